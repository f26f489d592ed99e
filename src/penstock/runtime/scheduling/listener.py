"""Whoever reads what a graph tells while it runs.

The graph runs in a task of its own, under a token of its own, and what it tells waits in a queue. Leaving the reading,
in the middle or at the end, cancels the token and waits until the task is done: nothing runs on that nobody reads.
What the task ended with is raised to the reader, and not in the task, so that a KeyboardInterrupt of a node comes out
where the graph was called and not in the middle of the event loop.

Knows neither steps nor nodes: an event is whatever is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from penstock.runtime.cancellation import CancellationToken

MAX_UNREAD = 1_000
"""So many pieces of streaming nodes may wait to be read before whoever makes them waits too."""

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)


class Audience(Protocol[E_contra]):
    """Whoever is told what a graph does, in its order, on its event loop."""

    def tell(self, event: E_contra) -> None:
        """One more event; does not wait."""

    @property
    def is_behind(self) -> bool:
        """Whether so much is to be taken in that whoever tells should wait."""

    async def make_room(self) -> None:
        """Wait until that is not so any more."""


class Listener(Generic[E]):
    """Gets what a graph tells, in its order. There is one reader; it takes from `events`, and waits when there is none.

    Telling and reading happen for every node, most often many at a time: a deque and one future cost a fifth of what a
    queue of asyncio's does.
    """

    __slots__ = ("_behind", "_waiting", "closed", "events", "is_over")

    def __init__(self) -> None:
        self.events: deque[E] = deque()
        self.is_over = False
        """Whether nothing more will be told."""
        self.closed = False
        """Whether nobody reads any more."""
        self._waiting: asyncio.Future[None] | None = None
        self._behind: list[asyncio.Future[None]] = []
        """Those who wait for the reader."""

    def tell(self, event: E) -> None:
        """One more event."""
        if not self.closed:
            self.events.append(event)
            if self._waiting is not None:
                self._wake()

    def finish(self) -> None:
        """Nothing more will be told."""
        self.is_over = True
        if self._waiting is not None:
            self._wake()

    async def has_more(self) -> bool:
        """Wait until there are events to read; False if there will be none."""
        for one in self._behind:
            if not one.done():
                one.set_result(None)
        self._behind.clear()
        while not self.events and not self.is_over:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return bool(self.events)

    @property
    def is_behind(self) -> bool:
        """Whether so much is unread that whoever tells should wait."""
        return len(self.events) > MAX_UNREAD and not self.closed

    async def make_room(self) -> None:
        """Wait until a reader who is behind has caught up."""
        while self.is_behind:
            caught_up = asyncio.get_running_loop().create_future()
            self._behind.append(caught_up)
            await caught_up

    def close(self) -> None:
        """Nobody reads any more."""
        self.closed = True
        for one in self._behind:
            if not one.done():
                one.set_result(None)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


class Listening(Generic[E]):
    """Runs `work` while it is read; as a context manager, gives the listener that `work` tells."""

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
            self._token.cancel("nobody reads the stream any more", cause="abandoned_stream")
        interrupted = await until_done(self._task)
        if interrupted is not None:
            raise interrupted
        if exc is None and self._task.cancelled():
            raise asyncio.CancelledError
        leaves_too = isinstance(self._error, KeyboardInterrupt | SystemExit)  # nobody swallows these
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
    """Wait for it, however often the wait is cancelled; the last cancel that came meanwhile."""
    interrupted = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            interrupted = error
    return interrupted
