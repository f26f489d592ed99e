"""The schema version of a database, and upgrades to the newest version.

Opening a new, empty database creates its tables. Opening an older database never changes it, because another process
may be using it: only an explicit `migrate` upgrades it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.hosting.ports import StoreUnavailable
from penstock.storage import migrations
from penstock.storage.migrations import APPLICATION_ID, POSTGRES_LOCK, for_postgres, for_sqlite
from penstock.storage.port import Transaction, placeholders
from penstock.storage.sqlite.database import SqliteDatabase, unavailable
from penstock.storage.sqlite.file import Schema, SqliteFile, has_tables, hindrance, schema_mismatch

if TYPE_CHECKING:
    from penstock.storage.postgres.database import PostgresDatabase

BUSY_TIMEOUT_S = 0.9
"""How long a transaction waits for locks of other processes: short enough for a service to report a failure within two
seconds, even if the previous one has just started to wait."""


def newest() -> int:
    """Return the schema version that this Penstock creates and reads."""
    return len(migrations.MIGRATIONS)


def statements(after: int, translate: Callable[[str], str]) -> tuple[str, ...]:
    """Return the statements that upgrade a database from version `after` to the newest."""
    return tuple(translate(statement) for version in migrations.MIGRATIONS[after:] for statement in version)


def check(where: str, found: int) -> None:
    """Raise StoreUnavailable unless the database is new or has the newest version."""
    if found > newest():
        raise _newer(where, found)
    if 0 < found < newest():
        raise StoreUnavailable(
            f"{where!r} is of version {found}, and this Penstock needs version {newest()}; "
            "run `penstock db upgrade --db URL` for it"
        )


def _newer(where: str, found: int) -> StoreUnavailable:
    return StoreUnavailable(
        f"{where!r} is of version {found}, and this Penstock knows versions up to {newest()}; "
        "use the Penstock that upgraded it, or a newer one"
    )


# SQLite.


async def open_sqlite(path: Path, *, fsync: bool = False) -> SqliteDatabase:
    """Open the database in a file, creating it if it does not exist."""
    check(str(path), await sqlite_version(path))
    schema = Schema(APPLICATION_ID, newest(), statements(0, for_sqlite))
    return await SqliteDatabase.open(path, schema, busy_timeout_s=BUSY_TIMEOUT_S, fsync=fsync)


async def sqlite_version(path: Path) -> int:
    """Return the schema version of the file; 0 if it does not exist or is empty."""
    return await asyncio.to_thread(_sqlite_version, path)


async def migrate_sqlite(path: Path) -> int:
    """Upgrade the file to the newest version in one transaction, and return that version."""
    return await asyncio.to_thread(_migrate_sqlite, path)


def _sqlite_version(path: Path) -> int:
    if not os.path.exists(path):  # also False in a folder without permission
        return 0
    with _opened(path) as file:
        return _header_version(path, file)


async def sqlite_lacks(path: Path, ledger: Path) -> bool:
    """Whether runs in the file were worked on but the ledger with their spending does not exist."""
    return await asyncio.to_thread(_sqlite_lacks, path, ledger)


def _sqlite_lacks(path: Path, ledger: Path) -> bool:
    if os.path.exists(ledger) or not os.path.exists(path):
        return False
    with _opened(path) as file:
        (has_worked,) = file.execute("SELECT EXISTS (SELECT 1 FROM runs WHERE epoch > 0)").fetchone()
        return bool(has_worked)


async def check_sqlite(path: Path, schema: Schema) -> None:
    """Raise StoreUnavailable if the file exists and cannot be used with this schema; an empty file can."""
    await asyncio.to_thread(_check_sqlite, path, schema)


def _check_sqlite(path: Path, schema: Schema) -> None:
    if not os.path.exists(path):
        return
    with _opened(path) as file:
        why = schema_mismatch(file, schema) if has_tables(file) else ""
    if why:
        raise unavailable(f"{str(path)!r} cannot be used: {why}")


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    if found := hindrance(path):
        raise unavailable(f"{str(path)!r} cannot be used: {'; '.join(found)}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_TIMEOUT_S)) as file:
            yield file
    except sqlite3.Error as error:
        raise unavailable(
            f"{str(path)!r} cannot be read: {error} ({getattr(error, 'sqlite_errorname', '?')})"
        ) from error


def _header_version(path: Path, file: sqlite3.Connection) -> int:
    (tables,) = file.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    (application,) = file.execute("PRAGMA application_id").fetchone()
    (version,) = file.execute("PRAGMA user_version").fetchone()
    if not tables and not application:
        return 0
    if application != APPLICATION_ID:
        raise unavailable(f"{str(path)!r} is a database of something else; name another file")
    return int(version)


def _migrate_sqlite(path: Path) -> int:
    found = _sqlite_version(path)
    if found > newest():
        raise _newer(str(path), found)
    schema = Schema(APPLICATION_ID, found or newest(), statements(0, for_sqlite))
    file = SqliteFile(
        path, schema, make_error=unavailable, busy_timeout_s=BUSY_TIMEOUT_S, fsync=True, factory=sqlite3.Connection
    )
    with closing(file), file.writing() as connection:
        (now,) = connection.execute("PRAGMA user_version").fetchone()  # another process may have upgraded it meanwhile
        for statement in statements(now, for_sqlite):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {newest()}")
    return newest()


# PostgreSQL.

OUR_TABLES = ("runs", "events", "journal", "graphs", "approvals", "chats")
"""Tables that belong to another application if the database has no `penstock_schema`."""
HAS_TABLE = "SELECT table_name FROM information_schema.tables WHERE table_schema = current_schema() AND table_name IN"


async def prepare_postgres(database: PostgresDatabase) -> None:
    """Create the tables of a new database; StoreUnavailable if it has another version."""
    found = await postgres_version(database)
    check(database.where, found)
    if found == 0:
        await migrate_postgres(database)


async def postgres_version(database: PostgresDatabase) -> int:
    """Return the schema version of the database; 0 if it has no Penstock tables."""
    return await database.read(lambda transaction: _postgres_version(transaction, database.where))


async def migrate_postgres(database: PostgresDatabase) -> int:
    """Upgrade the database to the newest version in one transaction, and return that version."""

    async def body(transaction: Transaction) -> int:
        await transaction.row("SELECT pg_advisory_xact_lock(?)", POSTGRES_LOCK)
        found = await _postgres_version(transaction, database.where)
        if found > newest():
            raise _newer(database.where, found)
        if found == 0:
            await transaction.run("CREATE TABLE penstock_schema (version BIGINT NOT NULL)")
            await transaction.run("INSERT INTO penstock_schema (version) VALUES (0)")
        for statement in statements(found, for_postgres):
            await transaction.run(statement)
        await transaction.run("UPDATE penstock_schema SET version = ?", newest())
        return newest()

    return await database.write(body)


async def _postgres_version(transaction: Transaction, where: str) -> int:
    if await transaction.row(f"{HAS_TABLE} (?)", "penstock_schema") is not None:
        row = await transaction.row("SELECT max(version) FROM penstock_schema")
        assert row is not None, "a maximum is one row"
        return int(row[0] or 0)
    taken = await transaction.rows(f"{HAS_TABLE} ({placeholders(len(OUR_TABLES))})", *OUR_TABLES)
    if taken:
        names = ", ".join(sorted(str(row[0]) for row in taken))
        raise StoreUnavailable(f"{where!r} has tables of something else ({names}); give Penstock a database of its own")
    return 0
