"""The one check of a graph document: can it run with these node types, models, tools and programs?

`penstock graph validate`, `run`, `serve` and the server's API all use it, so that they list the same problems: those of
the JSON, of the graph and of each node's data, and names that the services do not offer, in one pass. A problem hides
no other, except where nothing is left to check: text that is not JSON, or a document without a list of nodes.

`check_document` needs no services and its result can be cached; `DocumentCheck.problems_with` compares the names with
what is offered now. A model named as a provider's (`openai:gpt-4o`) is accepted, unless the service `allowed_models`
excludes it: only a call shows whether it exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

from penstock.errors import InvalidValue
from penstock.kernel.document import read_loosely, without_repeats
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.nodes.parts.services import ALLOWED_MODELS, ModelNotAllowed, check_allowed
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.nodes.program import ProgramNotServed
from penstock.runtime.graphs.settings import Checked
from penstock.runtime.graphs.validation import compile_graph

MAX_NAMED = 20
"""Maximum number of offered names in a message."""
EMPTY = "empty"
"""Problem code of a graph without a node that runs."""
NO_CHAT = "no_chat"
"""Problem code of a graph that can run, but that a chat cannot enter."""
UNKNOWN_MODEL = "unknown_model"
"""Problem code of a model that a node names and the services do not offer."""
MODEL_NOT_ALLOWED = "model_not_allowed"
"""Problem code of a provider's model that the operator does not allow graphs to name."""
UNKNOWN_TOOL = "unknown_tool"
"""Problem code of a tool that a node names and the services do not offer."""
UNKNOWN_MCP_SERVER = "unknown_mcp_server"
"""Problem code of an MCP server that a node names and the services do not have."""
UNKNOWN_PROGRAM = "unknown_program"
"""Problem code of a Python program that a node names and that is not served."""
NOT_OFFERED = frozenset({UNKNOWN_MODEL, MODEL_NOT_ALLOWED, UNKNOWN_TOOL, UNKNOWN_MCP_SERVER, UNKNOWN_PROGRAM})
"""Problems that disappear without a change of the graph, when the services offer or allow the name."""

USES: Mapping[str, str] = MappingProxyType({"model": "models", "program": PROGRAMS})
"""Settings that name something a service offers, with the service, of a node type that does not declare its own."""

Entries = Callable[[GraphSpec], Iterable[str]]
"""Returns the nodes from which a run starts; InvalidValue if the graph has none."""


@dataclass(frozen=True, slots=True)
class Named:
    """A name in the data of a node that a service has to offer or, for a provider's model, to allow."""

    service: str
    path: str
    name: str


@dataclass(frozen=True, slots=True)
class DocumentCheck:
    """The problems of a document by itself, and the names that depend on the services."""

    problems: tuple[Problem, ...]
    named: tuple[Named, ...] = ()

    def problems_with(self, services: Mapping[str, Any]) -> tuple[Problem, ...]:
        """Return all problems, those of names that the services do not offer last."""
        missing = (_not_offered(named, services) for named in self.named)
        return (*self.problems, *(problem for problem in missing if problem is not None))

    def models_with(self, services: Mapping[str, Any]) -> list[str]:
        """Return the models that nodes name, sorted, without those that the services do not offer or allow."""
        models = (named for named in self.named if named.service in ("models", ALLOWED_MODELS))
        return sorted({named.name for named in models if _not_offered(named, services) is None})

    @property
    def names_providers(self) -> bool:
        """Whether a model may be named as a provider's."""
        return any(_may_be_provided(named) for named in self.named)

    def with_providers(self) -> DocumentCheck:
        """Return the check in which models of providers need only be allowed; imports the providers."""
        # Imported here, by name: the package is of a higher layer, and it loads half of a provider client.
        providers = import_module("penstock.providers.models.names").PROVIDERS
        named = [replace(one, service=ALLOWED_MODELS) if _is_provided(one, providers) else one for one in self.named]
        return replace(self, named=tuple(named))


def problems_in(
    document: str | bytes | Mapping[str, Any], executors: ExecutorRegistry | None, services: Mapping[str, Any]
) -> tuple[Problem, ...]:
    """Return everything that prevents a document from running with these executors and services."""
    check = check_document(document, executors)
    return (check.with_providers() if check.names_providers else check).problems_with(services)


def check_document(
    document: str | bytes | Mapping[str, Any], executors: ExecutorRegistry | None, entries: Entries | None = None
) -> DocumentCheck:
    """Check a document; `entries` selects the nodes that it is to start from.

    Without executors, node types and everything that depends on them are not checked.
    """
    graph, problems = read_loosely(document)
    if graph is None:
        return DocumentCheck(tuple(problems))
    found = without_repeats(problems, _graph_problems(graph, executors, entries))
    return DocumentCheck(tuple(found), () if executors is None else tuple(names_in(graph, executors)))


def _graph_problems(graph: GraphSpec, executors: ExecutorRegistry | None, entries: Entries | None) -> Iterator[Problem]:
    chosen = None
    try:
        chosen = None if entries is None else list(entries(graph))
    except InvalidValue as error:
        yield Problem(NO_CHAT, "$.nodes", str(error))
    try:
        plan = compile_graph(graph, executors, entries=chosen)
    except GraphInvalid as invalid:
        yield from invalid.problems
    else:
        if not plan.ids:
            yield Problem(EMPTY, "$.nodes", "the graph has no node that runs; add one")


def names_in(graph: GraphSpec, executors: ExecutorRegistry, at: str = "$") -> Iterator[Named]:
    """Yield each model, tool, MCP server and program that nodes name, nested graphs included.

    Settings are found by name, also in data that has other problems: `graph` is a nested graph, and a node type lists
    the settings that name something offered in `uses`.
    """
    types = {node.type for node in graph.nodes if node.data and node.type in executors}
    checked = {type: executor for type in types if isinstance(executor := executors[type], Checked)}
    for number, node in enumerate(graph.nodes):
        if node.type in checked:
            yield from _names_of(checked[node.type], node.data, executors, f"{at}.nodes[{number}].data")


def _names_of(
    executor: Checked[Any], data: Mapping[str, Any], executors: ExecutorRegistry, place: str
) -> Iterator[Named]:
    settings = executor.settings.names
    for setting, service in getattr(executor, "uses", USES).items():
        if setting in settings:
            yield from _names_at(service, f"{place}.{setting}", data.get(setting))
    nested = data.get("graph") if "graph" in settings else None
    if isinstance(nested, dict):
        graph, _ = read_loosely(nested, is_part=True)
        yield from () if graph is None else names_in(graph, executors, f"{place}.graph")


def _names_at(service: str, path: str, value: object) -> Iterator[Named]:
    listed = [(path, value)] if isinstance(value, str) else []
    if isinstance(value, list):
        listed = [(f"{path}[{at}]", one) for at, one in enumerate(value) if isinstance(one, str)]
    yield from (Named(service, place, name) for place, name in listed if name)


def _may_be_provided(named: Named) -> bool:
    return named.service == "models" and ":" in named.name and "://" not in named.name


def _is_provided(named: Named, providers: Iterable[str]) -> bool:
    provider, _, rest = named.name.partition(":")
    return _may_be_provided(named) and provider in providers and bool(rest.strip())


def _not_offered(named: Named, services: Mapping[str, Any]) -> Problem | None:
    of_provider = named.service == ALLOWED_MODELS
    service = services.get("models" if of_provider else named.service)
    offered = service if isinstance(service, Mapping) else {}
    if named.name in offered:
        return None
    if of_provider:
        try:
            check_allowed(named.name, services)
        except ModelNotAllowed as refused:
            return Problem(MODEL_NOT_ALLOWED, named.path, str(refused))
        return None
    code, detail = NOT_OFFERED_BY[named.service](named.name, offered)
    return Problem(code, named.path, detail)


def _model(name: str, offered: Mapping[str, Any]) -> tuple[str, str]:
    return UNKNOWN_MODEL, f"there is no model {shown(name)}; {_choice(offered)}, or a provider's, such as openai:gpt-4o"


def _tool(name: str, offered: Mapping[str, Any]) -> tuple[str, str]:
    return UNKNOWN_TOOL, f"there is no tool {shown(name)}; {_choice(offered)}"


def _mcp_server(name: str, offered: Mapping[str, Any]) -> tuple[str, str]:
    return UNKNOWN_MCP_SERVER, f"there is no MCP server {shown(name)}; {_choice(offered)}"


def _program(name: str, served: Mapping[str, Any]) -> tuple[str, str]:
    return UNKNOWN_PROGRAM, str(ProgramNotServed(name, served))


def _choice(offered: Mapping[str, Any]) -> str:
    listed = ", ".join(sorted(map(str, offered))[:MAX_NAMED])
    return f"use one of: {listed}" if listed else "none is offered here"


NOT_OFFERED_BY: Mapping[str, Callable[[str, Mapping[str, Any]], tuple[str, str]]] = {
    "models": _model,
    "tools": _tool,
    "mcp": _mcp_server,
    PROGRAMS: _program,
}
"""The problem of a name that is not offered, by service."""
