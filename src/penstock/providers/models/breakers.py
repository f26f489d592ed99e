"""One circuit breaker for each provider and model, shared within the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.breaker import CircuitBreaker, CircuitSnapshot
from penstock.errors import Halted
from penstock.providers.models.formats.format import UnsupportedRequest
from penstock.stops import Stop, StopReason

REQUEST_TIMEOUT = 408
SERVER_ERROR = 500


class Breakers:
    """Circuits by name, created on first use, all with the same thresholds."""

    def __init__(
        self, failure_threshold: int = 5, recovery_timeout: float = 60.0, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.failure_threshold = failure_threshold
        self.recovery_timeout = recovery_timeout
        self._clock = clock
        self._lock = Lock()
        self._circuits: dict[str, CircuitBreaker] = {}

    def of(self, name: str) -> CircuitBreaker:
        """Return the circuit called `name`, such as "openai:gpt-4o"."""
        with self._lock:
            found = self._circuits.get(name)
            if found is None:
                found = CircuitBreaker(self.failure_threshold, self.recovery_timeout, name=name, clock=self._clock)
                self._circuits[name] = found
            return found

    def snapshots(self) -> list[CircuitSnapshot]:
        """Return a snapshot of every circuit."""
        with self._lock:
            circuits = list(self._circuits.values())
        return [circuit.snapshot() for circuit in circuits]

    def reset(self) -> None:
        """Close all circuits manually."""
        with self._lock:
            circuits = list(self._circuits.values())
        for circuit in circuits:
            circuit.reset()


breakers = Breakers()
"""The circuits shared within the process."""


@contextmanager
def passing(breaker: CircuitBreaker | None) -> Iterator[None]:
    """Pass one request through a circuit, and record its outcome there.

    Raises Halted if the circuit is open, which counts as a refusal that cost nothing.
    """
    if breaker is None:
        yield
        return
    decision = breaker.check()
    if not decision.allowed:
        raise Halted(Stop(StopReason.CIRCUIT_OPEN, decision.reason))
    try:
        yield
    except BaseException as error:
        if is_sign_of_failure(error):
            breaker.record_failure(decision.permit)
        else:
            breaker.record_abandoned(decision.permit)
        raise
    breaker.record_success(decision.permit)


def is_sign_of_failure(error: BaseException) -> bool:
    """Whether an error indicates that the provider is failing: not a cancel, and not a justified refusal.

    A rate limit is such a refusal: it states itself when to retry.
    """
    if not isinstance(error, Exception) or isinstance(error, UnsupportedRequest):
        return False
    status = getattr(error, "status_code", None)
    return not isinstance(status, int) or status >= SERVER_ERROR or status == REQUEST_TIMEOUT
