"""The activities: they hand a run to its host, and report to Temporal that they are alive meanwhile.

They run on the loop of the engine's own thread. A node that blocks the host's loop does not stop their heartbeats, up
to a limit: a loop that has stood still for longer is as good as dead.

Temporal stores the results and errors of activities. Results are statuses; errors name something that a worker does not
have, or only their class: their message and cause might quote the run, and are logged here instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from penstock.engines.temporal.workflow import CANCEL, WORK, Result, Stretch
from penstock.hosting.engine import CannotWork, Ended, Fence, Leaving, Waiting, Work, WorkResult

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

T = TypeVar("T")

logger = logging.getLogger("penstock.engines")

STALLED_S = 300.0
"""Time after which a host whose event loop has not turned counts as dead."""
RETRY_S = 2.0
"""Delay before another worker is tried."""
LEAVING_S = 5.0
"""Time that a run has to be parked when it is taken away from this worker."""


class Activities:
    """The activities of one host."""

    def __init__(self, work: Work, host_loop: asyncio.AbstractEventLoop, queue: str) -> None:
        self._work = work
        self._host_loop = host_loop
        self._queue = queue
        """The queue that they take runs from."""
        self._turned_s = time.monotonic()
        """When the host's loop was last seen to turn."""

    @property
    def all(self) -> list[Callable[..., Any]]:
        """The activities, for a Temporal worker."""
        return [self.work, self.cancel]

    @activity.defn(name=WORK)
    async def work(self, stretch: Stretch) -> Result:
        """Work on a run until it ends, waits or leaves this host."""
        async with self._alive():
            self._check_database(stretch)
            fence = Fence(stretch.stretch, activity.info().attempt)
            result: WorkResult = await self._on_host(lambda: self._work(stretch.run_id, fence, self._queue))
        match result:
            case Ended(status):
                return Result("ended", status)
            case Waiting(until_ms):
                return Result("waiting", until_ms=until_ms)
            case Leaving():
                return Result("leaving")

    @activity.defn(name=CANCEL)
    async def cancel(self, stretch: Stretch) -> Result:
        """Cancel a run whose workflow was cancelled."""
        async with self._alive():
            self._check_database(stretch)
            await self._on_host(lambda: self._work.cancel(stretch.run_id, "cancelled in Temporal"))
        return Result("ended", "cancelled")

    def _check_database(self, stretch: Stretch) -> None:
        if stretch.database != self._work.database:
            ours, other = self._work.database, stretch.database
            message = (
                f"{self._work.worker} works with another database ({ours}) than the run ({other}): two fleets use the "
                f"task queue {self._queue!r}; give each its own with --queue, or a namespace"
            )
            logger.error("run %s cannot be worked on here: %s", stretch.run_id, message)
            raise _again(message, "AnotherDatabase")

    async def _on_host(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await a call on the host's loop; a cancelled one is awaited too, so that the run is parked."""
        tasks: list[asyncio.Task[T]] = []

        async def outer() -> T:
            tasks.append(asyncio.ensure_future(call()))
            return await tasks[0]

        done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(outer(), self._host_loop))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            self._host_loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            await asyncio.wait((done,), timeout=LEAVING_S)
            raise
        except CannotWork as error:
            raise _again(str(error), "CannotWork") from None
        except Exception as error:
            logger.exception("an activity of this worker failed")
            name = type(error).__name__
            raise ApplicationError(f"{name} on {self._work.worker}; its log has the details", type=name) from None

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Send heartbeats until the block is left."""
        task = asyncio.create_task(self._keep_beating())
        try:
            yield
        finally:
            task.cancel()

    async def _keep_beating(self) -> None:
        timeout = activity.info().heartbeat_timeout
        every_s = 5.0 if timeout is None else timeout.total_seconds() / 3
        self._turned_s = time.monotonic()
        while time.monotonic() - self._turned_s < STALLED_S:
            activity.heartbeat()
            self._host_loop.call_soon_threadsafe(self._turned)
            await asyncio.sleep(every_s)
        logger.error("the event loop of this worker has stood still for %g s: its runs are given up", STALLED_S)

    def _turned(self) -> None:
        self._turned_s = time.monotonic()


def _again(message: str, name: str) -> ApplicationError:
    # Benign: the library would log a traceback for each attempt.
    return ApplicationError(
        message, type=name, next_retry_delay=timedelta(seconds=RETRY_S), category=ApplicationErrorCategory.BENIGN
    )
