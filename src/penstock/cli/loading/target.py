"""The graph that a command is about: a JSON file, or Python that has one.

flow.json                 a graph as an editor writes it, called `flow` if it has no id
flow.py, flow.py:name     a Graph, a GraphSpec or a function that returns one; without a name, the one called
                          `graph`, or the only one there is
package.module:name       the same in a module
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.cli.exits import Refused
from penstock.cli.loading.code import load_attribute, load_module, made
from penstock.cli.loading.values import read_bytes
from penstock.flow import compiled
from penstock.flow.graph import Graph
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphSpec, Problem, shown
from penstock.kernel.validate import validate

Runnable = Graph | GraphSpec
USUAL_NAME = "graph"
UNNAMED = GraphSpec().id
"""What a graph is called that nobody has named."""


def load_graph(target: str) -> Runnable:
    """The graph; GraphInvalid has the problems of one that is not well formed."""
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
    """The graph in a JSON file, called as its file is if it has no id; GraphInvalid as above."""
    content = read_bytes(path, what)
    graph = parse_graph(content)
    if graph.id != UNNAMED or "id" in json.loads(content):
        return graph
    return parse_graph({**graph_to_json(graph), "id": path.stem})  # which looks at the name as at any other


def as_spec(graph: Runnable) -> GraphSpec:
    """The graph in the kernel's own terms."""
    return graph if isinstance(graph, GraphSpec) else graph.to_spec()


def problems_of(graph: Runnable, executors: ExecutorRegistry | None) -> list[Problem]:
    """Everything that keeps the graph from running; types and handles are looked at if there are executors."""
    return validate(graph, executors) if isinstance(graph, GraphSpec) else compiled.problems_of(graph)


def refuse_for_steps(target: str, options: Sequence[str]) -> None:
    """Refuse options that are about nodes, where there are none."""
    if options:
        has_own = f"{target} is a Graph in Python, whose steps have their own"
        raise Refused(f"{', '.join(options)}: this is for the nodes of a graph in JSON, and {has_own}")


def _graph_in(module: ModuleType, target: str) -> Runnable:
    if hasattr(module, USUAL_NAME):
        return _as_graph(getattr(module, USUAL_NAME), f"{target}:{USUAL_NAME}")
    found = {name: value for name, value in vars(module).items() if isinstance(value, Graph | GraphSpec)}
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise Refused(f"{target} has several graphs; name one: {', '.join(f'{target}:{name}' for name in found)}")
    raise Refused(f"{target} has no Graph; make one called {USUAL_NAME!r}, or name a function that returns one")


def _as_graph(value: Any, where: str) -> Runnable:
    found = made(value, where)
    if isinstance(found, Graph | GraphSpec):
        return found
    got = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    gave = f"what {where} returned is {got}" if found is not value else f"{where} is {got}"
    raise Refused(f"{gave}; it must be a Graph, a GraphSpec or a function that returns one")
