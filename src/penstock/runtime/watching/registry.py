"""Which runs are under way here, by id, and the cancels that came before their run.

A cancel and the run it is for come from different places and in any order. If the run is here, it is stopped. If it is
not here yet, the cancel is remembered, for a while, and strikes when the run is registered. If the run has ended, the
answer says so. So a cancel is never lost: the run ends cancelled, or whoever asked was told that it was too late.

Nobody reports that a run has ended: its log says so, and that is looked at whenever the run is asked for, and for all
of them each time their number has doubled. Of a run that has ended only the id is kept, for the answer `ended`; of the
newest `MAX_ENDED` such runs, that is.

Knows the runs of this process only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.limits import seconds_to_ns
from penstock.errors import InvalidValue, PenstockError, RunEnded
from penstock.runtime.context import ExecutionContext
from penstock.runtime.options import must_be_text, whole
from penstock.stops import TerminationReason
from penstock.tracing.events import RunCompleted

MAX_ENDED = 10_000
SWEEP_FROM = 64
"""So many runs may have ended unnoticed before anybody looks."""


class CancelResult(StrEnum):
    """What became of a cancel."""

    CANCELLED = "cancelled"
    """The run was told to stop."""
    ALREADY_CANCELLED = "already_cancelled"
    """Somebody, or its deadline, had told the run to stop before."""
    REMEMBERED = "remembered"
    """There is no such run yet; it will be told to stop when it is registered."""
    ENDED = "ended"
    """The run had come to its end before."""


class EarlyCancelsFull(PenstockError):
    """A cancel came before its run and cannot be remembered: `limit` others are. None of those is given up for it."""

    def __init__(self, run_id: str, limit: int) -> None:
        self.run_id = run_id
        self.limit = limit
        super().__init__(f"run {run_id} is not known, and {limit} cancels of such runs are remembered; try again later")


@dataclass(slots=True)
class _Entry:
    context: ExecutionContext
    is_claimed: bool
    """Whether a cancel has come for it: that one is answered `cancelled`, and those after it `already_cancelled`."""


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
        if whole("max_early", max_early) < 1:
            raise InvalidValue("max_early", max_early, "a whole number of cancels, one or more")
        self._max_early = max_early
        self._clock = clock
        self._lock = threading.RLock()
        self._runs: dict[str, _Entry] = {}
        self._sweep_at = SWEEP_FROM
        self._early: dict[str, _Early] = {}
        """The cancels that are remembered, the one that expires first first."""
        self._ended: dict[str, None] = {}
        """The ids of runs that have ended, the oldest first."""

    def register(self, context: ExecutionContext) -> None:
        """Let the run be found by its id, before it does anything; a cancel that was remembered strikes at once.

        InvalidValue if a run of that id is under way. The id of one that has ended is free.
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
        """Stop the run, or remember to; the first reason counts."""
        must_be_text("run_id", run_id)
        must_be_text("reason", reason)
        with self._lock:
            entry = self._running(run_id)
            if entry is None:
                return CancelResult.ENDED if run_id in self._ended else self._remember(run_id, reason)
            is_first = not entry.is_claimed and entry.context.cancellation.cancellation is None
            entry.is_claimed = True
        return _strike(entry.context, reason, is_first)

    def forget(self, run_id: str) -> None:
        """Let go of a run, or of a cancel that was remembered; a run that was here counts as ended from now on."""
        with self._lock:
            self._early.pop(run_id, None)
            if run_id in self._runs:
                self._let_go(run_id)

    def get(self, run_id: str) -> ExecutionContext | None:
        """The main context of the run; None if no such run is under way."""
        with self._lock:
            entry = self._running(run_id)
        return None if entry is None else entry.context

    def running(self) -> list[str]:
        """The ids of the runs under way, in the order they were registered."""
        with self._lock:
            self._sweep()
            return list(self._runs)

    def __len__(self) -> int:
        return len(self.running())

    def __contains__(self, run_id: object) -> bool:
        return isinstance(run_id, str) and self.get(run_id) is not None

    # Inside, under the lock.

    def _running(self, run_id: str) -> _Entry | None:
        entry = self._runs.get(run_id)
        if entry is not None and entry.context.graph.closed:
            self._let_go(run_id)
            return None
        return entry

    def _sweep(self) -> None:
        for run_id in list(self._runs):
            self._running(run_id)
        # Looking at all of them is paid for by the registrations in between.
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
    """The main context itself: a handle may stand under a budget of its own, and a cancel is for the run."""
    if not isinstance(context, ExecutionContext) or context.depth:
        raise InvalidValue("context", context, "the main context of a run")
    if context.graph.closed:
        raise RunEnded(context.run_id, "it came to be registered")
    return context._origin


def _strike(context: ExecutionContext, reason: str, is_first: bool) -> CancelResult:
    """Stop the run, whoever else does so too, and look whether it was in time."""
    context.abort(reason)
    # Marked first, looked at second: a run that has not ended by now finds the mark when it does.
    with context.graph.lock:
        if context.graph.closed and not _was_cancelled(context):
            return CancelResult.ENDED
    return CancelResult.CANCELLED if is_first else CancelResult.ALREADY_CANCELLED


def _was_cancelled(context: ExecutionContext) -> bool:
    (last,) = context.graph.events(context.graph.seq - 1)
    return isinstance(last, RunCompleted) and last.termination_reason is TerminationReason.CONTEXT_CANCELED
