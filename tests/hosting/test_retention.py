"""What is removed when it is no longer needed: accounts of runs that are gone, and of days long past."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import pytest

from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS
from penstock.hosting import retention
from penstock.hosting.durability import day_of
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.retention import sweep_accounts
from penstock.storage.memory import MemoryStores
from penstock.testing.clock import ManualClock
from tests.hosting.graphs import Gate, host_with, killed
from tests.hosting.test_approvals import pending_approval

DAY_S = 86_400
KEPT = 3
SETTINGS = HostSettings(tick_s=0.05, drain_s=0, keep_days=KEPT, daily_usd="9", owner_daily_usd="9")
LONG_S = 40 * DAY_S


def made() -> tuple[MemoryStores, ManualClock]:
    clock = ManualClock(start_ns=1_000)
    return MemoryStores(clock=clock), clock


async def a_host(stores: MemoryStores, clock: ManualClock, settings: HostSettings = SETTINGS) -> RunHost:
    return await host_with(stores, settings=settings, clock=clock, gate=Gate())


async def run_of(host: RunHost, owner: str, run_id: str) -> None:
    await host.submit(owner=owner, graph_id="echo", run_id=run_id)
    assert (await host.wait(run_id)).status == "completed"


def accounts(stores: MemoryStores) -> Sequence[str]:
    return stores.ledger.aged(0, limit=10_000)


def today(clock: ManualClock) -> date:
    return day_of(clock.time_ns() // 1_000_000)


async def test_the_accounts_of_a_run_and_of_its_day_are_gone_when_they_are_not_kept_any_more() -> None:
    stores, clock = made()
    async with await a_host(stores, clock) as host:
        await run_of(host, "ann", "r")
    day = today(clock)
    assert list(accounts(stores)) == [f"all:{day}", f"user:ann:{day}", "run:r"]
    clock.advance(LONG_S)
    async with await a_host(stores, clock) as host:
        await run_of(host, "bob", "s")
    day = today(clock)
    assert list(accounts(stores)) == [f"all:{day}", f"user:bob:{day}", "run:s"]


async def test_as_many_runs_are_removed_at_once_as_have_ended_since_the_last_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "RUNS_PAGE", 2)
    stores, clock = made()
    async with await a_host(stores, clock) as host:
        for number in range(7):
            await run_of(host, "ann", f"r{number}")
    clock.advance(LONG_S)
    host = await a_host(stores, clock)
    await retention.remove_ended(host._context)
    assert [run.id for run in await stores.runs.list(limit=10)] == []
    assert not [name for name in accounts(stores) if name.startswith("run:")]
    assert host.stats()["totals"]["removed"] == 7


async def test_blocks_of_days_long_past_are_ended_and_removed() -> None:
    stores, clock = made()
    host = await a_host(stores, clock, replace(SETTINGS, day_blocks=True))
    await host.start()
    await run_of(host, "ann", "r")
    day = today(clock)
    assert [name for name in accounts(stores) if name.startswith("block:")]
    assert stores.ledger.balance(f"all:{day}").held_nanos > 0
    await killed(host)  # nothing has been given back
    clock.advance(LONG_S)
    async with await a_host(stores, clock):
        pass
    assert list(accounts(stores)) == []


async def test_the_next_host_removes_what_a_host_that_died_in_the_middle_left_behind() -> None:
    stores, clock = made()
    async with await a_host(stores, clock) as host:
        await run_of(host, "ann", "r")
    stores.ledger.charge("k", "run:r", Amounts(cost_nanos=7))
    clock.advance(LONG_S)
    assert await stores.runs.remove_ended(clock.time_ns() // 1_000_000) == ["r"]
    assert "run:r" in accounts(stores)
    async with await a_host(stores, clock) as host:
        await run_of(host, "ann", "r")  # of the same id: what the other has used is not its own
    assert stores.ledger.balance("run:r").spent_nanos == 0
    clock.advance(LONG_S)
    host = await a_host(stores, clock)
    await sweep_accounts(host._context)
    assert "run:r" in accounts(stores), "its run is there"


async def test_over_many_days_there_are_no_more_accounts_than_are_kept() -> None:
    stores, clock = made()
    for number in range(12):
        async with await a_host(stores, clock) as host:
            for owner in ("ann", "bob:2026-01-01", "2026-01-01"):
                await run_of(host, owner, f"{owner[:3]}{number}")
            assert len(accounts(stores)) <= (KEPT + 2) * (1 + 2 * 3)
        clock.advance(DAY_S)
    assert len(accounts(stores)) > KEPT * (1 + 2 * 3)


async def test_days_are_kept_for_two_days_also_if_runs_are_not() -> None:
    stores, clock = made()
    settings = HostSettings(drain_s=0, keep_days=0.001, daily_usd="9")
    async with await a_host(stores, clock, settings) as host:
        await run_of(host, "ann", "r")
    left = []
    for _ in range(4):
        clock.advance(DAY_S)
        host = await a_host(stores, clock, settings)
        await retention.remove_ended(host._context)
        await sweep_accounts(host._context)
        left.append(len(accounts(stores)))
    assert left == [1, 1, 0, 0]


async def test_accounts_still_in_use_are_never_removed() -> None:
    stores, clock = made()
    host = await a_host(stores, clock)
    async with host:
        await host.submit(owner="ann", graph_id="ask", run_id="waits", input="it")
        await pending_approval(host, "waits")
        await run_of(host, "bob", "held")
        stores.ledger.hold("k", "run:held", Amounts(cost_nanos=1))
    for name in ("mine", "run", "all:yesterday", "user:x", "user:2026", "all:2001-01-01-1"):
        stores.ledger.open_account(name, NO_LIMITS)
    before = accounts(stores)
    clock.advance(LONG_S)
    host = await a_host(stores, clock)
    assert await stores.runs.remove_ended(clock.time_ns() // 1_000_000) == ["held"]
    await sweep_accounts(host._context)
    assert accounts(stores) == before
    stores.ledger.release("k")
    await sweep_accounts(host._context)
    assert set(before) - set(accounts(stores)) == {"run:held", *(name for name in before if "bob" in name)}


async def test_the_day_of_a_run_that_was_never_begun_is_kept_until_it_has_ended() -> None:
    stores, clock = made()
    host = await a_host(stores, clock)
    async with host:
        await run_of(host, "ann", "r")
    await host.submit(owner="ann", graph_id="echo", run_id="queued")
    day = today(clock)
    clock.advance(LONG_S)
    host = await a_host(stores, clock)
    await retention.remove_ended(host._context)
    await sweep_accounts(host._context)
    assert list(accounts(stores)) == [f"all:{day}", f"user:ann:{day}"]
    await host.cancel("queued")
    await sweep_accounts(host._context)
    assert list(accounts(stores)) == []


async def test_many_accounts_are_looked_at_page_by_page_and_by_several_hosts_at_once() -> None:
    stores, clock = made()
    hosts = [await a_host(stores, clock) for _ in range(3)]
    for number in range(retention.PAGE * 2 + 7):
        stores.ledger.open_account(f"run:r{number}", NO_LIMITS)
    for number in range(0, retention.PAGE * 2, retention.PAGE // 2):
        await hosts[0].submit(owner=f"o{number}", graph_id="echo", run_id=f"r{number}")
    clock.advance(LONG_S)
    await asyncio.gather(*(sweep_accounts(host._context) for host in hosts))
    assert list(accounts(stores)) == [f"run:r{number}" for number in range(0, retention.PAGE * 2, retention.PAGE // 2)]
