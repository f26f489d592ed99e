"""A host that dies at any moment: before or after any call to a store, and at random times.

Under a simulated loop. The next host finds what is in the stores, and nothing else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import RunRecord
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Sleeper, executors, graph, host_with, killed
from tests.hosting.test_host import Kind

SETTINGS = HostSettings(tick_s=0.5, lease_s=3, drain_s=0)


class Deadly:
    """Stores whose `at`-th call never returns: it was made, or it was not."""

    def __init__(self, stores: MemoryStores, at: int, is_made: bool) -> None:
        self.at, self.is_made = at, is_made
        self.calls = 0
        self.reached = asyncio.Event()
        for name in ("runs", "events", "graphs", "approvals", "cancels", "journal"):
            setattr(self, name, _Counted(self, getattr(stores, name)))
        self.ledger, self.memories = stores.ledger, stores.memories
        self.transaction = _Counted(self, stores).transaction


class _Counted:
    def __init__(self, deadly: Deadly, store: Any) -> None:
        self._deadly = deadly
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            deadly = self._deadly
            deadly.calls += 1
            if deadly.calls < deadly.at:
                return await method(*args, **kwargs)
            if deadly.calls == deadly.at and deadly.is_made:
                await method(*args, **kwargs)
            deadly.reached.set()
            return await asyncio.Event().wait()

        return call


def host_on(stores: Any, worker: str, loop: SimLoop) -> RunHost:
    return RunHost(stores, executors=executors(), settings=SETTINGS, worker=worker, clock=loop.clock)


async def until_done(host: RunHost, kind: Kind) -> RunRecord:
    """What a client does: submit, answer questions, and wait."""
    host.handlers["mine"] = kind
    await host.start()
    await host.submit(owner="ann", graph_id="ask", run_id="r", input="it", origin={"kind": "mine"})
    while True:
        async for event in host.events("r"):
            if event.type == "run.waiting":
                approval = await host.stores.approvals.get(event.data["approval_id"])
                if approval is not None and approval.state == "waiting":
                    await host.answer(approval.id, "approved", by="bob")
        run = await host.wait("r")
        if run.status != "parked":
            return run


async def dies(at: int, is_made: bool) -> bool:
    """One life and the next; whether there was an `at`-th call to die at."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    await host_with(stores)
    kind, deadly = Kind(stores), Deadly(stores, at, is_made)
    first = host_on(deadly, "first", loop)
    client = asyncio.create_task(until_done(first, kind))
    dying = asyncio.create_task(deadly.reached.wait())
    await asyncio.wait((client, dying), return_when=asyncio.FIRST_COMPLETED)
    client.cancel()
    dying.cancel()
    await asyncio.gather(client, dying, return_exceptions=True)
    await killed(first)
    second = host_on(stores, "second", loop)
    left = await until_done(second, kind)
    await second.close()
    events = await stores.events.read("r")
    assert (left.status, left.output, left.worker) == ("completed", "prepared it", None)
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert [event.type for event in events if event.type in STATUS_OF] == ["run.completed"]
    assert len(await stores.approvals.list(run_id="r")) == 1
    assert set(kind.ends) == {("completed", "prepared it")}
    return deadly.reached.is_set()


@pytest.mark.reliability
@pytest.mark.parametrize("is_made", [True, False])
def test_a_host_that_dies_at_any_call_of_a_store_loses_nothing(is_made: bool) -> None:
    at = 1
    while sim_run(lambda at=at: dies(at, is_made), seed=at):  # type: ignore[misc]
        at += 1
    assert at > 20


CHAIN = graph(
    ("in", "input", {}),
    *((f"n{number}", "sleeper", {"seconds": 1}) for number in range(4)),
    edges="in>n0 n0>n1 n1>n2 n2>n3",
)


class Counted(Sleeper):
    """Counts how often it was begun and done."""

    def __init__(self) -> None:
        self.begun = 0
        self.done = 0

    async def execute(self, data: Mapping[str, Any], inputs: Any, context: Any) -> Any:
        self.begun += 1
        result = await super().execute(data, inputs, context)
        self.done += 1
        return result


async def story(seed: int) -> int:
    """Hosts that die and are closed at random times; how often one did."""
    loop, chance = asyncio.get_running_loop(), random.Random(seed)
    assert isinstance(loop, SimLoop)
    stores, naps = MemoryStores(clock=loop.clock), Counted()

    async def new_host(name: str) -> RunHost:
        host = await host_with(stores, settings=SETTINGS, clock=loop.clock, worker=name, sleeper=naps)
        await host.start()
        return host

    await stores.graphs.save("chain", "ann", "chain", CHAIN, now_ms=0)
    hosts = [await new_host("h0"), await new_host("h1")]
    runs = [await hosts[0].submit(owner="ann", graph_id="chain", run_id=f"r{n}", input=n) for n in range(3)]
    ends = 0
    for number in range(chance.choice([0, 1, 2, 4])):
        await asyncio.sleep(chance.uniform(0, 2))
        victim = hosts.pop(chance.randrange(2))
        await (killed(victim) if chance.random() < 0.6 else victim.close())
        hosts.append(await new_host(f"h{number + 2}"))
        ends += 1
    left = [await hosts[0].wait(run.id) for run in runs]
    for host in hosts:
        await host.close()
    assert [(run.status, run.output) for run in left] == [("completed", n) for n in range(3)], left
    for run in runs:
        events = await stores.events.read(run.id)
        assert [event.seq for event in events] == [*range(1, len(events) + 1)]
        assert [event.type for event in events].count("run.completed") == 1
        assert events[-1].type == "run.completed"
    assert 12 <= naps.begun <= 12 + 3 * ends
    assert naps.done <= 12 + 3 * ends
    return ends


@pytest.mark.reliability
def test_hosts_that_die_at_random_times_bring_every_run_to_its_one_end() -> None:
    assert sum(sim_run(lambda seed=seed: story(seed), seed=seed) for seed in range(300)) > 300  # type: ignore[misc]
