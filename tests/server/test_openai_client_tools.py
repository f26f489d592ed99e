"""Tools of the client over /v1: the run waits for their results, which come with the client's next request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from penstock.agents.messages import Message, ToolCall
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.hosting.ports import RunRecord
from penstock.server.openai.wire.request import parse_call_id
from tests.nodes.graphs import graph, node
from tests.server.openai_service import ANNA, BERT, PRICE, Served, chat_with, serving

pytestmark = pytest.mark.requirement("X-14")

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS},
}
FLAT: Any = {"type": "function", "name": "weather", "description": "The weather.", "parameters": PARAMETERS}
QUESTION: Any = [{"role": "user", "content": "How is the weather?"}]


def messages_of(request: ModelRequest) -> list[Message]:
    return [request.messages[at] for at in range(len(request.messages))]


def weatherman(request: ModelRequest) -> Any:
    """Ask for the weather in Rome and Oslo at once, then in Bern, then answer with what came."""
    results = [message.text for message in messages_of(request) if message.role == "tool"]
    if not any(spec.name == "weather" for spec in request.tools):
        return f"No tools, but {results}" if results else "No tools."
    if not results:
        return [ToolCall("0", "weather", {"city": "Rome"}), ToolCall("1", "weather", {"city": "Oslo"})]
    if len(results) == 2:
        return ToolCall("0", "weather", {"city": "Bern"})
    return f"It is {', '.join(results)}."


def once(request: ModelRequest) -> Any:
    """Ask for the weather in Rome, then answer with what came."""
    results = [message.text for message in messages_of(request) if message.role == "tool"]
    return f"It is {results[-1]}." if results else ToolCall("0", "weather", {"city": "Rome"})


def mixed(request: ModelRequest) -> Any:
    """Use a tool of the graph and one of the client in one turn."""
    results = [message.text for message in messages_of(request) if message.role == "tool"]
    if results:
        return f"I saw: {' and '.join(results)}."
    return [ToolCall("0", "look", {"at": "the sky"}), ToolCall("1", "weather", {"city": "Rome"})]


def clumsy(request: ModelRequest) -> Any:
    """Call the tool with wrong arguments first."""
    results = [message.text for message in messages_of(request) if message.role == "tool"]
    if not results:
        return ToolCall("0", "weather", {"town": 3})
    return "Done." if len(results) > 1 else ToolCall("1", "weather", {"city": "Rome"})


MODELS = {"weatherman": weatherman, "once": once, "mixed": mixed, "clumsy": clumsy}
GRAPHS = {
    "weatherman": chat_with("weatherman"),
    "once": chat_with("once"),
    "mixed": chat_with("mixed", tools=["look"]),
    "clumsy": chat_with("clumsy"),
    "relay": graph(
        [node("start", "chat-start"), node("first", "agent", model="once"), node("second", "agent", model="parrot")],
        ["start > first", "first > second"],
    ),
}


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    models = {name: ScriptedModel(reply, name=name, usage=PRICE) for name, reply in MODELS.items()}
    async with serving(models=models, **settings) as it:
        for id, document in GRAPHS.items():
            await it.stores.graphs.save(id, "anna", id, document, now_ms=1)
        yield it


async def test_a_run_that_waits_for_the_clients_tools_is_listed_among_the_approvals() -> None:
    async with served() as it, it.client() as client:
        await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        async with httpx2.AsyncClient(base_url=it.url, headers={"Authorization": f"Bearer {ANNA}"}) as http:
            listed = await http.get("/api/approvals")
            assert listed.status_code == 200, listed.text
            (waiting,) = listed.json()["approvals"]
            assert (waiting["state"], waiting["expects"]) == ("waiting", None)
            assert (await http.get(f"/api/approvals/{waiting['id']}")).json() == waiting
            rejected = await http.post(f"/api/approvals/{waiting['id']}/reject", json={"reason": "no"})
            assert rejected.status_code == 200, rejected.text


def results_for(calls: Any, *contents: str) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": content}
        for call, content in zip(calls, contents, strict=True)
    ]


async def run_of(it: Served, answer: Any) -> RunRecord:
    found = await it.host.get(answer.model_extra["penstock"]["run_id"])
    assert found is not None
    return found


async def test_calls_of_several_rounds_are_answered_by_one_run() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="weatherman", messages=QUESTION, tools=[WEATHER])
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.content is None
        calls: Any = message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
        assert first.usage is not None
        assert first.usage.prompt_tokens == PRICE.input_tokens
        assert (await run_of(it, first)).status == "waiting"

        history: Any = [*QUESTION, message, *results_for(calls, "sunny", "cold")]
        second = await client.chat.completions.create(model="weatherman", messages=history, tools=[WEATHER])
        more: Any = second.choices[0].message.tool_calls
        assert [json.loads(call.function.arguments) for call in more] == [{"city": "Bern"}]

        history += [second.choices[0].message, *results_for(more, "mild")]
        third = await client.chat.completions.create(model="weatherman", messages=history, tools=[WEATHER])
        assert third.choices[0].message.content == "It is sunny, cold, mild."
        assert third.choices[0].finish_reason == "stop"
        assert len({first.id, second.id, third.id}) == 3
        assert third.usage is not None
        assert third.usage.prompt_tokens == PRICE.input_tokens
        (run,) = await it.runs()
        assert run.status == "completed"
        assert run.tokens_in == 3 * PRICE.input_tokens
        assert third.model_extra is not None
        assert third.model_extra["penstock"]["cost_usd"] == pytest.approx(0.75)


async def test_streamed_calls_come_as_deltas_and_the_next_stream_continues() -> None:
    async with served() as it, it.client() as client:
        async with client.chat.completions.stream(model="once", messages=QUESTION, tools=[WEATHER]) as stream:
            first = await stream.get_final_completion()
        assert first.choices[0].finish_reason == "tool_calls"
        calls: Any = first.choices[0].message.tool_calls
        assert calls[0].function.name == "weather"
        assert json.loads(calls[0].function.arguments) == {"city": "Rome"}
        history: Any = [*QUESTION, first.choices[0].message.model_dump(exclude={"parsed"})]
        for call in history[-1]["tool_calls"]:
            call["function"].pop("parsed_arguments", None)
        history += results_for(calls, "sunny")
        chunks = await client.chat.completions.create(
            model="once", messages=history, tools=[WEATHER], stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in chunks:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        assert text == "It is sunny."
        assert usage is not None
        assert usage.prompt_tokens == PRICE.input_tokens
        assert len(await it.runs()) == 1


@pytest.mark.parametrize("stateful", [True, False])
async def test_responses_continue_with_the_outputs_of_functions(stateful: bool) -> None:
    async with served() as it, it.client() as client:
        first = await client.responses.create(model="weatherman", input=QUESTION, tools=[FLAT])
        assert first.status == "completed"
        history: Any = list(QUESTION)
        response = first
        for contents in (("sunny", "cold"), ("mild",)):
            calls = [item for item in response.output if item.type == "function_call"]
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id, "output": content}
                for call, content in zip(calls, contents, strict=True)
            ]
            if stateful:
                sent: Any = {"input": outputs, "previous_response_id": response.id}
            else:
                history += [*(call.model_dump(exclude_none=True) for call in calls), *outputs]
                sent = {"input": history}
            response = await client.responses.create(model="weatherman", tools=[FLAT], **sent)
        assert response.output_text == "It is sunny, cold, mild."
        assert response.id.endswith("~2")
        assert (await client.responses.retrieve(response.id)).output_text == response.output_text
        again = await client.responses.retrieve(first.id)
        assert [item.model_dump() for item in again.output] == [item.model_dump() for item in first.output]
        assert again.status == "completed"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(f"{first.id}~7")
        assert len(await it.runs()) == 1


async def test_a_streamed_response_has_the_calls_as_items() -> None:
    async with served() as it, it.client() as client:
        async with client.responses.stream(model="once", input="x", tools=[FLAT]) as stream:
            events = [event.type async for event in stream]
            first = await stream.get_final_response()
        assert "response.function_call_arguments.delta" in events
        assert events[-1] == "response.completed"
        (call,) = first.output
        assert call.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        async with client.responses.stream(
            model="once", input=output, tools=[FLAT], previous_response_id=first.id
        ) as stream:
            assert (await stream.get_final_response()).output_text == "It is sunny."


async def test_the_tools_of_the_graph_run_here_and_those_of_the_client_there() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="mixed", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["weather"]
        history: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        answer = await client.chat.completions.create(model="mixed", messages=history, tools=[WEATHER])
        assert answer.choices[0].message.content == "I saw: the sky is bright and sunny."
        response = await client.responses.create(model="mixed", input="x", tools=[FLAT])
        assert [item.name for item in response.output if item.type == "function_call"] == ["weather"]


async def test_arguments_that_do_not_fit_are_returned_to_the_model_and_not_to_the_client() -> None:
    async with served() as it, it.client() as client:
        answer = await client.chat.completions.create(model="clumsy", messages=QUESTION, tools=[WEATHER])
        (call,) = answer.choices[0].message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": "Rome"}  # type: ignore[union-attr]


async def test_a_run_whose_client_never_returns_ends_with_its_calls() -> None:
    async with served(client_tools_wait_s=0.05) as it, it.client() as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        run = await it.run((await run_of(it, first)).id)
        assert run.status == "completed"
        assert run.output == {"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}
        # The results are too late for that run: a new one has the conversation, with the calls and results.
        calls: Any = first.choices[0].message.tool_calls
        history: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        late = await client.chat.completions.create(model="once", messages=history, tools=[WEATHER])
        assert late.choices[0].message.content == "It is sunny."
        request = it.models["once"].last_request
        assert request is not None
        assert [message.role for message in messages_of(request)][:3] == ["user", "assistant", "tool"]
        assert messages_of(request)[1].tool_calls[0].arguments == {"city": "Rome"}
        assert len(await it.runs()) == 2
        response = await client.responses.create(model="once", input="x", tools=[FLAT])
        await it.run((await run_of(it, response)).id)
        (call,) = response.output
        assert call.type == "function_call"
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rainy"}]
        later = await client.responses.create(model="once", input=output, previous_response_id=response.id)
        assert later.output_text == "It is rainy."


async def test_a_run_whose_calls_other_nodes_would_get_fails_if_the_client_never_returns() -> None:
    async with served(client_tools_wait_s=0.05) as it, it.client() as client:
        first = await client.chat.completions.create(model="relay", messages=QUESTION, tools=[WEATHER])
        run = await it.run((await run_of(it, first)).id)
        assert run.status == "failed"
        assert "did not return the results of its tools (weather)" in str(run.error)


async def test_a_waiting_run_holds_no_slot() -> None:
    async with served() as it, it.client() as client:
        for _ in range(it.host.settings.max_running_per_owner + 1):
            await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        answer = await client.chat.completions.create(model="parrot", messages=QUESTION)
        assert answer.choices[0].message.content == "How is the weather?"


async def test_a_parked_run_continues_with_results_that_came_meanwhile(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/it.db"
    async with served(url=url) as it, it.client() as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
    calls: Any = first.choices[0].message.tool_calls
    history: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
    async with served(url=url) as it, it.client() as client:
        answer = await client.chat.completions.create(model="once", messages=history, tools=[WEATHER])
        assert answer.choices[0].message.content == "It is sunny."
        (run,) = await it.runs()
        assert run.epoch > 1
        assert run.tokens_in == 2 * PRICE.input_tokens


async def test_another_conversation_with_the_same_calls_is_a_run_of_its_own() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        changed: Any = [{"role": "system", "content": "Be short."}, *QUESTION]
        history = [*changed, first.choices[0].message, *results_for(calls, "sunny")]
        answer = await client.chat.completions.create(model="once", messages=history, tools=[WEATHER])
        assert answer.choices[0].message.content == "It is sunny."
        assert len(await it.runs()) == 2


async def test_calls_of_another_user_are_not_answered() -> None:
    async with served() as it, it.client() as client, it.client(BERT) as other:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        history: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "stolen")]
        await other.chat.completions.create(model="once", messages=history, tools=[WEATHER])
        assert (await run_of(it, first)).status == "waiting"


async def test_wrong_results_are_refused_and_the_run_still_waits() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="weatherman", messages=QUESTION, tools=[WEATHER])
        message, calls = first.choices[0].message, first.choices[0].message.tool_calls or []
        good: Any = results_for(calls, "sunny", "cold")
        bad: list[tuple[list[Any], str]] = [
            ([], "messages.1.tool_calls.0.id"),
            (good[:1], "messages.1.tool_calls.1.id"),
            ([*good, good[0]], "messages.4.tool_call_id"),
            ([good[0], {**good[1], "tool_call_id": "call_of_mine"}], "messages.3.tool_call_id"),
            ([{"role": "user", "content": "And?"}], "messages.1.tool_calls.0.id"),
        ]
        for results, param in bad:
            sent: Any = [*QUESTION, message, *results]
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="weatherman", messages=sent, tools=[WEATHER])
            assert refused.value.param == param or (not results and refused.value.param == "messages")
        assert (await run_of(it, first)).status == "waiting"
        assert len(await it.runs()) == 1


async def test_wrong_outputs_of_a_response_are_refused() -> None:
    async with served() as it, it.client() as client:
        first = await client.responses.create(model="weatherman", input="x", tools=[FLAT])
        calls: Any = first.output
        good: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in calls]
        bad: list[tuple[Any, str]] = [
            (good[:1], "input"),
            ([good[0], good[0]], "input.1.call_id"),
            ([{**good[0], "call_id": "call_of_mine"}], "input.0.call_id"),
            ([{**good[0], "call_id": f"call_{'0' * 34}"}], "input.0.call_id"),
            ("Never mind.", "previous_response_id"),
        ]
        for sent, param in bad:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="weatherman", input=sent, previous_response_id=first.id)
            assert refused.value.param == param
        assert (await run_of(it, first)).status == "waiting"


async def test_other_results_for_answered_calls_are_a_conflict_and_the_same_ones_follow_the_run() -> None:
    async with served() as it, it.client(max_retries=0) as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        sent: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        second = await client.chat.completions.create(model="once", messages=sent, tools=[WEATHER])
        again = await client.chat.completions.create(model="once", messages=sent, tools=[WEATHER])
        assert again.id == second.id
        other: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "rainy")]
        with pytest.raises(openai.ConflictError, match="other results"):
            await client.chat.completions.create(model="once", messages=other, tools=[WEATHER])
        assert len(await it.runs()) == 1


async def test_the_next_request_may_offer_other_tools() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="weatherman", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        sent: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny", "cold")]
        answer = await client.chat.completions.create(model="weatherman", messages=sent)
        assert answer.choices[0].message.content == "No tools, but ['sunny', 'cold']"
        assert len(await it.runs()) == 1


async def test_limits_count_over_the_whole_run() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(
            model="once", messages=QUESTION, tools=[WEATHER], extra_body={"penstock": {"limits": {"max_steps": 3}}}
        )
        calls: Any = first.choices[0].message.tool_calls
        sent: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        with pytest.raises(openai.APIStatusError) as refused:
            await client.chat.completions.create(model="once", messages=sent, tools=[WEATHER])
        assert (refused.value.status_code, refused.value.code) == (402, "step_limit_exceeded")


async def test_a_tool_with_the_name_of_one_of_the_graph_is_refused() -> None:
    async with served() as it, it.client(max_retries=0) as client:
        taken: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}
        with pytest.raises(openai.BadRequestError, match="has its own tool 'look'") as refused:
            await client.chat.completions.create(model="mixed", messages=QUESTION, tools=[taken])
        assert (refused.value.code, refused.value.param) == ("ToolNameTaken", "tools")


async def test_a_person_can_reject_the_calls_of_a_client() -> None:
    async with served() as it, it.client() as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        run = await run_of(it, first)
        (call,) = first.choices[0].message.tool_calls or ()
        found = parse_call_id(call.id)
        assert found is not None
        await it.host.answer(found[0], "rejected", reason="not today", by="vera")
        assert (await it.run(run.id)).output == "It is the client gave no result: not today."


async def test_results_of_two_requests_at_once_reach_the_run_once() -> None:
    async with served() as it, it.client(max_retries=0) as client:
        first = await client.chat.completions.create(model="once", messages=QUESTION, tools=[WEATHER])
        calls: Any = first.choices[0].message.tool_calls
        sent: Any = [*QUESTION, first.choices[0].message, *results_for(calls, "sunny")]
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="once", messages=sent, tools=[WEATHER]) for _ in range(5))
        )
        assert {answer.choices[0].message.content for answer in answers} == {"It is sunny."}
        (run,) = await it.runs()
        assert run.tokens_in == 2 * PRICE.input_tokens
