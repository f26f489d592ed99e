"""Check whether a graph can run on this server before anything is started.

Drafts are stored as they are, because their owners may still be working on them; this module distinguishes them from
runnable graphs. A chat enters a graph at other nodes than a plain run does, so a graph may support only one of the two.
A document never changes under its digest, so each is checked once; the offered models may change and are checked
each time.

A model named as a provider's (`openai:gpt-4o`) is not checked: only a call to the provider shows whether it exists.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.chat.run_handler import chat_services
from penstock.chat.scope import CHAT_START_TYPES
from penstock.errors import InvalidValue
from penstock.hosting.ports import GraphRecord
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.nodes.parts.services import names_in
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import ProgramNotServed
from penstock.runtime.graphs.graph_plan import aside
from penstock.runtime.graphs.settings import Finding
from penstock.runtime.graphs.validation import compile_graph

if TYPE_CHECKING:
    from penstock.hosting.ports import GraphStore

MAX_CACHED = 10_000
"""Maximum number of cached document checks."""
MAX_NAMED = 20
"""Maximum number of offered models named in a message."""
PAGE = 100
MAX_LISTED = 10_000
"""Maximum number of graphs in the lists of models and of tools."""
NO_CHAT = "no_chat"
"""Problem code of a graph that can run, but that a chat cannot enter."""
EMPTY = "empty"
"""Problem code of a graph without a node that runs."""
UNKNOWN_MODEL = "unknown_model"
"""Problem code of a model that a node names and the services do not offer."""
UNKNOWN_PROGRAM = "unknown_program"
"""Problem code of a Python program that a node names and this server was not started with."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The cacheable result of a check: the problems, and the models and programs that must be offered, with paths."""

    problems: tuple[Problem, ...]
    models: tuple[Finding, ...] = ()
    programs: tuple[Finding, ...] = ()


class GraphChecker:
    """Checks graphs against the executors and against the models that the services offer."""

    def __init__(self, executors: ExecutorRegistry, services: Mapping[str, Any]) -> None:
        self._executors = executors
        self._services = services
        self._cache: dict[tuple[str, bool], CheckResult] = {}
        self._type_count = len(executors)

    @property
    def models(self) -> Mapping[str, Any]:
        """The models that the services offer by name."""
        return self._offered("models")

    async def problems(self, graph: GraphRecord, *, in_chat: bool = False) -> Sequence[Problem]:
        """Return all problems that prevent the graph from running; cached by digest."""
        if self._type_count != len(self._executors):  # a node type that was unknown may be registered now
            self._type_count = len(self._executors)
            self._cache.clear()
        found = self._cache.get((graph.digest, in_chat))
        if found is None:
            found = await self._check(graph.document, in_chat)
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[graph.digest, in_chat] = found
        return self._with_services(found)

    async def problems_in(self, document: Mapping[str, Any], *, in_chat: bool = False) -> Sequence[Problem]:
        """Return all problems that prevent a document from running; a large one is checked on a thread."""
        return self._with_services(await self._check(document, in_chat))

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

    async def _check(self, document: Mapping[str, Any], in_chat: bool) -> CheckResult:
        result = await aside(document, lambda graph: _check(graph, self._executors, in_chat))
        if not any(":" in name for _, name in result.models):  # none is a provider's: nothing to import
            return result
        return replace(result, models=await asyncio.to_thread(_without_providers, result.models))

    def _with_services(self, result: CheckResult) -> tuple[Problem, ...]:
        if not result.models and not result.programs:
            return result.problems
        models, programs = self.models, self._offered(PROGRAMS)
        return (
            *result.problems,
            *(_unknown_model(path, name, models) for path, name in result.models if name not in models),
            *(_unknown_program(path, name, programs) for path, name in result.programs if name not in programs),
        )

    def _offered(self, service: str) -> Mapping[str, Any]:
        offered = self._services.get(service)
        return offered if isinstance(offered, Mapping) else {}


def is_conversational(graph: GraphRecord) -> bool:
    """Whether the graph has a chat start node, and so runs in chats."""
    nodes: Sequence[Any] = graph.document.get("nodes") or ()
    return any(isinstance(node, dict) and node.get("type") in CHAT_START_TYPES for node in nodes)


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


def problems_in(document: Mapping[str, Any], executors: ExecutorRegistry) -> tuple[Problem, ...]:
    """Return all problems that prevent a document from running, except models and programs that are not offered."""
    return _check(document, executors, False).problems


def _check(document: Mapping[str, Any], executors: ExecutorRegistry, in_chat: bool) -> CheckResult:
    try:
        graph = parse_graph(document)
    except GraphInvalid as invalid:
        return CheckResult(invalid.problems)
    try:
        entries = chat_services(graph)["execution"]["entry_node_ids"] if in_chat else None
    except InvalidValue as error:
        return CheckResult((*_compile_problems(graph, executors, None), Problem(NO_CHAT, "$.nodes", str(error))))
    problems = _compile_problems(graph, executors, entries)
    models, programs = names_in(graph, executors, "model"), names_in(graph, executors, "program")
    return CheckResult(problems, tuple(models), tuple(programs))


def _compile_problems(
    graph: GraphSpec, executors: ExecutorRegistry, entries: Iterable[str] | None
) -> tuple[Problem, ...]:
    try:
        plan = compile_graph(graph, executors, entries=entries)
    except GraphInvalid as invalid:
        return invalid.problems
    return () if plan.ids else (Problem(EMPTY, "$.nodes", "the graph has no node that runs; add one"),)


def _without_providers(models: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the models that are not named as a provider's; the services must offer these by name."""
    from penstock.providers.models.names import PROVIDERS  # a slow import: it loads half of a provider client

    def is_provider_model(name: str) -> bool:
        provider, _, rest = name.partition(":")
        return provider in PROVIDERS and bool(rest.strip()) and "://" not in name

    return tuple(model for model in models if not is_provider_model(model[1]))


def _unknown_model(path: str, name: str, offered: Mapping[str, Any]) -> Problem:
    names = ", ".join(sorted(map(str, offered))[:MAX_NAMED]) or "none"
    detail = f"there is no model {shown(name)}; use one of: {names}; or a provider's, such as openai:gpt-4o"
    return Problem(UNKNOWN_MODEL, path, detail)


def _unknown_program(path: str, name: str, served: Mapping[str, Any]) -> Problem:
    return Problem(UNKNOWN_PROGRAM, path, str(ProgramNotServed(name, served)))
