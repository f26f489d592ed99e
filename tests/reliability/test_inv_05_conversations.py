"""INV 5: a server that has had thousands of conversations keeps none of them in memory."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock import notify
from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse, Usage
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors
from penstock.server.app import create_app
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from tests.server.served import SECRETS, TOKENS
from tests.soak import scaled

pytestmark = pytest.mark.reliability

CLIENTS = 8
WARM_UP = 400
CONVERSATIONS = scaled(800, soak=20_000)
TALK = {
    "nodes": [
        {"id": "start", "type": "chat-start", "position": {"x": 0, "y": 0}, "data": {}},
        {"id": "agent", "type": "agent", "position": {"x": 1, "y": 0}, "data": {"model": "words", "stream": True}},
    ],
    "edges": [{"id": "e", "source": "start", "target": "agent", "data": {"channel": "flow"}}],
}


class Words(Model):
    """Answers in a few words, with the loop in between."""

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[str | ToolCall | Usage | ModelResponse]:
        for word in ("a ", "few ", "words"):
            await asyncio.sleep(0)
            yield word
        yield ModelResponse("a few words", (), Usage(5, 3), "stop", self.name)


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[httpx2.AsyncClient]:
    async with await open_stores(f"sqlite:///{folder}/runs.db") as stores:
        await stores.graphs.save("talk", "root", "talk", TALK, now_ms=0)
        parts: dict[str, Any] = {"executors": executors(), "services": {"models": {"words": Words("words")}}}
        async with RunHost(stores, **parts, settings=HostSettings(tick_s=0.05)) as host:
            settings = ServerSettings(tokens=TOKENS, retry_grace_s=0)  # else the answers of the last 2 s are kept
            app = create_app(host, ChatService(host, stores.chats), stores, settings)
            transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642") as client:
                yield client


async def converse(client: httpx2.AsyncClient, count: int) -> None:
    """So many new conversations by several clients, every second one streamed."""
    left = iter(range(count))

    async def one(name: str) -> None:
        for number in left:
            body = {
                "model": "talk",
                "messages": [{"role": "user", "content": f"question {number}"}],
                "stream": number % 2 == 0,
            }
            headers = {"Authorization": f"Bearer {SECRETS[name]}"}
            answer = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert (answer.status_code, "words" in answer.text) == (200, True)

    await asyncio.gather(*(one(("ann", "bob")[number % 2]) for number in range(CLIENTS)))


def blocks() -> int:
    """Blocks of memory that objects of the interpreter have, without garbage."""
    gc.collect()
    return sys.getallocatedblocks()


@pytest.mark.timeout(300 if CONVERSATIONS < 5_000 else 3_600)
async def test_a_conversation_leaves_no_object_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "MAX_TOPICS", 50)  # the one cache that a few hundred runs would not fill
    async with serving(tmp_path) as client:
        await converse(client, WARM_UP)
        before = blocks()
        await converse(client, CONVERSATIONS)
        assert blocks() - before < 2 * CONVERSATIONS  # the record of a run alone has ten


async def test_what_a_conversation_needed_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """A server collects garbage rarely, and would have the cycles of thousands of runs in memory by then."""
    async with serving(tmp_path) as client:
        await converse(client, 50)
        gc.collect()
        gc.disable()
        try:
            await converse(client, 100)
            assert gc.collect() < 100
        finally:
            gc.enable()
