"""Deterministic concurrency tests: an event loop with virtual time and a seeded order.

Two things make an asyncio test flaky or slow: real time, and the one order in which a real loop happens to run ready
callbacks. `SimLoop` removes both. Its clock stops while anything is ready and then jumps to the next timer, so an hour
of backoff costs nothing. Of all ready callbacks it picks the next at random, from a seed: the same seed gives the same
schedule, another seed another one, and a failure names its seed.

It is asyncio's own loop with three parts replaced: the turn (which moves the clock where a real loop waits, and picks
where a real loop queues), the creation of callbacks and timers (the same without what only sockets and debugging need,
because whole days are simulated here), and the task class (whose hash is a number instead of an address: a TaskGroup
cancels its children in the order of a set, and that order has to depend on the seed as well).

It supports no sockets, signals, subprocesses or threads, and refuses operations that need them. A seed repeats the
loop's decisions; it does not repeat decisions of the code under test that depend on real time, `id()`, the garbage
collector or a string's hash.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from penstock.testing.clock import WALL_START_NS

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
H = TypeVar("H", bound=asyncio.Handle)

STEPS_PER_INSTANT = 1_000_000
"""Number of callbacks without time advancing that counts as a spinning loop: about a second of real time."""

CANCEL_ROUNDS = 5
"""Number of cancels a task that outlives `main` may swallow before the run fails."""

RESOLUTION_S = 1e-9
"""Timers this close are due together: 0.1 + 0.2 and 0.3 are one instant, in either order."""

MANY_TIMERS = 100
"""With more timers than this, cancelled ones are removed once they are the majority, as asyncio does."""

FEW_CANCELLED = MANY_TIMERS // 2
"""With at most this many cancelled timers they cannot be that majority, and nothing more needs to be counted."""


class SimError(RuntimeError):
    """A simulated run cannot continue."""


class SimDeadlock(SimError):
    """Nothing is ready, no timer is set, and the main task still waits."""


class SimLivelock(SimError):
    """Callbacks keep scheduling each other and time never advances."""


class SimRefused(SimError):
    """The code requested something a seed cannot repeat: a thread, or a loop inside a loop."""


class SimClock:
    """The loop's virtual time as a `penstock.clock.Clock`."""

    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:
        return self._now_ns

    def time_ns(self) -> int:
        return WALL_START_NS + self._now_ns

    def move(self, to_s: float) -> None:
        """Set the time when the loop advances; time is read far more often than it advances."""
        self._now_ns = round(to_s * 1_000_000_000)


class _SimHandle(asyncio.Handle):
    """A callback of `call_soon`, created in one step: asyncio's own checks for debug mode first."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], loop: SimLoop, context: Context | None
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _SimTimer(asyncio.TimerHandle):
    """A callback of `call_at`, created and cancelled in one step each: every `sleep` cancels its timer."""

    __slots__ = ()
    _args: tuple[Any, ...] | None  # type: ignore[assignment]  # None once it is cancelled

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: SimLoop,
        context: Context | None,
    ) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if self._loop._debug:
            super().cancel()  # which keeps its repr for the log
        elif not self._cancelled:
            if self._scheduled:
                self._loop._timer_cancelled_count += 1
            self._cancelled = True
            self._callback = None
            self._args = None


class _Due(float):
    """A timer's due time with the timer: compared as a number, without a Python call for each comparison."""

    __slots__ = ("timer",)
    timer: asyncio.TimerHandle


class _SimTask(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, number: int, **options: Any) -> None:
        # Before asyncio's constructor, which adds the task to a set immediately.
        self.number = number
        self._hash = hash((loop.seed, number))
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._hash


class _InOrder(WeakKeyDictionary[AsyncGenerator[Any, Any], None]):
    """A weak set that keeps insertion order, so that open generators are closed in a repeatable order."""

    def add(self, item: AsyncGenerator[Any, Any]) -> None:
        self[item] = None

    def discard(self, item: AsyncGenerator[Any, Any]) -> None:
        self.pop(item, None)


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time is virtual and whose order is decided by `seed`."""

    has_threads = False
    """Work that would run on a thread to keep the loop responsive runs inline: here, no time passes meanwhile."""

    # Attributes of BaseEventLoop that the type stubs do not declare.
    _closed: bool
    _debug: bool
    _stopping: bool
    _task_factory: object
    _timer_cancelled_count: int
    _check_closed: Callable[[], None]
    _check_thread: Callable[[], None]
    _check_callback: Callable[[object, str], None]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.clock = SimClock()
        self.unhandled: list[BaseException] = []  # errors that reached the exception handler, of callbacks or tasks
        self._now = 0.0
        self._due_before = RESOLUTION_S
        self._home = threading.get_ident()
        self._tasks_made = 0
        self._steps_left = STEPS_PER_INSTANT
        self._winding_down = False
        self._draw = random.Random(seed).random
        self._ready: list[asyncio.Handle] = []
        self._scheduled: list[_Due] = []
        self._asyncgens = _InOrder()

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed or self._debug:
            return _made_by_caller(super().call_soon(callback, *args, context=context), frames=1)
        handle = _SimHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if delay is None:
            raise TypeError("delay must not be None")
        return self._set_timer(self._now + delay, callback, args, context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if when is None:
            raise TypeError("when cannot be None")
        return self._set_timer(when, callback, args, context)

    def _set_timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        due = _Due(when - 0.0)  # refuses a text that float() would accept
        if self._closed or self._debug:
            due.timer = self._make_checked_timer(when, callback, args, context)
        else:
            due.timer = _SimTimer(when, callback, args, self, context)
        heappush(self._scheduled, due)
        return due.timer

    def _make_checked_timer(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        """Create a timer as asyncio's debug mode does, or refuse on a closed loop."""
        self._check_closed()
        self._check_thread()
        self._check_callback(callback, "call_at")
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        return _made_by_caller(timer, frames=3)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if self._closed or self._task_factory is not None:
            return super().create_task(coro, **options)
        self._tasks_made += 1
        return _SimTask(coro, loop=self, number=self._tasks_made, **options)

    def _run_once(self) -> None:
        """Run turns until the loop is to stop; returning after each turn would only make asyncio call this again.

        A turn runs as many callbacks as are ready at its beginning, picked from all that are ready, including new ones.
        """
        ready, timers, draw = self._ready, self._scheduled, self._draw
        handle: asyncio.Handle | None
        while True:
            if timers and (timers[0].timer._cancelled or self._timer_cancelled_count > FEW_CANCELLED):
                self._drop_cancelled_timers()
            if not ready and not self._stopping:
                self._pass_time()
            self._steps_left = steps_left = self._steps_left - len(ready) - 1
            if steps_left < 0:
                raise SimLivelock(f"{STEPS_PER_INSTANT:,} callbacks and no end: {self._describe_pending()}")
            while timers and not timers[0] >= self._due_before:
                handle = heappop(timers).timer
                handle._scheduled = False  # type: ignore[attr-defined]
                ready.append(handle)
            for _ in range(len(ready)):
                drawn, count = draw(), len(ready)
                if count > 1:
                    at = int(drawn * count)
                    ready[at], ready[-1] = ready[-1], ready[at]
                # Releasing the previous handle may make another one ready, so nothing is counted or drawn after this.
                handle = ready.pop()
                if handle._cancelled:
                    continue
                if self._debug:
                    self._run_in_debug_mode(handle)
                else:
                    handle._run()
            handle = None  # release its references at the end of the turn
            if self._stopping:
                return

    def _drop_cancelled_timers(self) -> None:
        """Remove all cancelled timers if there are many, otherwise those at the head.

        This is exactly asyncio's rule: the order of timers of one instant depends on the history of the heap.
        """
        timers = self._scheduled
        if len(timers) > MANY_TIMERS and self._timer_cancelled_count / len(timers) > 0.5:
            for due in timers:
                if due.timer._cancelled:
                    due.timer._scheduled = False  # type: ignore[attr-defined]
            timers[:] = [due for due in timers if not due.timer._cancelled]
            heapify(timers)
            self._timer_cancelled_count = 0
        else:
            while timers and timers[0].timer._cancelled:
                self._timer_cancelled_count -= 1
                heappop(timers).timer._scheduled = False  # type: ignore[attr-defined]

    def _pass_time(self) -> None:
        """Jump to the next timer when nothing is ready."""
        if not self._scheduled:
            raise SimDeadlock(f"nothing is ready and no timer is set; waiting forever: {self._describe_pending()}")
        first = self._scheduled[0]
        if first > self._now:
            self._now = now = first.timer.when()
            self.clock.move(now)
            # After a hundred days a float no longer distinguishes nanoseconds, and the timer would never be due.
            self._due_before = now + max(RESOLUTION_S, math.ulp(now))
            if not self._winding_down:
                self._steps_left = STEPS_PER_INSTANT

    def _run_in_debug_mode(self, handle: asyncio.Handle) -> None:
        """Run a callback; a failure is logged with where it was created. No callback counts as slow in virtual time."""
        self._current_handle: asyncio.Handle | None = handle
        try:
            handle._run()
        finally:
            self._current_handle = None

    def pending(self) -> list[asyncio.Task[Any]]:
        """Return the tasks that have not ended, oldest first."""
        return sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "number", 0))

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._home:
            raise SimRefused(
                f"thread {threading.current_thread().name!r} called into a SimLoop: a seed cannot "
                "repeat the timing of threads; use ManualClock and a real loop, or make the work a coroutine"
            )
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> NoReturn:  # type: ignore[override]
        name = getattr(func, "__qualname__", repr(func))
        raise SimRefused(f"run_in_executor({name}): a SimLoop has no threads; test blocking code on a real loop")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self.is_closed():
            self.unhandled.append(error)
        super().default_exception_handler(context)

    def wind_down(self) -> None:
        """Cancel remaining tasks until they have ended, then close open async generators."""
        # From here on steps are counted over all instants, so that a task that sleeps and swallows cancels ends as
        # well.
        self._winding_down, self._steps_left = True, STEPS_PER_INSTANT
        for _ in range(CANCEL_ROUNDS):
            if leftovers := self.pending():
                self._cancel(leftovers)
        if self.pending():
            raise SimDeadlock(f"cancelled {CANCEL_ROUNDS} times and still there: {self._describe_pending()}")
        self.run_until_complete(self.shutdown_asyncgens())

    def _cancel(self, tasks: list[asyncio.Task[Any]]) -> None:
        for task in tasks:
            task.cancel()
        try:
            results = self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        except SimDeadlock:
            return  # a task swallowed the cancel and waits again; the next round cancels it again
        self.unhandled += [error for error in results if _is_fault(error)]

    def _describe_pending(self) -> str:
        return ", ".join(_describe(task) for task in self.pending()) or "no task at all"


def _made_by_caller(handle: H, *, frames: int) -> H:
    """Remove the loop's own `frames` from the stack that debug mode keeps for `handle`."""
    if stack := handle._source_traceback:  # type: ignore[attr-defined]
        del stack[-frames:]
    return handle


def _is_fault(outcome: object) -> bool:
    return isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError)


def _describe(task: asyncio.Task[Any]) -> str:
    name = getattr(task.get_coro(), "__qualname__", "?")
    stack = task.get_stack(limit=1)
    where = f" at {stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else ""
    return f"{task.get_name()} ({name}{where})"


def sim_run(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run `main()` in one simulated schedule; exceptions carry the seed as a note.

    An exception that was never awaited, in a callback or an abandoned task, fails the run too. Tasks that outlive
    `main` are cancelled, as `asyncio.run` does.
    """
    _refuse_inside_a_loop()
    loop = SimLoop(seed)
    try:
        return _run_and_wind_down(loop, main)
    except BaseException as error:
        error.add_note(f"SimLoop seed={seed}: replay with sim_run(main, seed={seed})")
        raise
    finally:
        loop.close()


def _run_and_wind_down(loop: SimLoop, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        result = loop.run_until_complete(main())
    except BaseException as error:
        try:
            loop.wind_down()
        except SimError as second:  # the first failure is the one to report
            error.add_note(f"and then: {second}")
        for other in loop.unhandled:
            error.add_note(f"also raised, and never awaited: {other!r}")
        raise
    loop.wind_down()
    if loop.unhandled:
        raise loop.unhandled[0]
    return result


def _refuse_inside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SimRefused("sim_run starts a loop of its own: call it from a plain function, not from a coroutine")


def explore(main_factory: Callable[[int], Coroutine[Any, Any, T]], *, schedules: int, first_seed: int = 0) -> list[T]:
    """Run `main_factory(seed)` for each of `schedules` seeds; return the results in order, or raise at a failure."""

    def run(seed: int) -> T:
        return sim_run(lambda: main_factory(seed), seed=seed)

    return [run(seed) for seed in range(first_seed, first_seed + schedules)]
