"""The other side of MCP in tests: servers and clients of the library, of whichever release is imported."""

from __future__ import annotations

from typing import Any

import mcp.server

from penstock.providers.mcp.installed import is_release_1

IS_RELEASE_1 = is_release_1()

IMPORT_SERVER = """
try:
    from mcp.server import MCPServer
except ImportError:  # release 1
    from mcp.server.fastmcp import FastMCP as MCPServer
"""
"""The beginning of a server's program."""

MCPServer: Any = mcp.server.FastMCP if IS_RELEASE_1 else mcp.server.MCPServer  # type: ignore[attr-defined,unused-ignore]


def http_app(server: Any, **options: Any) -> Any:
    """The ASGI app of a server of the library."""
    if not IS_RELEASE_1:
        return server.streamable_http_app(**options)
    for name, value in options.items():
        setattr(server.settings, name, value)
    return server.streamable_http_app()
