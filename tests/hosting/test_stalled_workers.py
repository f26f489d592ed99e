"""A host that sleeps through its lease: when it wakes, another has the run, and it writes nothing of it."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

from penstock.hosting.host import Prepared
from penstock.hosting.ports import CancelRequest, RunRecord
from penstock.storage.memory import MemoryStores
from penstock.testing.clock import ManualClock
from tests.hosting.graphs import SETTINGS, host_with, killed

NEVER_S = 1_000


class Stalling:
    """A store whose `method` falls asleep the `nth` time that it is called."""

    def __init__(self, store: Any, method: str, nth: int) -> None:
        self._store = store
        self._method = method
        self._left = nth
        self.asleep, self.wake = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name != self._method:
            return found

        async def stalling(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            if not self._left:
                self.asleep.set()
                await self.wake.wait()
            return await found(*args, **kwargs)

        return stalling


class Kind:
    """Handlers that record the end of a run."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def of(self, worker: str) -> Any:
        kind = self

        class OfWorker:
            async def on_start(self, run: RunRecord) -> Prepared:
                return Prepared(run.input)

            async def on_resume(self, run: RunRecord) -> None:
                pass

            async def on_end(self, run: RunRecord, stores: Any) -> None:
                kind.ends.append((worker, run.status))

        return OfWorker()


async def test_who_has_lost_a_run_asks_nothing_for_it() -> None:
    clock = ManualClock()
    stores = MemoryStores(clock=clock)
    mine, stalling = copy.copy(stores), Stalling(stores.approvals, "ask", 1)
    mine.approvals = stalling  # type: ignore[assignment]
    first = await host_with(mine, clock=clock, settings=replace(SETTINGS, tick_s=NEVER_S))
    await first.start()
    await first.submit(owner="ann", graph_id="ask", run_id="r", input="it")
    await stalling.asleep.wait()
    gone = first._runs.by_id["r"].gone
    clock.advance(SETTINGS.lease_s + 1)
    async with await host_with(stores, clock=clock) as second:
        async for event in second.events("r"):
            if event.type == "approval.requested":
                break
        await second.cancel("r")
        assert (await second.wait("r")).status == "cancelled"
        stalling.wake.set()
        await gone.wait()
        assert [one.state for one in await stores.approvals.list()] == ["withdrawn"]
    assert first.stats()["totals"]["lost"] == 1
    await killed(first)


async def test_fenced_worker_does_not_report_the_end_of_the_run() -> None:
    clock, kind = ManualClock(), Kind()
    stores = MemoryStores(clock=clock)
    mine, stalling = copy.copy(stores), Stalling(stores.cancels, "find", 3)  # when the run has come to its end
    mine.cancels = stalling  # type: ignore[assignment]
    first = await host_with(mine, clock=clock, settings=replace(SETTINGS, tick_s=NEVER_S))
    first.handlers["run"] = kind.of("first")
    await first.start()
    await first.submit(owner="ann", graph_id="echo", run_id="r", input="it")
    await stalling.asleep.wait()
    log, gone = first._runs.by_id["r"].log, first._runs.by_id["r"].gone
    assert log is not None
    await log.flush()  # nothing is left whose writing would prove that it was lost
    clock.advance(SETTINGS.lease_s + 1)
    await stores.cancels.put(CancelRequest("r", "enough", "ann", 0, 2**45))
    second = await host_with(stores, clock=clock)
    second.handlers["run"] = kind.of("second")
    async with second:
        assert (await second.wait("r")).status == "cancelled"
        stalling.wake.set()
        await gone.wait()
    assert kind.ends == [("second", "cancelled")]
    await killed(first)
