"""Forks between machines whose clocks differ: what a fork has found is known by its owner, not by its time."""

from __future__ import annotations

import pytest

from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import ManualClock
from tests.hosting.graphs import graph, host_with
from tests.hosting.test_control import with_model
from tests.hosting.test_on_databases import url
from tests.hosting.test_takeover import Counter
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "url"]

NODES = 12
CHAIN = graph(
    ("in", "input", {}),
    *((f"n{number}", "counter", {}) for number in range(NODES)),
    edges="in>n0 " + " ".join(f"n{number}>n{number + 1}" for number in range(NODES - 1)),
)


def clocks(ahead_s: float) -> tuple[ManualClock, ManualClock]:
    """Those of two machines; the first is ahead by so much, or behind."""
    one, other = ManualClock(), ManualClock()
    (one if ahead_s > 0 else other).advance(abs(ahead_s))
    return one, other


@pytest.mark.parametrize("ahead_s", [2, 0, -2])
async def test_a_fork_that_is_resumed_repeatedly_gains_no_steps_from_a_clock(ahead_s: float) -> None:
    stores, counter = MemoryStores(), Counter()
    of_front, of_worker = clocks(ahead_s)
    front = await host_with(stores, clock=of_front, counter=counter)
    await stores.graphs.save("chain", "ann", "chain", CHAIN, now_ms=0)
    async with await host_with(stores, clock=of_worker, counter=counter) as worker:
        run = await worker.submit(owner="ann", graph_id="chain", input="x", limits={"max_steps": 5})
        assert (await worker.wait(run.id)).status == "halted"
    await front.fork(run.id, owner="ann", at="in", run_id_new="f")
    ran = counter.times
    async with await host_with(stores, clock=of_worker, counter=counter) as worker:
        for again in range(3):
            if again:
                await worker.resume("f")
            assert (await worker.wait("f")).status == "halted"
    assert counter.times - ran == ran, "it may use what the run might, and no more"


@pytest.mark.parametrize("ahead_s", [2, 0, -2])
async def test_a_fork_does_not_pay_for_work_of_a_machine_with_another_clock(ahead_s: float, url: str) -> None:
    of_one, of_other = clocks(ahead_s)
    async with await open_stores(url) as stores:
        host, model = await with_model(stores, clock=of_one)
        async with host:
            run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.8"})
            assert (await host.wait(run.id)).status == "halted"
        host, model = await with_model(stores, clock=of_other)
        async with host:
            fork = await host.wait((await host.fork(run.id, owner="ann", at="b")).id)
            of_fork = await host.wait((await host.fork(fork.id, owner="ann", at="b")).id)
    assert [(one.status, one.output, one.cost_nanos) for one in (fork, of_fork)] == [
        ("completed", "hi!!", 400_000_000)
    ] * 2
    assert model.calls == 2


async def test_recorded_and_new_work_of_a_fork_are_distinguished_after_its_journal_is_shortened() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
        fork = await host.wait((await host.fork(run.id, owner="ann", at="b")).id)
    found = {entry.key: entry.at_ms for entry in await stores.journal.load(fork.id)}
    assert {key for key, at_ms in found.items() if at_ms < 0} == {key for key in found if key.startswith("a")}
    assert {abs(at_ms) for key, at_ms in found.items() if at_ms < 0} <= {
        entry.at_ms for entry in await stores.journal.load(run.id)
    }


async def test_a_fork_that_was_made_before_entries_were_marked_is_judged_by_when_they_were_written() -> None:
    stores = MemoryStores()
    host, _ = await with_model(stores)
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.8"})
        await host.wait(run.id)
    await host.fork(run.id, owner="ann", at="b", run_id_new="f")
    fork = await stores.runs.get("f")
    assert fork is not None
    origin = {name: one for name, one in fork.origin.items() if name != "about"}
    found = [entry._replace(at_ms=abs(entry.at_ms)) for entry in await stores.journal.load("f")]
    await stores.runs.add(fork._replace(id="old", origin=origin), found)
    host, _ = await with_model(stores)
    async with host:
        assert (await host.wait("old")).status == "completed"
