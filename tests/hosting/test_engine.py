"""A host whose runs are dispatched by an engine: what the host does, with an engine in memory and simulated time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.dispatched import REDISPATCH_S
from penstock.hosting.engine import Fence
from penstock.hosting.host import RunHost
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, graph, host_with, killed
from tests.hosting.local_engine import LocalEngine, LocalServer


class Fleet:
    """A host that clients talk to, and workers, over one database and one engine."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        self.clock = loop.clock
        self.stores = MemoryStores(clock=self.clock)
        self.server = LocalServer(lambda: self.clock.time_ns() // 1_000_000)
        self.gate = Gate()
        self.hosts: list[RunHost] = []

    async def host(self, *, is_worker: bool = False, **more: Any) -> RunHost:
        engine = LocalEngine(self.server, is_worker=is_worker)
        more = {"settings": SETTINGS, "gate": self.gate, **more}
        host = await host_with(self.stores, clock=self.clock, engine=engine, **more)
        await host.start()
        self.hosts.append(host)
        return host

    async def worker(self, name: str = "worker", **more: Any) -> RunHost:
        return await self.host(is_worker=True, worker=name, **more)

    async def run(self, run_id: str) -> RunRecord:
        run = await self.stores.runs.get(run_id)
        assert run is not None
        return run

    async def until(self, run_id: str, status: str) -> RunRecord:
        while (run := await self.run(run_id)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # of simulated time
        return run

    async def close(self) -> None:
        for host in self.hosts:
            await host.close()
        for task in self.server.tasks.values():
            task.cancel()


def simulated(test: Callable[[Fleet], Awaitable[None]]) -> Callable[[], None]:
    """Run a test in simulated time, with a fleet that is closed afterwards."""

    async def main() -> None:
        fleet = Fleet()
        try:
            await test(fleet)
        finally:
            await fleet.close()

    def run() -> None:
        sim_run(main, seed=1)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def types(fleet: Fleet, run_id: str) -> list[str]:
    return [event.type for event in await fleet.stores.events.read(run_id) if event.type.startswith("run.")]


async def newest(fleet: Fleet, run_id: str) -> HostedEvent:
    return (await fleet.stores.events.read(run_id))[-1]


@simulated
async def test_a_submitted_run_is_worked_on_by_a_worker(fleet: Fleet) -> None:
    front, worker = await fleet.host(), await fleet.worker()
    left = await front.wait((await front.submit(owner="ann", graph_id="echo", run_id="r", input="x")).id)
    assert (left.status, left.output, left.queue, left.epoch) == ("completed", "x", "local", 1)
    assert left.fence == Fence(1, 1).number
    assert (front.stats()["totals"].get("claimed", 0), worker.stats()["totals"]["claimed"]) == (0, 1)
    assert await types(fleet, "r") == ["run.queued", "run.started", "run.completed"]
    assert not fleet.server.tasks


@simulated
async def test_a_run_that_is_dispatched_twice_is_worked_on_once(fleet: Fleet) -> None:
    front = await fleet.host()
    await fleet.worker()
    run = await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await fleet.gate.has_come(1)
    await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    fleet.server.dispatch(run)
    fleet.gate.opened.set()
    assert (await front.wait("r")).epoch == 1
    assert fleet.gate.came == 1


@simulated
async def test_a_run_whose_worker_died_is_continued_and_the_dead_one_cannot_write(fleet: Fleet) -> None:
    front, first = await fleet.host(), await fleet.worker("first")
    await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await fleet.gate.has_come(1)
    old = first._runs.by_id["r"]
    fleet.server.works.clear()
    second = await fleet.worker("second")
    taken = asyncio.create_task(fleet.server.works[0]("r", Fence(1, 2), "local"))
    await fleet.gate.has_come(2)
    fleet.gate.opened.set()
    await taken
    left = await front.wait("r")
    assert (left.status, left.worker, left.epoch, left.fence) == ("completed", None, 2, Fence(1, 2).number)
    await old.gone.wait()
    assert (first.stats()["totals"]["lost"], second.stats()["totals"]["completed"]) == (1, 1)
    assert (await types(fleet, "r")).count("run.completed") == 1


@simulated
async def test_a_closing_worker_leaves_its_runs_to_another_one(fleet: Fleet) -> None:
    front, first = await fleet.host(), await fleet.worker("first")
    await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await fleet.gate.has_come(1)
    await fleet.worker("second")
    await first.close()
    await fleet.gate.has_come(2)
    fleet.gate.opened.set()
    left = await front.wait("r")
    assert (left.status, left.epoch, left.crash_count) == ("completed", 2, 0)
    found = await types(fleet, "r")
    assert found == ["run.queued", "run.started", "run.parked", "run.queued", "run.resumed", "run.completed"]


@simulated
async def test_cancel_reaches_a_run_in_the_queue_and_on_another_host(fleet: Fleet) -> None:
    front = await fleet.host()
    for run_id in ("queued", "running"):
        await front.submit(owner="ann", graph_id="gate", run_id=run_id, input="x")
        if run_id == "queued":
            assert (await front.cancel("queued", reason="enough")).value == "cancelled"
            await fleet.worker()
    await fleet.gate.has_come(1)
    assert (await front.cancel("running", reason="enough")).value == "cancelled"
    for run_id in ("queued", "running"):
        left = await front.wait(run_id)
        assert (left.status, left.error) == ("cancelled", "enough")
    assert fleet.gate.came == 1


@simulated
async def test_a_run_that_waits_for_an_answer_leaves_its_worker_and_continues_on_another(fleet: Fleet) -> None:
    front = await fleet.host()
    first = await fleet.worker("first", settings=replace(SETTINGS, park_waiting_s=5))
    await front.submit(owner="ann", graph_id="ask", run_id="r", input="it")
    parked = await fleet.until("r", "parked")
    assert (parked.worker, first.stats()["waiting"]) == (None, 0)
    await asyncio.sleep(3 * REDISPATCH_S)
    assert (await fleet.run("r")).epoch == 1, "it is not dispatched as long as it waits"
    await first.close()
    await fleet.worker("second")
    (approval,) = await fleet.stores.approvals.list(run_id="r")
    await front.answer(approval.id, "approved", by="bob")
    left = await front.wait("r")
    assert (left.status, left.output, left.epoch, left.crash_count) == ("completed", "it", 2, 0)


@simulated
async def test_an_answer_on_the_worker_while_the_run_is_parked_is_not_lost(fleet: Fleet) -> None:
    worker = await fleet.worker(settings=replace(SETTINGS, park_waiting_s=5))
    await worker.submit(owner="ann", graph_id="ask", run_id="r", input="it")
    await fleet.until("r", "waiting")
    (approval,) = await fleet.stores.approvals.list(run_id="r")
    hosted = worker._runs.by_id["r"]
    while not hosted._is_leaving():  # noqa: ASYNC110  # simulated time
        await asyncio.sleep(0.01)
    await worker.answer(approval.id, "approved", by="bob")
    async with asyncio.timeout(REDISPATCH_S / 2):
        assert (await worker.wait("r")).status == "completed"


@simulated
async def test_a_cancelled_run_that_waits_for_an_answer_ends(fleet: Fleet) -> None:
    front = await fleet.host()
    await fleet.worker(settings=replace(SETTINGS, park_waiting_s=5))
    await front.submit(owner="ann", graph_id="ask", run_id="r", input="it")
    await fleet.until("r", "parked")
    assert (await front.cancel("r")).value == "cancelled"
    assert (await front.wait("r")).status == "cancelled"
    await asyncio.sleep(1)
    assert not fleet.server.tasks, "the engine has let go of it"


@simulated
async def test_a_halted_run_that_is_granted_more_is_dispatched_again(fleet: Fleet) -> None:
    front = await fleet.host()
    await fleet.worker()
    await front.submit(owner="ann", graph_id="echo", run_id="r", input="x", limits={"max_steps": 1})
    assert (await front.wait("r")).status == "halted"
    await front.grant("r", {"max_steps": 10}, by="bob")
    left = await front.wait("r")
    assert (left.status, left.fence) == ("completed", Fence(2, 1).number)


@simulated
async def test_a_run_waits_for_a_worker_that_has_its_model_and_its_events_say_so(fleet: Fleet) -> None:
    document = graph(
        ("in", "input", {}),
        ("ask", "llm-completion", {"model": "rare"}),
        ("out", "output", {}),
        edges="in>ask ask>out",
    )
    front = await fleet.host()
    await fleet.stores.graphs.save("model", "ann", "model", document, now_ms=0)
    await fleet.worker("poor", services={"models": {}})
    await front.submit(owner="ann", graph_id="model", run_id="r", input="x")
    await asyncio.sleep(5)
    assert (await fleet.run("r")).status == "queued"
    last = await newest(fleet, "r")
    assert (last.type, last.seq) == ("run.queued", 2), "it is reported once"
    assert "there is no model 'rare'" in last.data["missing"][0]
    assert "there is no model 'rare'" in fleet.server.failures[-1]
    await fleet.worker("rich", services={"models": {"rare": ScriptedModel(["done"])}})
    left = await front.wait("r")
    assert (left.status, left.output, left.crash_count) == ("completed", "done", 0)


@simulated
async def test_a_run_waits_for_a_worker_that_knows_its_node_types(fleet: Fleet) -> None:
    document = graph(("in", "input", {}), ("new", "novel", {}), ("out", "output", {}), edges="in>new new>out")
    front = await fleet.host()
    await fleet.stores.graphs.save("new", "ann", "new", document, now_ms=0)
    await fleet.worker("old")
    await front.submit(owner="ann", graph_id="new", run_id="r", input="x")
    await asyncio.sleep(5)
    assert "novel" in (await newest(fleet, "r")).data["missing"][0]
    fleet.gate.opened.set()
    await fleet.worker("new", novel=fleet.gate)
    assert (await front.wait("r")).status == "completed"


@simulated
async def test_the_runs_of_an_owner_are_limited_over_all_workers(fleet: Fleet) -> None:
    settings = replace(SETTINGS, max_running_per_owner=2)
    front = await fleet.host()
    for name in ("first", "second", "third"):
        await fleet.worker(name, settings=settings)
    runs = [await front.submit(owner="ann", graph_id="gate", input=number) for number in range(5)]
    await fleet.gate.has_come(2)
    await asyncio.sleep(20)
    assert fleet.gate.came == 2
    other = await front.submit(owner="bob", graph_id="gate", input="x")
    await fleet.gate.has_come(3)
    fleet.gate.opened.set()
    assert {(await front.wait(run.id)).status for run in (*runs, other)} == {"completed"}


@simulated
async def test_a_run_that_could_not_be_dispatched_is_swept_up(fleet: Fleet) -> None:
    front = await fleet.host()
    await fleet.worker()
    fleet.server.is_away = True
    await front.submit(owner="ann", graph_id="echo", run_id="r", input="x")
    assert front.stats()["totals"]["engine_failures"] == 1
    assert not (await front.engine_health()).is_ok
    await asyncio.sleep(2 * REDISPATCH_S)
    assert (await fleet.run("r")).status == "queued"
    fleet.server.is_away = False
    assert (await front.wait("r")).status == "completed"


@simulated
async def test_a_run_that_the_engine_has_lost_is_swept_up_after_its_lease(fleet: Fleet) -> None:
    front, first = await fleet.host(), await fleet.worker("first")
    await front.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await fleet.gate.has_come(1)
    await killed(first)
    fleet.hosts.remove(first)
    fleet.server.works.clear()
    for task in fleet.server.tasks.values():
        task.cancel()
    fleet.server.tasks.clear()
    fleet.gate.opened.set()
    await fleet.worker("second")
    left = await front.wait("r")
    assert (left.status, left.epoch, left.crash_count, left.fence) == ("completed", 2, 1, Fence(2, 1).number)


@simulated
async def test_runs_that_were_queued_before_there_was_an_engine_are_dispatched(fleet: Fleet) -> None:
    before = await host_with(fleet.stores, clock=fleet.clock, settings=SETTINGS, gate=fleet.gate)
    await before.submit(owner="ann", graph_id="echo", run_id="r", input="x")
    front = await fleet.host()
    await fleet.worker()
    left = await front.wait("r")
    assert (left.status, left.queue) == ("completed", "local")


@simulated
async def test_a_fork_is_dispatched_too(fleet: Fleet) -> None:
    front = await fleet.host()
    await fleet.worker()
    run = await front.submit(owner="ann", graph_id="echo", input="x")
    await front.wait(run.id)
    fork = await front.fork(run.id, owner="ann", at="out", run_id_new="fork")
    assert (await front.wait(fork.id)).output == "x"
    replay = await front.replay(run.id, owner="ann")
    assert (await front.wait(replay.id)).output == "x"


def test_later_fences_are_higher() -> None:
    fences = [Fence(1, 1), Fence(1, 2), Fence(1, 2**32 - 1), Fence(2, 1), Fence(2**20, 1)]
    numbers = [fence.number for fence in fences]
    assert numbers == sorted({*numbers})
