"""Release 1 of the MCP library, for a server.

It knows no version of the protocol without sessions. Its decorators for handlers are not used: they would list all
tools before a call, and turn every error into a result of the tool.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import mcp
from mcp.server import stdio
from mcp.server.lowlevel import Server

_library: Any = mcp  # mypy checks against release 2
types = _library.types
_Server: Any = Server
STDIN, STDOUT, STDERR = 0, 1, 2


def _is_error(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], anyio.ClosedResourceError)


# The library logs the end of a session in which a client listens as an error, with a traceback.
logging.getLogger("mcp.server.streamable_http").addFilter(_is_error)


class MCPError(_library.McpError):  # type: ignore[misc]
    """An error that the client gets."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(types.ErrorData(code=code, message=message))


@dataclass(frozen=True, slots=True)
class Context:
    """What a handler is given of a request, as release 2 calls it."""

    given: Any
    """The library's own."""

    @property
    def meta(self) -> dict[str, Any]:
        """What the client has sent in `_meta`."""
        return (self.given.meta.model_extra or {}) if self.given.meta is not None else {}

    @property
    def request(self) -> Any:
        """The HTTP request; None over other transports."""
        return self.given.request

    @property
    def session(self) -> Context:
        """Where progress is reported."""
        return self

    async def report_progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Report progress, if the client wants to know it."""
        token = self.given.meta.progressToken if self.given.meta is not None else None
        if token is not None:
            request_id = str(self.given.request_id)
            await self.given.session.send_progress_notification(token, progress, total, message, request_id)


def create_server(
    version: str,
    instructions: str,
    list_tools: Callable[[Any, Any], Awaitable[Any]],
    call_tool: Callable[[Any, Any], Awaitable[Any]],
) -> Any:
    """Create the server of graphs."""
    server = _Server("penstock", version=version, instructions=instructions)

    def answering(handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def answer(request: Any) -> Any:
            return types.ServerResult(await handler(Context(server.request_context), request.params))

        return answer

    server.request_handlers[types.ListToolsRequest] = answering(list_tools)
    server.request_handlers[types.CallToolRequest] = answering(call_tool)
    return server


@asynccontextmanager
async def stdio_server() -> AsyncIterator[Any]:
    """Yield the streams of standard input and output; what else is printed meanwhile goes to standard error."""
    wire_in, wire_out = os.dup(STDIN), os.dup(STDOUT)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, STDIN)
    os.close(null)
    os.dup2(STDERR, STDOUT)
    # Not closed: a thread that still reads would read from whatever gets the number next.
    incoming = os.fdopen(wire_in, encoding="utf-8", errors="replace", closefd=False)
    outgoing = os.fdopen(wire_out, "w", encoding="utf-8", closefd=False)
    try:
        async with stdio.stdio_server(anyio.wrap_file(incoming), anyio.wrap_file(outgoing)) as streams:
            yield streams
    finally:
        os.dup2(wire_in, STDIN)
        os.dup2(wire_out, STDOUT)


def has_sessions(version: str) -> bool:
    """Whether requests of this version of the protocol belong to sessions: all that this release knows do."""
    return True
