"""What differs between the releases of the MCP library for a server: here release 2, in `release_1` the other.

MCPError        an error that the client gets, made of its code and message
Context         what a handler is given of a request: its `meta`, its HTTP `request`, and `session.report_progress`
create_server   a server without a transport
stdio_server    the streams of standard input and output, which nothing else reads or writes meanwhile
has_sessions    whether a version of the protocol has sessions
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from penstock.providers.mcp.installed import is_release_1

Handler = Callable[[Any, Any], Awaitable[Any]]
"""Answers a request from its context and parameters."""

if is_release_1() and not TYPE_CHECKING:
    from penstock.server.mcp.release_1 import Context, MCPError, create_server, has_sessions, stdio_server
else:
    from mcp import MCPError
    from mcp.server.context import ServerRequestContext
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS

    Context = ServerRequestContext[Any, Any]

    def create_server(version: str, instructions: str, list_tools: Handler, call_tool: Handler) -> Server[Any]:
        """Create the server of graphs."""
        return Server(
            "penstock",
            version=version,
            instructions=instructions,
            on_list_tools=list_tools,
            on_call_tool=call_tool,
            get_tool_input_schema=lambda _: None,  # otherwise every call would first list all tools
        )

    def has_sessions(version: str) -> bool:
        """Whether requests of this version of the protocol belong to sessions."""
        return version in HANDSHAKE_PROTOCOL_VERSIONS


__all__ = ["Context", "MCPError", "create_server", "has_sessions", "stdio_server"]
