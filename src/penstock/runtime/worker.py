"""Threads for work that its caller may have to abandon.

A sync function cannot be interrupted; it can only be abandoned. So if a caller may have to be released early (a
deadline, a cancel), the function runs on a worker and the caller waits for whichever comes first. An abandoned worker
finishes its job, passes the late result to `on_late`, and is then reused. Functions that hang for ever would take a
thread each, so their number is bounded: while too many abandoned functions still run, no further one is started.

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

from penstock.errors import PenstockError

IDLE_SECONDS = 5.0
SLICE_S = 0.5

MAX_ABANDONED = 200
"""Default maximum number of abandoned functions that still run in this process; see `limit_abandoned`."""

_limits = {"abandoned": MAX_ABANDONED}
_abandoned: set[Job] = set()
"""Jobs that their callers have left and whose functions still run; each change is one atomic operation."""
_idle: list[_Worker] = []
_busy: set[_Worker] = set()
_tasks: set[asyncio.Task[None]] = set()
"""Keeps the tasks of jobs alive: a loop has only weak references to them."""
_numbers = itertools.count(1)


def others_alive() -> bool:
    """Whether the program has threads besides this one and the workers: one of them may stop the work of this one."""
    return _thread._count() > len(_idle) + len(_busy)


def busy_workers() -> int:
    """Return the number of busy workers, including those with abandoned work."""
    return len(_busy)


class TooManyAbandoned(PenstockError, RuntimeError):
    """A sync function was not started, because too many that were cancelled or timed out still run in this process."""

    def __init__(self, running: int) -> None:
        self.running = running
        super().__init__(
            f"{running} functions that were cancelled or timed out still run in threads of this process, and no more "
            "are started; make them async, or give what they wait for a timeout of its own"
        )


def limit_abandoned(maximum: int) -> None:
    """Set how many abandoned functions of this process may still run before no further function is started."""
    _limits["abandoned"] = maximum


def abandoned_jobs() -> int:
    """Return the number of abandoned functions that still run."""
    return len(_abandoned)


class Job:
    """One function on a worker: finished by the worker, or abandoned by its caller, whichever comes first."""

    __slots__ = ("_claim", "_wake", "abandoned", "context", "error", "fn", "is_counted", "on_late", "value")

    def __init__(
        self, fn: Callable[[], Any], on_late: Callable[[Any, BaseException | None], None], *, is_counted: bool = False
    ) -> None:
        """`is_counted`, for functions of users: refuse the job while too many of those hang; count it if it hangs."""
        self.fn = fn
        self.is_counted = is_counted
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
        self._pass_on()

    def _pass_on(self) -> None:
        if self._claim.acquire(blocking=False):
            self.wake()
        else:
            try:
                self.on_late(self.value, self.error)
            finally:
                _abandoned.discard(self)

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
        if not self.abandoned:
            if self.is_counted:
                # Before the claim is taken: the worker discards the job after it has failed to take the claim.
                _abandoned.add(self)
            self.abandoned = self._claim.acquire(blocking=False)
            if not self.abandoned:
                _abandoned.discard(self)
        return self.abandoned

    def not_started(self) -> None:
        """Take the claim of a job that no worker has: it cannot be abandoned."""
        self._claim.acquire(blocking=False)

    def wake(self) -> None:
        """Wake the caller; may be called from any thread, any number of times."""
        # Releasing an unlocked lock raises: the caller is already awake.
        with contextlib.suppress(RuntimeError):
            self._wake.release()


class LoopJob(Job):
    """A function on a worker that a task waits for."""

    __slots__ = ("_done", "_loop")

    def __init__(
        self, fn: Callable[[], Any], on_late: Callable[[Any, BaseException | None], None], *, is_counted: bool = False
    ) -> None:
        super().__init__(fn, on_late, is_counted=is_counted)
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()

    async def result(self) -> Any:
        """Start the job, wait for it, and return its value or raise its error."""
        self._start()
        await self._done
        if self.error is not None:
            raise self.error
        return self.value

    def _start(self) -> None:
        start(self)

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._finish)

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class TaskJob(LoopJob):
    """A coroutine on a task of its own, which its caller may abandon as one abandons a function on a worker."""

    __slots__ = ()

    def _start(self) -> None:
        task = self._loop.create_task(self._run())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)

    async def _run(self) -> None:
        try:
            self.value = await self.fn()
        except BaseException as error:  # also if the loop ends: the caller or `on_late` receives it
            self.error = error
        self._pass_on()


def start(job: Job) -> None:
    """Run the job on an idle worker, or on a new one.

    A job that is counted raises TooManyAbandoned while too many others hang; RuntimeError if no thread can be started.
    """
    if job.is_counted and len(_abandoned) >= _limits["abandoned"]:
        job.not_started()
        raise TooManyAbandoned(len(_abandoned))
    try:
        worker = _idle.pop()
    except IndexError:
        try:
            worker = _Worker()
        except RuntimeError:
            job.not_started()
            raise
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
    _abandoned.clear()


# Threads do not survive a fork; the list of them does.
os.register_at_fork(after_in_child=_forget_workers)
