"""What an answer says about itself, however its bytes come in pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.providers.http.response import Answer, Events, Opaque, Plain, answer_of
from penstock.providers.reading.meter import Allowance, Meter
from penstock.runtime.billing.usage import Usage

AMPLE = Allowance(1_000, 1_000, 1_000_000)
USAGE = {"prompt_tokens": 10, "completion_tokens": 5}


def event(data: Any, name: str | None = None, end: str = "\n") -> bytes:
    named = f"event: {name}{end}" if name else ""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{named}data: {text}{end}{end}".encode()


def chunk(text: str = "", finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"model": "m", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}], **more}


CHAT = [
    event(chunk("hel")),
    event(chunk("lo")),
    event(chunk(finish="stop")),
    event({"model": "m", "choices": [], "usage": USAGE}),
    event("[DONE]"),
]


def taken(answer: Answer, data: bytes, size: int = 7) -> bytes:
    pieces = [answer.take(data[at : at + size]) for at in range(0, len(data), size)]
    return b"".join(pieces) + answer.end()


@given(st.integers(1, 400), st.booleans(), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_are_passed_on_byte_for_byte_however_they_are_split(size: int, withholds: bool, end: str) -> None:
    events = [one.decode().replace("\n", end).encode() for one in CHAT]
    answer = Events(Meter(AMPLE), "chat", withholds_usage=withholds)
    passed = taken(answer, b"".join(events), size)
    assert passed == b"".join(events[:3] + events[4:] if withholds else events)
    assert answer.is_complete
    assert answer.usage == Usage(10, 5, model="m")


def test_a_usage_beside_a_choice_is_never_withheld() -> None:
    last = event(chunk(finish="stop", usage=USAGE))
    answer = Events(Meter(AMPLE), "chat", withholds_usage=True)
    assert taken(answer, last) == last
    assert answer.usage == Usage(10, 5, model="m")


def test_an_intermediate_usage_report_is_not_the_bill() -> None:
    answer = Events(Meter(AMPLE), "chat")
    taken(answer, event(chunk("hel", usage=USAGE)))
    assert (answer.is_complete, answer.usage) == (False, None)


def test_a_stream_is_complete_when_all_its_answers_are() -> None:
    answer = Events(Meter(AMPLE), "chat", answers=2)
    answer.take(event(chunk(finish="stop", index=0)))
    assert not answer.is_complete
    answer.take(event(chunk(finish="length", index=1)))
    assert answer.is_complete


MESSAGE = [
    event({"type": "message_start", "message": {"model": "c", "usage": {"input_tokens": 9, "output_tokens": 1}}}),
    event({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hello"}}),
    event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}}),
    event({"type": "message_stop"}),
]


def test_a_stream_of_messages_merges_its_usage_reports() -> None:
    answer = Events(Meter(AMPLE), "messages")
    assert taken(answer, b"".join(MESSAGE)) == b"".join(MESSAGE)
    assert (answer.is_complete, answer.usage) == (True, Usage(9, 4, model="c"))


def test_a_stream_of_messages_that_breaks_off_has_no_usage() -> None:
    answer = Events(Meter(AMPLE), "messages")
    taken(answer, b"".join(MESSAGE[:2]))
    assert (answer.is_complete, answer.usage) == (False, None)


def test_cached_input_of_a_stream_of_messages_is_input() -> None:
    start = {"input_tokens": 9, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 1}
    answer = Events(Meter(AMPLE), "messages")
    answer.take(event({"type": "message_start", "message": {"model": "c", "usage": start}}))
    answer.take(MESSAGE[2])
    assert answer.usage == Usage(129, 4, 100, 20, "c")


@pytest.mark.parametrize(("kind", "is_complete"), [("completed", True), ("incomplete", True), ("failed", False)])
def test_a_responses_stream_ends_with_the_complete_response(kind: str, is_complete: bool) -> None:
    whole = {"model": "m", "usage": {"input_tokens": 3, "output_tokens": 2}, "error": {"message": "it broke"}}
    whole["error"] = None if is_complete else whole["error"]
    answer = Events(Meter(AMPLE), "responses")
    taken(answer, event({"type": f"response.{kind}", "response": whole}))
    assert (answer.is_complete, answer.usage) == (is_complete, Usage(3, 2, model="m"))
    assert (answer.fault is None) is is_complete


@pytest.mark.parametrize(
    ("api", "data"),
    [
        ("chat", {"error": {"message": "overloaded"}}),
        ("messages", {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}),
        ("responses", {"type": "error", "message": "overloaded"}),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_kept(api: Any, data: dict[str, Any]) -> None:
    answer = Events(Meter(AMPLE), api)
    taken(answer, event(data))
    assert "overloaded" in str(answer.fault)


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": 0, "completion_tokens": 0}},
        {"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": 0, "completion_tokens": 5}},
        {"choices": [{"message": {"content": "x" * 400}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}},
        {"content": [{"type": "text", "text": "hello"}], "usage": {"input_tokens": 9, "output_tokens": 0}},
        {"output": [{"content": [{"text": "hello"}]}], "usage": {"input_tokens": 9, "output_tokens": 0}},
        {
            "output": [{"type": "function_call", "name": "f", "arguments": "x" * 400}],
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
        {
            "content": [{"type": "tool_use", "name": "f", "input": {"a": ["x" * 400]}}],
            "usage": {"input_tokens": 9, "output_tokens": 1},
        },
        {"content": [{"type": "thinking", "thinking": "x" * 400}], "usage": {"input_tokens": 9, "output_tokens": 1}},
        {"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": -1, "completion_tokens": 5}},
        {"choices": [{"message": {"content": "hello"}}], "usage": None},
        {"choices": [{"message": {"content": "hello"}}]},
    ],
)
def test_an_implausible_usage_is_ignored(body: dict[str, Any]) -> None:
    answer = Plain(Meter(AMPLE))
    taken(answer, json.dumps(body).encode())
    assert (answer.is_complete, answer.usage) == (True, None)


@pytest.mark.parametrize("data", [b"", b"{", b'"text"', b"\xff\xfe"])
def test_a_plain_answer_that_is_not_an_object_is_not_complete(data: bytes) -> None:
    answer = Plain(Meter(AMPLE))
    assert taken(answer, data) == data
    assert not answer.is_complete


@given(st.binary(max_size=400), st.sampled_from(["chat", "messages", "responses"]))
def test_arbitrary_data_is_passed_on(data: bytes, api: Any) -> None:
    assert taken(Events(Meter(AMPLE), api), data) == data


@pytest.mark.parametrize(
    "data",
    [
        {"choices": 1},
        {"choices": [1, {"delta": 2}, {"delta": {"content": 3, "tool_calls": [4, {"function": 5}]}}]},
        {"usage": {"prompt_tokens": "many"}, "choices": [{"finish_reason": "stop"}]},
        {"type": "message_start", "message": 1},
        {"type": "message_delta", "delta": 1, "usage": 2},
        {"type": "response.completed", "response": 1},
    ],
)
def test_odd_shapes_break_nothing(data: dict[str, Any]) -> None:
    for api in ("chat", "messages", "responses"):
        answer = Events(Meter(AMPLE), api)  # type: ignore[arg-type]
        assert taken(answer, event(data)) == event(data)
        assert answer.usage is None


def test_bedrocks_count_in_the_headers_is_used_if_the_body_has_none() -> None:
    headers = {"x-amzn-bedrock-input-token-count": "9", "x-amzn-bedrock-output-token-count": "4"}
    answer = Plain(Meter(AMPLE), headers)
    taken(answer, b'{"generation": "one two"}')
    assert answer.usage == Usage(9, 4)
    for count in ("", "-1", "x", "9" * 13):
        answer = Plain(Meter(AMPLE), {**headers, "x-amzn-bedrock-input-token-count": count})
        taken(answer, b'{"generation": "one two"}')
        assert answer.usage is None


@pytest.mark.parametrize(
    ("api", "content_type", "streams", "kind"),
    [
        ("speech", "audio/mpeg", False, Opaque),
        ("transcriptions", "text/plain", False, Opaque),
        ("transcriptions", "application/json", False, Plain),
        ("transcriptions", "text/event-stream", True, Events),
        ("unknown", "application/json", False, Opaque),
        ("unknown", "text/event-stream", False, Opaque),
        ("gemini", "application/json; charset=UTF-8", True, Events),
        ("gemini", "application/json", False, Plain),
        ("ollama", "application/x-ndjson", True, Events),
        ("converse", "application/vnd.amazon.eventstream", True, Events),
        ("embeddings", "application/json", False, Plain),
    ],
)
def test_the_reader_of_a_response_follows_from_its_content_type(
    api: Any, content_type: str, streams: bool, kind: type
) -> None:
    assert type(answer_of(Meter(AMPLE), api, content_type, streams=streams)) is kind


def test_a_prompt_that_gemini_blocks_is_a_complete_answer() -> None:
    answer = Events(Meter(AMPLE), "gemini")
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 5}}
    taken(answer, f"data: {json.dumps(blocked)}\n\n".encode())
    assert answer.is_complete
    assert answer.usage == Usage(5)
