"""Stream a run's events to readers on an event loop.

Nothing is queued for a reader: the run's log is the buffer. A reader is a position in the log, and holds one batch of
events beyond it. So a slow reader delays nothing; once the log has dropped entries that a reader had not read, the
reader raises `MissedEvents` with their number, and can continue after the gap. There are no other gaps.

A reader that has read everything sleeps until the next entry. It goes to sleep under the graph's lock, after a check
that found nothing new, and the writer notifies under the same lock: no entry can be missed in between. The readers of
one run that sleep on one loop share one wake-up, so a writer pays per loop, not per reader: one `call_soon_threadsafe`,
and nothing at all until a reader sleeps again. A wake-up exists from the first reader that goes to sleep until it is
released; between two events nothing of a reader is registered anywhere. So an abandoned reader needs no clean-up, a
wait that is cancelled or times out loses no event, and the same reader can be used again, on another loop too.

Knows the log, and nothing of the run that writes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.runtime.observers import WakeUps, wake_ups_of
from penstock.tracing.events import TraceEvent
from penstock.tracing.execution_graph import ExecutionGraph

BATCH = 128
"""Maximum number of events built at a time; other tasks can run before each batch."""


class MissedEvents(PenstockError):
    """The log dropped `missed` events after `since` before the reader read them; continue from `resume_since`."""

    def __init__(self, run_id: str, since: int, missed: int) -> None:
        self.run_id = run_id
        self.since = since
        """The newest event before the gap."""
        self.missed = missed
        self.resume_since = since + missed
        """The newest event of the gap: continue with this as `since`, or with the same reader's next event."""
        events = "1 event is" if missed == 1 else f"{missed} events are"
        super().__init__(f"run {run_id}: {events} missing after seq {since}; continue with since={self.resume_since}")


def stream_events(context: ExecutionContext, since: int = 0) -> EventStream:
    """Stream every event of the context's run after `since`: kept events, then new ones, up to RunCompleted.

    If the log no longer has the next event, the reader raises MissedEvents and continues after the gap at the next
    call.
    """
    return EventStream(context.graph, since)


class EventStream(AsyncIterator[TraceEvent]):
    """One reader of one run. Created by `stream_events`."""

    def __init__(self, graph: ExecutionGraph, since: int = 0) -> None:
        if not _is_between(0, since, newest := graph.seq):
            raise InvalidValue("since", since, f"0, or the seq of an event of the run (the newest is {newest})")
        self.seq = since
        """Sequence number of the event delivered last: pass it as `since` to resume later."""
        self._graph = graph
        self._batch: deque[TraceEvent] = deque()
        self._size = BATCH
        self._closed = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TraceEvent:
        while not self._batch and await self._comes_more():
            # Meanwhile another task may have read the batch from this reader, or closed it.
            if not self._batch and not self._closed:
                self._batch.extend(self._read())
        if not self._batch:
            raise StopAsyncIteration
        return self._next()

    async def aclose(self) -> None:
        """Stop reading; a task that waits for an event gets the end instead. Optional when the reader is dropped."""
        self._closed = True
        self._batch.clear()
        with self._graph.lock:
            if self._graph.notify is not None:
                self._graph.notify()

    # Internals.

    def _next(self) -> TraceEvent:
        seq = self._batch[0].seq
        if seq != self.seq + 1:
            raise self._missed(seq - 1)
        self.seq = seq
        return self._batch.popleft()

    def _missed(self, until: int) -> MissedEvents:
        error = MissedEvents(self._graph.chain_id, self.seq, until - self.seq)
        self.seq = until
        return error

    def _read(self) -> Sequence[TraceEvent]:
        """Return the next batch. An event that cannot be built is isolated by smaller batches, and counts as missed."""
        while True:
            try:
                batch = self._graph.events(self.seq, limit=self._size)
            except Exception as error:
                if self._size == 1:
                    raise self._missed(max(self.seq, self._graph.dropped_events) + 1) from error
                self._size = max(1, self._size // 8)
            else:
                self._size = min(BATCH, self._size * 2)
                return batch

    async def _comes_more(self) -> bool:
        """Wait until there is something to read; return False if there never will be."""
        graph, loop = self._graph, asyncio.get_running_loop()
        woken = loop.create_future()
        with graph.lock:
            # Added to the list first: the lock is re-entrant, and a finalizer that runs in this thread may write as
            # well.
            wake_ups = wake_ups_of(graph)
            wake_up = _wake_up_on(loop, wake_ups)
            wake_up.sleepers[woken] = None
            is_over = self._closed or graph.closed
            has_work = not self._closed and graph.seq > self.seq
            if has_work or is_over:
                wake_up.let_go(woken, wake_ups)
        if has_work:
            await asyncio.sleep(0)
        elif not is_over:
            try:
                await woken
            except BaseException:
                with graph.lock:
                    wake_up.let_go(woken, wake_ups)
                raise
        return has_work or not is_over


class _LoopWakeUp:
    """Wakes all readers that sleep on one loop until the next entry of one run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sleepers: dict[asyncio.Future[Any], None] = {}

    def release(self) -> None:
        """Schedule the wake-up, from any thread; raises RuntimeError if the loop is closed."""
        self.loop.call_soon_threadsafe(self._wake)

    def let_go(self, sleeper: asyncio.Future[Any], wake_ups: WakeUps) -> None:
        """Remove a reader that woke by itself; the last one removes the wake-up. The caller holds the graph's lock."""
        self.sleepers.pop(sleeper, None)
        if not self.sleepers:
            wake_ups.remove(self)

    def _wake(self) -> None:
        for sleeper in list(self.sleepers):
            if not sleeper.done():
                sleeper.set_result(None)


def _wake_up_on(loop: asyncio.AbstractEventLoop, wake_ups: WakeUps) -> _LoopWakeUp:
    """Return the shared wake-up of the readers on `loop`. Removes those of closed loops."""
    for wake_up in list(wake_ups.sleeping):
        if isinstance(wake_up, _LoopWakeUp):
            if wake_up.loop is loop:
                return wake_up
            if wake_up.loop.is_closed():
                wake_ups.remove(wake_up)
    wake_up = _LoopWakeUp(loop)
    wake_ups.sleeping.append(wake_up)
    return wake_up


def _is_between(least: int, value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
