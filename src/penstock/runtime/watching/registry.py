"""The running runs of this process, by id, and the cancel requests that arrived before their run.

A cancel request and its run come from different places and in any order. If the run is registered, it is stopped. If it
is not registered yet, the request is remembered, for a while, and applied when the run is registered. If the run has
ended, the result says so. So a cancel request is never lost: the run ends cancelled, or the caller learns that it was
too late.

The end of a run is not reported to the registry: it is read from the run's log whenever the run is looked up, and for
all runs each time their number has doubled. Of a run that has ended only the id is kept, for the result `ended`, and
only for the newest `MAX_ENDED` such runs.

Knows the runs of this process only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.limits import seconds_to_ns
from penstock.errors import InvalidValue, PenstockError, RunEnded
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import RunCompleted

MAX_ENDED = 10_000
SWEEP_FROM = 64
"""Number of registered runs at which ended ones are first looked for."""


class CancelResult(StrEnum):
    """The result of a cancel request."""

    CANCELLED = "cancelled"
    """The run was cancelled by this request."""
    ALREADY_CANCELLED = "already_cancelled"
    """An earlier request, or the run's deadline, had already cancelled the run."""
    REMEMBERED = "remembered"
    """The run is not registered yet; it will be cancelled when it is."""
    ENDED = "ended"
    """The run had already ended."""


class EarlyCancelsFull(PenstockError):
    """An early cancel request cannot be remembered, because `limit` others are; none of those is dropped for it."""

    def __init__(self, run_id: str, limit: int) -> None:
        self.run_id = run_id
        self.limit = limit
        super().__init__(f"run {run_id} is not known, and {limit} cancels of such runs are remembered; try again later")


@dataclass(slots=True)
class _Entry:
    context: ExecutionContext
    is_claimed: bool
    """Whether a cancel request has arrived: that one returns `cancelled`, and later ones `already_cancelled`."""


@dataclass(frozen=True, slots=True)
class _Early:
    reason: str
    until_ns: int


class RunRegistry:
    """The runs of this process by id; safe to use from any thread."""

    def __init__(
        self, *, early_cancel_ttl_s: float = 600.0, max_early: int = 10_000, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._ttl_ns = seconds_to_ns(early_cancel_ttl_s, "early_cancel_ttl_s")
        if not self._ttl_ns:
            raise InvalidValue("early_cancel_ttl_s", early_cancel_ttl_s, "more than zero seconds")
        self._max_early = checks.integer("max_early", max_early, minimum=1, of="cancels")
        self._clock = clock
        self._lock = threading.RLock()
        self._runs: dict[str, _Entry] = {}
        self._sweep_at = SWEEP_FROM
        self._early: dict[str, _Early] = {}
        """Remembered cancel requests, in order of expiry."""
        self._ended: dict[str, None] = {}
        """Ids of runs that have ended, oldest first."""

    def register(self, context: ExecutionContext) -> None:
        """Register the run under its id, before it does anything; applies a remembered cancel request immediately.

        Raises InvalidValue if a run of that id is running. The id of a run that has ended is free.
        """
        context = _main(context)
        run_id = context.run_id
        with self._lock:
            if self._running(run_id) is not None:
                raise InvalidValue("run_id", run_id, "one that no other run under way has")
            self._drop_expired()
            early = self._early.pop(run_id, None)
            self._ended.pop(run_id, None)
            self._runs[run_id] = _Entry(context, is_claimed=early is not None)
            if len(self._runs) >= self._sweep_at:
                self._sweep()
        if early is not None:
            context.abort(early.reason)

    def cancel(self, run_id: str, reason: str = "cancelled") -> CancelResult:
        """Cancel the run, or remember the request until it is registered; the first reason counts."""
        checks.text("run_id", run_id)
        checks.text("reason", reason)
        with self._lock:
            entry = self._running(run_id)
            if entry is None:
                return CancelResult.ENDED if run_id in self._ended else self._remember(run_id, reason)
            is_first = not entry.is_claimed and entry.context.cancellation.cancellation is None
            entry.is_claimed = True
        return _cancel_run(entry.context, reason, is_first)

    def forget(self, run_id: str) -> None:
        """Remove a run or a remembered cancel request; a removed run counts as ended from now on."""
        with self._lock:
            self._early.pop(run_id, None)
            if run_id in self._runs:
                self._let_go(run_id)

    def get(self, run_id: str) -> ExecutionContext | None:
        """Return the main context of the run; None if no such run is running."""
        with self._lock:
            entry = self._running(run_id)
        return None if entry is None else entry.context

    def running(self) -> list[str]:
        """Return the ids of the running runs, in the order they were registered."""
        with self._lock:
            self._sweep()
            return list(self._runs)

    def __len__(self) -> int:
        return len(self.running())

    def __contains__(self, run_id: object) -> bool:
        return isinstance(run_id, str) and self.get(run_id) is not None

    # Internals, under the lock.

    def _running(self, run_id: str) -> _Entry | None:
        entry = self._runs.get(run_id)
        if entry is not None and entry.context.graph.closed:
            self._let_go(run_id)
            return None
        return entry

    def _sweep(self) -> None:
        for run_id in list(self._runs):
            self._running(run_id)
        # The cost of checking all runs is amortised over the registrations in between.
        self._sweep_at = max(SWEEP_FROM, 2 * len(self._runs))

    def _let_go(self, run_id: str) -> None:
        del self._runs[run_id]
        self._ended[run_id] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _remember(self, run_id: str, reason: str) -> CancelResult:
        self._drop_expired()
        before = self._early.pop(run_id, None)
        if len(self._early) >= self._max_early:
            raise EarlyCancelsFull(run_id, self._max_early)
        until_ns = self._clock.monotonic_ns() + self._ttl_ns
        self._early[run_id] = _Early(reason if before is None else before.reason, until_ns)
        return CancelResult.REMEMBERED

    def _drop_expired(self) -> None:
        now_ns = self._clock.monotonic_ns()
        while self._early and self._early[first := next(iter(self._early))].until_ns <= now_ns:
            del self._early[first]


def _main(context: object) -> ExecutionContext:
    """Return the main context itself: a handle may have a budget of its own, and a cancel applies to the run."""
    if not isinstance(context, ExecutionContext) or context.depth:
        raise InvalidValue("context", context, "the main context of a run")
    if context.graph.closed:
        raise RunEnded(context.run_id, "it cannot be registered")
    return context._origin


def _cancel_run(context: ExecutionContext, reason: str, is_first: bool) -> CancelResult:
    """Cancel the run, even if another caller does so too, and check whether it was in time."""
    context.abort(reason)
    # Cancel first, check second: a run that has not ended by now sees the cancel when it ends.
    with context.graph.lock:
        if context.graph.closed and not _was_cancelled(context):
            return CancelResult.ENDED
    return CancelResult.CANCELLED if is_first else CancelResult.ALREADY_CANCELLED


def _was_cancelled(context: ExecutionContext) -> bool:
    (last,) = context.graph.events(context.graph.seq - 1)
    return isinstance(last, RunCompleted) and last.termination_reason is TerminationReason.CONTEXT_CANCELED
