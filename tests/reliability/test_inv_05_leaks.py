"""INV 5: after ten thousand runs of every kind, nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import tracemalloc
from collections import deque

import pytest

from penstock import Budget, ExecutionConfig, ExecutionContext, Halted, contain
from tests.reliability.leaks import leave_nothing

pytestmark = [pytest.mark.reliability]


LEFT_BEHIND: deque[asyncio.Future[object]] = deque(maxlen=10)
"""Calls that were under way when their run ended; asyncio needs a reference to them."""


async def mixed_run(number: int) -> None:
    kind = number % 7
    async with contain(max_cost_usd=1, max_steps=50, timeout_s=0.001 if kind == 1 else 30) as run:
        if kind == 1:
            with pytest.raises(Halted):
                await run.allm(lambda: asyncio.sleep(10))
        elif kind == 2:
            task = asyncio.create_task(run.acall_llm(lambda: asyncio.sleep(10)))
            await asyncio.sleep(0)
            run.abort("enough")
            await task
        elif kind == 3:
            task = asyncio.create_task(run.acall_llm(lambda: asyncio.sleep(10)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        elif kind == 4:
            with run.spawn_child("child", budget=Budget(max_steps=1)) as child:
                await child.allm(lambda: asyncio.sleep(0))
                with pytest.raises(Halted):
                    await child.allm(lambda: asyncio.sleep(0))
        elif kind == 5:
            LEFT_BEHIND.append(asyncio.ensure_future(run.acall_llm(lambda: asyncio.sleep(10))))
            await asyncio.sleep(0)
        elif kind == 6:
            run.tool(len, "on a worker")
        else:
            await run.allm(lambda: asyncio.sleep(0))


@pytest.mark.timeout(300)
async def test_thousands_of_mixed_runs_leave_no_task_no_thread_and_little_memory() -> None:
    await leave_nothing(mixed_run)


def test_runs_that_are_never_ended_are_garbage_collected() -> None:
    def abandoned() -> None:
        run = ExecutionContext(ExecutionConfig(1, 10, 1, timeout_ms=60_000))
        run.spawn_child("child").wrap_tool_call(lambda: None)

    for _ in range(50):
        abandoned()
    gc.collect()
    tracemalloc.start()
    for _ in range(300):
        abandoned()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 300 * 500


@pytest.mark.requirement("C-4")
def test_abandoned_sync_work_returns_its_thread() -> None:
    release = threading.Event()
    run = ExecutionContext()
    for _ in range(20):
        with pytest.raises(Halted):
            run.tool(release.wait, 30, timeout_s=0.001)
    release.set()
    deadline = time.monotonic() + 30
    while run.balance.unresolved_nanos or run.balance.held_nanos:
        assert time.monotonic() < deadline
    run.end()
