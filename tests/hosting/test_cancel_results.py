"""The result of a cancel is true, and a cancel request for an existing run counts until it has ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from penstock.hosting.host import REMOVE_S, TIDY_S, CancelResult, RunHost
from penstock.hosting.ports import UNTIL_ENDED, CancelRequest, HostedEvent
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock, SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, host_with, killed

pytestmark = pytest.mark.requirement("K-13")

LATER_S = SETTINGS.early_cancel_s + 1


def sim_clock() -> Any:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop.clock


async def left_by_a_dead_host(stores: MemoryStores, clock: Any, gate: Gate) -> None:
    """A run that stands at the gate, and whose host has died."""
    dying = await host_with(stores, gate=gate, clock=clock, worker="dying")
    await dying.start()
    await dying.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await gate.entered.wait()
    await killed(dying)


class Held:
    """A method of a store whose next call waits, before or after it is done, until it is let go."""

    def __init__(self, store: Any, name: str, *, is_after: bool = False) -> None:
        self.reached, self.let_go = asyncio.Event(), asyncio.Event()
        self._method, self._is_after = getattr(store, name), is_after
        setattr(store, name, self._call)

    async def _call(self, *args: Any, **given: Any) -> Any:
        if self.reached.is_set():
            return await self._method(*args, **given)
        self.reached.set()
        if not self._is_after:
            await self.let_go.wait()
        answer = await self._method(*args, **given)
        await self.let_go.wait()
        return answer


# As long as the run is there.


def test_a_cancel_of_a_run_whose_host_is_dead_holds_however_late_the_next_host_comes() -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        await left_by_a_dead_host(stores, clock, gate)
        front = await host_with(stores, clock=clock)
        result = await front.cancel("r", reason="enough", by="ann")
        assert result is CancelResult.REMEMBERED, "no worker has confirmed it"
        await asyncio.sleep(LATER_S)
        gate.opened.set()
        async with await host_with(stores, gate=gate, clock=clock) as host:
            left = await host.wait("r")
        assert (left.status, left.error, gate.came) == ("cancelled", "enough", 1)
        assert not await stores.cancels.of("r")

    sim_run(main, seed=1)


def test_a_cancel_request_of_an_existing_run_lasts_as_long_as_the_run_even_if_its_sender_dies() -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        await left_by_a_dead_host(stores, clock, gate)
        keeping = Held(stores.cancels, "put", is_after=True)
        asking = asyncio.create_task((await host_with(stores, clock=clock)).cancel("r"))
        await keeping.reached.wait()
        asking.cancel()
        await asyncio.sleep(LATER_S)
        gate.opened.set()
        async with await host_with(stores, gate=gate, clock=clock) as host:
            assert (await host.wait("r")).status == "cancelled"

    sim_run(main, seed=1)


@pytest.mark.parametrize("owner", [None, "ann"])
def test_early_cancel_repeated_once_the_run_exists_is_valid_until_the_run_ends(owner: str | None) -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        front = await host_with(stores, clock=clock)
        await left_by_a_dead_host(stores, clock, gate)
        await stores.cancels.put(CancelRequest("r", "enough", "bob", 0, clock.time_ns() // 1_000_000 + 1_000))
        await front.cancel("r", reason="more than enough", owner=owner)
        await asyncio.sleep(LATER_S)
        gate.opened.set()
        async with await host_with(stores, gate=gate, clock=clock) as host:
            assert (await host.wait("r")).status == "cancelled"
        assert gate.came == 1

    sim_run(main, seed=1)


def cancel_request(run_id: str) -> CancelRequest:
    """A cancel request for an existing run, stored by a host that died before doing more."""
    return CancelRequest(run_id, "enough", "bob", at_ms=0, until_ms=UNTIL_ENDED)


def test_cancel_requests_of_ended_or_removed_runs_are_deleted_and_those_of_others_are_not() -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        await left_by_a_dead_host(stores, clock, gate)
        async with await host_with(stores, clock=clock, settings=replace(SETTINGS, max_running=1)) as host:
            for run_id in ("ended", "removed"):
                await host.wait((await host.submit(owner="ann", graph_id="echo", run_id=run_id)).id)
            await host.remove("removed")
            host._claims.is_closing = True  # it claims nothing more
            for run_id in ("r", "ended", "removed"):
                await stores.cancels.put(cancel_request(run_id))
            await asyncio.sleep(REMOVE_S + TIDY_S)
            assert [intent.run_id for intent in await stores.cancels.lasting()] == ["r"]

    sim_run(main, seed=1)


# The result of a cancel.


def test_cancel_after_the_decision_is_only_reported_as_remembered() -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        elsewhere = await host_with(stores, clock=clock)
        async with await host_with(stores, gate=gate, clock=clock) as host:
            await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
            await gate.entered.wait()
            ending = Held(stores, "transaction")
            gate.opened.set()
            await ending.reached.wait()
            for one in (elsewhere, host):
                assert await one.cancel("r", by="ann") is CancelResult.REMEMBERED
            ending.let_go.set()
            assert (await host.wait("r")).status == "completed"
            assert await elsewhere.cancel("r") is CancelResult.ENDED

    sim_run(main, seed=1)


ENDS: dict[str, dict[str, Any]] = {
    "completed": {"output": "x"},
    "cancelled": {"reason": "cancelled", "cause": "user"},
}


async def left_by_version_0_1(stores: MemoryStores, clock: Any, gate: Gate, end: str) -> None:
    """A run whose worker died between its last event and its status, which version 0.1 stored one after the other."""
    await left_by_a_dead_host(stores, clock, gate)
    run = await stores.runs.get("r")
    assert run is not None
    seq = await stores.events.last_seq("r")
    await stores.events.append("r", run.epoch, [HostedEvent(seq + 1, run.created_ms, f"run.{end}", ENDS[end])])


@pytest.mark.parametrize("end", ENDS)
def test_run_whose_version_0_1_worker_stored_only_its_last_event_ends_as_that_event_reports(end: str) -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        await left_by_version_0_1(stores, clock, gate, end)
        host = await host_with(stores, gate=gate, clock=clock)
        assert await host.cancel("r", by="ann") is (
            CancelResult.ENDED if end == "completed" else CancelResult.CANCELLED
        )
        await asyncio.sleep(SETTINGS.lease_s)
        async with host:
            assert (await host.wait("r")).status == end
        assert not await stores.cancels.of("r")

    sim_run(main, seed=1)


async def test_a_host_that_has_lost_a_run_to_another_does_not_answer_for_it() -> None:
    stores, gate, clock = MemoryStores(), Gate(), ManualClock()
    never_ticks = replace(SETTINGS, tick_s=1_000)
    async with await host_with(stores, gate=gate, clock=clock, settings=never_ticks) as slept:
        await slept.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await gate.entered.wait()
        log = slept._runs.by_id["r"].log
        assert log is not None
        await log.flush()  # else it finds out by what it still has to tell
        clock.advance(SETTINGS.lease_s + 1)
        taken = await stores.runs.claim("other", now_ms=clock.time_ns() // 1_000_000, lease_ms=1_000)
        assert taken is not None
        keeping = Held(stores.cancels, "put", is_after=True)
        cancelling = asyncio.create_task(slept.cancel("r"))
        await keeping.reached.wait()
        looking = Held(stores.cancels, "find")  # whether the cancel request is still there, which another is to find
        keeping.let_go.set()
        await asyncio.wait([cancelling, asyncio.create_task(looking.reached.wait())], return_when="FIRST_COMPLETED")
        await stores.runs.update("r", taken.epoch, status="completed", ended_ms=1)
        looking.let_go.set()
        assert await cancelling is CancelResult.ENDED


# With a resume at the same time.


async def cancelled_at_the_gate(host: RunHost, gate: Gate) -> None:
    await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await gate.entered.wait()
    gate.entered.clear()
    await host.cancel("r")


@pytest.mark.parametrize(
    "stale", [[], [replace(cancel_request("r"), owner="ann")]], ids=["alone", "beside one that was left"]
)
async def test_a_cancel_that_comes_while_a_run_is_resumed_counts_also_if_its_asker_dies(
    stale: list[CancelRequest],
) -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        await cancelled_at_the_gate(host, gate)
        await host.wait("r")
        for intent in stale:
            await stores.cancels.put(intent)
        held = Held(stores, "transaction", is_after=True)
        resuming = asyncio.create_task(host.resume("r"))
        await held.reached.wait()
        await stores.cancels.put(replace(cancel_request("r"), reason="again"))
        gate.opened.set()
        held.let_go.set()
        await resuming
        left = await host.wait("r")
        assert (left.status, left.error, gate.came) == ("cancelled", "again", 1)


# While the next host takes up what was parked.


async def parked_at_the_gate(stores: MemoryStores, gate: Gate) -> None:
    async with await host_with(stores, gate=gate, worker="before") as before:
        await before.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await gate.entered.wait()
    gate.opened.set()


@pytest.mark.parametrize(
    ("store", "name"), [("runs", "list"), ("runs", "get"), ("events", "last_seq"), ("runs", "requeue")]
)
async def test_a_run_that_was_parked_and_is_cancelled_is_not_taken_up_by_who_saw_it_parked(
    store: str, name: str
) -> None:
    stores, gate = MemoryStores(), Gate()
    await parked_at_the_gate(stores, gate)
    front = await host_with(stores, gate=gate, worker="front")
    host = await host_with(stores, gate=gate, worker="next")
    looking = Held(getattr(stores, store), name, is_after=name != "requeue")
    starting = asyncio.create_task(host.start())
    await looking.reached.wait()
    assert await front.cancel("r") is CancelResult.CANCELLED
    looking.let_go.set()
    await starting
    async with host:
        assert (await host.wait("r")).status == "cancelled"
        await host.submit(owner="ann", graph_id="echo", run_id="other", input="x")
        await host.wait("other")
        assert ((await stores.runs.get("r")).status, gate.came) == ("cancelled", 1)  # type: ignore[union-attr]


async def test_a_parked_run_whose_canceller_died_before_the_status_is_ended_by_the_next_host() -> None:
    stores, gate = MemoryStores(), Gate()
    await parked_at_the_gate(stores, gate)
    front = await host_with(stores, gate=gate, worker="front")
    ending = Held(stores.runs, "end")
    dying = asyncio.create_task(front.cancel("r"))
    await ending.reached.wait()
    dying.cancel()
    await asyncio.wait([dying])
    async with await host_with(stores, gate=gate, worker="next") as host:
        assert (await host.wait("r")).status == "cancelled"
    assert gate.came == 1


# Ends that an earlier worker stored.


@pytest.mark.parametrize(("store", "method"), [("events", "last_seq"), ("journal", "load")])
def test_cancel_is_too_late_once_a_version_0_1_worker_has_stored_the_last_event(store: str, method: str) -> None:
    """Whether the next worker is about to read the stored events, or has read them and clears away."""

    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        await left_by_version_0_1(stores, clock, gate, "completed")
        slow = Held(getattr(stores, store), method)  # a database that is slow at that moment
        async with await host_with(stores, gate=gate, clock=clock, worker="heir") as heir:
            await slow.reached.wait()
            cancelling = asyncio.create_task(heir.cancel("r"))
            await asyncio.sleep(0.1)  # it has come to where it waits for the run
            assert not cancelling.done()
            slow.let_go.set()
            assert await cancelling is CancelResult.ENDED
            assert (await heir.wait("r")).status == "completed"

    sim_run(main, seed=1)


def test_a_cancel_that_was_put_ahead_and_done_here_holds_if_this_host_dies() -> None:
    async def main() -> None:
        clock = sim_clock()
        stores, gate = MemoryStores(clock=clock), Gate()
        dying = await host_with(stores, gate=gate, clock=clock, settings=replace(SETTINGS, tick_s=1_000))
        await dying.start()
        keeping = Held(stores.cancels, "put")  # there was no such run when it looked
        cancelling = asyncio.create_task(dying.cancel("r"))
        await keeping.reached.wait()
        await dying.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await gate.entered.wait()
        keeping.let_go.set()
        assert await cancelling is CancelResult.CANCELLED
        await killed(dying)
        await asyncio.sleep(LATER_S)
        gate.opened.set()
        async with await host_with(stores, gate=gate, clock=clock) as heir:
            assert (await heir.wait("r")).status == "cancelled"

    sim_run(main, seed=1)
