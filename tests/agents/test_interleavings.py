"""Whenever and however an agent is stopped, all calls end, no hold remains, and `after_execution` is called once."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from penstock import Budget, CancelledError, ExecutionContext, Usage
from penstock.agents import Agent, Compaction, ModelRequest, ModelResponse, ScriptedModel, ToolCall, tool
from penstock.testing import SimLoop, check_history, explore
from tests.agents.scripts import Diary, priced, use

pytestmark = [pytest.mark.reliability, pytest.mark.requirement("T-5", "X-1")]


@tool
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited " * 20


@tool(budget=Budget(max_cost_dollars=0.5, max_time_seconds=0.2))
async def pay(ctx: ExecutionContext, times: int) -> str:
    """Pay."""
    for _ in range(times):
        await ctx.atool(asyncio.sleep, 0.05, name="pay a little", cost_hint_usd=0.1)
    return "paid"


def busy(chance: random.Random, depth: int) -> Any:
    """A model that does several things at once, for a few turns."""

    async def answer(request: ModelRequest) -> ModelResponse:
        await asyncio.sleep(chance.random() / 10)
        usage = Usage(20, chance.randrange(request.max_output_tokens))
        if chance.random() < 0.1:
            raise ConnectionResetError("cut off")
        if chance.random() < 0.15:
            return ModelResponse("done", usage=usage)
        calls: list[ToolCall] = [
            use("wait", "a", seconds=chance.random() / 5),
            use("pay", "b", times=chance.randrange(8)),
        ]
        if depth:
            calls.append(use("below", "c", task="go"))
        return ModelResponse("", tuple(calls[: chance.randrange(1, 4)]), usage, "tool_calls")

    return ScriptedModel(answer)


def agent(chance: random.Random, diary: Diary, depth: int = 1) -> Agent:
    below = [agent(chance, Diary(), depth - 1)] if depth else []
    return Agent(
        busy(chance, depth),
        tools=[wait, pay, *below],
        budget=Budget(max_cost_dollars=2 if depth else 0.5),
        name="above" if depth else "below",
        hooks=[diary],
        on_delta=(lambda delta: None) if chance.random() < 0.5 else None,
        compaction=Compaction(400, keep_last=1, model=ScriptedModel(lambda request: "summary")),
        max_iterations=6,
    )


def test_an_agent_that_is_stopped_at_any_moment_leaves_nothing_behind() -> None:
    async def main(seed: int) -> str:
        chance, diary = random.Random(seed), Diary()
        budget = Budget(max_cost_dollars=chance.choice([0.3, 1, 10]), max_steps=chance.choice([10, 1_000]))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        run = priced(budget, clock=loop.clock)
        task = asyncio.create_task(agent(chance, diary).run("go", run))
        stop = chance.choice([None, lambda: run.abort("enough"), task.cancel])
        if stop is not None:
            loop.call_later(chance.random(), stop)
        with suppress(asyncio.CancelledError, CancelledError):
            await task
        assert [call.name for call in run._run.graph.open_calls()] == ["main"]
        run.end()
        assert run.balance.held_nanos == 0
        assert run.ledger.root.committed <= run.ledger.root.max_cost
        assert check_history(run.history()) == []
        ends = [moment for moment in diary.moments if moment.startswith("after_execution")]
        assert diary.moments == [] or ends == diary.moments[-1:]
        begun = [event for event in run.history() if event.kind == "iteration_started"]
        assert len(begun) == len([event for event in run.history() if event.kind == "iteration_ended"])
        return ends[0] if ends else "never began"

    endings = Counter(explore(main, schedules=150))
    assert {"after_execution context_canceled", "after_execution limit_exceeded", "after_execution error"} <= set(
        endings
    )


def test_agents_in_threads_never_pass_the_ceiling_they_share() -> None:
    run = priced(Budget(max_cost_dollars=0.2))
    seen: list[int] = []

    def greedy(request: ModelRequest) -> ModelResponse:
        seen.append(run.ledger.root.committed)
        return ModelResponse("", (use("find", q="x"),), Usage(20, request.max_output_tokens // 8), "tool_calls")

    @tool
    async def find(q: str) -> str:
        """Look something up."""
        return "x"

    def work() -> None:
        asyncio.run(Agent(ScriptedModel(greedy), tools=[find], max_iterations=1_000).run("go", run))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run.end()
    assert max(seen) <= 200_000_000
    assert run.balance.spent_nanos <= 200_000_000
    assert run.balance.held_nanos == 0
    assert {child.termination_reason for child in run.children} == {"limit_exceeded"}
