"""A usage that a run starts from, shows what the run counts, and can be added to."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    InvalidValue,
    Reported,
    ResourceUsage,
)
from penstock.containment.limits import Limits
from penstock.stores import Ledger, MemoryLedgerStore, SharedBudget
from penstock.testing import ManualClock
from tests.flow.steps import const, sim_loop, simulated

pytestmark = pytest.mark.requirement("P-B6")

FIGURES = ("tokens_used", "steps_executed", "api_calls", "cost_dollars")
LIMITS = {
    "tokens_used": "max_tokens",
    "steps_executed": "max_steps",
    "api_calls": "max_api_calls",
    "cost_dollars": "max_cost_dollars",
}


# Made by hand.


def test_elapsed_time_runs_on_a_monotonic_clock_from_the_moment_it_is_made() -> None:
    clock = ManualClock()
    clock.advance(5)
    usage = ResourceUsage(clock=clock)
    clock.jump_wall(-3_600)
    clock.advance(2)
    assert usage.time_elapsed_seconds == 2
    assert usage.exceeds(Budget(max_time_seconds=2)) == (True, "Time limit exceeded: 2s/2s")
    assert usage.exceeds(Budget(max_time_seconds=2.5)) == (False, None)
    assert ResourceUsage(_start_monotonic=3.0, clock=clock).time_elapsed_seconds == 4
    assert ResourceUsage().time_elapsed_seconds >= 0


def test_it_is_a_mutable_dataclass() -> None:
    usage = ResourceUsage(1, 2, 3, 0.5)
    usage.tokens_used += 10
    usage.steps_executed = usage.api_calls = 0
    usage.cost_dollars -= 0.25
    assert usage == ResourceUsage(tokens_used=11, cost_dollars=0.25)
    assert dataclasses.replace(usage, api_calls=7).api_calls == 7
    assert dataclasses.asdict(usage)["tokens_used"] == 11


# Where a run starts from.


@pytest.mark.parametrize("figure", FIGURES)
def test_the_limits_of_a_run_count_from_the_usage_it_is_given(figure: str) -> None:
    limits: dict[str, Any] = {LIMITS[figure]: 5}
    values: dict[str, Any] = {figure: 5}
    ctx = ExecutionContext(usage=ResourceUsage(**values), budget=Budget(**limits), name="run")
    with pytest.raises(BudgetExceededError) as raised:
        ctx.check_budget()
    assert (raised.value.owner, raised.value.budget) == ("run", Budget(**limits))
    with pytest.raises(BudgetExceededError):
        ctx.tool(lambda: 1)
    values[figure] = 4
    ExecutionContext(usage=ResourceUsage(**values), budget=Budget(**limits)).tool(lambda: 1)


def test_the_time_of_a_run_counts_from_the_usage_it_is_given() -> None:
    clock = ManualClock()
    usage = ResourceUsage(clock=clock)
    clock.advance(3)
    ctx = ExecutionContext(usage=usage, budget=Budget(max_time_seconds=5), clock=clock, name="run")
    assert ctx.usage.time_elapsed_seconds == 3
    clock.advance(1)
    ctx.tool(lambda: 1)
    assert ctx.get_snapshot().elapsed_ms == 1_000  # the run's own time
    clock.advance(1)
    with pytest.raises(BudgetExceededError, match=r"5.000 s elapsed of the 5 s of 'run'"):
        ctx.tool(lambda: 1)


@pytest.mark.parametrize("given", [False, True])
def test_a_deadline_reaches_running_work_by_the_time_of_the_usage(given: bool) -> None:
    async def main() -> None:
        clock = sim_loop().clock
        usage = ResourceUsage(clock=clock)
        await asyncio.sleep(3)
        token = CancellationToken(clock=clock) if given else None
        ctx = ExecutionContext(
            usage=usage, budget=Budget(max_time_seconds=5), cancellation=token, clock=clock, name="run"
        )
        graph = Graph("g").add_step(FunctionNode("n", lambda ctx: asyncio.sleep(60)), "a")
        with pytest.raises(BudgetExceededError) as raised:
            await graph.execute(ctx)
        assert (sim_loop().time(), raised.value.owner, raised.value.budget.max_time_seconds) == (5, "run", 5)

    simulated(main)


async def test_a_usage_given_shows_what_the_run_counts_while_it_runs_and_after() -> None:
    usage = ResourceUsage(tokens_used=10)
    seen: list[int] = []

    def spend(ctx: ExecutionContext) -> Any:
        seen.append(usage.tokens_used)
        assert ctx.usage is usage
        return Reported.of(1, input_tokens=5, cost_usd=0.5)

    graph = Graph("g").add_step(FunctionNode("n", spend), "a").add_step(FunctionNode("n", spend), "b", depends_on=["a"])
    with ExecutionContext(usage=usage) as ctx:
        assert ctx.usage is usage
        await graph.execute(ctx)
    assert seen == [10, 15]
    assert (usage.tokens_used, usage.steps_executed, usage.cost_dollars) == (20, 2, 1.0)


async def test_runs_one_after_the_other_count_in_the_usage_they_share() -> None:
    usage, graph = ResourceUsage(), Graph("g").add_step(const("n"), "a")
    for _ in range(3):
        await graph.execute(ExecutionContext(usage=usage, budget=Budget(max_steps=3)))
    assert usage.steps_executed == 3
    with pytest.raises(BudgetExceededError):
        await graph.execute(ExecutionContext(usage=usage, budget=Budget(max_steps=3)))
    await graph.execute(ExecutionContext(usage=usage, budget=Budget(max_steps=4)))
    assert usage.steps_executed == 4


async def test_runs_at_the_same_time_do_not_pass_the_budget_of_the_usage_they_share() -> None:
    usage, ran = ResourceUsage(), []
    budget = Budget(max_steps=7)

    async def work(ctx: ExecutionContext) -> None:
        await asyncio.sleep(0)
        ran.append(1)

    graph = Graph("g")
    for at in range(5):
        graph.add_step(FunctionNode("n", work), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    contexts = [ExecutionContext(usage=usage, budget=budget) for _ in range(3)]
    ends = await asyncio.gather(*(graph.execute(ctx) for ctx in contexts), return_exceptions=True)
    assert any(isinstance(end, BudgetExceededError) for end in ends)
    assert len(ran) == usage.steps_executed == 7


async def test_a_call_under_way_when_the_usage_goes_to_another_run_is_settled_in_both() -> None:
    usage = ResourceUsage()
    first = ExecutionContext(usage=usage)

    def hand_on() -> Reported[int]:
        nonlocal second
        second = ExecutionContext(usage=usage, budget=Budget(max_cost_dollars=1))
        return Reported.of(1, cost_usd=0.25)

    second = first
    first.llm(hand_on, cost_hint_usd=0.5)
    assert (first.balance.spent_usd, second.balance.spent_usd, second.balance.held_usd) == (0.25, 0.25, 0.0)
    assert (usage.cost_dollars, usage.steps_executed, second.balance.steps_open) == (0.25, 1, 0)
    assert first.usage is not usage
    assert second.usage is usage


def test_a_usage_that_is_no_usage_is_refused_by_name() -> None:
    with pytest.raises(InvalidValue) as refused:
        ExecutionContext(usage={"tokens_used": 5})  # type: ignore[arg-type]
    assert refused.value.field == "usage"


def test_a_usage_is_refused_beside_a_ledger_with_another_clock_and_of_a_part_of_a_run() -> None:
    with pytest.raises(InvalidValue, match="a ledger is passed"):
        ExecutionContext(usage=ResourceUsage(), ledger=Ledger())
    usage = ResourceUsage()
    ctx = ExecutionContext(usage=usage)
    with pytest.raises(InvalidValue, match="clock"):
        ExecutionContext(usage=usage, clock=ManualClock())
    part = ctx.with_sub_budget(Budget(max_tokens=10)).usage
    with pytest.raises(InvalidValue, match="a whole run"):
        ExecutionContext(usage=part)
    ExecutionContext(usage=copy.copy(part))


# What a node adds.


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("figure", FIGURES)
async def test_usage_added_by_a_node_counts_toward_the_budget(figure: str, shared: bool) -> None:
    usage, ran = ResourceUsage(), []

    def add(ctx: ExecutionContext) -> None:
        ran.append(1)
        target = usage if shared else ctx.usage
        setattr(target, figure, getattr(target, figure) + 50)

    graph = Graph("g")
    for at in range(5):
        graph.add_step(FunctionNode("n", add), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    limits: dict[str, Any] = {LIMITS[figure]: 100}
    ctx = ExecutionContext(usage=usage if shared else None, budget=Budget(**limits))
    with pytest.raises(BudgetExceededError) as raised:
        await graph.execute(ctx)
    assert len(ran) == 2
    assert getattr(raised.value.usage, figure) >= 100
    assert raised.value.partial == {"s0": None, "s1": None}


def test_a_budget_check_right_after_an_addition_trips() -> None:
    ctx = ExecutionContext(budget=Budget(max_tokens=10))
    ctx.usage.tokens_used += 9
    ctx.check_budget()
    ctx.usage.tokens_used += 1
    with pytest.raises(BudgetExceededError):
        ctx.check_budget()


async def test_usage_added_under_a_sub_budget_counts_in_outer_budgets_too() -> None:
    def add(ctx: ExecutionContext) -> int:
        ctx.usage.tokens_used += 30
        return ctx.usage.tokens_used

    usage = ResourceUsage(tokens_used=100)
    graph = Graph("g").add_step(FunctionNode("n", add), "a", sub_budget=Budget(max_tokens=50))
    assert await graph.execute(ExecutionContext(usage=usage)) == {"a": 30}
    assert usage.tokens_used == 130


async def test_added_usage_is_in_the_totals_of_the_trace() -> None:
    def add(ctx: ExecutionContext) -> None:
        ctx.usage.tokens_used += 30

    trace = ExecutionTrace("g")
    await Graph("g").add_step(FunctionNode("n", add), "a").execute(ExecutionContext(trace=trace))
    assert trace.total_tokens == 30


@pytest.mark.parametrize("figure", [*FIGURES, "retries_used"])
def test_a_figure_cannot_be_lowered_and_no_account_changes_by_trying(figure: str) -> None:
    values: dict[str, Any] = {figure: 5}
    ctx = ExecutionContext(usage=ResourceUsage(**values))
    before = ctx.balance
    for wrong in (4, -1, float("nan"), "five", None, True):
        with pytest.raises(InvalidValue, match=figure):
            setattr(ctx.usage, figure, wrong)
    assert ctx.balance == before
    setattr(ctx.usage, figure, getattr(ctx.usage, figure))
    assert ctx.balance == before


@given(st.lists(st.tuples(st.sampled_from(FIGURES), st.integers(0, 10**6))))
def test_the_account_ends_with_the_sum_of_all_additions(additions: list[tuple[str, int]]) -> None:
    usage = ResourceUsage()
    ctx = ExecutionContext(usage=usage)
    expected = dict.fromkeys(FIGURES, 0.0)
    for figure, amount in additions:
        more: float = amount / 1_000 if figure == "cost_dollars" else amount
        setattr(usage, figure, getattr(usage, figure) + more)
        expected[figure] += more
    balance = ctx.balance
    assert balance.tokens_in + balance.tokens_out == usage.tokens_used == expected["tokens_used"]
    assert (balance.steps, balance.api_calls) == (expected["steps_executed"], expected["api_calls"])
    assert balance.spent_usd == usage.cost_dollars == pytest.approx(expected["cost_dollars"], abs=1e-9)
    assert (balance.held_nanos, balance.unresolved_nanos, balance.steps_open) == (0, 0, 0)


def test_additions_beside_calls_in_other_threads_never_lower_what_was_counted() -> None:
    usage = ResourceUsage()
    ctx = ExecutionContext(usage=usage)

    def call() -> None:
        for _ in range(200):
            ctx.tool(lambda: Reported.of(1, input_tokens=1))

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        ctx.usage.api_calls += 1  # only here
    for thread in threads:
        thread.join()
    assert (usage.tokens_used, usage.steps_executed) == (400, 400)


def test_added_usage_is_charged_at_the_shared_budget() -> None:
    store = MemoryLedgerStore()
    store.open_account("team", Limits(tokens=100))
    ctx = ExecutionContext(shared_budget=SharedBudget(store, "team", prefix="run/1"))
    ctx.usage.tokens_used += 60
    ctx.usage.tokens_used += 30
    assert store.balance("team").tokens_in == 90


# A measurement.


def test_a_copy_and_the_usage_of_an_error_keep_the_figures_of_their_moment() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(budget=Budget(max_steps=1), clock=clock)
    ctx.tool(lambda: 1)
    clock.advance(2)
    with pytest.raises(BudgetExceededError) as raised:
        ctx.tool(lambda: 1)
    live = ctx.usage
    kept = [copy.copy(live), copy.deepcopy(live), pickle.loads(pickle.dumps(live)), raised.value.usage]
    kept.append(pickle.loads(pickle.dumps(raised.value)).usage)
    clock.advance(1)
    live.tokens_used += 5
    for usage in kept:
        assert (usage.steps_executed, usage.tokens_used, usage.time_elapsed_seconds) == (1, 0, 2)
    assert (live.tokens_used, live.time_elapsed_seconds) == (5, 3)
    assert dataclasses.asdict(live)["tokens_used"] == 5
    assert "tokens_used=5" in repr(live)


async def test_the_time_of_an_ended_run_no_longer_changes() -> None:
    clock = ManualClock()
    usage = ResourceUsage(clock=clock)
    with ExecutionContext(usage=usage, clock=clock):
        clock.advance(2)
    clock.advance(5)
    assert usage.time_elapsed_seconds == 2
