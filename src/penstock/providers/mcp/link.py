"""One open connection to a server, owned by one task.

The MCP library ties a connection to the task that opened it. So a dedicated task opens it, waits, and closes it; tools
may be called from any task, and such a call can be cancelled without waiting for the server. The library's automatic
behaviour is disabled: it does not reconnect, caches no results, does not list tools again and validates no result
against a schema that came from the server.

Tools and results are returned as the JSON objects of the protocol, checked for their form by the library, because the
releases of the library name their attributes differently.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import httpx2
from mcp import types
from pydantic import ValidationError

from penstock.providers.egress import EgressClient, EgressError, EgressPolicy
from penstock.providers.mcp.library import LibraryError, Request, connect, http_streams
from penstock.providers.mcp.process import ServerProcess
from penstock.providers.mcp.servers import HttpServer, McpError, StdioServer

Json = dict[str, Any]

CLOSE_S = 10.0
"""Time allowed for a clean close before it is cancelled."""
MAX_WAIT_S = 86_400.0


class Link:
    """A connection that is opened, used from any task, and closed."""

    def __init__(self, name: str, server: StdioServer | HttpServer, max_tools: int) -> None:
        self.name = name
        self._server = server
        self._max_tools = max_tools
        self._process = ServerProcess(server) if isinstance(server, StdioServer) else None
        self._failed: list[EgressError] = []
        """The last error of the egress guard."""
        self._closing = asyncio.Event()
        self._opened: asyncio.Future[list[Json]] = asyncio.get_running_loop().create_future()
        self._request: Request | None = None
        self._owner: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[Any]] = set()

    async def open(self) -> list[Json]:
        """Connect and return the server's tools; raise McpError if that takes too long."""
        self._owner = asyncio.create_task(self._own(), name=f"mcp {self.name}")
        try:
            async with asyncio.timeout(self._server.start_timeout_s):
                return await asyncio.shield(self._opened)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise self._error(f"it did not start within {self._server.start_timeout_s:g} s") from None
            raise

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Json:
        """Call a tool and return the server's result; raise McpError if the call fails."""
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        task = asyncio.create_task(self._ask(request, types.CallToolResult), name=f"mcp {self.name} {tool[:64]}")
        self._requests.add(task)
        task.add_done_callback(self._forget)
        try:
            return await asyncio.shield(task)
        finally:
            # The cancel is sent to the server, if it still reads; the caller does not wait for that.
            task.cancel()

    async def close(self) -> None:
        """Close the connection, its process and its requests; return when all have ended."""
        self._closing.set()
        owner = self._owner
        if owner is None:
            return
        if not self._opened.done():
            owner.cancel()  # it is not waiting for `_closing` yet
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
            async with self._connection() as self._request:
                self._opened.set_result(await self._list())
                await self._closing.wait()
        except Exception as error:
            if not self._opened.done():
                self._opened.set_exception(self._translated(_first(error)))
                self._opened.exception()  # mark as retrieved, in case no caller is waiting any more
        finally:
            self._request = None

    def _connection(self) -> AbstractAsyncContextManager[Request]:
        server = self._server
        if isinstance(server, HttpServer):
            return _over_http(server, self._failed)
        assert self._process is not None
        return connect(self._process.streams())

    async def _list(self) -> list[Json]:
        tools: list[Json] = []
        cursor: str | None = None
        for _page in range(self._max_tools + 1):
            request = types.ListToolsRequest(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
            listed = await self._ask(request, types.ListToolsResult)
            tools += listed["tools"]
            if len(tools) > self._max_tools:
                raise self._error(f"it has more than {self._max_tools} tools")
            cursor = listed.get("nextCursor")
            if not cursor:
                return tools
        raise self._error("its list of tools does not end")

    async def _ask(self, request: Any, result: type[Any]) -> Json:
        send = self._request
        if send is None:
            raise self._error("it is closed")
        try:
            answer = await send(request, result)
            return cast(Json, answer.model_dump(by_alias=True, mode="json", exclude_unset=True))
        except Exception as error:
            raise self._translated(error) from error

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._requests.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved, in case no caller is waiting any more

    def _error(self, why: str) -> McpError:
        if self._process is not None and self._process.stderr and not self._opened.done():
            why = f"{why}; its error output ends with: {self._process.stderr[-300:]}"
        return McpError(self.name, why)

    def _translated(self, error: BaseException) -> Exception:
        """Translate an error of the library."""
        if isinstance(error, McpError):
            return error
        if self._failed and not self._opened.done():
            return self._failed[-1]
        if self._process is not None and self._process.why is not None:
            return self._error(self._process.why)
        if isinstance(error, LibraryError):
            return self._error(str(error))
        if isinstance(error, ValidationError):
            return self._error("its answer is not of the form the protocol asks for")
        return self._error(f"{type(error).__name__}: {error}")


@asynccontextmanager
async def _over_http(server: HttpServer, failed: list[EgressError]) -> AsyncIterator[Request]:
    policy = server.policy or EgressPolicy(allow_hosts=[_host_of(server.url)])
    # The tool's own timeout bounds how long a call takes; the guard bounds what is read.
    bounded = replace(policy, timeout_s=MAX_WAIT_S, max_bytes=min(policy.max_bytes, server.max_message_bytes))
    async with EgressClient(bounded, ssl_context=server.ssl_context) as egress:
        transport = _Posting(await egress.guard(), failed)
        http = httpx2.AsyncClient(transport=transport, trust_env=False, headers=dict(server.headers), timeout=None)
        async with http, connect(http_streams(server.url, http, bounded.max_bytes)) as request:
            yield request


class _Posting(httpx2.AsyncBaseTransport):
    """Sends each request on its own.

    The GET stream for server messages, which the library would reopen repeatedly, is refused. A failed request is
    answered with an error response: an exception raised here would end the connection for all other requests.
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
            content = {"jsonrpc": "2.0", "id": None, "error": {"code": types.INTERNAL_ERROR, "message": str(error)}}
            return httpx2.Response(502, json=content, request=request)


def _host_of(url: str) -> str:
    read = httpx2.URL(url)
    host = f"[{read.host}]" if ":" in read.host else read.raw_host.decode("ascii")
    return f"{host}:{read.port or (443 if read.scheme == 'https' else 80)}"


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Wait until all tasks have ended; a cancel is deferred until then, so that their cleanup completes."""
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
