"""A run's events as a stream that can be taken up again anywhere.

A reader is a place in the log and nothing else: no queue stands between a run and who watches it. A page is read when
the last one has gone out, so a client that does not read costs one small page and its socket's buffer, delays nobody,
and is told everything if it comes back. What a model wrote is data: framing is ours alone.

A server's `send` returns quietly when nobody is there any more, so a stream that only sent would never notice. Each
watches `receive` beside it, and ends as soon as its client leaves, the run is over, or the server closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from starlette.responses import Response

from penstock.errors import PenstockError
from penstock.hosting.ports import EventStore, RunStore
from penstock.hosting.records import ENDED, HostedEvent, RunRecord
from penstock.server.auth import User
from penstock.server.errors import ApiError, api_error
from penstock.server.guards.asgi import Receive, Scope, Send
from penstock.server.guards.envelope import fault
from penstock.server.metrics import Metrics
from penstock.server.outages import public
from penstock.server.settings import ServerSettings

LOG = logging.getLogger("penstock.server")

PAGE = 64
CHUNK_BYTES = 32 * 1024
"""So much is made ready at once; an event that is larger goes alone."""
RETRY_MS = 2_000
FIRST_PAUSE_S = 0.01
HEARTBEAT = b":\n\n"
ENDS = frozenset({"run.completed", "run.failed", "run.halted", "run.cancelled", "run.parked"})
"""What a run says last, for as long as nobody resumes it."""

_TYPE = re.compile(r"[a-z0-9_.-]{1,100}")


class LogStores(Protocol):
    """Where runs and their events are."""

    @property
    def runs(self) -> RunStore: ...

    @property
    def events(self) -> EventStore: ...


def event_json(event: HostedEvent) -> dict[str, Any]:
    """One event, as streams and pages show it."""
    return {"seq": event.seq, "at_ms": event.at_ms, "type": event.type, "data": dict(public(event).data)}


def frame(event: HostedEvent) -> bytes:
    """One event on the wire: its seq is the id, and its data one line of JSON."""
    return framed(event_json(event), event=event.type, id=str(event.seq))


def framed(data: Any, *, event: str | None = None, id: str | None = None) -> bytes:
    """Anything as one event: JSON escapes line ends and NUL, so that nothing inside can end it early."""
    name = f"event: {event}\n" if event is not None and _TYPE.fullmatch(event) else ""
    number = f"id: {id}\n" if id is not None else ""
    return f"{number}{name}data: ".encode() + _json(data) + b"\n\n"


def _json(data: Any) -> bytes:
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can carry
        return json.dumps(data, separators=(",", ":")).encode("ascii")


async def follow(stores: LogStores, run_id: str, after: int, heartbeat_s: float) -> AsyncGenerator[bytes, None]:
    """The run's events after that one, in frames, until it has ended or is parked; a heartbeat where there is none."""
    yield f"retry: {RETRY_MS}\n\n".encode()
    place, pause_s = after, FIRST_PAUSE_S
    while True:
        # The page itself is let go before anything waits for the client: it keeps a chunk, not what it was cut from.
        chunk, place = _chunk(await stores.events.read(run_id, place, PAGE), place)
        if chunk:
            pause_s = FIRST_PAUSE_S
            yield chunk
            continue
        standing = await _standing(stores, run_id, place)
        if standing == "over" or (standing == "overdue" and pause_s >= heartbeat_s):
            return
        pause_s = heartbeat_s if standing == "going" else min(pause_s * 2, heartbeat_s)
        if not await stores.events.wait(run_id, place, pause_s) and pause_s == heartbeat_s:
            yield HEARTBEAT


async def is_over(stores: LogStores, run: RunRecord, place: int) -> bool:
    """Whether a run has ended with that event; nothing comes behind it, unless somebody lets the run go on."""
    return run.status in ENDED and await _standing(stores, run.id, place) == "over"


def _chunk(page: Sequence[HostedEvent], place: int) -> tuple[bytes, int]:
    """As many events as go out at once, and the place behind them; the rest is read again."""
    chunk = bytearray()
    for event in page:
        one = frame(event)
        if chunk and len(chunk) + len(one) > CHUNK_BYTES:
            break
        chunk += one
        place = event.seq
    return bytes(chunk), place


async def _standing(stores: LogStores, run_id: str, place: int) -> Literal["going", "ending", "overdue", "over"]:
    """Whether more is to come. A run's last word and its status are written one after the other: both are waited for.

    A status whose word does not come is overdue; then there is none.
    """
    run = await stores.runs.get(run_id)
    newest = await stores.events.last_seq(run_id)
    if run is None:
        return "over"
    if newest > place:
        return "going"
    told = await stores.events.read(run_id, max(newest - 1, 0), 1)
    is_resting = run.status in ENDED or run.status == "parked"
    has_said_so = bool(told) and told[-1].type in ENDS
    if is_resting:
        return "over" if has_said_so else "overdue"
    return "ending" if has_said_so else "going"


class Streams:
    """The streams that are open: how many, whose, and how they are all ended."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self.heartbeat_s = settings.heartbeat_s
        self._most = settings.max_streams
        self._most_per_user = settings.max_streams_per_user
        self._metrics = metrics
        self._open: Counter[str] = Counter()
        self._closing: asyncio.Event | None = None
        self._is_closed = False

    def enter(self, user: str) -> None:
        """Count one more; ApiError if there are too many."""
        if self._is_closed:
            raise ApiError(503, "the server is closing; ask again", retry_after_s=2)
        if self._open.total() >= self._most or self._open[user] >= self._most_per_user:
            message = f"there may be {self._most_per_user} open streams for each user, and {self._most} in all"
            raise ApiError(429, message, retry_after_s=5)
        self._open[user] += 1
        self._metrics.open_streams += 1

    def leave(self, user: str) -> None:
        """One less."""
        self._open[user] -= 1
        if not self._open[user]:
            del self._open[user]
        self._metrics.open_streams -= 1

    @contextmanager
    def place(self, user: str) -> Iterator[None]:
        """Take the place of a stream before anything is begun for it; if none is made in here, it is given back."""
        self.enter(user)
        try:
            yield
        except BaseException:
            self.leave(user)
            raise
        self._metrics.streams += 1

    def closing(self) -> asyncio.Event:
        """Set when all streams are to end."""
        if self._closing is None:
            self._closing = asyncio.Event()
            if self._is_closed:
                self._closing.set()
        return self._closing

    def close(self) -> None:
        """End all streams; their clients come back when the server does."""
        self._is_closed = True
        self.closing().set()


class EventStream(Response):
    """An answer that goes on: frames, for as long as somebody reads them.

    Its place among the open streams was taken before, by `Streams.place`, so that nothing is started for a stream that
    cannot be; it is given back here.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        streams: Streams,
        user: User,
        *,
        on_left: Callable[[], Awaitable[object]] | None = None,
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        """`on_left` is called if the client leaves before the frames have come to their end."""
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._frames = frames
        self._streams = streams
        self._user = user.name
        self._on_left = on_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            has_left = await self._run(receive, send)
        finally:
            self._streams.leave(self._user)
            await self._frames.aclose()
        if has_left and self._on_left is not None:
            await self._on_left()

    async def _run(self, receive: Receive, send: Send) -> bool:
        """Send until one of three is over; whether it was the client that left."""
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_left(receive))
        closing = asyncio.ensure_future(self._streams.closing().wait())
        tasks = {sending, leaving, closing}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not sending.cancelled():
            sending.result()
            return False
        if closing.done() and not closing.cancelled():
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return False
        return True

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for one in self._frames:
                await send(_body(one))
                # Where nothing has to be waited for, the others, and the look for a client that left, get their turn.
                await asyncio.sleep(0)
        except PenstockError as error:
            # The status is out; what went wrong is told as an event without an id, so that the place stays.
            said = api_error(error)
            if said.status == 500:
                LOG.error("a stream failed: %s", fault(error))
            await send(_body(framed({"code": said.code, "message": str(said)}, event="error")))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _body(content: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": True}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
