"""The app at /mcp when release 2 of the MCP library is not installed.

The rest of the server works without it. Some agent frameworks need release 1, and a served program shares one
environment with the server and its framework.
"""

from __future__ import annotations

from importlib.util import find_spec

from starlette.types import Receive, Scope, Send

from penstock.server.errors import ApiError, send_error

NOT_INSTALLED = "MCP needs release 2 of the library mcp, which is not installed here: pip install 'penstock[mcp]'"


def is_mcp_installed() -> bool:
    """Whether release 2 of the MCP library is installed; release 1 has no package of types."""
    return find_spec("mcp_types") is not None


class NoMcp:
    """The ASGI app at /mcp that answers every request with an error that names the package to install."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(ApiError(501, NOT_INSTALLED, code="not_installed"), scope, receive, send)
