"""A run as a text tree, as JSON and as Mermaid.

Converts the recorder's entries to text; knows nothing of how calls run. Names, messages, metadata, the data of custom
events and recorded payloads are untrusted: all of it is redacted (`redact`), then truncated, then escaped for its
destination.

A context is exported with everything below it: the run's own context is the whole run, a child is its part. A bare
`ExecutionGraph` is the whole run too, without the limits, which the recorder does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from penstock.errors import InvalidValue
from penstock.money import format_cost, format_usd, to_nanos
from penstock.stops import TerminationReason
from penstock.tracing import views
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    ChildCompleteTrace,
    ChildSpawnTrace,
    CompactionTrace,
    CustomTrace,
    DivergenceTrace,
    ErrorTrace,
    IterationEndTrace,
    IterationStartTrace,
    LimitTrace,
    ModelCallTrace,
    RunCompleted,
    RunStarted,
    SafetyTrace,
    ToolCallTrace,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import OPEN, CallRecord, Source
from penstock.tracing.redaction import MAX_NAME, Redaction, printable
from penstock.tracing.stats import ExecutionStats

FORMAT = "penstock.trace.v1"
MAX_LINES = 2_000
MAX_DRAWN = 200
MAX_METERS = 100
PAYLOAD = ("input", "output")
NO_CEILING = 1 << 62
"""A ceiling this large means no limit."""


class Context(Protocol):
    """The part of a context that exports read: its run's recorder, and its place."""

    _source: Source

    @property
    def graph(self) -> ExecutionGraph: ...


Traced = ExecutionGraph | Context
"""What can be exported: a context with everything below it, or a whole recorder."""


# The data behind every form.


def trace_data(of: Traced, *, secrets: Iterable[str] = ()) -> dict[str, Any]:
    """Return the run, or a context's part of it, as JSON data: limits, stats, calls and events, all up to one `seq`."""
    graph, source = _place(of)
    rules = Redaction(secrets)
    seq, calls = graph.calls()
    calls = [call for call in calls if _is_within(call.source, source)]
    events = list(_events_within(graph, source, seq))
    top = next((call for call in calls if call.source is source and _is_base(call)), None)
    began_ns = min((call.started_ns for call in calls), default=0)
    return {
        "format": FORMAT,
        "run_id": rules.text(graph.chain_id, MAX_NAME),
        "context": "" if source is None else rules.text(source.path),
        "name": "" if source is None else rules.text(source.name, MAX_NAME),
        "seq": seq,
        **_ending(graph, top, events, seq, rules),
        "start_ts_ms": (began_ns + graph.wall_offset_ns) // 1_000_000 if calls else None,
        "metadata": rules.data(top.metadata) if top is not None and top.metadata else {},
        "limits": [meter.to_dict(rules) for meter in _meters(of, graph, events)],
        "stats": _stats(graph, source, rules),
        "calls": list(_calls(graph, calls, seq, began_ns, rules)),
        "events": [_event(event, rules) for event in events],
        "dropped_events": graph.dropped_events,
    }


def trace_json(of: Traced, *, secrets: Iterable[str] = (), indent: int | None = None) -> str:
    """Return `trace_data` as JSON text."""
    return json.dumps(trace_data(of, secrets=secrets), indent=indent, ensure_ascii=False, allow_nan=False)


def _place(of: Traced) -> tuple[ExecutionGraph, Source | None]:
    if isinstance(of, ExecutionGraph):
        return of, None if of.root is None else of.root.source
    if not isinstance(getattr(of, "graph", None), ExecutionGraph):
        raise InvalidValue("of", of, "an ExecutionContext or an ExecutionGraph")
    return of.graph, of._source


def _is_within(place: Source, source: Source | None) -> bool:
    ancestor: Source | None = place
    while ancestor is not None and ancestor is not source:
        ancestor = ancestor.parent
    return ancestor is not None


def _is_base(call: CallRecord) -> bool:
    """Whether the call represents a context: a run's main one, or a child."""
    return call.parent is None or call.source.depth > call.parent.source.depth


def _events_within(graph: ExecutionGraph, source: Source | None, seq: int) -> Iterator[TraceEvent]:
    if source is None:
        return
    below = source.path + "/"
    for event in graph.events():
        if event.seq <= seq and (event.source == source.path or event.source.startswith(below)):
            yield event


def _ending(
    graph: ExecutionGraph, top: CallRecord | None, events: Sequence[TraceEvent], seq: int, rules: Redaction
) -> dict[str, Any]:
    """Return the status and its reason, and the duration so far."""
    ended = top is not None and top.end_seq <= seq
    last = events[-1] if events else None
    reason = str(last.termination_reason) if isinstance(last, RunCompleted) else None
    shown: dict[str, Any] = {"status": "created" if top is None else top.status_at(seq), "termination_reason": reason}
    shown["stop_reason"] = rules.text(top.stop_reason) if top and ended and top.stop_reason else None
    shown["error_class"] = rules.text(top.error_class) if top and ended and top.error_class else None
    until_ns = top.ended_ns if top and ended else graph.clock.monotonic_ns()
    shown["duration_ms"] = 0.0 if top is None else (until_ns - top.started_ns) / 1_000_000
    return shown


def _stats(graph: ExecutionGraph, source: Source | None, rules: Redaction) -> dict[str, Any]:
    stats = asdict(ExecutionStats() if source is None else graph.stats(source))
    del stats["own"]
    # Not as keys of anybody's making: a model called `token` is not a secret.
    return {name: _renamed(figure, rules) if isinstance(figure, dict) else figure for name, figure in stats.items()}


def _renamed(figures: Mapping[str, float], rules: Redaction) -> dict[str, float]:
    shown: dict[str, float] = {}
    for name, figure in figures.items():
        kept = rules.text(name, MAX_NAME)
        shown[kept] = shown.get(kept, 0) + figure
    return shown


def _calls(
    graph: ExecutionGraph, calls: Sequence[CallRecord], seq: int, began_ns: int, rules: Redaction
) -> Iterator[dict[str, Any]]:
    kept = {call.number for call in calls}
    folded = dict(graph.folded)
    now_ns = graph.clock.monotonic_ns()
    for call in calls:
        shown = views.node(call, seq, graph.wall_offset_ns, folded.get(call.number))
        for text in ("name", "model", "stop_reason", "error_class"):
            if shown[text]:
                shown[text] = rules.text(shown[text])
        parent = call.parent
        while parent is not None and parent.number not in kept:
            parent = parent.parent
        until_ns = call.ended_ns if call.end_seq <= seq else now_ns
        shown["parent_id"] = parent.node_id if parent else None
        shown["metadata"] = rules.data(shown["metadata"]) if shown["metadata"] else {}
        shown["is_context"] = _is_base(call)
        shown["context"] = rules.text(call.source.path)
        shown["iteration"] = call.iteration
        shown["offset_ms"] = (call.started_ns - began_ns) / 1_000_000
        shown["duration_ms"] = max(0, until_ns - call.started_ns) / 1_000_000
        yield shown


def _event(event: TraceEvent, rules: Redaction) -> dict[str, Any]:
    return {
        # A recorded payload is bounded already.
        name: (rules.uncut(value) if name in PAYLOAD else rules._data(value))
        if isinstance(value, str | dict | list)
        else value
        for name, value in event.to_dict().items()
    }


# Limits.


@dataclass(slots=True)
class Meter:
    """One limit: how much of it was used, and whether it stopped something."""

    budget: str
    unit: str
    used: float
    held: float
    ceiling: float
    tripped: bool = False

    @property
    def share(self) -> float:
        """The used share of the ceiling, from 0 to 1, or more if a bill was larger than its hold."""
        return self.used / self.ceiling if self.ceiling else 1.0

    def to_dict(self, rules: Redaction) -> dict[str, Any]:
        """The meter as JSON data."""
        return asdict(self) | {"budget": rules.text(self.budget, MAX_NAME)}


def _meters(of: Traced, graph: ExecutionGraph, events: Iterable[TraceEvent]) -> list[Meter]:
    """Return every limit of the context and of those around and below it, and any other that has stopped something.

    Of several budgets with one name, the one nearest to its ceiling is shown.
    """
    meters: dict[tuple[str, str], Meter] = {}
    for account, until_ns in _accounts(of, graph.clock.monotonic_ns()):
        balance = of.ledger.balance(account)  # type: ignore[union-attr]
        for meter in meters_of(balance, until_ns - account.opened_ns):
            _keep(meters, meter)
    for event in events:
        if isinstance(event, LimitTrace) and None not in (event.budget, event.unit, event.limit):
            key = (str(event.budget), str(event.unit))
            if key not in meters:
                _keep(meters, Meter(*key, event.used or 0.0, event.held or 0.0, event.limit or 0.0))
            if key in meters:
                meters[key].tripped = True
    return list(meters.values())


def _keep(meters: dict[tuple[str, str], Meter], meter: Meter) -> None:
    there = meters.get((meter.budget, meter.unit))
    if (there is None and len(meters) < MAX_METERS) or (there is not None and meter.share > there.share):
        meters[meter.budget, meter.unit] = meter


def meters_of(balance: Any, elapsed_ns: int) -> Iterator[Meter]:
    """The limits of an account, each as a meter."""
    for unit, used, held, ceiling in _figures(balance, elapsed_ns):
        if ceiling < NO_CEILING:
            scale = 1_000_000_000 if unit in ("usd", "seconds") else 1
            yield Meter(balance.name, unit, used / scale, held / scale, ceiling / scale)


def _figures(balance: Any, elapsed_ns: int) -> Iterator[tuple[str, float, float, float]]:
    """Unit, used, held and ceiling of every dimension, in the ledger's own units."""
    limits = balance.limits
    yield "usd", balance.spent_nanos + balance.unresolved_nanos, balance.held_nanos, limits.cost_nanos
    yield "steps", balance.steps, balance.steps_open, limits.steps
    yield "tokens", balance.tokens_in + balance.tokens_out, balance.tokens_held, limits.tokens
    yield "api calls", balance.api_calls, 0, limits.api_calls
    yield "retries", balance.retries, 0, limits.retries
    yield "seconds", elapsed_ns, 0, limits.time_ns


def _accounts(of: Any, now_ns: int) -> Iterator[tuple[Any, int]]:
    """The accounts of a context, of those above it and of those below, each with the end of its time.

    A bare recorder has none.
    """
    if getattr(of, "ledger", None) is None:
        return
    contexts = [of]
    for context in contexts:
        contexts += context.children
    ended = {id(each._account): each._base.ended_ns for each in reversed(contexts) if each._base.end_seq != OPEN}
    accounts = {id(each._account): each._account for each in contexts}
    parent = of._account.parent
    while parent is not None:
        accounts[id(parent)] = parent
        parent = parent.parent
    for key, account in accounts.items():
        yield account, ended.get(key, now_ns)


# The tree as text.


@dataclass(slots=True)
class Line:
    """One line, and the lines below it."""

    text: str
    below: list[Line] = field(default_factory=list)


def trace_tree(of: Traced, *, secrets: Iterable[str] = (), max_lines: int = MAX_LINES) -> str:
    """Return the run as a text tree: contexts with their iterations, calls and children, and the stats at the end."""
    graph, source = _place(of)
    if source is None:
        return "(nothing was recorded)"
    rules = Redaction(secrets)
    tree = _Tree(rules)
    for event in _events_within(graph, source, graph.seq):
        tree.add(event)
    top = tree.context(source.depth, source.path, source.name)
    lines = list(_drawn([top], max_lines))
    if graph.dropped_events:
        lines.insert(1, f"├── … {graph.dropped_events} earlier events are no longer kept")
    return "\n".join([*lines, "", *_stat_lines(graph.stats(source), rules)])


class _Tree:
    """Converts events to lines, each below the call or the context it happened in."""

    def __init__(self, rules: Redaction) -> None:
        self.rules = rules
        self._contexts: dict[tuple[int, str], Line] = {}
        self._calls: dict[str, Line] = {}
        self._depths: dict[str, int] = {}

    def context(self, depth: int, path: str, name: str) -> Line:
        """Return the line of a context; created on first use."""
        line = self._contexts.get((depth, path))
        if line is None:
            child = " (child)" if depth else ""
            line = self._contexts[depth, path] = Line(f'ExecutionContext "{self.rules.name(name)}"{child}')
        return line

    def add(self, event: TraceEvent) -> None:
        """Add an event."""
        if isinstance(event, CallStarted):
            self._start(event)
        elif isinstance(event, CallEnded):
            self._end(event)
        elif isinstance(event, RunStarted | ChildSpawnTrace):
            return  # shown by the context's own line
        elif not isinstance(event, RunCompleted) or event.termination_reason is not TerminationReason.SUCCESS:
            self._parent_line(event).below.append(Line(self._text(event)))

    def _start(self, event: CallStarted) -> None:
        parent_depth = self._depths.get(event.parent_id or "")
        self._depths[event.node_id] = event.depth
        if event.call_kind != "system" or (parent_depth is not None and parent_depth == event.depth):
            line = self._calls[event.node_id] = Line(_call_text(event, self.rules))
            self._parent_line(event).below.append(line)
            return
        context = self._calls[event.node_id] = self.context(event.depth, event.source, event.name)
        if parent_depth is not None:
            spawned = Line("ChildSpawnTrace " + _fields(self.rules, name=event.name), [context])
            self._calls[event.parent_id or ""].below.append(spawned)

    def _end(self, event: CallEnded) -> None:
        line = self._calls.get(event.node_id)
        if line is None:
            self._parent_line(event).below.append(Line(_call_text(event, self.rules)))
        elif line is not self._contexts.get((event.depth, event.source)):
            line.text = _call_text(event, self.rules)

    def _parent_line(self, event: TraceEvent) -> Line:
        """Return the line above an event: that of its call, or of its context."""
        parent = event.node_id if isinstance(event, CallSettled) else event.parent_id
        name = event.source.rpartition("/")[2]
        return self._calls.get(parent or "") or self.context(event.depth, event.source, name)

    def _text(self, event: TraceEvent) -> str:
        return f"{type(event).__name__} {_fields(self.rules, **_facts(event))}"


def _facts(event: TraceEvent) -> dict[str, object]:
    """Describe an event that is not about a call."""
    match event:
        case IterationStartTrace():
            return {"iteration": event.iteration}
        case IterationEndTrace():
            return {"iteration": event.iteration, "action": _Word(event.action)}
        case ChildCompleteTrace():
            return {"name": event.child_name, "reason": _Word(event.termination_reason)}
        case RunCompleted():
            return {"reason": _Word(event.termination_reason), "error": event.error}
        case CallSettled():
            return {"tokens": event.input_tokens + event.output_tokens or None, "cost": _Usd(event.cost)}
        case CompactionTrace():
            return {"before": event.before, "after": event.after}
        case LimitTrace():
            return {"stop_reason": _Word(event.stop_reason), "budget": event.budget, "message": event.message}
        case SafetyTrace():
            return {"event": _Word(event.event_type), "decision": _Word(event.decision), "reason": event.reason}
        case DivergenceTrace():
            return {"shape": event.shape, "message": event.message}
        case ErrorTrace():
            return {"error": event.error_class, "message": event.message}
        case CustomTrace():
            return {"name": event.name, "data": event.data or None}
        case _:
            return {}


class _Word(str):
    """Quote the text unless it is one word."""


class _Usd(float):
    """An amount of money."""


class _Ms(float):
    """A duration."""


def _call_text(event: CallStarted | CallEnded, rules: Redaction) -> str:
    title = {"llm": "ModelCallTrace", "tool": "ToolCallTrace"}.get(event.call_kind, "StepTrace")
    about: dict[str, object] = {}
    if event.call_kind == "llm":
        about["name"] = event.name if event.name != event.model else None
        about["model"] = event.model
    else:
        about["tool" if event.call_kind == "tool" else "step"] = event.name
    if isinstance(event, CallStarted):
        return f"{title} {_fields(rules, **about, status=_Word('running'))}"
    about["tokens"] = event.input_tokens + event.output_tokens or None
    about["cost"] = _Word("unknown") if event.cost_unknown else _Usd(event.cost) if event.cost else None
    about["duration"] = _Ms(event.duration_ms) if event.duration_ms else None
    if event.status == "fail":
        about["error"] = f"{event.error}: {event.stop_reason}" if event.stop_reason else event.error
    elif event.status == "halt":
        about["halted"] = event.stop_reason or "halted"
    about["abandoned"] = event.abandoned or None
    if isinstance(event, ModelCallTrace | ToolCallTrace):
        about["input"], about["output"] = event.input, event.output
    return f"{title} {_fields(rules, **about)}"


def _fields(rules: Redaction, **about: object) -> str:
    shown = (f"{name}: {_shown(value, rules)}" for name, value in about.items() if value is not None)
    return "{" + ", ".join(shown) + "}"


def _shown(value: object, rules: Redaction) -> str:
    if isinstance(value, _Usd):
        return format_usd(to_nanos(float(value)))
    if isinstance(value, _Ms):
        return f"{value:.4g}ms" if value < 1_000 else f"{value / 1_000:.4g}s"
    if isinstance(value, _Word) and value.isidentifier():
        return rules.name(value)
    safe = rules.name(value) if isinstance(value, str) else rules.data(value)
    text = json.dumps(safe, ensure_ascii=False)
    return printable(text if len(text) <= MAX_NAME + 2 else f"{text[:MAX_NAME]}…")


def _total_cost(stats: ExecutionStats) -> object:
    if not stats.unknown_costs:
        return _Usd(stats.total_cost)
    return format_cost(to_nanos(stats.total_cost), stats.unknown_costs)


def _stat_lines(stats: ExecutionStats, rules: Redaction) -> list[str]:
    figures: dict[str, object] = {
        "TotalInputTokens": stats.total_input_tokens,
        "TotalOutputTokens": stats.total_output_tokens,
        "TotalCost": _total_cost(stats),
        "InputTokensByModel": stats.input_tokens_by_model,
        "OutputTokensByModel": stats.output_tokens_by_model,
        "CostByModel": stats.cost_by_model,
        "ToolCallCount": stats.tool_call_count,
        "ToolCallsByName": stats.tool_calls_by_name,
    }
    lines = ["Stats (auto-aggregated, includes children):"]
    for name, figure in figures.items():
        value = _renamed(figure, rules) if isinstance(figure, dict) else figure
        lines.append(f"  {name}: {json.dumps(value) if isinstance(value, dict) else _shown(value, rules)}")
    return lines


def _drawn(top: Sequence[Line], max_lines: int) -> Iterator[str]:
    """Render the lines with their branches; lines beyond the maximum are counted."""
    # A stack, not recursion: agent trees may be deeper than Python's.
    stack = [(line, "", "", "") for line in reversed(top)]
    drawn = 0
    while stack and drawn < max_lines:
        line, indent, branch, onward = stack.pop()
        yield indent + branch + line.text
        drawn += 1
        last = len(line.below) - 1
        for at in range(last, -1, -1):
            more = ("└── ", "    ") if at == last else ("├── ", "│   ")
            stack.append((line.below[at], indent + onward, *more))
    if stack:
        yield f"… and {_count(line for line, *_ in stack)} more lines"


def _count(lines: Iterable[Line]) -> int:
    waiting = list(lines)
    for line in waiting:
        waiting += line.below
    return len(waiting)


# The call tree as a picture.

MARKS = {"created": "·", "running": "…", "success": "✓", "fail": "✗", "halt": "■"}
STYLES = {
    "success": "fill:#e6f4ea,stroke:#137333,color:#0b3d1e",
    "fail": "fill:#fce8e6,stroke:#b3261e,color:#5c1410",
    "halt": "fill:#fef0d9,stroke:#b06000,color:#5a3200",
    "running": "fill:#e8f0fe,stroke:#1a56b0,color:#0b2a5c",
}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ._-/:,$→✓✗■…·")


def trace_mermaid(of: Traced, *, secrets: Iterable[str] = (), max_calls: int = MAX_DRAWN) -> str:
    """Return the call tree as a Mermaid flowchart with at most `max_calls` calls, and the number of the others."""
    graph, source = _place(of)
    rules = Redaction(secrets)
    seq, calls = graph.calls()
    calls = [call for call in calls if _is_within(call.source, source)]
    drawn = {call.number for call in calls[:max_calls]}
    lines, links = ["flowchart TD"], []
    for call in calls[:max_calls]:
        status = call.status_at(seq)
        style = f":::{status}" if status in STYLES else ""
        lines.append(f'    c{call.number}["{_label(call, status, call.end_seq <= seq, rules)}"]{style}')
        parent = call.parent
        while parent is not None and parent.number not in drawn:
            parent = parent.parent
        if parent is not None:
            links.append(f"    c{parent.number} --> c{call.number}")
    if len(calls) > len(drawn):
        links.append(f'    more["… and {len(calls) - len(drawn)} more calls"]')
    return "\n".join([*lines, *links, *(f"    classDef {name} {style}" for name, style in STYLES.items())]) + "\n"


def _label(call: CallRecord, status: str, ended: bool, rules: Redaction) -> str:
    parts = [f"{MARKS[status]} {call.name}"]
    if call.kind != "system":
        parts.append(call.kind if call.model is None else f"{call.kind} {call.model}")
    if ended and (cost := call.cost + (call.settled.cost if call.settled else 0)):
        parts.append(format_usd(cost))
    elif ended and call.is_unpaid_at(call.end_seq):
        parts.append("cost unknown")
    if ended and status in ("fail", "halt") and (why := call.error_class or call.stop_reason):
        parts.append(why.partition(":")[0])
    return "<br/>".join(_entities(rules.text(part, 80)) for part in parts)


def _entities(text: str) -> str:
    """Escape text for a Mermaid label: all but plain letters and digits become entity codes."""
    return "".join(c if c in _PLAIN else f"#{ord(c)};" for c in printable(text))
