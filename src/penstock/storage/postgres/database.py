"""A database on a PostgreSQL server.

Each transaction body is one transaction on a pooled connection. A body is run again if the server rejected it because
of other transactions (a deadlock, a row inserted concurrently), or if its connection was lost before the commit. If the
connection is lost during the commit, the outcome is unknown, and the caller has to retry.

Round trips are the main cost. A body that reads with a single statement needs no BEGIN and COMMIT; if it makes another
statement after all, it is started again in a transaction. Many rows are inserted by one statement. Connections are
returned without the driver's reset: no body changes a setting of its session, and none leaves a transaction open.

Notifications go through NOTIFY, which carries ids and nothing else (`listener`). When the connection that listens is
lost, it is opened again and all waiters are woken to check for themselves, since notifications sent meanwhile are lost.
Waiters also check by themselves every few seconds.

A pooler that assigns a connection per transaction cannot be used: LISTEN and prepared statements belong to a session.
It is detected and reported when the database is opened.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]

from penstock.errors import InvalidValue
from penstock.hosting.ports import StoreCorrupt, StoreUnavailable
from penstock.notify import Notifier
from penstock.storage.faults import RowFaults
from penstock.storage.port import Dialect, Row, T, Transaction, TransactionBody, Value
from penstock.storage.postgres.listener import NOTIFY, Listener, channel_of

DIALECT = Dialect("postgresql", " FOR UPDATE", " FOR SHARE", " FOR UPDATE SKIP LOCKED")
BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
POLL_INTERVAL_S = 5.0
"""Longest time for which a change without a notification goes unnoticed."""
MAX_ATTEMPTS = 5
BACKOFF_S = 0.02
"""Pause before a transaction is run again, multiplied by the number of attempts."""
CONNECT_S = 2.0
"""Longest wait for the server to accept a connection: short enough for a service to report the failure in time."""
ROLLBACK_S = 2.0
"""Longest wait for the end of a transaction that failed or was cancelled."""
LOCKED_S = 1.5
"""Longest wait of a statement for a lock: more than the second after which the server looks for deadlocks."""

RETRYABLE = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,  # the row was inserted concurrently: the next attempt finds it
    asyncpg.TooManyConnectionsError,  # nothing was done; another process, or this one, may return a connection
)
CONNECTION_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # raised when the server's termination coincides with a statement
    ConnectionError,
)
ERRORS = (*CONNECTION_LOST, asyncpg.PostgresError, OSError, TimeoutError)

POOLER = (
    "a pooler that hands out a connection per transaction stands between; connect to the server itself, "
    "or let the pooler keep sessions (pool_mode = session)"
)
ADVICE: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError), POOLER),
    ((asyncpg.InvalidCatalogNameError,), "make the database first"),
    ((asyncpg.InvalidAuthorizationSpecificationError,), "check user and password in its URL"),
    ((asyncpg.InsufficientPrivilegeError,), "let its user read and write"),
    ((asyncpg.ReadOnlySQLTransactionError,), "connect to the server that takes writes"),
    ((asyncpg.TooManyConnectionsError,), "allow more connections there, or use fewer here"),
    ((asyncpg.DiskFullError,), "free space on the server's disk"),
    ((asyncpg.UndefinedTableError, asyncpg.UndefinedColumnError), "run `penstock db upgrade --db URL` for it"),
    ((TimeoutError, asyncpg.QueryCanceledError), "see what keeps the server busy, then try again"),
    ((asyncpg.LockNotAvailableError,), "see who keeps a lock on the server, then try again"),
    ((*CONNECTION_LOST, OSError), "see whether the server runs and can be reached, then try again"),
)
"""Advice on what to do about an error, by type of error."""


class PostgresTransaction:
    """A transaction body's view of a connection."""

    dialect = DIALECT

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.topics: dict[str, None] = {}
        self.claims: dict[str, tuple[int, str]] = {}

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(numbered(statement), *values)
        return rows

    async def row(self, statement: str, *values: Value) -> Row | None:
        row: Row | None = await self._connection.fetchrow(numbered(statement), *values)
        return row

    async def run(self, statement: str, *values: Value) -> int:
        status: str = await self._connection.execute(numbered(statement), *values)
        count = status.rpartition(" ")[2]  # such as UPDATE 3
        return int(count) if count.isdigit() else 0

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        rows = values if isinstance(values, list) else [*values]
        if len(rows) > 1 and (at_once := await self._for_many(statement)) is not None:
            await self._connection.execute(at_once, *map(_as_array, zip(*rows, strict=True)))
        else:
            await self._connection.executemany(numbered(statement), rows)

    async def _for_many(self, statement: str) -> str | None:
        """Return the statement that handles all rows at once, from an array for each value; None if there is none."""
        if statement not in _FOR_MANY:
            at_once = None
            if INSERT.fullmatch(statement) or UPDATE.fullmatch(statement):
                prepared = await self._connection.prepare(numbered(statement))
                at_once = for_many(statement, [type.name for type in prepared.get_parameters()])
            _FOR_MANY[statement] = at_once
        return _FOR_MANY[statement]

    def notify(self, topic: str) -> None:
        self.topics[topic] = None

    async def send_notifications(self) -> None:
        """Notify the listeners of the topics, if there are any; the server delivers at commit."""
        if self.topics:
            await self._connection.execute(NOTIFY, [*self.topics], [str(channel_of(topic)) for topic in self.topics])


INSERT = re.compile(r"(INSERT INTO \w+) \(([\w, ]+)\) VALUES \(\?(?:, \?)*\)( ON CONFLICT .*)?", re.DOTALL)
UPDATE = re.compile(r"UPDATE (\w+) SET ((?:\w+ = \?(?:, )?)+) WHERE (\w+ = \?(?: AND \w+ = \?)*)")
_FOR_MANY: dict[str, str | None] = {}
"""The statement for many rows, by the statement for one; the server reports the types of its values."""


def for_many(statement: str, types: Sequence[str]) -> str:
    """Return the statement that applies an INSERT or UPDATE of one row to arrays of values of these types.

    Numbers are sent as text: the driver asks each new connection about other arrays, with a query that takes longer.
    """
    arrays = ", ".join(f"${number}::{'bytea' if type == 'bytea' else 'text'}[]" for number, type in enumerate(types, 1))
    names = ", ".join(f"v{number}" for number in range(len(types)))
    values = [f"v{number}{'' if type in ('text', 'bytea') else f'::{type}'}" for number, type in enumerate(types)]
    if (insert := INSERT.fullmatch(statement)) is not None:
        into, columns, conflict = insert.groups()
        rows = f"unnest({arrays}) WITH ORDINALITY AS new_rows ({names}, row_at)"
        return f"{into} ({columns}) SELECT {', '.join(values)} FROM {rows} ORDER BY row_at{conflict or ''}"
    update = UPDATE.fullmatch(statement)
    assert update is not None, "a statement of this form"
    table, settings, condition = update.groups()
    changed, keys = (re.findall(r"(\w+) = \?", part) for part in (settings, condition))
    sets = ", ".join(f"{column} = {value}" for column, value in zip(changed, values, strict=False))
    where = " AND ".join(
        f"{table}.{column} = {value}" for column, value in zip(keys, values[len(changed) :], strict=True)
    )
    return f"UPDATE {table} SET {sets} FROM unnest({arrays}) AS new_rows ({names}) WHERE {where}"


def _as_array(values: Sequence[Value]) -> Sequence[str | bytes | None]:
    """Return a column of values as `for_many` takes it."""
    return [str(value) if isinstance(value, int) else value for value in values]


class _NeedsTransaction(BaseException):
    """A body that was to read with a single statement makes another one, which needs a transaction."""


class SingleStatement(PostgresTransaction):
    """The view of a body that reads with one statement, outside of any transaction."""

    _has_read = False

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        self._read_once()
        return await super().rows(statement, *values)

    async def row(self, statement: str, *values: Value) -> Row | None:
        self._read_once()
        return await super().row(statement, *values)

    async def run(self, statement: str, *values: Value) -> int:
        raise _NeedsTransaction

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        raise _NeedsTransaction

    def _read_once(self) -> None:
        if self._has_read:
            raise _NeedsTransaction
        self._has_read = True


class PostgresDatabase:
    """A `Database` on a server, for the event loop it was opened on; made by `open`."""

    def __init__(self, url: str, pool: Any, timeout_s: float) -> None:
        self.where = without_password(url)
        """The URL without a password."""
        self.faults = RowFaults()
        self._url = url
        self._pool = pool
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._notifier = Notifier()
        self._listener = Listener(self._notifier, self._connect_listener, ERRORS)
        self._is_closed = False

    @classmethod
    async def open(cls, url: str, *, connections: int = 10, timeout_s: float = 10.0) -> PostgresDatabase:
        """Connect to the server; statements time out after `timeout_s`, connecting after `CONNECT_S`."""
        where = without_password(url)
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=0,  # a pool with a minimum size logs a traceback whenever it cannot keep it
                max_size=connections,
                timeout=CONNECT_S,
                command_timeout=timeout_s,
                server_settings={"application_name": "penstock"},
                connection_class=_connection_class(timeout_s),
                init=lambda connection: connection.execute(connection.session_settings),
            )
            async with pool.acquire():
                pass  # fail now if the server cannot be reached
        except ERRORS as error:
            raise unavailable(where, error) from error
        except ValueError as error:
            raise InvalidValue("url", where, f"a URL of a PostgreSQL database ({error})") from None
        database = cls(url, pool, timeout_s)
        try:
            await database._refuse_pooler()
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, body: TransactionBody[T], *, inline: bool = False) -> T:
        self._check()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            stage = _Stage()
            try:
                return await self._write_once(body, stage)
            except StoreCorrupt as error:
                self.faults.note(error)
                raise
            except ERRORS as error:
                may_repeat = isinstance(error, RETRYABLE) or (
                    isinstance(error, CONNECTION_LOST) and not stage.is_committing
                )
                if not may_repeat or attempt == MAX_ATTEMPTS or self._is_closed:
                    raise unavailable(self.where, error) from error
                await self._back_off(error, attempt)
        raise AssertionError("unreachable")

    async def read(self, body: TransactionBody[T], *, inline: bool = False, single: bool = False) -> T:
        self._check()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                if single:
                    with suppress(_NeedsTransaction):
                        async with self._connected() as connection:
                            return await body(SingleStatement(connection))
                async with self._transaction(BEGIN_READ) as connection:
                    result = await body(PostgresTransaction(connection))
                    await connection.execute("COMMIT")
                    return result
            except StoreCorrupt as error:
                self.faults.note(error)
                raise
            except ERRORS as error:
                may_repeat = isinstance(error, (*RETRYABLE, *CONNECTION_LOST))
                if not may_repeat or attempt == MAX_ATTEMPTS or self._is_closed:
                    raise unavailable(self.where, error) from error
                await self._back_off(error, attempt)
        raise AssertionError("unreachable")

    async def size_bytes(self) -> int:
        """Return the size of the whole database."""

        async def body(transaction: Transaction) -> int:
            row = await transaction.row("SELECT pg_database_size(current_database())")
            assert row is not None, "a function call is one row"
            return int(row[0])

        return await self.read(body)

    @property
    def version(self) -> int:
        return self._notifier.version

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        self._check()
        await self._listener.wait(topic, seen, min(timeout_s, POLL_INTERVAL_S))

    async def close(self) -> None:
        self._is_closed = True
        self._notifier.notify_all()
        await self._listener.close()
        try:
            await asyncio.wait_for(self._pool.close(), self._timeout_s)
        except ERRORS:
            self._pool.terminate()

    async def _write_once(self, body: TransactionBody[T], stage: _Stage) -> T:
        async with self._transaction("BEGIN") as connection:
            transaction = PostgresTransaction(connection)
            result = await body(transaction)
            await transaction.send_notifications()
            stage.is_committing = True
            await connection.execute("COMMIT")
        for topic in transaction.topics:
            self._notifier.notify(topic)
        return result

    @asynccontextmanager
    async def _transaction(self, begin: str) -> AsyncIterator[Any]:
        """Yield a connection in a transaction that the block commits; if anything fails, it is rolled back.

        The statements are our own: asyncpg's `Transaction` leaves the connection in a transaction if the caller is
        cancelled while it begins, or once more while it is rolled back.
        """
        async with self._connected() as connection:
            try:
                await connection.execute(begin)
                yield connection
            except BaseException:
                # Shielded: a connection must not return to the pool before its transaction has ended.
                await _finish(_roll_back(connection))
                raise

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        # A caller that finds all connections busy waits for statements of others, as long as those may take. Connecting
        # has the pool's own time limit.
        async with self._pool.acquire(timeout=self._timeout_s) as connection:
            yield connection

    async def _back_off(self, error: Exception, attempt: int) -> None:
        if isinstance(error, CONNECTION_LOST):  # the other connections are as old as this one
            with suppress(*ERRORS):
                await self._pool.expire_connections()
        await asyncio.sleep(BACKOFF_S * attempt)

    def _check(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.where!r} was closed")
        if self._process != os.getpid():
            raise StoreUnavailable(f"{self.where!r} was opened by the process this one was forked from; open it anew")
        if self._loop is not asyncio.get_running_loop():
            raise StoreUnavailable(f"{self.where!r} was opened on another event loop; open it anew on this one")

    async def _connect_listener(self) -> Any:
        return await asyncpg.connect(
            self._url, timeout=CONNECT_S, server_settings={"application_name": "penstock listener"}
        )

    async def _refuse_pooler(self) -> None:
        """Raise StoreUnavailable if two of our connections can share one session of the server."""
        try:
            async with self._connected() as first:
                if first.get_server_pid() == await first.fetchval("SELECT pg_backend_pid()"):
                    return  # no pooler between
                async with self._connected() as second:
                    sessions = [await each.fetchval("SELECT pg_backend_pid()") for each in (first, second)]
        except ERRORS as error:
            raise unavailable(self.where, error) from error
        if sessions[0] == sessions[1]:
            raise StoreUnavailable(f"{self.where!r} cannot be used: {POOLER}")


def _connection_class(timeout_s: float) -> Any:
    """Return a connection class whose transactions the server ends when they idle or wait for a lock too long.

    A process may be stopped in the middle of a transaction. It keeps its locks, for example on its own run, and no
    worker could take that run over. A statement sets this, since a session pooler accepts few settings at startup.
    """

    class Connection(asyncpg.Connection):  # type: ignore[misc]
        __slots__ = ()
        session_settings = (
            f"SET idle_in_transaction_session_timeout = {max(1, round(timeout_s * 1_000))}; "
            f"SET lock_timeout = {max(1, round(min(LOCKED_S, timeout_s) * 1_000))}"
        )

        def get_reset_query(self) -> str:
            """Return no query: no body changes its session, and none returns its connection within a transaction."""
            return ""

    return Connection


async def _roll_back(connection: Any) -> None:
    """End the transaction of a connection; close the connection if that fails, and so let the server end it."""
    try:
        async with asyncio.timeout(ROLLBACK_S):  # also limits how long a cancelled statement takes to end
            await connection.execute("ROLLBACK")
    except BaseException as error:
        connection.terminate()
        if not isinstance(error, ERRORS):
            raise


async def _finish(work: Coroutine[Any, Any, None]) -> None:
    """Await `work` to its end, however often the caller is cancelled meanwhile; then raise the cancellation."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class _Stage:
    """Progress of a write."""

    is_committing = False


@lru_cache(maxsize=1_000)
def numbered(statement: str) -> str:
    """Return the statement with $1, $2, … in place of each `?`."""
    first, *rest = statement.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


def without_password(url: str) -> str:
    """Return the URL without its password; raise InvalidValue if it is not the URL of a PostgreSQL database."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidValue("url", "something else, which may hold a password", "postgresql://user@host/database")
    user = f"{parts.username}@" if parts.username else ""
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{user}{host}{port}{parts.path}"


def unavailable(where: str, error: Exception) -> StoreUnavailable:
    """Return the error for a failure of the server, with advice on what to do about it."""
    advice = next((advice for kinds, advice in ADVICE if isinstance(error, kinds)), "see the server's log")
    why = str(error) or type(error).__name__
    return StoreUnavailable(f"{where!r} cannot be used now: {why} ({type(error).__name__}); {advice}")
