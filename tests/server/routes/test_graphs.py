"""Graphs over HTTP: versions, conflicts, archives, and what is wrong with a document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.served import CHAT, ECHO, GATE, Echo, edge, node, served


async def test_versions_grow_with_changes_and_only_with_them() -> None:
    async with served() as server, server.client("ann") as ann:
        first = (await ann.post("/api/graphs", json={"id": "g", "name": "G", "document": ECHO})).json()
        again = await ann.post("/api/graphs", json={"id": "g", "name": "G", "document": ECHO})
        assert (again.status_code, again.json()["version"]) == (201, 1)
        second = (await ann.put("/api/graphs/g", json={"document": GATE, "expected_version": 1})).json()
        assert (first["version"], second["version"], second["name"]) == (1, 2, "G")
        versions = (await ann.get("/api/graphs/g/versions")).json()
        assert [one["version"] for one in versions] == [2, 1]
        assert (await ann.get("/api/graphs/g?version=1")).json()["document"] == ECHO
        assert (await ann.get("/api/graphs/g?version=3")).status_code == 404


async def test_two_who_change_the_same_version_do_not_overwrite_each_other() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/g", json={"document": ECHO, "expected_version": 0})
        assert (await ann.put("/api/graphs/g", json={"document": GATE, "expected_version": 1})).status_code == 200
        late = await ann.put("/api/graphs/g", json={"document": ECHO, "expected_version": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
        taken = await ann.post("/api/graphs", json={"id": "g", "name": "G", "document": {"nodes": [], "edges": []}})
        assert taken.status_code == 409


async def test_an_archived_graph_is_not_listed_can_be_read_and_comes_back_when_it_is_saved() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/g", json={"document": ECHO})
        assert (await ann.delete("/api/graphs/g")).status_code == 204
        assert (await ann.get("/api/graphs")).json()["graphs"] == []
        assert (await ann.get("/api/graphs/g")).json()["is_archived"] is True
        assert (await ann.put("/api/graphs/g", json={"document": GATE})).status_code == 200
        assert [one["id"] for one in (await ann.get("/api/graphs")).json()["graphs"]] == ["g"]


async def test_a_list_comes_in_pages_that_follow_each_other() -> None:
    async with served() as server, server.client("vera") as vera:
        for at in range(5):
            await server.save(f"g{at}", ECHO)
        seen, place = [], None
        while True:
            params = {"limit": 2, **({"before": place} if place else {})}
            page = (await vera.get("/api/graphs", params=params)).json()
            seen += [one["id"] for one in page["graphs"]]
            place = page["next"]
            if place is None:
                break
        assert sorted(seen) == [f"g{at}" for at in range(5)]
        assert len(seen) == 5
        assert "document" not in page["graphs"][0]


async def test_a_document_that_is_wrong_is_told_with_every_place() -> None:
    wrong = {"nodes": [{"id": 1, "type": "input"}], "edges": [{"id": "e"}]}
    async with served() as server, server.client("ann") as ann:
        refused = await ann.put("/api/graphs/g", json={"document": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "graph_invalid")
        assert len(refused.json()["error"]["details"]) > 1
        checked = (await ann.post("/api/graphs/validate", json={"document": wrong})).json()
        assert checked["valid"] is False
        assert all(problem["path"].startswith("$") for problem in checked["problems"])
        fine = (await ann.post("/api/graphs/validate", json={"document": ECHO})).json()
        assert fine == {"valid": True, "problems": []}


async def test_the_node_types_have_handles_and_schemas() -> None:
    async with served() as server, server.client("vera") as vera:
        types = {one["type"]: one for one in (await vera.get("/api/node-types")).json()["node_types"]}
        assert types["approval"]["data_schema"]["type"] == "object"
        assert [one["name"] for one in types["approval"]["outputs"]] == ["approved", "rejected"]
        assert types["echo"]["inputs"] is None


DRAFT = {"nodes": [node("a", "no-such-type"), node("b", "output")], "edges": [edge("a", "b")]}
CYCLE = {"nodes": [node("a", "echo"), node("b", "echo")], "edges": [edge("a", "b"), edge("b", "a")]}


@pytest.mark.parametrize(("draft", "code"), [(DRAFT, "unknown_type"), (CYCLE, "cycle")])
async def test_a_draft_is_kept_and_every_answer_says_that_it_cannot_run(draft: Any, code: str) -> None:
    async with served() as server, server.client("ann") as ann:
        checked = (await ann.post("/api/graphs/validate", json={"document": draft})).json()
        assert code in [problem["code"] for problem in checked["problems"]]
        put = (await ann.put("/api/graphs/g", json={"document": draft})).json()
        posted = (await ann.post("/api/graphs", json={"id": "h", "name": "h", "document": draft})).json()
        got = (await ann.get("/api/graphs/g")).json()
        for answer in (put, posted, got):
            assert (answer["valid"], answer["problems"], answer["document"]) == (False, checked["problems"], draft)
        mended = (await ann.put("/api/graphs/g", json={"document": ECHO})).json()
        assert (mended["version"], mended["valid"], mended["problems"]) == (2, True, [])
        listed = (await ann.get("/api/graphs")).json()["graphs"]
        assert [(one["id"], one["valid"]) for one in listed] == [("g", True), ("h", False)]
        assert (await ann.get("/api/graphs/g?version=1")).json()["valid"] is False


async def test_a_graph_that_cannot_run_is_not_run_but_refused_with_everything_that_is_wrong() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chatty", CHAT)
        chat = (await ann.post("/api/chats", json={"graph_id": "chatty"})).json()
        turn = (await ann.post(f"/api/chats/{chat['id']}/messages", json={"content": "x"})).json()
        await server.host.wait(turn["run_id"])
        for graph_id in ("draft", "chatty"):
            await ann.put(f"/api/graphs/{graph_id}", json={"document": DRAFT})
        about = f"/api/chats/{chat['id']}/messages"
        asked: list[tuple[str, Any]] = [
            ("/api/runs", {"graph_id": "draft"}),
            ("/api/runs?stream=true", {"graph_id": "draft", "version": 1}),
            ("/api/agents/draft/chat", {"content": "x"}),
            (about, {"content": "x"}),
            (f"{about}/{turn['message_id']}/retry", {}),
            (f"{about}/{turn['message_id']}/continue", {}),
            (f"{about}/{turn['user_message_id']}/edit", {"content": "y"}),
        ]
        for path, body in asked:
            refused = await ann.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "graph_invalid"), path
            assert "no-such-type" in str(refused.json()["error"]["details"])
        assert len(await server.stores.runs.list()) == 1
        assert len(await server.chats.tree(chat["id"])) == 2
        old = (await ann.post("/api/runs", json={"graph_id": "chatty", "version": 1, "input": "x"})).json()
        assert (await server.host.wait(old["id"])).status == "completed"


HALF = {
    "nodes": [
        node("start", "chat-start"),
        node("out", "output"),
        node("in", "input"),
        node("a", "echo"),
        node("b", "echo"),
    ],
    "edges": [edge("start", "out"), edge("in", "a"), edge("a", "b"), edge("b", "a")],
}
"""A chat comes through it; a plain run, which enters it everywhere, would go round and round."""


async def test_a_chat_is_refused_only_what_keeps_a_chat_from_running() -> None:
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/half", json={"document": HALF})).json()["valid"] is False
        assert (await ann.post("/api/runs", json={"graph_id": "half"})).status_code == 422
        turn = (await ann.post("/api/agents/half/chat", json={"content": "x"})).json()
        assert (await server.host.wait(turn["run_id"])).status == "completed"
        assert "half" in [one["id"] for one in (await ann.get("/v1/models")).json()["data"]]
        asked = {"model": "half", "messages": [{"role": "user", "content": "x"}]}
        assert (await ann.post("/v1/chat/completions", json=asked)).status_code == 200


async def test_a_graph_that_a_chat_cannot_enter_is_run_and_not_talked_to() -> None:
    lone = {"nodes": [node("c", "echo", text="hi")], "edges": []}
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/lone", json={"document": lone})).json()["valid"] is True
        refused = (await ann.post("/api/agents/lone/chat", json={"content": "x"})).json()["error"]
        assert (refused["code"], refused["details"][0]["code"]) == ("graph_invalid", "no_chat")
        assert "chat-start" in refused["details"][0]["message"]
        assert await server.stores.chats.list() == []
        asked = {"model": "lone", "messages": [{"role": "user", "content": "x"}]}
        assert (await ann.post("/v1/chat/completions", json=asked)).status_code == 200


async def test_a_draft_can_run_as_soon_as_its_types_are_there() -> None:
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/g", json={"document": DRAFT})).json()["valid"] is False
        server.host.executors.register("no-such-type", Echo())
        assert (await ann.get("/api/graphs/g")).json()["valid"] is True
        run = (await ann.post("/api/runs", json={"graph_id": "g"})).json()
        assert (await server.host.wait(run["id"])).output == "echo"
