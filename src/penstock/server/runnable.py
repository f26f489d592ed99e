"""Which graphs can run here: what keeps a graph from it is known before anything is started.

A draft is kept as it is, for its owner may still be working on it, and this is where it is told from a graph that can
run. A chat enters a graph at other nodes than a plain run does, so that one of them may be able to and the other not.
What is in a document never changes under its digest, so that each is looked at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.chat.protocol import chat_services
from penstock.errors import InvalidValue
from penstock.hosting.records import GraphRecord
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, Problem
from penstock.kernel.validate import validate

MAX_KNOWN = 10_000
"""So many documents are remembered."""
SMALL = 100
"""So many nodes and edges are looked at sooner than a thread is found for it."""
NO_CHAT = "no_chat"
"""The code of a graph that can run, and that a chat cannot enter."""


class Runnable:
    """What keeps graphs from running on some executors."""

    def __init__(self, executors: ExecutorRegistry) -> None:
        self._executors = executors
        self._known: dict[tuple[str, bool], tuple[Problem, ...]] = {}
        self._types = len(executors)

    async def problems(self, graph: GraphRecord, *, in_chat: bool = False) -> Sequence[Problem]:
        """Everything that keeps it from running."""
        if self._types != len(self._executors):  # what was of an unknown type may not be any more
            self._types = len(self._executors)
            self._known.clear()
        found = self._known.get((graph.digest, in_chat))
        if found is None:
            found = await self.problems_in(graph.document, in_chat=in_chat)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[graph.digest, in_chat] = found
        return found

    async def problems_in(self, document: Mapping[str, Any], *, in_chat: bool = False) -> tuple[Problem, ...]:
        """Everything that keeps a document from running; a large one is looked at on a thread."""
        if _is_small(document):
            return _problems(document, self._executors, in_chat)
        return await asyncio.to_thread(_problems, document, self._executors, in_chat)

    async def must_run(self, graph: GraphRecord, *, in_chat: bool = False) -> GraphRecord:
        """The graph; GraphInvalid, with everything that keeps it from running, if it cannot."""
        if problems := await self.problems(graph, in_chat=in_chat):
            raise GraphInvalid(problems)
        return graph


def _is_small(document: Mapping[str, Any]) -> bool:
    parts = [document.get("nodes"), document.get("edges")]
    return sum(len(one) for one in parts if isinstance(one, list)) <= SMALL


def _problems(document: Mapping[str, Any], executors: ExecutorRegistry, in_chat: bool) -> tuple[Problem, ...]:
    try:
        graph = parse_graph(document)
    except GraphInvalid as invalid:
        return invalid.problems
    try:
        entries = chat_services(graph)["execution"]["entry_node_ids"] if in_chat else None
    except InvalidValue as nowhere:
        return (*validate(graph, executors), Problem(NO_CHAT, "$.nodes", str(nowhere)))
    return tuple(validate(graph, executors, entries=entries))
