"""Graphs inside nodes: in data, checked before the outer graph runs, run as a part of the same run.

A nested graph has the executors, the state and the services of the graph around it, its limits and its one cap on how
many nodes run at once; its links are its own. What is told of its nodes is told by the node it stands in, as `inside`,
with the path from there.

How deep graphs may stand inside each other is bounded by the depth of their JSON, 64 levels, which is about 15 graphs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from contextvars import ContextVar
from typing import Annotated, Any

from penstock.kernel.document import parse_graph, parse_part
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import DEFAULT_OUTPUT, GraphInvalid, Problem
from penstock.kernel.validate import validate
from penstock.kernel.values import DataValue
from penstock.nodes.parts.settings import EXACT, BudgetData, Finding
from penstock.nodes.parts.values import typed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.keys import Entered
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.graph_plan import GraphPlan
from penstock.runtime.graphs.graph_runtime import GraphRuntime, run_flow
from penstock.runtime.graphs.node_events import LIFECYCLE, NodeEvent

GraphData = Annotated[dict[str, Any], EXACT]
"""A graph, written as the graph around it is."""

INSIDE = "inside"
"""The type of the events that tell of nodes of a nested graph."""

Told = AsyncGenerator[NodeEvent | ExecutionResult, None]

_is_read: ContextVar[bool] = ContextVar("penstock_nested_is_read", default=False)
"""Whether a graph around the one that is looked at was read as a whole, with this one in it."""

OF_THE_OUTER_GRAPH = frozenset({"execution", "execution_context", "chat_scope"})


def findings(graph: Mapping[str, Any], executors: ExecutorRegistry, at: str = ".graph") -> Iterator[Finding]:
    """What keeps a nested graph from running, graphs inside it included."""
    for problem in _problems(graph, executors):
        yield at + problem.path.removeprefix("$"), problem.detail


def _problems(graph: Mapping[str, Any], executors: ExecutorRegistry) -> Sequence[Problem]:
    token = _is_read.set(True) if not _is_read.get() else None
    try:  # what stands deeper inside is read and copied with it, and not again at each depth
        return validate(parse_part(graph) if token is None else parse_graph(graph), executors)
    except GraphInvalid as invalid:
        return invalid.problems
    finally:
        if token is not None:
            _is_read.reset(token)


async def plan_of(graph: Mapping[str, Any], context: FlowContext) -> GraphPlan:
    """The graph in the data of the node that `context` is of."""
    return await runtime_of(context)._plan.inside(str(context.node_id), graph)


async def run(
    graph: GraphPlan, given: Any, context: FlowContext, within: ExecutionContext | None = None, *, number: int = 0
) -> Told:
    """Run a nested graph on an input, as a part of the run that `context` belongs to: its events, its result last.

    A node that runs graphs one after the other numbers them, so that a journal can tell them apart.
    """
    place = (within or context.execution).with_input(given)
    run = run_flow(graph, inner(context, place))
    async with aclosing(run if number == 0 else _numbered(run, place, number)) as everything:
        async for told in everything:
            yield told


async def _numbered(run: Told, place: ExecutionContext, number: int) -> Told:
    """The same at a place of its own in the journal, if there is one."""
    journal = place._run.journal
    async with aclosing(run):
        with nullcontext() if journal is None else Entered(journal.here().mark("round", number)):
            async for told in run:
                yield told


def inner(context: FlowContext, place: ExecutionContext) -> FlowContext:
    """What nodes inside are given: the same, but for what is about the outer graph's own nodes."""
    services = {name: one for name, one in context.services.items() if name not in OF_THE_OUTER_GRAPH}
    return FlowContext(None, context.chat_id, context.run_id, context.state, None, services, place)


def runtime_of(context: FlowContext) -> GraphRuntime:
    """The graph around a node."""
    assert context.runtime is not None, "nodes run in a graph"
    return context.runtime


def place_of(context: FlowContext, budget: BudgetData | None) -> ExecutionContext:
    """Where a node's work runs: under a budget of its own, if it has one."""
    place = context.execution
    return place if budget is None else place.with_sub_budget(budget.budget(), name=context.node_id)


def only(result: ExecutionResult) -> DataValue:
    """What a nested graph came to: its one output, or all of them by handle."""
    outputs = result.outputs
    if outputs.keys() == {DEFAULT_OUTPUT}:
        return outputs[DEFAULT_OUTPUT]
    if not outputs:
        return DataValue("any", None)
    return typed({name: value.value for name, value in outputs.items()})


def inside(event: NodeEvent, at: str = "") -> NodeEvent:
    """What the node around a nested graph tells of an event in it; `at` is which of its graphs that was."""
    told = _told(event)
    return NodeEvent.progress(INSIDE, {**told, "node": f"{at}/{told['node']}"} if at else told)


def _told(event: NodeEvent) -> dict[str, Any]:
    data = event.data
    if event.event_type == INSIDE and isinstance(data, Mapping) and "node" in data:
        return {**data, "node": f"{event.node_id}/{data['node']}"}
    told = {"node": event.node_id, "type": event.node_type, "event": event.event_type}
    if event.event_type in LIFECYCLE:  # values and errors are told once, where they belong
        return told
    return {**told, "data": data}
