"""Threads for work that its caller may have to abandon.

A sync function cannot be interrupted; it can only be abandoned. So if a caller may have to be released early (a
deadline, a cancel), the function runs on a worker and the caller waits for whichever comes first. An abandoned worker
finishes its job, passes the late result to `on_late`, and is then reused.

Workers are daemon threads: a function that never returns does not keep the interpreter alive. One is created when none
is idle, so nested calls can never wait for each other, and it ends after a while without work.
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
    """Whether the program has threads besides this one and the workers: one of them may stop what runs in this one."""
    return _thread._count() > len(_idle) + len(_busy)


def busy_workers() -> int:
    """Return the number of busy workers, including those with abandoned work."""
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
        """Run the function, on the worker."""
        try:
            self.value = self.context.run(self.fn)
        except BaseException as error:
            self.error = error
        if self._claim.acquire(blocking=False):
            self.wake()
        else:
            self.on_late(self.value, self.error)

    def wait(self, seconds: float | None) -> bool:
        """Wait, in the caller's thread; return True if the function has finished, False if it was abandoned."""
        ends = None if seconds is None else time.monotonic() + seconds
        # In slices: a signal that another thread received is handled by the main thread between two waits.
        while not self._wake.acquire(
            timeout=SLICE_S if ends is None else max(0, min(SLICE_S, ends - time.monotonic()))
        ):
            if ends is not None and time.monotonic() >= ends:
                break
        return not self.leave()

    def leave(self) -> bool:
        """Abandon the job; return True if the function has not finished, so that its result goes to `on_late`."""
        self.abandoned = self.abandoned or self._claim.acquire(blocking=False)
        return self.abandoned

    def wake(self) -> None:
        """Wake the caller; may be called from any thread, any number of times."""
        # Releasing an unlocked lock raises: the caller is already awake.
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
        """Start the job, wait for it, and return its value or raise its error."""
        start(self)
        await self._done
        if self.error is not None:
            raise self.error
        return self.value

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
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
        # From an empty context: a worker outlives the job it was started for, and must not keep its scope.
        contextvars.Context().run(self._thread.start)

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
                    # Another thread has just taken this worker from the list: its job is about to arrive.
                    self._given.acquire()
            job, self._job = self._job, None
            assert job is not None
            try:
                job.run()
            finally:
                # If `on_late` raised, this thread ends with a traceback, and is not busy any more.
                del job
                _busy.discard(self)
            _idle.append(self)


def _forget_workers() -> None:
    _idle.clear()
    _busy.clear()


# Threads do not survive a fork; the list of them does.
os.register_at_fork(after_in_child=_forget_workers)
