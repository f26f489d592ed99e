"""INV 1: spent + held never passes the ceiling, by the provider's own invoice, whatever runs at the same time."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial

import pytest

from penstock import (
    Budget,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    Price,
    PriceBook,
    RunSettings,
    StopReason,
    WrapOptions,
)
from penstock.testing import Answer, FailAfterBilling, FakeProvider, RefuseFree, ServerError, check_history
from tests.soak import scaled

pytestmark = [pytest.mark.reliability]

CALLS = 10_000
MOST_TOKENS = 100
PER_MTOK = 100.0
WORST_USD = MOST_TOKENS * PER_MTOK / 1e6


def make_provider(seed: int) -> FakeProvider:
    """30 % errors, of which a third were billed first; the rest answers, with up to `MOST_TOKENS` tokens."""
    rng = random.Random(seed)

    def behave(_: int) -> Answer | FailAfterBilling | RefuseFree | ServerError:
        tokens = rng.randint(1, MOST_TOKENS)
        draw = rng.random()
        if draw < 0.10:
            return FailAfterBilling(input_tokens=0, output_tokens=tokens)
        if draw < 0.20:
            return RefuseFree(429)
        if draw < 0.30:
            return ServerError(500, billed=False)
        return Answer(input_tokens=0, output_tokens=tokens)

    return FakeProvider(behave, input_usd_per_mtok=0, output_usd_per_mtok=PER_MTOK)


def make_run(ceiling_usd: float, **limits: int) -> ExecutionContext:
    prices = PriceBook(registered={"fake-1": Price(0, PER_MTOK)}, use_genai_prices=False)
    return ExecutionContext(
        ExecutionConfig(ceiling_usd, None, None),
        budget=Budget(**limits) if limits else None,
        prices=prices,
        settings=RunSettings(max_kept_calls=None, max_safety_events=100),
    )


def check(run: ExecutionContext, provider: FakeProvider, ceiling_usd: float) -> None:
    """What must be true once everything has drained."""
    figures = run.balance
    assert figures.held_nanos == 0
    assert figures.steps_open == 0
    run.end()
    ceiling = round(ceiling_usd * 1e9)
    assert provider.invoice.total_nanos <= ceiling
    assert check_history(run.history(), invoice=provider.invoice, ceiling_nanos=ceiling, ledger=figures) == []


@pytest.mark.requirement("C-2", "X-1", "P-B2")
@pytest.mark.parametrize(
    ("calls", "share"),
    # Those that wait for room are the long part: each that leaves is looked for among all that wait.
    [
        pytest.param(scaled(2_000, soak=CALLS), 0.2, id="ceiling is hit"),
        pytest.param(CALLS, 2.0, id="ceiling is never hit"),
    ],
)
async def test_thousands_of_concurrent_calls_with_errors_and_cancels_stay_inside(calls: int, share: float) -> None:
    ceiling = calls * WORST_USD * share
    provider, run, rng = make_provider(seed=1), make_run(ceiling), random.Random(2)
    options = WrapOptions(operation_name="ask", cost_estimate_hint=WORST_USD)
    refused_falsely = 0

    async def ask() -> None:
        nonlocal refused_falsely
        outcome = await run.acall_llm(provider.acomplete, options)
        stop = outcome.call.stop
        if stop is not None and stop.reason is StopReason.BUDGET_EXCEEDED:
            assert None not in (stop.used, stop.held, stop.limit)
            refused_falsely += (stop.used or 0) + (stop.held or 0) + WORST_USD <= (stop.limit or 0) - 1e-9

    tasks = [asyncio.ensure_future(ask()) for _ in range(calls)]
    for _ in range(3):
        await asyncio.sleep(0)
        for task in rng.sample(tasks, calls // 15):
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert refused_falsely == 0
    check(run, provider, ceiling)
    if share > 1:
        assert {event.event_type for event in run.get_snapshot().events} == {"aborted"}


@pytest.mark.requirement("C-2", "C-3", "X-1")
def test_sixty_four_threads_with_errors_and_cancels_stay_inside() -> None:
    ceiling = CALLS * WORST_USD * 0.3
    provider, run = make_provider(seed=3), make_run(ceiling, max_steps=6_000, max_api_calls=9_000)
    options = WrapOptions(operation_name="ask", cost_estimate_hint=WORST_USD)
    together, cancelled = threading.Barrier(64), []

    def cancelled_under_way(child: ExecutionContext) -> object:
        answer = provider.complete()
        child.abort("changed its mind")
        cancelled.append(child)
        return answer

    def ask_many(number: int) -> None:
        rng = random.Random(number)
        together.wait()
        for _ in range(CALLS // 64):
            if rng.random() >= 0.2:
                run.wrap_llm_call(provider.complete, options)
                continue
            child = run.spawn_child(f"child {number}")
            child.wrap_llm_call(partial(cancelled_under_way, child), options)
            child.end()

    threads = [threading.Thread(target=ask_many, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cancelled
    assert run.balance.steps <= 6_000
    assert run.balance.api_calls <= 9_000
    check(run, provider, ceiling)


@pytest.mark.requirement("P-B4", "C-2")
def test_two_parents_with_eight_children_each_never_pass_a_ceiling_at_either_level() -> None:
    provider, run = make_provider(seed=4), make_run(ceiling_usd=1.50)
    options = WrapOptions(operation_name="ask", cost_estimate_hint=WORST_USD)
    parents = [run.spawn_child(f"parent {p}", budget=Budget(max_cost_dollars=1.00)) for p in range(2)]
    children = [
        parent.spawn_child(f"child {c}", budget=Budget(max_cost_dollars=0.20)) for parent in parents for c in range(8)
    ]
    watched, passed = [run, *parents, *children], []
    together = threading.Barrier(len(children))

    def spend(child: ExecutionContext) -> None:
        together.wait()
        for _ in range(60):
            child.wrap_llm_call(provider.complete, options)
            for context in watched:
                figures = context.balance
                taken = figures.spent_nanos + figures.held_nanos + figures.unresolved_nanos
                if taken > figures.limits.cost_nanos:
                    passed.append(context.name)

    threads = [threading.Thread(target=spend, args=(child,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert passed == []

    def taken(context: ExecutionContext) -> int:
        figures = context.balance
        return figures.spent_nanos + figures.unresolved_nanos

    assert [taken(parent) for parent in parents] == [
        sum(taken(child) for child in children if child.parent is parent) for parent in parents
    ]
    assert taken(run) == sum(taken(parent) for parent in parents)
    assert run.balance.spent_usd + run.balance.unresolved_usd > 1.49
    check(run, provider, 1.50)


@pytest.mark.requirement("P-B2", "P-B5")
async def test_every_dimension_stops_exactly_at_its_limit_under_concurrency() -> None:
    async def works() -> str:
        await asyncio.sleep(0)
        return "ok"

    for limits, expected in (({"max_steps": 7}, 7), ({"max_api_calls": 7}, 7)):
        run = make_run(1.0, **limits)
        decisions = await asyncio.gather(*(run.awrap_llm_call(works) for _ in range(50)))
        assert decisions.count(Decision.ALLOW) == expected, limits
        run.end()


@pytest.mark.requirement("P-B2")
def test_tokens_that_a_provider_reports_trip_the_token_limit() -> None:
    provider = FakeProvider(lambda _: Answer(input_tokens=30, output_tokens=20))
    run = make_run(1.0, max_tokens=200)
    decisions = [run.wrap_llm_call(provider.complete) for _ in range(6)]
    assert decisions == [Decision.ALLOW] * 4 + [Decision.HALT] * 2
    assert run.usage.tokens_used == 200
