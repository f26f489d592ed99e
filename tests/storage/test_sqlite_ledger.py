"""The ledger in a SQLite file does what every ledger store must, in several processes, and says when it cannot."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import Clock
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore, TicketRequest, WouldBlock
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.containment.tickets import Waiting
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.stops import Stop, StopReason
from penstock.storage import SqliteLedgerStore
from penstock.storage.sqlite import ledger as sqlite_ledger
from penstock.storage.sqlite.file import LOG_BYTES
from penstock.storage.sqlite.ledger import SELECT_OPEN_HOLDS
from penstock.testing import ManualClock
from penstock.testing.contracts import LedgerStoreContract
from penstock.testing.contracts.ledger_tests import USED

ASK = Amounts(cost_nanos=10, tokens_in=3, tokens_out=4, api_calls=1)


class Contract(LedgerStoreContract):
    threads = 8

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "ledger.db"

    def make_store(self, clock: Clock) -> LedgerStore:
        return SqliteLedgerStore(self.path, clock=clock, busy_timeout_s=60)

    def close_store(self, store: LedgerStore) -> None:
        assert isinstance(store, SqliteLedgerStore)
        store.close()


@contextmanager
def no_room_on_the_disk() -> Iterator[None]:
    """No file can be written to: as a full disk, for this process alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    path.parent.rename(path.parent.with_name("elsewhere"))
    try:
        yield
    finally:
        path.parent.with_name("elsewhere").rename(path.parent)


@pytest.mark.requirement("X-1", "P-B4", "P-B5", "C-3")
class TestSqliteLedgerStoreOnAFullDisk(Contract):
    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        return no_room_on_the_disk()


class TestSqliteLedgerStoreInAFolderThatGoesAway(Contract):
    threads = holds_per_thread = 2

    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        return moved_away(self.path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder / "ledger.db"


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


def test_holds_survive_reopening_the_file(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=20))
        store.hold("k1", "run", ASK)
        store.hold("k2", "run", ASK)
        store.settle("k1", Amounts(6))
        store.leave_unresolved("k2")
        before = store.balance("run")
    with SqliteLedgerStore(path) as again:
        assert again.balance("run") == before
        assert dict(again.unresolved()) == {"k2": ASK}
        stop = again.hold("k3", "run", ASK)
        assert stop is not None
        assert stop.reason is StopReason.BUDGET_EXCEEDED


def test_two_stores_on_one_file_are_one_budget(path: Path) -> None:
    with SqliteLedgerStore(path) as one, SqliteLedgerStore(path) as other:
        one.open_account("run", Limits(steps=1))
        assert one.hold("k1", "run", ASK) is None
        assert other.hold("k1", "run", ASK) is None, "the same call, repeated"
        assert other.hold("k2", "run", ASK) is not None
        other.withdraw("k1")
        assert one.balance("run").attempts == 0


def test_an_inline_operation_runs_on_the_calling_thread(path: Path) -> None:
    with SqliteLedgerStore(path) as store, SqliteLedgerStore(path) as other:
        store.open_account("run", Limits(steps=1))
        assert store.try_inline(lambda: store.hold("k1", "run", ASK)) is None
        stop = store.try_inline(lambda: store.hold("k2", "run", ASK))
        assert stop is not None
        assert stop.reason is StopReason.STEP_LIMIT_EXCEEDED
        assert [*other.held()] == ["k1"]
        with pytest.raises(KeyError):
            store.try_inline(lambda: store.balance("unknown"))


def test_an_inline_operation_does_not_wait_for_another_process(path: Path) -> None:
    with (
        SqliteLedgerStore(path, busy_timeout_s=60) as store,
        closing(sqlite3.connect(path, isolation_level=None)) as db,
    ):
        store.open_account("run", NO_LIMITS)
        db.execute("BEGIN IMMEDIATE")
        with pytest.raises(WouldBlock):
            store.try_inline(lambda: store.hold("k", "run", ASK))
        assert store.try_inline(store.held) == {}, "readers wait for no writer"
        db.execute("ROLLBACK")
        assert store.try_inline(lambda: store.hold("k", "run", ASK)) is None


def test_an_inline_operation_does_not_wait_for_another_thread(path: Path) -> None:
    with SqliteLedgerStore(path, busy_timeout_s=60) as store, ThreadPoolExecutor(1) as pool:
        store.open_account("run", NO_LIMITS)
        with store._file.writing():
            future = pool.submit(store.try_inline, lambda: store.hold("k", "run", ASK))
            with pytest.raises(WouldBlock):
                future.result(60)
        assert pool.submit(store.try_inline, lambda: store.hold("k", "run", ASK)).result(60) is None


def test_an_inline_operation_does_not_wait_for_the_disk(path: Path) -> None:
    with SqliteLedgerStore(path, fsync=True) as store, pytest.raises(WouldBlock):
        store.try_inline(lambda: store.open_account("run", NO_LIMITS))
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)
        count = 0
        with pytest.raises(WouldBlock):
            while True:
                store.try_inline(lambda key=f"{count}{'x' * 4_000}": store.hold(key, "run", ASK))
                count += 1
        assert LOG_BYTES < path.with_name(f"{path.name}-wal").stat().st_size < 2 * LOG_BYTES
        store.withdraw(f"0{'x' * 4_000}")
        with pytest.raises(WouldBlock):  # who could wait has folded the log, and to begin one waits for the disk too
            store.try_inline(lambda: store.hold("k", "run", ASK))
        store.hold("k", "run", ASK)
        assert store.try_inline(lambda: store.hold("l", "run", ASK)) is None
        assert len(store.held()) == count + 1


def test_refusals_read_as_those_of_the_store_in_memory(path: Path) -> None:
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
    with SqliteLedgerStore(path, clock=clock) as store:
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


def test_errors_read_as_those_of_the_store_in_memory(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
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


def test_holds_that_a_dead_process_left_are_listed_and_can_be_ended(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)
        assert in_a_child(lambda: store.hold("k", "run", ASK)) == 0
        assert dict(store.held()) == {"k": ASK}
        store.leave_unresolved("k")
        assert dict(store.held()) == {}
        assert dict(store.unresolved()) == {"k": ASK}


def test_a_bill_larger_than_the_file_can_hold_is_not_recorded_and_its_hold_stays(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)
        store.hold("k1", "run", ASK)
        store.hold("k2", "run", ASK)
        with pytest.raises(LedgerUnavailable, match="larger than"):
            store.settle("k1", Amounts(10**30))
        store.settle("k1", Amounts(2**63 - 1 - 10))
        with pytest.raises(LedgerUnavailable, match="cannot record"):
            store.settle("k2", Amounts(2**62))
        assert (store.balance("run").spent_nanos, store.balance("run").held_nanos) == (2**63 - 1 - 10, 10)


def test_time_limits_continue_after_a_reboot(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = ManualClock(start_ns=10**15), ManualClock(start_ns=0)
    monkeypatch.setattr("penstock.storage.sqlite.ledger.boot_id", lambda: "first boot")
    with SqliteLedgerStore(path, clock=before) as store:
        store.open_account("run", Limits(time_ns=1_000))
        before.jump_wall(86_400)
        assert store.hold("k1", "run", ASK) is None, "a wall clock that is set is not time that passed"
    monkeypatch.setattr("penstock.storage.sqlite.ledger.boot_id", lambda: "second boot")
    with SqliteLedgerStore(path, clock=after) as store:
        after.advance_ns(999)
        assert store.hold("k2", "run", ASK) is None
        after.advance_ns(1)
        stop = store.hold("k3", "run", ASK)
        assert stop is not None
        assert stop.reason is StopReason.TIMEOUT


def test_a_forked_child_and_its_parent_share_one_budget(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=3))
        store.hold("parent", "run", ASK)

        def work() -> None:
            assert store.hold("child", "run", ASK) is None
            assert in_a_child(lambda: store.hold("grandchild", "run", ASK)) == 0
            assert store.balance("run").steps_open == 3
            store.close()

        assert in_a_child(work) == 0
        assert store.balance("run").steps_open == 3
        assert store.hold("one too many", "run", ASK) is not None


def test_a_fork_waits_for_operations_of_other_threads(path: Path) -> None:
    with SqliteLedgerStore(path, busy_timeout_s=60) as store, ThreadPoolExecutor(3) as pool:
        store.open_account("run", NO_LIMITS)

        def work(thread: int) -> None:
            for number in range(50):
                assert store.hold(f"thread {thread}:{number}", "run", ASK) is None

        threads = [pool.submit(work, thread) for thread in range(3)]
        children = [in_a_child(lambda: store.hold(f"child {os.getpid()}", "run", ASK)) for _ in range(10)]
        for thread in threads:
            thread.result()
        assert children == [0] * 10
        assert store.balance("run").steps_open == 3 * 50 + 10


def test_open_holds_are_found_without_looking_at_those_that_have_ended(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)
    with closing(sqlite3.connect(path)) as other:
        plan = other.execute(
            f"EXPLAIN QUERY PLAN {SELECT_OPEN_HOLDS}", {"state": "held", "prefix": "run", "size": 3}
        ).fetchall()
    assert "open_holds" in str(plan)


def test_no_connection_lives_across_a_fork(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)

        def look() -> None:
            assert not [fd for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(path))]

        assert in_a_child(look) == 0


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def test_concurrent_creation_of_the_file_succeeds(path: Path) -> None:
    go, ready = os.pipe(), []
    for number in range(6):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(go[1])
                os.read(go[0], 1)
                with SqliteLedgerStore(path, busy_timeout_s=30) as store:
                    store.open_account("run", NO_LIMITS)
                    status = 0 if store.hold(str(number), "run", ASK) is None else 2
            finally:
                os._exit(status)
        ready.append(pid)
    os.close(go[0])
    os.close(go[1])
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ready] == [0] * 6
    with SqliteLedgerStore(path) as store:
        assert store.balance("run").steps_open == 6


def test_a_closed_store_records_nothing_and_may_be_closed_again(path: Path) -> None:
    store = SqliteLedgerStore(path)
    store.close()
    store.close()
    with pytest.raises(LedgerUnavailable, match="it was closed"):
        store.open_account("run", NO_LIMITS)
    with pytest.raises(LedgerUnavailable, match="it was closed"):
        store.balance("run")
    assert [child.name for child in path.parent.iterdir()] == [path.name], "the log was folded into the file"


def test_an_unreferenced_store_is_collected(path: Path) -> None:
    SqliteLedgerStore(path)
    gc.collect()
    assert not [fd for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(path))]


def test_a_deleted_file_is_not_created_again(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=1))
        shutil.rmtree(path.parent)
        for operation in (lambda: store.hold("k", "run", ASK), lambda: store.balance("run")):
            with pytest.raises(LedgerUnavailable, match="the file is gone"):
                operation()
        assert in_a_child(lambda: store.hold("k", "run", ASK)) == 1
        assert not path.exists()


def test_an_emptied_file_is_not_filled_again(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=1))
        assert in_a_child(lambda: None) == 0, "a fork, after which the file is opened again"
        path.write_bytes(b"")
        with pytest.raises(LedgerUnavailable, match="it was emptied"):
            store.open_account("run", Limits(steps=1))
        assert path.read_bytes() == b""


def test_a_file_emptied_under_an_open_store_is_not_a_ledger_in_which_nothing_was_spent(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=1))
        store.hold("k", "run", ASK)
        for emptied in (path, path.with_name("ledger.db-wal")):
            os.truncate(emptied, 0)
            with suppress(LedgerUnavailable):
                assert store.hold(f"k {emptied}", "run", ASK) is not None


def test_a_replaced_file_is_refused(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=1))
        path.rename(path.with_name("kept.db"))
        SqliteLedgerStore(path).close()
        with pytest.raises(LedgerUnavailable, match="another file has taken its place"):
            store.hold("k", "run", ASK)


OPERATIONS: dict[str, Callable[[LedgerStore], object]] = {
    "open_account": lambda store: store.open_account("new", NO_LIMITS),
    "hold": lambda store: store.hold("k2", "run", ASK),
    "draw_retry": lambda store: store.draw_retry("run"),
    "settle": lambda store: store.settle("k", ASK),
    "release": lambda store: store.release("k"),
    "withdraw": lambda store: store.withdraw("k"),
    "leave_unresolved": lambda store: store.leave_unresolved("k"),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_file_that_is_locked_for_too_long_is_reported(operation: Callable[[LedgerStore], object], path: Path) -> None:
    with SqliteLedgerStore(path, busy_timeout_s=0.01) as store:
        store.open_account("run", NO_LIMITS)
        store.hold("k", "run", ASK)
        before = store.balance("run")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerUnavailable, match=r"ledger\.db' cannot record: database is locked \(SQLITE_BUSY"):
                operation(store)
            assert store.balance("run") == before, "looking needs no lock"
        operation(store)


def test_a_file_that_is_locked_for_a_while_is_waited_for(path: Path) -> None:
    with SqliteLedgerStore(path, busy_timeout_s=60, factory=Watched) as store:
        store.open_account("run", NO_LIMITS)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            Watched.turned_away = lambda: other.in_transaction and other.execute("ROLLBACK")
            assert store.hold("k", "run", ASK) is None
            assert not other.in_transaction


class Watched(sqlite3.Connection):
    """A connection that tells when it was turned away."""

    turned_away: Callable[[], object]

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        try:
            return super().execute(*statement)
        except sqlite3.OperationalError:
            type(self).turned_away()
            raise


def make_garbage(path: Path) -> None:
    path.write_bytes(os.urandom(10_000))


def make_half_garbage(path: Path) -> None:
    SqliteLedgerStore(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))


def make_read_only(path: Path) -> None:
    """The header asks for a newer way of writing than SQLite knows, so that it only reads, also for root."""
    SqliteLedgerStore(path).close()
    with path.open("r+b") as file:
        file.seek(18)
        file.write(b"\x09")


def make_a_folder(path: Path) -> None:
    path.mkdir()


def make_another_application(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")


def make_newer(path: Path) -> None:
    SqliteLedgerStore(path).close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA user_version = 7")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_garbage, "file is not a database .*; name another file, or restore it from a backup"),
        (make_half_garbage, "malformed"),
        (make_read_only, "readonly"),
        (make_a_folder, "is a folder; name a file in it"),
        (make_another_application, "it is a database of something else"),
        (make_newer, "its tables are of version 7, and this Penstock knows version 3; open it with"),
    ],
)
def test_an_unusable_file_is_refused_and_unchanged(make: Callable[[Path], None], message: str, path: Path) -> None:
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(LedgerUnavailable, match=message):
        use(path)
    assert before == (path.read_bytes() if path.is_file() else b"")


def test_a_file_of_the_previous_version_gets_what_is_new_and_keeps_what_it_has(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=10))
        store.hold("k", "run", ASK)
    with closing(sqlite3.connect(path)) as old:
        for statement in (
            "DROP TABLE tickets",
            "DROP INDEX held_under",
            "ALTER TABLE holds DROP COLUMN under",
            "PRAGMA user_version = 2",
        ):
            old.execute(statement)
        old.commit()
    with SqliteLedgerStore(path) as first, SqliteLedgerStore(path) as second:
        assert dict(first.held()) == {"k": ASK}
        assert isinstance(second.join_queue("k2", "run", ASK, TicketRequest()), Waiting)
        first.release("k")
        assert second.renew("k2") is None
        assert first.balance("run").held_nanos == 10
    with closing(sqlite3.connect(path)) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (3,)


UNHINTED_ARE_GONE = ("DROP TABLE unhinted", "DROP TABLE dearest")


def test_a_file_made_before_calls_without_a_hint_were_known_gets_what_is_new(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=100))
        store.hold("k", "run", ASK)
    with closing(sqlite3.connect(path)) as old:
        for statement in UNHINTED_ARE_GONE:
            old.execute(statement)
        old.commit()
    with SqliteLedgerStore(path) as store:
        assert dict(store.held()) == {"k": ASK}
        assert store.hold("first", "run", Amounts(), unhinted_lease_s=10) is None
        assert isinstance(store.hold("second", "run", Amounts(), unhinted_lease_s=10), Stop)
        store.settle("first", Amounts(5))
        assert store.hold("second", "run", Amounts(), unhinted_lease_s=10) is None


def test_a_process_that_knows_nothing_of_calls_without_a_hint_works_beside_one_that_does(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes the statements that it knows: those of its version, for the tables of its version."""
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=100))
        store.open_account("gone", Limits(cost_nanos=100))
        for account in ("run", "gone"):
            assert store.hold(f"{account} first", account, Amounts(), unhinted_lease_s=10) is None
            waiting = store.join_queue(f"{account} next", account, Amounts(), TicketRequest(), unhinted_lease_s=10)
            assert isinstance(waiting, Waiting)
        with monkeypatch.context() as patch:
            older = "EXISTS (SELECT 1 FROM unhinted WHERE unhinted.key = holds.key)"
            patch.setattr(sqlite_ledger, "SELECT_HOLD", sqlite_ledger.SELECT_HOLD.replace(older, "0"))
            patch.setattr(sqlite_ledger, "SELECT_UNHINTED", "SELECT * FROM tickets WHERE account < 0 AND account = ?1")
            older = "(SELECT lease_ns FROM unhinted WHERE unhinted.key = tickets.key)"
            patch.setattr(sqlite_ledger, "SELECT_TICKETS", sqlite_ledger.SELECT_TICKETS.replace(older, "NULL"))
            with SqliteLedgerStore(path) as old:
                assert old.hold("old", "run", ASK) is None
                old.settle("old", USED)
                old.leave_unresolved("gone first")
                old.leave_queue("gone next")
                assert old.forget(["gone"]) == 1
        assert store.renew("run next") is None, "the older one has let it go"
        store.settle("run first", Amounts(5))
        assert store.hold("third", "run", Amounts(), unhinted_lease_s=10) is None
        assert store.held()["third"].cost_nanos == 5
        assert store.balance("run").spent_nanos == 5 + USED.cost_nanos


def test_a_hold_with_a_hint_is_as_many_statements_as_before(path: Path) -> None:
    """Those of an un-hinted one may be more; also while the cost of others is not known."""
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=100))
        store.hold("first", "run", Amounts(), unhinted_lease_s=10)
        for number, known in enumerate((False, True)):
            statements: list[str] = []
            with store._file.writing() as connection:
                connection.set_trace_callback(statements.append)
            store.hold(f"k{number}", "run", ASK)
            store.settle(f"k{number}", USED)
            connection.set_trace_callback(None)
            made = [statement.split()[0] for statement in statements if "COMMIT" not in statement]
            held = ["BEGIN", "SELECT", "SELECT", "UPDATE", "UPDATE", "INSERT"]  # one UPDATE is that of a trigger
            assert made == [*held, "BEGIN", "SELECT", "UPDATE", "UPDATE"], known
            store.settle("first", Amounts(1))


def use(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", NO_LIMITS)


def test_a_missing_folder_is_not_created(path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match=r"there is no folder /"):
        SqliteLedgerStore(path / "deeper" / "ledger.db")


@pytest.mark.parametrize("wrong", ["", ":memory:", "a\0b"])
def test_an_invalid_path_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidValue, match=r"^path must be the path of a file"):
        SqliteLedgerStore(wrong)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), None, "2"])
def test_an_invalid_timeout_is_refused(wrong: Any, path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"^busy_timeout_s must be"):
        SqliteLedgerStore(path, busy_timeout_s=wrong)


@pytest.mark.parametrize("name", ["", "a'b\"c;--", "%s?#&", "ünï 🌊", "a\0b", "x" * 10_000])
def test_names_and_keys_are_any_text(name: str, path: Path) -> None:
    with SqliteLedgerStore(path.with_name("ledger ?#%20.db")) as store:
        store.open_account(name, NO_LIMITS)
        store.open_account(f"{name}.", NO_LIMITS, parent=name)
        assert store.hold(name, f"{name}.", ASK) is None
        assert dict(store.held()) == {name: ASK}
        assert store.balance(name).name == name
        assert store.path.exists()


def test_text_that_cannot_be_written_is_not_recorded(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        with pytest.raises(LedgerUnavailable, match="not valid text"):
            store.open_account("\ud800", NO_LIMITS)
        store.open_account("run", NO_LIMITS)


def test_impossible_figures_are_refused_by_the_file_itself(path: Path) -> None:
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(steps=1, api_calls=1, retries=1))
    with closing(sqlite3.connect(path)) as other:
        for wrong in (
            *("held = -1", "held = 1", "steps_taken = 2", "retries = 2", "steps_done = 1"),
            *("tokens_in = 1", "committed = 0.5", "committed = 'much'"),
        ):
            with pytest.raises(sqlite3.IntegrityError):
                other.execute(f"UPDATE accounts SET {wrong}")
