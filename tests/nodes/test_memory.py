"""The memory node: in the flow, as an agent's tools, and whose memories are whose."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.agents.messages import ToolCall
from penstock.agents.scripted import ScriptedModel
from penstock.errors import InvalidValue
from penstock.kernel.executor import ExecutionResult
from penstock.nodes.parts.services import ServiceMissing
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import run_flow
from penstock.storage.memory import InProcessMemory
from tests.nodes.graphs import Json, graph, node, problems, registry


def alone(**data: Any) -> Json:
    return graph([node("in", "input"), node("m", "memory", **data)], ["in > m"])


async def ran(
    document: Json,
    input: Any,
    store: Any,
    *,
    chat_id: str | None = None,
    owner: str = "",
    run_id: str | None = "r",
    **more: Any,
) -> Any:
    services = {"memory": store, "run": {"owner": owner}, **more}
    with ExecutionContext(input=input) as run:
        context = FlowContext(chat_id=chat_id, run_id=run_id, services=services, execution=run)
        async for event in run_flow(document, context, registry()):
            if isinstance(event, ExecutionResult):
                return event.outputs["output"].value
    return None


@pytest.mark.requirement("K-16")
async def test_what_one_run_remembers_another_one_of_the_same_chat_recalls() -> None:
    store = InProcessMemory()
    assert await ran(alone(action="remember", key="dam"), {"m": 221}, store, chat_id="c") == {"m": 221}
    assert await ran(alone(key="dam"), None, store, chat_id="c", run_id="r2") == {"m": 221}
    assert await ran(alone(key="dam", default="?"), None, store, chat_id="another") == "?"
    assert await ran(alone(key="dam", scope="owner"), None, store, chat_id="c", owner="ann") is None


async def test_an_owner_has_one_memory_in_all_chats_and_no_other_owner_sees_it() -> None:
    store = InProcessMemory()
    keep = alone(action="remember", key="name", scope="owner")
    await ran(keep, "Ann", store, chat_id="c1", owner="ann")
    assert await ran(alone(key="name", scope="owner"), None, store, chat_id="c2", owner="ann") == "Ann"
    assert await ran(alone(key="name", scope="owner"), None, store, chat_id="c1", owner="bob") is None


@pytest.mark.parametrize("scope", ["chat", "owner"])
async def test_a_run_without_an_owner_has_a_memory_of_its_own(scope: str) -> None:
    store = InProcessMemory()
    await ran(alone(action="remember", key="k", scope=scope), "v", store, run_id="r1")
    assert await ran(alone(key="k", scope=scope), None, store, run_id="r1") == "v"
    assert await ran(alone(key="k", scope=scope), None, store, run_id="r2") is None


async def test_runs_that_were_given_no_id_remember_apart_too() -> None:
    store = InProcessMemory()
    await ran(alone(action="remember", key="k"), "v", store, run_id=None)
    assert await ran(alone(key="k"), None, store, run_id=None) is None


async def test_the_same_thing_without_a_key_is_remembered_once() -> None:
    store = InProcessMemory()
    for value in ("Hoover Dam is 221 m high", "Aswan is wide", "Hoover Dam is 221 m high"):
        await ran(alone(action="remember"), value, store, chat_id="c")
    found = await ran(alone(), "how HIGH is Hoover?", store, chat_id="c")
    assert [one["value"] for one in found] == ["Hoover Dam is 221 m high", "Aswan is wide"]  # both have "is"
    everything = await ran(alone(), "", store, chat_id="c")
    assert [one["value"] for one in everything] == ["Hoover Dam is 221 m high", "Aswan is wide"]


@pytest.mark.requirement("K-16")
async def test_an_agent_that_is_linked_remembers_and_recalls() -> None:
    document = graph(
        [node("in", "input"), node("a", "agent", model="m"), node("mem", "memory"), node("own", "memory", name="own")],
        ["in > a"],
        ["mem.tools > a.tools", "own.tools > a.tools"],
    )
    prompts: list[str] = []

    def answer(request: Any) -> Any:
        prompts.append(request.messages[-1].text)
        assert [one.name for one in request.tools] == ["remember", "recall", "remember_own", "recall_own"]
        calls = [
            ToolCall("1", "remember", {"key": "height", "value": "221 m"}),
            ToolCall("2", "recall", {"about": "height"}),
            ToolCall("3", "recall", {"about": "the word 221"}),
            ToolCall("4", "recall", {"about": "nothing"}),
        ]
        return calls[len(prompts) - 1] if len(prompts) <= len(calls) else "done"

    assert await ran(document, "go", InProcessMemory(), models={"m": ScriptedModel(answer)}) == "done"
    found = '[{"key": "height", "value": "221 m"}]'
    assert prompts == ["go", "remembered as 'height'", found, found, "[]"]


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {1: "a", "b": 2}, {"a": object()}, b"bytes", {1}])
async def test_values_that_are_not_json_are_not_remembered(value: Any) -> None:
    store = InProcessMemory()
    for data in ({}, {"key": "k"}):
        with pytest.raises(InvalidValue, match="value of a memory"):
            await ran(alone(action="remember", **data), value, store, chat_id="c")
    assert await store.search("chat:c", "") == []


async def test_values_that_are_equal_and_not_the_same_are_remembered_apart() -> None:
    store = InProcessMemory()
    for value in (1, 1.0, True, "1", None, {"a": 1, "b": 2}, {"b": 2, "a": 1}, [1], (1,), "\ud800"):
        await ran(alone(action="remember"), value, store, chat_id="c")
    found = await store.search("chat:c", "", 20)
    assert repr([one.value for one in reversed(found)]) == repr(
        [1, 1.0, True, "1", None, {"b": 2, "a": 1}, [1], "\ud800"]
    )


async def test_a_node_without_the_service_says_so() -> None:
    with pytest.raises(ServiceMissing, match="memories"):
        await ran(alone(), "x", None)


def test_invalid_data_is_reported_before_the_run() -> None:
    assert [path for path, _ in problems(alone(scope="world", action="forget", limit=0, key=""))] == [
        "$.nodes[1].data.scope",
        "$.nodes[1].data.action",
        "$.nodes[1].data.key",
        "$.nodes[1].data.limit",
    ]
