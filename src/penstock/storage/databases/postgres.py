"""A database on a PostgreSQL server.

Each act is one transaction on a connection of a pool. One that the server turned away because of others (a deadlock, a
row that somebody else made at the same time) is run again; so is one whose connection was lost before it was committed.
If the connection is lost during the commit, nobody knows what came of it, and the caller has to ask again.

Bells ring through NOTIFY, which carries ids and nothing else. One connection listens; when it is lost, it is opened
again, and everybody who waits looks for themselves: what was said meanwhile, nobody heard. Besides, whoever waits
looks every few seconds anyway.

A pooler that hands out a connection per transaction cannot be between: LISTEN and prepared statements belong to a
session. That is noticed when the database is opened, and said.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]

from penstock.errors import InvalidValue
from penstock.hosting.ports import StoreUnavailable
from penstock.storage.databases.bells import Bells
from penstock.storage.databases.port import Act, Dialect, Row, T, Value

DIALECT = Dialect("postgresql", " FOR UPDATE", " FOR SHARE", " FOR UPDATE SKIP LOCKED")
CHANNEL = "penstock"
LOOK_S = 5.0
"""How long something may go unnoticed that no notification told of."""
TRIES = 5
PAUSE_S = 0.02
"""Before an act is run again, once more for each time."""
RECONNECT_S = 0.5
CONNECT_S = 2.0
"""How long an act waits for a connection: short enough for a service to say in time that it cannot be done."""
LOCKED_S = 1.5
"""How long a statement waits for what somebody else has locked: after a second the server looks for two that wait for
each other."""

TURNED_AWAY = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.UniqueViolationError,  # somebody else made the row at the same time: now it is there to be found
)
LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # so it says when the server's good-bye comes together with a statement
    ConnectionError,
)
FAULTS = (*LOST, asyncpg.PostgresError, OSError, TimeoutError)

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
    ((TimeoutError, asyncpg.QueryCanceledError), "see what keeps the server busy, then ask again"),
    ((asyncpg.LockNotAvailableError,), "see who keeps a lock on the server, then ask again"),
    ((*LOST, OSError), "see whether the server runs and can be reached, then ask again"),
)
"""What to do about a fault."""


class PostgresTransaction:
    """One act's view of a connection."""

    dialect = DIALECT

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.topics: dict[str, None] = {}

    async def rows(self, statement: str, *values: Value) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(numbered(statement), *values)
        return rows

    async def row(self, statement: str, *values: Value) -> Row | None:
        row: Row | None = await self._connection.fetchrow(numbered(statement), *values)
        return row

    async def run(self, statement: str, *values: Value) -> int:
        said: str = await self._connection.execute(numbered(statement), *values)
        count = said.rpartition(" ")[2]  # such as UPDATE 3
        return int(count) if count.isdigit() else 0

    async def run_many(self, statement: str, values: Iterable[Sequence[Value]]) -> None:
        await self._connection.executemany(numbered(statement), values)

    def ring(self, topic: str) -> None:
        self.topics[topic] = None

    async def notify(self) -> None:
        """Tell others, once this is committed."""
        if self.topics:
            await self._connection.execute(
                "SELECT pg_notify($1, topic) FROM unnest($2::text[]) AS topic", CHANNEL, [*self.topics]
            )


class PostgresDatabase:
    """A `Database` on a server, for the event loop it was opened on; made by `open`."""

    def __init__(self, url: str, pool: Any, timeout_s: float) -> None:
        self.where = shown(url)
        """The URL without a password."""
        self._url = url
        self._pool = pool
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._process = os.getpid()
        self._bells = Bells()
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False

    @classmethod
    async def open(cls, url: str, *, connections: int = 10, timeout_s: float = 10.0) -> PostgresDatabase:
        """Connect; a statement that takes longer than `timeout_s` has failed, a connection after `CONNECT_S`."""
        where = shown(url)
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=0,  # a pool that keeps a floor of connections logs a traceback whenever it cannot
                max_size=connections,
                timeout=CONNECT_S,
                command_timeout=timeout_s,
                server_settings={"application_name": "penstock"},
                connection_class=_unstuck_after(timeout_s),
                init=lambda connection: connection.execute(connection.unstuck),
            )
            async with pool.acquire():
                pass  # whether it can be reached at all is said now
        except FAULTS as error:
            raise fault(where, error) from error
        except ValueError as error:
            raise InvalidValue("url", where, f"a URL of a PostgreSQL database ({error})") from None
        database = cls(url, pool, timeout_s)
        try:
            await database._refuse_pooler()
        except BaseException:
            await database.close()
            raise
        return database

    async def write(self, act: Act[T], *, brief: bool = False) -> T:
        self._check()
        for attempt in range(1, TRIES + 1):
            stage = _Stage()
            try:
                return await self._write_once(act, stage)
            except FAULTS as error:
                may_repeat = isinstance(error, TURNED_AWAY) or (isinstance(error, LOST) and not stage.is_committing)
                if not may_repeat or attempt == TRIES or self._is_closed:
                    raise fault(self.where, error) from error
                await self._before_repeating(error, attempt)
        raise AssertionError("unreachable")

    async def read(self, act: Act[T], *, brief: bool = False) -> T:
        self._check()
        for attempt in range(1, TRIES + 1):
            try:
                async with (
                    self._connected() as connection,
                    connection.transaction(isolation="repeatable_read", readonly=True),
                ):
                    return await act(PostgresTransaction(connection))
            except FAULTS as error:
                if not isinstance(error, (*TURNED_AWAY, *LOST)) or attempt == TRIES or self._is_closed:
                    raise fault(self.where, error) from error
                await self._before_repeating(error, attempt)
        raise AssertionError("unreachable")

    @property
    def rung(self) -> int:
        return self._bells.rung

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        self._check()
        if self._listening is None:
            self._listening = self._loop.create_task(self._listen(), name="penstock-postgres-listen")
        await self._bells.wait(topic, seen, min(timeout_s, LOOK_S))

    async def close(self) -> None:
        self._is_closed = True
        self._bells.ring_all()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait((self._listening,))
        try:
            await asyncio.wait_for(self._pool.close(), self._timeout_s)
        except FAULTS:
            self._pool.terminate()

    async def _write_once(self, act: Act[T], stage: _Stage) -> T:
        async with self._connected() as connection:
            transaction = PostgresTransaction(connection)
            whole = connection.transaction()
            await whole.start()
            try:
                result = await act(transaction)
                await transaction.notify()
            except BaseException:
                with suppress(*FAULTS):
                    await whole.rollback()
                raise
            stage.is_committing = True
            await whole.commit()
        for topic in transaction.topics:
            self._bells.ring(topic)
        return result

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        async with self._pool.acquire(timeout=CONNECT_S) as connection:
            yield connection

    async def _before_repeating(self, error: Exception, attempt: int) -> None:
        if isinstance(error, LOST):  # the others are as old as this one
            with suppress(*FAULTS):
                await self._pool.expire_connections()
        await asyncio.sleep(PAUSE_S * attempt)

    def _check(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"{self.where!r} was closed")
        if self._process != os.getpid():
            raise StoreUnavailable(f"{self.where!r} was opened by the process this one was forked from; open it anew")
        if self._loop is not asyncio.get_running_loop():
            raise StoreUnavailable(f"{self.where!r} was opened on another event loop; open it anew on this one")

    async def _listen(self) -> None:
        """Ring for what others tell, for as long as this database is open."""
        while True:
            with suppress(*FAULTS):
                await self._listen_until_lost()
            await asyncio.sleep(RECONNECT_S)

    async def _listen_until_lost(self) -> None:
        lost = asyncio.Event()
        connection = await asyncpg.connect(
            self._url, timeout=CONNECT_S, server_settings={"application_name": "penstock listener"}
        )
        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(CHANNEL, self._heard)
            self._bells.ring_all()  # for what was said while nobody listened
            await lost.wait()
        finally:
            connection.terminate()

    def _heard(self, connection: object, pid: int, channel: str, topic: object) -> None:
        self._bells.ring(str(topic))

    async def _refuse_pooler(self) -> None:
        """StoreUnavailable if two connections of ours can be on one session of the server."""
        try:
            async with self._connected() as first:
                if first.get_server_pid() == await first.fetchval("SELECT pg_backend_pid()"):
                    return  # nobody between
                async with self._connected() as second:
                    sessions = [await one.fetchval("SELECT pg_backend_pid()") for one in (first, second)]
        except FAULTS as error:
            raise fault(self.where, error) from error
        if sessions[0] == sessions[1]:
            raise StoreUnavailable(f"{self.where!r} cannot be used: {POOLER}")


def _unstuck_after(timeout_s: float) -> Any:
    """Connections whose transaction the server ends when nothing comes for so long, or it waits for a lock.

    A process may be stopped in the middle of one. It keeps what it has locked, its own run for one, and nobody could
    take that over. It is said by a statement, for a pooler that keeps sessions takes few settings with the greeting.
    """

    class Connection(asyncpg.Connection):  # type: ignore[misc]
        __slots__ = ()
        unstuck = (
            f"SET idle_in_transaction_session_timeout = {max(1, round(timeout_s * 1_000))}; "
            f"SET lock_timeout = {max(1, round(min(LOCKED_S, timeout_s) * 1_000))}"
        )

        def get_reset_query(self) -> str:
            return f"{super().get_reset_query()}\n{self.unstuck};"

    return Connection


class _Stage:
    """How far a write has come."""

    is_committing = False


@lru_cache(maxsize=1_000)
def numbered(statement: str) -> str:
    """The statement with $1, $2, … where it has `?`."""
    first, *rest = statement.split("?")
    return first + "".join(f"${number}{part}" for number, part in enumerate(rest, 1))


def shown(url: str) -> str:
    """Where the database is, without a password; InvalidValue if that is no URL of one."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidValue("url", "something else, which may hold a password", "postgresql://user@host/database")
    user = f"{parts.username}@" if parts.username else ""
    host = parts.hostname or ""
    port = f":{parts.port}" if parts.port else ""
    return f"postgresql://{user}{host}{port}{parts.path}"


def fault(where: str, error: Exception) -> StoreUnavailable:
    """The error for what the server could not do, with what to do about it."""
    advice = next((told for kinds, told in ADVICE if isinstance(error, kinds)), "see the server's log")
    why = str(error) or type(error).__name__
    return StoreUnavailable(f"{where!r} cannot be used now: {why} ({type(error).__name__}); {advice}")
