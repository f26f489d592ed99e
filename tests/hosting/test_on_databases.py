"""The same host on every database: what memory promises, the others keep, over a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.containment.limits import NO_LIMITS
from penstock.hosting.host import CancelResult, HostSettings, RunHost, RunLimits
from penstock.hosting.ports import Conflict, RunRecord
from penstock.hosting.retention import sweep_accounts
from penstock.runtime.billing.usage import Usage
from penstock.storage.stores import Stores, open_stores
from tests.hosting.graphs import Gate, host_with, killed
from tests.hosting.test_approvals import pending_approval
from tests.hosting.test_control import TWO_CALLS
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

SETTINGS = HostSettings(tick_s=0.05, lease_s=1, drain_s=0)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "runs.db")


async def opened(url: str) -> Stores:
    stores = await open_stores(url)
    assert isinstance(stores, Stores)
    await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
    return stores


async def test_runs_are_worked_on_read_and_waited_for(url: str) -> None:
    async with await opened(url) as stores, await host_with(stores, settings=SETTINGS) as host:
        runs = [await host.submit(owner=f"o{n % 3}", graph_id="echo", input={"ü\0": n}) for n in range(12)]
        left = [await host.wait(run.id) for run in runs]
        events = [event async for event in host.events(runs[0].id)]
    assert [run.output for run in left] == [{"ü\0": n} for n in range(12)]
    assert [event.seq for event in events] == [*range(1, len(events) + 1)]
    assert events[-1].type == "run.completed"


async def test_a_question_and_its_run_survive_the_death_of_a_host(url: str) -> None:
    async with await opened(url) as stores:
        first = await host_with(stores, settings=SETTINGS, worker="first")
        await first.start()
        run = await first.submit(owner="ann", graph_id="ask", input="it")
        approval = await pending_approval(first, run.id)
        await killed(first)
    async with await opened(url) as stores:
        second = await host_with(stores, settings=SETTINGS, worker="second")
        await second.answer(approval.id, "edited", answer="that", by="bob")
        async with second:
            left = await second.wait(run.id)
    assert (left.status, left.output, left.epoch) == ("completed", "that", 2)


async def test_a_cancel_survives_a_restart_before_and_after_its_run_is_submitted(url: str) -> None:
    gate = Gate()
    async with await opened(url) as stores:
        first = await host_with(stores, settings=SETTINGS, gate=gate)
        await first.start()
        await first.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        assert await first.cancel("early") is CancelResult.REMEMBERED
        await first.close()
    async with await opened(url) as stores:
        second = await host_with(stores, settings=SETTINGS, gate=gate)
        assert await second.cancel("r") is CancelResult.CANCELLED
        async with second:
            await second.submit(owner="ann", graph_id="gate", run_id="early")
            assert (await second.wait("early")).status == "cancelled"
            assert (await second.wait("r")).status == "cancelled"
    assert gate.came == 1


async def test_a_halted_run_is_granted_more_and_pays_for_nothing_twice(url: str) -> None:
    usage = Usage.of(cost_usd="0.4", input_tokens=10, output_tokens=5)
    model = ScriptedModel(lambda request: f"{request.messages[-1].text}!", usage=usage)
    services = {"models": {"m": model}}
    async with await opened(url) as stores, await host_with(stores, settings=SETTINGS, services=services) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        assert (await host.wait(run.id)).stop_reason == "budget_exceeded"
        await host.grant(run.id, RunLimits(max_cost_usd="0.4"), by="eve")
        left = await host.wait(run.id)
        spent = (await asyncio.to_thread(stores.ledger.balance, f"run:{run.id}")).spent_nanos
        fork = await host.fork(run.id, owner="ann", at="b", input="yo")
        assert (await host.wait(fork.id)).output == "yo!"
        replay = await host.replay(run.id, owner="ann")
        assert (await host.wait(replay.id)).output == "hi!!"
    assert (left.status, left.output, left.cost_nanos, spent) == ("completed", "hi!!", 800_000_000, 800_000_000)
    assert model.calls == 3


async def test_of_two_forks_that_want_one_id_at_once_one_gets_it_and_runs(url: str) -> None:
    services = {"models": {"m": ScriptedModel(lambda request: f"{request.messages[-1].text}!")}}
    async with (
        await opened(url) as stores,
        await opened(url) as others,
        await host_with(stores, settings=SETTINGS, services=services) as host,
    ):
        other = await host_with(others, settings=SETTINGS, services=services)
        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
        for number in range(3):
            requests = [
                one.fork(run.id, owner="ann", at=at, input="yo", run_id_new=f"f{number}")
                for one, at in ((host, "a"), (other, "b"))
            ]
            forks = await asyncio.gather(*requests, return_exceptions=True)
            assert sum(isinstance(one, Conflict) for one in forks) == 1
            left = await host.wait(f"f{number}")
            assert left.output == {"a": "yo!!", "b": "yo!"}[left.origin["at"]]


async def test_of_grants_that_come_from_two_hosts_at_once_one_counts(url: str) -> None:
    async with await opened(url) as stores, await opened(url) as others:
        async with await host_with(stores, settings=SETTINGS) as host:
            for number in range(5):
                await host.submit(owner="ann", graph_id="echo", run_id=f"r{number}", limits={"max_steps": 0})
                assert (await host.wait(f"r{number}")).status == "halted"
        hosts = [await host_with(stores, settings=SETTINGS), await host_with(others, settings=SETTINGS)]
        for number in range(5):
            grants = [host.grant(f"r{number}", RunLimits(max_steps=3), by="eve") for host in hosts * 3]
            answers = await asyncio.gather(*grants, return_exceptions=True)
            assert sum(isinstance(answer, RunRecord) for answer in answers) == 1, answers
            assert sum(isinstance(answer, Conflict) for answer in answers) == 5, answers
            run = await hosts[0].get(f"r{number}")
            assert run is not None
            assert (run.status, run.limits["max_steps"]) == ("queued", 3)
        async with hosts[1] as host:
            assert [(await host.wait(f"r{number}")).status for number in range(5)] == ["completed"] * 5


async def test_a_run_is_stopped_by_a_host_that_does_not_have_it(url: str) -> None:
    gate = Gate()
    async with (
        await opened(url) as stores,
        await opened(url) as others,
        await host_with(stores, settings=SETTINGS, gate=gate) as host,
    ):
        await host.submit(owner="ann", graph_id="gate", run_id="r")
        await gate.entered.wait()
        elsewhere = await host_with(others, settings=SETTINGS)
        reading = asyncio.create_task(_last(elsewhere))
        assert await elsewhere.cancel("r") is CancelResult.CANCELLED
        assert await reading == "run.cancelled"


async def test_accounts_of_runs_that_are_gone_and_of_days_long_past_are_forgotten(url: str) -> None:
    settings = HostSettings(drain_s=0, keep_days=1e-9, daily_usd="9")
    async with await opened(url) as stores:
        async with await host_with(stores, settings=HostSettings(drain_s=0, daily_usd="9")) as host:
            await host.wait((await host.submit(owner="ann", graph_id="echo", run_id="r")).id)
            await host.wait((await host.submit(owner="ann", graph_id="echo", run_id="s")).id)
        ended = await stores.runs.get("r")
        assert ended is not None
        await asyncio.to_thread(stores.ledger.open_account, "all:2001-01-01", NO_LIMITS)
        await asyncio.to_thread(stores.ledger.open_account, "run:x", NO_LIMITS, parent="all:2001-01-01")
        await stores.runs.remove_ended(ended.ended_ms + 1, limit=1)  # and the host that did so died
        host = await host_with(stores, settings=settings)
        await sweep_accounts(host._context)
        left = await asyncio.to_thread(stores.ledger.aged, 0)
        assert [name for name in left if not name.startswith("all:20")] == ["run:s"]
        assert [name for name in left if name.startswith("all:2001")] == []
        assert len(left) == 2


async def _last(host: RunHost) -> str:
    return [event.type async for event in host.events("r")][-1]
