"""The contracts of the design document on graph chat, as graphs that run through the library and the service.

The document shows fragments (an edge's channel, the signature of an executor, the names in `services`); each is used
here in the form it is written in. `test_seed_004_definition_of_done.py` has the document's definition of done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import DataValue, ExecutionContext, ExecutionResult, FlowContext, GraphInvalid, NodeEvent, run_flow
from penstock.agents import ScriptedModel, Tool
from penstock.agents.model import ModelRequest
from penstock.chat import services_for
from penstock.executors import parse_graph
from penstock.runtime.watching.registry import CancelResult
from tests.chat.chats import ANN, chatting
from tests.nodes.graphs import Json, graph, node
from tests.server.served import served


async def flow(
    document: Json, executors: Mapping[str, Any], *, context: FlowContext | None = None
) -> tuple[list[NodeEvent], ExecutionResult]:
    """Run the graph; its events and its result."""
    within = context or FlowContext(execution=ExecutionContext())
    events, result = [], ExecutionResult()
    async with aclosing(run_flow(document, within, executors)) as everything:
        async for one in everything:
            if isinstance(one, ExecutionResult):
                result = one
            else:
                events.append(one)
    return events, result


# Architecture: channels and executors.

CHANNELS: Json = {
    "nodes": [
        {"id": "ask", "type": "text", "data": {"text": "how high?"}},
        {"id": "dictionary", "type": "words", "data": {"words": {"how high?": "60 m"}}},
        {"id": "answer", "type": "look-up", "data": {}},
    ],
    "edges": [
        {"id": "e1", "source": "ask", "target": "answer", "data": {"channel": "flow"}},
        {
            "id": "e2",
            "source": "dictionary",
            "sourceHandle": "words",
            "target": "answer",
            "targetHandle": "tools",
            "data": {"channel": "link"},
        },
    ],
}
"""`flow` routes a value, `link` wires a dependency."""


class Text:
    def execute(self, data: Json, inputs: Mapping[str, DataValue], context: FlowContext) -> ExecutionResult:
        return ExecutionResult(outputs={"output": DataValue("text", data["text"])})


class Words:
    """An executor without flow behaviour: it materializes an artifact for the nodes that link to it."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def materialize(self, data: Json, output_handle: str, context: FlowContext) -> Any:
        self.made.append(output_handle)
        return dict(data["words"])


class LookUp:
    """Streams an event and then its result; finds its dependency through the runtime API of the document."""

    async def execute(
        self, data: Json, inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | ExecutionResult]:
        assert context.runtime is not None
        assert context.node_id is not None
        (words,) = await context.runtime.resolve_links(context.node_id, "tools")
        yield NodeEvent(context.node_id, "look-up", "progress", context.run_id or "", {"words": len(words)})
        yield ExecutionResult(outputs={"output": DataValue("text", words[inputs["input"].value])})


@pytest.mark.requirement("K-2", "K-4", "K-5")
async def test_flow_routes_values_and_link_wires_dependencies() -> None:
    words = Words()
    events, result = await flow(CHANNELS, {"text": Text(), "words": words, "look-up": LookUp()})
    assert result.outputs["output"].value == "60 m"
    assert words.made == ["words"]
    assert [(one.node_id, one.event_type) for one in events] == [
        ("ask", "started"),
        ("ask", "completed"),
        ("answer", "started"),
        ("answer", "progress"),
        ("answer", "completed"),
    ]


@pytest.mark.requirement("K-3")
async def test_the_runtime_api_of_the_document() -> None:
    seen: Json = {}

    class Looking(LookUp):
        async def execute(self, data: Json, inputs: Any, context: FlowContext) -> Any:  # type: ignore[override]
            runtime = context.runtime
            assert runtime is not None
            seen["node"] = runtime.get_node("ask").type
            seen["in"] = [one.id for one in runtime.incoming_edges("answer", channel="flow")]
            seen["linked"] = [one.id for one in runtime.incoming_edges("answer", target_handle="tools")]
            seen["out"] = [
                one.id for one in runtime.outgoing_edges("dictionary", channel="link", source_handle="words")
            ]
            seen["links"] = await runtime.resolve_links("answer", "tools")
            seen["artifact"] = await runtime.materialize_output("dictionary", "words")
            runtime.cache_set("key", 7)
            seen["cache"] = runtime.cache_get("key")
            return ExecutionResult(outputs={"output": inputs["input"]})

    words = Words()
    await flow(CHANNELS, {"text": Text(), "words": words, "look-up": Looking()})
    assert seen == {
        "node": "text",
        "in": ["e1"],
        "linked": ["e2"],
        "out": ["e2"],
        "links": [{"how high?": "60 m"}],
        "artifact": {"how high?": "60 m"},
        "cache": 7,
    }
    assert words.made == ["words"]


@pytest.mark.requirement("K-4")
async def test_the_flow_context_has_the_six_fields_of_the_document() -> None:
    seen: list[Any] = []

    class Looking:
        def execute(self, data: Json, inputs: Any, context: FlowContext) -> ExecutionResult:
            seen.extend([context.node_id, context.chat_id, context.run_id, context.state, context.services["clock"]])
            assert context.runtime is not None
            seen.append(context.runtime.get_node("a").id)
            return ExecutionResult()

    context = FlowContext(
        chat_id="chat-1", run_id="run-1", state={"n": 1}, services={"clock": "noon"}, execution=ExecutionContext()
    )
    await flow(graph([node("a", "look")]), {"look": Looking()}, context=context)
    assert seen == ["a", "chat-1", "run-1", {"n": 1}, "noon", "a"]


@pytest.mark.requirement("K-2")
@pytest.mark.parametrize("data", [None, {}, {"channel": None}, {"channel": "string"}], ids=str)
def test_a_missing_or_invalid_channel_is_refused_and_not_patched(data: Any) -> None:
    document = {**CHANNELS, "edges": [{**CHANNELS["edges"][0], "data": data}]}
    with pytest.raises(GraphInvalid) as invalid:
        parse_graph(document)
    assert invalid.value.problems[0].path.startswith("$.edges[0].data")


# Chat execution semantics.


class RecordingModels:
    """Models by name that answer with their name, and the messages and tools that each received."""

    def __init__(self, *names: str) -> None:
        self.texts: dict[str, list[list[str]]] = {}
        self.tools: dict[str, list[list[str]]] = {}
        self.models = {name: ScriptedModel(lambda request, name=name: self._answer(name, request)) for name in names}

    def _answer(self, name: str, request: ModelRequest) -> str:
        self.texts.setdefault(name, []).append([one.text for one in request.messages])
        self.tools.setdefault(name, []).append([one.name for one in request.tools])
        return f"{name}{len(self.texts[name])}"


def agents(*names: str) -> list[Json]:
    return [node(name, "agent", model=name) for name in names]


def start(**data: Any) -> Json:
    return node("start", "chat-start", **data)


async def _send() -> str:
    return "sent"


MAIL = Tool(_send, name="mail")


async def chat_twice(document: Json, recorded: RecordingModels) -> list[str]:
    """Say two things in a chat with the graph; the answers."""
    answers = []
    async with chatting(document, recorded.models, tools={"mail": MAIL}) as chats:
        for text in ("one", "two"):
            turn = await chats.service.stream_chat(chats.chat_id, text, owner=ANN, user_tools=["mail"])
            answers.append((await turn.result()).content)
    return answers


@pytest.mark.requirement("K-11", "K-12")
async def test_pipeline_and_composition_coexist_in_one_graph() -> None:
    """`A -> B` is a pipeline; `C` is linked into the tools of `A`."""
    recorded = RecordingModels("A", "B", "C")
    document = graph([start(), *agents("A", "B", "C")], ["start > A", "A > B"], ["C.tool > A.tools"])
    assert await chat_twice(document, recorded) == ["B1", "B2"]
    assert recorded.texts["A"] == [["one"], ["one", "B1", "two"]]
    assert recorded.texts["B"] == [["A1"], ["A2"]]
    assert recorded.tools["A"] == [["C"], ["C"]]
    assert "C" not in recorded.texts


@pytest.mark.requirement("K-11")
@pytest.mark.parametrize("include", [True, False])
async def test_include_user_tools_holds_through_intermediate_nodes(include: bool) -> None:
    recorded = RecordingModels("A", "B")
    between = node("p", "prompt-template", template="{{ q }}")
    document = graph([start(includeUserTools=include), between, *agents("A", "B")], ["start > p.q", "p > A", "A > B"])
    await chat_twice(document, recorded)
    assert recorded.tools == {"A": [["mail"] if include else []] * 2, "B": [[], []]}


@pytest.mark.requirement("K-17")
@pytest.mark.parametrize("type", ["subgraph", "loop"])
async def test_the_first_agent_inside_a_container_is_the_entry_agent(type: str) -> None:
    recorded = RecordingModels("A", "B")
    more = {"max_iterations": 1} if type == "loop" else {}
    container = node("inner", type, graph=graph(agents("A")), **more)
    document = graph([start(includeUserTools=True), container, *agents("B")], ["start > inner", "inner > B"])
    assert await chat_twice(document, recorded) == ["B1", "B2"]
    assert recorded.texts["A"] == [["one"], ["one", "B1", "two"]]
    assert recorded.texts["B"] == [["A1"], ["A2"]]
    assert recorded.tools == {"A": [["mail"], ["mail"]], "B": [[], []]}


@pytest.mark.requirement("K-13")
async def test_a_cancel_before_registration_is_applied_when_the_run_binds() -> None:
    recorded = RecordingModels("A")
    async with chatting(graph([start(), *agents("A")], ["start > A"]), recorded.models) as chats:
        assert await chats.host.cancel("early") is CancelResult.REMEMBERED
        turn = await chats.service.stream_chat(chats.chat_id, "one", owner=ANN, run_id="early")
        assert (await turn.result()).data["state"] == "partial"
    assert recorded.texts == {}


# Phase 1 and 2: services of a chat run.


class ScopedAgent:
    """An agent executor as the document's phase 1 has it: history for entry agents, the payload for the others."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def execute(self, data: Json, inputs: Mapping[str, DataValue], context: FlowContext) -> ExecutionResult:
        chat_scope = context.services.chat_scope  # type: ignore[attr-defined]
        node_id = str(context.node_id)
        if chat_scope.is_entry_agent(node_id):
            given = context.services.chat_input.messages  # type: ignore[attr-defined]
        else:
            given = inputs["input"].value
        self.given[node_id] = given, chat_scope.include_user_tools(node_id)
        return ExecutionResult(outputs={"output": DataValue("text", f"{node_id} says")})


class Pass:
    def execute(self, data: Json, inputs: Mapping[str, DataValue], context: FlowContext) -> ExecutionResult:
        return ExecutionResult(outputs={"output": DataValue("text", "one")})


@pytest.mark.requirement("K-11")
@pytest.mark.parametrize("form", ["mapping", "object"])
async def test_executors_reach_the_chat_scope_as_an_attribute_of_the_services(form: str) -> None:
    document = graph([start(includeUserTools=True), *agents("A", "B")], ["start > A", "A > B"])
    named = {**services_for(parse_graph(document)), "chat_input": SimpleNamespace(messages=["one", "first", "two"])}
    services: Any = named if form == "mapping" else SimpleNamespace(**named)
    executor = ScopedAgent()
    context = FlowContext(services=services, execution=ExecutionContext())
    await flow(document, {"chat-start": Pass(), "agent": executor}, context=context)
    assert executor.given == {"A": (["one", "first", "two"], True), "B": ("A says", False)}


APART = graph(
    [node("a", "pass"), node("b", "pass"), node("apart", "pass"), node("x", "pass"), node("y", "pass")],
    ["a > b", "x > y", "y > x"],
)
"""Two nodes that are reached from `a`, one that is not, and a cycle that is not."""


@pytest.mark.requirement("K-6")
@pytest.mark.parametrize("execution", [{"entry_node_ids": ["a"]}, SimpleNamespace(entry_node_ids=["a"])], ids=type)
async def test_only_nodes_that_the_entry_nodes_reach_are_executed(execution: Any) -> None:
    context = FlowContext(services={"execution": execution}, execution=ExecutionContext())
    events, _ = await flow(APART, {"pass": Pass()}, context=context)
    assert [one.node_id for one in events if one.event_type == "started"] == ["a", "b"]
    with pytest.raises(GraphInvalid, match="x"):
        await flow(APART, {"pass": Pass()})


# Phase 4: the channel contract at the API boundary.


@pytest.mark.requirement("K-2")
async def test_the_api_keeps_both_channels_as_they_are() -> None:
    document = graph([start(), *agents("A", "C")], ["start > A"], ["C.tool > A.tools"])
    async with served() as server, server.client("ann") as ann:
        assert (await ann.put("/api/graphs/g", json={"document": document})).status_code == 200
        kept = (await ann.get("/api/graphs/g")).json()["document"]
    assert [one["data"] for one in kept["edges"]] == [{"channel": "flow"}, {"channel": "link"}]


@pytest.mark.requirement("K-2")
@pytest.mark.parametrize("data", [{}, {"channel": None}, {"channel": "string"}], ids=str)
async def test_the_api_refuses_a_missing_or_invalid_channel_and_stores_nothing(data: Json) -> None:
    document = graph([start(), *agents("A")], ["start > A"])
    document["edges"][0]["data"] = data
    async with served() as server, server.client("ann") as ann:
        answer = await ann.put("/api/graphs/g", json={"document": document})
        assert answer.status_code == 422
        assert "edges[0].data" in answer.text
        assert (await ann.get("/api/graphs/g")).status_code == 404


def schemas_in(given: Any) -> Iterator[Mapping[str, Any]]:
    """Every object inside a JSON value."""
    if isinstance(given, dict):
        yield given
        for value in given.values():
            yield from schemas_in(value)
    elif isinstance(given, list):
        for value in given:
            yield from schemas_in(value)


@pytest.mark.requirement("K-18")
async def test_the_published_schema_has_the_two_channels() -> None:
    async with served() as server:
        published = server.app.openapi()
    assert any(sorted(one.get("enum") or ()) == ["flow", "link"] for one in schemas_in(published))


# Phase 5: lifecycle events.


class Failing:
    async def execute(self, data: Json, inputs: Any, context: FlowContext) -> ExecutionResult:
        raise OSError("gone")


class Streaming:
    async def execute(self, data: Json, inputs: Any, context: FlowContext) -> AsyncIterator[Any]:
        yield NodeEvent(str(context.node_id), "stream", "progress", context.run_id or "", 1)
        yield ExecutionResult(outputs={"output": DataValue("text", "one")})


class Async:
    async def execute(self, data: Json, inputs: Any, context: FlowContext) -> ExecutionResult:
        return ExecutionResult(outputs={"output": DataValue("text", "one")})


@pytest.mark.requirement("K-9")
@pytest.mark.parametrize(
    ("executor", "expected"),
    [
        (Pass(), ["started", "completed"]),
        (Async(), ["started", "completed"]),
        (Streaming(), ["started", "progress", "completed"]),
        (Failing(), ["started", "error"]),
    ],
    ids=["sync", "async", "streaming", "failing"],
)
async def test_an_executed_node_has_one_started_and_one_terminal_event(executor: Any, expected: list[str]) -> None:
    types: list[str] = []
    try:
        async with aclosing(run_flow(graph([node("a", "any")]), ExecutionContext(), {"any": executor})) as events:
            async for one in events:
                if isinstance(one, NodeEvent):
                    types.append(one.event_type)
    except OSError:
        assert isinstance(executor, Failing)
    assert types == expected
