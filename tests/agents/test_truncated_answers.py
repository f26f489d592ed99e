"""An answer that the budget cut is a halt by that budget; one that came to its own limit says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Budget, BudgetExceededError, ExecutionContext, ModelCallTrace, Usage
from penstock.agents.agent import Agent, AgentResult
from penstock.agents.compaction import Compaction
from penstock.agents.formats import FormatError
from penstock.agents.loop import Conversation, Iteration
from penstock.agents.messages import Message, ToolCall
from penstock.agents.model import (
    Model,
    ModelRequest,
    ModelResponse,
    ModelSettings,
    TruncatedByBudget,
    TruncatedResponse,
)
from penstock.agents.react import ReActLoop
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tools import tool
from penstock.events import LimitTrace
from penstock.stops import StopReason
from penstock.tracing.record import OPEN
from tests.agents.scripts import Diary, priced

MESSAGES = [Message.user("Count to 1,000.")]
COST, TOKENS = StopReason.BUDGET_EXCEEDED, StopReason.TOKEN_LIMIT_EXCEEDED


dug: list[bool] = []


@tool
async def dig() -> str:
    """Dig."""
    dug.append(True)
    return "dug"


def counting(text: str = "1, 2, 3, ", calls: tuple[ToolCall, ...] = ()) -> ScriptedModel:
    """A model that never comes to its end: it says as much as it may."""

    def answer(request: ModelRequest) -> ModelResponse:
        return ModelResponse(text, calls, Usage(10, request.max_output_tokens), "length")

    return ScriptedModel(answer)


async def cut(run: ExecutionContext, model: Model | None = None, **options: Any) -> TruncatedByBudget:
    with pytest.raises(TruncatedByBudget) as raised:
        await (model or counting()).generate(run, MESSAGES, **options)
    return raised.value


def limit_events(run: ExecutionContext) -> list[LimitTrace]:
    return [event for event in run.history() if isinstance(event, LimitTrace)]


@pytest.mark.requirement("P-B3")
@pytest.mark.parametrize(
    ("budget", "reason", "unit", "message"),
    [
        (
            Budget(max_cost_dollars=0.001),
            COST,
            "usd",
            r"\$0\.00\d+ spent of the \$0\.001 of 'main': it paid for 9\d of",
        ),
        (
            Budget(max_tokens=60),
            TOKENS,
            "tokens",
            r"\d\d of the 60 tokens of 'main' used: it paid for 4\d of the 4096 ",
        ),
    ],
    ids=["money", "tokens"],
)
async def test_a_budget_that_pays_for_a_part_of_the_answer_halts_the_run(
    budget: Budget, reason: StopReason, unit: str, message: str
) -> None:
    run = priced(budget)
    error = await cut(run)
    assert isinstance(error, BudgetExceededError)
    assert (error.stop.reason, error.stop.unit, error.owner, error.budget) == (reason, unit, "main", budget)
    assert error.text == "1, 2, 3, "
    with pytest.raises(TruncatedByBudget, match=message):
        raise error
    assert run.stop is error.stop
    (limit,) = limit_events(run)
    assert (limit.stop_reason, limit.name, limit.budget) == (str(reason), "scripted", "main")
    run.end(error)
    assert run.termination_reason == "limit_exceeded"


async def test_what_a_cut_answer_cost_is_paid_and_nothing_of_it_stays_held() -> None:
    run = priced(Budget(max_cost_dollars=0.001))
    await cut(run)
    (call,) = [event for event in run.events if isinstance(event, ModelCallTrace)]
    assert (call.status, call.finish_reason) == ("success", "length")
    assert 0 < run.balance.spent_nanos == round(call.cost * 1e9) <= 1_000_000
    assert (run.balance.held_nanos, run.balance.unresolved_nanos) == (0, 0)


@pytest.mark.parametrize(
    ("outer", "inner", "whose"),
    [
        (Budget(max_cost_dollars=0.001), Budget(max_cost_dollars=0.01), "main"),
        (Budget(max_cost_dollars=0.01), Budget(max_cost_dollars=0.001), "inner"),
        (Budget(max_cost_dollars=0.001), Budget(max_cost_dollars=0.001), "inner"),
        (Budget(max_tokens=90), Budget(max_cost_dollars=0.01), "main"),
        (Budget(max_cost_dollars=0.001), Budget(max_tokens=500), "main"),
        (Budget(max_cost_dollars=0.001), Budget(max_tokens=40), "inner"),
    ],
)
async def test_the_halt_is_by_the_limit_that_left_least(outer: Budget, inner: Budget, whose: str) -> None:
    run = priced(outer)
    child = run.spawn_child("inner", budget=inner)
    error = await cut(child)
    assert error.owner == whose
    assert child.stop is error.stop
    assert run.stop is (error.stop if whose == "main" else None)


async def test_what_others_have_taken_meanwhile_is_in_the_figures() -> None:
    run = priced(Budget(max_cost_dollars=0.001))

    async def answer(request: ModelRequest) -> ModelResponse:
        with run.spawn_child("beside") as beside:
            await beside.atool(lambda: None, cost_hint_usd=0)
        return ModelResponse("1, ", usage=Usage(1, 50), finish_reason="length")

    error = await cut(run, ScriptedModel(answer))
    assert (error.stop.used, error.stop.limit, error.stop.held) == (0.000501, 0.001, 0)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.requirement("T-10")
async def test_an_agents_cut_answer_is_a_limit_and_what_came_is_kept(streams: bool) -> None:
    deltas: list[Any] = []
    diary = Diary()
    agent = Agent(counting(), hooks=[diary], on_delta=deltas.append if streams else None)
    run = priced(Budget(max_cost_dollars=0.001))
    result = await agent.run("count", run)
    assert isinstance(result.error, TruncatedByBudget)
    assert (result.termination_reason, result.partial, result.text) == ("limit_exceeded", "1, 2, 3, ", "1, 2, 3, ")
    assert result.error.was_streamed is streams
    assert [iteration.is_complete for iteration in result.context.data.iteration_history] == [False]
    assert "after_model_call TruncatedByBudget" in diary.moments
    assert "".join(delta.text for delta in deltas) == ("1, 2, 3, " if streams else "")


async def test_a_turn_truncated_inside_a_tool_call_runs_no_tool() -> None:
    dug.clear()
    model = counting("", (ToolCall("1", "dig", {}), ToolCall("2", "dig", '{"whe')))
    result = await Agent(model, tools=[dig], budget=Budget(max_cost_dollars=0.001)).run("dig", priced())
    assert (type(result.error), dug) == (TruncatedByBudget, [])
    unlimited = await Agent(model, tools=[dig], settings=ModelSettings(max_output_tokens=20)).run("dig", priced())
    with pytest.raises(
        TruncatedResponse, match=r"in the middle of a tool call, at its maximum of 20 tokens; raise max_output_tokens"
    ):
        unlimited.output  # noqa: B018
    assert dug == []


async def test_tool_calls_that_are_whole_run_although_more_was_to_come() -> None:
    whole = ModelResponse("and", (ToolCall("1", "dig", {}),), Usage(1, 1), "length")
    agent = Agent(ScriptedModel([whole, "done"]), tools=[dig], budget=Budget(max_cost_dollars=0.001))
    assert (await agent.run("dig", priced())).output == "done"


async def test_a_summary_that_the_budget_cut_is_no_summary() -> None:
    run = priced(Budget(max_cost_dollars=0.001), data=Conversation("go"))
    run.data.set_iterations([Iteration((Message.assistant("word " * 20),)) for _ in range(3)])
    with pytest.raises(TruncatedByBudget):
        await Compaction(20, keep_last=0).compact(run, run.data, counting())
    assert len(run.data.iterations) == 3


# at its own limit


async def answered(*replies: Any, **options: Any) -> AgentResult:
    return await Agent(ScriptedModel(replies), **options).run("go", priced())


@pytest.mark.parametrize("reason", ["length", "content_filter"])
async def test_an_answer_that_came_to_its_own_limit_is_one_and_says_so(reason: Any) -> None:
    result = await answered(ModelResponse("1, 2", usage=Usage(1, 5), finish_reason=reason))
    assert (result.output, result.finish_reason, result.termination_reason) == ("1, 2", reason, "success")
    (call,) = [event for event in result.context.events if isinstance(event, ModelCallTrace)]
    assert (call.finish_reason, call.to_dict()["finish_reason"]) == (reason, reason)
    assert f"not whole: {reason}" in result.context.explain()
    (node,) = [one for one in result.context.graph.snapshot()["nodes"].values() if one["kind"] == "llm"]
    assert node["metadata"] == {"finish_reason": reason}


async def test_an_answer_that_is_whole_says_nothing() -> None:
    result = await answered("1, 2")
    assert result.finish_reason is None
    assert [event.finish_reason for event in result.context.events if isinstance(event, ModelCallTrace)] == [None]
    assert "not whole" not in result.context.explain()


async def test_of_several_turns_the_last_one_says_whether_the_answer_is_whole() -> None:
    first = ModelResponse("", (ToolCall("1", "dig", {}),), Usage(1, 5), "length")
    assert (await answered(first, "done", tools=[dig])).finish_reason is None


async def test_an_answer_truncated_inside_its_format_is_not_requested_again() -> None:
    schema = {"type": "object", "properties": {"metres": {"type": "integer"}}, "required": ["metres"]}
    cut_off = ModelResponse('{"metres": 22', usage=Usage(1, 5), finish_reason="length")
    result = await answered(cut_off, output=schema, settings=ModelSettings(max_output_tokens=5))
    assert isinstance(result.error, TruncatedResponse)
    assert "in the middle of its format, at its maximum of 5 tokens" in str(result.error)
    assert isinstance(result.error.__cause__, FormatError)
    assert (result.partial, result.text) == ('{"metres": 22', '{"metres": 22')
    whole = ModelResponse('{"metres": 221}', usage=Usage(1, 5), finish_reason="length")
    assert (await answered(whole, output=schema)).output == {"metres": 221}


async def test_a_truncated_step_of_text_is_not_requested_again() -> None:
    step = ModelResponse("Thought: I should", usage=Usage(1, 5), finish_reason="length")
    model = ScriptedModel([step])
    result = await Agent(model, loop=ReActLoop(model)).run("go", priced())
    assert isinstance(result.error, TruncatedResponse)
    assert "in the middle of a step" in str(result.error)
    answer = ModelResponse("Thought: so\nFinal Answer: 1, 2", usage=Usage(1, 5), finish_reason="length")
    model = ScriptedModel([answer])
    result = await Agent(model, loop=ReActLoop(model)).run("go", priced())
    assert (result.output, result.finish_reason) == ("1, 2", "length")


async def test_what_a_function_says_of_its_end_is_no_matter_unless_it_is_one_of_ours() -> None:
    run = priced()
    await run.allm(lambda: SimpleNamespace(finish_reason=["length"]))
    assert [event.finish_reason for event in run.events if isinstance(event, ModelCallTrace)] == [None]
    assert all(call.end_seq == OPEN or call.finish_reason is None for call in run.graph.calls()[1])
