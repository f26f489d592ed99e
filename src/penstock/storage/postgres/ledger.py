"""Budgets in a PostgreSQL database, shared by every machine that reaches it.

Each operation is one statement, a call of one of the functions in `ledger_schema`; while calls wait in the tree of its
account, it is a transaction that also admits the next ones. `PostgresLedger` is async: a statement runs on the event
loop of its caller, which has its own connections, as many as there may be concurrent operations. Callers that block use
`PostgresLedgerStore`, which runs the same operations on the ledger's own loop, in a thread. Transactions of several
statements run there too, since a caller that blocks its loop in the middle of one would keep its locks.

Calls that wait are woken by notifications, which one more connection receives there from the first wait on.

When a connection is lost, the answer is lost, but the operation may have been recorded. Operations have keys, and are
repeated once on a new connection; drawing a retry without a key is not repeated.

Time limits are measured on the monotonic clock of the machine that opened the account, and on wall clocks by others.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import parse_qs, urlsplit

import asyncpg  # type: ignore[import-untyped]

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import Balance
from penstock.containment.ledger import (
    Amounts,
    TicketRequest,
    above_already,
    charged_not_held,
    check_page,
    check_same,
    held_not_charged,
    no_account,
    no_hold,
    under_another,
    waits_already,
)
from penstock.containment.limits import Limits, seconds_to_ns
from penstock.containment.tickets import Ticket, Waiting, no_ticket
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.notify import Wakeups
from penstock.runtime.durable.async_ledger import BlockingLedger
from penstock.runtime.durable.loop_thread import LoopThread, run_on
from penstock.stops import Stop
from penstock.storage.ledger_rows import (
    CEILINGS,
    Moment,
    StoredQueue,
    account_of,
    amounts_of,
    boot_id,
    columns_of,
    fits_columns,
    is_held,
    names_of_aged,
    refusal_of,
    stop_text,
    waiting_of,
)
from penstock.storage.postgres import ledger_schema as schema

LOCK_NUMBER = int.from_bytes(b"Penstock")
"""Number of the advisory lock held while the tables are created."""
ADDITIONS_THERE = f"SELECT to_regclass('{schema.LEDGER}_unhinted')"
RETRYABLE = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)
"""Errors of operations that were rolled back and may simply be repeated."""
CONNECTION_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
)
"""Errors of a connection that breaks, depending on the moment it breaks."""
MAX_ATTEMPTS = 4
"""Maximum number of attempts of an operation."""
LOCKED_S = 1.5
"""Longest time an operation waits for a lock."""
CANCELLED_S = 1.0
"""Longest time a cancelled operation waits for the server to end it."""
RECONNECT_S = 1.0
"""Pause before the connection for notifications is made again."""
SERVER_SHARE = 0.75
"""The server times out before the client: what the server gives up is certain not to be recorded."""

Row = Mapping[str, Any]
T = TypeVar("T")


class PostgresLedger:
    """The operations of a `LedgerStore` in a PostgreSQL database, as coroutines for any event loop."""

    poll_s = 1.0
    """Calls that wait are woken by notifications; a lost one is found by polling."""

    def __init__(self, dsn: str, clock: Clock, timeout_s: float, max_connections: int, fsync: bool) -> None:
        self._where = _location(dsn)
        self.dsn = dsn
        self._clock = clock
        self._boot = boot_id()
        self.timeout_s = seconds_to_ns(timeout_s, "timeout_s") / 1e9
        self.max_connections = checks.integer("max_connections", max_connections, minimum=1)
        server_timeout_s = self.timeout_s * SERVER_SHARE
        self.settings = {
            "application_name": "penstock ledger",
            "statement_timeout": str(max(1, round(server_timeout_s * 1_000))),
            "lock_timeout": str(max(1, round(min(LOCKED_S, server_timeout_s) * 1_000))),
            **({} if fsync else {"synchronous_commit": "off"}),
        }
        self.is_made = False
        """Whether the tables were there: tables that are gone later are never created again."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._connections: dict[asyncio.AbstractEventLoop, _Connections] = {}
        self._thread: LoopThread | None = None
        self._is_listening = False
        self._wakeups = Wakeups()
        _LEDGERS.add(self)

    def close(self) -> None:
        """Close all connections; every later operation raises LedgerUnavailable. Closing is idempotent."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, {}
            thread, self._thread = self._thread, None
        for loop, open_there in connections.items():
            if loop is asyncio._get_running_loop():  # nothing can be awaited here
                open_there.terminate()
            elif loop.is_running():  # otherwise they were closed with their loop
                with suppress(TimeoutError, CancelledError, RuntimeError):
                    run_on(loop, open_there.close(), self.timeout_s)
        if thread is not None:
            thread.close()

    def run_blocking(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation on the ledger's own loop, and wait for it."""
        try:
            own = self._own_loop()
        except LedgerUnavailable:
            operation.close()
            raise
        try:
            return run_on(own.loop, operation)
        except (RuntimeError, CancelledError) as error:  # the thread was closed meanwhile
            raise self._closed() from error

    async def ensure(self) -> None:
        """Connect, and create the tables if they do not exist; raise LedgerUnavailable if that fails."""
        await self._rows("SELECT 1")

    async def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        """Create the account if missing; raise LedgerError if it exists with other limits or another parent."""
        answer = await self._call("open_account", account, parent, *self._now(), *_ceilings(limits))
        if answer["outcome"] == "no parent":
            raise no_account(str(parent))
        if answer["outcome"] == "other":
            raise LedgerError(f"account {account!r} exists with other limits or another parent")

    async def grant(self, account: str, limits: Limits) -> None:
        """Replace the ceilings of the account; what was taken stays taken."""
        _found(account, await self._change([account], "grant_limits", account, *_ceilings(limits)))

    async def put_under(self, account: str, parent: str) -> None:
        """Count what the account has taken, and takes from now on, at `parent` and its ancestors as well."""
        answer = _found(account, await self._change([account, parent], "put_under", account, parent))
        if answer["outcome"] == "no parent":
            raise no_account(parent)
        if answer["outcome"] == "above":
            raise above_already(account, parent)
        if answer["outcome"] == "other":
            raise under_another(account, parent, answer["name"])

    async def hold(
        self,
        key: str,
        account: str,
        ask: Amounts,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | None:
        """Take `ask` from the account and every ancestor, or return the Stop that refuses; a key is taken once."""
        now, fits = self._now(), fits_columns(ask)
        amounts = columns_of(ask if fits else Amounts())
        if unhinted_lease_s is not None:
            checks.seconds("unhinted_lease_s", unhinted_lease_s, above_zero=True)
        how = ("hold", False) if unhinted_lease_s is None else ("hold_unhinted", unhinted_lease_s)
        answer = await self._call(*how, key, account, under, fits, retry_drawn, *amounts, *now)
        _found(account, answer)
        if answer["outcome"] == "queued":
            return await self._hold_beside_queue(key, account, ask, retry_drawn, under, unhinted_lease_s)
        if answer["outcome"] == "waits":
            raise waits_already(key)
        if answer["outcome"] in ("charged", "known"):
            is_held(key, answer, account, ask, unhinted_lease_s is not None)
        if unhinted_lease_s is not None and fits:
            ask = replace(ask, cost_nanos=answer["requested"])
        return refusal_of(answer["levels"], ask, retry_drawn, now) if answer["outcome"] == "refused" else None

    async def _hold_beside_queue(
        self,
        key: str,
        account: str,
        ask: Amounts,
        retry_drawn: bool,
        under: str | None,
        unhinted_lease_s: float | None,
    ) -> Stop | None:
        def enter(read: _Read) -> Stop | None:
            if is_held(key, read.known, account, ask, unhinted_lease_s is not None):
                return None
            if read.ticket is not None:
                raise waits_already(key)
            newcomer = read.queue.newcomer(key, read.target, ask, retry_drawn, under, None, unhinted_lease_s)
            return read.queue.enter(newcomer)

        return await self._decide(_Decision([account], None, enter, key=key, under=under))

    async def join_queue(
        self,
        key: str,
        account: str,
        ask: Amounts,
        ticket: TicketRequest,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | Waiting | None:
        """Take `ask` as `hold` does, or wait with a ticket if only holds of other calls are in the way."""
        checks.instance("ticket", ticket, TicketRequest)
        if unhinted_lease_s is not None:
            checks.seconds("unhinted_lease_s", unhinted_lease_s, above_zero=True)

        def join(read: _Read) -> Stop | Waiting | None:
            row = read.ticket
            if row is not None:
                check_same("ticket", key, (row["name"], amounts_of(row)), (account, ask))
                if key in read.queue.tickets:
                    return read.renew(key)
            elif is_held(key, read.known, account, ask, unhinted_lease_s is not None):
                return None
            newcomer = read.queue.newcomer(key, read.target, ask, retry_drawn, under, ticket, unhinted_lease_s)
            return read.queue.enter_or_join(newcomer)

        return await self._decide(_Decision([account], None, join, key=key, under=under, request=ticket))

    async def renew(self, key: str) -> Stop | Waiting | None:
        """Renew the lease of a ticket; None if the call is admitted and holds, a Stop if it is refused."""
        rows = await self._rows(schema.SELECT_TICKET, key)
        if not rows:
            raise no_ticket(key)
        if rows[0]["state"] == "waiting" and rows[0]["is_fresh"]:
            return waiting_of(rows[0])  # only read, as long as the lease lasts
        return await self._at_ticket(key, lambda read: read.renew(key))

    async def leave_queue(self, key: str) -> None:
        """Give the ticket back; if the call was admitted meanwhile, withdraw its hold."""
        await self._at_ticket(key, lambda read: read.queue.leave(key))

    async def renew_unhinted(self, key: str) -> bool:
        """Renew the lease of an un-hinted call that holds; False if no call has to wait for it, now or later."""
        return bool(await self._rows(schema.RENEW_UNHINTED, key))

    async def queued(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys that have a ticket, with what each waits for."""
        return {row["key"]: amounts_of(row) for row in await self._rows(schema.SELECT_QUEUED, prefix)}

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when the answer for the key may have changed, in any process; returns what ends this."""
        remove = self._wakeups.add(_digest(key), wake)
        own = self._own_loop()
        with self._lock:
            if not self._is_listening:
                own.start(self._listen())
                self._is_listening = True
        return remove

    async def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        """Replace the hold by what was used; settling a settled key again changes nothing."""
        await self._end(key, "settled", actual, succeeded)

    async def release(self, key: str) -> None:
        """End the hold of a call that failed and cost nothing."""
        await self._end(key, "released")

    async def withdraw(self, key: str) -> None:
        """End the hold of a call that never ran."""
        await self._end(key, "withdrawn")

    async def leave_unresolved(self, key: str) -> None:
        """Mark the hold of a call that is over and whose bill is unknown."""
        await self._end(key, "unresolved")

    async def charge(self, key: str, account: str, actual: Amounts) -> None:
        """Count what was spent outside any hold; a key is charged once, and never refused."""
        answer = _found(account, await self._change([account], "charge", key, account, *columns_of(actual)))
        if answer["outcome"] == "waits":
            raise waits_already(key)
        if answer["outcome"] == "known":
            raise held_not_charged(key)
        if answer["outcome"] == "charged":
            check_same("charge", key, (answer["name"], amounts_of(answer)), (account, actual))

    async def draw_retry(self, account: str, key: str | None = None) -> bool:
        """Take one retry from every level; return False if one has none left. A key draws once."""
        answer = _found(account, await self._call("draw_retry", account, key, repeat=key is not None))
        if answer["outcome"] == "none left":
            return False
        check_same("retry", str(key), (answer["name"], None), (account, None))
        return True

    async def balance(self, account: str) -> Balance:
        """Return the figures of the account, all from one instant; raise KeyError if it does not exist."""
        rows = await self._rows(schema.SELECT_ACCOUNT, account)
        if not rows:
            raise no_account(account)
        return accounts.balance(account_of(rows[0], self._now()))

    async def balances(self, names: Sequence[str]) -> Mapping[str, Balance]:
        """Return the figures of these accounts, all from one instant; those that do not exist are left out."""
        rows = await self._rows(schema.SELECT_ACCOUNTS, [*names])
        now = self._now()
        return {row["name"]: accounts.balance(account_of(row, now)) for row in rows}

    async def unresolved(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys whose bill is unknown, with what each still holds."""
        return {row["key"]: amounts_of(row) for row in await self._rows(schema.SELECT_OPEN_HOLDS, "unresolved", prefix)}

    async def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys of calls under way, or whose process died before it reported how they ended."""
        return {row["key"]: amounts_of(row) for row in await self._rows(schema.SELECT_OPEN_HOLDS, "held", prefix)}

    async def aged(
        self, age_s: float, *, prefix: str = "", after: str | None = None, limit: int = 1_000
    ) -> Sequence[str]:
        """Return accounts opened at least `age_s` ago, in order of opening; `after` ends the previous page."""
        age_ns, limit = check_page(age_s, limit)
        return names_of_aged(await self._rows(schema.SELECT_OPENED, after, limit, prefix), age_ns, self._now())

    async def forget(self, names: Collection[str]) -> int:
        """Remove accounts with all their keys, and return how many; their use stays counted at their ancestors."""
        return len(await self._rows(schema.FORGET, [*names]))

    async def _end(self, key: str, to: str, used: Amounts | None = None, succeeded: bool = False) -> None:
        amounts = (0, 0, 0) if used is None else (used.cost_nanos, used.tokens_in, used.tokens_out)
        answer = await self._change([], "end_hold", key, to, *amounts, succeeded, of=key)
        if answer["outcome"] == "no hold":
            raise no_hold(key)
        if answer["outcome"] == "cannot":
            if answer["state"] == "charged":
                raise charged_not_held(key)
            raise LedgerError(f"a hold that is {answer['state']} cannot become {to}")

    async def _change(self, names: Sequence[str], name: str, *args: Any, of: str | None = None) -> Any:
        """Do an operation that may make room, and admit waiting calls if there are any.

        It concerns the accounts of these names, or that of the hold of a key.
        """
        answer = await self._call(name, False, *args)
        if answer["outcome"] == "queued":
            answer = await self._decide(_Decision(names, of, lambda read: read.answer, operation=(name, args)))
        return answer

    async def _at_ticket(self, key: str, do: Callable[[_Read], T]) -> T:
        def at_ticket(read: _Read) -> tuple[bool, T | None]:
            is_there = key in read.queue.tickets  # else it has expired, and others may have been admitted
            return is_there, do(read) if is_there else None

        is_there, answer = await self._decide(_Decision([], key, at_ticket))
        if not is_there:
            raise no_ticket(key)
        return answer  # type: ignore[return-value]

    async def _decide(self, decision: _Decision[T]) -> T:
        """Run a transaction that decides about the calls that wait; see `ledger_schema`."""
        own = self._own_loop()
        if asyncio.get_running_loop() is not own.loop:
            try:
                return await own.result(self._decide(decision))
            except RuntimeError as error:
                raise self._closed() from error
        answer, woken = await self._run(partial(decision.run, self._now()))
        self._wakeups.wake(map(_digest, woken))
        return answer

    async def _listen(self) -> None:
        await self._connected().listen(self._wakeups)

    async def _call(self, name: str, *args: Any, repeat: bool = True) -> Any:
        places = ", ".join(f"${number}" for number in range(1, len(args) + 1))
        (row,) = await self._rows(f"SELECT {schema.LEDGER}_{name}({places}) AS answer", *args, repeat=repeat)
        return json.loads(row["answer"])

    async def _rows(self, statement: str, *args: Any, repeat: bool = True) -> list[Row]:
        return list(await self._run(lambda connection: connection.fetch(statement, *args), repeat))

    async def _run(self, work: Callable[[Any], Awaitable[T]], repeat: bool = True) -> T:
        connections = self._connected()
        try:
            async with asyncio.timeout(self.timeout_s):
                return await connections.run(work, repeat)
        except (LedgerError, KeyError):
            raise
        except Exception as error:  # any error: no call may leave that is not recorded
            raise self.unavailable(str(error) or type(error).__name__) from error

    def _connected(self) -> _Connections:
        """Return the connections of the running loop."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._is_closed:
                raise self._closed()
            if (found := self._connections.get(loop)) is None:
                for ended in [loop for loop in self._connections if loop.is_closed()]:
                    del self._connections[ended]
                found = self._connections[loop] = _Connections(self)
            return found

    def _own_loop(self) -> LoopThread:
        with self._lock:
            if self._is_closed:
                raise self._closed()
            if self._thread is None:
                self._thread = LoopThread("penstock-ledger-postgres")
            return self._thread

    def _closed(self) -> LedgerUnavailable:
        return self.unavailable("it was closed")

    def unavailable(self, why: str) -> LedgerUnavailable:
        """Return the error of an operation that could not be recorded."""
        return LedgerUnavailable(f"{self._where} cannot record: {why}")

    def _now(self) -> Moment:
        return Moment(self._boot, self._clock.monotonic_ns(), self._clock.time_ns())

    def _reset_after_fork(self) -> None:
        """Reset the ledger in a forked child, which has neither the thread nor a right to the connections."""
        self._lock = threading.Lock()
        _ORPHANED.append((self._connections, self._thread))
        self._connections, self._thread, self._is_listening = {}, None, False


class PostgresLedgerStore(BlockingLedger):
    """A `LedgerStore` in a PostgreSQL database, for budgets that several machines share.

    Threads may share it, and a forked child may go on using it. It connects at its first operation, and creates its
    tables (`penstock_ledger_…`) if they do not exist. An operation that takes longer than `timeout_s` fails. It has at
    most `max_connections` for callers that block, and for each event loop. Without `fsync` no operation waits for the
    server's disk: if its machine fails, the latest operations are lost. With it, the server's own setting applies.
    """

    ledger: PostgresLedger

    def __init__(
        self,
        dsn: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout_s: float = 5.0,
        max_connections: int = 4,
        fsync: bool = True,
    ) -> None:
        super().__init__(PostgresLedger(dsn, clock, timeout_s, max_connections, fsync))

    def close(self) -> None:
        """Close the connections; every later operation raises LedgerUnavailable. Closing is idempotent."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ensure(self) -> None:
        """Connect, and create the tables if they do not exist; raise LedgerUnavailable if that fails."""
        self.ledger.run_blocking(self.ledger.ensure())


class _Read:
    """What a transaction has read of the calls that wait in one tree of accounts."""

    def __init__(self, target: int, answer: Any, now: Moment, read: Mapping[str, Any]) -> None:
        self.target = target
        self.answer = answer
        """The answer of the operation of the transaction."""
        self.known: Row | None = read["known"]
        self.ticket: Row | None = read["ticket"]
        """That of a new call's key, perhaps in another tree."""
        self.queue = StoredQueue(now, read["accounts"], read["tickets"], read["holds"], read["unhinted"])
        self.renewed: str | None = None

    def renew(self, key: str) -> Stop | Waiting | None:
        answer = self.queue.answer(key)
        if isinstance(answer, Waiting):
            self.renewed = key
        return answer


@dataclass(frozen=True, slots=True)
class _Decision(Generic[T]):
    """A transaction that decides about the calls that wait in one tree of accounts."""

    names: Sequence[str]
    """Accounts of the tree; of two trees, if one is put under the other."""
    of: str | None
    """Key of a ticket or hold in the tree, in place of a name."""
    decide: Callable[[_Read], T]
    key: str | None = None
    """Key of a new call, whose hold is read if it has one."""
    under: str | None = None
    request: TicketRequest | None = None
    """That of a new call that may wait."""
    operation: tuple[str, tuple[Any, ...]] | None = None
    """A change to be made before the tickets are read."""

    async def run(self, now: Moment, connection: Any) -> tuple[T, list[str]]:
        """Return the answer, and the keys of calls to wake."""
        async with connection.transaction():
            target = await _call(connection, "lock_tree", self.names, self.of)
            if target is None:
                raise no_ticket(str(self.of)) if self.of is not None else no_account(self.names[0])
            answer = None
            if self.operation is not None:
                name, args = self.operation
                answer = json.loads(await _call(connection, name, True, *args))
            read = _Read(
                target, answer, now, json.loads(await _call(connection, "read_queue", target, self.key, self.under))
            )
            decided = self.decide(read)
            await _call(connection, "write_queue", *self._outcome(read), *now)
            return decided, read.queue.woken

    def _outcome(self, read: _Read) -> tuple[Any, ...]:
        queue = read.queue
        joined = [] if queue.joined is None else [queue.joined]
        return (
            [ticket.key for ticket in queue.withdrawn],
            json.dumps(
                [self._row(queue, one) | asdict(queue.taken_for(one)) for one in (*queue.admitted, *queue.entered)]
            ),
            [ticket.key for ticket in queue.removed],
            json.dumps([self._row(queue, ticket) for ticket in queue.changed]),
            json.dumps([self._row(queue, ticket) for ticket in joined]),
            read.renewed,
            queue.woken,
        )

    def _row(self, queue: StoredQueue, ticket: Ticket) -> dict[str, Any]:
        row = {name: getattr(ticket, name) for name in schema.TICKET_FIELDS} | asdict(queue.asks[ticket.key])
        row |= {"account": queue.account_id(ticket), "name": ticket.account.name}
        row["stop"] = None if ticket.reason is None else stop_text(ticket.reason)
        return row if self.request is None else row | asdict(self.request)


async def _call(connection: Any, name: str, *args: Any) -> Any:
    places = ", ".join(f"${number}" for number in range(1, len(args) + 1))
    return await connection.fetchval(f"SELECT {schema.LEDGER}_{name}({places})", *args)


class _Connections:
    """The connections of one event loop.

    Not the driver's own pool: that resets a connection each time it is returned, which is another round trip to the
    server. Here nothing needs a reset, since each operation is one statement.
    """

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger
        self._slots = asyncio.Semaphore(ledger.max_connections)
        self._idle: list[Any] = []
        self._making = asyncio.Lock()
        self._is_closed = False
        self._closing: AsyncGenerator[None, None] | None = None
        """Suspended until its loop shuts down, or `close`."""

    async def run(self, work: Callable[[Any], Awaitable[T]], repeat: bool) -> T:
        """Return what `work` does with a connection; repeat it where that can do no harm."""
        left, has_lost = MAX_ATTEMPTS, False
        while True:
            left -= 1
            try:
                return await self._run(work)
            except RETRYABLE:
                if not left:
                    raise
            except asyncpg.QueryCanceledError:  # it has taken too long, and would again
                raise
            except CONNECTION_LOST:
                if has_lost or not repeat or not left:
                    raise
                has_lost = True

    async def _run(self, work: Callable[[Any], Awaitable[T]]) -> T:
        async with self._slots:
            connection = await self._connected()
            try:
                answer = await work(connection)
            except (asyncpg.PostgresError, LedgerError, KeyError):
                self._keep(connection)  # the server has answered: the connection works
                raise
            except asyncio.CancelledError:
                await self._cancel(connection)
                raise
            except BaseException:
                connection.terminate()
                self._drop_idle()
                raise
            self._keep(connection)
            return answer

    async def listen(self, wakeups: Wakeups) -> None:
        """Wake calls when notified, and all of them whenever a notification may have been missed."""
        while True:
            with suppress(TimeoutError, asyncpg.PostgresError, *CONNECTION_LOST):
                await self._listen_once(wakeups)
            wakeups.wake_all()
            await asyncio.sleep(RECONNECT_S)

    async def _listen_once(self, wakeups: Wakeups) -> None:
        """Receive notifications until the connection is lost."""
        lost = asyncio.Event()
        connection = await self._connect()
        try:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(schema.CHANNEL, lambda *notified: wakeups.wake([notified[-1]]))
            wakeups.wake_all()
            await lost.wait()
        finally:
            connection.terminate()

    def _keep(self, connection: Any) -> None:
        if self._is_closed:
            connection.terminate()
        elif not connection.is_closed():
            self._idle.append(connection)

    async def _cancel(self, connection: Any) -> None:
        """Let the server cancel what runs on the connection, and wait for that, so that it is done or never will be."""
        try:
            await connection.close(timeout=CANCELLED_S)
        except BaseException:
            connection.terminate()

    def _drop_idle(self) -> None:
        """Close idle connections: where one is lost, the others may be lost too without having noticed."""
        while self._idle:
            self._idle.pop().terminate()

    async def _connected(self) -> Any:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        if self._closing is None:
            self._closing = self._close_with_loop()
            await anext(self._closing)
        connection = await self._connect()
        try:
            if not self._ledger.is_made:
                async with self._making:
                    await self._make(connection)
                    self._ledger.is_made = True
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _connect(self) -> Any:
        ledger = self._ledger
        return await asyncpg.connect(ledger.dsn, timeout=ledger.timeout_s, server_settings=dict(ledger.settings))

    async def _make(self, connection: Any) -> None:
        async with connection.transaction():
            await connection.execute(f"SELECT pg_advisory_xact_lock({LOCK_NUMBER})")
            if await connection.fetchval(f"SELECT to_regclass('{schema.LEDGER}_about')") is None:
                for statement in schema.STATEMENTS:
                    await connection.execute(statement)
            version = await connection.fetchval(f"SELECT version FROM {schema.LEDGER}_about")
            if version in schema.OLDER_VERSIONS:
                for statement in schema.UPGRADE:
                    await connection.execute(statement)
                version = schema.VERSION
            if version == schema.VERSION and await connection.fetchval(ADDITIONS_THERE) is None:
                for statement in schema.ADDITIONS:
                    await connection.execute(statement)
            if version != schema.VERSION:
                raise self._ledger.unavailable(
                    f"its tables are of version {version}, and this Penstock knows version {schema.VERSION}; "
                    "use the Penstock that made them, or a newer one"
                )

    async def close(self) -> None:
        """Close the connections; those in use are closed when their operation ends."""
        if self._closing is not None:
            await self._closing.aclose()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        """Close the connections when the loop closes its async generators, before it ends."""
        try:
            yield
        finally:
            self._is_closed = True
            while self._idle:
                connection = self._idle.pop()
                try:
                    await connection.close()
                except (asyncpg.PostgresError, *CONNECTION_LOST):
                    connection.terminate()

    def terminate(self) -> None:
        """Close the connections without a word to the server."""
        self._is_closed = True
        self._drop_idle()


def _digest(key: str) -> str:
    """Return a key as it is in a notification, whose length is limited."""
    return hashlib.md5(key.encode(), usedforsecurity=False).hexdigest()


def _ceilings(limits: Limits) -> list[int]:
    return [getattr(limits, name) for name in CEILINGS]


def _found(account: str, answer: Row) -> Row:
    if answer["outcome"] == "no account":
        raise no_account(account)
    return answer


def _location(dsn: str) -> str:
    """Return the location of the database, without user and password; raise InvalidValue if `dsn` is no such URL."""
    expected = "a URL as postgresql://user@host/database"
    if type(dsn) is not str:
        raise InvalidValue("dsn", dsn, expected)
    parts = urlsplit(dsn)
    if parts.scheme not in ("postgresql", "postgres"):
        raise InvalidValue("dsn", "something else, which may hold a password", expected)
    options = parse_qs(parts.query)
    host = parts.hostname or options.get("host", ["localhost"])[0]
    return repr(f"postgresql://{host}:{parts.port or 5432}{parts.path}")


_LEDGERS: weakref.WeakSet[PostgresLedger] = weakref.WeakSet()
_ORPHANED: list[object] = []
"""Connections of a parent process: never used here, and never closed, which would end the parent's sessions."""


def _after_fork() -> None:
    for ledger in list(_LEDGERS):
        ledger._reset_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
