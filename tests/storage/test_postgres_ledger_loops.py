"""The ledger in PostgreSQL as tasks use it: on their own event loop, without a thread, and left behind by callers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

import asyncpg
import pytest

from penstock.clock import Clock
from penstock.containment.ledger import Amounts, LedgerStore
from penstock.containment.limits import BudgetExceededError, Limits
from penstock.errors import CancelledError, LedgerUnavailable
from penstock.runtime.billing.usage import Reported
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.async_ledger import AsyncLedger, BlockingLedger
from penstock.runtime.durable.loop_thread import LoopThread, run_on
from penstock.runtime.durable.shared import SharedBudget
from penstock.stops import StopReason
from penstock.storage.postgres.ledger import PostgresLedgerStore
from tests.runtime.durable.test_shared import until
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server, run
from tests.storage.test_postgres_ledger import PATIENCE_S, Contract, cut, locked, read_only, wait_for_waiting

__all__ = ["dsn", "ledger_database", "postgres_server"]

T = TypeVar("T")
USD = 1_000_000_000
SESSIONS = """SELECT 1 FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = 'penstock ledger'"""


class Elsewhere:
    """The ledger of a store, whose operations are those of tasks on another loop than its own."""

    def __init__(self, store: PostgresLedgerStore) -> None:
        self.store = store
        self.thread = LoopThread("elsewhere")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store.ledger, name)

    def run_blocking(self, operation: Coroutine[Any, Any, T]) -> T:
        return run_on(self.thread.loop, operation, PATIENCE_S)


@pytest.mark.requirement("X-1", "P-B4", "P-B5", "C-3")
class TestOnTheLoopOfATask(Contract):
    """Every operation in a task of its caller's loop."""

    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        return read_only(self.dsn)

    def make_store(self, clock: Clock) -> LedgerStore:
        store = super().make_store(clock)
        assert isinstance(store, PostgresLedgerStore)
        return BlockingLedger(Elsewhere(store))

    def close_store(self, store: LedgerStore) -> None:
        assert isinstance(store, BlockingLedger)
        assert isinstance(store.ledger, Elsewhere)
        store.ledger.store.close()
        store.ledger.thread.close()


@pytest.fixture
def store(dsn: str) -> Iterator[PostgresLedgerStore]:
    """A store that no thread has used yet, with an account for one call."""
    with PostgresLedgerStore(dsn) as opening:
        opening.open_account("team", Limits(cost_nanos=USD))
    with PostgresLedgerStore(dsn, timeout_s=PATIENCE_S) as made:
        made.ledger.settings["lock_timeout"] = str(int(PATIENCE_S * 1_000))
        yield made


def shared_at(store: PostgresLedgerStore) -> SharedBudget:
    return SharedBudget(store, "team", prefix="run/1")


async def never() -> None:
    raise AssertionError("it was not to run")


def until_closed(dsn: str, which: str = "") -> None:
    """The server hears of the end of a connection a moment later."""
    while run(dsn, SESSIONS + which):
        time.sleep(0.001)


@asynccontextmanager
async def account_locked(dsn: str) -> AsyncIterator[None]:
    connection = await asyncpg.connect(dsn)
    try:
        async with connection.transaction():
            await connection.execute("SELECT 1 FROM penstock_ledger_accounts FOR UPDATE")
            yield
    finally:
        await connection.close()


async def one_waits(dsn: str) -> None:
    await asyncio.to_thread(wait_for_waiting, dsn, 1)


async def test_a_task_holds_and_settles_without_any_thread(store: PostgresLedgerStore) -> None:
    before = set(threading.enumerate())
    held: list[Any] = []

    async def work() -> str:
        held.append(await AsyncLedger(store).held())
        return "text"

    with ExecutionContext(shared_budget=shared_at(store)) as context:
        assert await context.allm(work, cost_hint_usd=1) == "text"
    assert held == [{"run/1/n000002": Amounts(USD, 0, 0, 1)}]
    assert (await AsyncLedger(store).balance("team")).spent_nanos == USD
    assert set(threading.enumerate()) <= before


def test_connections_of_a_loop_are_closed_with_it(dsn: str, store: PostgresLedgerStore) -> None:
    with ExecutionContext(shared_budget=shared_at(store)) as context:
        for _ in range(3):
            assert asyncio.run(context.allm(lambda: "text", cost_hint_usd=0)) == "text"
    until_closed(dsn)
    assert store.balance("team").attempts == 3, "and threads have their own"


async def test_a_store_closed_on_the_loop_of_its_tasks_records_nothing_more(store: PostgresLedgerStore) -> None:
    ledger = AsyncLedger(store)
    assert (await ledger.balance("team")).attempts == 0
    store.close()
    with pytest.raises(LedgerUnavailable, match="it was closed"):
        await ledger.balance("team")


async def test_a_store_closed_by_a_thread_closes_the_connections_of_a_loop(
    dsn: str, store: PostgresLedgerStore
) -> None:
    assert (await AsyncLedger(store).balance("team")).attempts == 0
    await asyncio.to_thread(store.close)
    await asyncio.to_thread(until_closed, dsn)


async def test_connections_that_are_lost_are_replaced_on_the_loop_of_a_task(
    dsn: str, store: PostgresLedgerStore
) -> None:
    ledger = AsyncLedger(store)
    for number in range(3):
        assert await ledger.hold(str(number), "team", Amounts(1)) is None
        await asyncio.to_thread(cut, dsn)
        await ledger.settle(str(number), Amounts(1))
        await asyncio.to_thread(cut, dsn)
    assert (await ledger.balance("team")).spent_nanos == 3


async def test_tables_that_are_gone_are_not_created_again_by_another_loop(dsn: str, store: PostgresLedgerStore) -> None:
    assert (await AsyncLedger(store).balance("team")).attempts == 0
    await asyncio.to_thread(run, dsn, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    await asyncio.to_thread(cut, dsn)
    with pytest.raises(LedgerUnavailable):
        await asyncio.to_thread(store.balance, "team")


async def test_a_task_cancelled_during_its_hold_does_not_wait_and_what_is_taken_is_given_back(
    dsn: str, store: PostgresLedgerStore
) -> None:
    shared = shared_at(store)
    with ExecutionContext(shared_budget=shared) as context:
        async with account_locked(dsn):
            calling = asyncio.create_task(context.allm(never, cost_hint_usd=1))
            await one_waits(dsn)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert shared.asking == 1, "the store has not answered"
        await until(lambda: not shared.asking and not shared.waiting)
    balance = await AsyncLedger(store).balance("team")
    assert (balance.held_nanos, balance.attempts) == (0, 0)


async def test_a_cancelled_run_does_not_wait_for_its_hold_and_what_is_taken_is_given_back(
    dsn: str, store: PostgresLedgerStore
) -> None:
    shared, token = shared_at(store), CancellationToken()
    with ExecutionContext(shared_budget=shared, cancellation=token) as context:
        async with account_locked(dsn):
            calling = asyncio.create_task(context.allm(never, cost_hint_usd=1))
            await one_waits(dsn)
            token.cancel("enough")
            with pytest.raises(CancelledError):
                await calling
        await until(lambda: not shared.asking and not shared.waiting)
    assert (await AsyncLedger(store).balance("team")).held_nanos == 0


def test_a_hold_under_way_when_its_loop_ends_leaves_nothing_held(dsn: str, store: PostgresLedgerStore) -> None:
    shared = shared_at(store)
    with ExecutionContext(shared_budget=shared) as context:
        with locked(dsn):
            with pytest.raises(BudgetExceededError) as stopped:
                asyncio.run(context.allm(never, cost_hint_usd=1, timeout_s=0.2))
            while shared.asking or shared.waiting:  # what may have been taken is given back before there is room for it
                time.sleep(0.001)
        assert stopped.value.stop_reason is StopReason.TIMEOUT
    until_closed(dsn, " AND state = 'active'")
    assert (store.balance("team").held_nanos, store.balance("team").attempts) == (0, 0)


def test_a_settlement_under_way_when_its_loop_ends_is_still_recorded(dsn: str, store: PostgresLedgerStore) -> None:
    shared = shared_at(store)

    async def main() -> None:
        with ExecutionContext(shared_budget=shared) as context:
            await context.allm(lambda: "text", cost_hint_usd=1)
            shared.charged("run/1/more", Amounts(7))
            async with account_locked(dsn):
                flushing = asyncio.create_task(shared.aflush())
                await one_waits(dsn)
                flushing.cancel()
                await asyncio.gather(flushing, return_exceptions=True)

    asyncio.run(main())
    while shared.waiting:
        time.sleep(0.001)
    assert store.balance("team").spent_nanos == USD + 7


async def test_tasks_that_wait_for_the_same_room_take_turns(store: PostgresLedgerStore) -> None:
    running = 0

    async def work() -> Reported[str]:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        assert running == 1
        running -= 1
        return Reported.of("text", cost_usd=0)

    budgets = [SharedBudget(store, "team", prefix=f"run{number}/1") for number in range(4)]
    contexts = [ExecutionContext(shared_budget=shared) for shared in budgets]
    answers = await asyncio.gather(*(context.allm(work, cost_hint_usd=1) for context in contexts))
    for context in contexts:
        context.end()
    assert answers == ["text"] * 4
    assert (await AsyncLedger(store).queued()) == {}
