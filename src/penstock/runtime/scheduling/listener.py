"""Read the events of a graph while it runs.

The graph runs in its own task, under its own token, and its events wait in a queue. When the reader leaves, in the
middle or at the end, the token is cancelled and the reader waits until the task is done: a graph never runs on without
a reader. The task's error is raised to the reader, and not in the task, so that a KeyboardInterrupt of a node surfaces
where the graph was called and not in the middle of the event loop.

Knows neither steps nor nodes: an event is any object.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from penstock.runtime.cancellation import CancellationToken

MAX_UNREAD = 1_000
"""Maximum number of unread events before streaming nodes wait for the reader."""

CATCH_UP_S = 0.01
"""Interval at which a thread polls whether a slow reader has caught up."""

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)


class Audience(Protocol[E_contra]):
    """Receives the events of a graph, in order, on the graph's event loop."""

    def emit(self, event: E_contra) -> None:
        """Deliver one event, without waiting."""

    @property
    def is_behind(self) -> bool:
        """Whether so many events are unread that producers should wait."""

    async def make_room(self) -> None:
        """Wait until the reader has caught up."""


class Listener(Generic[E]):
    """A queue of a graph's events, in order, with one reader, which takes from `events` and waits when it is empty.

    Every node emits events, most often many at a time: a deque and one future cost a fifth of an `asyncio.Queue`.
    """

    __slots__ = ("_behind", "_waiting", "closed", "events", "is_over")

    def __init__(self) -> None:
        self.events: deque[E] = deque()
        self.is_over = False
        """Whether no more events will come."""
        self.closed = False
        """Whether the reader has left."""
        self._waiting: asyncio.Future[None] | None = None
        self._behind: list[asyncio.Future[None]] = []
        """Producers that wait for the reader."""

    def emit(self, event: E) -> None:
        """Queue one event; no effect once the reader has left."""
        if not self.closed:
            self.events.append(event)
            if self._waiting is not None:
                self._wake()

    def finish(self) -> None:
        """Mark the queue as complete: no more events will come."""
        self.is_over = True
        if self._waiting is not None:
            self._wake()

    async def has_more(self) -> bool:
        """Wait until there are events to read; return False if there will be none."""
        for waiter in self._behind:
            if not waiter.done():
                waiter.set_result(None)
        self._behind.clear()
        while not self.events and not self.is_over:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return bool(self.events)

    @property
    def is_behind(self) -> bool:
        """Whether so many events are unread that producers should wait."""
        return len(self.events) > MAX_UNREAD and not self.closed

    async def make_room(self) -> None:
        """Wait until a slow reader has caught up."""
        while self.is_behind:
            caught_up = asyncio.get_running_loop().create_future()
            self._behind.append(caught_up)
            await caught_up

    def close(self) -> None:
        """Mark that the reader has left, and release waiting producers."""
        self.closed = True
        for waiter in self._behind:
            if not waiter.done():
                waiter.set_result(None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Listening(Generic[E]):
    """Run `work` while its events are read; the context manager returns the listener that `work` emits to."""

    __slots__ = ("_error", "_listener", "_task", "_token", "_work")

    _task: asyncio.Task[None]

    def __init__(self, work: Callable[[Listener[E]], Awaitable[Any]], token: CancellationToken) -> None:
        self._work = work
        self._token = token
        self._listener: Listener[E] = Listener()
        self._error: BaseException | None = None

    async def __aenter__(self) -> Listener[E]:
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self._listener

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.close()
        if not self._task.done():
            self._token.cancel("the reader of the stream has left", cause="abandoned_stream")
        interrupted = await until_done(self._task)
        if interrupted is not None:
            raise interrupted
        if exc is None and self._task.cancelled():
            raise asyncio.CancelledError
        leaves_too = isinstance(self._error, KeyboardInterrupt | SystemExit)  # never swallowed
        if self._error is not None and (exc is None or leaves_too):
            raise self._error

    async def _run(self) -> None:
        try:
            await self._work(self._listener)
        except BaseException as error:
            self._error = error
        finally:
            self._listener.finish()


async def until_done(task: asyncio.Task[Any]) -> asyncio.CancelledError | None:
    """Wait for the task, however often the wait is cancelled; return the last cancel that came meanwhile."""
    interrupted = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    return interrupted
