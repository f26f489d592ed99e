"""`map`: run a graph in data, or a tool or agent linked into `each`, on every item of a list.

The items are nodes of a generated graph, so that they run on the same scheduler: in parallel as the node allows, within
the run's concurrency limit, stopped together when one fails. The results keep the order of the items.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.agents.messages import ToolCall
from penstock.agents.tools import ToolChain, execute_one
from penstock.errors import PenstockError
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle, typed
from penstock.kernel.graph import DEFAULT_OUTPUT, GraphSpec, NodeSpec
from penstock.nodes.parts import nested
from penstock.nodes.parts.nested import GraphData
from penstock.nodes.parts.services import combine_tools, runtime_of
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.runtime.graphs.settings import Checked, Data, Finding, Settings, Within

MAX_ITEMS = 10_000
ITEM = "item"
"""Node type of the items in the generated graph."""


class MapRefused(PenstockError):
    """A list cannot be mapped: it is too long, or it is not clear what to run on its items."""


class ItemFailed(PenstockError):
    """The tool or agent linked into `each` failed on an item."""

    def __init__(self, number: int, why: str) -> None:
        self.number = number
        super().__init__(f"item {number}: {why}")


@dataclass(frozen=True, slots=True)
class MapData(Data):
    """What runs on an item, the maximum number of items, and how many run in parallel."""

    graph: GraphData | None = None
    max_items: Annotated[int, Within(0, MAX_ITEMS)] = 100
    parallel: Annotated[int, Within(1, 1_000)] = 4


class Map(Checked[MapData]):
    """Runs on every item of a list, and outputs the list of results."""

    settings = Settings(MapData)
    inputs = (Handle("input", "list", required=True), Handle("each", channel="link"))
    outputs = (Handle("output", "list"),)
    follows = MappingProxyType({"execute": ("each",)})

    def look(self, data: MapData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Report problems of the nested graph."""
        if data.graph is not None:
            yield from nested.findings(data.graph, executors)

    def look_inside(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterable[Finding]:
        """Report problems of the nested graph."""
        return nested.findings_in(data, executors)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | DataValue]:
        """Yield the events of the items, and the list of their results."""
        read = self.settings.read(data)
        items = inputs["input"].value
        if not isinstance(items, list):
            raise MapRefused(f"the input must be a list of items, not a {type(items).__name__}")
        if len(items) > read.max_items:
            raise MapRefused(f"the list has {len(items)} items; the maximum is {read.max_items} (max_items)")
        each = await _each(read, context, items)
        results: list[Any] = [None] * len(items)
        if items:
            place = nested.inner(context, context.execution)
            run = run_flow(_graph_of(len(items)), place, {ITEM: each}, max_parallel=read.parallel)
            async with aclosing(run) as everything:
                async for event in everything:
                    if isinstance(event, NodeEvent):
                        if event.event_type == "completed" and DEFAULT_OUTPUT in event.data:
                            results[int(event.node_id)] = event.data[DEFAULT_OUTPUT].value
                        yield nested.inside(event)
        yield DataValue("list", results)


def _graph_of(count: int) -> GraphSpec:
    return GraphSpec(tuple(NodeSpec(str(number), ITEM) for number in range(count)), id="map")


async def _each(data: MapData, context: FlowContext, items: list[Any]) -> _GraphEach | _ToolEach:
    linked = await runtime_of(context).resolve_links(str(context.node_id), "each")
    if (data.graph is None) == (not linked):
        raise MapRefused("exactly one of data.graph and a link into `each` must be given")
    if data.graph is not None:
        return _GraphEach(items, await nested.plan_of(data.graph, context), context)
    chain = combine_tools(linked)
    if len(chain.specs) != 1:
        raise MapRefused(f"exactly one tool must be linked into `each`, not {len(chain.specs)}")
    return _ToolEach(items, chain)


class _GraphEach:
    """Runs a graph on an item."""

    def __init__(self, items: list[Any], graph: GraphPlan, around: FlowContext) -> None:
        self._items = items
        self._graph = graph
        self._around = around

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Events:
        number = int(str(context.node_id))
        run = nested.run(self._graph, self._items[number], self._around, context.execution)
        async with aclosing(run) as everything:
            async for event in everything:
                if isinstance(event, ExecutionResult):
                    yield ExecutionResult({DEFAULT_OUTPUT: nested.only(event)})
                else:
                    yield nested.inside(event)


class _ToolEach:
    """Calls a tool, or an agent, with an item."""

    def __init__(self, items: list[Any], chain: ToolChain) -> None:
        self._items = items
        self._chain = chain
        self._spec = chain.specs[0]

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> DataValue:
        number = int(str(context.node_id))
        call = ToolCall(str(number), self._spec.name, self._arguments(self._items[number]))
        result = await execute_one(self._chain, context.execution, call, number)
        if result.is_error:
            raise ItemFailed(number, result.content)
        return typed(result.content if result.value is None else result.value)

    def _arguments(self, item: Any) -> Mapping[str, Any]:
        """Return an object with all required names unchanged; pass any other item as the only required argument."""
        names = list(self._spec.parameters.get("properties", {}))
        needed = list(self._spec.parameters.get("required", ())) or names
        if isinstance(item, Mapping) and set(needed) <= item.keys():
            return item
        if len(needed) != 1:
            raise MapRefused(f"an item must be an object with {', '.join(needed) or 'no arguments'}")
        return {needed[0]: item}
