"""Graphs over the starts of a server: examples are whose who changes them, files are followed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.loading.served import GraphFile
from penstock.cli.service.seed_graphs import OWNER, SavedGraphs, save_example_graphs, save_graph_files
from penstock.hosting.host import RunHost
from penstock.nodes import executors
from penstock.server.examples import EXAMPLES, SHIPPED, ExampleModel, example_graphs
from penstock.storage.memory import MemoryStores

DOCUMENTS = example_graphs()
ECHO: Any = {"nodes": [{"id": "in", "type": "input", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}
OTHER: Any = {"nodes": [{"id": "other", "type": "input", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}
STRANGE: Any = {
    "nodes": [{"id": "a", "type": "agent", "position": {"x": 0, "y": 0}, "data": {"model": "gpt-9"}}],
    "edges": [],
}


def host_on(stores: MemoryStores) -> RunHost:
    return RunHost(stores, executors=executors(), services={"models": {"example": ExampleModel()}})


def examples(**changed: Any) -> list[GraphFile]:
    """Those of the package, or of one in which some of them were changed."""
    return [GraphFile(id, changed.get(id, one), f"example {id}", EXAMPLES[id]) for id, one in DOCUMENTS.items()]


async def put(stores: MemoryStores, graph_id: str, document: Any, name: str | None = None) -> None:
    known = await stores.graphs.get(graph_id)
    assert known is not None
    await stores.graphs.save(graph_id, known.owner, name or known.name, document, now_ms=1)


async def versions(stores: MemoryStores, graph_id: str) -> list[Any]:
    return [one.document for one in reversed(await stores.graphs.versions(graph_id))]


async def test_every_example_is_known_by_its_digest() -> None:
    stores = MemoryStores()
    for id, document in DOCUMENTS.items():
        saved = await stores.graphs.save(id, OWNER, id, document, now_ms=0)
        assert saved.digest in SHIPPED[id], "add it; those of earlier packages stay"
    assert SHIPPED.keys() == EXAMPLES.keys()


async def test_changed_example_is_kept_at_the_next_start() -> None:
    stores = MemoryStores()
    first = await save_example_graphs(host_on(stores), examples())
    assert (first.ids, first.notes, first.to_try) == (["assistant", "pipeline", "publish"], [], "assistant")
    await put(stores, "assistant", ECHO)
    second = await save_example_graphs(host_on(stores), examples())
    assert (second.ids, second.notes, second.to_try) == (first.ids, [], "pipeline"), "an echo does not converse"
    assert await versions(stores, "assistant") == [DOCUMENTS["assistant"], ECHO]
    assert len(await versions(stores, "pipeline")) == 1


async def test_unchanged_example_is_updated_with_the_package() -> None:
    stores = MemoryStores()
    await save_example_graphs(host_on(stores), examples())
    await put(stores, "assistant", DOCUMENTS["assistant"], name="My own")
    await save_example_graphs(host_on(stores), examples(assistant=ECHO))
    newest = await stores.graphs.get("assistant")
    assert newest is not None
    assert (newest.version, newest.document, newest.name) == (3, ECHO, "My own")


async def test_an_example_that_was_archived_is_not_brought_back_nor_offered() -> None:
    stores = MemoryStores()
    await save_example_graphs(host_on(stores), examples())
    await stores.graphs.archive("assistant")
    kept = await save_example_graphs(host_on(stores), examples(assistant=ECHO))
    assert kept.ids == ["pipeline", "publish"]
    assert len(await versions(stores, "assistant")) == 1


async def test_user_graph_with_the_name_of_an_example_is_kept() -> None:
    stores = MemoryStores()
    await stores.graphs.save("assistant", "ann", "Mine", DOCUMENTS["assistant"], now_ms=0)
    await save_example_graphs(host_on(stores), examples(assistant=ECHO))
    assert await versions(stores, "assistant") == [DOCUMENTS["assistant"]]


async def test_graph_is_updated_from_its_file_and_the_change_is_reported() -> None:
    stores, file = MemoryStores(), GraphFile("flow", ECHO, "flow.json", "flow")
    assert await save_graph_files(host_on(stores), [file]) == SavedGraphs(["flow"], [])
    assert await save_graph_files(host_on(stores), [file]) == SavedGraphs(["flow"], []), "the same again is nothing new"
    await put(stores, "flow", OTHER, name="My own")
    kept = await save_graph_files(host_on(stores), [file])
    assert await versions(stores, "flow") == [ECHO, OTHER, ECHO]
    note = "  updated       flow.json: flow is now version 3; it differs from version 2, which stays available"
    assert kept.notes == [note]
    newest = await stores.graphs.get("flow")
    assert newest is not None
    assert newest.name == "My own", "a file says nothing of names"


async def test_a_graph_of_a_file_that_was_archived_is_offered_again() -> None:
    stores, file = MemoryStores(), GraphFile("flow", ECHO, "flow.json", "flow")
    await save_graph_files(host_on(stores), [file])
    await stores.graphs.archive("flow")
    kept = await save_graph_files(host_on(stores), [file])
    assert kept.notes == ["  restored      flow was archived"]
    assert [one.id for one in await stores.graphs.list()] == ["flow"]


@pytest.mark.parametrize("are_examples", [False, True])
async def test_missing_models_of_a_graph_are_reported(are_examples: bool) -> None:
    stores = MemoryStores()
    await save_example_graphs(host_on(stores), examples())
    if are_examples:
        await put(stores, "assistant", STRANGE)
        kept = await save_example_graphs(host_on(stores), examples())
    else:
        kept = await save_graph_files(host_on(stores), [GraphFile("fl\x1bow", STRANGE, "flow.json", "flow")])
    (note,) = kept.notes
    assert note.startswith("  cannot run    " + ("assistant" if are_examples else "fl\ufffdow"))
    assert "there is no model 'gpt-9'; use one of: example," in note
