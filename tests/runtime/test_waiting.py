"""Calls that wait for what other calls hold, in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from openai import OpenAI

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ExecutionContext,
    Graph,
    InvalidValue,
    RunSettings,
    StopReason,
    contain,
)
from penstock.events import CallWaiting
from penstock.providers import contained
from penstock.runtime.billing.usage import Usage
from penstock.stores import Ledger
from penstock.testing import SimLoop, check_history, sim_run
from penstock.testing.provider import FakeProviderServer

pytestmark = pytest.mark.requirement("X-9")

USD = 1_000_000_000


def simulate(main: Callable[[ExecutionContext], Awaitable[Any]], **limits: Any) -> tuple[ExecutionContext, Any]:
    """Run `main` with a run of these limits, in virtual time."""
    runs: list[ExecutionContext] = []

    async def body() -> Any:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        runs.append(contain(clock=loop.clock, divergence=False, **limits))
        return await main(runs[0])

    outcome = sim_run(body, seed=1)
    return runs[0], outcome


def whole(run: ExecutionContext) -> None:
    """End the run, and check that its history is consistent and that no call waits."""
    assert not run._run.room.queues
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


def spend(run: ExecutionContext, cost: float, seconds: float = 1.0) -> Callable[[], Awaitable[str]]:
    """A function that takes a while and costs so much."""

    async def work() -> str:
        await asyncio.sleep(seconds)
        run.report(cost_usd=cost)
        return "done"

    return work


def waits(run: ExecutionContext) -> list[CallWaiting]:
    return [event for event in run.history() if isinstance(event, CallWaiting)]


def test_twenty_calls_whose_worst_cases_do_not_fit_together_all_complete() -> None:
    async def main(run: ExecutionContext) -> Any:
        calls = (run.allm(spend(run, 0.00105), cost_hint_usd=0.02) for _ in range(20))
        return await asyncio.gather(*calls)

    run, outcome = simulate(main, max_cost_usd=0.05)
    assert outcome == ["done"] * 20
    assert run.balance.spent_usd == pytest.approx(0.021)
    assert (run.balance.held_nanos, run.balance.unresolved_nanos) == (0, 0)
    assert len(waits(run)) == 18
    whole(run)


def test_a_waiting_call_is_created_holds_nothing_and_starts_when_it_is_admitted() -> None:
    async def main(run: ExecutionContext) -> dict[str, Any]:
        first = asyncio.ensure_future(run.allm(spend(run, 0.1), name="first", cost_hint_usd=0.9))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(run.allm(spend(run, 0.1), name="second", cost_hint_usd=0.9))
        await asyncio.sleep(0.5)
        nodes = run.graph.snapshot()["nodes"].values()
        status = {node["name"]: node["status"] for node in nodes}
        assert run.balance.held_usd == pytest.approx(0.9)
        assert run.balance.steps_open == 1
        await asyncio.gather(first, second)
        return status

    run, outcome = simulate(main, max_cost_usd=1)
    assert outcome == {"main": "running", "first": "running", "second": "created"}
    kinds = [(event.kind, event.name) for event in run.history() if getattr(event, "name", "") == "second"]  # type: ignore[attr-defined]
    assert [kind for kind, _ in kinds] == ["call_waiting", "call_started", "call_ended"]
    (waiting,) = waits(run)
    assert (waiting.budget, waiting.unit, waiting.held, waiting.asked) == ("main", "usd", 0.9, 0.9)
    second = next(node for node in run.graph.snapshot()["nodes"].values() if node["name"] == "second")
    assert second["metadata"]["waited_ms"] == 990


def test_a_call_that_cannot_fit_beside_what_is_spent_is_refused_at_once() -> None:
    async def main(run: ExecutionContext) -> None:
        first = asyncio.ensure_future(run.allm(spend(run, 0.1, 100), cost_hint_usd=0.9))
        await asyncio.sleep(0.01)
        run._run.ledger.settle(_hold(run, 0.05), 50_000_000)
        with pytest.raises(BudgetExceededError, match=r"would hold \$0.96"):
            await asyncio.wait_for(run.allm(spend(run, 0.1), cost_hint_usd=0.96), 1)
        await first

    run, _ = simulate(main, max_cost_usd=1)
    assert waits(run) == []


def _hold(run: ExecutionContext, usd: float) -> Any:
    return run._run.ledger.hold(run._account, round(usd * USD))


def test_a_waiting_call_is_refused_when_the_money_is_spent_after_all() -> None:
    async def main(run: ExecutionContext) -> None:
        first = asyncio.ensure_future(run.allm(spend(run, 0.9), cost_hint_usd=0.9))
        await asyncio.sleep(0.01)
        second = run.allm(spend(run, 0.1), cost_hint_usd=0.5)
        outcomes: Any = await asyncio.gather(first, second, return_exceptions=True)
        done, refused = outcomes
        assert done == "done"
        assert isinstance(refused, BudgetExceededError)
        assert refused.stop.momentary is False

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


@pytest.mark.parametrize("ends", ["abort", "cancel", "timeout", "task"])
def test_cancel_and_deadlines_reach_a_waiting_call(ends: str) -> None:
    token = CancellationToken()

    async def main(run: ExecutionContext) -> None:
        long = asyncio.ensure_future(run.allm(spend(run, 0.1, 1_000), name="long", cost_hint_usd=0.9))
        await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(run.allm(spend(run, 0.1), name="waiting", cost_hint_usd=0.9))
        await asyncio.sleep(1)
        match ends:
            case "abort":
                run.abort("enough")
            case "cancel":
                token.cancel("enough")
            case "task":
                waiting.cancel()
            case _:
                pass
        started = asyncio.get_running_loop().time()
        outcome: Any = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert asyncio.get_running_loop().time() - started <= 1, "at once, or at the deadline"
        expected = {"task": asyncio.CancelledError, "timeout": BudgetExceededError}.get(ends, CancelledError)
        assert isinstance(outcome, expected)
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)

    run, _ = simulate(main, max_cost_usd=1, cancellation=token, timeout_s=2 if ends == "timeout" else None)
    assert not run._run.room.queues
    waited = next(node for node in run.graph.snapshot()["nodes"].values() if node["name"] == "waiting")
    assert waited["status"] == "halt"
    assert run.balance.held_nanos == 0
    whole(run)


def test_a_call_waits_no_longer_than_it_may() -> None:
    async def main(run: ExecutionContext) -> None:
        long = asyncio.ensure_future(run.allm(spend(run, 0.1, 60), cost_hint_usd=0.9))
        await asyncio.sleep(0.01)
        with pytest.raises(BudgetExceededError, match=r"waited 5 s for other calls to end") as caught:
            await run.allm(spend(run, 0.1), cost_hint_usd=0.9)
        assert caught.value.stop.momentary
        await long

    run, _ = simulate(main, max_cost_usd=1, max_wait_s=5)
    whole(run)


def test_with_no_time_to_wait_a_call_is_refused_at_once() -> None:
    run = contain(max_cost_usd=1, max_wait_s=0)
    held = _hold(run, 0.9)
    with pytest.raises(BudgetExceededError) as caught:
        run.llm(lambda: None, cost_hint_usd=0.5)
    assert caught.value.stop.momentary
    run._run.ledger.release(held)
    assert run.llm(lambda: 1, cost_hint_usd=0.5) == 1


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "5", None, True])
def test_the_time_to_wait_is_checked(seconds: Any) -> None:
    with pytest.raises(InvalidValue, match="max_wait_s"):
        RunSettings(max_wait_s=seconds)


def test_threads_wait_and_a_grant_or_a_release_lets_them_go() -> None:
    run = contain(max_cost_usd=1)
    held = _hold(run, 0.9)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run.llm, lambda: "done", cost_hint_usd=0.5) for _ in range(2)]
        _until(lambda: len(run._run.room) == 2)
        run._run.ledger.grant(run._account, Budget(max_cost_dollars=1.4))
        _until(lambda: any(call.done() for call in waiting))
        run._run.ledger.release(held)
        assert [call.result() for call in waiting] == ["done", "done"]


def _until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not holds():
        pause.wait(0.001)


async def test_a_sync_call_on_an_event_loop_never_waits() -> None:
    run = contain(max_cost_usd=1)
    held = _hold(run, 0.9)
    with pytest.raises(BudgetExceededError, match="await its async twin") as caught:
        run.llm(lambda: None, cost_hint_usd=0.5)
    assert caught.value.stop.momentary
    run._run.ledger.release(held)


def test_a_call_that_waits_for_its_own_outer_call_is_refused_at_once() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> None:
            await run.allm(spend(run, 0.1), name="inner", cost_hint_usd=0.9)

        with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
            await run.atool(outer, cost_hint_usd=0.5)
        assert asyncio.get_running_loop().time() < 1

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


@pytest.mark.parametrize("between", [False, True])
def test_a_call_that_waits_for_the_call_of_another_run_that_it_is_part_of_is_refused_at_once(between: bool) -> None:
    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_cost_dollars=1), clock=run._run.clock)
        one, other = contain(ledger=team), contain(ledger=team)

        async def inner() -> Any:
            return await other.atool(lambda: other.allm(spend(other, 0.1), cost_hint_usd=0.6))

        async def outer() -> None:
            await (one.atool(inner) if between else inner())

        with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
            await one.atool(outer, cost_hint_usd=0.5)
        assert asyncio.get_running_loop().time() < 1

    simulate(main)


def test_a_call_waits_while_other_work_of_the_call_of_another_run_goes_on() -> None:
    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_cost_dollars=1), clock=run._run.clock)
        one, other = contain(ledger=team), contain(ledger=team)

        async def outer() -> None:
            first = asyncio.ensure_future(other.allm(spend(other, 0.1), cost_hint_usd=0.4))
            await asyncio.sleep(0.1)
            assert await other.allm(spend(other, 0.1), cost_hint_usd=0.3) == "done"
            await first
            one.report(cost_usd=0)

        await one.atool(outer, cost_hint_usd=0.5)
        assert len(waits(other)) == 1

    simulate(main)


def test_a_call_waits_for_the_outer_call_of_another_one_that_runs() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> Any:
            return await run.allm(spend(run, 0.1, 5), cost_hint_usd=0.1)

        both = run.atool(outer, cost_hint_usd=0.5), run.allm(spend(run, 0.1), cost_hint_usd=0.6)
        assert list(await asyncio.gather(*both)) == ["done", "done"]

    run, _ = simulate(main, max_cost_usd=1)
    assert len(waits(run)) == 1


def test_two_outer_calls_that_block_each_other_end_in_one_refusal() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> Any:
            await asyncio.sleep(1)
            return await run.allm(spend(run, 0.1), cost_hint_usd=0.2)

        outcomes = await asyncio.gather(
            *(run.atool(outer, cost_hint_usd=0.5) for _ in range(2)), return_exceptions=True
        )
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["BudgetExceededError", "str"]

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


def test_a_call_is_refused_as_soon_as_the_last_other_work_of_its_outer_call_has_ended() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> None:
            other = asyncio.ensure_future(run.allm(spend(run, 0.1, 1), cost_hint_usd=0.1))
            await asyncio.sleep(0.5)
            with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
                await run.allm(spend(run, 0.1), cost_hint_usd=0.5)
            assert await other == "done"

        await run.atool(outer, cost_hint_usd=0.6)
        assert asyncio.get_running_loop().time() < 2

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


@pytest.mark.parametrize("ends", ["child", "abort", "timeout"])
def test_a_call_is_refused_as_soon_as_the_last_other_work_of_its_outer_call_is_stopped(ends: str) -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> None:
            child = run.spawn_child("child")
            limit_s = 1 if ends == "timeout" else None
            other = asyncio.ensure_future(child.atool(asyncio.sleep, 100, timeout_s=limit_s))
            inner = asyncio.ensure_future(run.allm(spend(run, 0.1), cost_hint_usd=0.5))
            await asyncio.sleep(1)
            if ends != "timeout":
                child.end() if ends == "child" else child.abort("enough")
            with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
                await inner
            await asyncio.gather(other, return_exceptions=True)

        await run.atool(outer, cost_hint_usd=0.6)
        assert asyncio.get_running_loop().time() < 2

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


def test_an_open_child_context_is_no_work_that_a_call_could_wait_for() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> None:
            run.spawn_child("idle")
            await run.allm(spend(run, 0.1), cost_hint_usd=0.9)

        with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
            await run.atool(outer, cost_hint_usd=0.5)
        assert asyncio.get_running_loop().time() < 1

    simulate(main, max_cost_usd=1)


def test_a_call_that_waits_for_its_turn_does_not_hide_that_others_block_each_other() -> None:
    async def main(run: ExecutionContext) -> None:
        async def outer() -> None:
            await asyncio.sleep(0.2)
            with pytest.raises(BudgetExceededError, match="wait themselves, so waiting would not end"):
                await run.allm(spend(run, 0.1), cost_hint_usd=0.8)
            run.report(cost_usd=0)

        holds = asyncio.ensure_future(run.atool(outer, cost_hint_usd=0.3))
        await asyncio.sleep(0.1)
        # The second one has room, and would take that of the first.
        waiting = (run.allm(spend(run, 0.1), cost_hint_usd=hint) for hint in (0.8, 0.4))
        assert await asyncio.gather(*waiting) == ["done", "done"]
        await holds
        assert asyncio.get_running_loop().time() < 3

    run, _ = simulate(main, max_cost_usd=1)
    whole(run)


def test_a_large_call_is_passed_by_small_ones_a_few_times_only() -> None:
    order: list[str] = []

    async def small(run: ExecutionContext, number: int) -> None:
        await asyncio.sleep(number * 0.1)
        await run.allm(spend(run, 0, 1), name=f"small {number}", cost_hint_usd=0.1)
        order.append("small")

    async def large(run: ExecutionContext) -> None:
        await asyncio.sleep(0.55)
        await run.allm(spend(run, 0, 1), name="large", cost_hint_usd=0.9)
        order.append("large")

    async def main(run: ExecutionContext) -> None:
        await asyncio.gather(large(run), *(small(run, number) for number in range(60)))

    simulate(main, max_cost_usd=1)
    assert order.index("large") <= 12
    assert len(order) == 61


def test_runs_that_share_a_budget_take_turns() -> None:
    ledger = Ledger("team", Budget(max_cost_dollars=1))
    runs = [ExecutionContext(name=name, ledger=ledger) for name in ("many", "one")]
    order: list[str] = []

    async def call(run: ExecutionContext) -> None:
        await run.allm(spend(run, 0.001), cost_hint_usd=0.9)
        order.append(run.name)

    async def main() -> None:
        many = [asyncio.ensure_future(call(runs[0])) for _ in range(10)]
        await asyncio.sleep(0.5)
        await asyncio.gather(*many, call(runs[1]))

    sim_run(main, seed=1)
    assert order.index("one") <= 2


def test_model_calls_of_unknown_cost_run_one_at_a_time_until_one_has_ended() -> None:
    run = contain(max_cost_usd=1)

    def dear() -> str:
        run.report(cost_usd=0.5)
        return "done"

    def call() -> object:
        try:
            return run.llm(dear)
        except BudgetExceededError as error:
            return error.stop.reason

    with ThreadPoolExecutor(16) as pool:
        outcomes = [each.result() for each in [pool.submit(call) for _ in range(16)]]
    assert run.balance.spent_usd <= 1.5
    assert outcomes.count("done") == 2
    assert outcomes.count(StopReason.BUDGET_EXCEEDED) == 14


def test_runs_that_share_a_budget_share_what_they_know_of_calls_of_unknown_cost() -> None:
    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_cost_dollars=1), clock=run._run.clock)
        runs = [contain(ledger=team) for _ in range(16)]
        outcomes = await asyncio.gather(*(each.allm(spend(each, 0.5)) for each in runs), return_exceptions=True)
        assert team.balance().spent_usd <= 1.5
        assert outcomes.count("done") == 2
        assert [type(outcome) for outcome in outcomes].count(BudgetExceededError) == 14

    simulate(main)


def test_a_later_run_holds_what_a_call_of_unknown_cost_has_cost_in_an_earlier_one() -> None:
    team = Ledger("team", Budget(max_cost_dollars=1))
    with contain(ledger=team) as earlier:
        earlier.llm(lambda: earlier.report(cost_usd=0.3))
    with contain(ledger=team) as later:
        assert later.llm(lambda: later.balance.held_usd) == pytest.approx(0.3)
        later.llm(lambda: later.report(cost_usd=0.4))
        assert earlier.balance.spent_usd + later.balance.spent_usd == pytest.approx(0.7)
        assert later.call_llm(lambda: None).call.stop.reason is StopReason.BUDGET_EXCEEDED  # 0.4 would not fit


def test_runs_under_budgets_of_their_own_do_not_wait_for_calls_of_unknown_cost_of_others() -> None:
    team = Ledger("team")  # without a limit of money

    async def main(run: ExecutionContext) -> None:
        runs = [contain(max_cost_usd=1, ledger=team) for _ in range(5)]
        await asyncio.gather(*(each.allm(spend(each, 0.001)) for each in runs))
        assert [waits(each) for each in runs] == [[]] * 5

    simulate(main)


@pytest.mark.parametrize("shared", [False, True])
def test_a_call_of_unknown_cost_and_a_hold_that_block_each_other_end_in_one_refusal(shared: bool) -> None:
    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_cost_dollars=1), clock=run._run.clock)
        one, other = (contain(ledger=team), contain(ledger=team)) if shared else (run, run)

        async def first() -> Any:
            await asyncio.sleep(1)
            return await one.allm(spend(one, 0.1), cost_hint_usd=0.5)

        async def holds() -> Any:
            await asyncio.sleep(0.5)
            return await other.allm(spend(other, 0.1))

        outcomes = await asyncio.gather(one.allm(first), other.atool(holds, cost_hint_usd=0.7), return_exceptions=True)
        assert sorted(type(outcome).__name__ for outcome in outcomes) == ["BudgetExceededError", "str"]
        assert asyncio.get_running_loop().time() < 5

    simulate(main, max_cost_usd=1)


def test_what_the_first_call_of_unknown_cost_calls_itself_does_not_wait() -> None:
    run = contain(max_cost_usd=1)
    assert run.llm(lambda: run.llm(lambda: "inner")) == "inner"


def test_what_the_first_call_of_unknown_cost_calls_in_another_run_does_not_wait() -> None:
    team = Ledger("team", Budget(max_cost_dollars=1))
    one, other = contain(ledger=team), contain(ledger=team)
    assert one.llm(lambda: other.tool(lambda: other.llm(lambda: "inner"))) == "inner"


def test_a_first_call_that_fails_or_never_runs_lets_the_next_one_go() -> None:
    async def main(run: ExecutionContext) -> None:
        async def fails() -> None:
            await asyncio.sleep(1)
            raise ValueError

        async def three() -> None:
            await asyncio.sleep(0.5)
            await asyncio.gather(*(run.allm(spend(run, 0.1)) for _ in range(3)))

        await asyncio.gather(run.allm(fails), three(), return_exceptions=True)

    run, _ = simulate(main, max_cost_usd=1)
    assert run.balance.spent_usd == pytest.approx(0.3)
    whole(run)


class Billed(Exception):
    """An error of a provider that charged for the call."""

    usage = Usage.of(cost_usd="0.5", input_tokens=10, output_tokens=5)


@pytest.mark.parametrize("shared", [False, True], ids=["one run", "runs of one ledger"])
@pytest.mark.parametrize(
    ("error", "timeout_s"),
    [(ConnectionRefusedError(), None), (ValueError("broken"), None), (Billed(), None), (None, 1)],
    ids=["refused", "broken", "billed", "timeout"],
)
def test_calls_of_unknown_cost_run_one_at_a_time_until_the_cost_of_one_is_known(
    error: Exception | None, timeout_s: float | None, shared: bool
) -> None:
    running, most = 0, 0

    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_cost_dollars=1), clock=run._run.clock)
        runs = [contain(ledger=team) if shared else run for _ in range(16)]
        calls = iter(range(16))

        async def ask(place: ExecutionContext) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            try:
                if next(calls) < 3:
                    await asyncio.sleep(2)
                    raise error or ValueError("broken")
                await asyncio.sleep(0.5)
                place.report(cost_usd=0.5)
            finally:
                running -= 1

        limits = [timeout_s, *[None] * 15]
        asking = (run.allm(partial(ask, run), timeout_s=limit) for run, limit in zip(runs, limits, strict=True))
        await asyncio.gather(*asking, return_exceptions=True)
        total = team.balance() if shared else run.balance
        assert (total.spent_usd, total.held_usd) == (1, 0)

    simulate(main, max_cost_usd=1)
    assert most == 1


@pytest.mark.parametrize("shared", [False, True], ids=["one run", "runs of one ledger"])
@pytest.mark.parametrize("hint_usd", [None, 0.01])
def test_under_a_token_limit_model_calls_run_one_at_a_time_until_the_tokens_of_one_are_known(
    hint_usd: float | None, shared: bool
) -> None:
    async def main(run: ExecutionContext) -> None:
        team = Ledger("team", Budget(max_tokens=1_000), clock=run._run.clock)
        runs = [contain(ledger=team) if shared else run for _ in range(16)]
        calls = iter(range(16))

        async def ask(place: ExecutionContext) -> None:
            await asyncio.sleep(1)
            if next(calls) == 0:
                raise ValueError("broken")
            place.report(input_tokens=400, output_tokens=100)

        asking = (place.allm(partial(ask, place), cost_hint_usd=hint_usd) for place in runs)
        outcomes = await asyncio.gather(*asking, return_exceptions=True)
        total = team.balance() if shared else run.balance
        assert total.tokens_in + total.tokens_out == 1_000
        assert [type(outcome).__name__ for outcome in outcomes].count("BudgetExceededError") == 13

    simulate(main, max_tokens=1_000)


def test_a_call_that_knew_its_tokens_shows_nothing_of_what_others_use() -> None:
    async def main(run: ExecutionContext) -> None:
        async def ask() -> None:
            await asyncio.sleep(0)
            run.report(input_tokens=400, output_tokens=100)

        await asyncio.gather(*(run.allm(ask) for _ in range(16)), return_exceptions=True)

    with FakeProviderServer() as server, contain(max_tokens=1_500, prices=server.provider.prices) as run:
        with contained(run), OpenAI(base_url=server.openai_url, api_key="none") as client:
            client.responses.create(model="fake-1", input="hello", max_output_tokens=500)
        known = run.balance.tokens_in + run.balance.tokens_out
        asyncio.run(main(run))
        assert known < 500
        assert run.balance.tokens_in + run.balance.tokens_out == known + 1_000


def test_tools_do_not_wait_under_a_token_limit_and_nor_do_calls_without_one() -> None:
    for kind, limits in (("allm", {"max_cost_usd": 100}), ("atool", {"max_tokens": 1_000})):

        async def main(run: ExecutionContext, kind: str = kind) -> None:
            calls = (getattr(run, kind)(lambda: asyncio.sleep(1), cost_hint_usd=1) for _ in range(5))
            await asyncio.gather(*calls)

        run, _ = simulate(main, **limits)
        assert waits(run) == []


def test_without_a_money_limit_and_for_tools_calls_of_unknown_cost_do_not_wait() -> None:
    for kind, limits in (("allm", {"max_steps": 100}), ("atool", {"max_cost_usd": 1})):

        async def main(run: ExecutionContext, kind: str = kind) -> None:
            await asyncio.gather(*(getattr(run, kind)(spend(run, 0.001)) for _ in range(5)))

        run, _ = simulate(main, **limits)
        assert waits(run) == []


def test_steps_of_a_graph_wait_too() -> None:
    graph = Graph("wide", max_parallel=6)

    async def work(ctx: ExecutionContext) -> Any:
        return await ctx.allm(spend(ctx, 0.1), cost_hint_usd=0.5)

    for number in range(6):
        graph.step(work, f"step {number}")

    async def main(run: ExecutionContext) -> Any:
        return await graph.execute(run)

    run, outcome = simulate(main, max_cost_usd=1)
    assert set(outcome.values()) == {"done"}
    whole(run)


def test_steps_and_tools_that_hold_nothing_start_however_many_pass_a_call_that_waits() -> None:
    started: list[str] = []

    async def main(run: ExecutionContext) -> Any:
        def tool(number: int) -> Callable[[], Awaitable[None]]:
            async def work() -> None:
                started.append(f"tool {number}")

            return work

        async def step(ctx: ExecutionContext) -> None:
            started.append("step")

        graph = Graph("g")
        graph.step(step, "first") >> graph.step(step, "second")
        holder = asyncio.ensure_future(run.allm(spend(run, 0.1, seconds=5), cost_hint_usd=0.9))
        await asyncio.sleep(0.1)
        waiting = asyncio.ensure_future(run.allm(spend(run, 0.1), cost_hint_usd=0.9))
        await asyncio.sleep(0.1)
        for number in range(8):  # more than may pass a call that waits
            await run.atool(tool(number))
        await graph.execute(run)
        assert not holder.done()
        return await asyncio.gather(holder, waiting)

    run, outcome = simulate(main, max_cost_usd=1)
    assert outcome == ["done", "done"]
    assert started == [*(f"tool {number}" for number in range(8)), "step", "step"]
    assert len(waits(run)) == 1
    whole(run)


def test_explain_says_that_a_call_waited() -> None:
    async def main(run: ExecutionContext) -> None:
        await asyncio.gather(*(run.allm(spend(run, 0.1), name=f"call {n}", cost_hint_usd=0.9) for n in range(2)))

    run, _ = simulate(main, max_cost_usd=1)
    assert "waited 1.00 s" in run.explain()


@pytest.mark.parametrize("waiting", [15, 16, 40])
def test_a_call_inside_one_that_holds_passes_any_number_of_calls_that_wait(waiting: int) -> None:
    async def main(run: ExecutionContext) -> Any:
        async def outer() -> str:
            await asyncio.sleep(1)
            await run.allm(spend(run, 0), cost_hint_usd=0.2)
            run.report(cost_usd=0)
            return "done"

        holds = asyncio.ensure_future(run.allm(outer, cost_hint_usd=0.3))
        other = asyncio.ensure_future(run.allm(spend(run, 0, seconds=5), cost_hint_usd=0.6))
        await asyncio.sleep(0.1)
        queue = [asyncio.ensure_future(run.allm(spend(run, 0), cost_hint_usd=0.8)) for _ in range(waiting)]
        return await asyncio.gather(holds, other, *queue)

    run, outcome = simulate(main, max_cost_usd=1)
    assert outcome == ["done"] * (waiting + 2)
    whole(run)
