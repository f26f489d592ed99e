"""Answers are counted while they arrive: their tokens are estimated from their text, the rest is bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.providers.reading.measure import WEIGHT_PER_BYTE, added_by, tokens_of, weigh, whole_in
from penstock.providers.reading.meter import Allowance, ExcessOutput, JsonBody, Meter
from penstock.runtime.billing.usage import Usage


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("hello", 2),
        ("one two three four", 5),
        ("привет", 2),
        ("你好世界", 3),
        ("🙂", 1),
        (" " * 320, 10),
        ("-" * 32 + "abcd", 2),
        ("ab" * 16, 8),
    ],
)
def test_tokens_are_estimated_from_characters(text: str, tokens: int) -> None:
    assert tokens_of(weigh(text)) == tokens


@given(st.text())
def test_no_text_weighs_more_than_its_bytes(text: str) -> None:
    assert 0 <= weigh(text) <= len(text.encode(errors="surrogatepass")) * WEIGHT_PER_BYTE


@pytest.mark.parametrize(
    ("event", "texts"),
    [
        ({"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]}, ["a", "b"]),
        ({"choices": [{"delta": {"reasoning": "r", "reasoning_content": "r"}}]}, ["r"]),
        ({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{}"}}]}}]}, ["{}"]),
        ({"type": "response.output_text.delta", "delta": "a"}, ["a"]),
        ({"type": "response.output_text.done", "delta": "a"}, []),
        ({"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}, ["a"]),
        ({"type": "content_block_delta", "delta": {"partial_json": "{", "thinking": "t"}}, ["{", "t"]),
        ({"choices": [{"text": "a", "index": 0}]}, ["a"]),
        (
            {"candidates": [{"content": {"parts": [{"text": "a"}, {"functionCall": {"name": "f"}}]}}]},
            ["a", '{"name":"f"}'],
        ),
        ({"message": {"role": "assistant", "content": "a", "thinking": "t"}, "done": False}, ["a", "t"]),
        ({"message": {"tool_calls": [{"function": {"arguments": {"x": 1}}}]}}, ['{"x":1}']),
        ({"response": "a", "thinking": "t", "done": False}, ["a", "t"]),
        ({"contentBlockDelta": {"delta": {"text": "a"}}}, ["a"]),
        ({"contentBlockDelta": {"delta": {"toolUse": {"input": "{}"}}}}, ['{"input":"{}"}']),
        ({"outputText": "a"}, ["a"]),
        ({"generation": "a"}, ["a"]),
        ({"candidates": 1, "message": 2, "contentBlockDelta": 3, "response": {}, "output": [4]}, []),
        ({"choices": 1, "delta": 2}, []),
        ({"choices": [1, {"delta": 2}, {"delta": {"content": 3, "tool_calls": [4, {"function": 5}]}}]}, []),
    ],
)
def test_the_text_that_an_event_adds_is_found_in_every_api(event: dict[str, Any], texts: list[str]) -> None:
    assert added_by(event) == texts


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ({"choices": [{"message": {"content": "a", "refusal": "b"}}]}, ["a", "b"]),
        ({"choices": [{"message": {"content": [{"type": "text", "text": "a"}]}}]}, ["a"]),
        ({"content": [{"type": "text", "text": "a"}, {"type": "tool_use", "input": {"b": 1}}]}, ["a", '{"b":1}']),
        ({"output": [{"content": [{"text": "a"}]}, {"arguments": "b"}, {"summary": [{"text": "c"}]}]}, ["b", "a", "c"]),
        ({"type": "response.completed", "response": {"output": [{"content": [{"text": "a"}]}]}}, ["a"]),
        ({"type": "response.output_text.done", "text": "a"}, ["a"]),
        ({"type": "response.content_part.done", "part": {"text": "a"}}, ["a"]),
        ({"choices": "a", "content": 1, "output": {}, "response": []}, []),
    ],
)
def test_the_text_of_a_whole_answer_is_found_in_every_api(body: dict[str, Any], texts: list[str]) -> None:
    assert whole_in(body) == texts


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}}]}


def test_events_are_counted_together_and_cut_at_twice_what_was_paid() -> None:
    meter = Meter(Allowance(7, 10, 1_000_000))
    for _ in range(20):
        meter.add_event({"choices": [{"delta": {"content": "word"}}]})
    assert (meter.tokens, meter.is_over) == (20, True)
    with pytest.raises(ExcessOutput, match="sent 21 tokens, 10 tokens were paid for") as raised:
        meter.add_event({"choices": [{"delta": {"content": "word"}}]})
    assert raised.value.usage == Usage(7, 21)


def test_an_event_that_repeats_the_text_is_not_counted_again() -> None:
    meter = Meter(Allowance(7, 10, 1_000_000))
    for _ in range(15):
        meter.add_event({"type": "response.output_text.delta", "delta": "word"})
    meter.add_event({"type": "response.output_text.done", "text": "word" * 15})
    assert meter.tokens == 15


@given(st.integers(1, 700), st.integers(0, 300))
def test_an_unfinished_body_is_cut_soon_after_it_is_too_long(size: int, around: int) -> None:
    """However its bytes come in pieces: at most a piece and a step later."""
    body = JsonBody(Meter(Allowance(7, 10, 1_000_000)))
    data = json.dumps({"id": "x" * around, **chat("word" * 5_000)}).encode()
    taken = 0
    with pytest.raises(ExcessOutput):
        while True:
            taken += len(body.take(data[taken : taken + size]))
    assert taken < 2_500 + around * 2 + size


def test_an_unfinished_body_of_allowed_text_and_much_else_is_not_cut() -> None:
    body = JsonBody(Meter(Allowance(7, 1_000, 1_000_000)))
    data = json.dumps({**chat("word" * 1_500), "other": ["x" * 100] * 2_000}).encode()
    for at in range(0, len(data), 1_000):
        body.take(data[at : at + 1_000])
    assert body.content() == data


@pytest.mark.parametrize(
    ("body", "max_bytes"),
    [
        ({}, 65_536 + 80 + 12_800),
        ({"stream": True}, 65_536 + 80 + 204_800),
        ({"tools": [{"type": "function"}, {"name": "f"}]}, 65_536 + 80 + 12_800),
        ({"logprobs": True}, 65_536 + 80 + 819_200),
        ({"tools": [{"type": "web_search"}]}, 64 * 1024 * 1024),
        ({"modalities": ["text", "audio"]}, 64 * 1024 * 1024),
        ({"tools": "x"}, 65_536 + 80 + 12_800),
        ({"tools": [{"functionDeclarations": []}]}, 65_536 + 80 + 12_800),
        ({"tools": [{"googleSearch": {}}]}, 64 * 1024 * 1024),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, 64 * 1024 * 1024),
    ],
)
def test_the_bytes_of_an_answer_are_limited_by_its_request(body: dict[str, Any], max_bytes: int) -> None:
    allowance = Allowance.of(body, 10, 100)
    assert allowance == Allowance(10, 100, max_bytes)
    meter = Meter(allowance)
    meter.count_bytes(max_bytes)
    with pytest.raises(ExcessOutput, match=f"more than {max_bytes:,} bytes, 100 tokens were paid for") as raised:
        meter.count_bytes(1)
    assert raised.value.usage == Usage(10, 100)


@pytest.mark.parametrize(
    ("usage", "is_plausible"),
    [
        (Usage(9, 100), True),
        (Usage(9, 23), True),
        (Usage(9, 22), False),
        (Usage(9, 0), False),
        (Usage(0, 100), False),
    ],
)
def test_a_usage_with_far_less_output_than_came_is_false(usage: Usage, is_plausible: bool) -> None:
    meter = Meter(Allowance(9, 100, 1_000_000))
    meter.check_whole(chat("word" * 100))
    assert meter.is_plausible(usage) is is_plausible


def test_an_answer_that_is_no_text_is_counted_in_bytes_alone() -> None:
    meter = Meter(Allowance.of_data(7, 1_000))
    meter.add_event({"choices": [{"delta": {"content": "word " * 1_000}}]})
    meter.check_whole({"text": "word " * 1_000})
    meter.check_unfinished(b'{"text": "' + b"word " * 1_000)
    assert (meter.tokens, meter.is_over) == (0, False)
    with pytest.raises(ExcessOutput):
        meter.count_bytes(1_001)


def test_input_that_an_answer_repeats_is_no_output() -> None:
    allowance = Allowance.of({"echo": True}, 100, 10, repeats=1)
    meter = Meter(allowance)
    meter.add_event({"choices": [{"text": "word" * 105}]})
    assert (meter.tokens, meter.is_over) == (5, False)
    assert meter.is_plausible(Usage(100, 5))
    with pytest.raises(ExcessOutput):
        meter.add_event({"choices": [{"text": "word" * 116}]})
