"""Differences between two documents of a graph.

Nodes and edges are matched by id, so that moving one in its list is not a change; everything else is compared by
its place. Positions of nodes are excluded: they are layout. Knows no node type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from penstock.runtime.graphs.settings import path_of

Kind = Literal["added", "removed", "changed"]
What = Literal["node", "edge", "graph"]
Steps = tuple[str | int, ...]

LISTS: Mapping[str, What] = {"nodes": "node", "edges": "edge"}
MISSING = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One difference in a node, in an edge, or in the rest of the document."""

    kind: Kind
    what: What
    id: str
    path: str = ""
    before: Any = None
    after: Any = None


def diff(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the differences, nodes first, then edges, then the rest of the document."""
    for field, what in LISTS.items():
        yield from _of_elements(what, _by_id(before.get(field)), _by_id(after.get(field)))
    rest = [{name: value for name, value in one.items() if name not in LISTS} for one in (before, after)]
    yield from _of_values("graph", "", (), rest[0], rest[1])


def _by_id(elements: Any) -> dict[str, Mapping[str, Any]]:
    given = elements if isinstance(elements, list) else []
    return {str(one.get("id")): one for one in given if isinstance(one, Mapping)}


def _of_elements(
    what: What, before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    for id, element in before.items():
        if id not in after:
            yield Change("removed", what, id, before=element)
        else:
            yield from _of_values(what, id, (), _content(element), _content(after[id]))
    for id, element in after.items():
        if id not in before:
            yield Change("added", what, id, after=element)


def _content(element: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in element.items() if name != "position"}


def _of_values(what: What, id: str, steps: Steps, before: Any, after: Any) -> Iterator[Change]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in {**before, **after}:
            inner = before.get(name, MISSING), after.get(name, MISSING)
            yield from _of_values(what, id, (*steps, name), *inner)
    elif before is MISSING:
        yield Change("added", what, id, path_of(steps), after=after)
    elif after is MISSING:
        yield Change("removed", what, id, path_of(steps), before=before)
    elif before != after or type(before) is not type(after):
        yield Change("changed", what, id, path_of(steps), before, after)
