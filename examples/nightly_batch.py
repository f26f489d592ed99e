"""A nightly batch under a daily cap: what the day can pay for is done, the rest stops and waits for the next day.

    python examples/nightly_batch.py [--daily 0.010] [--documents 30]

Every document is a run of its own on a host, four at a time. The cap holds over all of them, and over other hosts on
the same database. A run that finds the day used up is halted with what it has, and resumed the next night. Here a
higher cap stands in for the next day. The model is scripted: no key, no network.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile

from penstock import Agent, Price, PriceBook
from penstock.agents import ScriptedModel
from penstock.hosting import HostSettings, RunHost
from penstock.nodes import Program
from penstock.stores import Stores, open_stores

PRICES = PriceBook(registered={"reader": Price(1, 5)}, use_genai_prices=False)
LIMITS = {"max_cost_usd": "0.005"}
"""Of one document."""
TEXT = "{}: " + "The dam was inspected, and its gates were found to be in good order. " * 8
AGENT = Agent(
    ScriptedModel(lambda request: f"In short: {request.messages[-1].text[:200]}", name="reader"),
    "Sum the document up.",
    name="reader",
)


def host_on(stores: Stores, daily_usd: float) -> RunHost:
    """Return a host that reads four documents at once, and spends no more than this in a day."""
    settings = HostSettings(daily_usd=str(daily_usd), max_running=4, max_wait_s=1)
    return RunHost(stores, services={"programs": {"reader": Program.of(AGENT)}}, prices=PRICES, settings=settings)


async def first_night(stores: Stores, names: list[str], daily_usd: float) -> list[str]:
    """Submit every document; return the runs that the cap has stopped."""
    async with host_on(stores, daily_usd) as host:
        runs = [
            await host.submit(owner="batch", graph_id="reader", input=TEXT.format(name), limits=LIMITS)
            for name in names
        ]
        ended = [await host.wait(run.id) for run in runs]
        halted = [run.id for run in ended if run.status == "halted"]
        spent = sum(run.cost_nanos for run in ended) / 1e9
        print(f"night 1    {len(ended) - len(halted)} of {len(names)} documents, ${spent:.6f} of ${daily_usd:.6f}")
        assert spent <= daily_usd, "the cap did not hold"
        assert all(run.status in ("completed", "halted") for run in ended)
        return halted


async def next_night(stores: Stores, halted: list[str], daily_usd: float) -> int:
    """Resume what was stopped; return how many documents are done now."""
    async with host_on(stores, daily_usd) as host:
        for run_id in halted:
            await host.resume(run_id)
        ended = [await host.wait(run_id) for run_id in halted]
        done = sum(run.status == "completed" for run in ended)
        print(f"night 2    {done} of {len(halted)} documents")
        return done


async def main() -> int:
    """Read for two nights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--daily", type=float, default=0.010)
    parser.add_argument("--documents", type=int, default=30)
    given = parser.parse_args()
    names = [f"document {number}" for number in range(1, given.documents + 1)]
    with tempfile.TemporaryDirectory() as folder:
        async with await open_stores(f"{folder}/batch.db") as stores:
            await stores.graphs.save("reader", "batch", "Reader", Program.of(AGENT).document(), now_ms=0)
            halted = await first_night(stores, names, given.daily)
            done = await next_night(stores, halted, given.daily * 10) if halted else 0
    return 0 if done == len(halted) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
