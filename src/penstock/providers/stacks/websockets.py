"""WebSockets, over which some APIs take model requests: OpenAI's responses and realtime sessions, Gemini's live ones.

This module imports none of the libraries that open them. A WebSocket carries a conversation of its own, without a
request that could be held for or clamped, so it is not contained. A WebSocket to a model API is reported before its
handshake, as one uncontained request, and refused if the run is strict.

The libraries `websockets` and `websocket-client` have sockets of their own. Those of httpx2, httpx and aiohttp are
opened by a GET request, which passes through their stacks and is checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from penstock.providers.current import may_apply, open_socket
from penstock.providers.hooks import Method, Patch

READER_END_S = 5.0
"""Maximum wait for the thread that reads from a closed connection; it ends at once."""


def check_upgrade(method: str, host: str, path: str, headers: Mapping[str, str]) -> None:
    """Report the request if it opens a WebSocket to a model API; raise if it is refused."""
    if method == "GET" and may_apply("POST") and headers.get("upgrade", "").lower() == "websocket":
        open_socket(host, path)


def _handshake(original: Method) -> Method:
    def handshake(connection: Any, *args: Any, **options: Any) -> Any:
        _check(connection, _uri_of(connection.protocol))
        return original(connection, *args, **options)

    return handshake


def _ahandshake(original: Method) -> Method:
    async def handshake(connection: Any, *args: Any, **options: Any) -> Any:
        _check(connection, _uri_of(connection.protocol))
        return await original(connection, *args, **options)

    return handshake


def _legacy_handshake(original: Method) -> Method:
    async def handshake(connection: Any, wsuri: Any, *args: Any, **options: Any) -> Any:
        _check(connection, wsuri)
        return await original(connection, wsuri, *args, **options)

    return handshake


def _uri_of(protocol: Any) -> Any:
    return protocol.uri if hasattr(protocol, "uri") else protocol.wsuri  # its name before websockets 15


def _check(connection: Any, uri: Any) -> None:
    """Report the WebSocket; if it is refused, close its connection, which the library does for some errors alone."""
    try:
        open_socket(uri.host, uri.path)
    except BaseException:
        if hasattr(connection, "close_socket"):
            connection.close_socket()  # wakes up the thread that reads from it
            connection.recv_events_thread.join(READER_END_S)
        elif hasattr(connection, "transport"):
            connection.transport.abort()
        raise


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
