"""Interrupt the task inside a `contained` block when its run is stopped.

A request is interrupted where it waits, by `stacks`. That is not enough for frameworks that make requests in tasks of
their own, because they decide whether and how an error raised there reaches the caller. LangChain collects it with
`gather(return_exceptions=True)` and treats anything that is no Exception as an answer; a team of AutoGen loses the task
that feeds its queue, and waits at the queue for ever. All of them handle a cancel of the task that called them, as by
`asyncio.timeout`. So the task that entered the block is cancelled too. When the cancel leaves the block, it is taken
back, and the run's own error is raised in its place.

A task that stops its own run continues: it may have something to tidy up, and its further calls are refused. A task
that waits in a call of the run is left to that call, which raises the run's error right there. If the call ends between
the cancel and the check for it, the task is interrupted a second time, on its way out of the block. A task that enters
a block of a run that was stopped before is interrupted where it first waits. As with `asyncio.timeout`, a task is
interrupted once: code that swallows the cancel and waits again waits for as long as it likes.

Knows tasks and tokens, and nothing of HTTP libraries.
"""

from __future__ import annotations

import asyncio
from contextvars import Context

from penstock.runtime.call import stopped
from penstock.runtime.cancellation import EARLY_S, Task
from penstock.runtime.handle import Handle


class Interruption:
    """The interruption of one task inside one block."""

    def __init__(self, context: Handle, task: Task) -> None:
        self._context = context
        self._task = task
        self._loop = task.get_loop()
        self._requested = task.cancelling()
        self._is_sent = False
        self._has_left = False
        self._timer: asyncio.TimerHandle | None = None
        token = context._token
        self._remove = token.add_callback(self._on_cancel)
        # Checked after the callback was added, so that a stop in between is seen by one of the two, or by both.
        if token.cancellation is not None and token.cancellation.cause != "shutdown":
            self._loop.call_soon(self._send, context=Context())
        left_s = token.seconds_left()
        if left_s is not None:
            self._timer = self._loop.call_later(left_s, self._on_time, context=Context())  # keeps no run alive

    def leave(self, error: BaseException | None) -> BaseException | None:
        """End the interruption when the task leaves the block; return the error to leave it with."""
        self._has_left = True
        self._remove()
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_sent:
            return error
        is_cancelled_by_others = self._task.uncancel() > self._requested
        stop = self._context._token.stop
        if isinstance(error, asyncio.CancelledError) and not is_cancelled_by_others and stop is not None:
            return stopped(self._context, stop)
        return error

    def _on_cancel(self) -> None:
        """Handle the cancel of the token, in the thread that cancels."""
        if _current_task() is self._task or self._context._token.watches(self._task):
            return
        try:
            self._loop.call_soon_threadsafe(self._send)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _send(self) -> None:
        if not (self._has_left or self._is_sent or self._task.done()):
            self._is_sent = True
            self._task.cancel()

    def _on_time(self) -> None:
        """Apply the deadline, on the loop; a timer may fire a moment early."""
        token = self._context._token
        if not token.is_cancelled:
            left_s = (token.seconds_left() or 0.0) + EARLY_S
            self._timer = self._loop.call_later(left_s, self._on_time, context=Context())


class Interruptions:
    """The tasks that are inside one block, which may be entered any number of times."""

    def __init__(self, context: Handle) -> None:
        self._context = context
        self._entered: dict[Task, list[Interruption]] = {}
        """By task, innermost last; each task changes its own entry only."""

    def enter(self) -> None:
        """Interrupt the current task, if there is one, when the run is stopped."""
        task = _current_task()
        if task is not None:
            self._entered.setdefault(task, []).append(Interruption(self._context, task))

    def leave(self, error: BaseException | None) -> BaseException | None:
        """End the latest `enter` of the current task; return the error to leave the block with."""
        task = _current_task()
        if task not in self._entered and len(self._entered) == 1:
            task = next(iter(self._entered))  # an async generator is closed in a task of the loop
        entered = self._entered.get(task) if task is not None else None
        if task is None or entered is None:
            return error
        latest = entered.pop()
        if not entered:
            del self._entered[task]
        return latest.leave(error)


def _current_task() -> Task | None:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()
