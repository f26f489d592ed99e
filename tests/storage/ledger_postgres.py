"""One database for the tests of the ledger in PostgreSQL, empty for each of them."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from tests.storage.postgres import TEMPLATE, postgres_server

__all__ = ["dsn", "ledger_database", "postgres_server"]

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def ledger_database(postgres_server: str) -> Iterator[str]:
    """The URL of a database that does not wait for the disk."""
    name = f"ledger_{os.getpid()}_{next(_numbers)}"  # each module that imports this has one of its own
    making = f"CREATE DATABASE {name} {TEMPLATE}", f"ALTER DATABASE {name} SET synchronous_commit = off"
    run(postgres_server % "postgres", *making)
    yield postgres_server % name
    run(postgres_server % "postgres", f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def dsn(ledger_database: str) -> str:
    """The URL of a database without a ledger. To make it so is quicker than to make another one."""
    run(ledger_database, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return ledger_database


def run(dsn: str, *statements: str) -> list[Any]:
    """The rows of the last of the statements."""

    async def work() -> list[Any]:
        connection = await asyncpg.connect(dsn)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return list(await connection.fetch(statements[-1]))
        finally:
            await connection.close()

    return asyncio.run(work())
