"""The ledger in PostgreSQL does what every ledger store must, and says when it cannot."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from penstock.clock import Clock
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore, TicketRequest
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.stops import StopReason
from penstock.storage.postgres import ledger, ledger_schema
from penstock.storage.postgres.ledger import PostgresLedgerStore
from penstock.testing import ManualClock
from penstock.testing.contracts import LedgerStoreContract
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server, run

__all__ = ["dsn", "ledger_database", "postgres_server"]

ASK = Amounts(cost_nanos=10, tokens_in=3, tokens_out=4, api_calls=1)
PATIENCE_S = 60.0
"""A noisy machine may hold a connection up for long; these tests are about figures, not about time."""


class Contract(LedgerStoreContract):
    threads = 8

    @pytest.fixture(autouse=True)
    def _database(self, dsn: str) -> None:
        self.dsn = dsn

    def make_store(self, clock: Clock) -> LedgerStore:
        return PostgresLedgerStore(self.dsn, clock=clock, timeout_s=PATIENCE_S)

    def close_store(self, store: LedgerStore) -> None:
        assert isinstance(store, PostgresLedgerStore)
        store.close()

    def pass_time(self, seconds: float) -> None:
        """Leases are measured by the clock of the server, which no test can turn: they end earlier instead."""
        earlier = f"interval '{seconds} seconds'"
        run(
            self.dsn,
            "UPDATE penstock_ledger_tickets "
            f"SET expires = least(expires, deadline) - {earlier}, deadline = deadline - {earlier}",
            f"UPDATE penstock_ledger_unhinted SET expires = expires - {earlier}",
        )


@contextmanager
def read_only(dsn: str) -> Iterator[None]:
    """No transaction of the database may write: open ones are ended, new ones fail."""
    name = run(dsn, "SELECT current_database() AS name")[0]["name"]
    cut(dsn, f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    try:
        yield
    finally:
        run(
            dsn,
            "SET SESSION CHARACTERISTICS AS TRANSACTION READ WRITE",
            f'ALTER DATABASE "{name}" RESET default_transaction_read_only',
        )
        cut(dsn)


def cut(dsn: str, *statements: str) -> None:
    """Break every other connection to the database."""
    ending = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    run(dsn, *statements, f"{ending} WHERE datname = current_database() AND pid <> pg_backend_pid()")


@pytest.mark.requirement("X-1", "P-B4", "P-B5", "C-3")
class TestPostgresLedgerStore(Contract):
    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        return read_only(self.dsn)


@pytest.fixture
def store(dsn: str) -> Iterator[PostgresLedgerStore]:
    with PostgresLedgerStore(dsn, timeout_s=PATIENCE_S) as made:
        yield made


def in_a_child(work: Callable[[], object]) -> int:
    """What a forked child says: 0 if `work` went well, 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_two_stores_on_one_database_are_one_budget(dsn: str, store: PostgresLedgerStore) -> None:
    with PostgresLedgerStore(dsn) as other:
        store.open_account("run", Limits(steps=1))
        assert store.hold("k1", "run", ASK) is None
        assert other.hold("k1", "run", ASK) is None, "the same call, repeated"
        assert other.hold("k2", "run", ASK) is not None
        other.withdraw("k1")
        assert store.balance("run").attempts == 0


def test_ledgers_in_two_schemas_of_one_database_know_nothing_of_each_other(dsn: str) -> None:
    run(dsn, "DROP SCHEMA IF EXISTS apart CASCADE", "CREATE SCHEMA apart")
    with PostgresLedgerStore(dsn) as one, PostgresLedgerStore(f"{dsn}&search_path=apart") as other:
        one.open_account("run", Limits(steps=1))
        other.open_account("run", Limits(steps=2))
        assert one.hold("k", "run", ASK) is None
        assert (one.balance("run").steps_open, other.balance("run").steps_open) == (1, 0)
    run(dsn, "DROP SCHEMA apart CASCADE")


def test_refusals_read_as_those_of_the_store_in_memory(dsn: str) -> None:
    clock = ManualClock()
    cases = [
        Limits(cost_nanos=5_000_000_000),
        Limits(steps=1),
        Limits(tokens=9),
        Limits(api_calls=1),
        Limits(retries=0),
        Limits(time_ns=7),
    ]
    memory = MemoryLedgerStore(clock=clock)
    with PostgresLedgerStore(dsn, clock=clock) as store:
        answers = []
        for each in (memory, store):
            for number, limits in enumerate(cases):
                each.open_account(f"top {number}", limits)
                each.open_account(f"below {number}", NO_LIMITS, parent=f"top {number}")
                each.hold(f"first {number}", f"below {number}", Amounts(3_000_000_000, 3, 4, 1))
        clock.advance_ns(7)
        for each in (memory, store):
            asks = (Amounts(3_000_000_000, 3, 4, 1), Amounts(), Amounts(10**30), Amounts(1, 10**30, 10**30, 10**30))
            answers.append(
                [each.hold(f"{number} {ask}", f"below {number}", ask) for number in range(len(cases)) for ask in asks]
            )
    assert answers[0] == answers[1]
    assert any(stop is not None and stop.asked for stop in answers[0])


def test_errors_read_as_those_of_the_store_in_memory(store: PostgresLedgerStore) -> None:
    store.open_account("run", NO_LIMITS)
    store.open_account("graph", NO_LIMITS, parent="run")
    store.hold("k", "run", Amounts(10))
    with pytest.raises(LedgerError, match=r"^hold 'k' was taken from 'run', not from 'graph'$"):
        store.hold("k", "graph", Amounts(10))
    with pytest.raises(LedgerError, match=r"^hold 'k' was taken for Amounts\(cost_nanos=10, .*not for Amounts"):
        store.hold("k", "run", Amounts(11))
    with pytest.raises(LedgerError, match=r"^no hold 'x': it was refused, or never taken$"):
        store.release("x")
    with pytest.raises(KeyError, match=r"no account 'unknown'; open it first"):
        store.balance("unknown")


def test_a_connection_that_is_lost_is_replaced_and_nothing_is_counted_twice(
    dsn: str, store: PostgresLedgerStore
) -> None:
    store.open_account("run", NO_LIMITS)
    for number in range(5):
        cut(dsn)
        assert store.hold(str(number), "run", ASK) is None
        cut(dsn)
        store.settle(str(number), ASK)
    assert (store.balance("run").spent_nanos, store.balance("run").attempts) == (50, 5)


@pytest.mark.parametrize("key", [None, "k"])
def test_a_retry_whose_answer_was_lost_is_drawn_again_only_by_its_key(
    dsn: str, store: PostgresLedgerStore, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    fetch, lost = asyncpg.Connection.fetch, 0

    async def fetch_unheard(connection: Any, statement: str, *args: Any) -> Any:
        nonlocal lost
        rows = await fetch(connection, statement, *args)
        if "draw_retry" in statement and not lost:
            lost += 1
            raise ConnectionResetError("the answer was lost")
        return rows

    store.open_account("run", Limits(retries=3))
    monkeypatch.setattr(asyncpg.Connection, "fetch", fetch_unheard)
    if key is None:
        with pytest.raises(LedgerUnavailable, match="the answer was lost"):
            store.draw_retry("run", key)
    else:
        assert store.draw_retry("run", key)
    assert (lost, store.balance("run").retries) == (1, 1)
    assert store.draw_retry("run")
    assert store.balance("run").retries == 2


def test_connections_lost_during_many_operations_leave_exact_figures(dsn: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", NO_LIMITS)
    is_over = threading.Event()

    def work(thread: int) -> int:
        """How many holds were answered; one whose answer is lost is repeated."""
        for number in range(40):
            for end in (lambda key: store.hold(key, "run", ASK), lambda key: store.settle(key, ASK)):
                while True:
                    try:
                        end(f"{thread}:{number}")
                        break
                    except LedgerUnavailable:
                        continue
        return 40

    def break_them() -> None:
        for _ in range(20):
            if not is_over.wait(0.05):
                cut(dsn)

    with ThreadPoolExecutor(5) as pool:
        breaking = pool.submit(break_them)
        try:
            done = sum(pool.map(work, range(4)))
        finally:
            is_over.set()
        breaking.result()
    figures = store.balance("run")
    assert (figures.steps, figures.attempts, figures.spent_nanos, figures.held_nanos) == (done, done, 10 * done, 0)


def test_an_operation_that_waits_too_long_for_a_lock_fails_and_changes_nothing(dsn: str) -> None:
    with PostgresLedgerStore(dsn, timeout_s=0.2) as store:
        _once_made(store)
        store.open_account("run", NO_LIMITS)
        before = store.balance("run")
        with locked(dsn), pytest.raises(LedgerUnavailable, match="cannot record: "):
            store.hold("k", "run", ASK)
        assert store.balance("run") == before
        assert store.hold("k", "run", ASK) is None


@pytest.mark.parametrize("account", ["run", "below"])
def test_of_two_operations_that_wait_for_the_same_room_one_gets_it(
    dsn: str, store: PostgresLedgerStore, account: str
) -> None:
    store.open_account("run", Limits(cost_nanos=15))
    store.open_account("below", NO_LIMITS, parent="run")
    with ThreadPoolExecutor(2) as pool:
        with locked(dsn):
            futures = [pool.submit(store.hold, f"k{number}", account, ASK) for number in range(2)]
            wait_for_waiting(dsn, 2)
        stops = [future.result() for future in futures]
    assert stops.count(None) == 1, "each judged by what was there before the other one took it"
    assert store.balance("run").held_nanos == 10


def test_a_concurrent_settle_and_release_do_not_both_end_a_hold(dsn: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", NO_LIMITS)
    store.hold("k", "run", ASK)
    with ThreadPoolExecutor(2) as pool:
        with locked(dsn):
            ends = [pool.submit(store.release, "k"), pool.submit(store.settle, "k", ASK)]
            wait_for_waiting(dsn, 2)
        refused = [one for one in ends if isinstance(one.exception(), LedgerError)]
    assert len(refused) == 1
    assert (store.balance("run").held_nanos, store.balance("run").attempts) == (0, 1)


OPERATIONS_BELOW: dict[str, Callable[[PostgresLedgerStore], object]] = {
    "hold": lambda store: store.hold("new", "run", ASK),
    "settle": lambda store: store.settle("k", ASK),
    "release": lambda store: store.release("k"),
    "charge": lambda store: store.charge("new", "run", ASK),
    "draw_retry": lambda store: store.draw_retry("run", "k"),
    "open_account": lambda store: store.open_account("below", NO_LIMITS, parent="run"),
}


@pytest.mark.parametrize("name", OPERATIONS_BELOW)
def test_an_operation_that_waits_while_its_account_is_moved_counts_at_the_new_parent(
    name: str, dsn: str, store: PostgresLedgerStore
) -> None:
    for account in ("run", "day"):
        store.open_account(account, NO_LIMITS)
    store.hold("k", "run", ASK)
    with ThreadPoolExecutor(2) as pool:
        with locked(dsn):
            put = pool.submit(store.put_under, "run", "day")
            wait_for_waiting(dsn, 1)
            operation = pool.submit(OPERATIONS_BELOW[name], store)
            wait_for_waiting(dsn, 2)
        put.result()
        operation.result()
    if name == "open_account":
        store.hold("below it", "below", ASK)
    assert replace(store.balance("day"), name="run") == store.balance("run")


def test_a_hold_that_waits_while_its_account_is_put_under_a_budget_that_is_used_up_is_refused(
    dsn: str, store: PostgresLedgerStore
) -> None:
    store.open_account("run", NO_LIMITS)
    store.open_account("day", Limits(steps=1))
    store.hold("k", "run", ASK)
    with ThreadPoolExecutor(2) as pool:
        with locked(dsn):
            put = pool.submit(store.put_under, "run", "day")
            wait_for_waiting(dsn, 1)
            hold = pool.submit(store.hold, "k2", "run", ASK)
            wait_for_waiting(dsn, 2)
        put.result()
        stop = hold.result()
    assert stop is not None
    assert (stop.reason, stop.budget) == (StopReason.STEP_LIMIT_EXCEEDED, "day")


def wait_for_waiting(dsn: str, count: int) -> None:
    """Return once this many operations wait for a lock."""
    waiting = """SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
        AND application_name = 'penstock ledger'"""
    while len(run(dsn, waiting)) < count:
        continue


def _once_made(store: PostgresLedgerStore) -> None:
    """Making the tables may take longer than an impatient store waits."""
    while True:
        try:
            return store.ensure()
        except LedgerUnavailable:
            continue


@contextmanager
def locked(dsn: str) -> Iterator[None]:
    """Another connection has the account locked."""
    import asyncio

    loop = asyncio.new_event_loop()
    connection = loop.run_until_complete(asyncpg.connect(dsn))
    try:
        loop.run_until_complete(connection.execute("BEGIN; SELECT 1 FROM penstock_ledger_accounts FOR UPDATE"))
        yield
        loop.run_until_complete(connection.execute("ROLLBACK"))
    finally:
        loop.run_until_complete(connection.close())
        loop.close()


def test_a_forked_child_and_its_parent_share_one_budget(dsn: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", Limits(steps=2))
    store.hold("parent", "run", ASK)

    def work() -> None:
        assert store.hold("child", "run", ASK) is None
        assert store.balance("run").steps_open == 2
        store.close()

    assert in_a_child(work) == 0
    assert store.balance("run").steps_open == 2
    assert store.hold("one too many", "run", ASK) is not None


def test_concurrent_creation_of_the_tables_succeeds(dsn: str) -> None:
    stores = [PostgresLedgerStore(dsn, timeout_s=PATIENCE_S) for _ in range(6)]

    def work(number: int) -> object:
        stores[number].open_account("run", NO_LIMITS)
        return stores[number].hold(str(number), "run", ASK)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [None] * 6
    assert stores[0].balance("run").steps_open == 6
    for store in stores:
        store.close()


def test_an_operation_waits_for_the_disk_as_the_server_is_set_or_not_at_all(dsn: str) -> None:
    name = run(dsn, "SELECT current_database() AS name")[0]["name"]
    run(dsn, f"ALTER DATABASE {name} SET synchronous_commit = local")
    try:
        for fsync, setting in ((True, "local"), (False, "off")):
            with PostgresLedgerStore(dsn, timeout_s=PATIENCE_S, fsync=fsync) as store:
                (row,) = store.ledger.run_blocking(store.ledger._rows("SHOW synchronous_commit"))
                assert row["synchronous_commit"] == setting
    finally:
        run(dsn, f"ALTER DATABASE {name} SET synchronous_commit = off")


def test_a_closed_store_records_nothing_and_may_be_closed_again(dsn: str) -> None:
    store = PostgresLedgerStore(dsn)
    store.open_account("run", NO_LIMITS)
    store.close()
    store.close()
    with pytest.raises(LedgerUnavailable, match="it was closed"):
        store.balance("run")
    assert "penstock-ledger-postgres" not in {thread.name for thread in threading.enumerate()}


def test_a_store_that_was_never_used_has_nothing_to_close() -> None:
    PostgresLedgerStore("postgresql://none@127.0.0.1:1/none").close()


def test_an_unreachable_server_is_reported_without_the_password() -> None:
    with PostgresLedgerStore("postgresql://me:s3cret@127.0.0.1:1/none") as store:
        with pytest.raises(LedgerUnavailable, match=r"'postgresql://127\.0\.0\.1:1/none' cannot record: ") as raised:
            store.open_account("run", NO_LIMITS)
        assert "s3cret" not in str(raised.value)


def test_missing_tables_are_not_created_again(dsn: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", Limits(steps=1))
    run(dsn, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    cut(dsn)
    for operation in (lambda: store.hold("k", "run", ASK), lambda: store.balance("run")):
        with pytest.raises(LedgerUnavailable, match="penstock_ledger"):
            operation()
    assert run(dsn, "SELECT to_regclass('penstock_ledger_about') AS there")[0]["there"] is None


def test_tables_of_another_version_are_unchanged(dsn: str) -> None:
    with PostgresLedgerStore(dsn) as store:
        store.ensure()
    run(dsn, "UPDATE penstock_ledger_about SET version = 7")
    message = "its tables are of version 7, and this Penstock knows version 3"
    with PostgresLedgerStore(dsn) as store, pytest.raises(LedgerUnavailable, match=message):
        store.open_account("run", NO_LIMITS)


@pytest.mark.parametrize("version", [1, 2])
def test_tables_of_an_older_version_get_what_is_new_and_keep_what_they_have(version: int, dsn: str) -> None:
    with PostgresLedgerStore(dsn) as store:
        store.open_account("run", Limits(cost_nanos=20))
        store.hold("k", "run", ASK)
        store.hold("k2", "run", ASK)
        store.settle("k", Amounts(0))
    run(
        dsn,
        "DROP TABLE penstock_ledger_tickets",
        "ALTER TABLE penstock_ledger_holds DROP COLUMN under",
        "DROP FUNCTION penstock_ledger_put_under",
        "DROP FUNCTION penstock_ledger_draw_retry",
        "CREATE FUNCTION penstock_ledger_put_under(text, text) RETURNS void LANGUAGE sql AS ''",
        f"UPDATE penstock_ledger_about SET version = {version}",
    )
    with PostgresLedgerStore(dsn) as store:
        store.open_account("day", NO_LIMITS)
        store.put_under("run", "day")
        assert store.draw_retry("run")
        assert replace(store.balance("day"), name="run", limits=Limits(cost_nanos=20)) == store.balance("run")
        assert isinstance(store.join_queue("k3", "run", Amounts(15), TicketRequest()), Waiting)
        store.release("k2")
        assert store.renew("k3") is None
    assert run(dsn, "SELECT version FROM penstock_ledger_about")[0]["version"] == 3
    named = "SELECT count(*) AS of_the_name FROM pg_proc WHERE proname = 'penstock_ledger_put_under'"
    assert run(dsn, named)[0]["of_the_name"] == 1, "a process of the older version cannot pass a call that waits"


def test_tables_made_before_calls_without_a_hint_were_known_get_what_is_new(dsn: str) -> None:
    """A process that was there before goes on: the arguments of the functions that it calls are the same."""
    with PostgresLedgerStore(dsn) as old:
        old.open_account("run", Limits(cost_nanos=100))
        old.hold("k", "run", ASK)
        signatures = "SELECT proname, pg_get_function_identity_arguments(oid) AS args FROM pg_proc "
        signatures += "WHERE starts_with(proname, 'penstock_ledger') AND proname <> 'penstock_ledger_hold_unhinted'"
        run(
            dsn,
            "DROP TABLE penstock_ledger_unhinted, penstock_ledger_dearest",
            "DROP FUNCTION penstock_ledger_hold_unhinted",
        )
        before = {row["proname"]: row["args"] for row in run(dsn, signatures)}
        with PostgresLedgerStore(dsn) as new:
            assert new.hold("first", "run", Amounts(), unhinted_lease_s=10) is None
            assert isinstance(new.join_queue("second", "run", Amounts(), TicketRequest(), unhinted_lease_s=10), Waiting)
            assert {row["proname"]: row["args"] for row in run(dsn, signatures)} == before
            assert old.hold("old", "run", ASK) is None
            old.settle("old", Amounts(3))
            old.settle("k", Amounts(2))
            assert isinstance(new.renew("second"), Waiting)
            old.settle("first", Amounts(5))
            assert new.renew("second") is None
            assert new.held()["second"].cost_nanos == 5
    assert run(dsn, "SELECT version FROM penstock_ledger_about")[0]["version"] == 3


def test_impossible_figures_are_refused_by_the_database_itself(dsn: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", Limits(steps=1, retries=1))
    for wrong in ("held = -1", "held = 1", "steps_taken = 2", "retries = 2", "steps_done = 1", "tokens_in = 1"):
        with pytest.raises(asyncpg.CheckViolationError):
            run(dsn, f"UPDATE penstock_ledger_accounts SET {wrong}")


def test_a_bill_larger_than_the_database_can_hold_is_not_recorded_and_its_hold_stays(
    store: PostgresLedgerStore,
) -> None:
    store.open_account("run", NO_LIMITS)
    store.hold("k1", "run", ASK)
    store.hold("k2", "run", ASK)
    with pytest.raises(LedgerUnavailable, match="cannot record"):
        store.settle("k1", Amounts(10**30))
    store.settle("k1", Amounts(2**63 - 1 - 10))
    with pytest.raises(LedgerUnavailable, match="cannot record"):
        store.settle("k2", Amounts(2**62))
    assert (store.balance("run").spent_nanos, store.balance("run").held_nanos) == (2**63 - 1 - 10, 10)
    stop = store.hold("k3", "run", ASK)
    assert stop is not None
    assert stop.reason is StopReason.BUDGET_EXCEEDED


@pytest.mark.parametrize("name", ["", "a'b\"c;--", "%s?#&$1", "ünï 🌊", "x" * 2_000])
def test_names_and_keys_are_any_text(name: str, store: PostgresLedgerStore) -> None:
    store.open_account(name, NO_LIMITS)
    store.hold(name, name, ASK)
    store.leave_unresolved(name)
    assert dict(store.unresolved()) == {name: ASK}
    assert store.balance(name).name == name


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_text_that_the_database_cannot_have_is_refused(name: str, store: PostgresLedgerStore) -> None:
    store.open_account("run", NO_LIMITS)
    for operation in (lambda: store.hold(name, "run", ASK), lambda: store.open_account(name, NO_LIMITS)):
        with pytest.raises(LedgerUnavailable, match="cannot record"):
            operation()
    assert store.balance("run").attempts == 0


@pytest.mark.parametrize("wrong", ["", "sqlite:///x", "host=x password=s3cret", None, 7])
def test_an_invalid_url_is_refused_without_the_password(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^dsn must be a URL as postgresql://") as raised:
        PostgresLedgerStore(wrong)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize("wrong", [0, -1, True, None, 1.5])
def test_an_invalid_number_of_connections_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^max_connections must be"):
        PostgresLedgerStore("postgresql://h/d", max_connections=wrong)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), None, "2"])
def test_an_invalid_timeout_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^timeout_s must be"):
        PostgresLedgerStore("postgresql://h/d", timeout_s=wrong)


@pytest.mark.requirement("X-9")
@pytest.mark.parametrize("lose", [lambda dsn: gc.collect(), cut], ids=["garbage collection", "a lost connection"])
def test_a_call_is_woken_by_another_process_whatever_happens_to_its_connection(
    lose: Callable[[str], object], dsn: str, store: PostgresLedgerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "RECONNECT_S", 0.01)
    woken = threading.Event()
    with PostgresLedgerStore(dsn, timeout_s=PATIENCE_S) as other:
        store.open_account("run", Limits(cost_nanos=10))
        store.hold("k", "run", ASK)
        answer: object = store.join_queue("k2", "run", ASK, TicketRequest())
        assert isinstance(answer, Waiting)
        store.on_change("k2", woken.set)
        assert woken.wait(PATIENCE_S), "it listens from now on, and may have missed something"
        woken.clear()
        lose(dsn)
        other.release("k")
        while answer is not None:
            assert woken.wait(PATIENCE_S)
            woken.clear()
            answer = store.renew("k2")


@pytest.mark.requirement("X-9")
def test_no_notification_is_sent_while_no_call_waits(dsn: str, store: PostgresLedgerStore) -> None:
    sent: list[str] = []

    async def watch() -> None:
        connection = await asyncpg.connect(dsn)
        await connection.add_listener(ledger_schema.CHANNEL, lambda *notified: sent.append(notified[-1]))
        store.open_account("run", Limits(cost_nanos=10))
        store.hold("k", "run", ASK)
        store.settle("k", ASK)
        store.charge("k3", "run", ASK)
        await connection.execute("SELECT 1")
        await connection.close()

    asyncio.run(watch())
    assert sent == []
