"""The three wire formats of the gateway: their paths, their credentials and their errors.

A wire lists the paths that it passes on. Every other path is refused by name, because it would be a way around the
limits. Statuses are chosen for the clients: 402 without `Retry-After` is retried by none of them but codex, which gets
429 with `insufficient_quota`.

Knows paths, headers and error bodies, and nothing of runs, limits or HTTP libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

WireName = Literal["openai", "anthropic", "gemini"]
Kind = Literal["model", "free", "ping"]
"""The kind of a path: a model call, a request that costs nothing, or a probe that the gateway answers itself."""

PAYMENT_REQUIRED = 402
TOO_MANY_REQUESTS = 429
UPGRADE_REQUIRED = 426
NO_RETRY = (b"x-should-retry", b"false")
CREDENTIALS = frozenset(
    {b"authorization", b"x-api-key", b"api-key", b"x-goog-api-key", b"proxy-authorization", b"cookie"}
)
"""Headers of a client that never reach a provider."""


class Denied(Exception):
    """A request that the gateway does not pass on; it is answered in the error format of its wire."""

    def __init__(self, status: int, message: str, *, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after_s = retry_after_s
        """When to try again; None if trying again does not help."""


_DOT_SEGMENTS = frozenset({".", ".."})


@dataclass(frozen=True, slots=True)
class Wire:
    """One wire format."""

    name: WireName
    address: str
    """Base URL of the provider itself, in the form that its clients take."""
    key_header: str
    root: str
    """Path between the base URL and the paths below."""
    model_paths: re.Pattern[str]
    """Paths of model calls, which take POST."""
    free_paths: Mapping[str, re.Pattern[str]]
    """Paths that cost nothing, by method."""
    refused: re.Pattern[str]
    """Paths of features that are refused by name; the first matching group is the name."""

    def route(self, method: str, path: str, *, upgrades: bool = False) -> tuple[Kind, str]:
        """Return the kind of a path below the wire, and the path below the base URL of its upstream; raise Denied.

        `upgrades` is whether the client wants to speak another protocol there, such as WebSocket.
        """
        if not _DOT_SEGMENTS.isdisjoint(path.split("/")):  # an upstream may resolve them to a path that is not listed
            raise Denied(404, "a path with . or .. as a segment is not offered by the gateway", code="not_offered")
        short = path.rstrip("/")
        if self.root and (short == self.root or short.startswith(self.root + "/")):
            short = short[len(self.root) :]
        if not short and method in ("GET", "HEAD"):
            return "ping", ""
        if self.model_paths.fullmatch(short):
            if upgrades:  # at this status codex continues over HTTP at once; at others it ends, or retries
                raise Denied(
                    UPGRADE_REQUIRED, f"{short} is offered as a plain request only: send it by POST", code="websocket"
                )
            if method != "POST":
                raise Denied(405, f"{short} takes POST, not {method}", code="method_not_allowed")
            return "model", self.root + short
        free = self.free_paths.get(method)
        if free is not None and free.fullmatch(short):
            return "free", self.root + short
        raise Denied(404, self._why_refused(method, short), code="not_offered")

    def _why_refused(self, method: str, path: str) -> str:
        found = self.refused.match(path)
        if found is not None:
            name = next(group for group in found.groups() if group)
            return f"{name} is not offered by the gateway, because its cost cannot be held before it is spent"
        return f"{method} {path[:200] or '/'} is not offered by the gateway; docs/gateway.md lists what is"

    def error(self, denied: Denied, user_agent: str = "") -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return the status, headers and body of the error for a client of this wire, which must not retry in vain."""
        status, code = _status_for(denied.status, denied.code, user_agent)
        body = json.dumps(_BODIES[self.name](status, code, denied.message), ensure_ascii=False).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if denied.retry_after_s is not None:
            headers.append((b"retry-after", str(denied.retry_after_s).encode()))
        elif status < 500:
            headers.append(NO_RETRY)
        return status, headers, body

    def error_event(self, message: str) -> bytes:
        """Return the event that reports an error in the middle of a stream."""
        data = json.dumps(_BODIES[self.name](502, "stream_ended", message), ensure_ascii=False)
        return f"{'event: error' + chr(10) if self.name == 'anthropic' else ''}data: {data}\n\n".encode()


def _status_for(status: int, code: str, user_agent: str) -> tuple[int, str]:
    """Return a status that the client does not retry: codex retries every 4xx but 400 and an exhausted quota."""
    if "codex" not in user_agent.lower() or status >= 500 or status in (TOO_MANY_REQUESTS, UPGRADE_REQUIRED):
        return status, code
    return (TOO_MANY_REQUESTS, "insufficient_quota") if status == PAYMENT_REQUIRED else (400, code)


_OPENAI_TYPES = {401: "authentication_error", 402: "insufficient_quota", 429: "insufficient_quota"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_GEMINI_STATUSES = {
    401: "UNAUTHENTICATED",
    402: "RESOURCE_EXHAUSTED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def _openai(status: int, code: str, message: str) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}


def _anthropic(status: int, code: str, message: str) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _gemini(status: int, code: str, message: str) -> dict[str, Any]:
    kind = _GEMINI_STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return {"error": {"code": status, "message": message, "status": kind}}


_BODIES = MappingProxyType({"openai": _openai, "anthropic": _anthropic, "gemini": _gemini})

OPENAI = Wire(
    "openai",
    "https://api.openai.com/v1",
    "authorization",
    "/v1",
    re.compile(
        r"/(?:chat/completions|responses|completions|embeddings"
        r"|images/(?:generations|edits|variations)|audio/(?:speech|transcriptions|translations))"
    ),
    {"GET": re.compile(r"/models(?:/[^/]+){0,2}"), "POST": re.compile(r"/(?:moderations|responses/input_tokens)")},
    re.compile(
        r"/(realtime|assistants|threads|files|uploads|batches|vector_stores|fine_tuning|containers|conversations|evals"
        r"|videos|skills|chatkit)(?:/|$)|/(responses)/|/(chat/completions)/"
    ),
)
ANTHROPIC = Wire(
    "anthropic",
    "https://api.anthropic.com",
    "x-api-key",
    "/v1",
    re.compile(r"/messages"),
    {"GET": re.compile(r"/models(?:/[^/]+)?"), "POST": re.compile(r"/messages/count_tokens")},
    re.compile(r"/(messages/batches|files|skills|complete)(?:/|$)"),
)
GEMINI = Wire(
    "gemini",
    "https://generativelanguage.googleapis.com",
    "x-goog-api-key",
    "",
    re.compile(
        r"/v1(?:beta|alpha)?/(?:models|tunedModels)/[\w.-]+:"
        r"(?:generateContent|streamGenerateContent|embedContent|batchEmbedContents)"
    ),
    {
        "GET": re.compile(r"/v1(?:beta|alpha)?/models(?:/[^/:]+)?"),
        "POST": re.compile(r"/v1(?:beta|alpha)?/models/[^/:]+:countTokens"),
    },
    re.compile(
        r"(?:/upload)?/v1(?:beta|alpha)?/(files|cachedContents|batches|corpora|fileSearchStores)"
        r"|/v1(?:beta|alpha)?/models/[^/:]+:(batchGenerateContent|asyncBatchEmbedContent|predict|predictLongRunning"
        r"|bidiGenerateContent)|/ws/.*\.(BidiGenerateContent)"
    ),
)
WIRES: Mapping[str, Wire] = MappingProxyType({wire.name: wire for wire in (OPENAI, ANTHROPIC, GEMINI)})


def presented_key(headers: Mapping[str, str], query: str) -> str:
    """Return the key that a client sends, in the header of any wire or in Gemini's query; empty if there is none."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    for name in ("x-api-key", "x-goog-api-key", "api-key"):
        if found := headers.get(name):
            return found
    return next((part[4:] for part in query.split("&") if part.startswith("key=")), "")


def without_key(query: str) -> str:
    """Return the query without the key of the client."""
    return "&".join(part for part in query.split("&") if not part.startswith("key="))
