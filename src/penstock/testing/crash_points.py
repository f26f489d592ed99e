"""Kill a process at a failpoint chosen by a test.

`PENSTOCK_CRASH_AT="node.before_append:3"` in the environment, or `arm("node.before_append:3")`, kills the process with
SIGKILL the third time it reaches that failpoint. Only this module reads the variable, and nothing is armed before `arm`
is called: a process that is not under test is not affected.

`POINTS` are the failpoints of a run with a journal, `HOSTED_POINTS` those that a host adds. `watching()` counts the
failpoints a run reaches, and kills nothing.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import InvalidValue
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.failpoints import HOSTED_POINTS, POINTS

VARIABLE = "PENSTOCK_CRASH_AT"

__all__ = ["HOSTED_POINTS", "POINTS", "VARIABLE", "arm", "disarm", "watching"]


def arm(at: str | None = None, *, die: Callable[[], None] | None = None) -> None:
    """Die at the n-th pass of a failpoint, `name` or `name:n`; by default the one the environment names, if any."""
    wanted = os.environ.get(VARIABLE) if at is None else at
    if not wanted:
        return
    name, _, number = wanted.partition(":")
    if name not in (*POINTS, *HOSTED_POINTS) or (number and not number.isdecimal()) or number == "0":
        names = ", ".join((*POINTS, *HOSTED_POINTS))
        raise InvalidValue("crash point", wanted, f"name or name:n, where name is one of {names}")
    left = int(number or 1)

    def reached(point: str) -> None:
        nonlocal left
        if point == name:
            left -= 1
            if not left:
                (die or _die)()

    failpoints.hook = reached


def disarm() -> None:
    """Disarm all failpoints."""
    failpoints.hook = None


@contextmanager
def watching() -> Iterator[Counter[str]]:
    """Count how often each failpoint is reached in the block."""
    passed: Counter[str] = Counter()

    def reached(point: str) -> None:
        passed[point] += 1

    before, failpoints.hook = failpoints.hook, reached
    try:
        yield passed
    finally:
        failpoints.hook = before


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
