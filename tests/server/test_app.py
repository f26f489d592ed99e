"""The thin path: a graph is saved, run, watched and found again, over HTTP alone."""

from __future__ import annotations

import httpx2
import pytest

from penstock.server.auth import ACCESS
from penstock.server.settings import ServerSettings
from tests.server.served import ASK, CHAT, ECHO, GATE, SECRETS, happened, listening, parse_events, served, wire


@pytest.mark.requirement("X-6")
async def test_a_graph_is_saved_run_and_watched_over_http() -> None:
    async with served() as server, server.client("ann") as ann:
        saved = await ann.put("/api/graphs/echo", json={"name": "Echo", "document": ECHO})
        assert (saved.status_code, saved.json()["version"], saved.json()["owner"]) == (200, 1, "ann")
        started = await ann.post("/api/runs", json={"graph_id": "echo", "input": "héllo"})
        assert started.status_code == 201, started.text
        run_id = started.json()["id"]
        watched = await ann.get(f"/api/runs/{run_id}/events")
        events = parse_events(watched.text)
        assert events[0]["event"] == "run.queued"
        assert events[-1]["event"] == "run.completed"
        assert [int(event["id"]) for event in events] == list(range(1, len(events) + 1))
        run = (await ann.get(f"/api/runs/{run_id}")).json()
        assert run["status"] == "completed"
        assert "héllo" in str(run["output"])
        assert run["last_seq"] == len(events)


async def test_a_chat_is_answered_over_http() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        response = await ann.post("/api/agents/chat/chat", json={"content": "Hello"})
        assert response.status_code == 200, response.text
        turn = response.json()
        await ann.get(f"/api/runs/{turn['run_id']}/events")
        chat = (await ann.get(f"/api/chats/{turn['chat_id']}")).json()
        assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]
        assert chat["active"] == [turn["user_message_id"], turn["message_id"]]


async def test_a_question_is_answered_over_http() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("ask", ASK)
        run = (await ann.post("/api/runs", json={"graph_id": "ask", "input": "x"})).json()
        await happened(server, run["id"], "run.waiting")
        waiting = (await ann.get("/api/approvals")).json()["approvals"]
        answered = await ann.post(f"/api/approvals/{waiting[0]['id']}/approve")
        assert (answered.status_code, answered.json()["state"]) == (200, "approved"), answered.text
        events = parse_events((await ann.get(f"/api/runs/{run['id']}/events")).text)
        assert events[-1]["event"] == "run.completed"
        again = await ann.post(f"/api/approvals/{waiting[0]['id']}/reject")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


async def test_a_run_is_cancelled_while_its_stream_is_open() -> None:
    async with served() as server, listening(server.app) as address, wire(address) as watcher:
        await server.save("gate", GATE)
        async with server.client("ann") as ann:
            run = (await ann.post("/api/runs", json={"graph_id": "gate"})).json()
            watcher.send("GET", f"/api/runs/{run['id']}/events", Authorization=f"Bearer {SECRETS['ann']}")
            assert await watcher.status() == 200
            await watcher.until(b"event: run.started")
            cancelled = await ann.post(f"/api/runs/{run['id']}/cancel", json={"reason": "enough"})
            assert cancelled.json() == {"result": "cancelled"}
            assert b"enough" in await watcher.until(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", ["/health", "/ready", "/"])
async def test_health_is_open_to_every_client(path: str) -> None:
    async with served() as server, server.client() as anonymous:
        answer = await anonymous.get(path)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_and_ready_accept_head_requests(path: str) -> None:
    async with served() as server, listening(server.app) as (host, port):
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}") as monitor:
            head, whole = await monitor.head(path), await monitor.get(path)
        same = {"content-type", "content-length", "cache-control"}
        assert (head.status_code, head.content) == (200, b"")
        assert {name: head.headers[name] for name in same} == {name: whole.headers[name] for name in same}


async def test_openapi_describes_required_tokens_and_errors() -> None:
    async with served() as server, served(ServerSettings()) as unasked, server.client("ann") as ann:
        description = (await ann.get("/api/openapi.json")).json()
        assert description["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
        shown = {"/api": "#/components/schemas/ErrorShown", "/v1/": "#/components/schemas/ErrorAnswer"}
        for path, operations in description["paths"].items():
            for method, operation in operations.items():
                is_open = ACCESS[path][method.upper()] == "open"
                assert operation.get("security") == (None if is_open else [{"token": []}]), path
                for status in ("4XX", "5XX"):
                    schema = operation["responses"][status]["content"]["application/json"]["schema"]
                    assert schema["$ref"] == shown.get(path[:4], shown["/api"])
                assert "default" not in operation["responses"]
        described = unasked.app.openapi()
        assert described["paths"]["/api/me"]["get"]["security"] == [{"token": []}, {}]
        assert unasked.app.openapi() is described
