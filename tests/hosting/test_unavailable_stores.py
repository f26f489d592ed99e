"""Stores that fail: one call at a time, and for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import LedgerUnavailable
from penstock.hosting.durability import day_accounts
from penstock.hosting.event_data import STATUS_OF
from penstock.hosting.host import CancelResult, HostSettings, RunHost
from penstock.hosting.ports import ENDED, StoreUnavailable
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from penstock.testing.faulty import Fault, FaultKind, FaultyStores, ask_again, every_call
from tests.hosting.graphs import Gate, Teller, executors, graph, host_with
from tests.hosting.test_approvals import pending_approval
from tests.hosting.test_control import with_model


async def behind(fault: Fault) -> tuple[MemoryStores, RunHost]:
    """A host whose stores fail, and the stores that do not."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    stores = MemoryStores(clock=loop.clock)
    await host_with(stores)
    faulty: Any = FaultyStores(stores, fault)
    faulty.ledger = stores.ledger  # one that may block would be called on a thread, which a seed does not control
    settings = HostSettings(drain_s=0)
    return stores, RunHost(faulty, executors=executors(), settings=settings, worker="w", clock=loop.clock)


async def check_log(stores: MemoryStores, run_id: str) -> None:
    events = await stores.events.read(run_id, limit=100_000)
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    run = await stores.runs.get(run_id)
    assert run is not None
    assert run.status in ENDED
    assert [event.type for event in events if event.type in STATUS_OF] == [f"run.{run.status}"]
    assert events[-1].type == f"run.{run.status}"


async def answered_run(fault: Fault) -> None:
    stores, host = await behind(fault)
    async with host:
        run = await ask_again(lambda: host.submit(owner="ann", graph_id="ask", run_id="r", input="it"))
        approval = await ask_again(lambda: pending_approval(host, run.id))
        await ask_again(lambda: host.answer(approval.id, "approved", by="bob"))
        left = await host.wait(run.id)
    assert (left.status, left.output) == ("completed", "it")
    await check_log(stores, "r")


async def cancelled_run(fault: Fault) -> None:
    stores, host = await behind(fault)
    async with host:
        await ask_again(lambda: host.submit(owner="ann", graph_id="ask", run_id="r", input="it"))
        await ask_again(lambda: pending_approval(host, "r"))
        assert await ask_again(lambda: host.cancel("r")) in (CancelResult.CANCELLED, CancelResult.ALREADY_CANCELLED)
        left = await host.wait("r")
    assert left.status == "cancelled"
    assert not await stores.approvals.list(run_id="r", states=["waiting"])
    await check_log(stores, "r")


async def cancelled_in_the_queue(fault: Fault) -> None:
    stores, host = await behind(fault)
    await ask_again(lambda: host.submit(owner="ann", graph_id="echo", run_id="r"))
    await ask_again(lambda: host.cancel("r"))
    async with host:
        assert (await host.wait("r")).status == "cancelled"
    await check_log(stores, "r")


async def parked_run(fault: Fault) -> None:
    stores, host = await behind(fault)
    async with host:
        await ask_again(lambda: host.submit(owner="ann", graph_id="ask", run_id="r", input="it"))
        approval = await ask_again(lambda: pending_approval(host, "r"))
    run = await stores.runs.get("r")
    assert run is not None
    assert run.status == "parked"
    await stores.approvals.answer(approval.id, "approved", by="bob", now_ms=0)
    async with RunHost(host.stores, executors=executors(), worker="v", clock=host._context.clock) as second:
        assert (await second.wait("r")).output == "it"


async def resumed_run(fault: Fault) -> None:
    stores, host = await behind(fault)
    async with host:
        await ask_again(
            lambda: host.submit(owner="ann", graph_id="echo", run_id="r", input="it", limits={"max_steps": 1})
        )
        assert (await host.wait("r")).status == "halted"
        await stores.runs.get("r")
        more = host.settings.default_limits
        run = await ask_again(lambda: host.grant("r", more, by="bob"))
        assert run.limits["max_steps"] == 1_001
        assert (await host.wait("r")).output == "it"


@pytest.mark.parametrize("kind", ["io", "write-then-timeout"])
@pytest.mark.parametrize("scenario", [answered_run, cancelled_run, cancelled_in_the_queue, parked_run, resumed_run])
def test_whichever_call_of_a_store_fails_the_run_ends_as_if_none_had(scenario: Any, kind: FaultKind) -> None:
    assert sim_run(lambda: every_call(scenario, kind), seed=1) > 10


class Away:
    """Stores that can be taken away, all at once."""

    def __init__(self, stores: MemoryStores) -> None:
        self.is_away = False
        for name in ("runs", "events", "graphs", "approvals", "cancels", "journal"):
            setattr(self, name, _Switched(self, getattr(stores, name)))
        self.ledger, self.memories = stores.ledger, stores.memories
        self._stores = stores

    async def transaction(self, unit: Any, *, inline: bool = False) -> Any:
        if self.is_away:
            raise StoreUnavailable("it is away")
        return await self._stores.transaction(unit, inline=inline)


class _Switched:
    def __init__(self, away: Away, store: Any) -> None:
        self._away = away
        self._store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._away.is_away:
                raise StoreUnavailable("it is away")
            return await method(*args, **kwargs)

        return call


async def test_while_the_stores_are_away_nothing_is_taken_on_and_nothing_that_runs_is_lost() -> None:
    stores, gate = MemoryStores(), Gate()
    await host_with(stores)
    away: Any = Away(stores)
    async with RunHost(away, executors=executors(gate=gate), settings=HostSettings(tick_s=0.01, drain_s=0)) as host:
        await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await gate.entered.wait()
        reader = asyncio.create_task(_all(host, "r"))
        await asyncio.sleep(0)
        away.is_away = True
        gate.opened.set()
        for asking in (host.submit(owner="ann", graph_id="echo"), host.cancel("q"), host.get("r"), host.resume("r")):
            with pytest.raises(StoreUnavailable):
                await asking
        for _ in range(50):
            await asyncio.sleep(0)
        assert host.stats()["running"] == 1
        away.is_away = False
        left = await host.wait("r")
        events = await reader
    assert (left.status, left.output) == ("completed", "x")
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    await check_log(stores, "r")


async def test_a_run_here_can_be_cancelled_while_the_stores_are_away() -> None:
    stores, gate = MemoryStores(), Gate()
    await host_with(stores)
    away: Any = Away(stores)
    async with RunHost(away, executors=executors(gate=gate), settings=HostSettings(tick_s=0.01, drain_s=0)) as host:
        await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
        await gate.entered.wait()
        away.is_away = True
        assert await host.cancel("r", reason="enough") is CancelResult.CANCELLED
        assert await host.cancel("r", reason="enough") is CancelResult.ALREADY_CANCELLED
        away.is_away = False
        assert (await host.wait("r")).status == "cancelled"


async def test_a_host_that_closes_while_the_stores_are_away_leaves_its_runs_to_others() -> None:
    stores, gate = MemoryStores(), Gate()
    await host_with(stores)
    away: Any = Away(stores)
    host = RunHost(away, executors=executors(gate=gate), settings=HostSettings(tick_s=0.01, drain_s=0))
    await host.start()
    await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
    await gate.entered.wait()
    away.is_away = True
    await host.close()
    run = await stores.runs.get("r")
    assert run is not None
    assert (run.status, run.worker) == ("running", host.worker)


async def test_a_ledger_that_cannot_record_lets_no_call_leave() -> None:
    stores = MemoryStores()
    host, model = await with_model(stores)
    hold = stores.ledger.hold
    stores.ledger.hold = _unable  # type: ignore[method-assign]
    async with host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        left = await host.wait(run.id)
        assert (left.status, left.stop_reason, model.calls) == ("halted", "ledger_unavailable", 0)
        stores.ledger.hold = hold  # type: ignore[method-assign]
        await host.resume(run.id)
        assert (await host.wait(run.id)).output == "hi!!"


def _unable(*args: Any, **kwargs: Any) -> Any:
    raise LedgerUnavailable("the disk is full")


def test_a_ledger_that_is_away_when_the_last_call_ends_gets_its_cost_before_the_run_is_over() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        settings = HostSettings(drain_s=0, owner_daily_usd="5")
        host, _ = await with_model(stores, clock=loop.clock, settings=settings)
        settle, back_at = stores.ledger.settle, loop.time() + 1

        def settle_later(*args: Any, **kwargs: Any) -> Any:
            return _unable() if loop.time() < back_at else settle(*args, **kwargs)

        stores.ledger.settle = settle_later  # type: ignore[method-assign]
        async with host:
            run = await host.submit(owner="ann", graph_id="two", input="hi")
            assert (await host.wait(run.id)).cost_nanos == 800_000_000
        for name in (f"run:{run.id}", day_accounts(run)[1]):
            account = stores.ledger.balance(name)
            assert (account.spent_nanos, account.held_nanos, account.unresolved_nanos) == (800_000_000, 0, 0)

    sim_run(main, seed=1)


def test_a_cost_that_could_not_be_settled_in_time_is_unresolved_in_the_record() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        host, _ = await with_model(stores, clock=loop.clock)
        async with host:
            run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
            stores.ledger.settle = _unable  # type: ignore[method-assign]
            fork = await host.wait((await host.fork(run.id, owner="ann", at="b")).id)
        assert (fork.status, fork.cost_nanos, fork.unresolved_nanos) == ("completed", 0, 400_000_000)
        assert stores.ledger.balance(f"run:{fork.id}").held_nanos == 400_000_000

    sim_run(main, seed=1)


async def _all(host: RunHost, run_id: str) -> list[Any]:
    return [event async for event in host.events(run_id)]


async def test_run_waits_while_its_event_buffer_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.hosting.event_pipeline.MAX_BUFFERED", 50)
    stores, gate, teller = MemoryStores(), Gate(), Teller()
    await host_with(stores)
    document = graph(
        ("in", "input", {}), ("gate", "gate", {}), ("tell", "teller", {"events": 5_000}), edges="in>gate in>tell"
    )
    await stores.graphs.save("tell", "ann", "tell", document, now_ms=0)
    away: Any = Away(stores)
    settings = HostSettings(tick_s=0.01, drain_s=0)
    async with RunHost(away, executors=executors(gate=gate, teller=teller), settings=settings) as host:
        await host.submit(owner="ann", graph_id="tell", run_id="r")
        await gate.entered.wait()
        away.is_away = True
        gate.opened.set()
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert teller.emitted < 4_000
        away.is_away = False
        assert (await host.wait("r")).status == "completed"
    events = [event for event in await stores.events.read("r", limit=10_000) if event.type == "node.progress"]
    assert [event.data["data"] for event in events] == [*range(5_000)]
    await check_log(stores, "r")
