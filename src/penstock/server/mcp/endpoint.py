"""The ways to reach the MCP server: streamable HTTP at /mcp, and stdin and stdout."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from penstock.server.auth import LOCAL, User, current_user
from penstock.server.mcp.calls import Calls, server_of
from penstock.server.runnable import Runnable
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores


class McpEndpoint:
    """The ASGI app at /mcp; an async context manager, in which it must be to answer."""

    def __init__(self, calls: Calls, streams: Streams | None = None) -> None:
        self.server = server_of(calls)
        self._streams = streams
        self._is_closing = False
        self._manager: StreamableHTTPSessionManager | None = None
        self._stack = AsyncExitStack()
        calls.is_closing = self._closes

    async def __aenter__(self) -> McpEndpoint:
        self._is_closing = False
        self._manager = StreamableHTTPSessionManager(self.server)
        await self._stack.enter_async_context(self._manager.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a session is its user's, and to others as if it were not there."""
        assert self._manager is not None, "the endpoint is entered before it is asked"
        user: User = scope["state"]["user"]
        token = AccessToken(token="", client_id=user.name, scopes=[])
        await self._manager.handle_request({**scope, "user": AuthenticatedUser(token)}, receive, send)

    def _closes(self) -> bool:
        return self._is_closing or (self._streams is not None and self._streams.closing().is_set())


def create_mcp(
    host: RunHost, chats: ChatService, stores: Stores, graphs: Runnable, *, streams: Streams | None = None
) -> McpEndpoint:
    """The endpoint for /mcp, behind the server's gate; enter it before it is asked."""
    return McpEndpoint(Calls(host, chats, stores, graphs, current_user), streams)


def server_for(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> Server[Any]:
    """The MCP server of one user, for whatever transport one has; all runs are that user's."""

    def always(_: Any) -> User:
        return user

    return server_of(Calls(host, chats, stores, Runnable(host.executors), always))


async def serve_stdio(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> None:
    """Answer on stdin and stdout until stdin ends. What is printed meanwhile goes to stderr."""
    server = server_for(host, chats, stores, user=user)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
