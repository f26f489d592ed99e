"""A run's events for whoever reads them on an event loop.

Nothing is queued for a reader: the run's log is the buffer. A reader is a place in the log, and holds one batch of
events beyond it. So a slow one delays nobody; once the log has let go of entries that a reader had not read, it is told
how many (`MissedEvents`), and can go on behind the gap. What it gets has no other gaps.

A reader that has read everything sleeps until the next entry. It lies down under the graph's lock, after a look that
found nothing new, and the writer rings under the same lock: no entry can slip in between. The readers of one run that
sleep on one loop share one bell, so a writer pays for a loop, not for a reader: one `call_soon_threadsafe`, and nothing
at all until somebody has lain down again. A bell lives from the first who lies down until it is rung; between two
events nothing of a reader is registered anywhere. So there is nothing to undo for one that is dropped half-way, a wait
that is cancelled or times out loses no event, and the same reader may be asked again, on another loop too.

Knows the log, and nothing of the run that writes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any

from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.runtime.watching.observers import Bells, bells_of
from penstock.tracing.events import TraceEvent
from penstock.tracing.execution_graph import ExecutionGraph

BATCH = 128
"""Events made at a time; before each batch, other tasks have their turn."""


class MissedEvents(PenstockError):
    """Events that a reader had not read are gone: `missed` of them, after `since`; it can go on from `resume_since`."""

    def __init__(self, run_id: str, since: int, missed: int) -> None:
        self.run_id = run_id
        self.since = since
        """The newest event before the gap."""
        self.missed = missed
        self.resume_since = since + missed
        """The newest event of the gap: read on with this as `since`, or ask the same reader for its next event."""
        events = "1 event is" if missed == 1 else f"{missed} events are"
        super().__init__(f"run {run_id}: {events} missing after seq {since}; go on with since={self.resume_since}")


def stream_events(context: ExecutionContext, since: int = 0) -> EventStream:
    """Every event of the context's run after `since`: those that are kept, then those to come, up to RunCompleted.

    If the log no longer has the one that comes next, the reader raises MissedEvents and goes on behind the gap when it
    is asked again.
    """
    return EventStream(context.graph, since)


class EventStream(AsyncIterator[TraceEvent]):
    """One reader of one run. Made by `stream_events`."""

    def __init__(self, graph: ExecutionGraph, since: int = 0) -> None:
        if not _is_between(0, since, newest := graph.seq):
            raise InvalidValue("since", since, f"0, or the seq of an event of the run (the newest is {newest})")
        self.seq = since
        """The event that was handed over last: whoever comes back later gives it as `since`."""
        self._graph = graph
        self._batch: deque[TraceEvent] = deque()
        self._size = BATCH
        self._closed = False

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> TraceEvent:
        while not self._batch and await self._comes_more():
            # Meanwhile another task may have asked as well, and read; or closed it.
            if not self._batch and not self._closed:
                self._batch.extend(self._read())
        if not self._batch:
            raise StopAsyncIteration
        return self._next()

    async def aclose(self) -> None:
        """Read no further; who waits for an event gets the end instead. Who just stops reading need not call it."""
        self._closed = True
        self._batch.clear()
        with self._graph.lock:
            if self._graph.notify is not None:
                self._graph.notify()

    # Inside.

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
        """What comes next. An event that cannot be made is found by reading less at a time, and is one missed."""
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
        """Wait until there is something to read; False if there never will be."""
        graph, loop = self._graph, asyncio.get_running_loop()
        woken = loop.create_future()
        with graph.lock:
            # On the list first: the lock is re-entrant, and a finalizer that runs in this thread may write as well.
            bells = bells_of(graph)
            bell = _bell_on(loop, bells)
            bell.sleepers[woken] = None
            is_over = self._closed or graph.closed
            has_work = not self._closed and graph.seq > self.seq
            if has_work or is_over:
                bell.let_go(woken, bells)
        if has_work:
            await asyncio.sleep(0)
        elif not is_over:
            try:
                await woken
            except BaseException:
                with graph.lock:
                    bell.let_go(woken, bells)
                raise
        return has_work or not is_over


class _LoopBell:
    """Wakes everybody who sleeps on one loop until the next entry of one run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.sleepers: dict[asyncio.Future[Any], None] = {}

    def release(self) -> None:
        """Wake them soon, from any thread; RuntimeError if the loop is closed."""
        self.loop.call_soon_threadsafe(self._wake)

    def let_go(self, sleeper: asyncio.Future[Any], bells: Bells) -> None:
        """One got up by itself; the last takes the bell with it. The caller holds the graph's lock."""
        self.sleepers.pop(sleeper, None)
        if not self.sleepers:
            bells.take_off(self)

    def _wake(self) -> None:
        for sleeper in list(self.sleepers):
            if not sleeper.done():
                sleeper.set_result(None)


def _bell_on(loop: asyncio.AbstractEventLoop, bells: Bells) -> _LoopBell:
    """The bell of those who sleep on `loop`. What a loop that was closed has left is cleared away."""
    for bell in list(bells.sleeping):
        if isinstance(bell, _LoopBell):
            if bell.loop is loop:
                return bell
            if bell.loop.is_closed():
                bells.take_off(bell)
    made = _LoopBell(loop)
    bells.sleeping.append(made)
    return made


def _is_between(least: int, value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
