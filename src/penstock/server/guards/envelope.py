"""Around everything: a request id, security headers, what is counted, and an answer for what nobody caught.

A fault is told to the log by its type and place, without its text, which may be anything; the client is told the
request's id.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import new_run_id
from penstock.server.errors import api_error
from penstock.server.guards.asgi import App, Message, Receive, Scope, Send, headers_named, refuse
from penstock.server.metrics import Metrics

LOG = logging.getLogger("penstock.server")
REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
     b"object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)  # fmt: skip
"""On every answer, unless it says otherwise itself."""


class Envelope:
    """The outermost guard."""

    def __init__(
        self, app: App, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK, new_id: Callable[[], str] = new_run_id
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        letter = _Letter(self._id_of(scope), send)
        scope.setdefault("state", {})["request_id"] = letter.id
        began = self._clock.monotonic_ns()
        try:
            await self._deliver(letter, scope, receive)
        finally:
            route = scope["state"].get("route", "other")
            self._metrics.answered(route, scope["method"], letter.status, self._clock.monotonic_ns() - began)

    async def _others(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # nothing here speaks websocket

    async def _deliver(self, letter: _Letter, scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, letter.send)
        except Exception as error:
            LOG.error("request %s failed: %s", letter.id, fault(error))
            self._metrics.faults += 1
            if letter.status:
                # Half an answer must not look like a whole one; the server closes the connection.
                raise AnswerBroken(letter.id) from None
            await refuse(api_error(error), scope, receive, letter.send)

    def _id_of(self, scope: Scope) -> str:
        sent = headers_named(scope, b"x-request-id")
        if len(sent) == 1 and REQUEST_ID.fullmatch(sent[0]):
            return sent[0].decode()
        return self._new_id()


class AnswerBroken(RuntimeError):
    """An answer was under way when the server failed; the rest of it cannot come."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the answer to request {request_id} was cut off")


class _Letter:
    """One answer on its way out; 0 is its status until it has one."""

    def __init__(self, id: str, send: Send) -> None:
        self.id = id
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._sealed(list(message.get("headers", ())))}
        await self._send(message)

    def _sealed(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        said = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in SECURITY_HEADERS if name not in said]
        if b"cache-control" not in said:
            headers.append((b"cache-control", b"no-store"))
        headers.append((b"x-request-id", self.id.encode()))
        return headers


def fault(error: BaseException) -> str:
    """Where an error comes from, without what it says: types, files and lines."""
    frames = traceback.extract_tb(error.__traceback__)[-6:]
    places = " < ".join(f"{frame.filename.rsplit('/', 2)[-1]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"
