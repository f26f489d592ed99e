"""Unresolved bills of hosted runs: a person lists and resolves them, and the run goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.containment.ledger import Amounts
from penstock.errors import InvalidValue, LedgerUnavailable
from penstock.hosting import BillNotFound, HostSettings, RunHost, RunLimits
from penstock.hosting.control import RunNotFound
from penstock.hosting.ports import Conflict, HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.server.sse import is_over
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import explore
from tests.hosting.graphs import SETTINGS, graph, host_with, killed
from tests.hosting.test_grants import host_at, made
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

pytestmark = pytest.mark.requirement("X-10")

ASK = graph(("in", "input", {}), ("a", "llm-completion", {"model": "m"}), ("out", "output", {}), edges="in>a a>out")
HELD = 4_096 * 100_000
"""Nano-dollars that a call without a maximum holds: nearly the whole ceiling of these runs."""
CEILING = {"max_cost_usd": "0.41"}


class Losing(ScriptedModel):
    """A model that loses the connection of its first requests, which may have been billed."""

    retries = 1

    def __init__(self, times: int = 1) -> None:
        self.times = times
        super().__init__(self._reply, usage=Usage.of(cost_usd="0.01", input_tokens=10, output_tokens=5))

    def _reply(self, request: ModelRequest) -> str:
        if self.calls <= self.times:
            raise ConnectionResetError("the peer has gone")
        return f"{request.messages[-1].text}!"


def prices() -> PriceBook:
    return PriceBook(registered={"scripted": Price(0, 100)}, use_genai_prices=False)


async def hosting(stores: Any, model: ScriptedModel, **options: Any) -> RunHost:
    host = await host_with(stores, services={"models": {"m": model}}, prices=prices(), **options)
    await stores.graphs.save("one", "ann", "one", ASK, now_ms=0)
    return host


async def halted_run(host: RunHost, run_id: str = "r") -> RunRecord:
    """A run that was halted because the bill of its only request is unknown."""
    await host.submit(owner="ann", graph_id="one", run_id=run_id, input="hi", limits=CEILING)
    left = await host.wait(run_id)
    assert (left.status, left.stop_reason) == ("halted", "budget_exceeded")
    assert (left.cost_nanos, left.unresolved_nanos) == (0, HELD)
    return left


async def events_of(host: RunHost, run_id: str = "r") -> list[HostedEvent]:
    return [event async for event in host.events(run_id)]


Open = Callable[[], AbstractAsyncContextManager[Any]]


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Open the stores of a test, in each kind of database."""

    @asynccontextmanager
    async def stores() -> AsyncIterator[Any]:
        if request.param == "memory":
            yield MemoryStores()
            return
        async with await open_stores(url) as found:
            yield found

    url = str(request.getfixturevalue("postgres_url")) if request.param == "postgres" else str(tmp_path / "runs.db")
    return stores


async def test_a_halted_run_continues_after_its_bills_are_resolved(opened: Open) -> None:
    model = Losing()
    async with opened() as stores, await hosting(stores, model) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        assert (bill.held.cost_nanos, bill.name, bill.model) == (HELD, "scripted", "scripted")
        assert bill.reason == "the peer has gone"
        resolved = await host.resolve_bill("r", bill.call_id, cost_usd="0.02", by="eve", tokens_in=7, tokens_out=3)
        assert (resolved.status, resolved.cost_nanos, resolved.unresolved_nanos) == ("halted", 20_000_000, 0)
        assert (resolved.tokens_in, resolved.tokens_out) == (7, 3)
        assert await host.bills("r") == []
        await host.resume("r")
        left = await host.wait("r")
        events = await events_of(host)
        balance = await asyncio.to_thread(stores.ledger.balance, "run:r")
    assert (left.status, left.output, left.unresolved_nanos) == ("completed", "hi!", 0)
    assert (left.cost_nanos, left.tokens_in, left.tokens_out) == (30_000_000, 17, 8)
    (event,) = [event for event in events if event.type == "bill.resolved"]
    facts = {"call_id": bill.call_id, "by": "eve", "cost_usd": 0.02, "held_usd": 0.4096, "tokens_in": 7}
    assert {name: event.data[name] for name in facts} == facts
    assert event.at_ms >= (bill.at_ms or 0) > 0
    shown = [event.data["units"][0] for event in events if event.type == "budget"][-1]
    assert (shown["spent"], shown["unresolved"]) == (0.03, 0)
    assert (balance.spent_nanos, balance.unresolved_nanos, balance.held_nanos) == (30_000_000, 0, 0)


async def test_without_a_resolution_it_halts_again(opened: Open) -> None:
    async with opened() as stores, await hosting(stores, Losing()) as host:
        await halted_run(host)
        await host.resume("r")
        left = await host.wait("r")
    assert (left.status, left.stop_reason, left.unresolved_nanos) == ("halted", "budget_exceeded", HELD)


async def test_a_released_bill_gives_its_hold_back(opened: Open) -> None:
    async with opened() as stores, await hosting(stores, Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        released = await host.release_bill("r", bill.call_id, by="eve")
        assert (released.cost_nanos, released.unresolved_nanos) == (0, 0)
        balance = await asyncio.to_thread(stores.ledger.balance, "run:r")
        assert (balance.spent_nanos, balance.unresolved_nanos) == (0, 0)
        await host.resume("r")
        left = await host.wait("r")
        events = await events_of(host)
    assert (left.status, left.cost_nanos) == ("completed", 10_000_000)
    (event,) = [event for event in events if event.type == "bill.released"]
    assert (event.data["by"], event.data["cost_usd"], event.data["held_usd"]) == ("eve", 0, 0.4096)


async def test_a_run_whose_bills_are_resolved_can_be_granted_more() -> None:
    stores = MemoryStores()
    async with await hosting(stores, Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        await host.resolve_bill("r", bill.call_id, cost_usd="0.50", by="eve")
        await host.grant("r", RunLimits(max_cost_usd="0.60"), by="eve")
        left = await host.wait("r")
    assert (left.status, left.cost_nanos) == ("completed", 510_000_000)


async def test_a_bill_is_resolved_once(opened: Open) -> None:
    async with opened() as stores, await hosting(stores, Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        await host.resolve_bill("r", bill.call_id, cost_usd="0.02", by="eve")
        expected = r"the bill of call '1-\w+/n\d+' of run 'r' was resolved at \$0\.02 by 'eve'"
        with pytest.raises(Conflict, match=expected):
            await host.resolve_bill("r", bill.call_id, cost_usd="0.03", by="bob")
        with pytest.raises(Conflict, match=expected):
            await host.release_bill("r", bill.call_id, by="bob")
        balance = await asyncio.to_thread(stores.ledger.balance, "run:r")
    assert balance.spent_nanos == 20_000_000


async def test_an_unknown_bill_or_run_is_not_found() -> None:
    async with await hosting(MemoryStores(), Losing()) as host:
        await halted_run(host)
        for call_id in ("n000001", "", "1-x/n000004", "x/y/z", "r"):
            with pytest.raises(BillNotFound, match="list its bills for their ids"):
                await host.resolve_bill("r", call_id, cost_usd=0, by="eve")
        with pytest.raises(RunNotFound):
            await host.bills("another")
        with pytest.raises(RunNotFound):
            await host.release_bill("another", "n000001", by="eve")


@pytest.mark.parametrize(
    "given",
    [{"cost_usd": -1}, {"cost_usd": float("nan")}, {"cost_usd": 0, "tokens_in": -1}, {"cost_usd": 0, "by": " "}],
)
async def test_an_invalid_resolution_is_refused(given: dict[str, Any]) -> None:
    async with await hosting(MemoryStores(), Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        with pytest.raises(InvalidValue):
            await host.resolve_bill("r", bill.call_id, **{"by": "eve", **given})
        assert len(await host.bills("r")) == 1


async def test_the_bills_of_a_run_in_progress_are_listed_and_cannot_be_resolved() -> None:
    stores = MemoryStores()
    async with await hosting(stores, Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        await host.close()
        await host.resume("r")  # queued: no worker is there to continue it
        assert await host.bills("r") == [bill]
        with pytest.raises(Conflict, match="run 'r' has not ended: its bills can be resolved when it has ended"):
            await host.resolve_bill("r", bill.call_id, cost_usd=0, by="eve")


async def test_readers_of_a_run_whose_bill_was_resolved_reach_its_end() -> None:
    stores = MemoryStores()
    async with await hosting(stores, Losing()) as host:
        run = await halted_run(host)
        (bill,) = await host.bills("r")
        halted_at = (await events_of(host))[-1]
        assert halted_at.type == "run.halted"
        await host.release_bill("r", bill.call_id, by="eve")
        events = await events_of(host)
        assert [event.type for event in events[-2:]] == ["run.halted", "bill.released"]
        assert await is_over(stores, run, events[-1].seq)
        assert not await is_over(stores, run, halted_at.seq)


async def test_a_resolution_that_the_ledger_has_not_got_is_applied_later() -> None:
    stores = MemoryStores()
    async with await hosting(stores, Losing()) as host:
        await halted_run(host)
        (bill,) = await host.bills("r")
        settle = stores.ledger.settle

        def unavailable(*args: Any, **named: Any) -> None:
            raise LedgerUnavailable("the ledger cannot be reached")

        stores.ledger.settle = unavailable  # type: ignore[method-assign]
        with pytest.raises(LedgerUnavailable):
            await host.resolve_bill("r", bill.call_id, cost_usd="0.02", by="eve")
        stores.ledger.settle = settle  # type: ignore[method-assign]
        assert stores.ledger.balance("run:r").unresolved_nanos == HELD
        assert await host.bills("r") == []
        assert stores.ledger.balance("run:r").spent_nanos == 20_000_000
        with pytest.raises(Conflict, match=r"was resolved at \$0\.02 by 'eve'"):
            await host.release_bill("r", bill.call_id, by="bob")


class Hanging(ScriptedModel):
    """A model that never answers its first request."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        super().__init__(["never"])

    async def request(self, request: ModelRequest) -> Any:
        self.requested.set()
        await asyncio.Event().wait()


async def test_the_call_of_a_worker_that_was_lost_is_a_bill(opened: Open) -> None:
    model, short = Hanging(), HostSettings(tick_s=0.05, lease_s=0.5, drain_s=0)
    async with opened() as stores:
        first = await hosting(stores, model, settings=short)
        await first.start()
        await first.submit(owner="ann", graph_id="one", run_id="r", input="hi", limits=CEILING)
        await model.requested.wait()
        await killed(first)
        async with await hosting(stores, Losing(0), settings=short, worker="second") as host:
            left = await host.wait("r")
            assert (left.status, left.unresolved_nanos) == ("halted", HELD)
            (bill,) = await host.bills("r")
            assert bill.held.cost_nanos == HELD
            await host.release_bill("r", bill.call_id, by="eve")
            await host.resume("r")
            assert (await host.wait("r")).status == "completed"


async def test_a_resolved_bill_frees_the_daily_budget() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="0.50")
    async with await hosting(MemoryStores(), Losing(), settings=settings) as host:
        await halted_run(host)
        await host.submit(owner="ann", graph_id="one", run_id="next", input="hi", limits={"max_cost_usd": "0.41"})
        await host.wait("next")
        (bill,) = await host.bills("r")
        await host.resolve_bill("r", bill.call_id, cost_usd="0.01", by="eve")
        await host.submit(owner="ann", graph_id="one", run_id="last", input="hi", limits={"max_cost_usd": "0.41"})
        assert (await host.wait("last")).status == "completed"


def test_of_people_who_resolve_a_bill_at_once_exactly_one_does() -> None:
    async def schedule(seed: int) -> str:
        stores, clock = made()
        chance = random.Random(seed)
        async with await hosting(stores.memory, Losing(), clock=clock) as host:
            await halted_run(host)
            (bill,) = await host.bills("r")
        hosts = [host_at(stores, clock, worker) for worker in ("one", "other")]

        async def resolve(number: int) -> str | None:
            await asyncio.sleep(chance.choice([0, 0, 0.01]))
            try:
                host = hosts[number % 2]
                await host.resolve_bill("r", bill.call_id, cost_usd=f"0.0{number + 1}", by=f"p{number}")
                return f"p{number}"
            except Conflict:
                return None

        (winner,) = (name for name in await asyncio.gather(*map(resolve, range(4))) if name is not None)
        events = await stores.memory.events.read("r", limit=1_000)
        (event,) = [event for event in events if event.type == "bill.resolved"]
        amount = round(event.data["cost_usd"] * 1e9)
        assert event.data["by"] == winner
        run = await stores.memory.runs.get("r")
        assert run.cost_nanos == stores.ledger.balance("run:r").spent_nanos == amount
        return winner

    assert len(set(explore(schedule, schedules=60))) > 1


def test_a_resolution_that_comes_with_a_resume_loses_neither() -> None:
    async def schedule(seed: int) -> str:
        stores, clock = made()
        chance = random.Random(seed)
        async with await hosting(stores.memory, Losing(), clock=clock) as host:
            await halted_run(host)
            (bill,) = await host.bills("r")
        one, other = (host_at(stores, clock, worker) for worker in ("one", "other"))

        async def later(act: Any) -> Any:
            await asyncio.sleep(chance.choice([0, 0, 0.01]))
            return await act

        acts = [one.resume("r"), other.release_bill("r", bill.call_id, by="eve")]
        resumed, released = await asyncio.gather(*(later(act) for act in acts), return_exceptions=True)
        assert isinstance(resumed, RunRecord), resumed
        run = await stores.memory.runs.get("r")
        assert run.status == "queued"
        events = [event.type for event in await stores.memory.events.read("r", limit=1_000)]
        is_released = isinstance(released, RunRecord)
        assert is_released or isinstance(released, Conflict), released
        assert events.count("bill.released") == is_released
        assert events[-1] == "run.queued"
        assert (stores.ledger.balance("run:r").unresolved_nanos == 0) is is_released
        return str(is_released)

    assert set(explore(schedule, schedules=60)) == {"True", "False"}


async def test_bills_are_listed_oldest_first_and_by_run() -> None:
    stores = MemoryStores()
    async with await hosting(stores, Losing(4), settings=SETTINGS) as host:
        await halted_run(host, "r")
        await halted_run(host, "r2")
        stores.ledger.hold("r/1-x/n9", "run:r", Amounts(1), retry_drawn=True)
        stores.ledger.leave_unresolved("r/1-x/n9")
        first, second = await host.bills("r")
        assert (first.call_id, first.name, first.at_ms) == ("1-x/n9", None, None)
        assert first.reason == "the worker was lost before the call ended"
        assert second.held.cost_nanos == HELD
        assert len(await host.bills("r2")) == 1
