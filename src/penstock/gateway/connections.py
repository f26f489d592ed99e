"""The open connections to upstreams: one request at a time on each, most recently used first.

This is not httpcore's own pool, which checks every open connection before and after each request: with twenty of them,
that costs as much as the rest of a relayed request. Knows nothing of calls and limits.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import httpcore2

Headers = list[tuple[bytes, bytes]]

CONNECT_S = 15.0
READ_S = 600.0
"""Maximum time without data from an upstream, as in the clients of OpenAI and Anthropic."""
MAX_CONNECTIONS = 1_000
MAX_IDLE = 64
"""Maximum number of connections to one upstream that are kept open without a request."""
IDLE_S = 30.0
Idle = deque[httpcore2.AsyncHTTPConnection]
"""Connections of one upstream that no request uses, the least recently used first."""
_TIMEOUTS = {"connect": CONNECT_S, "read": READ_S, "write": CONNECT_S}


class Connections:
    """The connections to all upstreams."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None) -> None:
        self._ssl_context = ssl_context
        self._idle: defaultdict[str, Idle] = defaultdict(deque)
        """By address."""
        self._free = asyncio.Semaphore(MAX_CONNECTIONS)

    async def send(self, method: str, url: httpcore2.URL, headers: Headers, body: bytes | None) -> httpcore2.Response:
        """Send one request, and return the response with its body unread; the caller closes it."""
        request = httpcore2.Request(method, url, headers=headers, content=body, extensions={"timeout": _TIMEOUTS})
        idle = self._idle[str(url.origin)]
        await self._admit()
        try:
            connection = await self._take(url.origin, idle)
        except BaseException:
            self._free.release()
            raise
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await self._give_back(connection, idle)
            raise
        lent = _LentBody(response, partial(self._give_back, connection, idle))
        return httpcore2.Response(
            response.status, headers=response.headers, content=lent, extensions=response.extensions
        )

    async def aclose(self) -> None:
        """Close the connections that no request uses."""
        for idle in self._idle.values():
            while idle:
                await idle.pop().aclose()

    async def _admit(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._free.acquire()
        except TimeoutError:
            raise httpcore2.PoolTimeout(f"{MAX_CONNECTIONS} connections are in use") from None

    async def _take(self, origin: httpcore2.Origin, idle: Idle) -> httpcore2.AsyncHTTPConnection:
        """Return the most recently used connection that is still open, or a new one."""
        while idle:
            connection = idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore2.AsyncHTTPConnection(origin, ssl_context=self._ssl_context, keepalive_expiry=IDLE_S)

    async def _give_back(self, connection: httpcore2.AsyncHTTPConnection, idle: Idle) -> None:
        """Keep a connection whose exchange is complete, and close any other; close the oldest if it has expired or is
        surplus.
        """
        self._free.release()
        if connection.is_idle() and not connection.is_closed():
            idle.append(connection)
        else:
            await connection.aclose()
        if len(idle) > MAX_IDLE or (len(idle) > 1 and idle[0].has_expired()):
            await idle.popleft().aclose()


class _LentBody:
    """The body of a response; closing it gives its connection back."""

    def __init__(self, response: httpcore2.Response, give_back: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self._give_back = give_back
        self._is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._response.stream:  # type: ignore[union-attr]  # async, since the connection is
            yield part

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                await self._response.aclose()
            finally:
                await self._give_back()
