"""Loads the graph or agent that a command operates on, from a JSON file or Python code.

flow.json                 a graph in JSON; its id is `flow` if it has none
flow.py, flow.py:name     a Graph, an Agent, a GraphSpec or a function that returns one; without a name, the one called
                          `graph` or `agent`, or the only one in the module
package.module:name       the same in a module

To run, an agent becomes a graph with the agent as its only step. A graph in JSON is loaded as a `GraphSource`, which
may have problems of any kind, so that all of them are found by the one check in `nodes.checking`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import Refused
from penstock.cli.loading.code import attribute_of, load_module, resolve
from penstock.cli.values import read_bytes
from penstock.flow import compiled
from penstock.flow.graph import Graph
from penstock.kernel.document import graph_to_json, parse_graph, read_loosely
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphInvalid, GraphSpec, Problem, shown

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from penstock.agents.agent import Agent

Runnable = Graph | GraphSpec
USUAL_NAMES = ("graph", "agent")


@dataclass(frozen=True, slots=True)
class GraphSource:
    """The document of a graph in JSON, valid or not."""

    document: Mapping[str, Any]
    """Has an id: its own, or the stem of its file."""

    @property
    def id(self) -> str:
        """The id of the graph."""
        return str(self.document["id"])

    @property
    def node_types(self) -> set[str]:
        """The node types that the graph uses."""
        graph, _ = read_loosely(self.document)
        return set() if graph is None else {node.type for node in graph.nodes if node.type}

    def problems(self, executors: ExecutorRegistry | None, services: Mapping[str, Any]) -> Sequence[Problem]:
        """Return everything that prevents the graph from running; without executors, types are not checked."""
        from penstock.nodes.checking import problems_in  # imports agents, which a Graph does not need

        return problems_in(self.document, executors, services)

    def graph(self) -> GraphSpec:
        """Return the graph; GraphInvalid if its JSON is not well formed."""
        return parse_graph(self.document)


def load_target(target: str) -> Graph | GraphSource:
    """Load the graph, or the agent as a graph; GraphInvalid if a file has no JSON object."""
    if is_code(target):
        found = load_program(target, load_module)
        if isinstance(found, GraphSpec):
            return GraphSource(graph_to_json(found))
        return _around(found) if is_agent(found) else found
    return read_source(Path(target), "FILE")


def load_graph(target: str) -> Runnable:
    """Load the graph, or the agent as a graph; GraphInvalid has the problems if it is not well formed."""
    found = load_target(target)
    return found if isinstance(found, Graph) else found.graph()


def is_code(target: str) -> bool:
    """Whether a target names Python code, and not a file or directory of graphs in JSON."""
    module, _, attribute = target.rpartition(":")
    return target.endswith(".py") or bool(module and attribute and not Path(target).exists())


def module_in(target: str) -> str:
    """Return the module or file of a target that names Python code."""
    return target if target.endswith(".py") else target.rpartition(":")[0]


def load_program(target: str, load: Callable[[str], ModuleType]) -> Graph | GraphSpec | Agent:
    """Return the graph or agent that a target names in Python code; `load` imports its module."""
    module = load(module_in(target))
    if target.endswith(".py"):
        return _usual_one(module, target)
    where, _, attribute = target.rpartition(":")
    return _as_program(attribute_of(module, where, attribute, _known), target)


def is_agent(value: object) -> TypeIs[Agent]:
    """Whether a value is an Agent; agents are imported only by programs that have one."""
    agents = sys.modules.get("penstock.agents.agent")
    return agents is not None and isinstance(value, agents.Agent)


def has_agents(graph: Graph) -> bool:
    """Whether a step of the graph, or of a graph inside it, is an agent."""
    seen, todo = {id(graph)}, [graph]
    while todo:
        for step in todo.pop()._steps.values():
            if is_agent(step.node):
                return True
            if isinstance(step.node, Graph) and id(step.node) not in seen:
                seen.add(id(step.node))
                todo.append(step.node)
    return False


def _around(agent: Agent) -> Graph:
    graph = Graph(agent.name)
    graph.step(agent, agent.name)
    return graph


def read_source(path: Path, what: str) -> GraphSource:
    """Read a graph from a JSON file; without an id, it gets the file's stem. GraphInvalid if not a JSON object."""
    if not path.exists() and not path.suffix and path == Path(path.name):
        raise Refused(f"there is no file {shown(str(path))}; a graph in a module is named package.module:name")
    content = read_bytes(path, what)
    graph, problems = read_loosely(content)
    if graph is None:
        raise GraphInvalid(problems)
    raw = json.loads(content)
    return GraphSource({**(raw if problems else graph_to_json(graph)), "id": raw.get("id", path.stem)})


def as_spec(graph: Runnable) -> GraphSpec:
    """Return the graph as the kernel's GraphSpec."""
    return graph if isinstance(graph, GraphSpec) else graph.to_spec()


def problems_of(graph: Graph) -> list[Problem]:
    """Return all problems that prevent a graph in Python from running."""
    if not graph.to_spec().nodes:
        return [Problem("empty", "$.nodes", "the graph has no steps; add one")]
    return compiled.problems_of(graph)


def refuse_node_options(target: str, options: Sequence[str]) -> None:
    """Raise Refused for options that apply to nodes: a Graph in Python has steps instead."""
    if options:
        why = f"{target} is a Graph in Python, whose steps bring their own"
        raise Refused(f"{', '.join(options)} can only be used with a graph in JSON: {why}")


def _usual_one(module: ModuleType, target: str) -> Graph | GraphSpec | Agent:
    for name in USUAL_NAMES:
        if hasattr(module, name):
            return _as_program(getattr(module, name), f"{target}:{name}")
    found = _programs_in(module)
    if len(found) == 1:
        return next(iter(found.values()))
    if found:
        raise Refused(f"{target} has several graphs; name one: {', '.join(f'{target}:{name}' for name in found)}")
    raise Refused(f"{target} has no Graph and no Agent; add one called {USUAL_NAMES[0]!r} or {USUAL_NAMES[1]!r}")


def _as_program(value: Any, where: str) -> Graph | GraphSpec | Agent:
    found = resolve(value, where)
    if isinstance(found, Graph | GraphSpec) or is_agent(found):
        return found
    got = "a class" if isinstance(found, type) else f"of type {type(found).__name__}"
    gave = f"what {where} returned is {got}" if found is not value else f"{where} is {got}"
    raise Refused(f"{gave}; it must be a Graph, an Agent, a GraphSpec or a function that returns one")


def _programs_in(owner: object) -> dict[str, Graph | GraphSpec | Agent]:
    everything = getattr(owner, "__dict__", {}).items()
    return {name: value for name, value in everything if isinstance(value, Graph | GraphSpec) or is_agent(value)}


def _known(owner: object) -> str:
    """Describe the graphs and agents that a module has."""
    return f"its graphs and agents are: {', '.join(_programs_in(owner)) or 'none'}"
