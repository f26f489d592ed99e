"""Processes that die where a test wants them to.

`PENSTOCK_CRASH_AT="node.before_append:3"` in the environment, or `arm("node.before_append:3")`, kills the process with
SIGKILL the third time it comes to that point. Nothing reads the variable but this module, and nothing is armed before
`arm` is called: a process that does not test never dies of it.

`POINTS` are the names of a run with a journal, `HOSTED_POINTS` those that a host adds. `watching()` counts what a run
comes by, and kills nobody.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import InvalidValue
from penstock.hosting.points import POINTS as HOSTED_POINTS
from penstock.runtime.durable import points
from penstock.runtime.durable.points import POINTS

VARIABLE = "PENSTOCK_CRASH_AT"

__all__ = ["HOSTED_POINTS", "POINTS", "VARIABLE", "arm", "disarm", "watching"]


def arm(at: str | None = None, *, die: Callable[[], None] | None = None) -> None:
    """Die at the n-th passing of a point, `name` or `name:n`; by default what the environment says, if it does."""
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

    points.hook = reached


def disarm() -> None:
    """From now on, nobody dies."""
    points.hook = None


@contextmanager
def watching() -> Iterator[Counter[str]]:
    """How often each point is passed in the block."""
    passed: Counter[str] = Counter()

    def reached(point: str) -> None:
        passed[point] += 1

    before, points.hook = points.hook, reached
    try:
        yield passed
    finally:
        points.hook = before


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
