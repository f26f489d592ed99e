"""How a context comes to its end, and what it leaves to read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, Halted
from penstock.money import format_usd
from penstock.runtime.cancellation import Cancellation
from penstock.runtime.settlement import leave_running
from penstock.stops import LIMIT_REASONS, Stop, StopReason, TerminationReason
from penstock.tracing.events import ChildCompleteTrace, RunCompleted
from penstock.tracing.lifecycle import Status
from penstock.tracing.record import OPEN, CallRecord

if TYPE_CHECKING:
    from penstock.runtime.context import ExecutionContext

STATUS_OF: dict[TerminationReason, Status] = {
    TerminationReason.SUCCESS: "success",
    TerminationReason.MAX_ITERATIONS: "halt",
    TerminationReason.ERROR: "fail",
    TerminationReason.CONTEXT_CANCELED: "halt",
    TerminationReason.HOOK_ABORT: "halt",
    TerminationReason.LIMIT_EXCEEDED: "halt",
}


def reason_for(context: ExecutionContext, error: BaseException | None) -> TerminationReason:
    """How the context ended, from what ended it."""
    return _reason_for(context, error, context.cancellation.cancellation)


def _reason_for(
    context: ExecutionContext, error: BaseException | None, cancelled: Cancellation | None
) -> TerminationReason:
    if isinstance(error, BaseExceptionGroup):
        # A fault in the group is the reason; without one, its first stop is.
        reasons = [_reason_for(context, one, cancelled) for one in error.exceptions]
        return TerminationReason.ERROR if TerminationReason.ERROR in reasons else reasons[0]
    if isinstance(error, Halted):
        return _reason_of(error.stop)
    if isinstance(error, CancelledError | asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        return TerminationReason.CONTEXT_CANCELED if cancelled is None else _reason_of(cancelled.stop)
    if error is not None:
        said = getattr(error, "termination_reason", None)
        return said if isinstance(said, TerminationReason) else TerminationReason.ERROR
    stop = _stop(context, cancelled)
    return TerminationReason.SUCCESS if stop is None else _reason_of(stop)


def _stop(context: ExecutionContext, cancelled: Cancellation | None) -> Stop | None:
    return context._run.stops.get(context._source) if cancelled is None else cancelled.stop


def _reason_of(stop: Stop) -> TerminationReason:
    if stop.reason in LIMIT_REASONS:
        return TerminationReason.LIMIT_EXCEEDED
    if stop.reason is StopReason.HOOK_DENIED:
        return TerminationReason.HOOK_ABORT
    if stop.reason is StopReason.ABORTED:
        return TerminationReason.CONTEXT_CANCELED
    return TerminationReason.ERROR


def end_child(child: ExecutionContext, reason: TerminationReason | None) -> None:
    """Close the child's place in the tree, and tell the parent; once."""
    run, record, parent = child._run, child._base, child.parent
    reason = reason or reason_for(child, None)
    now_ns = run.now()
    stop = child.stop
    with run.lock:
        if record.end_seq != OPEN or parent is None:
            return
        below = [call for call in run.graph.open_calls() if call is not record and call.is_under(record)]
        if below:
            _abandon(child, below, now_ns, f"{child.name!r} ended while the call was running")
        run.graph.end(record, now_ns, STATUS_OF[reason], stop_reason=str(stop) if stop else None)
        _tell_parent(child, reason, now_ns)
    _stop_leftovers(child, below)


def end_run(context: ExecutionContext, error: BaseException | None) -> None:
    """Close the run: what is still open is abandoned, the root ends, and the last event is written; once."""
    run, root = context._run, context._base
    now_ns = run.now()
    with run.lock:
        if run.graph.closed:
            return
        # Looked at once, and here: who cancels and then finds the run open may rely on it that the run ends cancelled.
        cancelled = context.cancellation.cancellation
        reason, stop = _reason_for(context, error, cancelled), _stop(context, cancelled)
        below = [call for call in run.graph.open_calls() if call is not root]
        if below:
            _abandon(context, below, now_ns, "the run ended while the call was running")
        error_class = type(error).__name__ if error is not None else None
        run.graph.end(root, now_ns, STATUS_OF[reason], stop_reason=str(stop) if stop else None, error_class=error_class)
        where = run.where(context._source, None, now_ns)
        run.graph.close(RunCompleted(termination_reason=reason, error=error_class, **where))
        context._final, context._ended_as = cancelled, reason
    _stop_leftovers(context, below)


def _abandon(context: ExecutionContext, open_calls: list[CallRecord], now_ns: int, why: str) -> None:
    """End what is still open, newest first, so that children end before their parents. Under the lock."""
    run, contexts = context._run, {child._base.number: child for child in _below(context)}
    for record in open_calls:
        leave_running(run, record, now_ns, f"{StopReason.ABORTED}: {why}")
        child = contexts.get(record.number)
        if child is not None:
            _tell_parent(child, _reason_of(child.stop) if child.stop else TerminationReason.CONTEXT_CANCELED, now_ns)


def _below(context: ExecutionContext) -> Iterator[ExecutionContext]:
    found = list(context._children or ())
    while found:
        child = found.pop()
        yield child
        found.extend(child._children or ())


def _tell_parent(child: ExecutionContext, reason: TerminationReason, now_ns: int) -> None:
    """Write that the child has ended. Under the lock."""
    run, parent, record = child._run, child.parent, child._base
    assert parent is not None
    child._final, child._ended_as = child.cancellation.cancellation, reason
    duration_ms = (now_ns - child._started_ns) / 1_000_000
    run.graph.append(
        ChildCompleteTrace(
            child_name=child.name,
            node_id=record.node_id,
            termination_reason=reason,
            duration_ms=duration_ms,
            **run.where(parent._source, record.parent, now_ns),
        )
    )
    if child._let_go is not None:
        child._let_go()


def _stop_leftovers(context: ExecutionContext, leftovers: list[CallRecord]) -> None:
    """Leaving is no abort; but work that goes on after the end is told to stop."""
    if context._run.shared is not None:
        context._run.shared.catch_up_soon()
    if leftovers:
        context.cancellation.cancel(f"{context.name!r} has ended", cause="shutdown")
    context.cancellation.close()


def totals(context: ExecutionContext) -> str:
    """One line: what was used of what was allowed, and what is not known."""
    figures, unknown = context.balance, context._run.unknown_costs
    limits = figures.limits
    cost = format_usd(figures.spent_nanos)
    if limits.cost_nanos < UNLIMITED:
        cost += f" of {format_usd(limits.cost_nanos)}"
    parts = [f"cost known ≥ {cost}, unknown {_counted(unknown, 'call')}" if unknown else f"cost {cost}"]
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


def _counted(count: int, word: str, limit: int = UNLIMITED) -> str:
    one, many = ("y", "ies") if word == "retr" else ("", "s")
    of = f"/{limit}" if limit < UNLIMITED else ""
    return f"{count}{of} {word}{one if count == 1 and not of else many}"
