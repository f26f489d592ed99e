"""The events of a run, as frozen data.

A closed union, one class per kind. Every event has its time, context, iteration and depth, and the call it happened
under; the run that records it fills these in, for your own kinds (subclasses of `CustomTrace`) too. `to_dict()` returns
an event as plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any, ClassVar, TypedDict, Unpack

from penstock import checks
from penstock.clock import utc_from_ns
from penstock.money import to_nanos
from penstock.stops import TerminationReason
from penstock.tracing.jsonable import jsonable
from penstock.tracing.lifecycle import CallKind, Status


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """The fields of every event; filled in by the run that records it."""

    kind: ClassVar[str] = "event"

    run_id: str = ""
    seq: int = 0
    """The event's place in the run's log: 1, 2, 3, … without gaps."""
    at_ms: int = 0
    """Wall-clock time, in milliseconds since 1970."""
    source: str = ""
    """The path of context names, such as main/compaction."""
    depth: int = 0
    iteration: int = 0
    parent_id: str | None = None
    """The call under which it happened."""

    @property
    def timestamp(self) -> datetime:
        """The time of the event, in UTC."""
        return utc_from_ns(self.at_ms * 1_000_000)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON data."""
        return {"kind": self.kind} | {one.name: jsonable(getattr(self, one.name)) for one in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(TraceEvent):
    """A run began."""

    kind: ClassVar[str] = "run_started"
    name: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCompleted(TraceEvent):
    """A run ended; nothing follows."""

    kind: ClassVar[str] = "run_ended"
    termination_reason: TerminationReason = TerminationReason.SUCCESS
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(TraceEvent):
    """A call was created; whether it is admitted is decided next."""

    kind: ClassVar[str] = "call_started"
    node_id: str = ""
    call_kind: CallKind = "system"
    name: str = ""
    model: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWaiting(TraceEvent):
    """A call waits for other calls to end: its budget can pay for it, but not while they hold money."""

    kind: ClassVar[str] = "call_waiting"
    node_id: str = ""
    call_kind: CallKind = "system"
    name: str = ""
    message: str = ""
    budget: str | None = None
    unit: str | None = None
    limit: float | None = None
    used: float | None = None
    held: float | None = None
    asked: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallEnded(TraceEvent):
    """A call ended: success, fail or halt; exactly one for each call that was created."""

    kind: ClassVar[str] = "call_ended"
    node_id: str = ""
    call_kind: CallKind = "system"
    name: str = ""
    model: str | None = None
    status: Status = "success"
    cost: float = 0.0
    """US dollars."""
    input_tokens: int = 0
    output_tokens: int = 0
    duration_ms: float = 0.0
    retries_used: int = 0
    stop_reason: str | None = None
    error: str | None = None
    finish_reason: str | None = None
    """Why the answer of a model is incomplete: `length` or `content_filter`; None if it is complete, or if that is
    unknown.
    """
    abandoned: bool = False
    """Whether the caller was released while the work continues; its further cost is settled later."""
    cost_unknown: bool = False
    """Whether the call was billed at an unknown cost, so that `cost` has no meaning."""

    @property
    def cost_nanos(self) -> int:
        """The cost in nano-dollars."""
        return to_nanos(self.cost, "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCallTrace(CallEnded):
    """A model call that ended."""

    call_kind: CallKind = "llm"
    input: Any = None
    """The messages that were sent, as JSON data; None unless the run records payloads."""
    output: Any = None
    """The message that was received, as JSON data; None unless the run records payloads and the call succeeded."""


class CallFields(TypedDict, total=False):
    """The fields of CallEnded, for constructors of its subclasses."""

    run_id: str
    seq: int
    at_ms: int
    source: str
    depth: int
    iteration: int
    parent_id: str | None
    node_id: str
    call_kind: CallKind
    name: str
    model: str | None
    status: Status
    cost: float
    input_tokens: int
    output_tokens: int
    duration_ms: float
    retries_used: int
    stop_reason: str | None
    error: str | None
    finish_reason: str | None
    abandoned: bool
    cost_unknown: bool


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class ToolCallTrace(CallEnded):
    """A tool call that ended; `tool_name` is its `name`."""

    call_kind: CallKind = "tool"
    input: Any = None
    """The arguments, as JSON data; None unless the run records payloads."""
    output: Any = None
    """What the tool returned, as JSON data; None unless the run records payloads and the call succeeded."""

    def __init__(
        self, *, tool_name: str = "", input: Any = None, output: Any = None, **fields: Unpack[CallFields]
    ) -> None:
        fields.setdefault("call_kind", "tool")
        if checks.text("tool_name", tool_name):
            fields["name"] = tool_name
        CallEnded.__init__(self, **fields)
        object.__setattr__(self, "input", input)
        object.__setattr__(self, "output", output)

    @property
    def tool_name(self) -> str:
        """The tool's name."""
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettled(TraceEvent):
    """The bill of a call arrived after the call had ended."""

    kind: ClassVar[str] = "call_settled"
    node_id: str = ""
    cost: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationStartTrace(TraceEvent):
    """An agent loop began an iteration."""

    kind: ClassVar[str] = "iteration_started"


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationEndTrace(TraceEvent):
    """An agent loop finished an iteration."""

    kind: ClassVar[str] = "iteration_ended"
    duration_ms: float = 0.0
    action: str = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpawnTrace(TraceEvent):
    """A child context was created."""

    kind: ClassVar[str] = "child_spawned"
    child_name: str = ""
    node_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildCompleteTrace(TraceEvent):
    """A child context ended."""

    kind: ClassVar[str] = "child_completed"
    child_name: str = ""
    node_id: str = ""
    termination_reason: TerminationReason = TerminationReason.SUCCESS
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionTrace(TraceEvent):
    """A history was shortened."""

    kind: ClassVar[str] = "compacted"
    before: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTrace(TraceEvent):
    """A limit stopped a call or the run: which limit, whose budget, how much."""

    kind: ClassVar[str] = "limit_reached"
    node_id: str | None = None
    """The call that was stopped; None if it was the run itself."""
    name: str = ""
    stop_reason: str = ""
    message: str = ""
    budget: str | None = None
    unit: str | None = None
    limit: float | None = None
    used: float | None = None
    held: float | None = None
    asked: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetyTrace(TraceEvent):
    """A safety event of a hook, or one recorded by the program."""

    kind: ClassVar[str] = "safety"
    event_type: str = ""
    decision: str = ""
    reason: str = ""
    hook: str = ""
    request_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceTrace(TraceEvent):
    """A runaway pattern was detected; advisory, once per signature."""

    kind: ClassVar[str] = "divergence_noticed"
    shape: str = ""
    signature: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorTrace(TraceEvent):
    """An error outside of any call."""

    kind: ClassVar[str] = "error"
    error_class: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomTrace(TraceEvent):
    """Any other event; subclass it for kinds of your own."""

    kind: ClassVar[str] = "custom"
    name: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


Event = (
    RunStarted
    | RunCompleted
    | CallWaiting
    | CallStarted
    | ModelCallTrace
    | ToolCallTrace
    | CallEnded
    | CallSettled
    | IterationStartTrace
    | IterationEndTrace
    | ChildSpawnTrace
    | ChildCompleteTrace
    | CompactionTrace
    | LimitTrace
    | SafetyTrace
    | DivergenceTrace
    | ErrorTrace
    | CustomTrace
)
"""Every kind of event."""
