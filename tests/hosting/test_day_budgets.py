"""What a user, and all, may spend in a day: kept in the database, so that hosts that share it share the budget."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.agents.model import Model, ModelRequest, ModelResponse
from penstock.hosting.host import HostSettings, RunHost
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Usage
from penstock.storage.stores import open_stores
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


class Penny(Model):
    """A model whose answers cost a cent."""

    max_output_tokens = 10

    def __init__(self) -> None:
        super().__init__("penny")
        self.billed_nanos = 0

    async def request(self, request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(0)
        self.billed_nanos += CALL_NANOS
        return ModelResponse("said", usage=Usage(1, 10, model="penny"))


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
    options = {"settings": SETTINGS, "prices": PRICES, "services": {"models": {"m": penny}}}
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
