"""Sessions of MCP: how many there may be, which one gives way, and that no user can lock out others."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.server.auth import User
from penstock.server.errors import ApiError
from penstock.server.graph_check import GraphChecker
from penstock.server.mcp import McpEndpoint, create_mcp
from penstock.server.mcp.sessions import Session, Sessions
from penstock.server.settings import ServerSettings
from penstock.storage.memory import MemoryStores
from penstock.testing import sim_run
from tests.mcp_library import IS_RELEASE_1
from tests.server.served import GATE, TOKENS, Served, eventually, listening, served, wire

IDLE_S = 60.0
HELLO: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}
PING = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
ACCEPT = {"Accept": "application/json, text/event-stream"}


def bounds(most: int, most_per_user: int) -> ServerSettings:
    return ServerSettings(
        tokens=TOKENS, max_mcp_sessions=most, max_mcp_sessions_per_user=most_per_user, mcp_idle_s=IDLE_S
    )


@asynccontextmanager
async def asking(server: Served, *names: str) -> AsyncGenerator[list[httpx2.AsyncClient], None]:
    """A client for each name, of a server whose /mcp answers."""
    clients = [server.client(name, **ACCEPT) for name in names]
    async with server.app.state.contexts[0]:
        yield clients
    for client in clients:
        await client.aclose()


async def opened(client: httpx2.AsyncClient) -> str:
    answer = await client.post("/mcp", json=HELLO)
    assert answer.status_code == 200, answer.text
    return str(answer.headers["mcp-session-id"])


async def pinged(client: httpx2.AsyncClient, session: str) -> int:
    return (await client.post("/mcp", json=PING, headers={"Mcp-Session-Id": session})).status_code


async def test_over_the_users_limit_their_idlest_session_is_evicted() -> None:
    async with served(bounds(most=100, most_per_user=3)) as server, asking(server, "ann", "bob") as (ann, bob):
        first = await opened(bob)
        mine = [await opened(ann) for _ in range(3)]
        assert await pinged(ann, mine[0]) == 200  # so that the second is the one that was idle for longest
        mine += [await opened(ann)]
        assert [await pinged(ann, one) for one in mine] == [200, 404, 200, 200]
        for _ in range(20):
            mine += [await opened(ann)]
        assert [await pinged(ann, one) for one in mine] == [404] * (len(mine) - 3) + [200] * 3
        assert await pinged(bob, first) == 200


async def test_no_session_is_opened_while_all_are_active() -> None:
    settings = bounds(most=100, most_per_user=2)
    async with (
        served(settings) as server,
        listening(server.app) as address,
        server.client("ann", **ACCEPT) as ann,
        server.client("bob", **ACCEPT) as bob,
        wire(address) as one,
        wire(address) as other,
    ):
        mine = [await opened(ann), await opened(ann)]
        for listener, session in zip((one, other), mine, strict=True):
            listener.send(
                "GET",
                "/mcp",
                Mcp_Session_Id=session,
                Authorization=ann.headers["authorization"],
                Accept=ACCEPT["Accept"],
            )
            assert await listener.status() == 200
        refused = await ann.post("/mcp", json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"].startswith("at most 2 open sessions per user")
        assert [await pinged(ann, session) for session in mine] == [200, 200]
        await opened(bob)
        assert (await ann.delete("/mcp", headers={"Mcp-Session-Id": mine[0]})).status_code == 200
        await opened(ann)


async def test_evicting_a_session_cancels_the_run_of_an_abandoned_call() -> None:
    settings = bounds(most=100, most_per_user=1)
    call = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "gate", "arguments": {"input": "x"}}}
    async with served(settings) as server, listening(server.app) as address, server.client("ann", **ACCEPT) as ann:
        await server.save("gate", GATE)
        session = await opened(ann)
        headers = {"Mcp_Session_Id": session, "Authorization": ann.headers["authorization"], "Accept": ACCEPT["Accept"]}
        async with wire(address) as caller:
            caller.send("POST", "/mcp", json.dumps(call).encode(), Content_Type="application/json", **headers)
            await server.gate.entered.wait()
            assert (await ann.post("/mcp", json=HELLO)).status_code == 429
        (run,) = await server.stores.runs.list()
        while (await ann.post("/mcp", json=HELLO)).status_code == 429:  # noqa: ASYNC110  the server sees it when it does
            await asyncio.sleep(0)
        assert (await server.host.wait(run.id)).status == "cancelled"


async def test_at_the_total_limit_the_user_with_most_sessions_loses_one() -> None:
    async with (
        served(bounds(most=4, most_per_user=3)) as server,
        asking(server, "bob", "ann", "root") as (bob, ann, root),
    ):
        alone = await opened(bob)
        many = [await opened(ann) for _ in range(3)]
        new = await opened(root)
        assert [await pinged(ann, one) for one in many] == [404, 200, 200]
        assert (await pinged(bob, alone), await pinged(root, new)) == (200, 200)


async def test_a_session_that_its_client_ended_is_not_counted() -> None:
    async with served(bounds(most=2, most_per_user=2)) as server, asking(server, "ann", "bob") as (ann, bob):
        kept, ended = await opened(ann), await opened(ann)
        for client, status in ((bob, 404), (ann, 200), (ann, 404)):
            assert (await client.delete("/mcp", headers={"Mcp-Session-Id": ended})).status_code == status
        new = await opened(ann)
        assert [await pinged(ann, one) for one in (kept, ended, new)] == [200, 404, 200]


@pytest.mark.parametrize("body", [PING, [], "x"])
async def test_a_request_that_opens_no_session_is_not_counted(body: Any) -> None:
    async with served(bounds(most=3, most_per_user=3)) as server, asking(server, "ann") as (ann,):
        mine = [await opened(ann) for _ in range(2)]
        for _ in range(5):
            await ann.post("/mcp", json=body)
            await ann.get("/mcp")
        assert [await pinged(ann, one) for one in mine] == [200, 200]


@pytest.mark.skipif(IS_RELEASE_1, reason="release 1 of the library knows no such version")
async def test_versions_of_the_protocol_without_sessions_are_not_counted() -> None:
    async with served(bounds(most=1, most_per_user=1)) as server, asking(server, "ann") as (ann,):
        mine = await opened(ann)
        for _ in range(3):
            await ann.post("/mcp", json=PING, headers={"MCP-Protocol-Version": "2026-07-28"})
            await ann.post("/mcp", json=PING, headers={"MCP-Protocol-Version": "2026-07-28", "Mcp-Session-Id": mine})
        assert await pinged(ann, mine) == 200


@pytest.mark.parametrize("version", ["2025-03-26", "2026-07-28", "2099-01-01", "?"])
async def test_no_version_of_the_protocol_opens_sessions_over_the_limit(version: str) -> None:
    async with served(bounds(most=1, most_per_user=1)) as server, asking(server, "ann") as (ann,):
        answers = [await ann.post("/mcp", json=HELLO, headers={"MCP-Protocol-Version": version}) for _ in range(3)]
        mine = [answer.headers["mcp-session-id"] for answer in answers if "mcp-session-id" in answer.headers]
        assert [await pinged(ann, one) for one in mine] == [404] * (len(mine) - 1) + [200] * bool(mine)


async def test_a_disconnect_while_a_session_is_opened_is_not_counted() -> None:
    async with served(bounds(most=1, most_per_user=1)) as server, asking(server, "ann") as (ann,):
        endpoint: McpEndpoint = server.app.state.contexts[0]
        entered = asyncio.Event()

        async def never() -> Message:
            entered.set()
            await asyncio.Event().wait()
            raise AssertionError("nothing comes")

        async def send(message: Message) -> None:
            raise AssertionError("nothing is answered")

        scope = {
            "type": "http", "method": "POST", "path": "/mcp", "query_string": b"", "headers": [],
            "state": {"user": User("ann", "user")},
        }  # fmt: skip
        opening = asyncio.ensure_future(endpoint(scope, never, send))
        await entered.wait()
        assert (await ann.post("/mcp", json=HELLO)).status_code == 429  # the place is kept for the one that comes
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await opening
        assert await pinged(ann, await opened(ann)) == 200


def test_an_idle_session_ends_and_frees_its_slot() -> None:
    async def story() -> list[int]:
        stores = MemoryStores()
        host = RunHost(stores, executors={})
        settings = bounds(most=2, most_per_user=2)
        chats, graphs = ChatService(host, stores.chats), GraphChecker(host.executors, host.services)
        endpoint = create_mcp(host, chats, stores, graphs, settings=settings)

        async def let_in(scope: Scope, receive: Receive, send: Send) -> None:
            await endpoint({**scope, "state": {"user": User("ann", "user")}}, receive, send)

        transport = httpx2.ASGITransport(app=let_in)  # type: ignore[arg-type]
        async with endpoint, httpx2.AsyncClient(transport=transport, base_url="http://here", headers=ACCEPT) as ann:
            first, second = await opened(ann), await opened(ann)
            await asyncio.sleep(IDLE_S - 1)
            seen = [await pinged(ann, second)]
            await asyncio.sleep(2)
            third = await opened(ann)
            return [*seen, *[await pinged(ann, one) for one in (first, second, third)]]

    assert sim_run(story, seed=1) == [200, 404, 200, 200]


# By themselves

Act = tuple[str, str]


@given(st.lists(st.tuples(st.sampled_from(["open", "use", "rest", "end"]), st.sampled_from("abcd")), max_size=60))
def test_limits_always_hold_and_active_sessions_are_never_evicted(
    acts: list[Act],
) -> None:
    sessions, alive, now_s = Sessions(5, 2), list[Session](), 0.0
    for act, owner in acts:
        now_s += 1
        own = [one for one in alive if one.owner == owner]
        if act == "open":
            with suppress(ApiError):
                session, evicted = sessions.open(owner)
                session.id = f"s{now_s}"
                assert evicted is None or evicted.active_requests == 0
                alive = [*(one for one in alive if one is not evicted), session]
        elif own and act == "use":
            own[0].active_requests += 1
        elif own and act == "rest" and own[-1].active_requests:
            sessions.end_request(own[-1], now_s)
        elif own and act == "end":
            sessions.forget(own[0])
            alive.remove(own[0])
        assert len(alive) <= 5
        assert max(Counter(one.owner for one in alive).values(), default=0) <= 2
        assert all(sessions.find(one.owner, str(one.id)) is one for one in alive)


def test_a_session_is_found_only_by_its_owner() -> None:
    sessions = Sessions(5, 2)
    session, _ = sessions.open("ann")
    session.id = "one"
    assert sessions.find("ann", "one") is session
    assert sessions.find("bob", "one") is None
    sessions.forget(session)
    sessions.forget(session)
    assert sessions.find("ann", "one") is None


async def test_ten_times_the_limit_leaves_the_limit() -> None:
    settings = ServerSettings(tokens=TOKENS, max_mcp_sessions_per_user=20)
    async with served(settings) as server, asking(server, "ann", "bob") as (ann, bob):
        theirs = await opened(bob)
        mine = await asyncio.gather(*(opened(ann) for _ in range(20)))
        mine += [await opened(ann) for _ in range(180)]
        assert Counter([await pinged(ann, one) for one in mine]) == {404: 180, 200: 20}
        assert await pinged(bob, theirs) == 200
        before = len(asyncio.all_tasks())
        await opened(ann)
        await eventually(lambda: len(asyncio.all_tasks()) == before)  # nothing of what gave way is left
