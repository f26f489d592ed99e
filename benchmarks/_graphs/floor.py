"""The floor: plain awaits, and asyncio's own ways to do things at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run

Step = Callable[[int], Awaitable[int]]


@dataclass(slots=True)
class Record:
    step: int
    given: int
    result: int
    started_ns: int
    ended_ns: int


def chain(shape: Chain) -> Run:
    steps = [_step(shape.pause) for _ in range(shape.size)]

    async def run() -> int:
        value = 0
        for step in steps:
            value = await step(value)
        return value

    return run


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    steps = [_step(shape.pause) for _ in range(shape.size)]
    records: list[Record] = []

    async def run() -> int:
        records.clear()
        value = 0
        for number, step in enumerate(steps):
            started_ns = time.perf_counter_ns()
            result = await step(value)
            records.append(Record(number, value, result, started_ns, time.perf_counter_ns()))
            value = result
        return value

    return run, lambda: len(records)


def fan(shape: Fan, *, group: bool = False) -> Run:
    steps = [_step(shape.pause) for _ in range(shape.size)]

    async def gathered() -> int:
        return sum(await asyncio.gather(*[asyncio.ensure_future(step(place)) for place, step in enumerate(steps)]))

    async def grouped() -> int:
        async with asyncio.TaskGroup() as tasks:
            under_way = [tasks.create_task(_awaited(step(place))) for place, step in enumerate(steps)]
        return sum(task.result() for task in under_way)

    return grouped if group else gathered


def layers(shape: Layers) -> Run:
    async def step(name: str, needs: list[asyncio.Task[int]]) -> int:
        needed = [await need for need in needs]
        await asyncio.sleep(shape.sleep_s[name])
        return shape.value(name, needed)

    async def run() -> int:
        tasks: dict[str, asyncio.Task[int]] = {}
        for name, needs in shape.depends_on.items():
            tasks[name] = asyncio.create_task(step(name, [tasks[need] for need in needs]))
        return sum([await tasks[name] for name in shape.last])

    return run


async def _awaited(step: Awaitable[int]) -> int:
    return await step


def _step(pause: Pause | None) -> Step:
    if pause is None:

        async def step(value: int) -> int:
            return value + 1

    else:

        async def step(value: int) -> int:
            await pause()
            return value + 1

    return step
