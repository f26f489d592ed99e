"""Read many documents at once, write one report, and stay inside a dollar.

    python examples/map_reduce.py [--documents 40] [--ceiling 1.00]

One agent reads each document, at most eight at a time; another writes the report from what they found. The ceiling is
for all of them together: if it is too low for every document, reading stops when no further one fits, and the report is
written from those that were read. The model is scripted: no key, no network.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

from penstock import Agent, Budget, BudgetExceededError, ExecutionContext, Graph, Price, PriceBook, Usage
from penstock.agents import ModelRequest, ModelSettings, ScriptedModel

PRICES = PriceBook(registered={"reader": Price(1, 5), "writer": Price(3, 15)}, use_genai_prices=False)
RESERVE_USD = 0.05
"""Kept back from the readers, so that the report can always be written."""


def read(request: ModelRequest) -> str:
    """What the reader finds in a document."""
    return f"{len(request.messages[-1].text.split())} words on {request.messages[-1].text.split()[0]}"


def write(request: ModelRequest) -> str:
    """What the writer makes of it all."""
    return f"A report from {request.messages[-1].text.count('words on')} documents."


READER = Agent(
    ScriptedModel(read, name="reader", usage=Usage(900, 120), latency_s=0.02),
    "Say in one line what the document is about.",
    settings=ModelSettings(max_output_tokens=200),
    name="reader",
)
WRITER = Agent(
    ScriptedModel(write, name="writer", usage=Usage(2_000, 400), latency_s=0.02),
    "Write a report from these notes.",
    name="writer",
)


def readers(documents: list[str]) -> Graph:
    """A graph with a step for each document."""
    graph = Graph("readers", max_parallel=8, settle="collect")
    for number, document in enumerate(documents):
        graph.add_step(READER, f"document {number}", input=document)
    return graph


async def report(documents: list[str], ceiling_usd: float) -> tuple[Mapping[str, str], str, ExecutionContext]:
    """What was read, the report, and the run it came from."""
    with ExecutionContext(name="map-reduce", budget=Budget(max_cost_dollars=ceiling_usd), prices=PRICES) as run:
        reading = run.with_sub_budget(Budget(max_cost_dollars=max(0.0, ceiling_usd - RESERVE_USD)), "reading")
        try:
            found: Mapping[str, str] = await readers(documents).execute(reading)
        except BudgetExceededError as stopped:
            found = stopped.partial
        written = await WRITER.run("\n".join(found.values()) or "nothing", run)
        return found, written.output, run


def main() -> None:
    """Read the command line, make the documents up, print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--ceiling", type=float, default=1.00)
    arguments = parser.parse_args()
    documents = [f"turbine-{number} " + "water " * (20 + number) for number in range(arguments.documents)]
    found, written, run = asyncio.run(report(documents, arguments.ceiling))
    print(written)
    print(f"read {len(found)} of {len(documents)} documents")
    print(f"spent ${run.balance.spent_usd:.4f} of ${arguments.ceiling:.2f}")
    assert run.balance.spent_usd <= arguments.ceiling


if __name__ == "__main__":
    main()
