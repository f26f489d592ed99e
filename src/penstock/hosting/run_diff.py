"""The differences between two runs: their inputs, the ends of their nodes, and their results.

Pure: reads records and events as JSON data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

NODE_ENDS = ("node.completed", "node.error", "node.cancelled", "node.skipped")
HIDDEN = frozenset({"node_id", "node_type", "replayed"})
"""Fields of events that are not compared: a replayed result is the same result."""
DID_NOT_RUN = "did not run"
COMPARED = ("graph_id", "graph_version", "input", "limits", "status", "stop_reason", "error", "cost_usd", "output")
"""Fields of a run that are compared."""

Difference = tuple[str, Any, Any]
"""The name of the field or node that differs, and its value in each of the runs."""


def node_ends(events: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return how each node ended, by node id, from the types and data of a run's events."""
    return {
        data["node_id"]: {"status": type.removeprefix("node.")}
        | {name: value for name, value in data.items() if name not in HIDDEN}
        for type, data in events
        if type in NODE_ENDS
    }


def field_differences(
    first: Mapping[str, Any], second: Mapping[str, Any], fields: Sequence[str] = COMPARED
) -> Iterator[Difference]:
    """Yield the fields of two runs that differ."""
    for name in fields:
        if first.get(name) != second.get(name):
            yield name, first.get(name), second.get(name)


def node_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the nodes that ended differently, given the `node_ends` of two runs."""
    for node in dict.fromkeys([*first, *second]):
        if first.get(node) != second.get(node):
            yield f"node {node}", first.get(node, DID_NOT_RUN), second.get(node, DID_NOT_RUN)
