"""The last event of a halted run names whose limit it was, and a grant that cannot help is refused and not written."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.clock import Clock
from penstock.containment.accounts import Account
from penstock.containment.limits import Limits
from penstock.hosting.durability import day_accounts, day_of
from penstock.hosting.halts import RAISED_BY, limit_owner
from penstock.hosting.host import HostSettings, RunHost, RunLimits
from penstock.hosting.ports import Conflict, HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.stops import LIMIT_REASONS, Stop, StopReason
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from tests.hosting.graphs import Sleeper, graph, host_with

PRICES = PriceBook(registered={"penny": Price(0, 1_000)}, use_genai_prices=False)
DAY_S = 86_400


class Penny(Model):
    """A model whose answers cost a cent."""

    max_output_tokens = 10

    def __init__(self) -> None:
        super().__init__("penny")

    async def request(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(0)
        return ModelResponse("text", usage=Usage(1, 10, model="penny"))


def line(*nodes: tuple[str, str, dict[str, Any]]) -> dict[str, Any]:
    """A graph of nodes one behind the other."""
    ids = ["in", *(id for id, _, _ in nodes)]
    edges = " ".join(f"{one}>{two}" for one, two in pairwise(ids))
    return graph(("in", "input", {}), *nodes, edges=edges)


ASK = line(("a", "llm-completion", {"model": "m"}))
SLEEP = line(("s", "sleeper", {"seconds": 5}))
TIGHT = {"max_cost_usd": 0.001}
TWICE = line(("a", "llm-completion", {"model": "m"}), ("b", "llm-completion", {"model": "m"}))
TWO = graph(
    ("in", "input", {}),
    ("a", "llm-completion", {"model": "m", "budget": {"max_cost_usd": 0.002}}),
    ("b", "llm-completion", {"model": "m", "budget": TIGHT}),
    edges="in>b in>a",
)


class Case(NamedTuple):
    """A run that is halted: its graph, limits and host, and the facts of its last event."""

    document: Mapping[str, Any]
    limits: Mapping[str, Any]
    settings: Mapping[str, Any]
    whose: str
    node_id: str | None = None
    budget: str = "main"


CASES = {
    "own cost": Case(ASK, {"max_cost_usd": "0.001"}, {}, "run", "a"),
    "own steps": Case(ASK, {"max_steps": 1}, {}, "run"),
    "own tokens": Case(ASK, {"max_tokens": 1}, {}, "run", "a"),
    "own calls": Case(ASK, {"max_api_calls": 0}, {}, "run"),
    "own time": Case(SLEEP, {"timeout_s": 0.3}, {}, "run", "s"),
    "a node": Case(line(("a", "llm-completion", {"model": "m", "budget": TIGHT})), {}, {}, "node", "a", "a"),
    "a node's time": Case(
        line(("sub", "subgraph", {"graph": SLEEP, "budget": {"max_time_s": 1}})), {}, {}, "node", "sub", "sub"
    ),
    "an agent": Case(line(("a", "agent", {"model": "m", "name": "Botty", "budget": TIGHT})), {}, {}, "node", "a", "a"),
    "a node that is called as the run is": Case(
        line(("main", "agent", {"model": "m", "budget": TIGHT})), {"max_cost_usd": "0.50"}, {}, "node", "main"
    ),
    "a node inside": Case(
        line(("sub", "subgraph", {"graph": line(("deep", "llm-completion", {"model": "m", "budget": TIGHT}))})),
        {},
        {},
        "node",
        "sub",
        "deep",
    ),
    "one of two nodes": Case(TWO, {}, {}, "node", "b", "b"),
    "its owner's day": Case(ASK, {}, {"owner_daily_usd": "0.001"}, "owner", "a", "user:ann:{day}"),
    "everybody's day": Case(ASK, {}, {"daily_usd": "0.001"}, "all", "a", "all:{day}"),
}


def clock_here() -> Clock:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop.clock


async def host_at(stores: MemoryStores, **settings: Any) -> RunHost:
    return await host_with(
        stores,
        settings=HostSettings(tick_s=0.05, drain_s=0, **settings),
        clock=clock_here(),
        services={"models": {"m": Penny()}},
        prices=PRICES,
        sleeper=Sleeper(),
    )


async def halted(case: Case) -> tuple[MemoryStores, RunRecord]:
    """The run once it is halted, and the stores that have it."""
    stores = MemoryStores(clock=clock_here())
    await stores.graphs.save("g", "ann", "g", case.document, now_ms=0)
    async with await host_at(stores, **case.settings) as host:
        await host.submit(owner="ann", graph_id="g", run_id="r", input="x", limits=case.limits)
        left = await host.wait("r")
    assert left.status == "halted", left.error
    return stores, left


async def events_of(stores: MemoryStores) -> list[HostedEvent]:
    return list(await stores.events.read("r", limit=10_000))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_halted_run_names_whose_limit_it_was_and_the_node(case: Case) -> None:
    async def main() -> None:
        stores, left = await halted(case)
        last = (await events_of(stores))[-1]
        assert (last.type, last.data["whose"], last.data.get("node_id")) == ("run.halted", case.whose, case.node_id)
        assert last.data["budget"] == case.budget.format(day=day_of(left.created_ms))

    sim_run(main, seed=1)


@pytest.mark.parametrize(
    ("case", "more", "message"),
    [
        ("own time", {"max_steps": 9}, r"its own limit \(0.300 s .* gives it no more of that: grant timeout_s"),
        ("own steps", {"timeout_s": 9, "max_cost_usd": 9}, r"its own limit \(1 of the 1 steps.* grant max_steps"),
        ("own cost", {"max_cost_usd": "0.00"}, "its own limit .* grant max_cost_usd"),
        ("own calls", {"max_api_calls": 0, "max_steps": 9}, "its own limit .* grant max_api_calls"),
        ("own tokens", {}, "its own limit .* grant max_tokens"),
        (
            "a node",
            {"max_cost_usd": 9},
            r"a budget inside its graph \(.* of 'a'.*no grant raises: give that more in a new version",
        ),
        (
            "a node's time",
            {"timeout_s": 9},
            r"a budget inside its graph \(.* of 'sub'\), which no .*: resume it to try again, or",
        ),
        (
            "its owner's day",
            {"max_cost_usd": 9},
            "what its owner may spend in a day .* resume it when the server allows",
        ),
        (
            "everybody's day",
            {"max_cost_usd": 9},
            "what all owners together may spend in a day .* or fork it on another",
        ),
    ],
)
def test_a_grant_that_gives_nothing_of_what_halted_the_run_is_refused_and_changes_nothing(
    case: str, more: dict[str, Any], message: str
) -> None:
    async def main() -> None:
        stores, left = await halted(CASES[case])
        events = await events_of(stores)
        host = await host_at(stores)
        with pytest.raises(Conflict, match=f"run 'r' was halted by {message}"):
            await host.grant("r", more, by="eve")
        assert await host.get("r") == left
        assert await events_of(stores) == events

    sim_run(main, seed=1)


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.whose == "run"])
def test_grant_of_the_limit_that_halted_the_run_resumes_it(case: str) -> None:
    async def main() -> None:
        stores, left = await halted(CASES[case])
        async with await host_at(stores) as host:
            await host.grant("r", {RAISED_BY[str(left.stop_reason)]: 100}, by="eve")
            assert (await host.wait("r")).status == "completed"

    sim_run(main, seed=1)


def test_a_run_that_is_halted_again_for_something_else_is_granted_that() -> None:
    async def main() -> None:
        stores, _ = await halted(Case(SLEEP, {"max_steps": 1, "timeout_s": 3}, {}, "run"))
        async with await host_at(stores) as host:
            await host.grant("r", {"max_steps": 9}, by="eve")
            assert (await host.wait("r")).stop_reason == "timeout"
            with pytest.raises(Conflict, match="grant timeout_s"):
                await host.grant("r", {"max_steps": 9}, by="eve")
            await host.grant("r", {"timeout_s": 1}, by="eve")
            assert (await host.wait("r")).stop_reason == "timeout"
            with pytest.raises(Conflict, match="grant timeout_s"):  # the time that was left has no round figure
                await host.grant("r", {"max_steps": 9}, by="eve")
            await host.grant("r", {"timeout_s": 9}, by="eve")
            assert (await host.wait("r")).status == "completed"

    sim_run(main, seed=1)


def test_a_run_halted_by_a_day_budget_continues_after_a_grant_and_on_another_day_as_a_fork() -> None:
    async def main() -> None:
        stores, left = await halted(CASES["its owner's day"])
        async with await host_at(stores, owner_daily_usd="0.001") as host:
            await host.resume("r")
            assert (await host.wait("r")).status == "halted"
        async with await host_at(stores, owner_daily_usd="0.50") as host:
            await host.resume("r")
            assert (await host.wait("r")).status == "completed"
        stores, left = await halted(CASES["everybody's day"]._replace(settings={"daily_usd": "0.015"}, document=TWICE))
        await asyncio.sleep(DAY_S)
        async with await host_at(stores, daily_usd="0.015") as host:
            fork = await host.fork("r", owner="ann", at="b")
            assert (await host.wait(fork.id)).status == "completed"
            assert day_accounts(fork) != day_accounts(left)

    sim_run(main, seed=1)


def test_run_without_halt_details_may_be_granted_anything() -> None:
    async def main() -> None:
        stores = MemoryStores(clock=clock_here())
        host = await host_at(stores)
        await host.submit(owner="ann", graph_id="echo", run_id="r", input="x", limits={"max_steps": 9})
        run = await stores.runs.claim("older", now_ms=0, lease_ms=1_000)
        assert run is not None
        stop = {"stop_reason": "timeout", "message": "too long", "budget": "main", "unit": "seconds"}
        seq = await stores.events.last_seq("r") + 1
        await stores.events.append("r", run.epoch, [HostedEvent(seq, 0, "run.halted", stop)])
        await stores.runs.update("r", run.epoch, status="halted", stop_reason="timeout", ended_ms=run.created_ms)
        async with host:
            await host.grant("r", {"max_steps": 1}, by="eve")
            assert (await host.wait("r")).status == "completed"

    sim_run(main, seed=1)


def test_a_limit_belongs_to_the_run_or_a_day_or_a_part_and_anything_else_to_no_one() -> None:
    run = RunRecord("r", "ann", "g", 1, None, {}, {}, created_ms=0)
    own = Account("main", Limits(steps=4, time_ns=1_500_000_000))

    def whose(budget: str | None, limit: float = 4, reason: StopReason = StopReason.STEP_LIMIT_EXCEEDED) -> str | None:
        unit = "seconds" if reason is StopReason.TIMEOUT else "steps"
        return limit_owner(Stop(reason, "no", budget=budget, unit=unit, limit=limit), run, own)

    assert whose("main") == whose("main", 1.5, StopReason.TIMEOUT) == "run"
    assert whose("run:r") == "run", "as the ledger calls it, also where this process knows no such limit"
    assert whose("main", 5) == whose("run:other") == whose("\ud800") == whose("") == "node"
    assert whose("user:ann:1970-01-01") == "owner"
    assert whose("all:1970-01-01") == "all"
    assert whose("user:bob:1970-01-01") == whose("all:1970-01-02") == "node"
    assert whose(None) is None, "a hook that denies for such a reason names no owner"
    assert whose("main", 4, StopReason.CIRCUIT_OPEN) is None
    assert limit_owner(Stop(StopReason.TIMEOUT, "no", budget="main"), run, None) is None


def test_every_limit_is_raised_by_something_that_can_be_granted() -> None:
    assert set(RAISED_BY) == LIMIT_REASONS
    assert all(hasattr(RunLimits(), name) for name in RAISED_BY.values())
