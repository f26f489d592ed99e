"""`map`: the same for every item of a list: a graph in data, or a tool or an agent that is linked into `each`.

The items are the nodes of a graph of their own, so that they run on the one scheduler: side by side as the node allows,
under the one cap of the run, stopped together when one fails. Their results keep the order of the items.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.agents.messages import ToolCall
from penstock.agents.tools import ToolChain, execute_one
from penstock.errors import PenstockError
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.graph import DEFAULT_OUTPUT, GraphSpec, NodeSpec
from penstock.kernel.values import DataValue
from penstock.nodes.parts import nested
from penstock.nodes.parts.nested import GraphData
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Finding, Settings, Within
from penstock.nodes.parts.toolbox import gathered
from penstock.nodes.parts.values import typed
from penstock.runtime.graphs.flow_context import FlowContext
from penstock.runtime.graphs.graph_plan import GraphPlan
from penstock.runtime.graphs.graph_runtime import run_flow
from penstock.runtime.graphs.node_events import NodeEvent

MAX_ITEMS = 10_000
ITEM = "item"
"""The type of the nodes that the items are."""


class MapRefused(PenstockError):
    """A list cannot be gone through: it is too long, or nothing says what to do with its items."""


class ItemFailed(PenstockError):
    """What is linked into `each` could not do its work on an item."""

    def __init__(self, number: int, told: str) -> None:
        self.number = number
        super().__init__(f"item {number}: {told}")


@dataclass(frozen=True, slots=True)
class MapData(Data):
    """What is done with an item, with how many at most, and with how many at once."""

    graph: GraphData | None = None
    max_items: Annotated[int, Within(0, MAX_ITEMS)] = 100
    parallel: Annotated[int, Within(1, 1_000)] = 4
    budget: BudgetData | None = None
    """For all items together."""


class Map(Checked[MapData]):
    """Goes through a list and gives the list of what came of each item."""

    settings = Settings(MapData)
    inputs = (Handle("input", "list", required=True), Handle("each", channel="link"))
    outputs = (Handle("output", "list"),)
    follows = MappingProxyType({"execute": ("each",)})

    def look(self, data: MapData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """What keeps the graph inside from running."""
        if data.graph is not None:
            yield from nested.findings(data.graph, executors)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | DataValue]:
        """What is told of the items, and the list of what came of them."""
        read = self.settings.read(data)
        items = inputs["input"].value
        if not isinstance(items, list):
            raise MapRefused(f"a list of items is needed, and there is a {type(items).__name__}")
        if len(items) > read.max_items:
            raise MapRefused(f"{len(items)} items are more than the {read.max_items} that max_items allows")
        each = await _each(read, context, items)
        results: list[Any] = [None] * len(items)
        if items:
            place = nested.inner(context, nested.place_of(context, read.budget))
            run = run_flow(_graph_of(len(items)), place, {ITEM: each}, max_parallel=read.parallel)
            async with aclosing(run) as everything:
                async for told in everything:
                    if isinstance(told, NodeEvent):
                        if told.event_type == "completed" and DEFAULT_OUTPUT in told.data:
                            results[int(told.node_id)] = told.data[DEFAULT_OUTPUT].value
                        yield nested.inside(told)
        yield DataValue("list", results)


def _graph_of(count: int) -> GraphSpec:
    return GraphSpec(tuple(NodeSpec(str(number), ITEM) for number in range(count)), id="map")


async def _each(data: MapData, context: FlowContext, items: list[Any]) -> _GraphEach | _ToolEach:
    linked = await nested.runtime_of(context).resolve_links(str(context.node_id), "each")
    if (data.graph is None) == (not linked):
        raise MapRefused("either data.graph or a link into `each` says what is done with an item, and not both")
    if data.graph is not None:
        return _GraphEach(items, await nested.plan_of(data.graph, context), context)
    chain = gathered(linked)
    if len(chain.specs) != 1:
        raise MapRefused(f"one tool is linked into `each`, and not {len(chain.specs)}")
    return _ToolEach(items, chain)


class _GraphEach:
    """Runs a graph on an item."""

    def __init__(self, items: list[Any], graph: GraphPlan, around: FlowContext) -> None:
        self._items = items
        self._graph = graph
        self._around = around

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Told:
        number = int(str(context.node_id))
        run = nested.run(self._graph, self._items[number], self._around, context.execution)
        async with aclosing(run) as everything:
            async for told in everything:
                if isinstance(told, ExecutionResult):
                    yield ExecutionResult({DEFAULT_OUTPUT: nested.only(told)})
                else:
                    yield nested.inside(told)


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
        """An object is the arguments, if it has their names; anything else is the only one there is, or is needed."""
        names = list(self._spec.parameters.get("properties", {}))
        needed = list(self._spec.parameters.get("required", ())) or names
        if isinstance(item, Mapping) and set(needed) <= item.keys():
            return item
        if len(needed) != 1:
            raise MapRefused(f"an item has to be an object with {', '.join(needed) or 'no arguments'}")
        return {needed[0]: item}
