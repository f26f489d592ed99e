"""The event pipeline of a run: its trace becomes events, which are buffered and written to the event store.

The `TraceForwarder` copies the trace to the events: every call with its node, limits, waits, late bills, and budgets.
It has no task: trace writers notify it, from any thread, and the event writer drains it before each write. When the
buffer is full, entries stay in the trace.

The `EventWriter` knows nothing of calls. A run emits events without waiting: an event gets its sequence number
immediately and is buffered. Buffered events are written in batches, together with those of the other runs of the host
where possible (`event_batches`), while the next ones accumulate.
Consecutive pieces of one text in the buffer are joined, so that a slow store gets fewer and longer events. The first
event after a pause is delayed by a few milliseconds to batch it with the rest of its burst, unless a caller waits for
it: an append costs about the same for one event as for ten. A caller that waits writes the buffer itself if no write is
in progress; otherwise a task is created, which ends when the buffer is empty. The buffer is bounded: `room` makes a run
that is ahead of the store wait.

Sequence numbers continue from the last one in the store. A failed append is retried until it succeeds or another worker
has taken over the run; then nothing more is written, and the `on_fenced` callback is called.

The writer does not know its readers. Each write wakes the waiting readers, which read recent events from memory (never
more than the store has) or from the store.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from threading import get_ident
from typing import Any, TypeVar

from penstock.clock import Clock
from penstock.errors import InvalidValue
from penstock.hosting.budgets import BudgetReporter
from penstock.hosting.event_batches import GATHER_S, MAX_INLINE_EVENTS, EventBatches, Transact, Unit
from penstock.hosting.event_data import (
    NODE_TYPE,
    NOWHERE,
    CallPlace,
    EventPayload,
    Whose,
    call_ended,
    call_settled,
    call_started,
    call_waiting,
    limit_event,
    sanitize,
    to_json,
    unpriced_event,
)
from penstock.hosting.figures import RunFigures, SpendingTally
from penstock.hosting.payloads import PayloadRecorder
from penstock.hosting.ports import Conflict, Fenced, HostedEvent, TransactionStores, retry_unavailable
from penstock.ids import call_number
from penstock.notify import Notifier
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.journal import is_json
from penstock.runtime.observers import wake_ups_of
from penstock.stops import Stop, StopReason
from penstock.tracing.events import CallWaiting, LimitTrace, SafetyTrace
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord, Settlement

T = TypeVar("T")
StoreEvents = Callable[[str, int, Sequence[HostedEvent]], Awaitable[None]]
"""Stores the next events, given a run id and an epoch; see `EventStore.append`."""

PIECE = "text.delta"
MAX_BUFFERED = 10_000
"""Number of buffered events at which a run has to wait."""
BATCH = 500
MAX_JOINED = 16_000
"""Maximum length of a text joined from pieces."""
MAX_RECENT = 200
"""Number of stored events that are also kept in memory, for readers that follow closely."""


class _NotStorable(Exception):
    """One of the events cannot be stored in any store."""

    def __init__(self, error: InvalidValue) -> None:
        self.error = error
        super().__init__(str(error))


async def _refuse(run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
    """Store nothing, for a writer that is closed."""
    raise Fenced(run_id, epoch)


class EventWriter:
    """Writes the events of one run under one claim."""

    def __init__(
        self,
        store: StoreEvents,
        run_id: str,
        epoch: int,
        last_seq: int,
        *,
        clock: Clock,
        on_fenced: Callable[[], None],
        batches: EventBatches | None = None,
        has_more: Callable[[], bool] | None = None,
    ) -> None:
        """With `batches`, events are written with those of other runs, except while `has_more()` is True because the
        run has other data to store with them.
        """
        self._store = store
        self._batches = batches
        self._has_more = has_more
        self.run_id = run_id
        self.epoch = epoch
        self._clock = clock
        self._on_fenced: Callable[[], None] | None = on_fenced
        self._buffer: deque[HostedEvent] = deque()
        self._writing = 0
        """Number of events at the head of the buffer that are being written; these are no longer joined."""
        self._is_writing = False
        self._is_in_batch = False
        """Whether its events are being written with those of other runs."""
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | _InBatches | None = None
        """Timer that starts the next write, unless a caller that waits starts it earlier."""
        self._writer: asyncio.Task[None] | None = None
        self.source: Callable[[], None] | None = None
        """Called before each write to append pending events (the trace forwarder)."""
        self._recent: deque[HostedEvent] = deque(maxlen=MAX_RECENT)
        self.seq = last_seq
        """Sequence number of the newest event."""
        self.written = last_seq
        """Sequence number of the newest stored event."""
        self._notifier = Notifier()
        """Wakes waiters after each write, and when nothing more will be written."""
        self.is_fenced = False
        """Whether another worker has claimed the run."""
        self.is_ended = False
        """Whether the end of this claim is stored, with the status of the run."""

    def emit(self, type: str, data: Mapping[str, Any] | None = None, *, at_ms: int | None = None) -> None:
        """Append an event to the buffer and schedule a write; does not wait."""
        self.append(type, data, at_ms)
        if self._timer is None:  # a write is nearly always scheduled already
            self.schedule()

    def append(self, type: str, data: Mapping[str, Any] | None = None, at_ms: int | None = None) -> None:
        """Append an event to the buffer; the caller has to schedule the write."""
        if self.is_fenced or self._is_closed:
            return
        buffer, data = self._buffer, data or {}
        if type == PIECE and len(buffer) > self._writing:
            joined = _joined(buffer[-1], data)
            if joined is not None:
                buffer[-1] = joined
                return
        buffer.append(event := self._event(type, data, at_ms))
        self.seq = event.seq

    def schedule(self) -> None:
        """Schedule a write after `GATHER_S`, unless one is scheduled or in progress."""
        if self._timer is None and not self._is_writing and not self._is_closed and not self.is_fenced:
            if self._batches is None:
                self._timer = self._loop.call_later(GATHER_S, self.start)
            else:
                self._timer = _InBatches(self._batches, self)

    @property
    def is_full(self) -> bool:
        """Whether a run should wait before it emits more events."""
        return len(self._buffer) >= MAX_BUFFERED

    async def room(self) -> None:
        """Wait until the buffer is below its bound, or the run is lost."""
        while self.is_full and not self.is_fenced:
            await self.changed()

    async def changed(self, timeout_s: float | None = None) -> None:
        """Wait for the next write, or until nothing more will be written, or for `timeout_s`."""
        # Callers check a condition first and await nothing in between: no notification can be missed.
        await self._notifier.wait(self.run_id, self._notifier.version, timeout_s)

    def after(self, seq: int, most: int) -> list[HostedEvent] | None:
        """Return at most `most` stored events after `seq` from memory; None if they are only in the store."""
        if seq >= self.written:
            return []
        first = self._recent[0].seq if self._recent else self.seq + 1
        return None if seq + 1 < first else [*islice(self._recent, seq + 1 - first, seq + 1 - first + most)]

    def start(self) -> None:
        """Start a write now, without waiting for more events."""
        self._cancel_timer()
        if not self._is_writing and self._has_events():
            self._is_writing = True
            self._writer = self._loop.create_task(self._write(), name=f"log of {self.run_id}")

    # Events that are written with those of other runs.

    def begin_batch(self) -> list[HostedEvent]:
        """Return the events to be written now; empty if there are none, or if this writer writes them itself."""
        self._timer = None
        if self._is_writing or self._is_closed or self.is_fenced or not self._has_events():
            return []
        if self._has_more is not None and self._has_more():
            self.start()
            return []
        self._is_writing = self._is_in_batch = True
        batch = list(islice(self._buffer, BATCH))
        self._writing = len(batch)
        return batch

    def end_batch(self, batch: list[HostedEvent]) -> None:
        """Continue after the events of `begin_batch` were stored."""
        self._writing = 0
        self._is_writing = self._is_in_batch = False
        self._remove(batch)
        if self._has_events():
            self.schedule()

    def write_alone(self) -> None:
        """Write the events of `begin_batch`, which were not stored, without those of other runs."""
        self._writing = 0
        self._is_in_batch = False
        if self._is_closed:
            self._is_writing = False
            self._notifier.notify(self.run_id)
        else:
            self._writer = self._loop.create_task(self._write(), name=f"log of {self.run_id}")

    async def flush(self) -> None:
        """Wait until all emitted events are stored; Fenced if another worker has claimed the run."""
        while self._buffer and not self.is_fenced:
            if self._is_writing:
                await self.changed()
            else:
                self._is_writing = True
                await self._write()
        if self.is_fenced:
            raise Fenced(self.run_id, self.epoch)

    async def end(
        self, type: str, data: Mapping[str, Any], transaction: Transact, finish: Unit[T], *, inline: bool
    ) -> T:
        """Write all emitted events and a last one, and run `finish(stores)`, in one transaction; return its result.

        The last event is never in the buffer, where a write in progress would store it before the transaction does.
        Raises Fenced, and commits nothing of the transaction, if another worker has claimed the run.
        """
        while self._is_writing and not self.is_fenced:
            await self.changed()
        self._has_events()
        while len(self._buffer) > BATCH and not self.is_fenced:  # bound the transaction like an append
            self._is_writing = True
            await self._write(until=BATCH)
        if self.is_fenced:
            raise Fenced(self.run_id, self.epoch)
        self._is_writing = True
        self._cancel_timer()
        try:
            return await self._end_with(self._event(type, data), transaction, finish, inline=inline)
        except (Fenced, Conflict):
            self.fence()
            raise Fenced(self.run_id, self.epoch) from None
        finally:
            self._is_writing = False
            self._notifier.notify(self.run_id)

    def _event(self, type: str, data: Mapping[str, Any], at_ms: int | None = None) -> HostedEvent:
        """Return the event that follows the newest one."""
        return HostedEvent(self.seq + 1, self._clock.time_ns() // 1_000_000 if at_ms is None else at_ms, type, data)

    async def _end_with(self, last: HostedEvent, transaction: Transact, finish: Unit[T], *, inline: bool) -> T:
        batch = [*self._buffer, last]
        self._writing = len(self._buffer)
        try:
            while True:
                try:
                    if failpoints.hook is not None:
                        failpoints.hook("events.before_append")
                    result = await self._written_with(batch, transaction, finish, inline=inline)
                    break
                except _NotStorable as refused:
                    batch = _storable(batch, refused.error)
        finally:
            self._writing = 0
        if failpoints.hook is not None:
            failpoints.hook("events.after_append")
        self.is_ended = True
        self.seq = last.seq
        self._buffer.append(last)
        self._remove(batch)
        return result

    async def _written_with(
        self, batch: list[HostedEvent], transaction: Transact, finish: Unit[T], *, inline: bool
    ) -> T:
        async def unit(stores: TransactionStores) -> T:
            try:
                await stores.events.append(self.run_id, self.epoch, batch)
            except InvalidValue as error:
                raise _NotStorable(error) from error
            return await finish(stores)

        is_inline = inline and len(batch) <= MAX_INLINE_EVENTS
        return await retry_unavailable(lambda: transaction(unit, inline=is_inline))

    async def close(self) -> None:
        """Stop writing; events still in the buffer are discarded."""
        self._is_closed = True
        self._cancel_timer()
        while self._is_in_batch:  # other runs share the transaction
            await self.changed()
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.wait((self._writer,))
        # These refer back to the run that owns this writer. Without them, the memory of the run is freed immediately,
        # and not only by the next garbage collection, which is rare in a server.
        self._store, self._on_fenced, self._has_more = _refuse, None, None
        self._notifier.notify(self.run_id)

    def fence(self) -> None:
        """Discard the buffer and write nothing more, because another worker has claimed the run."""
        if not self.is_fenced:
            self.is_fenced = True
            self._buffer.clear()
            self._notifier.notify(self.run_id)
            if self._on_fenced is not None:
                self._on_fenced()

    async def _write(self, until: int = 0) -> None:
        """Write until at most `until` events are left in the buffer."""
        self._cancel_timer()
        try:
            while self._has_events() and len(self._buffer) > until:
                self._remove(await self._written(list(islice(self._buffer, BATCH))))
            self._writer = None
        finally:
            self._is_writing = False
            self._notifier.notify(self.run_id)  # if the write failed, a waiting caller tries it itself

    def _has_events(self) -> bool:
        if self.source is not None:
            self.source()
        return bool(self._buffer)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _written(self, batch: list[HostedEvent]) -> list[HostedEvent]:
        """Store the batch and return it as stored; empty if another worker has claimed the run."""
        self._writing = len(batch)
        try:
            if failpoints.hook is not None:
                failpoints.hook("events.before_append")
            await retry_unavailable(lambda: self._store(self.run_id, self.epoch, batch))
            if failpoints.hook is not None:
                failpoints.hook("events.after_append")
        except InvalidValue as error:
            if any(event.data.keys() != {"lost"} for event in batch):
                return await self._written(_storable(batch, error))
            self.fence()
        except (Fenced, Conflict):  # another writer has appended to this log: the run is lost
            self.fence()
        finally:
            self._writing = 0
        return [] if self.is_fenced else batch

    def _remove(self, batch: list[HostedEvent]) -> None:
        buffer = self._buffer
        if batch:
            self._recent.extend(batch)
            self.written = batch[-1].seq
        if len(batch) == len(buffer):  # nearly always: no event was added meanwhile
            buffer.clear()
        else:
            for _ in batch:
                buffer.popleft()
        self._notifier.notify(self.run_id)


class _InBatches:
    """The entry of a writer in `EventBatches`, which can be cancelled like a timer."""

    __slots__ = ("_batches", "_log")

    def __init__(self, batches: EventBatches, log: EventWriter) -> None:
        self._batches = batches
        self._log = log
        batches.schedule(log)

    def cancel(self) -> None:
        self._batches.cancel(self._log)


def _storable(batch: list[HostedEvent], error: InvalidValue) -> list[HostedEvent]:
    """Replace the data of events that cannot be stored by an error; of all events, if those cannot be identified."""
    kept = [event if is_json(dict(event.data)) else event._replace(data=_lost(error)) for event in batch]
    return kept if kept != batch else [event._replace(data=_lost(error)) for event in batch]


def _lost(error: InvalidValue) -> dict[str, str]:
    return {"lost": sanitize(f"the event cannot be stored: {error}")}


def _joined(last: HostedEvent, other: Mapping[str, Any]) -> HostedEvent | None:
    """Join the data of a text piece to the event before it; None if that event is from another text, or too long."""
    if last.type != PIECE:
        return None
    one = last.data
    if one.get("node_id") != other.get("node_id") or one.get("source") != other.get("source"):
        return None
    text = one["text"] + other["text"]
    return HostedEvent(last.seq, last.at_ms, last.type, {**one, "text": text}) if len(text) <= MAX_JOINED else None


TRACE_BATCH = 256


class TraceForwarder:
    """Copies the trace of one run to one event writer; trace writers notify it by calling `release`."""

    def __init__(
        self,
        graph: ExecutionGraph,
        log: EventWriter,
        clock_offset_ms: int = 0,
        *,
        whose: Whose = lambda stop: None,
        budgets: BudgetReporter | None = None,
        payloads: PayloadRecorder | None = None,
        spending: SpendingTally | None = None,
        figures: RunFigures | None = None,
    ) -> None:
        self._graph = graph
        self._log = log
        self._whose = whose
        self._budgets = budgets
        self._payloads = payloads
        self._spending = spending
        self._figures = figures
        self._places: dict[int, CallPlace] = {}
        """Places of the calls in progress, by number; the place of a child is derived from that of its parent."""
        self._stops_below: dict[int, Stop] = {}
        """The last stop of a child, by the number of the call in progress that made it."""
        self._stops: dict[int, tuple[Stop, str | None, CallPlace, bool]] = {}
        """Stops of ended calls whose `limit` has not been read yet, by number: the stop, the owner of the limit, the
        place of the call, and whether the stop arose in it."""
        self._waiting: dict[int, tuple[str, float]] = {}
        """Unit and amount that each waiting call needs, by number."""
        self._clock_offset_ms = clock_offset_ms
        """Event-log clock minus trace clock."""
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._pending: deque[tuple[EventPayload, int]] = deque()
        """Converted entries not yet appended, at most one batch, each with its time in milliseconds."""
        self._next = 1
        """The seq of the next trace entry to read."""
        self._is_subscribed = False

    def open(self) -> None:
        """Start forwarding."""
        self._log.source = self._on_writing
        self._on_writing()
        self._log.schedule()

    def drain(self) -> None:
        """Forward new trace entries until the event buffer is full."""
        pending, log = self._pending, self._log
        if self._is_subscribed and not pending:
            return  # nothing new: a trace writer would have cleared the flag
        count = TRACE_BATCH
        while pending or count == TRACE_BATCH:  # a batch that is not full was the last one
            if not pending:
                count = self._read_on()
            elif log.is_full:
                return
            else:
                self._append(*pending.popleft())

    def close(self) -> None:
        """Forward the remaining entries, even if the buffer is full, and stop."""
        self._log.source = None
        with self._graph.lock:
            wake_ups_of(self._graph).remove(self)
        while not self._log.is_fenced and (self._pending or self._read_on()):
            if self._pending:
                self._append(*self._pending.popleft())
        self.report_budgets()
        if self._budgets is not None:
            self._budgets.close()
        self._log.schedule()

    def release(self) -> None:
        """Schedule a drain after a trace write; called under the lock of the trace, from any thread."""
        self._is_subscribed = False
        if get_ident() == self._thread:
            self._log.schedule()
        else:
            self._loop.call_soon_threadsafe(self._log.schedule)

    def _on_writing(self) -> None:
        """Forward new entries and subscribe to the next one; called by the event writer before each write."""
        self._subscribe()
        self.report_budgets(at_once=False)

    def _subscribe(self) -> None:
        self.drain()
        while not self._is_subscribed and not self._pending:
            with self._graph.lock:
                if self._next > self._graph.seq:
                    wake_ups_of(self._graph).sleeping.append(self)
                    self._is_subscribed = True
                    return
            self.drain()  # another thread has written meanwhile, before the subscription
        if self._pending:  # the buffer was full
            self._log.schedule()

    def _read_on(self) -> int:
        """Read and convert the next batch; return the number of trace entries read."""
        graph = self._graph
        with graph.lock:
            at = max(self._next - graph._first_seq, 0)
            first = graph._first_seq + at
            entries = graph._log[at : at + TRACE_BATCH]
        count = len(entries)
        self._next = first + count
        for seq, entry in enumerate(entries, first):
            if type(entry) is CallRecord:
                self._take(entry, seq)
            elif isinstance(entry, LimitTrace):
                self._pending.append((self._limit(entry), entry.at_ms))
            elif isinstance(entry, CallWaiting):
                self._pending.append((self._wait(entry), entry.at_ms))
            elif isinstance(entry, Settlement):
                at_ns, place = entry.at_ns + graph.wall_offset_ns, self._place_of(entry.call)
                if self._spending is not None:
                    self._spending.take_late(place.node_id, entry)
                if self._figures is not None:
                    self._figures.take_late(entry)
                self._pending.append((call_settled(place, entry), at_ns // 1_000_000))
            elif isinstance(entry, SafetyTrace) and (payload := unpriced_event(entry)) is not None:
                self._pending.append((payload, entry.at_ms))
        return count

    def _take(self, call: CallRecord, seq: int) -> None:
        is_over = call.end_seq == seq
        payload = self._end(call) if is_over else self._start(call)
        at_ns = (call.ended_ns if is_over else call.started_ns) + self._graph.wall_offset_ns
        self._pending.append((payload, at_ns // 1_000_000))

    def _start(self, call: CallRecord) -> EventPayload:
        place = self._places[call.number] = self._place_of(call)
        self._waiting.pop(call.number, None)
        return call_started(place, call)

    def _end(self, call: CallRecord) -> EventPayload:
        number, stop = call.number, call.stop
        place = self._places.pop(number, None) or self._place_of(call)
        self._waiting.pop(number, None)
        below = self._stops_below.pop(number, None)
        if self._spending is not None and not place.replayed:
            self._spending.take(place.node_id, call)
        if self._figures is not None and call.kind == "llm" and not place.replayed:
            self._figures.take_call(call)
        if self._payloads is not None and call.payload is not None:
            self._payloads.take(self._graph, call)
        if stop is None:
            return call_ended(place, call, None, cause=False)
        whose, is_cause = self._whose(stop), below != stop
        if call.parent_number:
            self._stops_below[call.parent_number] = stop
        if stop.reason is not StopReason.ABORTED:  # an abort has one `limit`, however many calls it stops
            self._stops[number] = stop, whose, place, is_cause
        return call_ended(place, call, whose, cause=is_cause)

    def _limit(self, event: LimitTrace) -> EventPayload:
        if self._budgets is not None:
            self._budgets.is_urgent = True
        number = 0 if event.node_id is None else call_number(event.node_id)
        known = self._stops.pop(number, None)
        if known is None or str(known[0].reason) != event.stop_reason:
            place = self._places.get(number, NOWHERE)
            return limit_event(event, node_id=place.node_id, cause=True)
        stop, whose, place, is_cause = known
        return limit_event(event, node_id=place.node_id, stop=stop, whose=whose, cause=is_cause)

    def _wait(self, event: CallWaiting) -> EventPayload:
        if self._budgets is not None:
            self._budgets.is_urgent = True
        if event.unit is not None and event.asked is not None:
            self._waiting[call_number(event.node_id)] = event.unit, event.asked
        above = 0 if event.parent_id is None else call_number(event.parent_id)
        place = self._places.get(above, NOWHERE)._replace(replayed=False)
        return call_waiting(place, event, self._whose)

    def _place_of(self, call: CallRecord) -> CallPlace:
        """Return the place of a call: that of its parent, extended by the node if the call executes one."""
        names: list[str] = []
        replayed = bool(call.metadata and call.metadata.get("replayed"))
        at: CallRecord | None = call
        while at is not None:
            if at is not call and (known := self._places.get(at.number)) is not None:
                if known.node_id is not None:
                    names.append(known.node_id)
                break
            if at.kind == "system" and at.metadata and NODE_TYPE in at.metadata:
                names.append(to_json(at.name))
            at = at.parent
        return CallPlace("/".join(reversed(names)) or None, replayed)

    def report_budgets(self, *, at_once: bool = True) -> None:
        """Append the budgets that have changed; with `at_once` also those reported a moment ago."""
        if self._budgets is None:
            return
        waiting: dict[str, float] = {}
        for unit, amount in self._waiting.values():
            waiting[unit] = waiting.get(unit, 0) + amount
        for payload in self._budgets.events(self._node_of, waiting, at_once=at_once):
            self._log.append(*payload)

    def _node_of(self, number: int) -> str | None:
        return self._places.get(number, NOWHERE).node_id

    def _append(self, payload: EventPayload, at_ms: int) -> None:
        self._log.append(*payload, at_ms + self._clock_offset_ms)
