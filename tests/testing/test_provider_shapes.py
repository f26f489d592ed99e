"""The answers of the fake provider are valid by the types of the official SDKs, with no field they do not know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats import FORMATS
from penstock.testing.provider.generation import Generation

TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/responses": (Response, ResponseStreamEvent),
    "/v1/messages": (Message, RawMessageStreamEvent),
}
CALLS = (ToolCall("find", '{"q":"dam"}', "call_1"), ToolCall("now", "{}", "call_2"))
GENERATIONS = {
    "text": Generation("sixty metres high", (), 9, 5, False, (9, 5), "m", 1, 1_700_000_000, True),
    "truncated": Generation("sixty met", (), 9, 3, True, (9, 3), "m", 2, 1_700_000_000, True),
    "calls": Generation("", CALLS, 9, 8, False, (9, 8), "m", 3, 1_700_000_000, True),
    "text and calls": Generation("looking", CALLS, 9, 9, False, (9, 9), "m", 4, 1_700_000_000, False),
    "nothing": Generation("", (), 9, 0, False, (9, 0), "m", 5, 1_700_000_000, True),
}


@pytest.mark.parametrize("path", TYPES)
def test_plain_answers_are_valid_by_the_types_of_the_sdk(path: str) -> None:
    adapter = TypeAdapter(TYPES[path][0])
    for name, generation in GENERATIONS.items():
        parsed = adapter.validate_json(json.dumps(FORMATS[path].plain(generation)), strict=True)
        assert list(unknown_fields(parsed)) == [], name


@pytest.mark.parametrize("path", TYPES)
def test_streamed_events_are_valid_by_the_types_of_the_sdk(path: str) -> None:
    adapter = TypeAdapter(TYPES[path][1])
    for name, generation in GENERATIONS.items():
        stream = FORMATS[path].stream(generation)
        for data in events(b"".join((stream.opening, *stream.pieces, stream.ending))):
            parsed = adapter.validate_json(data, strict=True)
            assert list(unknown_fields(parsed)) == [], (name, data)


def events(stream: bytes) -> Iterator[bytes]:
    """Yield the data of each event; `ping` and `[DONE]`, which the SDKs skip, have no type."""
    for event in stream.split(b"\n\n"):
        data = event.partition(b"data: ")[2]
        if data and data != b"[DONE]" and b'"type":"ping"' not in data:
            yield data


def unknown_fields(value: Any) -> Iterator[str]:
    """Yield the names of fields that the types do not declare, at any depth."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for _, field in value:
            yield from unknown_fields(field)
    elif isinstance(value, list):
        for item in value:
            yield from unknown_fields(item)
