"""Check whether a graph can run on this server before anything is started.

The check itself is `nodes.checking`, which the command line uses too. This module caches it, adds the entry points of
chats, and applies it to stored graphs. Drafts are stored as they are, because their owners may still be working on
them; this module distinguishes them from runnable graphs. A chat enters a graph at other nodes than a plain run does,
so a graph may support only one of the two. A document never changes under its digest, so each is checked once; the
offers of the services may change and are compared each time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.chat.scope import CHAT_START_TYPES
from penstock.chat.turn import chat_services
from penstock.hosting.ports import GraphRecord
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem
from penstock.nodes.checking import DocumentCheck, check_document
from penstock.nodes.handles import NodeHandles, ResolvedHandle, resolved_handles
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import is_program
from penstock.runtime.graphs.graph_runtime import aside

if TYPE_CHECKING:
    from penstock.hosting.ports import GraphStore

MAX_CACHED = 10_000
"""Maximum number of cached document checks."""
PAGE = 100
MAX_LISTED = 10_000
"""Maximum number of graphs in the lists of models and of tools."""


class GraphChecker:
    """Checks graphs against the executors and against the models that the services offer."""

    def __init__(self, executors: ExecutorRegistry, services: Mapping[str, Any]) -> None:
        self._executors = executors
        self._services = services
        self._cache: dict[tuple[str, bool], DocumentCheck] = {}
        self._type_count = len(executors)

    @property
    def models(self) -> Mapping[str, Any]:
        """The models that the services offer by name."""
        return self._offered("models")

    @property
    def programs(self) -> Mapping[str, Any]:
        """The Python programs that the services offer by name."""
        return self._offered(PROGRAMS)

    def _offered(self, service: str) -> Mapping[str, Any]:
        offered = self._services.get(service)
        return offered if isinstance(offered, Mapping) else {}

    async def problems(self, graph: GraphRecord, *, in_chat: bool = False) -> Sequence[Problem]:
        """Return all problems that prevent the graph from running; cached by digest."""
        return (await self._cached_check(graph, in_chat)).problems_with(self._services)

    async def models_in(self, graph: GraphRecord) -> list[str]:
        """Return the models that nodes of the graph name and that may be used, sorted; nested graphs included."""
        return (await self._cached_check(graph, False)).models_with(self._services)

    async def _cached_check(self, graph: GraphRecord, in_chat: bool) -> DocumentCheck:
        if self._type_count != len(self._executors):  # a node type that was unknown may be registered now
            self._type_count = len(self._executors)
            self._cache.clear()
        found = self._cache.get((graph.digest, in_chat))
        if found is None:
            found = await self._check(graph.document, in_chat)
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[graph.digest, in_chat] = found
        return found

    async def can_chat(self, graph: GraphRecord) -> bool:
        """Whether the graph can answer in a chat."""
        return not await self.problems(graph, in_chat=True)

    async def problems_in(self, document: Mapping[str, Any], *, in_chat: bool = False) -> Sequence[Problem]:
        """Return all problems that prevent a document from running; a large one is checked on a thread."""
        return (await self._check(document, in_chat)).problems_with(self._services)

    async def handles_in(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the handles of each node as JSON, by path; those of a large document are found on a thread."""
        return await aside(document, lambda graph: _handles_json(resolved_handles(graph, self._executors)))

    async def must_run(self, graph: GraphRecord, *, in_chat: bool = False) -> GraphRecord:
        """Return the graph; raises GraphInvalid with all its problems if it cannot run."""
        if problems := await self.problems(graph, in_chat=in_chat):
            raise GraphInvalid(problems)
        return graph

    async def runnable(self, graphs: GraphStore) -> list[GraphRecord]:
        """Return all graphs that can run, ordered by id; conversational graphs are checked for running in a chat."""
        return [
            graph
            for graph in await all_graphs(graphs)
            if not await self.problems(graph, in_chat=is_conversational(graph))
        ]

    async def _check(self, document: Mapping[str, Any], in_chat: bool) -> DocumentCheck:
        entries = _chat_entries if in_chat else None
        result = await aside(document, lambda graph: check_document(graph, self._executors, entries))
        return await asyncio.to_thread(result.with_providers) if result.names_providers else result


def _handles_json(handles: Mapping[str, NodeHandles]) -> dict[str, Any]:
    def side(found: Sequence[ResolvedHandle]) -> list[dict[str, Any]]:
        return [{**asdict(one.handle), "declared": one.declared} for one in found]

    return {path: {"inputs": side(one.inputs), "outputs": side(one.outputs)} for path, one in handles.items()}


def is_conversational(graph: GraphRecord) -> bool:
    """Whether the graph has a chat start node, and so runs in chats."""
    nodes: Sequence[Any] = graph.document.get("nodes") or ()
    return any(isinstance(node, dict) and node.get("type") in CHAT_START_TYPES for node in nodes)


def is_chat_entered(graph: GraphRecord) -> bool:
    """Whether a conversation over /v1 is a chat: the graph has a chat-start or a program, which can read history."""
    return is_conversational(graph) or is_program(graph.document)


async def all_graphs(graphs: GraphStore) -> list[GraphRecord]:
    """Return all graphs ordered by id, including drafts, at most `MAX_LISTED`."""
    found: list[GraphRecord] = []
    before: str | None = None
    while len(found) < MAX_LISTED:
        page = await graphs.list(before=before, limit=PAGE)
        found.extend(page)
        if len(page) < PAGE:
            break
        before = page[-1].id
    return found


def _chat_entries(graph: GraphSpec) -> Iterable[str]:
    entries: list[str] = chat_services(graph)["execution"]["entry_node_ids"]
    return entries
