"""Limits on one HTTP/1.1 connection: they bound the cost of a client before routing and authentication.

The parser is llhttp, in C, through httptools. This module adds the limits that the parser lacks: the size of a
request's head, the time it takes, the number of pieces of a body, the amount read in one turn of the event loop, and
the number of connections of one address. A request that cannot be parsed gets a 400 response in the usual form, and the
connection is closed. A request with both Content-Length and Transfer-Encoding counts as one that cannot be parsed.

Pipelined requests wait for the responses to earlier ones. uvicorn keeps an object for each and reads more of them after
every response, so their number is limited, too. Within that limit the server keeps reading, because it notices a
disconnect only on a connection that it reads.

A client over its limit of connections gets a 503 response and is disconnected. Connections of trusted proxies carry
many clients and have no such limit; the requests of those clients are limited in `ConcurrencyGuard`. When the server is
at its own limit, a new connection takes the place of an idle one, so that silent clients keep no other client out.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.server.clients import Network, is_in, network_of

MAX_CONNECTIONS = 2_000
"""Maximum number of open connections of a server; fewer if the process may not open twice as many files."""
MAX_ACCEPTED = 32
"""Maximum number of connections that are accepted in one turn of the event loop."""
HEADERS_S = 15.0
"""How long a client may take to send a request's head."""
MAX_HEAD_BYTES = 128 * 1024
"""Maximum size of a request's head while it is parsed; `OriginGuard` refuses far smaller ones, in the usual form."""
MAX_READ_BYTES = 4 * 1024
"""Maximum number of bytes read from one connection before the others get their turn."""
MAX_PIPELINED = 8
"""Maximum number of requests on one connection that wait for the response to an earlier one."""
MAX_SMALL_PIECES = 500
"""Maximum number of pieces of a body that is cut into pieces of less than MIN_PIECE_BYTES on average."""
MIN_PIECE_BYTES = 64


class ConnectionLimit:
    """Bounds how many connections are open, of each address and in all.

    When all places are taken, the next connection takes that of an idle one: of the address with most idle connections,
    the one that has been idle for longest. A connection is idle while no request of it is being answered.
    """

    def __init__(
        self, max_per_client: int, trusted: tuple[Network, ...] = (), *, max_connections: int = MAX_CONNECTIONS
    ) -> None:
        self._max_per_client = max_per_client
        self._trusted = trusted
        self._max_connections = max_connections
        self._total = 0
        self._open: Counter[str] = Counter()
        self._idle: dict[str, dict[ClientConnection, None]] = {}
        """Idle connections by client, the longest idle first."""

    def enter(self, connection: ClientConnection, address: str) -> str:
        """Add an idle connection and return the key of its client; raises OverflowError if there is no place."""
        client = network_of(address)
        if self._open[client] >= self._max_per_client and not is_in(address, self._trusted):
            raise OverflowError("this address has too many open connections; close some, or reuse them")
        if self._total >= self._max_connections and not self._close_an_idle_one():
            raise OverflowError("the server has too many open connections; retry in a moment")
        self._total += 1
        self._open[client] += 1
        self.add_idle(connection, client)
        return client

    def leave(self, connection: ClientConnection, client: str) -> None:
        """Remove a connection."""
        self.remove_idle(connection, client)
        self._total -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]

    def add_idle(self, connection: ClientConnection, client: str) -> None:
        """Mark a connection as idle: it has no request now."""
        self._idle.setdefault(client, {})[connection] = None

    def remove_idle(self, connection: ClientConnection, client: str) -> None:
        """Unmark an idle connection: it has a request, or is closed."""
        idle = self._idle.get(client, {})
        idle.pop(connection, None)
        if not idle:
            self._idle.pop(client, None)

    def _close_an_idle_one(self) -> bool:
        most = max(self._idle.values(), key=len, default=None)
        if most is None:
            return False
        next(iter(most)).evict()
        return True


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
        self._answering: Any = None  # `cycle` is the newest request, and may wait for this one's response
        self._timer = self.loop.call_later(self.headers_s, self._check_head, None)
        if self.limit is not None and self.client is not None:
            try:
                self._counted = self.limit.enter(self, self.client[0])
            except OverflowError as full:
                self._refuse(503, "overloaded", str(full))

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop checking the connection, and report the disconnect to the request in progress."""
        self._timer.cancel()
        self._leave()
        self._disconnect()
        super().connection_lost(exc)

    def evict(self) -> None:
        """Close this idle connection in favour of another client; the unread part of a response is lost."""
        self._is_refused = True
        self._leave()  # at once: the loop reports the loss in its next turn, and more clients may come in this one
        self.transport.abort()

    def _leave(self) -> None:
        if self._counted is not None and self.limit is not None:
            self.limit.leave(self, self._counted)
            self._counted = None

    def data_received(self, data: bytes) -> None:
        """Parse received data, unless the connection is being closed."""
        if self._is_refused or self.transport.is_closing():
            return
        if not self._is_in_body:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_body and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a header of the head; trailers after a chunked body have no use and are dropped."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin a request, or queue it behind the response to the previous one."""
        if self._is_refused:  # the rest of what was read together with a refused request
            return
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        elif len(self.pipeline) > MAX_PIPELINED:
            self._refuse(503, "overloaded", f"at most {MAX_PIPELINED} requests of a connection may wait for responses")
            return
        else:
            self.flow.resume_reading()
        if self._counted is not None and self.limit is not None:
            self.limit.remove_idle(self, self._counted)
        self._is_in_body = True
        self._head_bytes = self._pieces = self._body_bytes = 0

    def on_body(self, body: bytes) -> None:
        """Accept a piece of the body; refuse too many tiny pieces, which cost the server far more than their sender."""
        if self._is_refused:
            return
        self._pieces += 1
        self._body_bytes += len(body)
        if self._pieces > MAX_SMALL_PIECES and self._body_bytes < self._pieces * MIN_PIECE_BYTES:
            self._refuse(400, "bad_request", f"send the body in chunks of at least {MIN_PIECE_BYTES} bytes")
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if self._is_refused:
            return
        super().on_message_complete()
        self._is_in_body = False

    def on_response_complete(self) -> None:
        """End a response; the next request may be waiting already."""
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        is_waiting = self.timeout_keep_alive_task is not None
        if is_waiting and self._counted is not None and self.limit is not None:
            self.limit.add_idle(self, self._counted)

    def send_400_response(self, msg: str) -> None:
        """Respond to data that is not a valid HTTP request."""
        self._refuse(400, "bad_request", "this is no valid HTTP/1.1 request")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Respond without calling the app, and close the connection; only close it if a response has begun."""
        self._is_refused = True
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps({"error": {"code": code, "message": message}}).encode()
            head = STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            self.transport.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        self.pipeline.clear()
        self._disconnect()
        self.transport.close()

    def _disconnect(self) -> None:
        """Report a client disconnect to the request that the app is answering; the app then sends nothing more."""
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

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


def allowed_connections() -> int:
    """Raise this process's limit of open files as far as needed and possible, and return the connections it allows.

    The common default of 1,024 files is fewer than the connections of a busy server, and once all are in use, nothing
    can be accepted or opened. Half of the files are left for databases, providers, and connections being closed.
    """
    if sys.platform == "win32":  # has no such limit
        return MAX_CONNECTIONS
    import resource

    wanted = 2 * MAX_CONNECTIONS
    files, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY or files >= wanted:
        return MAX_CONNECTIONS
    files = wanted if highest == resource.RLIM_INFINITY else min(wanted, highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, highest))
    return min(MAX_CONNECTIONS, files // 2)
