"""The suites of the service's stores, over SQLite."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from penstock.storage import Stores, open_stores
from penstock.testing.contracts.stores import StoreBundle, StoresContract, agree


class TestSqliteStores(StoresContract):
    """Each test has files of its own."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.paths = (tmp_path / f"{number}.db" for number in itertools.count())

    async def open_stores(self) -> Stores:
        return await open_stores(str(next(self.paths)))

    async def open_another(self, stores: StoreBundle) -> Stores:
        assert isinstance(stores, Stores)
        return await open_stores(stores.url)


@pytest.mark.parametrize("seed", range(5))
async def test_sqlite_answers_as_memory_does(tmp_path: Path, seed: int) -> None:
    async with await open_stores("memory:") as memory, await open_stores(str(tmp_path / "p.db")) as sqlite:
        await agree(memory, sqlite, seed=seed)
