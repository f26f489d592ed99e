"""Graphs in memory, with all their versions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.hosting.ports import Conflict, GraphHead, GraphRecord
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import check_expected_version, lower_ascii, merge_positions, search_key

GRAPH = RecordCodec(
    GraphRecord,
    names=("id", "owner"),
    texts=("name", "saved_by", "note"),
    numbers=("created_ms",),
    documents=("document",),
    objects=("document",),
)


class MemoryGraphStore:
    """Graphs by id and version."""

    def __init__(self, undo: UndoLog | None = None) -> None:
        self._undo = undo or UndoLog()
        self._graphs: dict[str, list[GraphRecord]] = {}
        """The versions of each graph, the oldest first: version 1 is at index 0."""
        self._sources: dict[tuple[str, int], str] = {}
        """The text that a version was saved with, by graph and version."""
        self._archived: set[str] = set()
        self._layouts: dict[str, str] = {}
        """Positions of nodes by graph, as JSON."""

    async def save(
        self,
        graph_id: str,
        owner: str,
        name: str,
        document: Mapping[str, Any],
        *,
        now_ms: int,
        expected_version: int | None = None,
        saved_by: str = "",
        note: str = "",
        source: str = "",
    ) -> GraphRecord:
        source = codec.decode_source(codec.encode_source("document", document, source))
        if saved_by:
            codec.name("saved_by", saved_by)
        versions = self._graphs.get(graph_id, [])
        graph = GraphRecord(
            graph_id, len(versions) + 1, owner, name, document, _digest(document), now_ms, False, saved_by, note
        )
        encoded = GRAPH.encode(graph)
        if versions and versions[0].owner != owner:
            raise Conflict(f"graph {graph_id!r} is another owner's; save it under an id of its own")
        if versions and (versions[-1].name, versions[-1].digest) == (name, graph.digest):
            return self._decode(versions[-1])
        check_expected_version(graph_id, len(versions), expected_version)
        self._undo.entry(self._graphs, graph_id)
        self._graphs[graph_id] = [*versions, encoded]
        if source:
            self._undo.entry(self._sources, (graph_id, graph.version))
            self._sources[graph_id, graph.version] = source
        return self._decode(encoded)

    async def get(self, graph_id: str, version: int | None = None) -> GraphRecord | None:
        found = self._find(graph_id, version)
        return None if found is None else self._decode(found)

    async def head(self, graph_id: str, version: int | None = None) -> GraphHead | None:
        found = self._find(graph_id, version)
        return None if found is None else GraphHead(graph_id, found.version, found.owner, graph_id in self._archived)

    async def source(self, graph_id: str, version: int | None = None) -> str:
        found = self._find(graph_id, version)
        return "" if found is None else self._sources.get((graph_id, found.version), "")

    async def list(
        self,
        *,
        owner: str | None = None,
        before: str | None = None,
        limit: int = 100,
        is_archived: bool = False,
        text: str | None = None,
    ) -> Sequence[GraphRecord]:
        codec.limit(limit)
        part = None if text is None else search_key(text)
        graphs = sorted(self._graphs.items())
        newest = [versions[-1] for id, versions in graphs if (id in self._archived) == is_archived]
        listed = [
            graph
            for graph in newest
            if (owner is None or graph.owner == owner)
            and (before is None or graph.id > before)
            and (part is None or part in lower_ascii(graph.id) or part in search_key(graph.name))
        ]
        return [self._decode(graph) for graph in listed[:limit]]

    async def versions(self, graph_id: str) -> Sequence[GraphRecord]:
        return [self._decode(graph) for graph in reversed(self._graphs.get(graph_id, []))]

    async def archive(self, graph_id: str, *, is_archived: bool = True) -> None:
        if graph_id not in self._graphs:
            raise KeyError(f"no graph {graph_id!r}")
        was_archived = graph_id in self._archived
        self._undo.step(lambda: self._mark(graph_id, was_archived))
        self._mark(graph_id, is_archived)

    async def layout(self, graph_id: str) -> Mapping[str, Any]:
        stored = self._layouts.get(graph_id)
        return {} if stored is None else codec.decode_object("graph_layouts", graph_id, stored)

    async def arrange(self, graph_id: str, positions: Mapping[str, Any]) -> Mapping[str, Any]:
        codec.encode_object("positions", positions)
        if graph_id not in self._graphs:
            raise KeyError(f"no graph {graph_id!r}")
        merged = merge_positions(await self.layout(graph_id), positions)
        self._undo.entry(self._layouts, graph_id)
        self._layouts[graph_id] = codec.encode_object("positions", merged)
        return merged

    def _mark(self, graph_id: str, is_archived: bool) -> None:
        if is_archived:
            self._archived.add(graph_id)
        else:
            self._archived.discard(graph_id)

    def _find(self, graph_id: str, version: int | None) -> GraphRecord | None:
        versions = self._graphs.get(graph_id, [])
        number = len(versions) if version is None else version
        return versions[number - 1] if 1 <= number <= len(versions) else None

    def _decode(self, graph: GraphRecord) -> GraphRecord:
        decoded, is_archived = GRAPH.decode(graph), graph.id in self._archived
        return decoded if decoded.is_archived == is_archived else replace(decoded, is_archived=is_archived)


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(codec.canonical("document", document).encode()).hexdigest()
