"""How many requests are under way at once.

Whoever comes when the server is full is told so like everybody who is refused: as JSON, with when to come back. What
listens has a bound of its own on connections, above this one, and knows nothing of that.
"""

from __future__ import annotations

from penstock.server.errors import RETRY_AFTER_S, ApiError
from penstock.server.guards.asgi import App, Receive, Scope, Send, refuse
from penstock.server.settings import ServerSettings

ALWAYS_ANSWERED = "/health"
"""A server that is full is there all the same."""


class CrowdGuard:
    """Lets requests through for as long as there is room."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self._app = app
        self._most = settings.max_requests
        self._under_way = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
        elif self._under_way >= self._most:
            message = f"{self._most} requests are under way, and no more are taken; ask again in a moment"
            error = ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
            await refuse(error, scope, receive, send)
        else:
            await self._let_through(scope, receive, send)

    async def _let_through(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._under_way += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
