"""WebSockets, over which some APIs take model requests: OpenAI's responses and realtime sessions, Gemini's live ones.

This module imports none of the libraries that open them. What goes over a WebSocket is a conversation of its own, with
no request that could be held for or cut down, so it is not contained. A WebSocket to a model API is reported before
its handshake, as one uncontained request, and refused if the run is strict.

The libraries `websockets` and `websocket-client` have sockets of their own. Those of httpx2, httpx and aiohttp are
opened by a GET request, which comes through their stacks and is looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.providers.current import may_apply, open_socket
from penstock.providers.hooks import Method, Patch


def check_upgrade(method: str, host: str, path: str, headers: Mapping[str, str]) -> None:
    """Report the request if it opens a WebSocket to a model API; raise if it is refused."""
    if method == "GET" and may_apply("POST") and headers.get("upgrade", "").lower() == "websocket":
        open_socket(host, path)


def _handshake(original: Method) -> Method:
    def handshake(connection: Any, *args: Any, **options: Any) -> Any:
        protocol = connection.protocol
        uri = protocol.uri if hasattr(protocol, "uri") else protocol.wsuri  # its name before websockets 15
        open_socket(uri.host, uri.path)
        return original(connection, *args, **options)

    return handshake


def _ahandshake(original: Method) -> Method:
    async def handshake(connection: Any, *args: Any, **options: Any) -> Any:
        return await checked(connection, *args, **options)

    checked = _handshake(original)
    return handshake


def _legacy_handshake(original: Method) -> Method:
    async def handshake(connection: Any, wsuri: Any, *args: Any, **options: Any) -> Any:
        open_socket(wsuri.host, wsuri.path)
        return await original(connection, wsuri, *args, **options)

    return handshake


def _connect(original: Method) -> Method:
    def connect(client: Any, url: str, **options: Any) -> Any:
        address = urlsplit(url)
        open_socket(address.hostname or "", address.path)
        return original(client, url, **options)

    return connect


PATCHES = (
    Patch("websockets.sync.client", "ClientConnection", "handshake", _handshake),
    Patch("websockets.asyncio.client", "ClientConnection", "handshake", _ahandshake),
    Patch("websockets.trio.client", "ClientConnection", "handshake", _ahandshake),
    Patch("websockets.legacy.client", "WebSocketClientProtocol", "handshake", _legacy_handshake),
    Patch("websocket._core", "WebSocket", "connect", _connect),
)
