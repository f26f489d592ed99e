"""INV 16: a cancel is never lost, whenever it comes; the answer is true, and nothing is raised.

Under a simulated loop, each seed is one story: a run that is submitted at some time, worked on by one of two hosts, one
of which may be closed or die on the way, and one to three cancels at any time, also before the run is there.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.host import CancelResult, HostSettings, RunHost
from penstock.hosting.ports import ENDED
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Sleeper, graph, host_with, killed
from tests.soak import scaled

STORIES = scaled(500, soak=20_000)
SETTINGS = HostSettings(tick_s=0.5, lease_s=3, drain_s=0)


@dataclass
class Story:
    """What happened in one seed."""

    results: list[CancelResult] = field(default_factory=list)
    status: str = ""
    types: list[str] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)


def document(chance: random.Random) -> dict[str, Any]:
    seconds = chance.choice([0, 0.01, 1, 2])
    if chance.random() < 0.3:
        return graph(
            ("in", "input", {}),
            ("nap", "sleeper", {"seconds": seconds}),
            ("ask", "approval", {"timeout_s": 4}),
            edges="in>nap nap>ask",
        )
    return graph(("in", "input", {}), ("nap", "sleeper", {"seconds": seconds}), edges="in>nap")


async def story(seed: int) -> Story:
    chance, outcome = random.Random(seed), Story()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    hosts = [
        await host_with(stores, settings=SETTINGS, clock=loop.clock, worker=name, sleeper=Sleeper())
        for name in ("one", "two")
    ]
    await stores.graphs.save("nap", "ann", "nap", document(chance), now_ms=0)
    started = hosts if chance.random() < 0.7 else hosts[:1]
    for host in started:
        await host.start()
    moments = [
        chance.choice([0, 1, *(chance.uniform(0, 7) for _ in range(4))]) for _ in range(chance.choice([1, 1, 2, 3]))
    ]

    async def submit() -> None:
        await asyncio.sleep(chance.choice([0, 0, 0, 0.5, 1]))
        await hosts[0].submit(owner="ann", graph_id="nap", run_id="r")

    async def cancel(after_s: float, host: RunHost) -> None:
        await asyncio.sleep(after_s)
        outcome.results.append(await host.cancel("r", reason="enough", by="bob"))

    async def leave() -> None:
        await asyncio.sleep(chance.uniform(0, 3))
        if chance.random() < 0.5:
            await hosts[0].close()
        else:
            await killed(hosts[0])

    acts = [submit(), *(cancel(moment, chance.choice(hosts)) for moment in moments)]
    if len(started) == 2 and chance.random() < 0.5:
        acts.append(leave())
    await asyncio.gather(*acts)
    for host in hosts[1:]:
        await host.start()
    outcome.status = (await hosts[1].wait("r")).status
    for host in hosts:
        await host.close()
    events = await stores.events.read("r")
    outcome.types, outcome.seqs = [event.type for event in events], [event.seq for event in events]
    assert not await stores.approvals.list(run_id="r", states=["waiting"])
    return outcome


@pytest.mark.reliability
@pytest.mark.timeout(900)
def test_a_cancel_at_any_time_ends_the_run_or_reports_that_it_had_ended() -> None:
    results_seen = set()
    for seed in range(STORIES):
        outcome = sim_run(lambda seed=seed: story(seed), seed=seed)  # type: ignore[misc]
        where = f"seed {seed}: {outcome}"
        assert outcome.status in ENDED, where
        if set(outcome.results) - {CancelResult.ENDED}:
            assert outcome.status == "cancelled", where
        if CancelResult.ENDED in outcome.results and outcome.status != "cancelled":
            assert set(outcome.results) == {CancelResult.ENDED}, where
        assert outcome.seqs == [*range(1, len(outcome.seqs) + 1)], where
        ends = [type for type in outcome.types if type in STATUS_OF and type != "run.parked"]
        assert ends == [f"run.{outcome.status}"], where
        assert outcome.types[-1] == ends[0], where
        results_seen |= set(outcome.results)
    assert results_seen == set(CancelResult)
