"""A run at one moment, as the people who limit it read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from penstock.clock import utc_from_ns
from penstock.containment import accounts
from penstock.containment.safety import SafetyEvent
from penstock.money import to_usd
from penstock.runtime.cancellation import Cancellation
from penstock.runtime.handle import Handle
from penstock.stops import Stop, StopReason
from penstock.tracing.execution_graph import by_number
from penstock.tracing.lifecycle import CallKind
from penstock.tracing.record import CallRecord

NodeStatus = Literal["running", "ok", "halted", "aborted", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One call; `end_ts` is None while it is under way."""

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


@dataclass(frozen=True, slots=True)
class ContextSnapshot:
    """The state of a run: its figures, its calls and its safety events, all up to `seq`."""

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
    seq: int
    attempts: int
    """Calls that were let through, whatever came of them."""
    held_usd: float
    unresolved_usd: float
    """Held by calls whose bill nobody knows."""
    unknown_costs: int
    """Model calls whose cost could not be told: if there are any, the accumulated cost is a lower bound."""
    events_dropped: int


def take_snapshot(handle: Handle, started_ns: int, cancelled: Cancellation | None) -> ContextSnapshot:
    """The run as `handle` sees it now; every figure belongs to the same instant."""
    run = handle._run
    with run.lock:
        figures = accounts.balance(handle._account)
        seq, calls = run.graph.seq, run.graph._kept()
        events, dropped, unknown_costs = list(run.safety_events or ()), run.safety_dropped, run.unknown_costs
        elapsed_ns = handle._now_or_end() - started_ns
    calls.sort(key=by_number)
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
    )


def _abort_reason(stop: Stop) -> str:
    """Why everything was stopped: in the words of whoever did it, or the stop reason and its figures."""
    return stop.message if stop.reason is StopReason.ABORTED else str(stop)


def _node_records(calls: Sequence[CallRecord], seq: int, wall_offset_ns: int) -> list[NodeRecord]:
    """The model and tool calls as the log up to `seq` tells them; what only groups them is left out."""
    shown = {call.number: call for call in calls if call.kind != "system"}
    return [_node_record(call, shown, seq, wall_offset_ns) for call in shown.values()]


def _node_record(call: CallRecord, shown: Mapping[int, CallRecord], seq: int, wall_offset_ns: int) -> NodeRecord:
    above = call.parent
    while above is not None and above.number not in shown:
        above = above.parent
    ended = call.end_seq <= seq
    late = call.settled if call.settled is not None and call.settled.seq <= seq else None
    return NodeRecord(
        node_id=call.node_id,
        parent_id=above.node_id if above else None,
        kind=call.kind,
        operation_name=call.name,
        start_ts=utc_from_ns(call.started_ns + wall_offset_ns),
        end_ts=utc_from_ns(call.ended_ns + wall_offset_ns) if ended else None,
        status=_status(call) if ended else "running",
        cost_usd=to_usd(call.cost + (late.cost if late else 0)) if ended else 0.0,
        retries_used=call.retries,
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
