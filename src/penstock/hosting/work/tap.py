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
        self._seq = 0
        """The newest that was read."""
        self._is_listening = False

    def open(self) -> None:
        """Begin to listen."""
        self._log.source = self._on_writing
        self._on_writing()
        self._log.rouse()

    def pump(self) -> None:
        """Put into the log what the trace has that is not there yet, as far as there is room."""
        read, log = self._read, self._log
        if self._is_listening and not read:
            return  # the next entry rings, and none has
        while (read or self._has_more()) and not log.is_full:
            self._tell(*read.popleft())

    def close(self) -> None:
        """Tell the rest, whatever the room, and listen no more."""
        self._log.source = None
        with self._graph.lock:
            bells_of(self._graph).take_off(self)
        while not self._log.is_lost and (self._read or self._has_more()):
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
        if self._is_listening:
            return
        with self._graph.lock:
            if not self._read and self._seq >= self._graph.seq:
                bells_of(self._graph).sleeping.append(self)
                self._is_listening = True
                return
        self._log.rouse()

    def _has_more(self) -> bool:
        """Read on, until there is something to tell or no more to read."""
        graph, read = self._graph, self._read
        while not read:
            with graph.lock:
                first = max(self._seq + 1, graph._first_seq)
                entries = graph._since(self._seq, BATCH)
            if not entries:
                return False
            self._seq = first + len(entries) - 1
            # Of all that a run's own log says, model and tool calls and limits are told.
            for seq, entry in enumerate(entries, first):
                if type(entry) is CallRecord:
                    if entry.kind != "system":
                        self._take(entry, seq)
                elif isinstance(entry, LimitTrace):
                    read.append((of_limit(entry), entry.at_ms))
        return True

    def _take(self, call: CallRecord, seq: int) -> None:
        is_over = call.end_seq == seq
        told = of_ended(self._replayed, call) if is_over else of_begun(self._replayed, call)
        at_ns = (call.ended_ns if is_over else call.started_ns) + self._graph.wall_offset_ns
        self._read.append((told, at_ns // 1_000_000))

    def _tell(self, told: Told, at_ms: int) -> None:
        self._log.put(*told, at_ms=at_ms + self._later_ms)
