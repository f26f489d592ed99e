"""What runs used, by node and model: the shares of each run add up to its record, and all of them to the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.hosting.durability import ALL, day_of
from penstock.hosting.figures import SpendingTally
from penstock.hosting.host import RunHost
from penstock.hosting.ports import MAX_SHARES, CostShare, HostedEvent
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.storage.memory import MemoryStores
from penstock.storage.stores import open_stores
from penstock.testing import ManualClock
from tests.hosting.graphs import SETTINGS, Gate, graph, host_with, killed
from tests.hosting.test_takeover import written
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

CENT = 10_000_000
READ = graph(
    ("in", "input", {}),
    ("read", "llm-completion", {"model": "small"}),
    ("out", "output", {}),
    edges="in>read read>out",
)
WORK = graph(
    ("in", "input", {}),
    ("each", "map", {"graph": READ}),
    ("sum", "llm-completion", {"model": "large"}),
    ("gate", "gate", {}),
    ("last", "llm-completion", {"model": "small"}),
    edges="in>each each>sum sum>gate gate>last",
)
PRICES = PriceBook(registered={"small": Price(0, 1), "large": Price(0, 1)}, use_genai_prices=False)


def model(name: str, usd: str) -> ScriptedModel:
    usage = Usage.of(cost_usd=usd, input_tokens=3, output_tokens=2)
    return ScriptedModel(lambda request: "done", name=name, usage=usage)


class Scene:
    """Hosts on one set of stores, with two models and a gate between the second and the last call."""

    def __init__(self, stores: Any) -> None:
        self.stores, self.gate = stores, Gate()
        self.models = {"small": model("small", "0.01"), "large": model("large", "0.10")}

    async def host(self, clock: Clock = SYSTEM_CLOCK) -> RunHost:
        services, settings = {"models": self.models}, replace(SETTINGS, daily_usd="100")
        host = await host_with(
            self.stores, settings=settings, services=services, prices=PRICES, clock=clock, gate=self.gate
        )
        await self.stores.graphs.save("work", "ann", "work", WORK, now_ms=0)
        return host

    async def must_add_up(self) -> int:
        """Compare the shares of every run with its record, and their sum with the ledger; return the sum."""
        runs = await self.stores.runs.list()
        for run in runs:
            shares = await self.stores.spending.of(run.id)
            for figure in ("cost_nanos", "tokens_in", "tokens_out", "unknown_costs"):
                assert sum(getattr(share, figure) for share in shares) == getattr(run, figure), (run.id, figure)
        (total,) = await self.stores.spending.sums()
        balance = await asyncio.to_thread(self.stores.ledger.balance, f"{ALL}{day_of(runs[0].created_ms)}")
        assert total.cost_nanos == balance.spent_nanos == sum(run.cost_nanos for run in runs)
        return int(total.cost_nanos)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return "memory:" if request.param == "memory" else str(tmp_path / "runs.db")


def by_node(shares: Sequence[CostShare]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(share.node, share.model): (share.calls, share.cost_nanos) for share in shares}


WHOLE = {("each", "small"): (3, 3 * CENT), ("sum", "large"): (1, 10 * CENT), ("last", "small"): (1, CENT)}


async def test_shares_add_up_to_the_records_and_the_ledger_over_all_kinds_of_runs(url: str) -> None:
    async with await open_stores(url) as stores:
        scene = Scene(stores)
        scene.gate.opened.set()
        async with await scene.host() as host:
            for owner, run_id in (("ann", "whole"), ("bob", "other")):
                await host.submit(owner=owner, graph_id="work", run_id=run_id, input=[1, 2, 3])
                await host.wait(run_id)
            assert by_node(await scene.stores.spending.of("whole")) == WHOLE

            limits = {"max_cost_usd": "0.12"}
            await host.submit(owner="ann", graph_id="work", run_id="halted", input=[1, 2, 3], limits=limits)
            assert (await host.wait("halted")).status == "halted"
            halted = by_node(await scene.stores.spending.of("halted"))
            await scene.must_add_up()
            await host.grant("halted", type(host.settings.ceilings)(max_cost_usd="1"), by="ann")
            assert (await host.wait("halted")).status == "completed"
            assert sum(cost for _, cost in halted.values()) < 14 * CENT
            assert by_node(await scene.stores.spending.of("halted")) == WHOLE

            forked = await host.fork("whole", owner="ann", at="sum", run_id_new="forked")
            await host.wait(forked.id)
            without_the_first = {key: share for key, share in WHOLE.items() if key[0] != "each"}
            assert by_node(await scene.stores.spending.of("forked")) == without_the_first
            replayed = await host.replay("whole", owner="ann")
            assert (await host.wait(replayed.id)).cost_nanos == 0
            assert by_node(await scene.stores.spending.of(replayed.id)) == {("", ""): (0, 0)}
            assert await scene.must_add_up() == (3 * 14 + 11) * CENT
            by_owner = {row.owner: (row.runs, row.cost_nanos) for row in await scene.stores.spending.sums(["owner"])}
            assert by_owner == {"ann": (4, (2 * 14 + 11) * CENT), "bob": (1, 14 * CENT)}


async def test_calls_of_a_killed_worker_are_counted_at_their_nodes() -> None:
    clock = ManualClock()
    scene = Scene(MemoryStores(clock=clock))
    first = await scene.host(clock)
    await first.start()
    await first.submit(owner="ann", graph_id="work", run_id="r", input=[1, 2, 3])
    await scene.gate.has_come(1)
    await written(first)
    await killed(first)
    scene.gate.opened.set()
    clock.advance(SETTINGS.lease_s + 1)
    async with await scene.host(clock) as second:
        left = await second.wait("r")
    assert (left.status, left.epoch) == ("completed", 2)
    assert by_node(await scene.stores.spending.of("r")) == WHOLE
    await scene.must_add_up()


async def test_a_resolved_bill_counts_at_its_node_and_model() -> None:
    scene = Scene(MemoryStores())

    def lose(request: ModelRequest) -> str:
        raise ConnectionResetError("the peer has gone")

    scene.models["large"] = ScriptedModel(lose, name="large")
    async with await scene.host() as host:
        await host.submit(owner="ann", graph_id="work", run_id="r", input=[1], limits={"max_cost_usd": "0.50"})
        assert (await host.wait("r")).status == "failed"
        (bill,) = await host.bills("r")
        await host.resolve_bill("r", bill.call_id, cost_usd="0.02", by="eve", tokens_in=7, tokens_out=3)
        shares = by_node(await scene.stores.spending.of("r"))
        assert shares == {("each", "small"): (1, CENT), ("sum", "large"): (1, 2 * CENT)}
        await scene.must_add_up()
        scene.models["large"] = model("large", "0.10")
        scene.gate.opened.set()
        await host.resume("r")
        assert (await host.wait("r")).status == "completed"
        shares = by_node(await scene.stores.spending.of("r"))
        assert shares == {**WHOLE, ("each", "small"): (1, CENT), ("sum", "large"): (2, 12 * CENT)}
        await scene.must_add_up()


def test_names_that_no_store_accepts_and_very_many_nodes_are_counted_too() -> None:
    def ended(node_id: str, cost_usd: float | None = 0.01) -> HostedEvent:
        data = {"call_id": "n1", "kind": "llm", "node_id": node_id, "model": "\ud83d\0" * 500, "cost_usd": cost_usd}
        return HostedEvent(1, 1, "call.ended", data)

    tally = SpendingTally()
    tally.take_events([ended("a/3/b"), ended("a"), ended("a", None)])
    (share,) = tally.shares()
    assert (share.node, share.calls, share.cost_nanos, share.unknown_costs) == ("a", 3, 2 * CENT, 1)
    assert len(share.model) == 200
    assert "\0" not in share.model.encode("utf-8").decode()
    tally.take_events([ended(f"n{number}") for number in range(2 * MAX_SHARES)])
    assert len(tally.shares()) < MAX_SHARES
