"""A conversation that has become too long is summed up by a nested agent, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import Budget, InvalidValue, Usage
from penstock.agents.compaction import Compaction
from penstock.agents.executor import Executor
from penstock.agents.loop import Conversation
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import tool
from penstock.events import CompactionTrace
from tests.agents.scripts import priced, use

pytestmark = pytest.mark.requirement("T-7")


@tool
async def read(page: int) -> str:
    """Read a page."""
    return f"page {page} " + "x" * 200


def reader(pages: int, sizes: list[int]) -> ScriptedModel:
    def answer(request: ModelRequest) -> Any:
        sizes.append(len(request.messages))
        return use("read", page=len(sizes)) if len(sizes) <= pages else "done"

    return ScriptedModel(answer)


async def test_the_older_part_is_summed_up_in_a_child_and_the_history_is_kept() -> None:
    summarized: list[str] = []

    def sum_up(request: ModelRequest) -> str:
        summarized.append(request.messages[0].text)
        return f"summary {len(summarized)}"

    sizes: list[int] = []
    compaction = Compaction(600, keep_last=1, model=ScriptedModel(sum_up, usage=Usage(50, 5)))
    run = priced(data=Conversation("Read it all."))
    result = await Executor(ToolCallingLoop(reader(10, sizes), [read], compaction=compaction)).execute(run)
    assert result.result == "done"
    assert max(sizes) < 14
    assert "tool read: page 1 " in summarized[0]
    assert "user: Summary of the conversation so far:\nsummary 1" in summarized[1]
    assert len(run.data.iteration_history) == 11
    assert [message.text[:7] for message in run.data.messages if message.role == "tool"][:2] == ["page 1 ", "page 2 "]
    assert run.data.transcript[1].text.startswith("Summary of the conversation so far:\nsummary")
    events = [event for event in run.events if isinstance(event, CompactionTrace)]
    assert len(events) == len(summarized)
    assert all(event.after < event.before for event in events)
    assert [child.name for child in run.children] == ["compaction"] * len(summarized)
    assert {child.termination_reason for child in run.children} == {"success"}
    assert run.stats.cost_by_child["compaction"] > 0


async def test_a_short_conversation_is_not_compacted() -> None:
    run = priced(data=Conversation("Read it all."))
    loop = ToolCallingLoop(reader(3, []), [read], compaction=Compaction(100_000))
    await Executor(loop).execute(run)
    assert run.children == ()


async def test_without_a_model_of_its_own_compaction_uses_the_agents_model() -> None:
    def answer(request: ModelRequest) -> Any:
        if "Summarize it" in request.instructions:
            return "summary"
        return use("read", page=1) if len(request.messages) < 7 else "done"

    run = priced(data=Conversation("Read it all."))
    loop = ToolCallingLoop(ScriptedModel(answer), [read], compaction=Compaction(300, keep_last=0))
    await Executor(loop, max_iterations=6).execute(run)
    assert run.children
    assert run.data.transcript[1].text.endswith("summary")


async def test_a_limit_that_stops_the_summary_stops_the_agent() -> None:
    run = priced(Budget(max_steps=7), data=Conversation("Read it all."))
    compaction = Compaction(300, keep_last=1, model=ScriptedModel(["never"]))
    result = await Executor(ToolCallingLoop(reader(10, []), [read], compaction=compaction)).execute(run)
    assert result.termination_reason == "limit_exceeded"


async def test_a_summary_that_fails_ends_the_agent_with_its_error() -> None:
    run = priced(data=Conversation("Read it all."))
    compaction = Compaction(300, keep_last=1, model=ScriptedModel([ValueError("no")]))
    result = await Executor(ToolCallingLoop(reader(10, []), [read], compaction=compaction)).execute(run)
    assert isinstance(result.error, ValueError)
    assert [child.termination_reason for child in run.children] == ["error"]


async def test_what_would_hardly_make_room_is_not_summed_up() -> None:
    @tool
    async def flood(times: int) -> str:
        return "x" * times

    calls = [use("flood", times=times) for times in (1, 1, 1, 10_000)]
    run = priced(data=Conversation("go"))
    loop = ToolCallingLoop(ScriptedModel([*calls, "done"]), [flood], compaction=Compaction(1_000, keep_last=1))
    assert (await Executor(loop).execute(run)).result == "done"
    assert run.children == ()


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidValue, match="threshold_tokens"):
        Compaction(0)
    with pytest.raises(InvalidValue, match="model"):
        Compaction(10, model="small")  # type: ignore[arg-type]
