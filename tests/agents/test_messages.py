"""Messages, and their weight."""

from __future__ import annotations

import json

import pytest

from penstock import InvalidValue
from penstock.agents.messages import MEDIA_WEIGHT, MESSAGE_WEIGHT, Media, Message, ToolCall, ToolResult, Transcript


def test_a_message_weighs_its_bytes_its_media_and_its_calls() -> None:
    assert Message.user("dams").weight == 4 + MESSAGE_WEIGHT
    assert Message.user("ä").weight == 2 + MESSAGE_WEIGHT
    assert Message.user(["dam", Media("image/png", url="https://x/y.png")]).weight == 3 + MEDIA_WEIGHT + MESSAGE_WEIGHT
    with_call = Message.assistant("", [ToolCall("1", "find", {"q": "ä"})])
    assert with_call.weight >= len('{"q": "ä"}'.encode()) + len("find") + MESSAGE_WEIGHT


def test_text_that_is_no_valid_unicode_is_weighed_too() -> None:
    assert Message.user("\ud800").weight == 3 + MESSAGE_WEIGHT


def test_a_transcript_keeps_the_weight_of_what_is_in_it() -> None:
    messages = [Message.user("one"), Message.assistant("two")]
    transcript = Transcript(messages)
    transcript.extend([Message.user("three")])
    assert transcript.weight == sum(message.weight for message in transcript)
    assert [message.text for message in transcript.since(1)] == ["two", "three"]
    copied = transcript.copy()
    copied.append(Message.user("four"))
    assert len(transcript) == 3


def test_two_states_of_one_transcript_never_look_alike() -> None:
    transcript = Transcript([Message.user("one")])
    before = repr(transcript)
    transcript.append(Message.user("one"))
    assert repr(transcript) != before


def test_a_message_is_json() -> None:
    call = ToolCall("1", "find", {"q": "dams"})
    result = ToolResult("1", "find", "three")
    shown = [Message.assistant("", [call]).to_dict(), Message.tool(result).to_dict()]
    assert json.loads(json.dumps(shown)) == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "name": "find", "arguments": {"q": "dams"}}]},
        {"role": "tool", "content": "three", "tool_call_id": "1", "name": "find"},
    ]


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(InvalidValue, match="role"):
        Message("robot")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="content"):
        Message.user([3])  # type: ignore[list-item]
    with pytest.raises(InvalidValue, match="url"):
        Media("image/png")
