"""A hosted run whose model has no price: its record and its events count the calls of unknown cost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import RunHost, RunLimits
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.hosting.retention import remove_ended, sweep_accounts
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.storage.memory import MemoryStores
from penstock.testing import ManualClock
from tests.hosting.graphs import SETTINGS, host_with, killed, without_steps
from tests.hosting.test_control import TWO_CALLS

TOKENS = Usage.of(input_tokens=10, output_tokens=5)
"""What a model says that has no price: how much it used, and not what that costs."""


def echoing(usage: Usage | None = TOKENS) -> ScriptedModel:
    return ScriptedModel(lambda request: f"{request.messages[-1].text}!", usage=usage)


async def hosting(stores: MemoryStores, model: ScriptedModel, **options: Any) -> RunHost:
    host = await host_with(stores, services={"models": {"m": model}}, **options)
    await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
    return host


async def events_of(host: RunHost, run_id: str) -> list[HostedEvent]:
    return [event async for event in host.events(run_id)]


def costs(events: list[HostedEvent]) -> list[Any]:
    return [event.data["cost_usd"] for event in without_steps(events) if event.type == "call.ended"]


@pytest.mark.parametrize("usage", [TOKENS, None])
async def test_run_counts_its_calls_of_unknown_cost(usage: Usage | None) -> None:
    async with await hosting(MemoryStores(), echoing(usage)) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        left, events = await host.wait(run.id), await events_of(host, run.id)
        totals = host.stats()["totals"]
    assert (left.status, left.cost_nanos, left.unknown_costs) == ("completed", 0, 2)
    assert costs(events) == [None, None]
    assert (events[-1].data["cost_usd"], events[-1].data["unknown_costs"]) == (None, 2)
    assert (totals["unknown_costs"], totals["cost_nanos"]) == (2, 0)


async def test_a_run_whose_costs_are_all_known_says_nothing_of_it() -> None:
    model = echoing(Usage.of(cost_usd="0.25"))
    async with await hosting(MemoryStores(), model) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        left, events = await host.wait(run.id), await events_of(host, run.id)
    assert (left.cost_nanos, left.unknown_costs) == (500_000_000, 0)
    assert costs(events) == [0.25, 0.25]
    assert "unknown_costs" not in events[-1].data


async def test_a_resumed_run_counts_each_call_once() -> None:
    async with await hosting(MemoryStores(), echoing()) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_api_calls": 1})
        assert (await host.wait(run.id)).unknown_costs == 1
        await host.grant(run.id, RunLimits(max_api_calls=5), by="eve")
        left, events = await host.wait(run.id), await events_of(host, run.id)
        totals = host.stats()["totals"]
    assert (left.status, left.unknown_costs, totals["unknown_costs"]) == ("completed", 2, 2)
    calls = [event.data for event in without_steps(events) if event.type == "call.ended"]
    ended = [call for call in calls if call["status"] == "success"]
    assert [(one["cost_usd"], one.get("replayed", False)) for one in ended] == [
        (None, False),
        (None, True),
        (None, False),
    ]


async def test_a_fork_counts_its_own_calls_and_a_replay_makes_none() -> None:
    model = echoing()
    async with await hosting(MemoryStores(), model) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi")
        await host.wait(run.id)
        fork = await host.fork(run.id, owner="ann", at="b")
        replay = await host.replay(run.id, owner="ann")
        left = [await host.wait(one.id) for one in (run, fork, replay)]
    assert [one.unknown_costs for one in left] == [2, 1, 0]
    assert model.calls == 3


async def test_the_ended_and_the_open_calls_of_a_dead_host_are_counted_once() -> None:
    requested, clock, stores = asyncio.Event(), ManualClock(), MemoryStores()

    def reply(request: ModelRequest) -> Any:
        text = request.messages[-1].text
        if text.endswith("!") and not requested.is_set():
            requested.set()
            return asyncio.sleep(3_600)
        return f"{text}!"

    model = ScriptedModel(reply, usage=TOKENS)
    first = await hosting(stores, model, clock=clock)
    await first.start()
    run = await first.submit(owner="ann", graph_id="two", input="hi")
    await requested.wait()
    await killed(first)
    clock.advance(SETTINGS.lease_s + 1)
    async with await hosting(stores, model, clock=clock) as second:
        left, events = await second.wait(run.id), await events_of(second, run.id)
    assert (left.status, left.epoch, left.unknown_costs, model.calls) == ("completed", 2, 3, 3)
    assert events[-1].data["unknown_costs"] == 3


async def test_a_host_that_finds_the_last_event_written_takes_the_count_from_it() -> None:
    clock, stores = ManualClock(), MemoryStores()
    run = (await stores.runs.add(RunRecord("r", "ann", "two", 1))).run
    await stores.runs.claim("dead", now_ms=0, lease_ms=1)
    data = {"output": "x", "cost_usd": 0.5, "tokens_in": 1, "tokens_out": 2, "unknown_costs": 7}
    await stores.events.append("r", 1, [HostedEvent(1, 0, "run.completed", data)])
    async with await hosting(stores, echoing(), clock=clock) as host:
        left = await host.wait(run.id)
    assert (left.status, left.cost_nanos, left.unknown_costs) == ("completed", 500_000_000, 7)


async def test_the_account_that_counts_them_is_forgotten_with_its_run() -> None:
    clock, stores = ManualClock(), MemoryStores()
    async with await hosting(stores, echoing(), clock=clock) as host:
        runs = [await host.submit(owner="ann", graph_id="two", run_id=f"r:{n}", input="hi") for n in range(2)]
        for run in runs:
            await host.wait(run.id)
    host = await hosting(stores, echoing(), clock=clock)
    kept = {"run:r:0", "unknown:r:0", "run:r:1", "unknown:r:1"}
    assert {*stores.ledger.aged(0)} == kept
    clock.advance(10 * 365 * 86_400)
    await sweep_accounts(host._context)
    assert {*stores.ledger.aged(0)} == kept, "their runs are there"
    await remove_ended(host._context)
    assert list(stores.ledger.aged(0)) == []


async def test_a_model_without_a_price_is_reported_in_the_events_of_the_run() -> None:
    prices = PriceBook(use_genai_prices=False)
    async with await hosting(MemoryStores(), echoing(), prices=prices) as host:
        run = await host.submit(owner="ann", graph_id="two", input="hi", limits={"max_cost_usd": "0.5"})
        await host.wait(run.id)
        (event,) = [event for event in await events_of(host, run.id) if event.type == "price.unknown"]
    assert event.data["model"] == "scripted"
    assert event.data["message"].startswith("model 'scripted' has no known price, so its calls are not limited by cost")
