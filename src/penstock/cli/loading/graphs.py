"""Loads graphs: the one that a command operates on, from a JSON file or Python code, and the JSON files of a server.

flow.json                 a graph in JSON; its id is `flow` if it has none
flow.py, flow.py:name     a Graph, a GraphSpec or a function that returns one; without a name, the one called
                          `graph`, or the only one in the module
package.module:name       the same in a module
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.cli.exits import Refused
from penstock.cli.loading.code import load_attribute, load_module, resolve
from penstock.cli.values import read_bytes
from penstock.flow import compiled
from penstock.flow.graph import Graph
from penstock.ids import AN_ID, ID
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown
from penstock.runtime.graphs.validation import validate

Runnable = Graph | GraphSpec
USUAL_NAME = "graph"
UNNAMED = GraphSpec().id
"""Default id of a graph without a name."""


def load_graph(target: str) -> Runnable:
    """Load the graph; GraphInvalid has the problems if it is not well formed."""
    path = Path(target)
    if target.endswith(".py"):
        return _graph_in(load_module(target), target)
    module, colon, attribute = target.rpartition(":")
    if colon and module and attribute and not path.exists():
        return _as_graph(load_attribute(module, attribute), target)
    if not path.exists() and not path.suffix and "/" not in target:
        raise Refused(f"there is no file {shown(target)}; a graph in a module is named package.module:name")
    return read_graph(path, "FILE")


def read_graph(path: Path, what: str) -> GraphSpec:
    """Read a graph from a JSON file; without an id, it gets the file's stem. Raises GraphInvalid as above."""
    content = read_bytes(path, what)
    graph = parse_graph(content)
    if graph.id != UNNAMED or "id" in json.loads(content):
        return graph
    return parse_graph({**graph_to_json(graph), "id": path.stem})  # parsed again to validate the id


def as_spec(graph: Runnable) -> GraphSpec:
    """Return the graph as the kernel's GraphSpec."""
    return graph if isinstance(graph, GraphSpec) else graph.to_spec()


def problems_of(graph: Runnable, executors: ExecutorRegistry | None) -> list[Problem]:
    """Return all problems that prevent the graph from running; types and handles are checked if executors are given."""
    return validate(graph, executors) if isinstance(graph, GraphSpec) else compiled.problems_of(graph)


def refuse_node_options(target: str, options: Sequence[str]) -> None:
    """Raise Refused for options that apply to nodes: a Graph in Python has steps instead."""
    if options:
        why = f"{target} is a Graph in Python, whose steps bring their own"
        raise Refused(f"{', '.join(options)} can only be used with a graph in JSON: {why}")


def _graph_in(module: ModuleType, target: str) -> Runnable:
    if hasattr(module, USUAL_NAME):
        return _as_graph(getattr(module, USUAL_NAME), f"{target}:{USUAL_NAME}")
    found = {name: value for name, value in vars(module).items() if isinstance(value, Graph | GraphSpec)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise Refused(f"{target} has several graphs; name one: {', '.join(f'{target}:{name}' for name in found)}")
    raise Refused(f"{target} has no Graph; add one called {USUAL_NAME!r}, or name a function that returns one")


def _as_graph(value: Any, where: str) -> Runnable:
    found = resolve(value, where)
    if isinstance(found, Graph | GraphSpec):
        return found
    got = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    gave = f"what {where} returned is {got}" if found is not value else f"{where} is {got}"
    raise Refused(f"{gave}; it must be a Graph, a GraphSpec or a function that returns one")


# The graph files of a server.


@dataclass(frozen=True, slots=True)
class GraphFile:
    """A graph document read from a file."""

    id: str
    document: Mapping[str, Any]
    where: str
    name: str
    """Display name."""


class InvalidGraphFile(Exception):
    """A file does not contain a valid graph; has the file and all its problems."""

    def __init__(self, where: str, problems: Sequence[Problem]) -> None:
        self.where = where
        self.problems = problems
        super().__init__(where)


def load_documents(paths: Iterable[str]) -> list[GraphFile]:
    """Load the graphs in these files and in the `.json` files of these directories; ids must be unique."""
    found: dict[str, GraphFile] = {}
    for path in _files(paths):
        graph = _read_file(path)
        if ID.fullmatch(graph.id) is None:
            advice = 'rename the file, or give the graph another "id"'
            raise Refused(f"{path}: {shown(graph.id)} is not a valid graph id; {advice}: {AN_ID}")
        if graph.id in found:
            raise Refused(f"{path} and {found[graph.id].where} both have a graph called {graph.id!r}; rename one")
        found[graph.id] = GraphFile(graph.id, graph_to_json(graph), str(path), graph.id)
    return list(found.values())


def _read_file(path: Path) -> GraphSpec:
    if path.suffix == ".py" and path.is_file():
        why = "its steps are functions of its own process"
        raise Refused(f"{path}: a graph in Python cannot be served, because {why}; serve a graph in JSON")
    try:
        return read_graph(path, "GRAPHS")
    except GraphInvalid as invalid:
        raise InvalidGraphFile(str(path), invalid.problems) from None


def _files(paths: Iterable[str]) -> Iterator[Path]:
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.json"))
        if not inside:
            raise Refused(f"there is no .json file in {given!r}")
        yield from inside
