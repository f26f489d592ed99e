"""The structure of a Python graph or agent as JSON: its fingerprint, and the effect of a change on a recorded run.

The structure of a graph is its steps, their dependencies, their policies and budgets, and the graphs and agents in it;
that of an agent is its name, its model, its tools and their schemas, its output and its limits. Long texts and schemas
are in it as digests. The code of the functions is not in it: editing a function keeps the fingerprint.

A step matches a recorded one if it has the same id and the same input, waits for the same steps, and all of these
match. `lineages` has one digest per step for this comparison, so a step after a changed one never matches: its recorded
result was made from another input. A step stays the same if its policies, budgets or code change.

Knows neither journals nor services.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from typing import Any, Literal

from penstock.agents.agent import Agent
from penstock.containment.limits import Budget
from penstock.flow.graph import Graph
from penstock.flow.node import type_of
from penstock.flow.step import Step
from penstock.policies import ErrorPolicy
from penstock.runtime.durable.journal import is_json

Kind = Literal["graph", "agent"]
Structure = Mapping[str, Any]

SHORT = 8
"""Number of characters of a digest inside a structure."""
LONG = 16
"""Number of characters of a fingerprint."""
DEFAULT_POLICY = ErrorPolicy()


def structure_of(program: Graph | Agent) -> dict[str, Any]:
    """Return the structure of a valid graph, its steps in execution order, or of an agent."""
    return _agent(program) if isinstance(program, Agent) else _graph(program)


def fingerprint_of(structure: Structure) -> str:
    """Return the digest of a structure."""
    return _digest(structure, LONG)


def kind_of(structure: Structure) -> Kind:
    """Return whether it is the structure of a graph or of an agent."""
    return "graph" if "steps" in structure else "agent"


# The structure of programs.


def _graph(graph: Graph) -> dict[str, Any]:
    steps = [_step(graph, graph._steps[id]) for id in graph.execution_order()]
    return {"id": graph.id, "steps": steps, "settle": str(graph.settle), "max_parallel": graph.max_parallel}


def _step(graph: Graph, step: Step) -> dict[str, Any]:
    node = step.node
    if node is None and graph.session is not None:
        node = graph.session.get_node(step.node_id)
    found: dict[str, Any] = {"id": step.id, "node": step.node_id, "type": type_of(node), "after": list(step.before)}
    if step.input_fn is not None:
        found["input"] = "function"
    elif step.input is not None:
        found["input"] = _digest(step.input if is_json(step.input) else type(step.input).__qualname__)
    if step.error_policy is not None:
        found["policy"] = _policy(step.error_policy)
    if step.sub_budget is not None:
        found["budget"] = _budget(step.sub_budget)
    if isinstance(node, Graph):
        found["graph"] = _graph(node)
    elif isinstance(node, Agent):
        found["agent"] = _agent(node)
    return found


def _policy(policy: ErrorPolicy) -> dict[str, Any]:
    """Return the differences from the default policy."""
    found: dict[str, Any] = {}
    for field in fields(policy):
        value = getattr(policy, field.name)
        if value != getattr(DEFAULT_POLICY, field.name):
            node_id = getattr(value, "id", None) if field.name == "fallback_node" else None
            found[field.name] = node_id or (value if is_json(value) else type(value).__qualname__)
    return found


def _budget(budget: Budget) -> dict[str, str]:
    values = {field.name: getattr(budget, field.name) for field in fields(budget) if field.init}
    return {name: str(value) for name, value in values.items() if value is not None}


def _agent(agent: Agent) -> dict[str, Any]:
    loop = agent.loop
    tools, output = getattr(loop, "tools", None), getattr(loop, "output", None)
    found: dict[str, Any] = {"name": agent.name, "model": agent.model.name, "loop": type(loop).__name__}
    found["instructions"] = _digest(getattr(loop, "instructions", ""))
    found["tools"] = {spec.name: _digest(spec.parameters) for spec in getattr(tools, "specs", ())}
    if output is not None:
        found["output"] = _digest(getattr(output, "schema", None) or output.instructions)
    if agent.budget is not None:
        found["budget"] = _budget(agent.budget)
    found["max_iterations"] = agent.executor.max_iterations
    return found


# What changed.


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A recorded step or call that the program no longer has, or has in another form."""

    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of a change of a program on a run that was recorded before it."""

    reused: tuple[str, ...] = ()
    """Recorded steps or calls whose results are used."""
    again: tuple[Mismatch, ...] = ()
    """Recorded steps that have changed and run again."""
    ignored: tuple[Mismatch, ...] = ()
    """Recorded steps or calls that the program does not have any more."""

    def to_json(self) -> dict[str, Any]:
        """Return the change as the data of an event."""
        return {
            "reused": list(self.reused),
            "again": [{"name": one.name, "why": one.why} for one in self.again],
            "ignored": [{"name": one.name, "why": one.why} for one in self.ignored],
        }


def lineages(structure: Structure) -> dict[str, str]:
    """Return a digest for each step of a graph that covers the step and everything before it, by step id."""
    found: dict[str, str] = {}
    for step in _steps(structure):
        before = sorted((id, found.get(id, "")) for id in _after(step))
        inner = step.get("graph")
        nested = sorted(lineages(inner).items()) if isinstance(inner, Mapping) else None
        found[str(step.get("id"))] = _digest([step.get("id"), before, step.get("input"), nested])
    return found


def new_names(before: Structure, now: Structure) -> dict[str, str]:
    """Return the names under which changed and new steps are recorded, by step id: the id and the lineage.

    Steps that match those of `before` keep their ids.
    """
    known = lineages(before)
    return {id: f"{id}@{lineage}" for id, lineage in lineages(now).items() if known.get(id) != lineage}


def change_of(before: Structure, now: Structure, recorded: Iterable[str]) -> Change:
    """Compare the program that a run was recorded with to the one that continues it.

    `recorded` names the recorded parts: steps in the journal for a graph, paths of calls for an agent.
    """
    names = list(recorded)
    was, is_now = kind_of(before), kind_of(now)
    if was != is_now:
        return Change(ignored=_all(names, f"the program was {_a(was)} and is {_a(is_now)} now"))
    return _change_of_agent(before, now, names) if is_now == "agent" else _change_of_graph(before, now, names)


def _change_of_graph(before: Structure, now: Structure, recorded: list[str]) -> Change:
    steps = {str(step.get("id")): step for step in _steps(now)}
    earlier = {str(step.get("id")): step for step in _steps(before)}
    renamed = new_names(before, now)
    found = {renamed.get(id, id): id for id in steps}
    others = [name for name in recorded if name not in found]
    return Change(
        tuple(found[name] for name in recorded if name in found),
        tuple(Mismatch(id, _why(earlier.get(id, {}), steps[id])) for id in others if id in renamed),
        tuple(Mismatch(name, _gone(name, steps)) for name in others if name not in renamed),
    )


def _gone(name: str, steps: Mapping[str, Any]) -> str:
    return "it has changed again since" if name.rpartition("@")[0] in steps else "there is no such step any more"


def _why(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    waited, waits = _after(before), _after(now)
    if sorted(waited) != sorted(waits):
        return f"it waits for {_listed(waits)}, and waited for {_listed(waited)}"
    if before.get("input") != now.get("input"):
        return "its input has changed"
    if before.get("graph") != now.get("graph"):
        return "the graph in it has changed"
    return "a step before it has changed"


def _change_of_agent(before: Structure, now: Structure, recorded: list[str]) -> Change:
    for field, what in (("name", "name"), ("model", "model")):
        if before.get(field) != now.get(field):
            why = f"the {what} of the agent was {before.get(field)} and is {now.get(field)} now"
            return Change(ignored=_all(recorded, why))
    return Change(reused=tuple(recorded))


def _all(names: Iterable[str], why: str) -> tuple[Mismatch, ...]:
    return tuple(Mismatch(name, why) for name in names)


def _steps(structure: Structure) -> list[Mapping[str, Any]]:
    found = structure.get("steps")
    return [step for step in found if isinstance(step, Mapping)] if isinstance(found, list) else []


def _after(step: Mapping[str, Any]) -> list[str]:
    found = step.get("after")
    return [str(id) for id in found] if isinstance(found, list) else []


def _a(kind: Kind) -> str:
    return "an agent" if kind == "agent" else "a graph"


def _listed(ids: list[str]) -> str:
    return " and ".join(ids) if ids else "nothing"


def _digest(value: Any, length: int = SHORT) -> str:
    text = json.dumps(value, sort_keys=True, default=_plain)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:length]


def _plain(value: object) -> Any:
    return dict(value) if isinstance(value, Mapping) else type(value).__qualname__
