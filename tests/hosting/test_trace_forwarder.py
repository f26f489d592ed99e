"""What a run's own log says, on its way into the log that is kept."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import pytest

from penstock.hosting import event_pipeline
from penstock.hosting.event_pipeline import BATCH, EventWriter, TraceForwarder
from penstock.hosting.ports import HostedEvent
from penstock.storage.memory import MemoryEventStore
from penstock.testing import ManualClock
from penstock.tracing.events import CustomTrace
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import Source


class Run:
    """A trace that is written by hand, and the log that it is forwarded to."""

    def __init__(self, store: MemoryEventStore | None = None, *, lock: Any = None, max_kept: int | None = None) -> None:
        self.graph = ExecutionGraph(clock=ManualClock(), lock=lock, max_kept=max_kept)
        self.store = store or MemoryEventStore()
        self.log = EventWriter(self.store.append, "r", 0, 0, clock=ManualClock(), on_fenced=lambda: None)
        self.forwarder = TraceForwarder(self.graph, self.log)

    def call(self, name: str, kind: CallKind = "tool") -> None:
        """One call, from its beginning to its end."""
        with self.graph.lock:
            call = self.graph.begin(None, kind, name, None, Source("main"), 0)
            self.graph.end(call, 1_000_000, "success")

    def note(self, name: str) -> None:
        """An entry of the trace that is no event of a hosted run."""
        with self.graph.lock:
            self.graph.append(CustomTrace(name=name, seq=self.graph.seq + 1))

    async def stored(self) -> list[str]:
        """The events in the store, once all are written."""
        await self.log.flush()
        events = await self.store.read("r", limit=100_000)
        assert [event.seq for event in events] == [*range(1, len(events) + 1)]
        return [f"{event.type} {event.data['name']}" for event in events]


def both(*names: object) -> list[str]:
    return [f"call.{what} {name}" for name in names for what in ("started", "ended")]


class Overtaken:
    """A lock that another thread takes first, at the nth time that it is wanted."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.left = 0
        self.overtake: Callable[[], None] = int

    def __enter__(self) -> None:
        self.left -= 1
        if self.left == 0:
            other = threading.Thread(target=self.overtake)
            other.start()
            other.join()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


class Busy(MemoryEventStore):
    """An event store while whose first append something happens."""

    meanwhile: Callable[[], None] | None = None

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        await super().append(run_id, epoch, events)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()


async def test_calls_of_every_kind_are_forwarded_in_order() -> None:
    run = Run()
    run.forwarder.open()
    run.call("a")
    run.call("inside", "system")
    run.call("b", "llm")
    run.forwarder.drain()
    assert await run.stored() == both("a", "inside", "b")


@pytest.mark.parametrize("count", [BATCH // 2 - 1, BATCH // 2, BATCH // 2 + 1, 3 * BATCH])
@pytest.mark.parametrize("way", ["drain", "close"])
async def test_all_trace_entries_are_forwarded(way: str, count: int) -> None:
    run = Run()
    run.forwarder.open()
    for number in range(count):
        run.call(f"{number}")
    getattr(run.forwarder, way)()
    assert await run.stored() == both(*range(count))


async def test_batch_without_forwarded_entries_does_not_hide_later_ones() -> None:
    run = Run()
    run.forwarder.open()
    for number in range(BATCH):
        run.note(f"{number}")
    run.call("a")
    run.forwarder.drain()
    assert await run.stored() == both("a")


async def test_entries_wait_while_the_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pipeline, "MAX_BUFFERED", 5)
    run = Run()
    run.forwarder.open()
    for number in range(BATCH):
        run.call(f"{number}")
    run.forwarder.drain()
    assert run.log.seq == 5
    run.forwarder.drain()
    assert run.log.seq == 5
    assert await run.stored() == both(*range(BATCH))


async def test_entries_that_the_trace_has_dropped_are_skipped() -> None:
    run = Run(max_kept=1)
    for number in range(10_000):
        run.call(f"{number}")
    assert run.graph._first_seq > 1
    run.forwarder.open()
    run.forwarder.close()
    stored = await run.stored()
    assert stored[-2:] == both(9_999)
    assert len(stored) == 20_000 + 1 - run.graph._first_seq


@pytest.mark.parametrize("nth", [1, 2])
async def test_entry_appended_while_forwarder_goes_idle_is_delivered_promptly(
    nth: int,
) -> None:
    lock, store = Overtaken(), Busy()
    run = Run(store, lock=lock)

    def meanwhile() -> None:
        run.note("inside")
        lock.left, lock.overtake = nth, lambda: run.call("late")

    store.meanwhile = meanwhile
    run.forwarder.open()
    run.call("first")
    async with asyncio.timeout(60):
        while run.log.written < 4:
            await run.log.changed()
    assert lock.left <= 0
    assert await run.stored() == both("first", "late")
    await run.log.close()
