"""A database in a SQLite file: acts that share a transaction, callers that go away, and what can be wrong."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.hosting.ports import Conflict, StoreUnavailable
from penstock.storage.databases.port import Transaction
from penstock.storage.databases.sqlite import SqliteDatabase
from penstock.storage.sqlite_file import Schema

SCHEMA = Schema(1234, 1, ("CREATE TABLE notes (id INTEGER PRIMARY KEY, said TEXT NOT NULL)",))
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


def saying(text: str) -> Callable[[Transaction], Coroutine[Any, Any, int]]:
    async def act(transaction: Transaction) -> int:
        transaction.ring("said")
        return await transaction.run("INSERT INTO notes (said) VALUES (?)", text)

    return act


async def said(transaction: Transaction) -> list[str]:
    return [row[0] for row in await transaction.rows("SELECT said FROM notes ORDER BY id")]


class Gate:
    """An act that has begun and does not go on until it may."""

    def __init__(self) -> None:
        self._begun, self._may_go_on = threading.Event(), threading.Event()

    async def act(self, transaction: Transaction) -> None:
        await transaction.run("INSERT INTO notes (said) VALUES ('gate')")
        self._begun.set()
        self._may_go_on.wait()

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    def open(self) -> None:
        self._may_go_on.set()


async def test_acts_that_wait_together_share_a_transaction_and_are_answered_after_its_end(path: Path) -> None:
    async with opened(path) as database:
        first, second = Gate(), Gate()
        waiting = [asyncio.ensure_future(database.write(first.act))]
        await first.begun()
        waiting += [asyncio.ensure_future(database.write(act)) for act in (saying("a"), second.act, saying("b"))]
        await asyncio.sleep(0)
        first.open()
        await second.begun()
        await waiting[0]
        assert await database.read(said) == ["gate"], "what is not committed is not seen"
        assert [one.done() for one in waiting] == [True, False, False, False]
        second.open()
        await asyncio.gather(*waiting)
        assert await database.read(said) == ["gate", "a", "gate", "b"]


async def test_an_act_that_fails_takes_back_its_own_changes_alone(path: Path) -> None:
    async def refused(transaction: Transaction) -> None:
        await saying("refused")(transaction)
        raise Conflict("no")

    async def wrong(transaction: Transaction) -> None:
        await saying("wrong")(transaction)
        await transaction.run("INSERT INTO nowhere VALUES (1)")

    async with opened(path) as database:
        gate = Gate()
        before = asyncio.ensure_future(database.write(gate.act))
        await gate.begun()
        acts: list[Any] = [saying("a"), refused, saying("b"), wrong, saying("c")]
        together = [asyncio.ensure_future(database.write(act)) for act in acts]
        await asyncio.sleep(0)
        gate.open()
        await before
        answers = await asyncio.gather(*together, return_exceptions=True)
        assert [type(answer) for answer in answers] == [int, Conflict, int, StoreUnavailable, int]
        assert await database.read(said) == ["gate", "a", "b", "c"]
        with pytest.raises(Conflict):
            await database.write(refused)
        with pytest.raises(StoreUnavailable, match="no such table: nowhere"):
            await database.write(wrong)
        assert await database.read(said) == ["gate", "a", "b", "c"]


async def test_a_caller_that_goes_away_while_it_waits_has_asked_for_nothing(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        before = asyncio.ensure_future(database.write(gate.act))
        await gate.begun()
        leaving = asyncio.ensure_future(database.write(saying("left")))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        gate.open()
        await before
        await database.write(saying("after"))
        assert await database.read(said) == ["gate", "after"]


async def test_a_caller_that_goes_away_in_the_middle_leaves_a_whole_act(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        leaving = asyncio.ensure_future(database.write(gate.act))
        await gate.begun()
        leaving.cancel()
        await asyncio.wait((leaving,))
        gate.open()
        await database.write(saying("after"))
        assert await database.read(said) == ["gate", "after"]


async def test_closing_finishes_what_was_asked_for_and_refuses_what_comes_after(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        asked = [asyncio.ensure_future(database.write(act)) for act in (gate.act, saying("a"), saying("b"))]
        await gate.begun()
        closing_it = asyncio.ensure_future(database.close())
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="closed"):
            await database.write(saying("late"))
        assert not closing_it.done()
        gate.open()
        await closing_it
        await asyncio.gather(*asked)
        await database.close()
        for late in (database.read(said), database.wait("said", 0, 1)):
            with pytest.raises(StoreUnavailable, match="closed"):
                await late
    async with opened(path) as database:
        assert await database.read(said) == ["gate", "a", "b"]


async def test_whoever_waits_for_a_bell_is_woken_by_closing(path: Path) -> None:
    async with opened(path) as database:
        waiting = asyncio.ensure_future(database.wait("said", database.rung, 60))
        await asyncio.sleep(0)
        await database.close()
        await waiting


async def test_a_bell_that_rang_between_looking_and_waiting_is_heard(path: Path) -> None:
    async with opened(path) as database:
        seen = database.rung
        await database.write(saying("a"))
        await database.wait("said", seen, 60)


async def test_what_another_process_wrote_is_noticed(path: Path) -> None:
    async with opened(path) as database, opened(path) as other:
        while "there" not in await database.read(said):
            seen = database.rung
            if seen == 0:
                await other.write(saying("there"))
            await database.wait("said", seen, 60)


async def test_an_act_that_waits_for_something_else_is_refused_whole(path: Path) -> None:
    async def wandering(transaction: Transaction) -> None:
        await saying("lost")(transaction)
        await asyncio.sleep(0)

    async with opened(path) as database:
        with pytest.raises(RuntimeError, match="not its transaction"):
            await database.write(wandering)
        assert await database.read(said) == []


async def test_a_file_that_others_keep_locked_is_said_and_used_again_when_it_is_free(path: Path) -> None:
    async with opened(path, busy_timeout_s=0.02) as database:
        other = await asyncio.to_thread(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match=r"SQLITE_BUSY.*another process keeps it locked"):
            await database.write(saying("a"))
        assert await database.read(said) == [], "whoever reads waits for nobody"
        await asyncio.to_thread(other.close)
        await database.write(saying("b"))
        assert await database.read(said) == ["b"]


async def test_a_deleted_file_is_said_and_never_made_anew(path: Path) -> None:
    async with opened(path) as database:
        await database.write(saying("a"))
        await asyncio.to_thread(path.unlink)
        for asked in (database.write(saying("b")), database.read(said)):
            with pytest.raises(StoreUnavailable, match=r"gone.*put it back"):
                await asked
    assert not os.path.exists(path)  # noqa: ASYNC240 -- the database is closed


async def test_a_file_is_made_for_its_owner_alone_and_one_that_is_there_is_left_as_open_as_it_is(path: Path) -> None:
    def modes() -> set[int]:
        return {stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir() if one.name.startswith(path.name)}

    async with opened(path) as database:
        await database.write(saying("a"))
        assert await asyncio.to_thread(modes) == {0o600}
    await asyncio.to_thread(path.chmod, 0o640)
    async with opened(path) as database:
        await database.write(saying("b"))
        assert await asyncio.to_thread(modes) == {0o640}


async def test_a_place_where_no_file_can_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"SQLITE_CANTOPEN.*make its folder"):
        await SqliteDatabase.open(tmp_path / "no" / "folder.db", SCHEMA)


async def test_a_file_that_is_no_database_is_said_and_left(path: Path) -> None:
    await asyncio.to_thread(path.write_bytes, b"no database, but long enough to be one" * 100)
    with pytest.raises(StoreUnavailable, match="SQLITE_NOTADB"):
        await SqliteDatabase.open(path, SCHEMA)


async def test_every_commit_waits_for_the_disk_if_asked(path: Path) -> None:
    async def synchronous(transaction: Transaction) -> int:
        row = await transaction.row("PRAGMA synchronous")
        assert row is not None
        return int(row[0])

    for fsync, level in ((False, 1), (True, 2)):
        async with opened(path, fsync=fsync) as database:
            assert await database.write(synchronous) == level


def test_another_event_loop_is_told_to_open_its_own(path: Path) -> None:
    with asyncio.Runner() as runner:
        database = runner.run(SqliteDatabase.open(path, SCHEMA))

        def elsewhere() -> None:
            with pytest.raises(StoreUnavailable, match="another event loop"):
                asyncio.run(database.write(saying("a")))

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        runner.run(database.close())


async def test_a_forked_child_is_told_to_open_its_own_and_the_parent_goes_on(path: Path) -> None:
    async with opened(path) as database:
        await database.write(saying("a"))
        child = os.fork()
        if child == 0:  # pragma: no cover
            try:
                database._check()
            except StoreUnavailable as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await database.write(saying("b"))
        assert await database.read(said) == ["a", "b"]


class Faulty(sqlite3.Connection):
    """Fails at the writer's statement number `at`, counted from when it was armed: before it, or once it is done."""

    at: int | None = None
    after = False
    fault = FAULTS[0]
    seen = 0

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        fails = False
        if threading.current_thread().name.endswith("writer"):
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
    Faulty.at = None


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_statement_of_a_shared_transaction_leaves_each_act_whole_or_not_there(
    path: Path, fault: str, after: bool
) -> None:
    async def twice(transaction: Transaction, text: str) -> None:
        await transaction.run("INSERT INTO notes (said) VALUES (?)", f"{text}1")
        await transaction.run("INSERT INTO notes (said) VALUES (?)", f"{text}2")

    async with opened(path, factory=Faulty, busy_timeout_s=0.01) as database:
        for at in range(1, 20):
            gate = Gate()
            before = asyncio.ensure_future(database.write(gate.act))
            await gate.begun()
            texts = [f"{at}{letter}" for letter in "abc"]
            acts = [asyncio.ensure_future(database.write(lambda t, text=text: twice(t, text))) for text in texts]
            await asyncio.sleep(0)
            # The gate's COMMIT is one more statement.
            Faulty.at, Faulty.after, Faulty.fault, Faulty.seen = at + 1, after, fault, 0
            gate.open()
            await before
            answers = await asyncio.gather(*acts, return_exceptions=True)
            is_reached = Faulty.seen >= at + 1
            Faulty.at = None
            there = await database.read(said)
            for text, answer in zip(texts, answers, strict=True):
                kept = [f"{text}{number}" in there for number in (1, 2)]
                assert kept in ([True, True], [False, False])
                assert answer is None or isinstance(answer, StoreUnavailable)
                assert kept[0] or answer is not None, "what was answered is there"
        assert not is_reached, "more statements than were tried"


def test_what_is_committed_survives_a_database_that_was_never_closed(path: Path) -> None:
    async def leave() -> None:
        database = await SqliteDatabase.open(path, SCHEMA)
        await database.write(saying("a"))
        database._stop_asking()  # as the end of a process would, but for the threads
        for desk in database._desks:
            await desk.ended

    asyncio.run(leave())
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT said FROM notes").fetchall() == [("a",)]


class Look:
    """A read that has begun and does not end until it may; which thread it is on."""

    def __init__(self) -> None:
        self.thread = 0
        self._begun, self._may_go_on = threading.Event(), threading.Event()

    async def act(self, transaction: Transaction) -> None:
        self.thread = threading.get_ident()
        self._begun.set()
        self._may_go_on.wait()

    async def begun(self) -> None:
        await asyncio.to_thread(self._begun.wait)

    def end(self) -> None:
        self._may_go_on.set()


async def where(transaction: Transaction) -> int:
    return threading.get_ident()


async def test_reads_one_after_the_other_are_of_one_thread_and_those_beside_a_long_one_of_another(path: Path) -> None:
    async with opened(path) as database:
        usual = {await database.read(where) for _ in range(20)}
        assert len(usual) == 1
        long = Look()
        reading = asyncio.create_task(database.read(long.act))
        await long.begun()
        beside = {await database.read(where) for _ in range(20)}
        long.end()
        await reading
        assert {long.thread} == usual
        assert len(beside) == 1
        assert beside != usual


async def test_a_read_that_waits_behind_a_long_one_is_taken_by_the_reader_that_is_free_first(path: Path) -> None:
    async with opened(path) as database:
        first, second = Look(), Look()
        reading = [asyncio.create_task(database.read(one.act)) for one in (first, second)]
        await first.begun()
        await second.begun()
        behind = [asyncio.create_task(database.read(where)) for _ in range(6)]
        await asyncio.sleep(0)
        second.end()
        assert {*await asyncio.gather(*behind)} == {second.thread}
        first.end()
        await asyncio.gather(*reading)


async def test_a_caller_that_leaves_a_long_read_leaves_its_reader_busy(path: Path) -> None:
    async with opened(path) as database:
        long = Look()
        reading = asyncio.create_task(database.read(long.act))
        await long.begun()
        reading.cancel()
        await asyncio.wait((reading,))
        assert await database.read(where) != long.thread
        long.end()


async def test_closing_ends_each_reader_after_what_was_laid_before_any(path: Path) -> None:
    database = await SqliteDatabase.open(path, SCHEMA)
    long = Look()
    reading = asyncio.create_task(database.read(long.act))
    await long.begun()
    others = [asyncio.create_task(database.read(where)) for _ in range(5)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(database.close())
    await asyncio.sleep(0)
    long.end()
    await asyncio.gather(reading, closing)
    assert len(await asyncio.gather(*others)) == 5
