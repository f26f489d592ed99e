"""The tables of a PostgreSQL database and its ledger, written to an archive and read from it.

All tables are read in one transaction, which sees them as of one instant and makes no writer wait. They are restored in
one transaction too, completely or not at all. A ledger that was never used has no tables, version 0.
"""

from __future__ import annotations

import asyncio
import re
import zipfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

import asyncpg  # type: ignore[import-untyped]

from penstock.hosting.ports import StoreUnavailable
from penstock.storage import migrations
from penstock.storage.postgres import ledger_schema
from penstock.storage.postgres.database import BEGIN_READ, CONNECT_S, ERRORS, unavailable, without_password

LEDGER_TABLES = tuple(f"{ledger_schema.LEDGER}_{name}" for name in ("accounts", "levels", "holds", "draws", "tickets"))
"""Each after the tables it refers to. What is known of calls without a hint is left out: their leases, and what
they cost, which the next one shows."""
PIECE_BYTES = 1 << 20
COLUMNS = """SELECT table_name, column_name FROM information_schema.columns
    WHERE table_schema = current_schema() AND table_name = ANY($1) ORDER BY table_name, ordinal_position"""
NUMBERED = """SELECT table_name, column_name FROM information_schema.columns
    WHERE table_schema = current_schema() AND table_name = ANY($1) AND is_identity = 'YES'"""


def our_tables() -> list[str]:
    """Return the tables of every version, each after the tables it refers to."""
    created = [
        found[1]
        for version in migrations.MIGRATIONS
        for statement in version
        if (found := re.match(r"CREATE TABLE (\w+)", statement))
    ]
    return [*dict.fromkeys(created), *LEDGER_TABLES]


async def dump(url: str, archive: zipfile.ZipFile) -> tuple[int, int, dict[str, list[str]]]:
    """Write every table to the archive; returns the versions of tables and ledger, and the columns by table."""
    async with _connected(url) as connection:
        await connection.execute(BEGIN_READ)
        version = await _version(connection, "penstock_schema")
        ledger_version = await _version(connection, f"{ledger_schema.LEDGER}_about")
        if not version:
            raise StoreUnavailable(f"{without_password(url)!r} has no tables of Penstock; there is nothing to back up")
        columns: dict[str, list[str]] = {}
        for table, column in await connection.fetch(COLUMNS, our_tables()):
            columns.setdefault(table, []).append(column)
        tables = {table: columns[table] for table in our_tables() if table in columns}
        for table, names in tables.items():
            async with _member(archive, table, "w") as file:
                await connection.copy_from_table(table, columns=names, output=partial(asyncio.to_thread, file.write))
        return version, ledger_version, tables


async def load(
    url: str, archive: zipfile.ZipFile, version: int, ledger_version: int, tables: dict[str, list[str]]
) -> None:
    """Create the tables of that version in an empty database, and fill them."""
    where = without_password(url)
    is_older = ledger_version in ledger_schema.OLDER_VERSIONS
    if not is_older and ledger_version not in (0, ledger_schema.VERSION):
        raise StoreUnavailable(
            f"the backup has a ledger of version {ledger_version}, and this Penstock knows versions up to "
            f"{ledger_schema.VERSION}; restore it with the Penstock that made it"
        )
    if unknown := sorted(set(tables) - set(our_tables())):
        raise StoreUnavailable(f"the backup has tables that this Penstock does not know: {', '.join(unknown)}")
    async with _connected(url) as connection, connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", migrations.POSTGRES_LOCK)
        taken = [row[0] for row in await connection.fetch(COLUMNS, our_tables())]
        if taken:
            raise StoreUnavailable(f"{where!r} is not empty; a restore never overwrites a database: name an empty one")
        await _create(connection, version)
        if ledger_version:
            await _run(connection, (ledger_schema.TABLES,) if is_older else ledger_schema.STATEMENTS)
        for table, names in tables.items():
            async with _member(archive, table, "r") as file:
                await connection.copy_to_table(table, columns=names, source=_pieces(file))
        if is_older:
            await _run(connection, ledger_schema.UPGRADE)
        for table, column in await connection.fetch(NUMBERED, list(tables)):
            await connection.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', '{column}'), max({column})) FROM {table}"
            )


async def _create(connection: Any, version: int) -> None:
    await connection.execute("CREATE TABLE penstock_schema (version BIGINT NOT NULL)")
    await connection.execute("INSERT INTO penstock_schema (version) VALUES ($1)", version)
    for statements in migrations.MIGRATIONS[:version]:
        await _run(connection, map(migrations.for_postgres, statements))


async def _run(connection: Any, statements: Iterable[str]) -> None:
    for statement in statements:
        await connection.execute(statement)


async def _version(connection: Any, table: str) -> int:
    if await connection.fetchval("SELECT to_regclass($1)", table) is None:
        return 0
    return int(await connection.fetchval(f"SELECT max(version) FROM {table}") or 0)


@asynccontextmanager
async def _member(archive: zipfile.ZipFile, table: str, mode: Literal["r", "w"]) -> AsyncIterator[Any]:
    file = await asyncio.to_thread(archive.open, f"{table}.copy", mode, force_zip64=mode == "w")
    try:
        yield file
    finally:
        await asyncio.to_thread(file.close)


async def _pieces(file: Any) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
        yield piece


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    """Connect without a time limit for statements: a large table takes as long as it takes."""
    try:
        connection = await asyncpg.connect(url, timeout=CONNECT_S, server_settings={"application_name": "penstock"})
        try:
            yield connection
        finally:
            await connection.close()
    except ERRORS as error:
        raise unavailable(without_password(url), error) from error
