"""Several `penstock serve` on one PostgreSQL."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.exits import Refused
from penstock.cli.remote.connection import Connection
from tests.cli.service.test_serve import QUICK, served
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.usefixtures("forks")

PROCESSES, CLIENTS_OF_EACH, TURNS = 8, 15, 3
CONNECTIONS = 10
"""Connections that a process takes at most, without `--db-connections`."""
MESSAGE = {"model": "assistant", "messages": [{"role": "user", "content": "hello"}]}


async def _one(url: str, statement: str) -> Any:
    import asyncpg  # type: ignore[import-untyped]  # only where a server is used

    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


@contextmanager
def connections_counted(url: str) -> Iterator[list[int]]:
    """Count the connections to the database again and again, until the block has ended."""
    found: list[int] = []
    has_ended = threading.Event()

    async def count() -> None:
        import asyncpg

        connection = await asyncpg.connect(url)
        statement = "SELECT count(*) - 1 FROM pg_stat_activity WHERE datname = current_database()"
        try:
            while not has_ended.is_set():
                found.append(await connection.fetchval(statement))
        finally:
            await connection.close()

    thread = threading.Thread(target=asyncio.run, args=(count(),))
    thread.start()
    try:
        yield found
    finally:
        has_ended.set()
        thread.join()


def _chat(url: str) -> Counter[str]:
    """Some turns of one client: how each was answered."""
    found: Counter[str] = Counter()
    with Connection(url) as server:
        for _ in range(TURNS):
            try:
                answer = server.post("/v1/chat/completions", MESSAGE)
                found[answer["choices"][0]["finish_reason"]] += 1
            except Refused as error:
                found[str(error)] += 1
    return found


def test_eight_servers_on_a_postgresql_with_default_settings_refuse_no_request(
    postgres_url: str, directory: Path
) -> None:
    assert asyncio.run(_one(postgres_url, "SHOW max_connections")) == "100"
    (directory / "quick.py").write_text(QUICK)
    with ExitStack() as stack:
        options = ("--db", postgres_url, "--models", "quick.py:models", "--max-running-per-user", "500")
        servers = [stack.enter_context(served(*options)) for _ in range(PROCESSES)]
        urls = [server.url for server in servers]
        with connections_counted(postgres_url) as connections, ThreadPoolExecutor(len(urls) * CLIENTS_OF_EACH) as pool:
            answers = sum(pool.map(_chat, urls * CLIENTS_OF_EACH), Counter[str]())
        errors = "".join(server.stop(signal.SIGTERM)[1] for server in servers)
    assert (answers, errors) == ({"stop": PROCESSES * CLIENTS_OF_EACH * TURNS}, "")
    assert PROCESSES * 2 < max(connections) <= PROCESSES * CONNECTIONS
