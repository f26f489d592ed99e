"""An API as the server sees it: checks, a plain answer, a stream, an error. Pure functions of a `Generation`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import CAPS, WireRequest

Fields = Mapping[str, Any]

OPENAI_ERRORS: Mapping[int, str] = MappingProxyType(
    {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream in the parts at which it can break: its opening, its pieces, and its end markers."""

    opening: bytes
    pieces: tuple[bytes, ...]
    ending: bytes


def json_object(request: WireRequest) -> Fields | None:
    """Return the body; None if it is no JSON object."""
    return request.body if isinstance(request.body, dict) else None


def no_headers(_: Generation) -> dict[str, str]:
    """Return no headers."""
    return {}


@dataclass(frozen=True, slots=True)
class Format:
    """One API."""

    problem: Callable[[Fields], str | None]
    """Returns the problem of a request; None if it has none."""
    plain: Callable[[Generation], dict[str, Any] | bytes]
    stream: Callable[[Generation], Stream]
    error: Callable[[int, str], dict[str, Any]]
    headers: Callable[[int], dict[str, str]]
    terms: Callable[[WireRequest], Fields | None] = json_object
    """Returns the request under OpenAI's names; None if the body cannot be read."""
    plain_type: str = "application/json"
    stream_type: str = "text/event-stream; charset=utf-8"
    separator: bytes = b"\n\n"
    """Ends an event of a stream."""
    padding: bytes = b": keep-alive\n\n"
    """An event of a stream without content."""
    usage_headers: Callable[[Generation], dict[str, str]] = no_headers


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in the format of OpenAI's APIs."""
    kind = OPENAI_ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def openai_headers(number: int) -> dict[str, str]:
    """Return the headers that OpenAI's clients read."""
    return {"x-request-id": f"req_{number}", "openai-processing-ms": "1"}


def common_problem(fields: Fields) -> str | None:
    """Return a problem that every API rejects, or None."""
    model = fields.get("model")
    if not isinstance(model, str) or not 0 < len(model) <= 256:
        return "model: a name of 1 to 256 characters is needed"
    for name in CAPS:
        cap = fields.get(name)
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int) or cap < 1):
            return f"{name}: a whole number of tokens, 1 or more"
    if not isinstance(fields.get("stream"), bool | None):
        return "stream: true or false"
    return None


def messages_problem(fields: Fields) -> str | None:
    """Return the problem of a list of messages, or None."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        return "messages: a list of at least one message is needed"
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        return "messages: each is an object with a role"
    return None
