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

SHIPPED = {
    "assistant": frozenset({"87eb6717510099e77a68914406bc02a7955b5a361a634303832700aa38c8a53e"}),
    "pipeline": frozenset({"2f257df16c6d51733dbf6f6cc432287de6a3de0f68d667b989ab1a941aa82598"}),
    "publish": frozenset({"ecd85a4a15a3bb7710fdccaaedccbc24b90ab2fa5088616bf613a905d56865dc"}),
}
"""The digests of their documents, those of earlier packages too: one that is none of these, somebody has changed.

Whoever changes an example adds its digest, and takes none away."""


def example_graphs() -> dict[str, Mapping[str, Any]]:
    """The documents by id."""
    folder = files("penstock.server.examples")
    return {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in EXAMPLES}
