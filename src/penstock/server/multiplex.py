"""Events of several runs, and changes of lists, on one stream: a browser has six connections for all its tabs.

A subscriber is a position in each log, as in `sse`. The id of every event has the positions of all runs, so that a
client that reconnects with it misses nothing and sees nothing twice. A run that has ended stays subscribed: it may be
resumed. Lists have no positions: a subscriber gets their state first, and again after each reconnect, then the changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence

from penstock.server.sse import CHUNK_BYTES, HEARTBEAT, PAGE, RETRY_MS, LogStores, event_json, first_done, framed

MAX_STREAM_RUNS = 50
"""Maximum number of runs on one stream."""
POLL_INTERVAL_S = 1.0
"""Interval at which lists are read."""

Topic = Callable[[], Awaitable[bytes]]
"""Reads a list and returns frames of its changes since the last reading; empty if there are none."""


async def follow_many(
    stores: LogStores,
    runs: Sequence[str],
    places: Sequence[int],
    *,
    heartbeat_s: float,
    types: Collection[str] = (),
    topics: Sequence[Topic] = (),
    follows: bool = True,
) -> AsyncGenerator[bytes, None]:
    """Yield frames of the runs' events after the given places, of these types if any are given, and of the topics.

    The stream ends only when its client disconnects or the server closes; without `follows`, after what exists now.
    """
    yield f"retry: {RETRY_MS}\n\n".encode()
    loop = asyncio.get_running_loop()
    position = list(places)
    polled_s, sent_s = -POLL_INTERVAL_S, loop.time()
    while True:
        chunk = b""
        for index in range(len(runs)):
            while piece := await _piece(stores, runs, position, index, types):
                chunk += piece
                if len(chunk) >= CHUNK_BYTES:
                    yield chunk
                    chunk, sent_s = b"", loop.time()
        if topics and loop.time() - polled_s >= POLL_INTERVAL_S:
            polled_s = loop.time()
            for topic in topics:
                chunk += await topic()
        if not chunk and loop.time() - sent_s >= heartbeat_s:
            chunk = HEARTBEAT
        if chunk:
            yield chunk
            sent_s = loop.time()
        if not follows:
            return
        due_s = sent_s + heartbeat_s
        if topics:
            due_s = min(due_s, polled_s + POLL_INTERVAL_S)
        await _news(stores, runs, position, max(0.0, due_s - loop.time()))


async def _piece(
    stores: LogStores, runs: Sequence[str], position: list[int], index: int, types: Collection[str]
) -> bytes:
    """Return the frames of the next events of a run, and move its position; empty if there is no event to send."""
    run_id, chunk = runs[index], bytearray()
    while not chunk:
        page = await stores.events.read(run_id, position[index], PAGE)
        for event in page:
            position[index] = event.seq
            if types and event.type not in types:
                continue
            data = {"run_id": run_id, **event_json(event)}
            chunk += framed(data, event=event.type, id=position_id(position))
            if len(chunk) >= CHUNK_BYTES:
                break
        if not page:
            break
        await asyncio.sleep(0)
    return bytes(chunk)


async def _news(stores: LogStores, runs: Sequence[str], position: Sequence[int], timeout_s: float) -> None:
    """Wait until one of the runs has a new event, or the timeout expires."""
    if not runs:
        await asyncio.sleep(timeout_s)
        return
    waits = [
        asyncio.ensure_future(stores.events.wait(run_id, place, timeout_s))
        for run_id, place in zip(runs, position, strict=True)
    ]
    done = await first_done(*waits)
    for wait in done:
        if not wait.cancelled():
            wait.result()


def position_id(position: Sequence[int]) -> str:
    """Return the id of an event: the positions of all runs, in the order of the request."""
    return ",".join(map(str, position))
