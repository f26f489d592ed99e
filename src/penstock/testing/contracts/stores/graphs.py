"""The contract of every `GraphStore`."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, GraphRecord
from penstock.testing.contracts.stores.suite import (
    NOT_JSON,
    NOT_NAMES,
    NOT_OBJECTS,
    ODD_NAMES,
    ODD_VALUES,
    StoreBundle,
    StoreContract,
    fresh,
    raises,
    until_nothing,
)

DOCUMENT: dict[str, Any] = {"nodes": [{"id": "n", "type": "text"}], "edges": []}


async def saved(stores: StoreBundle, id: str = "g", document: Any = None, **changes: Any) -> GraphRecord:
    fields = {"owner": "ann", "name": "Graph", "now_ms": 1_000, **changes}
    return await stores.graphs.save(id, fields.pop("owner"), fields.pop("name"), document or DOCUMENT, **fields)


class GraphStoreContract(StoreContract):
    """Graphs by id: each version is stored, none is stored twice, none is lost to another writer."""

    @fresh
    async def test_a_graph_is_read_back_unchanged(self, stores: StoreBundle) -> None:
        graph = await saved(stores, name="Gr\x00\u00fc\ud83d")
        assert (graph.id, graph.version, graph.owner, graph.name) == ("g", 1, "ann", "Gr\x00\u00fc\ud83d")
        assert (graph.document, graph.created_ms, graph.is_archived) == (DOCUMENT, 1_000, False)
        assert await stores.graphs.get("g") == graph
        assert await stores.graphs.get("g", 1) == graph
        assert await stores.graphs.head("g") == await stores.graphs.head("g", 1) == ("g", 1, "ann", False)
        assert list(await stores.graphs.versions("g")) == [graph]
        assert list(await stores.graphs.list()) == [graph]

    @fresh
    async def test_an_unknown_graph_or_version_is_none(self, stores: StoreBundle) -> None:
        for id in ("unknown", "", *NOT_NAMES):
            assert await stores.graphs.get(id) is None
            assert await stores.graphs.head(id) is None
            assert list(await stores.graphs.versions(id)) == list(await stores.graphs.list(owner=id)) == []
        await saved(stores)
        for version in (0, 2, -1, 10**9):
            assert await stores.graphs.get("g", version) is None
            assert await stores.graphs.head("g", version) is None

    @fresh
    async def test_documents_are_read_back_exactly_and_are_copies(self, stores: StoreBundle) -> None:
        document = {f"v{number}": value for number, value in enumerate(ODD_VALUES)}
        await saved(stores, document=document)
        found = await stores.graphs.get("g")
        assert found is not None
        assert repr(found.document) == repr(document), "keys in the order they had"
        found.document.clear()  # type: ignore[attr-defined]
        again = await stores.graphs.get("g")
        assert again is not None
        assert again.document == document

    @fresh
    async def test_a_graph_that_cannot_be_stored_is_refused(self, stores: StoreBundle) -> None:
        for value in NOT_JSON:
            with raises(InvalidValue):
                await saved(stores, document={"data": value})
        for document in NOT_OBJECTS:
            with raises(InvalidValue):
                await stores.graphs.save("g", "ann", "Graph", document, now_ms=1)
        for name in NOT_NAMES:
            with raises(InvalidValue):
                await saved(stores, name)
            with raises(InvalidValue):
                await saved(stores, owner=name)
        assert list(await stores.graphs.list()) == []

    @fresh
    async def test_saving_an_unchanged_graph_makes_no_new_version(self, stores: StoreBundle) -> None:
        first = await saved(stores, document={"a": 1, "b": 2})
        for expected in (None, 0, 1, 7):
            again = await saved(stores, document={"b": 2, "a": 1}, now_ms=9_000, expected_version=expected)
            assert again == first
        assert len(await stores.graphs.versions("g")) == 1

    @fresh
    async def test_every_change_is_a_version(self, stores: StoreBundle) -> None:
        documents: list[dict[str, Any]] = [{"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {}, {"a": 1}]
        for number, document in enumerate(documents, 1):
            graph = await stores.graphs.save("g", "ann", "Graph", document, now_ms=number)
            assert (graph.version, graph.created_ms) == (number, number)
        renamed = await stores.graphs.save("g", "ann", "Other", documents[-1], now_ms=8)
        assert renamed.version == 8
        versions = await stores.graphs.versions("g")
        assert [graph.version for graph in versions] == [8, 7, 6, 5, 4, 3, 2, 1]
        assert await stores.graphs.get("g") == versions[0]
        assert await stores.graphs.get("g", 2) == versions[-2]
        assert await stores.graphs.head("g") == ("g", 8, "ann", False)
        assert await stores.graphs.head("g", 2) == ("g", 2, "ann", False)
        assert versions[-1].digest == versions[1].digest == versions[0].digest, "the same document"
        assert len({graph.digest for graph in versions}) == 6

    @fresh
    async def test_the_digest_does_not_depend_on_the_order_of_keys(self, stores: StoreBundle) -> None:
        first = await saved(stores, "g", {"a": {"x": 1, "y": "\u00fc\U0001f30a"}, "b": []})
        other = await saved(stores, "h", {"b": [], "a": {"y": "\u00fc\U0001f30a", "x": 1}})
        assert first.digest == other.digest
        assert len(first.digest) == 64

    @fresh
    async def test_a_version_that_is_not_the_expected_one_is_a_conflict(self, stores: StoreBundle) -> None:
        for expected in (1, 5):
            with raises(Conflict):
                await saved(stores, expected_version=expected)
        assert await stores.graphs.get("g") is None
        await saved(stores, expected_version=0)
        for expected in (0, 2):
            with raises(Conflict):
                await saved(stores, document={"new": True}, expected_version=expected)
        assert (await saved(stores, document={"new": True}, expected_version=1)).version == 2

    @fresh
    async def test_another_owners_graph_is_a_conflict(self, stores: StoreBundle) -> None:
        graph = await saved(stores)
        for document in (DOCUMENT, {"new": True}):
            with raises(Conflict):
                await saved(stores, document=document, owner="bob")
        assert list(await stores.graphs.versions("g")) == [graph]

    @fresh
    async def test_of_concurrent_saves_from_one_version_one_succeeds(self, stores: StoreBundle) -> None:
        await saved(stores)
        async with self.another(stores) as other:
            both = (stores, other)

            async def save(number: int) -> int | None:
                try:
                    graph = await saved(both[number % 2], document={"by": number}, expected_version=1)
                except Conflict:
                    return None
                return graph.version

            versions = await asyncio.gather(*map(save, range(self.claimants)))
        assert [version for version in versions if version is not None] == [2]
        assert len(await stores.graphs.versions("g")) == 2

    @fresh
    async def test_concurrent_saves_without_an_expected_version_each_make_a_version(self, stores: StoreBundle) -> None:
        async with self.another(stores) as other:
            both = (stores, other)
            saves = [saved(both[number % 2], document={"by": number}) for number in range(self.claimants)]
            graphs = await asyncio.gather(*saves)
        assert sorted(graph.version for graph in graphs) == [*range(1, self.claimants + 1)]

    @fresh
    async def test_graphs_are_listed_by_id_a_page_at_a_time(self, stores: StoreBundle) -> None:
        for id in ODD_NAMES:
            await saved(stores, id)
            await saved(stores, id, {"version": 2})
        await saved(stores, "another's", owner="bob")
        found = await until_nothing(lambda last: stores.graphs.list(owner="ann", before=last, limit=4))
        assert {graph.version for graph in found} == {2}
        assert [graph.id for graph in found] == sorted(ODD_NAMES), "by code points, as Python sorts text"
        assert len(await stores.graphs.list()) == len(ODD_NAMES) + 1
        assert list(await stores.graphs.list(limit=0)) == []
        with raises(InvalidValue):
            await stores.graphs.list(limit=-1)

    @fresh
    async def test_an_archived_graph_is_not_listed_and_can_be_read(self, stores: StoreBundle) -> None:
        await saved(stores, "g")
        await saved(stores, "g", {"new": True})
        await saved(stores, "h")
        for _ in range(2):
            await stores.graphs.archive("g")
            assert [graph.id for graph in await stores.graphs.list()] == ["h"]
        assert [graph.is_archived for graph in await stores.graphs.versions("g")] == [True, True]
        first = await stores.graphs.get("g", 1)
        assert first is not None
        assert first.is_archived
        assert await stores.graphs.head("g", 1) == ("g", 1, "ann", True)
        third = await saved(stores, "g", {"newer": True})
        assert (third.version, third.is_archived) == (3, True), "saving does not put it back"
        for _ in range(2):
            await stores.graphs.archive("g", is_archived=False)
            assert [graph.id for graph in await stores.graphs.list()] == ["g", "h"]
        with raises(KeyError):
            await stores.graphs.archive("unknown")

    @fresh
    async def test_a_version_has_its_author_and_note(self, stores: StoreBundle) -> None:
        first = await saved(stores)
        assert (first.saved_by, first.note) == ("", "")
        second = await saved(stores, document={"new": True}, saved_by="bob", note="more\x00 \u00fc\ud83d")
        assert (second.owner, second.saved_by, second.note) == ("ann", "bob", "more\x00 \u00fc\ud83d")
        assert await stores.graphs.get("g") == second
        assert list(await stores.graphs.versions("g")) == [second, first]
        again = await saved(stores, document={"new": True}, saved_by="eve", note="nothing is new")
        assert again == second, "an unchanged graph keeps its author"
        with raises(InvalidValue):
            await saved(stores, document={}, saved_by="a\x00b")

    @fresh
    async def test_the_text_of_a_document_is_kept_with_its_version(self, stores: StoreBundle) -> None:
        text = '\n{ "n" : 1E2,\t"\\u00fc": [1.0 , "\u00fc\\ud83d"],"n":100.0 }\n\n'
        document = {"n": 100.0, "\u00fc": [1.0, "\u00fc\ud83d"]}
        first = await saved(stores, document=document, source=text)
        assert first.document == document
        assert (await stores.graphs.get("g")) == first
        assert await stores.graphs.source("g") == await stores.graphs.source("g", 1) == text
        await saved(stores, document={"new": True})
        assert await stores.graphs.source("g") == ""
        assert await stores.graphs.source("g", 1) == text
        assert await stores.graphs.source("g", 9) == await stores.graphs.source("unknown") == ""
        assert (await saved(stores, document={"a": "\ufffd"}, source='{"a":"\ufffd"}')).document == {"a": "\ufffd"}
        assert (await stores.graphs.get("g", 3)) is not None
        assert await stores.graphs.source("g") == "", "it looks like a damaged column"
        await stores.graphs.save("g", "ann", "G", {"new": True}, now_ms=1)
        for wrong in ("{", '{"new": 1}', '{"new": NaN}', "[" * 100_000, '{"a": "\ud83d"}'):
            with raises(InvalidValue):
                await saved(stores, document={"new": True}, source=wrong)
        assert len(await stores.graphs.versions("g")) == 4

    @fresh
    async def test_positions_are_merged_and_make_no_version(self, stores: StoreBundle) -> None:
        await saved(stores)
        assert await stores.graphs.layout("g") == await stores.graphs.layout("unknown") == {}
        first = {"n": {"x": 1.5, "y": -2}, "m/o": {"x": 0, "y": 0}}
        assert await stores.graphs.arrange("g", first) == first
        assert await stores.graphs.arrange("g", {"n": {"x": 3, "y": 4}, "m/o": None}) == {"n": {"x": 3, "y": 4}}
        assert await stores.graphs.layout("g") == {"n": {"x": 3, "y": 4}}
        assert len(await stores.graphs.versions("g")) == 1
        await saved(stores, document={"new": True})
        assert await stores.graphs.layout("g") == {"n": {"x": 3, "y": 4}}, "positions outlive a version"
        with raises(KeyError):
            await stores.graphs.arrange("unknown", {})
        with raises(InvalidValue):
            await stores.graphs.arrange("g", {"n": float("nan")})

    @fresh
    async def test_graphs_are_found_by_a_part_of_their_id_or_name(self, stores: StoreBundle) -> None:
        await saved(stores, "Pipe_line", name="First")
        await saved(stores, "other", name="Caf\u00e9 %PIPE")
        await saved(stores, "third", name="third")
        await stores.graphs.archive("third")
        cases: tuple[tuple[str, list[str]], ...] = (
            ("pipe", ["Pipe_line", "other"]), ("PIPE_", ["Pipe_line"]), ("%", ["other"]), ("\u00e9", ["other"]),
            ("i", ["Pipe_line", "other"]), ("none", []), ("", ["Pipe_line", "other"]), ("third", []),
        )  # fmt: skip
        for text, found in cases:
            assert [graph.id for graph in await stores.graphs.list(text=text)] == found, text
        assert [graph.id for graph in await stores.graphs.list(text="THI", is_archived=True)] == ["third"]
        assert [graph.id for graph in await stores.graphs.list(is_archived=True)] == ["third"]
