"""Hooks with `fire`, hooks that raise, and what a context knows of the execution in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from penstock import (
    AfterExecutionEvent,
    AfterIterationEvent,
    Agent,
    AgentLoopResult,
    BeforeExecutionEvent,
    BeforeIterationEvent,
    Budget,
    BudgetExceededError,
    CancelledError,
    ChildCompleteTrace,
    ExecutionContext,
    Executor,
    Hook,
    HookEvent,
    InvalidValue,
    IterationEndTrace,
    LoopAction,
    tool,
)
from penstock.agents import HookAbort, MaxIterationsReached, ScriptedModel, ToolCallingLoop
from penstock.agents.loop import Conversation
from penstock.events import RunCompleted
from penstock.testing import ManualClock
from tests.agents.scripts import Diary, use

pytestmark = pytest.mark.requirement("T-13")


@tool
async def find(q: str) -> str:
    """Look something up."""
    return f"{q}: 60 m"


class Fires:
    """A hook that keeps every event it is given."""

    def __init__(self, act: Callable[[ExecutionContext, HookEvent], Any] = lambda context, event: None) -> None:
        self.events: list[HookEvent] = []
        self._act = act

    def fire(self, context: ExecutionContext, event: HookEvent) -> Any:
        self.events.append(event)
        return self._act(context, event)


class AsyncFires(Fires):
    async def fire(self, context: ExecutionContext, event: HookEvent) -> Any:
        await asyncio.sleep(0)
        return super().fire(context, event)


def searching() -> ToolCallingLoop:
    return ToolCallingLoop(ScriptedModel([use("find", q="dam"), "60 m"]), [find])


def raising(error: BaseException, on: type[HookEvent]) -> Callable[[ExecutionContext, HookEvent], None]:
    def act(context: ExecutionContext, event: HookEvent) -> None:
        if isinstance(event, on):
            raise error

    return act


# fire().


@pytest.mark.parametrize("kind", [Fires, AsyncFires])
async def test_fire_is_given_the_four_events_in_their_order(kind: type[Fires]) -> None:
    hook = kind()
    result = await Executor(searching(), hooks=[hook]).execute("go")
    assert [type(event) for event in hook.events] == [
        BeforeExecutionEvent,
        BeforeIterationEvent,
        AfterIterationEvent,
        BeforeIterationEvent,
        AfterIterationEvent,
        AfterExecutionEvent,
    ]
    assert [event.iteration for event in hook.events[1:5]] == [1, 1, 2, 2]  # type: ignore[attr-defined]
    assert all(isinstance(event, HookEvent) for event in hook.events)
    last = hook.events[-1]
    assert last == AfterExecutionEvent(result.result, result.termination_reason, None)


async def test_after_iteration_event_has_result_and_duration_of_its_iteration() -> None:
    clock = ManualClock()

    class Takes:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            clock.advance(0.25)
            return AgentLoopResult(LoopAction.TERMINATE, result="done")

    slow = Fires(lambda context, event: clock.advance(5.0) if isinstance(event, AfterIterationEvent) else None)
    hook = Fires()
    with ExecutionContext(data=Conversation("go"), clock=clock) as run:
        await Executor(Takes(), hooks=[slow, hook]).execute(run.with_input("go"))
    (after,) = [event for event in hook.events if isinstance(event, AfterIterationEvent)]
    (ended,) = [event for event in run.events if isinstance(event, IterationEndTrace)]
    assert after.duration_ms == ended.duration_ms == 250.0
    assert after.result.result == "done"


async def test_hooks_of_both_forms_are_called_in_the_order_of_the_list() -> None:
    calls: list[str] = []

    class Method(Hook):
        def before_iteration(self, context: ExecutionContext) -> None:
            calls.append("method")

    def fired(context: ExecutionContext, event: HookEvent) -> None:
        if isinstance(event, BeforeIterationEvent):
            calls.append("fire")

    loop = ToolCallingLoop(ScriptedModel(["60 m", "60 m"]))
    await Executor(loop, hooks=[Fires(fired), Method()]).execute("go")
    await Executor(loop, hooks=[Method(), Fires(fired)]).execute("go")
    assert calls == ["fire", "method", "method", "fire"]


async def test_hook_with_fire_may_have_the_methods_of_model_and_tool_calls() -> None:
    class Both(Hook):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def fire(self, context: ExecutionContext, event: HookEvent) -> None:
            self.calls.append(type(event).__name__)

        def before_model_call(self, context: ExecutionContext, request: Any) -> None:
            self.calls.append("before_model_call")

    hook = Both()
    await Executor(ToolCallingLoop(ScriptedModel(["60 m"])), hooks=[hook]).execute("go")
    assert hook.calls[:4] == [
        "BeforeExecutionEvent",
        "BeforeIterationEvent",
        "before_model_call",
        "AfterIterationEvent",
    ]


def test_hook_with_fire_and_a_method_for_the_same_moment_is_refused() -> None:
    class Twice:
        def fire(self, context: ExecutionContext, event: HookEvent) -> None: ...

        def before_iteration(self, context: ExecutionContext) -> None: ...

    with pytest.raises(InvalidValue, match="with fire or with before_iteration, not with both"):
        Executor(searching(), hooks=[Twice()])


@pytest.mark.parametrize("hook", [object(), type("NotCallable", (), {"fire": 1})()])
def test_object_without_fire_or_a_method_is_refused(hook: object) -> None:
    with pytest.raises(InvalidValue, match="an object with fire, or with one of the methods before_execution"):
        Executor(searching(), hooks=[hook])


async def test_fire_may_spawn_a_child_context() -> None:
    def spawn(context: ExecutionContext, event: HookEvent) -> None:
        if isinstance(event, BeforeIterationEvent):
            with context.spawn_child("audit") as child:
                child.tool(lambda: None, name="note")

    with ExecutionContext() as run:
        await Executor(searching(), hooks=[Fires(spawn)]).execute(run)
    assert [child.name for child in run.children] == ["audit", "audit"]


# Hooks that raise.


@pytest.mark.parametrize("moment", [BeforeExecutionEvent, BeforeIterationEvent, AfterIterationEvent])
@pytest.mark.parametrize("error", [ValueError("no"), HookAbort("not today")], ids=type)
async def test_error_of_fire_ends_the_execution_and_is_kept(moment: type[HookEvent], error: Exception) -> None:
    hook, diary = Fires(raising(error, moment)), Diary()
    result = await Executor(searching(), hooks=[diary, hook]).execute("go")
    assert (result.termination_reason, result.error) == ("hook_abort", error)
    assert result.context.termination_reason == "hook_abort"
    assert diary.moments[-1] == "after_execution hook_abort"
    assert hook.events[-1] == AfterExecutionEvent(None, result.termination_reason, error)
    (ended,) = [event for event in result.context.history() if isinstance(event, RunCompleted)]
    assert (ended.termination_reason, ended.error) == ("hook_abort", type(error).__name__)


async def test_loop_cannot_replace_the_error_of_a_hook() -> None:
    class Wraps(ToolCallingLoop):
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            try:
                return await super().next(context)
            except Exception as error:
                raise RuntimeError("something went wrong") from error

    class Fails(Hook):
        def before_model_call(self, context: ExecutionContext, request: Any) -> None:
            raise ValueError("no")

    result = await Executor(Wraps(ScriptedModel(["60 m"])), hooks=[Fails()]).execute("go")
    assert result.termination_reason == "hook_abort"
    assert isinstance(result.error, ValueError)


async def test_limit_that_a_hook_runs_into_ends_the_execution_as_that_limit() -> None:
    def spend(context: ExecutionContext, event: HookEvent) -> None:
        if isinstance(event, BeforeIterationEvent):
            context.tool(lambda: None, name="audit")

    with ExecutionContext(budget=Budget(max_steps=0)) as run:
        result = await Executor(searching(), hooks=[Fires(spend)]).execute(run)
    assert (result.termination_reason, type(result.error)) == ("limit_exceeded", BudgetExceededError)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=type)
async def test_interrupt_in_a_hook_is_raised(error: BaseException) -> None:
    diary = Diary()
    with pytest.raises(type(error)):
        await Executor(searching(), hooks=[Fires(raising(error, BeforeIterationEvent)), diary]).execute("go")
    assert diary.moments[-1] == "after_execution context_canceled"


async def test_cancel_in_a_hook_is_not_an_abort() -> None:
    hook = Fires(raising(asyncio.CancelledError(), BeforeIterationEvent))
    task = asyncio.create_task(Executor(searching(), hooks=[hook]).execute("go"))
    with pytest.raises(asyncio.CancelledError):
        (await task).unwrap()
    assert hook.events[-1].termination_reason == "context_canceled"  # type: ignore[attr-defined]


async def test_cancel_of_the_run_in_a_hook_is_not_an_abort() -> None:
    def cancel(context: ExecutionContext, event: HookEvent) -> None:
        if isinstance(event, BeforeIterationEvent):
            context.abort("enough")
            context.check_cancelled()

    result = await Executor(searching(), hooks=[Fires(cancel)]).execute("go")
    assert (result.termination_reason, type(result.error)) == ("context_canceled", CancelledError)


# The context.


async def test_context_knows_what_its_execution_came_to() -> None:
    seen: list[Any] = []

    def look(context: ExecutionContext, event: HookEvent) -> None:
        seen.append((context.final_result, context.error, context.termination_reason))

    with ExecutionContext() as run:
        assert (run.final_result, run.error, run.termination_reason) == (None, None, None)
        result = await Executor(searching(), hooks=[Fires(look)]).execute(run.with_input("go"))
        assert seen[:-1] == [(None, None, None)] * 5
        assert seen[-1] == ("60 m", None, "success")
        assert run.final_result == result.result == "60 m"
        assert result.context.final_result == "60 m"
    assert (run.final_result, run.error, run.termination_reason) == ("60 m", None, "success")


async def test_context_keeps_the_error_of_its_execution_and_ends_as_it_did() -> None:
    class Endless:
        async def next(self, context: ExecutionContext) -> AgentLoopResult:
            return AgentLoopResult(LoopAction.CONTINUE)

    with ExecutionContext() as run:
        child = run.spawn_child("compaction", Conversation("go"))
        result = await Executor(Endless(), max_iterations=2).execute(child)
        run.complete_child(child)
    assert isinstance(child.error, MaxIterationsReached)
    assert child.error is result.error
    assert (child.final_result, child.termination_reason) == (None, "max_iterations")
    (completed,) = [event for event in run.events if isinstance(event, ChildCompleteTrace)]
    assert completed.termination_reason == "max_iterations"
    assert (run.error, run.termination_reason) == (None, "success")


async def test_next_execution_in_a_context_replaces_the_outcome() -> None:
    failing = ToolCallingLoop(ScriptedModel([ValueError("down")]))
    with ExecutionContext() as run:
        await Executor(failing).execute(run)
        assert isinstance(run.error, ValueError)
        run.data = None
        await Executor(searching()).execute(run)
    assert (run.final_result, run.error, run.termination_reason) == ("60 m", None, "success")


async def test_context_cancelled_after_a_failed_execution_ends_cancelled() -> None:
    run = ExecutionContext()
    await Executor(ToolCallingLoop(ScriptedModel([ValueError("down")]))).execute(run)
    run.abort("enough")
    run.end()
    assert run.termination_reason == "context_canceled"


def test_context_keeps_the_error_it_was_left_with() -> None:
    error = ValueError("no")
    with pytest.raises(ValueError), ExecutionContext() as run, run.spawn_child("inner") as child:
        raise error
    assert child.error is run.error is error
    assert (child.termination_reason, run.termination_reason) == ("error", "error")
    run.end(RuntimeError("too late"))
    assert run.error is error


async def test_agent_result_and_its_context_agree() -> None:
    result = await Agent(ScriptedModel(["60 m"])).run("go")
    assert result.context.final_result == result.output == "60 m"
    assert result.context.end_time is not None


def test_context_knows_when_it_began_and_ended() -> None:
    clock = ManualClock()
    run = ExecutionContext(clock=clock)
    clock.advance(1.0)
    with run:
        with run.spawn_child("inner") as child:
            assert child.end_time is None
            clock.advance(2.0)
        clock.advance(4.0)
        assert run.end_time is None
    assert run.end_time is not None
    assert child.end_time is not None
    assert (run.start_time.tzinfo, isinstance(run.start_time, datetime)) == (UTC, True)
    assert child.start_time - run.start_time == timedelta(seconds=1)
    assert child.end_time - child.start_time == timedelta(seconds=2)
    assert run.end_time - run.start_time == timedelta(seconds=7)
    assert run.with_input("same place").end_time == run.end_time
