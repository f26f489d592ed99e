"""Cancellation, as a tree of tokens.

A token is cancelled once, from any thread, with or without an event loop; its children are cancelled with it. The cause
is data: who or what cancelled it, and why. A deadline is a cancel by the clock.

How a cancel reaches running work:

- A task that awaits inside a call is *watched* by the token of its context (`watch`). A cancel sets the token first and
  then reads the watched tasks; a call registers its task first and then reads the token. So one of the two always sees
  the other. The task is interrupted with `Task.cancel()`, on its own loop and only while it is still watched: a late
  cancel can never hit later work of the task. The interruption is kept as a `PendingCancel`, so that code which catches
  the `asyncio.CancelledError` can distinguish ours from others and take it back (`Task.uncancel`).
- A waiting thread registers a callback.
- Other code should call `check()` now and then.

A deadline is noticed by a waiter, by a check, or by the timer that is set while a task is watched. Each loop has its
own timer, because a loop may end long before the token does. An inherited deadline cancels the token that owns it, and
everything below, so that the stop names the owner of the deadline.
"""

from __future__ import annotations

import _thread
import asyncio
import functools
import threading
import weakref
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Literal

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.accounts import timeout_stop
from penstock.containment.limits import UNLIMITED, seconds_to_ns
from penstock.errors import CancelledError
from penstock.stops import Stop, StopReason

Cause = Literal["user", "parent", "deadline", "limit", "abandoned_stream", "shutdown"]

EARLY_S = 0.001
"""Added to the wait after a timer fired early, to avoid a busy loop."""


@dataclass(frozen=True, slots=True)
class Cancellation:
    """Why a token is cancelled: its own cause, and the stop that started it."""

    cause: Cause
    stop: Stop


class PendingCancel:
    """One interruption of one task; pending until it is taken back."""

    __slots__ = ("is_pending",)

    def __init__(self) -> None:
        self.is_pending = True


Task = asyncio.Task[Any]


class CancellationToken:
    """Whether work should stop, and why; safe to use from any thread and any event loop."""

    __slots__ = (
        "__weakref__",
        "_callbacks",
        "_children",
        "_clock",
        "_deadline_of",
        "_lock",
        "_opened_ns",
        "_parent",
        "_timers",
        "_watched",
        "cancellation",
        "deadline_ns",
        "name",
    )

    def __init__(
        self,
        *,
        deadline_s: float | None = None,
        name: str = "main",
        clock: Clock = SYSTEM_CLOCK,
        _parent: CancellationToken | None = None,
        _opened_ns: int | None = None,
    ) -> None:
        self.name = name
        self.cancellation: Cancellation | None = None
        """Set once, when the token is cancelled."""
        self.deadline_ns = UNLIMITED
        """On the clock's monotonic scale, the ancestors' deadlines included."""
        self._clock = clock
        self._opened_ns = clock.monotonic_ns() if _opened_ns is None else _opened_ns
        """Start of the deadline's period."""
        if deadline_s is not None:
            self.deadline_ns = self._opened_ns + seconds_to_ns(deadline_s, "deadline_s")
        self._deadline_of: CancellationToken | None = None
        """The ancestor whose deadline was inherited; None if the deadline is this token's own."""
        self._parent = _parent
        """Children keep their parent alive, and it refers to them weakly: a cancel has to pass through it."""
        self._lock: threading.RLock = threading.RLock() if _parent is None else _parent._lock
        """One lock for the whole tree of tokens; it is never held for long."""
        self._children: list[weakref.ref[CancellationToken]] | None = None
        self._callbacks: dict[object, Callable[[], None]] = {}
        self._watched: dict[Task, PendingCancel | None] = {}
        self._timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}

    # State.

    @property
    def is_cancelled(self) -> bool:
        """Whether work should stop; notices a deadline that has passed."""
        return self.cancellation is not None or self._expired()

    @property
    def cause(self) -> Cause | None:
        """Who or what cancelled: user, parent, deadline, limit, abandoned_stream or shutdown; None if not cancelled."""
        return self.cancellation.cause if self.cancellation else None

    @property
    def reason(self) -> str | None:
        """Why, in words; None if the token is not cancelled."""
        return self.cancellation.stop.message if self.cancellation else None

    @property
    def stop(self) -> Stop | None:
        """The stop behind the cancel; None if the token is not cancelled."""
        return self.cancellation.stop if self.cancellation else None

    def check(self) -> None:
        """Raise CancelledError if work should stop."""
        if self.cancellation is not None or self._expired():
            assert self.cancellation is not None
            raise CancelledError(self.cancellation.stop.message, stop=self.cancellation.stop)

    async def wait(self) -> None:
        """Return once the token is cancelled, from any thread."""
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        def wake_from_anywhere() -> None:
            call_on(loop, wake)

        remove = self.add_callback(wake_from_anywhere)
        early_s = 0.0
        try:
            while not self.is_cancelled:
                left_s = self.seconds_left()
                await asyncio.wait((woken,), timeout=None if left_s is None else left_s + early_s)
                early_s = EARLY_S
        finally:
            remove()

    def wait_sync(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the token is cancelled or the time is up; return whether it is cancelled."""
        # A bare lock, not an Event: an Event has an inner lock, on which a signal handler that cancels would block.
        woken = _thread.allocate_lock()
        woken.acquire()
        remove = self.add_callback(woken.release)
        try:
            waits = [wait for wait in (timeout_s, self.seconds_left()) if wait is not None]
            woken.acquire(timeout=max(0.0, min(*waits, threading.TIMEOUT_MAX)) if waits else -1)
            return self.is_cancelled
        finally:
            remove()

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline, never negative; None if there is none."""
        return self._seconds_left() if self.deadline_ns < UNLIMITED else None

    # Cancelling.

    def cancel(self, reason: str = "cancelled", *, cause: Cause = "user", stop: Stop | None = None) -> bool:
        """Cancel this token and all below it; return False, without effect, if it was already cancelled."""
        return self._cancel(Cancellation(cause, stop or Stop(StopReason.ABORTED, reason, budget=self.name)))

    def child(
        self, name: str = "child", *, deadline_s: float | None = None, _opened_ns: int | None = None
    ) -> CancellationToken:
        """Return a token that is cancelled with this one, and can be cancelled by itself."""
        child = CancellationToken(
            deadline_s=deadline_s, name=name, clock=self._clock, _parent=self, _opened_ns=_opened_ns
        )
        if self.deadline_ns <= child.deadline_ns:
            child.deadline_ns, child._deadline_of = self.deadline_ns, self._deadline_of or self
        with self._lock:
            if self._children is None:
                self._children = []
            elif (count := len(self._children)) >= 16 and count & (count - 1) == 0:
                self._children = [known for known in self._children if known() is not None]
            self._children.append(weakref.ref(child))
        if self.cancellation is not None:
            child._cancel(Cancellation("parent", self.cancellation.stop))
        return child

    def follow(self, other: CancellationToken) -> Callable[[], None]:
        """Cancel this token when `other` is cancelled or reaches its deadline; return a function that ends this."""
        if other.deadline_ns < self.deadline_ns:
            self.deadline_ns, self._deadline_of = other.deadline_ns, other._deadline_of or other

        def cancel_too() -> None:
            self.cancel(cause="parent", stop=other.stop)

        return other.add_callback(cancel_too)

    def add_callback(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` once when the token is cancelled, now if it is; return a function that removes it.

        It runs in the thread that cancels: keep it short, and let it raise nothing.
        """
        key = object()
        with self._lock:
            self._callbacks[key] = callback
        # A signal handler may cancel during the lines above: the token's state after them decides.
        if self.cancellation is not None and self._callbacks.pop(key, None) is not None:
            callback()
        return lambda: _forget(self._callbacks, key)

    def close(self) -> None:
        """Drop the timers, as the token's work is over."""
        if not self._timers:
            return
        timers, self._timers = self._timers, {}
        current = asyncio._get_running_loop()
        for loop, timer in timers.items():
            if loop is current:
                timer.cancel()
            else:
                call_on(loop, timer.cancel)

    # For admission and settlement.

    def watch(self, task: Task) -> bool:
        """Interrupt `task` if a cancel comes while it is watched; return False if it is already watched."""
        watched = self._watched
        if task in watched:
            return False
        watched[task] = None
        if self.deadline_ns < UNLIMITED and (loop := task.get_loop()) not in self._timers:
            for other in list(self._timers):
                if other.is_closed():
                    self._timers.pop(other, None)
            self._set_timer(loop, self._seconds_left())
        return True

    def unwatch(self, task: Task) -> PendingCancel | None:
        """Stop watching; return the interruption that is still pending, if there is one."""
        pending_cancel = self._watched.pop(task, None)
        return pending_cancel if pending_cancel is not None and pending_cancel.is_pending else None

    def pending_cancel_of(self, task: Task) -> PendingCancel | None:
        """Return the interruption of `task` by this token that was not taken back yet."""
        pending_cancel = self._watched.get(task)
        return pending_cancel if pending_cancel is not None and pending_cancel.is_pending else None

    def watches(self, task: Task) -> bool:
        """Whether this token, or one below it, watches `task`."""
        todo = [self]
        while todo:
            token = todo.pop()
            if task in token._watched:
                return True
            with token._lock:  # the list may grow meanwhile
                todo += [child for known in token._children or () if (child := known()) is not None]
        return False

    # Inside.

    def _seconds_left(self) -> float:
        return max(0.0, (self.deadline_ns - self._clock.monotonic_ns()) / 1_000_000_000)

    def _expired(self) -> bool:
        """Cancel if the deadline has passed; return whether the token is cancelled."""
        if self.cancellation is None:
            now_ns = self._clock.monotonic_ns()
            if now_ns < self.deadline_ns:
                return False
            owner = self._deadline_of or self
            stop = timeout_stop(owner.name, owner.deadline_ns - owner._opened_ns, now_ns - owner._opened_ns)
            owner._cancel(Cancellation("deadline", stop))
            if self is not owner:
                self._cancel(Cancellation("parent", owner.stop or stop))
        return True

    def _on_time(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the timer of `loop`, on that loop. It may fire a moment early; then it is set again."""
        if not self._expired() and loop in self._timers:
            self._set_timer(loop, self._seconds_left() + EARLY_S)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, delay_s: float) -> None:
        # A loop keeps a cancelled timer, and its context variables, until its time has come: use an empty context.
        self._timers[loop] = loop.call_later(delay_s, self._on_time, loop, context=Context())

    def _cancel(self, cancellation: Cancellation) -> bool:
        callbacks: list[Callable[[], None]] = []
        tokens: list[CancellationToken] = []
        if not self._set(cancellation, callbacks, tokens):
            return False
        _interrupt(tokens)
        raised: BaseException | None = None
        for callback in callbacks:
            # One failing callback must not keep the cancel from the others.
            try:
                callback()
            except Exception:
                pass
            except BaseException as error:
                raised = raised or error
        if raised is not None:
            raise raised
        return True

    def _set(
        self, cancellation: Cancellation, callbacks: list[Callable[[], None]], tokens: list[CancellationToken]
    ) -> bool:
        """Mark this token and all below it, and collect their callbacks; return False if it was already marked."""
        first = len(tokens)
        below = Cancellation("parent", cancellation.stop)
        # A stack, not recursion: contexts may be nested deeper than Python's recursion limit.
        todo = [self]
        while todo:
            token = todo.pop()
            with token._lock:
                if token.cancellation is not None:
                    continue
                token.cancellation = cancellation if token is self else below
                callbacks.extend(token._callbacks.values())
                token._callbacks.clear()
                todo += [child for known in token._children or () if (child := known()) is not None]
            tokens.append(token)
        return len(tokens) > first


def translate_cancel(token: CancellationToken, task: Task, error: BaseException, requested: int) -> BaseException:
    """If our own cancel caused `error`, take it back from the task and return our CancelledError; else `error`.

    `requested` is the task's number of cancels when watching began. If others came since then besides ours, the task
    itself is cancelled too: ours is taken back, and theirs is raised.
    """
    if isinstance(error, asyncio.CancelledError):
        pending_cancel = token.pending_cancel_of(task)
        if pending_cancel is not None:
            pending_cancel.is_pending = False
            if task.uncancel() <= requested:
                return CancelledError(stop=token.stop)
    return error


async def drain_cancel(task: Task, requested: int) -> None:
    """Take back our interruption, swallowed or not yet delivered, so that it cannot hit later work of the task."""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        if task.uncancel() > requested:
            raise
    else:
        task.uncancel()


def _interrupt(tokens: list[CancellationToken]) -> None:
    """Cancel every task that `tokens` watch, each on its own loop, if it is still watched by then."""
    by_loop: dict[asyncio.AbstractEventLoop, dict[Task, list[CancellationToken]]] = {}
    for token in tokens:
        for task in list(token._watched):
            by_loop.setdefault(task.get_loop(), {}).setdefault(task, []).append(token)
    for loop, tasks in by_loop.items():
        call_on(loop, functools.partial(_deliver, tasks))


def _deliver(tasks: dict[Task, list[CancellationToken]]) -> None:
    """Interrupt the tasks of one loop; on that loop."""
    for task, tokens in tasks.items():
        watching = [token for token in tokens if task in token._watched]
        if watching and not task.done():
            pending_cancel = PendingCancel()
            for token in watching:
                token._watched[task] = pending_cancel
            task.cancel()


def call_on(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    """Run `callback` on `loop`: now if this is that loop, soon otherwise, never if it is closed."""
    if asyncio._get_running_loop() is loop:
        callback()
        callback = _nothing  # a signal handler may run while the loop sleeps: it has to wake up all the same
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _nothing() -> None:
    pass


def _forget(callbacks: dict[object, Callable[[], None]], key: object) -> None:
    callbacks.pop(key, None)
