"""The loop of a model that calls tools natively."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from penstock import ExecutionContext
from penstock.agents.executor import Executor
from penstock.agents.formats import FormatError, JsonFormat
from penstock.agents.loop import Conversation
from penstock.agents.model import ModelRequest
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import MAX_CALLS_PER_TURN, tool
from tests.agents.scripts import priced, use


@dataclass
class Dam:
    name: str
    metres: int


@tool
async def find(q: str) -> str:
    """Look something up."""
    return f"{q}: 60 m"


async def run_loop(loop: ToolCallingLoop, **options: Any) -> tuple[Any, ExecutionContext]:
    run = priced(data=Conversation("go"), **options)
    return await Executor(loop).execute(run), run


@pytest.mark.requirement("T-6")
async def test_tools_are_run_until_the_model_answers() -> None:
    requests: list[list[tuple[str, str]]] = []

    def answer(request: ModelRequest) -> Any:
        requests.append([(message.role, message.text) for message in request.messages])
        assert (request.instructions, [spec.name for spec in request.tools]) == ("Be brief.", ["find"])
        return [use("find", "a", q="one"), use("find", "b", q="two")] if len(requests) == 1 else "both 60 m"

    result, run = await run_loop(ToolCallingLoop(ScriptedModel(answer), [find], instructions="Be brief."))
    assert result.result == "both 60 m"
    assert requests[1] == [("user", "go"), ("assistant", ""), ("tool", "one: 60 m"), ("tool", "two: 60 m")]
    assert [message.tool_call_id for message in run.data.messages[2:4]] == ["a", "b"]


async def test_an_invalid_call_is_returned_to_the_model_which_continues() -> None:
    result, run = await run_loop(ToolCallingLoop(ScriptedModel([use("lose"), use("find"), "sorry"]), [find]))
    assert result.result == "sorry"
    assert "there is no tool 'lose'" in run.data.messages[2].text
    assert "q: Field required" in run.data.messages[4].text


async def test_a_turn_with_too_many_calls_keeps_the_maximum_in_the_conversation() -> None:
    calls = [use("find", f"c{number}", q="x") for number in range(5_000)]
    result, run = await run_loop(ToolCallingLoop(ScriptedModel([calls, "sorry"]), [find]))
    assert result.result == "sorry"
    _, message, *results, _ = run.data.messages
    assert message.tool_calls == tuple(calls[:MAX_CALLS_PER_TURN])
    assert [result.tool_call_id for result in results] == [call.id for call in message.tool_calls]
    assert {result.text for result in results} == {
        "not run: 5000 calls in one turn; the maximum is 128, so call fewer at a time"
    }


async def test_a_turn_of_as_many_calls_as_one_may_have_is_run_and_kept_whole() -> None:
    calls = [use("find", f"c{number}", q="x") for number in range(MAX_CALLS_PER_TURN)]
    _, run = await run_loop(ToolCallingLoop(ScriptedModel([calls, "done"]), [find]))
    assert {one.text for one in run.data.messages[2:-1]} == {"x: 60 m"}
    assert len(run.data.messages) == MAX_CALLS_PER_TURN + 3


@pytest.mark.requirement("T-9")
async def test_an_answer_in_the_wrong_format_is_requested_again() -> None:
    replies = ["about 60", '{"name": "Hoover"}', '{"name": "Hoover", "metres": 221}']
    result, run = await run_loop(ToolCallingLoop(ScriptedModel(replies), output=JsonFormat(Dam)))
    assert result.unwrap() == Dam("Hoover", 221)
    corrections = [message.text for message in run.data.messages if message.role == "user"][1:]
    assert "not JSON" in corrections[0]
    assert "metres" in corrections[1]


@pytest.mark.requirement("T-9")
async def test_an_answer_in_the_wrong_format_is_requested_again_up_to_the_maximum() -> None:
    model = ScriptedModel(lambda request: "about 60")
    result, _ = await run_loop(ToolCallingLoop(model, output=JsonFormat(Dam), max_format_retries=3))
    assert isinstance(result.error, FormatError)
    assert (result.termination_reason, model.calls) == ("error", 4)


@pytest.mark.requirement("T-9")
async def test_a_retry_for_the_format_may_call_a_tool_after_all() -> None:
    replies = ["about 60", use("find", q="Hoover"), '{"name": "Hoover", "metres": 60}']
    result, _ = await run_loop(ToolCallingLoop(ScriptedModel(replies), [find], output=JsonFormat(Dam)))
    assert result.unwrap() == Dam("Hoover", 60)


async def test_a_turn_that_is_broken_off_leaves_no_call_without_a_result_in_use() -> None:
    @tool
    async def wait() -> None:
        await asyncio.sleep(3_600)

    run = priced(data=Conversation("go"))
    task = asyncio.create_task(Executor(ToolCallingLoop(ScriptedModel([use("wait")]), [wait])).execute(run))
    while run.stats.model_call_count == 0 or not run._run.graph.open_calls()[:-1]:  # noqa: ASYNC110
        await asyncio.sleep(0)
    run.abort("enough")
    await task
    assert list(run.data.iterations) == []
    (broken,) = run.data.iteration_history
    assert (broken.is_complete, broken.messages[0].tool_calls) == (False, (use("wait"),))


async def test_one_loop_serves_many_executions_at_once() -> None:
    def answer(request: ModelRequest) -> Any:
        if len(request.messages) == 1:
            return use("find", q=request.messages[0].text)
        return f"answer {request.messages[2].text}"

    executor = Executor(ToolCallingLoop(ScriptedModel(answer), [find]))
    results = await asyncio.gather(*(executor.execute(f"dam {number}") for number in range(20)))
    assert [result.result for result in results] == [f"answer dam {number}: 60 m" for number in range(20)]
