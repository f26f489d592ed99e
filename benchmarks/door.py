"""What does one contained call cost?

Each contestant is a generator of two halves: it prepares, is timed from its first `yield` to its second, and then
checks what it did. The function that is called counts its calls, so that one that was skipped or made twice shows.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from benchmarks._peers import load
from benchmarks._report import Cell, Table, main
from benchmarks._rounds import Contestant, expect, least_and_median, measure, play, versions

if TYPE_CHECKING:
    from penstock import ExecutionContext, ToolCallContext

CALLS = 10_000
LIMITS: dict[str, Any] = {
    "max_cost_usd": 1e6,
    "max_steps": 10**9,
    "max_tokens": 10**12,
    "max_api_calls": 10**9,
    "max_retries": 10**6,
}
"""A ceiling in every dimension, and none that is reached."""
FAR_OFF_S = 3_600.0

_numbers = itertools.count(1)


def work() -> int:
    """The sync function that is called: the number of this call."""
    return next(_numbers)


def work_on(value: int) -> int:
    """The sync function with an argument that is called."""
    next(_numbers)
    return value


async def awork() -> int:
    """The async function that is called."""
    return next(_numbers)


# Nothing around the call.


def bare_call(calls: int) -> Iterator[None]:
    before = last = work()
    yield
    for _ in range(calls):
        last = work()
    yield
    expect("calls", last - before, calls)


async def bare_await(calls: int) -> AsyncIterator[None]:
    before = last = work()
    yield
    for _ in range(calls):
        last = await awork()
    yield
    expect("calls", last - before, calls)


class Kept:
    """As large as what Penstock keeps of a call."""

    __slots__ = tuple(f"field_{number}" for number in range(18))


def record_kept(calls: int) -> Iterator[None]:
    """The call, and an object with its number, its two times and its place in a log: what any record of it costs."""
    before = last = work()
    log: list[Kept] = []
    now = time.monotonic_ns
    yield
    for number in range(calls):
        kept = Kept()
        kept.field_0, kept.field_1 = number, now()  # type: ignore[attr-defined]
        log.append(kept)
        last = work()
        kept.field_2, kept.field_3 = now(), len(log)  # type: ignore[attr-defined]
        log.append(kept)
    yield
    expect("calls", last - before, calls)
    expect("entries", len(log), 2 * calls)


# Penstock: limits in every dimension, ledger, log and call graph are on.


def penstock_sync(calls: int, **settings: Any) -> Iterator[None]:
    from penstock import Decision, WrapOptions, contain

    options = WrapOptions(operation_name="step")
    with contain(**LIMITS, **settings) as run:
        before, decision = work(), Decision.ALLOW
        yield
        for _ in range(calls):
            decision = run.wrap_llm_call(work, options)
        yield
        expect("decision", decision, Decision.ALLOW)
        _expect_recorded(run, before, calls)


def penstock_sync_value(calls: int) -> Iterator[None]:
    from penstock import contain

    with contain(**LIMITS) as run:
        before, value = work(), -1
        yield
        for number in range(calls):
            value = run.tool(work_on, number, name="step", cost_hint_usd=0.001)
        yield
        expect("value", value, calls - 1)
        expect("spent", run.balance.spent_nanos, calls * 1_000_000)
        _expect_recorded(run, before, calls)


def penstock_sync_usage(calls: int) -> Iterator[None]:
    from penstock import Reported, contain

    answer = Reported.of("text", cost_usd=0.001, input_tokens=10, output_tokens=5)

    def ask() -> Reported[str]:
        next(_numbers)
        return answer

    with contain(**LIMITS) as run:
        before, value = work(), ""
        yield
        for _ in range(calls):
            value = run.llm(ask, name="step")
        yield
        expect("value", value, "text")
        expect("spent", run.balance.spent_nanos, calls * 1_000_000)
        expect("tokens", run.usage.tokens_used, calls * 15)
        _expect_recorded(run, before, calls)


def penstock_sync_guarded(calls: int) -> Iterator[None]:
    from penstock import CircuitBreaker, ShieldPipeline

    hook_calls = itertools.count()

    class Hook:
        def before_llm_call(self, ctx: ToolCallContext) -> None:
            next(hook_calls)

    yield from penstock_sync(calls, pipeline=ShieldPipeline(pre_dispatch=Hook()), breaker=CircuitBreaker())
    expect("calls that the hook saw", next(hook_calls), calls)


def penstock_sync_deadline(calls: int) -> Iterator[None]:
    yield from penstock_sync(calls, timeout_s=FAR_OFF_S)


async def penstock_async(calls: int, **settings: Any) -> AsyncIterator[None]:
    from penstock import Decision, WrapOptions, contain

    options = WrapOptions(operation_name="step")
    async with contain(**LIMITS, **settings) as run:
        before, decision = work(), Decision.ALLOW
        yield
        for _ in range(calls):
            decision = await run.awrap_llm_call(awork, options)
        yield
        expect("decision", decision, Decision.ALLOW)
        _expect_recorded(run, before, calls)


async def penstock_async_deadline(calls: int) -> AsyncIterator[None]:
    async for _ in penstock_async(calls, timeout_s=FAR_OFF_S):
        yield


def _expect_recorded(run: ExecutionContext, before: int, calls: int) -> None:
    """Every call was made once, counted once, and is in the graph."""
    expect("calls", work() - before - 1, calls)
    expect("steps", run.balance.steps, calls)
    expect("log entries of calls", run.graph.seq - 2, 2 * calls + _divergence_events(run))
    totals = run.graph.aggregates
    expect("recorded calls", totals["total_llm_calls"] + totals["total_tool_calls"], calls)


def _divergence_events(run: ExecutionContext) -> int:
    return sum(event.kind == "divergence" for event in run.history(since=run.graph.seq - 10))


# Peers.


def veronica_core(calls: int) -> Iterator[None]:
    containment = load("veronica_core.containment")
    config = containment.ExecutionConfig(max_cost_usd=1e9, max_steps=10**9, max_retries_total=10**6, timeout_ms=0)
    options = containment.WrapOptions(operation_name="step")
    with containment.ExecutionContext(config=config) as run:
        before = work()
        yield
        for _ in range(calls):
            run.wrap_llm_call(fn=work, options=options)
        yield
        expect("calls", work() - before - 1, calls)


def tenacity_sync(calls: int) -> Iterator[None]:
    tenacity = load("tenacity")
    retried = tenacity.retry(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_exponential())(work)
    before = last = work()
    yield
    for _ in range(calls):
        last = retried()
    yield
    expect("calls", last - before, calls)


async def tenacity_async(calls: int) -> AsyncIterator[None]:
    tenacity = load("tenacity")
    retried = tenacity.retry(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_exponential())(awork)
    before = last = work()
    yield
    for _ in range(calls):
        last = await retried()
    yield
    expect("calls", last - before, calls)


def pybreaker_call(calls: int) -> Iterator[None]:
    breaker = load("pybreaker").CircuitBreaker(fail_max=5, reset_timeout=60)
    before = last = work()
    yield
    for _ in range(calls):
        last = breaker.call(work)
    yield
    expect("calls", last - before, calls)


async def asyncio_timeout(calls: int) -> AsyncIterator[None]:
    before = last = work()
    yield
    for _ in range(calls):
        async with asyncio.timeout(FAR_OFF_S):
            last = await awork()
    yield
    expect("calls", last - before, calls)


async def asyncio_wait_for(calls: int) -> AsyncIterator[None]:
    before = last = work()
    yield
    for _ in range(calls):
        last = await asyncio.wait_for(awork(), FAR_OFF_S)
    yield
    expect("calls", last - before, calls)


# Timing.


def time_calls(contestant: str, calls: int, reps: int, **settings: Any) -> dict[str, Any]:
    """CPU µs per call of each rep, all threads of the process together."""
    halves = globals()[contestant]
    if inspect.isasyncgenfunction(halves):
        cpu_us = asyncio.run(_time_async(halves, calls, reps, settings))
    else:
        cpu_us = [_time_sync(halves, count, settings) for count in (_warm_up(calls), *[calls] * reps)][1:]
    return {"cpu_us": cpu_us}


def time_fresh(contestant: Contestant, calls: int, reps: int, timeout_s: float = 300.0) -> None:
    """`time_calls` in a fresh process that has the contestant's peer."""
    measure(
        contestant,
        "benchmarks.door",
        "time_calls",
        timeout_s,
        contestant=contestant.name,
        calls=calls,
        reps=reps,
        **contestant.settings,
    )


def _warm_up(calls: int) -> int:
    return min(calls, 1_000)


def _time_sync(halves: Any, calls: int, settings: dict[str, Any]) -> float:
    timed = halves(calls, **settings)
    next(timed)
    gc.collect()
    started = time.process_time_ns()
    next(timed)
    taken_ns = time.process_time_ns() - started
    expect("an end after the checks", next(timed, "ended"), "ended")
    return taken_ns / 1_000 / calls


async def _time_async(halves: Any, calls: int, reps: int, settings: dict[str, Any]) -> list[float]:
    cpu_us = []
    for count in (_warm_up(calls), *[calls] * reps):
        timed = halves(count, **settings)
        await anext(timed)
        gc.collect()
        started = time.process_time_ns()
        await anext(timed)
        cpu_us.append((time.process_time_ns() - started) / 1_000 / count)
        expect("an end after the checks", await anext(timed, "ended"), "ended")
    return cpu_us[1:]


# The question.


def contestants() -> list[Contestant]:
    """Everybody, in the order of the table."""
    return [
        Contestant("bare function call", "bare_call"),
        Contestant("bare await", "bare_await"),
        Contestant("penstock wrap_llm_call", "penstock_sync"),
        Contestant("penstock tool: value, cost hint, watched for loops", "penstock_sync_value"),
        Contestant("penstock llm: value with usage and cost", "penstock_sync_usage"),
        Contestant("penstock wrap_llm_call, hook and breaker", "penstock_sync_guarded"),
        Contestant("penstock wrap_llm_call, run deadline (worker thread)", "penstock_sync_deadline"),
        Contestant("penstock awrap_llm_call", "penstock_async"),
        Contestant("penstock awrap_llm_call, run deadline", "penstock_async_deadline"),
        Contestant("veronica-core wrap_llm_call", "veronica_core", "veronica-core"),
        Contestant("tenacity @retry, sync", "tenacity_sync", "tenacity"),
        Contestant("tenacity @retry, async", "tenacity_async", "tenacity"),
        Contestant("pybreaker call", "pybreaker_call", "pybreaker"),
        Contestant("asyncio.timeout", "asyncio_timeout"),
        Contestant("asyncio.wait_for", "asyncio_wait_for"),
    ]


def ask(quick: bool) -> list[Table]:
    """The cost of one call, beside the bare call and the peers."""
    calls, rounds, reps = (2_000, 2, 3) if quick else (CALLS, 5, 5)
    everybody = contestants()

    play(everybody, rounds, lambda each: time_fresh(each, calls, reps))
    least = {each.name: min(each.figures("cpu_us")) for each in everybody if each.results}
    table = Table(
        question="What does one contained call cost?",
        measured=f"CPU µs per call of a function that returns a number; {calls:,} calls in one run, {reps} times in "
        f"each of {rounds} fresh processes, in shuffled rounds. The ratios are of the minima.",
        columns=("one call", "min µs", "median µs", "× the bare call", "× veronica-core"),
        rows=[_row(each, least) for each in everybody],
        versions=versions(everybody),
        raw={each.label: each.figures("cpu_us") for each in everybody},
    )
    return [table]


def _row(contestant: Contestant, least: dict[str, float]) -> tuple[Cell, ...]:
    if contestant.trouble:
        return contestant.label, contestant.trouble, None, None, None
    lowest, median = least_and_median(contestant.figures("cpu_us"))
    is_async = inspect.isasyncgenfunction(globals()[contestant.name])
    bare, peer = least.get("bare_await" if is_async else "bare_call"), least.get("veronica_core")
    return contestant.label, lowest, median, bare and lowest / bare, peer and lowest / peer


if __name__ == "__main__":
    main(ask)
