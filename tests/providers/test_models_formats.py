"""What is sent to each API, and how its answers are parsed: also those of servers that are sloppy with them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agents import Media, Message, ModelRequest, ModelSettings, NamedTool, ToolCall, ToolResult, Transcript
from penstock.agents.model import ModelResponse
from penstock.agents.tools import ToolSpec
from penstock.providers.models import UnsupportedRequest
from penstock.providers.models.events import UnreadableEvent, events
from penstock.providers.models.formats import Chat, Format, Messages, Responses
from penstock.providers.models.formats.format import StreamError, is_strict
from penstock.providers.reading.meter import Allowance, Meter
from penstock.runtime.billing.usage import Usage

CONVERSATION = [
    Message.system("Be brief."),
    Message.user("2+3 and 20+30?"),
    Message.assistant("Let me see.", [ToolCall("1", "add", {"a": 2}), ToolCall("2", "add", '{"a": 20,')]),
    Message.tool(ToolResult("1", "add", "5")),
    Message.tool(ToolResult("2", "add", "not JSON", is_error=True)),
    Message.assistant("", [ToolCall("3", "add", {})]),
    Message.tool(ToolResult("3", "add", "50")),
]


def request(*messages: Message, **settings: Any) -> ModelRequest:
    return ModelRequest(
        Transcript(messages), settings=ModelSettings(**settings), instructions="You add.", max_output_tokens=9
    )


def streamed(format: Format, *fed: dict[str, Any]) -> tuple[list[str | ToolCall], ModelResponse | None]:
    reader = format.reader()
    pieces = [piece for event in fed for piece in reader.feed(event)]
    return pieces, reader.whole()


# Requests.


def test_a_conversation_for_chat_completions() -> None:
    messages = Chat().body("m", request(*CONVERSATION), streams=False)["messages"]
    roles = [message["role"] for message in messages]
    assert roles == ["system", "system", "user", "assistant", "tool", "tool", "assistant", "tool"]
    assert messages[3]["tool_calls"][1]["function"] == {"name": "add", "arguments": '{"a": 20,'}
    assert messages[6]["content"] is None
    assert messages[7] == {"role": "tool", "tool_call_id": "3", "content": "50"}


def test_a_conversation_for_responses() -> None:
    body = Responses().body("m", request(*CONVERSATION), streams=False)
    kinds = [item.get("type") or item["role"] for item in body["input"]]
    assert kinds == [
        *("system", "user", "assistant", "function_call", "function_call"),
        *("function_call_output", "function_call_output", "function_call", "function_call_output"),
    ]
    assert (body["instructions"], body["store"]) == ("You add.", False)


def test_a_conversation_for_messages() -> None:
    body = Messages().body("m", request(*CONVERSATION), streams=False)
    assert body["system"] == "You add.\n\nBe brief."
    turns = [(turn["role"], [block["type"] for block in turn["content"]]) for turn in body["messages"]]
    assert turns == [
        ("user", ["text"]),
        ("assistant", ["text", "tool_use", "tool_use"]),
        ("user", ["tool_result", "tool_result"]),
        ("assistant", ["tool_use"]),
        ("user", ["tool_result"]),
    ]
    assert body["messages"][1]["content"][2]["input"] == {"arguments": '{"a": 20,'}


def test_stop_sequences_are_sent_or_refused() -> None:
    stopping = request(Message.user("hi"), stop=("END",))
    assert Chat().body("m", stopping, streams=False)["stop"] == ["END"]
    assert Messages().body("m", stopping, streams=False)["stop_sequences"] == ["END"]
    with pytest.raises(UnsupportedRequest, match="no stop sequences"):
        Responses().body("m", stopping, streams=False)


@pytest.mark.parametrize(
    ("format", "media", "part"),
    [
        (
            Chat(),
            Media("audio/wav", data=b"a"),
            {"type": "input_audio", "input_audio": {"data": "YQ==", "format": "wav"}},
        ),
        (Chat(), Media("image/png", url="http://p"), {"type": "image_url", "image_url": {"url": "http://p"}}),
        (Responses(), Media("application/pdf", url="http://p"), {"type": "input_file", "file_url": "http://p"}),
        (
            Responses(),
            Media("image/png", data=b"a"),
            {"type": "input_image", "image_url": "data:image/png;base64,YQ=="},
        ),
        (
            Messages(),
            Media("image/png", url="http://p"),
            {"type": "image", "source": {"type": "url", "url": "http://p"}},
        ),
    ],
)
def test_media_in_the_words_of_each_api(format: Format, media: Media, part: dict[str, Any]) -> None:
    body = format.body("m", request(Message.user([media])), streams=False)
    (message,) = [turn for turn in body.get("messages", body.get("input")) if turn["role"] == "user"]
    assert message["content"] == [part]


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        ({"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}, True),
        ({"type": "object", "properties": {"a": {}}, "required": [], "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"]}, False),
        ({"type": "array", "items": {"type": "object"}}, False),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, False),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"b": {}}}}}, False),
        ({"type": "string"}, True),
    ],
)
def test_a_schema_is_strict_if_every_object_in_it_is(schema: dict[str, Any], strict: bool) -> None:
    assert is_strict(schema) is strict


# Answers.


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"model": "m-1", "choices": [{"delta": delta, "finish_reason": finish}]}


def piece(arguments: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": more.pop("name", None), "arguments": arguments}, **more}


def test_a_tool_call_in_pieces_is_given_when_it_is_whole() -> None:
    pieces, whole = streamed(
        Chat(),
        chunk(tool_calls=[piece("", index=0, id="1", name="add")]),
        chunk(tool_calls=[piece('{"a":', index=0)]),
        chunk(tool_calls=[piece("1}", index=0), piece('{"a":2}', index=1, id="2", name="add")]),
        chunk("tool_calls"),
    )
    assert pieces == [ToolCall("1", "add", {"a": 1}), ToolCall("2", "add", {"a": 2})]
    assert whole is not None
    assert list(whole.tool_calls) == pieces


def test_tool_calls_without_index_or_id_or_the_right_finish() -> None:
    pieces, whole = streamed(
        Chat(),
        chunk(tool_calls=[piece("{}", id="1", name="a")]),
        chunk(
            tool_calls=[piece("{}", id="2", name="b"), {"function": {"name": "c", "arguments": {"x": 1}}, "index": 7}]
        ),
        chunk("stop"),
    )
    assert pieces == [ToolCall("1", "a", {}), ToolCall("2", "b", {}), ToolCall("call_7", "c", {"x": 1})]
    assert whole is not None
    assert whole.finish_reason == "tool_calls"


def test_text_in_parts_is_text() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "hi"}]
    pieces, whole = streamed(Chat(), chunk(content=parts), chunk("stop"))
    plain = Chat().read({"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]})
    assert pieces == ["hi"]
    assert whole is not None
    assert plain is not None
    assert whole.text == plain.text == "hi"


def test_usage_after_the_end_counts_with_its_cached_part() -> None:
    counts = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 90}}
    _, whole = streamed(Chat(), chunk(content="hi"), chunk("stop"), {"model": "m-1", "choices": [], "usage": counts})
    assert whole is not None
    assert whole.usage == Usage(100, 5, cached_input_tokens=90, model="m-1")


def test_usage_of_messages_is_the_sum_of_all_kinds_of_input() -> None:
    begun = {"model": "m-1", "usage": {"input_tokens": 10, "cache_read_input_tokens": 80, "output_tokens": 1}}
    ended = {"cache_creation_input_tokens": 5, "output_tokens": 7}
    pieces, whole = streamed(
        Messages(),
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": ended},
        {"type": "message_stop"},
    )
    assert pieces == ["hi"]
    assert whole is not None
    assert whole.usage == Usage(95, 7, cached_input_tokens=80, cache_write_tokens=5, model="m-1")


def test_a_last_event_without_the_answer_leaves_what_came_before() -> None:
    pieces, whole = streamed(
        Responses(),
        {"type": "response.output_text.delta", "delta": "hi"},
        {"type": "response.completed", "response": {"status": "completed", "output": []}},
    )
    assert pieces == ["hi"]
    assert whole is not None
    assert whole.text == "hi"


@pytest.mark.parametrize(
    ("format", "answer", "reason"),
    [
        (Chat(), {"choices": [{"message": {"refusal": "no"}, "finish_reason": "stop"}]}, "content_filter"),
        (Chat(), {"choices": [{"message": {"content": "a"}, "finish_reason": "length"}]}, "length"),
        (Messages(), {"content": [{"type": "text", "text": "a"}], "stop_reason": "max_tokens"}, "length"),
        (Messages(), {"content": [], "stop_reason": "refusal"}, "content_filter"),
        (Responses(), {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "content_filter"),
        (Responses(), {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),
    ],
)
def test_why_an_answer_ended(format: Format, answer: dict[str, Any], reason: str) -> None:
    whole = format.read(answer)
    assert whole is not None
    assert whole.finish_reason == reason


@pytest.mark.parametrize("format", [Chat(), Messages(), Responses()])
@pytest.mark.parametrize(
    "answer", [{}, {"choices": None}, {"choices": [None]}, {"content": None}, {"status": "queued"}]
)
def test_an_answer_without_its_end_is_none(format: Format, answer: dict[str, Any]) -> None:
    assert format.read(answer) is None


@pytest.mark.parametrize(
    ("format", "event"),
    [
        (Chat(), {"error": {"type": "server_error", "message": "overloaded"}}),
        (Chat(), {"error": "overloaded"}),
        (Messages(), {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}),
        (Responses(), {"type": "error", "message": "overloaded"}),
    ],
)
def test_an_error_in_a_stream_is_raised(format: Format, event: dict[str, Any]) -> None:
    with pytest.raises(StreamError, match="overloaded"):
        list(format.reader().feed(event))


def test_a_failed_response_is_an_error() -> None:
    failed = {"status": "failed", "error": {"code": "server_error", "message": "overloaded"}}
    reader = Responses().reader()
    assert list(reader.feed({"type": "response.failed", "response": failed})) == []
    with pytest.raises(StreamError, match="overloaded"):
        reader.whole()


# Events.


async def _read(chunks: list[bytes]) -> list[dict[str, Any]]:
    async def coming() -> AsyncIterator[bytes]:
        for one in chunks:
            yield one

    return [event async for event in events(coming(), Meter(Allowance(1_000, 1_000, 1_000_000)))]


@given(
    st.lists(st.dictionaries(st.text(), st.text(), max_size=3), max_size=4),
    st.lists(st.integers(0, 400), max_size=8),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_however_the_bytes_come(objects: list[dict[str, str]], cuts: list[int], end: str) -> None:
    lines = (f": a comment{end}event: x{end}data: {json.dumps(one, ensure_ascii=False)}{end}{end}" for one in objects)
    stream = ("".join(lines) + f"data: [DONE]{end}{end}data: no{end}{end}").encode("utf-8", "surrogatepass")
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    chunks = [stream[begin:until] for begin, until in itertools.pairwise(places)]
    assert asyncio.run(_read(chunks)) == [json.loads(json.dumps(one)) for one in objects]


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: [1]\n\n", b"data: " + b"[" * 100_000 + b"\n\n"])
async def test_an_event_that_is_no_object_cannot_be_read(data: bytes) -> None:
    with pytest.raises(UnreadableEvent):
        await _read([data])


async def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.providers.models.events.MAX_EVENT_BYTES", 1_000)
    with pytest.raises(UnreadableEvent, match="more than 1000 bytes"):
        await _read([b"data: " + b"x" * 500] * 3)


LOOK = ToolSpec("look", "Look.", {"type": "object"})


def body_of(format: Format, **settings: Any) -> dict[str, Any]:
    request = ModelRequest(Transcript([Message.user("x")]), [LOOK], ModelSettings(**settings), max_output_tokens=9)
    return dict(format.body("m", request, streams=False))


@pytest.mark.requirement("X-14")
@pytest.mark.parametrize(
    ("format", "settings", "fields"),
    [
        (Chat(), {"top_p": 0.5, "seed": 3}, {"top_p": 0.5, "seed": 3}),
        (Chat("max_tokens"), {"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1}),
        (Chat(), {"reasoning_effort": "low", "parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        (Chat(), {"tool_choice": "required"}, {"tool_choice": "required"}),
        (
            Chat(),
            {"tool_choice": NamedTool("look")},
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
        ),
        (Responses(), {"top_p": 0.5, "reasoning_effort": "low"}, {"top_p": 0.5, "reasoning": {"effort": "low"}}),
        (Responses(), {"tool_choice": NamedTool("look")}, {"tool_choice": {"type": "function", "name": "look"}}),
        (Responses(), {"tool_choice": "none", "parallel_tool_calls": True}, {"tool_choice": "none"}),
        (Messages(), {"top_p": 0.5, "stop": ("a",)}, {"top_p": 0.5, "stop_sequences": ["a"]}),
        (Messages(), {"tool_choice": "required"}, {"tool_choice": {"type": "any"}}),
        (Messages(), {"tool_choice": NamedTool("look")}, {"tool_choice": {"type": "tool", "name": "look"}}),
        (
            Messages(),
            {"parallel_tool_calls": False},
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        ),
        (Messages(), {"tool_choice": "none", "parallel_tool_calls": False}, {"tool_choice": {"type": "none"}}),
    ],
)
def test_settings_are_sent_in_the_fields_of_the_api(
    format: Format, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = body_of(format, **settings)
    assert {name: body.get(name) for name in fields} == fields
    assert format.applies >= settings.keys()


@pytest.mark.requirement("X-14")
@pytest.mark.parametrize("format", [Chat(), Responses(), Messages()])
def test_settings_that_an_api_does_not_have_are_refused_before_anything_is_sent(format: Format) -> None:
    values: dict[str, Any] = {
        "seed": 1, "presence_penalty": 1, "frequency_penalty": 1, "reasoning_effort": "low", "stop": ("a",)
    }  # fmt: skip
    for name, value in values.items():
        if name in format.applies:
            body_of(format, **{name: value})
        else:
            with pytest.raises(UnsupportedRequest, match=name):
                body_of(format, **{name: value})
