"""Answers in the shapes that real client libraries return.

One function per API builds the answer as plain data; the object shapes are the same data with attribute access. Only
the fields that programs read are imitated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, TypeAlias

Shape: TypeAlias = Literal["openai", "anthropic", "responses", "dict-openai", "dict-anthropic"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What an answer says, whatever its shape; `usage` is (input, output) tokens as reported, or None for silence."""

    number: int
    model: str
    text: str
    usage: tuple[int, int] | None
    cut_short: bool
    """The output ended at `max_tokens`."""


def in_shape(shape: Shape, reply: Reply) -> Any:
    """`reply` as the client library of `shape` would return it."""
    build, as_object = SHAPES[shape]
    return _attributes(build(reply)) if as_object else build(reply)


def _chat_completion(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.number}",
        "object": "chat.completion",
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": reply.text},
                "finish_reason": "length" if reply.cut_short else "stop",
            }
        ],
        "usage": _openai_usage(reply, "prompt", "completion"),
    }


def _response(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"resp_{reply.number}",
        "object": "response",
        "model": reply.model,
        "status": "incomplete" if reply.cut_short else "completed",
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply.text}]},
        ],
        "output_text": reply.text,
        "usage": _openai_usage(reply, "input", "output"),
    }


def _openai_usage(reply: Reply, input_name: str, output_name: str) -> dict[str, Any] | None:
    if reply.usage is None:
        return None
    taken, given = reply.usage
    return {
        f"{input_name}_tokens": taken,
        f"{output_name}_tokens": given,
        "total_tokens": taken + given,
        f"{input_name}_tokens_details": {"cached_tokens": 0},
        f"{output_name}_tokens_details": {"reasoning_tokens": 0},
    }


def _message(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.number}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [{"type": "text", "text": reply.text}],
        "stop_reason": "max_tokens" if reply.cut_short else "end_turn",
        "usage": reply.usage
        and {
            "input_tokens": reply.usage[0],
            "output_tokens": reply.usage[1],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def _attributes(data: Any) -> Any:
    if isinstance(data, dict):
        return SimpleNamespace(**{key: _attributes(value) for key, value in data.items()})
    if isinstance(data, list):
        return [_attributes(item) for item in data]
    return data


SHAPES: Mapping[str, tuple[Callable[[Reply], dict[str, Any]], bool]] = MappingProxyType(
    {
        "openai": (_chat_completion, True),
        "responses": (_response, True),
        "anthropic": (_message, True),
        "dict-openai": (_chat_completion, False),
        "dict-anthropic": (_message, False),
    }
)
