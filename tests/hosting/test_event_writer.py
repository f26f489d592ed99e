"""What a run tells, on its way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.hosting import event_pipeline
from penstock.hosting.event_pipeline import EventWriter
from penstock.hosting.ports import Conflict, Fenced, HostedEvent, StoreUnavailable
from penstock.storage.memory import MemoryEventStore
from penstock.testing import ManualClock


class Slow:
    """An event store that writes when it is let."""

    def __init__(self) -> None:
        self.store = MemoryEventStore()
        self.let = asyncio.Event()
        self.batches: list[int] = []
        self.failure: Exception | None = None

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        await self.let.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        self.batches.append(len(events))
        await self.store.append(run_id, epoch, events)


class Open:
    """A log over a slow store."""

    def __init__(self, last_seq: int = 0) -> None:
        self.slow = Slow()
        self.lost = 0
        store: Any = self.slow
        self.log = EventWriter(store.append, "r", 0, last_seq, clock=ManualClock(), on_fenced=self._count)

    def _count(self) -> None:
        self.lost += 1

    async def __aenter__(self) -> Open:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.log.close()

    async def written(self) -> list[tuple[int, str, Any]]:
        return [(event.seq, event.type, event.data) for event in await self.slow.store.read("r", limit=100_000)]


async def test_what_gathers_while_the_store_writes_is_written_at_once() -> None:
    async with Open() as here:
        here.log.emit("first")
        here.log.start()
        await asyncio.sleep(0)
        for number in range(900):
            here.log.emit("next", {"number": number})
        here.slow.let.set()
        await here.log.flush()
        assert here.slow.batches == [1, 500, 400]
        assert [seq for seq, _, _ in await here.written()] == [*range(1, 902)]


async def test_pieces_of_one_text_are_joined_and_others_keep_their_order() -> None:
    def piece(text: str, source: str = "a") -> tuple[str, dict[str, str]]:
        return "text.delta", {"node_id": "n", "source": source, "text": text}

    async with Open() as here:
        here.slow.let.set()
        for emitted in (piece("1"), piece("2"), piece("x", "b"), piece("3"), ("other", {}), piece("4"), piece("5")):
            here.log.emit(*emitted)
        await here.log.flush()
        assert [(type, data.get("text")) for _, type, data in await here.written()] == [
            ("text.delta", "12"),
            ("text.delta", "x"),
            ("text.delta", "3"),
            ("other", None),
            ("text.delta", "45"),
        ]


async def test_a_piece_that_is_being_written_is_not_changed_any_more() -> None:
    async with Open() as here:
        here.log.emit("text.delta", {"node_id": "n", "source": "a", "text": "1"})
        here.log.start()
        await asyncio.sleep(0)  # it is on its way
        here.log.emit("text.delta", {"node_id": "n", "source": "a", "text": "2"})
        here.slow.let.set()
        await here.log.flush()
        assert [data["text"] for _, _, data in await here.written()] == ["1", "2"]


async def test_a_joined_text_has_a_longest_length() -> None:
    async with Open() as here:
        here.slow.let.set()
        for _ in range(5):
            here.log.emit("text.delta", {"node_id": "n", "source": "a", "text": "x" * 6_000})
        await here.log.flush()
        assert [len(data["text"]) for _, _, data in await here.written()] == [12_000, 12_000, 6_000]


async def test_run_that_fills_the_buffer_waits_until_the_store_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_pipeline, "MAX_BUFFERED", 10)
    async with Open() as here:
        for _ in range(10):
            here.log.emit("one")
        assert here.log.is_full
        waiting = asyncio.create_task(here.log.room())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        here.slow.let.set()
        await waiting


async def test_unavailable_store_is_retried_and_nothing_is_lost() -> None:
    async with Open() as here:
        here.slow.failure = StoreUnavailable("away")
        here.slow.let.set()
        here.log.emit("one")
        here.log.emit("two")
        await here.log.flush()
        assert [type for _, type, _ in await here.written()] == ["one", "two"]


@pytest.mark.parametrize("refusal", [Fenced("r", 0), Conflict("there is another event 1")])
async def test_fenced_writer_reports_it_and_writes_nothing_more(refusal: Exception) -> None:
    async with Open() as here:
        here.slow.failure = refusal
        here.slow.let.set()
        here.log.emit("one")
        with pytest.raises(Fenced):
            await here.log.flush()
        here.log.emit("two")
        await here.log.room()
        assert (here.lost, await here.written()) == (1, [])


async def test_an_event_that_no_store_takes_is_replaced_and_the_others_are_kept() -> None:
    async with Open() as here:
        here.slow.let.set()
        here.log.emit("good")
        here.log.emit("bad", {"value": object()})
        here.log.emit("good too")
        await here.log.flush()
        assert [type for _, type, _ in await here.written()] == ["good", "bad", "good too"]
        assert "cannot be stored" in (await here.written())[1][2]["lost"]


def test_a_store_in_memory_refuses_values_that_are_not_json() -> None:
    with pytest.raises(InvalidValue):
        asyncio.run(MemoryEventStore().append("r", 0, [HostedEvent(1, 0, "x", {"value": object()})]))


async def test_burst_of_events_is_one_append_and_flush_does_not_wait_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_pipeline, "GATHER_S", 3_600)
    async with Open() as opened:
        opened.slow.let.set()
        for name in ("run.started", "node.started", "call.started"):
            opened.log.emit(name)
            await asyncio.sleep(0)
        await opened.log.flush()
        assert opened.slow.batches == [3]
        opened.log.emit("run.completed")
        opened.log.start()
        await opened.log.changed()
        assert opened.slow.batches == [3, 1]


class TransactionalStore(Slow):
    """Records which event types are appended outside a transaction, and which inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.inside: list[str] = []

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        await super().append(run_id, epoch, events)
        self.outside += [event.type for event in events]

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        class Stores:
            events = self.store

        before = len(await self.store.read("r"))
        result = await unit(Stores)
        self.inside += [event.type for event in (await self.store.read("r"))[before:]]
        return result


async def finish(stores: Any) -> str:
    return "closed"


async def test_last_event_is_not_stored_by_a_write_in_progress_but_with_the_end_of_the_run() -> None:
    store = TransactionalStore()
    untyped: Any = store
    log = EventWriter(untyped.append, "r", 0, 0, clock=ManualClock(), on_fenced=lambda: None)
    log.emit("one")
    log.start()
    await asyncio.sleep(0)
    log.emit("two")
    ending = asyncio.create_task(log.end("run.completed", {"output": 1}, store.transaction, finish, inline=True))
    await asyncio.sleep(0)
    store.let.set()
    assert await ending == "closed"
    assert (store.outside, store.inside) == (["one", "two"], ["run.completed"])
    assert [event.seq for event in await store.store.read("r")] == [1, 2, 3]
    assert (log.is_ended, log.written, log.seq) == (True, 3, 3)
    await log.close()


async def test_end_that_fails_stores_nothing_and_can_be_tried_again() -> None:
    store = TransactionalStore()
    untyped: Any = store
    log = EventWriter(untyped.append, "r", 0, 0, clock=ManualClock(), on_fenced=lambda: None)
    log.append("one")

    async def refuse(unit: Any, *, inline: bool = False) -> Any:
        raise RuntimeError("the handler failed")

    with pytest.raises(RuntimeError, match="the handler failed"):
        await log.end("run.completed", {}, refuse, finish, inline=True)
    assert (log.is_ended, log.written, log.seq) == (False, 0, 1)
    assert await log.end("run.completed", {}, store.transaction, finish, inline=True) == "closed"
    assert store.inside == ["one", "run.completed"]
    await log.close()


async def test_event_is_written_soon_without_a_waiting_caller() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.emit("run.started")
        await opened.log.changed()
        assert await opened.written() == [(1, "run.started", {})]


async def test_event_emitted_after_close_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pipeline, "GATHER_S", 0)
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.emit("run.completed")
        await opened.log.flush()
    opened.log.emit("too.late")
    opened.log.schedule()
    await asyncio.sleep(0.01)
    assert [type for _, type, _ in await opened.written()] == ["run.completed"]


async def test_flush_raises_the_error_of_a_failed_write(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Open() as opened:
        opened.log.emit("one")
        opened.log.start()
        await asyncio.sleep(0)
        waiting = asyncio.create_task(opened.log.flush())
        await asyncio.sleep(0)
        opened.slow.failure = RuntimeError("a fault of the store")
        monkeypatch.setattr(opened.slow.store, "append", _broken)
        opened.slow.let.set()
        with pytest.raises(RuntimeError, match="broken"):
            await waiting


async def _broken(*args: object) -> None:
    raise RuntimeError("broken")


async def test_source_is_drained_before_each_write() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        left = ["second", "first"]
        opened.log.source = lambda: opened.log.emit(left.pop()) if left else None
        opened.log.schedule()
        await opened.log.changed()
        await opened.log.flush()
        assert [type for _, type, _ in await opened.written()] == ["first", "second"]


async def test_the_buffer_of_recent_events_matches_the_newest_stored_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_pipeline, "MAX_RECENT", 3)
    async with Open() as opened:
        log, slow = opened.log, opened.slow
        assert log.after(0, 10) == []
        slow.let.set()
        for number in range(5):
            log.emit(f"event.{number}")
        await log.flush()
        slow.let.clear()
        log.emit("not.written")
        assert log.after(2, 10) == [*await slow.store.read("r", 2)]
        assert [event.seq for event in log.after(3, 1) or ()] == [4]
        assert log.after(1, 10) is None, "event 2 is only in the store by now"
        assert log.after(5, 10) == log.after(99, 10) == []


async def test_writer_of_a_resumed_run_has_no_earlier_events_in_memory() -> None:
    opened = Open(last_seq=7)
    assert opened.log.after(7, 10) == []
    assert opened.log.after(6, 10) is None


async def test_what_no_store_takes_is_at_hand_as_it_is_kept() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.emit("one", {"value": float("nan")})
        opened.log.emit("two", {"value": 2})
        await opened.log.flush()
        at_hand = opened.log.after(0, 10)
        assert at_hand == [*await opened.slow.store.read("r")]
        assert at_hand is not None
        assert [event.data.keys() for event in at_hand] == [{"lost"}, {"value"}]
