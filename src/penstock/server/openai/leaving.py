"""Clients that leave, and servers that close: both end a stream at once, and a quiet one is told from a dead one.

Knows nothing of runs: whoever starts something says what is to happen to it when its client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.server.sse import Streams

T = TypeVar("T")

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
CLIENT_CLOSED_REQUEST = 499


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class ServerCloses(Exception):
    """All streams are to end."""


async def unless_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; ClientLeft, with the work cancelled, if the connection is closed before."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft
    finally:
        await _gone(working, leaving)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _gone(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def with_heartbeats(items: AsyncGenerator[T, None], streams: Streams) -> AsyncGenerator[T | None, None]:
    """The items as they come, and None whenever nothing has come for a while; ServerCloses when it does."""
    async with aclosing(items):
        closing = asyncio.ensure_future(streams.closing().wait())
        coming = asyncio.ensure_future(anext(items))
        try:
            while True:
                await asyncio.wait({coming, closing}, timeout=streams.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                if coming.done():
                    try:
                        item = coming.result()
                    except StopAsyncIteration:
                        return
                    coming = asyncio.ensure_future(anext(items))
                    yield item
                elif closing.done():
                    raise ServerCloses
                else:
                    yield None
        finally:
            await _gone(coming, closing)


class RunStream(Response):
    """Server-sent events, until they end or their reader leaves.

    Its place among the open streams was taken before, by `Streams.place`, so that nothing is started for a stream
    that cannot be.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        streams: Streams,
        user: str,
        on_leave: Callable[[], Awaitable[object]],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        del self.headers["content-length"]
        self._frames = frames
        self._streams = streams
        self._user = user
        self._on_leave = on_leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames; whoever leaves is noticed at once."""
        try:
            await unless_left(receive, self._tell(send))
        except (ClientLeft, OSError):
            await self._on_leave()
        finally:
            self._streams.leave(self._user)

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._frames) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
