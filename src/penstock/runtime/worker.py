"""Threads for work that somebody may have to walk away from.

A sync function cannot be interrupted; it can only be left behind. So where a caller must get free in time (a
deadline, a cancel), the function runs on a worker and the caller waits for whichever comes first. A worker that was
left behind finishes its job on its own, hands the late result to `on_late`, and is then used again.

Workers are daemon threads: a function that never returns does not keep the interpreter alive. They are made when none
is idle, so nested calls can never wait for each other, and they end after a while without work.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import contextvars
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

IDLE_SECONDS = 5.0
SLICE_S = 0.5

_idle: list[_Worker] = []
_busy: set[_Worker] = set()
_numbers = itertools.count(1)


def others_alive() -> bool:
    """Whether the program has threads beside this one and the workers: one of them may want to stop what we run."""
    return _thread._count() > len(_idle) + len(_busy)


def busy_workers() -> int:
    """How many workers are running something now, abandoned work included."""
    return len(_busy)


class Job:
    """One function on a worker: finished by the worker, or abandoned by its caller, whichever comes first."""

    __slots__ = ("_claim", "_wake", "abandoned", "context", "error", "fn", "on_late", "value")

    def __init__(self, fn: Callable[[], Any], on_late: Callable[[Any, BaseException | None], None]) -> None:
        self.fn = fn
        self.context = contextvars.copy_context()
        self.on_late = on_late
        self.value: Any = None
        self.error: BaseException | None = None
        self.abandoned = False
        self._claim = _thread.allocate_lock()
        """Taken once: by the worker when it is done, or by the caller when it leaves."""
        self._wake = _thread.allocate_lock()
        self._wake.acquire()

    def run(self) -> None:
        """The worker's side."""
        try:
            self.value = self.context.run(self.fn)
        except BaseException as error:
            self.error = error
        if self._claim.acquire(blocking=False):
            self.wake()
        else:
            self.on_late(self.value, self.error)

    def wait(self, seconds: float | None) -> bool:
        """The caller's side: True if the function has finished, False if it was abandoned."""
        ends = None if seconds is None else time.monotonic() + seconds
        # In slices: a signal that another thread received is handled by the main thread between two waits.
        while not self._wake.acquire(
            timeout=SLICE_S if ends is None else max(0, min(SLICE_S, ends - time.monotonic()))
        ):
            if ends is not None and time.monotonic() >= ends:
                break
        return not self.leave()

    def leave(self) -> bool:
        """Walk away: True if the function has not finished, and its result goes to `on_late`."""
        self.abandoned = self.abandoned or self._claim.acquire(blocking=False)
        return self.abandoned

    def wake(self) -> None:
        """Make the caller look up; may be called by anybody, any number of times."""
        # Releasing an unlocked lock is an error that says the caller is awake already.
        with contextlib.suppress(RuntimeError):
            self._wake.release()


class LoopJob(Job):
    """A function on a worker that a task waits for."""

    __slots__ = ("_done", "_loop")

    def __init__(self, fn: Callable[[], Any], on_late: Callable[[Any, BaseException | None], None]) -> None:
        super().__init__(fn, on_late)
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()

    async def result(self) -> Any:
        """Start it, wait for it; its value, or raise what it raised."""
        start(self)
        await self._done
        if self.error is not None:
            raise self.error
        return self.value

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


def start(job: Job) -> None:
    """Run the job on an idle worker, or on a new one."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.give(job)


class _Worker:
    """A thread that runs one job after the other."""

    def __init__(self) -> None:
        self._given = _thread.allocate_lock()
        self._given.acquire()
        self._job: Job | None = None
        self._thread = threading.Thread(target=self._loop, name=f"penstock-worker-{next(_numbers)}", daemon=True)
        self._thread.start()

    def give(self, job: Job) -> None:
        _busy.add(self)
        self._job = job
        self._given.release()

    def _loop(self) -> None:
        while True:
            if not self._given.acquire(timeout=IDLE_SECONDS):
                try:
                    _idle.remove(self)
                    return
                except ValueError:
                    # Somebody has just taken this worker from the list: the job is on its way.
                    self._given.acquire()
            job, self._job = self._job, None
            assert job is not None
            try:
                job.run()
            finally:
                # If `on_late` raised, this thread ends and says so; it is not busy any more.
                del job
                _busy.discard(self)
            _idle.append(self)


def _forget_workers() -> None:
    _idle.clear()
    _busy.clear()


# Threads do not survive a fork; the list of them does.
os.register_at_fork(after_in_child=_forget_workers)
