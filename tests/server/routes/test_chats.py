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


async def test_chats_are_listed_with_their_last_message_by_graph_and_by_text() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        await server.save("other", CHAT)
        first = await answered(server, ann, "/api/agents/chat/chat", {"content": "about dams"})
        await answered(server, ann, "/api/agents/other/chat", {"content": "about rivers"})
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "empty"})

        async def listed(**params: Any) -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = (await ann.get("/api/chats", params=params)).json()["chats"]
            return found

        assert [one["id"] for one in await listed(q="DAMS", graph_id="chat")] == [first["chat_id"]]
        assert await listed(q="dams", graph_id="other") == []
        (dams,) = await listed(q="dams")
        assert dams["last"]["message_id"] == first["message_id"]
        assert (dams["last"]["role"], dams["last"]["state"]) == ("assistant", "complete")
        assert [one["last"] for one in await listed(graph_id="chat") if one["id"] == "empty"] == [None]
        assert (await ann.get("/api/chats", params={"q": "a\nb"})).status_code == 422


async def test_a_long_path_is_read_a_window_at_a_time() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        chat = (await ann.post("/api/chats", json={"graph_id": "chat"})).json()
        messages = f"/api/chats/{chat['id']}/messages"
        turns = [await answered(server, ann, messages, {"content": f"{number}"}) for number in range(4)]
        retried = await answered(server, ann, f"{messages}/{turns[1]['message_id']}/retry")
        await ann.post(f"{messages}/{turns[1]['message_id']}/choose")
        ids = [id for turn in turns for id in (turn["user_message_id"], turn["message_id"])]

        async def window(**params: Any) -> dict[str, Any]:
            found: dict[str, Any] = (await ann.get(f"/api/chats/{chat['id']}/path", params=params)).json()
            found["ids"] = [one["id"] for one in found["messages"]]
            return found

        assert (await window())["ids"] == (await window(limit=8))["ids"] == ids
        last = await window(limit=3)
        assert (last["ids"], last["has_earlier"], last["has_later"]) == (ids[-3:], True, False)
        earlier = await window(limit=3, before=last["ids"][0])
        assert (earlier["ids"], earlier["has_earlier"]) == (ids[2:5], True)
        place = {"number": 1, "count": 2, "previous_id": None, "next_id": retried["message_id"]}
        assert earlier["messages"][1]["place"] == place
        assert (await window(before=ids[0]))["ids"] == (await window(after=ids[-1]))["ids"] == []
        assert (await window(after=ids[2], limit=2))["ids"] == ids[3:5]
        around = await window(around=ids[4], limit=3)
        assert (around["ids"], around["end_id"]) == (ids[3:6], ids[-1])
        beside = await window(around=retried["message_id"])
        assert (beside["ids"], beside["end_id"]) == ([*ids[:3], retried["message_id"]], retried["message_id"])
        assert (await window())["end_id"] == ids[-1], "reading another branch does not bring it into view"
        for params, status in (({"around": "x"}, 404), ({"around": ids[0], "before": ids[1]}, 422)):
            response = await ann.get(f"/api/chats/{chat['id']}/path", params=params)
            assert response.status_code == status


async def test_an_empty_chat_has_an_empty_path() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "c"})
        shown = (await ann.get("/api/chats/c/path")).json()
        assert (shown["messages"], shown["end_id"], shown["has_earlier"], shown["has_later"]) == (
            [],
            None,
            False,
            False,
        )


async def test_only_graphs_that_a_chat_can_enter_are_listed_as_agents() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        await server.save(
            "entered", {"nodes": [node("in", "input"), node("out", "output")], "edges": [edge("in", "out")]}
        )
        await server.save("alone", {"nodes": [node("text", "text", text="hi")], "edges": []})
        agents = (await ann.get("/api/agents")).json()["agents"]
        assert [(one["id"], one["made_for_chat"]) for one in agents] == [("chat", True), ("entered", False)]
        page = (await ann.get("/api/agents", params={"limit": 1})).json()
        assert (page["agents"], page["next"]) == ([], "alone")


async def test_an_attachment_is_removed_unless_a_message_refers_to_it() -> None:
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        await server.save("chat", CHAT)
        ids = [(await ann.post("/api/attachments?name=a", content=b"x")).json()["id"] for _ in range(2)]
        await answered(server, ann, "/api/agents/chat/chat", {"content": "look", "attachments": ids[:1]})
        assert (await bob.delete(f"/api/attachments/{ids[1]}")).status_code == 404
        assert [(await ann.delete(f"/api/attachments/{id}")).status_code for id in ids] == [409, 204]
        assert [(await ann.get(f"/api/attachments/{id}")).status_code for id in ids] == [200, 404]
