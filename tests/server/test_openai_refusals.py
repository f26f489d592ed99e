"""What /v1 does not support is refused: which field, its value, and what to do instead."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from penstock.hosting.host import HostSettings, RunLimits
from penstock.server.openai.refusals import failure_of
from penstock.server.openai.wire.answer import Ended
from tests.nodes.graphs import graph, node
from tests.server.openai_service import ANNA, Served, serving

MESSAGES = [{"role": "user", "content": "x"}]
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "bright"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BROKEN = {"type": "image_url", "image_url": {"url": 3}}


async def posted(served: Served, path: str, body: dict[str, Any], method: str = "POST") -> httpx2.Response:
    headers = {"Authorization": f"Bearer {ANNA}", "Content-Type": "application/json"}
    async with httpx2.AsyncClient(base_url=served.url, headers=headers, timeout=30) as client:
        return await client.request(method, path, content=json.dumps({"model": "parrot", **body}).encode())


FILE = {"type": "input_file", "file_data": "data:text/plain,x"}


def named(name: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": "data:text/plain,x", "filename": name}}


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (
        CHAT,
        {"messages": [*MESSAGES, {"role": "user", "content": ""}]},
        "messages.1.content",
        "text, a picture or a file",
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 1_000_001}]}, "messages.0.content", "at most 1,000,000"),
    (CHAT, {"messages": [{"role": "user", "content": [PICTURE] * 21}]}, "messages.0.content", "at most 20"),
    (CHAT, {"messages": [{"role": "user", "content": [BROKEN]}]}, "messages.0.content.0.image_url.url", "string"),
    (CHAT, {"messages": [{"role": "user", "content": [named(5)]}]}, "messages.0.content.0.file.filename", "string"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [named({"a": 1})]}]},
        "messages.0.content.0.file.filename",
        "string",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [named("a\nb")]}]},
        "messages.0.content.0.file.filename",
        "one line",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [named("a" * 300)]}]},
        "messages.0.content.0.file.filename",
        "255",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{**named("a"), "file": 3}]}]},
        "messages.0.content.0.file",
        "dict",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [FILE | {"filename": "\n"}]}]},
        "input.0.content.0.filename",
        "line",
    ),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [FILE | {"filename": 5}]}]},
        "input.0.content.0.filename",
        "string",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "penstock": {"limits": {"max_cost_usd": "1_0"}}},
        "penstock.limits.max_cost_usd",
        "'0.50'",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "penstock": {"limits": {"max_cost_usd": 1e-10}}},
        "penstock.limits.max_cost_usd",
        "at least",
    ),
    (
        CHAT,
        {"messages": [*MESSAGES, {"role": "tool", "content": "3"}]},
        "messages",
        "or with the results of your tools",
    ),
    (CHAT, {"messages": MESSAGES, "stream": "yes"}, "stream", "boolean"),
    (CHAT, {"messages": MESSAGES, "stream": 1}, "stream", "boolean"),
    (CHAT, {"messages": MESSAGES, "n": "1"}, "n", "integer"),
    (CHAT, {"messages": MESSAGES, "n": True}, "n", "integer"),
    (CHAT, {"messages": MESSAGES, "max_tokens": "5"}, "max_tokens", "integer"),
    (CHAT, {"messages": MESSAGES, "temperature": "0.5"}, "temperature", "number"),
    (RESPONSES, {"input": [{**OUTPUT, "output": {"a": 1}}, *MESSAGES]}, "input.0.output", "string"),
    (
        CHAT,
        {"messages": MESSAGES, "stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "boolean",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "penstock": {"limits": {"max_steps": -1}}},
        "penstock.limits.max_steps",
        "whole number",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "penstock": {"limits": {"max_tokens": 9}}},
        "penstock.limits.max_tokens",
        "at most 5",
    ),
    (CHAT, {"messages": MESSAGES, "penstock": {"limits": {"money": 1}}}, "penstock.limits", "max_cost_usd"),
    (CHAT, {"messages": MESSAGES, "penstock": {"run_id": "bert:1"}}, "penstock.run_id", "anna:"),
    (CHAT, {"messages": MESSAGES, "model": "draft"}, "model", "no-such-type"),
    (RESPONSES, {"input": ""}, "input", "text, a picture or a file"),
    (RESPONSES, {"input": "x" * 1_000_001}, "input", "at most 1,000,000"),
    (RESPONSES, {"input": "x", "instructions": "x" * 1_000_001}, "instructions", "at most 1,000,000"),
    (RESPONSES, {"input": [{"role": "user", "content": ""}]}, "input.0.content", "text, a picture or a file"),
    (RESPONSES, {"input": [*MESSAGES, OUTPUT]}, "input.1.call_id", "follows the answer with that tool call"),
    (RESPONSES, {"input": [REASONING]}, "input", "at least one user message"),
    (
        RESPONSES,
        {"input": [{"type": "item_reference", "id": "msg_1"}, *MESSAGES]},
        "input.0.type",
        "previous_response_id",
    ),
    (RESPONSES, {"input": "x", "conversation": "conv_1"}, "conversation", "previous_response_id"),
    (RESPONSES, {"input": "x", "conversation": {"id": "conv_1"}}, "conversation", "previous_response_id"),
    (RESPONSES, {"input": "x", "background": "no"}, "background", "boolean"),
    (RESPONSES, {"input": "x", "penstock": {"limits": {"timeout_s": "soon"}}}, "penstock.limits.timeout_s", "number"),
]


async def test_invalid_values_are_refused_with_their_field_in_the_request() -> None:
    settings = HostSettings(ceilings=RunLimits(max_tokens=5), drain_s=0)
    async with serving(settings, max_body_bytes=4_000_000) as served:
        draft = graph([node("start", "chat-start"), node("odd", "no-such-type")], ["start > odd"])
        await served.stores.graphs.save("draft", "anna", "Draft", draft, now_ms=1)
        for path, body, param, says in WRONG:
            answer = await posted(served, path, body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (param, says, error)
            assert says in error["message"], error
        assert await served.runs() == []
        assert list(await served.stores.chats.list()) == []


async def test_an_invalid_query_has_a_param_and_invalid_json_has_none() -> None:
    async with serving() as served, served.client() as client:
        given = await client.responses.create(model="parrot", input="x")
        answer = await posted(served, f"{RESPONSES}/{given.id}?starting_after=soon", {}, "GET")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "starting_after")
        async with httpx2.AsyncClient(base_url=served.url, headers={"Authorization": f"Bearer {ANNA}"}) as http:
            answer = await http.post(CHAT, content=b'{"model": nonsense', headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, None)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b'{"model": "parrot", "input": "a\\u0000b"}', "bad_text", "input"),
        (b'{"model": "parrot", "input": "\\ud800"}', "bad_text", "input"),
        (b'{"model": "parrot", "input": "x", "temperature": NaN}', "bad_number", None),
        (b'{"model": "parrot", "input": "x", "top_p": 1e999}', "bad_number", "top_p"),
        (b'{"model": "parrot", "input": "x", "tools": ' + b"[" * 200 + b"]" * 200 + b"}", "too_deep", None),
        (b'{"model": "parrot", "model": "plain", "input": "x"}', "duplicate_key", None),
    ],
    ids=["NUL", "half a pair", "NaN", "too large", "too deep", "twice"],
)
async def test_unusable_json_is_a_400_like_every_invalid_request(body: bytes, code: str, param: str | None) -> None:
    async with serving() as served, httpx2.AsyncClient(base_url=served.url) as client:
        headers = {"Authorization": f"Bearer {ANNA}", "Content-Type": "application/json"}
        answer = await client.post(RESPONSES, content=body, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (400, "invalid_request_error", code)
        assert param is None or error["param"] == param


async def test_a_tool_result_cannot_continue_a_response() -> None:
    async with serving() as served, served.client() as client:
        given = await client.responses.create(model="looker", input="x")
        for items in ([OUTPUT], [OUTPUT, *MESSAGES]):
            answer = await posted(
                served, RESPONSES, {"model": "looker", "input": items, "previous_response_id": given.id}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "input.0.call_id")
            assert "the graph's own tools are already done" in error["message"]
        again: Any = [item.model_dump() for item in given.output]
        later = await client.responses.create(model="looker", input=[*MESSAGES, *again, OUTPUT, *MESSAGES])  # type: ignore[list-item]
        assert later.output_text == "Bright."


async def test_returned_reasoning_is_ignored_and_listed() -> None:
    async with serving() as served:
        answer = (
            await posted(served, RESPONSES, {"model": "listener", "input": [*MESSAGES, REASONING, *MESSAGES]})
        ).json()
        assert answer["penstock"]["ignored"] == ["input.1"]
        assert answer["output"][0]["content"][0]["text"] == "user: x | user: x"


async def test_a_graph_without_history_lists_the_ignored_messages() -> None:
    system = {"role": "system", "content": "Be kind."}
    request_body = {"model": "plain", "instructions": "Be short."}
    async with serving() as served, served.client() as client:
        for body, ignored in (
            ({"messages": MESSAGES}, []),
            ({"messages": [system, *MESSAGES]}, ["messages.0"]),
            ({"messages": [system, *MESSAGES, *MESSAGES, *MESSAGES]}, ["messages.0-2"]),
        ):
            answer = (await posted(served, CHAT, {"model": "plain", **body})).json()
            assert (answer["penstock"]["ignored"], answer["choices"][0]["message"]["content"]) == (ignored, "x")
        for given_input, ignored in (("x", ["instructions"]), ([system, *MESSAGES], ["input.0", "instructions"])):
            answer = (await posted(served, RESPONSES, {**request_body, "input": given_input})).json()
            assert (answer["penstock"]["ignored"], answer["instructions"]) == (ignored, None)
            later = await client.responses.retrieve(answer["id"])
            assert later.instructions is None
            assert (later.model_extra or {})["penstock"]["ignored"] == ignored
        heard = (
            await posted(served, RESPONSES, {**request_body, "model": "listener", "input": [system, *MESSAGES]})
        ).json()
        assert (heard["penstock"]["ignored"], heard["instructions"]) == ([], "Be short.")


# Limits


async def test_a_limit_error_names_its_source_and_how_to_raise_it() -> None:
    settings = HostSettings(default_limits=RunLimits(max_steps=0), drain_s=0)
    async with serving(settings) as served:
        request_body = {"messages": MESSAGES, "penstock": {"limits": {"max_steps": 1}}}
        error = (await posted(served, CHAT, request_body)).json()["error"]
        assert error["code"] == "step_limit_exceeded"
        assert "the request sets it in penstock.limits.max_steps: retry with a higher limit" in error["message"]
        grant = f'POST /api/runs/{error["run_id"]}/grant with {{"limits": {{"max_steps": …}}}}'
        assert grant in error["message"]
        error = (await posted(served, CHAT, {"messages": MESSAGES})).json()["error"]
        assert "the server sets it unless you send penstock.limits.max_steps" in error["message"]
        streamed = (await posted(served, CHAT, {**request_body, "stream": True})).text
        assert "the request sets it" in streamed


@pytest.mark.parametrize(
    ("whose", "says"),
    [
        ("node", "a node of the graph sets that limit"),
        ("owner", "daily budget for you"),
        ("all", "daily budget for all users together"),
        ("run", "penstock.limits.max_cost_usd"),
        (None, "penstock.limits.max_cost_usd"),
    ],
)
def test_the_advice_depends_on_the_owner_of_the_limit(whose: str | None, says: str) -> None:
    refused = failure_of(Ended("halted", reason="budget_exceeded", whose=whose), "r1", has_text=False)
    assert refused is not None
    assert says in refused.message
