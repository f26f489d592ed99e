"""How soon is a caller free again?

A deadline over work that does not listen, and a cancel of many calls at once beside what a bare TaskGroup takes for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable

from benchmarks._report import Cell, Table, main
from penstock import CancelledError, ExecutionConfig, ExecutionContext, FunctionNode, Graph, contain

IN_FLIGHT = 1_000


def deadline_over_a_sleeping_function() -> float:
    """A sync function that sleeps for a second, under a run timeout of 100 ms: ms until its caller has the halt."""
    run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=100))
    started = time.perf_counter()
    outcome = run.call_tool(lambda: time.sleep(1))
    taken = time.perf_counter() - started
    assert outcome.call.stop is not None
    assert outcome.call.stop.reason == "timeout"
    return taken * 1_000


def abort_of_many_calls() -> float:
    """1,000 async calls under way: ms from the abort until every caller has its decision."""

    async def measure() -> float:
        async with contain() as run:
            calls = [asyncio.create_task(run.awrap_llm_call(lambda: asyncio.sleep(60))) for _ in range(IN_FLIGHT)]
            await asyncio.sleep(0.1)
            started = time.perf_counter()
            run.abort("enough")
            decisions = await asyncio.gather(*calls)
            taken = time.perf_counter() - started
            assert decisions == ["HALT"] * IN_FLIGHT
            assert run.balance.steps_open == 0
            return taken * 1_000

    return asyncio.run(measure())


def abort_of_a_graph() -> float:
    """A graph with 1,000 steps under way: ms from the abort until `execute` has raised and every step has ended."""

    async def measure() -> float:
        graph = Graph("wide", max_parallel=IN_FLIGHT)
        for number in range(IN_FLIGHT):
            graph.add_step(FunctionNode("sleep", lambda ctx: asyncio.sleep(60)), f"s{number}")
        run = ExecutionContext(ExecutionConfig(1.0, 10_000, 10))
        executing = asyncio.create_task(_until_cancelled(graph, run))
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        run.abort("enough")
        await executing
        taken = time.perf_counter() - started
        assert run.balance.steps_open == 0
        return taken * 1_000

    return asyncio.run(measure())


async def _until_cancelled(graph: Graph, run: ExecutionContext) -> None:
    with contextlib.suppress(CancelledError):
        await graph.execute(run)


def cancel_of_a_bare_task_group() -> float:
    """1,000 sleeping tasks of a TaskGroup: ms from the cancel until the group is left."""

    async def measure() -> float:
        async def group() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(IN_FLIGHT):
                    tasks.create_task(asyncio.sleep(60))

        outer = asyncio.create_task(group())
        await asyncio.sleep(0.1)
        started = time.perf_counter()
        outer.cancel()
        await asyncio.wait([outer])
        return (time.perf_counter() - started) * 1_000

    return asyncio.run(measure())


def ask(quick: bool) -> list[Table]:
    """Wall ms: the median and the worst."""
    rounds = 3 if quick else 15
    contestants: list[tuple[str, Callable[[], float]]] = [
        ("sync function that sleeps 1 s, 100 ms timeout: caller free", deadline_over_a_sleeping_function),
        ("abort with 1,000 async calls under way: all callers answered", abort_of_many_calls),
        ("abort of a graph with 1,000 steps under way: all ended", abort_of_a_graph),
        ("bare TaskGroup of 1,000 tasks, cancelled: left", cancel_of_a_bare_task_group),
    ]
    results: dict[str, list[float]] = {label: [] for label, _ in contestants}
    for _ in range(rounds):
        for label, measure in contestants:
            results[label].append(measure())
    bare = statistics.median(results[contestants[-1][0]])
    rows: list[tuple[Cell, ...]] = []
    for label, ms in results.items():
        median = statistics.median(ms)
        rows.append((label, median, max(ms), median / bare if "1,000" in label else None))
    return [
        Table(
            question="How soon is a caller free again?",
            measured=f"Wall ms in {rounds} rounds, one after the other.",
            columns=("", "median ms", "worst ms", "× bare TaskGroup"),
            rows=rows,
            raw=dict(results),
        )
    ]


if __name__ == "__main__":
    main(ask)
