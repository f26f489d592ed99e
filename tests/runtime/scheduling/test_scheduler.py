"""How a plan is driven: in place where nothing waits, with as many tasks as there are waits, under one cap."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock import ExecutionContext, FunctionNode, Graph, RunSettings
from penstock.runtime.scheduling import scheduler
from penstock.testing import sim_run


def fan(count: int, fn: Any, max_parallel: int) -> Graph:
    graph = Graph("fan", max_parallel=max_parallel)
    for number in range(count):
        graph.add_step(FunctionNode(f"n{number}", fn), f"s{number}")
    return graph


class Counting:
    """A task factory that counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        self.made += 1
        return asyncio.Task(coro, loop=loop, **options)


async def tasks_made(graph: Graph) -> int:
    counting = Counting()
    asyncio.get_running_loop().set_task_factory(counting)
    await graph.execute(ExecutionContext())
    return counting.made


async def test_a_chain_needs_no_task() -> None:
    graph = Graph("chain", max_parallel=8)
    for number in range(50):
        graph.add_step(
            FunctionNode("n", lambda ctx: asyncio.sleep(0)), f"s{number}", depends_on=[f"s{number - 1}"][:number]
        )
    assert await tasks_made(graph) == 0


async def test_steps_that_never_wait_share_one_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TURN_NS", 10**12)

    async def at_once(ctx: ExecutionContext) -> int:
        return 1

    assert await tasks_made(fan(500, at_once, 500)) <= 2


async def test_steps_that_wait_get_a_task_each_and_hardly_more() -> None:
    made = await tasks_made(fan(500, lambda ctx: asyncio.sleep(0.1), 500))
    assert 499 <= made <= 1_000


async def test_one_at_a_time_needs_no_task_either() -> None:
    assert await tasks_made(fan(20, lambda ctx: asyncio.sleep(0), 1)) == 0


async def test_ready_steps_run_in_the_order_they_became_ready() -> None:
    order: list[str] = []

    def note(ctx: ExecutionContext) -> None:
        order.append(ctx.input)

    graph = Graph("g")
    for name in "dbca":
        graph.add_step(FunctionNode(name, note), name, input=name)
    graph.add_step(FunctionNode("last", note), "last", input="last", depends_on=["d"])
    await graph.execute()
    assert order == ["d", "b", "c", "a", "last"]


async def test_the_loop_gets_its_turn_in_a_long_graph_that_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "TURN_NS", 0)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await fan(100, lambda ctx: 1, 1).execute()
    beside.cancel()
    assert turns >= 90


async def test_the_loop_gets_its_turn_where_nothing_is_recorded_too() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    context = ExecutionContext(settings=RunSettings(record_steps=False))
    assert len(await fan(5_000, lambda ctx: 1, 1).execute(context)) == 5_000
    beside.cancel()
    assert turns >= 4
    assert context.graph.calls()[1] == [context.graph.root]


async def test_a_sync_step_that_keeps_the_loop_from_turning_is_named_in_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "BLOCKED_NS", 1_000_000)
    monkeypatch.setattr(scheduler, "TURN_NS", 0)

    def blocks(ctx: ExecutionContext) -> None:
        ends = time.monotonic_ns() + 3_000_000
        while time.monotonic_ns() < ends:
            pass

    with pytest.warns(RuntimeWarning, match=r"step 'busy' of graph 'g' kept the event loop .*\(blocking=True\)"):
        await Graph("g").add_step(FunctionNode("busy", blocks), "busy").execute()


@pytest.mark.filterwarnings("error::RuntimeWarning")
async def test_a_warning_that_is_an_error_here_stops_the_graph_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "BLOCKED_NS", 1)
    monkeypatch.setattr(scheduler, "TURN_NS", 0)
    graph = fan(3, lambda ctx: asyncio.sleep(60), 4).add_step(FunctionNode("busy", lambda ctx: 1), "busy")
    with pytest.raises(RuntimeWarning, match="busy"):
        await graph.execute()


async def test_a_graph_whose_coroutine_is_closed_ends_its_steps() -> None:
    context = ExecutionContext()
    running = fan(3, lambda ctx: asyncio.sleep(60), 3).execute(context)
    running.send(None)
    running.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert context.balance.steps_open == 0
    assert [call.status for call in context.graph.calls()[1][1:]] == ["halt"]


async def test_a_step_that_waits_for_long_is_not_taken_for_one_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "BLOCKED_NS", 1_000_000)
    monkeypatch.setattr(scheduler, "TURN_NS", 0)
    await Graph("g").add_step(FunctionNode("waits", lambda ctx: asyncio.sleep(0.005)), "waits").execute()


def busy_times(max_parallel: int, graph: Graph) -> tuple[int, float]:
    """How many sleepers there were at once, at most, and when the last of them was done, in virtual seconds."""
    now, most = 0, 0

    async def sleeper(ctx: ExecutionContext) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1

    def fill(one: Graph) -> None:
        for step in one._steps.values():
            if isinstance(step.node, Graph):
                fill(step.node)
            else:
                step.node = FunctionNode("sleeper", sleeper)

    async def main() -> float:
        fill(graph)
        loop = asyncio.get_running_loop()
        before = loop.time()
        await graph.execute(ExecutionContext())
        return loop.time() - before

    took = sim_run(main, seed=1)
    return most, round(took, 6)


def _named(name: str, count: int, max_parallel: int) -> Graph:
    graph = Graph(name, max_parallel=max_parallel)
    for number in range(count):
        graph.add_step(FunctionNode("n", lambda ctx: None), f"s{number}")
    return graph


@pytest.mark.requirement("P-P1")
@pytest.mark.parametrize(
    ("cap", "inner_cap", "most", "took"),
    [(1, 10, 1, 12.0), (2, 10, 2, 6.0), (4, 10, 4, 3.0), (12, 10, 12, 1.0), (12, 1, 3, 4.0), (12, 2, 6, 2.0)],
)
def test_one_cap_holds_over_graphs_inside_graphs_and_no_slot_is_lost(
    cap: int, inner_cap: int, most: int, took: float
) -> None:
    outer = Graph("outer", max_parallel=cap)
    for number in range(3):
        outer.add_step(_named(f"inner{number}", 4, inner_cap), f"g{number}")
    assert busy_times(cap, outer) == (most, took)


@pytest.mark.requirement("P-P1")
def test_slots_are_released_for_later_nodes() -> None:
    outer = Graph("outer", max_parallel=4)
    outer.add_step(_named("first", 4, 4), "first")
    outer.add_step(_named("second", 4, 4), "second", depends_on=["first"])
    outer.add_step(_named("third", 8, 4), "third", depends_on=["second"])
    assert busy_times(4, outer) == (4, 4.0)


@pytest.mark.requirement("P-P1")
def test_a_graph_that_waits_for_a_slot_gets_one_when_another_graph_has_no_use_for_it() -> None:
    outer = Graph("outer", max_parallel=3)
    outer.add_step(_named("long", 6, 3), "long")
    outer.add_step(_named("short", 1, 1), "short")
    most, took = busy_times(3, outer)
    assert most == 3
    assert took == 3.0
