"""OpenAI's Chat Completions."""

from __future__ import annotations

from typing import Any

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats.format import (
    Fields,
    Format,
    Stream,
    common_problem,
    event,
    messages_problem,
    openai_error,
    openai_headers,
)
from penstock.testing.provider.generation import Generation


def _problem(fields: Fields) -> str | None:
    if fields.get("n") not in (None, 1):
        return "n: one choice is all that this provider gives"
    return common_problem(fields) or messages_problem(fields)


def _plain(generation: Generation) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": generation.text if generation.text or not generation.tool_calls else None,
        "refusal": None,
        "annotations": [],
    }
    if generation.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in generation.tool_calls]
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish_reason(generation)}
    answer = {**_head(generation, "chat.completion"), "choices": [choice]}
    return answer if generation.usage is None else {**answer, "usage": _usage(*generation.usage)}


def _stream(generation: Generation) -> Stream:
    texts = [_chunk(generation, {"content": piece}) for piece in generation.pieces]
    calls = [
        _chunk(generation, {"tool_calls": [{"index": index, **_tool_call(call)}]})
        for index, call in enumerate(generation.tool_calls)
    ]
    ending = _chunk(generation, {}, _finish_reason(generation))
    if generation.usage_in_stream and generation.usage is not None:
        head = _head(generation, "chat.completion.chunk")
        ending += event({**head, "choices": [], "usage": _usage(*generation.usage)})
    opening = _chunk(generation, {"role": "assistant", "content": "", "refusal": None})
    return Stream(opening, (*texts, *calls), ending + b"data: [DONE]\n\n")


def _chunk(generation: Generation, delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    usage = {"usage": None} if generation.usage_in_stream else {}
    return event({**_head(generation, "chat.completion.chunk"), "choices": [choice], **usage})


def _head(generation: Generation, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{generation.number}",
        "object": kind,
        "created": generation.created_s,
        "model": generation.model,
        "service_tier": "default",
        "system_fingerprint": "fp_fake",
    }


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish_reason(generation: Generation) -> str:
    if generation.cut_short:
        return "length"
    return "tool_calls" if generation.tool_calls else "stop"


def _usage(taken: int, given: int) -> dict[str, Any]:
    return {
        "prompt_tokens": taken,
        "completion_tokens": given,
        "total_tokens": taken + given,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


FORMAT = Format(_problem, _plain, _stream, openai_error, openai_headers)
