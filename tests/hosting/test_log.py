"""What a run tells, on its way into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, Fenced, StoreUnavailable
from penstock.hosting.records import HostedEvent
from penstock.hosting.work import log as log_module
from penstock.hosting.work.log import RunLog
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
        self.log = RunLog(store, "r", 0, last_seq, clock=ManualClock(), on_lost=self._count)

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
        here.log.tell("first")
        here.log.hurry()
        await asyncio.sleep(0)
        for number in range(900):
            here.log.tell("next", {"number": number})
        here.slow.let.set()
        await here.log.flush()
        assert here.slow.batches == [1, 500, 400]
        assert [seq for seq, _, _ in await here.written()] == [*range(1, 902)]


async def test_pieces_of_one_text_are_joined_and_others_keep_their_order() -> None:
    def piece(text: str, source: str = "a") -> tuple[str, dict[str, str]]:
        return "text.delta", {"node_id": "n", "source": source, "text": text}

    async with Open() as here:
        here.slow.let.set()
        for told in (piece("1"), piece("2"), piece("x", "b"), piece("3"), ("other", {}), piece("4"), piece("5")):
            here.log.tell(*told)
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
        here.log.tell("text.delta", {"node_id": "n", "source": "a", "text": "1"})
        here.log.hurry()
        await asyncio.sleep(0)  # it is on its way
        here.log.tell("text.delta", {"node_id": "n", "source": "a", "text": "2"})
        here.slow.let.set()
        await here.log.flush()
        assert [data["text"] for _, _, data in await here.written()] == ["1", "2"]


async def test_a_joined_text_has_a_longest_length() -> None:
    async with Open() as here:
        here.slow.let.set()
        for _ in range(5):
            here.log.tell("text.delta", {"node_id": "n", "source": "a", "text": "x" * 6_000})
        await here.log.flush()
        assert [len(data["text"]) for _, _, data in await here.written()] == [12_000, 12_000, 6_000]


async def test_a_run_that_tells_more_than_the_line_holds_waits_until_the_store_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "MAX_LINE", 10)
    async with Open() as here:
        for _ in range(10):
            here.log.tell("one")
        assert here.log.is_full
        waiting = asyncio.create_task(here.log.room())
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        here.slow.let.set()
        await waiting


async def test_a_store_that_is_away_is_asked_again_and_nothing_is_lost() -> None:
    async with Open() as here:
        here.slow.failure = StoreUnavailable("away")
        here.slow.let.set()
        here.log.tell("one")
        here.log.tell("two")
        await here.log.flush()
        assert [type for _, type, _ in await here.written()] == ["one", "two"]


@pytest.mark.parametrize("refusal", [Fenced("r", 0), Conflict("there is another event 1")])
async def test_a_log_that_was_taken_over_says_so_and_writes_nothing_more(refusal: Exception) -> None:
    async with Open() as here:
        here.slow.failure = refusal
        here.slow.let.set()
        here.log.tell("one")
        with pytest.raises(Fenced):
            await here.log.flush()
        here.log.tell("two")
        await here.log.room()
        assert (here.lost, await here.written()) == (1, [])


async def test_an_event_that_no_store_takes_is_replaced_and_the_others_are_kept() -> None:
    async with Open() as here:
        here.slow.let.set()
        here.log.tell("good")
        here.log.tell("bad", {"value": object()})
        here.log.tell("good too")
        await here.log.flush()
        assert [type for _, type, _ in await here.written()] == ["good", "bad", "good too"]
        assert "cannot be kept" in (await here.written())[1][2]["lost"]


def test_a_store_in_memory_refuses_what_is_no_json() -> None:
    with pytest.raises(InvalidValue):
        asyncio.run(MemoryEventStore().append("r", 0, [HostedEvent(1, 0, "x", {"value": object()})]))


async def test_what_is_told_in_one_burst_is_one_append_and_whoever_waits_for_it_does_not_wait_for_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "GATHER_S", 3_600)
    async with Open() as opened:
        opened.slow.let.set()
        for name in ("run.started", "node.started", "call.started"):
            opened.log.tell(name)
            await asyncio.sleep(0)
        await opened.log.flush()
        assert opened.slow.batches == [3]
        opened.log.tell("run.completed")
        opened.log.hurry()
        await opened.log.bell.wait()
        assert opened.slow.batches == [3, 1]


async def test_what_is_hastened_is_written_by_whoever_waits_for_it_and_no_task_is_made() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.put("run.completed")
        opened.log.hasten()
        tasks = asyncio.all_tasks()
        await opened.log.flush()
        assert asyncio.all_tasks() == tasks
        await asyncio.sleep(0)
        assert (asyncio.all_tasks(), opened.slow.batches) == (tasks, [1])


async def test_what_is_hastened_is_written_while_whoever_tells_it_waits_for_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_module, "GATHER_S", 3_600)
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.tell("node.completed")
        opened.log.put("run.completed")
        opened.log.hasten()
        await opened.log.bell.wait()
        assert opened.slow.batches == [2]


async def test_what_is_hastened_while_the_store_writes_is_written_next_and_once() -> None:
    async with Open() as opened:
        opened.log.tell("one")
        opened.log.hurry()
        await asyncio.sleep(0)
        opened.log.put("two")
        opened.log.hasten()
        opened.slow.let.set()
        await opened.log.flush()
        assert opened.slow.batches == [1, 1]


async def test_what_is_hastened_is_left_if_the_log_is_closed_first() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.put("run.completed")
        opened.log.hasten()
        await opened.log.close()
        await asyncio.sleep(0)
        assert opened.slow.batches == []


async def test_an_event_that_nobody_waits_for_is_written_soon_all_the_same() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.tell("run.started")
        await opened.log.bell.wait()
        assert await opened.written() == [(1, "run.started", {})]


async def test_what_is_told_after_the_log_was_closed_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "GATHER_S", 0)
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.tell("run.completed")
        await opened.log.flush()
    opened.log.tell("too.late")
    opened.log.rouse()
    await asyncio.sleep(0.01)
    assert [type for _, type, _ in await opened.written()] == ["run.completed"]


async def test_who_waits_for_a_writing_that_failed_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Open() as opened:
        opened.log.tell("one")
        opened.log.hurry()
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


async def test_what_there_is_to_tell_is_asked_for_before_anything_is_written() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        left = ["second", "first"]
        opened.log.source = lambda: opened.log.tell(left.pop()) if left else None
        opened.log.rouse()
        await opened.log.bell.wait()
        await opened.log.flush()
        assert [type for _, type, _ in await opened.written()] == ["first", "second"]


async def test_what_is_at_hand_is_what_the_store_has_newest_and_never_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "AT_HAND", 3)
    async with Open() as opened:
        log, slow = opened.log, opened.slow
        assert log.after(0, 10) == []
        slow.let.set()
        for number in range(5):
            log.tell(f"event.{number}")
        await log.flush()
        slow.let.clear()
        log.tell("not.written")
        assert log.after(2, 10) == [*await slow.store.read("r", 2)]
        assert [event.seq for event in log.after(3, 1) or ()] == [4]
        assert log.after(1, 10) is None, "event 2 is only in the store by now"
        assert log.after(5, 10) == log.after(99, 10) == []


async def test_a_log_that_goes_on_after_another_worker_has_nothing_of_before_at_hand() -> None:
    opened = Open(last_seq=7)
    assert opened.log.after(7, 10) == []
    assert opened.log.after(6, 10) is None


async def test_what_no_store_takes_is_at_hand_as_it_is_kept() -> None:
    async with Open() as opened:
        opened.slow.let.set()
        opened.log.tell("one", {"value": float("nan")})
        opened.log.tell("two", {"value": 2})
        await opened.log.flush()
        at_hand = opened.log.after(0, 10)
        assert at_hand == [*await opened.slow.store.read("r")]
        assert at_hand is not None
        assert [event.data.keys() for event in at_hand] == [{"lost"}, {"value"}]
