"""Limits, budgets, hooks and breakers.

The names of a contained run are here too. They are loaded when they are first used, because they live in layers above
this one; `__init__.pyi` has their types.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "ChainMetadata": "penstock.containment.safety",
    "ContextSnapshot": "penstock.runtime.snapshot",
    "ExecutionConfig": "penstock.containment.limits",
    "ExecutionContext": "penstock.runtime.context",
    "ExecutionGraph": "penstock.tracing.execution_graph",
    "NodeRecord": "penstock.runtime.snapshot",
    "WrapOptions": "penstock.runtime.calls",
}

__all__ = [
    "ChainMetadata",
    "ContextSnapshot",
    "ExecutionConfig",
    "ExecutionContext",
    "ExecutionGraph",
    "NodeRecord",
    "WrapOptions",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock.containment' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value
