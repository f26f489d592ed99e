"""Journal entries of built-in nodes wait for the next effect, and are stored before it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import RunHost
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.nodes.llm_completion import LlmCompletion
from penstock.runtime.durable.journal import Journal
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.storage.memory import MemoryStores
from tests.hosting.graphs import graph, host_with

ANSWER = graph(("in", "input", {}), ("a", "llm-completion", {"model": "m"}), ("out", "output", {}), edges="in>a a>out")
ANSWER_THEN_LOOK = graph(
    ("in", "input", {}), ("a", "llm-completion", {"model": "m"}), ("look", "look", {}), edges="in>a a>look"
)


class CountedJournal:
    """A journal store that records the keys of each append."""

    def __init__(self, stores: MemoryStores) -> None:
        self._store = stores.journal
        self.appends: list[list[str]] = []
        self.gate: asyncio.Event | None = None

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.appends.append([entry.key for entry in entries])
        await self._store.append(run_id, entries, epoch=epoch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Look:
    """A node that reads the stored journal of its run when it starts: all that an effect of it may depend on."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self, stores: MemoryStores) -> None:
        self._stores = stores

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        stored = [entry.key for entry in await self._stores.journal.load("r")]
        return ExecutionResult({"output": DataValue("any", stored)})


async def host_of(stores: MemoryStores, **more: Any) -> RunHost:
    model = ScriptedModel(lambda request: "fine")
    host = await host_with(stores, services={"models": {"m": model}}, look=Look(stores), **more)
    await stores.graphs.save("answer", "ann", "answer", ANSWER, now_ms=0)
    await stores.graphs.save("look", "ann", "look", ANSWER_THEN_LOOK, now_ms=0)
    return host


async def test_entries_of_an_answer_are_stored_with_the_end_of_the_run() -> None:
    stores = MemoryStores()
    journal: Any = CountedJournal(stores)
    stores.journal = journal
    async with await host_of(stores) as host:
        await host.submit(owner="ann", graph_id="answer", run_id="r", input="hi")
        left = await host.wait("r")
        stored = [entry.key for entry in await stores.journal.load("r")]
        replayed = await host.wait((await host.replay("r", owner="ann")).id)
    assert (left.output, replayed.output) == ("fine", "fine")
    assert stored == ["a/llm:scripted", "a"]
    assert journal.appends == [["a/llm:scripted", "a"]]


@pytest.mark.parametrize("graph_id", ["answer", "look"])
async def test_completed_run_keeps_answers_inside_recorded_nodes_in_short_form_only(graph_id: str) -> None:
    """In the first graph they wait until the end of the run, in the second they were stored before it."""
    stores = MemoryStores()
    async with await host_of(stores) as host:
        await host.submit(owner="ann", graph_id=graph_id, run_id="r", input="hi")
        await host.wait("r")
    values = {entry.key: entry.value for entry in await stores.journal.load("r")}
    assert "fine" not in str(values["a/llm:scripted"])
    assert "fine" in str(values["a"])


async def test_entries_are_stored_before_the_next_node_starts() -> None:
    stores = MemoryStores()
    async with await host_of(stores) as host:
        await host.submit(owner="ann", graph_id="look", run_id="r", input="hi")
        left = await host.wait("r")
    assert left.output == ["a/llm:scripted", "a"]


async def test_answer_to_a_subclass_is_stored_before_the_node_has_it() -> None:
    class Noting(LlmCompletion):
        async def execute(self, data: Any, inputs: Any, context: Any) -> Any:
            await super().execute(data, inputs, context)
            return DataValue("any", [entry.key for entry in await stores.journal.load("r")])

    stores = MemoryStores()
    async with await host_of(stores, **{"llm-completion": Noting()}) as host:
        await host.submit(owner="ann", graph_id="answer", run_id="r", input="hi")
        assert (await host.wait("r")).output == ["a/llm:scripted"]


async def test_entries_are_stored_with_the_first_event_that_shows_them() -> None:
    stores = MemoryStores()
    document = graph(
        ("in", "input", {}),
        ("a", "llm-completion", {"model": "m"}),
        ("gate", "gate", {}),
        edges="in>a in>gate",
    )

    class Gate:
        inputs = (Handle("input"),)
        outputs = (Handle("output"),)

        async def execute(self, data: Any, inputs: Any, context: Any) -> Any:
            await opened.wait()
            return ExecutionResult({"output": inputs["input"]})

    opened = asyncio.Event()
    async with await host_of(stores, gate=Gate()) as host:
        await stores.graphs.save("beside", "ann", "beside", document, now_ms=0)
        await host.submit(owner="ann", graph_id="beside", run_id="r", input="hi")
        async for event in host.events("r"):
            if event.type == "node.completed" and event.data["node_id"] == "a":
                stored = [entry.key for entry in await stores.journal.load("r")]
                opened.set()
    assert stored == ["a/llm:scripted", "a"]


def journal_of(store: CountedJournal) -> Journal:
    untyped: Any = store
    journal = Journal(untyped, "r")
    journal.may_wait = {"a"}
    return journal


async def test_only_answers_that_the_node_itself_receives_wait() -> None:
    store = CountedJournal(MemoryStores())
    journal = journal_of(store)
    for key in ("a/agent:x/turn:1/llm:m", "a/llm:m#2", "a/llm:m?2"):
        await journal.append(key, "llm", {})
    await journal.append("a", "node", {})
    assert store.appends == []
    now = ["a/agent:x/turn:1/tool:0:c:1/llm:m", "a~2/llm:m", "b/llm:m", "a/llm:m/llm:n", "a/agent:x/turn:1/tool:0:c:1"]
    for key in now:
        await journal.append(key, "llm", {})
    assert [keys[-1] for keys in store.appends] == now
    assert store.appends[0] == ["a/agent:x/turn:1/llm:m", "a/llm:m#2", "a/llm:m?2", "a", now[0]]
    assert journal.waiting == []


async def test_value_that_a_store_may_refuse_does_not_wait() -> None:
    store = CountedJournal(MemoryStores())
    journal = journal_of(store)
    try:
        await journal.append("a", "node", {"value": float("nan")})
    except Exception:
        assert journal.waiting == []
    else:
        raise AssertionError("the store refuses it")


async def test_concurrent_flush_returns_only_when_the_entries_are_stored() -> None:
    store = CountedJournal(MemoryStores())
    journal = journal_of(store)
    await journal.append("a", "node", {})
    store.gate = asyncio.Event()
    both = [asyncio.create_task(journal.flush()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in both)
    store.gate.set()
    await asyncio.gather(*both)
    assert [entry.key for entry in await store.load("r")] == ["a"]
    assert journal.waiting == []
