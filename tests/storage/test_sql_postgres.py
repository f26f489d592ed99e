"""The suites of the service's stores, over PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest

from penstock.containment.ledger import Amounts
from penstock.containment.limits import Limits
from penstock.errors import InvalidValue
from penstock.hosting.ports import Fenced, RunRecord
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.storage import Stores, open_stores
from penstock.storage.port import Transaction
from penstock.storage.postgres.database import DIALECT, PostgresDatabase
from penstock.storage.sql.events import check_claim
from penstock.storage.stores import CONNECTIONS
from penstock.testing.contracts.stores import StoreBundle, StoresContract, agree
from tests.storage.postgres import postgres_schemas, postgres_server, postgres_url

__all__ = ["postgres_schemas", "postgres_server", "postgres_url"]


class TestPostgresStores(StoresContract):
    """Each test has schemas of its own."""

    claimants = 12

    @pytest.fixture(autouse=True)
    def _schemas(self, postgres_schemas: Callable[[], str]) -> None:
        self.new_schema = postgres_schemas
        self.urls: dict[int, str] = {}

    async def open_stores(self) -> Stores:
        url = await asyncio.to_thread(self.new_schema)
        stores = await open_stores(url)
        self.urls[id(stores)] = url
        return stores

    async def open_another(self, stores: StoreBundle) -> Stores:
        return await open_stores(self.urls[id(stores)])


@pytest.mark.parametrize("seed", range(3))
async def test_postgres_answers_as_memory_does(postgres_schemas: Callable[[], str], seed: int) -> None:
    url = await asyncio.to_thread(postgres_schemas)
    async with await open_stores("memory:") as memory, await open_stores(url) as postgres:
        await agree(memory, postgres, seed=seed)


async def test_a_run_cannot_be_taken_over_while_its_worker_writes(
    postgres_schemas: Callable[[], str],
) -> None:
    url = await asyncio.to_thread(postgres_schemas)
    database = await PostgresDatabase.open(url)
    async with await open_stores(url) as stores:
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
        await stores.runs.claim("slow", now_ms=1_000, lease_ms=10)
        for lock in (DIALECT.share_lock, DIALECT.update_lock):

            async def writing(transaction: Transaction, lock: str = lock) -> None:
                await check_claim(transaction, "r", 1, lock)
                assert await stores.runs.claim("quick", now_ms=2_000, lease_ms=10) is None

            await database.write(writing)
        taken = await stores.runs.claim("quick", now_ms=2_000, lease_ms=10)
        assert taken is not None
        with pytest.raises(Fenced):
            await database.write(writing)
    await database.close()


async def test_a_process_takes_no_more_connections_than_it_may(postgres_url: str) -> None:
    async with await open_stores(postgres_url) as stores:
        ledger = AsyncLedger(stores.ledger)
        await ledger.open_account("a", Limits())
        spy = await asyncpg.connect(postgres_url)

        async def write(number: int) -> None:
            await stores.runs.add(RunRecord(f"run-{number}", "ann", "g", 1))
            await stores.events.wait(f"run-{number}", 0, 0.01)

        async def hold(number: int) -> None:
            await ledger.charge(f"charge-{number}", "a", Amounts(1))
            await asyncio.to_thread(stores.ledger.charge, f"blocking-{number}", "a", Amounts(1))

        stop = stores.ledger.on_change("charge-1", lambda: None)
        for _ in range(3):
            await asyncio.gather(*(act(number) for number in range(60) for act in (write, hold)))
        used = await spy.fetchval(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        stop()
        await spy.close()
    assert CONNECTIONS < used <= CONNECTIONS + 2
    assert 9 * used <= 97  # of the 100 of a server as it comes, which keeps three for its administrators


@pytest.mark.parametrize("wrong", [3, 0, -1, 2.5, None, True, "8", 1_001])
async def test_a_number_of_connections_that_is_too_small_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="connections"):
        await open_stores("memory:", connections=wrong)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf"), "10", None, True, 1e6])
async def test_a_time_limit_that_is_none_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="timeout_s"):
        await open_stores("memory:", timeout_s=wrong)
