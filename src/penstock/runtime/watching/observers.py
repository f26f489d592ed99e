"""Watching a run without being able to slow or fail it.

Nothing is queued for anybody: the run's log is the buffer. Each observer has a daemon thread that reads the log from
where it left off and hands over what it finds, in order, in batches. All a writer ever does is to ring the bells of the
observers that are asleep: a lock released, nothing waited for. Who is slow falls behind and, once the log has let go of
entries it had not read, loses those; they are counted. Who raises is counted too, and gets the next batch. Who hangs,
hangs alone. They do share the interpreter with the run: what an observer computes takes its turn there.

An observer lies down under the graph's lock, after a look that found nothing new, and `graph.notify` is called under
the same lock. So no entry can slip in between, and nobody has to wake up just to look. A graph has one `notify`:
`Bells`, which everybody who sleeps until the next entry shares, here and in `stream`.

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
"""How long an observer that has been told to stop may take to do so before it counts as hung."""

Observer = Callable[[Sequence[TraceEvent]], None]


class Bell(Protocol):
    """What wakes one sleeper, or several."""

    def release(self) -> None:
        """Ring, without waiting for anything; RuntimeError if there is nobody to wake any more."""


class Bells:
    """The bells of those who sleep until the next entry of a graph, whose `notify` this is.

    Everything here is read and written under the graph's lock. A bell is rung once: then it is off the list.
    """

    def __init__(self) -> None:
        self.sleeping: list[Bell] = []
        self.has_observers = False
        """Whether there is an `Observers` of this graph that has not been closed."""

    def __call__(self) -> None:
        """Ring every bell."""
        if self.sleeping:
            for bell in self.sleeping:
                # An interrupt here may leave a bell on the list that was rung already; ringing twice wakes once.
                try:  # noqa: SIM105  under the lock, and `suppress` takes longer than most bells
                    bell.release()
                except RuntimeError:
                    pass
            self.sleeping.clear()

    def take_off(self, bell: Bell) -> None:
        """The sleeper got up by itself; no effect if the bell was rung."""
        with suppress(ValueError):
            self.sleeping.remove(bell)


def bells_of(graph: ExecutionGraph) -> Bells:
    """The bells that the next entry of `graph` rings. The caller holds the graph's lock."""
    if graph.notify is None:
        graph.notify = Bells()
    if not isinstance(graph.notify, Bells):
        raise RuntimeError(f"run {graph.chain_id} notifies {graph.notify!r} already, which cannot be shared")
    return graph.notify


class Subscription:
    """One observer of one run: what it got, what it missed, how often it failed. Made by `Observers.add`."""

    def __init__(self, observers: Observers, observer: Observer, name: str) -> None:
        self.name = name
        self.delivered = 0
        """Events handed over, also those of batches on which the observer raised."""
        self.dropped = 0
        """Events that were gone from the log before they were read, or not yet read when this was closed."""
        self.failures = 0
        """Batches on which the observer raised."""
        self.last_error: BaseException | None = None
        self._observers = observers
        self._graph = observers.graph
        self._observer = observer
        self._seq = 0
        """The newest entry that is done with; written by the thread alone, under `_moved`."""
        self._batch = BATCH
        self._moved = threading.Condition()
        self._until: int | None = None
        """The newest entry when it was closed; what comes later is not for this observer."""
        self._ended = False
        self._inside = False
        """Whether the observer has been called and has not returned."""
        self._bell = _thread.allocate_lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._watch, name=f"penstock-observer-{name}", daemon=True)

    @property
    def pending(self) -> int:
        """Events written for this observer and not done with: delivered, dropped and pending are all there were."""
        until = self._until
        return 0 if self._ended else max(0, (self._graph.seq if until is None else until) - self._seq)

    @property
    def ended(self) -> bool:
        """Whether the observer will not be called again."""
        return self._ended

    def drain(self, timeout_s: float) -> bool:
        """Wait until everything written so far was handed over; False if that takes longer, or will not happen.

        Blocks the calling thread. The observer itself cannot wait for what it is in the middle of: it gets False.
        """
        goal = self._graph.seq
        if threading.current_thread() is self._thread:
            return False
        with self._moved:
            self._moved.wait_for(lambda: self._seq >= goal or self._ended, min(timeout_s, threading.TIMEOUT_MAX))
            return self._seq >= goal

    def close(self) -> None:
        """Stop after the batch under way, if there is one; does not wait for that."""
        with self._graph.lock:
            if self._until is None:
                self._until = self._graph.seq
                self._observers._bells()

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
        """What comes next. An event that cannot be made is found by reading less at a time, counted and passed over."""
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
            # SystemExit and its kind would end this thread without a word; nobody but the observer is meant by them.
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
        """Sleep until there is something to do; False if there never will be."""
        with self._graph.lock:
            # On the list first: the lock is re-entrant, and a finalizer that runs in this thread may write as well.
            self._observers._bells.sleeping.append(self._bell)
            is_over = self._graph.closed
            has_work = self._until is not None or self._graph.seq > self._seq
            if has_work or is_over:
                self._observers._bells.take_off(self._bell)
                return has_work
        self._bell.acquire()
        return True

    def _end(self) -> None:
        if self._until is not None:
            self.dropped += max(0, self._until - self._seq)
        with self._moved:
            self._ended = True
            self._moved.notify_all()
        self._observers._forget(self)


class Observers:
    """Everybody who watches one run from a thread. There is one of these per graph at a time."""

    def __init__(self, graph: ExecutionGraph) -> None:
        self.graph = graph
        self.hung = 0
        """Observers that were left behind by `close` because they did not return."""
        self._lock = threading.Lock()
        self._live: dict[Subscription, None] = {}
        self._past_dropped = 0
        self._past_failures = 0
        self._numbers = itertools.count(1)
        self._closed = False
        with graph.lock:
            self._bells = bells_of(graph)
            if self._bells.has_observers:
                raise RuntimeError(f"run {graph.chain_id} has its observers already; add to those")
            self._bells.has_observers = True
            self._sleeping = self._bells.sleeping

    @property
    def dropped(self) -> int:
        """Events that observers missed, past and present ones together."""
        with self._lock:
            return self._past_dropped + sum(one.dropped for one in self._live)

    @property
    def failures(self) -> int:
        """Batches on which observers raised, past and present ones together."""
        with self._lock:
            return self._past_failures + sum(one.failures for one in self._live)

    def add(self, observer: Observer, *, name: str | None = None) -> Subscription:
        """Let `observer` have every event of the run, from the first that is kept on, on a thread of its own."""
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
        """Let everybody catch up for at most `timeout_s`, stop them, and return how many hang and were left behind.

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
            self._bells.has_observers = False
            if not self._bells.sleeping:  # else a stream waits for the next entry
                self.graph.notify = None
        self.hung = sum(one._inside for one in live)
        return self.hung

    def _forget(self, subscription: Subscription) -> None:
        """An observer's thread has ended: keep its counts only."""
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
