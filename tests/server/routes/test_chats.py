"""Chats over HTTP: said, said again, answered again, brought into view; and what is attached."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.server.served import CHAT, Served, served


async def answered(server: Served, client: httpx2.AsyncClient, path: str, body: Any = None) -> dict[str, Any]:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    turn: dict[str, Any] = answer.json()
    await server.host.wait(turn["run_id"])
    return turn


async def test_nothing_that_was_said_is_lost_by_saying_it_again() -> None:
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


async def test_a_chat_is_renamed_and_listed_with_the_one_used_last_first() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        for id in ("a", "b"):
            await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": id})
        renamed = await ann.patch("/api/chats/a", json={"title": "Другое ✓"})
        assert renamed.json()["title"] == "Другое ✓"
        assert {one["id"] for one in (await ann.get("/api/chats")).json()["chats"]} == {"a", "b"}
        assert (await ann.patch("/api/chats/a", json={"title": "a\nb"})).status_code == 422


async def test_an_admin_speaks_in_the_name_of_the_chats_owner() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        await server.save("chat", CHAT)
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "a"})
        turn = await answered(server, root, "/api/chats/a/messages", {"content": "from root"})
        assert (await server.host.wait(turn["run_id"])).owner == "ann"


async def test_what_is_attached_is_given_back_byte_for_byte_and_named_in_the_message() -> None:
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


async def test_nothing_to_say_and_a_parent_in_a_new_chat_are_refused() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        assert (await ann.post("/api/agents/chat/chat", json={"content": ""})).status_code == 422
        said = await ann.post("/api/agents/chat/chat", json={"content": "x", "parent_id": "p"})
        assert said.json()["error"]["path"] == "$.parent_id"
        await ann.post("/api/chats", json={"graph_id": "chat", "chat_id": "a"})
        orphan = await ann.post("/api/chats/a/messages", json={"content": "x", "parent_id": "none"})
        assert orphan.status_code in {404, 409, 422}


async def test_a_chat_with_a_graph_that_is_not_there_is_not_made() -> None:
    async with served() as server, server.client("ann") as ann:
        refused = await ann.post("/api/chats", json={"graph_id": "nothere"})
        said = await ann.post("/api/agents/nothere/chat", json={"content": "x"})
        assert (refused.status_code, refused.json()) == (404, said.json())
        assert (await ann.get("/api/chats")).json()["chats"] == []
        await server.save("draft", {"nodes": [], "edges": []})
        assert (await ann.post("/api/chats", json={"graph_id": "draft"})).status_code == 201  # it may be mended
