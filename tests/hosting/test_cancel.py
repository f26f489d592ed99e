"""Stopping a run: before it is there, queued, here, elsewhere, while it waits, twice, too late, over a restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.errors import InvalidValue
from penstock.hosting.host import CancelResult, RunHost
from penstock.hosting.ports import ENDED, CancelRequest
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock, SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, host_with, killed
from tests.hosting.test_host import Kind, types_of

pytestmark = pytest.mark.requirement("K-13")


async def ended(host: RunHost, run_id: str) -> tuple[str, str | None, str | None]:
    run = await host.wait(run_id)
    return run.status, run.stop_reason, run.error


async def cancelled_at_work(host: RunHost, gate: Gate, run_id: str) -> None:
    """A run that was cancelled while it was at the gate, and has ended."""
    await host.submit(owner="ann", graph_id="gate", run_id=run_id, input="x")
    await gate.entered.wait()
    await host.cancel(run_id)
    await host.wait(run_id)


CANCELLED = ("cancelled", "aborted", "enough")
NEVER_TICKS = replace(SETTINGS, tick_s=1_000)


async def test_a_cancel_before_the_run_is_submitted_is_remembered_and_applied_at_submission() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        assert await host.cancel("r", reason="enough", by="bob") is CancelResult.REMEMBERED
        run = await host.submit(owner="ann", graph_id="gate", run_id="r")
        assert run.status == "cancelled"
        assert await ended(host, "r") == CANCELLED
        assert await types_of(host, "r") == ["run.queued", "run.cancelled"]
        assert await host.cancel("r") is CancelResult.ENDED
    assert gate.came == 0


async def test_a_cancel_ahead_that_is_meant_for_ones_own_run_leaves_anothers_alone() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        assert await host.cancel("r", reason="enough", by="bob", owner="bob") is CancelResult.REMEMBERED
        await host.submit(owner="ann", graph_id="echo", run_id="r", input="x")
        run = await host.wait("r")
        assert (run.status, run.output, run.error) == ("completed", "x", None)
        assert await host.cancel("r", by="bob", owner="bob") is CancelResult.REMEMBERED, "as if it were not there"


async def test_an_early_cancel_of_ones_own_run_holds_whatever_another_has_requested_before() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as first:
        for name, reason in (("bob", "mine now"), ("ann", "enough")):
            assert await first.cancel("r", reason=reason, by=name, owner=name) is CancelResult.REMEMBERED
    async with await host_with(stores) as host:
        assert (await host.submit(owner="ann", graph_id="echo", run_id="r")).status == "cancelled"
        assert await ended(host, "r") == CANCELLED


def test_a_cancel_that_is_meant_for_ones_own_run_does_not_reach_anothers_wherever_it_is() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        clock = loop.clock
        stores, gate = MemoryStores(clock=clock), Gate()
        async with await host_with(stores, gate=gate, clock=clock) as here:
            elsewhere = await host_with(stores, clock=clock)
            await elsewhere.cancel("r", by="bob", owner="bob")
            await here.submit(owner="ann", graph_id="gate", run_id="r", input="x")
            await gate.entered.wait()
            for host in (here, elsewhere):
                assert await host.cancel("r", by="bob", owner="bob") is CancelResult.REMEMBERED
            await asyncio.sleep(60)  # a thousand ticks, in no time
            assert (await stores.runs.get("r")).status == "running"  # type: ignore[union-attr]
            assert await elsewhere.cancel("r", reason="enough", by="root") is CancelResult.CANCELLED, "it is the first"
            assert await ended(here, "r") == CANCELLED
            assert await here.cancel("r", owner="ann") is CancelResult.ENDED

    sim_run(main, seed=1)


async def test_a_cancel_that_is_meant_for_ones_own_run_leaves_anothers_that_waits_in_the_queue() -> None:
    stores = MemoryStores()
    host = await host_with(stores)
    await host.submit(owner="ann", graph_id="echo", run_id="r")
    assert await host.cancel("r", by="bob", owner="bob") is CancelResult.REMEMBERED
    assert await host.cancel("r", reason="enough", by="ann", owner="ann") is CancelResult.CANCELLED
    assert await ended(host, "r") == CANCELLED


@pytest.mark.parametrize("owner", ["", 7, b"ann"])
async def test_an_owner_that_is_no_name_is_refused(owner: object) -> None:
    host = await host_with(MemoryStores())
    with pytest.raises(InvalidValue, match="owner must be"):
        await host.cancel("r", owner=owner)  # type: ignore[arg-type]


async def test_an_early_cancel_expires() -> None:
    stores, clock = MemoryStores(), ManualClock()
    async with await host_with(stores, clock=clock) as host:
        assert await host.cancel("r") is CancelResult.REMEMBERED
        clock.advance(SETTINGS.early_cancel_s + 1)
        await host.submit(owner="ann", graph_id="echo", run_id="r")
        assert (await host.wait("r")).status == "completed"


async def test_queued_run_is_cancelled_in_place_and_its_handler_is_called() -> None:
    stores = MemoryStores()
    host = await host_with(stores)
    kind = host.handlers["mine"] = Kind(stores)
    await host.submit(owner="ann", graph_id="echo", run_id="r", origin={"kind": "mine"})
    assert await host.cancel("r", reason="enough") is CancelResult.CANCELLED
    assert await ended(host, "r") == CANCELLED
    assert kind.ends == [("cancelled", None)]
    totals = host.stats()["totals"]
    assert (totals["cancelled"], totals["ended:cancelled:aborted"]) == (1, 1)
    await host.start()
    assert await types_of(host, "r") == ["run.queued", "run.cancelled"]
    await host.close()


async def test_a_run_that_is_worked_on_here_is_stopped_and_a_second_cancel_changes_nothing() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        await host.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        first, second = await asyncio.gather(
            host.cancel("r", reason="enough"), host.cancel("r", reason="more than enough")
        )
        assert {first, second} == {CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED}
        assert (await host.wait("r")).status == "cancelled"
        assert await host.cancel("r") is CancelResult.ENDED
        types = [type for type in await types_of(host, "r") if type != "budget" and not type.startswith("call.")]
        assert types[-2:] == ["node.cancelled", "run.cancelled"]


async def test_a_run_that_another_host_works_on_is_stopped_there() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as here:
        await here.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        elsewhere = await host_with(stores)
        assert await elsewhere.cancel("r", reason="enough") is CancelResult.CANCELLED
        assert await ended(elsewhere, "r") == CANCELLED
        assert await elsewhere.cancel("r") is CancelResult.ENDED


@pytest.mark.requirement("X-7")
async def test_cancel_of_a_waiting_run_withdraws_its_approval() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        await host.submit(owner="ann", graph_id="ask", run_id="r")
        async for event in host.events("r"):
            if event.type == "run.waiting":
                break
        assert await host.cancel("r", reason="enough") is CancelResult.CANCELLED
        assert await ended(host, "r") == CANCELLED
    (approval,) = await stores.approvals.list(run_id="r")
    assert approval.state == "withdrawn"


async def test_a_cancel_whose_host_died_is_done_by_the_one_that_takes_the_run_over() -> None:
    stores, gate, clock = MemoryStores(), Gate(), ManualClock()
    dying = await host_with(stores, gate=gate, clock=clock, settings=replace(SETTINGS, tick_s=1_000))
    await dying.start()
    await dying.submit(owner="ann", graph_id="gate", run_id="r")
    await gate.entered.wait()
    next_host = await host_with(stores, gate=gate, clock=clock)
    cancelling = asyncio.create_task(next_host.cancel("r", reason="enough"))
    await asyncio.sleep(0)
    await killed(dying)
    clock.advance(SETTINGS.lease_s + 1)
    async with next_host:
        assert await ended(next_host, "r") == CANCELLED
        assert await cancelling is CancelResult.CANCELLED
    assert gate.came == 1


async def with_a_parked_run() -> tuple[MemoryStores, Gate]:
    """Stores with a run whose host was closed while a node worked on it, and the gate that the node stands at."""
    stores, gate = MemoryStores(), Gate()
    host = await host_with(stores, gate=gate)
    await host.start()
    await host.submit(owner="ann", graph_id="gate", run_id="r")
    await gate.entered.wait()
    await host.close()
    return stores, gate


async def test_a_parked_run_can_be_cancelled_and_is_not_resumed() -> None:
    stores, gate = await with_a_parked_run()
    assert (await stores.runs.get("r")).status == "parked"  # type: ignore[union-attr]
    next_host = await host_with(stores, gate=gate)
    assert await next_host.cancel("r", reason="enough") is CancelResult.CANCELLED
    async with next_host:
        assert await ended(next_host, "r") == CANCELLED
    assert gate.came == 1


def cancel_request(run_id: str) -> CancelRequest:
    """A cancel request that was stored by a host which died before doing more."""
    return CancelRequest(run_id, "enough", "bob", at_ms=0, until_ms=1 << 52)


async def test_a_cancel_of_a_parked_run_whose_asker_died_is_done_by_the_next_host() -> None:
    stores, gate = await with_a_parked_run()
    await stores.cancels.put(cancel_request("r"))
    gate.opened.set()
    async with await host_with(stores, gate=gate) as next_host:
        assert await ended(next_host, "r") == CANCELLED
    assert gate.came == 1


async def test_a_worker_looks_for_a_cancel_before_anything_of_the_run_is_done() -> None:
    stores, gate, clock = MemoryStores(), Gate(), ManualClock()
    gate.opened.set()
    async with await host_with(stores, gate=gate, clock=clock, settings=NEVER_TICKS) as host:
        await host.wait((await host.submit(owner="ann", graph_id="echo")).id)  # its first tick is over
        elsewhere = await host_with(stores, clock=clock)
        await elsewhere.submit(owner="ann", graph_id="gate", run_id="r")
        await stores.cancels.put(cancel_request("r"))
        clock.advance(1)
        await host.submit(owner="ann", graph_id="echo")  # it looks at the queue, and claims the older one first
        assert await ended(host, "r") == CANCELLED
        assert await types_of(host, "r") == ["run.queued", "run.cancelled"]
    assert gate.came == 0


async def test_a_worker_looks_for_a_cancel_once_more_when_all_is_done() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate, settings=NEVER_TICKS) as host:
        await host.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        await stores.cancels.put(cancel_request("r"))
        gate.opened.set()
        assert await ended(host, "r") == CANCELLED


async def test_a_cancelled_run_that_is_resumed_is_not_cancelled_again() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        await cancelled_at_work(host, gate, "r")
        gate.opened.set()
        assert (await host.resume("r")).status == "queued"
        run = await host.wait("r")
        assert (run.status, run.output, run.error, run.stop_reason) == ("completed", "x", None, None)
        assert [type for type in await types_of(host, "r") if type.startswith("run.")] == [
            "run.queued",
            "run.started",
            "run.cancelled",
            "run.queued",
            "run.resumed",
            "run.completed",
        ]


async def test_a_cancel_is_forgotten_once_its_run_has_ended_by_it_wherever_that_was() -> None:
    stores, gate = MemoryStores(), Gate()
    host = await host_with(stores, gate=gate)
    await host.submit(owner="ann", graph_id="gate", run_id="queued")
    await host.cancel("queued")
    async with host:
        await cancelled_at_work(host, gate, "here")
    assert not await stores.cancels.find({"queued": "ann", "here": "ann"}, now_ms=0)


async def test_a_cancel_that_comes_too_late_is_not_kept() -> None:
    stores = MemoryStores()
    async with await host_with(stores) as host:
        await host.wait((await host.submit(owner="ann", graph_id="echo", run_id="r")).id)
    assert await host.cancel("r") is CancelResult.ENDED
    assert not await stores.cancels.find({"r": "ann"}, now_ms=0)


async def test_a_cancel_that_was_kept_after_the_end_does_not_strike_when_the_run_is_resumed() -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        await cancelled_at_work(host, gate, "r")
    await stores.cancels.put(cancel_request("r"))
    gate.opened.set()
    async with host:
        await host.resume("r")
        assert (await host.wait("r")).status == "completed"


@pytest.mark.parametrize("reason", ["", "\0\ud800 ünï", "x" * 100_000])
async def test_any_reason_can_be_given(reason: str) -> None:
    stores, gate = MemoryStores(), Gate()
    async with await host_with(stores, gate=gate) as host:
        await host.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        assert await host.cancel("r", reason=reason) is CancelResult.CANCELLED
        assert (await host.wait("r")).status in ENDED
