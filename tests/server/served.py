"""A whole server for tests: real stores in memory, a real host, real chats, and clients that ask it.

Graphs here run on executors of a few lines, so that a test decides when a node goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
from fastapi import FastAPI

from penstock.chat.service import ChatService
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.hosting.host import HostSettings, RunHost
from penstock.kernel.executor import DataValue, ExecutionResult
from penstock.nodes import executors as standard_executors
from penstock.runtime.billing.prices import PriceBook
from penstock.server.app import create_app, state_of
from penstock.server.auth import Token
from penstock.server.serve import ServerProcess, listen
from penstock.server.settings import ServerSettings
from penstock.server.ui_files import NO_UI, UiFiles
from penstock.storage.memory import MemoryStores

SECRETS = {name: f"canary-{name}-0123456789abcdef" for name in ("ann", "bob", "vera", "root", "past")}
TOKENS = (
    Token.of("ann", "user", SECRETS["ann"]),
    Token.of("bob", "user", SECRETS["bob"]),
    Token.of("vera", "viewer", SECRETS["vera"]),
    Token.of("root", "admin", SECRETS["root"]),
    Token.of("past", "admin", SECRETS["past"], "2020-12-31"),
)


class Gate:
    """A node that waits until the test opens it, and then gives what came in."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.entered = asyncio.Event()

    async def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> ExecutionResult:
        self.entered.set()
        await self.opened.wait()
        return ExecutionResult(outputs={"output": inputs.get("input", DataValue("text", "open"))})


class Echo:
    """A node that gives its text, or what came in."""

    async def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: Any) -> ExecutionResult:
        given = inputs.get("input", DataValue("text", data.get("text", "echo")))
        return ExecutionResult(outputs={"output": given})


def node(id: str, type: str, **data: Any) -> dict[str, Any]:
    return {"id": id, "type": type, "position": {"x": 0, "y": 0}, "data": data}


def edge(source: str, target: str) -> dict[str, Any]:
    return {"id": f"{source}-{target}", "source": source, "target": target, "data": {"channel": "flow"}}


ECHO = {"nodes": [node("in", "input"), node("out", "output")], "edges": [edge("in", "out")]}
GATE = {
    "nodes": [node("in", "input"), node("gate", "gate"), node("out", "output")],
    "edges": [edge("in", "gate"), edge("gate", "out")],
}
CHAT = {
    "nodes": [node("start", "chat-start"), node("echo", "echo"), node("out", "output")],
    "edges": [edge("start", "echo"), edge("echo", "out")],
}
ASK = {
    "nodes": [node("in", "input"), node("ask", "approval", question="May it?"), node("out", "output")],
    "edges": [edge("in", "ask"), {**edge("ask", "out"), "sourceHandle": "approved"}],
}


@dataclass
class Served:
    """Everything behind one server, and clients by the name of their user."""

    app: FastAPI
    host: RunHost
    chats: ChatService
    stores: MemoryStores
    gate: Gate
    _clients: dict[str, httpx2.AsyncClient] = field(default_factory=dict)

    def client(self, name: str | None = None, **headers: str) -> httpx2.AsyncClient:
        """A client with that user's token; without a name, with none."""
        if name is not None:
            headers["Authorization"] = f"Bearer {SECRETS[name]}"
        transport = httpx2.ASGITransport(app=self.app)  # type: ignore[arg-type]
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost:8642", headers=headers)

    async def save(self, graph_id: str, document: Mapping[str, Any], owner: str = "ann") -> None:
        await self.stores.graphs.save(graph_id, owner, graph_id, document, now_ms=1)


@asynccontextmanager
async def served(
    settings: ServerSettings | None = None,
    *,
    host_settings: HostSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    prices: PriceBook | None = None,
    ui: UiFiles = NO_UI,
    gateway: Any = None,
    **services: Any,
) -> AsyncGenerator[Served, None]:
    """A server with tokens for ann and bob (users), vera (viewer), root (admin) and past (an admin's that is over),
    unless settings say otherwise.
    """
    gate = Gate()
    executors = {**await asyncio.to_thread(standard_executors), "gate": gate, "echo": Echo()}
    stores = MemoryStores()
    settings = settings or ServerSettings(tokens=TOKENS)
    quick = host_settings or HostSettings(tick_s=0.05, drain_s=0)
    async with RunHost(stores, executors=executors, services=services, settings=quick, prices=prices) as host:
        chats = ChatService(host, stores.chats)
        app = create_app(host, chats, stores, settings, clock=clock, ui=ui, gateway=gateway)
        yield Served(app, host, chats, stores, gate)


@asynccontextmanager
async def running(
    app: FastAPI, listener: socket.socket | None = None, **given: Any
) -> AsyncGenerator[ServerProcess, None]:
    """The app on a real socket of this machine, on the test's own loop, until the block ends."""
    listener = listener or listen(ServerSettings(port=0))
    server = ServerProcess(app, **given)
    serving = asyncio.ensure_future(server.serve([listener]))
    try:
        await eventually(lambda: server.started or serving.done())
        yield server
    finally:
        server.stop()
        await serving
        listener.close()


@asynccontextmanager
async def listening(app: FastAPI, **given: Any) -> AsyncGenerator[tuple[str, int], None]:
    """The app as `running` has it, by its address."""
    listener = listen(ServerSettings(port=0))
    address = listener.getsockname()
    async with running(app, listener, **given):
        yield address


async def eventually(is_so: Callable[[], bool]) -> None:
    """Let everybody have their turn until it is so; the test's own timeout ends what never is."""
    for _ in itertools.count():
        if is_so():
            return
        await asyncio.sleep(0)


@dataclass
class Wire:
    """A client on a bare socket: it sends exactly the given bytes, and reads only on demand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, method: str, target: str, body: bytes = b"", **headers: str) -> None:
        lines = {"Host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
        if body:
            lines.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self.writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body)

    async def status(self) -> int:
        """The status of the next answer; its headers are read, too."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def until(self, text: bytes) -> bytes:
        return await self.reader.readuntil(text)


@asynccontextmanager
async def wire(address: tuple[str, int], limit: int = 2**16, source: str = "127.0.0.1") -> AsyncGenerator[Wire, None]:
    reader, writer = await asyncio.open_connection(*address, limit=limit, local_addr=(source, 0))
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def happened(server: Served, run_id: str, type: str) -> Mapping[str, Any]:
    """Wait until the run has emitted such an event; its data."""
    async with aclosing(server.host.events(run_id)) as events:
        async for event in events:
            if event.type == type:
                return event.data
    raise AssertionError(f"the run ended without {type}")


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events in the text of a stream, as a browser would read them."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" in fields:
            found.append({**fields, "data": json.loads(fields["data"])})
    return found


def parts(app: FastAPI) -> Any:
    return state_of(app)
