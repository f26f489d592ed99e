"""Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats.format import (
    Fields,
    Format,
    Stream,
    common_problem,
    event,
    messages_problem,
)
from penstock.testing.provider.generation import Generation

ERRORS: Mapping[int, str] = MappingProxyType(
    {
        400: "invalid_request_error",
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        529: "overloaded_error",
    }
)


def _problem(fields: Fields) -> str | None:
    if fields.get("max_tokens") is None:
        return "max_tokens: field required"
    return common_problem(fields) or messages_problem(fields)


def _plain(generation: Generation) -> dict[str, Any]:
    texts = [{"type": "text", "text": generation.text}] if generation.text else []
    tools = [_tool_use(call, _object(call.arguments)) for call in generation.tool_calls]
    answer = {**_head(generation), "content": texts + tools, "stop_reason": _stop_reason(generation)}
    return answer if generation.usage is None else {**answer, "usage": _usage(*generation.usage)}


def _stream(generation: Generation) -> Stream:
    opening = _event("message_start", message=_begun(generation))
    texts = [_delta(0, {"type": "text_delta", "text": piece}) for piece in generation.pieces]
    if texts:
        opening += _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
        texts[-1] += _event("content_block_stop", index=0)
    calls = [_block(index, call) for index, call in enumerate(generation.tool_calls, int(bool(texts)))]
    return Stream(opening + _event("ping"), (*texts, *calls), _ending(generation))


def _begun(generation: Generation) -> dict[str, Any]:
    begun = {**_head(generation), "content": [], "stop_reason": None}
    if generation.usage is None:
        return begun
    taken, given = generation.usage
    return {**begun, "usage": _usage(taken, 1 if given else 0)}


def _ending(generation: Generation) -> bytes:
    usage = {} if generation.usage is None else {"usage": _counts(*generation.usage)}
    stop = {"stop_reason": _stop_reason(generation), "stop_sequence": None}
    return _event("message_delta", delta=stop, **usage) + _event("message_stop")


def _block(index: int, call: ToolCall) -> bytes:
    begun = _event("content_block_start", index=index, content_block=_tool_use(call, {}))
    whole = _delta(index, {"type": "input_json_delta", "partial_json": call.arguments})
    return begun + whole + _event("content_block_stop", index=index)


def _delta(index: int, delta: dict[str, Any]) -> bytes:
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **data: Any) -> bytes:
    return event({"type": kind, **data}, kind)


def _head(generation: Generation) -> dict[str, Any]:
    return {
        "id": f"msg_{generation.number}",
        "type": "message",
        "role": "assistant",
        "model": generation.model,
        "stop_sequence": None,
    }


def _tool_use(call: ToolCall, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _object(arguments: Any) -> Any:
    """Return the arguments as data, as a plain answer has them; arguments that are not JSON stay text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _stop_reason(generation: Generation) -> str:
    if generation.cut_short:
        return "max_tokens"
    return "tool_use" if generation.tool_calls else "end_turn"


def _usage(taken: int, given: int) -> dict[str, Any]:
    return {**_counts(taken, given), "service_tier": "standard"}


def _counts(taken: int, given: int) -> dict[str, int]:
    return {
        "input_tokens": taken,
        "output_tokens": given,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _error(status: int, message: str) -> dict[str, Any]:
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _headers(number: int) -> dict[str, str]:
    return {"request-id": f"req_{number}"}


FORMAT = Format(_problem, _plain, _stream, _error, _headers)
