"""The events of a run carry its whole call tree: where each call belongs, whose budget refused it, and what is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.clock import SYSTEM_CLOCK
from penstock.hosting.event_data import CallPlace, call_settled
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.storage.memory import MemoryStores
from penstock.testing import SimLoop, sim_run
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import Settlement, Source
from tests.hosting.graphs import graph, host_with

PRICES = PriceBook(registered={"penny": Price(0, 1_000)}, use_genai_prices=False)
READ = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")
BRANCHES = graph(
    ("in", "input", {}),
    ("each", "map", {"graph": READ, "parallel": 2}),
    ("lead", "agent", {"model": "m"}),
    edges="in>each in>lead",
)
ONE = graph(("in", "input", {}), ("a", "llm-completion", {"model": "m"}), edges="in>a")
BUDGETED = graph(
    ("in", "input", {}),
    ("a", "llm-completion", {"model": "m", "budget": {"max_cost_usd": 0.001}}),
    edges="in>a",
)


class Penny(Model):
    """A model whose calls hold a cent; each takes so many seconds and costs a tenth of a cent a token."""

    max_output_tokens = 10

    def __init__(self, seconds: float = 0, tokens: int = 10) -> None:
        super().__init__("penny")
        self._seconds = seconds
        self._tokens = tokens

    async def request(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(self._seconds)
        return ModelResponse("answer", usage=Usage(1, self._tokens, model="penny"))


async def penny_host(stores: MemoryStores, seconds: float = 0, tokens: int = 10, **options: Any) -> RunHost:
    loop = asyncio.get_running_loop()
    clock = loop.clock if isinstance(loop, SimLoop) else SYSTEM_CLOCK
    services = {"models": {"m": Penny(seconds, tokens)}}
    return await host_with(stores, services=services, prices=PRICES, clock=clock, **options)


async def ran(
    document: Mapping[str, Any], *, input: Any = "hi", limits: Any = None, seconds: float = 0, **options: Any
) -> tuple[RunRecord, list[HostedEvent]]:
    """A run of that graph from its beginning to its end, and its events."""
    stores = MemoryStores()
    await stores.graphs.save("g", "ann", "g", document, now_ms=0)
    async with await penny_host(stores, seconds, **options) as host:
        run = await host.submit(owner="ann", graph_id="g", input=input, limits=limits)
        left = await host.wait(run.id)
        return left, [event async for event in host.events(run.id)]


def calls(events: list[HostedEvent], type: str = "call.started") -> list[Mapping[str, Any]]:
    return [event.data for event in events if event.type == type]


def unit(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    (found,) = [one for one in data["units"] if one["unit"] == name]
    return found  # type: ignore[no-any-return]


async def test_every_parent_of_a_call_is_an_earlier_call_and_every_call_ends_once() -> None:
    _, events = await ran(BRANCHES, input=["x", "y", "z"])
    seen: set[str | None] = {None}
    for call in calls(events):
        assert call["parent_id"] in seen
        seen.add(call["call_id"])
    assert [call["call_id"] for call in calls(events) if call["parent_id"] is None] == ["n000001"]
    ended = [call["call_id"] for call in calls(events, "call.ended")]
    assert sorted(ended) == sorted(seen - {None}, key=str)


async def test_calls_of_parallel_branches_carry_the_path_of_their_node() -> None:
    left, events = await ran(BRANCHES, input=["x", "y", "z"])
    assert left.status == "completed"
    models = [call for call in calls(events) if call["kind"] == "llm"]
    assert sorted(call["node_id"] for call in models) == ["each/0/read", "each/1/read", "each/2/read", "lead"]
    steps = {call["node_id"]: call["node_type"] for call in calls(events) if "node_type" in call}
    assert steps["each"] == "map"
    assert steps["each/2/read"] == "llm-completion"
    (root,) = [call for call in calls(events) if call["depth"] == 0]
    assert "node_id" not in root


async def test_costs_of_all_calls_add_up_to_the_cost_of_the_run() -> None:
    left, events = await ran(BRANCHES, input=["x", "y", "z"])
    total = sum(round(call["cost_usd"] * 1e9) for call in calls(events, "call.ended"))
    assert total == left.cost_nanos == 40_000_000


@pytest.mark.parametrize(
    ("document", "limits", "whose", "budget", "node_id"),
    [
        (ONE, {"max_cost_usd": "0.001"}, "run", "main", "a"),
        (BUDGETED, None, "node", "a", "a"),
    ],
)
async def test_refused_call_names_the_caller_the_amount_and_the_budget(
    document: Mapping[str, Any], limits: Any, whose: str, budget: str, node_id: str
) -> None:
    _, events = await ran(document, limits=limits)
    (refused,) = [call for call in calls(events, "call.ended") if call["kind"] == "llm"]
    stop = refused["stop"]
    assert (stop["reason"], stop["whose"], stop["budget"], stop["unit"]) == ("budget_exceeded", whose, budget, "usd")
    assert (stop["limit"], stop["used"], stop["held"], stop["momentary"]) == (0.001, 0.0, 0.0, False)
    assert stop["asked"] == 0.01
    assert stop["cause"] is True
    above = [call["stop"] for call in calls(events, "call.ended") if call["kind"] == "system" and "stop" in call]
    assert above
    assert not any(stop["cause"] for stop in above)
    causes = [event.data for event in events if event.type == "limit" and event.data["cause"]]
    assert [(one["call_id"], one["node_id"], one["whose"]) for one in causes] == [(refused["call_id"], node_id, whose)]
    assert causes[0]["asked"] == 0.01


def test_event_of_a_waiting_call_has_the_requested_and_the_held_amount() -> None:
    left, events = sim_run(
        partial(ran, BRANCHES, input=["x", "y"], limits={"max_cost_usd": "0.025"}, seconds=1, tokens=5), seed=1
    )
    assert left.status == "completed"
    (wait,) = calls(events, "call.waiting")
    assert wait["node_id"] in ("each/0/read", "each/1/read", "lead")
    stop = wait["stop"]
    assert (stop["whose"], stop["momentary"], stop["asked"], stop["held"], stop["limit"]) == (
        "run",
        True,
        0.01,
        0.02,
        0.025,
    )
    budgets = [unit(event.data, "usd") for event in events if event.type == "budget"]
    assert 0.01 in [one["waiting"] for one in budgets]
    assert budgets[-1]["waiting"] == 0


def test_held_money_is_reported_while_a_call_runs_and_spent_money_at_the_end() -> None:
    left, events = sim_run(partial(ran, ONE, limits={"max_cost_usd": "0.5"}, seconds=3), seed=1)
    budgets = [event.data for event in events if event.type == "budget"]
    assert {(data["budget"], data["level"]) for data in budgets} == {("main", "run")}
    first, last = unit(budgets[0], "usd"), unit(budgets[-1], "usd")
    assert (first["held"], first["spent"], first["limit"], first["left"]) == (0.01, 0.0, 0.5, 0.49)
    assert (last["held"], last["spent"], last["left"]) == (0.0, left.cost_nanos / 1e9, 0.49)
    assert unit(budgets[-1], "api calls")["spent"] == 1
    assert next(call for call in calls(events) if call["kind"] == "llm")["held_usd"] == 0.01


def test_changes_of_a_budget_are_reported_at_most_four_times_a_second() -> None:
    items = [*range(60)]
    document = graph(("in", "input", {}), ("each", "map", {"graph": READ, "parallel": 1}), edges="in>each")
    left, events = sim_run(partial(ran, document, input=items, limits={"max_cost_usd": "5"}, seconds=0.02), seed=1)
    at = [event.at_ms for event in events if event.type == "budget"]
    assert left.status == "completed"
    assert 3 <= len(at) <= 2 + (at[-1] - at[0]) / 250


def test_budget_of_a_node_is_reported_under_its_path() -> None:
    document = graph(
        ("in", "input", {}), ("a", "llm-completion", {"model": "m", "budget": {"max_cost_usd": 0.05}}), edges="in>a"
    )
    _, events = sim_run(partial(ran, document, seconds=2), seed=1)
    inside = [event.data for event in events if event.type == "budget" and event.data["level"] == "node"]
    assert {(data["budget"], data["node_id"]) for data in inside} == {("a", "a")}
    assert (unit(inside[0], "usd")["held"], unit(inside[0], "usd")["limit"]) == (0.01, 0.05)
    assert unit(inside[-1], "usd")["spent"] == 0.01


def test_daily_budgets_above_a_run_are_reported_while_it_runs() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="0.06", daily_usd="0.10")
    _, events = sim_run(partial(ran, ONE, seconds=5, settings=settings), seed=1)
    days = [event.data for event in events if event.type == "budget" and event.data["level"] in ("owner", "all")]
    first = {data["level"]: unit(data, "usd") for data in days[:2]}
    assert {level: (one["held"], one["limit"]) for level, one in first.items()} == {
        "owner": (0.01, 0.06),
        "all": (0.01, 0.1),
    }
    last = {data["level"]: unit(data, "usd") for data in days}
    assert {level: (one["held"], one["spent"], one["left"]) for level, one in last.items()} == {
        "owner": (0.0, 0.01, 0.05),
        "all": (0.0, 0.01, 0.09),
    }


async def test_short_run_under_daily_budgets_does_not_read_them() -> None:
    settings = HostSettings(tick_s=0.05, drain_s=0, owner_daily_usd="0.06", daily_usd="0.10")
    _, events = await ran(ONE, settings=settings)
    assert {event.data["level"] for event in events if event.type == "budget"} == {"run"}


async def test_bill_that_arrives_late_is_an_event_of_its_own() -> None:
    trace = ExecutionGraph()
    with trace.lock:
        call = trace.begin(None, "llm", "penny", "penny", Source("main"), 0)
    late = Settlement(call, 2, 0, 10_000_000, 1, 10)
    assert call_settled(CallPlace("a"), late) == (
        "call.settled",
        {"call_id": "n000001", "node_id": "a", "cost_usd": 0.01, "tokens_in": 1, "tokens_out": 10},
    )
