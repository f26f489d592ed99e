"""The ways to reach the MCP server: streamable HTTP at /mcp, and stdin and stdout.

The protocol's own server keeps the sessions, and ends those that are idle. Which requests open one, use one and end one
is seen here, from outside: by the headers that go in and come out.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from penstock.server.auth import LOCAL, User, current_user
from penstock.server.errors import ApiError
from penstock.server.guards.asgi import Message, Receive, Scope, Send, headers_named, refuse
from penstock.server.mcp.calls import Calls, server_of
from penstock.server.mcp.sessions import Session, Sessions
from penstock.server.runnable import Runnable
from penstock.server.settings import ServerSettings
from penstock.server.sse import Streams

if TYPE_CHECKING:
    from penstock.chat.service import ChatService
    from penstock.hosting.host import RunHost
    from penstock.storage import Stores


SESSION = b"mcp-session-id"
PROTOCOL = b"mcp-protocol-version"


class McpEndpoint:
    """The ASGI app at /mcp; an async context manager, in which it must be to answer."""

    def __init__(self, calls: Calls, settings: ServerSettings, streams: Streams | None = None) -> None:
        self.server = server_of(calls)
        self._settings = settings
        self._streams = streams
        self._is_closing = False
        self._manager: StreamableHTTPSessionManager | None = None
        self._stack = AsyncExitStack()
        calls.is_closing = self._closes

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
        """Answer a request; a session is its user's, and to others as if it were not there."""
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
        """Answer what can only be the beginning of a session, if there is a place for one."""
        try:
            session, given_up = self._sessions.open(user.name)
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                session.id = next((id.decode() for name, id in message["headers"] if name == SESSION), None)
            await send(message)

        try:
            if given_up is not None:
                await self._end(given_up)
            await self._answer(user.name, scope, receive, seen)
        except BaseException:  # the protocol's server gives up what was not answered to its end
            self._sessions.forget(session)
            raise
        self._sessions.rest(session, _now_s())
        if session.id is None:
            self._sessions.forget(session)

    async def _use(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is asked in a session that is open."""

        async def seen(message: Message) -> None:
            if message["type"] == "http.response.start" and _ends(scope["method"], message["status"]):
                self._sessions.forget(session)
            await send(message)

        session.under_way += 1
        try:
            await self._answer(session.owner, scope, receive, seen)
        finally:
            self._sessions.rest(session, _now_s())

    async def _end(self, session: Session) -> None:
        """End a session as its client would."""
        assert session.id is not None, "one that is only being opened is not idle"
        headers = [(SESSION, session.id.encode())]
        scope = {"type": "http", "method": "DELETE", "path": "/mcp", "query_string": b"", "headers": headers}

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            """Nobody waits for the answer."""

        await self._answer(session.owner, scope, receive, send)

    async def _answer(self, owner: str, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._manager is not None, "the endpoint is entered before it is asked"
        user = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
        if scope["method"] != "GET" or self._streams is None:
            await self._manager.handle_request({**scope, "user": user}, receive, send)
            return
        listening = _Listening(self._streams.closing(), receive, send)
        await self._manager.handle_request({**scope, "user": user}, listening.receive, listening.send)
        await listening.end()

    def _closes(self) -> bool:
        return self._is_closing or (self._streams is not None and self._streams.closing().is_set())


class _Listening:
    """A stream on which a client waits for whatever may be told: when the server closes it is as if the client left.

    Without that the server would wait for it, and break it off in the end.
    """

    def __init__(self, closing: asyncio.Event, receive: Receive, send: Send) -> None:
        self._closing = closing
        self._receive = receive
        self._send = send
        self._is_open = False

    async def receive(self) -> Message:
        """What the client says; that it has left, once the server closes."""
        hearing, closing = asyncio.ensure_future(self._receive()), asyncio.ensure_future(self._closing.wait())
        tasks = {hearing, closing}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        return {"type": "http.disconnect"} if hearing.cancelled() else hearing.result()

    async def send(self, message: Message) -> None:
        """Pass on a piece of the answer."""
        self._is_open = message.get("more_body", message["type"] == "http.response.start")
        await self._send(message)

    async def end(self) -> None:
        """End what was left open because the server closes."""
        if self._is_open and self._closing.is_set():
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


def _has_sessions(scope: Scope) -> bool:
    """Whether the request is of a version of the protocol that has them; one that does not say is."""
    said = headers_named(scope, PROTOCOL)
    return not said or said[0].decode("latin-1") in HANDSHAKE_PROTOCOL_VERSIONS


def _ends(method: str, status: int) -> bool:
    """Whether an answer says that the session is over."""
    return status == 404 or (method == "DELETE" and status < 400)


def _now_s() -> float:
    """By the clock that the protocol's server has for what is idle."""
    return asyncio.get_running_loop().time()


def create_mcp(
    host: RunHost,
    chats: ChatService,
    stores: Stores,
    graphs: Runnable,
    *,
    settings: ServerSettings | None = None,
    streams: Streams | None = None,
) -> McpEndpoint:
    """The endpoint for /mcp, behind the server's gate; enter it before it is asked."""
    return McpEndpoint(Calls(host, chats, stores, graphs, current_user), settings or ServerSettings(), streams)


def server_for(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> Server[Any]:
    """The MCP server of one user, for whatever transport one has; all runs are that user's."""

    def always(_: Any) -> User:
        return user

    return server_of(Calls(host, chats, stores, Runnable(host.executors, host.services), always))


async def serve_stdio(host: RunHost, chats: ChatService, stores: Stores, *, user: User = LOCAL) -> None:
    """Answer on stdin and stdout until stdin ends. What is printed meanwhile goes to stderr."""
    server = server_for(host, chats, stores, user=user)
    async with stdio_server() as (incoming, outgoing):
        await server.run(incoming, outgoing, server.create_initialization_options())
