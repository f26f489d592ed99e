"""A database in a SQLite file: jobs that share a transaction, callers that go away, and what can be wrong."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.storage.port import INLINE_MAX_ROWS, Transaction
from penstock.storage.sqlite.database import INLINE_MAX_BYTES, SqliteDatabase
from penstock.storage.sqlite.file import LOG_BYTES, Schema

SCHEMA = Schema(1234, 1, ("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)",))
FAULTS = ("disk I/O error", "database or disk is full", "attempt to write a readonly database", "database is locked")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "notes.db"


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[SqliteDatabase]:
    database = await SqliteDatabase.open(path, SCHEMA, **options)
    try:
        yield database
    finally:
        await database.close()


def adding(text: str) -> Callable[[Transaction], Coroutine[Any, Any, int]]:
    async def body(transaction: Transaction) -> int:
        transaction.notify("notes")
        return await transaction.run("INSERT INTO notes (text) VALUES (?)", text)

    return body


async def notes(transaction: Transaction) -> list[str]:
    return [row[0] for row in await transaction.rows("SELECT text FROM notes ORDER BY id")]


class Gate:
    """A transaction body that blocks until it is released."""

    def __init__(self) -> None:
        self._begun, self._may_go_on = threading.Event(), threading.Event()

    async def body(self, transaction: Transaction) -> None:
        await transaction.run("INSERT INTO notes (text) VALUES ('gate')")
        self._begun.set()
        self._may_go_on.wait()

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    def open(self) -> None:
        self._may_go_on.set()


async def test_queued_jobs_share_a_transaction_and_are_resolved_after_its_commit(path: Path) -> None:
    async with opened(path) as database:
        first, second = Gate(), Gate()
        waiting = [asyncio.ensure_future(database.write(first.body))]
        await first.begun()
        waiting += [asyncio.ensure_future(database.write(body)) for body in (adding("a"), second.body, adding("b"))]
        await asyncio.sleep(0)
        first.open()
        await second.begun()
        await waiting[0]
        assert await database.read(notes) == ["gate"], "what is not committed is not seen"
        assert [one.done() for one in waiting] == [True, False, False, False]
        second.open()
        await asyncio.gather(*waiting)
        assert await database.read(notes) == ["gate", "a", "gate", "b"]


async def test_a_failing_job_rolls_back_only_its_own_changes(path: Path) -> None:
    async def refused(transaction: Transaction) -> None:
        await adding("refused")(transaction)
        raise Conflict("no")

    async def wrong(transaction: Transaction) -> None:
        await adding("wrong")(transaction)
        await transaction.run("INSERT INTO nowhere VALUES (1)")

    async with opened(path) as database:
        gate = Gate()
        before = asyncio.ensure_future(database.write(gate.body))
        await gate.begun()
        jobs: list[Any] = [adding("a"), refused, adding("b"), wrong, adding("c")]
        together = [asyncio.ensure_future(database.write(body)) for body in jobs]
        await asyncio.sleep(0)
        gate.open()
        await before
        answers = await asyncio.gather(*together, return_exceptions=True)
        assert [type(answer) for answer in answers] == [int, Conflict, int, StoreUnavailable, int]
        assert await database.read(notes) == ["gate", "a", "b", "c"]
        with pytest.raises(Conflict):
            await database.write(refused)
        with pytest.raises(StoreUnavailable, match="no such table: nowhere"):
            await database.write(wrong)
        assert await database.read(notes) == ["gate", "a", "b", "c"]


async def test_a_write_that_returns_undecodable_text_fails_no_job_that_shares_its_transaction(path: Path) -> None:
    async def damage(transaction: Transaction) -> None:
        await transaction.run("INSERT INTO notes (text) VALUES (CAST(x'ff' AS TEXT))")

    async def edit(transaction: Transaction) -> str:
        row = await transaction.row("UPDATE notes SET text = text || '!' WHERE id = 1 RETURNING text")
        assert row is not None
        return str(row[0])

    async with opened(path) as database:
        await database.write(damage)
        gate = Gate()
        before = asyncio.ensure_future(database.write(gate.body))
        await gate.begun()
        together = [asyncio.ensure_future(database.write(body)) for body in (adding("a"), edit, adding("b"))]
        await asyncio.sleep(0)
        gate.open()
        await before
        assert await asyncio.gather(*together) == [1, "\ufffd!", 1]
        assert await database.read(notes) == ["\ufffd!", "gate", "a", "b"]


async def test_a_job_cancelled_in_the_queue_is_not_run(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        before = asyncio.ensure_future(database.write(gate.body))
        await gate.begun()
        leaving = asyncio.ensure_future(database.write(adding("left")))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        gate.open()
        await before
        await database.write(adding("after"))
        assert await database.read(notes) == ["gate", "after"]


async def test_a_job_cancelled_while_running_is_committed_whole(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        leaving = asyncio.ensure_future(database.write(gate.body))
        await gate.begun()
        leaving.cancel()
        await asyncio.wait((leaving,))
        gate.open()
        await database.write(adding("after"))
        assert await database.read(notes) == ["gate", "after"]


async def test_closing_finishes_queued_jobs_and_refuses_later_ones(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        pending = [asyncio.ensure_future(database.write(body)) for body in (gate.body, adding("a"), adding("b"))]
        await gate.begun()
        closing_it = asyncio.ensure_future(database.close())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="closed"):
            await database.write(adding("late"))
        assert not closing_it.done()
        gate.open()
        await closing_it
        await asyncio.gather(*pending)
        await database.close()
        for late in (database.read(notes), database.wait("notes", 0, 1)):
            with pytest.raises(StoreUnavailable, match="closed"):
                await late
    async with opened(path) as database:
        assert await database.read(notes) == ["gate", "a", "b"]


async def test_closing_wakes_waiters(path: Path) -> None:
    async with opened(path) as database:
        waiting = asyncio.ensure_future(database.wait("notes", database.version, 60))
        await asyncio.sleep(0)
        await database.close()
        await waiting


async def test_a_notification_between_reading_and_waiting_is_not_lost(path: Path) -> None:
    async with opened(path) as database:
        seen = database.version
        await database.write(adding("a"))
        await database.wait("notes", seen, 60)


async def test_writes_of_another_process_are_noticed(path: Path) -> None:
    async with opened(path) as database, opened(path) as other:
        while "there" not in await database.read(notes):
            seen = database.version
            if seen == 0:
                await other.write(adding("there"))
            await database.wait("notes", seen, 60)


class Something:
    """What only an event loop could wait for."""

    def __await__(self) -> Iterator[object]:
        yield self


async def test_a_body_that_awaits_something_else_is_refused_and_rolled_back(path: Path) -> None:
    async def wandering(transaction: Transaction) -> None:
        await adding("lost")(transaction)
        await Something()

    async with opened(path) as database:
        with pytest.raises(RuntimeError, match="not one of its stores"):
            await database.write(wandering)
        assert await database.read(notes) == []


async def test_a_locked_file_is_reported_and_used_again_when_it_is_free(path: Path) -> None:
    async with opened(path, busy_timeout_s=0.02) as database:
        other = await asyncio.to_thread(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"SQLITE_BUSY.*another process keeps it locked"):
            await database.write(adding("a"))
        assert await database.read(notes) == [], "readers wait for no writer"
        await asyncio.to_thread(other.close)
        await database.write(adding("b"))
        assert await database.read(notes) == ["b"]


async def test_a_deleted_file_is_reported_and_never_created_again(path: Path) -> None:
    async with opened(path) as database:
        await database.write(adding("a"))
        await asyncio.to_thread(path.unlink)
        for pending in (database.write(adding("b")), database.read(notes)):
            with pytest.raises(StoreUnavailable, match=r"gone.*put it back"):
                await pending
    assert not os.path.exists(path)  # noqa: ASYNC240 -- the database is closed


async def test_a_new_file_is_private_and_an_existing_one_keeps_its_mode(path: Path) -> None:
    def modes() -> set[int]:
        return {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir() if one.name.startswith(path.name)}

    async with opened(path) as database:
        await database.write(adding("a"))
        assert await asyncio.to_thread(modes) == {0o600}
    await asyncio.to_thread(path.chmod, 0o640)
    async with opened(path) as database:
        await database.write(adding("b"))
        assert await asyncio.to_thread(modes) == {0o640}


async def test_a_path_where_no_file_can_be_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"there is no folder /.*/no; make it, or name another file$"):
        await SqliteDatabase.open(tmp_path / "no" / "folder.db", SCHEMA)


async def test_a_file_that_is_no_database_is_reported_and_unchanged(path: Path) -> None:
    await asyncio.to_thread(path.write_bytes, b"no database, but long enough to be one" * 100)
    with pytest.raises(StoreUnavailable, match="SQLITE_NOTADB"):
        await SqliteDatabase.open(path, SCHEMA)


async def test_with_fsync_every_commit_waits_for_the_disk(path: Path) -> None:
    async def synchronous(transaction: Transaction) -> int:
        row = await transaction.row("PRAGMA synchronous")
        assert row is not None
        return int(row[0])

    for fsync, level in ((False, 1), (True, 2)):
        async with opened(path, fsync=fsync) as database:
            assert await database.write(synchronous) == level


def test_use_on_another_event_loop_is_refused(path: Path) -> None:
    with asyncio.Runner() as runner:
        database = runner.run(SqliteDatabase.open(path, SCHEMA))

        def elsewhere() -> None:
            with pytest.raises(StoreUnavailable, match="another event loop"):
                asyncio.run(database.write(adding("a")))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        runner.run(database.close())


async def test_use_in_a_forked_child_is_refused_and_the_parent_continues(path: Path) -> None:
    async with opened(path) as database:
        await database.write(adding("a"))
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                database._check()
            except StoreUnavailable as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await database.write(adding("b"))
        assert await database.read(notes) == ["a", "b"]


class Faulty(sqlite3.Connection):
    """Fails at the writer's statement number `at`, counted from when it was armed: before it, or once it is done."""

    at: int | None = None
    after = False
    fault = FAULTS[0]
    seen = 0
    thread = "penstock-sqlite-writer"

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        fails = False
        if threading.current_thread().name == Faulty.thread:
            Faulty.seen += 1
            fails = Faulty.seen == Faulty.at
        if fails and not Faulty.after:
            raise sqlite3.OperationalError(Faulty.fault)
        answer = super().execute(*statement)
        if fails:
            raise sqlite3.OperationalError(Faulty.fault)
        return answer


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    Faulty.at, Faulty.thread = None, "penstock-sqlite-writer"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_statement_of_a_shared_transaction_leaves_each_job_whole_or_undone(
    path: Path, fault: str, after: bool
) -> None:
    async def twice(transaction: Transaction, text: str) -> None:
        await transaction.run("INSERT INTO notes (text) VALUES (?)", f"{text}1")
        await transaction.run("INSERT INTO notes (text) VALUES (?)", f"{text}2")

    async with opened(path, factory=Faulty, busy_timeout_s=0.01) as database:
        for at in range(1, 20):
            gate = Gate()
            before = asyncio.ensure_future(database.write(gate.body))
            await gate.begun()
            texts = [f"{at}{letter}" for letter in "abc"]
            jobs = [asyncio.ensure_future(database.write(lambda t, text=text: twice(t, text))) for text in texts]
            await asyncio.sleep(0)
            # The gate's COMMIT is one more statement.
            Faulty.at, Faulty.after, Faulty.fault, Faulty.seen = at + 1, after, fault, 0
            gate.open()
            await before
            answers = await asyncio.gather(*jobs, return_exceptions=True)
            is_reached = Faulty.seen >= at + 1
            Faulty.at = None
            there = await database.read(notes)
            for text, answer in zip(texts, answers, strict=True):
                kept = [f"{text}{number}" in there for number in (1, 2)]
                assert kept in ([True, True], [False, False])
                assert answer is None or isinstance(answer, StoreUnavailable)
                assert kept[0] or answer is not None, "what was answered is there"
        assert not is_reached, "more statements than were tried"


def test_commits_survive_a_database_that_was_never_closed(path: Path) -> None:
    async def leave() -> None:
        database = await SqliteDatabase.open(path, SCHEMA)
        await database.write(adding("a"))
        database._stop_threads()  # as the end of a process would, but for the threads
        for thread in database._threads:
            await thread.ended

    asyncio.run(leave())
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT text FROM notes").fetchall() == [("a",)]


class Look:
    """A read that has begun and does not end until it may; which thread it is on."""

    def __init__(self) -> None:
        self.thread = 0
        self._begun, self._may_go_on = threading.Event(), threading.Event()

    async def body(self, transaction: Transaction) -> None:
        self.thread = threading.get_ident()
        self._begun.set()
        self._may_go_on.wait()

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    def end(self) -> None:
        self._may_go_on.set()


async def where(transaction: Transaction) -> int:
    return threading.get_ident()


async def test_sequential_reads_use_one_thread_and_reads_beside_a_long_one_another(path: Path) -> None:
    async with opened(path) as database:
        usual = {await database.read(where) for _ in range(20)}
        assert len(usual) == 1
        long = Look()
        reading = asyncio.create_task(database.read(long.body))
        await long.begun()
        beside = {await database.read(where) for _ in range(20)}
        long.end()
        await reading
        assert {long.thread} == usual
        assert len(beside) == 1
        assert beside != usual


async def test_a_read_queued_behind_a_long_one_is_stolen_by_a_free_reader(path: Path) -> None:
    async with opened(path) as database:
        first, second = Look(), Look()
        reading = [asyncio.create_task(database.read(gate.body)) for gate in (first, second)]
        await first.begun()
        await second.begun()
        behind = [asyncio.create_task(database.read(where)) for _ in range(6)]
        await asyncio.sleep(0)
        second.end()
        assert {*await asyncio.gather(*behind)} == {second.thread}
        first.end()
        await asyncio.gather(*reading)


async def test_a_cancelled_long_read_leaves_its_reader_busy(path: Path) -> None:
    async with opened(path) as database:
        long = Look()
        reading = asyncio.create_task(database.read(long.body))
        await long.begun()
        reading.cancel()
        await asyncio.wait((reading,))
        assert await database.read(where) != long.thread
        long.end()


async def test_closing_ends_each_reader_after_all_queued_reads(path: Path) -> None:
    database = await SqliteDatabase.open(path, SCHEMA)
    long = Look()
    reading = asyncio.create_task(database.read(long.body))
    await long.begun()
    others = [asyncio.create_task(database.read(where)) for _ in range(5)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    long.end()
    await asyncio.gather(reading, closing)
    assert len(await asyncio.gather(*others)) == 5


# What is inline is done at once.


def inline_result(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What it answers without the loop having turned."""
    with pytest.raises(StopIteration) as answered:
        coroutine.send(None)
    return answered.value.value


async def test_an_inline_transaction_is_done_and_notified_before_the_loop_turns(path: Path) -> None:
    async with opened(path) as database:
        seen = database.version
        assert inline_result(database.write(adding("a"), inline=True)) == 1
        assert inline_result(database.read(notes, inline=True)) == ["a"]
        assert inline_result(database.read(where, inline=True)) == threading.get_ident()
        await database.wait("notes", seen, 60)
        assert await database.read(notes) == ["a"], "those with a connection of their own see it"


async def test_an_inline_transaction_waits_its_turn_behind_queued_jobs(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        pending = [asyncio.ensure_future(database.write(body)) for body in (gate.body, adding("a"))]
        await gate.begun()
        pending += [asyncio.ensure_future(database.write(adding(text), inline=True)) for text in "bc"]
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*pending)
        assert inline_result(database.read(notes, inline=True)) == ["gate", "a", "b", "c"]


async def test_an_inline_transaction_does_not_overtake_jobs_the_writer_has_not_started(path: Path) -> None:
    loop = asyncio.get_running_loop()
    tell, may_go_on = loop.call_soon_threadsafe, threading.Event()

    def tell_and_stay(*args: Any, **options: Any) -> asyncio.Handle:
        handle = tell(*args, **options)
        if threading.current_thread().name == "penstock-sqlite-writer":
            may_go_on.wait()
        return handle

    async with opened(path) as database:
        loop.call_soon_threadsafe = tell_and_stay  # type: ignore[method-assign]
        await database.write(adding("a"))
        pending = [asyncio.ensure_future(database.write(adding("b")))]  # the writer has answered, and stays there
        await asyncio.sleep(0)
        pending += [asyncio.ensure_future(database.write(adding(text), inline=True)) for text in "cd"]
        await asyncio.sleep(0)
        try:
            assert await database.read(notes) == ["a"]
        finally:
            may_go_on.set()
        await asyncio.gather(*pending)
        assert await database.read(notes) == ["a", "b", "c", "d"]


async def test_an_inline_read_of_too_many_rows_restarts_on_a_thread(path: Path) -> None:
    async def notes_and_thread(transaction: Transaction) -> tuple[int, list[str]]:
        return threading.get_ident(), await notes(transaction)

    async def tell_many(transaction: Transaction) -> None:
        await transaction.run_many("INSERT INTO notes (text) VALUES (?)", [("few",)] * INLINE_MAX_ROWS)

    async with opened(path) as database:
        await database.write(tell_many)
        assert inline_result(database.read(notes_and_thread, inline=True)) == (
            threading.get_ident(),
            ["few"] * INLINE_MAX_ROWS,
        )
        await database.write(adding("one more"))
        thread, found = await database.read(notes_and_thread, inline=True)
        assert thread != threading.get_ident()
        assert found == [*["few"] * INLINE_MAX_ROWS, "one more"]
        assert inline_result(database.read(where, inline=True)) == threading.get_ident()


async def test_an_inline_write_that_is_too_large_is_rolled_back_and_restarted_on_a_thread(path: Path) -> None:
    async def many(transaction: Transaction) -> int:
        await transaction.run("INSERT INTO notes (text) VALUES ('first')")
        await transaction.run_many("INSERT INTO notes (text) VALUES (?)", [("many",)] * (INLINE_MAX_ROWS + 1))
        return threading.get_ident()

    async def long(transaction: Transaction) -> int:
        await transaction.run("INSERT INTO notes (text) VALUES ('first')")
        await transaction.run("INSERT INTO notes (text) VALUES (?)", "x" * (INLINE_MAX_BYTES + 1))
        return threading.get_ident()

    async with opened(path) as database:
        for body in (many, long):
            assert await database.write(body, inline=True) != threading.get_ident()
        there = await database.read(notes)
        assert (there.count("first"), there.count("many"), len(there)) == (2, INLINE_MAX_ROWS + 1, INLINE_MAX_ROWS + 4)


async def test_the_first_commit_to_a_new_log_waits_for_the_disk_and_is_not_inline(path: Path) -> None:
    async with opened(path) as database:
        await database.write(adding("a"))
    async with opened(path) as database:  # the last to close it has folded its log
        assert await database.write(where, inline=True) != threading.get_ident()
        await database.write(adding("b"), inline=True)
        assert inline_result(database.write(where, inline=True)) == threading.get_ident()


async def test_an_inline_transaction_waits_for_another_process_without_blocking_the_loop(path: Path) -> None:
    async with opened(path, busy_timeout_s=60) as database:
        other = await asyncio.to_thread(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        pending = asyncio.ensure_future(database.write(adding("a"), inline=True))
        await asyncio.sleep(0.01)
        assert not pending.done()
        assert inline_result(database.read(notes, inline=True)) == []
        await asyncio.to_thread(other.close)
        assert await pending == 1
        assert inline_result(database.write(adding("b"), inline=True)) == 1


async def test_with_fsync_nothing_is_inline(path: Path) -> None:
    async with opened(path, fsync=True) as database:
        assert await database.write(where, inline=True) != threading.get_ident()
        assert await database.read(where, inline=True) != threading.get_ident()


async def test_a_failing_inline_transaction_is_rolled_back(path: Path) -> None:
    async def refused(transaction: Transaction) -> None:
        await adding("refused")(transaction)
        raise Conflict("no")

    async with opened(path) as database:
        seen = database.version
        with pytest.raises(Conflict):
            await database.write(refused, inline=True)
        assert database.version == seen, "a rolled-back transaction notifies no one"
        assert inline_result(database.write(adding("a"), inline=True)) == 1
        assert inline_result(database.read(notes, inline=True)) == ["a"]


async def test_an_inline_transaction_reports_a_file_that_is_gone_or_closed(path: Path) -> None:
    async with opened(path) as database:
        await asyncio.to_thread(path.unlink)
        for pending in (database.write(adding("b"), inline=True), database.read(notes, inline=True)):
            with pytest.raises(StoreUnavailable, match=r"gone.*put it back"):
                await pending
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.write(adding("b"), inline=True)


async def test_the_next_inline_transaction_after_a_fork_succeeds(path: Path) -> None:
    async with opened(path) as database:
        assert inline_result(database.write(adding("a"), inline=True)) == 1
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert await database.write(adding("b"), inline=True) == 1, "a thread opens the file anew"
        assert await database.read(notes, inline=True) == ["a", "b"]
        assert inline_result(database.read(notes, inline=True)) == ["a", "b"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_statement_of_an_inline_transaction_leaves_it_whole_or_undone(
    path: Path, fault: str, after: bool
) -> None:
    async def twice(transaction: Transaction, text: str) -> None:
        await transaction.run("INSERT INTO notes (text) VALUES (?)", f"{text}1")
        await transaction.run("INSERT INTO notes (text) VALUES (?)", f"{text}2")

    Faulty.thread = threading.current_thread().name
    async with opened(path, factory=Faulty) as database:
        for at in range(1, 7):
            Faulty.at, Faulty.after, Faulty.fault, Faulty.seen = at, after, fault, 0
            answer = await asyncio.gather(
                database.write(lambda t, at=at: twice(t, f"{at}."), inline=True), return_exceptions=True
            )
            is_reached = Faulty.seen >= at
            Faulty.at = None
            there = await database.read(notes)
            kept = [f"{at}.{number}" in there for number in (1, 2)]
            assert kept in ([True, True], [False, False])
            assert answer == [None] or isinstance(answer[0], StoreUnavailable)
            assert kept[0] or answer != [None], "what was answered is there"
        assert not is_reached, "more statements than were tried"


class Watched(sqlite3.Connection):
    """Says on which threads logs were folded."""

    folded: ClassVar[list[str]] = []

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in statement[0]:
            Watched.folded.append(threading.current_thread().name)
        return super().execute(*statement)


async def test_the_writer_checkpoints_a_long_log(path: Path) -> None:
    def longest() -> int:
        return path.with_name(f"{path.name}-wal").stat().st_size

    Watched.folded.clear()
    async with opened(path, factory=Watched) as database:
        sizes = []
        for _ in range(200):
            await database.write(adding("x" * INLINE_MAX_BYTES), inline=True)
            sizes.append(await asyncio.to_thread(longest))
        assert max(sizes) < 2 * LOG_BYTES
        assert any(later < earlier for earlier, later in pairwise(sizes)), "it has become shorter again"
        assert len(await database.read(notes)) == 200
    assert set(Watched.folded) == {"penstock-sqlite-writer"}
    assert len(Watched.folded) < 30, "and not after every transaction"
