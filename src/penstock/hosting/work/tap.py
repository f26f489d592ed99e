"""Takes what a run's own log says into the log that is kept.

No task: whoever writes into the run's log rings, from any thread, and the log that is kept asks for what is new before
it writes. Entries that find no room wait where they are, in the run's log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from threading import get_ident

from penstock.hosting.work.log import RunLog
from penstock.hosting.work.told import Told, of_begun, of_ended, of_limit
from penstock.runtime.watching.observers import bells_of
from penstock.tracing.events import LimitTrace
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import CallRecord

BATCH = 256


class TraceTap:
    """Reads one run's trace for one log; a bell that the writers of the trace ring."""

    def __init__(self, graph: ExecutionGraph, log: RunLog, later_ms: int = 0) -> None:
        self._graph = graph
        self._log = log
        self._replayed: set[int] = set()
        """Calls that have begun here and were found in the journal."""
        self._later_ms = later_ms
        """By how much the clock of the log is ahead of that of the trace."""
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._read: deque[tuple[Told, int]] = deque()
        """What was read and is not told yet, and when it happened: one batch at most."""
        self._next = 1
        """The seq of the entry that is read next."""
        self._is_listening = False

    def open(self) -> None:
        """Begin to listen."""
        self._log.source = self._on_writing
        self._on_writing()
        self._log.rouse()

    def pump(self) -> None:
        """Put into the log what the trace has by now that is not there yet, as far as there is room."""
        read, log = self._read, self._log
        if self._is_listening and not read:
            return  # the next entry rings, and none has
        count = BATCH
        while read or count == BATCH:  # a batch that was not full had all that there was
            if not read:
                count = self._read_on()
            elif log.is_full:
                return
            else:
                self._tell(*read.popleft())

    def close(self) -> None:
        """Tell the rest, whatever the room, and listen no more."""
        self._log.source = None
        with self._graph.lock:
            bells_of(self._graph).take_off(self)
        while not self._log.is_lost and (self._read or self._read_on()):
            if self._read:
                self._tell(*self._read.popleft())
        self._log.rouse()

    def release(self) -> None:
        """Something was written; called under the lock of the trace, by any thread."""
        self._is_listening = False
        if get_ident() == self._thread:
            self._log.rouse()
        else:
            self._loop.call_soon_threadsafe(self._log.rouse)

    def _on_writing(self) -> None:
        """Tell what is new, and be rung for by the next entry; once rung, it is asked for before the next writing."""
        self.pump()
        while not self._is_listening and not self._read:
            with self._graph.lock:
                if self._next > self._graph.seq:
                    bells_of(self._graph).sleeping.append(self)
                    self._is_listening = True
                    return
            self.pump()  # another thread has written meanwhile, and has rung for nobody
        if self._read:  # there was no room for it
            self._log.rouse()

    def _read_on(self) -> int:
        """Read one more batch, and keep what is told of it; how many entries it had."""
        graph = self._graph
        with graph.lock:
            at = max(self._next - graph._first_seq, 0)
            first = graph._first_seq + at
            entries = graph._log[at : at + BATCH]
        count = len(entries)
        self._next = first + count
        # Of all that a run's own log says, model and tool calls and limits are told.
        for seq, entry in enumerate(entries, first):
            if type(entry) is CallRecord:
                if entry.kind != "system":
                    self._take(entry, seq)
            elif isinstance(entry, LimitTrace):
                self._read.append((of_limit(entry), entry.at_ms))
        return count

    def _take(self, call: CallRecord, seq: int) -> None:
        is_over = call.end_seq == seq
        told = of_ended(self._replayed, call) if is_over else of_begun(self._replayed, call)
        at_ns = (call.ended_ns if is_over else call.started_ns) + self._graph.wall_offset_ns
        self._read.append((told, at_ns // 1_000_000))

    def _tell(self, told: Told, at_ms: int) -> None:
        self._log.put(*told, at_ms + self._later_ms)
