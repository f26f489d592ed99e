"""A run in this process as the event stream that a server would send, and its display.

Everything shown comes from the run's events and figures, so the run never waits for the display.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.cli.render.call_tree import Calls, frame
from penstock.cli.render.events import RunEvent
from penstock.cli.render.renderers import EventLog
from penstock.cli.render.screen import Line, Screen
from penstock.runtime.context import ExecutionContext
from penstock.tracing.events import CallEnded, CallStarted, LimitTrace, TraceEvent
from penstock.tracing.explain import attempt_of

Shown = CallStarted | CallEnded | LimitTrace
"""Trace events that the display of a run shows."""
CATCH_UP_S = 2.0
"""Maximum wait at the end for events that the observer has not delivered yet."""


@contextmanager
def watched(
    run: ExecutionContext, screen: Screen, *, planned: Sequence[str] = (), moves: bool = True
) -> Iterator[None]:
    """Show `run` on `screen` until the block exits: a live tree on a terminal, one line per event elsewhere."""
    if not (moves and screen.moves):
        with _observed(run, EventLog(screen)):
            yield
        return
    calls = Calls(planned)

    def picture() -> list[Line]:
        return frame(calls, run.balance, run.usage.time_elapsed_seconds, screen.width, screen.height)

    with screen.moving(picture), _observed(run, calls):
        yield


@contextmanager
def _observed(run: ExecutionContext, reader: Calls | EventLog) -> Iterator[None]:
    """Pass the events of the run to `reader`, on the observer's own thread, until the block exits."""
    started_ms = 0

    def read(events: Sequence[TraceEvent]) -> None:
        nonlocal started_ms
        for trace in events:
            started_ms = started_ms or trace.at_ms
            if isinstance(trace, Shown):
                reader.add(run_event(trace, started_ms))

    observing = run.observe(read)
    yield
    observing.drain(timeout_s=CATCH_UP_S)


def run_event(trace: Shown, started_ms: int) -> RunEvent:
    """Convert a trace event of a run that started at that time."""
    at_s = (trace.at_ms - started_ms) / 1_000
    if isinstance(trace, LimitTrace):
        names = ("stop_reason", "message", "budget", "unit", "limit", "used", "held", "asked")
        return RunEvent(trace.seq, "limit", {name: getattr(trace, name) for name in names}, at_s)
    call = {
        "call_id": trace.node_id,
        "parent_id": trace.parent_id,
        "kind": trace.call_kind,
        "name": trace.name,
        "model": trace.model,
    }
    if isinstance(trace, CallStarted):
        return RunEvent(trace.seq, "call.started", call | {"attempt": attempt_of(trace.metadata)}, at_s)
    ended = {
        "status": trace.status,
        "cost_usd": None if trace.cost_unknown else trace.cost,
        "tokens_in": trace.input_tokens,
        "tokens_out": trace.output_tokens,
        "stop_reason": trace.stop_reason,
        "error": trace.error,
        "abandoned": trace.abandoned,
    }
    return RunEvent(trace.seq, "call.ended", call | ended, at_s)
