"""What a run tells, on its way into the event store.

A run tells without waiting: an event gets its number at once and stands in line; what stands there is written all in
one append, while the next ones gather. Pieces of one text that stand in line one behind the other are joined, so that a
store that is slow gets fewer and longer events. What comes after a silence waits a few milliseconds for the rest of its
burst, unless somebody waits for it: an append costs much the same for one event as for ten. Whoever waits writes it
himself, if nobody does; else a task is made for it, which is gone when the line is empty. The line has a bound: `room`
makes whoever runs ahead wait.

Numbers go on from the last one in the store. An append that failed is tried again until it succeeds or another worker
has taken the run over; then nothing more is written, and whoever owns the log is told.

Readers are not known here. What was written rings a bell, and who sleeps by it reads what is still at hand, which is
never more than the store has, or asks the store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from penstock.clock import Clock
from penstock.errors import InvalidValue
from penstock.hosting.points import passing
from penstock.hosting.ports import Conflict, EventStore, Fenced
from penstock.hosting.records import HostedEvent
from penstock.hosting.work.patience import patiently
from penstock.hosting.work.told import clean
from penstock.runtime.durable.journal import is_json

PIECE = "text.delta"
MAX_LINE = 10_000
"""So many events stand in line before a run has to wait."""
BATCH = 500
MAX_JOINED = 16_000
"""A text that is joined from pieces grows no longer than this."""
GATHER_S = 0.005
"""How long what is told after a silence waits for more."""
AT_HAND = 200
"""So many events that are in the store are kept here too, for readers who follow closely."""


class Bell:
    """Wakes whoever waits for the next thing to happen, on one event loop."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        """Wake everybody who waits now."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                _wake(one)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until it is rung, or the time is over."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        timer = None if timeout_s is None else loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in self._waiting:
                self._waiting.remove(waiter)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RunLog:
    """The events of one run under one claim."""

    def __init__(
        self, store: EventStore, run_id: str, epoch: int, last_seq: int, *, clock: Clock, on_lost: Callable[[], None]
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._epoch = epoch
        self._clock = clock
        self._on_lost: Callable[[], None] | None = on_lost
        self._line: deque[HostedEvent] = deque()
        self._writing = 0
        """How many at the head of the line are being written: those are not joined any more."""
        self._is_writing = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._soon: asyncio.Handle | None = None
        """When what stands in line is written, if nobody waits for it before."""
        self._writer: asyncio.Task[None] | None = None
        self.source: Callable[[], None] | None = None
        """Tells what there is to tell; asked before anything is written."""
        self._at_hand: deque[HostedEvent] = deque(maxlen=AT_HAND)
        self.seq = last_seq
        """The newest event's."""
        self.written = last_seq
        """The newest one's that is in the store."""
        self.bell = Bell()
        """Rung when something was written, or nothing will be any more."""
        self.is_lost = False
        """Whether another worker has the run."""

    def tell(self, type: str, data: Mapping[str, Any] | None = None, *, at_ms: int | None = None) -> None:
        """Put an event in line, and see to it that it is written soon; does not wait."""
        self.put(type, data, at_ms)
        if self._soon is None:  # nearly always something was told just before
            self.rouse()

    def put(self, type: str, data: Mapping[str, Any] | None = None, at_ms: int | None = None) -> None:
        """Put an event in line; whoever does that sees to it that it is written."""
        if self.is_lost or self._is_closed:
            return
        line, data = self._line, data or {}
        if type == PIECE and len(line) > self._writing:
            joined = _joined(line[-1], data)
            if joined is not None:
                line[-1] = joined
                return
        if at_ms is None:
            at_ms = self._clock.time_ns() // 1_000_000
        self.seq = seq = self.seq + 1
        line.append(HostedEvent(seq, at_ms, type, data))

    def rouse(self) -> None:
        """See to it that what there is to tell is written soon."""
        if self._soon is None and not self._is_writing and not self._is_closed and not self.is_lost:
            self._soon = self._loop.call_later(GATHER_S, self.hurry)

    @property
    def is_full(self) -> bool:
        """Whether a run should wait before it tells more."""
        return len(self._line) >= MAX_LINE

    async def room(self) -> None:
        """Wait until the line is shorter than its bound."""
        while self.is_full and not self.is_lost:
            await self.bell.wait()

    def after(self, seq: int, most: int) -> list[HostedEvent] | None:
        """Events that are in the store after that one, at most so many; None if only the store knows them."""
        if seq >= self.written:
            return []
        first = self._at_hand[0].seq if self._at_hand else self.seq + 1
        return None if seq + 1 < first else [*islice(self._at_hand, seq + 1 - first, seq + 1 - first + most)]

    def hasten(self) -> None:
        """Have it written as soon as the caller waits for something; if that is `flush`, no task is made for it."""
        if not self._is_writing:
            self._let_go_of_timer()
            self._soon = self._loop.call_soon(self.hurry)

    def hurry(self) -> None:
        """Write what there is to tell now, whether or not more comes."""
        self._let_go_of_timer()
        if not self._is_writing and self._has_line():
            self._is_writing = True
            self._writer = self._loop.create_task(self._write(), name=f"log of {self._run_id}")

    async def flush(self) -> None:
        """Wait until everything that was told is in the store; Fenced if the run is another worker's now."""
        while self._line and not self.is_lost:
            if self._is_writing:
                await self.bell.wait()
            else:
                self._is_writing = True
                await self._write()
        if self.is_lost:
            raise Fenced(self._run_id, self._epoch)

    async def close(self) -> None:
        """Write nothing more; what still stands in line is left."""
        self._is_closed = True
        self._let_go_of_timer()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait((self._writer,))
        self._on_lost = None
        self.bell.ring()

    def lose(self) -> None:
        """The run is another worker's."""
        if not self.is_lost:
            self.is_lost = True
            self._line.clear()
            self.bell.ring()
            if self._on_lost is not None:
                self._on_lost()

    async def _write(self) -> None:
        """Write until the line is empty."""
        self._let_go_of_timer()
        try:
            while self._has_line():
                self._take_off(await self._written(list(islice(self._line, BATCH))))
            self._writer = None
        finally:
            self._is_writing = False
            self.bell.ring()  # should it have failed, whoever waits for it tries himself

    def _has_line(self) -> bool:
        if self.source is not None:
            self.source()
        return bool(self._line)

    def _let_go_of_timer(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None

    async def _written(self, batch: list[HostedEvent]) -> list[HostedEvent]:
        """The batch as it is in the store now; nothing if the run is another worker's."""
        self._writing = len(batch)
        try:
            passing("events.before_append")
            await patiently(lambda: self._store.append(self._run_id, self._epoch, batch))
            passing("events.after_append")
        except InvalidValue as error:
            if any(event.data.keys() != {"lost"} for event in batch):
                return await self._written(_keepable(batch, error))
            self.lose()
        except (Fenced, Conflict):  # somebody else writes this log: whoever it is, it is not ours any more
            self.lose()
        finally:
            self._writing = 0
        return [] if self.is_lost else batch

    def _take_off(self, batch: list[HostedEvent]) -> None:
        line = self._line
        if batch:
            self._at_hand.extend(batch)
            self.written = batch[-1].seq
        if len(batch) == len(line):  # nearly always: nothing was told meanwhile
            line.clear()
        else:
            for _ in batch:
                line.popleft()
        self.bell.ring()


def _keepable(batch: list[HostedEvent], error: InvalidValue) -> list[HostedEvent]:
    """The batch with something else in the place of what no store takes; of all of it, if that cannot be found."""
    kept = [event if is_json(dict(event.data)) else event._replace(data=_lost(error)) for event in batch]
    return kept if kept != batch else [event._replace(data=_lost(error)) for event in batch]


def _lost(error: InvalidValue) -> dict[str, str]:
    return {"lost": clean(f"what was told cannot be kept: {error}")}


def _joined(last: HostedEvent, other: Mapping[str, Any]) -> HostedEvent | None:
    """The data of a piece of a text, and the event before it, as one; None if that is no piece of the same."""
    if last.type != PIECE:
        return None
    one = last.data
    if one.get("node_id") != other.get("node_id") or one.get("source") != other.get("source"):
        return None
    text = one["text"] + other["text"]
    return HostedEvent(last.seq, last.at_ms, last.type, {**one, "text": text}) if len(text) <= MAX_JOINED else None
