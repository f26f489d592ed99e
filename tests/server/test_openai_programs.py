"""Served Python programs over /v1: tools, formats and settings of the client, and the history of a conversation."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from penstock.agents import Agent, ReActLoop, ScriptedModel, chat_history, tool
from penstock.flow.graph import Graph
from penstock.nodes import Program
from tests.nodes.graphs import graph, node
from tests.server.openai_service import PRICE, Served, chat_with, serving
from tests.server.test_openai_client_tools import QUESTION, WEATHER, mixed, once, results_for

pytestmark = [pytest.mark.requirement("X-13"), pytest.mark.requirement("X-14")]

JSON_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {
        "name": "sky",
        "schema": {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]},
    },
}


@tool
def look(at: str) -> str:
    """Look at something."""
    return f"{at} is bright"


class Plain(ScriptedModel):
    """A model that applies no settings but the output limit."""

    applies = frozenset({"max_output_tokens"})


def remembering() -> Graph:
    """A graph that answers with the history and the new message."""
    made = Graph("remembering")

    @made.step
    def answer(ctx: Any) -> str:
        return " | ".join([*(f"{one.role}: {one.text}" for one in chat_history()), f"new: {ctx.input}"])

    return made


def _programs() -> dict[str, Program]:
    models = {name: ScriptedModel(reply, name=name, usage=PRICE) for name, reply in (("once", once), ("mixed", mixed))}
    sky = ScriptedModel(lambda _: json.dumps({"sky": "blue"}), name="sky", usage=PRICE)
    targets: list[Any] = [
        Agent(models["once"], "Be brief.", name="forecaster"),
        Agent(models["mixed"], tools=[look], name="watcher"),
        Agent(sky, name="painter"),
        Agent(Plain([], name="modest"), name="modest"),
        Agent(sky, output=dict, name="strict"),
        Agent(sky, name="thinker", loop=ReActLoop(sky)),
        remembering(),
    ]
    return {target.id: Program.of(target) for target in targets}


def within(container: str, **data: Any) -> Any:
    inner = graph([node("in", "input"), node("agent", "agent", model="forecast")], ["in > agent"])
    return graph([node("start", "chat-start"), node("box", container, graph=inner, **data)], ["start > box"])


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    async with serving(**settings) as it:
        services = it.app.state.server.host._context.services
        services["programs"] = programs = _programs()
        services["models"]["forecast"] = ScriptedModel(once, name="forecast", usage=PRICE)
        for id, program in programs.items():
            await it.stores.graphs.save(id, "server", id, program.document(), now_ms=1)
        deep = within("subgraph")
        inner = deep["nodes"][1]["data"]["graph"]
        deep["nodes"][1]["data"]["graph"] = graph(
            [node("in", "input"), node("box", "subgraph", graph=inner)], ["in > box"]
        )
        documents = {
            "boxed": within("subgraph"),
            "deep": deep,
            "looped": within("loop", max_iterations=2),
            "mapped": within("map"),
        }
        for id, document in documents.items():
            await it.stores.graphs.save(id, "anna", id, document, now_ms=1)
        yield it


@pytest.mark.parametrize("model", ["forecaster", "boxed", "deep"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_an_agent_in_python_or_in_a_subgraph_calls_tools_of_the_client(model: str, streamed: bool) -> None:
    async with served() as it, it.client() as client:

        async def send(messages: Any) -> Any:
            if not streamed:
                return await client.chat.completions.create(model=model, messages=messages, tools=[WEATHER])
            async with client.chat.completions.stream(model=model, messages=messages, tools=[WEATHER]) as stream:
                return await stream.get_final_completion()

        first = await send(QUESTION)
        assert first.choices[0].finish_reason == "tool_calls"
        calls: Any = first.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["weather"]
        message = first.choices[0].message.model_dump(include={"role", "content"}) | {
            "tool_calls": [
                {"id": c.id, "type": "function", "function": c.function.model_dump(include={"name", "arguments"})}
                for c in calls
            ]
        }
        last = await send([*QUESTION, message, *results_for(calls, "sunny")])
        assert last.choices[0].message.content == "It is sunny."
        (run,) = await it.runs()
        assert (run.status, run.tokens_in) == ("completed", 2 * PRICE.input_tokens)


async def test_tools_of_the_program_and_of_the_client_are_used_in_one_turn() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="watcher", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        history = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        last = await client.chat.completions.create(model="watcher", messages=history, tools=[WEATHER])
        assert last.choices[0].message.content == "I saw: the sky is bright and sunny."


async def test_an_output_format_and_settings_apply_to_an_agent_in_python() -> None:
    async with served() as it, it.client() as client:
        answer = await client.chat.completions.create(
            model="painter", messages=QUESTION, response_format=JSON_FORMAT, max_tokens=50
        )
        assert json.loads(str(answer.choices[0].message.content)) == {"sky": "blue"}


async def test_a_client_that_does_not_return_gets_its_calls_as_the_output() -> None:
    async with served(client_tools_wait_s=0.01) as it, it.client() as client:
        await client.chat.completions.create(model="forecaster", messages=QUESTION, tools=[WEATHER])
        (run,) = await it.runs()
        ended = await it.run(run.id)
        assert ended.status == "completed"
        assert ended.output == {"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}


@pytest.mark.parametrize(
    ("model", "wanted", "param", "why"),
    [
        ("looped", {"tools": [WEATHER]}, "tools", "an agent inside node 'box', a loop, which takes only messages"),
        ("mapped", {"tools": [WEATHER]}, "tools", "an agent inside node 'box', a map, which takes only messages"),
        ("remembering", {"tools": [WEATHER]}, "tools", "talks to 'remembering', a graph in Python, which takes only"),
        ("thinker", {"tools": [WEATHER]}, "tools", "'thinker' runs a loop of its own"),
        (
            "strict",
            {"response_format": JSON_FORMAT},
            "response_format",
            "agent 'strict' has an output format of its own",
        ),
        ("modest", {"seed": 3}, "seed", "the model of agent 'modest' (in Python) cannot apply it"),
    ],
)
async def test_what_cannot_be_applied_is_refused_by_name(model: str, wanted: Any, param: str, why: str) -> None:
    async with served() as it, it.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=model, messages=QUESTION, **wanted)
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
        assert why in refused.value.message
        assert await it.runs() == []


async def test_a_graph_in_python_reads_the_history_of_the_conversation() -> None:
    async with served() as it, it.client() as client:
        history: Any = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "two"},
        ]
        answer = await client.chat.completions.create(model="remembering", messages=history)
        expected = "system: Be kind. | user: one | assistant: first | new: two"
        assert answer.choices[0].message.content == expected
        assert answer.model_extra is not None
        assert answer.model_extra["penstock"]["ignored"] == []
        plain = await it.host.submit(owner="anna", graph_id="remembering", input="three")
        assert (await it.run(plain.id)).output == "new: three"


async def test_an_agent_node_is_still_the_entry_agent_of_its_graph() -> None:
    async with served() as it, it.client() as client:
        await it.stores.graphs.save("plain-agent", "anna", "p", chat_with("forecast"), now_ms=1)
        first = await client.chat.completions.create(model="plain-agent", messages=QUESTION, tools=[WEATHER])
        assert first.choices[0].finish_reason == "tool_calls"
