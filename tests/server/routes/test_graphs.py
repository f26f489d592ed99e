"""Graphs over HTTP: versions, conflicts, archives, and what is wrong with a document."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.server.routes.graphs import RESERVED
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


async def test_a_graph_cannot_have_the_name_of_a_route() -> None:
    assert {"validate"} == RESERVED
    async with served() as server, server.client("ann") as ann:
        refused = await ann.post("/api/graphs", json={"id": "validate", "name": "V", "document": ECHO})
        assert (refused.status_code, refused.json()["error"]["path"]) == (422, "$.id")
        assert "another route" in refused.json()["error"]["message"]
        assert (await ann.put("/api/graphs/validate", json={"document": ECHO})).status_code == 405
        assert await server.stores.graphs.list() == []


async def test_concurrent_changes_of_a_version_do_not_overwrite_each_other() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/g", json={"document": ECHO, "expected_version": 0})
        assert (await ann.put("/api/graphs/g", json={"document": GATE, "expected_version": 1})).status_code == 200
        late = await ann.put("/api/graphs/g", json={"document": ECHO, "expected_version": 1})
        assert (late.status_code, late.json()["error"]["code"]) == (409, "conflict")
        taken = await ann.post("/api/graphs", json={"id": "g", "name": "G", "document": {"nodes": [], "edges": []}})
        assert taken.status_code == 409


async def test_an_archived_graph_is_unlisted_readable_and_restored_when_saved() -> None:
    async with served() as server, server.client("ann") as ann:
        await ann.put("/api/graphs/g", json={"document": ECHO})
        assert (await ann.delete("/api/graphs/g")).status_code == 204
        assert (await ann.get("/api/graphs")).json()["graphs"] == []
        assert (await ann.get("/api/graphs/g")).json()["is_archived"] is True
        for save in (
            lambda: ann.put("/api/graphs/g", json={"document": GATE}),
            lambda: ann.post("/api/graphs", json={"id": "g", "name": "g", "document": GATE}),
        ):
            await ann.delete("/api/graphs/g")
            assert (await save()).json()["is_archived"] is False
            assert [one["id"] for one in (await ann.get("/api/graphs")).json()["graphs"]] == ["g"]


async def test_an_archived_graph_starts_no_run_through_any_route() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chatty", CHAT)
        await ann.post("/api/chats", json={"graph_id": "chatty", "chat_id": "old"})
        turn = (await ann.post("/api/chats/old/messages", json={"content": "x", "run_id": "r"})).json()
        await server.host.wait("r")
        await ann.delete("/api/graphs/chatty")
        about = "/api/chats/old/messages"
        requests: list[tuple[str, Any]] = [
            ("/api/runs", {"graph_id": "chatty"}),
            ("/api/runs?stream=true", {"graph_id": "chatty", "version": 1, "run_id": "s"}),
            ("/api/agents/chatty/chat", {"content": "x"}),
            ("/api/agents/chatty/chat", {"content": "x", "run_id": "t"}),
            ("/api/chats", {"graph_id": "chatty"}),
            ("/api/chats", {"graph_id": "chatty", "chat_id": "new"}),
            (about, {"content": "x"}),
            (f"{about}/{turn['message_id']}/retry", {}),
            (f"{about}/{turn['message_id']}/continue", {"run_id": "u"}),
            (f"{about}/{turn['user_message_id']}/edit", {"content": "y"}),
        ]
        for path, body in requests:
            refused = await ann.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict"), path
            assert "(PUT /api/graphs/chatty restores it)" in refused.json()["error"]["message"]
        assert len(await server.stores.runs.list()) == 1
        assert [one.id for one in await server.stores.chats.list()] == ["old"]
        assert len(await server.chats.tree("old")) == 2
        again = (await ann.post(about, json={"content": "x", "run_id": "r"})).json()
        assert again["message_id"] == turn["message_id"], "the turn from before is returned"
        assert (await ann.post("/api/chats", json={"graph_id": "chatty", "chat_id": "old"})).status_code == 201
        await ann.put("/api/graphs/chatty", json={"document": CHAT})
        assert (await ann.post(about, json={"content": "x"})).status_code == 200


async def test_graphs_are_listed_in_pages() -> None:
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


async def test_an_invalid_document_is_refused_with_every_path() -> None:
    wrong = {"nodes": [{"id": 1, "type": "input"}], "edges": [{"id": "e"}]}
    async with served() as server, server.client("ann") as ann:
        refused = await ann.put("/api/graphs/g", json={"document": wrong})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "graph_invalid")
        assert len(refused.json()["error"]["details"]) > 1
        checked = (await ann.post("/api/graphs/validate", json={"document": wrong})).json()
        assert checked["valid"] is False
        assert all(problem["path"].startswith("$") for problem in checked["problems"])
        fine = (await ann.post("/api/graphs/validate", json={"document": ECHO})).json()
        assert (fine["valid"], fine["problems"]) == (True, [])


async def test_the_node_types_have_handles_and_schemas() -> None:
    async with served() as server, server.client("vera") as vera:
        types = {one["type"]: one for one in (await vera.get("/api/node-types")).json()["node_types"]}
        assert types["approval"]["data_schema"]["type"] == "object"
        assert [one["name"] for one in types["approval"]["outputs"]] == ["approved", "rejected"]
        assert types["echo"]["inputs"] is None


DRAFT = {"nodes": [node("a", "no-such-type"), node("b", "output")], "edges": [edge("a", "b")]}
CYCLE = {"nodes": [node("a", "echo"), node("b", "echo")], "edges": [edge("a", "b"), edge("b", "a")]}


EMPTY: Any = {"nodes": [], "edges": []}
PARTS = {"nodes": [node("t", "toolset")], "edges": []}
STRANGE = {"nodes": [node("in", "input"), node("a", "agent", model="gpt-9")], "edges": [edge("in", "a")]}


@pytest.mark.parametrize(
    ("draft", "code"),
    [(DRAFT, "unknown_type"), (CYCLE, "cycle"), (EMPTY, "empty"), (PARTS, "empty"), (STRANGE, "unknown_model")],
    ids=lambda one: one if isinstance(one, str) else "",
)
async def test_a_draft_is_stored_and_marked_as_invalid_everywhere(draft: Any, code: str) -> None:
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


async def test_a_run_of_an_invalid_graph_is_refused_with_all_problems() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("chatty", CHAT)
        chat = (await ann.post("/api/chats", json={"graph_id": "chatty"})).json()
        turn = (await ann.post(f"/api/chats/{chat['id']}/messages", json={"content": "x"})).json()
        await server.host.wait(turn["run_id"])
        for graph_id in ("draft", "chatty"):
            await ann.put(f"/api/graphs/{graph_id}", json={"document": DRAFT})
        about = f"/api/chats/{chat['id']}/messages"
        requests: list[tuple[str, Any]] = [
            ("/api/runs", {"graph_id": "draft"}),
            ("/api/runs?stream=true", {"graph_id": "draft", "version": 1}),
            ("/api/agents/draft/chat", {"content": "x"}),
            (about, {"content": "x"}),
            (f"{about}/{turn['message_id']}/retry", {}),
            (f"{about}/{turn['message_id']}/continue", {}),
            (f"{about}/{turn['user_message_id']}/edit", {"content": "y"}),
        ]
        for path, body in requests:
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


async def test_a_chat_is_refused_only_for_problems_that_affect_chats() -> None:
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/half", json={"document": HALF})).json()["valid"] is False
        assert (await ann.post("/api/runs", json={"graph_id": "half"})).status_code == 422
        turn = (await ann.post("/api/agents/half/chat", json={"content": "x"})).json()
        assert (await server.host.wait(turn["run_id"])).status == "completed"
        assert "half" in [one["id"] for one in (await ann.get("/v1/models")).json()["data"]]
        requests = {"model": "half", "messages": [{"role": "user", "content": "x"}]}
        assert (await ann.post("/v1/chat/completions", json=requests)).status_code == 200


async def test_a_graph_without_a_chat_entry_runs_but_has_no_chats() -> None:
    lone = {"nodes": [node("c", "echo", text="hi")], "edges": []}
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/lone", json={"document": lone})).json()["valid"] is True
        refused = (await ann.post("/api/agents/lone/chat", json={"content": "x"})).json()["error"]
        assert (refused["code"], refused["details"][0]["code"]) == ("graph_invalid", "no_chat")
        assert "chat-start" in refused["details"][0]["message"]
        assert await server.stores.chats.list() == []
        requests = {"model": "lone", "messages": [{"role": "user", "content": "x"}]}
        assert (await ann.post("/v1/chat/completions", json=requests)).status_code == 200


async def test_a_draft_can_run_once_its_node_types_are_registered() -> None:
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/g", json={"document": DRAFT})).json()["valid"] is False
        server.host.executors.register("no-such-type", Echo())
        assert (await ann.get("/api/graphs/g")).json()["valid"] is True
        run = (await ann.post("/api/runs", json={"graph_id": "g"})).json()
        assert (await server.host.wait(run["id"])).output == "echo"


def around(inside: Any) -> Any:
    return {"nodes": [node("in", "input"), node("sub", "subgraph", graph=inside)], "edges": [edge("in", "sub")]}


async def test_a_graph_with_an_unknown_model_is_refused_with_the_available_models() -> None:
    async with served(models={"mine": ScriptedModel(["hm"])}) as server, server.client("ann") as ann:
        for graph_id, document in (("g", STRANGE), ("deep", around(around(STRANGE)))):
            await ann.put(f"/api/graphs/{graph_id}", json={"document": document})
            requests = {"model": graph_id, "messages": [{"role": "user", "content": "x"}]}
            refused = (await ann.post("/api/runs", json={"graph_id": graph_id})).json()["error"]
            assert (refused["code"], refused["details"][0]["code"]) == ("graph_invalid", "unknown_model")
            assert refused["details"][0]["path"].endswith("nodes[1].data.model")
            assert "'gpt-9'; use one of: mine, or a provider's" in refused["details"][0]["message"]
            answer = await ann.post("/v1/chat/completions", json=requests)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "graph_invalid")
            assert "gpt-9" in answer.json()["error"]["message"]
        assert (await ann.get("/v1/models")).json()["data"] == []
        assert await server.stores.runs.list() == []


async def test_a_model_may_be_added_later_or_be_a_providers_or_a_script() -> None:
    models: dict[str, Any] = {}
    async with served(models=models) as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/g", json={"document": STRANGE})).json()["valid"] is False
        models["gpt-9"] = ScriptedModel(["hm"])
        assert (await ann.get("/api/graphs/g")).json()["valid"] is True
        run = (await ann.post("/api/runs", json={"graph_id": "g", "input": "x"})).json()
        assert (await server.host.wait(run["id"])).output == "hm"
        for model, is_valid in (
            ("openai:gpt-4o", True),
            ({"script": ["hm"]}, True),
            ("openai:", False),
            ("openai-compatible:http://127.0.0.1:1/v1:m", False),
            ("unknown:m", False),
            ("модель", False),
        ):
            document = {"nodes": [node("a", "agent", model=model)], "edges": []}
            checked = (await ann.post("/api/graphs/validate", json={"document": document})).json()
            assert (checked["valid"], len(checked["problems"])) == (is_valid, 0 if is_valid else 1), model


async def test_custom_executors_may_use_any_model_name() -> None:
    async with served() as server, server.client("ann") as ann:
        document = {"nodes": [node("a", "echo", model="T", graph={"nodes": 3})], "edges": []}
        assert (await ann.put("/api/graphs/g", json={"document": document})).json()["valid"] is True


async def test_a_list_says_which_graphs_can_chat_and_which_are_made_for_it() -> None:
    start = {"id": "start", "type": "chat-start", "data": {}}
    answer, lost = node("a", "echo"), node("a", "no-such-type")
    async with served() as server, server.client("ann") as ann:
        graphs = {"plain": [{**answer, "type": "input"}], "talks": [start, answer], "draft": [start, lost]}
        for id, nodes in graphs.items():
            document = {"nodes": nodes, "edges": []}
            assert (await ann.put(f"/api/graphs/{id}", json={"document": document})).is_success
        listed = {one["id"]: one for one in (await ann.get("/api/graphs")).json()["graphs"]}
        found = {id: (listed[id]["chat"], listed[id]["made_for_chat"]) for id in ("plain", "talks", "draft")}
        assert found == {"plain": (True, False), "talks": (True, True), "draft": (False, True)}
        assert (await ann.get("/api/graphs/talks")).json()["chat"] is True
        agents = {one["id"] for one in (await ann.get("/api/agents")).json()["agents"]}
        assert agents == {id for id, one in listed.items() if one["chat"]}
