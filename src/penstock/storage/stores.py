"""All stores of a service, opened by one URL.

memory:                     nothing survives the process
sqlite:///folder/file.db    a file, relative to the current folder; sqlite:////folder/file.db is absolute; or a path
postgresql://…              a PostgreSQL server

Inside a transaction the stores of a database are the same classes over a database that joins the open transaction: each
of their transaction bodies runs in that transaction instead of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar
from urllib.parse import unquote, urlsplit

from penstock import checks
from penstock.chat.ports import ChatStore
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import LedgerStore
from penstock.errors import InvalidValue, LedgerUnavailable
from penstock.hosting.audit import AuditStore
from penstock.hosting.people import PersonStore
from penstock.hosting.ports import (
    ApprovalStore,
    CancelStore,
    EventStore,
    GraphStore,
    PayloadStore,
    RunStore,
    SpendingStore,
    StoreCorrupt,
    StoreUnavailable,
)
from penstock.hosting.tokens import TokenStore
from penstock.nodes.memory import MemoryStore
from penstock.runtime.durable.ports import JournalStore
from penstock.storage import versions
from penstock.storage.faults import RowFaults
from penstock.storage.memory import MemoryStores
from penstock.storage.port import Database, T, Transaction, TransactionBody, Unit
from penstock.storage.sql.approvals import SqlApprovalStore
from penstock.storage.sql.audit import SqlAuditStore
from penstock.storage.sql.chats import SqlChatStore
from penstock.storage.sql.events import SqlEventStore, SqlJournalStore
from penstock.storage.sql.graphs import SqlGraphStore
from penstock.storage.sql.memories import SqlMemoryStore
from penstock.storage.sql.payloads import SqlPayloadStore
from penstock.storage.sql.people import SqlPersonStore
from penstock.storage.sql.runs import SqlCancelStore, SqlRunStore
from penstock.storage.sql.scan import unreadable_rows
from penstock.storage.sql.spending import SqlSpendingStore
from penstock.storage.sql.tokens import SqlTokenStore
from penstock.storage.sqlite import file
from penstock.storage.sqlite.ledger import SCHEMA as LEDGER_SCHEMA
from penstock.storage.sqlite.ledger import SqliteLedgerStore

if TYPE_CHECKING:
    from penstock.storage.postgres.database import PostgresDatabase
    from penstock.storage.postgres.ledger import PostgresLedgerStore


class Transact(Protocol):
    """Runs a unit of work in one transaction."""

    async def __call__(self, unit: Unit[T], *, inline: bool = False) -> T: ...


Ledger = TypeVar("Ledger", bound="SqliteLedgerStore | PostgresLedgerStore")

EXPECTED_URL = "memory:, sqlite:///path, postgresql://…, or the path of a file"


@dataclass(frozen=True, slots=True)
class Stores:
    """All stores of a service; an async context manager that closes them."""

    url: str
    """The URL of the stores, without a password."""
    runs: RunStore
    events: EventStore
    graphs: GraphStore
    approvals: ApprovalStore
    cancels: CancelStore
    journal: JournalStore
    chats: ChatStore
    payloads: PayloadStore
    spending: SpendingStore
    memories: MemoryStore
    tokens: TokenStore
    audit: AuditStore
    people: PersonStore
    ledger: LedgerStore
    faults: RowFaults
    """Rows that could not be decoded, as found so far."""
    _transact: Transact = field(repr=False)
    _scan: Callable[[float], Awaitable[Sequence[StoreCorrupt]]] = field(repr=False)
    _measure: Callable[[], Awaitable[int | None]] = field(repr=False)
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack, repr=False)

    async def transaction(self, unit: Unit[T], *, inline: bool = False) -> T:
        """Run the unit in one transaction over the stores it receives, and return its result after the commit.

        If the unit raises, the transaction is rolled back. It may run more than once, so it must only use those stores:
        runs, events, graphs, approvals, cancels, journal, chats, payloads, spending, tokens and audit. With `inline` it
        may run on the event loop; see `Database.write`.
        """
        return await self._transact(unit, inline=inline)

    async def check_rows(self, *, pause_s: float = 0.0) -> Sequence[StoreCorrupt]:
        """Decode every row of every table, and return those that cannot be decoded; `faults` has the same afterwards.

        Pauses for `pause_s` after each 100 rows.
        """
        self.faults.replace(await self._scan(pause_s))
        return self.faults.rows

    async def size_bytes(self) -> int | None:
        """Return the size of the database, ledger included; None in memory."""
        return await self._measure()

    async def close(self) -> None:
        """Finish pending operations and release all resources; idempotent."""
        await self._closing.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


CONNECTIONS = 8
"""Maximum number of concurrently used connections of one process to PostgreSQL. Together with the connections that
listen, nine processes fit into the server's default limit of 100."""
MIN_CONNECTIONS = 4
"""Two for the stores, and one for each side of the ledger: tasks, and callers that block."""
MAX_CONNECTIONS = 1_000
MAX_TIMEOUT_S = 86_400.0
TIMEOUT_S = 10.0
"""Time limit of a statement on PostgreSQL."""


async def open_stores(
    url: str,
    *,
    clock: Clock = SYSTEM_CLOCK,
    fsync: bool = False,
    connections: int = CONNECTIONS,
    timeout_s: float = TIMEOUT_S,
) -> Stores:
    """Open the stores of a URL, creating the tables of a new database.

    Raises StoreUnavailable, with the reason, if they cannot be opened.

    `fsync` is for SQLite: every commit waits for the disk, so that committed data survives a power failure too. The
    other options are for PostgreSQL: the number of concurrent `connections`, stores and ledger together (up to two more
    only listen), and the time limit of a statement.
    """
    checks.integer("connections", connections, minimum=MIN_CONNECTIONS, maximum=MAX_CONNECTIONS)
    if checks.seconds("timeout_s", timeout_s, above_zero=True) > MAX_TIMEOUT_S:
        raise InvalidValue("timeout_s", timeout_s, f"at most {MAX_TIMEOUT_S:g} seconds")
    scheme = scheme_of(url)
    if scheme == "memory":
        return _open_memory(clock)
    if scheme == "postgresql":
        return await _open_postgres_stores(url, clock, connections, timeout_s)
    return await _open_sqlite(url, clock, fsync)


async def migrate(url: str) -> int:
    """Upgrade a database to the newest version in one transaction, and return that version."""
    if scheme_of(url) == "memory":
        return versions.newest()
    if scheme_of(url) == "sqlite":
        return await versions.migrate_sqlite(sqlite_path(url))
    return await _on_postgres(url, versions.migrate_postgres)


async def schema_version(url: str) -> int:
    """Return the schema version of a database; 0 if it does not exist or is empty."""
    if scheme_of(url) == "memory":
        return versions.newest()
    if scheme_of(url) == "sqlite":
        return await versions.sqlite_version(sqlite_path(url))
    return await _on_postgres(url, versions.postgres_version)


def newest_version() -> int:
    """Return the schema version that this Penstock creates and reads."""
    return versions.newest()


def scheme_of(url: str) -> str:
    """Return the kind of store: memory, sqlite or postgresql; InvalidValue for any other URL."""
    if url in ("memory:", "memory://"):
        return "memory"
    scheme = url.partition("://")[0] if "://" in url else "sqlite"
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme != "sqlite" or not url or url.startswith(":memory:"):
        raise InvalidValue("url", url, EXPECTED_URL)
    return "sqlite"


def sqlite_path(url: str) -> Path:
    """Return the absolute path of the file that a URL or a plain path names."""
    if "://" not in url:
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    path = unquote(parts.path)[1:]
    if parts.netloc or parts.query or parts.fragment or not path or path.startswith(":memory:"):
        raise InvalidValue("url", url, "sqlite:/// and the path of a file, nothing else")
    return Path(path).absolute()


def ledger_path(path: Path) -> Path:
    """Return the path of the ledger file that belongs to a database file."""
    return path.with_name(f"{path.name}.ledger")


def hindrance(url: str) -> tuple[str, str] | None:
    """Return why a server cannot write to the database's location, with advice; None if no reason is found."""
    if scheme_of(url) != "sqlite":
        return None
    path = sqlite_path(url)
    return file.hindrance(path) or file.hindrance(ledger_path(path))


async def check_ledger(url: str) -> None:
    """Raise StoreUnavailable if the ledger of a database cannot be opened, or is missing although runs have spent.

    A missing ledger is not created again, because a new one would have no spending in it.
    """
    if scheme_of(url) != "sqlite":
        return
    path = sqlite_path(url)
    ledger = ledger_path(path)
    if await versions.sqlite_lacks(path, ledger):
        raise StoreUnavailable(
            f"{str(ledger)!r} is gone, which has what the runs in {path.name!r} have spent; put it back from a copy: "
            "it is not created again. An empty file of that name would begin anew, as if nothing had been spent"
        )
    await versions.check_sqlite(ledger, LEDGER_SCHEMA)


async def check_rows(url: str) -> Sequence[StoreCorrupt]:
    """Decode every row of a database that exists, and return those that cannot be decoded."""
    async with await open_stores(url) as stores:
        return await stores.check_rows()


def _open_memory(clock: Clock) -> Stores:
    memory = MemoryStores(clock=clock)
    return Stores(
        memory.url,
        memory.runs,
        memory.events,
        memory.graphs,
        memory.approvals,
        memory.cancels,
        memory.journal,
        memory.chats,
        memory.payloads,
        memory.spending,
        memory.memories,
        memory.tokens,
        memory.audit,
        memory.people,
        memory.ledger,
        memory.faults,
        memory.transaction,
        memory.scan,
        memory.size_bytes,
    )


async def _open_sqlite(url: str, clock: Clock, fsync: bool) -> Stores:
    path = sqlite_path(url)
    async with AsyncExitStack() as opened:
        database = await versions.open_sqlite(path, fsync=fsync)
        opened.push_async_callback(database.close)
        await check_ledger(url)
        ledger = await _open_ledger(lambda: SqliteLedgerStore(ledger_path(path), clock=clock, fsync=fsync))
        opened.push_async_callback(asyncio.to_thread, ledger.close)
        measure = partial(asyncio.to_thread, _size_of_files, path)
        return _sql_stores(database, f"sqlite:///{path}", ledger, measure, opened.pop_all())
    raise AssertionError("unreachable")


async def _open_postgres_stores(url: str, clock: Clock, connections: int, timeout_s: float) -> Stores:
    of_ledger = connections // 4  # on each side: its operations are single statements
    async with AsyncExitStack() as opened:
        database = await _open_postgres(url, connections - 2 * of_ledger, timeout_s)
        opened.push_async_callback(database.close)
        await versions.prepare_postgres(database)
        ledger = await _open_ledger(lambda: _postgres_ledger(url, clock, of_ledger, timeout_s / 2))
        opened.push_async_callback(asyncio.to_thread, ledger.close)
        return _sql_stores(database, database.where, ledger, database.size_bytes, opened.pop_all())
    raise AssertionError("unreachable")


async def _on_postgres(url: str, operation: Callable[[PostgresDatabase], Awaitable[int]]) -> int:
    database = await _open_postgres(url)
    try:
        return await operation(database)
    finally:
        await database.close()


async def _open_postgres(
    url: str, connections: int = MIN_CONNECTIONS, timeout_s: float = TIMEOUT_S
) -> PostgresDatabase:
    try:
        driver = await asyncio.to_thread(import_module, "penstock.storage.postgres.database")
    except ImportError as error:
        raise StoreUnavailable(f"PostgreSQL needs asyncpg ({error}); install penstock[postgres]") from error
    database: PostgresDatabase = await driver.PostgresDatabase.open(url, connections=connections, timeout_s=timeout_s)
    return database


async def _open_ledger(open_ledger: Callable[[], Ledger]) -> Ledger:
    """Open a ledger on a thread; if the caller is cancelled meanwhile, close it again."""
    opening = asyncio.ensure_future(asyncio.to_thread(open_ledger))
    try:
        return await asyncio.shield(opening)
    except LedgerUnavailable as error:
        raise StoreUnavailable(str(error)) from error
    except asyncio.CancelledError:
        await asyncio.wait((opening,))
        if not opening.cancelled() and opening.exception() is None:
            await asyncio.to_thread(opening.result().close)
        raise


def _postgres_ledger(url: str, clock: Clock, connections: int, timeout_s: float) -> PostgresLedgerStore:
    from penstock.storage.postgres.ledger import PostgresLedgerStore

    return PostgresLedgerStore(url, clock=clock, max_connections=connections, timeout_s=timeout_s)


def _size_of_files(path: Path) -> int:
    """Return the size of a database file, its ledger, and their write-ahead logs."""
    files = [Path(f"{file}{suffix}") for file in (path, ledger_path(path)) for suffix in ("", "-wal")]
    return sum(file.stat().st_size for file in files if file.exists())


def _sql_stores(
    database: Database,
    url: str,
    ledger: LedgerStore,
    measure: Callable[[], Awaitable[int | None]],
    closing: AsyncExitStack,
) -> Stores:
    return Stores(
        url,
        SqlRunStore(database),
        SqlEventStore(database),
        SqlGraphStore(database),
        SqlApprovalStore(database),
        SqlCancelStore(database),
        SqlJournalStore(database),
        SqlChatStore(database),
        SqlPayloadStore(database),
        SqlSpendingStore(database),
        SqlMemoryStore(database),
        SqlTokenStore(database),
        SqlAuditStore(database),
        SqlPersonStore(database),
        ledger,
        database.faults,
        partial(_transact, database),
        partial(unreadable_rows, database),
        measure,
        closing,
    )


class _JoinedDatabase:
    """A `Database` whose transaction bodies run in an open transaction."""

    __slots__ = ("_transaction", "faults")

    def __init__(self, transaction: Transaction, faults: RowFaults) -> None:
        self._transaction = transaction
        self.faults = faults

    async def write(self, body: TransactionBody[T], *, inline: bool = False) -> T:
        return await body(self._transaction)

    async def read(self, body: TransactionBody[T], *, inline: bool = False, single: bool = False) -> T:
        return await body(self._transaction)

    @property
    def version(self) -> int:
        raise RuntimeError(NO_WAITING)

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        raise RuntimeError(NO_WAITING)

    async def close(self) -> None:
        raise RuntimeError("a transaction cannot close its database")


NO_WAITING = "a transaction cannot wait for something to happen"


class _TransactionStores:
    """The stores of a database inside one transaction."""

    __slots__ = (
        *("approvals", "audit", "cancels", "chats", "events", "graphs", "journal", "payloads", "runs", "spending"),
        "tokens",
    )

    def __init__(self, transaction: Transaction, faults: RowFaults) -> None:
        database: Database = _JoinedDatabase(transaction, faults)
        self.runs = SqlRunStore(database)
        self.events = SqlEventStore(database)
        self.graphs = SqlGraphStore(database)
        self.approvals = SqlApprovalStore(database)
        self.cancels = SqlCancelStore(database)
        self.journal = SqlJournalStore(database)
        self.chats = SqlChatStore(database)
        self.tokens = SqlTokenStore(database)
        self.payloads = SqlPayloadStore(database)
        self.spending = SqlSpendingStore(database)
        self.audit = SqlAuditStore(database)


async def _transact(database: Database, unit: Unit[T], *, inline: bool = False) -> T:
    """Run the unit with the stores of one transaction, and commit it; roll back if the unit raises."""
    return await database.write(
        lambda transaction: unit(_TransactionStores(transaction, database.faults)), inline=inline
    )
