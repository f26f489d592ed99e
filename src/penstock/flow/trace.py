"""Traces of graphs: what happened, step by step.

A trace is opt-in: it is passed to the context, and every graph that runs there registers which records of the run are
its steps. The records exist anyway; a trace computes its content from them when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, TypeVar, get_args

from penstock import checks
from penstock.clock import utc_from_ns
from penstock.errors import CancelledError, InvalidValue
from penstock.money import format_cost, format_usd, to_nanos, to_usd
from penstock.runtime.context import ExecutionContext
from penstock.runtime.run import Run
from penstock.runtime.settlement import error_text
from penstock.tracing.jsonable import jsonable
from penstock.tracing.record import CallRecord

TraceStatus = Literal["running", "completed", "failed", "cancelled"]
_STATUSES = get_args(TraceStatus)
MAX_DEPTH = 10_000
"""Maximum depth of a step in a trace, which `explain` indents by."""


@dataclass(slots=True)
class StepTrace:
    """One attempt of one step; skips and fallbacks are attempts too."""

    step_id: str
    node_id: str
    node_type: str
    input: Any
    output: Any
    error: str | None
    start_time: datetime
    end_time: datetime
    duration_ms: float
    tokens_used: int = 0
    """Tokens used by the step, including everything inside it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    cost_usd: float = 0.0
    status: str = "success"
    """success, fail or halt."""
    attempt: int = 1
    call_id: str = ""
    """The call in the run's tree."""
    parent_step: str | None = None
    """The step of the outer graph, for a step of a nested graph."""
    depth: int = 0
    """Number of nested graphs around the step."""
    unknown_costs: int = 0
    """Number of calls inside it with an unknown cost, which is not in `cost_usd`."""

    def __post_init__(self) -> None:
        for name in ("step_id", "node_id", "node_type", "status", "call_id"):
            checks.text(name, getattr(self, name))
        for name in ("error", "parent_step"):
            text = getattr(self, name)
            if text is not None:
                checks.text(name, text, none="none")
        for name in ("start_time", "end_time"):
            checks.instance(name, getattr(self, name), datetime)
        checks.number("duration_ms", self.duration_ms, minimum=0)
        checks.integer("tokens_used", self.tokens_used, of="tokens")
        checks.mapping("metadata", self.metadata, "values by name")
        to_nanos(self.cost_usd, "cost_usd")
        checks.integer("attempt", self.attempt)
        checks.integer("depth", self.depth, maximum=MAX_DEPTH)
        checks.integer("unknown_costs", self.unknown_costs)

    def to_dict(self) -> dict[str, Any]:
        """Return the step as JSON data."""
        return {
            "step_id": self.step_id,
            "node_id": self.node_id,
            "node_type": self.node_type,
            "input": jsonable(self.input),
            "output": jsonable(self.output),
            "error": self.error,
            "start_time": self.start_time.isoformat(),
            "end_time": self.end_time.isoformat(),
            "duration_ms": self.duration_ms,
            "tokens_used": self.tokens_used,
            "cost_usd": self.cost_usd,
            "status": self.status,
            "attempt": self.attempt,
            "call_id": self.call_id,
            "parent_step": self.parent_step,
            "depth": self.depth,
            "metadata": jsonable(self.metadata),
            **_unknown(self.unknown_costs),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> StepTrace:
        """Return the step that `to_dict` wrote; raises InvalidValue, which names the invalid field."""
        return _read(cls, document, "step", _STEP_FIELDS, _STEP_REQUIRED)


class _Section:
    """The steps that one execution of one graph has registered."""

    __slots__ = ("index", "inputs", "journal", "results", "run")

    def __init__(
        self,
        run: Run,
        journal: list[CallRecord],
        results: Mapping[str, Any],
        inputs: list[Any],
        index: Mapping[str, int],
    ) -> None:
        self.run = run
        self.journal = journal
        self.results = results
        self.inputs = inputs
        self.index = index


class _Measured:
    """The figures of a trace: read from the run while a graph runs, and assignable."""

    _steps: list[StepTrace]
    """Steps that were given, added, or read after their graph had ended."""
    _sections: list[_Section] | None = None
    """Sections registered since; None before the first."""
    _inside = 0
    _context: ExecutionContext | None = None
    """The context of the running graph."""
    _before = (0, 0, 0)
    _tokens = 0
    _nanos = 0
    _unknown = 0

    @property
    def steps(self) -> list[StepTrace]:
        """Steps that were given or added, then every attempt of every step that ran, in the order in which they began.

        The list belongs to the trace, except while a graph runs: then it is a new one each time. Assigning replaces all
        steps.
        """
        if self._sections:
            numbered = [one for section in self._sections for one in _steps_of(section, self._sections)]
            found = [step for _, step in sorted(numbered, key=lambda one: one[0])]
            if self._inside:
                return self._steps + found
            self._sections.clear()
            self._steps += found
        return self._steps

    @steps.setter
    def steps(self, steps: list[StepTrace]) -> None:
        given: object = steps
        if not isinstance(given, list) or (given and not all(isinstance(step, StepTrace) for step in given)):
            raise InvalidValue("steps", steps, "a list of StepTrace")
        self._steps = steps
        if self._sections is not None:
            for section in self._sections:
                section.journal.clear()  # what ends from now on is written there

    @property
    def total_tokens(self) -> int:
        """Tokens used while the graph ran, plus those of added steps."""
        return self._figures()[0]

    @total_tokens.setter
    def total_tokens(self, tokens: int) -> None:
        checks.integer("total_tokens", tokens)
        if tokens or self._tokens or self._context is not None:  # a new trace has nothing to set
            self._tokens += tokens - self._figures()[0]

    @property
    def total_cost(self) -> float:
        """US dollars spent while the graph ran, plus those of added steps."""
        return to_usd(self._figures()[1])

    @total_cost.setter
    def total_cost(self, cost: float) -> None:
        nanos = to_nanos(cost, "total_cost")
        if nanos or self._nanos or self._context is not None:
            self._nanos += nanos - self._figures()[1]

    @property
    def unknown_costs(self) -> int:
        """Number of calls with an unknown cost; if there are any, `total_cost` is a lower bound."""
        return self._figures()[2]

    @unknown_costs.setter
    def unknown_costs(self, count: int) -> None:
        checks.integer("unknown_costs", count)
        if count or self._unknown or self._context is not None:
            self._unknown += count - self._figures()[2]

    def _figures(self) -> tuple[int, int, int]:
        """Return tokens, nano-dollars and calls of unknown cost so far."""
        if self._context is None:
            return self._tokens, self._nanos, self._unknown
        tokens, nanos, unknown = _used(self._context)
        before = self._before
        return self._tokens + tokens - before[0], self._nanos + nanos - before[1], self._unknown + unknown - before[2]


@dataclass(repr=False)
class ExecutionTrace(_Measured):
    """The history of a graph and of its nested graphs. Pass one as `trace=` to an ExecutionContext."""

    graph_id: str
    start_time: datetime = field(default_factory=lambda: datetime.now().astimezone())
    end_time: datetime | None = None
    status: TraceStatus = "running"
    steps: list[StepTrace] = field(default_factory=list)
    total_tokens: int = field(default_factory=int)  # a factory leaves the property of the base class in place
    total_cost: float = field(default_factory=float)
    error: str | None = None

    def __post_init__(self) -> None:
        checks.text("graph_id", self.graph_id)
        checks.instance("start_time", self.start_time, datetime)
        if self.end_time is not None:
            checks.instance("end_time", self.end_time, datetime)
        if self.status not in _STATUSES:
            raise InvalidValue("status", self.status, f"one of {', '.join(_STATUSES)}")
        if self.error is not None:
            checks.text("error", self.error)

    # Written by graphs.

    def watch(
        self,
        run: Run,
        journal: list[CallRecord],
        results: Mapping[str, Any],
        inputs: list[Any] | None,
        index: Mapping[str, int],
    ) -> None:
        """Register a graph that begins; its steps will be found in `journal`."""
        if self._sections is None:
            self._sections = []
        self._sections.append(_Section(run, journal, results, inputs or [], index))

    def add_step(self, step: StepTrace) -> None:
        """Add a step that no graph ran, and what it used to the totals."""
        checks.instance("step", step, StepTrace)
        self._steps.append(step)
        self._tokens += step.tokens_used
        self._nanos += to_nanos(step.cost_usd)
        self._unknown += step.unknown_costs

    def during(self, context: ExecutionContext) -> AbstractContextManager[None]:
        """Follow the execution of a graph: the outermost one sets the trace's status, and its context the totals."""
        return _During(self, context)

    def _end(self, run: Run, status: TraceStatus, error: str | None) -> None:
        ended = run.wall_time()
        if self.start_time.tzinfo is None:  # such as datetime.now(): local time, which the end can be compared with
            ended = ended.astimezone().replace(tzinfo=None)
        self.status, self.error, self.end_time = status, error, ended

    # Read by people.

    def explain(self) -> str:
        """Return the execution as lines: every attempt with its time, cost and error."""
        lines = [f"Graph: {self.graph_id}", f"Status: {self.status}"]
        steps = self.steps
        for step in steps:
            indent = "  " * (step.depth + 1)
            lines.append(f"{indent}{step.step_id} ({step.node_type}): {_what(step)}")
            if step.error:
                lines.append(f"{indent}  Error: {step.error}")
        tokens, nanos, unknown = self._figures()
        if tokens or nanos or unknown:
            lines.append(f"Total: {tokens} tokens, {_cost(nanos, unknown)}")
        if self.error and not any(step.error for step in steps):
            lines.append(f"Error: {self.error}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as JSON data."""
        return {
            "graph_id": self.graph_id,
            "start_time": self.start_time.isoformat(),
            "end_time": self.end_time.isoformat() if self.end_time else None,
            "status": self.status,
            "steps": [step.to_dict() for step in self.steps],
            "total_tokens": self.total_tokens,
            "total_cost": self.total_cost,
            "error": self.error,
            **_unknown(self.unknown_costs),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> ExecutionTrace:
        """Return the trace that `to_dict` wrote; raises InvalidValue, which names the invalid field."""
        given: object = document
        fields_given = given if not isinstance(given, Mapping) else {**given}
        unknown_costs = fields_given.pop("unknown_costs", 0) if isinstance(fields_given, dict) else 0
        trace = _read(cls, fields_given, "trace", _TRACE_FIELDS, _TRACE_REQUIRED)
        trace.unknown_costs = _value("trace.unknown_costs", unknown_costs, *_COUNT)
        return trace

    def __repr__(self) -> str:
        return f"<ExecutionTrace of {self.graph_id!r}: {self.status}, {len(self.steps)} step(s)>"

    def _repr_markdown_(self) -> str:
        return f"```\n{self.explain()}\n```"


class _During:
    """A graph that runs under a trace; a class because a generator would cost every traced execution more."""

    __slots__ = ("context", "trace")

    def __init__(self, trace: ExecutionTrace, context: ExecutionContext) -> None:
        self.trace = trace
        self.context = context

    def __enter__(self) -> None:
        trace = self.trace
        trace._inside += 1
        if trace._inside == 1:
            trace._context, trace._before = self.context, _used(self.context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        trace = self.trace
        try:
            if trace._inside == 1:
                run = self.context._run
                if error is None:
                    trace._end(run, "completed", None)
                else:
                    trace._end(run, _status_for(error), f"{type(error).__name__}: {error_text(error)}")
        finally:
            trace._inside -= 1
            if trace._inside == 0:
                trace._tokens, trace._nanos, trace._unknown, trace._context = *trace._figures(), None


def _used(context: ExecutionContext) -> tuple[int, int, int]:
    """Return tokens, nano-dollars and calls of unknown cost so far; exact even if the run does not keep every call."""
    account, run = context._account, context._run
    with run.lock:  # all of one instant
        spent = account.committed - account.held - account.unresolved
        return account.tokens_in + account.tokens_out, spent, run.unknown_costs


def _unknown(calls: int) -> dict[str, int]:
    """Return the field for calls of unknown cost; empty if there are none."""
    return {"unknown_costs": calls} if calls else {}


def _cost(nanos: int, unknown: int) -> str:
    return f"cost {format_cost(nanos, unknown)}" if unknown else format_usd(nanos)


def _status_for(error: BaseException) -> TraceStatus:
    import asyncio

    return "cancelled" if isinstance(error, CancelledError | asyncio.CancelledError) else "failed"


def _steps_of(section: _Section, sections: list[_Section]) -> Iterator[tuple[int, StepTrace]]:
    journal = list(section.journal)
    usage = _usage_below(section.run)
    numbers = {record.number: record for one in sections if one.run is section.run for record in list(one.journal)}
    numbers |= {call.number: call for call in section.run.graph.calls()[1] if call.metadata and "step" in call.metadata}
    for record in journal:
        yield record.number, _step(section, record, usage, numbers)


def _step(
    section: _Section,
    record: CallRecord,
    usage: Mapping[int, tuple[int, int, int]],
    numbers: Mapping[int, CallRecord],
) -> StepTrace:
    about = dict(record.metadata or {})
    run, name = section.run, record.name
    tokens, cost, unknown = usage.get(record.number, (0, 0, 0))
    outer, depth = _outer_step(record, numbers)
    succeeded = record.status == "success"
    if record.abandoned:
        about["abandoned"] = True
    return StepTrace(
        step_id=name,
        node_id=str(about.pop("node", "")),
        node_type=str(about.pop("node_type", "")),
        input=section.inputs[section.index[name]] if name in section.index else None,
        output=section.results.get(name) if succeeded else None,
        error=None if succeeded else f"{record.error_class or 'halted'}: {record.stop_reason or ''}",
        start_time=utc_from_ns(run.wall_time_ns(record.started_ns)),
        end_time=utc_from_ns(run.wall_time_ns(record.ended_ns)),
        duration_ms=(record.ended_ns - record.started_ns) / 1_000_000,
        tokens_used=tokens,
        metadata=about,
        cost_usd=to_usd(cost),
        status=record.status,
        attempt=int(about.get("attempt", 1)),
        call_id=record.node_id,
        parent_step=outer,
        depth=depth,
        unknown_costs=unknown,
    )


def _outer_step(record: CallRecord, numbers: Mapping[int, CallRecord]) -> tuple[str | None, int]:
    outer, depth = None, 0
    above = record.parent
    while above is not None:
        if above.number in numbers:
            outer = outer or above.name
            depth += 1
        above = above.parent
    return outer, depth


def _usage_below(run: Run) -> dict[int, tuple[int, int, int]]:
    """Return tokens, cost and number of calls of unknown cost of each call, including everything below it."""
    _, calls = run.graph.calls()
    folded = list(run.graph.folded.items())
    usage = {number: (one.tokens_in + one.tokens_out, one.cost, 0) for number, one in folded}
    # A call has a higher number than the one that made it: from the last to the first, what is below is done before.
    for call in reversed(calls):
        tokens, cost, unknown = usage.get(call.number, (0, 0, 0))
        late = call.settled
        tokens += (getattr(call, "tokens_in", 0) or 0) + (getattr(call, "tokens_out", 0) or 0)
        cost += getattr(call, "cost", 0) + (late.cost if late else 0)
        tokens += late.tokens_in + late.tokens_out if late else 0
        unknown += call.is_unpaid_at(call.end_seq if late is None else late.seq)
        usage[call.number] = tokens, cost, unknown
        if call.parent is not None:
            above = usage.get(call.parent.number, (0, 0, 0))
            usage[call.parent.number] = above[0] + tokens, above[1] + cost, above[2] + unknown
    return usage


def _what(step: StepTrace) -> str:
    parts = [f"{step.duration_ms:.0f}ms"]
    if step.status != "success":
        parts.append(step.status)
    if "abandoned" in step.metadata:
        parts.append("abandoned")
    if step.attempt > 1:
        parts.append(f"attempt {step.attempt}")
    if "skip" in step.metadata:
        parts.append("skipped")
    if "continue" in step.metadata:
        parts.append("continued")
    if "fallback" in step.metadata:
        parts.append(f"fallback {step.metadata['fallback']}")
    if step.tokens_used:
        parts.append(f"{step.tokens_used} tokens")
    if step.cost_usd or step.unknown_costs:
        parts.append(_cost(to_nanos(step.cost_usd), step.unknown_costs))
    return ", ".join(parts)


# Read back.


class _Unreadable(Exception):
    """A value has the wrong type for its field."""


def _anything(value: Any) -> Any:
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Unreadable
    return value


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Unreadable
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _Unreadable
    return value


def _time(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(_text(value))
    except ValueError:
        raise _Unreadable from None


def _time_or_none(value: Any) -> datetime | None:
    return None if value is None else _time(value)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unreadable
    return dict(value)


def _status(value: Any) -> str:
    if value not in _STATUSES:
        raise _Unreadable
    return str(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Unreadable
    return [_read(StepTrace, step, f"steps[{at}]", _STEP_FIELDS, _STEP_REQUIRED) for at, step in enumerate(value)]


_Field = tuple[str, Callable[[Any], Any]]
_TIME: _Field = ("a time in ISO 8601", _time)
_COUNT: _Field = ("a whole number, 0 or more", _whole)
_AMOUNT: _Field = ("a finite number, 0 or more", _number)
_TEXT: _Field = ("a string", _text)
_MAYBE_TEXT: _Field = ("a string or None", _text_or_none)

_STEP_FIELDS: Mapping[str, _Field] = {
    "step_id": _TEXT,
    "node_id": _TEXT,
    "node_type": _TEXT,
    "input": ("", _anything),
    "output": ("", _anything),
    "error": _MAYBE_TEXT,
    "start_time": _TIME,
    "end_time": _TIME,
    "duration_ms": _AMOUNT,
    "tokens_used": _COUNT,
    "cost_usd": _AMOUNT,
    "status": _TEXT,
    "attempt": _COUNT,
    "call_id": _TEXT,
    "parent_step": _MAYBE_TEXT,
    "depth": _COUNT,
    "metadata": ("an object", _object),
    "unknown_costs": _COUNT,
}
_TRACE_FIELDS: Mapping[str, _Field] = {
    "graph_id": _TEXT,
    "start_time": _TIME,
    "end_time": ("a time in ISO 8601, or None", _time_or_none),
    "status": (f"one of {', '.join(_STATUSES)}", _status),
    "steps": ("a list", _list),
    "total_tokens": _COUNT,
    "total_cost": _AMOUNT,
    "error": _MAYBE_TEXT,
}

_STEP_REQUIRED = tuple(one.name for one in fields(StepTrace) if one.default is one.default_factory is MISSING)
_TRACE_REQUIRED = ("graph_id", "start_time")
"""A new trace may omit its start and begins now; a stored one has its start."""

T = TypeVar("T")


def _value(path: str, value: Any, expected: str, read: Callable[[Any], Any]) -> Any:
    try:
        return read(value)
    except _Unreadable:
        raise InvalidValue(path, value, expected) from None


def _read(kind: type[T], document: object, path: str, known: Mapping[str, _Field], required: Sequence[str]) -> T:
    """Return a `kind` from its JSON data."""
    if not isinstance(document, Mapping):
        raise InvalidValue(path, document, "a JSON object, as to_dict() writes it")
    for name in document:
        if name not in known:
            raise InvalidValue(path, name, f"an object of the fields {', '.join(known)}")
    for name in required:
        if name not in document:
            raise InvalidValue(path, sorted(document), f"an object with {name!r}")
    values = {name: _value(f"{path}.{name}", document[name], *known[name]) for name in document}
    try:
        return kind(**values)
    except InvalidValue as invalid:
        raise InvalidValue(f"{path}.{invalid.field}", invalid.value, invalid.expected) from None
