"""A database of either kind and everything it stores, for tests that search it for secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["Kept", "kept", "postgres_server", "postgres_url"]

TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"


@dataclass(frozen=True)
class Kept:
    """The database of a service."""

    url: str
    folder: Path | None
    """The folder of the SQLite files; None for a server."""

    async def everything(self) -> Mapping[str, bytes]:
        """The bytes of each file, or the rows of each table as text."""
        if self.folder is not None:
            return await asyncio.to_thread(_bytes_in, self.folder)
        return await _rows_of(self.url)


@pytest.fixture(params=["sqlite", "postgresql"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Kept:
    """A new database of each kind."""
    if request.param == "postgresql":
        return Kept(request.getfixturevalue("postgres_url"), None)
    return Kept(str(tmp_path / "data.db"), tmp_path)


def _bytes_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


async def _rows_of(url: str) -> dict[str, bytes]:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("SET bytea_output = escape")  # bytes that are text are shown as that
        names = [row["tablename"] for row in await connection.fetch(TABLES)]
        found = {name: await connection.fetch(f"SELECT one::text AS row FROM {name} AS one") for name in names}
    finally:
        await connection.close()
    return {name: "\n".join(row["row"] for row in rows).encode() for name, rows in found.items()}
