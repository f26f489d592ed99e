"""A database in a SQLite file: acts that share a transaction, callers that go away, and what can be wrong."""

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
from penstock.storage.databases.port import FEW, Transaction
from penstock.storage.databases.sqlite import LITTLE, SqliteDatabase
from penstock.storage.sqlite_file import LOG_BYTES, Schema

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
    with pytest.raises(StoreUnavailable, match=r"there is no folder /.*/no; make it, or name another file$"):
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


# What is brief is done at once.


def at_once(asking: Coroutine[Any, Any, Any]) -> Any:
    """What it answers without the loop having turned."""
    with pytest.raises(StopIteration) as answered:
        asking.send(None)
    return answered.value.value


async def test_what_is_brief_is_done_before_the_loop_turns_and_rings_its_bells(path: Path) -> None:
    async with opened(path) as database:
        seen = database.rung
        assert at_once(database.write(saying("a"), brief=True)) == 1
        assert at_once(database.read(said, brief=True)) == ["a"]
        assert at_once(database.read(where, brief=True)) == threading.get_ident()
        await database.wait("said", seen, 60)
        assert await database.read(said) == ["a"], "those with a connection of their own see it"


async def test_what_is_brief_keeps_its_turn_behind_what_was_asked_for_before(path: Path) -> None:
    async with opened(path) as database:
        gate = Gate()
        asked = [asyncio.ensure_future(database.write(act)) for act in (gate.act, saying("a"))]
        await gate.begun()
        asked += [asyncio.ensure_future(database.write(saying(text), brief=True)) for text in "bc"]
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(*asked)
        assert at_once(database.read(said, brief=True)) == ["gate", "a", "b", "c"]


async def test_what_is_brief_does_not_overtake_what_the_writer_has_not_begun(path: Path) -> None:
    loop = asyncio.get_running_loop()
    tell, may_go_on = loop.call_soon_threadsafe, threading.Event()

    def tell_and_stay(*args: Any, **options: Any) -> asyncio.Handle:
        handle = tell(*args, **options)
        if threading.current_thread().name == "penstock-sqlite-writer":
            may_go_on.wait()
        return handle

    async with opened(path) as database:
        loop.call_soon_threadsafe = tell_and_stay  # type: ignore[method-assign]
        await database.write(saying("a"))
        asked = [asyncio.ensure_future(database.write(saying("b")))]  # the writer has answered, and stays there
        await asyncio.sleep(0)
        asked += [asyncio.ensure_future(database.write(saying(text), brief=True)) for text in "cd"]
        await asyncio.sleep(0)
        try:
            assert await database.read(said) == ["a"]
        finally:
            may_go_on.set()
        await asyncio.gather(*asked)
        assert await database.read(said) == ["a", "b", "c", "d"]


async def test_a_look_that_finds_more_than_a_few_rows_is_begun_anew_on_a_thread(path: Path) -> None:
    async def said_where(transaction: Transaction) -> tuple[int, list[str]]:
        return threading.get_ident(), await said(transaction)

    async def tell_many(transaction: Transaction) -> None:
        await transaction.run_many("INSERT INTO notes (said) VALUES (?)", [("few",)] * FEW)

    async with opened(path) as database:
        await database.write(tell_many)
        assert at_once(database.read(said_where, brief=True)) == (threading.get_ident(), ["few"] * FEW)
        await database.write(saying("one more"))
        thread, found = await database.read(said_where, brief=True)
        assert thread != threading.get_ident()
        assert found == [*["few"] * FEW, "one more"]
        assert at_once(database.read(where, brief=True)) == threading.get_ident()


async def test_what_is_not_brief_after_all_is_undone_and_begun_anew_on_a_thread(path: Path) -> None:
    async def many(transaction: Transaction) -> int:
        await transaction.run("INSERT INTO notes (said) VALUES ('first')")
        await transaction.run_many("INSERT INTO notes (said) VALUES (?)", [("many",)] * (FEW + 1))
        return threading.get_ident()

    async def long(transaction: Transaction) -> int:
        await transaction.run("INSERT INTO notes (said) VALUES ('first')")
        await transaction.run("INSERT INTO notes (said) VALUES (?)", "x" * (LITTLE + 1))
        return threading.get_ident()

    async with opened(path) as database:
        for act in (many, long):
            assert await database.write(act, brief=True) != threading.get_ident()
        there = await database.read(said)
        assert (there.count("first"), there.count("many"), len(there)) == (2, FEW + 1, FEW + 4)


async def test_what_begins_a_log_waits_for_the_disk_and_is_not_done_on_the_loop(path: Path) -> None:
    async with opened(path) as database:
        await database.write(saying("a"))
    async with opened(path) as database:  # the last to close it has folded its log
        assert await database.write(where, brief=True) != threading.get_ident()
        await database.write(saying("b"), brief=True)
        assert at_once(database.write(where, brief=True)) == threading.get_ident()


async def test_what_is_brief_waits_for_another_process_without_keeping_the_loop(path: Path) -> None:
    async with opened(path, busy_timeout_s=60) as database:
        other = await asyncio.to_thread(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
        await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
        asked = asyncio.ensure_future(database.write(saying("a"), brief=True))
        await asyncio.sleep(0.01)
        assert not asked.done()
        assert at_once(database.read(said, brief=True)) == []
        await asyncio.to_thread(other.close)
        assert await asked == 1
        assert at_once(database.write(saying("b"), brief=True)) == 1


async def test_where_every_commit_waits_for_the_disk_nothing_is_done_on_the_loop(path: Path) -> None:
    async with opened(path, fsync=True) as database:
        assert await database.write(where, brief=True) != threading.get_ident()
        assert await database.read(where, brief=True) != threading.get_ident()


async def test_a_brief_act_that_fails_takes_back_its_changes(path: Path) -> None:
    async def refused(transaction: Transaction) -> None:
        await saying("refused")(transaction)
        raise Conflict("no")

    async with opened(path) as database:
        seen = database.rung
        with pytest.raises(Conflict):
            await database.write(refused, brief=True)
        assert database.rung == seen, "nobody is woken for what has not happened"
        assert at_once(database.write(saying("a"), brief=True)) == 1
        assert at_once(database.read(said, brief=True)) == ["a"]


async def test_a_brief_act_is_told_of_a_file_that_is_gone_or_closed(path: Path) -> None:
    async with opened(path) as database:
        await asyncio.to_thread(path.unlink)
        for asked in (database.write(saying("b"), brief=True), database.read(said, brief=True)):
            with pytest.raises(StoreUnavailable, match=r"gone.*put it back"):
                await asked
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.write(saying("b"), brief=True)


async def test_after_a_fork_the_next_brief_act_is_done_as_well(path: Path) -> None:
    async with opened(path) as database:
        assert at_once(database.write(saying("a"), brief=True)) == 1
        child = os.fork()
        if child == 0:  # pragma: no cover
            os._exit(0)
        await asyncio.to_thread(os.waitpid, child, 0)
        assert await database.write(saying("b"), brief=True) == 1, "a thread opens the file anew"
        assert await database.read(said, brief=True) == ["a", "b"]
        assert at_once(database.read(said, brief=True)) == ["a", "b"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_at_any_statement_of_a_brief_act_leaves_it_whole_or_not_there(
    path: Path, fault: str, after: bool
) -> None:
    async def twice(transaction: Transaction, text: str) -> None:
        await transaction.run("INSERT INTO notes (said) VALUES (?)", f"{text}1")
        await transaction.run("INSERT INTO notes (said) VALUES (?)", f"{text}2")

    Faulty.thread = threading.current_thread().name
    async with opened(path, factory=Faulty) as database:
        for at in range(1, 7):
            Faulty.at, Faulty.after, Faulty.fault, Faulty.seen = at, after, fault, 0
            answer = await asyncio.gather(
                database.write(lambda t, at=at: twice(t, f"{at}."), brief=True), return_exceptions=True
            )
            is_reached = Faulty.seen >= at
            Faulty.at = None
            there = await database.read(said)
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


async def test_a_log_that_has_become_long_is_folded_by_the_writer_and_begun_anew(path: Path) -> None:
    def longest() -> int:
        return path.with_name(f"{path.name}-wal").stat().st_size

    Watched.folded.clear()
    async with opened(path, factory=Watched) as database:
        sizes = []
        for _ in range(200):
            await database.write(saying("x" * LITTLE), brief=True)
            sizes.append(await asyncio.to_thread(longest))
        assert max(sizes) < 2 * LOG_BYTES
        assert any(later < earlier for earlier, later in pairwise(sizes)), "it has become shorter again"
        assert len(await database.read(said)) == 200
    assert set(Watched.folded) == {"penstock-sqlite-writer"}
    assert len(Watched.folded) < 30, "and not after every act"
