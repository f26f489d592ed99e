"""Answers from documents: an index of embeddings, and answers with their sources, each under a budget of its own.

    python examples/rag.py [--index-budget 0.0005]

Documents are embedded in batches until the index budget is used up: what is indexed stays, and the rest is named. Then
each question is embedded, compared with the index, and answered by an agent from the three nearest documents. All of it
is one run, so the ceiling holds for embeddings and answers together. The models are scripted: no key, no network. A
real one is `embedding_model("openai:text-embedding-3-small")`.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from hashlib import blake2b

from penstock import Agent, Budget, BudgetExceededError, ExecutionContext, Price, PriceBook, Usage
from penstock.agents import EmbeddingModel, EmbeddingRequest, Embeddings, ModelRequest, ScriptedModel

CEILING_USD = 0.01
BATCH = 8
PRICES = PriceBook(registered={"vectors": Price("0.10", 0), "writer": Price(1, 5)}, use_genai_prices=False)
RIVERS = ("Colorado", "Feather", "Tennessee", "Columbia", "Missouri", "Yangtze", "Nile", "Paraná")
DOCUMENTS = {
    f"{river} {year}": f"Survey of the {river} river in {year}: the dam on the {river} was {100 + year % 97} m high."
    for river in RIVERS
    for year in range(2001, 2026)
}


class Vectors(EmbeddingModel):
    """Counts words in 256 buckets: near texts share words."""

    async def request(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector of length 1 for each text."""
        found = [vector(str(text)) for text in request.texts]
        return Embeddings(found, Usage(self.count_input(request), 0))


def vector(text: str) -> list[float]:
    """Count the words of a text by their hash."""
    counts = [0.0] * 256
    for word in text.lower().replace(":", " ").replace("?", " ").split():
        counts[blake2b(word.encode(), digest_size=1).digest()[0]] += 1
    length = math.sqrt(sum(count * count for count in counts)) or 1
    return [count / length for count in counts]


def near(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the cosine of two vectors of length 1."""
    return sum(a * b for a, b in zip(one, other, strict=True))


def write(request: ModelRequest) -> str:
    """Answer with the first source, as a model would that reads them."""
    return request.messages[-1].text.splitlines()[1]


EMBEDDER = Vectors("vectors")
WRITER = Agent(
    ScriptedModel(write, name="writer", usage=Usage(200, 40)), "Answer from the sources, and name one.", name="writer"
)


async def index(run: ExecutionContext, budget: Budget) -> dict[str, Sequence[float]]:
    """Embed the documents, batch by batch, until the budget has no room for another batch."""
    indexed: dict[str, Sequence[float]] = {}
    names = list(DOCUMENTS)
    try:
        with run.with_sub_budget(budget, "index") as indexing:
            for start in range(0, len(names), BATCH):
                batch = names[start : start + BATCH]
                found = await EMBEDDER.embed(indexing, [DOCUMENTS[name] for name in batch])
                indexed.update(zip(batch, found.vectors, strict=True))
    except BudgetExceededError as stopped:
        print(f"index      stopped: {stopped.reason}")
    print(f"index      {len(indexed)} of {len(DOCUMENTS)} documents")
    return indexed


async def answer(run: ExecutionContext, indexed: dict[str, Sequence[float]], question: str) -> str:
    """Find the nearest documents, and let the agent answer from them."""
    (wanted,) = (await EMBEDDER.embed(run, [question])).vectors
    nearest = sorted(indexed, key=lambda name: near(indexed[name], wanted), reverse=True)[:3]
    sources = "\n".join(f"[{name}] {DOCUMENTS[name]}" for name in nearest)
    return str((await WRITER.run(f"{question}\n{sources}", run)).output)


async def main() -> int:
    """Index, ask twice, and compare what was spent with the ceiling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index-budget", type=float, default=0.0005)
    index_usd = parser.parse_args().index_budget
    with ExecutionContext(name="rag", budget=Budget(max_cost_dollars=CEILING_USD), prices=PRICES) as run:
        indexed = await index(run, Budget(max_cost_dollars=index_usd))
        for question in ("How high was the Feather dam in 2007?", "How high was the Columbia dam in 2003?"):
            print(f"question   {question}\nanswer     {await answer(run, indexed, question)}")
    spent = run.stats.cost_by_model
    print(f"spent      ${run.balance.spent_usd:.6f} of ${CEILING_USD}: {spent}")
    return 0 if spent["vectors"] <= index_usd + 0.0001 and run.balance.spent_usd <= CEILING_USD else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
