"""What the record of a run that was taken over, or takes up another, says that it paid: what the ledger says."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

from penstock.containment.ledger import MemoryLedgerStore
from penstock.errors import LedgerUnavailable
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Gate, graph, host_with
from tests.hosting.test_control import with_model
from tests.hosting.test_day_budgets import PRICES, SETTINGS, Penny

ASKING = (("in", "input", {}), ("a", "llm-completion", {"model": "m"}))
ALONE = graph(*ASKING, edges="in>a")
BESIDE = graph(*ASKING, ("late", "late", {}), edges="in>a in>late")


class SlowAnswers:
    """A ledger that records a hold, and answers when it may."""

    is_immediate = False

    def __init__(self, ledger: MemoryLedgerStore) -> None:
        self._ledger = ledger
        self.recorded = asyncio.Event()
        self.may_answer = threading.Event()
        self._loop = asyncio.get_running_loop()

    def hold(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._ledger.hold(*args, **kwargs)
        self._loop.call_soon_threadsafe(self.recorded.set)
        assert self.may_answer.wait(10)
        return answer

    def __getattr__(self, name: str) -> Any:
        if name == "try_inline":
            raise AttributeError(name)
        return getattr(self._ledger, name)


class Late:
    """A node that fails once the ledger was called."""

    def __init__(self, ledger: SlowAnswers) -> None:
        self._ledger = ledger

    async def execute(self, data: Any, inputs: Any, context: Any) -> Any:
        await self._ledger.recorded.wait()
        raise ValueError("too late")


async def test_hold_request_pending_when_a_run_ends_is_not_reported_as_unresolved() -> None:
    stores, penny = MemoryStores(), Penny()
    await stores.graphs.save("beside", "ann", "beside", BESIDE, now_ms=0)
    slow: Any = SlowAnswers(stores.ledger)
    stores.ledger = slow
    services, late = {"models": {"m": penny}}, Late(slow)
    async with await host_with(stores, settings=SETTINGS, prices=PRICES, services=services, late=late) as host:
        run = await host.submit(owner="ann", graph_id="beside", input="x")
        for again in (False, True):
            slow.recorded.clear()
            slow.may_answer.clear()
            if again:
                await host.resume(run.id)
            await _until_failed(stores, run.id, 1 + again)
            slow.may_answer.set()
            left = await host.wait(run.id)
            last = (await stores.events.read(run.id, limit=1_000))[-1]
            assert (left.status, left.cost_nanos, left.unresolved_nanos) == ("failed", 0, 0)
            assert "unresolved_usd" not in last.data
            account = stores.ledger.balance(f"run:{run.id}")
            assert (account.spent_nanos, account.held_nanos, account.unresolved_nanos) == (0, 0, 0)
    assert penny.billed_nanos == 0


async def _until_failed(stores: MemoryStores, run_id: str, times: int) -> None:
    """Wait until so many of its nodes have raised."""
    while True:
        events = await stores.events.read(run_id, limit=1_000)
        if sum(event.type == "node.error" for event in events) == times:
            return
        await asyncio.sleep(0.001)


def test_fork_that_ends_while_the_ledger_is_unavailable_reports_its_own_cost_afterwards() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        stores = MemoryStores(clock=loop.clock)
        host, _ = await with_model(stores, clock=loop.clock)
        balance, back_at = stores.ledger.balance, loop.time() + 60

        def balance_later(account: str) -> Any:
            if loop.time() < back_at and account.startswith("run:f"):
                raise LedgerUnavailable("it is away")
            return balance(account)

        stores.ledger.balance = balance_later  # type: ignore[method-assign]
        async with host:
            run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
            fork = await host.wait((await host.fork(run.id, owner="ann", at="b", run_id_new="f")).id)
        assert (fork.status, fork.cost_nanos) == ("completed", 400_000_000)
        assert loop.time() >= back_at

    sim_run(main, seed=1)


async def test_a_host_that_closes_parks_a_run_that_still_asks_for_a_hold() -> None:
    stores, penny = MemoryStores(), Penny()
    await stores.graphs.save("alone", "ann", "alone", ALONE, now_ms=0)
    slow: Any = SlowAnswers(stores.ledger)
    stores.ledger = slow
    settings, services = replace(SETTINGS, drain_s=0), {"models": {"m": penny}}
    async with await host_with(stores, settings=settings, prices=PRICES, services=services) as host:
        run = await host.submit(owner="ann", graph_id="alone", input="x")
        await slow.recorded.wait()
    assert (await stores.runs.get(run.id)).status == "parked"  # type: ignore[union-attr]
    slow.may_answer.set()


async def test_a_host_that_closes_parks_a_run_also_while_the_ledger_is_away() -> None:
    stores, gate = MemoryStores(), Gate()
    for _ in range(2):
        async with await host_with(stores, gate=gate) as host:
            if not gate.came:
                await host.submit(owner="ann", graph_id="gate", run_id="r", input="x")
            await gate.entered.wait()
            gate.entered.clear()
            if gate.came == 2:
                stores.ledger.balance = stores.ledger.held = _away  # type: ignore[method-assign]
        assert (await stores.runs.get("r")).status == "parked"  # type: ignore[union-attr]


def _away(*args: Any, **kwargs: Any) -> Any:
    raise LedgerUnavailable("it is away")
