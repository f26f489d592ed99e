"""What a user, and all, may spend in a day: kept in the database, so that hosts that share it share the budget."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.containment.ledger import MemoryLedgerStore
from penstock.errors import InvalidValue
from penstock.hosting.durability import day_accounts, day_of
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import HostStores, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.runtime.durable import blocks
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import ManualClock
from tests.hosting.graphs import graph, host_with
from tests.hosting.test_on_databases import url
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "url"]

CALL_NANOS = 10_000_000
"""A cent: ten tokens of output at a tenth of a cent, which is as many as a call may ask for."""
PRICES = PriceBook(registered={"penny": Price(0, 1_000)}, use_genai_prices=False)
ASK = graph(("in", "input", {}), ("a", "llm-completion", {"model": "m"}), edges="in>a")
SETTINGS = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="0.06", daily_usd="0.10")
RUNS_OF = {"ann": 12, "bob": 12}


in_blocks = False
"""Whether hosts set parts of the budgets aside for their runs; nothing else may differ."""


@pytest.fixture(autouse=True, params=[False, True], ids=["", "in blocks"])
def _in_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hosting.test_day_budgets.in_blocks", request.param)
    for name, value in (("SHARE", 2), ("MIN_CALLS", 1)):  # small budgets, and many blocks
        monkeypatch.setattr(blocks, name, value)


class Penny(Model):
    """A model whose answers cost a cent."""

    max_output_tokens = 10

    def __init__(self) -> None:
        super().__init__("penny")
        self.billed_nanos = 0

    async def request(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(0)
        self.billed_nanos += CALL_NANOS
        return ModelResponse("text", usage=Usage(1, 10, model="penny"))


async def spend(hosts: list[RunHost]) -> Counter[str]:
    """Runs of two users on all hosts at once; how many of each were answered."""
    for host in hosts:
        await host.start()
    runs = [
        await hosts[number % len(hosts)].submit(owner=owner, graph_id="penny", input="x")
        for owner, most in RUNS_OF.items()
        for number in range(most)
    ]
    left = [await hosts[0].wait(run.id) for run in runs]
    for host in hosts:
        await host.close()
    assert {run.status for run in left} == {"completed", "halted"}
    assert {run.stop_reason for run in left if run.status == "halted"} == {"budget_exceeded"}
    return Counter(run.owner for run in left if run.status == "completed")


@pytest.mark.requirement("P-B4")
async def test_hosts_that_share_a_database_share_the_budget_of_each_user_and_of_all(url: str) -> None:
    penny = Penny()
    settings = replace(SETTINGS, day_blocks=in_blocks)
    options = {"settings": settings, "prices": PRICES, "services": {"models": {"m": penny}}}
    async with await open_stores(url) as one, await open_stores(url) as other:
        await one.graphs.save("penny", "ann", "penny", ASK, now_ms=0)
        hosts = [
            await host_with(stores, worker=name, **options)  # type: ignore[arg-type]
            for name, stores in (("one", one), ("other", other))
        ]
        answered = await spend(hosts)
        hosts = [await host_with(other, worker="later", **options)]  # type: ignore[arg-type]
        later = await hosts[0].submit(owner="eve", graph_id="penny", input="x")
        async with hosts[0]:
            assert (await hosts[0].wait(later.id)).status == "halted"
    assert max(answered.values()) <= 6
    assert answered.total() == 10
    assert penny.billed_nanos == 10 * CALL_NANOS


async def test_a_run_is_paid_from_the_day_on_which_it_was_submitted_whenever_it_begins() -> None:
    clock = ManualClock()
    stores = MemoryStores(clock=clock)
    await stores.graphs.save("penny", "ann", "penny", ASK, now_ms=0)
    services = {"models": {"m": Penny()}}
    settings = replace(SETTINGS, day_blocks=in_blocks)
    host = await host_with(stores, clock=clock, settings=settings, prices=PRICES, services=services)
    clock.advance(86_400 - 60)  # it began at midnight
    run = await host.submit(owner="ann", graph_id="penny", input="x")
    clock.advance(120)
    async with host:
        left = await host.wait(run.id)
    assert left.started_ms is not None
    assert (left.status, day_of(left.started_ms) - day_of(run.created_ms)) == ("completed", timedelta(days=1))
    first = day_of(run.created_ms)
    assert {name for name in stores.ledger.aged(0) if not name.startswith(("run:", blocks.BLOCKS))} == {
        f"all:{first}",
        f"user:ann:{first}",
    }
    assert stores.ledger.balance(f"user:ann:{first}").spent_nanos == CALL_NANOS


IN_BERLIN = replace(SETTINGS, day_zone="Europe/Berlin")


async def test_the_day_of_a_budget_is_that_of_the_time_zone_in_the_settings() -> None:
    clock = ManualClock()
    clock.advance(23.5 * 3_600)  # it began at midnight in UTC: in Berlin, it is the next day
    stores = MemoryStores(clock=clock)
    await stores.graphs.save("penny", "ann", "penny", ASK, now_ms=0)
    services = {"models": {"m": Penny()}}
    host = await host_with(stores, clock=clock, settings=IN_BERLIN, prices=PRICES, services=services)
    async with host:
        for number in range(7):
            run = await host.submit(owner="ann", graph_id="penny", input=number)
            left = await host.wait(run.id)
        assert left.halt is not None
        assert (left.status, left.halt["whose"]) == ("halted", "owner")
        assert await spent_by_day(stores) == {"2026-01-02": 6 * CALL_NANOS}
        clock.advance(23.6 * 3_600)  # midnight in Berlin, an hour before that of UTC
        run = await host.submit(owner="ann", graph_id="penny", input="tomorrow")
        assert (await host.wait(run.id)).status == "completed"
        assert (await spent_by_day(stores))["2026-01-03"] == CALL_NANOS
        day = day_of(host.now_ms(), host.settings.zone)
        budgets = {one.level: one for one in await host.budgets_of_day(day, ["ann"], [])}
        assert budgets["owner"].left_nanos == 5 * CALL_NANOS


async def spent_by_day(stores: MemoryStores) -> dict[str, int]:
    names = [name for name in stores.ledger.aged(0) if name.startswith("user:ann:")]
    return {name.rpartition(":")[2]: stores.ledger.balance(name).spent_nanos for name in names}


@pytest.mark.parametrize("wrong", ["", "Mars/Olympus", "../etc/passwd", "Europe", "a\0b", "/etc/localtime", 7, None])
def test_a_time_zone_that_does_not_exist_is_refused_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="day_zone"):
        HostSettings(day_zone=wrong)


class Days:
    """A service that is started again and again on the same stores, with other budgets for the day."""

    def __init__(self, stores: HostStores) -> None:
        self.stores = stores
        self.penny = Penny()

    def host(self, **budgets: str) -> Awaitable[RunHost]:
        settings = HostSettings(tick_s=0.05, drain_s=0, day_blocks=in_blocks, **budgets)  # type: ignore[arg-type]
        return host_with(self.stores, settings=settings, prices=PRICES, services={"models": {"m": self.penny}})

    async def runs(self, host: RunHost, times: int, owner: str = "ann", **limits: object) -> list[RunRecord]:
        """So many runs, one after the other, as they were left."""
        await self.stores.graphs.save("penny", "ann", "penny", ASK, now_ms=0)
        left = []
        for _ in range(times):
            run = await host.submit(owner=owner, graph_id="penny", input="x", limits=limits)
            left.append(await host.wait(run.id))
        return left

    def spent_cents(self, run: RunRecord) -> list[int | None]:
        """What is counted for everybody on the day of a run, and for its owner; None for no account."""
        return [self._spent(name) for name in day_accounts(run)]

    def _spent(self, name: str) -> int | None:
        try:
            return self.stores.ledger.balance(name).spent_nanos // CALL_NANOS
        except KeyError:
            return None


def statuses(runs: list[RunRecord]) -> str:
    """c for each that is complete, h for each that was halted."""
    return "".join(run.status[0] for run in runs)


async def test_a_budget_of_all_that_comes_during_the_day_holds_for_those_who_have_spent_before() -> None:
    days = Days(MemoryStores())
    async with await days.host(owner_daily_usd="1") as host:
        (run, *_) = await days.runs(host, 2)
    async with await days.host(owner_daily_usd="1", daily_usd="0.04") as host:
        assert statuses(await days.runs(host, 3)) == "cch"
        assert statuses(await days.runs(host, 1, "bob")) == "h"
    assert days.spent_cents(run) == [4, 4]


async def test_a_budget_of_users_that_comes_during_the_day_counts_below_that_of_all() -> None:
    days = Days(MemoryStores())
    async with await days.host(daily_usd="1") as host:
        await days.runs(host, 2)
    async with await days.host(daily_usd="1", owner_daily_usd="0.02") as host:
        assert statuses(await days.runs(host, 3)) == "cch"
        (run,) = await days.runs(host, 1, "bob")
    assert days.spent_cents(run) == [5, 1]


async def test_a_run_that_began_before_the_budget_existed_counts_once_it_continues(url: str) -> None:
    async with await open_stores(url) as stores:
        days = Days(stores)
        async with await days.host() as host:
            (run,) = await days.runs(host, 1, max_api_calls=0)
            assert run.status == "halted"
        async with await days.host(owner_daily_usd="0.03", daily_usd="1") as host:
            assert statuses(await days.runs(host, 3)) == "ccc"
            await host.grant(run.id, {"max_api_calls": 5}, by="eve")
            assert (await host.wait(run.id)).status == "halted"
            assert await asyncio.to_thread(days.spent_cents, run) == [3, 3]
    assert days.penny.billed_nanos == 3 * CALL_NANOS


async def test_a_budget_of_the_day_is_raised_by_a_higher_one_and_not_by_a_host_that_has_none() -> None:
    days = Days(MemoryStores())
    async with await days.host(owner_daily_usd="0.02") as host:
        *_, run = await days.runs(host, 3)
        assert run.status == "halted"
        async with await days.host() as beside:
            assert statuses(await days.runs(beside, 1)) == "h"
        assert statuses(await days.runs(host, 1)) == "h"
    async with await days.host(owner_daily_usd="0.04") as host:
        await host.resume(run.id)
        assert (await host.wait(run.id)).status == "completed"
        assert statuses(await days.runs(host, 2)) == "ch"
    assert days.spent_cents(run) == [None, 4]


async def test_hosts_with_other_budgets_that_take_over_from_each_other_leave_one_tree_with_exact_figures() -> None:
    days = Days(MemoryStores())
    async with await days.host(owner_daily_usd="1") as of_users:
        await days.runs(of_users, 1)
        async with await days.host(daily_usd="1") as of_all:
            (run,) = await days.runs(of_all, 1, "bob", max_api_calls=0)
            await days.runs(of_all, 1, "bob")
        await of_users.grant(run.id, {"max_api_calls": 5}, by="eve")
        assert (await of_users.wait(run.id)).status == "completed"
    # A run that began in a block stays below the accounts that its first host knew.
    assert days.spent_cents(run) == [2, 0 if in_blocks else 1]


async def test_without_budgets_there_are_no_accounts_of_days() -> None:
    days = Days(MemoryStores())
    async with await days.host() as host:
        (run, *_) = await days.runs(host, 2)
    assert days.spent_cents(run) == [None, None]


async def test_a_run_that_is_done_again_from_an_older_copy_of_the_stores_is_paid_for_again() -> None:
    ledger = MemoryLedgerStore()
    for again in range(1, 5):
        stores = MemoryStores()
        stores.ledger = ledger
        days = Days(stores)
        await stores.graphs.save("penny", "ann", "penny", ASK, now_ms=0)
        async with await days.host(owner_daily_usd="0.03") as host:
            await host.submit(owner="ann", graph_id="penny", input="x", run_id="r")
            left = await host.wait("r")
        assert left.status == ("completed" if again <= 3 else "halted")
        assert days.spent_cents(left) == [None, min(again, 3)]
        assert days.penny.billed_nanos == (CALL_NANOS if again <= 3 else 0)
