"""Writes a briefing about a topic."""

from __future__ import annotations

from typing import Any

from penstock import Agent, ErrorPolicy, ExecutionContext, Graph
from penstock.server.examples import ExampleModel  # needs no key; a real one is named: Agent("openai:gpt-4o", …)

researcher = Agent(ExampleModel(), "Collect facts.", name="researcher")
writer = Agent(ExampleModel(), "Write one sentence.", name="writer")

graph = Graph("briefing", max_parallel=2)
retry = ErrorPolicy("retry", retry_count=2)


@graph.step(error_policy=retry)
async def history(context: ExecutionContext) -> Any:
    return (await researcher.run(f"history of {context.input}", context)).output


@graph.step(error_policy=retry)
async def figures(context: ExecutionContext) -> Any:
    return (await researcher.run(f"figures about {context.input}", context)).output


@graph.step(depends_on=[history, figures])
async def brief(context: ExecutionContext) -> Any:
    return (await writer.run("\n".join(context.input.values()), context)).output
