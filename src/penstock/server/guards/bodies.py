"""Bodies: how large, how slow, of what type, and whether they are JSON that can be worked with.

A body is received whole before the route is asked, within a size, a time and a share of memory, chunked or not. All
are JSON but those of RAW. Compressed ones are not taken: a small one may be an endless one.

Many clients send all they have before they look for an answer, and one that is still sending when the connection is
closed never sees it. So whoever sends too much is answered at once, and then heard out for a moment; nothing is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from penstock.server.errors import ApiError
from penstock.server.guards.asgi import App, Message, Receive, Scope, Send, headers_named, refuse
from penstock.server.guards.json_text import read_json
from penstock.server.settings import ServerSettings

RAW: Mapping[str, str] = {"/api/attachments": "max_attachment_bytes"}
"""Routes that take any bytes, and the setting that says how many."""
ON_A_THREAD = 64 * 1024
"""Bodies from this size are looked at beside the event loop."""
LINGER_BYTES = 32 * 1024 * 1024
LINGER_S = 2.0
"""So much, for so long, is read on of a body that was refused for its size, before the connection is closed."""


class ClientLeft(Exception):
    """Nobody is there to be answered."""


class TooLarge(ApiError):
    """A body has more bytes than it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(413, f"a body may have {limit} bytes here", headers={"Connection": "close"})


class BodyGuard:
    """Receives bodies within their bounds."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._room = settings.max_buffered_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            await self._app(scope, receive, send)
            return
        body = _Body(self)
        try:
            await self._receive(body, scope, receive)
        except ClientLeft:
            body.give_back()
            return
        except TooLarge as error:
            body.give_back()
            await _refuse_and_hear_out(error, body, scope, receive, send)
            return
        except ApiError as error:
            body.give_back()
            await refuse(error, scope, receive, send)
            return
        try:
            await self._app(scope, body.replayed(receive), send)
        finally:
            body.give_back()

    async def _receive(self, body: _Body, scope: Scope, receive: Receive) -> None:
        setting = RAW.get(scope["path"])
        limit: int = getattr(self._settings, setting or "max_body_bytes")
        _check_headers(scope, limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                await body.read(receive, limit)
        except TimeoutError:
            message = f"the body did not arrive within {self._settings.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        if body.content and setting is None:
            _check_type(scope)
            await self._check_json(bytes(body.content))

    async def _check_json(self, raw: bytes) -> None:
        bounds = {"max_depth": self._settings.max_json_depth, "max_values": self._settings.max_json_values}
        if len(raw) < ON_A_THREAD:
            read_json(raw, **bounds)
        else:
            await asyncio.to_thread(read_json, raw, **bounds)

    def take_room(self, size: int) -> None:
        """Count bytes that are kept; ApiError when all bodies together are too many."""
        if size > self._room:
            raise ApiError(503, "too much is being sent at once; try again", code="overloaded", retry_after_s=1)
        self._room -= size

    def give_room(self, size: int) -> None:
        """They are not kept any more."""
        self._room += size


class _Body:
    """One body, as far as it has come."""

    def __init__(self, guard: BodyGuard) -> None:
        self.content = bytearray()
        self._guard = guard
        self._taken = 0
        self._is_told = False
        self.has_come = False
        """Whether all of it was sent, read or not."""

    async def read(self, receive: Receive, limit: int) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            self.has_come = not more
            if len(self.content) + len(piece) > limit:
                raise TooLarge(limit)
            self._guard.take_room(len(piece))
            self._taken += len(piece)
            self.content += piece

    def give_back(self) -> None:
        self._guard.give_room(self._taken)
        self._taken = 0

    def replayed(self, receive: Receive) -> Receive:
        """The body again, as one message; then whatever comes, such as the client's leaving."""

        async def again() -> Message:
            if self._is_told:
                return await receive()
            self._is_told = True
            content = bytes(self.content)
            self.content = bytearray()
            self.give_back()
            return {"type": "http.request", "body": content, "more_body": False}

        return again


def _check_headers(scope: Scope, limit: int) -> None:
    if any(value.lower() != b"identity" for value in headers_named(scope, b"content-encoding")):
        raise ApiError(415, "bodies are taken as they are, without a Content-Encoding")
    for length in headers_named(scope, b"content-length"):
        if not length.isdigit() or len(length) > 20 or int(length) > limit:
            raise TooLarge(limit)


async def _refuse_and_hear_out(error: ApiError, body: _Body, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer, and end the answer, which closes the connection, when the client has sent its body or enough of it."""

    async def send_open(message: Message) -> None:
        await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

    await refuse(error, scope, receive, send_open)
    if not body.has_come and _may_be_heard_out(scope):
        await _hear_out(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _may_be_heard_out(scope: Scope) -> bool:
    """Whether a client sends now, and may come to an end: not if it waits to be asked, or has announced far more."""
    lengths = headers_named(scope, b"content-length")
    is_bounded = all(one.isdigit() and len(one) <= 20 and int(one) <= LINGER_BYTES for one in lengths)
    return is_bounded and not headers_named(scope, b"expect")


async def _hear_out(receive: Receive) -> None:
    left = LINGER_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message["body"])


def _check_type(scope: Scope) -> None:
    types = headers_named(scope, b"content-type")
    kind, _, parameters = types[0].partition(b";") if len(types) == 1 else (b"", b"", b"")
    charset = parameters.strip().lower().replace(b'"', b"")
    is_json = kind.strip().lower() == b"application/json" and charset in {b"", b"charset=utf-8"}
    if not is_json:
        raise ApiError(415, "send JSON, and say so: Content-Type: application/json")
