"""Graphs in memory, every version of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.hosting.ports import Conflict
from penstock.hosting.records import GraphHead, GraphRecord
from penstock.storage.memory.shapes import Shape
from penstock.storage.sql import codec

GRAPH = Shape(
    GraphRecord,
    names=("id", "owner"),
    texts=("name",),
    numbers=("created_ms",),
    documents=("document",),
    objects=("document",),
)


class MemoryGraphStore:
    """Graphs by id and version."""

    def __init__(self) -> None:
        self._graphs: dict[str, list[GraphRecord]] = {}
        """The versions of each, the oldest first: version 1 is at 0."""
        self._archived: set[str] = set()

    async def save(
        self,
        graph_id: str,
        owner: str,
        name: str,
        document: Mapping[str, Any],
        *,
        now_ms: int,
        expected_version: int | None = None,
    ) -> GraphRecord:
        versions = self._graphs.get(graph_id, [])
        graph = GraphRecord(graph_id, len(versions) + 1, owner, name, document, _digest(document), now_ms)
        kept = GRAPH.kept(graph)
        if versions and versions[0].owner != owner:
            raise Conflict(f"graph {graph_id!r} is another owner's; save it under an id of its own")
        if versions and (versions[-1].name, versions[-1].digest) == (name, graph.digest):
            return self._given(versions[-1])
        _check_expected(graph_id, len(versions), expected_version)
        self._graphs[graph_id] = [*versions, kept]
        return self._given(kept)

    async def get(self, graph_id: str, version: int | None = None) -> GraphRecord | None:
        found = self._find(graph_id, version)
        return None if found is None else self._given(found)

    async def head(self, graph_id: str, version: int | None = None) -> GraphHead | None:
        found = self._find(graph_id, version)
        return None if found is None else GraphHead(graph_id, found.version, found.owner, graph_id in self._archived)

    async def list(
        self, *, owner: str | None = None, before: str | None = None, limit: int = 100
    ) -> Sequence[GraphRecord]:
        codec.limit(limit)
        newest = [versions[-1] for id, versions in sorted(self._graphs.items()) if id not in self._archived]
        listed = [
            graph
            for graph in newest
            if (owner is None or graph.owner == owner) and (before is None or graph.id > before)
        ]
        return [self._given(graph) for graph in listed[:limit]]

    async def versions(self, graph_id: str) -> Sequence[GraphRecord]:
        return [self._given(graph) for graph in reversed(self._graphs.get(graph_id, []))]

    async def archive(self, graph_id: str, *, is_archived: bool = True) -> None:
        if graph_id not in self._graphs:
            raise KeyError(f"no graph {graph_id!r}")
        if is_archived:
            self._archived.add(graph_id)
        else:
            self._archived.discard(graph_id)

    def _find(self, graph_id: str, version: int | None) -> GraphRecord | None:
        versions = self._graphs.get(graph_id, [])
        number = len(versions) if version is None else version
        return versions[number - 1] if 1 <= number <= len(versions) else None

    def _given(self, graph: GraphRecord) -> GraphRecord:
        given, is_archived = GRAPH.given(graph), graph.id in self._archived
        return given if given.is_archived == is_archived else replace(given, is_archived=is_archived)


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(codec.canonical("document", document).encode()).hexdigest()


def _check_expected(graph_id: str, newest: int, expected: int | None) -> None:
    if expected is not None and expected != newest:
        there = f"the newest version is {newest}" if newest else "there is none"
        raise Conflict(f"graph {graph_id!r} was expected at version {expected}, and {there}; look at it and save again")
