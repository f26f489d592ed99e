"""INV 5 for graphs: after ten thousand graphs of every kind, nothing is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import pytest

from penstock import (
    Budget,
    CancelledError,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    Halted,
)
from tests.reliability.leaks import leave_nothing

pytestmark = [pytest.mark.reliability]


class Boom(Exception):
    pass


async def quick(context: ExecutionContext) -> int:
    await asyncio.sleep(0)
    return 1


async def slow(context: ExecutionContext) -> None:
    await asyncio.sleep(10)


async def boom(context: ExecutionContext) -> None:
    raise Boom


async def pieces(context: ExecutionContext) -> AsyncIterator[int]:
    for piece in range(3):
        yield piece
    await asyncio.sleep(10)


def on_a_thread(context: ExecutionContext) -> int:
    return threading.get_ident()


TERMINAL = FunctionNode("terminal", quick, persistent=True)


def wide(last: Callable[[ExecutionContext], object]) -> Graph:
    graph = Graph("wide", max_parallel=4, queue_persistent=True)
    graph.add_step(FunctionNode("first", quick), "first")
    for number in range(3):
        graph.add_step(TERMINAL if number else FunctionNode("quick", quick), f"s{number}", depends_on=["first"])
    return graph.add_step(FunctionNode("last", last), "last", depends_on=["s0", "s1", "s2"])


async def succeeds(run: ExecutionContext) -> None:
    assert (await wide(quick).execute(run))["last"] == 1


async def fails(run: ExecutionContext) -> None:
    graph = Graph("g", max_parallel=3).add_step(FunctionNode("slow", slow), "slow")
    with pytest.raises(Boom):
        await graph.add_step(FunctionNode("boom", boom), "boom").execute(run)


async def is_aborted(run: ExecutionContext) -> None:
    asyncio.get_running_loop().call_soon(run.abort)
    with pytest.raises(CancelledError):
        await wide(slow).execute(run)


async def is_cancelled(run: ExecutionContext) -> None:
    task = asyncio.create_task(wide(slow).execute(run))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def recovers(run: ExecutionContext) -> None:
    policy = ErrorPolicy("fallback", retry_count=1, retry_delay_ms=0, fallback_node=FunctionNode("other", quick))
    graph = Graph("g").add_step(FunctionNode("boom", boom), "s", error_policy=policy)
    outer = Graph("outer").add_step(graph, "inner", sub_budget=Budget(max_steps=9))
    assert await outer.execute(run.with_input(1)) == {"inner": {"s": 1}}


async def is_halted(run: ExecutionContext) -> None:
    graph = Graph("g").add_step(wide(quick), "inner", sub_budget=Budget(max_steps=2))
    with pytest.raises(Halted):
        await graph.execute(run)


async def is_left_in_the_middle(run: ExecutionContext) -> None:
    async with aclosing(wide(pieces).execute_stream(run)) as events:
        async for event in events:
            if event.event_type == "progress":
                break


async def uses_a_thread(run: ExecutionContext) -> None:
    graph = Graph("g").add_step(FunctionNode("thread", on_a_thread, blocking=True), "s")
    assert (await graph.execute(run))["s"] != threading.get_ident()


KINDS: list[Callable[[ExecutionContext], Awaitable[None]]] = [
    succeeds,
    fails,
    is_aborted,
    is_cancelled,
    recovers,
    is_halted,
    is_left_in_the_middle,
    uses_a_thread,
]


async def mixed_run(number: int) -> None:
    trace = ExecutionTrace("mixed") if number % 3 == 0 else None
    async with ExecutionContext(ExecutionConfig(1, 50, 10, timeout_ms=30_000), trace=trace) as run:
        await KINDS[number % len(KINDS)](run)
        assert run.balance.held_nanos == run.balance.steps_open == 0


@pytest.mark.timeout(300)
async def test_thousands_of_mixed_graphs_leave_no_task_no_thread_and_little_memory() -> None:
    await leave_nothing(mixed_run)
