"""Circuit breakers: when to stop calling a failing provider, and when to try again.

A circuit is closed while calls pass, open while none does, and half open while a limited number of probes test whether
the provider has recovered. `TRANSITIONS` is the whole state machine. One breaker may serve every run and every thread
that uses a provider. It neither makes calls nor waits; time comes in through a clock.

A call may end long after it was admitted, when the state of the circuit has changed: its success says nothing about a
circuit that opened meanwhile, and its failure nothing about a recovery it was not part of. So each admitting `check`
returns a permit. All calls of one closed period share a permit; every probe has its own. A result counts only if its
permit belongs to the current state, and that of a probe counts once. A result without a permit is treated as one of the
current state: a closed circuit counts it, an open one ignores it, a half-open one attributes it to the oldest probe. If
no probe is in progress, because the caller did not `check`, a half-open circuit treats the result itself as a probe: a
failure opens it again, a success counts towards closing it.

A probe holds its slot until its result is recorded. A caller that drops a probe without a result (cancelled, refused
later, abandoned in its thread) calls `record_abandoned`, and the next caller probes instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock


class CircuitState(StrEnum):
    """Which calls pass: all, none, or a limited number."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Trigger(StrEnum):
    """What changes the state of a circuit."""

    THRESHOLD_REACHED = "threshold_reached"
    RECOVERY_TIME_PASSED = "recovery_time_passed"
    PROBES_SUCCEEDED = "probes_succeeded"
    PROBE_FAILED = "probe_failed"
    RESET = "reset"


TRANSITIONS: Mapping[CircuitState, Mapping[Trigger, CircuitState]] = {
    CircuitState.CLOSED: {
        Trigger.THRESHOLD_REACHED: CircuitState.OPEN,
        Trigger.RESET: CircuitState.CLOSED,
    },
    CircuitState.OPEN: {
        Trigger.RECOVERY_TIME_PASSED: CircuitState.HALF_OPEN,
        Trigger.RESET: CircuitState.CLOSED,
    },
    CircuitState.HALF_OPEN: {
        Trigger.PROBES_SUCCEEDED: CircuitState.CLOSED,
        Trigger.PROBE_FAILED: CircuitState.OPEN,
        Trigger.RESET: CircuitState.CLOSED,
    },
}


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The data of a run for a policy that it calls."""

    cost_usd: float = 0.0
    step_count: int = 0
    chain_id: str = ""


@dataclass(frozen=True, slots=True)
class PolicyDecision:
    """Whether a call may proceed; if not, the reason and when to try again."""

    allowed: bool
    policy_type: str = "circuit_breaker"
    reason: str = ""
    permit: int | None = None
    """Passed back with the result of the call, so that a late result is recognized."""


@dataclass(frozen=True, slots=True)
class CircuitSnapshot:
    """The state of a circuit at one moment."""

    name: str
    state: CircuitState
    failures: int
    """Failures in a row since the last success that counted."""
    probes_out: int
    probes_succeeded: int
    retry_in_s: float | None
    """Seconds until a probe may pass; None unless the circuit is open."""
    times_opened: int


class CircuitBreaker:
    """Refuses calls after `failure_threshold` failures in a row, and probes again after `recovery_timeout` seconds."""

    def __init__(
        self,
        failure_threshold: int = 5,
        recovery_timeout: float = 60.0,
        *,
        half_open_probes: int = 1,
        name: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._threshold = checks.integer("failure_threshold", failure_threshold, minimum=1)
        self._recovery_ns = _positive_ns("recovery_timeout", recovery_timeout)
        self._probes_needed = checks.integer("half_open_probes", half_open_probes, minimum=1)
        self._name = checks.text("name", name)
        self._clock = clock
        self._lock = Lock()
        self._state = CircuitState.CLOSED
        self._failures = 0
        """Failures in a row. Zero exactly when closed with nothing to reset: `record_success` reads it without the
        lock.
        """
        self._passing: PolicyDecision | None = None
        """The answer to every `check` while closed, None otherwise: `check` reads it without the lock."""
        self._last_permit = 0
        self._probes_out: set[int] = set()
        """The permits of probes without a result; empty unless half open."""
        self._probes_succeeded = 0
        self._retry_at_ns = 0
        self._times_opened = 0
        self._move(Trigger.RESET)

    @property
    def name(self) -> str:
        """The name of the protected provider, for reasons."""
        return self._name

    @property
    def state(self) -> CircuitState:
        """The state that the next `check` would find: half open as soon as the recovery time has passed."""
        with self._lock:
            return self._state_now()

    def check(self, context: PolicyContext | None = None) -> PolicyDecision:
        """Return whether a call may proceed now. An admitted call must be followed by exactly one `record_…`, with its
        permit.
        """
        return self._passing or self._check_with_lock()

    def record_success(self, permit: int | None = None) -> None:
        """Record a success: the count of failures restarts; the last required probe closes the circuit."""
        if self._failures:
            self._record_success_with_lock(permit)

    def record_failure(self, permit: int | None = None) -> None:
        """Record a failure: at the threshold it opens the circuit; a failed probe opens it again."""
        with self._lock:
            if not self._claim(permit):
                return
            self._failures += 1
            if self._state is CircuitState.HALF_OPEN:
                self._move(Trigger.PROBE_FAILED)
            elif self._failures >= self._threshold:
                self._move(Trigger.THRESHOLD_REACHED)

    def record_abandoned(self, permit: int | None = None) -> None:
        """Record a call without a result: the slot of a probe is free again, nothing else changes."""
        with self._lock:
            self._claim(permit)

    def reset(self) -> None:
        """Close the circuit manually; results of calls admitted before are ignored."""
        with self._lock:
            self._move(Trigger.RESET)

    def snapshot(self) -> CircuitSnapshot:
        """Return all figures of this moment, consistent with each other."""
        with self._lock:
            state = self._state_now()
            waiting_ns = self._retry_at_ns - self._clock.monotonic_ns()
            return CircuitSnapshot(
                name=self._name,
                state=state,
                failures=self._failures,
                probes_out=len(self._probes_out),
                probes_succeeded=self._probes_succeeded,
                retry_in_s=max(waiting_ns, 0) / 1e9 if state is CircuitState.OPEN else None,
                times_opened=self._times_opened,
            )

    def _check_with_lock(self) -> PolicyDecision:
        with self._lock:
            if self._passing is not None:  # closed since the unlocked look
                return self._passing
            if self._state is CircuitState.OPEN:
                waiting_ns = self._retry_at_ns - self._clock.monotonic_ns()
                if waiting_ns > 0:
                    return PolicyDecision(False, reason=self._open_reason(waiting_ns))
                self._move(Trigger.RECOVERY_TIME_PASSED)
            if len(self._probes_out) + self._probes_succeeded >= self._probes_needed:
                return PolicyDecision(False, reason=self._half_open_reason())
            permit = self._next_permit()
            self._probes_out.add(permit)
            return PolicyDecision(True, permit=permit)

    def _record_success_with_lock(self, permit: int | None) -> None:
        with self._lock:
            if not self._claim(permit):
                return
            if self._state is CircuitState.CLOSED:
                self._failures = 0
                return
            self._probes_succeeded += 1
            if self._probes_succeeded >= self._probes_needed:
                self._move(Trigger.PROBES_SUCCEEDED)

    def _claim(self, permit: int | None) -> bool:
        """Return whether a result counts in the current state, and free the slot of a probe."""
        if self._passing is not None:
            return permit is None or permit == self._passing.permit
        if permit is None:
            if self._state_now() is CircuitState.OPEN:
                return False
            if self._state is CircuitState.OPEN:
                self._move(Trigger.RECOVERY_TIME_PASSED)
            if not self._probes_out:
                return True
            permit = min(self._probes_out)
        if permit not in self._probes_out:
            return False
        self._probes_out.remove(permit)
        return True

    def _move(self, trigger: Trigger) -> None:
        self._state = TRANSITIONS[self._state][trigger]
        self._passing = None
        self._probes_out.clear()
        self._probes_succeeded = 0
        if self._state is CircuitState.CLOSED:
            self._failures = 0
            self._passing = PolicyDecision(True, permit=self._next_permit())
        elif self._state is CircuitState.OPEN:
            self._retry_at_ns = self._clock.monotonic_ns() + self._recovery_ns
            self._times_opened += 1

    def _next_permit(self) -> int:
        self._last_permit += 1
        return self._last_permit

    def _state_now(self) -> CircuitState:
        if self._state is CircuitState.OPEN and self._clock.monotonic_ns() >= self._retry_at_ns:
            return TRANSITIONS[self._state][Trigger.RECOVERY_TIME_PASSED]
        return self._state

    def _open_reason(self, waiting_ns: int) -> str:
        failures = "1 failure" if self._failures == 1 else f"{self._failures} failures in a row"
        return f"{self._called()} is open after {failures}; it tries again in {_seconds(waiting_ns)}"

    def _half_open_reason(self) -> str:
        return (
            f"{self._called()} is half open and has its {self._probes_needed} probe(s) under way; it closes when they "
            f"succeed, and tries again {_seconds(self._recovery_ns)} after one that fails"
        )

    def _called(self) -> str:
        return f"circuit {self._name!r}" if self._name else "the circuit"


def _seconds(ns: int) -> str:
    return f"{round(ns / 1e9, 3):g} s"


def _positive_ns(field: str, seconds: object) -> int:
    return max(1, round(checks.seconds(field, seconds, above_zero=True) * 1_000_000_000))
