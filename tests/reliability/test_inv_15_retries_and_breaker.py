"""INV 15: retry budgets and circuit breakers are exact under concurrency.

Attempts are at most the calls plus the retry budget, however many layers retry and however many steps run at once. A
half-open breaker lets exactly its number of probes through, of a thousand callers that come together.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock import (
    CircuitBreaker,
    Decision,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    Halted,
    WrapOptions,
)
from penstock.testing import ManualClock, SimLoop, check_history, explore
from tests.containment.test_breaker import all_at_once
from tests.soak import scaled

pytestmark = [pytest.mark.reliability]

SCHEDULES = scaled(1_250, soak=200_000)
CALLERS = 1_000
NODES, RETRY_BUDGET = 100, 37


class Boom(Exception):
    pass


async def retry_schedule(seed: int) -> None:
    """Every attempt beyond a call's first draws on one retry budget, however many layers ask for it."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    rng = random.Random(seed)
    reached = 0
    run = ExecutionContext(ExecutionConfig(None, None, 5), clock=loop.clock)

    async def provider() -> None:
        nonlocal reached
        reached += 1
        await asyncio.sleep(rng.choice([0, 0.01]))
        raise Boom

    async def layer(depth: int) -> None:
        work = provider if depth == 0 else (lambda: layer(depth - 1))
        outcome = await run.acall_tool(work, WrapOptions(operation_name=f"layer {depth}", retry_policy_override=2))
        outcome.call.result()

    with pytest.raises((Boom, Halted)):
        await layer(2)
    assert reached <= 1 + 5
    assert run.balance.retries <= 5
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-3", "C-7")
@pytest.mark.timeout(900)
def test_three_layers_of_retries_share_one_budget() -> None:
    explore(retry_schedule, schedules=SCHEDULES)


@pytest.mark.requirement("C-3")
async def test_attempts_of_a_graph_are_at_most_its_nodes_plus_the_retry_budget() -> None:
    attempts = 0

    async def fail(context: ExecutionContext) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise Boom

    graph = Graph("failing", max_parallel=NODES, settle="collect")
    for number in range(NODES):
        policy = ErrorPolicy(on_error="skip", retry_count=5, retry_delay_ms=0)
        graph.add_step(FunctionNode(f"n{number}", fail), f"s{number}", error_policy=policy)
    run = ExecutionContext(ExecutionConfig(None, None, RETRY_BUDGET))
    await graph.execute(run)
    run.end()
    assert (attempts, run.balance.retries) == (NODES + RETRY_BUDGET, RETRY_BUDGET)
    assert check_history(run.history(), ledger=run.balance) == []


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("probes", [1, 3])
def test_of_a_thousand_threads_exactly_the_probes_pass(probes: int) -> None:
    breaker = half_open_breaker(probes)
    decisions = all_at_once(CALLERS, breaker.check)
    permits = [decision.permit for decision in decisions if decision.allowed]
    assert len(permits) == len(set(permits)) == probes
    assert all("half open" in decision.reason for decision in decisions if not decision.allowed)


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("probes", [1, 3])
async def test_of_a_thousand_concurrent_calls_exactly_the_probes_reach_the_provider(probes: int) -> None:
    breaker = half_open_breaker(probes)
    run = ExecutionContext(breaker=breaker)
    may_answer = asyncio.Event()
    reached = 0

    async def provider() -> None:
        nonlocal reached
        reached += 1
        await may_answer.wait()

    calls = [asyncio.create_task(run.awrap_llm_call(provider)) for _ in range(CALLERS)]
    while sum(call.done() for call in calls) < CALLERS - probes:  # noqa: ASYNC110  # the refusals set no event
        await asyncio.sleep(0)
    assert reached == breaker.snapshot().probes_out == probes
    may_answer.set()
    decisions = await asyncio.gather(*calls)
    assert (decisions.count(Decision.ALLOW), decisions.count(Decision.HALT)) == (probes, CALLERS - probes)
    assert breaker.state == "closed"


def half_open_breaker(probes: int) -> CircuitBreaker:
    """A breaker that has opened and whose recovery time is over."""
    clock = ManualClock()
    breaker = CircuitBreaker(1, 60.0, half_open_probes=probes, clock=clock)
    breaker.record_failure(breaker.check().permit)
    clock.advance(60)
    return breaker
