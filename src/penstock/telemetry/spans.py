"""Write events as spans, by the GenAI conventions of OpenTelemetry.

    invoke_workflow     the run
    invoke_agent        a child context; an iteration of a loop
    chat                a model call
    execute_tool        a tool call
    (the step's name)   a step of a graph

`SpanWriter` is a fold over the run's log, which is in order: the parent of a call has begun before it and is still
open, so its span is available. Times are those of the records: of calls to the nanosecond, of everything else to the
millisecond. A span that has ended cannot be changed: information about a call that arrives after its end (the limit
that refused it, a late bill) is added to the enclosing span.

Knows the API of OpenTelemetry, and nothing of the exporter. Runs on one thread.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider

from penstock.money import known_usd, to_nanos
from penstock.runtime.context import ExecutionContext
from penstock.telemetry.payloads import payload_attributes
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    ChildCompleteTrace,
    CompactionTrace,
    CustomTrace,
    DivergenceTrace,
    ErrorTrace,
    IterationEndTrace,
    IterationStartTrace,
    LimitTrace,
    ModelCallTrace,
    RunCompleted,
    SafetyTrace,
    ToolCallTrace,
    TraceEvent,
)
from penstock.tracing.record import CallRecord
from penstock.tracing.redaction import MAX_NAME, Redaction
from penstock.tracing.tree import meters_of

Attribute = str | bool | int | float
Attributes = dict[str, Attribute]

INSTRUMENTATION = "penstock"
YIELD_EVERY = 32
GATHER_S = 0.1
"""Time events accumulate before they are read: waking up for each event costs the run more than writing it."""
MAX_FAILED_KEPT = 1_000
"""Maximum number of failed attempts remembered for the link of the next attempt."""

PROVIDERS = (
    ("claude", "anthropic"),
    ("anthropic", "anthropic"),
    ("gpt", "openai"),
    ("o1", "openai"),
    ("o3", "openai"),
    ("o4", "openai"),
    ("openai", "openai"),
    ("text-embedding", "openai"),
    ("gemini", "gcp.gemini"),
    ("mistral", "mistral_ai"),
    ("ministral", "mistral_ai"),
    ("codestral", "mistral_ai"),
    ("command", "cohere"),
    ("cohere", "cohere"),
    ("deepseek", "deepseek"),
    ("grok", "x_ai"),
    ("sonar", "perplexity"),
    ("groq", "groq"),
    ("bedrock", "aws.bedrock"),
    ("azure", "azure.ai.openai"),
    ("vertex", "gcp.vertex_ai"),
)
"""Prefixes of model names, each with its provider."""


def provider_of(model: str | None, metadata: Mapping[str, object]) -> str:
    """Return the provider of the model: from the call's metadata, else from the model's name, else `_OTHER`."""
    provider = metadata.get("provider")
    if isinstance(provider, str) and provider:
        return provider
    name = (model or "").lower()
    return next((known for prefix, known in PROVIDERS if name.startswith(prefix)), "_OTHER")


@dataclass(slots=True)
class OpenSpan:
    """A span that has started, with what is needed to add children to it."""

    span: Span
    context: Context
    start_ns: int
    place: tuple[int, str]
    """The depth and the path of its context."""
    is_context: bool = False
    model: str | None = None
    attempt: int = 1


class SpanWriter:
    """An observer that writes a run's events as spans."""

    def __init__(
        self, context: ExecutionContext, tracer_provider: TracerProvider | None, rules: Redaction, content: bool
    ) -> None:
        self.written = 0
        self.failures = 0
        self.last_error: BaseException | None = None
        self.flushing = threading.Event()
        """Set while a caller waits for everything to be written."""
        self._context = context
        self._graph = context.graph
        self._tracer = trace.get_tracer(INSTRUMENTATION, tracer_provider=tracer_provider)
        self._around = get_current()
        self._rules = rules
        self._content = content
        self._open: dict[str, OpenSpan] = {}
        """Spans of running calls, by call id."""
        self._places: dict[tuple[int, str], str] = {}
        """The call that represents a context, by the context's depth and path."""
        self._iterations: dict[tuple[int, str], OpenSpan] = {}
        self._failed: dict[tuple[str | None, str, str, int], SpanContext] = {}
        self._root: tuple[str, CallEnded | None] | None = None
        """The run's own call and, once it has arrived, its end: the run's termination reason follows right after it."""
        self._records: dict[str, CallRecord] = {}

    def __call__(self, events: Sequence[TraceEvent]) -> None:
        """Write these events; an event that the tracer cannot take is counted and skipped."""
        self._records = self._records_of(events)
        for at, event in enumerate(events, 1):
            try:
                self._write(event)
            except Exception as error:
                self.failures += 1
                self.last_error = error
            if at % YIELD_EVERY == 0:
                time.sleep(0)  # yield the interpreter to the run's own thread
        if not self._graph.closed:
            self.flushing.wait(GATHER_S)

    def _records_of(self, events: Sequence[TraceEvent]) -> dict[str, CallRecord]:
        """Return the records behind the events, which have times in nanoseconds; holds the lock only briefly."""
        with self._graph.lock:
            entries = self._graph._since(events[0].seq - 1, len(events))
        return {entry.node_id: entry for entry in entries if isinstance(entry, CallRecord)}

    def _write(self, event: TraceEvent) -> None:
        match event:
            case CallStarted():
                self._begin(event)
            case CallEnded():
                self._end(event)
            case IterationStartTrace():
                self._begin_iteration(event)
            case IterationEndTrace():
                self._end_iteration(event)
            case RunCompleted():
                self._end_run(event)
            case _:
                if span_event := self._span_event(event):
                    name, attributes = span_event
                    self._around_event(event).span.add_event(name, attributes, event.at_ms * 1_000_000)

    # Calls.

    def _begin(self, event: CallStarted | CallEnded, start_ns: int | None = None) -> OpenSpan:
        parent = self._open.get(event.parent_id or "")
        is_context = event.call_kind == "system" and (parent is None or event.depth > parent.place[0])
        metadata = event.metadata if isinstance(event, CallStarted) else {}
        attempt = metadata.get("attempt", 1)
        attempt = attempt if isinstance(attempt, int) else 1
        name, kind, attributes = self._named(event, is_context, metadata)
        attributes |= self._about(event, metadata)
        before = self._failed.pop((event.parent_id, event.call_kind, event.name, attempt - 1), None)
        opened = self._start(
            name,
            self._parent(event, parent),
            (event.depth, event.source),
            kind,
            attributes,
            self._began_ns(event) if start_ns is None else start_ns,
            [] if before is None else [Link(before, {"penstock.link": "previous_attempt"})],
        )
        opened.is_context, opened.model, opened.attempt = is_context, event.model, attempt
        self._open[event.node_id] = opened
        if is_context:
            self._places[opened.place] = event.node_id
        if event.parent_id is None:
            self._root = (event.node_id, None)
            opened.span.set_attributes(self._about_run())
        return opened

    def _start(
        self,
        name: str,
        parent: Context,
        place: tuple[int, str],
        kind: SpanKind,
        attributes: Attributes,
        start_ns: int,
        links: Sequence[Link] = (),
    ) -> OpenSpan:
        span = self._tracer.start_span(
            name,
            context=parent,
            kind=kind,
            attributes=attributes,
            links=links,
            start_time=start_ns,
            record_exception=False,
            set_status_on_exception=False,
        )
        return OpenSpan(span, trace.set_span_in_context(span, parent), start_ns, place)

    def _named(
        self, event: CallStarted | CallEnded, is_context: bool, metadata: Mapping[str, object]
    ) -> tuple[str, SpanKind, Attributes]:
        """Return the span's name and kind, and the attributes the conventions require."""
        name = self._rules.text(event.name, MAX_NAME)
        if event.call_kind == "llm":
            about: Attributes = {"gen_ai.operation.name": "chat", "penstock.call.name": name}
            about["gen_ai.provider.name"] = self._rules.text(provider_of(event.model, metadata), MAX_NAME)
            about |= self._model(event.model)
            return self._chat(event.model), SpanKind.CLIENT, about
        if event.call_kind == "tool":
            about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
            return f"execute_tool {name}", SpanKind.INTERNAL, about
        if not is_context:
            return name or "step", SpanKind.INTERNAL, {"penstock.step.name": name}
        if event.parent_id is None:
            about = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": name}
            return f"invoke_workflow {name}", SpanKind.INTERNAL, about
        return f"invoke_agent {name}", SpanKind.INTERNAL, _agent(name)

    def _chat(self, model: str | None) -> str:
        return f"chat {self._rules.text(model, MAX_NAME)}" if model else "chat"

    def _model(self, model: str | None) -> Attributes:
        return {"gen_ai.request.model": self._rules.text(model, MAX_NAME)} if model else {}

    def _about(self, event: CallStarted | CallEnded, metadata: Mapping[str, object]) -> Attributes:
        """Return the attributes of every call: its run, its context, and its attempt, fallback or skip."""
        about: Attributes = {
            "penstock.run_id": self._rules.text(event.run_id, MAX_NAME),
            "penstock.call_id": event.node_id,
            "penstock.context": self._rules.text(event.source, MAX_NAME),
        }
        if event.iteration:
            about["penstock.iteration"] = event.iteration
        for word in ("attempt", "fallback", "skip"):
            if (value := metadata.get(word)) is not None:
                about[f"penstock.{word}"] = value if isinstance(value, int) else self._rules.text(str(value), MAX_NAME)
        return about

    def _about_run(self) -> Attributes:
        metadata = self._context.metadata
        fields = {
            "penstock.request_id": metadata.request_id,
            "penstock.org_id": metadata.org_id,
            "penstock.team": metadata.team,
            "penstock.service": metadata.service,
            "user.id": metadata.user_id,
        }
        about: Attributes = {name: self._rules.text(str(value), MAX_NAME) for name, value in fields.items() if value}
        for name, value in dict(self._rules.data(metadata.tags)).items():
            about[f"penstock.tag.{name}"] = value if isinstance(value, str | bool | int | float) else json.dumps(value)
        return about

    def _end(self, event: CallEnded) -> None:
        opened = self._open.get(event.node_id)
        if opened is None:
            # The start event was lost: write the data of the end event.
            opened = self._begin(event, self._ended_ns(event) - round(event.duration_ms * 1_000_000))
        if event.parent_id is None:
            self._root = (event.node_id, event)
            return
        del self._open[event.node_id]
        if opened.is_context:
            self._places.pop(opened.place, None)
        if event.status == "fail":
            if len(self._failed) >= MAX_FAILED_KEPT:
                del self._failed[next(iter(self._failed))]
            key = (event.parent_id, event.call_kind, event.name, opened.attempt)
            self._failed[key] = opened.span.get_span_context()
        self._finish(opened, event, self._ended_ns(event))

    def _finish(self, opened: OpenSpan, event: CallEnded, end_ns: int) -> None:
        opened.span.set_attributes(self._outcome(event))
        if event.call_kind == "llm" and event.model != opened.model:
            # Only the answer named the model, or a hook chose another.
            opened.span.update_name(self._chat(event.model))
            opened.span.set_attribute("gen_ai.provider.name", self._rules.text(provider_of(event.model, {}), MAX_NAME))
        if event.status != "success":
            opened.span.set_status(Status(StatusCode.ERROR, self._rules.text(_message(event))))
        opened.span.end(end_ns)
        self.written += 1

    def _outcome(self, event: CallEnded) -> Attributes:
        about: Attributes = {"penstock.status": event.status}
        about |= {"penstock.cost.unknown": True} if event.cost_unknown else {"penstock.cost.usd": event.cost}
        if event.call_kind == "llm":
            about["gen_ai.usage.input_tokens"] = event.input_tokens
            about["gen_ai.usage.output_tokens"] = event.output_tokens
            about |= self._model(event.model)
        if self._content and isinstance(event, ModelCallTrace | ToolCallTrace):
            about |= payload_attributes(event, self._rules)
        if event.retries_used:
            about["penstock.retries_used"] = event.retries_used
        if event.abandoned:
            about["penstock.abandoned"] = True
        if event.status == "halt":
            about["penstock.stop_reason"] = self._rules.text(_reason(event), MAX_NAME)
        if event.status != "success":
            about["error.type"] = self._rules.text((event.status == "fail" and event.error) or _reason(event), MAX_NAME)
        return about

    def _end_run(self, event: RunCompleted) -> None:
        """End the run's span last; spans still open because their end events were lost end with it."""
        now_ns = event.at_ms * 1_000_000
        node_id, ended = self._root or ("", None)
        root = self._open.pop(node_id, None)
        for lost in [*self._iterations.values(), *reversed(self._open.values())]:
            lost.span.set_attribute("penstock.end_lost", True)
            lost.span.end(now_ns)
            self.written += 1
        self._iterations.clear()
        self._open.clear()
        if root is None:
            return
        root.span.set_attribute("penstock.termination_reason", str(event.termination_reason))
        root.span.set_attributes(self._totals(ended))
        if ended is not None:
            self._finish(root, ended, self._ended_ns(ended))
        else:
            root.span.end(now_ns)
            self.written += 1

    def _totals(self, ended: CallEnded | None) -> Attributes:
        """Return the run's usage, in total and relative to its limits."""
        stats = self._graph.stats(self._context._source)
        totals: Attributes = {
            "penstock.tokens.input": stats.total_input_tokens,
            "penstock.tokens.output": stats.total_output_tokens,
            "penstock.model_calls": stats.model_call_count,
            "penstock.tool_calls": stats.tool_call_count,
        }
        if (cost := known_usd(to_nanos(stats.total_cost), stats.unknown_costs)) is not None:
            totals["penstock.cost.total_usd"] = cost
        if stats.unknown_costs:  # the total is then a lower bound
            totals["penstock.cost.unknown_calls"] = stats.unknown_costs
        account = self._context._account
        balance = self._context.ledger.balance(account)
        elapsed_ns = round(ended.duration_ms * 1_000_000) if ended is not None else 0
        for meter in meters_of(balance, elapsed_ns):
            unit = meter.unit.replace(" ", "_")
            totals[f"penstock.budget.{unit}.limit"] = meter.ceiling
            totals[f"penstock.budget.{unit}.used"] = meter.used
        return totals

    # Iterations.

    def _begin_iteration(self, event: IterationStartTrace) -> None:
        place = (event.depth, event.source)
        if place in self._iterations:
            self._end_open_iteration(place, event.at_ms)
        name = self._rules.text(event.source.rpartition("/")[2], MAX_NAME)
        attributes = _agent(name) | {
            "penstock.run_id": self._rules.text(event.run_id, MAX_NAME),
            "penstock.context": self._rules.text(event.source, MAX_NAME),
            "penstock.iteration": event.iteration,
        }
        parent = self._around_event(event)
        # Events have times in milliseconds: an iteration does not begin before the context it is in.
        start_ns = max(event.at_ms * 1_000_000, parent.start_ns)
        self._iterations[place] = self._start(
            f"invoke_agent {name}", parent.context, place, SpanKind.INTERNAL, attributes, start_ns
        )

    def _end_iteration(self, event: IterationEndTrace) -> None:
        place = (event.depth, event.source)
        if (opened := self._iterations.get(place)) is not None:
            opened.span.set_attribute("penstock.iteration.action", self._rules.text(event.action, MAX_NAME))
            self._end_open_iteration(place, event.at_ms)

    def _end_open_iteration(self, place: tuple[int, str], at_ms: int) -> None:
        # To the end of that millisecond, so that its children do not end after it.
        self._iterations.pop(place).span.end((at_ms + 1) * 1_000_000)
        self.written += 1

    # Parents.

    def _parent(self, event: CallStarted | CallEnded, parent: OpenSpan | None) -> Context:
        """Return the parent of a call: the call that made it; or, for calls made by a loop, the iteration."""
        parent = parent or self._open_at((event.depth, event.source))
        if parent is None:
            return self._around
        iteration = self._iterations.get(parent.place) if parent.is_context else None
        return parent.context if iteration is None else iteration.context

    def _open_at(self, place: tuple[int, str]) -> OpenSpan | None:
        """Return the span of a context; the run's, if that is not known; None if neither is open."""
        root = self._root[0] if self._root else ""
        return self._open.get(self._places.get(place, "")) or self._open.get(root)

    def _around_event(self, event: TraceEvent) -> OpenSpan:
        """Return the open span that an event belongs to: its call's, its context's, or the run's."""
        place = (event.depth, event.source)
        opened = self._open.get(event.parent_id or "") or self._open_at(place)
        return opened or OpenSpan(trace.INVALID_SPAN, self._around, 0, place)

    def _began_ns(self, event: CallStarted | CallEnded) -> int:
        record = self._records.get(event.node_id)
        return event.at_ms * 1_000_000 if record is None else record.started_ns + self._graph.wall_offset_ns

    def _ended_ns(self, event: CallEnded) -> int:
        record = self._records.get(event.node_id)
        return event.at_ms * 1_000_000 if record is None else record.ended_ns + self._graph.wall_offset_ns

    # Everything else.

    def _span_event(self, event: TraceEvent) -> tuple[str, Attributes] | None:
        """Return an event that is not a call as the name and attributes of a span event; None if it has none."""
        match event:
            case LimitTrace():
                budget = {"name": event.budget, "unit": event.unit, "limit": event.limit}
                budget |= {"used": event.used, "held": event.held, "asked": event.asked}
                fields = {f"penstock.budget.{name}": value for name, value in budget.items()}
                fields |= {"penstock.stop_reason": event.stop_reason, "penstock.message": event.message}
                return "penstock.limit_reached", self._safe(fields | {"penstock.call_id": event.node_id})
            case SafetyTrace():
                fields = {"event_type": event.event_type, "decision": event.decision, "reason": event.reason}
                fields |= {"hook": event.hook}
                return "penstock.safety", self._safe({f"penstock.safety.{name}": fields[name] for name in fields})
            case DivergenceTrace():
                fields = {"penstock.divergence.shape": event.shape, "penstock.message": event.message}
                return "penstock.divergence", self._safe(fields)
            case ErrorTrace():
                return "exception", self._safe(
                    {"exception.type": event.error_class, "exception.message": event.message}
                )
            case CompactionTrace():
                return "penstock.compacted", {"penstock.before": event.before, "penstock.after": event.after}
            case CallSettled():
                return "penstock.call_settled", self._safe(
                    {
                        "penstock.call_id": event.node_id,
                        "penstock.cost.usd": event.cost,
                        "gen_ai.usage.input_tokens": event.input_tokens,
                        "gen_ai.usage.output_tokens": event.output_tokens,
                    }
                )
            case ChildCompleteTrace():
                return "penstock.child_completed", self._safe(
                    {
                        "penstock.child": event.child_name,
                        "penstock.termination_reason": str(event.termination_reason),
                        "penstock.call_id": event.node_id,
                    }
                )
            case CustomTrace():
                fields = {"penstock.event.name": event.name}
                if self._content:
                    fields["penstock.event.data"] = json.dumps(self._rules.data(event.data), ensure_ascii=False)
                return "penstock.custom", self._safe(fields)
            case _:
                return None

    def _safe(self, fields: Mapping[str, object]) -> Attributes:
        return {
            name: self._rules.text(value) if isinstance(value, str) else value
            for name, value in fields.items()
            if isinstance(value, str | bool | int | float)
        }


def _agent(name: str) -> Attributes:
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}


def _reason(event: CallEnded) -> str:
    """Return the short reason why it stopped."""
    return (event.stop_reason or event.status).partition(":")[0]


def _message(event: CallEnded) -> str:
    if event.status == "fail" and event.error:
        return f"{event.error}: {event.stop_reason}" if event.stop_reason else event.error
    return event.stop_reason or event.status
