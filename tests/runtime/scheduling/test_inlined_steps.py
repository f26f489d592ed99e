"""A step without options runs in the scheduler's own loop; one with options runs through `attempt_async`.

Both must leave the same behind: results, error, records, events and accounts. The default policy changes nothing, but
makes a step one with options.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from penstock import (
    CancelledError,
    ChainMetadata,
    CircuitBreaker,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    Reported,
    RunSettings,
    Usage,
)
from penstock.testing import SimLoop, sim_run

Step = Callable[[ExecutionContext], Any]
INLINE = RunSettings(sync_calls="inline")
"""With a time limit, sync steps would run on threads, in real time."""
PER_RUN = {"run_id", "chain_id", "at_ms", "timestamp", "request_id"}


class Ready(Awaitable[int]):
    """An awaitable that is no coroutine."""

    def __await__(self) -> Iterator[Any]:
        yield from asyncio.sleep(0).__await__()
        return 7


async def value(ctx: ExecutionContext) -> int:
    await asyncio.sleep(1)
    return 7


async def fails(ctx: ExecutionContext) -> None:
    await asyncio.sleep(1)
    raise ValueError("no")


async def endless(ctx: ExecutionContext) -> None:
    await asyncio.sleep(10**6)


async def calls(ctx: ExecutionContext) -> Any:
    return await ctx.atool(asyncio.sleep, 1, name="inner", cost_hint_usd=0.25)


async def passes_on(ctx: ExecutionContext) -> Any:
    return await ctx.allm(lambda: Reported.of("text", cost_usd=0.5, input_tokens=3, output_tokens=4), name="inner")


async def cancels_itself(ctx: ExecutionContext) -> int:
    ctx.abort("enough")
    return 7


async def swallows_a_cancel(ctx: ExecutionContext) -> int:
    ctx.abort("enough")
    try:
        await asyncio.sleep(1)
    except asyncio.CancelledError:
        return 7
    return 8


async def streams(ctx: ExecutionContext) -> AsyncIterator[int]:
    for number in range(3):
        yield number
        await asyncio.sleep(1)


def raises(error: BaseException) -> Step:
    def fail(ctx: ExecutionContext) -> None:
        raise error

    return fail


def reports(ctx: ExecutionContext) -> int:
    ctx.report(cost_usd=0.75, input_tokens=5)
    return 7


CASES: dict[str, Step] = {
    "a value": lambda ctx: 7,
    "nothing": lambda ctx: None,
    "a coroutine": value,
    "an awaitable": lambda ctx: Ready(),
    "a value with its cost": lambda ctx: Reported(7, Usage(10, 5, cost_nanos=1_000_000)),
    "a value with usage of no known price": lambda ctx: Reported(7, Usage(10, 5, model="unknown-model")),
    "usage reported meanwhile": reports,
    "a call inside": calls,
    "the value of a call inside": passes_on,
    "an error": raises(ValueError("no")),
    "an error after a wait": fails,
    "a cancel of another run": raises(CancelledError("elsewhere")),
    "an interrupt": raises(KeyboardInterrupt()),
    "an exit": raises(SystemExit(2)),
    "a group": raises(BaseExceptionGroup("some", [ValueError("no"), CancelledError("elsewhere")])),
    "an abort from inside": cancels_itself,
    "an abort that is swallowed": swallows_a_cancel,
    "a deadline": endless,
    "a stream": streams,
}


def what_is_left(step: Step, policy: ErrorPolicy | None, settings: RunSettings, **limits: Any) -> dict[str, Any]:
    graph = Graph("g", max_parallel=2)
    for name in ("first", "beside"):
        graph.add_step(FunctionNode(name, step), name, error_policy=policy)
    graph.add_step(FunctionNode("last", lambda ctx: "end"), "last", depends_on=["first"], error_policy=policy)
    left: dict[str, Any] = {}

    async def main() -> None:
        breaker = CircuitBreaker() if limits.pop("guarded", False) else None
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        ceilings = {"max_cost_usd": None, "max_steps": None, "max_retries_total": None, **limits}
        config = ExecutionConfig(**ceilings, timeout_ms=60_000)
        run = ExecutionContext(
            config, metadata=ChainMetadata("r", "c"), clock=loop.clock, settings=settings, breaker=breaker
        )
        try:
            left["results"] = dict(await graph.execute(run))
        except BaseException as error:
            left["error"] = type(error), str(error), getattr(error, "partial", None)
            left["notes"] = getattr(error, "__notes__", [])
            cause = error.__cause__
            left["cause"] = type(cause), str(cause)
        task = asyncio.current_task()
        assert task is not None
        left["cancelling"] = task.cancelling()
        left["balance"] = run.balance
        run.end()
        left["events"] = [
            (type(event).__name__, {key: each for key, each in asdict(event).items() if key not in PER_RUN})
            for event in run.history()
        ]
        left["explanation"] = run.explain()

    sim_run(main, seed=1)
    return left


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("settings", "limits"),
    [
        (INLINE, {}),
        (RunSettings(strict=True, sync_calls="inline"), {}),
        (INLINE, {"max_cost_usd": 0.3}),
        (INLINE, {"max_steps": 1}),
        (INLINE, {"max_retries_total": 0, "guarded": True}),
    ],
    ids=["plain", "strict", "little money", "one step", "no retries, a breaker"],
)
def test_an_inlined_step_leaves_the_same_behind_as_an_attempt(
    case: str, settings: RunSettings, limits: dict[str, Any]
) -> None:
    inlined = what_is_left(CASES[case], None, settings, **limits)
    attempted = what_is_left(CASES[case], ErrorPolicy(), settings, **limits)
    assert inlined == attempted


async def test_a_cancel_from_outside_leaves_the_same_behind() -> None:
    seen = []
    for policy in (None, ErrorPolicy()):
        graph = Graph("g")
        graph.add_step(FunctionNode("n", endless), "s", error_policy=policy)
        run = ExecutionContext()
        task = asyncio.create_task(graph.execute(run))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.append([(call.name, call.status, call.stop_reason) for call in run.graph.calls()[1] if call.name == "s"])
    assert seen[0] == seen[1]
