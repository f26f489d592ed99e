"""What runs of one graph share: it is looked at once, however often it runs."""

from __future__ import annotations

from collections.abc import Mapping
from threading import get_ident
from types import MappingProxyType
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry
from penstock.kernel.graph import GraphInvalid
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs import graph_runtime
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphPlan, GraphRuntime
from penstock.runtime.graphs.node_execution import NodeEvent, emit_flow
from penstock.testing import sim_run


class Looked:
    """An executor that counts how often its data was looked at."""

    def __init__(self) -> None:
        self.times = 0

    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[tuple[str, str]]:
        self.times += 1
        return []

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        return ExecutionResult({"output": DataValue("text", str(context.node_id))})


class Heard:
    """A subscriber that remembers its events."""

    is_behind = False

    def __init__(self) -> None:
        self.events: list[str] = []

    def emit(self, event: NodeEvent) -> None:
        self.events.append(f"{event.node_id} {event.event_type}")

    async def make_room(self) -> None: ...


def planned(looked: Looked) -> GraphPlan:
    nodes = [{"id": one, "type": "t", "position": {"x": 0, "y": 0}, "data": {}} for one in "ab"]
    edge = {"id": "e", "source": "a", "sourceHandle": "output", "target": "b", "targetHandle": "input"}
    document = {"id": "g", "nodes": nodes, "edges": [{**edge, "data": {"channel": "flow"}}]}
    return GraphPlan(parse_graph(document), ExecutorRegistry({"t": looked}))


async def ran(plan: GraphPlan, **services: Any) -> tuple[list[str], ExecutionResult]:
    heard = Heard()
    async with ExecutionContext() as context:
        flow = FlowContext(run_id="r", services=services, execution=context)
        return heard.events, await emit_flow(plan, flow, heard)


async def test_a_graph_that_runs_often_is_looked_at_once() -> None:
    looked = Looked()
    plan = planned(looked)
    for _ in range(3):
        events, result = await ran(plan)
        assert events == ["a started", "a completed", "b started", "b completed"]
        assert result.outputs["output"].value == "b"
    assert looked.times == 2, "each node"


async def test_each_way_to_begin_is_planned_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runtime, "MAX_ENTRIES", 1)
    plan = planned(Looked())
    for _ in range(2):
        assert (await ran(plan, execution={"entry_node_ids": ["b"]}))[0] == ["b started", "b completed"]
        assert len((await ran(plan))[0]) == 4


@pytest.mark.parametrize("entries", [["unknown"], [{}], [None]])
async def test_a_beginning_that_is_no_node_is_refused_each_time(entries: list[Any]) -> None:
    plan = planned(Looked())
    for _ in range(2):
        with pytest.raises(GraphInvalid):
            await ran(plan, execution={"entry_node_ids": entries})


def test_a_plan_has_its_executors() -> None:
    with pytest.raises(InvalidValue, match="executors"):
        GraphRuntime(planned(Looked()), run_id="r", executors={})


class Scribbling(Looked):
    """An executor that writes into the data it is given, and gives what it found there."""

    def execute(self, data: Any, inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        found = data.get("seen", 0)
        data["seen"] = found + 1
        return ExecutionResult({"output": DataValue("number", found)})


async def test_what_an_executor_does_to_its_data_does_not_reach_the_next_run() -> None:
    plan = planned(Scribbling())
    for _ in range(2):
        _, result = await ran(plan)
        assert result.outputs["output"].value == 0
    assert [node.data for node in plan.graph.nodes] == [{}, {}]


def inside(id: str = "g") -> dict[str, Any]:
    return {"id": id, "nodes": [{"id": "a", "type": "t", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}


async def test_a_graph_in_the_data_of_a_node_is_looked_at_once_for_all_runs() -> None:
    looked = Looked()
    plan = planned(looked)
    first = await plan.inside("a", inside())
    first.beginning_with(None)
    again = await plan.inside("a", inside())
    again.beginning_with(None)
    assert again is first
    assert looked.times == 1
    other = await plan.inside("a", inside("other"))
    assert other.graph.id == "other"
    for value in (1, True, 1.0):
        given = inside()
        given["nodes"][0]["data"]["value"] = value
        (node,) = (await plan.inside("a", given)).graph.nodes
        assert type(node.data["value"]) is type(value)
    assert (await plan.inside("b", inside())).graph == first.graph
    odd = {**inside(), "nodes": tuple(inside()["nodes"]), "made": MappingProxyType({})}
    assert (await plan.inside("b", odd)).graph == first.graph
    assert first.executors is plan.executors


@pytest.mark.parametrize("is_large", [True, False])
async def test_a_large_graph_is_read_and_looked_at_on_a_thread(is_large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Where(Looked):
        def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[tuple[str, str]]:
            threads.append(get_ident())
            return super().check(data, executors)

    def read(document: Any) -> Any:
        threads.append(get_ident())
        return parse_graph(document)

    monkeypatch.setattr(graph_runtime, "parse_graph", read)
    monkeypatch.setattr(graph_runtime, "is_large", lambda document: is_large)
    plan = await GraphPlan.of(inside(), ExecutorRegistry({"t": Where()}))
    await plan.get_ready()
    plan.beginning_with(None)
    assert len(threads) == 2
    assert (get_ident() in threads) is not is_large
    behind = plan.with_executors(ExecutorRegistry({"t": Where()}))
    await behind.get_ready()
    behind.beginning_with(None)
    assert (threads[-1] == get_ident()) is not is_large


async def test_a_large_graph_in_the_data_of_a_node_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runtime, "is_large", lambda document: True)
    plan = planned(Looked())
    assert await plan.inside("a", inside()) is not await plan.inside("a", inside())
    assert not plan._inside


def test_a_loop_without_threads_reads_large_graphs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runtime, "is_large", lambda document: True)

    async def main() -> str:
        plan = await GraphPlan.of(inside(), ExecutorRegistry({"t": Looked()}))
        await plan.get_ready()
        return (await plan.inside("a", inside("other"))).graph.id

    assert sim_run(main, seed=1) == "other"
