"""Transports of the MCP server: streamable HTTP at /mcp, and stdin and stdout.

The MCP library keeps the sessions and ends idle ones. This module observes from outside, by request and response
headers, which requests open, use and end a session.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Message, Receive, Scope, Send

from penstock.server.auth import LOCAL, User, current_user
from penstock.server.errors import ApiError, send_error
from penstock.server.graph_check import GraphChecker
from penstock.server.guards import headers_named
from penstock.server.mcp.calls import Calls, server_of
from penstock.server.mcp.library import has_sessions, stdio_server
from penstock.server.mcp.sessions import Session, Sessions
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams, first_done

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores


SESSION = b"mcp-session-id"
PROTOCOL = b"mcp-protocol-version"


class McpEndpoint:
    """The ASGI app at /mcp; an async context manager that must be entered before the first request."""

    def __init__(self, calls: Calls, settings: ServerSettings, streams: Streams | None = None) -> None:
        self.server = server_of(calls)
        self._settings = settings
        self._streams = streams
        self._is_closing = False
        self._manager: StreamableHTTPSessionManager | None = None
        self._stack = AsyncExitStack()
        calls.is_closing = self._is_shutting_down

    async def __aenter__(self) -> McpEndpoint:
        settings = self._settings
        self._is_closing = False
        self._sessions = Sessions(settings.max_mcp_sessions, settings.max_mcp_sessions_per_user)
        self._manager = StreamableHTTPSessionManager(
            self.server, session_idle_timeout=settings.mcp_idle_s, max_sessions=None
        )
        await self._stack.enter_async_context(self._manager.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a session belongs to its user, and does not exist for other users."""
        user: User = scope["state"]["user"]
        if not _has_sessions(scope):
            await self._answer(user.name, scope, receive, send)
        elif not (ids := headers_named(scope, SESSION)):
            await self._open(user, scope, receive, send)
        elif session := self._sessions.find(user.name, ids[0].decode("latin-1")):
            await self._use(session, scope, receive, send)
        else:
            await self._answer(user.name, scope, receive, send)

    async def _open(self, user: User, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request without a session id, which can only open a session, if the limits allow one."""
        try:
            session, evicted = self._sessions.open(user.name)
        except ApiError as error:
            await send_error(error, scope, receive, send)
            return

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                session.id = next((id.decode() for name, id in message["headers"] if name == SESSION), None)
            await send(message)

        try:
            if evicted is not None:
                await self._end(evicted)
            await self._answer(user.name, scope, receive, observe)
        except BaseException:  # the MCP library discards a session whose opening was interrupted
            self._sessions.forget(session)
            raise
        self._sessions.end_request(session, _now_s())
        if session.id is None:
            self._sessions.forget(session)

    async def _use(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request in an open session."""

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start" and _ends(scope["method"], message["status"]):
                self._sessions.forget(session)
            await send(message)

        session.active_requests += 1
        try:
            await self._answer(session.owner, scope, receive, observe)
        finally:
            self._sessions.end_request(session, _now_s())

    async def _end(self, session: Session) -> None:
        """End a session as its client would, with DELETE."""
        assert session.id is not None, "a session that is being opened is not idle"
        headers = [(SESSION, session.id.encode())]
        scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b"", "headers": headers}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            """Discard the response."""

        await self._answer(session.owner, scope, receive, send)

    async def _answer(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._manager is not None, "the endpoint is entered before the first request"
        user = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
        if scope["method"] != "GET" or self._streams is None:
            await self._manager.handle_request({**scope, "user": user}, receive, send)
            return
        listening = _Listening(self._streams.closing(), receive, send)
        await self._manager.handle_request({**scope, "user": user}, listening.receive, listening.send)
        await listening.end()

    def _is_shutting_down(self) -> bool:
        return self._is_closing or (self._streams is not None and self._streams.closing().is_set())


class _Listening:
    """A client's GET stream for server messages: it sees a disconnect when the server closes.

    Otherwise shutdown would wait for the stream, and abort it in the end.
    """

    def __init__(self, closing: asyncio.Event, receive: Receive, send: Send) -> None:
        self._closing = closing
        self._receive = receive
        self._send = send
        self._is_open = False

    async def receive(self) -> Message:
        """Receive the client's next message; a disconnect once the server closes."""
        receiving = asyncio.ensure_future(self._receive())
        done = await first_done(receiving, asyncio.ensure_future(self._closing.wait()))
        return receiving.result() if receiving in done else {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        begins = message["type"] == "http.response.start"
        self._is_open = message.get("more_body", begins)
        await self._send(message)
        if begins:  # the compression of older releases of starlette keeps it until a body comes: at the first ping
            await self._send({"type": "http.response.body", "body": b"", "more_body": True})

    async def end(self) -> None:
        """Complete a response that was left open because the server closes."""
        if self._is_open and self._closing.is_set():
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_sessions(scope: Scope) -> bool:
    """Whether the request's protocol version has sessions; a request without a version is assumed to."""
    versions = headers_named(scope, PROTOCOL)
    return not versions or has_sessions(versions[0].decode("latin-1"))


def _ends(method: str, status: int) -> bool:
    """Whether a response means that the session is over."""
    return status == 404 or (method == "DELETE" and status < 400)


def _now_s() -> float:
    """Return the time of the clock by which the MCP library measures idle sessions."""
    return asyncio.get_running_loop().time()


def create_mcp(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    graphs: GraphChecker,
    *,
    settings: ServerSettings | None = None,
    streams: Streams | None = None,
) -> McpEndpoint:
    """Create the endpoint for /mcp, to be used behind the auth guard; enter it before the first request."""
    return McpEndpoint(Calls(host, chats, stores, graphs, current_user), settings or ServerSettings(), streams)


def server_for(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> Any:
    """Create an MCP server for any transport; `user` owns all its runs."""

    def fixed_user(_: Any) -> User:
        return user

    return server_of(Calls(host, chats, stores, GraphChecker(host.executors, host.services), fixed_user))


async def serve_stdio(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> None:
    """Serve on stdin and stdout until stdin ends. Printed output goes to stderr meanwhile."""
    server = server_for(host, chats, stores, user=user)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
