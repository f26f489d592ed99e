"""An evaluation by replay: change one step of recorded runs, and pay for that step alone.

    python examples/replay_evaluation.py

Ten questions are answered by a graph of two steps: an expensive one that researches, and a cheap one that writes. The
journal of each run is recorded. Then another writer is tried on every question: each run is forked without its written
answer, so that the research is found in the journal and costs nothing again. At the end both writers are scored, and
one run is replayed in full, with nothing called. The models are scripted: no key, no network.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from penstock import ExecutionContext, Graph, Price, PriceBook, Usage
from penstock.agents import Agent, ScriptedModel
from penstock.stores import Journal, Stores, fork_journal, open_stores

PRICES = PriceBook(registered={"large": Price(5, 25), "small": Price("0.1", "0.4")}, use_genai_prices=False)
HEIGHTS = {"Hoover": 221, "Oroville": 235, "Aswan": 111, "Itaipu": 196, "Mauvoisin": 250}
HEIGHTS |= {"Vajont": 262, "Kariba": 128, "Nurek": 304, "Tarbela": 143, "Shasta": 183}
RESEARCH = ScriptedModel(
    lambda request: f"{HEIGHTS[request.messages[-1].text]} m, says the survey", name="large", usage=Usage(2_000, 300)
)


def writer(style: str) -> ScriptedModel:
    """Return the small model under one of two prompts: `vague` leaves the number out."""
    return ScriptedModel(
        lambda request: request.messages[-1].text.partition(",")[0] if style == "exact" else "It is high.",
        name="small",
        usage=Usage(200, 20),
    )


def graph(style: str) -> Graph:
    """Return the graph with one of the writers."""

    async def research(ctx: Any) -> str:
        return str((await Agent(RESEARCH).run(ctx.input, ctx)).output)

    async def write(ctx: Any) -> str:
        return str((await Agent(writer(style)).run(ctx.input, ctx)).output)

    made = Graph("dams")
    made.step(research, "research") >> made.step(write, "write")
    return made


async def answer(stores: Stores, run_id: str, dam: str, style: str, **options: Any) -> tuple[str, float]:
    """Run the graph with a journal; return the answer, and what the whole run has cost."""
    journal = await Journal.open(stores.journal, run_id, **options)
    with ExecutionContext(input=dam, prices=PRICES, journal=journal) as run:
        return (await graph(style).execute(run))["write"], run.balance.spent_usd


async def main() -> int:
    """Record, try another writer on what was recorded, and compare."""
    async with await open_stores("memory:") as stores:
        vague = {dam: await answer(stores, f"vague/{dam}", dam, "vague") for dam in HEIGHTS}
        researched = RESEARCH.calls
        for dam in HEIGHTS:
            await fork_journal(
                stores.journal, f"vague/{dam}", f"exact/{dam}", without=lambda entry: "write" in entry.key
            )
        exact = {dam: await answer(stores, f"exact/{dam}", dam, "exact") for dam in HEIGHTS}
        replayed, _ = await answer(stores, "exact/Hoover", "Hoover", "exact", replay_only=True)
    for name, answers in (("vague", vague), ("exact", exact)):
        right = sum(f"{HEIGHTS[dam]} m" == text for dam, (text, _) in answers.items())
        print(f"{name:10} {right} of {len(HEIGHTS)} answers have the number")
    print(f"research   paid {researched} times for the first writer, {RESEARCH.calls - researched} for the second")
    print(f"replayed   {replayed}")
    return 0 if RESEARCH.calls == researched == len(HEIGHTS) and replayed == "221 m" else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
