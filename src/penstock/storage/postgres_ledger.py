"""Budgets in a PostgreSQL database, shared by every machine that reaches it.

Each act is one statement, a call of one of the functions in `postgres_ledger_schema`. The port blocks and the driver
is async, so that the driver runs on a loop of its own; callers are threads, and as many acts are under way as there are
connections.

A connection that is lost takes the answer with it, not the act: that may have been recorded. Acts have keys, and are
asked once more on a new connection; a retry that is drawn without one is not.

Time limits are measured on the monotonic clock of the machine that opened the account, and on wall clocks by others.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import asyncpg  # type: ignore[import-untyped]

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import Balance
from penstock.containment.ledger import (
    Amounts,
    above_already,
    charged_not_held,
    check_held,
    check_page,
    check_same,
    held_not_charged,
    no_account,
    no_hold,
    under_another,
)
from penstock.containment.limits import Limits, seconds_to_ns
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.stops import Stop
from penstock.storage import postgres_ledger_schema as schema
from penstock.storage.ledger_rows import (
    CEILINGS,
    Moment,
    account_of,
    asked_of,
    boot_id,
    columns_of,
    fits_anywhere,
    names_of_aged,
    refusal_of,
)
from penstock.storage.loop_thread import LoopThread

LOCK_NUMBER = int.from_bytes(b"Penstock")
"""Of the advisory lock that whoever makes the tables holds."""
TURNED_AWAY = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""What is undone and may simply be asked again."""
LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
"""What a connection that breaks looks like, at the various moments it may break at."""
TIMES = 4
"""How often an act is asked before it is given up."""
LOCKED_S = 1.5
"""How long an act waits for what somebody else has locked."""
SERVER_SHARE = 0.75
"""The server gives up before we do: of what it gives up it is known that nothing is recorded."""

Row = Mapping[str, Any]


class PostgresLedgerStore:
    """A `LedgerStore` in a PostgreSQL database, for budgets that several machines share.

    Threads may share it, and a forked child may go on using it. It connects with its first act, and makes its tables
    (`penstock_ledger_…`) if they are not there. An act that takes longer than `timeout_s` has failed. Without
    `fsync` no act waits for the server's disk: should its machine fail, the last moments are forgotten. With it, the
    server's own setting counts.
    """

    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout_s: float = 5.0,
        max_connections: int = 4,
        fsync: bool = True,
    ) -> None:
        self._where = _shown(dsn)
        if type(max_connections) is not int or max_connections < 1:
            raise InvalidValue("max_connections", max_connections, "a whole number, one or more")
        self._dsn = dsn
        self._clock = clock
        self._boot = boot_id()
        self._timeout_s = seconds_to_ns(timeout_s, "timeout_s") / 1e9
        self._max_connections = max_connections
        patience_s = self._timeout_s * SERVER_SHARE
        self._settings = {
            "application_name": "penstock ledger",
            "statement_timeout": str(max(1, round(patience_s * 1_000))),
            "lock_timeout": str(max(1, round(min(LOCKED_S, patience_s) * 1_000))),
            **({} if fsync else {"synchronous_commit": "off"}),
        }
        self._is_closed = False
        self._lock = threading.Lock()
        self._line: _Line | None = None
        _STORES.add(self)

    def close(self) -> None:
        """Give the connections back; every act after that raises LedgerUnavailable. Closing twice is closing once."""
        with self._lock:
            self._is_closed = True
            line, self._line = self._line, None
        if line is not None:
            line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ensure(self) -> None:
        """Connect, and make the tables if they are not there; LedgerUnavailable if that cannot be."""
        self._rows("SELECT 1")

    def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        """Make the account if it is not there; LedgerError if it is there with other limits or another parent."""
        said = self._act("open_account", account, parent, *self._now(), *_ceilings(limits))
        if said["outcome"] == "no parent":
            raise no_account(str(parent))
        if said["outcome"] == "other":
            raise LedgerError(f"account {account!r} exists with other limits or another parent")

    def grant(self, account: str, limits: Limits) -> None:
        """Replace the ceilings of the account; what was taken stays taken."""
        _found(account, self._act("grant_limits", account, *_ceilings(limits)))

    def put_under(self, account: str, parent: str) -> None:
        """Count what the account has taken, and takes from now on, at `parent` and all above it as well."""
        said = _found(account, self._act("put_under", account, parent))
        if said["outcome"] == "no parent":
            raise no_account(parent)
        if said["outcome"] == "above":
            raise above_already(account, parent)
        if said["outcome"] == "other":
            raise under_another(account, parent, said["name"])

    def hold(self, key: str, account: str, ask: Amounts, *, retry_drawn: bool = False) -> Stop | None:
        """Take `ask` from the account and every ancestor, or say what refuses; a key is taken once."""
        now, fits = self._now(), fits_anywhere(ask)
        amounts = columns_of(ask if fits else Amounts())
        said = _found(account, self._act("hold", key, account, fits, retry_drawn, *amounts, *now))
        if said["outcome"] == "charged":
            raise charged_not_held(key)
        if said["outcome"] == "known":
            check_held(key, said["state"])
            check_same("hold", key, (said["name"], asked_of(said)), (account, ask))
        return refusal_of(said["levels"], ask, retry_drawn, now) if said["outcome"] == "refused" else None

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        """Replace the hold by what was used; settling a settled key again changes nothing."""
        self._end(key, "settled", actual, succeeded)

    def release(self, key: str) -> None:
        """The call failed and cost nothing."""
        self._end(key, "released")

    def withdraw(self, key: str) -> None:
        """The call never ran."""
        self._end(key, "withdrawn")

    def leave_unresolved(self, key: str) -> None:
        """The call is over and its bill is unknown."""
        self._end(key, "unresolved")

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        """Count what was spent outside any hold; a key is charged once, and never refused."""
        said = _found(account, self._act("charge", key, account, *columns_of(actual)))
        if said["outcome"] == "known":
            raise held_not_charged(key)
        if said["outcome"] == "charged":
            check_same("charge", key, (said["name"], asked_of(said)), (account, actual))

    def draw_retry(self, account: str, key: str | None = None) -> bool:
        """Take one retry from every level; False if one has none left. A key draws once."""
        said = _found(account, self._act("draw_retry", account, key, again=key is not None))
        if said["outcome"] == "none left":
            return False
        check_same("retry", str(key), (said["name"], None), (account, None))
        return True

    def balance(self, account: str) -> Balance:
        """The figures of the account, all of one instant; KeyError if there is none of that name."""
        rows = self._rows(schema.SELECT_ACCOUNT, account)
        if not rows:
            raise no_account(account)
        return accounts.balance(account_of(rows[0], self._now()))

    def unresolved(self) -> Mapping[str, Amounts]:
        """The keys whose bill is unknown, with what each still holds."""
        return {row["key"]: asked_of(row) for row in self._rows(schema.SELECT_OPEN_HOLDS, "unresolved", "")}

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys of calls that are under way, or whose process died before it said how they ended."""
        return {row["key"]: asked_of(row) for row in self._rows(schema.SELECT_OPEN_HOLDS, "held", prefix)}

    def aged(self, age_s: float, *, after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        """Accounts that were opened at least so long ago, in the order they were opened in; `after` the last before."""
        age_ns, limit = check_page(age_s, limit)
        return names_of_aged(self._rows(schema.SELECT_OPENED, after, limit), age_ns, self._now())

    def forget(self, names: Collection[str]) -> int:
        """Remove accounts, and every key that was theirs; how many. What they used stays counted above them."""
        return len(self._rows(schema.FORGET, [*names]))

    def _end(self, key: str, to: str, used: Amounts | None = None, succeeded: bool = False) -> None:
        amounts = (0, 0, 0) if used is None else (used.cost_nanos, used.tokens_in, used.tokens_out)
        said = self._act("end_hold", key, to, *amounts, succeeded)
        if said["outcome"] == "no hold":
            raise no_hold(key)
        if said["outcome"] == "cannot":
            if said["state"] == "charged":
                raise charged_not_held(key)
            raise LedgerError(f"a hold that is {said['state']} cannot become {to}")

    def _act(self, name: str, *args: Any, again: bool = True) -> Any:
        places = ", ".join(f"${number}" for number in range(1, len(args) + 1))
        (row,) = self._rows(f"SELECT {schema.LEDGER}_{name}({places}) AS said", *args, again=again)
        return json.loads(row["said"])

    def _rows(self, statement: str, *args: Any, again: bool = True) -> list[Row]:
        try:
            line = self._connected()
            return line.thread.run(line.fetch(statement, args, again), self._timeout_s)
        except LedgerError:
            raise
        except Exception as error:  # whatever it is: nothing may leave that is not recorded
            raise self._told(str(error) or type(error).__name__) from error

    def _connected(self) -> _Line:
        with self._lock:
            if self._is_closed:
                raise self._told("it was closed")
            if self._line is None:
                self._line = _Line(self._dsn, self._settings, self._timeout_s, self._max_connections, self._told)
            return self._line

    def _told(self, why: str) -> LedgerUnavailable:
        return LedgerUnavailable(f"{self._where} cannot record: {why}")

    def _now(self) -> Moment:
        return Moment(self._boot, self._clock.monotonic_ns(), self._clock.time_ns())

    def _forget_line(self) -> None:
        """Start anew, in a child: it has neither the thread nor a right to the connections."""
        self._lock = threading.Lock()
        _ORPHANED.append(self._line)
        self._line = None


class _Line:
    """The connections, and the loop they live on.

    Not the driver's own pool: that puts a connection in order each time it comes back, which is another journey to the
    server. Here nothing is left to put in order, since each act is one statement.
    """

    def __init__(
        self,
        dsn: str,
        settings: Mapping[str, str],
        timeout_s: float,
        size: int,
        fault: Callable[[str], LedgerUnavailable],
    ) -> None:
        self.thread = LoopThread("penstock-ledger-postgres")
        self._dsn = dsn
        self._settings = settings
        self._timeout_s = timeout_s
        self._fault = fault
        self._places = asyncio.Semaphore(size)
        self._idle: list[Any] = []
        self._is_made = False
        self._making = asyncio.Lock()

    async def fetch(self, statement: str, args: tuple[Any, ...], again: bool) -> list[Row]:
        """The rows of the statement; asked once more where that can do no harm."""
        left, has_lost = TIMES, False
        while True:
            left -= 1
            try:
                return await self._fetch(statement, args)
            except TURNED_AWAY:
                if not left:
                    raise
            except asyncpg.QueryCanceledError:  # it has taken too long, and would again
                raise
            except LOST:
                if has_lost or not again or not left:
                    raise
                has_lost = True

    async def _fetch(self, statement: str, args: tuple[Any, ...]) -> list[Row]:
        async with self._places:
            connection = await self._connected()
            try:
                rows = await connection.fetch(statement, *args)
            except asyncpg.PostgresError:
                self._keep(connection)  # the server has answered
                raise
            except BaseException:
                connection.terminate()
                self._drop_idle()
                raise
            self._keep(connection)
            return list(rows)

    def _keep(self, connection: Any) -> None:
        if not connection.is_closed():
            self._idle.append(connection)

    def _drop_idle(self) -> None:
        """Where one connection is lost, the others may be, and do not know it yet."""
        while self._idle:
            self._idle.pop().terminate()

    async def _connected(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        connection = await self._connect()
        try:
            # Looked for once: tables that are gone later are never made anew.
            if not self._is_made:
                async with self._making:
                    await self._make(connection)
                    self._is_made = True
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _connect(self) -> Any:
        return await asyncpg.connect(self._dsn, timeout=self._timeout_s, server_settings=dict(self._settings))

    async def _make(self, connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK_NUMBER})")
            if await connection.fetchval(f"SELECT to_regclass('{schema.LEDGER}_about')") is None:
                for statement in schema.STATEMENTS:
                    await connection.execute(statement)
            version = await connection.fetchval(f"SELECT version FROM {schema.LEDGER}_about")
            if version == 1:  # the same tables, with other functions
                for statement in (*schema.FUNCTIONS, f"UPDATE {schema.LEDGER}_about SET version = {schema.VERSION}"):
                    await connection.execute(statement)
                version = schema.VERSION
            if version != schema.VERSION:
                raise self._fault(
                    f"its tables are of version {version}, and this Penstock knows version {schema.VERSION}; "
                    "use the Penstock that made them, or a newer one"
                )

    def close(self) -> None:
        """Say good-bye to the server, and end the thread; what is under way there is cancelled."""
        with suppress(TimeoutError):
            self.thread.run(self._say_goodbye(), self._timeout_s)
        self.thread.close()

    async def _say_goodbye(self) -> None:
        while self._idle:
            connection = self._idle.pop()
            try:
                await connection.close()
            except (asyncpg.PostgresError, *LOST):
                connection.terminate()


def _ceilings(limits: Limits) -> list[int]:
    return [getattr(limits, name) for name in CEILINGS]


def _found(account: str, said: Row) -> Row:
    if said["outcome"] == "no account":
        raise no_account(account)
    return said


def _shown(dsn: str) -> str:
    """Where the database is, without who asks for it and with which password."""
    expected = "a URL as postgresql://user@host/database"
    if type(dsn) is not str:
        raise InvalidValue("dsn", dsn, expected)
    parts = urlsplit(dsn)
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidValue("dsn", "something else, which may hold a password", expected)
    asked = parse_qs(parts.query)
    host = parts.hostname or asked.get("host", ["localhost"])[0]
    return repr(f"postgresql://{host}:{parts.port or 5432}{parts.path}")


_STORES: weakref.WeakSet[PostgresLedgerStore] = weakref.WeakSet()
_ORPHANED: list[_Line | None] = []
"""Connections of a parent process: never used here, and never closed, which would say good-bye in its name."""


def _after_fork() -> None:
    for store in list(_STORES):
        store._forget_line()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
