"""Graphs nested in the data of nodes: checked before the outer graph runs, and run as a part of the same run.

A nested graph shares the executors, state, services, limits and concurrency limit of the enclosing graph; its links are
its own, and so is its part of the chat's scope. Events of its nodes are emitted by the enclosing node, as `inside`,
with the path from there.

The nesting depth is bounded by the depth of the JSON, 64 levels, which is about 15 graphs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, nullcontext
from contextvars import ContextVar
from typing import Annotated, Any

from penstock.kernel.document import read_loosely, without_repeats
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, typed
from penstock.kernel.graph import DEFAULT_OUTPUT, Problem
from penstock.nodes.parts.services import runtime_of
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.keys import enter_scope
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan
from penstock.runtime.graphs.node_execution import LIFECYCLE, NodeEvent, run_flow
from penstock.runtime.graphs.settings import EXACT, Finding
from penstock.runtime.graphs.validation import validate

GraphData = Annotated[dict[str, Any], EXACT]
"""A graph, in the same format as the enclosing graph."""

INSIDE = "inside"
"""Type of the events that report on nodes of a nested graph."""

Events = AsyncGenerator[NodeEvent | ExecutionResult, None]

_is_read: ContextVar[bool] = ContextVar("penstock_nested_is_read", default=False)
"""Whether an enclosing graph was already parsed as a whole, including the graph being checked."""

OUTER_GRAPH_SERVICES = frozenset({"execution", "execution_context", "chat_scope"})


def findings(graph: Mapping[str, Any], executors: ExecutorRegistry, at: str = ".graph") -> Iterator[Finding]:
    """Yield the problems of a nested graph, graphs inside it included."""
    for problem in _problems(graph, executors):
        yield at + problem.path.removeprefix("$"), problem.detail


def findings_in(data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterator[Finding]:
    """Yield the problems of the nested graph in data that has other problems, if there is one."""
    if isinstance(graph := data.get("graph"), dict):
        yield from findings(graph, executors)


def _problems(graph: Mapping[str, Any], executors: ExecutorRegistry) -> Sequence[Problem]:
    token = _is_read.set(True) if not _is_read.get() else None
    try:  # deeper graphs are parsed and copied with it, not again at each depth
        read, problems = read_loosely(graph, is_part=token is None)
        return problems if read is None else without_repeats(problems, validate(read, executors))
    finally:
        if token is not None:
            _is_read.reset(token)


async def plan_of(graph: Mapping[str, Any], context: FlowContext) -> GraphPlan:
    """Return the plan of the graph in the data of the node of `context`."""
    return await runtime_of(context)._plan.inside(str(context.node_id), graph)


async def run(
    graph: GraphPlan, given: Any, context: FlowContext, within: ExecutionContext | None = None, *, number: int = 0
) -> Events:
    """Run a nested graph on an input, as a part of the run of `context`; yield its events, and its result last.

    A node that runs graphs one after the other numbers them, so that the journal can distinguish them.
    """
    place = (within or context.execution).with_input(given)
    run = run_flow(graph, inner(context, place, number or 1))
    async with aclosing(run if number == 0 else _numbered(run, place, number)) as everything:
        async for event in everything:
            yield event


async def _numbered(run: Events, place: ExecutionContext, number: int) -> Events:
    """Run it under its own journal key, if the run has a journal."""
    journal = place._run.journal
    async with aclosing(run):
        with nullcontext() if journal is None else enter_scope(journal.scope().child("round", number)):
            async for event in run:
                yield event


def inner(context: FlowContext, place: ExecutionContext, iteration: int = 1) -> FlowContext:
    """Return the context of nested nodes: the same, without services about the outer graph's own nodes."""
    services = {name: service for name, service in context.services.items() if name not in OUTER_GRAPH_SERVICES}
    enter = getattr(context.services.get("chat_scope"), "inside", None)
    if enter is not None:  # a caller's own scope may support only one graph
        services["chat_scope"] = enter(str(context.node_id), iteration)
    return FlowContext(None, context.chat_id, context.run_id, context.state, None, services, place)


def only(result: ExecutionResult) -> DataValue:
    """Return the result of a nested graph: its only output, or all of them by handle."""
    outputs = result.outputs
    if outputs.keys() == {DEFAULT_OUTPUT}:
        return outputs[DEFAULT_OUTPUT]
    if not outputs:
        return DataValue("any", None)
    return typed({name: value.value for name, value in outputs.items()})


def inside(event: NodeEvent, at: str = "") -> NodeEvent:
    """Wrap an event of a nested graph for the enclosing node; `at` identifies which of its graphs emitted it."""
    data = _event_data(event)
    return NodeEvent.progress(INSIDE, {**data, "node": f"{at}/{data['node']}"} if at else data)


def _event_data(event: NodeEvent) -> dict[str, Any]:
    data = event.data
    if event.event_type == INSIDE and isinstance(data, Mapping) and "node" in data:
        return {**data, "node": f"{event.node_id}/{data['node']}"}
    wrapped = {"node": event.node_id, "type": event.node_type, "event": event.event_type}
    if event.event_type in LIFECYCLE:  # values and errors are emitted once, by their own events
        return wrapped
    return {**wrapped, "data": data}
