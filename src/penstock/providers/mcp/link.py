"""One open connection to a server, owned by one task.

The protocol's library ties a connection to the task that opened it. So a task of ours opens it, waits, and closes it;
whoever calls a tool may do so from any task, and be cancelled there without waiting for the server. The library's own
habits are kept out: it does not reconnect, keeps no answers, lists no tools again and checks no answer against a schema
that came from the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

import httpx2
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from pydantic import ValidationError

from penstock.providers.egress import EgressClient, EgressError, EgressPolicy
from penstock.providers.mcp.process import ServerProcess
from penstock.providers.mcp.servers import HttpServer, McpError, StdioServer

T = TypeVar("T")

CLOSE_S = 10.0
"""For everything there is to do on closing, before it is cut short."""
MAX_WAIT_S = 86_400.0


class Link:
    """A connection: opened, used from anywhere, closed."""

    def __init__(self, name: str, server: StdioServer | HttpServer, max_tools: int) -> None:
        self.name = name
        self._server = server
        self._max_tools = max_tools
        self._process = ServerProcess(server) if isinstance(server, StdioServer) else None
        self._failed: list[EgressError] = []
        """What the egress guard said last."""
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[list[types.Tool]] = asyncio.get_running_loop().create_future()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[Any]] = set()

    async def open(self) -> list[types.Tool]:
        """Connect, and tell the server's tools; McpError if that does not come to an end in time."""
        self._owner = asyncio.create_task(self._own(), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(self._opened)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise self._error(f"it did not start within {self._server.start_timeout_s:g} s") from None
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> types.CallToolResult:
        """What the server answers; McpError if it does not."""
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        task = asyncio.create_task(self._ask(request, types.CallToolResult), name=f"mcp {self.name} {tool[:64]}")
        self._requests.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        finally:
            # The server is told of the cancel, if it still listens; nobody has to wait for that.
            task.cancel()

    async def close(self) -> None:
        """End the connection, the process and everything that belongs to them; returns when they have ended."""
        self._closing.set()
        owner = self._owner
        if owner is None:
            return
        if not self._opened.done():
            owner.cancel()  # it is not waiting for a word of ours yet
        try:
            await asyncio.wait({owner}, timeout=CLOSE_S)
        finally:
            owner.cancel()
            for request in self._requests:
                request.cancel()
            await _ended({owner, *self._requests})
            if not self._opened.done():
                self._opened.cancel()

    async def _own(self) -> None:
        try:
            async with self._client_of() as self._client:
                self._opened.set_result(await self._list())
                await self._closing.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(self._told(_first(error)))
                self._opened.exception()  # seen, also if nobody waits any more
        finally:
            self._client = None

    def _client_of(self) -> AbstractAsyncContextManager[Client]:
        server = self._server
        if isinstance(server, HttpServer):
            return _over_http(server, self._failed)
        assert self._process is not None
        return Client(self._process.streams(), cache=None)

    async def _list(self) -> list[types.Tool]:
        tools: list[types.Tool] = []
        cursor: str | None = None
        for _page in range(self._max_tools + 1):
            request = types.ListToolsRequest(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
            listed = await self._ask(request, types.ListToolsResult)
            tools += listed.tools
            if len(tools) > self._max_tools:
                raise self._error(f"it has more than {self._max_tools} tools")
            cursor = listed.next_cursor
            if not cursor:
                return tools
        raise self._error("its list of tools does not end")

    async def _ask(self, request: types.ClientRequest, result: type[Any]) -> Any:
        client = self._client
        if client is None:
            raise self._error("it is closed")
        try:
            return await client.session.send_request(request, result)
        except Exception as error:
            raise self._told(error) from error

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._requests.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also if nobody waits any more

    def _error(self, why: str) -> McpError:
        if self._process is not None and self._process.stderr and not self._opened.done():
            why = f"{why}; it said: {self._process.stderr[-300:]}"
        return McpError(self.name, why)

    def _told(self, error: BaseException) -> Exception:
        """An error of the library in our words."""
        if isinstance(error, McpError):
            return error
        if self._failed and not self._opened.done():
            return self._failed[-1]
        if self._process is not None and self._process.why is not None:
            return self._error(self._process.why)
        if isinstance(error, MCPError):
            return self._error(str(error))
        if isinstance(error, ValidationError):
            return self._error("its answer is not of the form the protocol asks for")
        return self._error(f"{type(error).__name__}: {error}")


@asynccontextmanager
async def _over_http(server: HttpServer, failed: list[EgressError]) -> AsyncIterator[Client]:
    policy = server.policy or EgressPolicy(allow_hosts=[_host_of(server.url)])
    # How long an answer may take is the tool's affair; the guard bounds what is read.
    bounded = replace(policy, timeout_s=MAX_WAIT_S, max_bytes=min(policy.max_bytes, server.max_message_bytes))
    async with EgressClient(bounded, ssl_context=server.ssl_context) as egress:
        transport = _Posting(await egress.guard(), failed)
        async with httpx2.AsyncClient(
            transport=transport, trust_env=False, headers=dict(server.headers), timeout=None
        ) as http:
            streams = streamable_http_client(server.url, http_client=http, max_sse_event_size=bounded.max_bytes)
            async with Client(streams, cache=None) as client:
                yield client


class _Posting(httpx2.AsyncBaseTransport):
    """Sends what is asked for, each request for itself.

    A stream to listen on, which the library would open anew again and again, is refused. A request that fails is
    answered with its failure: an error raised here would end the connection for all others.
    """

    def __init__(self, guard: httpx2.AsyncBaseTransport, failed: list[EgressError]) -> None:
        self._guard = guard
        self._failed = failed

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(405, request=request)
        try:
            answer = await self._guard.handle_async_request(request)
            if answer.headers.get("content-type", "").lower().startswith("text/event-stream"):
                return answer
            try:
                await answer.aread()
            finally:
                await answer.aclose()
            return answer
        except EgressError as error:
            self._failed[:] = [error]
            told = {"jsonrpc": "2.0", "id": None, "error": {"code": types.INTERNAL_ERROR, "message": str(error)}}
            return httpx2.Response(502, json=told, request=request)


def _host_of(url: str) -> str:
    read = httpx2.URL(url)
    host = f"[{read.host}]" if ":" in read.host else read.raw_host.decode("ascii")
    return f"{host}:{read.port or (443 if read.scheme == 'https' else 80)}"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until all have ended; a cancel that comes meanwhile is kept until then, for what they clean up is ours."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            task.result()
    if cancelled is not None:
        raise cancelled
