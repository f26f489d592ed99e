"""The other side of MCP in tests: servers and clients of the library, of whichever release is imported.

What release 1 calls otherwise is called here as release 2 does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import mcp
import mcp.server
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from penstock.providers.mcp.installed import is_release_1

IS_RELEASE_1 = is_release_1()
MODES = ["legacy"] if IS_RELEASE_1 else ["legacy", "auto"]
"""How a client finds out the version of the protocol."""

IMPORT_SERVER = """
try:
    from mcp.server import MCPServer
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP as MCPServer
"""
"""The beginning of a server's program."""

library: Any = mcp
MCPServer: Any = library.server.FastMCP if IS_RELEASE_1 else library.server.MCPServer
MCPError: Any = library.McpError if IS_RELEASE_1 else library.MCPError


def http_app(server: Any, **options: Any) -> Any:
    """The ASGI app of a server of the library."""
    if not IS_RELEASE_1:
        return server.streamable_http_app(**options)
    for name, value in options.items():
        setattr(server.settings, name, value)
    return server.streamable_http_app()


@asynccontextmanager
async def in_memory(server: Any) -> AsyncIterator[Any]:
    """A client of a server in this process."""
    if IS_RELEASE_1:
        from mcp.shared.memory import create_connected_server_and_client_session  # type: ignore[attr-defined]

        async with create_connected_server_and_client_session(server) as session:
            yield Client1(session)
        return
    async with library.Client(server) as client:
        yield client


@asynccontextmanager
async def over_http(url: str, headers: Mapping[str, str], mode: str = "auto") -> AsyncIterator[Any]:
    """A client of the server at `url`."""
    if IS_RELEASE_1:
        async with httpx.AsyncClient(headers=headers, timeout=30) as http:
            streams: Any = streamable_http_client(url, http_client=http)  # type: ignore[arg-type]
            async with session_of(streams) as client:
                yield client
        return
    http2 = httpx2.AsyncClient(headers=headers, timeout=30)
    async with http2, library.Client(streamable_http_client(url, http_client=http2), mode=mode) as client:
        yield client


@asynccontextmanager
async def over_stdio(command: str, arguments: Sequence[str]) -> AsyncIterator[Any]:
    """A client of the program that it starts."""
    streams: Any = stdio_client(StdioServerParameters(command=command, args=list(arguments)))
    async with session_of(streams) if IS_RELEASE_1 else library.Client(streams) as client:
        yield client


@asynccontextmanager
async def session_of(streams: Any) -> AsyncIterator[Client1]:
    async with streams as (received, sending, *_), library.ClientSession(received, sending) as session:
        await session.initialize()
        yield Client1(session)


@dataclass
class Client1:
    """A client of release 1, as one of release 2."""

    session: Any

    async def list_tools(self) -> Any:
        return await self.session.list_tools()

    async def call_tool(self, name: str, arguments: Any, *, meta: Any = None, progress_callback: Any = None) -> Any:
        id = self.session._request_id
        try:
            result = await self.session.call_tool(name, arguments, progress_callback=progress_callback, meta=meta)
        except asyncio.CancelledError:  # the library sends no cancel
            params = library.types.CancelledNotificationParams(requestId=id)
            cancel = library.types.CancelledNotification(params=params)
            await self.session.send_notification(library.types.ClientNotification(cancel))
            raise
        return SimpleNamespace(
            content=result.content,
            is_error=result.isError,
            structured_content=result.structuredContent,
            meta=result.meta,
        )
