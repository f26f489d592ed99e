"""Concurrency without luck: an event loop with virtual time and a seeded order.

Two things make an asyncio test flaky or slow: real time, and the one order in which a real loop happens to run what is
ready. `SimLoop` takes both away. Its clock stands still while anything is ready and then jumps to the next timer, so
an hour of backoff costs nothing. Of everything that is ready it picks the next at random, from a seed: the same seed
is the same schedule, another seed another one, and a failure names its seed.

It is asyncio's own loop with three parts exchanged: the selector (which only moves the clock), the queue of ready
callbacks (which only shuffles), and the task class (whose hash is a number instead of an address: a TaskGroup cancels
its children in the order of a set, and that order has to belong to the seed as well).

It knows no sockets, signals, subprocesses or threads; whatever needs one is refused. A seed repeats what the loop
decides; what the code under test decides by real time, `id()`, the garbage collector or a string's hash is its own.
"""

from __future__ import annotations

import asyncio
import math
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, NoReturn, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from penstock.testing.clock import WALL_START_NS

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEPS_PER_INSTANT = 1_000_000
"""So many callbacks without time moving on are taken for a loop that spins: about a second of real time."""

CANCEL_ROUNDS = 5
"""How often a task that outlives `main` may swallow its cancel before it is called immortal."""

RESOLUTION_S = 1e-9
"""Timers this close are due together: 0.1 + 0.2 and 0.3 are one instant, in either order."""


class SimError(RuntimeError):
    """A simulated run cannot go on."""


class SimDeadlock(SimError):
    """Nothing is ready, no timer is set, and the main task still waits."""


class SimLivelock(SimError):
    """Callbacks keep each other busy and time never moves on."""


class SimRefused(SimError):
    """Asked for what a seed cannot repeat: a thread, or a loop inside a loop."""


class SimClock:
    """The loop's virtual time as a `penstock.clock.Clock`."""

    def __init__(self) -> None:
        self._now_ns = 0

    def monotonic_ns(self) -> int:
        return self._now_ns

    def time_ns(self) -> int:
        return WALL_START_NS + self._now_ns

    def move(self, to_s: float) -> None:
        """The loop has moved on; time is read far more often than it passes."""
        self._now_ns = round(to_s * 1_000_000_000)


class _ShuffledQueue(list[asyncio.Handle]):
    """The part of a deque that the loop uses, except that `popleft` takes any one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def popleft(self) -> asyncio.Handle:
        last = self.pop()
        at = int(self._random() * (len(self) + 1))
        if at == len(self):
            return last
        picked, self[at] = self[at], last
        return picked


class _SimTask(asyncio.Task[Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: SimLoop, number: int, **options: Any) -> None:
        # Before asyncio's own: it puts the task into a set at once.
        self.number = number
        self._hash = hash((loop.seed, number))
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._hash


class _InOrder(WeakKeyDictionary[AsyncGenerator[Any, Any], None]):
    """A weak set that remembers the order of arrival, so that open generators are closed in a repeatable one."""

    def add(self, item: AsyncGenerator[Any, Any]) -> None:
        self[item] = None

    def discard(self, item: AsyncGenerator[Any, Any]) -> None:
        self.pop(item, None)


class SimLoop(asyncio.BaseEventLoop):
    """An event loop whose time is virtual and whose order is decided by `seed`."""

    has_threads = False
    """What would be done on a thread so that nobody has to wait is done at once: here, nobody waits."""

    _scheduled: list[asyncio.TimerHandle]  # the heap of BaseEventLoop

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.clock = SimClock()
        self.unhandled: list[BaseException] = []  # what reached the exception handler: callbacks, forgotten tasks
        self._now = 0.0
        self._home = threading.get_ident()
        self._tasks_made = 0
        self._steps_left = STEPS_PER_INSTANT
        self._winding_down = False
        self._clock_resolution = RESOLUTION_S
        self._ready = _ShuffledQueue(seed)
        self._asyncgens = _InOrder()
        self._selector = self  # `_run_once` asks its selector to wait; here waiting is moving the clock
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> Sequence[NoReturn]:
        """Called once per round of the loop: jump to the next timer if nothing is ready."""
        if timeout is None:
            raise SimDeadlock(f"nothing is ready and no timer is set; waiting forever: {self._describe_pending()}")
        if timeout > 0:
            self._move_clock(self._scheduled[0].when())
            if not self._winding_down:
                self._steps_left = STEPS_PER_INSTANT
        self._steps_left -= len(self._ready) + 1
        if self._steps_left < 0:
            raise SimLivelock(f"{STEPS_PER_INSTANT:,} callbacks and no end: {self._describe_pending()}")
        return ()

    def _move_clock(self, to: float) -> None:
        self._now = to
        self.clock.move(to)
        # After a hundred days a float no longer tells nanoseconds apart, and asyncio would find the timer never due.
        self._clock_resolution = max(RESOLUTION_S, math.ulp(to))

    def pending(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended, oldest first."""
        return sorted(asyncio.all_tasks(self), key=lambda task: getattr(task, "number", 0))

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._home:
            raise SimRefused(
                f"thread {threading.current_thread().name!r} called into a SimLoop: when a thread answers cannot be "
                "repeated by a seed; use ManualClock and a real loop, or make the work a coroutine"
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
        """Cancel whatever is left until it has ended, then close open async generators."""
        # From here on steps are counted over all instants: a task that sleeps and swallows cancels ends as well.
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
            return  # one of them swallowed the cancel and waits again; the next round cancels it again
        self.unhandled += [error for error in results if _is_fault(error)]

    def _make_task(self, _loop: Any, coro: Any, **options: Any) -> _SimTask:
        self._tasks_made += 1
        return _SimTask(coro, loop=self, number=self._tasks_made, **options)

    def _describe_pending(self) -> str:
        return ", ".join(_describe(task) for task in self.pending()) or "no task at all"

    def _process_events(self, event_list: Sequence[NoReturn]) -> None:
        pass


def _is_fault(outcome: object) -> bool:
    return isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError)


def _describe(task: asyncio.Task[Any]) -> str:
    name = getattr(task.get_coro(), "__qualname__", "?")
    stack = task.get_stack(limit=1)
    where = f" at {stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else ""
    return f"{task.get_name()} ({name}{where})"


def sim_run(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run `main()` in one simulated schedule; what it raises carries the seed as a note.

    An exception that nobody awaited, in a callback or a forgotten task, fails the run too. Tasks that outlive `main`
    are cancelled, as `asyncio.run` does.
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
        except SimError as second:  # the first failure is the one to read
            error.add_note(f"and then: {second}")
        for other in loop.unhandled:
            error.add_note(f"also raised, and awaited by nobody: {other!r}")
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
    """Run `main_factory(seed)` once for each of `schedules` seeds; the results in order, or the first failure."""

    def run(seed: int) -> T:
        return sim_run(lambda: main_factory(seed), seed=seed)

    return [run(seed) for seed in range(first_seed, first_seed + schedules)]
