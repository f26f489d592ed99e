"""The suites of the service's stores, over PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.hosting.ports import Fenced, RunRecord
from penstock.storage import Stores, open_stores
from penstock.storage.port import Transaction
from penstock.storage.postgres.database import DIALECT, PostgresDatabase
from penstock.storage.sql.events import check_claim
from penstock.testing.contracts.stores import StoreBundle, StoresContract, agree
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]


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
