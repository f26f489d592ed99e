"""A run whose host dies, stops or closes goes on elsewhere, and what it did is not done again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.containment.ledger import LedgerStore
from penstock.hosting.host import RunHost
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.ports import CancelRequest, Fenced, HostedEvent
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.runtime.billing.usage import Usage
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock, SimLoop, sim_run
from tests.hosting.graphs import SETTINGS, Gate, graph, host_with, killed
from tests.hosting.test_approvals import pending_approval
from tests.hosting.test_control import TWO_CALLS
from tests.hosting.test_host import Kind, types_of


class Counter:
    """A node that counts how often it ran."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self) -> None:
        self.times = 0

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        self.times += 1
        return ExecutionResult({"output": inputs["input"]})


COUNTED = graph(("in", "input", {}), ("count", "counter", {}), ("gate", "gate", {}), edges="in>count count>gate")


class Scene:
    """Two hosts on one set of stores, and a run that has come half-way."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stores = MemoryStores(clock=self.clock)
        self.gate, self.counter = Gate(), Counter()

    async def host(self, worker: str, **settings: Any) -> RunHost:
        host = await host_with(
            self.stores,
            clock=self.clock,
            worker=worker,
            gate=self.gate,
            counter=self.counter,
            settings=replace(SETTINGS, **settings),
        )
        await self.stores.graphs.save("counted", "ann", "counted", COUNTED, now_ms=0)
        return host

    async def begun(self, **settings: Any) -> RunHost:
        host = await self.host("first", **settings)
        await host.start()
        await host.submit(owner="ann", graph_id="counted", run_id="r", input="x")
        await self.gate.entered.wait()
        return host

    def lease_runs_out(self) -> None:
        self.clock.advance(SETTINGS.lease_s + 1)


async def written(host: RunHost) -> HostedRun:
    """The run here once all its events are in the store, so that no refused event shows that it was lost."""
    hosted = host._runs.by_id["r"]
    assert hosted.log is not None
    await hosted.log.flush()
    return hosted


async def test_run_of_a_dead_host_continues_on_another_from_its_journal() -> None:
    scene = Scene()
    await killed(await scene.begun())
    async with await scene.host("second") as second:
        scene.gate.opened.set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert scene.gate.came == 1  # the lease of the dead one still holds
        scene.lease_runs_out()
        left = await second.wait("r")
        events = [event async for event in second.events("r")]
    assert (left.status, left.output, left.epoch) == ("completed", "x", 2)
    assert (scene.counter.times, scene.gate.came) == (1, 2)
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    (resumed,) = [event for event in events if event.type == "run.resumed"]
    assert resumed.data == {"epoch": 2, "replayed": 1, "worked_ms": 0, "lost": 1}


async def test_a_host_that_lost_a_run_stops_it_and_writes_nothing_more() -> None:
    scene = Scene()
    asleep = await scene.begun(tick_s=1_000)  # as if it were stopped: it renews nothing
    scene.lease_runs_out()
    lost = asleep._runs.by_id["r"]
    async with await scene.host("second") as second:
        await scene.gate.has_come(2)
        scene.gate.opened.set()  # both would go on now
        left = await second.wait("r")
        await lost.gone.wait()  # its journal refuses it
        events = await scene.stores.events.read("r")
    await asleep.close()
    assert (left.status, left.worker, left.epoch) == ("completed", None, 2)
    assert asleep.stats()["totals"]["lost"] == 1
    assert [event.type for event in events].count("run.completed") == 1
    with pytest.raises(Fenced):
        await scene.stores.events.append("r", 1, [HostedEvent(len(events) + 1, 0, "late")])


async def test_a_host_learns_from_its_renewal_that_a_run_is_not_its_own() -> None:
    scene = Scene()
    first = await scene.begun(lease_s=0.05)
    hosted = await written(first)
    scene.clock.advance(1)
    taken = await scene.stores.runs.claim("thief", now_ms=scene.clock.time_ns() // 1_000_000, lease_ms=60_000)
    assert taken is not None
    scene.clock.advance(1)
    async with asyncio.timeout(10):
        await hosted.gone.wait()
    await first.close()
    assert first.stats()["totals"]["lost"] == 1
    assert (await scene.stores.runs.get("r")).worker == "thief"  # type: ignore[union-attr]


async def test_a_host_that_claims_its_own_lost_run_again_works_on_it_once() -> None:
    scene = Scene()
    host = await scene.begun(tick_s=1_000)
    scene.lease_runs_out()
    host._claims.wake()
    await scene.gate.has_come(2)
    scene.gate.opened.set()
    left = await host.wait("r")
    await host.close()
    assert (left.status, left.epoch, scene.counter.times) == ("completed", 2, 1)


async def test_a_host_that_reclaims_its_own_lost_run_begins_when_its_previous_work_has_ended() -> None:
    class Lingering(Gate):
        """A gate that a stopped node does not leave immediately."""

        def __init__(self) -> None:
            super().__init__()
            self.stopped, self.let_go = asyncio.Event(), asyncio.Event()

        async def execute(self, *args: Any) -> ExecutionResult:
            try:
                return await super().execute(*args)
            except asyncio.CancelledError:
                self.stopped.set()
                await self.let_go.wait()
                raise

    scene = Scene()
    gate = scene.gate = Lingering()
    host = await scene.begun(tick_s=1_000)
    await written(host)
    scene.lease_runs_out()
    host._claims.wake()
    try:
        async with asyncio.timeout(10):
            await gate.stopped.wait()
        for _ in range(50):
            await asyncio.sleep(0)
        came = gate.came
    finally:
        gate.let_go.set()
    await gate.has_come(2)
    gate.opened.set()
    assert (await host.wait("r")).output == "x"
    await host.close()
    assert (came, host.stats()["totals"]["lost"]) == (1, 1)


async def test_a_host_that_closes_lets_runs_end_and_parks_the_others() -> None:
    scene = Scene()
    first = await scene.begun()
    kind = first.handlers["run"] = Kind(scene.stores)
    await first.close(drain_s=0)
    parked = await scene.stores.runs.get("r")
    assert parked is not None
    assert (parked.status, parked.worker) == ("parked", None)
    assert kind.ends == [("parked", None)]
    assert (await scene.stores.events.read("r"))[-1].type == "run.parked"
    scene.gate.opened.set()
    async with await scene.host("second") as second:  # goes on with it by itself
        left = await second.wait("r")
        assert (left.status, left.output) == ("completed", "x")
        assert [type for type in await types_of(second, "r") if type.startswith("run.")] == [
            "run.queued",
            "run.started",
            "run.parked",
            "run.queued",
            "run.resumed",
            "run.completed",
        ]
    assert scene.counter.times == 1


async def test_a_host_that_closes_waits_for_runs_that_end_in_time() -> None:
    scene = Scene()
    first = await scene.begun()
    closing = asyncio.create_task(first.close(drain_s=60))
    for _ in range(10):
        await asyncio.sleep(0)
    scene.gate.opened.set()
    await closing
    assert (await scene.stores.runs.get("r")).status == "completed"  # type: ignore[union-attr]


def test_a_host_that_closes_does_not_wait_for_answers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores, a_day = MemoryStores(clock=loop.clock), 86_400
        host = await host_with(stores, clock=loop.clock, settings=replace(SETTINGS, drain_s=a_day))
        await host.start()
        await host.submit(owner="ann", graph_id="ask", run_id="r")
        await pending_approval(host, "r")
        await asyncio.sleep(1)
        assert host.stats()["waiting"] == 1
        await host.close()
        assert (await stores.runs.get("r")).status == "parked"  # type: ignore[union-attr]
        assert loop.time() < a_day

    sim_run(main, seed=1)


async def test_a_reader_on_a_closing_host_ends() -> None:
    scene = Scene()
    first = await scene.begun()
    reader = asyncio.create_task(types_of(first, "r"))
    await asyncio.sleep(0)
    await first.close(drain_s=0)
    assert (await reader)[-1] == "run.parked"


@pytest.mark.parametrize("status", ["completed", "failed", "halted", "cancelled"])
async def test_a_run_whose_last_event_was_written_and_whose_status_was_not_is_closed_by_the_next_host(
    status: str,
) -> None:
    scene = Scene()
    first = await scene.begun()
    await killed(first)
    data = {
        "completed": {"output": "stored", "cost_usd": 0.25},
        "failed": {"error": "ValueError", "message": "no"},
        "halted": {"stop_reason": "timeout", "message": "late"},
        "cancelled": {"reason": "enough"},
    }[status]
    seq = await scene.stores.events.last_seq("r")
    await scene.stores.events.append("r", 1, [HostedEvent(seq + 1, 0, f"run.{status}", data)])
    reader_host = await scene.host("reader")
    reader = asyncio.create_task(types_of(reader_host, "r"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not reader.done()  # the last event is held back until the status agrees
    scene.lease_runs_out()
    async with await scene.host("second") as second:
        left = await second.wait("r")
        types = await reader
    assert left.status == status
    assert types[-1] == f"run.{status}"
    assert scene.gate.came == 1
    if status == "completed":
        assert (left.output, left.cost_nanos) == ("stored", 250_000_000)
    else:
        assert left.error


async def test_many_hosts_on_many_runs_do_each_run_once() -> None:
    scene = Scene()
    scene.gate.opened.set()
    hosts = [await scene.host(f"w{number}") for number in range(4)]
    for host in hosts:
        await host.start()
    runs = [await hosts[n % 4].submit(owner=f"o{n % 7}", graph_id="counted", input=n) for n in range(60)]
    left = [await hosts[0].wait(run.id) for run in runs]
    for host in hosts:
        await host.close()
    assert [run.output for run in left] == [*range(60)]
    assert {run.epoch for run in left} == {1}
    assert scene.counter.times == 60
    assert len([host for host in hosts if host.stats()["totals"].get("completed")]) > 1


class Mute:
    """The ledger of a host that dies: from then on nothing reaches it."""

    def __init__(self, ledger: LedgerStore) -> None:
        self._ledger = ledger
        self.is_mute = False

    def __getattr__(self, name: str) -> Any:
        return (lambda *args, **kwargs: None) if self.is_mute else getattr(self._ledger, name)


async def died_in_a_call(clock: ManualClock, stores: MemoryStores, also: Callable[[], None]) -> dict[str, Any]:
    """Run `r` of two calls at $0.40, whose host has died in the second; the services of the next host.

    `also` is called with each call after that one.
    """
    in_call = asyncio.Event()

    def reply(request: Any) -> Any:
        text = request.messages[-1].text
        if text.endswith("!") and not in_call.is_set():
            in_call.set()
            return asyncio.sleep(3_600)
        if in_call.is_set():
            also()
        return f"{text}!"

    model = ScriptedModel(reply, usage=Usage.of(cost_usd="0.4", input_tokens=10, output_tokens=5))
    services = {"models": {"m": model}}
    dying: Any = copy(stores)
    dying.ledger = Mute(stores.ledger)
    first = await host_with(dying, clock=clock, services=services)
    await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
    await first.start()
    await first.submit(owner="ann", graph_id="two", run_id="r", input="hi", limits={"max_cost_usd": "2"})
    await in_call.wait()
    dying.ledger.is_mute = True
    await killed(first)
    clock.advance(SETTINGS.lease_s + 1)
    return services


async def test_a_call_that_was_under_way_when_its_host_died_stays_in_the_bill() -> None:
    clock = ManualClock()
    stores, seen = MemoryStores(clock=clock), []
    services = await died_in_a_call(clock, stores, lambda: seen.append(stores.ledger.balance("run:r").unresolved_nanos))
    async with await host_with(stores, clock=clock, services=services) as second:
        left = await second.wait("r")
        events = [event async for event in second.events("r")]
    last = events[-1]
    resumed = next(event.seq for event in events if event.type == "run.resumed")
    budgets = [event.data["units"][0] for event in events if event.type == "budget" and event.seq > resumed]
    assert [one["unresolved"] for one in budgets] == [0.4] * len(budgets)
    assert (budgets[-1]["spent"], budgets[-1]["left"]) == (0.8, 0.8)
    assert (left.status, left.output, services["models"]["m"].calls) == ("completed", "hi!!", 3)
    assert (left.cost_nanos, left.unresolved_nanos) == (800_000_000, 400_000_000)
    assert (last.data["cost_usd"], last.data["unresolved_usd"]) == (0.8, 0.4)
    assert seen == [400_000_000], "it is unresolved before the next call leaves"
    account = stores.ledger.balance("run:r")
    assert (account.spent_nanos, account.held_nanos, account.unresolved_nanos) == (800_000_000, 0, 400_000_000)


async def test_a_call_that_was_under_way_stays_in_the_bill_of_a_run_that_no_host_resumes() -> None:
    clock = ManualClock()
    stores = MemoryStores(clock=clock)
    services = await died_in_a_call(clock, stores, lambda: pytest.fail("a call left"))
    await stores.cancels.put(CancelRequest("r", "enough", "bob", at_ms=0, until_ms=1 << 52))
    async with await host_with(stores, clock=clock, services=services) as second:
        left = await second.wait("r")
    assert (left.status, left.cost_nanos, left.unresolved_nanos) == ("cancelled", 400_000_000, 400_000_000)
    account = stores.ledger.balance("run:r")
    assert (account.held_nanos, account.unresolved_nanos) == (0, 400_000_000)


async def test_a_run_that_loses_every_worker_fails_after_ten_and_can_be_resumed() -> None:
    scene = Scene()
    first = await scene.begun()
    await killed(first)
    for number in range(9):
        scene.lease_runs_out()
        host = await scene.host(f"w{number}")
        await host.start()
        await scene.gate.has_come(number + 2)
        await killed(host)
    scene.lease_runs_out()
    scene.gate.opened.set()
    async with await scene.host("last") as last:
        left = await last.wait("r")
        assert left.status == "failed"
        assert "10 workers in a row" in str(left.error)
        await last.resume("r")
        assert (await last.wait("r")).output == "x"
    assert scene.counter.times == 1
