"""Who may object to a call.

A pipeline has five slots (`QUESTIONS`), each with any number of hooks. It asks them in order and makes one verdict of
what they say. It does not carry the verdict out, knows nothing of runs, and waits for nothing: hooks answer at once.

What holds, whatever a hook does: None and ALLOW are no opinion. An answer that lets the call go on (`GOES_ON`: DEGRADE,
and RETRY after an error) is kept, the first one, and given only if no later hook refuses. Any other answer refuses, at
once. A hook that raises or answers with anything else fails closed: the verdict is HALT. What is not an Exception, such
as a cancel or Ctrl-C, passes through.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from threading import Lock
from typing import Any, NoReturn, Protocol, runtime_checkable

from penstock import checks
from penstock.containment.safety import Decision, SafetyEvent, ToolCallContext
from penstock.errors import InvalidValue
from penstock.stops import StopReason

MAX_REASON = 500
"""Characters of a reason that are kept of a foreign text, such as an error message."""


class Slot(StrEnum):
    """The moments at which hooks are called, by the names `ShieldPipeline` takes them under."""

    PRE_DISPATCH = "pre_dispatch"
    TOOL_DISPATCH = "tool_dispatch"
    EGRESS = "egress"
    RETRY = "retry"
    BUDGET = "budget"


QUESTIONS: Mapping[Slot, tuple[str, tuple[str, ...]]] = {
    Slot.PRE_DISPATCH: ("before_llm_call", ("ctx",)),
    Slot.TOOL_DISPATCH: ("before_tool_call", ("ctx",)),
    Slot.EGRESS: ("before_egress", ("ctx", "url", "method")),
    Slot.RETRY: ("on_error", ("ctx", "err")),
    Slot.BUDGET: ("before_charge", ("ctx", "cost_usd")),
}
"""The method each slot asks, and what it is given."""

GOES_ON: Mapping[Slot, frozenset[Decision]] = {
    Slot.PRE_DISPATCH: frozenset({Decision.DEGRADE}),
    Slot.TOOL_DISPATCH: frozenset({Decision.DEGRADE}),
    Slot.EGRESS: frozenset({Decision.DEGRADE}),
    Slot.RETRY: frozenset({Decision.DEGRADE, Decision.RETRY}),
    Slot.BUDGET: frozenset({Decision.DEGRADE}),
}
"""The answers that do not refuse, so that a later hook still may."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a hook says of a call, with its reason; the pipeline fills in what the hook left out."""

    decision: Decision
    reason: str = ""
    hook: str = ""
    stop_reason: StopReason = StopReason.HOOK_DENIED
    model: str | None = None
    """The model to use instead, with DEGRADE; None leaves the degraded form to the caller."""
    error: Exception | None = None
    """What the hook raised, if that is why."""

    def __post_init__(self) -> None:
        checks.instance("decision", self.decision, Decision)
        checks.text("reason", self.reason)
        checks.text("hook", self.hook)
        checks.instance("stop_reason", self.stop_reason, StopReason)
        if self.model is not None:
            checks.text("model", self.model)

    @classmethod
    def deny(cls, reason: str, *, stop_reason: StopReason = StopReason.HOOK_DENIED) -> Verdict:
        """The call is not made."""
        return cls(Decision.HALT, reason, stop_reason=stop_reason)

    @classmethod
    def degrade(cls, *, model: str | None = None, reason: str = "") -> Verdict:
        """The call is made in its degraded form, or with `model`."""
        return cls(Decision.DEGRADE, reason, model=model)


Answer = Decision | Verdict | None
"""What a hook may return; None is no opinion."""


@runtime_checkable
class PreDispatchHook(Protocol):
    """Called before each model call."""

    def before_llm_call(self, ctx: ToolCallContext) -> Answer: ...


@runtime_checkable
class ToolDispatchHook(Protocol):
    """Called before each tool call."""

    def before_tool_call(self, ctx: ToolCallContext) -> Answer: ...


@runtime_checkable
class EgressHook(Protocol):
    """Called before anything is sent to `url`."""

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Answer: ...


@runtime_checkable
class RetryHook(Protocol):
    """Called after a call failed, to decide whether to try again."""

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Answer: ...


@runtime_checkable
class BudgetHook(Protocol):
    """Called before a cost is charged."""

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Answer: ...


class ShieldPipeline:
    """Hooks in five slots, one or a list each, and one verdict from all of a slot.

    A run asks with `judge`; the methods named like the hooks' are for direct use and return the bare decision. Either
    way the pipeline keeps an event of each verdict, the latest `max_events` of them. A direct call inside a run of the
    pipeline writes its event into the log of that run too.
    """

    def __init__(
        self,
        pre_dispatch: PreDispatchHook | Sequence[PreDispatchHook] | None = None,
        tool_dispatch: ToolDispatchHook | Sequence[ToolDispatchHook] | None = None,
        egress: EgressHook | Sequence[EgressHook] | None = None,
        retry: RetryHook | Sequence[RetryHook] | None = None,
        budget: BudgetHook | Sequence[BudgetHook] | None = None,
        *,
        max_events: int = 1000,
    ) -> None:
        self._seats: Mapping[Slot, tuple[_Seat, ...]] = {
            Slot.PRE_DISPATCH: _seats(Slot.PRE_DISPATCH, pre_dispatch),
            Slot.TOOL_DISPATCH: _seats(Slot.TOOL_DISPATCH, tool_dispatch),
            Slot.EGRESS: _seats(Slot.EGRESS, egress),
            Slot.RETRY: _seats(Slot.RETRY, retry),
            Slot.BUDGET: _seats(Slot.BUDGET, budget),
        }
        self._lock = Lock()
        self._events: deque[SafetyEvent] = deque(maxlen=checks.integer("max_events", max_events))
        self._dropped = 0
        self._log: Callable[[ShieldPipeline, SafetyEvent], None] | None = None
        """Writes the event of a direct call into the log of the run around it; set by the runs of the pipeline."""

    def has(self, slot: Slot) -> bool:
        """Whether there are hooks; if not, `judge` need not be called."""
        return bool(self._seats[slot])

    def judge(self, slot: Slot, ctx: ToolCallContext, *args: object) -> Verdict | None:
        """What the hooks of `slot` say together, with an event of it kept; None, and no event, if no hook objects."""
        verdict = self._ask(slot, ctx, args)
        if verdict is not None:
            self._record(_event(slot, ctx, verdict))
        return verdict

    def before_llm_call(self, ctx: ToolCallContext) -> Decision:
        """The decision on a model call; ALLOW if no hook objects."""
        return self._decide(Slot.PRE_DISPATCH, ctx)

    def before_tool_call(self, ctx: ToolCallContext) -> Decision:
        """The decision on a tool call; ALLOW if no hook objects."""
        return self._decide(Slot.TOOL_DISPATCH, ctx)

    def before_egress(self, ctx: ToolCallContext, url: str, method: str) -> Decision:
        """The decision on a request to `url`; ALLOW if no hook objects."""
        return self._decide(Slot.EGRESS, ctx, url, method)

    def before_charge(self, ctx: ToolCallContext, cost_usd: float) -> Decision:
        """The decision on a cost; ALLOW if no hook objects."""
        return self._decide(Slot.BUDGET, ctx, cost_usd)

    def on_error(self, ctx: ToolCallContext, err: BaseException) -> Decision:
        """The decision after an error; RETRY if no hook decides, which is no incident and leaves no event."""
        return self._decide(Slot.RETRY, ctx, err, unless=Decision.RETRY)

    def get_events(self) -> list[SafetyEvent]:
        """The events of the hooks' verdicts, of runs and of direct calls, oldest first."""
        with self._lock:
            return list(self._events)

    @property
    def dropped_events(self) -> int:
        """How many older events made room for newer ones."""
        with self._lock:
            return self._dropped

    def clear_events(self) -> None:
        """Forget the events and the count of dropped ones."""
        with self._lock:
            self._events.clear()
            self._dropped = 0

    def _decide(self, slot: Slot, ctx: ToolCallContext, *args: object, unless: Decision = Decision.ALLOW) -> Decision:
        verdict = self._ask(slot, ctx, args)
        if verdict is None:
            return unless
        event = _event(slot, ctx, verdict)
        self._record(event)
        if self._log is not None:
            self._log(self, event)
        return verdict.decision

    def _ask(self, slot: Slot, ctx: ToolCallContext, args: tuple[object, ...]) -> Verdict | None:
        kept = None
        for seat in self._seats[slot]:
            verdict = seat.ask(ctx, *args)
            if verdict is None:
                continue
            if verdict.decision not in GOES_ON[slot]:
                return verdict
            kept = kept or verdict
        return kept

    def _record(self, event: SafetyEvent) -> None:
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self._dropped += 1
            self._events.append(event)


@dataclass(frozen=True, slots=True)
class _Seat:
    """One hook in one slot, bound and checked once."""

    hook: str
    method: str
    question: Callable[..., object]
    stop_reason: StopReason
    explain: Callable[[], object] | None

    def ask(self, *args: object) -> Verdict | None:
        """The hook's verdict with nothing left out; None for no opinion."""
        try:
            answer = self.question(*args)
        except Exception as error:
            return self._failure(f"raised {_described(error)}", error)
        if answer is None or answer is Decision.ALLOW:
            return None
        return self._verdict(answer)

    def _verdict(self, answer: object) -> Verdict | None:
        if isinstance(answer, Decision):
            return Verdict(answer, self._reason(answer), self.hook, self.stop_reason)
        if isinstance(answer, Verdict):
            return self._completed(answer)
        if inspect.iscoroutine(answer):
            answer.close()
        return self._failure(f"returned {_shown(answer)}, which is neither a Decision nor a Verdict nor None")

    def _completed(self, verdict: Verdict) -> Verdict | None:
        if verdict.decision is Decision.ALLOW:
            return None
        return replace(
            verdict,
            reason=verdict.reason or self._reason(verdict.decision),
            hook=verdict.hook or self.hook,
            stop_reason=self.stop_reason if verdict.stop_reason is StopReason.HOOK_DENIED else verdict.stop_reason,
        )

    def _reason(self, decision: Decision) -> str:
        plain = f"{self.hook}.{self.method} returned {decision}"
        if self.explain is None:
            return plain
        try:
            explained = self.explain()
        except Exception as error:
            return f"{plain}, and its explain() raised {_described(error)}"
        return _cut(explained) if isinstance(explained, str) and explained else plain

    def _failure(self, what: str, error: Exception | None = None) -> Verdict:
        return Verdict(Decision.HALT, f"{self.hook}.{self.method} {what}", self.hook, error=error)


def _seats(slot: Slot, given: object) -> tuple[_Seat, ...]:
    if given is None:
        return ()
    hooks = given if isinstance(given, (list, tuple)) else (given,)
    return tuple(_seat(slot, hook) for hook in hooks)


def _seat(slot: Slot, hook: object) -> _Seat:
    method, parameters = QUESTIONS[slot]
    wanted = f"{method}({', '.join(parameters)})"
    if isinstance(hook, type):
        _refuse(slot, hook, f"a hook with {wanted}: an instance such as {hook.__name__}(), not the class")
    name = type(hook).__name__
    question = getattr(hook, method, None)
    if not callable(question):
        _refuse(slot, hook, f"a hook with {wanted}, which {name} does not have")
    if _is_async(question):
        _refuse(slot, hook, f"a hook that answers at once, but {name}.{method} is async: write it with `def`")
    if not _takes(question, len(parameters)):
        _refuse(slot, hook, f"a hook with {wanted}, but {name}.{method} takes other arguments")
    stop_reason = getattr(hook, "stop_reason", StopReason.HOOK_DENIED)
    if not isinstance(stop_reason, StopReason):
        raise InvalidValue(f"{slot}: {name}.stop_reason", stop_reason, "one of StopReason")
    explain = getattr(hook, "explain", None)
    if _is_async(explain):
        _refuse(slot, hook, f"a hook that answers at once, but {name}.explain is async: write it with `def`")
    return _Seat(name, method, question, stop_reason, explain if callable(explain) else None)


def _is_async(question: object) -> bool:
    return any(
        inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each)
        for each in (question, getattr(question, "__call__", None))  # noqa: B004
    )


def _takes(question: Callable[..., object], count: int) -> bool:
    try:
        signature = inspect.signature(question)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _refuse(slot: Slot, hook: object, expected: str) -> NoReturn:
    raise InvalidValue(slot, hook, expected)


def _event(slot: Slot, ctx: ToolCallContext, verdict: Verdict) -> SafetyEvent:
    # Only what stops a call has a stop reason; what continues is named by its decision.
    goes_on = verdict.decision in GOES_ON[slot]
    metadata: dict[str, Any] = {"slot": str(slot), "tool_name": ctx.tool_name}
    if verdict.model is not None:
        metadata["model"] = verdict.model
    return SafetyEvent(
        event_type=verdict.decision.lower() if goes_on else str(verdict.stop_reason),
        decision=verdict.decision,
        reason=verdict.reason,
        hook=verdict.hook,
        request_id=ctx.request_id,
        metadata=metadata,
    )


def _described(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:
        text = ""
    return _cut(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _shown(answer: object) -> str:
    try:
        return _cut(repr(answer))
    except Exception:
        return f"a {type(answer).__name__}"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[: MAX_REASON - 1] + "…"
