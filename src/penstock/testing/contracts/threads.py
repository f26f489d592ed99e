"""Run threads so that races happen.

Normally, short critical sections are hardly ever interrupted, and a missing lock passes its tests. Here a thread yields
at every line of the code under test, so that a race which is possible does happen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(count: int, work: Callable[[int], T], *, within: str = "penstock") -> list[T]:
    """Return the results of `work` on `count` threads, which start together and yield at every line of `within`."""
    start = threading.Barrier(count)

    def run(thread: int) -> T:
        start.wait()
        return work(thread)

    with giving_way(within), ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@contextmanager
def giving_way(within: str = "penstock") -> Iterator[None]:
    """Make threads started in the block yield at every line of `within`."""

    def give_way(frame: FrameType, event: str, arg: Any) -> Any:
        if not f"{frame.f_globals.get('__name__')}.".startswith(f"{within}."):
            return None
        time.sleep(0)
        return give_way

    before = threading.gettrace()
    threading.settrace(give_way)
    try:
        yield
    finally:
        threading.settrace(before)
