"""Events of several runs in one transaction: each keeps its claim, its numbers, its errors and its readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.hosting import event_batches
from penstock.hosting.event_batches import EventBatches
from penstock.hosting.event_pipeline import EventWriter
from penstock.hosting.ports import Fenced, RunRecord, StoreUnavailable
from penstock.storage import Stores, open_stores
from penstock.testing import ManualClock


class Batched:
    """Logs of claimed runs that share their transactions."""

    def __init__(self, stores: Stores) -> None:
        self.stores = stores
        self.transactions: list[bool] = []
        """Of each transaction, whether it may run on the event loop."""
        self.failures: list[BaseException] = []
        self.let: asyncio.Event | None = None
        """If it is set, transactions wait for it before they begin."""
        self.batches = EventBatches(self.transact)
        self.logs: list[EventWriter] = []
        self.has_more = False

    async def transact(self, unit: Any, *, inline: bool = False) -> Any:
        self.transactions.append(inline)
        if self.let is not None:
            await self.let.wait()
        if self.failures:
            raise self.failures.pop()
        return await self.stores.transaction(unit, inline=inline)

    async def claim(self, name: str) -> EventWriter:
        await self.stores.runs.add(RunRecord(name, "ann", "g", 1))
        run = await self.stores.runs.claim("w", now_ms=1, lease_ms=1_000, run_id=name)
        assert run is not None
        log = EventWriter(
            self.stores.events.append,
            name,
            run.epoch,
            0,
            clock=ManualClock(),
            on_fenced=lambda: None,
            batches=self.batches,
            has_more=lambda: self.has_more,
        )
        self.logs.append(log)
        return log

    async def stored(self, log: EventWriter) -> list[Any]:
        return [(event.seq, event.data) for event in await self.stores.events.read(log.run_id)]


@asynccontextmanager
async def batched(url: str, logs: int) -> AsyncIterator[tuple[Batched, list[EventWriter]]]:
    async with await open_stores(url) as stores:
        here = Batched(stores)
        yield here, [await here.claim(f"run-{number}") for number in range(logs)]
        for log in here.logs:
            await log.close()
        await here.batches.close()


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/runs.db"


async def until(condition: Callable[[], bool], logs: list[EventWriter]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await logs[0].changed(0.05)


async def all_stored(logs: list[EventWriter]) -> None:
    await until(lambda: all(log.written == log.seq for log in logs), logs)


async def test_events_of_several_runs_are_stored_in_one_transaction_and_their_readers_are_woken(url: str) -> None:
    async with batched(url, 5) as (here, logs):
        waiting = [asyncio.ensure_future(log.changed()) for log in logs]
        await asyncio.sleep(0)
        for number in range(3):
            for log in logs:
                log.emit("progress", {"number": number})
        assert here.transactions == []
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert here.transactions == [True]
        for log in logs:
            assert await here.stored(log) == [(1, {"number": 0}), (2, {"number": 1}), (3, {"number": 2})]
            assert [event.seq for event in log.after(0, 10) or ()] == [1, 2, 3]


async def test_events_that_come_while_a_transaction_is_under_way_are_in_the_next_one(url: str) -> None:
    async with batched(url, 2) as (here, logs):
        here.let = asyncio.Event()
        for log in logs:
            log.emit("first")
        await until(lambda: bool(here.transactions), logs)
        for log in logs:
            log.emit("second")
            assert log.after(0, 10) == []  # nothing is shown before it is stored
        here.let.set()
        await all_stored(logs)
        assert len(here.transactions) == 2
        for log in logs:
            assert [seq for seq, _ in await here.stored(log)] == [1, 2]


async def test_a_run_that_was_taken_over_is_fenced_and_the_others_lose_nothing(url: str) -> None:
    async with batched(url, 4) as (here, logs):
        assert await here.stores.runs.claim("thief", now_ms=10**6, lease_ms=1_000, run_id="run-2") is not None
        for log in logs:
            log.emit("progress")
        lost = logs.pop(2)
        await all_stored(logs)
        for log in logs:
            assert [seq for seq, _ in await here.stored(log)] == [1]
        with pytest.raises(Fenced):
            await lost.flush()
        assert await here.stored(lost) == []


async def test_an_event_that_cannot_be_stored_harms_no_other_run(url: str) -> None:
    async with batched(url, 3) as (here, logs):
        for number, log in enumerate(logs):
            log.emit("progress", {"value": float("nan") if number == 1 else number})
        await all_stored(logs)
        assert [await here.stored(log) for log in (logs[0], logs[2])] == [[(1, {"value": 0})], [(1, {"value": 2})]]
        ((_, data),) = await here.stored(logs[1])
        assert data.keys() == {"lost"}


@pytest.mark.parametrize(
    "failure", [StoreUnavailable("full"), RuntimeError("a fault of ours"), asyncio.CancelledError()]
)
async def test_after_a_failed_transaction_each_run_stores_its_own_events_once(url: str, failure: BaseException) -> None:
    async with batched(url, 3) as (here, logs):
        here.failures.append(failure)
        for log in logs:
            log.emit("progress")
        await all_stored(logs)
        for log in logs:
            assert [seq for seq, _ in await here.stored(log)] == [1]


async def test_more_events_than_one_transaction_may_have_on_the_loop_are_split(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_batches, "MAX_INLINE_EVENTS", 8)
    async with batched(url, 6) as (here, logs):
        for number, log in enumerate(logs):
            for _ in range(20 if number == 5 else 3):
                log.emit("progress")
        await all_stored(logs)
        assert here.transactions == [True, True, True, False]


async def test_a_log_that_closes_waits_for_the_transaction_that_it_shares(url: str) -> None:
    async with batched(url, 3) as (here, logs):
        here.let = asyncio.Event()
        for log in logs:
            log.emit("progress")
        await until(lambda: bool(here.transactions), logs)
        closing = asyncio.ensure_future(logs[0].close())
        await asyncio.sleep(0.01)
        assert not closing.done()
        here.let.set()
        await asyncio.wait_for(closing, 20)
        await all_stored(logs)
        assert [seq for seq, _ in await here.stored(logs[0])] == [1]


async def test_a_log_that_closes_while_its_transaction_fails_ends_and_writes_nothing_more(url: str) -> None:
    async with batched(url, 2) as (here, logs):
        here.let = asyncio.Event()
        for log in logs:
            log.emit("progress")
        await until(lambda: bool(here.transactions), logs)
        closing = asyncio.ensure_future(logs[0].close())
        await asyncio.sleep(0.01)
        here.failures.append(StoreUnavailable("full"))
        here.let.set()
        await asyncio.wait_for(closing, 20)
        await all_stored(logs[1:])
        assert await here.stored(logs[0]) == []


async def test_a_run_with_other_data_to_store_writes_its_events_with_that_data(url: str) -> None:
    async with batched(url, 3) as (here, logs):
        here.has_more = True
        for log in logs:
            log.emit("progress")
        await all_stored(logs)
        assert here.transactions == []


async def test_who_waits_for_its_events_need_not_wait_for_those_of_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_batches, "GATHER_S", 600)
    async with batched(url, 3) as (here, logs):
        for log in logs:
            log.emit("progress")
        await logs[1].flush()
        assert (logs[1].written, logs[0].written, here.transactions) == (1, 0, [])
