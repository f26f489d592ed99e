"""The app at /mcp without a supported version of the MCP library; the rest of the server works without it."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from penstock.server.errors import ApiError, send_error


class NoMcp:
    """The ASGI app at /mcp that answers every request with the reason, which names what to install."""

    def __init__(self, problem: str) -> None:
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(ApiError(501, self._problem, code="not_installed"), scope, receive, send)
