"""Check that thousands of repetitions leak nothing."""

from __future__ import annotations

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Awaitable, Callable

from tests.soak import scaled


async def leave_nothing(run: Callable[[int], Awaitable[None]]) -> None:
    """Run it thousands of times: no task, no thread, and less than half a megabyte for a thousand."""
    for number in range(500):
        await run(number)
    gc.collect()
    tracemalloc.start()
    threads = threading.active_count()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(2_000):
        await run(number)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    for number in range(scaled(500, soak=7_500)):
        await run(number)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threading.active_count() <= threads + 2
    assert (after - before) / 2 < 500_000
