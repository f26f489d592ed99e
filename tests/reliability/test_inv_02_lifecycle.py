"""INV 2: one start, one end, no gaps, children before parents, in every interleaving."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock import (
    Budget,
    CancelledError,
    CircuitBreaker,
    ExecutionConfig,
    ExecutionContext,
    Halted,
    RunEnded,
    RunSettings,
    WrapOptions,
)
from penstock.testing import SimLoop, check_history, explore
from tests.soak import scaled

pytestmark = [pytest.mark.reliability]

SCHEDULES = scaled(1_250, soak=200_000)


class Boom(Exception):
    pass


async def one_schedule(seed: int) -> None:
    """A small run with everything in it: nesting, errors, retries, timeouts, aborts, outside cancels, swallowing."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    rng = random.Random(seed)
    effects: list[str] = []
    run = ExecutionContext(
        ExecutionConfig(
            max_cost_usd=rng.choice([None, 0.05, 1.0]),
            max_steps=rng.choice([None, 3, 8]),
            max_retries_total=rng.choice([None, 2, 5]),
            timeout_ms=rng.choice([0, 0, 40, 200]),
        ),
        budget=rng.choice([None, Budget(max_api_calls=6)]),
        breaker=rng.choice([None, CircuitBreaker(3, 0.05, clock=loop.clock)]),
        settings=RunSettings(max_kept_calls=rng.choice([None, 8, 100])),
        clock=loop.clock,
    )
    attempts = failures = 0

    async def leaf(context: ExecutionContext) -> str:
        nonlocal attempts, failures
        attempts += 1
        kind = rng.random()
        try:
            await asyncio.sleep(rng.choice([0, 0, 0.01, 0.03, 0.3]))
        except asyncio.CancelledError:
            if kind < 0.2:
                return "swallowed"
            if kind < 0.3:
                await asyncio.sleep(0.02)
            if kind < 0.4:
                raise Boom from None
            raise
        if kind > 0.7:
            failures += 1
            raise Boom
        if kind > 0.65:
            context.abort("from inside")
        return "ok"

    async def nested(context: ExecutionContext) -> str:
        child = context.spawn_child("child", budget=rng.choice([None, Budget(max_steps=2)]))
        try:
            await asyncio.gather(*(ask(child) for _ in range(rng.randint(1, 2))), return_exceptions=rng.random() < 0.5)
        finally:
            if rng.random() < 0.8:
                context.complete_child(child)
        return "nested"

    async def ask(context: ExecutionContext) -> None:
        options = WrapOptions(
            operation_name="ask",
            cost_estimate_hint=rng.choice([0.0, 0.01]),
            timeout_ms=rng.choice([None, None, 20]),
            retry_policy_override=rng.choice([None, 2]),
        )
        deep = rng.random() < 0.3
        work = (lambda: nested(context)) if deep else (lambda: leaf(context))
        outcome = await context.acall_llm(work, options)
        if outcome.decision == "ALLOW":
            effects.append(outcome.call.node_id)

    tasks = [asyncio.ensure_future(ask(run)) for _ in range(rng.randint(2, 5))]
    for task in tasks:
        if rng.random() < 0.2:
            loop.call_later(rng.choice([0, 0.01, 0.05]), task.cancel)
        if rng.random() < 0.05:
            loop.call_later(0.015, task.cancel)
    if rng.random() < 0.2:
        loop.call_later(rng.choice([0, 0.02]), run.abort, "from outside")
    if rng.random() < 0.1:
        loop.call_later(rng.choice([0.01, 0.04]), run.end)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    expected = (asyncio.CancelledError, CancelledError, Halted, Boom, RunEnded)
    assert not [r for r in results if r is not None and not isinstance(r, expected)], results
    await asyncio.sleep(1)
    run.end()
    figures = run.balance
    assert figures.held_nanos == figures.steps_open == 0
    retries = run._account.max_retries
    assert figures.retries <= min(retries, failures + attempts)
    events = run.history()
    started = sum(event.kind == "call_started" for event in events)
    assert attempts <= started
    dropped = run.graph.dropped_events
    if not dropped:
        assert check_history(events, ledger=figures, effects=effects) == []


@pytest.mark.requirement("G-4", "C-4", "P-C2", "T-4")
@pytest.mark.timeout(900)
def test_no_interleaving_breaks_the_life_of_a_call() -> None:
    explore(one_schedule, schedules=SCHEDULES)
