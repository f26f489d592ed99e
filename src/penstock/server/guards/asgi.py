"""The shapes of ASGI, and how a guard answers by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from penstock.server.errors import ApiError, answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def headers_named(scope: Scope, name: bytes) -> list[bytes]:
    """Every value of a header, as it was sent."""
    return [value for key, value in scope["headers"] if key == name]


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error."""
    await answer(error, scope["path"])(scope, receive, send)
