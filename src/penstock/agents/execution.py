"""The execution that is under way: its hooks, the consumer of its deltas, and who approves its tool calls.

It is carried in a context variable, so that every model and every tool finds it, also inside a loop of your own. Knows
neither loops nor models; `hooks` has what a hook may implement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from penstock.agents.messages import Delta, ToolCall
from penstock.errors import Halted, PenstockError
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import ErrorTrace

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
        """What a hook raised; it ends the execution even if the loop catches it."""
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
