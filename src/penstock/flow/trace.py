"""What a graph did, step by step, for people to read.

A trace is opt-in: it is passed to the context, and every graph that runs there notes which of the run's records are
its steps. The records are made anyway; what is shown here is made from them when somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from penstock.clock import utc_from_ns
from penstock.errors import CancelledError
from penstock.money import format_usd, to_nanos, to_usd
from penstock.runtime.context import ExecutionContext
from penstock.runtime.run import Run
from penstock.runtime.settlement import told_by
from penstock.tracing.jsonable import jsonable
from penstock.tracing.record import CallRecord

TraceStatus = Literal["running", "completed", "failed", "cancelled"]


@dataclass(slots=True)
class StepTrace:
    """One attempt of one step; a skip and a fallback are attempts too."""

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
    """What the step used, everything inside it included."""
    metadata: dict[str, Any] = field(default_factory=dict)
    cost_usd: float = 0.0
    status: str = "success"
    """success, fail or halt."""
    attempt: int = 1
    call_id: str = ""
    """The call in the run's tree."""
    parent_step: str | None = None
    """The step of the outer graph, if this one stands in a nested graph."""
    depth: int = 0
    """How many graphs it is inside of, the outermost apart."""

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON data."""
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
        }


class _Section:
    """What one execution of one graph has noted."""

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


class ExecutionTrace:
    """What happened in a graph, and in the graphs inside it. Pass one as `trace=` to an ExecutionContext."""

    def __init__(self, graph_id: str, start_time: datetime | None = None) -> None:
        self.graph_id = graph_id
        self.start_time = start_time or datetime.now().astimezone()
        self.end_time: datetime | None = None
        self.status: TraceStatus = "running"
        self.error: str | None = None
        self._added: list[StepTrace] = []
        self._sections: list[_Section] = []
        self._inside = 0
        self._context: ExecutionContext | None = None
        """The context of the graph that runs now."""
        self._before = (0, 0)
        self._tokens = 0
        self._nanos = 0

    # Written by graphs.

    def watch(
        self,
        run: Run,
        journal: list[CallRecord],
        results: Mapping[str, Any],
        inputs: list[Any] | None,
        index: Mapping[str, int],
    ) -> None:
        """A graph begins: its steps will be found in `journal`."""
        self._sections.append(_Section(run, journal, results, inputs or [], index))

    def add_step(self, step: StepTrace) -> None:
        """Add a step that no graph ran."""
        self._added.append(step)

    @contextmanager
    def during(self, context: ExecutionContext) -> Iterator[None]:
        """The status of the outermost graph is that of the trace; what its context uses meanwhile is the total."""
        run = context._run
        self._inside += 1
        if self._inside == 1:
            self._context, self._before = context, _used(context)
        try:
            yield
        except BaseException as error:
            if self._inside == 1:
                self._end(run, _status_for(error), f"{type(error).__name__}: {told_by(error)}")
            raise
        else:
            if self._inside == 1:
                self._end(run, "completed", None)
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._tokens, self._nanos, self._context = *self._figures(), None

    def _figures(self) -> tuple[int, int]:
        """Tokens and nano-dollars so far."""
        if self._context is None:
            return self._tokens, self._nanos
        tokens, nanos = _used(self._context)
        return self._tokens + tokens - self._before[0], self._nanos + nanos - self._before[1]

    def _end(self, run: Run, status: TraceStatus, error: str | None) -> None:
        self.status, self.error, self.end_time = status, error, run.wall_time()

    # Read by people.

    @property
    def steps(self) -> list[StepTrace]:
        """Every attempt of every step, in the order they began."""
        found: list[tuple[int, StepTrace]] = []
        for section in self._sections:
            found += _steps_of(section, self._sections)
        return [step for _, step in sorted(found, key=lambda one: one[0])] + self._added

    @property
    def total_tokens(self) -> int:
        """Tokens that were used while the graph ran, and those of added steps."""
        return self._figures()[0] + sum(step.tokens_used for step in self._added)

    @property
    def total_cost(self) -> float:
        """US dollars that were spent while the graph ran, and those of added steps."""
        return to_usd(self._figures()[1] + sum(to_nanos(step.cost_usd) for step in self._added))

    def explain(self) -> str:
        """The execution in lines: every attempt with its time, cost and error."""
        lines = [f"Graph: {self.graph_id}", f"Status: {self.status}"]
        steps = self.steps
        for step in steps:
            indent = "  " * (step.depth + 1)
            lines.append(f"{indent}{step.step_id} ({step.node_type}): {_what(step)}")
            if step.error:
                lines.append(f"{indent}  Error: {step.error}")
        tokens, cost = self.total_tokens, self.total_cost
        if tokens or cost:
            lines.append(f"Total: {tokens} tokens, {format_usd(to_nanos(cost))}")
        if self.error and not any(step.error for step in steps):
            lines.append(f"Error: {self.error}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The trace as JSON data."""
        return {
            "graph_id": self.graph_id,
            "start_time": self.start_time.isoformat(),
            "end_time": self.end_time.isoformat() if self.end_time else None,
            "status": self.status,
            "steps": [step.to_dict() for step in self.steps],
            "total_tokens": self.total_tokens,
            "total_cost": self.total_cost,
            "error": self.error,
        }

    def __repr__(self) -> str:
        return f"<ExecutionTrace of {self.graph_id!r}: {self.status}, {len(self.steps)} step(s)>"

    def _repr_markdown_(self) -> str:
        return f"```\n{self.explain()}\n```"


def _used(context: ExecutionContext) -> tuple[int, int]:
    """Tokens and nano-dollars of a context so far; exact also where the run no longer keeps every call."""
    balance = context.balance
    return balance.tokens_in + balance.tokens_out, balance.spent_nanos


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
    usage: Mapping[int, tuple[int, int]],
    numbers: Mapping[int, CallRecord],
) -> StepTrace:
    about = dict(record.metadata or {})
    run, name = section.run, record.name
    tokens, cost = usage.get(record.number, (0, 0))
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


def _usage_below(run: Run) -> dict[int, tuple[int, int]]:
    """Tokens and cost of each call, everything below it included."""
    _, calls = run.graph.calls()
    folded = list(run.graph.folded.items())
    usage = {number: (one.tokens_in + one.tokens_out, one.cost) for number, one in folded}
    # A call has a higher number than the one that made it: from the last to the first, what is below is done before.
    for call in reversed(calls):
        tokens, cost = usage.get(call.number, (0, 0))
        late = call.settled
        tokens += (getattr(call, "tokens_in", 0) or 0) + (getattr(call, "tokens_out", 0) or 0)
        cost += getattr(call, "cost", 0) + (late.cost if late else 0)
        tokens += late.tokens_in + late.tokens_out if late else 0
        usage[call.number] = tokens, cost
        if call.parent is not None:
            above = usage.get(call.parent.number, (0, 0))
            usage[call.parent.number] = above[0] + tokens, above[1] + cost
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
    if "fallback" in step.metadata:
        parts.append(f"fallback {step.metadata['fallback']}")
    if step.tokens_used:
        parts.append(f"{step.tokens_used} tokens")
    if step.cost_usd:
        parts.append(format_usd(to_nanos(step.cost_usd)))
    return ", ".join(parts)
