"""Copies the trace of a run to its events: every call with its node, limits, waits, late bills, and budgets.

The forwarder has no task: trace writers notify it, from any thread, and the event writer drains it before each write.
When the buffer is full, entries stay in the trace.
"""

from __future__ import annotations

import asyncio
from collections import deque
from threading import get_ident

from penstock.hosting.budgets import BudgetReporter
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
    to_json,
    unpriced_event,
)
from penstock.hosting.event_writer import EventWriter
from penstock.hosting.figures import RunFigures
from penstock.hosting.payloads import PayloadRecorder
from penstock.hosting.spending import SpendingTally
from penstock.ids import call_number
from penstock.runtime.observers import wake_ups_of
from penstock.stops import Stop, StopReason
from penstock.tracing.events import CallWaiting, LimitTrace, SafetyTrace
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord, Settlement

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
        """Places of the calls in progress, by number: a call finds that of its parent here."""
        self._stops_below: dict[int, Stop] = {}
        """The last stop of a child, by the number of the call in progress that made it."""
        self._stops: dict[int, tuple[Stop, str | None, CallPlace, bool]] = {}
        """Stops of ended calls whose `limit` has not been read yet: whose limit, where, and whether it arose there."""
        self._waiting: dict[int, tuple[str, float]] = {}
        """What waiting calls need, by number: the unit and the amount."""
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
        """Return the place of a call: that of its parent, or, for the call of a node, that node inside it."""
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
