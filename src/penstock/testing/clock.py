"""A clock that moves only when a test advances it.

Thread-safe, so that code under test may read it from any thread. It knows no event loop: advancing it wakes nothing.
For code that sleeps or waits, use `SimLoop`.
"""

from __future__ import annotations

import threading

NANOS_PER_S = 1_000_000_000
WALL_START_NS = 1_767_225_600 * NANOS_PER_S
"""2026-01-01T00:00:00Z: where simulated wall clocks start, so that the output of a test is the same every day."""


class ManualClock:
    """A `penstock.clock.Clock` that a test moves.

    `advance` is time passing, `jump_wall` a clock being set, `suspend` a machine that sleeps.
    """

    def __init__(self, start_ns: int = 0, wall_start_ns: int = WALL_START_NS) -> None:
        self._lock = threading.Lock()
        self._monotonic_ns = start_ns
        self._wall_ns = wall_start_ns
        self._suspended_ns = 0

    def monotonic_ns(self) -> int:
        return self._monotonic_ns  # one read of one int: no lock needed

    def time_ns(self) -> int:
        return self._wall_ns

    def passed_ns(self) -> int:
        with self._lock:
            return self._monotonic_ns + self._suspended_ns

    def advance(self, seconds: float) -> None:
        """Advance both clocks by `seconds`."""
        self.advance_ns(round(seconds * NANOS_PER_S))

    def advance_ns(self, nanos: int) -> None:
        """Advance both clocks by `nanos` nanoseconds."""
        if nanos < 0:
            raise ValueError(f"time cannot pass by {nanos} ns; jump_wall() sets the wall clock back")
        with self._lock:
            self._monotonic_ns += nanos
            self._wall_ns += nanos

    def jump_wall(self, seconds: float) -> None:
        """Set the wall clock forward or, if negative, back, as an administrator or NTP would; no time passes."""
        with self._lock:
            self._wall_ns += round(seconds * NANOS_PER_S)

    def suspend(self, seconds: float) -> None:
        """Advance the wall clock by `seconds`, as on a suspended machine: its monotonic clock stops meanwhile."""
        nanos = round(seconds * NANOS_PER_S)
        if nanos < 0:
            raise ValueError(f"a machine cannot be suspended for {seconds} s")
        with self._lock:
            self._wall_ns += nanos
            self._suspended_ns += nanos
