"""An observer gets a run's events in order and in full, or a count of the missing ones; the run is not affected."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import InvalidValue, RunEnded
from penstock.runtime.observers import Observers, Subscription
from penstock.tracing.events import CallStarted, CustomTrace, TraceEvent
from penstock.tracing.execution_graph import TRIM_CHUNK, ExecutionGraph

PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""


def write(graph: ExecutionGraph, count: int = 1) -> None:
    for _ in range(count):
        with graph.lock:
            graph.append(CustomTrace(seq=graph.seq + 1))


def write_calls(graph: ExecutionGraph, count: int) -> None:
    assert graph.root is not None
    for _ in range(count):
        graph.mark_success(graph.begin_node(graph.root.node_id, "tool", "fetch"))


def end(graph: ExecutionGraph) -> None:
    with graph.lock:
        graph.close(CustomTrace(seq=graph.seq + 1))


@contextmanager
def watched(max_kept: int | None = None) -> Iterator[tuple[ExecutionGraph, Observers]]:
    """A run under way, with observers that are closed afterwards."""
    graph = ExecutionGraph(max_kept=max_kept)
    graph.create_root("run")
    observers = Observers(graph)
    try:
        yield graph, observers
    finally:
        observers.close(PATIENCE_S)


class Notes:
    """An observer that writes down the numbers of what it gets."""

    def __init__(self) -> None:
        self.seqs: list[int] = []

    def __call__(self, batch: Sequence[TraceEvent]) -> None:
        self.seqs.extend(event.seq for event in batch)


class Stuck(Notes):
    """An observer that does not return from its first batch until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.released = threading.Event()

    def __call__(self, batch: Sequence[TraceEvent]) -> None:
        self.entered.set()
        assert self.released.wait(PATIENCE_S)
        super().__call__(batch)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    observer = Stuck()
    yield observer
    observer.released.set()


def thread_of(subscription: Subscription) -> threading.Thread:
    return subscription._thread


# Delivery.


def test_an_observer_gets_every_event_in_order_and_without_gaps() -> None:
    with watched() as (graph, observers):
        notes = Notes()
        subscription = observers.add(notes)
        write(graph, 5_000)
        assert subscription.drain(PATIENCE_S)
        assert notes.seqs == list(range(1, graph.seq + 1))
        assert (subscription.delivered, subscription.dropped, subscription.pending) == (graph.seq, 0, 0)


def test_a_late_observer_gets_the_run_from_its_beginning() -> None:
    with watched() as (graph, observers):
        write(graph, 1_000)
        notes = Notes()
        assert observers.add(notes).drain(PATIENCE_S)
        assert notes.seqs == list(range(1, 1_002))


def test_events_are_those_of_the_log() -> None:
    with watched() as (graph, observers):
        got: list[TraceEvent] = []
        subscription = observers.add(got.extend)
        write_calls(graph, 3)
        assert subscription.drain(PATIENCE_S)
        assert got == graph.events()
        assert isinstance(got[0], CallStarted)


def test_an_observer_that_sleeps_is_woken_by_each_entry() -> None:
    with watched() as (graph, observers):
        subscription = observers.add(Notes())
        for _ in range(2_000):
            write(graph)
            assert subscription.drain(PATIENCE_S)
        assert subscription.delivered == graph.seq
        with graph.lock:
            assert len(observers._sleeping) <= 1


def test_an_entry_that_comes_just_before_an_observer_lies_down_wakes_it() -> None:
    class Sly(ExecutionGraph):
        """Writes an entry after each of the first looks that found nothing."""

        left = 3

        def events(self, since: int = 0, limit: int | None = None) -> list[TraceEvent]:
            found = super().events(since, limit)
            if not found and self.left:
                self.left -= 1
                write(self)
            return found

    assert_three_are_delivered(Sly())


def test_an_entry_written_while_an_observer_goes_to_sleep_wakes_it() -> None:
    class Interrupted(ExecutionGraph):
        """Writes an entry in the thread that asks whether the run is closed, under the lock, as a finalizer might."""

        left = 3

        @property
        def closed(self) -> bool:
            if self.left:
                self.left -= 1
                write(self)
            return super().closed

    assert_three_are_delivered(Interrupted())


def assert_three_are_delivered(graph: ExecutionGraph) -> None:
    observers = Observers(graph)
    got = threading.Semaphore(0)
    subscription = observers.add(lambda batch: got.release(len(batch)))
    for _ in range(3):
        assert got.acquire(timeout=PATIENCE_S)
    assert observers.close(PATIENCE_S) == 0
    assert subscription.delivered == 3


def test_eight_threads_may_write_while_two_observers_watch() -> None:
    with watched() as (graph, observers):
        notes = Notes(), Notes()
        subscriptions = [observers.add(one) for one in notes]
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            write_calls(graph, 500)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(one.drain(PATIENCE_S) for one in subscriptions)
        assert graph.seq == 1 + 8 * 500 * 2
        assert [one.seqs for one in notes] == [list(range(1, graph.seq + 1))] * 2


def test_an_observer_may_write_to_the_run_it_watches() -> None:
    with watched() as (graph, observers):
        answered = threading.Event()

        def answer(batch: Sequence[TraceEvent]) -> None:
            if any(isinstance(event, CustomTrace) for event in batch):
                answered.set()
            else:
                write(graph)

        subscription = observers.add(answer)
        assert answered.wait(PATIENCE_S)
        assert subscription.failures == 0


# Failing.


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_an_observer_that_raises_is_counted_and_gets_the_next_batch(error: BaseException) -> None:
    with watched() as (graph, observers):
        notes, others = Notes(), Notes()

        def fail(batch: Sequence[TraceEvent]) -> None:
            notes(batch)
            raise error

        failing, sound = observers.add(fail), observers.add(others)
        for failures in (1, 2, 3):
            assert failing.drain(PATIENCE_S)
            assert (failing.failures, failing.last_error) == (failures, error)
            write(graph)
        assert failing.drain(PATIENCE_S)
        assert sound.drain(PATIENCE_S)
        assert notes.seqs == others.seqs == [1, 2, 3, 4]
        assert (failing.delivered, sound.failures, observers.failures) == (4, 0, 4)


def test_an_event_that_cannot_be_made_is_passed_over_and_counted() -> None:
    with watched() as (graph, observers):
        write(graph, 700)
        with graph.lock:
            call = graph.begin(graph.root, "odd", "f", None, graph._source, 0)  # type: ignore[arg-type]
            graph.end(call, 0, "success")
        unmakeable = graph.seq
        write(graph, 700)
        notes = Notes()
        subscription = observers.add(notes)
        assert subscription.drain(PATIENCE_S)
        assert notes.seqs == [seq for seq in range(1, graph.seq + 1) if seq != unmakeable]
        assert (subscription.dropped, subscription.delivered) == (1, graph.seq - 1)
        assert isinstance(subscription.last_error, KeyError)


# Falling behind.


def test_an_observer_that_falls_behind_loses_dropped_entries_and_counts_them(stuck: Stuck) -> None:
    with watched(max_kept=1) as (graph, observers):
        subscription = observers.add(stuck)
        assert stuck.entered.wait(PATIENCE_S)
        write_calls(graph, 2 * TRIM_CHUNK)
        gone = graph.dropped_events
        assert gone > 0
        stuck.released.set()
        assert subscription.drain(PATIENCE_S)
        assert stuck.seqs == [1, *range(gone + 1, graph.seq + 1)]
        assert subscription.dropped == observers.dropped == gone - 1
        assert subscription.delivered + subscription.dropped == graph.seq


def test_a_run_continues_while_an_observer_hangs(stuck: Stuck) -> None:
    with watched() as (graph, observers):
        notes = Notes()
        hanging, sound = observers.add(stuck), observers.add(notes)
        assert stuck.entered.wait(PATIENCE_S)
        write(graph, 3_000)
        assert sound.drain(PATIENCE_S)
        assert len(notes.seqs) == graph.seq
        assert (hanging.delivered, hanging.pending) == (0, graph.seq)
        assert not hanging.drain(0)
        stuck.released.set()
        assert hanging.drain(PATIENCE_S)


def test_an_entry_rings_only_for_those_who_sleep(stuck: Stuck) -> None:
    with watched() as (graph, observers):
        observers.add(stuck)
        assert stuck.entered.wait(PATIENCE_S)
        write(graph, 100)
        assert observers._sleeping == []
        stuck.released.set()


def test_a_wake_up_that_was_already_released_does_not_fail_the_writer() -> None:
    with watched() as (graph, observers):
        observers._sleeping.append(threading.Lock())
        write(graph)
        assert graph.seq == 2


# Ending.


def test_an_observer_ends_after_the_run_has_ended_and_everything_was_delivered() -> None:
    graph = ExecutionGraph()
    graph.create_root("run")
    notes = Notes()
    subscription = Observers(graph).add(notes, name="ui")
    assert thread_of(subscription).daemon
    assert thread_of(subscription).name == "penstock-observer-ui"
    write(graph, 1_000)
    end(graph)
    thread_of(subscription).join(PATIENCE_S)
    assert subscription.ended
    assert notes.seqs == list(range(1, graph.seq + 1))
    assert subscription.drain(0)


def test_a_run_that_has_ended_can_still_be_read() -> None:
    graph = ExecutionGraph()
    graph.create_root("run")
    end(graph)
    notes = Notes()
    subscription = Observers(graph).add(notes)
    thread_of(subscription).join(PATIENCE_S)
    assert subscription.ended
    assert notes.seqs == [1, 2]


def test_a_closed_subscription_gets_nothing_more() -> None:
    with watched() as (graph, observers):
        notes = Notes()
        subscription = observers.add(notes)
        assert subscription.drain(PATIENCE_S)
        subscription.close()
        subscription.close()
        thread_of(subscription).join(PATIENCE_S)
        write(graph, 10)
        assert subscription.ended
        assert notes.seqs == [1]
        assert (subscription.dropped, subscription.pending) == (0, 0)
        assert not subscription.drain(float("inf"))


def test_events_not_delivered_before_the_close_count_as_dropped(stuck: Stuck) -> None:
    with watched() as (graph, observers):
        subscription = observers.add(stuck)
        assert stuck.entered.wait(PATIENCE_S)
        write(graph, 10)
        subscription.close()
        write(graph, 5)
        assert subscription.pending == 11
        stuck.released.set()
        thread_of(subscription).join(PATIENCE_S)
        assert (subscription.delivered, subscription.dropped, subscription.pending) == (1, 10, 0)
        assert observers.dropped == 10


def test_an_observer_may_close_itself_but_not_wait_for_itself() -> None:
    with watched() as (_graph, observers):
        ready = threading.Event()
        drained: list[bool] = []

        def once(batch: Sequence[TraceEvent]) -> None:
            assert ready.wait(PATIENCE_S)
            drained.append(subscription.drain(PATIENCE_S))
            subscription.close()

        subscription = observers.add(once)
        ready.set()
        thread_of(subscription).join(PATIENCE_S)
        assert subscription.ended
        assert (drained, subscription.failures) == ([False], 0)


def test_an_observer_may_close_all_observers() -> None:
    with watched() as (_graph, observers):
        hung: list[int] = []
        subscription = observers.add(lambda batch: hung.append(observers.close(PATIENCE_S)))
        thread_of(subscription).join(PATIENCE_S)
        assert subscription.ended
        assert (hung, subscription.failures) == ([0], 0)


def test_closing_lets_observers_catch_up() -> None:
    with watched() as (graph, observers):
        notes = [Notes() for _ in range(4)]
        subscriptions = [observers.add(one) for one in notes]
        write(graph, 3_000)
        assert observers.close(PATIENCE_S) == observers.hung == 0
        assert all(one.ended for one in subscriptions)
        assert [one.seqs for one in notes] == [list(range(1, 3_002))] * 4
        assert observers.dropped == 0


def test_closing_leaves_who_hangs_behind_and_counts_it(stuck: Stuck) -> None:
    with watched() as (graph, observers):
        notes = Notes()
        hanging, sound = observers.add(stuck), observers.add(notes)
        assert stuck.entered.wait(PATIENCE_S)
        write(graph, 10)
        assert sound.drain(PATIENCE_S)
        assert observers.close(timeout_s=0) == observers.hung == observers.close() == 1
        thread_of(sound).join(PATIENCE_S)
        assert (sound.ended, hanging.ended) == (True, False)
        assert len(notes.seqs) == 11
        stuck.released.set()
        thread_of(hanging).join(PATIENCE_S)
        assert hanging.delivered + hanging.dropped == graph.seq


def test_no_observer_is_added_after_the_close() -> None:
    with watched() as (_graph, observers):
        observers.close()
        with pytest.raises(RunEnded):
            observers.add(Notes())


def test_a_run_has_one_set_of_observers_at_a_time() -> None:
    with watched() as (graph, observers):
        with pytest.raises(RuntimeError, match="has its observers already"):
            Observers(graph)
        observers.close()
        assert graph.notify is None


@pytest.mark.parametrize("observer", [None, "print", pytest.param("async", id="async function")])
def test_an_invalid_observer_is_refused(observer: Any) -> None:
    async def observe(batch: Sequence[TraceEvent]) -> None: ...

    with watched() as (_graph, observers), pytest.raises(InvalidValue) as refused:
        observers.add(observe if observer == "async" else observer)  # type: ignore[arg-type]
    assert refused.value.field == "observer"


def test_past_observers_are_forgotten_but_their_counts_are_kept() -> None:
    def fail(batch: Sequence[TraceEvent]) -> None:
        raise ValueError("no")

    with watched() as (_graph, observers):
        for _ in range(20):
            subscription = observers.add(fail)
            assert subscription.drain(PATIENCE_S)
            subscription.close()
            thread_of(subscription).join(PATIENCE_S)
        assert not observers._live
        assert observers.failures == 20
