"""Observe a run from threads that can neither slow nor fail it.

Nothing is queued for observers: the run's log is the buffer. Each observer has a daemon thread that reads the log from
its last position and passes new events on, in order, in batches. A writer does no more than wake sleeping observers:
it releases a lock and waits for nothing. A slow observer falls behind and, once the log has dropped entries it had not
read, loses those; they are counted. Errors of an observer are counted too, and it gets the next batch. An observer that
hangs affects no other. Observers do share the interpreter with the run: their computations take interpreter time.

An observer goes to sleep under the graph's lock, after a check that found nothing new, and `graph.notify` is called
under the same lock. So no entry can be missed in between, and polling is not needed. A graph has one `notify`:
`WakeUps`, shared by everything that sleeps until the next entry, here and in `stream`.

Knows the log, and nothing of the run that writes it.
"""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from typing import Protocol

from penstock.errors import InvalidValue, RunEnded
from penstock.tracing.events import TraceEvent
from penstock.tracing.execution_graph import ExecutionGraph

BATCH = 512
GRACE_S = 0.25
"""Time an observer may take to stop after `close` before it counts as hung."""

Observer = Callable[[Sequence[TraceEvent]], None]


class WakeUp(Protocol):
    """Wakes one or several sleepers."""

    def release(self) -> None:
        """Wake the sleepers without waiting for anything; raises RuntimeError if none can be woken any more."""


class WakeUps:
    """The wake-ups to release at the next entry of a graph; the graph's `notify`.

    Everything here is read and written under the graph's lock. Each wake-up is released once and then removed from the
    list.
    """

    def __init__(self) -> None:
        self.sleeping: list[WakeUp] = []
        self.has_observers = False
        """Whether an `Observers` of this graph exists that has not been closed."""

    def __call__(self) -> None:
        """Wake every sleeper."""
        if self.sleeping:
            for wake_up in self.sleeping:
                # An interrupt here may leave an already released entry on the list; releasing twice wakes once.
                try:  # noqa: SIM105  under the lock, and `suppress` takes longer than most wake-ups
                    wake_up.release()
                except RuntimeError:
                    pass
            self.sleeping.clear()

    def remove(self, wake_up: WakeUp) -> None:
        """Remove the entry of a sleeper that woke by itself; no effect if it was already released."""
        with suppress(ValueError):
            self.sleeping.remove(wake_up)


def wake_ups_of(graph: ExecutionGraph) -> WakeUps:
    """Return the `WakeUps` of `graph`, creating it if needed. The caller holds the graph's lock."""
    if graph.notify is None:
        graph.notify = WakeUps()
    if not isinstance(graph.notify, WakeUps):
        raise RuntimeError(f"run {graph.chain_id} notifies {graph.notify!r} already, which cannot be shared")
    return graph.notify


class Subscription:
    """One observer of one run, with counts of events delivered, dropped and failed. Created by `Observers.add`."""

    def __init__(self, observers: Observers, observer: Observer, name: str) -> None:
        self.name = name
        self.delivered = 0
        """Events delivered, including those of batches on which the observer raised."""
        self.dropped = 0
        """Events dropped from the log before they were read, or not yet read when this was closed."""
        self.failures = 0
        """Batches on which the observer raised."""
        self.last_error: BaseException | None = None
        self._observers = observers
        self._graph = observers.graph
        self._observer = observer
        self._seq = 0
        """Sequence number of the newest processed entry; written by the thread alone, under `_moved`."""
        self._batch = BATCH
        self._moved = threading.Condition()
        self._until: int | None = None
        """Sequence number of the newest entry when it was closed; later entries are not delivered."""
        self._ended = False
        self._inside = False
        """Whether the observer has been called and has not returned."""
        self._wake_up = _thread.allocate_lock()
        self._wake_up.acquire()
        self._thread = threading.Thread(target=self._watch, name=f"penstock-observer-{name}", daemon=True)

    @property
    def pending(self) -> int:
        """Events written for this observer and not yet processed: delivered + dropped + pending is the total."""
        until = self._until
        return 0 if self._ended else max(0, (self._graph.seq if until is None else until) - self._seq)

    @property
    def ended(self) -> bool:
        """Whether the observer will not be called again."""
        return self._ended

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything written so far was delivered; return False if that takes longer, or will not happen.

        Blocks the calling thread. Returns False when called by the observer itself, which cannot wait for its own
        batch.
        """
        goal = self._graph.seq
        if threading.current_thread() is self._thread:
            return False
        with self._moved:
            self._moved.wait_for(lambda: self._seq >= goal or self._ended, min(timeout_s, threading.TIMEOUT_MAX))
            return self._seq >= goal

    def close(self) -> None:
        """Stop after the current batch, if any; does not wait for that."""
        with self._graph.lock:
            if self._until is None:
                self._until = self._graph.seq
                self._observers._wake_ups()

    # The thread's side.

    def _watch(self) -> None:
        try:
            while self._until is None:
                if batch := self._read():
                    self._hand_over(batch)
                elif not self._sleep():
                    break
        finally:
            self._end()

    def _read(self) -> Sequence[TraceEvent]:
        """Return the next batch. An event that cannot be built is isolated by smaller batches, counted and skipped."""
        while True:
            try:
                batch = self._graph.events(self._seq, limit=self._batch)
            except Exception as error:
                if self._batch == 1:
                    self._pass_over(error)
                self._batch = max(1, self._batch // 8)
            else:
                self._batch = min(BATCH, self._batch * 2)
                return batch

    def _pass_over(self, error: Exception) -> None:
        seq = max(self._seq, self._graph.dropped_events) + 1
        self.dropped += seq - self._seq
        self.last_error = error
        self._move_to(seq)

    def _hand_over(self, batch: Sequence[TraceEvent]) -> None:
        first, count = batch[0].seq, len(batch)
        self.dropped += first - self._seq - 1
        self._inside = True
        try:
            self._observer(batch)
        except BaseException as error:
            # SystemExit and similar would silently end this thread; they concern only the observer.
            self.failures += 1
            self.last_error = error
        self._inside = False
        self.delivered += count
        self._move_to(first + count - 1)

    def _move_to(self, seq: int) -> None:
        with self._moved:
            self._seq = seq
            self._moved.notify_all()

    def _sleep(self) -> bool:
        """Sleep until there is work; return False if there never will be."""
        with self._graph.lock:
            # Added to the list first: the lock is re-entrant, and a finalizer that runs in this thread may write as
            # well.
            self._observers._wake_ups.sleeping.append(self._wake_up)
            is_over = self._graph.closed
            has_work = self._until is not None or self._graph.seq > self._seq
            if has_work or is_over:
                self._observers._wake_ups.remove(self._wake_up)
                return has_work
        self._wake_up.acquire()
        return True

    def _end(self) -> None:
        if self._until is not None:
            self.dropped += max(0, self._until - self._seq)
        with self._moved:
            self._ended = True
            self._moved.notify_all()
        self._observers._forget(self)


class Observers:
    """All observers that watch one run from a thread. A graph has at most one of these at a time."""

    def __init__(self, graph: ExecutionGraph) -> None:
        self.graph = graph
        self.hung = 0
        """Observers abandoned by `close` because they did not return."""
        self._lock = threading.Lock()
        self._live: dict[Subscription, None] = {}
        self._past_dropped = 0
        self._past_failures = 0
        self._numbers = itertools.count(1)
        self._closed = False
        with graph.lock:
            self._wake_ups = wake_ups_of(graph)
            if self._wake_ups.has_observers:
                raise RuntimeError(f"run {graph.chain_id} has its observers already; add to those")
            self._wake_ups.has_observers = True
            self._sleeping = self._wake_ups.sleeping

    @property
    def dropped(self) -> int:
        """Events that observers missed, past and present observers together."""
        with self._lock:
            return self._past_dropped + sum(one.dropped for one in self._live)

    @property
    def failures(self) -> int:
        """Batches on which observers raised, past and present observers together."""
        with self._lock:
            return self._past_failures + sum(one.failures for one in self._live)

    def add(self, observer: Observer, *, name: str | None = None) -> Subscription:
        """Deliver every event of the run to `observer`, from the first that is kept on, on a thread of its own."""
        _check(observer)
        subscription = Subscription(self, observer, name or str(next(self._numbers)))
        with self._lock:
            if self._closed:
                raise RunEnded(self.graph.chain_id, f"observer {subscription.name!r} came after its end")
            self._live[subscription] = None
        try:
            subscription._thread.start()
        except BaseException:
            self._forget(subscription)
            raise
        return subscription

    def close(self, timeout_s: float = 1.0) -> int:
        """Let observers catch up for at most `timeout_s`, stop them, and return how many hang and were abandoned.

        Blocks the calling thread, for a moment longer than `timeout_s` at most.
        """
        with self._lock:
            if self._closed:
                return self.hung
            self._closed = True
            live = [one for one in self._live if one._thread is not threading.current_thread()]
        deadline = time.monotonic() + timeout_s
        for one in live:
            one.drain(max(0.0, deadline - time.monotonic()))
        for one in self._all():
            one.close()
        deadline = max(deadline, time.monotonic() + GRACE_S)
        for one in live:
            one._thread.join(max(0.0, deadline - time.monotonic()))
        with self.graph.lock:
            self._wake_ups.has_observers = False
            if not self._wake_ups.sleeping:  # otherwise a stream is waiting for the next entry
                self.graph.notify = None
        self.hung = sum(one._inside for one in live)
        return self.hung

    def _forget(self, subscription: Subscription) -> None:
        """Remove an observer whose thread has ended, and keep its counts."""
        with self._lock, suppress(KeyError):
            del self._live[subscription]
            self._past_dropped += subscription.dropped
            self._past_failures += subscription.failures

    def _all(self) -> list[Subscription]:
        with self._lock:
            return list(self._live)


def _check(observer: object) -> None:
    if not callable(observer) or iscoroutinefunction(observer):
        raise InvalidValue("observer", observer, "a function, not an async one, that takes a sequence of events")
