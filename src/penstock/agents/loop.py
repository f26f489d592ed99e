"""The iterations of an agent, the conversation they build on, and the execution that is under way.

An `AgentLoop` does one iteration at a time; the executor decides whether there is another. A loop has no state of its
own: it is all in the `LoopData` of the context, so that one loop serves any number of executions at once. You can
implement both protocols yourself.

The execution under way has the hooks, the consumer of deltas and the approver of tool calls. It is carried in a context
variable, so that every model and every tool finds it, also inside a loop of your own. This module knows no models and
no tools; `hooks` has the methods that a hook may implement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from inspect import isawaitable
from typing import Any, Protocol, runtime_checkable

from penstock.agents.messages import ContentPart, Delta, Message, ToolCall, Transcript
from penstock.errors import Halted, InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import ErrorTrace


class LoopAction(StrEnum):
    """The next action of a loop."""

    CONTINUE = "continue"
    TERMINATE = "terminate"


@dataclass(frozen=True, slots=True)
class AgentLoopResult:
    """Result of one iteration."""

    action: LoopAction
    next_prompt: str = ""
    """A user message to add before the next iteration; for CONTINUE."""
    result: Any = None
    """Result of the loop; for TERMINATE."""
    error: BaseException | None = None
    """Why there is no result; for TERMINATE."""
    finish_reason: str | None = None
    """Why the result is incomplete, such as `length`; for TERMINATE."""


CONTINUE = AgentLoopResult(LoopAction.CONTINUE)


@dataclass(slots=True)
class ExecutorResult:
    """Result of an execution of a loop."""

    result: Any
    """Result of the loop; None if it has none."""
    context: ExecutionContext
    """Where it ran, with everything that happened."""
    error: BaseException | None
    """Why there is no result; None if there is one."""
    termination_reason: TerminationReason
    partial: str = ""
    """The received part of an answer that broke off."""
    finish_reason: str | None = None
    """Why the result is incomplete, such as `length` (maximum output tokens); None if it is complete."""

    def unwrap(self) -> Any:
        """Return the result, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.result


@dataclass(frozen=True, slots=True)
class Iteration:
    """The messages of one iteration."""

    messages: tuple[Message, ...]
    is_complete: bool = True
    """False if the iteration was interrupted; the messages are those before the interruption."""


@runtime_checkable
class LoopData(Protocol):
    """The state of a loop."""

    @property
    def original_input(self) -> Sequence[ContentPart]:
        """The input that started the loop."""

    @property
    def iteration_history(self) -> Sequence[Iteration]:
        """All iterations, including those that were compacted."""

    def add_iteration_history(self, iteration: Iteration) -> None:
        """Add an iteration to the full history only."""

    @property
    def iterations(self) -> Sequence[Iteration]:
        """The iterations that the next one builds on: those in use."""

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        """Replace the iterations in use."""


@runtime_checkable
class AgentLoop(Protocol):
    """One iteration at a time."""

    def next(self, context: ExecutionContext) -> Awaitable[AgentLoopResult]:
        """Do one iteration. An exception ends the execution, as an error in the result does."""


class Conversation:
    """The default LoopData. The cost of a turn depends on its additions, not on the length of the conversation."""

    __slots__ = ("_earlier", "_history", "_iterations", "_transcript", "original_input")

    def __init__(self, input: str | Sequence[ContentPart] = "", history: Sequence[Message] = ()) -> None:
        if isinstance(input, str):
            self.original_input: tuple[ContentPart, ...] = (input,) if input else ()
        else:
            self.original_input = tuple(input)
        self._earlier = tuple(history)
        """Messages of an earlier conversation that this one continues."""
        self._history: list[Iteration] = []
        self._iterations: list[Iteration] = []
        self._transcript = self._first_messages()

    def _first_messages(self) -> Transcript:
        transcript = Transcript(self._earlier)
        if self.original_input:
            only = self.original_input[0]
            content = only if len(self.original_input) == 1 and isinstance(only, str) else self.original_input
            transcript.append(Message("user", content))
        return transcript

    @property
    def iteration_history(self) -> Sequence[Iteration]:
        """All iterations, including those that were compacted."""
        return self._history

    @property
    def iterations(self) -> Sequence[Iteration]:
        """The iterations that the next one builds on: those in use."""
        return self._iterations

    @property
    def transcript(self) -> Transcript:
        """The messages sent to a model: the earlier conversation, the input, and the iterations in use."""
        return self._transcript

    @property
    def messages(self) -> list[Message]:
        """All messages, including those that were compacted."""
        return [*self._first_messages(), *(message for iteration in self._history for message in iteration.messages)]

    def add_iteration_history(self, iteration: Iteration) -> None:
        """Add an iteration to the full history only."""
        self._history.append(iteration)

    def set_iterations(self, iterations: Sequence[Iteration]) -> None:
        """Replace the iterations in use."""
        self._iterations = list(iterations)
        self._transcript = self._first_messages()
        for iteration in self._iterations:
            self._transcript.extend(iteration.messages)

    def add(self, iteration: Iteration) -> None:
        """Add an iteration to the history and to those in use."""
        self._history.append(iteration)
        self._iterations.append(iteration)
        self._transcript.extend(iteration.messages)


def data_of(context: ExecutionContext) -> LoopData:
    """The state of the context's loop."""
    data = context.data
    if not isinstance(data, Conversation) and not isinstance(data, LoopData):
        raise InvalidValue("data of the context", data, "LoopData, such as a Conversation")
    return data


def remember(data: LoopData, messages: Sequence[Message], is_complete: bool = True) -> None:
    """Add an iteration to the history and to those in use."""
    iteration = Iteration(tuple(messages), is_complete)
    if isinstance(data, Conversation):
        data.add(iteration)
    else:
        data.add_iteration_history(iteration)
        data.set_iterations([*data.iterations, iteration])


def transcript_of(data: LoopData) -> Transcript:
    """The messages sent to a model."""
    if isinstance(data, Conversation):
        return data.transcript
    transcript = Transcript([Message("user", tuple(data.original_input))] if data.original_input else ())
    for iteration in data.iterations:
        transcript.extend(iteration.messages)
    return transcript


Listeners = Mapping[str, tuple[Callable[..., Any], ...]]
"""The methods of hooks to call, by moment (`before_model_call`, …)."""

NO_LISTENERS: Listeners = {}


class HookAbort(PenstockError):
    """Raised by a hook to end the execution, with the reason."""

    termination_reason = TerminationReason.HOOK_ABORT

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Approval:
    """The decision on a tool call that needs approval: allow, deny, or allow with other arguments."""

    allowed: bool
    reason: str = ""
    arguments: Mapping[str, Any] | None = None

    @classmethod
    def allow(cls) -> Approval:
        """Run the call unchanged."""
        return cls(True)

    @classmethod
    def deny(cls, reason: str = "denied") -> Approval:
        """Do not run the call; the reason is returned to the model."""
        return cls(False, reason)

    @classmethod
    def edit(cls, arguments: Mapping[str, Any]) -> Approval:
        """Run the call with these arguments instead."""
        return cls(True, arguments=arguments)


Approve = Callable[[ExecutionContext, ToolCall], Awaitable[Approval]]
OnDelta = Callable[[Delta], None]


class Execution:
    """State of one execution: its listeners, the consumer of deltas, the approver."""

    __slots__ = ("abort", "approve", "listeners", "on_delta", "partial")

    def __init__(
        self,
        listeners: Listeners = NO_LISTENERS,
        on_delta: OnDelta | None = None,
        approve: Approve | None = None,
    ) -> None:
        self.listeners = listeners
        self.on_delta = on_delta
        self.approve = approve
        self.abort: Exception | None = None
        """The error that a hook raised; it ends the execution even if the loop catches it."""
        self.partial = ""
        """The received part of a streamed answer that broke off."""

    async def fire(self, moment: str, context: ExecutionContext, *arguments: Any) -> Any:
        """Call the listeners in order, and return the last value that is not None.

        A value that a listener returns replaces the argument of its type for the listeners after it.
        """
        methods = self.listeners.get(moment)
        if methods is None:
            return None
        answer: Any = None
        # Hooks do not observe the calls that hooks make.
        outside = running_execution.set(Execution(NO_LISTENERS, self.on_delta, self.approve))
        try:
            for method in methods:
                returned = method(context, *arguments)
                if isawaitable(returned):
                    returned = await returned
                if returned is not None:
                    answer = returned
                    arguments = _replaced(arguments, returned)
        except Halted:
            raise  # a limit that the hook's own call ran into stops the execution as that limit
        except Exception as error:
            self.abort = error
            raise
        finally:
            with suppress(ValueError):  # closed from another context, where there is nothing to reset
                running_execution.reset(outside)
        return answer

    def emit(self, context: ExecutionContext, delta: Delta) -> None:
        """Pass a delta to its consumer, which is dropped if it raises: it cannot break the answer it observes."""
        if self.on_delta is None:
            return
        try:
            self.on_delta(delta)
        except Exception as error:
            self.on_delta = None
            context.record_event(ErrorTrace(error_class=type(error).__name__, message=f"on_delta: {error}"[:500]))


def _replaced(arguments: tuple[Any, ...], returned: Any) -> tuple[Any, ...]:
    """The arguments, with the returned value in place of those of its type."""
    return tuple(returned if type(returned) is type(argument) else argument for argument in arguments)


running_execution: ContextVar[Execution | None] = ContextVar("penstock_execution", default=None)
"""The innermost execution under way in this task."""
