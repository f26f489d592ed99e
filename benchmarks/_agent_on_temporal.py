"""The program of `engines`, as an agent of pydantic-ai in a workflow; imported where pydantic-ai is installed."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from benchmarks._peers import load

    pydantic_ai: Any = load("pydantic_ai")
    function: Any = load("pydantic_ai.models.function")
    messages: Any = load("pydantic_ai.messages")
    durable: Any = load("pydantic_ai.durable_exec.temporal")


async def answer(history: list[Any], info: Any) -> Any:
    """Call the tool in every turn but the last; hold in the last one if a folder says so."""
    question = str(history[0].parts[-1].content)
    turns, prompt = question.split(" ", 1)
    turn = sum(one.kind == "response" for one in history)
    if turn + 1 < int(turns):
        return messages.ModelResponse([messages.ToolCallPart("look", {"what": f"{turn} {prompt}"})])
    if folder := os.environ.get("HOLD"):
        with (Path(folder) / "log").open("a") as log:
            log.write(f"{os.getpid()} {time.time()}\n")
        while not (Path(folder) / "go").exists():
            time.sleep(0.02)  # noqa: ASYNC251  # as a tool or client that blocks does
    return messages.ModelResponse([messages.TextPart("done")])


async def look(what: str) -> str:
    """Look at something."""
    return f"saw {what}"


agent: Any = pydantic_ai.Agent(
    function.FunctionModel(answer),
    name="looker",
    tools=[look],
    capabilities=[durable.TemporalDurability(activity_config={"start_to_close_timeout": timedelta(seconds=60)})],
)


@workflow.defn
class Looker:
    """One run of the agent."""

    @workflow.run
    async def run(self, question: str) -> str:
        result = await agent.run(question, usage_limits=pydantic_ai.UsageLimits(request_limit=None))
        return str(result.output)
