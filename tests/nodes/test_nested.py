"""Graphs inside nodes: subgraph, map and loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from penstock.containment.limits import Budget, BudgetExceededError
from penstock.errors import CancelledError
from penstock.kernel.document import read_loosely
from penstock.kernel.executor import DataValue
from penstock.kernel.graph import GraphInvalid
from penstock.nodes.loop import LoopNotDone
from penstock.nodes.map import ItemFailed, MapRefused
from penstock.nodes.parts import nested
from penstock.nodes.parts.condition import ConditionFailed
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.testing import explore
from tests.nodes.graphs import Json, events_of, graph, node, output_of, problems, registry


class Add:
    """Adds `by` to a number."""

    def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
        return DataValue("number", inputs["input"].value + data.get("by", 1))


class Busy:
    """Gives what came after a while, and counts how many are at it at once."""

    def __init__(self) -> None:
        self.now = self.most = self.begun = self.cancelled = 0

    async def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if data.get("fails_on") == inputs["input"].value:
                raise LookupError("not this one")
            for _ in range(5):
                await asyncio.sleep(0)
            return DataValue("any", inputs["input"].value)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1


class Stuck:
    """Waits until it is cancelled; sets `begun` once it waits."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = 0

    async def execute(self, data: Any, inputs: Any, context: Any) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


class Tells:
    async def execute(self, data: Any, inputs: Any, context: Any) -> AsyncIterator[NodeEvent | DataValue]:
        yield NodeEvent.progress("counted", 1)
        yield DataValue("number", 1)


ADDS = graph([node("in", "input"), node("add", "add")], ["in > add"])
MORE: Json = {"add": Add()}


def around(type: str, **data: Any) -> Json:
    return graph([node("in", "input"), node("n", type, **data)], ["in > n"])


def works(type: str, **data: Any) -> Json:
    """A graph with one node between its ends."""
    return graph([node("in", "input"), node("work", type, **data)], ["in > work"])


# subgraph


async def test_a_subgraph_gets_the_input_and_outputs_its_result() -> None:
    assert await output_of(around("subgraph", graph=ADDS), 1, more=MORE) == 2


async def test_a_subgraph_with_several_outputs_returns_them_by_name() -> None:
    ends = graph([node("a", "text", text="x"), node("b", "constant", value=2)])
    assert await output_of(around("subgraph", graph=ends)) == {"a.output": "x", "b.output": 2}


async def test_events_of_nested_nodes_have_their_path() -> None:
    inner = graph([node("tells", "tells")])
    events, _ = await events_of(around("subgraph", graph=around("subgraph", graph=inner)), more={"tells": Tells()})
    inside = [one.data for one in events if one.event_type == "inside" and one.data["type"] == "tells"]
    assert inside == [
        {"node": "n/tells", "type": "tells", "event": "started"},
        {"node": "n/tells", "type": "tells", "event": "counted", "data": 1},
        {"node": "n/tells", "type": "tells", "event": "completed"},
    ]
    assert {one.node_id for one in events} == {"in", "n"}


async def test_a_subgraph_is_a_part_of_the_run() -> None:
    with ExecutionContext(input=1, budget=Budget(max_steps=3)) as run:
        with pytest.raises(BudgetExceededError):
            await output_of(around("subgraph", graph=ADDS), run=run, more=MORE)
        assert run.usage.steps_executed == 2  # the subgraph took the third, and failed


async def test_a_subgraph_has_a_budget_of_its_own() -> None:
    with ExecutionContext(input=1) as run, pytest.raises(BudgetExceededError, match="1 of the 1 steps of 'n' used"):
        await output_of(around("subgraph", graph=ADDS, budget={"max_steps": 1}), run=run, more=MORE)


async def test_state_and_services_are_those_of_the_graph_around() -> None:
    class Looks:
        def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
            context.state["seen"] = context.services["word"]
            return DataValue("text", context.run_id)

    inner = graph([node("looks", "looks")])
    outer = graph([node("n", "subgraph", graph=inner), node("read", "reads")], ["n > read"])

    class Reads:
        def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
            return DataValue("text", f"{context.state['seen']} {inputs['input'].value}")

    assert await output_of(outer, services={"word": "sill"}, more={"looks": Looks(), "reads": Reads()}) == "sill r"


async def test_the_start_of_the_run_is_known_only_to_the_outer_graph() -> None:
    services = {"execution": {"entry_node_ids": ["n"]}}
    outer = graph([node("n", "subgraph", graph=graph([node("a", "text", text="x")]))])
    assert await output_of(outer, services=services) == "x"


def test_everything_wrong_inside_is_found_before_the_run() -> None:
    broken = graph([node("a", "uper"), node("b", "merge", mode="last")], ["a > c"])
    twice = around("subgraph", graph=around("subgraph", graph=broken))
    inside = "$.nodes[1].data.graph.nodes[1].data.graph"
    assert [path for path, _ in problems(twice)] == [
        f"{inside}.edges[0].target",
        f"{inside}.nodes[0].type",
        f"{inside}.nodes[1]",
        f"{inside}.nodes[1].data.mode",
    ]
    assert sorted(path for path, _ in problems(around("subgraph", graph={"nodes": 3}))) == [
        "$.nodes[1].data.graph.edges",
        "$.nodes[1].data.graph.nodes",
    ]
    ((path, _),) = problems(around("subgraph"))
    assert path == "$.nodes[1].data.graph"


def test_deeply_nested_graphs_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def read_counted(document: Any, *, is_part: bool = False) -> Any:
        read.extend([] if is_part else [1])
        return read_loosely(document, is_part=is_part)

    monkeypatch.setattr(nested, "read_loosely", read_counted)
    deep = graph([node("a", "uper")])
    for _ in range(8):
        deep = graph([node("one", "subgraph", graph=deep), node("other", "subgraph", graph=graph([node("b", "text")]))])
    found = problems(deep)
    assert len(read) == 2
    assert len(found) == 1 + 8  # a text needs one
    assert problems(deep) == found


async def test_graphs_inside_each_other_are_bounded() -> None:
    deep = ADDS
    for _ in range(14):
        deep = around("subgraph", graph=deep)
    assert await output_of(deep, 1, more=MORE) == 2
    for _ in range(10):
        deep = around("subgraph", graph=deep)
    with pytest.raises(GraphInvalid, match="nested deeper than the 64 levels"):
        await output_of(deep, 1, more=MORE)


async def test_a_cancel_reaches_nested_graphs() -> None:
    stuck = Stuck()
    with ExecutionContext() as run:
        running = asyncio.ensure_future(
            output_of(around("subgraph", graph=works("stuck")), run=run, more={"stuck": stuck})
        )
        await stuck.begun.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert stuck.cancelled == 1


# map


async def test_a_map_goes_through_a_list_and_keeps_its_order() -> None:
    assert await output_of(around("map", graph=ADDS), [3, 1, 2], more=MORE) == [4, 2, 3]
    assert await output_of(around("map", graph=ADDS), [], more=MORE) == []
    assert await output_of(around("map", graph=ADDS), [5], more=MORE) == [6]


async def test_no_more_items_run_at_once_than_the_map_allows() -> None:
    busy = Busy()
    mapped = around("map", graph=works("busy"), parallel=3)
    assert await output_of(mapped, list(range(10)), more={"busy": busy}) == list(range(10))
    assert busy.most == 3


async def test_no_more_items_run_at_once_than_the_run_allows() -> None:
    busy = Busy()
    mapped = around("map", graph=works("busy"), parallel=8)
    assert await output_of(mapped, list(range(10)), more={"busy": busy}, max_parallel=2) == list(range(10))
    assert busy.most == 2


async def test_maps_in_maps_are_under_the_one_cap() -> None:
    busy = Busy()
    inner = around("map", graph=works("busy"), parallel=8)
    mapped = around("map", graph=inner, parallel=8)
    lists = [[1, 2, 3], [4, 5], [6]]
    assert await output_of(mapped, lists, more={"busy": busy}, max_parallel=3) == lists
    assert busy.most == 3


@pytest.mark.reliability
def test_a_map_has_the_same_result_in_every_interleaving() -> None:
    async def once(seed: int) -> None:
        busy = Busy()
        mapped = around("map", graph=works("busy"), parallel=4)
        assert await output_of(mapped, list(range(6)), more={"busy": busy}, max_parallel=3) == list(range(6))
        assert busy.most <= 3

    explore(once, schedules=50)


async def test_a_list_that_is_too_long_is_refused_before_any_item_runs() -> None:
    busy = Busy()
    mapped = around("map", graph=works("busy"), max_items=2)
    with pytest.raises(MapRefused, match="the list has 3 items; the maximum is 2"):
        await output_of(mapped, [1, 2, 3], more={"busy": busy})
    assert busy.begun == 0


async def test_nothing_is_no_list() -> None:
    with pytest.raises(MapRefused, match="the input must be a list of items, not a NoneType"):
        await output_of(around("map", graph=works("busy")), None, more={"busy": Busy()})


async def test_an_item_that_fails_stops_the_others() -> None:
    busy = Busy()
    mapped = around("map", graph=works("busy", fails_on=0), parallel=2)
    with pytest.raises(LookupError, match="not this one"):
        await output_of(mapped, list(range(20)), more={"busy": busy})
    assert (busy.begun, busy.cancelled, busy.now) == (2, 1, 0)


async def test_a_budget_holds_for_all_items_together() -> None:
    with ExecutionContext(input=list(range(50))) as run:
        with pytest.raises(BudgetExceededError, match="steps of 'n' used"):
            await output_of(around("map", graph=ADDS, budget={"max_steps": 10}), run=run, more=MORE)
        assert run.usage.steps_executed <= 11  # ten inside, and the input


async def test_a_cancel_stops_every_item() -> None:
    stuck = Stuck()
    with ExecutionContext(input=[1, 2, 3]) as run:
        running = asyncio.ensure_future(output_of(around("map", graph=works("stuck")), run=run, more={"stuck": stuck}))
        await stuck.begun.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert stuck.cancelled >= 1


async def test_a_map_calls_a_tool_that_is_linked() -> None:
    doubles = node("t", "tool", graph=works("add", by=10), parameters={"type": "object", "properties": {"n": {}}})
    doubles["data"]["graph"] = graph([node("in", "input"), node("p", "prompt-template", template="<{{ in.n }}>")])
    doubles["data"]["graph"]["edges"] = graph([], ["in > p.in"])["edges"]
    nodes = [node("in", "input"), node("n", "map"), doubles]
    mapped = graph(nodes, ["in > n"], ["t.tool > n.each"])
    assert await output_of(mapped, ["a", {"n": "b"}]) == ["<a>", "<b>"]


async def test_a_tool_that_fails_names_the_item() -> None:
    async def picky(name: str) -> str:
        if name == "b":
            raise LookupError("no such dam")
        return name.upper()

    nodes = [node("in", "input"), node("n", "map", parallel=1), node("t", "tool", tool="picky")]
    mapped = graph(nodes, ["in > n"], ["t.tool > n.each"])
    assert await output_of(mapped, ["a", "c"], services={"tools": {"picky": picky}}) == ["A", "C"]
    with pytest.raises(ItemFailed, match="item 1: LookupError: no such dam"):
        await output_of(mapped, ["a", "b"], services={"tools": {"picky": picky}})


async def test_a_map_needs_one_thing_to_do() -> None:
    with pytest.raises(MapRefused, match=r"exactly one of data\.graph and a link into `each`"):
        await output_of(around("map"), [1])


def test_what_cannot_become_a_list_is_found_before_the_run() -> None:
    nodes = [node("in", "input"), node("m", "map", graph=ADDS, parallel=0, max_items=20_000), node("e", "map")]
    paths = [path for path, _ in problems(graph(nodes, ["in > m"]), MORE)]
    assert paths == ["$.nodes[2]", "$.nodes[1].data.max_items", "$.nodes[1].data.parallel"]


# loop


async def test_a_loop_runs_on_its_previous_result_until_its_condition_holds() -> None:
    events, result = await events_of(around("loop", graph=ADDS, max_iterations=10, until="output >= 5"), 1, more=MORE)
    assert result.outputs["output"].value == 5
    assert [one.data for one in events if one.event_type == "iteration"] == [1, 2, 3, 4]
    assert [one.data["node"] for one in events if one.event_type == "inside"][-1] == "4/add"


async def test_a_loop_without_a_condition_runs_as_often_as_it_may() -> None:
    assert await output_of(around("loop", graph=ADDS, max_iterations=3), 1, more=MORE) == 4


async def test_a_loop_at_its_maximum_fails_or_outputs_its_last_result() -> None:
    with pytest.raises(
        LoopNotDone, match=r"ran 3 times, the maximum \(max_iterations\), and 'output > 100' does not hold"
    ):
        await output_of(around("loop", graph=ADDS, max_iterations=3, until="output > 100"), 1, more=MORE)
    lenient = around("loop", graph=ADDS, max_iterations=3, until="output > 100", at_limit="output")
    assert await output_of(lenient, 1, more=MORE) == 4


async def test_a_condition_may_ask_for_the_input_and_the_round() -> None:
    asks = around("loop", graph=ADDS, max_iterations=9, until="output == input + 2 && iteration == 2")
    assert await output_of(asks, 1, more=MORE) == 3


async def test_a_condition_that_cannot_be_answered_ends_the_loop() -> None:
    with pytest.raises(ConditionFailed):
        await output_of(around("loop", graph=ADDS, max_iterations=3, until="output.done"), 1, more=MORE)


async def test_a_loop_stops_at_a_limit_of_the_run() -> None:
    with ExecutionContext(input=1, budget=Budget(max_steps=21)) as run:
        with pytest.raises(BudgetExceededError):
            await output_of(around("loop", graph=ADDS, max_iterations=10_000), run=run, more=MORE)
        assert run.usage.steps_executed == 20  # the loop itself took one, and failed


async def test_a_loop_is_cancelled_in_the_middle() -> None:
    stuck = Stuck()
    with ExecutionContext() as run:
        running = asyncio.ensure_future(
            output_of(around("loop", graph=works("stuck"), max_iterations=5), run=run, more={"stuck": stuck})
        )
        await stuck.begun.wait()
        run.abort("enough")
        with pytest.raises(CancelledError):
            await running
    assert stuck.cancelled == 1


def test_a_loop_without_a_bound_is_found_before_the_run() -> None:
    found = problems(around("loop", graph=ADDS, until="outputs > 1"), MORE)
    assert found == [("$.nodes[1].data.max_iterations", "this is needed, and it is not there")]
    found = problems(around("loop", graph=ADDS, max_iterations=1, until="outputs > 1"), MORE)
    assert found == [("$.nodes[1].data.until", "there is no 'outputs'; there are: input, iteration, output")]


@pytest.mark.parametrize(("type", "data"), [("subgraph", {}), ("loop", {"max_iterations": 3}), ("map", {})])
async def test_an_exceeded_time_limit_stops_the_nested_graph_and_nothing_else(type: str, data: Json) -> None:
    stuck = Stuck()
    with ExecutionContext(input=[1]) as run:
        document = around(type, graph=works("stuck"), budget={"max_time_s": 0.1}, **data)
        with pytest.raises(BudgetExceededError, match=r"timeout: .* of the 0\.1 s of 'n'"):
            await output_of(document, run=run, more={"stuck": stuck})
        assert (bool(stuck.cancelled), run.cancellation.is_cancelled) == (stuck.begun.is_set(), False)


class Talks:
    """Never stops emitting events, and records when it is closed."""

    closed = 0

    async def execute(self, data: Any, inputs: Any, context: Any) -> AsyncIterator[NodeEvent]:
        try:
            while True:
                yield NodeEvent.progress("word")
        finally:
            self.closed += 1


@pytest.mark.parametrize(
    ("type", "data"), [("subgraph", {}), ("loop", {"max_iterations": 3}), ("map", {"parallel": 1})]
)
async def test_a_reader_who_leaves_closes_everything_inside_before_it_is_gone(type: str, data: Json) -> None:
    talks = Talks()
    document = around(type, graph=around("subgraph", graph=works("talks")), **data)
    with ExecutionContext(input=[1]) as run:
        context = FlowContext(execution=run)
        async with aclosing(run_flow(document, context, registry({"talks": talks}))) as everything:
            async for event in everything:
                if isinstance(event, NodeEvent) and event.event_type == "inside" and event.data["event"] == "word":
                    break
        assert talks.closed == 1


async def test_leaving_the_stream_in_the_middle_leaves_nothing_running() -> None:
    stuck = Stuck()
    looping = around("map", graph=around("subgraph", graph=works("stuck")))
    task = asyncio.ensure_future(output_of(looping, [1, 2, 3], more={"stuck": stuck}))
    await stuck.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stuck.cancelled >= 1
