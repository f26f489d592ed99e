"""Graphs over HTTP: versions, conflicts, archives, and what is wrong with a document."""

from __future__ import annotations

from tests.server.served import ECHO, GATE, served


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
