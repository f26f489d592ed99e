"""Release 1 of the MCP library, for a client.

Its session is used as it is, except that it does not tell a server of a cancelled request. Its HTTP transport is not
used: one error status ends the connection for all calls, an unreadable answer leaves its call waiting, a stream that
breaks off is opened again, and the request of a cancelled call stays open. So messages are posted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any

import anyio
import httpx2
import mcp
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from penstock.providers.egress import EgressError
from penstock.providers.reading.framing import EventSplitter, parse_json

MAX_WAITING = 256
"""Maximum number of messages queued for the server."""
EVENTS = "text/event-stream"
ACCEPT = {"accept": f"application/json, {EVENTS}", "content-type": "application/json"}
SESSION = "mcp-session-id"
PROTOCOL = "mcp-protocol-version"
CANCEL = "notifications/cancelled"
CLOSED = (anyio.BrokenResourceError, anyio.ClosedResourceError)

_library: Any = mcp  # mypy checks against release 2
types = _library.types
LibraryError = _library.McpError


class _Session(_library.ClientSession):  # type: ignore[misc]
    """A session that tells the server of a cancelled request."""

    async def request(self, request: Any, result: type[Any]) -> Any:
        """Send a request and return its result."""
        id = self._request_id  # of this request: the library takes it before it first waits
        try:
            return await self.send_request(request, result)
        except asyncio.CancelledError:
            cancel = types.JSONRPCNotification(jsonrpc="2.0", method=CANCEL, params={"requestId": id})
            with suppress(anyio.WouldBlock, *CLOSED):  # the caller does not wait for a server that does not read
                self._write_stream.send_nowait(SessionMessage(types.JSONRPCMessage(cancel)))
            raise


@asynccontextmanager
async def connect(
    streams: AbstractAsyncContextManager[Any],
) -> AsyncIterator[Callable[[Any, type[Any]], Awaitable[Any]]]:
    """Open a session over the streams."""
    async with streams as (received, sending), _Session(received, sending) as session:
        await session.initialize()
        yield session.request


def message_of(data: bytes) -> SessionMessage:
    """Return the message in `data`; raise ValueError if it is none."""
    return SessionMessage(types.JSONRPCMessage.model_validate_json(data))


@asynccontextmanager
async def http_streams(url: str, http: httpx2.AsyncClient, max_bytes: int) -> AsyncIterator[tuple[Any, Any]]:
    """Yield the streams of the server at `url`; `http` limits a whole response to `max_bytes`."""
    incoming, received = anyio.create_memory_object_stream[Any](0)
    sending, outgoing = anyio.create_memory_object_stream[Any](MAX_WAITING)
    posts = _Posts(url, http, incoming)
    with incoming, received, sending, outgoing:
        async with anyio.create_task_group() as group:
            group.start_soon(posts.send_all, outgoing)
            try:
                yield received, sending
            finally:
                await posts.end_session()
                group.cancel_scope.cancel()


class _Posts:
    """Posts each message to a server, and passes on the messages in the responses."""

    def __init__(self, url: str, http: httpx2.AsyncClient, incoming: Any) -> None:
        self._url = url
        self._http = http
        self._incoming = incoming
        self._headers = dict(ACCEPT)
        self._active: dict[Any, anyio.CancelScope] = {}
        """The requests under way, by id."""

    async def send_all(self, outgoing: Any) -> None:
        """Send messages until the session closes: requests side by side, notifications in their order."""
        async with anyio.create_task_group() as group:
            async for sent in outgoing:
                message = sent.message.root
                if isinstance(message, types.JSONRPCRequest):
                    scope = self._active[message.id] = anyio.CancelScope()
                    group.start_soon(self._request, message, scope)
                elif isinstance(message, types.JSONRPCNotification) and message.method == CANCEL:
                    if (active := self._active.get((message.params or {}).get("requestId"))) is not None:
                        active.cancel()
                    group.start_soon(self._notify, message)  # a server that does not answer it delays no other message
                else:
                    await self._notify(message)

    async def end_session(self) -> None:
        """Tell the server that its session is over."""
        if SESSION in self._headers:
            await self._http.delete(self._url, headers=self._headers)

    async def _request(self, message: Any, scope: anyio.CancelScope) -> None:
        """Send a request and pass on what the server answers, or the reason why it is no answer."""
        with scope, suppress(*CLOSED):
            try:
                why = await self._exchange(message)
            except EgressError as error:
                why = str(error)
            if why:
                problem = types.ErrorData(code=types.INTERNAL_ERROR, message=why)
                await self._pass_on(types.JSONRPCError(jsonrpc="2.0", id=message.id, error=problem))
        del self._active[message.id]

    async def _notify(self, message: Any) -> None:
        """Send a message that is not answered."""
        async with self._http.stream("POST", self._url, content=_json(message), headers=self._headers):
            pass

    async def _exchange(self, message: Any) -> str:
        """Send a request and pass on the messages of its response; return what is wrong if no answer is among them."""
        async with self._http.stream("POST", self._url, content=_json(message), headers=self._headers) as response:
            if message.method == "initialize":
                self._name(SESSION, response.headers.get(SESSION))
            async with aclosing(self._bodies(response)) as bodies:
                async for body in bodies:
                    answer = _answer(body, message.id, response.is_error)
                    if answer is None:
                        continue
                    is_result = isinstance(answer, types.JSONRPCResponse) and answer.id == message.id
                    if is_result and message.method == "initialize":  # before the session sends the next message
                        self._name(PROTOCOL, answer.result.get("protocolVersion"))
                    await self._pass_on(answer)
                    if is_result or isinstance(answer, types.JSONRPCError):
                        return ""
            return f"its response, of status {response.status_code}, has no answer"

    def _name(self, header: str, value: Any) -> None:
        """Send a header of the server's choice from now on, if its value is one that a header may have."""
        if isinstance(value, str) and value and value.isascii() and value.isprintable():
            self._headers[header] = value

    async def _bodies(self, response: httpx2.Response) -> AsyncGenerator[Any, None]:
        """Yield the JSON of each event of the response, or of its body."""
        if not response.headers.get("content-type", "").lower().startswith(EVENTS):
            yield parse_json(await response.aread())
            return
        buffer, splitter = bytearray(), EventSplitter()
        async for piece in response.aiter_bytes():
            buffer += piece
            for _, event in splitter.split(buffer):
                yield event

    async def _pass_on(self, message: Any) -> None:
        await self._incoming.send(SessionMessage(types.JSONRPCMessage(message)))


def _answer(body: Any, id: Any, is_error: bool) -> Any:
    """Return the message of a body; None if it is none. An error without an id is that of the request."""
    if isinstance(body, dict) and "error" in body and (is_error or body.get("id") is None):
        body = {**body, "id": id}
    try:
        return types.JSONRPCMessage.model_validate(body).root
    except ValidationError:
        return None


def _json(message: Any) -> str:
    return str(message.model_dump_json(by_alias=True, exclude_none=True))
