"""The usage of a run: a snapshot of its figures, calls and safety events at one moment, and its totals as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from penstock.clock import utc_from_ns
from penstock.containment import accounts
from penstock.containment.limits import UNLIMITED
from penstock.containment.safety import SafetyEvent
from penstock.money import format_cost, format_usd, to_usd
from penstock.runtime.cancellation import Cancellation
from penstock.runtime.handle import Handle
from penstock.runtime.run import Run
from penstock.stops import Stop, StopReason
from penstock.tracing.graph_state import GraphState, by_number
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import CallRecord

NodeStatus = Literal["running", "ok", "halted", "aborted", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One call; `end_ts` is None while it is running."""

    node_id: str
    parent_id: str | None
    """The call that made this one; None if no call did."""
    kind: CallKind
    operation_name: str
    start_ts: datetime
    end_ts: datetime | None
    status: NodeStatus
    cost_usd: float
    retries_used: int
    cost_unknown: bool = False
    """Whether the call was billed at an unknown cost, so that `cost_usd` is meaningless."""


@dataclass(frozen=True)
class ContextSnapshot:
    """The state of a run: its figures, its calls, its safety events and its call tree, all up to `seq`."""

    chain_id: str
    request_id: str
    step_count: int
    """Calls that succeeded."""
    cost_usd_accumulated: float
    retries_used: int
    aborted: bool
    abort_reason: str | None
    elapsed_ms: float
    nodes: list[NodeRecord]
    events: list[SafetyEvent]
    seq: int = 0
    attempts: int = 0
    """Calls that were admitted, whatever their outcome."""
    held_usd: float = 0.0
    unresolved_usd: float = 0.0
    """Amount held by calls whose bill is unknown."""
    unknown_costs: int = 0
    """Model calls of unknown cost: if there are any, the accumulated cost is a lower bound."""
    events_dropped: int = 0
    graph: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The call tree at `seq`, as `ExecutionGraph.snapshot()` returns it; rendered when it is first read."""


class _RenderedWhenRead:
    """Descriptor of the field `graph`: a state is rendered when it is read, plain data is returned as it is."""

    def __get__(self, snapshot: ContextSnapshot | None, owner: type[ContextSnapshot]) -> Any:
        if snapshot is None:
            return self
        graph: GraphState | dict[str, Any] = snapshot.__dict__["graph"]
        return graph.render() if isinstance(graph, GraphState) else graph

    def __set__(self, snapshot: ContextSnapshot, graph: GraphState | dict[str, Any]) -> None:
        snapshot.__dict__["graph"] = graph


ContextSnapshot.graph = _RenderedWhenRead()  # type: ignore[assignment]


def take_snapshot(handle: Handle, started_ns: int, cancelled: Cancellation | None) -> ContextSnapshot:
    """Return the run as `handle` sees it now; every figure belongs to the same instant."""
    run = handle._run
    with run.lock:
        figures = accounts.balance(handle._account)
        captured = run.graph._capture()
        events, dropped, unknown_costs = list(run.safety_events or ()), run.safety_dropped, run.unknown_costs
        elapsed_ns = handle._now_or_end() - started_ns
    seq, calls = captured.seq, sorted(captured.calls, key=by_number)
    return ContextSnapshot(
        chain_id=run.id,
        request_id=run.metadata.request_id,
        step_count=figures.steps,
        cost_usd_accumulated=figures.spent_usd,
        retries_used=figures.retries,
        aborted=cancelled is not None,
        abort_reason=None if cancelled is None else _abort_reason(cancelled.stop),
        elapsed_ms=elapsed_ns / 1_000_000,
        nodes=_node_records(calls, seq, run.graph.wall_offset_ns),
        events=events,
        seq=seq,
        attempts=figures.attempts,
        held_usd=figures.held_usd,
        unresolved_usd=figures.unresolved_usd,
        unknown_costs=unknown_costs,
        events_dropped=dropped,
        graph=GraphState(captured),  # type: ignore[arg-type]
    )


def _abort_reason(stop: Stop) -> str:
    """Return why the run was stopped: the message of the abort, or the stop reason and its figures."""
    return stop.message if stop.reason is StopReason.ABORTED else str(stop)


def _node_records(calls: Sequence[CallRecord], seq: int, wall_offset_ns: int) -> list[NodeRecord]:
    """Return the model and tool calls as of log position `seq`, without the calls that only group them."""
    shown = {call.number: call for call in calls if call.kind != "system"}
    return [_node_record(call, shown, seq, wall_offset_ns) for call in shown.values()]


def _node_record(call: CallRecord, shown: Mapping[int, CallRecord], seq: int, wall_offset_ns: int) -> NodeRecord:
    parent = call.parent
    while parent is not None and parent.number not in shown:
        parent = parent.parent
    ended = call.end_seq <= seq
    late = call.settled if call.settled is not None and call.settled.seq <= seq else None
    return NodeRecord(
        node_id=call.node_id,
        parent_id=parent.node_id if parent else None,
        kind=call.kind,
        operation_name=call.name,
        start_ts=utc_from_ns(call.started_ns + wall_offset_ns),
        end_ts=utc_from_ns(call.ended_ns + wall_offset_ns) if ended else None,
        status=_status(call) if ended else "running",
        cost_usd=to_usd(call.cost + (late.cost if late else 0)) if ended else 0.0,
        retries_used=call.retries,
        cost_unknown=ended and call.is_unpaid_at(seq),
    )


def _status(call: CallRecord) -> NodeStatus:
    if call.status == "success":
        return "ok"
    if call.status == "fail":
        return "error"
    reason = (call.stop_reason or "").partition(":")[0]
    if reason == StopReason.TIMEOUT:
        return "timeout"
    return "aborted" if reason == StopReason.ABORTED else "halted"


def totals(context: Handle) -> str:
    """Return one line: usage, limits, and unknown costs and bills."""
    figures, unknown = context.balance, context._run.unknown_costs
    limits = figures.limits
    of = f" of {format_usd(limits.cost_nanos)}" if limits.cost_nanos < UNLIMITED else ""
    parts = [f"cost {format_cost(figures.spent_nanos, unknown, of)}"]
    if figures.unresolved_nanos:
        parts.append(f"unresolved {format_usd(figures.unresolved_nanos)}")
    if figures.held_nanos:
        parts.append(f"held {format_usd(figures.held_nanos)}")
    for word, used, limit in (
        ("step", figures.steps, limits.steps),
        ("token", figures.tokens_in + figures.tokens_out, limits.tokens),
        ("api call", figures.api_calls, limits.api_calls),
        ("retr", figures.retries, limits.retries),
    ):
        if used or limit < UNLIMITED:
            parts.append(_counted(used, word, limit))
    return " · ".join(parts)


def remarks(run: Run) -> Iterator[str]:
    """Yield a line for each fact that the tree does not show: requests and work outside of it, and a swallowed stop."""
    for host, count in sorted((run.uncontained or {}).items()):
        yield f"{_counted(count, 'uncontained request')} to {host}: not limited, and in no figure of this run"
    yield from sorted(run.gaps or ())
    if run.swallowed is not None:
        yield f"a block ended normally although the run was stopped ({run.swallowed})"


def _counted(count: int, word: str, limit: int = UNLIMITED) -> str:
    one, many = ("y", "ies") if word == "retr" else ("", "s")
    of = f"/{limit}" if limit < UNLIMITED else ""
    return f"{count}{of} {word}{one if count == 1 and not of else many}"
