"""Memories in stores: what bounds them, what survives a process, and a database that had none yet."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from penstock.hosting.ports import StoreUnavailable
from penstock.nodes import memory
from penstock.nodes.memory import Memory, MemoryStore
from penstock.storage import migrate, migrations, open_stores, schema_version
from penstock.storage.memory import InProcessMemory, memories
from penstock.testing.faulty import FAULTS, FaultKind, FaultyStores
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'penstock.db'}"
    new_schema: Callable[[], str] = request.getfixturevalue("postgres_schemas")
    return new_schema()


async def _remember(url: str) -> None:
    async with await open_stores(url) as stores:
        await stores.memories.put("chat:c", "dam", {"m": 221})


async def _recall(url: str) -> list[Memory]:
    async with await open_stores(url) as stores:
        return [*await stores.memories.search("chat:c", "which dam?")]


def test_memories_survive_reopening_the_stores(url: str) -> None:
    asyncio.run(_remember(url))
    assert asyncio.run(_recall(url)) == [Memory("dam", {"m": 221})]


def test_a_database_without_memories_has_them_after_the_upgrade(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:1])
        assert asyncio.run(migrate(url)) == 1
    with pytest.raises(StoreUnavailable, match="penstock db upgrade"):
        asyncio.run(_remember(url))
    assert asyncio.run(migrate(url)) == asyncio.run(schema_version(url)) == len(migrations.MIGRATIONS)
    asyncio.run(_remember(url))
    assert asyncio.run(_recall(url)) == [Memory("dam", {"m": 221})]


async def test_the_words_of_a_memory_are_removed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_MEMORIES", 2)
    async with await open_stores(str(tmp_path / "p.db")) as stores:
        for key in ("a", "b", "c", "c"):
            await stores.memories.put("run:r", key, f"word {key}")
        rows = await asyncio.to_thread(_rows, tmp_path / "p.db")
        assert rows == [("run:r", 2, "b"), ("run:r", 2, "b word"), ("run:r", 2, "c"), ("run:r", 2, "c word")]


def _rows(path: Path) -> list[tuple[str, int, str]]:
    found = (
        "SELECT memory_spaces.space, size, key || iif(word = key, '', ' ' || word) FROM memory_words "
        "LEFT JOIN memories USING (number) LEFT JOIN memory_spaces ON memory_spaces.number = memories.space ORDER BY 3"
    )
    with closing(sqlite3.connect(path)) as file:
        return file.execute(found).fetchall()


async def test_the_number_of_spaces_in_a_process_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "MAX_SPACES", 2)
    store = InProcessMemory()
    for space in ("s", "t", "s", "u"):
        await store.put(space, "k", 1)
    assert [await store.get(space, "k") is not None for space in ("s", "t", "u")] == [True, False, True]


@pytest.mark.parametrize("kind", FAULTS)
async def test_an_unavailable_store_raises(kind: FaultKind) -> None:
    async with FaultyStores(await open_stores("memory:"), kind) as stores:
        assert isinstance(stores.memories, MemoryStore)
        with pytest.raises(StoreUnavailable, match=r"InProcessMemory\.put"):
            await stores.memories.put("s", "k", 1)
        found = await stores.memories.get("s", "k")
        assert found == (Memory("k", 1) if kind == "write-then-timeout" else None)
