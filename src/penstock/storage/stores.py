"""All stores of a service, by one URL.

memory:                     nothing survives the process
sqlite:///folder/file.db    a file, from the current folder; sqlite:////folder/file.db from the root; or a plain path
postgresql://…              a PostgreSQL server
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import unquote, urlsplit

from penstock.chat.ports import ChatStore
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import LedgerStore
from penstock.errors import InvalidValue, LedgerUnavailable
from penstock.hosting.ports import ApprovalStore, CancelStore, EventStore, GraphStore, RunStore, StoreUnavailable
from penstock.nodes.memory import MemoryStore
from penstock.runtime.durable.ports import JournalStore
from penstock.storage import sqlite_file
from penstock.storage.databases import versions
from penstock.storage.databases.port import Database
from penstock.storage.memory import MemoryStores
from penstock.storage.sql.approvals import SqlApprovalStore, SqlCancelStore
from penstock.storage.sql.chats import SqlChatStore
from penstock.storage.sql.events import SqlEventStore
from penstock.storage.sql.graphs import SqlGraphStore
from penstock.storage.sql.journal import SqlJournalStore
from penstock.storage.sql.memories import SqlMemoryStore
from penstock.storage.sql.runs import SqlRunStore
from penstock.storage.sqlite_ledger import SCHEMA as LEDGER_SCHEMA
from penstock.storage.sqlite_ledger import SqliteLedgerStore

if TYPE_CHECKING:
    from penstock.storage.databases.postgres import PostgresDatabase
    from penstock.storage.postgres_ledger import PostgresLedgerStore

Ledger = TypeVar("Ledger", bound="SqliteLedgerStore | PostgresLedgerStore")

SHAPE = "memory:, sqlite:///path, postgresql://…, or the path of a file"


@dataclass(frozen=True, slots=True)
class Stores:
    """Everything that a service keeps, in one place; an async context manager that closes itself."""

    url: str
    """Where it is, without a password."""
    runs: RunStore
    events: EventStore
    graphs: GraphStore
    approvals: ApprovalStore
    cancels: CancelStore
    journal: JournalStore
    chats: ChatStore
    memories: MemoryStore
    ledger: LedgerStore
    _closing: AsyncExitStack = field(default_factory=AsyncExitStack, repr=False)

    async def close(self) -> None:
        """Finish what was asked for, and give everything back; closing twice is closing once."""
        await self._closing.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def open_stores(url: str, *, clock: Clock = SYSTEM_CLOCK, fsync: bool = False) -> Stores:
    """Open every store of that URL; what is new and empty is made. StoreUnavailable says why one cannot be opened.

    `fsync` is for SQLite: every commit waits for the disk, so that what was answered survives a power cut too.
    """
    scheme = scheme_of(url)
    if scheme == "memory":
        return _in_memory(clock)
    if scheme == "postgresql":
        return await _in_postgres(url, clock)
    return await _in_sqlite(url, clock, fsync)


async def migrate(url: str) -> int:
    """Bring a database to the newest version, all of it or nothing; the version it is of then."""
    if scheme_of(url) == "memory":
        return versions.newest()
    if scheme_of(url) == "sqlite":
        return await versions.migrate_sqlite(sqlite_path(url))
    return await _on_postgres(url, versions.migrate_postgres)


async def schema_version(url: str) -> int:
    """Of what version a database is; 0 if it is not there, or empty."""
    if scheme_of(url) == "memory":
        return versions.newest()
    if scheme_of(url) == "sqlite":
        return await versions.sqlite_version(sqlite_path(url))
    return await _on_postgres(url, versions.postgres_version)


def newest_version() -> int:
    """The version that this Penstock makes and reads."""
    return versions.newest()


def scheme_of(url: str) -> str:
    """Which kind of store it is: memory, sqlite or postgresql."""
    if url in ("memory:", "memory://"):
        return "memory"
    scheme = url.partition("://")[0] if "://" in url else "sqlite"
    if scheme in ("postgresql", "postgres"):
        return "postgresql"
    if scheme != "sqlite" or not url or url.startswith(":memory:"):
        raise InvalidValue("url", url, SHAPE)
    return "sqlite"


def sqlite_path(url: str) -> Path:
    """The file that a URL or a plain path names."""
    if "://" not in url:
        return Path(url).expanduser().absolute()
    parts = urlsplit(url)
    path = unquote(parts.path)[1:]
    if parts.netloc or parts.query or parts.fragment or not path or path.startswith(":memory:"):
        raise InvalidValue("url", url, "sqlite:/// and the path of a file, nothing else")
    return Path(path).absolute()


def ledger_path(path: Path) -> Path:
    """The file of the ledger that belongs to a database in that file."""
    return path.with_name(f"{path.name}.ledger")


def hindrance(url: str) -> tuple[str, str] | None:
    """What keeps a server from writing where a database is, or would be, and what to do; None if nothing is seen."""
    if scheme_of(url) != "sqlite":
        return None
    path = sqlite_path(url)
    return sqlite_file.hindrance(path) or sqlite_file.hindrance(ledger_path(path))


async def check_ledger(url: str) -> None:
    """StoreUnavailable if the ledger of a database cannot be opened, or runs have spent, and it is gone.

    It is not made again, for that would be one in which nothing was spent.
    """
    if scheme_of(url) != "sqlite":
        return
    path = sqlite_path(url)
    ledger = ledger_path(path)
    if await versions.sqlite_lacks(path, ledger):
        raise StoreUnavailable(
            f"{str(ledger)!r} is gone, which has what the runs in {path.name!r} have spent; put it back from a copy: "
            "it is not made again. An empty file of that name would begin anew, as if nothing had been spent"
        )
    await versions.check_sqlite(ledger, LEDGER_SCHEMA)


def _in_memory(clock: Clock) -> Stores:
    kept = MemoryStores(clock=clock)
    return Stores(
        kept.url,
        kept.runs,
        kept.events,
        kept.graphs,
        kept.approvals,
        kept.cancels,
        kept.journal,
        kept.chats,
        kept.memories,
        kept.ledger,
    )


async def _in_sqlite(url: str, clock: Clock, fsync: bool) -> Stores:
    path = sqlite_path(url)
    async with AsyncExitStack() as opened:
        database = await versions.open_sqlite(path, fsync=fsync)
        opened.push_async_callback(database.close)
        await check_ledger(url)
        ledger = await _made(lambda: SqliteLedgerStore(ledger_path(path), clock=clock, fsync=fsync))
        opened.push_async_callback(asyncio.to_thread, ledger.close)
        return _over(database, f"sqlite:///{path}", ledger, opened.pop_all())
    raise AssertionError("unreachable")


async def _in_postgres(url: str, clock: Clock) -> Stores:
    async with AsyncExitStack() as opened:
        database = await _opened_postgres(url)
        opened.push_async_callback(database.close)
        await versions.prepare_postgres(database)
        ledger = await _made(lambda: _postgres_ledger(url, clock))
        opened.push_async_callback(asyncio.to_thread, ledger.close)
        return _over(database, database.where, ledger, opened.pop_all())
    raise AssertionError("unreachable")


async def _on_postgres(url: str, ask: Callable[[PostgresDatabase], Awaitable[int]]) -> int:
    database = await _opened_postgres(url)
    try:
        return await ask(database)
    finally:
        await database.close()


async def _opened_postgres(url: str) -> PostgresDatabase:
    try:
        driver = await asyncio.to_thread(import_module, "penstock.storage.databases.postgres")
    except ImportError as error:
        raise StoreUnavailable(f"PostgreSQL needs asyncpg ({error}); install penstock[postgres]") from error
    database: PostgresDatabase = await driver.PostgresDatabase.open(url)
    return database


async def _made(make: Callable[[], Ledger]) -> Ledger:
    """A ledger that is opened on a thread; whoever is cancelled meanwhile leaves none open."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except LedgerUnavailable as error:
        raise StoreUnavailable(str(error)) from error
    except asyncio.CancelledError:
        await asyncio.wait((making,))
        if not making.cancelled() and making.exception() is None:
            await asyncio.to_thread(making.result().close)
        raise


def _postgres_ledger(url: str, clock: Clock) -> PostgresLedgerStore:
    from penstock.storage.postgres_ledger import PostgresLedgerStore

    return PostgresLedgerStore(url, clock=clock)


def _over(database: Database, url: str, ledger: LedgerStore, closing: AsyncExitStack) -> Stores:
    return Stores(
        url,
        SqlRunStore(database),
        SqlEventStore(database),
        SqlGraphStore(database),
        SqlApprovalStore(database),
        SqlCancelStore(database),
        SqlJournalStore(database),
        SqlChatStore(database),
        SqlMemoryStore(database),
        ledger,
        closing,
    )
