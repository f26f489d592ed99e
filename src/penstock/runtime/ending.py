"""End a context: its reason, its last events, and its totals."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.containment.limits import UNLIMITED
from penstock.errors import CancelledError, Halted
from penstock.money import format_cost, format_usd
from penstock.runtime.cancellation import Cancellation
from penstock.runtime.run import Run
from penstock.runtime.settlement import leave_running
from penstock.stops import LIMIT_REASONS, Stop, StopReason, TerminationReason
from penstock.tracing.events import ChildCompleteTrace, RunCompleted
from penstock.tracing.lifecycle import Status
from penstock.tracing.record import OPEN, CallRecord, mark_stopped

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

STOPPED = frozenset(
    {TerminationReason.CONTEXT_CANCELED, TerminationReason.HOOK_ABORT, TerminationReason.LIMIT_EXCEEDED}
)
"""Ends of a context that was stopped, rather than completed or left with an error."""


class Outcome(NamedTuple):
    """The result of an execution in a context, or the error that ended the context."""

    result: Any
    error: BaseException | None
    reason: TerminationReason | None = None
    """How the execution ended; None if the error came from elsewhere."""


def reason_for(context: ExecutionContext, error: BaseException | None) -> TerminationReason:
    """Return how the context ended, given the error that ended it."""
    return _reason_for(context, error, context.cancellation.cancellation)


def _reason_for(
    context: ExecutionContext, error: BaseException | None, cancelled: Cancellation | None
) -> TerminationReason:
    outcome = context._outcome
    if outcome is not None and outcome.error is not None and outcome.reason is not None:
        is_the_end_of_both = error is outcome.error or (error is None and cancelled is None)
        if is_the_end_of_both:
            return outcome.reason
    if isinstance(error, BaseExceptionGroup):
        # A fault in the group is the reason; without one, its first stop is.
        reasons = [_reason_for(context, one, cancelled) for one in error.exceptions]
        return TerminationReason.ERROR if TerminationReason.ERROR in reasons else reasons[0]
    if isinstance(error, Halted):
        return _reason_of(error.stop)
    if isinstance(error, CancelledError | asyncio.CancelledError | KeyboardInterrupt | SystemExit | GeneratorExit):
        return TerminationReason.CONTEXT_CANCELED if cancelled is None else _reason_of(cancelled.stop)
    if error is not None:
        reason = getattr(error, "termination_reason", None)
        return reason if isinstance(reason, TerminationReason) else TerminationReason.ERROR
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
    """End the child's record in the tree, and write the event to its parent; once."""
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
        mark_stopped(record, stop)
        run.graph.end(record, now_ns, STATUS_OF[reason], stop_reason=str(stop) if stop else None)
        _tell_parent(child, reason, now_ns)
    _stop_leftovers(child, below)


def end_run(context: ExecutionContext, error: BaseException | None) -> None:
    """Close the run: abandon open calls, end the root, and write the last event; once."""
    run, root = context._run, context._base
    now_ns = run.now()
    with run.lock:
        if run.graph.closed:
            return
        # Read once, under the lock: a caller that cancels and then finds the run open relies on it ending cancelled.
        cancelled = context.cancellation.cancellation
        reason, stop = _reason_for(context, error, cancelled), _stop(context, cancelled)
        below = [call for call in run.graph.open_calls() if call is not root]
        if below:
            _abandon(context, below, now_ns, "the run ended while the call was running")
        error_class = type(error).__name__ if error is not None else None
        mark_stopped(root, stop)
        run.graph.end(root, now_ns, STATUS_OF[reason], stop_reason=str(stop) if stop else None, error_class=error_class)
        where = run.where(context._source, None, now_ns)
        run.graph.close(RunCompleted(termination_reason=reason, error=error_class, **where))
        context._final, context._ended_as = cancelled, reason
    _stop_leftovers(context, below)


def _abandon(context: ExecutionContext, open_calls: list[CallRecord], now_ns: int, why: str) -> None:
    """End open calls, newest first, so that children end before their parents. The caller holds the lock."""
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
    """Write the event that the child has ended. The caller holds the lock."""
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
    """Cancel work that is still running; a context without such work ends without a cancel."""
    if context._run.shared is not None:
        context._run.shared.flush_soon()
    if leftovers:
        context.cancellation.cancel(f"{context.name!r} has ended", cause="shutdown")
    context.cancellation.close()


def totals(context: ExecutionContext) -> str:
    """Return one line: usage, limits, and what is unknown."""
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
    """Yield a line for each fact that the tree does not show: requests that went past it, a stop that was swallowed."""
    for host, count in sorted((run.uncontained or {}).items()):
        yield f"{_counted(count, 'uncontained request')} to {host}: not limited, and in no figure of this run"
    if run.swallowed is not None:
        yield f"a block ended normally although the run was stopped ({run.swallowed})"


def _counted(count: int, word: str, limit: int = UNLIMITED) -> str:
    one, many = ("y", "ies") if word == "retr" else ("", "s")
    of = f"/{limit}" if limit < UNLIMITED else ""
    return f"{count}{of} {word}{one if count == 1 and not of else many}"
