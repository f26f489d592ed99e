"""Streaming responses, and a run's events as a stream that a client can resume at any event.

A subscriber is only a position in the log: there is no queue between a run and its subscribers. A page is read when
the previous one has been sent, so a client that does not read costs one small page and its socket's buffer, delays
neither the run nor other clients, and misses nothing if it reconnects. Text of a model is always data, never framing.

An ASGI server's `send` returns without an error after a disconnect, so a stream that only sends would not notice it.
Each stream also awaits `receive`, and ends as soon as its client disconnects, the run is over, or the server closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import zlib
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Generic, Literal, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError
from penstock.hosting.event_data import LAST_EVENTS
from penstock.hosting.ports import ENDED, HostedEvent, RunRecord
from penstock.server.auth import User
from penstock.server.errors import UNREADABLE, ApiError, api_error, fault_location
from penstock.server.guards import accepts_gzip
from penstock.server.metrics import Metrics
from penstock.server.settings import ServerSettings
from penstock.server.unavailable import public

LOG = logging.getLogger("penstock.server")

PAGE = 64
CHUNK_BYTES = 32 * 1024
"""Maximum size of one piece sent to a client; a larger event is sent alone."""
RETRY_MS = 2_000
READ_AHEAD = 16
"""Maximum number of items read ahead of a client."""
FIRST_PAUSE_S = 0.01
HEARTBEAT = b":\n\n"
GZIP_LEVEL = 1
GZIP_WINDOW = 16 + 13
"""gzip with a window of 8 KiB: a compressed stream takes some 40 KB of memory instead of 260."""
GZIP_MEMORY = 5
CLOSING = "the server is shutting down; retry in a moment"
DISCONNECTED = "the client disconnected"
"""Reason of a cancel request for a run whose client disconnected."""
CLIENT_CLOSED_REQUEST = 499
"""Status recorded for a request whose client disconnected; it is never received."""

T = TypeVar("T")

_TYPE = re.compile(r"[a-z0-9_.-]{1,100}")


class ReadsRuns(Protocol):
    """Reads runs: a `RunStore`, or a host's view of one in memory."""

    async def get(self, run_id: str) -> RunRecord | None: ...


class ReadsEvents(Protocol):
    """Reads events, as an `EventStore` does."""

    async def read(self, run_id: str, after_seq: int = 0, limit: int = 1_000) -> Sequence[HostedEvent]: ...

    async def last_seq(self, run_id: str) -> int: ...

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool: ...


class LogStores(Protocol):
    """The stores that runs and their events are read from."""

    @property
    def runs(self) -> ReadsRuns: ...

    @property
    def events(self) -> ReadsEvents: ...


def event_json(event: HostedEvent) -> dict[str, Any]:
    """Return an event as JSON, for streams and pages."""
    return {"seq": event.seq, "at_ms": event.at_ms, "type": event.type, "data": dict(public(event).data)}


def frame(event: HostedEvent) -> bytes:
    """Encode an event as an SSE frame: its seq is the id, its data one line of JSON."""
    return framed(event_json(event), event=event.type, id=str(event.seq))


def framed(data: Any, *, event: str | None = None, id: str | None = None) -> bytes:
    """Encode any value as one SSE frame; JSON escapes line ends and NUL, so no value can end the frame early."""
    name = f"event: {event}\n" if event is not None and _TYPE.fullmatch(event) else ""
    number = f"id: {id}\n" if id is not None else ""
    return f"{number}{name}data: ".encode() + encoded(data) + b"\n\n"


def encoded(data: Any) -> bytes:
    """Encode any value as JSON, on one line."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:  # an unpaired surrogate, which only an escape can represent
        return json.dumps(data, separators=(",", ":")).encode("ascii")


async def follow(stores: LogStores, run_id: str, after: int, heartbeat_s: float) -> AsyncGenerator[bytes, None]:
    """Yield frames of the run's events after `after` until it has ended or is parked, and heartbeats while idle."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    place, pause_s = after, FIRST_PAUSE_S
    while True:
        # Keep no reference to the page while the client is awaited: a slow client holds one chunk, not a page.
        chunk, place = _chunk(await stores.events.read(run_id, place, PAGE), place)
        if chunk:
            pause_s = FIRST_PAUSE_S
            yield chunk
            continue
        phase = await _phase(stores, run_id, place)
        if phase == "over" or (phase == "overdue" and pause_s >= heartbeat_s):
            return
        pause_s = heartbeat_s if phase == "active" else min(pause_s * 2, heartbeat_s)
        if not await stores.events.wait(run_id, place, pause_s) and pause_s == heartbeat_s:
            yield HEARTBEAT


async def is_over(stores: LogStores, run: RunRecord, place: int) -> bool:
    """Whether the run has ended with that event; no event follows unless the run is resumed."""
    return run.status in ENDED and await _phase(stores, run.id, place) == "over"


def _chunk(page: Sequence[HostedEvent], place: int) -> tuple[bytes, int]:
    """Return the frames to send next and the position after them; the rest of the page is read again."""
    chunk = bytearray()
    for event in page:
        encoded = frame(event)
        if chunk and len(chunk) + len(encoded) > CHUNK_BYTES:
            break
        chunk += encoded
        place = event.seq
    return bytes(chunk), place


async def _phase(stores: LogStores, run_id: str, place: int) -> Literal["active", "ending", "overdue", "over"]:
    """Return whether more events follow. A run's final event and its status are written separately: both are awaited.

    "overdue" means that the status is final but the final event is missing; if it stays so, there is none.
    """
    run = await stores.runs.get(run_id)
    newest = await stores.events.last_seq(run_id)
    if run is None:
        return "over"
    if newest > place:
        return "active"
    events = await stores.events.read(run_id, max(newest - 1, 0), 1)
    has_final_event = bool(events) and events[-1].type in LAST_EVENTS
    if run.status in ENDED or run.status == "parked":
        return "over" if has_final_event else "overdue"
    return "ending" if has_final_event else "active"


class Streams:
    """Counts the open streams, in total and by user, and ends them all at shutdown."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self.heartbeat_s = settings.heartbeat_s
        self._max_streams = settings.max_streams
        self._max_per_user = settings.max_streams_per_user
        self._metrics = metrics
        self._open: Counter[str] = Counter()
        self._closing: asyncio.Event | None = None
        self._is_closed = False

    def enter(self, user: str) -> None:
        """Count one more stream; raises ApiError if there are too many (429) or the server is closing (503)."""
        if self._is_closed:
            raise ApiError(503, CLOSING, retry_after_s=2)
        if self._open.total() >= self._max_streams or self._open[user] >= self._max_per_user:
            message = f"at most {self._max_per_user} open streams per user and {self._max_streams} in total are allowed"
            raise ApiError(429, message, retry_after_s=5)
        self._open[user] += 1
        self._metrics.open_streams += 1

    def leave(self, user: str) -> None:
        """Release one stream."""
        self._open[user] -= 1
        if not self._open[user]:
            del self._open[user]
        self._metrics.open_streams -= 1

    @contextmanager
    def place(self, user: str) -> Iterator[None]:
        """Reserve a stream before anything is started for it; an exception in the block releases the reservation."""
        self.enter(user)
        try:
            yield
        except BaseException:
            self.leave(user)
            raise
        self._metrics.streams += 1

    def closing(self) -> asyncio.Event:
        """Return the event that is set when all streams must end."""
        if self._closing is None:
            self._closing = asyncio.Event()
            if self._is_closed:
                self._closing.set()
        return self._closing

    def close(self) -> None:
        """End all streams; their clients reconnect when the server is back."""
        self._is_closed = True
        self.closing().set()


class ClientDisconnected(Exception):
    """The client closed the connection before the response was complete."""


class ServerShutdown(Exception):
    """The server is shutting down, and all streams must end."""


async def first_done(*tasks: asyncio.Future[Any]) -> set[asyncio.Future[Any]]:
    """Wait until a task is done, and return those that are; the others are cancelled, and have ended on return."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _cancel(*tasks)
    return done


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel it and raise ClientDisconnected."""
    working = asyncio.ensure_future(work)
    if working in await first_done(working, asyncio.ensure_future(_disconnect(receive))):
        return working.result()
    raise ClientDisconnected


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_heartbeats(items: AsyncGenerator[T, None], streams: Streams) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None after each heartbeat interval without one; raise ServerShutdown on shutdown."""
    ahead = _ReadAhead(items, streams.heartbeat_s)
    closing = asyncio.ensure_future(streams.closing().wait())
    closing.add_done_callback(ahead.wake)
    try:
        while True:
            while ahead.items:
                yield ahead.next()
            if ahead.is_over():
                return
            if closing.done():
                raise ServerShutdown
            if await ahead.wait():
                yield None
    finally:
        await _cancel(closing)
        await ahead.close()


class _ReadAhead(Generic[T]):
    """Reads items in a task of its own, a few ahead of their reader; a task and a timer for each item cost more."""

    def __init__(self, items: AsyncGenerator[T, None], idle_s: float) -> None:
        self.items: deque[T] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self._idle_s = idle_s
        self._last_s = self._loop.time()
        self._is_idle = False
        self._timer = self._loop.call_later(idle_s, self._look)
        self._reading = asyncio.ensure_future(self._read(items))
        self._reading.add_done_callback(self.wake)

    def next(self) -> T:
        """Take the next item; there is one."""
        self._last_s = self._loop.time()
        item = self.items.popleft()
        if not self._room.is_set() and len(self.items) < READ_AHEAD:
            self._room.set()
        return item

    def is_over(self) -> bool:
        """Whether all items were taken; raises the error that ended them."""
        if not self._reading.done() or self.items:
            return False
        self._reading.result()
        return True

    async def wait(self) -> bool:
        """Wait for an item, the end, or an interval without items; return whether it was such an interval."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        is_idle, self._is_idle = self._is_idle and not self.items, False
        if is_idle:
            self._last_s = self._loop.time()
        return is_idle

    def wake(self, _: object = None) -> None:
        """Let `wait` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def close(self) -> None:
        """Stop reading, and close the generator."""
        self._timer.cancel()
        await _cancel(self._reading)

    async def _read(self, items: AsyncGenerator[T, None]) -> None:
        async with aclosing(items):
            async for item in items:
                self.items.append(item)
                self.wake()
                if len(self.items) >= READ_AHEAD:
                    self._room.clear()
                    await self._room.wait()

    def _look(self) -> None:
        """Wake `wait` after an interval in which no item was taken."""
        left_s = self._last_s + self._idle_s - self._loop.time()
        if left_s <= 0:
            self._is_idle, left_s = True, self._idle_s
            self.wake()
        self._timer = self._loop.call_later(left_s, self._look)


class EventStream(Response):
    """A streaming response: sends frames until they end, the client disconnects or the server closes.

    The stream was reserved before, by `Streams.place`, so that nothing is started for a stream over the limit; the
    reservation is released here.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        streams: Streams,
        user: User,
        *,
        on_disconnect: Callable[[], Awaitable[object]] | None = None,
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
        reports_shutdown: bool = False,
        rest: Callable[[], bytes] = bytes,
        may_compress: bool = True,
    ) -> None:
        """Create the response; `on_disconnect` is called if the client disconnects before the frames end.

        With `reports_shutdown`, the frames themselves end when the server closes, such as by `with_heartbeats`.
        Without it they are stopped, and `rest` returns what they have not yielded by then. Events are compressed for
        clients that accept gzip, unless `may_compress` is false; other types are left to the middleware.
        """
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames
        self._streams = streams
        self._user = user.name
        self._on_disconnect = on_disconnect
        self._reports_shutdown = reports_shutdown
        self._rest = rest
        self._is_sending = False
        self._gzip: zlib._Compress | None = None
        self._may_compress = may_compress and media_type == "text/event-stream"
        if self._may_compress:
            self.headers["Vary"] = "Accept-Encoding"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._may_compress and accepts_gzip(scope):
            self._gzip = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW, GZIP_MEMORY)
            self.headers["Content-Encoding"] = "gzip"
        try:
            await cancel_on_disconnect(receive, self._send_all(send))
            return
        except (ClientDisconnected, OSError):  # some servers raise OSError when they send after a disconnect
            pass
        finally:
            self._streams.leave(self._user)  # before the callback, which may wait for a store
        if self._on_disconnect is not None:
            await self._on_disconnect()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._frames):
            if self._reports_shutdown:
                await self._send_frames(send)
            else:
                sending = asyncio.ensure_future(self._send_frames(send))
                closing = asyncio.ensure_future(self._streams.closing().wait())
                if sending in await first_done(sending, closing):
                    sending.result()
                # After a send that was interrupted, the client may lack events: the rest must not follow them.
                elif not self._is_sending and (rest := self._rest()):
                    await send(self._body(rest))
        last = b"" if self._gzip is None else self._gzip.flush()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_frames(self, send: Send) -> None:
        try:
            async for content in self._frames:
                self._is_sending = True
                await send(self._body(content))
                self._is_sending = False
                # If neither await suspends, yield here, so that other tasks and the disconnect watcher run.
                await asyncio.sleep(0)
        except PenstockError as error:
            # The status is already sent; report the error as an event without an id, which keeps the client's position.
            known = api_error(error)
            if known.status == 500 and known.code != UNREADABLE:
                LOG.error("a stream failed: %s", fault_location(error))
            await send(self._body(framed({"code": known.code, "message": str(known)}, event="error")))

    def _body(self, content: bytes) -> dict[str, Any]:
        if self._gzip is not None:
            # Flushed after each chunk, so that a client decodes it as soon as it arrives.
            content = self._gzip.compress(content) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        return {"type": "http.response.body", "body": content, "more_body": True}
