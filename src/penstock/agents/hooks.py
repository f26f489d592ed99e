"""Hooks: observe an execution, and change it.

A hook is an object with some of the methods of `Hook`, or with `fire(context, event)` for the beginning and the end of
the execution and of each iteration; each may be sync or async. Internally, `fire` is adapted to four of the methods, so
that there is one way to call hooks. Calls that a hook makes itself are not passed to hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.agents.loop import AgentLoopResult, ExecutorResult, Listeners
from penstock.agents.messages import ToolCall, ToolResult
from penstock.agents.model import ModelRequest, ModelResponse
from penstock.errors import InvalidValue
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason


class Hook:
    """Methods called during an execution. Override those you need, as plain or async methods.

    Raise HookAbort to end the execution; any other exception ends it as well, with the same reason. A `before_…` of a
    model or tool call may change its argument, or return a replacement; None leaves it unchanged.
    """

    def before_execution(self, context: ExecutionContext) -> Any:
        """Called when the execution begins."""

    def after_execution(self, context: ExecutionContext, result: ExecutorResult) -> Any:
        """Called once when the execution is over, however it ended."""

    def before_iteration(self, context: ExecutionContext) -> Any:
        """Called when an iteration begins; `context.iteration` is its number."""

    def after_iteration(self, context: ExecutionContext, result: AgentLoopResult) -> Any:
        """Called when an iteration has returned."""

    def before_model_call(self, context: ExecutionContext, request: ModelRequest) -> Any:
        """Called before a model request; a returned ModelRequest is sent instead."""

    def after_model_call(
        self,
        context: ExecutionContext,
        request: ModelRequest,
        response: ModelResponse | None,
        error: BaseException | None,
    ) -> Any:
        """Called when a model has answered, or failed; a returned ModelResponse replaces the response."""

    def before_tool_call(self, context: ExecutionContext, call: ToolCall) -> Any:
        """Called before a tool runs; a returned ToolCall runs instead, a returned ToolResult replaces the call."""

    def after_tool_call(self, context: ExecutionContext, call: ToolCall, result: ToolResult) -> Any:
        """Called when a tool has run; a returned ToolResult is sent to the model instead."""


@dataclass(frozen=True, slots=True)
class HookEvent:
    """Argument of a hook's `fire(context, event)`: one of the four classes below."""


@dataclass(frozen=True, slots=True)
class BeforeExecutionEvent(HookEvent):
    """The execution begins."""


@dataclass(frozen=True, slots=True)
class AfterExecutionEvent(HookEvent):
    """The execution is over, however it ended."""

    result: Any
    """Result of the loop; None if it has none."""
    termination_reason: TerminationReason
    error: BaseException | None
    """Why there is no result; None if there is one."""


@dataclass(frozen=True, slots=True)
class BeforeIterationEvent(HookEvent):
    """An iteration begins."""

    iteration: int
    """Its number, from 1."""


@dataclass(frozen=True, slots=True)
class AfterIterationEvent(HookEvent):
    """An iteration has returned."""

    iteration: int
    result: AgentLoopResult
    duration_ms: float
    """As in the IterationEndTrace of the iteration."""


Fire = Callable[[ExecutionContext, HookEvent], Any]


def _methods_for(fire: Fire) -> dict[str, Callable[..., Any]]:
    """The methods of a hook that has `fire` in their place."""

    def after_execution(context: ExecutionContext, ended: ExecutorResult) -> Any:
        return fire(context, AfterExecutionEvent(ended.result, ended.termination_reason, ended.error))

    def after_iteration(context: ExecutionContext, result: AgentLoopResult) -> Any:
        return fire(context, AfterIterationEvent(context.iteration, result, context._origin._iteration_ms))

    return {
        "before_execution": lambda context: fire(context, BeforeExecutionEvent()),
        "after_execution": after_execution,
        "before_iteration": lambda context: fire(context, BeforeIterationEvent(context.iteration)),
        "after_iteration": after_iteration,
    }


MOMENTS = tuple(name for name in vars(Hook) if name.startswith(("before_", "after_")))


def listeners_of(hooks: Sequence[object]) -> Listeners:
    """The methods to call, by moment; moments without a listener are left out."""
    listeners: dict[str, tuple[Callable[..., Any], ...]] = {}
    for hook in hooks:
        for moment, method in _methods_of(hook).items():
            listeners[moment] = (*listeners.get(moment, ()), method)
    return listeners


def _methods_of(hook: object) -> dict[str, Callable[..., Any]]:
    """A hook's own methods and its `fire`, by moment."""
    has = [moment for moment in MOMENTS if hasattr(hook, moment)]
    own = {name: getattr(hook, name) for name in has if getattr(type(hook), name, None) is not getattr(Hook, name)}
    fire = getattr(hook, "fire", None)
    if not callable(fire):
        if not has:
            raise InvalidValue("hook", hook, f"an object with fire, or with one of the methods {', '.join(MOMENTS)}")
        return own
    fired = _methods_for(fire)
    if twice := own.keys() & fired.keys():
        raise InvalidValue("hook", hook, f"an object with fire or with {', '.join(sorted(twice))}, not with both")
    return own | fired
