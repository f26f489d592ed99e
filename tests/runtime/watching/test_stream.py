"""A subscriber on an event loop gets every event of a run once and in order, or the number that are missing."""

from __future__ import annotations

import asyncio
import copy
import gc
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest

from penstock import ExecutionContext, InvalidValue, RunSettings
from penstock.runtime.observers import Observers, WakeUps
from penstock.runtime.watching.stream import BATCH, EventStream, MissedEvents, stream_events
from penstock.testing import explore
from penstock.testing.contracts.threads import giving_way
from penstock.tracing.events import CustomTrace, RunCompleted, RunStarted, TraceEvent
from penstock.tracing.execution_graph import TRIM_CHUNK, ExecutionGraph
from tests.soak import scaled

PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""


def write(context: ExecutionContext, count: int = 1) -> None:
    for _ in range(count):
        context.trace_custom("note")


def small_run() -> ExecutionContext:
    """A run that lets go of its oldest events soon."""
    return ExecutionContext(settings=RunSettings(max_kept_calls=1))


async def seqs(stream: EventStream) -> list[int]:
    return [event.seq async for event in stream]


async def asleep(graph: ExecutionGraph, sleepers: int = 1) -> None:
    """Let the others run until so many readers of this loop sleep."""
    loop = asyncio.get_running_loop()
    for _ in range(10_000):
        if len(sleeping_on(loop, graph)) == sleepers:
            return
        await asyncio.sleep(0)
    raise AssertionError("they never lay down")


def wake_ups(graph: ExecutionGraph) -> list[Any]:
    """Every wake_up that the next entry would ring; with no observers, they are those of readers."""
    return list(graph.notify.sleeping) if isinstance(graph.notify, WakeUps) else []


def sleeping_on(loop: asyncio.AbstractEventLoop, graph: ExecutionGraph) -> list[object]:
    return [one for wake_up in wake_ups(graph) if getattr(wake_up, "loop", None) is loop for one in wake_up.sleepers]


# What is read.


async def test_a_reader_gets_existing_and_then_new_events_up_to_the_end() -> None:
    with ExecutionContext() as context:
        write(context, 3)
        reader = asyncio.create_task(seqs(stream_events(context)))
        await asleep(context.graph)
        write(context, 3)
        await asleep(context.graph)
        await context.atool(asyncio.sleep, 0)
    assert await reader == list(range(1, context.graph.seq + 1))


async def test_events_are_those_of_the_history() -> None:
    with ExecutionContext() as context:
        await context.atool(asyncio.sleep, 0)
    got = [event async for event in stream_events(context)]
    assert got == context.history()
    assert isinstance(got[0], RunStarted)
    assert isinstance(got[-1], RunCompleted)


@pytest.mark.parametrize("kept", [1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH])
async def test_a_run_that_has_ended_is_replayed_to_its_end(kept: int) -> None:
    with ExecutionContext() as context:
        write(context, kept)
    last = context.graph.seq
    assert await seqs(stream_events(context)) == list(range(1, last + 1))
    assert await seqs(stream_events(context, since=2)) == list(range(3, last + 1))
    assert await seqs(stream_events(context, since=last)) == []


async def test_a_reader_that_has_come_to_the_end_stays_there() -> None:
    with ExecutionContext() as context:
        stream = stream_events(context)
    await seqs(stream)
    assert await seqs(stream) == []


async def test_a_reader_that_resumes_with_its_seq_misses_nothing() -> None:
    with ExecutionContext() as context:
        write(context, 10)
        first = stream_events(context)
        seen = [(await anext(first)).seq for _ in range(4)]
        assert first.seq == 4
        write(context, 10)
    assert seen + await seqs(stream_events(context, since=first.seq)) == list(range(1, context.graph.seq + 1))


async def test_a_child_streams_the_whole_run() -> None:
    with ExecutionContext() as context, context.spawn_child("child") as child:
        stream = stream_events(child)
    assert len(await seqs(stream)) == context.graph.seq


@pytest.mark.parametrize("since", [-1, 3, True, 1.0, "1", None])
def test_a_place_that_the_log_does_not_have_is_refused(since: Any) -> None:
    context = ExecutionContext()
    assert context.graph.seq == 2
    with pytest.raises(InvalidValue, match=r"since must be 0, or the seq of an event of the run \(the newest is 2\)"):
        stream_events(context, since)


# Falling behind.


async def test_a_reader_that_falls_behind_learns_how_many_it_missed_and_can_continue() -> None:
    with small_run() as context:
        stream = stream_events(context)
        assert (await anext(stream)).seq == 1
        in_hand = context.graph.seq
        write(context, 2 * TRIM_CHUNK)
        gone = context.graph.dropped_events
        assert gone > in_hand
        assert (await anext(stream)).seq == in_hand == 2
        with pytest.raises(MissedEvents) as missed:
            await anext(stream)
        error = missed.value
        another = stream_events(context, since=error.resume_since)
        for seq in range(gone + 1, context.graph.seq + 1):
            assert (await anext(stream)).seq == (await anext(another)).seq == seq
    assert (error.run_id, error.since, error.missed, error.resume_since) == (context.run_id, 2, gone - 2, gone)
    assert str(error) == f"run {context.run_id}: {gone - 2} events are missing after seq 2; continue with since={gone}"


async def test_a_run_whose_beginning_is_gone_is_not_passed_off_as_whole() -> None:
    with small_run() as context:
        write(context, 2 * TRIM_CHUNK)
    stream = stream_events(context)
    with pytest.raises(MissedEvents) as missed:
        await anext(stream)
    assert (missed.value.since, missed.value.missed) == (0, context.graph.dropped_events)
    assert stream.seq == missed.value.resume_since == context.graph.dropped_events


async def test_events_received_and_missed_add_up_to_all_events() -> None:
    chance = random.Random(7)
    stream, got, missed = stream_events(context := small_run()), 0, 0
    with context:
        for _ in range(200):
            write(context, chance.choice((0, 1, 50, 2_000)))
            for _ in range(min(chance.choice((1, 5, 500)), context.graph.seq - stream.seq)):
                try:
                    event = await anext(stream)
                except MissedEvents as error:
                    missed += error.missed
                else:
                    got += 1
                    assert event.seq == stream.seq == got + missed
                if stream.seq == context.graph.seq:
                    break
    assert missed > 0
    assert got > 0


async def test_a_reader_that_does_not_read_holds_one_batch_at_most() -> None:
    with ExecutionContext() as context:
        write(context, 10 * BATCH)
        stream = stream_events(context)
        await anext(stream)
        write(context, 10 * BATCH)
        assert len(stream._batch) < BATCH


async def test_an_event_that_cannot_be_made_is_one_missed() -> None:
    graph = ExecutionGraph()
    graph.create_root("run")
    write_to(graph, 300)
    with graph.lock:
        call = graph.begin(graph.root, "odd", "f", None, graph._source, 0)  # type: ignore[arg-type]
        graph.end(call, 0, "success")
    unmakeable = graph.seq
    write_to(graph, 300)
    end(graph)
    stream = EventStream(graph)
    got = [(await anext(stream)).seq for _ in range(unmakeable - 1)]
    with pytest.raises(MissedEvents, match=f"1 event is missing after seq {unmakeable - 1}") as missed:
        await anext(stream)
    assert isinstance(missed.value.__cause__, KeyError)
    got += await seqs(stream)
    assert got == [seq for seq in range(1, graph.seq + 1) if seq != unmakeable]


def test_a_miss_can_be_copied() -> None:
    error = copy.copy(MissedEvents("r1", 3, 4))
    assert (str(error), error.resume_since) == (str(MissedEvents("r1", 3, 4)), 7)


def write_to(graph: ExecutionGraph, count: int = 1) -> None:
    for _ in range(count):
        with graph.lock:
            graph.append(CustomTrace(seq=graph.seq + 1))


def end(graph: ExecutionGraph) -> None:
    with graph.lock:
        graph.close(CustomTrace(seq=graph.seq + 1))


# Waking.


async def test_readers_of_one_loop_cost_a_writer_one_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, wakes = asyncio.get_running_loop(), 0
    call_soon_threadsafe = loop.call_soon_threadsafe

    def counted(*args: Any, **options: Any) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return call_soon_threadsafe(*args, **options)

    with ExecutionContext() as context:
        readers = [asyncio.create_task(seqs(stream_events(context))) for _ in range(100)]
        await asleep(context.graph, 100)
        assert len(wake_ups(context.graph)) == 1
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        write(context, 500)
        assert wakes == 1
        assert wake_ups(context.graph) == []
    assert [await reader for reader in readers] == [list(range(1, context.graph.seq + 1))] * 100


async def test_a_long_replay_lets_others_have_their_turn() -> None:
    with ExecutionContext() as context:
        write(context, 10 * BATCH)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await seqs(stream_events(context))
    other.cancel()
    assert turns >= 10


async def test_two_tasks_may_share_a_reader() -> None:
    async def take_turns() -> list[int]:
        got = []
        async for event in stream:
            got.append(event.seq)
            await asyncio.sleep(0)
        return got

    with ExecutionContext() as context:
        stream = stream_events(context)
        readers = [asyncio.create_task(take_turns()) for _ in range(2)]
        for _ in range(5):
            await asleep(context.graph, 2)
            write(context, 7)
    got = [await reader for reader in readers]
    assert sorted(got[0] + got[1]) == list(range(1, context.graph.seq + 1))


def test_readers_on_two_loops_keep_up_with_writers_in_four_threads() -> None:
    context = ExecutionContext()
    got: list[list[int]] = []

    def read() -> None:
        async def main() -> list[list[int]]:
            return await asyncio.gather(*(seqs(stream_events(context)) for _ in range(3)))

        got.extend(asyncio.run(main()))

    with giving_way("penstock.runtime.watching.stream"):
        readers = in_threads(2, read)
        writers = in_threads(4, lambda: write(context, 100))
    join(writers)
    context.end()
    join(readers)
    assert got == [list(range(1, context.graph.seq + 1))] * 6
    assert wake_ups(context.graph) == []


def in_threads(count: int, work: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_reader_that_sleeps_is_woken_by_each_entry_of_another_thread() -> None:
    context = ExecutionContext()
    read = threading.Semaphore(0)

    async def main() -> None:
        async for _ in stream_events(context):
            read.release()

    reader = in_threads(1, lambda: asyncio.run(main()))
    for _ in range(context.graph.seq):
        assert read.acquire(timeout=PATIENCE_S)
    for _ in range(500):
        write(context)
        assert read.acquire(timeout=PATIENCE_S)
    context.end()
    join(reader)


async def test_an_entry_written_while_a_reader_goes_to_sleep_wakes_it() -> None:
    class Interrupted(ExecutionGraph):
        """Writes an entry in the thread that asks whether the run is closed, under the lock, as a finalizer might."""

        left = 3

        @property
        def closed(self) -> bool:
            if self.left:
                self.left -= 1
                write_to(self)
            return super().closed

    graph = Interrupted()
    stream = EventStream(graph)
    assert [(await asyncio.wait_for(anext(stream), PATIENCE_S)).seq for _ in range(3)] == [1, 2, 3]


@pytest.mark.reliability
def test_in_any_order_of_events_every_reader_gets_every_one() -> None:
    async def one_order(seed: int) -> None:
        chance = random.Random(seed)
        context = ExecutionContext()

        async def run() -> None:
            for _ in range(8):
                write(context, chance.choice((0, 1, 1, 3)))
                await asyncio.sleep(chance.choice((0, 0, 1)))
            context.end()

        async def impatient() -> list[int]:
            stream, got = stream_events(context), []
            while True:
                try:
                    got.append((await asyncio.wait_for(anext(stream), chance.choice((0.5, 1, 2)))).seq)
                except TimeoutError:
                    continue
                except StopAsyncIteration:
                    return got

        readers = [seqs(stream_events(context)), impatient(), impatient()]
        _, *got = await asyncio.gather(run(), *readers)
        assert got == [list(range(1, context.graph.seq + 1))] * 3
        assert wake_ups(context.graph) == []

    explore(one_order, schedules=scaled(100, soak=3_000))


# Leaving.


async def test_a_wait_that_is_cancelled_leaves_nothing_and_loses_nothing() -> None:
    with ExecutionContext() as context:
        stream = stream_events(context, since=context.graph.seq)
        for _ in range(3):
            waits = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            await asleep(context.graph)
            waits.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waits
            assert wake_ups(context.graph) == []
        write(context)
        assert (await anext(stream)).seq == context.graph.seq


async def test_a_cancel_that_meets_the_wake_loses_no_event() -> None:
    with ExecutionContext() as context:
        stream = stream_events(context, since=context.graph.seq)
        waits = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asleep(context.graph)
        write(context)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert (await anext(stream)).seq == context.graph.seq


async def test_a_reader_that_leaves_does_not_remove_the_wake_up_of_another() -> None:
    with ExecutionContext() as context:
        first, second = (asyncio.create_task(seqs(stream_events(context))) for _ in range(2))
        await asleep(context.graph, 2)
        first.cancel()
        await asleep(context.graph, 1)
    assert await second == list(range(1, context.graph.seq + 1))


async def test_a_reader_dropped_between_two_events_leaves_nothing() -> None:
    with ExecutionContext() as context:
        async for event in stream_events(context):
            if event.seq == context.graph.seq:
                break
        assert wake_ups(context.graph) == []


async def test_a_closed_reader_reads_no_further() -> None:
    with ExecutionContext() as context:
        async with aclosing(stream_events(context)) as stream:
            await anext(stream)
        write(context)
        assert await seqs(stream) == []
        await stream.aclose()


@pytest.mark.parametrize("with_an_entry", [False, True])
async def test_closing_a_reader_ends_who_waits_for_it(with_an_entry: bool) -> None:
    with ExecutionContext() as context:
        stream = stream_events(context, since=context.graph.seq)
        reader = asyncio.create_task(seqs(stream))
        await asleep(context.graph)
        if with_an_entry:
            write(context)
        await stream.aclose()
        assert await reader == []
        assert wake_ups(context.graph) == []


@pytest.mark.parametrize("next_is", ["an entry", "a reader"])
def test_a_loop_closed_under_a_reader_fails_no_writer_and_is_released(next_is: str) -> None:
    context = ExecutionContext()
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda loop, about: None)  # it complains of the task that it was closed under
    task = loop.create_task(seqs(stream_events(context)))
    loop.run_until_complete(asleep(context.graph))
    loop.close()
    gone = weakref.ref(task)
    del task
    if next_is == "an entry":
        write(context)
    else:
        asyncio.run(read_and_give_up(context))
    assert wake_ups(context.graph) == []
    gc.collect()
    assert gone() is None


async def read_and_give_up(context: ExecutionContext) -> None:
    reader = asyncio.create_task(seqs(stream_events(context)))
    await asleep(context.graph)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader


def test_a_reader_may_continue_on_another_loop() -> None:
    context = ExecutionContext()
    stream = stream_events(context)
    assert [asyncio.run(take(stream)) for _ in range(2)] == [1, 2]


async def take(stream: EventStream) -> int:
    return (await anext(stream)).seq


# Beside observers.


async def test_observers_and_readers_share_a_run() -> None:
    seen: list[int] = []

    def observe(batch: Sequence[TraceEvent]) -> None:
        seen.extend(event.seq for event in batch)

    with ExecutionContext() as context:
        reader = asyncio.create_task(seqs(stream_events(context)))
        await asleep(context.graph)
        subscription = context.observe(observe)
        for _ in range(20):
            write(context)
            await asyncio.sleep(0)
    assert await reader == list(range(1, context.graph.seq + 1))
    assert await asyncio.to_thread(subscription.drain, PATIENCE_S)
    assert seen == list(range(1, context.graph.seq + 1))


async def test_a_reader_outlives_the_observers() -> None:
    graph = ExecutionGraph()
    graph.create_root("run")
    observers = Observers(graph)
    reader = asyncio.create_task(seqs(EventStream(graph)))
    await asleep(graph)
    observers.close()
    write_to(graph)
    await asleep(graph)
    Observers(graph).close()
    write_to(graph)
    end(graph)
    assert await reader == list(range(1, graph.seq + 1))


async def test_a_graph_with_another_notify_is_left_alone() -> None:
    graph = ExecutionGraph()
    graph.create_root("run")
    graph.notify = lambda: None
    with pytest.raises(RuntimeError, match="which cannot be shared"):
        await anext(EventStream(graph, since=1))
