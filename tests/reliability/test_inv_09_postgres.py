"""INV 9 on a PostgreSQL server that is reachable but cannot write: read-only, full, or locked by another client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from penstock.containment.limits import Limits
from penstock.errors import LedgerUnavailable
from penstock.hosting.ports import StoreUnavailable
from penstock.storage.postgres import database as postgres_database
from penstock.storage.postgres import ledger
from penstock.storage.postgres.ledger import PostgresLedgerStore
from tests.reliability.test_inv_09_databases import broken_and_repaired, serving
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

ANSWERED_WITHIN_S = 2.0
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY tablename"
CUT = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)
FULL = """
CREATE OR REPLACE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'could not extend file "base/1/1": No space left on device' USING ERRCODE = 'disk_full';
END $$
"""


@asynccontextmanager
async def operator(url: str) -> AsyncIterator[Any]:
    """A connection of another client."""
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def tables(connection: Any) -> list[str]:
    """Those of the stores and of the ledger."""
    return [row["tablename"] for row in await connection.fetch(TABLES)]


async def test_a_service_whose_database_may_only_be_read(postgres_url: str) -> None:
    name = urlsplit(postgres_url).path.removeprefix("/")

    @asynccontextmanager
    async def read_only() -> AsyncIterator[None]:
        async with operator(postgres_url) as connection:
            await connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            await connection.execute(CUT)  # clients that reconnect see the change
            yield
            await connection.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
            await connection.execute(CUT)

    await broken_and_repaired(postgres_url, read_only)


async def test_a_service_whose_database_server_has_a_full_disk(postgres_url: str) -> None:
    """What is there can be read; whatever would be written is refused with the server's code for that."""

    @asynccontextmanager
    async def full() -> AsyncIterator[None]:
        async with operator(postgres_url) as connection:
            await connection.execute(FULL)
            for table in await tables(connection):
                await connection.execute(
                    f"CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON {table} EXECUTE FUNCTION full_disk()"
                )
            yield
            for table in await tables(connection):
                await connection.execute(f"DROP TRIGGER full_disk ON {table}")

    await broken_and_repaired(postgres_url, full)


def locked(url: str, is_locked: Callable[[str], bool]) -> AbstractAsyncContextManager[None]:
    """Another connection holds those tables locked."""

    @asynccontextmanager
    async def keeping() -> AsyncIterator[None]:
        async with operator(url) as connection:
            names = ", ".join(name for name in await tables(connection) if is_locked(name))
            await _locked(connection, names)
            yield
            await connection.execute("ROLLBACK")

    return keeping()


async def _locked(connection: Any, names: str) -> None:
    """Lock them all; a client that locks them in another order may cause a deadlock, which PostgreSQL resolves."""
    while True:
        await connection.execute("BEGIN")
        try:
            await connection.execute(f"LOCK TABLE {names} IN ACCESS EXCLUSIVE MODE")
            return
        except asyncpg.DeadlockDetectedError:
            await connection.execute("ROLLBACK")


async def test_a_service_whose_tables_another_client_keeps_locked(postgres_url: str) -> None:
    await broken_and_repaired(postgres_url, lambda: locked(postgres_url, lambda name: True))


REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/api/graphs", None),
    ("GET", "/api/graphs/chat", None),
    ("POST", "/api/runs", {"graph_id": "chat"}),
    ("POST", "/api/agents/chat/chat", {"content": "x"}),
    ("GET", "/api/runs", None),
    ("GET", "/api/runs/r1/events", None),
    ("POST", "/api/runs/r1/cancel", None),
    ("GET", "/api/chats/c", None),
    ("POST", "/api/chats/c/messages", {"content": "x"}),
    ("GET", "/api/approvals", None),
    ("GET", "/v1/models", None),
    ("POST", "/v1/chat/completions", {"model": "chat", "messages": [{"role": "user", "content": "x"}]}),
    ("GET", "/ready", None),
]


async def test_while_tables_are_locked_every_request_is_answered_503(postgres_url: str) -> None:
    async with serving(postgres_url) as service:
        await service.send(1)
        await service.answered(1)
        async with locked(postgres_url, lambda name: True):
            answers = await asyncio.gather(
                *(service.client.request(method, path, json=body) for method, path, body in REQUESTS)
            )
        statuses = {
            f"{request[0]} {request[1]}": answer.status_code for request, answer in zip(REQUESTS, answers, strict=True)
        }
        assert statuses == dict.fromkeys(statuses, 503)
        await service.send(2)
        await service.answered(2)
        await service.check(2)


async def test_waiting_for_a_lock_ends_before_the_time_to_answer(postgres_url: str) -> None:
    assert max(postgres_database.LOCKED_S, ledger.LOCKED_S) < ANSWERED_WITHIN_S

    async def waits(transaction: Any) -> str:
        row = await transaction.row("SHOW lock_timeout")
        return str(row[0])

    async def look(transaction: Any) -> Any:
        return await transaction.rows("SELECT * FROM kept")

    database = await postgres_database.PostgresDatabase.open(postgres_url)
    try:
        async with operator(postgres_url) as connection:
            await connection.execute("CREATE TABLE kept (id INTEGER)")
        for _ in range(2):  # the second time on a connection that was given back
            assert await database.read(waits) == f"{round(postgres_database.LOCKED_S * 1_000)}ms"
        async with locked(postgres_url, lambda name: name == "kept"):
            with pytest.raises(StoreUnavailable, match=r"lock timeout.*see who keeps a lock"):
                await database.read(look)
    finally:
        await database.close()


async def test_a_locked_ledger_is_reported_as_locked(postgres_url: str) -> None:
    ledger = await asyncio.to_thread(PostgresLedgerStore, postgres_url)
    try:
        await asyncio.to_thread(ledger.open_account, "a", Limits(cost_nanos=1))
        async with locked(postgres_url, lambda name: name.startswith("penstock_ledger")):
            with pytest.raises(LedgerUnavailable, match="lock timeout"):
                await asyncio.to_thread(ledger.open_account, "b", Limits(cost_nanos=1))
        await asyncio.to_thread(ledger.open_account, "b", Limits(cost_nanos=1))
    finally:
        await asyncio.to_thread(ledger.close)
