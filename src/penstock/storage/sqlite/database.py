"""A database in one SQLite file.

Short transactions (`inline`) run on the event loop while nothing is in the way: without `fsync` no commit waits
for the disk, and waking a thread and being woken by it costs three times as much as a few rows. All other transactions,
and those queued behind them, go to threads.

Writes go to one thread. It takes all queued jobs into one transaction, each transaction body under its own savepoint,
and answers their callers after the commit: under load, many bodies share the cost of a commit. Reads go to threads with
their own connections, and wait for no writer. The second reader is used only while the first is busy: waking a sleeping
thread costs as much as a read. `SqliteFile` opens and locks the file, and detects its loss.

Another process may write to the same file, and SQLite sends no notification. So while a caller waits for a topic, the
writer checks every 0.2 s whether another connection has changed the file, and wakes all waiters if so.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from penstock.containment.ledger import WouldBlock
from penstock.hosting.ports import StoreCorrupt, StoreUnavailable
from penstock.notify import Notifier
from penstock.storage.faults import RowFaults
from penstock.storage.port import INLINE_MAX_ROWS, Dialect, Row, T, TransactionBody, Value, drive
from penstock.storage.sqlite.file import Schema, SqliteFile, with_advice

DIALECT = Dialect("sqlite", update_lock="", share_lock="", skip_locked="")
"""No lock clauses: there is only one writer, so the rows that a writing transaction has read cannot change."""
READERS = 2
POLL_INTERVAL_S = 0.2
"""Longest time for which a write of another process goes unnoticed."""
INLINE_MAX_BYTES = 64_000
"""Maximum number of characters or bytes of a value in an inline transaction."""
MAX_BATCH = 1_000
"""Maximum number of jobs that share a transaction; more would keep the first callers waiting."""


class UndecodableText(WouldBlock):
    """A row has text that is not UTF-8. Its body is run again, off the loop, with a stand-in for those bytes."""


class SqliteTransaction:
    """A transaction body's view of a connection, on the thread that has the connection."""

    dialect = DIALECT

    def __init__(self, connection: sqlite3.Connection, topics: list[str]) -> None:
        self._connection = connection
        self._topics = topics
        self.claims: dict[str, tuple[int, str]] = {}

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        return self._fetch(statement, values, -1)

    async def row(self, statement: str, *values: Value) -> Row | None:
        rows = self._fetch(statement, values, -1)  # all, so that RETURNING completes
        return rows[0] if rows else None

    def _fetch(self, statement: str, values: Sequence[Value], size: int) -> list[Row]:
        """Return at most `size` rows, or all if it is negative."""
        cursor = self._connection.cursor()
        try:
            cursor.execute(statement, values)
            rows: list[Row] = cursor.fetchall() if size < 0 else cursor.fetchmany(size)
        except sqlite3.OperationalError as error:
            cursor.close()  # the error refers to it, and no savepoint can be released while its statement runs
            if str(error).startswith("Could not decode to UTF-8"):
                raise UndecodableText from None
            raise
        return rows

    async def run(self, statement: str, *values: Value) -> int:
        return self._connection.execute(statement, values).rowcount

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        self._connection.executemany(statement, values)

    def notify(self, topic: str) -> None:
        self._topics.append(topic)


class InlineTransaction(SqliteTransaction):
    """The view of an inline transaction body; raises WouldBlock, and nothing is done, if the work is too large."""

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        _check_inline(values)
        rows = self._fetch(statement, values, INLINE_MAX_ROWS + 1)
        if len(rows) > INLINE_MAX_ROWS:
            raise WouldBlock
        return rows

    async def row(self, statement: str, *values: Value) -> Row | None:
        _check_inline(values)
        rows = self._fetch(statement, values, -1)
        return rows[0] if rows else None

    async def run(self, statement: str, *values: Value) -> int:
        _check_inline(values)
        return self._connection.execute(statement, values).rowcount

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        rows = [*values]
        if len(rows) > INLINE_MAX_ROWS:
            raise WouldBlock
        _check_inline(chain.from_iterable(rows))
        self._connection.executemany(statement, rows)


def _check_inline(values: Iterable[Value]) -> None:
    for value in values:
        if isinstance(value, (str, bytes)) and len(value) > INLINE_MAX_BYTES:
            raise WouldBlock


@dataclass(slots=True, eq=False)
class Job:
    """A queued transaction body, with the future of its caller and its outcome."""

    body: TransactionBody[Any]
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None
    topics: list[str] = field(default_factory=list)
    thread: ConnectionThread | None = None
    """The thread it was queued for."""

    def resolve(self) -> None:
        """Resolve the caller's future; called on the loop."""
        if self.future.done():  # the caller was cancelled
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


Queue = SimpleQueue[Job | None]
_pending = attrgetter("pending")
Serve = Callable[[SqliteFile, Sequence[Job]], None]
Resolve = Callable[[Sequence[Job]], None]


class SqliteDatabase:
    """A `Database` in a file, for the event loop it was opened on; made by `open`."""

    def __init__(self, path: Path, open_file: Callable[[], SqliteFile]) -> None:
        self.path = path
        self.faults = RowFaults()
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._notifier = Notifier()
        self._watch: asyncio.Task[None] | None = None
        self._data_version: int | None = None
        """`data_version` at the last poll; it changes when another connection has written."""
        self._is_closed = False
        self._writer = ConnectionThread(
            "penstock-sqlite-writer", open_file, write_all, MAX_BATCH, self._resolve, checkpoints=True
        )
        self._readers = [  # one job at a time: another reader may take the next
            ConnectionThread("penstock-sqlite-reader", open_file, read_all, 1, self._resolve) for _ in range(READERS)
        ]
        for reader in self._readers:
            reader.others = [other for other in self._readers if other is not reader]
        self._threads = [self._writer, *self._readers]

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
        """Open the file; create it with the tables of `schema` if it does not exist.

        With `fsync` every commit waits for the disk, so that acknowledged writes survive a power cut too.
        """

        def open_file() -> SqliteFile:
            return SqliteFile(
                path,
                schema,
                make_error=unavailable,
                busy_timeout_s=busy_timeout_s,
                fsync=fsync,
                factory=factory,
                checkpoints=False,
            )

        database = cls(path, open_file)
        try:
            for thread in database._threads:  # the writer first: it creates the file
                thread.start()
                await thread.opened
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, body: TransactionBody[T], *, inline: bool = False) -> T:
        self._check()
        try:
            if inline:
                with suppress(WouldBlock):
                    return self._write_inline(body)
            return await self._run_on(self._writer, body)
        except StoreCorrupt as error:
            self.faults.note(error)
            raise

    async def read(self, body: TransactionBody[T], *, inline: bool = False, single: bool = False) -> T:
        self._check()
        try:
            if inline:
                with suppress(WouldBlock):
                    return self._read_inline(body)
            return await self._run_on(min(self._readers, key=_pending), body)
        except StoreCorrupt as error:
            self.faults.note(error)
            raise

    @property
    def version(self) -> int:
        return self._notifier.version

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        self._check()
        if self._watch is None or self._watch.done():
            self._watch = self._loop.create_task(self._watch_others(), name="penstock-sqlite-watch")
        await self._notifier.wait(topic, seen, timeout_s)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._notifier.notify_all()
            self._stop_threads()
        if self._watch is not None:
            await asyncio.wait((self._watch,))
        for thread in self._threads:
            await thread.ended

    def _stop_threads(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for reader in self._readers:
            reader.ended.add_done_callback(self._end_writer)
            reader.queue.put(None)

    def _end_writer(self, ended: asyncio.Future[None]) -> None:
        """End the writer after all readers: the last to close the file cleans up, and cannot during another close."""
        if all(reader.ended.done() for reader in self._readers):
            self._writer.queue.put(None)

    def _write_inline(self, body: TransactionBody[T]) -> T:
        topics: list[str] = []
        file = self._writer.idle_file()
        with file.inline(), file.writing() as connection:
            result = drive(body(InlineTransaction(connection, topics)))
        for topic in topics:  # after the commit, so that the waiters read the changes
            self._notifier.notify(topic)
        return result

    def _read_inline(self, body: TransactionBody[T]) -> T:
        file = self._readers[0].idle_file()
        with file.inline(to_write=False):
            return file.read(lambda connection: drive(body(InlineTransaction(connection, []))))

    async def _run_on(self, thread: ConnectionThread, body: TransactionBody[T]) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        thread.submit(Job(body, future))
        return await future

    def _check(self) -> None:
        if self._is_closed:
            raise unavailable(f"{str(self.path)!r} was closed")
        if self._process != os.getpid():
            raise unavailable(f"{str(self.path)!r} was opened by the process this one was forked from; open it anew")
        if self._loop is not asyncio.get_running_loop():
            raise unavailable(f"{str(self.path)!r} was opened on another event loop; open it anew on this one")

    def _resolve(self, jobs: Sequence[Job]) -> None:
        """Resolve the futures of the jobs, then notify their topics; called on the loop."""
        for job in jobs:
            if job.thread is not None:
                job.thread.pending -= 1
            job.resolve()
        for job in jobs:
            for topic in job.topics:
                self._notifier.notify(topic)

    async def _watch_others(self) -> None:
        """While a caller waits: wake all waiters when another connection has written since the last poll."""
        while True:
            with suppress(StoreUnavailable):
                now = await self.write(_data_version, inline=True)
                if now != self._data_version:
                    self._notifier.notify_all()
                self._data_version = now
            await asyncio.sleep(POLL_INTERVAL_S)
            if not self._notifier.has_waiters:
                return


class ConnectionThread:
    """A thread with a connection to the file and a queue of jobs. None in the queue ends it."""

    def __init__(
        self,
        name: str,
        open_file: Callable[[], SqliteFile],
        serve: Serve,
        batch_size: int,
        resolve: Resolve,
        *,
        checkpoints: bool = False,
    ) -> None:
        self.queue: Queue = SimpleQueue()
        self.file: SqliteFile | None = None
        """Its file, once it is open."""
        self.pending = 0
        """Number of its unresolved jobs; used on the loop only."""
        self.others: Sequence[ConnectionThread] = ()
        """Threads that serve the same jobs: jobs queued there are taken before this thread goes to sleep."""
        self._name = name
        self._open_file = open_file
        self._serve = serve
        self._batch_size = batch_size
        self._resolve = resolve
        self._checkpoints = checkpoints
        """Whether it checkpoints a log that has become long; waiting callers are answered first."""
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.ended.set_result(None)  # it has not started

    def submit(self, job: Job) -> None:
        """Queue a job; called on the loop."""
        self.pending += 1
        job.thread = self
        self.queue.put(job)

    def idle_file(self) -> SqliteFile:
        """Return the file for an inline transaction, on the loop; raise WouldBlock while jobs are queued."""
        if self.pending or self.file is None:
            raise WouldBlock
        return self.file

    def start(self) -> None:
        """Start the thread; `opened` reports whether the file could be opened."""
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
            jobs, is_last = self._batch(job)
            self._serve(file, jobs)
            self._post(self._resolve, jobs)
            if self._checkpoints and file.has_long_log:
                file.checkpoint()
            if is_last:
                return
            job = (self._steal() if self.queue.empty() else None) or self.queue.get()

    def _batch(self, job: Job | None) -> tuple[list[Job], bool]:
        """Return the job and those queued behind it, and whether the thread ends after them."""
        jobs: list[Job] = []
        with suppress(Empty):
            while job is not None:
                jobs.append(job)
                if len(jobs) >= self._batch_size:
                    break
                job = self.queue.get_nowait()
        return jobs, job is None

    def _steal(self) -> Job | None:
        for other in self.others:
            with suppress(Empty):
                job = other.queue.get_nowait()
                if job is not None:
                    return job
                other.queue.put(None)  # the other thread is to end, not this one
        return None

    def _post(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: no caller waits any more
            self._loop.call_soon_threadsafe(call, *args)


def write_all(file: SqliteFile, jobs: Sequence[Job]) -> None:
    """Run all jobs in one transaction; if it cannot be committed, none of them has taken effect.

    A job that meets text that is not UTF-8 has taken no effect either, and is run again in a transaction of its own.
    """
    _write_batch(file, jobs)
    _run_again(file, jobs, _write_batch)


def _write_batch(file: SqliteFile, jobs: Sequence[Job]) -> None:
    wanted = [job for job in jobs if not job.future.cancelled()]
    if not wanted:
        return
    try:
        with file.writing() as connection:
            if len(wanted) == 1:  # no savepoint: a failure undoes the transaction
                _run_job(wanted[0], connection)
                return
            for job in wanted:
                _run_in_savepoint(file, connection, job)
    except BaseException as error:
        for job in wanted:
            # The results of the other jobs are from a transaction that was not committed.
            job.error = error if len(wanted) == 1 else unavailable(str(error))
            job.topics = []


def read_all(file: SqliteFile, jobs: Sequence[Job]) -> None:
    """Run each job in its own transaction, so that all it reads is from one instant."""
    _read_batch(file, jobs)
    _run_again(file, jobs, _read_batch)


def _run_again(file: SqliteFile, jobs: Sequence[Job], run: Serve) -> None:
    for job in jobs:
        if isinstance(job.error, UndecodableText):
            job.error = None
            with file.tolerant_text():
                run(file, [job])


def _read_batch(file: SqliteFile, jobs: Sequence[Job]) -> None:
    for job in jobs:
        try:
            file.read(partial(_run_job, job))
        except BaseException as error:
            job.error = error


def _run_job(job: Job, connection: sqlite3.Connection) -> None:
    topics: list[str] = []
    job.result = drive(job.body(SqliteTransaction(connection, topics)))
    job.topics = topics


def _run_in_savepoint(file: SqliteFile, connection: sqlite3.Connection, job: Job) -> None:
    connection.execute("SAVEPOINT job")
    try:
        _run_job(job, connection)
    except BaseException as error:
        if not connection.in_transaction:  # SQLite has undone the whole transaction
            raise
        connection.execute("ROLLBACK TO job")
        job.error = _job_error(file, error) if isinstance(error, sqlite3.Error) else error
    connection.execute("RELEASE job")


async def _data_version(transaction: Any) -> int:
    row = await transaction.row("PRAGMA data_version")
    return int(row[0])


def unavailable(why: str) -> StoreUnavailable:
    """Return the error for a failure of the file, with advice on what to do about it."""
    return StoreUnavailable(with_advice(why))


def _job_error(file: SqliteFile, error: sqlite3.Error) -> StoreUnavailable:
    return unavailable(f"{str(file.path)!r} cannot record: {error} ({getattr(error, 'sqlite_errorname', '?')})")


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
