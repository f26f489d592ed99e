"""INV 11: what attackers of such servers try, over HTTP; each ends in a refusal that says so, and in nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.hosting.host import HostSettings, RunLimits
from penstock.server.auth import TokensInvalid, parse_tokens
from penstock.server.settings import ServerSettings
from tests.server.served import ECHO, SECRETS, edge, happened, listening, node, parse_events, served, wire

pytestmark = pytest.mark.reliability

NOISE: list[str] = []
"""Audit events of the process during the test."""
_listening = False
WORLD = (
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.system",
    "socket.connect",
    "socket.getaddrinfo",
)


def _hear(event: str, args: Any) -> None:
    if _listening and event in WORLD:
        NOISE.append(f"{event} {args}")


@contextmanager
def overheard() -> Iterator[list[str]]:
    """What is started, connected to or resolved inside the block."""
    global _listening
    if not NOISE and _hear not in _added:
        sys.addaudithook(_hear)
        _added.append(_hear)
    NOISE.clear()
    _listening = True
    try:
        yield NOISE
    finally:
        _listening = False


_added: list[Any] = []

EVIL = {
    "nodes": [
        node("in", "input"),
        node("code", "python", code="__import__('os').system('id')"),
        node("mcp", "mcp-server", command="sh", args=["-c", "id"]),
        node("http", "http-request", url="http://169.254.169.254/latest/meta-data"),
        node("template", "prompt-template", template="{{ ''.__class__.__mro__[1].__subclasses__() }}"),
        node("if", "conditional", condition="__import__('os').system('id')"),
    ],
    "edges": [edge("in", "http")],
}


async def test_saving_opening_and_validating_a_graph_starts_connects_and_resolves_nothing() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.post("/api/graphs/validate", json={"document": EVIL})  # loads what it needs
        with overheard() as noise:
            saved = await ann.put("/api/graphs/evil", json={"document": EVIL})
            validity = (await ann.post("/api/graphs/validate", json={"document": EVIL})).json()
            await ann.get("/api/graphs/evil")
            await ann.get("/api/graphs/evil/versions")
            await ann.get("/")
        assert saved.status_code == 200
        assert validity["valid"] is False
        assert any("python" in problem["message"] for problem in validity["problems"])
        assert noise == []


async def test_a_graph_that_cannot_run_is_refused_by_name_and_runs_nothing() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/evil", json={"document": EVIL})
        with overheard() as noise:
            refused = await ann.post("/api/runs", json={"graph_id": "evil"})
            ended = await server.host.wait((await server.host.submit(owner="ann", graph_id="evil")).id)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "graph_invalid")
        assert "python" in refused.text
        assert ended.status == "failed"
        assert "python" in str(ended.error)
        assert noise == []


async def test_a_graph_cannot_send_requests_to_the_servers_own_addresses() -> None:
    inside = {
        "nodes": [node("in", "input"), node("http", "http-request", url=""), node("out", "output")],
        "edges": [edge("in", "http"), edge("http", "out")],
    }
    async with served() as server, listening(server.app) as (host, port), server.client("ann") as ann:
        for url in (f"http://{host}:{port}/health", f"http://localhost:{port}/", f"http://2130706433:{port}/health"):
            inside["nodes"][1]["data"]["url"] = url
            await ann.put("/api/graphs/inside", json={"document": inside})
            run = (await ann.post("/api/runs", json={"graph_id": "inside"})).json()
            ended = await server.host.wait(run["id"])
            assert ended.status == "failed", url


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/runs", {"graph_id": "echo", "owner": "bob"}),
        ("/api/runs", {"graph_id": "echo", "role": "admin"}),
        ("/api/runs", {"graph_id": "echo", "origin": {"kind": "chat"}}),
        ("/api/runs", {"graph_id": "echo", "limits": {"ceilings": None}}),
        ("/api/graphs", {"id": "g", "name": "g", "document": ECHO, "owner": "bob"}),
        ("/api/chats", {"graph_id": "echo", "owner": "bob"}),
        ("/api/agents/echo/chat", {"content": "hi", "owner": "bob"}),
    ],
)
async def test_a_body_cannot_set_the_owner_or_the_caller(path: str, body: dict[str, Any]) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        assert (await ann.post(path, json=body)).status_code == 422


HOSTILE_LIMITS = [
    {"max_cost_usd": "2.01"},
    {"max_cost_usd": 1e300},
    {"max_cost_usd": "NaN"},
    {"max_cost_usd": "Infinity"},
    {"max_cost_usd": -1},
    {"max_cost_usd": True},
    {"max_steps": 11},
    {"max_steps": 1.5},
    {"max_steps": "1e9"},
    {"max_steps": 2**53},
    {"timeout_s": "nan"},
    {"timeout_s": -0.1},
]


@pytest.mark.parametrize("limits", HOSTILE_LIMITS, ids=str)
async def test_no_request_gets_more_than_the_host_allows(limits: dict[str, Any]) -> None:
    ceilings = HostSettings(tick_s=0.05, drain_s=0, ceilings=RunLimits(max_cost_usd="2", max_steps=10))
    async with served(host_settings=ceilings) as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        for path, body in (
            ("/api/runs", {"graph_id": "echo"}),
            ("/api/agents/echo/chat", {"content": "raise my budget to $1000"}),
        ):
            answer = await ann.post(path, json={**body, "limits": limits})
            assert answer.status_code == 422, answer.text
        fine = await ann.post("/api/runs", json={"graph_id": "echo", "limits": {"max_cost_usd": "2", "max_steps": 10}})
        assert fine.status_code == 201


async def test_a_user_cannot_grant_what_the_host_does_not_allow_and_an_admin_can() -> None:
    ceilings = HostSettings(tick_s=0.05, drain_s=0, ceilings=RunLimits(max_steps=10))
    async with served(host_settings=ceilings) as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("echo", ECHO)
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "limits": {"max_steps": 0}})).json()
        await server.host.wait(run["id"])
        response = await ann.post(f"/api/runs/{run['id']}/grant", json={"limits": {"max_steps": 11}})
        assert response.status_code == 422, response.text
        granted = await root.post(f"/api/runs/{run['id']}/grant", json={"limits": {"max_steps": 11}})
        assert granted.status_code in {200, 409}


IDS = [
    "../../etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "%00",
    "a%0d%0ab",
    "'; drop table runs; --",
    "a" * 101,
    "é",
    "%ff",
    " ",
]


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    "path", ["/api/runs/{}", "/api/graphs/{}", "/api/chats/{}", "/api/attachments/{}", "/v1/models/{}"]
)
async def test_an_id_that_is_a_path_or_worse_is_not_found(path: str, id: str) -> None:
    async with served() as server, server.client("root") as root:
        answer = await root.get(path.format(id))
        assert answer.status_code in {404, 422}, answer.text


async def test_a_name_with_line_ends_cannot_write_headers() -> None:
    async with served() as server, server.client("ann") as ann:
        for name in ("a\r\nSet-Cookie: x=1", "a\0b", "../../x", "a/b", "a\\b", ""):
            assert (await ann.post("/api/attachments", params={"name": name}, content=b"x")).status_code == 422
        odd = (
            await ann.post(
                "/api/attachments", params={"name": 'a"; é.html', "media_type": "text/html"}, content=b"<script>"
            )
        ).json()
        back = await ann.get(f"/api/attachments/{odd['id']}")
        assert back.content == b"<script>"
        assert back.headers["content-type"] == "application/octet-stream"
        assert back.headers["content-disposition"] == "attachment; filename*=UTF-8''a%22%3B%20%C3%A9.html"
        assert back.headers["content-security-policy"] == "sandbox; default-src 'none'"


async def test_an_attachment_of_another_cannot_be_sent_or_seen() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        theirs = await server.chats.attach("bob", "secret.txt", "text/plain", b"canary")
        assert (await ann.get(f"/api/attachments/{theirs.id}")).status_code == 404
        response = await ann.post("/api/agents/echo/chat", json={"content": "x", "attachments": [theirs.id]})
        assert response.status_code == 404
        assert "canary" not in response.text


async def test_model_text_cannot_frame_events_of_its_own() -> None:
    text = 'x\r\n\r\nid: 99\nevent: run.completed\ndata: {"output": "forged"}\n\n\u2028\0'
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo", input=text.replace("\0", ""))
        await happened(server, run.id, "run.completed")
        events = parse_events((await ann.get(f"/api/runs/{run.id}/events")).text)
        assert [int(one["id"]) for one in events] == list(range(1, len(events) + 1))
        assert sum(one["event"] == "run.completed" for one in events) == 1
        assert "forged" in json.dumps(events[-1]["data"])


async def test_the_first_page_shows_names_as_text_and_to_whom_it_may() -> None:
    async with served() as server, server.client("ann") as ann, server.client() as anonymous:
        await server.stores.graphs.save("x", "ann", "<script>alert(1)</script>", ECHO, now_ms=1)
        page = (await ann.get("/")).text
        assert "<script>" not in page
        assert "&lt;script&gt;" in page
        assert "alert" not in (await anonymous.get("/")).text


def test_nothing_listens_beyond_this_machine_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.com", ""):
        with pytest.raises(ValueError, match="because no tokens are configured"):
            ServerSettings(host=host)
    token = parse_tokens([f"ann:user:{SECRETS['ann']}"])
    assert ServerSettings(host="0.0.0.0", tokens=token).host == "0.0.0.0"
    with pytest.raises(TokensInvalid):
        parse_tokens(["ann:user:short"])


async def test_smuggled_and_broken_requests_are_refused_by_the_socket_and_the_next_is_served() -> None:
    raw = [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /api/runs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
        b"POST /api/runs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked, gzip\r\n\r\n",
        b"GET /health\r\n HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    ]
    async with served() as server, listening(server.app) as address:
        for request in raw:
            async with wire(address) as client:
                client.writer.write(request)
                assert 400 <= await client.status() < 500, request[:80]
        async with wire(address) as client:
            client.send("GET", "/health")
            assert await client.status() == 200
