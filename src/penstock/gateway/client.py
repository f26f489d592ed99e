"""The client's side of one request: its headers, its body, and the response that it gets.

Plain ASGI. A body is received completely before anything is sent upstream, within a limit of size. The client is
watched until it is answered, so that a disconnect ends the upstream's work too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from penstock.gateway.wires import Denied

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Maximum size of a request: images and sound travel in it."""
BODY_S = 120.0
"""Maximum time for a body to arrive."""
IDLE_S = 300.0
"""Maximum time that a client may stop reading before its answer is cut off, so that the hold ends."""


class Gone(Exception):
    """The client has disconnected before its request was complete."""


class Truncated(Exception):
    """The response cannot be completed: closing the connection is the only signal left."""


class Client:
    """One request of a client."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.raw_headers: Headers = list(scope["headers"])
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw_headers
        }
        self.has_begun = False
        self.status = 0
        """Status of the response; 0 until it begins."""
        self._receive = receive
        self._send = send

    @property
    def user_agent(self) -> str:
        """The client's `User-Agent` header."""
        return self.headers.get("user-agent", "")

    async def body(self) -> bytes:
        """Receive the whole body; raise Denied if it is too large, or takes too long."""
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and len(declared) < 19 and int(declared) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(BODY_S):
                return await self._whole_body()
        except TimeoutError:
            raise Denied(408, f"the body did not arrive within {BODY_S:g} s", code="request_timeout") from None

    async def _whole_body(self) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            if len(body) > MAX_BODY_BYTES:
                raise _too_large()
            if not message.get("more_body", False):
                return bytes(body)

    async def disconnected(self) -> None:
        """Return when the client has disconnected; the body must have been received."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self.has_begun, self.status = True, status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body; wait while the client does not read, and raise Truncated after `IDLE_S`."""
        try:
            async with asyncio.timeout(IDLE_S):
                await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})
        except TimeoutError:
            raise Truncated(f"the client has not read its answer for {IDLE_S:g} s") from None

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response."""
        await self.begin(status, headers)
        await self.write(body, is_last=True)


def _too_large() -> Denied:
    return Denied(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes", code="request_too_large")
