"""A fleet on Temporal: a server that submits, two workers that work, and one of them leaves in the middle.

    python examples/temporal_fleet.py --db postgresql://localhost/penstock --engine temporal://localhost:7233/default

Needs `pip install 'penstock[server,temporal]'`, PostgreSQL and Temporal (`temporal server start-dev`); on real machines
the workers are `penstock worker app.py:graph …`. Each run drafts and then polishes. The worker that leaves hands its
runs to the other, which finds the drafts in the journal: no model call is made, or paid, twice. The model is scripted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

from penstock import Agent, Graph, Price, PriceBook
from penstock.agents import ModelRequest, ScriptedModel
from penstock.hosting import HostSettings, RunHost
from penstock.nodes import Program
from penstock.stores import open_stores

RUNS = 6
PRICES = PriceBook(registered={"writer": Price(1, 5)}, use_genai_prices=False)
SETTINGS = HostSettings(drain_s=0, max_running=RUNS)
polishing = asyncio.Event()
may_polish = asyncio.Event()
calls: Counter[str] = Counter()


async def reply(request: ModelRequest) -> str:
    """Draft at once; polish when the first worker has left."""
    text = request.messages[-1].text
    calls[text] += 1
    if not text.startswith("draft of "):
        return f"draft of {text}"
    if sum(text.startswith("draft of ") for text in calls) == RUNS:
        polishing.set()  # a call leaves only when what was done before it is recorded: all drafts are
    await may_polish.wait()
    return f"polished {text}"


async def write(ctx: Any) -> str:
    """Ask the model once."""
    return str((await Agent(ScriptedModel(reply, name="writer"), name="writer").run(ctx.input, ctx)).output)


graph = Graph("report")
graph.step(write, "draft") >> graph.step(write, "polish")


async def fleet(db: str, engine_url: str) -> int:
    """Submit to the fleet, let one worker leave, and wait for the other."""
    from penstock.engines.temporal import TemporalEngine, TemporalSettings

    temporal = TemporalSettings.parse(engine_url)
    queue = f"fleet-{os.getpid()}"  # of this program alone
    services = {"programs": {"report": Program.of(graph)}}

    async def host(stack: AsyncExitStack, name: str, *queues: str) -> RunHost:
        stores = await stack.enter_async_context(await open_stores(db))
        await stores.graphs.save("report", "ann", "Report", Program.of(graph).document(), now_ms=0)
        engine = TemporalEngine(temporal, queues=queues, queue=queue)
        made = RunHost(stores, services=services, prices=PRICES, settings=SETTINGS, worker=name, engine=engine)
        return await stack.enter_async_context(made)

    async with AsyncExitStack() as stack:
        server = await host(stack, "server")
        await host(stack, "worker 1", queue)
        async with AsyncExitStack() as leaving:
            await host(leaving, "worker 2", queue)
            runs = [await server.submit(owner="ann", graph_id="report", input=f"dam {at}") for at in range(RUNS)]
            await polishing.wait()
        print(f"worker 2   left, with {RUNS} runs under way in the fleet")
        may_polish.set()
        ended = [await server.wait(run.id) for run in runs]
    statuses = Counter(run.status for run in ended)
    drafts = [count for text, count in calls.items() if not text.startswith("draft of ")]
    print(f"runs       {dict(statuses)}")
    print(f"drafts     {sum(drafts)} model calls for {len(drafts)} drafts")
    return 0 if statuses["completed"] == RUNS and set(drafts) == {1} else 1


def main() -> int:
    """Read where the fleet is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--db", help="postgresql://…")
    parser.add_argument("--engine", help="temporal://host:port/namespace")
    given = parser.parse_args()
    if not given.db or not given.engine:
        print("a fleet needs PostgreSQL and Temporal: give --db and --engine, see --help")
        return 0
    return asyncio.run(fleet(given.db, given.engine))


if __name__ == "__main__":
    sys.exit(main())
