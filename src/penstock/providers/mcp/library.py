"""What differs between the releases of the MCP library for a client: here release 2, in `release_1` the other.

connect        a session over streams, as a function that sends a request
http_streams   the streams of a server at an address
message_of     a message from its JSON
LibraryError   an error that the server has sent
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

from mcp.shared.message import SessionMessage

from penstock.providers.mcp.installed import is_release_1

Request = Callable[[Any, type[Any]], Awaitable[Any]]
"""Sends a request and returns its result, of that type."""

if is_release_1() and not TYPE_CHECKING:
    from penstock.providers.mcp.release_1 import LibraryError, connect, http_streams, message_of
else:
    import httpx2
    from mcp import Client
    from mcp import MCPError as LibraryError
    from mcp.client.streamable_http import streamable_http_client
    from mcp.types import jsonrpc_message_adapter

    @asynccontextmanager
    async def connect(streams: AbstractAsyncContextManager[Any]) -> AsyncIterator[Request]:
        """Open a session over the streams."""
        async with Client(streams, cache=None) as client:
            yield client.session.send_request

    def http_streams(url: str, http: httpx2.AsyncClient, max_bytes: int) -> AbstractAsyncContextManager[Any]:
        """Return the streams of the server at `url`; an event of an answer has at most `max_bytes`."""
        return streamable_http_client(url, http_client=http, max_sse_event_size=max_bytes)

    def message_of(data: bytes) -> SessionMessage:
        """Return the message in `data`; raise ValueError if it is none."""
        return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))


__all__ = ["LibraryError", "Request", "connect", "http_streams", "message_of"]
