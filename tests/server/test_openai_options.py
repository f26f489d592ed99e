"""Model settings, output formats and tool choices over /v1: applied to the entry agent, or refused by name."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial, reduce
from typing import Any

import httpx2
import openai
import pytest
from pydantic import BaseModel

from penstock.agents.messages import ToolCall
from penstock.agents.model import Model, ModelRequest, ModelResponse, ModelSettings, NamedTool
from penstock.agents.scripted import ScriptedModel
from tests.nodes.graphs import graph, node
from tests.server.openai_service import ANNA, PRICE, Served, chat_with, serving

pytestmark = pytest.mark.requirement("X-14")

MESSAGES: Any = [{"role": "user", "content": "x"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"height": {"type": "integer"}},
    "required": ["height"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "dam", "schema": SCHEMA, "strict": True}}


class Dam(BaseModel):
    height: int


def settings_of(served: Served) -> ModelSettings:
    request = served.models["parrot"].last_request
    assert request is not None
    return request.settings


async def add_model(served: Served, id: str, model: Model, **data: Any) -> None:
    served.app.state.server.host._context.services["models"][id] = model
    await served.stores.graphs.save(id, "anna", id, chat_with(id, **data), now_ms=1)


async def test_settings_of_a_completion_reach_the_model() -> None:
    async with serving() as served, served.client() as client:
        await client.chat.completions.create(
            model="parrot",
            messages=MESSAGES,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            stop="END",
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            max_tokens=50,
            max_completion_tokens=40,
            reasoning_effort="low",
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "f"}},
            parallel_tool_calls=False,
        )
        assert settings_of(served) == ModelSettings(
            max_output_tokens=40,
            temperature=0.5,
            top_p=0.9,
            seed=3,
            stop=("END",),
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            reasoning_effort="low",
            tool_choice=NamedTool("f"),
            parallel_tool_calls=False,
        )


async def test_settings_of_a_response_reach_the_model() -> None:
    async with serving() as served, served.client() as client:
        await client.responses.create(
            model="parrot", input="x", temperature=0, top_p=0.5, max_output_tokens=7, reasoning={"effort": "high"}
        )
        expected = ModelSettings(max_output_tokens=7, temperature=0, top_p=0.5, reasoning_effort="high")
        assert settings_of(served) == expected


async def test_neutral_values_want_nothing_and_are_accepted_by_every_graph() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(
            model="plain",
            messages=MESSAGES,
            top_p=1,
            presence_penalty=0,
            frequency_penalty=0,
            n=1,
            logprobs=False,
            parallel_tool_calls=True,
            tool_choice="none",
            tools=[TOOL],
            response_format={"type": "text"},
        )
        assert answer.choices[0].message.content == "x"
        assert (answer.model_extra or {})["penstock"]["ignored"] == ["logprobs"]


async def test_the_smaller_of_two_output_limits_applies_and_truncation_is_reported() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.chat.completions.create(model="short", messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_follows_the_json_schema_of_the_request(stream: bool) -> None:
    async with serving() as served, served.client() as client:
        replies = ["It is high.", 'Sure:\n```json\n{"height": 221}\n```']
        await add_model(served, "dam", ScriptedModel(replies, usage=PRICE))
        if stream:
            async with client.chat.completions.stream(model="dam", messages=MESSAGES, response_format=Dam) as chunks:
                parsed = (await chunks.get_final_completion()).choices[0].message.parsed
        else:
            answer = await client.chat.completions.parse(model="dam", messages=MESSAGES, response_format=Dam)
            parsed = answer.choices[0].message.parsed
        assert parsed == Dam(height=221)


async def test_a_response_follows_its_text_format() -> None:
    async with serving() as served, served.client() as client:
        model = ScriptedModel(['{"height": 221}', '{"a": [1]}'], usage=PRICE)
        await add_model(served, "dam", model)
        response = await client.responses.parse(model="dam", input="x", text_format=Dam)
        assert response.output_parsed == Dam(height=221)
        assert model.last_request is not None
        assert model.last_request.settings.output_schema is not None
        loose = await client.responses.create(model="dam", input="x", text={"format": {"type": "json_object"}})
        assert json.loads(loose.output_text) == {"a": [1]}


async def test_structured_output_by_a_forced_tool_needs_no_second_request() -> None:
    async with serving() as served, served.client() as client:
        await add_model(served, "dam", ScriptedModel([ToolCall("0", "f", {})], usage=PRICE))
        answer = await client.chat.completions.create(
            model="dam", messages=MESSAGES, tools=[TOOL], tool_choice="required"
        )
        assert answer.choices[0].finish_reason == "tool_calls"


class Plain(Model):
    """A model of a user that applies no settings."""

    async def request(self, request: ModelRequest) -> ModelResponse:
        return ModelResponse("x", usage=PRICE)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("own", {"temperature": 0.5}, "temperature"),
    ("own", {"seed": 1}, "seed"),
    ("own", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ("plain", {"temperature": 0.5}, "temperature"),
    ("plain", {"max_tokens": 5}, "max_tokens"),
    ("plain", {"tools": [TOOL]}, "tools"),
    ("plain", {"response_format": {"type": "json_object"}}, "response_format"),
    ("question", {"tools": [TOOL]}, "tools"),
    ("greedy", {"response_format": {"type": "json_object"}}, "response_format"),
    ("formatted", {"response_format": {"type": "json_object"}}, "response_format"),
    ("team", {"tools": [TOOL]}, "tools"),
    ("inside", {"tools": [TOOL]}, "tools"),
    ("parrot", {"logit_bias": {"1": 5}}, "logit_bias"),
    ("parrot", {"logprobs": True}, "logprobs"),
    ("parrot", {"top_logprobs": 3}, "top_logprobs"),
    ("parrot", {"modalities": ["text", "audio"]}, "modalities"),
    ("parrot", {"functions": [{"name": "f"}]}, "functions"),
    ("parrot", {"verbosity": "low"}, "verbosity"),
    ("parrot", {"web_search_options": {}}, "web_search_options"),
    ("parrot", {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ("parrot", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ("parrot", {"response_format": {"type": "grammar"}}, "response_format.type"),
]
MANY: Any = [{"type": "function", "function": {"name": f"f{at}"}} for at in range(10_000)]


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def format_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


DEEP: Any = {"type": "string"}
for _ in range(45):
    DEEP = {"anyOf": [DEEP]}
INVALID: list[tuple[dict[str, Any], str]] = [
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"seed": 1.5}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [""]}, "stop.0"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": MANY}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    (tool(name=""), "tools.0.function.name"),
    (tool(name="wetter für zürich"), "tools.0.function.name"),
    (tool(name="天気"), "tools.0.function.name"),
    (tool(name="f" * 65), "tools.0.function.name"),
    (tool(name="f", description=5), "tools.0.function.description"),
    (tool(name="f", parameters=5), "tools.0.function.parameters"),
    (tool(name="f", parameters={"type": "string"}), "tools.0.function.parameters.type"),
    (tool(name="f", parameters={"type": "thing"}), "tools.0.function.parameters.type"),
    (tool(name="f", parameters={"properties": []}), "tools.0.function.parameters.properties"),
    (tool(name="f", parameters={"properties": {"a": 5}}), "tools.0.function.parameters.properties.a"),
    (tool(name="f", parameters={"required": "a"}), "tools.0.function.parameters.required"),
    (tool(name="f", description="x" * 250_000), "tools"),
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (format_of(None), "response_format.json_schema.schema"),
    (format_of("object"), "response_format.json_schema.schema"),
    (format_of({"type": ["object", "thing"]}), "response_format.json_schema.schema.type"),
    (format_of({"enum": "a"}), "response_format.json_schema.schema.enum"),
    (format_of({"anyOf": {"type": "null"}}), "response_format.json_schema.schema.anyOf"),
    (format_of({"items": 5}), "response_format.json_schema.schema.items"),
    (format_of(DEEP), "response_format.json_schema.schema.anyOf"),
]


async def test_what_cannot_be_applied_is_refused_by_name() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        await add_model(served, "own", Plain("own"))
        await add_model(served, "formatted", ScriptedModel([]), output={"type": "object"})
        nodes = [node("start", "chat-start"), node("lead", "team", model="parrot"), node("m", "agent", model="parrot")]
        team = graph(nodes, ["start > lead"], ["m.tool > lead.members"])
        await served.stores.graphs.save("team", "anna", "team", team, now_ms=1)
        inner = graph([node("agent", "agent", model="parrot")], [])
        inside = graph(
            [node("start", "chat-start"), node("box", "loop", graph=inner, max_iterations=2)], ["start > box"]
        )
        await served.stores.graphs.save("inside", "anna", "inside", inside, now_ms=1)
        for model, fields, param in UNSUPPORTED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=model, messages=MESSAGES, extra_body=fields)
            found = (refused.value.code, refused.value.param)
            assert found == ("unsupported_parameter", param), (model, fields, str(refused.value))
        for fields, param in (
            ({"text": {"verbosity": "low"}}, "text.verbosity"),
            ({"max_tool_calls": 3}, "max_tool_calls"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="parrot", input="x", extra_body=fields)
            assert (refused.value.code, refused.value.param) == ("unsupported_parameter", param)
        assert await served.runs() == []


async def test_bad_values_are_refused_with_their_place() -> None:
    async with serving() as served, httpx2.AsyncClient(base_url=served.url) as client:
        for fields, param in INVALID:
            body = {"model": "parrot", "messages": MESSAGES, **fields}
            answer = await client.post(
                "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {ANNA}"}, timeout=30
            )
            error = answer.json()["error"]
            assert answer.status_code == 400, (fields, error)
            assert str(error["param"]).startswith(param), (str(fields)[:200], error)
        assert await served.runs() == []


CALL: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT: Any = {"role": "tool", "tool_call_id": "a", "content": "r"}
WORDED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL, TOOL]}, "tools.1.function.name: there are two tools called 'f'; rename one"),
    (format_of({"type": "obect"}), ".schema.type must be one or several of array, boolean, .*, not 'obect'"),
    (format_of({"items": 5}), ".schema.items must be a JSON Schema: an object, true or false, not 5"),
    (
        format_of(reduce(lambda inside, _: {"not": inside}, range(45), {})),
        "the JSON Schema has too many levels; use at most 40",
    ),
    ({"stop": 5, "temperature": "x"}, "temperature: Input should be a valid number \\(and 1 more\\)$"),
    ({"messages": [{"role": "user", "content": 5}]}, "content: Input should be a valid string, or a valid list$"),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT]},
        "messages.3.tool_call_id: this tool call has two results; send one for each call",
    ),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "b"}]}, RESULT]},
        "messages.1.tool_calls.1.id: no result follows this tool call; send one for each of b$",
    ),
]


async def test_a_refusal_says_what_is_wrong_and_what_to_do() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        for fields, message in WORDED:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model="parrot", messages=MESSAGES, extra_body=fields)
            error: Any = refused.value.body
            assert re.search(message, error["message"]), error


async def test_an_answer_that_never_follows_its_schema_is_an_error_with_advice() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        await add_model(served, "dam", ScriptedModel(["It is high."] * 3, usage=PRICE))
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(
                model="dam", messages=MESSAGES, response_format={"type": "json_object"}
            )
        error: Any = failed.value.body
        fact = "FormatError: the answer is not JSON: Expecting value at line 1, column 1; use a simpler schema"
        assert (error["code"], fact in error["message"]) == ("FormatError", True), error


# Requests that clients repeat


async def test_a_request_with_the_same_idempotency_key_gets_the_same_run() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        headers = {"Idempotency-Key": "order 1, part 2"}
        first = await client.chat.completions.create(model="parrot", messages=MESSAGES, extra_headers=headers)
        again = await client.chat.completions.create(model="parrot", messages=MESSAGES, extra_headers=headers)
        assert again.id == first.id
        response = await client.responses.create(model="plain", input="x", extra_headers={"Idempotency-Key": "2"})
        repeated = await client.responses.create(model="plain", input="x", extra_headers={"Idempotency-Key": "2"})
        assert repeated.id == response.id
        assert len(await served.runs()) == 2
        others: list[Any] = [
            client.chat.completions.create(
                model="parrot", messages=[{"role": "user", "content": "y"}], extra_headers=headers
            ),
            client.chat.completions.create(model="plain", messages=MESSAGES, extra_headers=headers),
            client.responses.create(model="plain", input="y", extra_headers={"Idempotency-Key": "2"}),
            client.responses.create(model="parrot", input="x", extra_headers={"Idempotency-Key": "2"}),
        ]
        for other in others:
            with pytest.raises(openai.ConflictError, match="this Idempotency-Key was sent with another") as refused:
                await other
            assert (refused.value.code, refused.value.param) == ("conflict", "Idempotency-Key")
        assert len(await served.runs()) == 2
        with pytest.raises(openai.BadRequestError, match="1 to 255 characters"):
            await client.chat.completions.create(
                model="parrot", messages=MESSAGES, extra_headers={"Idempotency-Key": "k" * 256}
            )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_repeated_request_after_a_lost_connection_follows_the_run(stream: bool) -> None:
    async with serving(retry_grace_s=60) as served, served.client(max_retries=0) as client:
        lost = asyncio.ensure_future(client.chat.completions.create(model="slow", messages=MESSAGES, stream=stream))
        await served.gate.reached.wait()
        if stream:
            await (await lost).close()
        else:
            lost.cancel()
            await asyncio.gather(lost, return_exceptions=True)
        retries = served.app.state.retries
        while not any(entry.is_lost for entry in retries):  # noqa: ASYNC110  the server notices in a moment
            await asyncio.sleep(0.01)
        again = asyncio.ensure_future(client.chat.completions.create(model="slow", messages=MESSAGES, stream=stream))
        while any(entry.is_lost for entry in retries):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        served.gate.opened.set()
        answer: Any = await again
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            text = answer.choices[0].message.content
        assert text == "After all: x"
        (run,) = await served.runs()
        assert run.status == "completed"


async def test_a_lost_request_is_not_followed_by_one_with_another_idempotency_key() -> None:
    async with serving(retry_grace_s=60) as served, served.client(max_retries=0) as client:

        def send(key: str) -> asyncio.Future[Any]:
            headers = {"Idempotency-Key": key}
            request: Any = client.chat.completions.create(model="slow", messages=MESSAGES, extra_headers=headers)
            return asyncio.ensure_future(request)

        lost = send("order 1")
        await served.gate.reached.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        while not any(entry.is_lost for entry in served.app.state.retries):  # noqa: ASYNC110  noticed in a moment
            await asyncio.sleep(0.01)
        other = send("order 2")
        while len(await served.runs()) < 2:  # noqa: ASYNC110  the second one is on its way
            await asyncio.sleep(0.01)
        served.gate.opened.set()
        assert (await other).choices[0].message.content == "After all: x"


async def test_an_sdk_that_repeats_a_request_under_way_follows_its_run() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        first = asyncio.ensure_future(client.chat.completions.create(model="slow", messages=MESSAGES))
        await served.gate.reached.wait()
        headers = {"x-stainless-retry-count": "1"}
        again = asyncio.ensure_future(
            client.chat.completions.create(model="slow", messages=MESSAGES, extra_headers=headers)
        )
        while len([*served.app.state.retries]) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        served.gate.opened.set()
        assert (await first).id == (await again).id
        assert len(await served.runs()) == 1


async def test_an_sdk_that_lost_an_answer_gets_it_again() -> None:
    again = {"x-stainless-retry-count": "1"}
    async with serving(retry_grace_s=60) as served, served.client(max_retries=0) as client:
        complete: Any = partial(client.chat.completions.create, model="parrot", messages=MESSAGES)
        first = await complete()
        assert (await complete(extra_headers=again)).id == first.id
        assert (await complete()).id != first.id
        assert (await complete(temperature=0.5, extra_headers=again)).id != first.id
        for background in (False, True):
            respond: Any = partial(client.responses.create, model="parrot", input="x", background=background)
            assert (await respond()).id == (await respond(extra_headers=again)).id
        assert len(await served.runs()) == 5


async def test_a_failed_request_is_repeated_as_a_run_of_its_own() -> None:
    async with serving(retry_grace_s=60) as served, served.client(max_retries=0) as client:
        await add_model(served, "dam", ScriptedModel(["It is high.", "It is high.", "It is high.", "{}"], usage=PRICE))
        complete: Any = partial(
            client.chat.completions.create, model="dam", messages=MESSAGES, response_format={"type": "json_object"}
        )
        with pytest.raises(openai.InternalServerError):
            await complete()
        assert (await complete(extra_headers={"x-stainless-retry-count": "1"})).choices[0].message.content == "{}"


async def test_an_answer_is_forgotten_after_its_grace() -> None:
    async with serving(retry_grace_s=0.01) as served, served.client(max_retries=0) as client:
        complete: Any = partial(client.chat.completions.create, model="parrot", messages=MESSAGES)
        first = await complete()
        while [*served.app.state.retries]:  # noqa: ASYNC110  kept for a moment
            await asyncio.sleep(0.01)
        assert (await complete(extra_headers={"x-stainless-retry-count": "1"})).id != first.id


async def test_equal_requests_at_once_are_runs_of_their_own() -> None:
    async with serving() as served, served.client(max_retries=0) as client:
        served.gate.opened.set()
        answers = await asyncio.gather(
            *(client.chat.completions.create(model="slow", messages=MESSAGES) for _ in range(3))
        )
        assert len({answer.id for answer in answers}) == 3
