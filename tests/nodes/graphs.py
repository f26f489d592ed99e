"""Graphs in few words, and running them."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry
from penstock.nodes import executors, json_schemas
from penstock.nodes.parts.condition import Condition
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.runtime.graphs.validation import validate

Json = dict[str, Any]

# What is loaded when a graph is first looked at is read from files; here that is before any event loop runs.
parse_graph({"nodes": [], "edges": []})
json_schemas()
Condition("true", ())


def node(id: str, type: str, /, **data: Any) -> Json:
    return {"id": id, "type": type, "data": data}


def edge(way: str, channel: str) -> Json:
    """`a.true > b.input`; handles that are left out are the usual ones."""
    (source, source_handle), (target, target_handle) = (_end(one) for one in way.split(" > "))
    return {
        "id": way,
        "source": source,
        "sourceHandle": source_handle,
        "target": target,
        "targetHandle": target_handle,
        "data": {"channel": channel},
    }


def _end(text: str) -> tuple[str, str | None]:
    id, _, handle = text.partition(".")
    return id, handle or None


def graph(nodes: list[Json], flow: list[str] | None = None, link: list[str] | None = None) -> Json:
    return {
        "id": "g",
        "nodes": nodes,
        "edges": [*(edge(way, "flow") for way in flow or ()), *(edge(way, "link") for way in link or ())],
    }


def registry(more: Json | None = None) -> ExecutorRegistry:
    return ExecutorRegistry({**executors(), **(more or {})})


def problems(document: Json, more: Json | None = None) -> list[tuple[str, str]]:
    return [(problem.path, problem.detail) for problem in validate(parse_graph(document), registry(more))]


async def events_of(
    document: Json,
    input: Any = None,
    *,
    run: ExecutionContext | None = None,
    services: Json | None = None,
    more: Json | None = None,
    max_parallel: int = 16,
) -> tuple[list[NodeEvent], ExecutionResult]:
    """The events of a run, and its result."""
    within = run or ExecutionContext(input=input)
    context = FlowContext(services=services or {}, execution=within, run_id="r")
    events: list[NodeEvent] = []
    result = ExecutionResult()
    async with aclosing(run_flow(document, context, registry(more), max_parallel=max_parallel)) as everything:
        async for one in everything:
            if isinstance(one, ExecutionResult):
                result = one
            else:
                events.append(one)
    if run is None:
        within.end()
    return events, result


async def output_of(document: Json, input: Any = None, **options: Any) -> Any:
    """The one value a graph comes to; by handle, if there are several."""
    _, result = await events_of(document, input, **options)
    values = {handle: value.value for handle, value in result.outputs.items()}
    return values["output"] if values.keys() == {"output"} else values
