"""Daily budgets that another host sets: hosts that ran before it apply them from their next run on."""

from __future__ import annotations

import asyncio

from penstock.hosting.host import RunHost
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from tests.hosting.test_day_budgets import CALL_NANOS, Days, statuses
from tests.hosting.test_on_databases import url
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "url"]


class Elsewhere(Days):
    """Hosts of which one works at a time; one that is started again knows what it knew."""

    async def done(self, host: RunHost, times: int, owner: str = "ann") -> str:
        async with host:
            return statuses(await self.runs(host, times, owner))


async def test_a_host_without_budgets_keeps_to_one_that_comes_while_it_is_at_work(url: str) -> None:
    async with await open_stores(url) as stores:
        days = Elsewhere(stores)
        without = await days.host()
        assert await days.done(without, 1) == "c"
        assert await days.done(await days.host(daily_usd="0.03"), 4) == "ccch"
        assert await days.done(without, 3) == "hhh"
        assert await days.done(without, 1, "bob") == "h"
    assert days.penny.billed_nanos == 4 * CALL_NANOS


async def test_a_host_without_budgets_keeps_to_one_of_an_owner_that_comes_while_it_is_at_work() -> None:
    days = Elsewhere(MemoryStores())
    without = await days.host()
    assert await days.done(without, 1) == "c"
    assert await days.done(await days.host(owner_daily_usd="0.01"), 2) == "ch"
    assert await days.done(without, 1) == "h"
    assert await days.done(without, 1, "bob") == "c", "bob has no budget"


async def test_what_owners_spend_on_a_host_that_knew_no_budget_of_all_counts_in_one_that_comes() -> None:
    days = Elsewhere(MemoryStores())
    of_owners = await days.host(owner_daily_usd="1")
    assert await days.done(of_owners, 2, "bob") == "cc"
    assert await days.done(await days.host(daily_usd="0.04"), 1, "ann") == "c"
    async with of_owners:
        *_, run = await days.runs(of_owners, 2, "bob")
    assert days.spent_cents(run) == [4, 3], "with what bob had spent before"
    assert run.status == "halted"


async def test_a_host_keeps_to_a_ceiling_that_another_has_raised_or_lowered_since() -> None:
    days = Elsewhere(MemoryStores())
    first = await days.host(daily_usd="0.02")
    assert await days.done(first, 3) == "cch"
    assert await days.done(await days.host(daily_usd="0.04"), 1) == "c"
    assert await days.done(first, 2) == "ch"
    assert await days.done(await days.host(daily_usd="0.03"), 1) == "h"
    assert days.penny.billed_nanos == 4 * CALL_NANOS


async def test_hosts_at_work_side_by_side_pass_a_new_budget_by_no_more_than_came_before_it(url: str) -> None:
    async with await open_stores(url) as one, await open_stores(url) as other:
        days, beside = Days(one), Days(other)
        without = await days.host()
        async with without:
            await days.runs(without, 1)
        async with await beside.host(daily_usd="0.05") as within:
            await beside.runs(within, 1)  # alone: a host claims a run with the budgets that it knows
            async with without:
                await asyncio.gather(days.runs(without, 8), beside.runs(within, 8))
    assert days.penny.billed_nanos + beside.penny.billed_nanos <= 6 * CALL_NANOS
