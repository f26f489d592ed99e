"""Model calls without a hint that draw on one account of a store run one at a time until one has ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore
from penstock.containment.limits import Budget, BudgetExceededError, Limits
from penstock.errors import Halted, LedgerUnavailable
from penstock.runtime import worker
from penstock.runtime.billing.usage import Reported
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import async_ledger, shared
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.runtime.durable.blocks import Blocks, is_block
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.run import RunSettings
from penstock.storage import SqliteLedgerStore
from penstock.testing import ManualClock
from tests.runtime.durable.test_shared import USD, never, until_sync

pytestmark = pytest.mark.requirement("X-9")

RUNS = 16
HALF = USD // 2


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LedgerStore]:
    made: Any = MemoryLedgerStore() if request.param == "memory" else SqliteLedgerStore(tmp_path / "ledger.db")
    made.open_account("team", Limits(cost_nanos=USD))
    yield made
    if request.param == "sqlite":
        made.close()


def run_on(store: Any, number: int = 1, account: str = "team", **options: Any) -> ExecutionContext:
    shared = SharedBudget(store, account, prefix=f"run{number}/1", owner=f"owner{number}")
    return ExecutionContext(shared_budget=shared, **options)


class Running:
    """Calls, and how many of them ran at once at most."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.before_any_ended = 0
        self.ended = 0
        self.lock = threading.Lock()

    def begin(self) -> None:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            if not self.ended:
                self.before_any_ended += 1

    def end(self) -> Reported[str]:
        with self.lock:
            self.now -= 1
            self.ended += 1
        return Reported.of("text", cost_usd=0.5)


def test_runs_at_one_account_pass_its_ceiling_by_one_call_at_most(store: LedgerStore) -> None:
    running, together = Running(), threading.Barrier(RUNS)

    def ask() -> Reported[str]:
        running.begin()
        return running.end()

    def work(number: int) -> bool:
        with run_on(store, number) as run:
            together.wait(60)
            return run.call_llm(ask).call.stop is None

    with ThreadPoolExecutor(RUNS) as pool:
        assert sum(pool.map(work, range(RUNS))) == 2
    assert running.before_any_ended == 1
    assert store.balance("team").spent_nanos == USD
    assert (dict(store.held()), dict(store.queued())) == ({}, {})


async def test_tasks_at_one_account_pass_its_ceiling_by_one_call_at_most(store: LedgerStore) -> None:
    running = Running()

    async def ask() -> Reported[str]:
        running.begin()
        await asyncio.sleep(0)
        return running.end()

    runs = [run_on(store, number) for number in range(RUNS)]
    answers = await asyncio.gather(*(run.acall_llm(ask) for run in runs))
    assert [answer.call.stop is None for answer in answers].count(True) == 2
    assert running.before_any_ended == 1
    for run in runs:
        run.end()
    assert (await asyncio.to_thread(store.balance, "team")).spent_nanos == USD


@pytest.mark.parametrize("kind", ["hinted", "tool", "no money limit"])
def test_no_other_call_waits_for_one_of_unknown_cost(kind: str, store: LedgerStore) -> None:
    store.open_account("free", Limits(steps=100))
    account = "free" if kind == "no money limit" else "team"
    began, done = threading.Event(), threading.Event()

    def first() -> Reported[str]:
        began.set()
        assert done.wait(60)
        return Reported.of("text", cost_usd=0.1)

    settings = RunSettings(max_wait_s=0)
    with (
        ThreadPoolExecutor(1) as pool,
        run_on(store, 1, account) as run,
        run_on(store, 2, account, settings=settings) as other,
    ):
        asking = pool.submit(run.llm, first)
        assert began.wait(60)
        if kind == "hinted":
            assert other.llm(lambda: "hinted", cost_hint_usd=0.1) == "hinted"
        elif kind == "tool":
            assert other.tool(lambda: "tool") == "tool"
        else:
            assert other.llm(lambda: "free") == "free"
        done.set()
        asking.result(60)


def test_a_call_inside_one_of_unknown_cost_does_not_wait_for_it(store: LedgerStore) -> None:
    settings = RunSettings(max_wait_s=0)
    with run_on(store, 1, settings=settings) as run, run_on(store, 2, settings=settings) as other:

        def inside() -> str:
            deepest: str = run.llm(lambda: "deepest")
            return deepest

        def outer() -> str:
            of_another_run: str = other.llm(inside)
            return of_another_run

        assert run.llm(outer) == "deepest"
    assert dict(store.queued()) == {}


def test_a_call_that_failed_before_any_has_ended_lets_the_next_one_run_alone(store: LedgerStore) -> None:
    running, together = Running(), threading.Barrier(4)

    def ask() -> Reported[str]:
        running.begin()
        with running.lock:
            running.now -= 1
        raise ValueError("no answer")

    def work(number: int) -> None:
        with run_on(store, number) as run:
            together.wait(60)
            run.call_llm(ask)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert (running.before_any_ended, running.most) == (4, 1)


def test_the_most_that_a_call_has_cost_is_known_to_later_runs(store: LedgerStore) -> None:
    with run_on(store, 1) as run:
        run.llm(lambda: Reported.of("text", cost_usd=0.6))
    with run_on(store, 2) as run, pytest.raises(BudgetExceededError):
        run.llm(never)
    assert store.balance("team").spent_nanos == 6 * USD // 10


def test_the_lease_of_a_long_call_is_renewed_and_then_forgotten(
    store: LedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "LEASE_S", 0.06)
    renewed: list[str] = []
    renew = type(store).renew_unhinted

    def counted(self: Any, key: str) -> bool:
        if len(renewed) == 2:
            renewed.append("")
            raise LedgerUnavailable("for a moment")
        renewed.append(key)
        return renew(self, key)

    monkeypatch.setattr(type(store), "renew_unhinted", counted)
    busy = worker.busy_workers()
    with run_on(store) as run:
        run.llm(lambda: until_sync(lambda: len(renewed) > 5))
    assert len(set(renewed)) == 2
    until_sync(lambda: not async_ledger._leases.renewals and worker.busy_workers() <= busy)


def test_a_call_of_unknown_cost_leaves_the_block_of_its_run(store: LedgerStore) -> None:
    """Blocks hide the calls of one worker from those of others."""

    async def begin(number: int) -> ExecutionContext:
        ledger = AsyncLedger(store)
        block = await Blocks(ledger, f"worker{number}", ManualClock()).account_for(["team"])
        assert is_block(block)
        account = f"account{number}"
        await ledger.open_account(account, Limits(), parent=block)
        budget = SharedBudget(store, account, prefix=f"run{number}/1", above=[block, "team"])
        return ExecutionContext(shared_budget=budget, settings=RunSettings(max_wait_s=0))

    first, second = (asyncio.run(begin(number)) for number in (1, 2))
    with first, second:

        def ask() -> Reported[str]:
            with pytest.raises((BudgetExceededError, Halted), match="one at a time"):
                in_a_thread(lambda: second.llm(never))
            return Reported.of("text", cost_usd=0.5)

        first.llm(ask)
    assert store.balance("team").spent_nanos == HALF


def in_a_thread(work: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_calls_of_one_run_run_one_at_a_time_with_and_without_a_limit_of_its_own(store: LedgerStore) -> None:
    for number, budget in enumerate((None, Budget(max_cost_dollars=10))):
        store.open_account(f"own {number}", Limits(cost_nanos=USD))
        options = {} if budget is None else {"budget": budget}
        running, together = Running(), threading.Barrier(4)
        with run_on(store, 10 + number, f"own {number}", **options) as run:

            def ask(running: Running = running) -> Reported[str]:
                running.begin()
                return running.end()

            def work(_: int, run: ExecutionContext = run, together: threading.Barrier = together) -> bool:
                together.wait(60)
                return run.call_llm(ask).call.stop is None

            with ThreadPoolExecutor(4) as pool:
                assert sum(pool.map(work, range(4))) == 2
        assert running.before_any_ended == 1
        assert store.held(f"run{10 + number}/") == {}
        assert store.balance(f"own {number}").spent_nanos == USD


def test_a_hinted_call_that_holds_money_keeps_no_call_of_unknown_cost_waiting(store: LedgerStore) -> None:
    assert store.hold("outside", "team", Amounts(HALF)) is None
    with run_on(store, settings=RunSettings(max_wait_s=0)) as run:
        assert run.llm(lambda: Reported.of("text", cost_usd=0.1)) == "text"
