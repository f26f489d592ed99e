"""Who may look into an execution, and change it.

A hook is an object with some of the methods of `Hook`, sync or async. What is under way (`Execution`: the hooks, who is
told deltas, who approves) goes with the task in a context variable, so that every model and every tool finds it, also
inside a loop that somebody wrote. What a hook does itself is not told to hooks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from penstock.errors import InvalidValue, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import ErrorTrace

if TYPE_CHECKING:
    from penstock.agents.executor import ExecutorResult
    from penstock.agents.loop import AgentLoopResult
    from penstock.agents.messages import ToolCall, ToolResult
    from penstock.agents.model import Delta, ModelRequest, ModelResponse


class HookAbort(PenstockError):
    """Raised by a hook to end the execution; says why."""

    termination_reason = TerminationReason.HOOK_ABORT

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class Hook:
    """What may be told of an execution. Override what you need, as a plain or as an async method.

    Raise HookAbort to end the execution. A `before_…` of a model or tool call may change what it is given, or return
    something else in its place; None leaves it as it is.
    """

    def before_execution(self, context: ExecutionContext) -> Any:
        """The execution begins."""

    def after_execution(self, context: ExecutionContext, result: ExecutorResult) -> Any:
        """The execution is over, however it ended; told once."""

    def before_iteration(self, context: ExecutionContext) -> Any:
        """An iteration begins; `context.iteration` is its number."""

    def after_iteration(self, context: ExecutionContext, result: AgentLoopResult) -> Any:
        """An iteration came to its end."""

    def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> Any:
        """A model is about to be asked; a ModelRequest that is returned is sent instead."""

    def after_model_call(
        self,
        context: ExecutionContext,
        request: ModelRequest,
        response: ModelResponse | None,
        error: BaseException | None,
    ) -> Any:
        """A model has answered, or failed; a ModelResponse that is returned counts instead."""

    def before_tool_call(self, context: ExecutionContext, call: ToolCall) -> Any:
        """A tool is about to run; a ToolCall that is returned runs instead, a ToolResult stands for the call."""

    def after_tool_call(self, context: ExecutionContext, call: ToolCall, result: ToolResult) -> Any:
        """A tool has run; a ToolResult that is returned is told to the model instead."""


MOMENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))
Listeners = Mapping[str, tuple[Callable[..., Any], ...]]


def listeners_of(hooks: Sequence[object]) -> Listeners:
    """The methods to call, by their moment; moments that nobody listens to have none."""
    listeners: dict[str, tuple[Callable[..., Any], ...]] = {}
    for hook in hooks:
        moments = [moment for moment in MOMENTS if hasattr(hook, moment)]
        if not moments:
            raise InvalidValue("hook", hook, f"an object with one of the methods {', '.join(MOMENTS)}")
        for moment in moments:
            if getattr(type(hook), moment, None) is not getattr(Hook, moment):
                listeners[moment] = (*listeners.get(moment, ()), getattr(hook, moment))
    return listeners


NOBODY: Listeners = {}


@dataclass(frozen=True, slots=True)
class Approval:
    """What somebody says to a tool call that needs approval: allow, deny, or allow with other arguments."""

    allowed: bool
    reason: str = ""
    arguments: Mapping[str, Any] | None = None

    @classmethod
    def allow(cls) -> Approval:
        """It may run as it is."""
        return cls(True)

    @classmethod
    def deny(cls, reason: str = "denied") -> Approval:
        """It may not run; the model is told why."""
        return cls(False, reason)

    @classmethod
    def edit(cls, arguments: Mapping[str, Any]) -> Approval:
        """It may run with these arguments instead."""
        return cls(True, arguments=arguments)


Approve = Callable[[ExecutionContext, "ToolCall"], Awaitable[Approval]]
OnDelta = Callable[["Delta"], None]


class Execution:
    """An execution under way: who listens, who is told deltas, who approves."""

    __slots__ = ("abort", "approve", "listeners", "on_delta", "partial")

    def __init__(
        self,
        listeners: Listeners = NOBODY,
        on_delta: OnDelta | None = None,
        approve: Approve | None = None,
    ) -> None:
        self.listeners = listeners
        self.on_delta = on_delta
        self.approve = approve
        self.abort: HookAbort | None = None
        """Set once a hook wants it to end, whatever a loop does about the exception."""
        self.partial = ""
        """What had come of a streamed answer that broke off."""

    async def fire(self, moment: str, context: ExecutionContext, *told: Any) -> Any:
        """Tell those who listen, one after the other; what one returns takes the place of what was last told first."""
        methods = self.listeners.get(moment)
        if methods is None:
            return None
        answer: Any = None
        outside = running_execution.set(Execution(NOBODY, self.on_delta, self.approve))
        try:
            for method in methods:
                said = method(context, *told)
                if isawaitable(said):
                    said = await said
                if said is not None:
                    answer = said
                    told = _replaced(told, said)
        except HookAbort as abort:
            self.abort = abort
            raise
        finally:
            with suppress(ValueError):  # closed from elsewhere, where there is nothing to reset
                running_execution.reset(outside)
        return answer

    def tell(self, context: ExecutionContext, delta: Delta) -> None:
        """Hand a delta on. Who raises is told no more: watching an answer cannot break it."""
        if self.on_delta is None:
            return
        try:
            self.on_delta(delta)
        except Exception as error:
            self.on_delta = None
            context.record_event(ErrorTrace(error_class=type(error).__name__, message=f"on_delta: {error}"[:500]))


def _replaced(told: tuple[Any, ...], said: Any) -> tuple[Any, ...]:
    """What the next hook is told: with what this one returned in place of what it is of the same kind as."""
    return tuple(said if type(said) is type(one) else one for one in told)


running_execution: ContextVar[Execution | None] = ContextVar("penstock_execution", default=None)
"""The execution that is under way here."""
