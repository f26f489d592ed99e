"""Example graphs, in the format that the editor writes; the same tests check them as check user graphs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

EXAMPLES = {
    "assistant": "A chat with one agent",
    "pipeline": "Two agents in a row: one finds out, one writes up",
    "publish": "A draft that a person has to approve",
}
"""Display names of the example graphs, by graph id."""

SHIPPED = {
    "assistant": frozenset({"87eb6717510099e77a68914406bc02a7955b5a361a634303832700aa38c8a53e"}),
    "pipeline": frozenset({"2f257df16c6d51733dbf6f6cc432287de6a3de0f68d667b989ab1a941aa82598"}),
    "publish": frozenset({"ecd85a4a15a3bb7710fdccaaedccbc24b90ab2fa5088616bf613a905d56865dc"}),
}
"""Digests of the example documents of this and all earlier releases; any other digest means a user changed the graph.

When you change an example, add its new digest and keep the old ones."""


def example_graphs() -> dict[str, Mapping[str, Any]]:
    """Return the example documents by graph id."""
    folder = files("penstock.server.examples")
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in EXAMPLES}
