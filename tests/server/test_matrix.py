"""Who may do what: every route and method × every role × what is one's own, another's, or not there.

The cells are made from the app's own routes. A route that is not declared cannot be reached, and fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from penstock.server.auth import ACCESS, Access
from penstock.server.tokens import create_token
from tests.server.served import ASK, CHAT, ECHO, Served, happened, served

Things = dict[str, str]

BODIES: dict[str, Any] = {
    "POST /api/graphs": {"id": "made", "name": "Made", "document": ECHO},
    "POST /api/graphs/validate": {"document": ECHO},
    "PUT /api/graphs/{graph_id}": {"document": ECHO},
    "PATCH /api/graphs/{graph_id}/layout": {"positions": {"in": {"x": 1, "y": 2}}},
    "POST /api/runs": {"graph_id": "echo"},
    "POST /api/runs/{run_id}/grant": {"limits": {"max_steps": 1}},
    "POST /api/runs/{run_id}/bills/resolve": {"call_id": "1-x/n000002", "cost_usd": "0.02"},
    "POST /api/runs/{run_id}/bills/release": {"call_id": "1-x/n000002"},
    "POST /api/runs/{run_id}/fork": {"at": "out"},
    "POST /api/approvals/{approval_id}/edit": {"answer": 1},
    "POST /api/chats": {"graph_id": "chat"},
    "PATCH /api/chats/{chat_id}": {"title": "Another"},
    "POST /api/chats/{chat_id}/messages": {"content": "more"},
    "POST /api/chats/{chat_id}/messages/{message_id}/edit": {"content": "else"},
    "POST /api/agents/{graph_id}/chat": {"content": "hi"},
    "POST /api/tokens": {"name": "carl", "another": True},
    "POST /api/tokens/{token_id}/bills/resolve": {"call_id": "day:2026-11-19/x/n000002", "cost_usd": "0.02"},
    "POST /api/tokens/{token_id}/bills/release": {"call_id": "day:2026-11-19/x/n000002"},
    "POST /v1/chat/completions": {"model": "chat", "messages": [{"role": "user", "content": "hi"}]},
    "POST /v1/responses": {"model": "chat", "input": "hi"},
    "POST /v1/embeddings": {"model": "chat", "input": "hi"},
}
QUERIES = {
    "GET /api/graphs/{graph_id}/diff": {"before": "1"},
    "POST /api/attachments": {"name": "a.txt"},
    "GET /api/stream": {"topics": "runs", "follow": "false"},
}

SHARED = {
    "/api/graphs/{graph_id}",
    "/api/graphs/{graph_id}/versions",
    "/api/graphs/{graph_id}/diff",
    "/api/graphs/{graph_id}/source",
    "/api/graphs/{graph_id}/layout",
    "/v1/models/{model_id}",
    "/api/agents/{graph_id}/chat",
}
"""Graphs are everybody's to read and to run."""
OWN_TO_CHANGE = {
    ("PUT", "/api/graphs/{graph_id}"),
    ("DELETE", "/api/graphs/{graph_id}"),
    ("PATCH", "/api/graphs/{graph_id}/layout"),
}
"""Seen by everybody and changed by their owners: refused by name, not hidden."""
MADE_IF_MISSING = {("PUT", "/api/graphs/{graph_id}"), ("POST", "/api/runs/{run_id}/cancel")}
"""Saving a graph makes it, and a cancel waits for its run."""

ALLOWED = {200, 201, 204, 409}
"""What one may do can still contradict how things stand."""
MISSING: Things = {
    "graph_id": "nothing",
    "model_id": "nothing",
    "message_id": "nothing",
    "chat_id": "nothing",
    "token_id": "nothing",
    "name": "nothing",
    "approval_id": "nothing",
    "attachment_id": "nothing",
    "run_id": "01890000-0000-7000-8000-000000000000",
    "other_id": "01890000-0000-7000-8000-000000000000",
    "call_id": "n999999",
    "response_id": "resp_01890000-0000-7000-8000-000000000000",
}


REFUSING = frozenset({"/v1/embeddings"})
"""Routes that refuse everybody."""


def declared() -> Iterator[tuple[str, str, Access]]:
    for path, methods in ACCESS.items():
        for method, access in methods.items():
            if path not in ("/mcp", "/assets/{name}"):  # a protocol of its own; files that are the same for everybody
                yield method, path, access


async def things_of(server: Served, owner: str) -> Things:
    """One of everything that has an owner."""
    ended = await server.host.submit(owner=owner, graph_id="echo")
    await server.host.wait(ended.id)
    asking = await server.host.submit(owner=owner, graph_id="ask", input=1)
    await happened(server, asking.id, "run.waiting")
    (approval,) = await server.stores.approvals.list(run_id=asking.id)
    turn = await server.chats.stream_agent_chat("chat", "hello", owner=owner)
    await turn.result()
    token, _ = create_token(owner, "user", by="root", now_ms=1)
    await server.stores.tokens.add(token)
    attached = await server.chats.attach(owner, "a.txt", "text/plain", b"bytes")
    await server.save(f"{owner}s", ECHO, owner)
    return {
        "graph_id": f"{owner}s",
        "model_id": f"{owner}s",
        "run_id": ended.id,
        "other_id": ended.id,
        "call_id": "n000001",
        "response_id": f"resp_{turn.run_id}",
        "approval_id": approval.id,
        "chat_id": turn.chat_id,
        "message_id": turn.message_id,
        "user_message_id": str(turn.user_message_id),
        "attachment_id": attached.id,
        "token_id": token.id,
        "name": owner,
    }


async def ask(client: httpx2.AsyncClient, method: str, path: str, things: Things) -> httpx2.Response:
    route = f"{method} {path}"
    if path.endswith("/edit") and "user_message_id" in things:
        things = {**things, "message_id": things["user_message_id"]}
    body = BODIES.get(route)
    return await client.request(method, path.format(**things), json=body, params=QUERIES.get(route))


def facts(answer: httpx2.Response, things: Things) -> tuple[int, str]:
    """What was answered; the ids that the client itself had sent are nothing new to it."""
    text = answer.text
    for id in sorted(things.values(), key=len, reverse=True):
        text = text.replace(id, "<id>")
    return answer.status_code, text


async def prepared(server: Served) -> dict[str, Things]:
    for name, document in (("echo", ECHO), ("chat", CHAT), ("ask", ASK)):
        await server.save(name, document, "root")
    return {owner: await things_of(server, owner) for owner in ("ann", "bob", "vera")}


@pytest.mark.parametrize(("method", "path", "access"), [one for one in declared() if one[1] not in REFUSING])
async def test_every_role_and_owner_on_a_route(method: str, path: str, access: Access) -> None:
    async with served() as server:
        things = await prepared(server)
        async with server.client() as anonymous, server.client("past") as past, server.client("vera") as vera:
            await check_anonymous(anonymous, method, path, access, things["ann"], "unauthorized")
            await check_anonymous(past, method, path, access, things["ann"], "token_expired")
            await look_at_a_viewer(vera, method, path, access, things)
        async with server.client("ann") as ann, server.client("root") as root:
            await look_at_a_user(ann, method, path, access, things)
            await look_at_an_admin(root, method, path, things)


async def check_anonymous(
    client: httpx2.AsyncClient, method: str, path: str, access: Access, things: Things, code: str
) -> None:
    for chosen in (things, MISSING):
        answer = await ask(client, method, path, chosen)
        assert answer.status_code == (200 if access == "open" else 401), answer.text
        if access != "open":
            assert answer.json()["error"]["code"] == code


async def look_at_a_viewer(
    client: httpx2.AsyncClient, method: str, path: str, access: Access, things: dict[str, Things]
) -> None:
    if access in {"user", "admin"}:
        for chosen in (things["vera"], things["ann"], MISSING):
            assert (await ask(client, method, path, chosen)).status_code == 403
    else:
        await look_at_things(client, method, path, things["vera"], things["ann"])


async def look_at_a_user(
    client: httpx2.AsyncClient, method: str, path: str, access: Access, things: dict[str, Things]
) -> None:
    if access == "admin":
        assert (await ask(client, method, path, things["ann"])).status_code == 403
    else:
        await look_at_things(client, method, path, things["ann"], things["bob"])


async def look_at_things(client: httpx2.AsyncClient, method: str, path: str, own: Things, others: Things) -> None:
    """Own ones are there; another's are as those that are not."""
    if "{" in path:
        another, missing = [facts(await ask(client, method, path, one), one) for one in (others, MISSING)]
        if (method, path) in OWN_TO_CHANGE:
            assert another[0] == 403, another
        elif path in SHARED:
            assert another[0] in ALLOWED, another
        else:
            assert another == missing
        if (method, path) in MADE_IF_MISSING:
            assert missing[0] == 200, missing
        else:
            assert missing[0] == 404, missing
    mine = await ask(client, method, path, own)
    assert mine.status_code in ALLOWED, mine.text


async def look_at_an_admin(client: httpx2.AsyncClient, method: str, path: str, things: dict[str, Things]) -> None:
    if "{" in path and (method, path) not in MADE_IF_MISSING:
        assert (await ask(client, method, path, MISSING)).status_code == 404
    answer = await ask(client, method, path, things["bob"])
    assert answer.status_code in ALLOWED, answer.text


async def test_every_route_of_the_app_is_declared_and_every_declared_route_is_there() -> None:
    async with served() as server:
        schema = server.app.openapi()
        served_routes = {
            (method.upper(), path)
            for path, methods in schema["paths"].items()
            for method in methods
            if method != "parameters"
        }
        assert served_routes == {(method, path) for method, path, _ in declared()}


@pytest.mark.parametrize("method", list(ACCESS["/mcp"]))
async def test_mcp_is_behind_the_same_auth_guard(method: str) -> None:
    async with (
        served() as server,
        server.client() as anonymous,
        server.client("past") as past,
        server.client("vera") as vera,
    ):
        assert (await anonymous.request(method, "/mcp")).status_code == 401
        assert (await past.request(method, "/mcp")).status_code == 401
        assert (await vera.request(method, "/mcp")).status_code == 403


async def test_an_undeclared_route_cannot_be_reached() -> None:
    async with served() as server, server.client("root") as root, server.client() as anonymous:

        @server.app.get("/api/forgotten")
        async def forgotten() -> str:
            return "secret"

        assert (await root.get("/api/forgotten")).status_code == 404
        assert (await anonymous.get("/api/forgotten")).status_code == 401


async def test_lists_show_the_users_own_things_and_only_admins_may_list_others() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        things = await prepared(server)
        for path, key in (("/api/runs", "runs"), ("/api/chats", "chats"), ("/api/approvals", "approvals")):
            for query in ({}, {"owner": "ann"}):
                found = (await ann.get(path, params=query)).json()[key]
                assert {one["owner"] for one in found} == {"ann"}, path
            for other in ("bob", "unknown"):
                refused = await ann.get(path, params={"owner": other})
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["path"]) == (403, "forbidden", "query.owner")
                assert "only admins" in error["message"]
            found = (await root.get(path, params={"owner": "bob"})).json()[key]
            assert {one["owner"] for one in found} == {"bob"}, path
        filtered = await ann.get("/api/approvals", params={"run_id": things["bob"]["run_id"]})
        assert filtered.json() == {"approvals": [], "next": None}


async def test_graphs_may_be_listed_by_any_owner() -> None:
    async with served() as server, server.client("vera") as vera:
        await server.save("g", ECHO, "ann")
        assert [one["id"] for one in (await vera.get("/api/graphs?owner=ann")).json()["graphs"]] == ["g"]
        assert (await vera.get("/api/graphs?owner=vera")).json()["graphs"] == []


async def test_an_unknown_query_parameter_is_refused_with_the_known_ones() -> None:
    async with served() as server, server.client("root") as root:
        described = (await root.get("/api/openapi.json")).json()["paths"]
        cases = [(path, method) for path in ACCESS if path.startswith("/api/") for method in ACCESS[path]]
        assert len(cases) > 40
        for path, method in cases:
            given = described[path][method.lower()].get("parameters", [])
            known = [one["name"] for one in given if one["in"] == "query"]
            refused = await root.request(method, re.sub(r"{\w+}", "x", path), params={"statüs": "bogus"})
            error, case = refused.json()["error"], f"{method} {path}: {refused.text}"
            assert (refused.status_code, error["code"], error["path"]) == (422, "invalid_value", "query.statüs"), case
            assert all(name in error["message"] for name in known), case
            for name in known:
                taken = await root.request(method, re.sub(r"{\w+}", "x", path), params={name: "\0"})
                assert taken.json()["error"].get("path") != f"query.{name}" or "there is no" not in taken.text, case


async def test_health_probes_and_openai_clients_may_send_unknown_parameters() -> None:
    async with served() as server, server.client("ann") as ann:
        for path in ("/health", "/ready", "/", "/v1/models"):
            assert (await ann.get(path, params={"cache": "no"})).status_code == 200


async def test_a_cursor_that_is_missing_or_anothers_is_refused_with_the_same_message() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        things = await prepared(server)
        places = (("/api/runs", "run_id"), ("/api/chats", "chat_id"), ("/api/approvals", "approval_id"))
        for path, key in places:
            refused = [await ann.get(path, params={"before": id}) for id in ("nonsense", things["bob"][key])]
            assert [one.status_code for one in refused] == [422, 422], path
            assert refused[0].json() == refused[1].json()
            assert refused[0].json()["error"]["path"] == "query.before"
            for asker in (ann, root):
                assert (await asker.get(path, params={"before": things["ann"][key]})).status_code == 200
        assert (await ann.get("/api/graphs", params={"before": "nonsense"})).status_code == 200  # any id is a place


async def test_cancelling_anothers_run_changes_nothing() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("ask", ASK, "root")
        run = await server.host.submit(owner="bob", graph_id="ask", input=1)
        await happened(server, run.id, "run.waiting")
        assert (await ann.post(f"/api/runs/{run.id}/cancel")).json() == {"result": "remembered"}
        assert await server.stores.cancels.find({run.id: "bob"}, now_ms=0) == {}
        assert (await server.stores.runs.get(run.id)).status == "waiting"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("run_id", "status"),
    [("ann:nightly", 200), ("01890000-0000-7000-8000-0000000000aa", 200), ("nightly", 404), ("bob:nightly", 404)],
)
async def test_an_early_cancel_is_stored_only_for_ids_that_cannot_be_anothers(run_id: str, status: int) -> None:
    async with served() as server, server.client("ann") as ann:
        assert (await ann.post(f"/api/runs/{run_id}/cancel")).status_code == status
        remembered = await server.stores.cancels.find({run_id: "ann"}, now_ms=0)
        assert bool(remembered) == (status == 200)


async def test_a_user_cannot_cancel_anothers_run_before_it_starts() -> None:
    run_id = "01890000-0000-7000-8000-0000000000aa"
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        await server.save("echo", ECHO)
        ahead = await bob.post(f"/api/runs/{run_id}/cancel", json={"reason": "because I can"})
        assert ahead.json() == {"result": "remembered"}
        await ann.post("/api/runs", json={"graph_id": "echo", "input": "x", "run_id": run_id})
        run = await server.host.wait(run_id)
        assert (run.status, run.output, run.error) == ("completed", "x", None)
        assert (await bob.post(f"/api/runs/{run_id}/cancel")).json() == {"result": "remembered"}, "as it was before"


@pytest.mark.parametrize("canceller", ["ann", "root"])
async def test_an_early_cancel_of_the_owner_or_an_admin_works_despite_earlier_requests_of_others(
    canceller: str,
) -> None:
    run_id = "01890000-0000-7000-8000-0000000000aa"
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        await server.save("echo", ECHO)
        await bob.post(f"/api/runs/{run_id}/cancel", json={"reason": "because I can"})
        async with server.client(canceller) as asker:
            response = await asker.post(f"/api/runs/{run_id}/cancel", json={"reason": "not needed"})
        assert response.json() == {"result": "remembered"}
        run = (await ann.post("/api/runs", json={"graph_id": "echo", "run_id": run_id})).json()
        assert (run["status"], run["error"]) == ("cancelled", "not needed")


async def test_an_id_with_another_users_prefix_is_refused() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        taken = await ann.post("/api/runs", json={"graph_id": "echo", "run_id": "bob:1"})
        assert (taken.status_code, taken.json()["error"]["path"]) == (422, "$.run_id")
        assert (await ann.post("/api/runs", json={"graph_id": "echo", "run_id": "ann:1"})).status_code == 201
