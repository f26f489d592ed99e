"""A database in one SQLite file.

What is brief, while nobody is in the way, is done at once, on the loop: without `fsync` no commit waits for the disk,
and to wake a thread and be woken by it costs three times what a few rows do. For everything else, and whatever comes
behind that, there are threads.

Writes go to one thread. It takes all that wait for it into one transaction, each act under a savepoint of its own, and
answers their callers after the commit: under load, many acts share what a commit costs. Reads go to threads with
connections of their own, and wait for no writer. The second reader is asked only while the first is busy: to wake a
thread that has slept costs as much as a read. How the file itself is opened, locked and lost is `SqliteFile`'s matter.

Another process may write to the same file, and SQLite tells nobody. So while somebody waits for a bell, the writer asks
every 0.2 s whether another connection has changed the file, and wakes everybody if so.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from penstock.containment.ledger import WouldWait
from penstock.hosting.ports import StoreUnavailable
from penstock.storage.databases.bells import Bells
from penstock.storage.databases.port import FEW, Act, Dialect, Row, T, Value
from penstock.storage.sqlite_file import Schema, SqliteFile, advised

DIALECT = Dialect("sqlite", update_lock="", share_lock="", skip_locked="")
"""There is one writer: what a writing act has read stays true without locks."""
READERS = 2
LOOK_S = 0.2
"""How long something that another process has written may go unnoticed."""
LITTLE = 64_000
"""So many characters or bytes a value of a brief act may have."""
MOST_AT_ONCE = 1_000
"""So many acts share a transaction; more would keep the first ones waiting."""


class SqliteTransaction:
    """One act's view of a connection, on the thread that has it."""

    dialect = DIALECT

    def __init__(self, connection: sqlite3.Connection, topics: list[str]) -> None:
        self._connection = connection
        self._topics = topics

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        rows: list[Row] = self._connection.execute(statement, values).fetchall()
        return rows

    async def row(self, statement: str, *values: Value) -> Row | None:
        rows: list[Row] = self._connection.execute(statement, values).fetchall()  # all, so that RETURNING is done
        return rows[0] if rows else None

    async def run(self, statement: str, *values: Value) -> int:
        return self._connection.execute(statement, values).rowcount

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        self._connection.executemany(statement, values)

    def ring(self, topic: str) -> None:
        self._topics.append(topic)


class BriefTransaction(SqliteTransaction):
    """The view of an act that is brief; WouldWait, and nothing done, where it turns out not to be."""

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        _must_be_little(values)
        rows: list[Row] = self._connection.execute(statement, values).fetchmany(FEW + 1)
        if len(rows) > FEW:
            raise WouldWait
        return rows

    async def row(self, statement: str, *values: Value) -> Row | None:
        _must_be_little(values)
        return await super().row(statement, *values)

    async def run(self, statement: str, *values: Value) -> int:
        _must_be_little(values)
        return await super().run(statement, *values)

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        rows = [*values]
        if len(rows) > FEW:
            raise WouldWait
        for row in rows:
            _must_be_little(row)
        await super().run_many(statement, rows)


def _must_be_little(values: Sequence[Value]) -> None:
    for value in values:
        if isinstance(value, str | bytes) and len(value) > LITTLE:
            raise WouldWait


@dataclass(slots=True, eq=False)
class Job:
    """An act on its way: who waits for it, and what came of it."""

    act: Act[Any]
    answer: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None
    topics: list[str] = field(default_factory=list)
    desk: Desk | None = None
    """Before whose desk it was laid."""

    def tell(self) -> None:
        """On the loop: whoever waits goes on."""
        if self.answer.done():  # the caller was cancelled
            return
        if self.error is None:
            self.answer.set_result(self.result)
        else:
            self.answer.set_exception(self.error)


Queue = SimpleQueue[Job | None]
_asked = attrgetter("asked")
Serve = Callable[[SqliteFile, Sequence[Job]], None]
Tell = Callable[[Sequence[Job]], None]


class SqliteDatabase:
    """A `Database` in a file, for the event loop it was opened on; made by `open`."""

    def __init__(self, path: Path, open_file: Callable[[], SqliteFile]) -> None:
        self.path = path
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._bells = Bells()
        self._watch: asyncio.Task[None] | None = None
        self._version: int | None = None
        """What changes when another connection has written; of the last look."""
        self._is_closed = False
        self._writer = Desk("penstock-sqlite-writer", open_file, write_all, MOST_AT_ONCE, self._tell, tidies=True)
        self._readers = [  # one act each: another reader may take the next
            Desk("penstock-sqlite-reader", open_file, read_all, 1, self._tell) for _ in range(READERS)
        ]
        for reader in self._readers:
            reader.others = [other for other in self._readers if other is not reader]
        self._desks = [self._writer, *self._readers]

    @classmethod
    async def open(
        cls,
        path: Path,
        schema: Schema,
        *,
        busy_timeout_s: float = 0.9,
        fsync: bool = False,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> SqliteDatabase:
        """Open the file, made with the tables of `schema` if it is not there.

        With `fsync` every commit waits for the disk, so that what was answered survives a power cut too.
        """

        def open_file() -> SqliteFile:
            return SqliteFile(
                path, schema, fault=fault, busy_timeout_s=busy_timeout_s, fsync=fsync, factory=factory, folds=False
            )

        database = cls(path, open_file)
        try:
            for desk in database._desks:  # the writer first: it makes the file
                desk.start()
                await desk.opened
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, act: Act[T], *, brief: bool = False) -> T:
        self._check()
        if brief:
            with suppress(WouldWait):
                return self._written_now(act)
        return await self._ask(self._writer, act)

    async def read(self, act: Act[T], *, brief: bool = False) -> T:
        self._check()
        if brief:
            with suppress(WouldWait):
                return self._read_now(act)
        return await self._ask(min(self._readers, key=_asked), act)

    @property
    def rung(self) -> int:
        return self._bells.rung

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        self._check()
        if self._watch is None or self._watch.done():
            self._watch = self._loop.create_task(self._watch_others(), name="penstock-sqlite-watch")
        await self._bells.wait(topic, seen, timeout_s)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._bells.ring_all()
            self._stop_asking()
        if self._watch is not None:
            await asyncio.wait((self._watch,))
        for desk in self._desks:
            await desk.ended

    def _stop_asking(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for reader in self._readers:
            reader.ended.add_done_callback(self._end_writer)
            reader.queue.put(None)

    def _end_writer(self, ended: asyncio.Future[None]) -> None:
        """After all readers: the last to close a file tidies it up, and cannot while another one is about to."""
        if all(reader.ended.done() for reader in self._readers):
            self._writer.queue.put(None)

    def _written_now(self, act: Act[T]) -> T:
        topics: list[str] = []
        with self._writer.file_now() as file, file.writing() as connection:
            done = _driven(act(BriefTransaction(connection, topics)))
        for topic in topics:
            self._bells.ring(topic)
        return done

    def _read_now(self, act: Act[T]) -> T:
        with self._readers[0].file_now(to_write=False) as file:
            return file.look(lambda connection: _driven(act(BriefTransaction(connection, []))))

    async def _ask(self, desk: Desk, act: Act[T]) -> T:
        answer: asyncio.Future[T] = self._loop.create_future()
        desk.ask(Job(act, answer))
        return await answer

    def _check(self) -> None:
        if self._is_closed:
            raise fault(f"{str(self.path)!r} was closed")
        if self._process != os.getpid():
            raise fault(f"{str(self.path)!r} was opened by the process this one was forked from; open it anew here")
        if self._loop is not asyncio.get_running_loop():
            raise fault(f"{str(self.path)!r} was opened on another event loop; open it anew on this one")

    def _tell(self, jobs: Sequence[Job]) -> None:
        """On the loop: answer those who wait, then ring for what they have done."""
        for job in jobs:
            if job.desk is not None:
                job.desk.asked -= 1
            job.tell()
        for job in jobs:
            for topic in job.topics:
                self._bells.ring(topic)

    async def _watch_others(self) -> None:
        """While somebody waits for a bell: wake everybody when another connection has written since the last look."""
        while True:
            with suppress(StoreUnavailable):
                now = await self.write(_data_version, brief=True)
                if now != self._version:
                    self._bells.ring_all()
                self._version = now
            await asyncio.sleep(LOOK_S)
            if not self._bells.is_awaited:
                return


class Desk:
    """A thread with a connection to the file, and the queue of acts before it. None in the queue ends it."""

    def __init__(
        self,
        name: str,
        open_file: Callable[[], SqliteFile],
        serve: Serve,
        most: int,
        tell: Tell,
        *,
        tidies: bool = False,
    ) -> None:
        self.queue: Queue = SimpleQueue()
        self.file: SqliteFile | None = None
        """Its file, once it is open."""
        self.asked = 0
        """How many acts were laid before it and are not answered yet; known on the loop."""
        self.others: Sequence[Desk] = ()
        """Who does the same: what waits there is taken before this one goes to sleep."""
        self._name = name
        self._open_file = open_file
        self._serve = serve
        self._most = most
        self._tell = tell
        self._tidies = tidies
        """Whether it folds the log when that has become long; those who wait are answered first."""
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.ended.set_result(None)  # it has not begun

    def ask(self, job: Job) -> None:
        """On the loop: lay an act before it."""
        self.asked += 1
        job.desk = self
        self.queue.put(job)

    @contextmanager
    def file_now(self, *, to_write: bool = True) -> Iterator[SqliteFile]:
        """On the loop: its file, for what does not wait; WouldWait if something was laid before it."""
        if self.asked or self.file is None:
            raise WouldWait
        with self.file.without_waiting(to_write=to_write):
            yield self.file

    def start(self) -> None:
        """Begin; `opened` says whether there is a file."""
        self.ended = self._loop.create_future()
        threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        try:
            self.file = file = self._open_file()
        except BaseException as error:
            self._post(_settle, self.opened, error)
            self._post(_settle, self.ended, None)
            return
        self._post(_settle, self.opened, None)
        try:
            self._serve_all(file)
        finally:
            file.close()
            self._post(_settle, self.ended, None)

    def _serve_all(self, file: SqliteFile) -> None:
        job = self.queue.get()
        while True:
            jobs, is_last = self._with_those_behind(job)
            self._serve(file, jobs)
            self._post(self._tell, jobs)
            if self._tidies and file.has_long_log:
                file.fold()
            if is_last:
                return
            job = (self._of_others() if self.queue.empty() else None) or self.queue.get()

    def _with_those_behind(self, job: Job | None) -> tuple[list[Job], bool]:
        """It and those who wait behind it, and whether nobody comes after them."""
        jobs: list[Job] = []
        with suppress(Empty):
            while job is not None:
                jobs.append(job)
                if len(jobs) >= self._most:
                    break
                job = self.queue.get_nowait()
        return jobs, job is None

    def _of_others(self) -> Job | None:
        for other in self.others:
            with suppress(Empty):
                job = other.queue.get_nowait()
                if job is not None:
                    return job
                other.queue.put(None)  # it is the other that is to end
        return None

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)


def write_all(file: SqliteFile, jobs: Sequence[Job]) -> None:
    """One transaction for all of them. If it cannot be committed, none of them has happened."""
    wanted = [job for job in jobs if not job.answer.cancelled()]
    if not wanted:
        return
    try:
        with file.writing() as connection:
            if len(wanted) == 1:  # what it could not do is undone with the transaction
                _do(wanted[0], connection)
                return
            for job in wanted:
                _do_or_undo(file, connection, job)
    except BaseException as error:
        for job in wanted:
            # What the others were told, they were told of a transaction that has not happened.
            job.error = error if len(wanted) == 1 else fault(str(error))
            job.topics = []


def read_all(file: SqliteFile, jobs: Sequence[Job]) -> None:
    """Each in a transaction of its own, so that all it reads is of one instant."""
    for job in jobs:
        try:
            file.look(partial(_do, job))
        except BaseException as error:
            job.error = error


def _do(job: Job, connection: sqlite3.Connection) -> None:
    topics: list[str] = []
    job.result = _driven(job.act(SqliteTransaction(connection, topics)))
    job.topics = topics


def _do_or_undo(file: SqliteFile, connection: sqlite3.Connection, job: Job) -> None:
    connection.execute("SAVEPOINT act")
    try:
        _do(job, connection)
    except BaseException as error:
        if not connection.in_transaction:  # SQLite has undone everybody's
            raise
        connection.execute("ROLLBACK TO act")
        job.error = _told(file, error) if isinstance(error, sqlite3.Error) else error
    connection.execute("RELEASE act")


def _driven(act: Coroutine[Any, Any, T]) -> T:
    """What the act gives; it waits for nothing but its transaction, which never makes it wait."""
    try:
        act.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    act.close()
    raise RuntimeError("an act waited for something that is not its transaction")


async def _data_version(transaction: Any) -> int:
    row = await transaction.row("PRAGMA data_version")
    return int(row[0])


def fault(why: str) -> StoreUnavailable:
    """The error for what the file cannot do, with what to do about it."""
    return StoreUnavailable(advised(why))


def _told(file: SqliteFile, error: sqlite3.Error) -> StoreUnavailable:
    return fault(f"{str(file.path)!r} cannot record: {error} ({getattr(error, 'sqlite_errorname', '?')})")


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
