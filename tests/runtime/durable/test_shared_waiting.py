"""A call that only the holds of others keep out of a shared budget waits, and holds nothing meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.messages import Message
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore, TicketRequest
from penstock.containment.limits import Budget, BudgetExceededError, Limits
from penstock.errors import CancelledError, Halted, LedgerUnavailable
from penstock.runtime.billing.usage import Reported
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.run import RunSettings
from penstock.stops import StopReason
from penstock.storage import SqliteLedgerStore
from penstock.tracing.events import CallWaiting
from tests.runtime.durable.test_shared import USD, Store, anever, never, until_sync
from tests.runtime.durable.test_shared_clamping import TOKEN, ledger, run_at, saying

pytestmark = pytest.mark.requirement("X-9")

CALLS = 12


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerStore]:
    """A store with an account of which each call wants all, so that only one can run at a time."""
    made: Any = MemoryLedgerStore() if request.param == "memory" else SqliteLedgerStore(tmp_path / "ledger.db")
    made.open_account("team", Limits(cost_nanos=USD + CALLS * USD // 100))
    yield made
    if request.param == "sqlite":
        made.close()


def run_on(store: Any, number: int = 1, **options: Any) -> ExecutionContext:
    shared = SharedBudget(store, "team", prefix=f"run{number}/1", owner=f"owner{number}")
    return ExecutionContext(shared_budget=shared, **options)


def cheap() -> Reported[str]:
    return Reported.of("text", cost_usd=0.01)


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once it is so; the condition may read a file, which is not done on an event loop."""
    for _ in range(20_000):
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never was")


class Occupied:
    """Holds so much of the account from outside, until it is let go."""

    def __init__(self, store: LedgerStore, nanos: int = USD) -> None:
        self.store = store
        assert store.hold("outside", "team", Amounts(nanos)) is None

    def let_go(self) -> None:
        self.store.release("outside")


async def test_all_tasks_complete_whose_worst_cases_do_not_fit_together(store: LedgerStore) -> None:
    most = []

    async def ask() -> Reported[str]:
        most.append((await asyncio.to_thread(store.balance, "team")).held_nanos)
        await asyncio.sleep(0)
        return cheap()

    runs = [run_on(store, number) for number in range(CALLS)]
    assert await asyncio.gather(*(run.allm(ask, cost_hint_usd=1) for run in runs)) == ["text"] * CALLS
    assert set(most) == {USD}, "one at a time"
    assert (await asyncio.to_thread(store.balance, "team")).spent_nanos == CALLS * USD // 100
    assert (dict(await asyncio.to_thread(store.queued)), dict(await asyncio.to_thread(store.held))) == ({}, {})
    for run in runs:
        run.end()
        assert (run.balance.spent_nanos, run.balance.held_nanos) == (USD // 100, 0)


def test_all_threads_complete_whose_worst_cases_do_not_fit_together(store: LedgerStore) -> None:
    def work(number: int) -> str:
        with run_on(store, number) as run:
            answer: str = run.llm(cheap, cost_hint_usd=1)
            return answer

    with ThreadPoolExecutor(CALLS) as pool:
        assert list(pool.map(work, range(CALLS))) == ["text"] * CALLS
    assert store.balance("team").spent_nanos == CALLS * USD // 100
    assert (dict(store.queued()), dict(store.held())) == ({}, {})


async def test_a_call_that_waits_at_a_store_is_shown_as_waiting(store: LedgerStore) -> None:
    outside = await asyncio.to_thread(Occupied, store)
    run = run_on(store, budget=Budget(max_cost_dollars=1))
    calling = asyncio.ensure_future(run.allm(cheap, name="ask", cost_hint_usd=1))
    await eventually(lambda: "waits for other calls to end" in run.explain())
    await asyncio.to_thread(outside.let_go)
    await calling
    (waiting,) = [event for event in run.history() if isinstance(event, CallWaiting)]
    assert (waiting.name, waiting.budget, waiting.asked) == ("ask", "team", 1.0)
    assert "waits" not in run.explain()
    (node,) = [node for node in run.graph.snapshot()["nodes"].values() if node["name"] == "ask"]
    assert node["metadata"]["waited_ms"] >= 0


async def test_a_call_that_waits_holds_nothing_in_its_own_run(store: LedgerStore) -> None:
    outside = await asyncio.to_thread(Occupied, store)
    run = run_on(store, budget=Budget(max_cost_dollars=1, max_steps=1))
    calling = asyncio.ensure_future(run.allm(cheap, cost_hint_usd=1))
    await eventually(lambda: bool(store.queued()))
    await eventually(lambda: run.balance.held_nanos == 0)
    assert (run.balance.steps_open, run.balance.attempts) == (0, 0)
    assert set(await asyncio.to_thread(store.held)) == {"outside"}
    await asyncio.to_thread(outside.let_go)
    assert await calling == "text"
    assert (run.balance.spent_nanos, run.balance.steps) == (USD // 100, 1)


@pytest.mark.parametrize("is_async", [True, False], ids=["task", "thread"])
def test_a_cancel_ends_the_wait_and_the_call_leaves_the_queue(is_async: bool, store: LedgerStore) -> None:
    outside = Occupied(store)
    token = CancellationToken()
    run = run_on(store, cancellation=token)

    def work() -> None:
        with pytest.raises(CancelledError, match="enough"):
            asyncio.run(run.allm(anever, cost_hint_usd=1)) if is_async else run.llm(never, cost_hint_usd=1)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        until_sync(lambda: bool(store.queued()))
        token.cancel("enough")
        done.result(60)
    until_sync(lambda: not store.queued())
    outside.let_go()
    assert dict(store.held()) == {}
    assert store.balance("team").attempts == 1, "that of the outside"
    run.end()


@pytest.mark.parametrize("is_async", [True, False], ids=["task", "thread"])
def test_the_time_limit_of_a_run_ends_the_wait(is_async: bool, store: LedgerStore) -> None:
    Occupied(store)
    run = run_on(store, budget=Budget(max_time_seconds=0.1))
    with pytest.raises(BudgetExceededError) as stopped:
        asyncio.run(run.allm(anever, cost_hint_usd=1)) if is_async else run.llm(never, cost_hint_usd=1)
    assert stopped.value.stop.reason is StopReason.TIMEOUT
    until_sync(lambda: not store.queued())
    run.end()


@pytest.mark.parametrize("is_async", [True, False], ids=["task", "thread"])
def test_a_call_waits_no_longer_than_the_settings_of_its_run_allow(is_async: bool, store: LedgerStore) -> None:
    Occupied(store)
    run = run_on(store, settings=RunSettings(max_wait_s=0.05))
    with pytest.raises(BudgetExceededError, match=r"of 'team'; the call would hold \$1.*; waited 0.05 s"):
        asyncio.run(run.allm(anever, cost_hint_usd=1)) if is_async else run.llm(never, cost_hint_usd=1)
    until_sync(lambda: not store.queued())
    assert run.balance.held_nanos == 0
    run.end()


def test_a_run_whose_calls_may_not_wait_is_refused_at_once(store: LedgerStore) -> None:
    Occupied(store)
    run = run_on(store, settings=RunSettings(max_wait_s=0))
    with pytest.raises(BudgetExceededError) as refused:
        run.llm(never, cost_hint_usd=1)
    assert "waited" not in refused.value.stop.message
    run.end()


async def test_a_sync_call_on_an_event_loop_does_not_wait_and_its_stop_names_the_async_twin(store: LedgerStore) -> None:
    await asyncio.to_thread(Occupied, store)
    run = run_on(store)
    with pytest.raises(BudgetExceededError, match="await its async twin"):
        run.llm(never, cost_hint_usd=1)
    assert dict(await asyncio.to_thread(store.queued)) == {}


async def test_a_call_that_only_its_own_caller_keeps_out_is_refused_at_once(store: LedgerStore) -> None:
    run = run_on(store)

    async def outer() -> Reported[str]:
        with pytest.raises(BudgetExceededError, match="the calls that hold the rest wait themselves"):
            await run.allm(anever, cost_hint_usd=1)
        return cheap()

    assert await run.allm(outer, cost_hint_usd=1) == "text"


async def test_of_two_runs_whose_inner_calls_keep_each_other_out_the_newest_is_refused(store: LedgerStore) -> None:
    await asyncio.to_thread(store.grant, "team", Limits(cost_nanos=2 * USD))
    both = asyncio.Barrier(2)

    async def work(number: int) -> str:
        run = run_on(store, number)

        async def outer() -> Reported[str]:
            await both.wait()
            try:
                return Reported.of(await run.allm(cheap, cost_hint_usd=1), cost_usd=0)
            except BudgetExceededError:
                return Reported.of("refused", cost_usd=0)

        answer: str = await run.allm(outer, cost_hint_usd=1)
        return answer

    assert sorted(await asyncio.gather(work(1), work(2))) == ["refused", "text"]


async def test_a_call_that_is_admitted_waits_for_room_in_its_own_run_as_well(store: LedgerStore) -> None:
    """Its own run's room is taken while it waits at the store: it gives the store's hold back, and waits for both."""
    await asyncio.to_thread(store.grant, "team", Limits(cost_nanos=3 * USD))
    outside = await asyncio.to_thread(Occupied, store, 3 * USD)
    run = run_on(store, budget=Budget(max_cost_dollars=1.05))
    first = asyncio.ensure_future(run.allm(cheap, cost_hint_usd=1))
    await eventually(lambda: bool(store.queued()))
    other = run._run.ledger.hold(run._account, USD)  # as another call of the run would
    await asyncio.to_thread(outside.let_go)
    await eventually(lambda: not store.held() and not store.queued())
    assert not first.done()
    run._run.ledger.release(other)  # type: ignore[arg-type]
    assert await first == "text"
    assert run.balance.spent_nanos == USD // 100


async def test_a_call_whose_ticket_has_expired_asks_again(store: LedgerStore) -> None:
    outside = await asyncio.to_thread(Occupied, store)
    calling = asyncio.ensure_future(run_on(store).allm(cheap, cost_hint_usd=1))
    await eventually(lambda: bool(store.queued()))
    (key,) = await asyncio.to_thread(store.queued)
    (await asyncio.to_thread(store.leave_queue, key))
    await eventually(lambda: key in store.queued())
    await asyncio.to_thread(outside.let_go)
    assert await calling == "text"


async def test_the_end_of_a_run_ends_the_wait_of_its_calls(store: LedgerStore) -> None:
    await asyncio.to_thread(Occupied, store)
    run = run_on(store)
    calling = asyncio.ensure_future(run.allm(anever, cost_hint_usd=1))
    await eventually(lambda: bool(store.queued()))
    run.end()
    with pytest.raises((CancelledError, Halted)):
        await calling
    await eventually(lambda: not store.queued())


async def test_a_store_that_fails_while_a_call_waits_refuses_it_and_the_ticket_is_given_back_later() -> None:
    store = Store(cost_nanos=USD)
    await asyncio.to_thread(Occupied, store.inner)
    store.poll_s = 0.01
    run = run_on(store)
    calling = asyncio.ensure_future(run.allm(anever, cost_hint_usd=1))
    await eventually(lambda: bool(store.inner.queued()))
    store.fails["renew"] = LedgerUnavailable("gone")
    with pytest.raises(Halted) as refused:
        await calling
    assert refused.value.stop.reason is StopReason.LEDGER_UNAVAILABLE
    await eventually(lambda: not store.inner.queued())
    run.end()


def test_tickets_of_earlier_claims_leave_the_queue_and_their_holds_are_withdrawn(store: LedgerStore) -> None:
    Occupied(store)
    for key in ("run1/1/a", "run1/1/b", "run2/1/a"):
        store.join_queue(key, "team", Amounts(USD), TicketRequest())
    store.release("outside")
    assert set(store.held()) == {"run1/1/a"}
    assert SharedBudget(store, "team", prefix="run1/2").recover() == ()
    assert dict(store.unresolved()) == {}, "it had not been picked up, so its call did not run"
    assert set(store.held()) == set(store.queued()) == {"run2/1/a"}


async def test_a_model_call_waits_for_its_whole_output_instead_of_having_less_because_of_others() -> None:
    store, seen = ledger(cost_nanos=150 * TOKEN), list[int]()
    outside = store.hold("outside", "team", Amounts(cost_nanos=100 * TOKEN))
    assert outside is None
    calling = asyncio.ensure_future(saying(5, seen).generate(run_at(store), [Message.user("Go on.")]))
    await eventually(lambda: bool(store.queued()))
    assert seen == []
    store.release("outside")
    await calling
    assert seen == [100]


async def test_a_model_call_has_less_output_only_for_what_others_spend() -> None:
    store, seen = ledger(cost_nanos=150 * TOKEN), list[int]()
    store.hold("outside", "team", Amounts(cost_nanos=100 * TOKEN))
    calling = asyncio.ensure_future(saying(5, seen).generate(run_at(store), [Message.user("Go on.")]))
    await eventually(lambda: bool(store.queued()))
    store.settle("outside", Amounts(cost_nanos=90 * TOKEN))
    await calling
    assert seen == [60]


@pytest.mark.parametrize("unit", ["cost_nanos", "tokens"])
async def test_a_model_call_that_has_to_have_less_output_has_no_less_because_of_others(unit: str) -> None:
    size, kind = (TOKEN, "cost_nanos") if unit == "cost_nanos" else (1, "tokens_out")
    store, seen = ledger(**{unit: 150 * size}), list[int]()
    store.charge("spent", "team", Amounts(**{kind: 60 * size}))
    store.hold("outside", "team", Amounts(**{kind: 50 * size}))
    calling = asyncio.ensure_future(saying(5, seen).generate(run_at(store), [Message.user("Go on.")]))
    await eventually(lambda: bool(store.queued()))
    store.release("outside")
    await calling
    assert seen == [90]


async def test_what_is_unresolved_is_not_waited_for() -> None:
    store, seen = ledger(cost_nanos=150 * TOKEN), list[int]()
    store.hold("outside", "team", Amounts(cost_nanos=100 * TOKEN))
    store.leave_unresolved("outside")
    await saying(5, seen).generate(run_at(store), [Message.user("Go on.")])
    assert seen == [50]
