"""Penstock: with every limit set that there is, or with nothing on but the order of the steps."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run
from benchmarks._rounds import expect
from penstock import ExecutionConfig, ExecutionContext, ExecutionTrace, FunctionNode, Graph, RunSettings

AT_ONCE = 1_000
FAR_OFF = ExecutionConfig(max_cost_usd=1e6, max_steps=10**9, max_retries_total=10**6, timeout_ms=3_600_000)
"""A ceiling in every dimension, and none that is reached."""
WITHOUT_DEADLINE = ExecutionConfig(max_cost_usd=1e6, max_steps=10**9, max_retries_total=10**6)
NOTHING_ON = RunSettings(record_steps=False)


def chain(shape: Chain, **settings: Any) -> Run:
    graph = steps_of(shape, sync=settings.get("sync", False))
    plan(graph)
    last = f"s{shape.size - 1}"

    async def run() -> int:
        result: int = (await graph.execute(_context(**settings)))[last]
        return result

    return run


def traced_chain(shape: Chain, *, read: bool = False, **settings: Any) -> tuple[Run, Recorded]:
    """With `read`, the trace is read after each run, which is when its steps are made."""
    graph = steps_of(shape, sync=settings.get("sync", False))
    plan(graph)
    last = f"s{shape.size - 1}"
    traces: list[ExecutionTrace] = []

    async def run() -> int:
        trace = ExecutionTrace(graph_id="chain", start_time=datetime.now(UTC))
        traces[:] = [trace]
        result: int = (await graph.execute(_context(trace, **settings)))[last]
        if read:
            expect("recorded steps", len(trace.steps), shape.size)
        return result

    return run, lambda: sum(len(trace.steps) for trace in traces)


def fan(shape: Fan, **settings: Any) -> Run:
    graph = Graph("fan", max_parallel=AT_ONCE)
    graph.add_step(FunctionNode("first", _first), "first", input=0)
    names = [f"w{place}" for place in range(shape.size)]
    for place, name in enumerate(names):
        graph.add_step(FunctionNode(name, _worker(place, shape.pause)), name, depends_on=["first"])
    graph.add_step(FunctionNode("total", _total(names)), "total", depends_on=names)
    return _runs(graph, settings)


def layers(shape: Layers, **settings: Any) -> Run:
    graph = Graph("layers", max_parallel=AT_ONCE)
    for name, needs in shape.depends_on.items():
        graph.add_step(FunctionNode(name, _layered(name, shape)), name, depends_on=needs)
    graph.add_step(FunctionNode("total", _total(shape.last)), "total", depends_on=shape.last)
    return _runs(graph, settings)


def steps_of(shape: Chain, sync: bool = False) -> Graph:
    """The chain, not yet looked at."""
    graph = Graph("chain", max_parallel=AT_ONCE)
    graph.add_step(FunctionNode("n0", _step(shape.pause, sync)), "s0", input=0)
    for number in range(1, shape.size):
        step = FunctionNode(f"n{number}", _step(shape.pause, sync))
        graph.add_step(step, f"s{number}", depends_on=[f"s{number - 1}"])
    return graph


def plan(graph: Graph) -> None:
    """All that is done once before the first run."""
    expect("problems", graph.validate(), [])
    graph.compiled()


def _runs(graph: Graph, settings: dict[str, Any]) -> Run:
    plan(graph)

    async def run() -> int:
        result: int = (await graph.execute(_context(**settings)))["total"]
        return result

    return run


def _context(
    trace: ExecutionTrace | None = None, *, limits: bool, sync: bool = False, recorded: bool = True
) -> ExecutionContext:
    """A deadline would send sync steps to worker threads: it is not set for them."""
    if not limits:
        return ExecutionContext(trace=trace, settings=None if recorded else NOTHING_ON)
    return ExecutionContext(WITHOUT_DEADLINE if sync else FAR_OFF, trace=trace)


def _step(pause: Pause | None, sync: bool) -> Any:
    if sync:
        return lambda ctx: ctx.input + 1
    if pause is None:

        async def step(ctx: ExecutionContext) -> int:
            result: int = ctx.input + 1
            return result

    else:

        async def step(ctx: ExecutionContext) -> int:
            await pause()
            result: int = ctx.input + 1
            return result

    return step


async def _first(ctx: ExecutionContext) -> int:
    result: int = ctx.input
    return result


def _worker(place: int, pause: Pause | None) -> Any:
    async def work(ctx: ExecutionContext) -> int:
        if pause:
            await pause()
        return place + 1

    return work


def _layered(name: str, shape: Layers) -> Any:
    needs, sleep_s = shape.depends_on[name], shape.sleep_s[name]

    async def work(ctx: ExecutionContext) -> int:
        await asyncio.sleep(sleep_s)
        return shape.value(name, [ctx.upstream[need] for need in needs])

    return work


def _total(names: list[str]) -> Any:
    async def total(ctx: ExecutionContext) -> int:
        upstream = ctx.upstream
        return sum([upstream[name] for name in names])

    return total
