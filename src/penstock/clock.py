"""Time as a parameter.

The cores never read a clock; the code that composes them passes one in, so that a test can stop time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol


class Clock(Protocol):
    """Monotonic time for durations and deadlines, wall time for display.

    A clock may also have `passed_ns()`: monotonic time that advances while the machine is suspended. It is used where
    machines have to agree on elapsed time.
    """

    def monotonic_ns(self) -> int: ...

    def time_ns(self) -> int: ...


def _with_suspends() -> Callable[[], int]:
    """Return a clock that advances while the machine is suspended, and cannot be set."""
    # Linux has one of its own, macOS its monotonic one, which `time.monotonic` does not read, Windows `time.monotonic`.
    clock: Any = getattr(time, "CLOCK_BOOTTIME", None) or getattr(time, "CLOCK_MONOTONIC", None)
    try:
        read: Callable[[], int] = partial(time.clock_gettime_ns, clock)
        read()
    except (AttributeError, TypeError, OSError):  # this system has neither, or does not let us read it
        return time.monotonic_ns
    return read


class SystemClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    time_ns = staticmethod(time.time_ns)
    passed_ns = staticmethod(_with_suspends())


SYSTEM_CLOCK: Clock = SystemClock()


def utc_from_ns(wall_ns: int) -> datetime:
    """Return a wall-clock reading as a UTC datetime."""
    return datetime.fromtimestamp(wall_ns / 1_000_000_000, UTC)


def utc_now() -> datetime:
    """Return the machine's wall clock as a UTC datetime, for timestamps of objects that programs create."""
    return utc_from_ns(time.time_ns())
