"""Tools of MCP servers over HTTP, through the egress guard: a real server, and hostile ones."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from penstock import CancelledError, Decision, ExecutionContext, ShieldPipeline
from penstock.agents import ToolCall
from penstock.agents.messages import ToolResult
from penstock.containment.safety import ToolCallContext
from penstock.providers.egress import EgressDenied, EgressFailed, EgressPolicy
from penstock.providers.mcp import HttpServer, McpError, McpTools
from tests.mcp_library import IS_RELEASE_1, MCPServer, http_app

Body = dict[str, Any]


def honest() -> Any:
    server = MCPServer("honest")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    async def wait() -> str:
        await asyncio.Event().wait()
        return "never"

    return server


@asynccontextmanager
async def served(server: Any, **options: Any) -> AsyncIterator[int]:
    """The port at which the server answers."""
    config = uvicorn.Config(http_app(server, **options), port=0, log_config=None, lifespan="on")
    config.timeout_graceful_shutdown = 1
    running = uvicorn.Server(config)
    task = asyncio.create_task(running._serve())
    while not running.started:  # noqa: ASYNC110  it has nothing to wait for
        await asyncio.sleep(0.01)
    try:
        yield running.servers[0].sockets[0].getsockname()[1]
    finally:
        running.should_exit = True
        await task


def to(port: int, **options: Any) -> HttpServer:
    policy = EgressPolicy(allow_private=True, ports=[port], **options)
    return HttpServer(f"http://127.0.0.1:{port}/mcp", policy=policy, start_timeout_s=5)


async def run(tools: McpTools, context: ExecutionContext, name: str = "act", **arguments: Any) -> ToolResult:
    return await tools.execute(context, ToolCall("1", name, arguments))


@pytest.mark.parametrize("options", [{}, {"json_response": True}, {"stateless_http": True}], ids=repr)
async def test_a_server_is_used_over_http(options: dict[str, Any]) -> None:
    async with served(honest(), **options) as port, McpTools(to(port)) as tools:
        assert [spec.name for spec in tools.specs] == ["add", "wait"]
        with ExecutionContext() as context:
            assert (await run(tools, context, "add", a=2, b=3)).content == "5"


async def test_a_cancel_reaches_a_call_over_http() -> None:
    async with served(honest()) as port, McpTools(to(port)) as tools:
        with ExecutionContext() as context:
            running = asyncio.ensure_future(run(tools, context, "wait"))
            await asyncio.sleep(0)
            context.abort("enough")
            with pytest.raises(CancelledError):
                await running
        with ExecutionContext() as other:
            assert (await run(tools, other, "add", a=1, b=1)).content == "2"


async def test_an_address_that_the_policy_forbids_is_never_contacted() -> None:
    async with served(honest()) as port:
        for server in (
            HttpServer(f"http://127.0.0.1:{port}/mcp"),
            HttpServer(f"http://127.0.0.1:{port}/mcp", policy=EgressPolicy(ports=[port])),
            HttpServer(f"http://localhost:{port}/mcp", policy=EgressPolicy(allow_private=True, allow_hosts=[])),
        ):
            with pytest.raises(EgressDenied):
                async with McpTools(server):
                    pass


class Refusing:
    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision | None:
        return Decision.HALT


async def test_the_hooks_of_the_run_decide_before_a_call_is_sent() -> None:
    async with served(honest()) as port, McpTools(to(port)) as tools:
        with ExecutionContext(pipeline=ShieldPipeline(egress=Refusing())) as context:
            answer = await run(tools, context, "add", a=1, b=1)
            assert answer.is_error
            assert "hook" in answer.content


# Hostile servers.


class Hostile:
    """Answers as it likes; knows how a session begins."""

    def __init__(self, act: Callable[[Body], bytes | AsyncIterator[bytes]]) -> None:
        self.act = act
        self.methods: list[str] = []
        self.heads: list[str] = []
        self.version: Any = "2025-06-18"
        self.cancelled = asyncio.Event()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
            request = json.loads(await reader.readexactly(length) or b"{}")
            self.heads.append(head)
            self.methods.append(request.get("method") or head.partition(" ")[0])
            answer = self.answer(request)
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                async for piece in answer:
                    writer.write(piece)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    def answer(self, request: Body) -> bytes | AsyncIterator[bytes]:
        method, id = request.get("method"), request.get("id")
        if method == "initialize":
            info = {"name": "hostile", "version": "1"}
            return result(id, {"protocolVersion": self.version, "capabilities": {"tools": {}}, "serverInfo": info})
        if method == "tools/list":
            return result(id, {"tools": [{"name": "act", "inputSchema": {"type": "object"}}]})
        if method == "tools/call":
            return self.act(request)
        if method == "notifications/cancelled":
            self.cancelled.set()
        if id is None:
            return http(b"", "202 Accepted")
        return http(json.dumps({"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": "no"}}).encode())


def http(body: bytes, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n{more}\r\n"
    )
    return head.encode() + body


def result(id: object, value: object) -> bytes:
    return http(json.dumps({"jsonrpc": "2.0", "id": id, "result": value}).encode(), more="mcp-session-id: s\r\n")


def text(content: str) -> Body:
    return {"content": [{"type": "text", "text": content}]}


@asynccontextmanager
async def hostile(act: Callable[[Body], bytes | AsyncIterator[bytes]]) -> AsyncIterator[Hostile]:
    made = Hostile(act)
    listening = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = listening.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listening.close()
        await listening.wait_closed()


async def endless(kind: str) -> AsyncIterator[bytes]:
    yield f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode()
    while True:
        yield b"data: " + b"x" * 65_536
        await asyncio.sleep(0)


async def silent() -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    while True:
        yield b": still there\n\n"
        await asyncio.sleep(0.01)


NO_ANSWERS: dict[str, Callable[[Body], bytes | AsyncIterator[bytes]]] = {
    "large": lambda request: result(request["id"], text("x" * 50_000_000)),
    "endless": lambda request: endless("application/json"),
    "endless events": lambda request: endless("text/event-stream"),
    "silent": lambda request: silent(),
    "closes": lambda request: b"",
    "garbage": lambda request: http(b"garbage"),
    "garbage events": lambda request: http(b"garbage", kind="text/event-stream"),
    "asks to come back": lambda request: http(b"id: 1\nretry: 1\ndata:\n\n", kind="text/event-stream"),
    "html": lambda request: http(b"<html>", kind="text/html"),
    "500": lambda request: http(b"", "500 Broken"),
    "202": lambda request: http(b"", "202 Accepted"),
    "redirect": lambda request: http(b"", "307 Moved", more="location: http://169.254.169.254/\r\n"),
}


@pytest.mark.parametrize("act", NO_ANSWERS.values(), ids=NO_ANSWERS)
async def test_a_malformed_answer_is_returned_to_the_model_as_an_error(act: Callable[[Body], Any]) -> None:
    async with hostile(act) as server, McpTools(to(server.port), timeout_s=1) as tools:
        with ExecutionContext() as context:
            answer = await run(tools, context)
        assert answer.is_error
        assert len(answer.content) < 3_000
    assert server.methods.count("tools/call") == 1
    assert "get" not in server.methods


async def test_an_answer_to_another_request_is_no_answer() -> None:
    def act(request: Body) -> bytes:
        return result("another", text("not requested"))

    # Release 2 of the library waits for another answer.
    timeout_s = None if IS_RELEASE_1 else 0.2
    async with hostile(act) as server, McpTools(to(server.port), timeout_s=timeout_s) as tools:
        with ExecutionContext() as context:
            answer = await run(tools, context)
        assert answer.is_error
        assert "not requested" not in answer.content


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_a_call_that_fails_fails_alone_and_says_why(kind: str) -> None:
    def act(request: Body) -> bytes:
        size = request["params"]["arguments"]["size"]
        answer = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": text("x" * size)})
        return http((answer if kind == "application/json" else f"data: {answer}\n\n").encode(), kind=kind)

    async with hostile(act) as server, McpTools(to(server.port, max_bytes=100_000)) as tools:
        with ExecutionContext() as context:
            sizes = [1, 1_000_000, 2, 1_000_000, 3]
            answers = await asyncio.gather(*(run(tools, context, size=size) for size in sizes))
        assert [len(answer.content) for answer in answers if not answer.is_error] == [1, 2, 3]
        problems = [answer.content for answer in answers if answer.is_error]
        events_in_release_2 = "ended without a response"
        assert all(re.search(f"larger than 100,000 bytes|{events_in_release_2}", why) for why in problems)


@pytest.mark.parametrize("status", ["500 Broken", "404 Gone", "401 Who", "202 Accepted"])
async def test_an_error_status_fails_its_call_and_no_other(status: str) -> None:
    refused = asyncio.Event()

    def act(request: Body) -> bytes | AsyncIterator[bytes]:
        return http(b"", status) if request["params"]["arguments"]["refuse"] else later(request)

    async def later(request: Body) -> AsyncIterator[bytes]:
        await refused.wait()
        yield result(request["id"], text("done"))

    async with hostile(act) as server, McpTools(to(server.port)) as tools:
        with ExecutionContext() as context:
            running = asyncio.ensure_future(run(tools, context, refuse=False))
            assert (await run(tools, context, refuse=True)).is_error
            refused.set()
            assert (await running).content == "done"


async def test_a_cancel_is_sent_over_http() -> None:
    called = asyncio.Event()

    async def never(request: Body) -> AsyncIterator[bytes]:
        called.set()
        async for piece in silent():
            yield piece

    async with hostile(never) as server, McpTools(to(server.port)) as tools:
        with ExecutionContext() as context:
            running = asyncio.ensure_future(run(tools, context))
            await called.wait()
            context.abort("enough")
            with pytest.raises(CancelledError):
                await running
        await server.cancelled.wait()


async def test_requests_name_their_session_and_it_is_ended() -> None:
    async with hostile(lambda request: result(request["id"], text("done"))) as server:
        async with McpTools(to(server.port)) as tools:
            with ExecutionContext() as context:
                assert (await run(tools, context)).content == "done"
        begun = server.methods.index("notifications/initialized")
        assert server.methods[begun:] == ["notifications/initialized", "tools/list", "tools/call", "delete"]
        for head in server.heads[begun:]:
            assert "\r\nmcp-session-id: s\r\n" in head
            assert "\r\nmcp-protocol-version: 20" in head


@pytest.mark.parametrize("version", ["2025-06-18\r\nx: y", "é", 7, None])
async def test_a_version_that_is_none_is_refused_when_the_server_is_opened(version: Any) -> None:
    async with hostile(lambda request: b"") as server:
        server.version = version
        with pytest.raises(McpError):
            async with McpTools(to(server.port)):
                pass
        assert "x: y" not in "".join(server.heads)


async def test_the_error_for_an_unreachable_server_names_it() -> None:
    async with hostile(lambda request: b"") as gone:
        port = gone.port
    with pytest.raises(EgressFailed):
        async with McpTools(to(port)):
            pass
