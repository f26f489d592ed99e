"""Tools of other agent frameworks as calls of a run.

Imports no framework: a program that passes a framework's tool has imported it.
"""

from __future__ import annotations

from penstock.adapters.tools import contained_tools

__all__ = ["contained_tools"]
