"""Running a loop to its end.

The executor begins and ends iterations, calls hooks, counts, and reports how the execution ended. It knows nothing of
models and tools: those find its hooks, deltas and approvals in the context variable. However an execution ends, by an
answer, an error, a limit, or a cancel of the run or of the task, `after_execution` is called once, and last.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Sequence
from contextlib import suppress
from inspect import isawaitable, iscoroutine
from typing import Any

from penstock import checks
from penstock.agents.hooks import listeners_of
from penstock.agents.loop import (
    NO_LISTENERS,
    AgentLoop,
    AgentLoopResult,
    Approve,
    Conversation,
    Execution,
    ExecutorResult,
    HookAbort,
    LoopAction,
    LoopData,
    OnDelta,
    data_of,
    remember,
    running_execution,
)
from penstock.agents.messages import ContentPart, Message
from penstock.agents.tools import render_value
from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, InvalidValue, PenstockError
from penstock.runtime.cancellation import drain_cancel, translate_cancel
from penstock.runtime.context import ExecutionContext, Outcome, reason_for
from penstock.runtime.durable.keys import current_scope
from penstock.runtime.settlement import error_text
from penstock.stops import TerminationReason
from penstock.tracing.events import ErrorTrace

MAX_ITERATIONS = 50
YIELD_EVERY = 32
"""Number of iterations after which the event loop runs other tasks, even if the agent's loop never waits."""

CONTINUED, TERMINATED = LoopAction.CONTINUE, LoopAction.TERMINATE
NOTHING = AgentLoopResult(TERMINATED)


class MaxIterationsReached(PenstockError):
    """A loop was not done after its maximum number of iterations."""

    termination_reason = TerminationReason.MAX_ITERATIONS

    def __init__(self, max_iterations: int) -> None:
        self.max_iterations = max_iterations
        super().__init__(f"not done after {max_iterations} iterations, the maximum (max_iterations)")


class Executor:
    """Runs a loop until it is done, stopped, or has used up its iterations."""

    def __init__(
        self,
        loop: AgentLoop,
        *,
        hooks: Sequence[object] = (),
        max_iterations: int = MAX_ITERATIONS,
        on_delta: OnDelta | None = None,
        approve: Approve | None = None,
    ) -> None:
        if not callable(getattr(loop, "next", None)):
            raise InvalidValue("loop", loop, "an AgentLoop: an object with next(context)")
        checks.integer("max_iterations", max_iterations)
        self.loop = loop
        self.max_iterations = max_iterations
        self.on_delta = on_delta
        """Consumer of the pieces of answers, nested agents' included; None uses that of the enclosing execution."""
        self.approve = approve
        """Decides on tool calls that need approval; None uses that of the enclosing execution."""
        self._listeners = listeners_of(hooks) if hooks else NO_LISTENERS

    async def execute(self, given: ExecutionContext | LoopData | str | Sequence[ContentPart]) -> ExecutorResult:
        """Run the loop in a context, or on data or an input in a new run.

        Limits, errors, aborts and cancels of the run are in the result. Only a cancel of the task is raised, after the
        hooks were called.
        """
        if isinstance(given, ExecutionContext):
            if given.data is None:
                given.data = Conversation(as_input(given.input))
            return await self._execute(given)
        data = Conversation(given) if isinstance(given, str | Sequence) else given
        context = ExecutionContext(data=data)
        try:
            result = await self._execute(context)
        except BaseException as error:
            context.end(error)
            raise
        context.end(result.error)
        return result

    async def _execute(self, context: ExecutionContext) -> ExecutorResult:
        enclosing = running_execution.get()
        context._origin._outcome = None
        execution = Execution(self._listeners, self.on_delta, self.approve)
        if enclosing is not None:
            execution.on_delta = execution.on_delta or enclosing.on_delta
            execution.approve = execution.approve or enclosing.approve
        task, token = current_task(), context._token
        assert task is not None
        requested, outside = task.cancelling(), running_execution.set(execution)
        # A cancel reaches the loop's own code and the hooks too, not only the calls they make.
        watching = token.watch(task)
        ended, failed = NOTHING, None
        around = None if context._run.journal is None else current_scope.set(current_scope.get())
        try:
            ended = await self._iterate(context, execution)
        except BaseException as error:
            failed = translate_cancel(token, task, error, requested)
        finally:
            with suppress(ValueError):  # closed from another context, where there is nothing to reset
                running_execution.reset(outside)
                if around is not None:
                    current_scope.reset(around)
        if watching and token.unwatch(task) is not None:
            await drain_cancel(task, requested)
        if execution.abort is not None and isinstance(failed, Exception):
            failed = execution.abort  # even if the loop has caught and replaced it
        partial = execution.partial or getattr(failed, "partial", "")
        reason = _reason(context, execution, failed)
        partial = partial if isinstance(partial, str) else ""
        result = ExecutorResult(ended.result, context, failed, reason, partial, ended.finish_reason)
        context._origin._outcome = Outcome(ended.result, failed, reason)
        await self._fire_after_execution(context, result)
        if failed is not None and not isinstance(failed, Exception | CancelledError):
            raise failed
        return result

    async def _iterate(self, context: ExecutionContext, execution: Execution) -> AgentLoopResult:
        data, loop, hooked, token = data_of(context), self.loop, self._listeners, context._token
        journal = context._run.journal
        place = None if journal is None else journal.scope().next("agent", context._source.name.partition("#")[0])
        if hooked:
            await execution.fire("before_execution", context)
        for turn in range(self.max_iterations):
            if turn % YIELD_EVERY == YIELD_EVERY - 1:
                await asyncio.sleep(
                    0
                )  # a cancel of the task needs a wait, and a scripted model and its tools may have none
            if token.cancellation is not None or token.deadline_ns < UNLIMITED:
                context.check_cancelled()
            context.start_iteration()
            if place is not None:
                current_scope.set(place.child("turn", turn + 1))
            action = TERMINATED
            try:
                if hooked:
                    await execution.fire("before_iteration", context)
                result = await loop.next(context)
                action = result.action
            finally:
                context.end_iteration(action)
            if hooked:
                await execution.fire("after_iteration", context, result)
            if execution.abort is not None:
                raise execution.abort
            if action is not CONTINUED:
                if result.error is not None:
                    raise result.error
                return result
            if result.next_prompt:
                remember(data, [Message.user(result.next_prompt)])
        raise MaxIterationsReached(self.max_iterations)

    async def _fire_after_execution(self, context: ExecutionContext, result: ExecutorResult) -> None:
        """Call every listener, whatever the others raise: the execution is over, and no hook changes its result."""
        for method in self._listeners.get("after_execution", ()):
            outside = running_execution.set(Execution())
            try:
                returned = method(context, result)
                if isinstance(result.error, GeneratorExit):
                    # The coroutine is being closed, and nothing can be awaited any more.
                    if iscoroutine(returned):
                        returned.close()
                elif isawaitable(returned):
                    await returned
            except Exception as error:
                message = f"after_execution: {error_text(error)}"
                with suppress(PenstockError):  # the run may have ended
                    context.record_event(ErrorTrace(error_class=type(error).__name__, message=message))
            finally:
                with suppress(ValueError):
                    running_execution.reset(outside)


def _reason(context: ExecutionContext, execution: Execution, error: BaseException | None) -> TerminationReason:
    if error is None:
        return TerminationReason.SUCCESS
    if error is execution.abort:
        return TerminationReason.HOOK_ABORT
    if isinstance(error, HookAbort | MaxIterationsReached):
        return error.termination_reason
    if isinstance(error, asyncio.CancelledError) and context.cancellation.cancellation is None:
        return TerminationReason.CONTEXT_CANCELED
    return reason_for(context, error)


def as_input(given: Any) -> str | Sequence[ContentPart]:
    """The input of a context as a prompt."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list | tuple) and all(isinstance(part, str) or hasattr(part, "media_type") for part in given):
        return given
    return render_value(given)
