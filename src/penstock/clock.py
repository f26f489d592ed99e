"""Time as a parameter.

The cores never read a clock; whoever composes them passes one in, so that a test can hold time still.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Clock(Protocol):
    """Monotonic time for durations and deadlines, wall time for showing."""

    def monotonic_ns(self) -> int: ...

    def time_ns(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    time_ns = staticmethod(time.time_ns)


SYSTEM_CLOCK: Clock = SystemClock()


def utc_from_ns(wall_ns: int) -> datetime:
    """A wall-clock reading as a UTC datetime."""
    return datetime.fromtimestamp(wall_ns / 1_000_000_000, UTC)


def utc_now() -> datetime:
    """The machine's wall clock as a UTC datetime, for stamping what people create themselves."""
    return utc_from_ns(time.time_ns())
