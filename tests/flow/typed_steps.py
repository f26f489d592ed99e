"""Steps written as functions, as a type checker sees them: mypy checks this file, and a test runs it."""

from __future__ import annotations

from typing import assert_type

from penstock import Budget, ErrorPolicy, ExecutionContext, FunctionNode, Graph, Step

graph = Graph("typed")


@graph.step
async def fetch(ctx: ExecutionContext) -> list[str]:
    """Fetch two pages."""
    return [f"page {number} on {ctx.input}" for number in range(2)]


@graph.step(depends_on=[fetch], error_policy=ErrorPolicy("retry", retry_count=1), sub_budget=Budget(max_steps=5))
def count(ctx: ExecutionContext) -> int:
    """Count the pages."""
    return len(ctx.input)


def report(ctx: ExecutionContext) -> str:
    """Write the report."""
    return f"{ctx.input} pages"


written = graph.step(report, depends_on=[count])
shouted = graph.step(FunctionNode("shout", lambda ctx: ctx.input.upper()))
written >> shouted

graph.add_step(report, "again", depends_on=[count, "fetch"])
graph.chain(shouted, "again")


async def call_directly(ctx: ExecutionContext) -> None:
    """A decorated function is called as before, and keeps its types."""
    assert_type(await fetch(ctx), list[str])
    assert_type(count(ctx), int)
    assert_type(written(ctx), str)
    assert_type(shouted, Step)
