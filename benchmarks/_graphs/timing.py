"""What is measured of a contestant; each function here is called in a process of its own.

A wrong result fails the contestant. Short runs are repeated until one figure is about 10 ms of work, since the clock of
the CPU time and what goes on beside it are coarse.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from benchmarks._graphs.shapes import Chain, Recorded, Run, shape_of
from benchmarks._rounds import expect

ONE_FIGURE_S = 0.01
Figures = dict[str, Any]


def time_cpu(contestant: str, shape: str, size: int, enough_s: float, **settings: Any) -> Figures:
    """CPU µs per step, all threads of the process together."""
    graph = shape_of(shape, size)
    run = _of(contestant, shape)(graph, **settings)
    seconds = asyncio.run(_timed(run, graph.expected, time.process_time, enough_s))
    return {"cpu_us": [each / graph.steps * 1e6 for each in seconds]}


def time_traced(contestant: str, size: int, enough_s: float, **settings: Any) -> Figures:
    """CPU µs per step of a chain whose every step is recorded."""
    traced: tuple[Run, Recorded] = _of(contestant, "traced_chain")(Chain(size), **settings)
    run, recorded = traced
    seconds = asyncio.run(_timed(run, size, time.process_time, enough_s))
    expect("recorded steps", recorded(), size)
    return {"cpu_us": [each / size * 1e6 for each in seconds]}


def time_wall(
    contestant: str, shape: str, size: int, enough_s: float, sleep_s: float = 0.0, **settings: Any
) -> Figures:
    """Wall ms of one run."""
    graph = shape_of(shape, size, sleep_s)
    run = _of(contestant, shape)(graph, **settings)
    seconds = asyncio.run(_timed(run, graph.expected, time.perf_counter, enough_s))
    return {"wall_ms": [each * 1e3 for each in seconds]}


def time_build(contestant: str, size: int, enough_s: float, **settings: Any) -> Figures:
    """CPU µs per node until a chain of that many could be run."""
    build = _of(contestant, "chain")
    build(Chain(100), **settings)
    figures: list[float] = []
    for _ in _until(enough_s):
        gc.collect()
        started = time.process_time()
        run: Run = build(Chain(size), **settings)
        figures.append((time.process_time() - started) / size * 1e6)
        if len(figures) == 1 and size <= 1_000:
            expect("result", asyncio.run(_awaited(run())), size)
    return {"cpu_us": figures}


def time_stages(contestant: str, size: int, enough_s: float) -> Figures:
    """CPU µs per node of Penstock's own stages: adding the steps of a chain, and all else before its first run."""
    ours = importlib.import_module(f"benchmarks._graphs.{contestant}")
    ours.plan(ours.steps_of(Chain(100)))
    figures: Figures = {"build_us": [], "plan_us": []}
    for _ in _until(enough_s):
        gc.collect()
        started = time.process_time()
        graph = ours.steps_of(Chain(size))
        built = time.process_time()
        ours.plan(graph)
        figures["build_us"].append((built - started) / size * 1e6)
        figures["plan_us"].append((time.process_time() - built) / size * 1e6)
    return figures


def compare_tracing(contestant: str, size: int, times: int, pairs: int, **settings: Any) -> Figures:
    """CPU µs per step, untraced and traced in turn in one process, each figure the average of so many runs."""
    untraced: Run = _of(contestant, "chain")(Chain(size), **settings)
    traced, recorded = _of(contestant, "traced_chain")(Chain(size), **settings)
    kinds: list[tuple[str, Run]] = [("untraced_us", untraced), ("traced_us", traced)]
    figures: Figures = {name: [] for name, _ in kinds}

    async def compare() -> None:
        for _, run in kinds:
            expect("result", await run(), size)
        for _ in range(pairs):
            kinds.reverse()
            for name, run in kinds:
                gc.collect()
                started = time.process_time()
                for _ in range(times):
                    await run()
                figures[name].append((time.process_time() - started) / times / size * 1e6)
        expect("recorded steps", recorded(), size)

    asyncio.run(compare())
    return figures


def time_many(contestant: str, size: int, runs: int, sleep_s: float, **settings: Any) -> Figures:
    """Wall s and CPU s of that many runs at once of a chain whose every step sleeps."""
    run: Run = _of(contestant, "chain")(shape_of("chain", size, sleep_s), **settings)

    async def all_at_once() -> Figures:
        await run()
        gc.collect()
        started, cpu = time.perf_counter(), time.process_time()
        results = await asyncio.gather(*[run() for _ in range(runs)])
        taken = {"wall_s": [time.perf_counter() - started], "cpu_s": [time.process_time() - cpu]}
        expect("results", (min(results), max(results), len(results)), (size, size, runs))
        return taken

    return asyncio.run(all_at_once())


def weigh_many(contestant: str, size: int, runs: int, **settings: Any) -> Figures:
    """kB for each of that many runs while all of them wait in their first step."""

    async def weighed() -> float:
        gate = Gate()
        run: Run = _of(contestant, "chain")(Chain(size, gate.wait), **settings)
        gate.opened.set()
        await run()  # what is made once is made now
        gate.close()
        gc.collect()
        tracemalloc.start()
        tasks = [asyncio.ensure_future(run()) for _ in range(runs)]
        await gate.full(runs)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gate.opened.set()
        expect("results", sum(await asyncio.gather(*tasks)), size * runs)
        return held / runs / 1_000

    return {"kb": [asyncio.run(weighed())]}


class Gate:
    """Where the steps of many runs wait until they have been weighed."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self._arrivals = asyncio.Semaphore(0)

    async def wait(self) -> None:
        self._arrivals.release()
        await self.opened.wait()

    def close(self) -> None:
        self.opened.clear()
        self._arrivals = asyncio.Semaphore(0)

    async def full(self, runs: int) -> None:
        """Until that many wait."""
        for _ in range(runs):
            await self._arrivals.acquire()


async def _timed(run: Run, expected: int, clock: Callable[[], float], enough_s: float) -> list[float]:
    """Seconds of one run, as often as there is time for; the first run warms up, the second says how short they are."""
    expect("result", await run(), expected)
    started = time.perf_counter()
    expect("result", await run(), expected)
    taken = time.perf_counter() - started
    times = max(1, min(200, int(ONE_FIGURE_S / taken)))
    figures = []
    for _ in _until(enough_s - taken):
        gc.collect()
        began = clock()
        for _ in range(times):
            result = await run()
        figures.append((clock() - began) / times)
        expect("result", result, expected)
    return figures


def _until(enough_s: float) -> Iterator[None]:
    """At least once, and until that much time has passed."""
    end = time.perf_counter() + enough_s
    yield
    while time.perf_counter() < end:
        yield


async def _awaited(run: Awaitable[int]) -> int:
    return await run


def _of(contestant: str, function: str) -> Any:
    return getattr(importlib.import_module(f"benchmarks._graphs.{contestant}"), function)
