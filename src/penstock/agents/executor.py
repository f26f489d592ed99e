"""Running a loop to its end.

The executor begins and ends iterations, tells hooks, counts, and says how it all ended. It knows nothing of models and
tools: those find what they need of it (hooks, deltas, approval) by themselves. However an execution ends, by an answer,
an error, a limit, a cancel of the run or of the task, those who listen to `after_execution` are told once, and last.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import isawaitable, iscoroutine
from typing import Any

from penstock.agents.hooks import Approve, Execution, HookAbort, OnDelta, listeners_of, running_execution
from penstock.agents.loop import AgentLoop, AgentLoopResult, Conversation, LoopAction, LoopData, data_of, remember
from penstock.agents.messages import ContentPart, Message
from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, InvalidValue, PenstockError
from penstock.runtime.cancellation import absorb, taken_back
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.keys import here
from penstock.runtime.ending import reason_for
from penstock.runtime.options import must_be_at_least
from penstock.runtime.settlement import told_by
from penstock.stops import TerminationReason
from penstock.tracing.events import ErrorTrace

MAX_ITERATIONS = 50
YIELDS_EVERY = 32
"""After so many iterations others get their turn on the event loop, whether or not the loop waits for anything."""

CONTINUED, TERMINATED = LoopAction.CONTINUE, LoopAction.TERMINATE
NOTHING = AgentLoopResult(TERMINATED)


class MaxIterationsReached(PenstockError):
    """A loop was not done after as many iterations as it may take."""

    termination_reason = TerminationReason.MAX_ITERATIONS

    def __init__(self, max_iterations: int) -> None:
        self.max_iterations = max_iterations
        super().__init__(f"not done after {max_iterations} iterations, which is all it may take")


@dataclass(slots=True)
class ExecutorResult:
    """What came of an execution."""

    result: Any
    """What the loop was for; None if it did not come to that."""
    context: ExecutionContext
    """Where it ran, with everything that happened."""
    error: BaseException | None
    """What kept it from having a result."""
    termination_reason: TerminationReason
    partial: str = ""
    """What had come of an answer that broke off."""
    finish_reason: str | None = None
    """Why the result is not whole, such as `length`: the answer came to what it may have at most; None if it is."""

    def unwrap(self) -> Any:
        """The result; or raise what kept it from having one."""
        if self.error is not None:
            raise self.error
        return self.result


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
        must_be_at_least(0, "max_iterations", max_iterations)
        self.loop = loop
        self.max_iterations = max_iterations
        self.on_delta = on_delta
        """Who is told the pieces of answers as they come, nested agents' included; None is who is told above it."""
        self.approve = approve
        """Who is asked about tool calls that need approval; None is who is asked above it."""
        self._listeners = listeners_of(hooks)

    async def execute(self, given: ExecutionContext | LoopData | str | Sequence[ContentPart]) -> ExecutorResult:
        """Run the loop in a context, or on data or an input as a run of its own.

        Nothing that happens inside is raised: limits, errors, aborts and cancels of the run are in the result. What is
        raised is the cancel of the task, after everybody was told.
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
        above = running_execution.get()
        execution = Execution(self._listeners, self.on_delta, self.approve)
        if above is not None:
            execution.on_delta = execution.on_delta or above.on_delta
            execution.approve = execution.approve or above.approve
        task, token = current_task(), context._token
        assert task is not None
        requested, outside = task.cancelling(), running_execution.set(execution)
        # A cancel reaches the loop's own code and the hooks too, not only the calls they make.
        watching = token.watch(task)
        ended, failed = NOTHING, None
        around = None if context._run.journal is None else here.set(here.get())
        try:
            ended = await self._iterate(context, execution)
        except BaseException as error:
            failed = taken_back(token, task, error, requested)
        finally:
            with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
                running_execution.reset(outside)
                if around is not None:
                    here.reset(around)
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)
        partial = execution.partial or getattr(failed, "partial", "")
        reason = _reason(context, failed)
        partial = partial if isinstance(partial, str) else ""
        result = ExecutorResult(ended.result, context, failed, reason, partial, ended.finish_reason)
        await self._tell_after(context, execution, result)
        if failed is not None and not isinstance(failed, Exception | CancelledError):
            raise failed
        return result

    async def _iterate(self, context: ExecutionContext, execution: Execution) -> AgentLoopResult:
        data, loop, hooked, token = data_of(context), self.loop, self._listeners, context._token
        journal = context._run.journal
        place = None if journal is None else journal.here().next("agent", context._source.name.partition("#")[0])
        if hooked:
            await execution.fire("before_execution", context)
        for turn in range(self.max_iterations):
            if turn % YIELDS_EVERY == YIELDS_EVERY - 1:
                await asyncio.sleep(0)  # a model and tools that never wait would let no cancel of the task through
            if token.cancellation is not None or token.deadline_ns < UNLIMITED:
                context.check_cancelled()
            context.start_iteration()
            if place is not None:
                here.set(place.mark("turn", turn + 1))
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

    async def _tell_after(self, context: ExecutionContext, execution: Execution, result: ExecutorResult) -> None:
        """Tell every one of them, whatever the others do: the execution is over, and nothing changes that."""
        for method in self._listeners.get("after_execution", ()):
            outside = running_execution.set(Execution())
            try:
                said = method(context, result)
                if isinstance(result.error, GeneratorExit):
                    # The coroutine is being closed, and nothing can be awaited any more.
                    if iscoroutine(said):
                        said.close()
                elif isawaitable(said):
                    await said
            except Exception as error:
                told = f"after_execution: {told_by(error)}"
                with suppress(PenstockError):  # the run may have ended
                    context.record_event(ErrorTrace(error_class=type(error).__name__, message=told))
            finally:
                with suppress(ValueError):
                    running_execution.reset(outside)


def _reason(context: ExecutionContext, error: BaseException | None) -> TerminationReason:
    if error is None:
        return TerminationReason.SUCCESS
    if isinstance(error, HookAbort | MaxIterationsReached):
        return error.termination_reason
    if isinstance(error, asyncio.CancelledError) and context.cancellation.cancellation is None:
        return TerminationReason.CONTEXT_CANCELED
    return reason_for(context, error)


def as_input(given: Any) -> str | Sequence[ContentPart]:
    """What a context was given, as what somebody asks."""
    if given is None:
        return ""
    if isinstance(given, str):
        return given
    if isinstance(given, list | tuple) and all(isinstance(part, str) or hasattr(part, "media_type") for part in given):
        return given
    from penstock.agents.tools import shown

    return shown(given)
