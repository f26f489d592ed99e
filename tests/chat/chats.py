"""A chat service on a real host with stores in memory, and models that wait where a test wants them to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.agents.scripted import ScriptedModel
from penstock.chat.service import ChatService
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.hosting.host import RunHost
from penstock.hosting.limits import HostSettings
from penstock.hosting.ports import RunRecord
from penstock.kernel.executor import DataValue
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop
from tests.nodes.graphs import Json, graph, node, registry

ANN = "ann"
ALONE = graph([node("start", "chat-start"), node("A", "agent", model="A", stream=True)], ["start > A"])
"""A graph that is one agent."""


ECHOING = graph([node("start", "chat-start"), node("echo", "echo")], ["start > echo"])
"""A graph that repeats its input, after a while."""


class Echo:
    """Answers after a while. It calls no model: a model's cost is held on a thread, which a seed does not control."""

    async def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
        await asyncio.sleep(0.1)
        return DataValue("text", f"answer to {inputs['input'].value}")


def loop() -> SimLoop:
    """The simulated loop that a test runs on."""
    running = asyncio.get_running_loop()
    assert isinstance(running, SimLoop)
    return running


class WatchedHost(RunHost):
    """A host that also records the arguments of each submission."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.submitted: list[dict[str, Any]] = []

    async def submit(self, *, also: Any = None, **arguments: Any) -> RunRecord:
        self.submitted.append(arguments)
        return await super().submit(also=also, **arguments)


class Histories:
    """A model that answers with a number, and records the messages of each request."""

    def __init__(self) -> None:
        self.requests: list[list[tuple[str, str]]] = []
        self.model = ScriptedModel(self._answer)

    def _answer(self, request: ModelRequest) -> str:
        self.requests.append([(one.role, one.text) for one in request.messages])
        return f"answer {len(self.requests)}"


class Slow(Model):
    """A model that says its pieces, and the rest when it may."""

    def __init__(self, *pieces: str, then: str = " whole") -> None:
        super().__init__("slow")
        self.pieces = pieces
        self.then = then
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.calls = 0

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        self.calls += 1
        for piece in self.pieces:
            yield piece
        self.begun.set()
        await self.may_end.wait()
        yield self.then
        yield ModelResponse("".join(self.pieces) + self.then)


@dataclass
class Chats:
    """The parts, for tests to reach into."""

    service: ChatService
    host: WatchedHost
    stores: Any
    chat_id: str = ""
    more: Json = field(default_factory=dict)


@asynccontextmanager
async def hosted(
    stores: Any,
    models: Json | None = None,
    *,
    settings: HostSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    **services: Any,
) -> AsyncIterator[Chats]:
    """A service on a host over these stores."""
    host = WatchedHost(
        stores,
        executors=registry(),
        services={"models": models or {}, **services},
        settings=settings or HostSettings(tick_s=0.05, drain_s=0),
    )
    service = ChatService(host, stores.chats, clock=clock)
    async with host:
        yield Chats(service, host, stores)


@asynccontextmanager
async def chatting(
    document: Json = ALONE, models: Json | None = None, *, stores: Any = None, **options: Any
) -> AsyncIterator[Chats]:
    """The same with a chat of ann's with one graph."""
    kept = stores or MemoryStores()
    await kept.graphs.save("g", ANN, "g", document, now_ms=0)
    async with hosted(kept, models, **options) as chats:
        chats.chat_id = (await chats.service.create_chat(owner=ANN, graph_id="g")).id
        yield chats
