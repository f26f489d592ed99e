"""Chats over HTTP: messages, edits, retries, switches; and attachments."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from penstock.hosting.limits import HostSettings
from penstock.server.routes.chats import SHOWN_TYPES
from tests.server.served import CHAT, Served, edge, node, served


async def answered(server: Served, client: httpx2.AsyncClient, path: str, body: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    await server.host.wait(turn["run_id"])
    return turn


async def test_retries_and_edits_keep_all_messages() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        chat = (await ann.post("/api/chats", json={"graph_id": "chat", "title": "T"})).json()
        messages = f"/api/chats/{chat['id']}/messages"
        first = await answered(server, ann, messages, {"content": "one"})
        edited = await answered(server, ann, f"{messages}/{first['user_message_id']}/edit", {"content": "two"})
        retried = await answered(server, ann, f"{messages}/{edited['message_id']}/retry")
        continued = await answered(server, ann, f"{messages}/{retried['message_id']}/continue")
        shown = (await ann.get(f"/api/chats/{chat['id']}")).json()
        assert [one["content"] for one in shown["messages"] if one["role"] == "user"] == ["one", "two"]
        assert shown["active"] == [edited["user_message_id"], retried["message_id"], continued["message_id"]]
        assert (await ann.post(f"{messages}/{first['user_message_id']}/choose")).status_code == 204
        shown = (await ann.get(f"/api/chats/{chat['id']}")).json()
        assert shown["active"] == [first["user_message_id"], first["message_id"]]


async def test_a_chat_is_renamed_and_chats_are_listed_most_recently_used_first() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        for id in ("a", "b"):
            await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": id})
        renamed = await ann.patch("/api/chats/a", json={"title": "Другое ✓"})
        assert renamed.json()["title"] == "Другое ✓"
        assert {one["id"] for one in (await ann.get("/api/chats")).json()["chats"]} == {"a", "b"}
        assert (await ann.patch("/api/chats/a", json={"title": "a\nb"})).status_code == 422


async def test_a_message_of_an_admin_belongs_to_the_owner_of_the_chat() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("chat", CHAT)
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "a"})
        turn = await answered(server, root, "/api/chats/a/messages", {"content": "from root"})
        assert (await server.host.wait(turn["run_id"])).owner == "ann"


async def test_an_attachment_is_returned_unchanged_and_named_in_its_message() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        content = bytes(range(256)) * 10
        params = {"name": "é.png", "media_type": "image/png"}
        attached = (await ann.post("/api/attachments", params=params, content=content)).json()
        assert (attached["size"], attached["name"]) == (2_560, "é.png")
        back = await ann.get(f"/api/attachments/{attached['id']}")
        assert (back.content, back.headers["content-type"]) == (content, "image/png")
        turn = await answered(
            server, ann, "/api/agents/chat/chat", {"content": "look", "attachments": [attached["id"]]}
        )
        shown = (await ann.get(f"/api/chats/{turn['chat_id']}")).json()
        assert shown["messages"][0]["data"]["attachments"][0]["id"] == attached["id"]


@pytest.mark.parametrize(
    ("sent", "query", "kept"),
    [
        ("image/png", None, "image/png"),
        ("Text/Plain; charset=utf-8", None, "text/plain"),
        ("image/png", "image/webp", "image/webp"),
        ("application/json", "application/json", "application/json"),
        *[(sent, None, "application/octet-stream") for sent in (None, "", " ; charset=utf-8", "application/json")],
        ("multipart/form-data; boundary=x", None, "application/octet-stream"),
        ("application/x-www-form-urlencoded", None, "application/octet-stream"),
    ],
)
async def test_the_type_of_an_attachment_is_that_of_the_query_or_else_of_the_header(
    sent: str | None, query: str | None, kept: str
) -> None:
    async with served() as server, server.client("ann") as ann:
        params = {"name": "a", **({} if query is None else {"media_type": query})}
        headers = {} if sent is None else {"Content-Type": sent}
        attached = await ann.post("/api/attachments", params=params, content=b"{}", headers=headers)
        assert (attached.status_code, attached.json()["media_type"]) == (201, kept)


@pytest.mark.parametrize("sent", ["png", "image/", "image/p ng", "image/png, text/html", f"image/{'x' * 128}"])
async def test_a_malformed_content_type_is_refused_by_name(sent: str) -> None:
    async with served() as server, server.client("ann") as ann:
        refused = await ann.post("/api/attachments?name=a", content=b"x", headers={"Content-Type": sent})
        assert (refused.status_code, refused.json()["error"]["path"]) == (422, "header.content-type")
        response = await ann.post(
            "/api/attachments?name=a&media_type=x/y", content=b"x", headers={"Content-Type": sent}
        )
        assert response.json()["media_type"] == "x/y", "what the query says counts, whatever the header does"


async def test_the_description_has_the_bytes_of_attachments() -> None:
    async with served() as server:
        path = server.app.openapi()["paths"]["/api/attachments/{attachment_id}"]
        content = path["get"]["responses"]["200"]["content"]
        assert content["application/octet-stream"]["schema"] == {"type": "string", "format": "binary"}
        assert set(content) == {*SHOWN_TYPES, "application/octet-stream"}


async def test_an_empty_message_and_a_parent_in_a_new_chat_are_refused() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        assert (await ann.post("/api/agents/chat/chat", json={"content": ""})).status_code == 422
        response = await ann.post("/api/agents/chat/chat", json={"content": "x", "parent_id": "p"})
        assert response.json()["error"]["path"] == "$.parent_id"
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "a"})
        orphan = await ann.post("/api/chats/a/messages", json={"content": "x", "parent_id": "none"})
        assert orphan.status_code in {404, 409, 422}


async def test_a_chat_with_a_missing_graph_is_not_created() -> None:
    async with served() as server, server.client("ann") as ann:
        refused = await ann.post("/api/chats", json={"graph_id": "nothere"})
        response = await ann.post("/api/agents/nothere/chat", json={"content": "x"})
        assert (refused.status_code, refused.json()) == (404, response.json())
        assert (await ann.get("/api/chats")).json()["chats"] == []
        await server.save("draft", {"nodes": [], "edges": []})
        assert (await ann.post("/api/chats", json={"graph_id": "draft"})).status_code == 201  # it may be mended


GATED = {
    "nodes": [node("start", "chat-start"), node("gate", "gate"), node("out", "output")],
    "edges": [edge("start", "gate"), edge("gate", "out")],
}


async def test_a_message_refused_by_a_full_queue_is_not_stored() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, max_running=1, max_queued=1)
    async with served(host_settings=settings) as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        await server.save("gated", GATED)
        for id, graph_id in (("full", "gated"), ("mine", "chat")):
            await ann.post("/api/chats", json={"graph_id": graph_id, "chat_id": id})
        first = await answered(server, ann, "/api/chats/mine/messages", {"content": "one"})
        under_way = [(await ann.post("/api/chats/full/messages", json={"content": "runs"})).json()]
        await server.gate.entered.wait()
        under_way += [(await ann.post("/api/chats/full/messages", json={"content": "waits"})).json()]
        before = (await ann.get("/api/chats/mine")).json()
        user_id, answer = first["user_message_id"], first["message_id"]
        ways = {
            "/api/chats/mine/messages": {"content": "hello"},
            f"/api/chats/mine/messages/{user_id}/edit": {"content": "hello"},
            f"/api/chats/mine/messages/{answer}/retry": {},
            f"/api/chats/mine/messages/{answer}/continue": {},
            "/api/agents/chat/chat": {"content": "hello"},
        }
        for path, body in ways.items():
            for named in ({}, {"run_id": "mine"}):
                refused = await ann.post(path, json={**body, **named})
                assert (refused.status_code, "retry-after" in refused.headers) == (429, True), path
        assert (await ann.get("/api/chats/mine")).json() == before
        assert len((await ann.get("/api/chats")).json()["chats"]) == 2
        server.gate.opened.set()
        for turn in under_way:
            await server.host.wait(turn["run_id"])
        await answered(server, ann, "/api/chats/mine/messages", {"content": "hello"})
        shown = (await ann.get("/api/chats/mine")).json()
        assert [one["content"] for one in shown["messages"] if one["role"] == "user"] == ["one", "hello"]


async def test_a_message_sent_while_another_is_answered_becomes_a_branch() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gated", GATED)
        await ann.post("/api/chats", json={"graph_id": "gated", "chat_id": "c"})
        slow = (await ann.post("/api/chats/c/messages", json={"content": "count to 60"})).json()
        await server.gate.entered.wait()
        hello = (await ann.post("/api/chats/c/messages", json={"content": "hello"})).json()
        server.gate.opened.set()
        for turn in (slow, hello):
            await server.host.wait(turn["run_id"])
        shown = (await ann.get("/api/chats/c")).json()
        parents = {one["content"]: one["parent_id"] for one in shown["messages"] if one["role"] == "user"}
        assert parents == {"count to 60": None, "hello": None}
        assert shown["active"] == [hello["user_message_id"], hello["message_id"]]


async def test_a_fork_of_an_answer_receives_the_replaced_user_message() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        turn = await answered(server, ann, "/api/agents/chat/chat", {"content": "count to 5"})
        body = {"at": "start", "input": "count to 8", "run_id": "fork"}
        assert (await ann.post(f"/api/runs/{turn['run_id']}/fork", json=body)).status_code == 201
        assert "count to 8" in str((await server.host.wait("fork")).output)


async def test_a_chat_is_deleted_by_its_owner_or_an_admin_with_attachments_used_only_there() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("chat", CHAT)
        files = []
        for name in ("own", "shared"):
            answer = await ann.post("/api/attachments", params={"name": name}, content=name.encode())
            files.append(answer.json()["id"])
        for id, attached in (("a", files), ("b", files[1:]), ("c", [])):
            await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": id})
            await answered(server, ann, f"/api/chats/{id}/messages", {"content": "see", "attachments": attached})
        async with server.client("bob") as bob:
            assert (await bob.delete("/api/chats/a")).status_code == 404
        assert (await ann.delete("/api/chats/a")).status_code == 204
        assert (await root.delete("/api/chats/c")).status_code == 204
        for method in ("GET", "DELETE"):
            assert (await ann.request(method, "/api/chats/a")).status_code == 404
        assert [one["id"] for one in (await ann.get("/api/chats")).json()["chats"]] == ["b"]
        assert [(await ann.get(f"/api/attachments/{file}")).status_code for file in files] == [404, 200]
        assert len((await ann.get("/api/runs")).json()["runs"]) == 3, "runs stay as long as runs do"


async def test_a_chat_is_not_deleted_while_an_answer_is_being_written_there() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("gated", GATED)
        await ann.post("/api/chats", json={"graph_id": "gated", "chat_id": "c"})
        turn = (await ann.post("/api/chats/c/messages", json={"content": "wait"})).json()
        await server.gate.entered.wait()
        refused = await ann.delete("/api/chats/c")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        assert "cancel it" in refused.json()["error"]["message"]
        server.gate.opened.set()
        await server.host.wait(turn["run_id"])
        assert len((await ann.get("/api/chats/c")).json()["messages"]) == 2
        assert (await ann.delete("/api/chats/c")).status_code == 204
