"""Tokens that end: between two requests, and while an answer is going out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.clock import Clock
from penstock.server.auth import Token
from penstock.server.guards import AuthGuard
from penstock.server.settings import ServerSettings
from penstock.testing import ManualClock, SimLoop, explore
from tests.mcp_library import MCPError, over_http
from tests.server.served import (
    ECHO,
    GATE,
    SECRETS,
    TOKENS,
    eventually,
    listening,
    node,
    parse_events,
    served,
    wire,
)
from tests.server.served import edge as flow

HOUR_S = 3_600
ENDS = "2026-01-01T01:00:00Z"
"""An hour after a manual clock begins."""
OLD, NEW = SECRETS["ann"], "another-secret-of-ann"
ROTATED = (Token.of("ann", "user", OLD, ENDS), Token.of("ann", "user", NEW), *TOKENS[1:])
SETTINGS = ServerSettings(tokens=ROTATED, heartbeat_s=0.01)
MESSAGE = f"this token was valid until {ENDS}; ask the operator of this server for a new one"
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
MCP = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-06-18"}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


async def fetch(app: ASGIApp, path: str, secret: str) -> httpx2.Response:
    transport = httpx2.ASGITransport(app=app)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.get(path, headers={"Authorization": f"Bearer {secret}"})


async def test_two_authorization_headers_are_refused(clock: ManualClock) -> None:
    gate = AuthGuard(fine, SETTINGS, clock=clock)
    transport = httpx2.ASGITransport(app=gate)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for secrets in ((OLD, SECRETS["root"]), (SECRETS["root"], OLD), (OLD, OLD), (OLD, "nonsense")):
            headers = [("Authorization", f"Bearer {secret}") for secret in secrets]
            answer = await client.get("/api/runs", headers=headers)
            assert answer.status_code == 401, answer.text
            assert answer.json()["error"]["code"] == "unauthorized"


# Between requests


async def test_a_token_is_accepted_at_its_last_nanosecond_and_not_after(clock: ManualClock) -> None:
    gate = AuthGuard(fine, SETTINGS, clock=clock)
    clock.advance(HOUR_S)
    assert (await fetch(gate, "/api/runs", OLD)).status_code == 200
    clock.advance_ns(1)
    assert (await fetch(gate, "/api/runs", OLD)).status_code == 401
    clock.jump_wall(-1)  # the time of day counts: one that is set back is believed
    assert (await fetch(gate, "/api/runs", OLD)).status_code == 200


async def test_only_the_right_secret_reveals_when_a_token_expired(clock: ManualClock) -> None:
    clock.advance(HOUR_S + 1)
    gate = AuthGuard(fine, SETTINGS, clock=clock)
    for path in ("/api/runs", "/nowhere"):
        refused = await fetch(gate, path, OLD)
        assert (refused.status_code, refused.json()) == (401, {"error": {"code": "token_expired", "message": MESSAGE}})
        assert refused.headers["www-authenticate"] == f'Bearer error="invalid_token", error_description="{MESSAGE}"'
        wrong = await fetch(gate, path, f"{OLD}x")
        assert (wrong.json()["error"]["code"], ENDS in wrong.text) == ("token_unknown", False)


async def test_an_expired_token_sees_open_routes_as_an_anonymous_client_does() -> None:
    async with served() as server, server.client("past") as past, server.client("ann") as ann:
        await server.save("echo-of-ann", ECHO)
        assert (await past.get("/health")).status_code == 200
        assert "echo-of-ann" in (await ann.get("/")).text
        page = await past.get("/")
        assert (page.status_code, "echo-of-ann" in page.text) == (200, False)


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("GET", "/api/me", None, {"code": "token_expired", "message": MESSAGE}),
        (
            "GET",
            "/v1/models",
            None,
            {"message": MESSAGE, "type": "authentication_error", "param": None, "code": "token_expired"},
        ),
        ("POST", "/mcp", HELLO, {"code": "token_expired", "message": MESSAGE}),
    ],
)
async def test_a_token_expires_between_two_requests_in_every_api(
    clock: ManualClock, method: str, path: str, body: Any, error: Any
) -> None:
    async with (
        served(SETTINGS, clock=clock) as server,
        listening(server.app) as (host, port),
        httpx2.AsyncClient(base_url=f"http://{host}:{port}", headers=MCP) as client,
    ):
        for secret, moved_s, status in ((OLD, HOUR_S, 200), (OLD, 1, 200), (OLD, 0, 401), (NEW, 0, 200)):
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.request(method, path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 401:
                assert answer.json() == {"error": error}
                assert 'error="invalid_token"' in answer.headers["www-authenticate"]
            clock.advance(moved_s)


async def me(client: httpx2.AsyncClient) -> dict[str, Any]:
    """Who the server takes this client for, without the limits of the runs it may start."""
    answer = (await client.get("/api/me")).json()
    return {fact: answer[fact] for fact in ("name", "role", "until")}


async def test_two_tokens_of_a_user_are_the_same_user(clock: ManualClock) -> None:
    async with served(SETTINGS, clock=clock) as server, server.client("ann") as old:
        new = server.client(Authorization=f"Bearer {NEW}")
        await server.save("echo", ECHO)
        run = (await old.post("/api/runs", json={"graph_id": "echo"})).json()
        assert await me(old) == {"name": "ann", "role": "user", "until": ENDS}
        assert await me(new) == {"name": "ann", "role": "user", "until": None}
        clock.advance(HOUR_S + 1)
        assert (await old.get(f"/api/runs/{run['id']}")).status_code == 401
        assert (await new.get(f"/api/runs/{run['id']}")).status_code == 200
        await new.aclose()


async def test_an_mcp_session_continues_with_its_users_new_token(clock: ManualClock) -> None:
    async with (
        served(SETTINGS, clock=clock) as server,
        listening(server.app) as (host, port),
        httpx2.AsyncClient(base_url=f"http://{host}:{port}", headers=MCP) as client,
    ):
        old, new = ({"Authorization": f"Bearer {secret}"} for secret in (OLD, NEW))
        session = (await client.post("/mcp", json=HELLO, headers=old)).headers["mcp-session-id"]
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        clock.advance(HOUR_S + 1)
        for headers, status in ((old, 401), (new, 200)):
            answer = await client.post("/mcp", json=ping, headers={**headers, "Mcp-Session-Id": session})
            assert answer.status_code == status


async def test_without_tokens_nothing_expires() -> None:
    async with served(ServerSettings()) as server, server.client() as local:
        assert await me(local) == {"name": "local", "role": "admin", "until": None}


# While an answer goes out

TALK = {
    "nodes": [node("start", "chat-start"), node("gate", "gate"), node("out", "output")],
    "edges": [flow("start", "gate"), flow("gate", "out")],
}
SAY = {"content": "hi"}
COMPLETE = {"model": "talk", "messages": [{"role": "user", "content": "hi"}], "stream": True}
GO_ON = {**COMPLETE, "penstock": {"on_disconnect": "continue"}}
RESPOND = {"model": "talk", "input": "hi", "stream": True}


@pytest.mark.parametrize(
    ("path", "body", "becomes"),
    [
        ("/api/runs?stream=true", {"graph_id": "gate"}, "completed"),
        ("/api/agents/talk/chat?stream=true", SAY, "completed"),
        ("/api/agents/talk/chat?stream=true&on_leave=cancel", SAY, "cancelled"),
        ("/v1/chat/completions", COMPLETE, "cancelled"),
        ("/v1/chat/completions", GO_ON, "completed"),
        ("/v1/responses", RESPOND, "cancelled"),
    ],
)
async def test_a_stream_ends_with_its_token_like_a_client_disconnect(
    clock: ManualClock, path: str, body: Any, becomes: str
) -> None:
    async with served(SETTINGS, clock=clock) as server, listening(server.app) as address, wire(address) as ann:
        await server.save("gate", GATE)
        await server.save("talk", TALK)
        await begun(ann, "POST", path, body)
        await server.gate.entered.wait()
        clock.advance(HOUR_S + 1)
        assert (await ann.until(b"0\r\n\r\n")).endswith(b"\n\n\r\n0\r\n\r\n")  # between two events, and properly
        (run,) = await server.stores.runs.list()
        if becomes == "completed":
            await eventually(lambda: server.app.state.server.metrics.open_streams == 0)
            server.gate.opened.set()
        assert (await server.host.wait(run.id)).status == becomes
        ann.send("GET", "/api/me", Authorization=f"Bearer {OLD}")
        assert await ann.status() == 401  # the connection is as good as new; the token is not


async def test_a_stream_is_resumed_with_a_new_token_where_the_old_one_expired(clock: ManualClock) -> None:
    async with served(SETTINGS, clock=clock) as server, server.client("ann") as old:
        new = server.client(Authorization=f"Bearer {NEW}")
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate")
        path = f"/api/runs/{run.id}/events"
        await server.gate.entered.wait()
        log = server.host._runs.by_id[run.id].log
        assert log is not None
        await log.flush()  # so that the stream has something to read when it begins
        following = asyncio.ensure_future(old.get(path))
        await eventually(lambda: server.app.state.server.metrics.open_streams == 1)
        for _ in range(100):
            await asyncio.sleep(0)
        clock.advance(HOUR_S + 1)
        first = parse_events((await following).text)
        assert (await old.get(path, headers={"Last-Event-ID": first[-1]["id"]})).status_code == 401
        server.gate.opened.set()
        rest = parse_events((await new.get(path, headers={"Last-Event-ID": first[-1]["id"]})).text)
        assert [int(one["id"]) for one in (*first, *rest)] == list(range(1, len(first) + len(rest) + 1))
        assert rest[-1]["event"] == "run.completed"
        await new.aclose()


async def test_the_listening_stream_of_an_mcp_client_ends_with_its_token(clock: ManualClock) -> None:
    async with (
        served(SETTINGS, clock=clock) as server,
        listening(server.app) as address,
        httpx2.AsyncClient(base_url=f"http://{address[0]}:{address[1]}", headers=MCP) as client,
        wire(address) as listener,
    ):
        token = {"Authorization": f"Bearer {OLD}"}
        session = (await client.post("/mcp", json=HELLO, headers=token)).headers["mcp-session-id"]
        listener.send("GET", "/mcp", **token, Accept="text/event-stream", Mcp_Session_Id=session)
        assert await listener.status() == 200
        clock.advance(HOUR_S + 1)
        assert await listener.until(b"0\r\n\r\n") == b"0\r\n\r\n"


@pytest.mark.parametrize(("mode", "becomes"), [("legacy", "completed"), ("auto", "cancelled")])
async def test_an_mcp_call_ends_with_its_token_and_cancels_its_run(clock: ManualClock, mode: str, becomes: str) -> None:
    entered = asyncio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        if message == "gate started":
            entered.set()

    async with (
        served(SETTINGS, clock=clock) as server,
        listening(server.app) as (host, port),
        over_http(f"http://{host}:{port}/mcp", {"Authorization": f"Bearer {OLD}"}, mode) as client,
    ):
        await server.save("gate", GATE)
        calling = asyncio.ensure_future(client.call_tool("gate", {"input": "x"}, progress_callback=on_progress))
        await entered.wait()
        clock.advance(HOUR_S + 1)
        with pytest.raises(MCPError, match="ended without a response"):
            await calling
        if becomes == "completed":
            server.gate.opened.set()
        (run,) = await server.stores.runs.list()
        assert (await server.host.wait(run.id)).status == becomes


async def test_the_streams_of_other_users_continue(clock: ManualClock) -> None:
    async with served(SETTINGS, clock=clock) as server, listening(server.app) as address:
        await server.save("gate", GATE)
        async with wire(address) as old, wire(address) as new:
            for one, secret in ((old, OLD), (new, NEW)):
                await begun(one, "POST", "/api/runs?stream=true", {"graph_id": "gate"}, secret)
            clock.advance(HOUR_S + 1)
            await old.until(b"0\r\n\r\n")
            server.gate.opened.set()
            assert b"run.completed" in await new.until(b"0\r\n\r\n")


async def begun(client: Any, method: str, path: str, body: Any, secret: str = OLD) -> None:
    content = json.dumps(body).encode()
    client.send(method, path, content, Authorization=f"Bearer {secret}", Content_Type="application/json")
    assert await client.status() == 200


class Looked(ManualClock):
    """A manual clock that knows how often it was looked at."""

    looks = 0

    def time_ns(self) -> int:
        self.looks += 1
        return super().time_ns()


class Caller:
    """The other side of an ASGI connection, by hand: what it says is put, what it hears is kept."""

    def __init__(self, *incoming: Message) -> None:
        self.incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.heard: list[Message] = []
        for message in incoming:
            self.incoming.put_nowait(message)

    async def ask(self, app: ASGIApp, clock: Clock, settings: ServerSettings = SETTINGS) -> None:
        headers = [(b"authorization", f"Bearer {OLD}".encode())]
        scope: Scope = {"type": "http", "method": "GET", "path": "/api/runs", "headers": headers}
        await AuthGuard(app, settings, clock=clock)(scope, self.incoming.get, self.send)

    async def send(self, message: Message) -> None:
        self.heard.append(message)


ALL = {"type": "http.request", "body": b"", "more_body": False}
LEAVES = {"type": "http.disconnect"}
START = {"type": "http.response.start", "status": 200, "headers": []}
LAST = {"type": "http.response.body", "body": b"", "more_body": False}


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    """Begin to answer, and leave it at that when the client leaves."""
    await send(START)
    await until_left(receive)


@asynccontextmanager
async def under_way(client: Caller, app: ASGIApp, clock: Clock) -> AsyncGenerator[asyncio.Task[None], None]:
    asking = asyncio.ensure_future(client.ask(app, clock))
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.wait({asking})


async def test_a_response_that_begins_after_the_token_expired_is_sent() -> None:
    clock, client, done = Looked(), Caller(ALL), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(until_left(receive))
        await done.wait()
        assert not leaving.done()
        leaving.cancel()
        await asyncio.wait({leaving})
        await fine(scope, receive, send)

    async with under_way(client, slow, clock) as asking:
        await eventually(lambda: clock.looks > 1)
        clock.advance(HOUR_S + 1)
        seen = clock.looks
        await eventually(lambda: clock.looks > seen + 3)
        done.set()
        await asking
    assert client.heard[-1]["body"] == b"fine"


async def test_a_body_in_transit_when_the_token_expires_is_received_completely() -> None:
    clock, client = Looked(), Caller({"type": "http.request", "body": b"one ", "more_body": True})

    async def echoing(scope: Scope, receive: Receive, send: Send) -> None:
        pieces = [(await receive())["body"] for _ in range(2)]
        await send(START)
        await send({**LAST, "body": b"".join(pieces)})

    async with under_way(client, echoing, clock) as asking:
        await eventually(client.incoming.empty)
        clock.advance(HOUR_S + 1)
        seen = clock.looks
        await eventually(lambda: clock.looks > seen + 3)
        client.incoming.put_nowait({"type": "http.request", "body": b"two", "more_body": False})
        await asking
    assert client.heard[-1]["body"] == b"one two"


async def test_a_client_that_disconnects_before_expiry_is_sent_nothing_more(clock: ManualClock) -> None:
    client = Caller(ALL, LEAVES)
    await client.ask(streaming, clock)
    assert client.heard == [START]


async def test_a_complete_response_is_not_completed_again(clock: ManualClock) -> None:
    async def ends(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await until_left(receive)
        await send(LAST)

    client = Caller(ALL)
    async with under_way(client, ends, clock) as asking:
        await eventually(lambda: bool(client.heard))
        clock.advance(HOUR_S + 1)
        await asking
    assert client.heard == [START, LAST]


async def test_a_stream_is_cancelled_with_its_request(clock: ManualClock) -> None:
    client = Caller(ALL)
    async with under_way(client, streaming, clock) as asking:
        await eventually(lambda: bool(client.heard))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    assert client.heard == [START]


@pytest.mark.parametrize("heartbeat_s", [0.7, 15.0, 86_400.0])
def test_a_stream_ends_when_its_token_expires_in_any_order_of_events(heartbeat_s: float) -> None:
    settings = ServerSettings(tokens=ROTATED, heartbeat_s=heartbeat_s)

    async def story(seed: int) -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        client, began_ns = Caller(ALL), loop.clock.monotonic_ns()
        await client.ask(streaming, loop.clock, settings)
        return loop.clock.monotonic_ns() - began_ns, len(client.heard)

    for took_ns, heard in explore(story, schedules=20):
        assert took_ns == pytest.approx(HOUR_S * 1_000_000_000, abs=1_000)
        assert heard == 2
