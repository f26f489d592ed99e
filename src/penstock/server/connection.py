"""One HTTP/1.1 connection: what a client may cost before any route, and before it is known who it is.

The parser is llhttp, in C, through httptools. What it leaves unbounded is bounded here: the size of a request's head,
the time it takes, the number of pieces a body is cut into, how much is read in one turn of the event loop, and the
number of connections of one address. A request that cannot be parsed is answered with 400 in the usual form, and the
connection is closed; one with both Content-Length and Transfer-Encoding is such a request.

A client at its share of connections is answered with 503 and disconnected. Connections of trusted proxies carry many
clients and are not counted; the requests of those clients are, by `ConcurrencyGuard`.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.server.clients import Network, is_in, network_of

HEADERS_S = 15.0
"""How long a client may take to send a request's head."""
MAX_HEAD_BYTES = 128 * 1024
"""Maximum size of a request's head while it is parsed; `OriginGuard` refuses far smaller ones, in the usual form."""
MAX_READ_BYTES = 4 * 1024
"""Maximum number of bytes read from one connection before the others get their turn."""
MAX_SMALL_PIECES = 500
"""Maximum number of pieces of a body that is cut into pieces of less than MIN_PIECE_BYTES on average."""
MIN_PIECE_BYTES = 64


class ConnectionLimit:
    """Counts the open connections of each address, and how many more it may open."""

    def __init__(self, max_per_client: int, trusted: tuple[Network, ...] = ()) -> None:
        self._max_per_client = max_per_client
        self._trusted = trusted
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> str | None:
        """Count a connection; return the key to `leave` with, None if it is a trusted proxy's, which is not counted.

        Raises OverflowError if the address has its share already.
        """
        if is_in(address, self._trusted):
            return None
        client = network_of(address)
        if self._open[client] >= self._max_per_client:
            raise OverflowError(f"{address} has {self._max_per_client} connections already")
        self._open[client] += 1
        return client

    def leave(self, client: str) -> None:
        """Count a connection less."""
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class ClientConnection(HttpToolsProtocol):
    """HTTP/1.1 for one client, within bounds; `limit` is set by `bounded`."""

    headers_s = HEADERS_S
    limit: ConnectionLimit | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start checking it periodically until it is lost."""
        super().connection_made(transport)
        # One recv is one turn of the loop; asyncio would read 256 KiB, which is 40,000 chunks of one byte.
        transport.max_size = MAX_READ_BYTES  # type: ignore[attr-defined]
        self._is_refused = False
        self._counted: str | None = None
        self._head_bytes = 0
        self._is_in_body = False
        self._pieces = 0
        self._body_bytes = 0
        self._timer = self.loop.call_later(self.headers_s, self._check_head, None)
        if self.limit is not None and self.client is not None:
            try:
                self._counted = self.limit.enter(self.client[0])
            except OverflowError:
                self._refuse(503, "overloaded", "this address has too many open connections; close some, or reuse them")

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking the connection."""
        self._timer.cancel()
        if self._counted is not None and self.limit is not None:
            self.limit.leave(self._counted)
            self._counted = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the connection is being closed."""
        if self._is_refused or self.transport.is_closing():
            return
        if not self._is_in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the head; those that follow a chunked body are not used by anything, and are dropped."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request."""
        super().on_headers_complete()
        self._is_in_body = True
        self._head_bytes = self._pieces = self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body; a body in countless tiny pieces costs the server far more than its sender."""
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > MAX_SMALL_PIECES and self._body_bytes < self._pieces * MIN_PIECE_BYTES:
            if not self._is_refused:
                self._refuse(400, "bad_request", f"send the body in chunks of at least {MIN_PIECE_BYTES} bytes")
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        super().on_message_complete()
        self._is_in_body = False

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is no HTTP."""
        self._refuse(400, "bad_request", "this is no valid HTTP/1.1 request")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer without calling the app, and close the connection; only close it if an answer has begun."""
        self._is_refused = True
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps({"error": {"code": code, "message": message}}).encode()
            head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            self.transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the app sees a client that has left, and sends nothing more
            cycle.message_event.set()
        self.transport.close()

    def _check_head(self, before: object) -> None:
        """Close the connection if it has been waiting for the same head since the last check."""
        cycle: Any = self.cycle
        is_idle = self.timeout_keep_alive_task is not None  # then uvicorn's keep-alive timeout applies
        waits_for_head = not is_idle and (cycle is None or cycle.response_complete)
        if waits_for_head and (cycle is None or cycle is before):
            self.transport.close()
            return
        self._timer = self.loop.call_later(self.headers_s, self._check_head, cycle if waits_for_head else None)


def bounded(limit: ConnectionLimit) -> type[ClientConnection]:
    """Return the protocol class whose connections share a limit: uvicorn creates them itself, from a class."""
    return type("BoundedConnection", (ClientConnection,), {"limit": limit})
