"""However an execution ends, it reports how, and `after_execution` is called once, and last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ExecutionConfig,
    ExecutionContext,
    InvalidValue,
    TerminationReason,
    Usage,
)
from penstock.agents.executor import Executor, MaxIterationsReached
from penstock.agents.hooks import Hook
from penstock.agents.loop import AgentLoopResult, Conversation, HookAbort, LoopAction
from penstock.agents.messages import Message, TextDelta, ToolCall, ToolResult, Transcript
from penstock.agents.model import ModelRequest, ModelResponse, TruncatedResponse
from penstock.agents.scripted import ScriptedModel
from penstock.agents.tool_calling import ToolCallingLoop
from penstock.agents.tools import tool
from penstock.testing import check_history
from tests.agents.scripts import Diary, kinds, priced, use

pytestmark = pytest.mark.requirement("T-5")


@tool
async def find(q: str) -> str:
    """Look something up."""
    return f"{q}: 60 m"


def loop(*replies: Any) -> ToolCallingLoop:
    return ToolCallingLoop(ScriptedModel(replies), [find])


class Turns:
    """A loop of one's own: whatever the function does, so many times."""

    def __init__(self, turn: Callable[[ExecutionContext], Any]) -> None:
        self._turn = turn

    async def next(self, context: ExecutionContext) -> AgentLoopResult:
        done = self._turn(context)
        done = await done if asyncio.iscoroutine(done) else done
        return done or AgentLoopResult(LoopAction.CONTINUE)


async def test_a_loop_that_never_waits_can_be_cancelled() -> None:
    turns: list[int] = []
    never_waits = Executor(Turns(lambda context: turns.append(context.iteration)), max_iterations=100_000)
    running = asyncio.ensure_future(never_waits.execute("go on"))
    asyncio.get_running_loop().call_soon(running.cancel)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert 0 < len(turns) < 1_000


async def test_hooks_are_called_in_the_order_of_events() -> None:
    diary, run = Diary(), priced(data=Conversation("How high?"))
    result = await Executor(loop(use("find", q="dam"), "60 m"), hooks=[diary]).execute(run)
    assert (result.unwrap(), result.termination_reason) == ("60 m", "success")
    assert diary.moments == [
        "before_execution",
        "before_iteration 1",
        "before_model_call",
        "after_model_call ModelResponse",
        "before_tool_call find",
        "after_tool_call dam: 60 m",
        "after_iteration 1 continue",
        "before_iteration 2",
        "before_model_call",
        "after_model_call ModelResponse",
        "after_iteration 2 terminate",
        "after_execution success",
    ]


async def test_iterations_are_events_of_the_context() -> None:
    run = priced(data=Conversation("How high?"))
    await Executor(loop(use("find", q="dam"), "60 m")).execute(run)
    calls = ["call_started", "call_ended"]
    assert kinds(run)[2:] == [
        *("iteration_started", *calls, *calls, "iteration_ended"),
        *("iteration_started", *calls, "iteration_ended"),
    ]
    assert [getattr(event, "action", None) for event in run.events if event.kind == "iteration_ended"] == [
        "continue",
        "terminate",
    ]
    assert [event.iteration for event in run.events[2:]] == [1] * 6 + [2] * 4
    begun = [event for event in run.events if event.kind == "iteration_started"]
    assert {(event.parent_id, event.source, event.depth) for event in begun} == {("n000001", "main", 0)}
    run.end()
    assert check_history(run.history()) == []


async def test_data_or_an_input_is_a_run_of_its_own() -> None:
    result = await Executor(loop("60 m")).execute("How high?")
    assert result.result == "60 m"
    assert result.context.termination_reason == "success"
    data = Conversation("How high?")
    again = await Executor(loop("60 m")).execute(data)
    assert again.context.data is data
    assert [message.text for message in data.messages] == ["How high?", "60 m"]


async def ends(diary: Diary, executor: Executor, run: ExecutionContext) -> TerminationReason:
    """Return how it ended; check that `after_execution` was called once, and last."""
    result = await executor.execute(run)
    assert [moment for moment in diary.moments if moment.startswith("after_execution")] == diary.moments[-1:]
    assert diary.results == [result]
    assert (result.termination_reason is TerminationReason.SUCCESS) == (result.error is None)
    return result.termination_reason


async def test_a_loop_that_is_never_done_ends_after_its_iterations() -> None:
    diary, run = Diary(), priced(data=Conversation("go"))
    executor = Executor(Turns(lambda context: None), hooks=[diary], max_iterations=3)
    assert await ends(diary, executor, run) == "max_iterations"
    assert isinstance(diary.results[0].error, MaxIterationsReached)
    assert run.iteration == 3


async def test_a_limit_ends_it() -> None:
    diary, run = Diary(), priced(Budget(max_steps=1), data=Conversation("go"))
    assert await ends(diary, Executor(loop(use("find", q="dam"), "60 m"), hooks=[diary]), run) == "limit_exceeded"
    assert isinstance(diary.results[0].error, BudgetExceededError)


async def test_an_error_ends_it() -> None:
    diary = Diary()
    assert (
        await ends(diary, Executor(loop(ValueError("no")), hooks=[diary]), priced(data=Conversation("go"))) == "error"
    )
    with pytest.raises(ValueError, match="no"):
        diary.results[0].unwrap()


async def test_an_error_in_the_result_of_a_loop_ends_it() -> None:
    failed = AgentLoopResult(LoopAction.TERMINATE, error=ValueError("no"))
    diary = Diary()
    executor = Executor(Turns(lambda context: failed), hooks=[diary])
    assert await ends(diary, executor, priced(data=Conversation("go"))) == "error"


async def test_a_cancel_of_the_run_ends_it_wherever_it_is() -> None:
    diary, run = Diary(), priced(data=Conversation("go"))

    async def wait(context: ExecutionContext) -> None:
        asyncio.get_running_loop().call_soon(run.abort, "enough")
        await asyncio.sleep(3_600)

    assert await ends(diary, Executor(Turns(wait), hooks=[diary]), run) == "context_canceled"
    assert isinstance(diary.results[0].error, CancelledError)
    assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_a_loop_that_makes_no_call_is_stopped_by_a_cancel_too() -> None:
    diary, run = Diary(), priced(data=Conversation("go"))

    def turn(context: ExecutionContext) -> None:
        if context.iteration == 2:
            run.abort("enough")

    assert await ends(diary, Executor(Turns(turn), hooks=[diary]), run) == "context_canceled"
    assert run.iteration == 2


async def test_a_cancel_of_the_task_calls_the_hooks_and_is_raised() -> None:
    diary, run = Diary(), priced(data=Conversation("go"))
    executor = Executor(ToolCallingLoop(ScriptedModel(["late"], latency_s=60)), hooks=[diary])
    task = asyncio.create_task(executor.execute(run))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert diary.moments[-1] == "after_execution context_canceled"


async def test_closing_the_coroutine_of_an_execution_calls_the_hooks_without_awaiting_them() -> None:
    reasons: list[str] = []

    class Plain:
        def after_execution(self, context: ExecutionContext, result: Any) -> None:
            reasons.append(str(result.termination_reason))

    run = priced(data=Conversation("go"))
    coroutine = Executor(Turns(lambda context: asyncio.sleep(1)), hooks=[Plain(), Diary()]).execute(run)
    coroutine.send(None)
    coroutine.close()
    assert reasons == ["context_canceled"]


BEFORE_THE_END = [
    "before_execution",
    "before_iteration",
    "after_iteration",
    "before_model_call",
    "after_model_call",
    "before_tool_call",
    "after_tool_call",
]


@pytest.mark.parametrize("moment", BEFORE_THE_END)
async def test_a_hook_may_abort_at_any_moment(moment: str) -> None:
    diary = Diary()
    hooks = [diary, type("Aborts", (), {moment: lambda self, *arguments: _raise(HookAbort("not today"))})()]
    executor = Executor(loop(use("find", q="dam"), "60 m"), hooks=hooks)
    assert await ends(diary, executor, priced(data=Conversation("go"))) == "hook_abort"
    assert str(diary.results[0].error) == "not today"


@pytest.mark.requirement("T-13")
@pytest.mark.parametrize("moment", BEFORE_THE_END)
async def test_a_hook_that_raises_anything_ends_it_and_its_error_is_kept(moment: str) -> None:
    diary = Diary()
    hooks = [diary, type("Fails", (), {moment: lambda self, *arguments: _raise(ValueError("no"))})()]
    executor = Executor(loop(use("find", q="dam"), "60 m"), hooks=hooks)
    assert await ends(diary, executor, priced(data=Conversation("go"))) == "hook_abort"
    assert isinstance(diary.results[0].error, ValueError)


def _raise(error: Exception) -> None:
    raise error


async def test_a_loop_cannot_swallow_an_abort() -> None:
    class Stubborn(ToolCallingLoop):
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            try:
                return await super().next(context)
            except Exception:
                return AgentLoopResult(LoopAction.CONTINUE)

    class Aborts(Hook):
        def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> None:
            raise HookAbort("not today")

    executor = Executor(Stubborn(ScriptedModel([])), hooks=[Aborts()])
    result = await executor.execute(priced(data=Conversation("go")))
    assert result.termination_reason == "hook_abort"


async def test_an_exception_in_after_execution_changes_nothing() -> None:
    class Fails(Hook):
        def after_execution(self, context: ExecutionContext, result: Any) -> None:
            raise ValueError("too late")

    diary, run = Diary(), priced(data=Conversation("go"))
    assert await ends(diary, Executor(loop("60 m"), hooks=[Fails(), diary]), run) == "success"
    assert [event.message for event in run.events if event.kind == "error"] == ["after_execution: too late"]


async def test_a_hook_may_change_requests_and_tool_calls() -> None:
    class Changes(Hook):
        def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> ModelRequest:
            return replace(request, messages=Transcript([Message.user("changed")]))

        async def after_model_call(
            self, context: ExecutionContext, request: ModelRequest, response: Any, error: Any
        ) -> ModelResponse | None:
            return ModelResponse("changed too") if response.text == "60 m" else None

        def before_tool_call(self, context: ExecutionContext, call: ToolCall) -> ToolCall:
            return replace(call, arguments={"q": "weir"})

        def after_tool_call(self, context: ExecutionContext, call: ToolCall, result: ToolResult) -> ToolResult:
            return replace(result, content=result.content.upper())

    prompts: list[str] = []

    def answer(request: ModelRequest) -> Any:
        prompts.append(" ".join(message.text for message in request.messages))
        return use("find", q="dam") if len(prompts) == 1 else "60 m"

    run = priced(data=Conversation("go"))
    result = await Executor(ToolCallingLoop(ScriptedModel(answer), [find]), hooks=[Changes()]).execute(run)
    assert result.result == "changed too"
    assert prompts == ["changed", "changed"]
    assert [message.text for message in run.data.messages] == ["go", "", "WEIR: 60 M", "changed too"]


async def test_a_hook_may_answer_for_a_tool() -> None:
    class Cached(Hook):
        def before_tool_call(self, context: ExecutionContext, call: ToolCall) -> ToolResult:
            return ToolResult(call.id, call.name, "cached")

    run = priced(data=Conversation("go"))
    await Executor(loop(use("find", q="dam"), "60 m"), hooks=[Cached()]).execute(run)
    assert run.stats.tool_call_count == 0
    assert run.data.messages[2].text == "cached"


async def test_calls_that_a_hook_makes_are_not_passed_to_hooks() -> None:
    class Judge(Hook):
        calls = 0

        async def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> None:
            self.calls += 1
            with context.spawn_child("judge") as child:
                await ScriptedModel(["fine"], usage=Usage(1, 1)).generate(child, [Message.user("fine?")])

    judge, run = Judge(), priced(data=Conversation("go"))
    assert (await Executor(loop("60 m"), hooks=[judge]).execute(run)).result == "60 m"
    assert judge.calls == 1
    assert [child.name for child in run.children] == ["judge"]


async def test_a_prompt_for_the_next_iteration_is_remembered() -> None:
    def turn(context: ExecutionContext) -> AgentLoopResult:
        if context.iteration == 1:
            return AgentLoopResult(LoopAction.CONTINUE, next_prompt="go on")
        return AgentLoopResult(LoopAction.TERMINATE, result=[m.text for m in context.data.messages])

    assert (await Executor(Turns(turn)).execute("go")).result == ["go", "go on"]


@pytest.mark.requirement("T-10")
async def test_deltas_have_the_path_of_their_context() -> None:
    deltas: list[Any] = []
    run = priced(data=Conversation("go"))
    await Executor(loop("60 m"), on_delta=deltas.append).execute(run)
    assert deltas == [TextDelta("60 m", "main")]


@pytest.mark.requirement("T-10")
async def test_an_answer_that_breaks_off_is_no_success_and_is_kept() -> None:
    model = ScriptedModel(["sixty metres"], piece_characters=6, breaks_off_after=1)
    run = priced(data=Conversation("go"))
    result = await Executor(ToolCallingLoop(model), on_delta=lambda delta: None).execute(run)
    assert isinstance(result.error, TruncatedResponse)
    assert (result.termination_reason, result.result, result.partial) == ("error", None, "sixty ")
    (iteration,) = run.data.iteration_history
    assert (iteration.messages[0].text, iteration.is_complete) == ("sixty ", False)


@pytest.mark.requirement("T-10")
async def test_what_had_come_is_kept_when_the_run_is_cancelled() -> None:
    run = priced(data=Conversation("go"))

    def stop(delta: Any) -> None:
        run.abort("enough")

    model = ScriptedModel(["sixty metres"], piece_characters=6)
    result = await Executor(ToolCallingLoop(model), on_delta=stop).execute(run)
    assert (result.termination_reason, result.partial) == ("context_canceled", "sixty ")


async def test_an_answer_that_the_budget_cut_is_no_success() -> None:
    run = priced(Budget(max_cost_dollars=0.001), data=Conversation("go"))
    cut = ModelResponse("sixty", usage=Usage(10, 20), finish_reason="length")
    result = await Executor(loop(cut)).execute(run)
    assert isinstance(result.error, BudgetExceededError)
    assert (result.termination_reason, result.result, result.partial) == ("limit_exceeded", None, "sixty")


async def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidValue, match="loop"):
        Executor(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="hook"):
        Executor(loop(), hooks=[object()])
    with pytest.raises(InvalidValue, match="max_iterations"):
        Executor(loop(), max_iterations=-1)
    result = await Executor(loop()).execute(ExecutionContext(data=object()))
    assert isinstance(result.error, InvalidValue)


async def test_a_timeout_of_the_run_is_a_limit() -> None:
    diary = Diary()
    run = ExecutionContext(
        ExecutionConfig(max_cost_usd=1, max_steps=9, max_retries_total=1, timeout_ms=10), data=Conversation("go")
    )
    executor = Executor(Turns(lambda context: asyncio.sleep(3_600)), hooks=[diary])
    assert await ends(diary, executor, run) == "limit_exceeded"
