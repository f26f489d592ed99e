"""What an editor needs of graphs over HTTP: authors and notes, layout, differences of versions, and node types."""

from __future__ import annotations

import json
from typing import Any

from tests.server.served import CHAT, ECHO, GATE, edge, node, served


async def test_a_version_names_who_saved_it_and_why() -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        created = await ann.post("/api/graphs", json={"id": "g", "name": "G", "document": ECHO, "note": "first"})
        assert (created.json()["saved_by"], created.json()["note"]) == ("ann", "first")
        await root.put("/api/graphs/g", json={"document": GATE, "note": "with a gate"})
        versions = (await ann.get("/api/graphs/g/versions")).json()
        assert [(one["saved_by"], one["note"]) for one in versions] == [("root", "with a gate"), ("ann", "first")]
        assert {one["owner"] for one in versions} == {"ann"}, "saving another's graph does not take it over"
        assert (await ann.put("/api/graphs/g", json={"document": ECHO, "note": "x" * 2_001})).status_code == 422


async def test_the_text_of_a_document_comes_back_byte_for_byte() -> None:
    text = f"\n{json.dumps(ECHO, indent=3)}\t\n".replace('"nodes"', '"n\\u006fdes"')
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        saved = await ann.put("/api/graphs/g", json={"document": ECHO, "source": text})
        assert saved.json()["document"] == ECHO
        found = await bob.get("/api/graphs/g/source")
        assert (found.text, found.headers["content-type"]) == (text, "application/json")
        await ann.put("/api/graphs/g", json={"document": GATE})
        assert (await ann.get("/api/graphs/g/source")).status_code == 204
        assert (await ann.get("/api/graphs/g/source?version=1")).text == text
        assert (await ann.get("/api/graphs/g/source?version=3")).status_code == 404
        assert (await ann.get("/api/graphs/none/source")).status_code == 404
        another = await ann.put("/api/graphs/g", json={"document": ECHO, "source": json.dumps(GATE)})
        assert another.status_code == 422
        assert "the JSON text of the document" in another.json()["error"]["message"]


async def test_moving_a_node_makes_no_version() -> None:
    async with served() as server, server.client("ann") as ann, server.client("bob") as bob:
        await ann.put("/api/graphs/g", json={"document": ECHO})
        moved = {"positions": {"n": {"x": 10.5, "y": -3}, "each/read": {"x": 0, "y": 0}}}
        assert (await ann.patch("/api/graphs/g/layout", json=moved)).json() == moved
        removed = await ann.patch("/api/graphs/g/layout", json={"positions": {"each/read": None}})
        assert (
            removed.json()
            == (await bob.get("/api/graphs/g/layout")).json()
            == {"positions": {"n": {"x": 10.5, "y": -3}}}
        )
        assert [one["version"] for one in (await ann.get("/api/graphs/g/versions")).json()] == [1]
        assert (await bob.patch("/api/graphs/g/layout", json=moved)).status_code == 403
        assert (await ann.patch("/api/graphs/none/layout", json=moved)).status_code == 404
        assert (await ann.get("/api/graphs/none/layout")).status_code == 404
        for position in ({"x": 1}, {"x": "1", "y": 2}, {"x": 1e9, "y": 0}, {"x": 1, "y": 2, "z": 3}, [1, 2]):
            refused = await ann.patch("/api/graphs/g/layout", json={"positions": {"n": position}})
            assert refused.status_code == 422, position


async def test_a_diff_lists_changes_by_node_and_edge_without_positions() -> None:
    before: dict[str, Any] = {
        "nodes": [
            node("a", "echo"),
            node("b", "echo", n=1, t={"u": [1]}),
            node("c", "echo"),
        ],
        "edges": [edge("a", "b"), edge("b", "c")],
        "title": "old",
    }
    after = {
        "nodes": [
            node("d", "echo"),
            node("b", "echo", n=1.0, t={"u": [2]}, new=None),
            {**node("a", "echo"), "position": {"x": 9, "y": 9}},
        ],
        "edges": [edge("a", "b"), edge("b", "d")],
    }
    async with served() as server, server.client("ann") as ann:
        for document in (before, after):
            await ann.put("/api/graphs/g", json={"document": document})
        found = (await ann.get("/api/graphs/g/diff?before=1")).json()
        assert (found["before"]["version"], found["after"]["version"], found["truncated"]) == (1, 2, False)
        shown = {(one["kind"], one["what"], one["id"], one["path"]) for one in found["changes"]}
        assert shown == {
            ("removed", "node", "c", ""),
            ("added", "node", "d", ""),
            ("changed", "node", "b", ".data.n"),
            ("changed", "node", "b", ".data.t.u"),
            ("added", "node", "b", ".data.new"),
            ("removed", "edge", before["edges"][1]["id"], ""),
            ("added", "edge", after["edges"][1]["id"], ""),
            ("removed", "graph", "", ".title"),
        }
        by_path = {one["path"]: one for one in found["changes"] if one["id"] == "b"}
        assert (by_path[".data.t.u"]["before"], by_path[".data.t.u"]["after"]) == ([1], [2])
        assert (await ann.get("/api/graphs/g/diff?before=2&after=2")).json()["changes"] == []
        for wrong, status in (("before=3", 404), ("before=0", 422), ("after=1", 422)):
            assert (await ann.get(f"/api/graphs/g/diff?{wrong}")).status_code == status, wrong


async def test_graphs_are_listed_by_text_and_archived_ones_on_request() -> None:
    async with served() as server, server.client("ann") as ann:
        for id, name in (("one", "Support"), ("two", "Billing"), ("three", "SUPPORT, old")):
            await ann.put(f"/api/graphs/{id}", json={"document": ECHO, "name": name})
        await ann.delete("/api/graphs/three")

        async def ids(query: str) -> list[str]:
            return [one["id"] for one in (await ann.get(f"/api/graphs?{query}")).json()["graphs"]]

        assert await ids("q=suPPort") == ["one"]
        assert await ids("q=t") == ["one", "two"]
        assert await ids("q=") == ["one", "two"]
        assert await ids("archived=true") == ["three"]
        assert (await ann.get("/api/graphs?archived=perhaps")).status_code == 422


async def test_node_types_have_what_a_palette_and_a_form_show() -> None:
    async with served() as server, server.client("vera") as vera:
        found = (await vera.get("/api/node-types")).json()
        types = found["node_types"]
        assert ["number", "text"] in found["conversions"]
        by_type = {one["type"]: one for one in types}
        agent = by_type["agent"]
        assert (agent["title"], agent["category"], agent["runs"]) == ("Agent", "Models", True)
        assert [(one["name"], one["channel"], one["many"]) for one in agent["inputs"]] == [
            ("input", "flow", "one"),
            ("tools", "link", "list"),
        ]
        properties = agent["data_schema"]["properties"]
        assert properties["model"]["x-penstock-picker"] == "model"
        assert properties["tools"]["x-penstock-picker"] == "tool"
        template = by_type["prompt-template"]["data_schema"]["properties"]["template"]
        assert template["x-penstock-handles"] == "placeholders"
        policy = agent["data_schema"]["$defs"]["ErrorPolicyData"]["properties"]
        assert policy["timeout_ms"]["description"]
        assert by_type["tool"]["runs"] is False
        assert (by_type["echo"]["title"], by_type["echo"]["category"]) == ("echo", "Other")
        categories = list(dict.fromkeys(one["category"] for one in types))
        assert categories[0] == "Begin and end"
        assert categories[-1] == "Other"


async def test_a_chat_graph_keeps_fields_that_no_one_here_knows() -> None:
    document = {
        **CHAT,
        "viewport": {"zoom": 1.0},
        "nodes": [*CHAT["nodes"], {**node("n", "of-another-server"), "x": [1.50]}],
    }
    async with served() as server, server.client("ann") as ann:
        saved = (await ann.put("/api/graphs/g", json={"document": document})).json()
        assert saved["document"] == document == (await ann.get("/api/graphs/g")).json()["document"]
        assert [one["code"] for one in saved["problems"]] == ["unknown_type"]


async def test_validate_returns_the_handles_of_each_node_as_its_data_makes_them() -> None:
    inside = {"nodes": [node("read", "prompt-template", template="{{ river }} {{ length")], "edges": []}
    document: dict[str, Any] = {
        "nodes": [
            node("brief", "prompt-template", template="{{ topic }} in {{ pages }}, \\{{ no }} {{ topic.name }}"),
            node("ask", "agent", model="m", error_policy={"on_error": "skip", "fallback_handle": "failed"}),
            node("each", "map", graph=inside),
            node("odd", "of-another-server", graph=inside, template="{{ x }}"),
        ],
        "edges": [
            edge("brief", "ask"),
            {"id": "x", "source": "odd", "sourceHandle": "part", "target": "ask", "targetHandle": "wrong",
             "data": {"channel": "link"}},
            {"id": "y", "source": "brief", "target": "odd", "data": {"channel": "neither"}},
        ],
    }  # fmt: skip
    async with served() as server, server.client("ann") as ann:
        found = (await ann.post("/api/graphs/validate", json={"document": document})).json()
        assert found["valid"] is False
        handles = found["handles"]
        assert list(handles) == ["brief", "ask", "each", "each/read", "odd"]

        def side(path: str, side: str) -> list[tuple[str, str, bool]]:
            return [(one["name"], one["channel"], one["declared"]) for one in handles[path][side]]

        assert side("brief", "inputs") == [("topic", "flow", True), ("pages", "flow", True)]
        assert side("brief", "outputs") == [("output", "flow", True)]
        assert side("ask", "inputs") == [("input", "flow", True), ("tools", "link", True), ("wrong", "link", False)]
        assert ("failed", "flow", True) in side("ask", "outputs")
        assert side("each/read", "inputs") == [("river", "flow", True)]
        assert side("odd", "inputs") == [("input", "flow", True)], "nothing is known of a type that is not here"
        assert side("odd", "outputs") == [("part", "link", True)]
        assert handles["ask"]["inputs"][1]["many"] == "list"

        brief = (await ann.post("/api/graphs/validate?handles=false", json={"document": document})).json()
        assert (brief["problems"], brief["handles"]) == (found["problems"], None)
        for broken in ({}, {"nodes": 3}, {"nodes": [None, {"id": 1}, {"id": "a"}], "edges": [[], {}]}):
            answer = await ann.post("/api/graphs/validate", json={"document": broken})
            assert (answer.status_code, answer.json()["valid"]) == (200, False), broken
