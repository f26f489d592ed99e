"""INV 9 on real databases that are broken from outside while a service uses them, and repaired.

While one is broken, callers get 503 with Retry-After, and no model is called. Once it works again, the same requests
succeed in the same process, once.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import httpx2
import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import StoreUnavailable
from penstock.runtime.billing.usage import Usage
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from penstock.storage.sqlite.file import _FILES, PAGE_SIZE
from penstock.storage.stores import Stores
from tests.nodes.graphs import graph, node, registry
from tests.server.served import SECRETS, TOKENS
from tests.storage.postgres import postgres_server, postgres_url, start_server

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.reliability

CHAT = graph([node("start", "chat-start"), node("A", "agent", model="m", stream=True)], ["start > A"])
COST_NANOS = 20_000
SETTINGS = HostSettings(tick_s=0.05, drain_s=0, daily_usd="1")
Hurt = Callable[[], AbstractAsyncContextManager[None]]


class Held(Model):
    """A model that answers when it is allowed to."""

    max_output_tokens = 64

    def __init__(self) -> None:
        super().__init__("gpt-4o-mini")
        self.requests = self.answered = 0
        self.entered, self.may_answer = asyncio.Event(), asyncio.Event()
        self.may_answer.set()

    async def request(self, request: ModelRequest) -> ModelResponse:
        self.requests += 1
        self.entered.set()
        await self.may_answer.wait()
        self.answered += 1
        usage = Usage.of(cost_usd="0.00002", input_tokens=9, output_tokens=9)
        return ModelResponse(f"answer to {request.messages[-1].text}", usage=usage)


@dataclass
class Service:
    """A chat of ann's, over HTTP."""

    client: httpx2.AsyncClient
    host: RunHost
    stores: Stores
    model: Held
    padding: str = ""

    def word(self, number: int) -> str:
        """The text of a turn."""
        return f"word {number}{self.padding}"

    async def try_to_send(self, number: int) -> httpx2.Response:
        message = {"content": self.word(number), "run_id": f"r{number}"}
        return await self.client.post("/api/chats/c/messages", json=message)

    async def send(self, number: int) -> None:
        """Send it until it is accepted, retrying a little earlier than the server suggests."""
        while (answer := await self.try_to_send(number)).status_code != 200:
            check_refusal(answer)
            await asyncio.sleep(0.05)

    async def answered(self, number: int) -> None:
        """Wait for the answer; a run that the ledger could not record is resumed."""
        while (run := await self.host.wait(f"r{number}")).status != "completed":
            assert (run.status, run.stop_reason) == ("halted", "ledger_unavailable"), run
            with suppress(StoreUnavailable):
                await self.host.resume(run.id)

    async def check(self, turns: int) -> None:
        """Nothing is lost, nothing was done twice."""
        seen = (await self.client.get("/api/chats/c")).json()
        texts = {one["id"]: one["content"] for one in seen["messages"]}
        words = [self.word(number) for number in range(1, turns + 1)]
        assert [texts[id] for id in seen["active"]] == [text for word in words for text in (word, f"answer to {word}")]
        assert self.model.answered == self.model.requests == turns
        runs = [await self.host.get(f"r{number}") for number in range(1, turns + 1)]
        assert [run and run.cost_nanos for run in runs] == [COST_NANOS] * turns
        assert await asyncio.to_thread(self._spent) == turns * COST_NANOS
        assert await asyncio.to_thread(self.stores.ledger.held) == {}

    def _spent(self) -> int:
        balances = [self.stores.ledger.balance(f"run:{id}") for id in self._ids()]
        return sum(one.spent_nanos for one in balances)

    def _ids(self) -> list[str]:
        return [f"r{number}" for number in range(1, self.model.requests + 1)]


def check_refusal(answer: httpx2.Response) -> None:
    assert answer.status_code == 503, answer.text
    assert 1 <= int(answer.headers["Retry-After"]) <= 5
    assert answer.json()["error"]["code"] in ("store_unavailable", "ledger_unavailable")


@asynccontextmanager
async def serving(url: str) -> AsyncIterator[Service]:
    async with await open_stores(url) as stores:
        await stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=0)
        model = Held()
        host = RunHost(stores, executors=registry(), services={"models": {"m": model}}, settings=SETTINGS)
        async with host:
            chats = ChatService(host, stores.chats)
            app = create_app(host, chats, stores, ServerSettings(tokens=TOKENS))
            headers = {"Authorization": f"Bearer {SECRETS['ann']}"}
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
                await client.post("/api/chats", json={"graph_id": "chat", "chat_id": "c"})
                yield Service(client, host, stores, model)


async def broken_and_repaired(url: str, hurt: Hurt, *, is_refused: bool = True, padding: str = "") -> None:
    """One turn before, one requested while the database is broken, one answered while it is, and one after."""
    async with serving(url) as service:
        service.padding = padding
        await service.send(1)
        await service.answered(1)
        async with hurt():
            if is_refused:
                check_refusal(await service.try_to_send(2))
                assert service.model.requests == 1
        await service.send(2)
        await service.answered(2)
        service.model.entered.clear()
        service.model.may_answer.clear()
        await service.send(3)
        await service.model.entered.wait()
        async with hurt():
            service.model.may_answer.set()
            if is_refused:
                check_refusal(await service.try_to_send(4))
        await service.answered(3)
        await service.send(4)
        await service.answered(4)
        await service.check(4)


# SQLite.


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.db"


LOCKER = """
import sqlite3, sys
held = [sqlite3.connect(path, isolation_level=None, timeout=30) for path in sys.argv[1:]]
for one in held:
    one.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
for one in held:
    one.execute("ROLLBACK")
    one.close()
"""


async def test_a_service_whose_files_another_process_has_locked(path: Path) -> None:
    @asynccontextmanager
    async def locked() -> AsyncIterator[None]:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-c", LOCKER, str(path), f"{path}.ledger")
        other = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert other.stdout is not None
        assert await other.stdout.readline() == b"locked\n"
        try:
            yield
        finally:
            await other.communicate(b"")

    await broken_and_repaired(str(path), locked)


async def test_a_service_whose_files_are_moved_away_and_put_back(path: Path) -> None:
    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        names = [path, Path(f"{path}.ledger")]
        for one in names:
            await asyncio.to_thread(one.rename, f"{one}.away")
        try:
            yield
        finally:
            for one in names:
                await asyncio.to_thread(Path(f"{one}.away").rename, one)

    await broken_and_repaired(str(path), away)


@asynccontextmanager
async def on_all_connections(during: str, after: str) -> AsyncIterator[None]:
    """Execute a statement on each open connection: their settings cannot be changed from outside."""
    for statement in (during, after):
        for file in list(_FILES):
            with file._lock:
                if file._connection is not None:
                    file._connection.execute(statement).fetchall()
        if statement is during:
            yield


async def test_a_service_whose_files_may_grow_no_more_as_on_a_full_disk(path: Path) -> None:
    @asynccontextmanager
    async def full() -> AsyncIterator[None]:
        await asyncio.to_thread(_fill, path)
        async with on_all_connections("PRAGMA max_page_count = 1", f"PRAGMA max_page_count = {2**30}"):
            yield

    await broken_and_repaired(str(path), full, padding=", and much more" * 1_000)


def _fill(path: Path) -> None:
    """Use what was freed in the file, so that whatever comes has to make it larger."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=30)) as other:
        other.execute("CREATE TABLE IF NOT EXISTS filler (bytes BLOB)")
        while (free := other.execute("PRAGMA freelist_count").fetchone()[0]) > 0:
            other.execute("INSERT INTO filler VALUES (zeroblob(?))", (free * PAGE_SIZE,))


async def test_a_service_whose_files_may_only_be_read_for_a_while(path: Path) -> None:
    await broken_and_repaired(
        str(path), lambda: on_all_connections("PRAGMA query_only = ON", "PRAGMA query_only = OFF")
    )


async def test_a_service_whose_disk_fails_at_every_write(path: Path) -> None:
    @asynccontextmanager
    async def failing() -> AsyncIterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    await broken_and_repaired(str(path), failing)


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_read_only_files_are_reported_and_used_once_they_are_writable() -> None:
    folder = Path(tempfile.mkdtemp())
    path = folder / "data.db"
    try:
        asyncio.run(_opened(path))
        with _as_reader(folder), pytest.raises(StoreUnavailable):
            asyncio.run(_opened(path))
        asyncio.run(_opened(path))
    finally:
        shutil.rmtree(folder)


async def _opened(path: Path) -> None:
    async with await open_stores(str(path)) as stores:
        await stores.graphs.save("chat", "ann", "chat", CHAT, now_ms=0)


class _as_reader:
    """Root may write anything, so a test that runs as root becomes another user here."""

    def __init__(self, folder: Path) -> None:
        self._paths = [*folder.iterdir(), folder]

    def __enter__(self) -> None:
        for path in self._paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        if os.geteuid() == 0:
            os.seteuid(65_534)

    def __exit__(self, *_: object) -> None:
        if os.getuid() == 0:
            os.seteuid(0)
        for path in self._paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


# PostgreSQL.


async def test_a_service_whose_connections_are_all_cut(postgres_url: str) -> None:
    @asynccontextmanager
    async def cut() -> AsyncIterator[None]:
        connection = await asyncpg.connect(postgres_url)
        others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        await connection.execute(f"{others} AND pid <> pg_backend_pid()")
        await connection.close()
        yield

    await broken_and_repaired(postgres_url, cut, is_refused=False)


@pytest.fixture(scope="module")
def own_server() -> Iterator[Any]:
    """A server of its own, which may be stopped."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-pg-own-"))
    try:
        server = start_server(folder)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no PostgreSQL server could be started: {error}")
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def own_url(own_server: Any) -> str:
    uri: str = own_server.get_uri(database="postgres")
    return uri.replace("postgres:@", "postgres:unused@")


async def test_a_service_whose_database_server_is_stopped_and_started(own_server: Any, own_url: str) -> None:
    @asynccontextmanager
    async def stopped() -> AsyncIterator[None]:
        await asyncio.to_thread(own_server.stop)
        try:
            yield
        finally:
            await asyncio.to_thread(own_server.ensure_postgres_running)

    await broken_and_repaired(own_url, stopped)
