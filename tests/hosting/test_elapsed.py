"""The time limit of a run holds over all workers that have it: what each has worked counts, what it waited does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from penstock.clock import Clock
from penstock.hosting.host import HostSettings, RunHost, RunLimits
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Sleeper, graph, host_with, killed
from tests.hosting.test_approvals import pending_approval

NAPS = 10
NAP_S = 1.0
LONG_S = 10_000.0
EPSILON_S = 0.2
NODES = [("in", "input", {}), *((f"nap{number}", "sleeper", {"seconds": NAP_S}) for number in range(NAPS))]
TEN_NAPS = graph(*NODES, edges=" ".join(f"{a[0]}>{b[0]}" for a, b in pairwise(NODES)))
SETTINGS = HostSettings(drain_s=0, tick_s=0.05, lease_s=0.5)

Leave = Callable[[RunHost], Coroutine[Any, Any, None]]


def _clock() -> Clock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop.clock


async def _stores() -> MemoryStores:
    stores = MemoryStores(clock=_clock())
    await stores.graphs.save("naps", "ann", "naps", TEN_NAPS, now_ms=0)
    return stores


async def _started(stores: MemoryStores, worker: str) -> RunHost:
    host = await host_with(stores, settings=SETTINGS, clock=_clock(), worker=worker, sleeper=Sleeper())
    await host.start()
    return host


async def _closed(host: RunHost) -> None:
    await host.close()


async def _over_and_over(stores: MemoryStores, leave: Leave, every_s: float, claims: int) -> RunRecord:
    """The run, after so many hosts have worked on it for a while, with long times in between when no host did."""
    for number in range(claims):
        host = await _started(stores, f"w{number}")
        await asyncio.sleep(every_s)
        await leave(host)
        await asyncio.sleep(LONG_S)
    run = await stores.runs.get("r")
    assert run is not None
    return run


async def _events(stores: MemoryStores) -> list[HostedEvent]:
    return list(await stores.events.read("r", limit=10_000))


@pytest.mark.parametrize("leave", [_closed, killed])
def test_a_run_that_is_left_and_taken_up_again_and_again_has_its_time_once(leave: Leave) -> None:
    async def main() -> None:
        stores = await _stores()
        host = await host_with(stores, settings=SETTINGS, clock=_clock())
        await host.submit(owner="ann", graph_id="naps", run_id="r", limits={"timeout_s": 5})
        run = await _over_and_over(stores, leave, every_s=1.5, claims=8)
        assert (run.status, run.stop_reason) == ("halted", "timeout")
        events = await _events(stores)
        done = {event.data["node_id"] for event in events if event.type == "node.completed"} - {"in"}
        assert 3 <= len(done) <= 5
        times = [event.data["worked_ms"] for event in events if event.type == "run.resumed"]
        assert times == sorted(times)
        assert 3_000 <= times[-1] < 5_000

    sim_run(main, seed=1)


def test_the_time_between_two_workers_does_not_count() -> None:
    async def main() -> None:
        stores = await _stores()
        host = await host_with(stores, settings=SETTINGS, clock=_clock())
        limits = {"timeout_s": NAPS * NAP_S + 6}  # six times half a nap is begun and done again
        await host.submit(owner="ann", graph_id="naps", run_id="r", limits=limits)
        run = await _over_and_over(stores, _closed, every_s=2.5, claims=6)
        assert run.status == "completed"

    sim_run(main, seed=1)


def test_granted_time_is_added_to_the_elapsed_time() -> None:
    async def main() -> None:
        stores, loop = await _stores(), asyncio.get_running_loop()
        async with await _started(stores, "w") as host:
            began = loop.time()
            await host.submit(owner="ann", graph_id="naps", run_id="r", limits={"timeout_s": 2.5})
            assert (await host.wait("r")).stop_reason == "timeout"
            assert loop.time() - began == pytest.approx(2.5, abs=EPSILON_S)
            await host.resume("r")
            assert (await host.wait("r")).stop_reason == "timeout"
            assert loop.time() - began == pytest.approx(2.5, abs=EPSILON_S), "there was no time left"
            await asyncio.sleep(LONG_S / 100)  # while the host ticks
            again = loop.time()
            await host.grant("r", RunLimits(timeout_s=3), by="eve")
            left = await host.wait("r")
            assert (left.stop_reason, left.limits["timeout_s"]) == ("timeout", 5.5)
            assert loop.time() - again == pytest.approx(3, abs=EPSILON_S)
            await host.grant("r", RunLimits(timeout_s=100), by="eve")
            assert (await host.wait("r")).status == "completed"

    sim_run(main, seed=1)


def test_waiting_for_an_answer_counts_under_one_worker_and_under_several() -> None:
    async def main() -> None:
        stores, loop = await _stores(), asyncio.get_running_loop()
        async with await _started(stores, "w") as host:
            began = loop.time()
            await host.submit(owner="ann", graph_id="ask", run_id="one", limits={"timeout_s": 5})
            assert (await host.wait("one")).stop_reason == "timeout"
            assert loop.time() - began == pytest.approx(5, abs=EPSILON_S)
            await host.submit(owner="ann", graph_id="ask", run_id="r", limits={"timeout_s": 5})
            await pending_approval(host, "r")
            await asyncio.sleep(3)
        await asyncio.sleep(LONG_S)
        began = loop.time()
        async with await _started(stores, "v") as host:
            left = await host.wait("r")
        assert (left.status, left.stop_reason) == ("halted", "timeout")
        assert loop.time() - began == pytest.approx(2, abs=EPSILON_S)

    sim_run(main, seed=1)
