"""Takes what a run's own log says into the log that is kept.

No task: whoever writes into the run's log rings, from any thread, and the loop of the host reads what is new. Entries
that find no room wait where they are, in the run's log.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable

from penstock.hosting.work.log import RunLog
from penstock.hosting.work.told import Told
from penstock.runtime.watching.observers import bells_of
from penstock.tracing.events import TraceEvent
from penstock.tracing.execution_graph import ExecutionGraph

BATCH = 256
LOOK_AGAIN_S = 0.05


class TraceTap:
    """Reads one run's trace for one log; a bell that the writers of the trace ring."""

    def __init__(self, graph: ExecutionGraph, log: RunLog, told: Callable[[TraceEvent], Told | None]) -> None:
        self._graph = graph
        self._log = log
        self._told = told
        self._loop = asyncio.get_running_loop()
        self._read: deque[TraceEvent] = deque()
        """What was read and is not told yet: one batch at most."""
        self._seq = 0
        """The newest that was read."""
        self._later: asyncio.TimerHandle | None = None
        self._is_closed = False

    def open(self) -> None:
        """Begin to listen."""
        self._on_ring()

    def pump(self, until_ms: float = math.inf) -> None:
        """Tell what the trace has that was not told yet, as far as there is room; up to that time, if one is given."""
        while not self._log.is_full and self._has_more() and self._read[0].at_ms <= until_ms:
            self._tell(self._read.popleft())

    def close(self) -> None:
        """Tell the rest, whatever the room, and listen no more."""
        self._is_closed = True
        if self._later is not None:
            self._later.cancel()
        with self._graph.lock:
            bells_of(self._graph).take_off(self)
        while not self._log.is_lost and self._has_more():
            self._tell(self._read.popleft())

    def release(self) -> None:
        """Something was written; called under the lock of the trace, by any thread."""
        self._loop.call_soon_threadsafe(self._soon)

    def _has_more(self) -> bool:
        if not self._read and self._seq < self._graph.seq:
            self._read.extend(self._graph.events(self._seq, BATCH))
            if self._read:
                self._seq = self._read[-1].seq
        return bool(self._read)

    def _tell(self, event: TraceEvent) -> None:
        told = self._told(event)
        if told is not None:
            self._log.tell(*told)

    def _soon(self) -> None:
        self._loop.call_soon(self._on_ring)  # after those whom the same step has told of its nodes

    def _on_ring(self) -> None:
        if self._is_closed:
            return
        self.pump()
        with self._graph.lock:
            if not self._read and self._seq >= self._graph.seq:
                bells_of(self._graph).sleeping.append(self)
                return
        self._later = self._loop.call_later(LOOK_AGAIN_S, self._on_ring)
