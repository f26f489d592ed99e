"""Which graphs can run here: what keeps a graph from it is known before anything is started.

A draft is kept as it is, for its owner may still be working on it, and this is where it is told from a graph that can
run. A chat enters a graph at other nodes than a plain run does, so that one of them may be able to and the other not.
What is in a document never changes under its digest, so that each is looked at once; which models are offered may
change, and is looked at each time.

Whether a provider has a model that is named as one of its own, nobody knows before it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.chat.protocol import chat_services
from penstock.errors import InvalidValue
from penstock.hosting.records import GraphRecord
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.kernel.validate import compile_graph
from penstock.nodes.parts.models import named_models
from penstock.nodes.parts.settings import Finding
from penstock.runtime.graphs.graph_plan import aside

MAX_KNOWN = 10_000
"""So many documents are remembered."""
MAX_LISTED = 20
"""So many of the models that there are are named."""
NO_CHAT = "no_chat"
"""The code of a graph that can run, and that a chat cannot enter."""
EMPTY = "empty"
"""The code of a graph in which there is nothing to run."""
UNKNOWN_MODEL = "unknown_model"
"""The code of a model that a node names, and that nobody offers."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What a document says for good: what is wrong with it, and which models have to be offered, and where."""

    problems: tuple[Problem, ...]
    models: tuple[Finding, ...] = ()


class Runnable:
    """What keeps graphs from running on some executors, with the models that some services offer."""

    def __init__(self, executors: ExecutorRegistry, services: Mapping[str, Any]) -> None:
        self._executors = executors
        self._services = services
        self._known: dict[tuple[str, bool], Looked] = {}
        self._types = len(executors)

    async def problems(self, graph: GraphRecord, *, in_chat: bool = False) -> Sequence[Problem]:
        """Everything that keeps it from running."""
        if self._types != len(self._executors):  # what was of an unknown type may not be any more
            self._types = len(self._executors)
            self._known.clear()
        found = self._known.get((graph.digest, in_chat))
        if found is None:
            found = await self._looked_at(graph.document, in_chat)
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[graph.digest, in_chat] = found
        return self._judged(found)

    async def problems_in(self, document: Mapping[str, Any], *, in_chat: bool = False) -> Sequence[Problem]:
        """Everything that keeps a document from running; a large one is looked at on a thread."""
        return self._judged(await self._looked_at(document, in_chat))

    async def must_run(self, graph: GraphRecord, *, in_chat: bool = False) -> GraphRecord:
        """The graph; GraphInvalid, with everything that keeps it from running, if it cannot."""
        if problems := await self.problems(graph, in_chat=in_chat):
            raise GraphInvalid(problems)
        return graph

    async def _looked_at(self, document: Mapping[str, Any], in_chat: bool) -> Looked:
        looked = await aside(document, lambda one: _looked(one, self._executors, in_chat))
        if not any(":" in name for _, name in looked.models):  # none can be a provider's, which would be loaded
            return looked
        return Looked(looked.problems, await asyncio.to_thread(_to_be_offered, looked.models))

    def _judged(self, looked: Looked) -> tuple[Problem, ...]:
        if not looked.models:
            return looked.problems
        offered = self._services.get("models")
        models = offered if isinstance(offered, Mapping) else {}
        return (*looked.problems, *(_unknown(*one, models) for one in looked.models if one[1] not in models))


def problems_in(document: Mapping[str, Any], executors: ExecutorRegistry) -> tuple[Problem, ...]:
    """Everything that keeps a document from running, whatever models are offered."""
    return _looked(document, executors, False).problems


def _looked(document: Mapping[str, Any], executors: ExecutorRegistry, in_chat: bool) -> Looked:
    try:
        graph = parse_graph(document)
    except GraphInvalid as invalid:
        return Looked(invalid.problems)
    try:
        entries = chat_services(graph)["execution"]["entry_node_ids"] if in_chat else None
    except InvalidValue as nowhere:
        return Looked((*_wrong_with(graph, executors, None), Problem(NO_CHAT, "$.nodes", str(nowhere))))
    problems = _wrong_with(graph, executors, entries)
    return Looked(problems, tuple(named_models(graph, executors)))


def _wrong_with(graph: GraphSpec, executors: ExecutorRegistry, entries: Iterable[str] | None) -> tuple[Problem, ...]:
    try:
        plan = compile_graph(graph, executors, entries=entries)
    except GraphInvalid as invalid:
        return invalid.problems
    return () if plan.ids else (Problem(EMPTY, "$.nodes", "there is nothing in it that runs; add a node that does"),)


def _to_be_offered(models: Iterable[Finding]) -> tuple[Finding, ...]:
    """Those that are not named as a provider's: somebody has to offer them by their name."""
    from penstock.providers.models.names import PROVIDERS  # half of what a client needs comes with it

    def is_a_providers(name: str) -> bool:
        provider, _, rest = name.partition(":")
        return provider in PROVIDERS and bool(rest.strip()) and "://" not in name

    return tuple(one for one in models if not is_a_providers(one[1]))


def _unknown(path: str, name: str, offered: Mapping[str, Any]) -> Problem:
    there = ", ".join(sorted(map(str, offered))[:MAX_LISTED]) or "none"
    detail = f"there is no model {shown(name)}; offered are: {there}; or name a provider's, such as openai:gpt-4o"
    return Problem(UNKNOWN_MODEL, path, detail)
