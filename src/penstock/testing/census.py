"""Check that a block of code leaves nothing behind.

Counts the things that a process can leave behind (asyncio tasks, threads, file descriptors, child processes) before and
after a block, allows a grace period, and names the leftovers. It knows Penstock's reusable worker threads, which stay
by design, and counts them only while they are busy. Things that a platform cannot list (no /proc) are not counted.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

POOL_THREAD_PREFIX = "penstock-worker"
STEP_S = 0.01
COLLECT_EVERY = 50
"""Number of steps between two collections of reference cycles."""


class Leak(AssertionError):
    """Something outlived the block that created it; `found` names each item."""

    def __init__(self, found: tuple[str, ...]) -> None:
        super().__init__("left behind: " + "; ".join(found))
        self.found = found


def census(*, grace_s: float = 2.0) -> Census:
    """Return a context manager, sync or async, that raises `Leak` for leftovers `grace_s` after the block.

    Use `async with` where the block leaves tasks that end by themselves: a plain `with` blocks the loop they need.
    """
    return Census(grace_s)


@dataclass(frozen=True, slots=True)
class _Count:
    tasks: frozenset[asyncio.Task[Any]]
    threads: frozenset[threading.Thread]
    descriptors: dict[str, str]
    children: dict[str, str]
    busy_workers: int


class Census:
    """One comparison of a process before and after a block; made by `census()`."""

    def __init__(self, grace_s: float) -> None:
        self._steps = max(1, round(grace_s / STEP_S))
        self._before: _Count | None = None

    def __enter__(self) -> None:
        self._before = _count()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            for _step in self._until_clean():
                time.sleep(STEP_S)

    async def __aenter__(self) -> None:
        self._before = _count()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            for _step in self._until_clean():
                await asyncio.sleep(STEP_S)

    def _until_clean(self) -> Iterator[None]:
        """Yield once for each wait the caller should make; ends when nothing is left, raises when the time is up."""
        assert self._before is not None, "the census was not entered"
        for step in range(self._steps + 1):
            found = tuple(_left_behind(self._before, _count()))
            if not found:
                return
            if step % COLLECT_EVERY == 0:  # again later too: a thread may drop its last reference meanwhile
                gc.collect()  # a closed object in a reference cycle is not a leak
            if step < self._steps:
                yield
        raise Leak(found)


def _count() -> _Count:
    threads = (thread for thread in threading.enumerate() if not thread.name.startswith(POOL_THREAD_PREFIX))
    return _Count(_tasks(), frozenset(threads), _descriptors(), _children(), _busy_workers())


def _left_behind(before: _Count, after: _Count) -> Iterator[str]:
    for task in sorted(after.tasks - before.tasks, key=asyncio.Task.get_name):
        yield f"task {task.get_name()} ({getattr(task.get_coro(), '__qualname__', '?')})"
    for thread in sorted(after.threads - before.threads, key=lambda thread: thread.name):
        yield f"{'daemon ' if thread.daemon else ''}thread {thread.name}"
    if after.busy_workers > before.busy_workers:
        yield f"{after.busy_workers - before.busy_workers} busy worker threads"
    if len(after.descriptors) > len(before.descriptors):
        for number, target in after.descriptors.items():
            if before.descriptors.get(number) != target:
                yield f"file descriptor {number} ({target})"
    for pid, name in after.children.items():
        if pid not in before.children:
            yield f"child process {pid} ({name})"


def _tasks() -> frozenset[asyncio.Task[Any]]:
    try:
        return frozenset(asyncio.all_tasks())
    except RuntimeError:  # no loop runs in this thread
        return frozenset()


def _descriptors() -> dict[str, str]:
    found = {}
    with suppress(OSError):
        for number in sorted(os.listdir("/proc/self/fd"), key=int):
            with suppress(OSError):  # the descriptor of this very listing is closed by now
                found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def _children() -> dict[str, str]:
    found: dict[str, str] = {}
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError), open(f"/proc/self/task/{thread}/children") as listing:  # the thread may have ended
                found.update((pid, _process_name(pid)) for pid in listing.read().split())
    return found


def _process_name(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return "?"


def _busy_workers() -> int:
    # A pool that was never imported has no workers: checking must not import it.
    count = getattr(sys.modules.get("penstock.runtime.worker"), "busy_workers", None)
    return int(count()) if callable(count) else 0
