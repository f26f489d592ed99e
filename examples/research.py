"""A graph that goes wrong in three ways and still comes to its end.

    penstock run examples/research.py:graph --input '"dams"' --max-cost 0.50

Three branches look into a topic at the same time. The search fails at first and is tried again; the archive is down and
a cache stands in for it; the interview would go on for ever and is stopped by a budget of its own, with what it has
heard so far. The model is scripted: no key, no network.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock import Budget, BudgetExceededError, ErrorPolicy, ExecutionContext, FunctionNode, Graph, Reported


async def ask(prompt: str) -> Reported[str]:
    """A model that takes a moment and charges for it."""
    await asyncio.sleep(0.15)
    return Reported.of(f"[{prompt}]", cost_usd=0.004, input_tokens=len(prompt), output_tokens=40, model="scripted")


async def think(ctx: ExecutionContext, prompt: str) -> Any:
    """Ask the model under the limits of the step: at most a cent is held while it answers."""
    return await ctx.allm(ask, prompt, name="model", cost_hint_usd=0.01)


graph = Graph("research", max_parallel=3)


@graph.step
async def plan(ctx: ExecutionContext) -> Any:
    return await think(ctx, f"how to find out about {ctx.input}")


attempts = 0


@graph.step(depends_on=[plan], error_policy=ErrorPolicy("retry", retry_count=2, retry_delay_ms=200))
async def search(ctx: ExecutionContext) -> Any:
    """A search engine that is not there at the first attempt."""
    global attempts
    attempts += 1
    await asyncio.sleep(0.1)
    if attempts == 1:
        raise ConnectionError("the search engine hung up")
    return await think(ctx, "what the search found")


async def cache(ctx: ExecutionContext) -> str:
    await asyncio.sleep(0.05)
    return "last week's copy of the archive"


@graph.step(depends_on=[plan], error_policy=ErrorPolicy("fallback", fallback_node=FunctionNode("cache", cache)))
async def archive(ctx: ExecutionContext) -> None:
    await asyncio.sleep(0.2)
    raise FileNotFoundError("the archive is closed today")


@graph.step(depends_on=[plan], sub_budget=Budget(max_cost_dollars=0.02))
async def interview(ctx: ExecutionContext) -> list[Any]:
    heard: list[Any] = []
    try:
        while True:
            heard.append(await think(ctx, "and then what happened?"))
    except BudgetExceededError:
        return heard


@graph.step(depends_on=[search, archive, interview])
async def draft(ctx: ExecutionContext) -> Any:
    return await think(ctx, f"a report from {' and '.join(ctx.input)}")


@graph.step(depends_on=[draft])
async def check(ctx: ExecutionContext) -> Any:
    return await think(ctx, f"is this right: {ctx.input}")


def main() -> None:
    """The same without the command line."""
    with ExecutionContext(name="research", input="dams", budget=Budget(max_cost_dollars=0.50)) as run:
        results = asyncio.run(graph.execute(run))
    print(run.explain())
    for step, result in results.items():
        print(f"{step:12} {result}")


if __name__ == "__main__":
    main()
