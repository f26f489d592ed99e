"""The records as nodes, totals and events, computed when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import Any, NamedTuple, Protocol

from penstock.ids import call_id
from penstock.money import to_usd
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    IterationEndTrace,
    IterationStartTrace,
    ModelCallTrace,
    RunStarted,
    ToolCallTrace,
    TraceEvent,
)
from penstock.tracing.jsonable import jsonable
from penstock.tracing.record import CallRecord, IterationMark, RunMark, Settlement
from penstock.tracing.stats import CALLS, COST, RETRIES, TOKENS_IN, TOKENS_OUT, UNKNOWN, Tally

Entry = CallRecord | Settlement | IterationMark | RunMark | TraceEvent
"""An entry in the log of a run."""


class TracedRun(Protocol):
    """The run whose entries are shown."""

    chain_id: str
    root: CallRecord | None
    wall_offset_ns: int


class Folded(NamedTuple):
    """Sums of finished calls that are no longer kept individually."""

    calls: int
    cost: int
    tokens_in: int
    tokens_out: int
    retries: int


def fold(before: Folded | None, more: Sequence[int]) -> Folded:
    """Add the sums of further calls to those of their ancestor."""
    return Folded(*more) if before is None else Folded(*map(add, before, more))


def fold_late(before: Folded | None, late: Settlement) -> Folded:
    """Add the bill of a call that was folded before its bill was known."""
    was = before or Folded(0, 0, 0, 0, 0)
    tokens_in, tokens_out = was.tokens_in + late.tokens_in, was.tokens_out + late.tokens_out
    return Folded(was.calls, was.cost + late.cost, tokens_in, tokens_out, was.retries)


def call_of(entry: Entry) -> CallRecord | None:
    """Return the call that an entry is about, if there is one."""
    if isinstance(entry, CallRecord):
        return entry
    return entry.call if isinstance(entry, Settlement) else None


def node(call: CallRecord, seq: int, wall_offset_ns: int, folded: Folded | None) -> dict[str, Any]:
    """Return one call as JSON data, as of `seq`."""
    ended = call.end_seq <= seq
    late = call.settled if call.settled is not None and call.settled.seq <= seq else None
    fields: dict[str, Any] = {
        "node_id": call_id(call.number),
        "parent_id": call.parent_id,
        "kind": call.kind,
        "name": call.name,
        "start_ts_ms": (call.started_ns + wall_offset_ns) // 1_000_000,
        "end_ts_ms": (call.ended_ns + wall_offset_ns) // 1_000_000 if ended else None,
        "status": call.status if ended else ("running" if call.running else "created"),
        "model": call.model,
        "retries_used": call.retries,
        "cost_usd": to_usd(call.cost + (late.cost if late else 0)) if ended else 0.0,
        "tokens_in": (late.tokens_in + (call.tokens_in or 0) if late else call.tokens_in) if ended else None,
        "tokens_out": (late.tokens_out + (call.tokens_out or 0) if late else call.tokens_out) if ended else None,
        "stop_reason": call.stop_reason if ended else None,
        "error_class": call.error_class if ended else None,
        "metadata": jsonable(call.metadata) if call.metadata else {},
    }
    if ended and call.is_unpaid_at(seq):
        fields["metadata"]["cost_unknown"] = True
    if ended and call.abandoned:
        fields["metadata"]["abandoned"] = True
    if ended and call.finish_reason is not None:
        fields["metadata"]["finish_reason"] = call.finish_reason
    if folded is not None:
        fields["metadata"]["folded"] = {
            "calls": folded.calls,
            "cost_usd": to_usd(folded.cost),
            "tokens_in": folded.tokens_in,
            "tokens_out": folded.tokens_out,
            "retries_used": folded.retries,
        }
    return fields


def aggregates(tally: Tally, max_depth: int) -> dict[str, Any]:
    """Return a run's totals as JSON data; `unknown_costs` counts calls whose cost is in no sum, if there are any."""
    totals = {
        "total_cost_usd": to_usd(tally.sum(COST, status="success")),
        "total_llm_calls": tally.sum(CALLS, "llm", "success"),
        "total_tool_calls": tally.sum(CALLS, "tool", "success"),
        "total_retries": tally.sum(RETRIES),
        "total_tokens_in": tally.sum(TOKENS_IN, status="success"),
        "total_tokens_out": tally.sum(TOKENS_OUT, status="success"),
        "max_depth": max_depth,
        "failed_calls": tally.sum(CALLS, status="fail"),
        "failed_cost_usd": to_usd(tally.sum(COST, status="fail")),
        "failed_tokens_in": tally.sum(TOKENS_IN, status="fail"),
        "failed_tokens_out": tally.sum(TOKENS_OUT, status="fail"),
        "halted_calls": tally.sum(CALLS, status="halt"),
        "halted_cost_usd": to_usd(tally.sum(COST, status="halt")),
        "halted_tokens_in": tally.sum(TOKENS_IN, status="halt"),
        "halted_tokens_out": tally.sum(TOKENS_OUT, status="halt"),
    }
    if unknown := tally.sum(UNKNOWN):
        totals["unknown_costs"] = unknown
    return totals


def event(graph: TracedRun, entry: Entry, seq: int) -> TraceEvent:
    """Return an entry of the log as an event."""
    if isinstance(entry, TraceEvent):
        return entry
    if isinstance(entry, Settlement):
        return CallSettled(
            **_where(graph, entry.call, seq, entry.at_ns),
            node_id=entry.call.node_id,
            cost=to_usd(entry.cost),
            input_tokens=entry.tokens_in,
            output_tokens=entry.tokens_out,
        )
    if isinstance(entry, IterationMark):
        return _iteration(graph, entry, seq)
    if isinstance(entry, RunMark):
        return _run_started(graph, seq)
    return _ended(graph, entry, seq) if entry.end_seq == seq else _started(graph, entry, seq)


_ENDED_AS: dict[str, type[CallEnded]] = {"llm": ModelCallTrace, "tool": ToolCallTrace, "system": CallEnded}


def _run_started(graph: TracedRun, seq: int) -> RunStarted:
    root = graph.root
    assert root is not None, "a run that has begun has its root"
    return RunStarted(**_where(graph, root, seq, root.started_ns), name=root.name, metadata=root.metadata or {})


def _iteration(graph: TracedRun, mark: IterationMark, seq: int) -> TraceEvent:
    where: dict[str, Any] = {
        "run_id": graph.chain_id,
        "seq": seq,
        "at_ms": (mark.at_ns + graph.wall_offset_ns) // 1_000_000,
        "source": mark.source.path,
        "depth": mark.source.depth,
        "iteration": mark.iteration,
        "parent_id": mark.base.node_id,
    }
    if mark.action is None:
        return IterationStartTrace(**where)
    return IterationEndTrace(**where, duration_ms=(mark.at_ns - mark.started_ns) / 1_000_000, action=mark.action)


def _started(graph: TracedRun, call: CallRecord, seq: int) -> CallStarted:
    return CallStarted(
        **_where(graph, call, seq, call.started_ns),
        node_id=call.node_id,
        call_kind=call.kind,
        name=call.name,
        model=call.model,
        metadata=dict(call.metadata or {}),
    )


def _ended(graph: TracedRun, call: CallRecord, seq: int) -> CallEnded:
    payload = {} if call.payload is None else call.payload._asdict()
    return _ENDED_AS[call.kind](
        **_where(graph, call, seq, call.ended_ns),
        node_id=call.node_id,
        call_kind=call.kind,
        name=call.name,
        model=call.model,
        status=call.status,
        cost=to_usd(call.cost),
        input_tokens=call.tokens_in or 0,
        output_tokens=call.tokens_out or 0,
        duration_ms=(call.ended_ns - call.started_ns) / 1_000_000,
        retries_used=call.retries,
        stop_reason=call.stop_reason,
        error=call.error_class,
        finish_reason=call.finish_reason,
        abandoned=call.abandoned,
        cost_unknown=call.cost_unknown,
        **payload,
    )


def _where(graph: TracedRun, call: CallRecord, seq: int, at_ns: int) -> dict[str, Any]:
    return {
        "run_id": graph.chain_id,
        "seq": seq,
        "at_ms": (at_ns + graph.wall_offset_ns) // 1_000_000,
        "source": call.source.path,
        "depth": call.source.depth,
        "iteration": call.iteration,
        "parent_id": call.parent_id,
    }
