"""Events as spans, by the GenAI conventions of OpenTelemetry.

    invoke_workflow     the run
    invoke_agent        a child context; an iteration of a loop
    chat                a model call
    execute_tool        a tool call
    (the step's name)   a step of a graph

`SpanWriter` is a fold over the run's log, which is in order: what a call stands under has begun before it and is open,
so its span is at hand. Times are those of the records: of calls to the nanosecond, of everything else to the
millisecond. A span that has ended cannot be changed any
more: what is told of a call after its end (the limit that refused it, a late bill) stands at the span around it.

Knows the API of OpenTelemetry, and nothing of who exports. Runs on one thread.
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

from penstock.runtime.context import ExecutionContext
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
    RunCompleted,
    SafetyTrace,
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
"""How long events are let gather before they are read: to wake up for each costs the run more than to write it."""
MAX_FAILED_KEPT = 1_000
"""Failed attempts that are remembered for the link of the next one."""

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
"""How a model's name begins, and whose it is."""


def provider_of(model: str | None, metadata: Mapping[str, object]) -> str:
    """Who serves the model: what the call says, else what the model's name tells, else `_OTHER`."""
    said = metadata.get("provider")
    if isinstance(said, str) and said:
        return said
    name = (model or "").lower()
    return next((provider for start, provider in PROVIDERS if name.startswith(start)), "_OTHER")


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun, and what is needed to put others under it."""

    span: Span
    context: Context
    start_ns: int
    place: tuple[int, str]
    """The depth and the path of the context it is in."""
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
        self.hurry = threading.Event()
        """Set while somebody waits for everything to be written."""
        self._context = context
        self._graph = context.graph
        self._tracer = trace.get_tracer(INSTRUMENTATION, tracer_provider=tracer_provider)
        self._around = get_current()
        self._rules = rules
        self._content = content
        self._open: dict[str, OpenSpan] = {}
        """The spans of calls under way, by call id."""
        self._places: dict[tuple[int, str], str] = {}
        """The call that stands for a context, by the context's depth and path."""
        self._iterations: dict[tuple[int, str], OpenSpan] = {}
        self._failed: dict[tuple[str | None, str, str, int], SpanContext] = {}
        self._root: tuple[str, CallEnded | None] | None = None
        """The run's own call and, once it has come, its end: the run's reason is told right after it."""
        self._records: dict[str, CallRecord] = {}

    def __call__(self, events: Sequence[TraceEvent]) -> None:
        """Write what these events tell; one that the tracer cannot take is counted and passed over."""
        self._records = self._records_of(events)
        for at, event in enumerate(events, 1):
            try:
                self._write(event)
            except Exception as error:
                self.failures += 1
                self.last_error = error
            if at % YIELD_EVERY == 0:
                time.sleep(0)  # the run's own thread may want the interpreter
        if not self._graph.closed:
            self.hurry.wait(GATHER_S)

    def _records_of(self, events: Sequence[TraceEvent]) -> dict[str, CallRecord]:
        """The records behind the events, which know the time to the nanosecond; one short look under the lock."""
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
                if told := self._told(event):
                    name, attributes = told
                    self._around_event(event).span.add_event(name, attributes, event.at_ms * 1_000_000)

    # Calls.

    def _begin(self, event: CallStarted | CallEnded, start_ns: int | None = None) -> OpenSpan:
        above = self._open.get(event.parent_id or "")
        is_context = event.call_kind == "system" and (above is None or event.depth > above.place[0])
        metadata = event.metadata if isinstance(event, CallStarted) else {}
        attempt = metadata.get("attempt", 1)
        attempt = attempt if isinstance(attempt, int) else 1
        name, kind, attributes = self._named(event, is_context, metadata)
        attributes |= self._about(event, metadata)
        before = self._failed.pop((event.parent_id, event.call_kind, event.name, attempt - 1), None)
        opened = self._start(
            name,
            self._parent(event, above),
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
        """The span's name and kind, and what the conventions want to be said of it."""
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
        """What is said of every call: whose it is, where it stands, and what stands for what."""
        about: Attributes = {
            "penstock.run_id": self._rules.text(event.run_id, MAX_NAME),
            "penstock.call_id": event.node_id,
            "penstock.context": self._rules.text(event.source, MAX_NAME),
        }
        if event.iteration:
            about["penstock.iteration"] = event.iteration
        for word in ("attempt", "fallback", "skip"):
            if (said := metadata.get(word)) is not None:
                about[f"penstock.{word}"] = said if isinstance(said, int) else self._rules.text(str(said), MAX_NAME)
        return about

    def _about_run(self) -> Attributes:
        metadata = self._context.metadata
        said = {
            "penstock.request_id": metadata.request_id,
            "penstock.org_id": metadata.org_id,
            "penstock.team": metadata.team,
            "penstock.service": metadata.service,
            "user.id": metadata.user_id,
        }
        about: Attributes = {name: self._rules.text(str(value), MAX_NAME) for name, value in said.items() if value}
        for name, value in dict(self._rules.data(metadata.tags)).items():
            about[f"penstock.tag.{name}"] = value if isinstance(value, str | bool | int | float) else json.dumps(value)
        return about

    def _end(self, event: CallEnded) -> None:
        opened = self._open.get(event.node_id)
        if opened is None:
            # Its beginning was lost: what the end knows of it is shown all the same.
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
            # Only the answer named it, or a hook chose another.
            opened.span.update_name(self._chat(event.model))
            opened.span.set_attribute("gen_ai.provider.name", self._rules.text(provider_of(event.model, {}), MAX_NAME))
        if event.status != "success":
            opened.span.set_status(Status(StatusCode.ERROR, self._rules.text(_message(event))))
        opened.span.end(end_ns)
        self.written += 1

    def _outcome(self, event: CallEnded) -> Attributes:
        about: Attributes = {"penstock.status": event.status, "penstock.cost.usd": event.cost}
        if event.call_kind == "llm":
            about["gen_ai.usage.input_tokens"] = event.input_tokens
            about["gen_ai.usage.output_tokens"] = event.output_tokens
            about |= self._model(event.model)
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
        """The run's span ends last; whatever is open still, because its end was lost, ends with it."""
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
        """What the run used, and what of its limits."""
        stats = self._graph.stats(self._context._source)
        totals: Attributes = {
            "penstock.cost.total_usd": stats.total_cost,
            "penstock.tokens.input": stats.total_input_tokens,
            "penstock.tokens.output": stats.total_output_tokens,
            "penstock.model_calls": stats.model_call_count,
            "penstock.tool_calls": stats.tool_call_count,
        }
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
        # Events know the millisecond only: an iteration does not begin before the context it is in.
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
        # To the end of that millisecond, so that what happened inside does not stick out.
        self._iterations.pop(place).span.end((at_ms + 1) * 1_000_000)
        self.written += 1

    # Where things stand.

    def _parent(self, event: CallStarted | CallEnded, above: OpenSpan | None) -> Context:
        """The span a call stands under: the call that made it; or, for what a loop makes, the iteration."""
        above = above or self._open_at((event.depth, event.source))
        if above is None:
            return self._around
        iteration = self._iterations.get(above.place) if above.is_context else None
        return above.context if iteration is None else iteration.context

    def _open_at(self, place: tuple[int, str]) -> OpenSpan | None:
        """The span of a context; the run's, if that is not known; None if neither is open."""
        root = self._root[0] if self._root else ""
        return self._open.get(self._places.get(place, "")) or self._open.get(root)

    def _around_event(self, event: TraceEvent) -> OpenSpan:
        """The open span that an event belongs to: its call's, its context's, or the run's."""
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

    def _told(self, event: TraceEvent) -> tuple[str, Attributes] | None:
        """An event that is no call, as the event of a span."""
        match event:
            case LimitTrace():
                budget = {"name": event.budget, "unit": event.unit, "limit": event.limit}
                budget |= {"used": event.used, "held": event.held, "asked": event.asked}
                said = {f"penstock.budget.{name}": value for name, value in budget.items()}
                said |= {"penstock.stop_reason": event.stop_reason, "penstock.message": event.message}
                return "penstock.limit_reached", self._safe(said | {"penstock.call_id": event.node_id})
            case SafetyTrace():
                said = {"event_type": event.event_type, "decision": event.decision, "reason": event.reason}
                said |= {"hook": event.hook}
                return "penstock.safety", self._safe({f"penstock.safety.{name}": said[name] for name in said})
            case DivergenceTrace():
                said = {"penstock.divergence.shape": event.shape, "penstock.message": event.message}
                return "penstock.divergence", self._safe(said)
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
                said = {"penstock.event.name": event.name}
                if self._content:
                    said["penstock.event.data"] = json.dumps(self._rules.data(event.data), ensure_ascii=False)
                return "penstock.custom", self._safe(said)
            case _:
                return None

    def _safe(self, said: Mapping[str, object]) -> Attributes:
        return {
            name: self._rules.text(value) if isinstance(value, str) else value
            for name, value in said.items()
            if isinstance(value, str | bool | int | float)
        }


def _agent(name: str) -> Attributes:
    return {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}


def _reason(event: CallEnded) -> str:
    """The word for why it stopped."""
    return (event.stop_reason or event.status).partition(":")[0]


def _message(event: CallEnded) -> str:
    if event.status == "fail" and event.error:
        return f"{event.error}: {event.stop_reason}" if event.stop_reason else event.error
    return event.stop_reason or event.status
