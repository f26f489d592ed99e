"""GET /ready: a server is ready if what it keeps can be read and written to."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.hosting.ports import CancelRequest, StoreUnavailable
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.server.readiness import FRESH_S, PROBE
from penstock.server.settings import ServerSettings
from penstock.storage import Stores, open_stores
from penstock.storage.memory.runs import MemoryCancelStore
from penstock.testing import ManualClock
from tests.server.served import served


@asynccontextmanager
async def serving(path: Path, clock: ManualClock | None = None) -> AsyncIterator[tuple[Stores, httpx2.AsyncClient]]:
    """A server on a file; its host is not started, so that nothing else writes."""
    async with await open_stores(str(path)) as stores:
        host = RunHost(stores, executors=await asyncio.to_thread(executors))
        app = create_app(host, ChatService(host, stores.chats), stores, clock=clock or ManualClock())
        transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642") as client:
            yield stores, client


@asynccontextmanager
async def locked(path: str) -> AsyncIterator[None]:
    other = await asyncio.to_thread(sqlite3.connect, path, isolation_level=None, check_same_thread=False)
    await asyncio.to_thread(other.execute, "BEGIN IMMEDIATE")
    try:
        yield
    finally:
        await asyncio.to_thread(other.close)


def make_read_only(path: str) -> None:
    """The header asks for a newer way of writing than SQLite knows, so that it only reads, also for root."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    other.close()
    with open(path, "r+b") as file:
        file.seek(18)
        file.write(b"\x09")


@pytest.mark.parametrize("suffix", ["", ".ledger"])
async def test_a_server_whose_file_is_locked_is_not_ready_until_it_is_free(tmp_path: Path, suffix: str) -> None:
    path, clock = tmp_path / "data.db", ManualClock()
    async with serving(path, clock) as (stores, client):
        async with locked(f"{path}{suffix}"):
            assert await stores.runs.list() == []  # it can be read
            answer = await client.get("/ready")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
            assert answer.json()["error"]["code"] == "store_unavailable"
            assert str(path) not in answer.text
        clock.advance(FRESH_S)
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("suffix", ["", ".ledger"])
async def test_a_server_whose_file_is_read_only_is_not_ready(tmp_path: Path, suffix: str) -> None:
    path, clock = tmp_path / "data.db", ManualClock()
    async with serving(path, clock) as (stores, client):
        assert (await client.get("/ready")).status_code == 200
        await asyncio.to_thread(make_read_only, f"{path}{suffix}")
        clock.advance(FRESH_S)
        assert await stores.runs.list() == []
        assert (await client.get("/ready")).status_code == 503


async def test_the_readiness_check_leaves_no_data(tmp_path: Path) -> None:
    async with serving(tmp_path / "data.db") as (stores, client):
        assert (await client.get("/ready")).status_code == 200
        assert await stores.cancels.find({PROBE: PROBE}, now_ms=ManualClock().time_ns() // 1_000_000) == {}
        with pytest.raises(KeyError):
            await asyncio.to_thread(stores.ledger.balance, PROBE)


class Counting(MemoryCancelStore):
    """A store that counts what is written, and can be full."""

    times = 0
    is_full = False

    async def put(self, intent: CancelRequest) -> CancelRequest:
        self.times += 1
        if self.is_full:
            raise StoreUnavailable("database or disk is full")
        return await super().put(intent)


async def test_the_readiness_check_writes_at_most_once_a_second() -> None:
    clock = ManualClock()
    async with served(clock=clock) as server, server.client() as anonymous:
        server.stores.cancels = store = Counting()
        answers = await asyncio.gather(*(anonymous.get("/ready") for _ in range(20)))
        assert ({answer.status_code for answer in answers}, store.times) == ({200}, 1)
        store.is_full = True
        assert (await anonymous.get("/ready")).status_code == 200  # what came of it a moment ago
        clock.advance(FRESH_S)
        assert [(await anonymous.get("/ready")).status_code for _ in range(3)] == [503] * 3
        assert store.times == 2


class Silent(MemoryCancelStore):
    """A store that takes what is written, and never says so."""

    async def put(self, intent: CancelRequest) -> Any:
        await asyncio.Event().wait()


async def test_a_write_that_does_not_return_times_out() -> None:
    async with served(ServerSettings(ready_timeout_s=0.01)) as server, server.client() as anonymous:
        server.stores.cancels = Silent()
        answers = await asyncio.gather(*(anonymous.get("/ready") for _ in range(3)))
        assert {answer.status_code for answer in answers} == {503}
