"""Graphs to begin with. They are written as an editor writes them, and checked by the same tests as anybody's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

EXAMPLES = {
    "assistant": "A chat with one agent",
    "pipeline": "Two agents in a row: one finds out, one writes up",
    "publish": "A draft that somebody has to approve",
}
"""What they are called, by id."""


def example_graphs() -> dict[str, Mapping[str, Any]]:
    """The documents by id."""
    folder = files("penstock.server.examples")
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in EXAMPLES}
