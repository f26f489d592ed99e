"""The runs that one host is working on.

Each has a task, which ends with the run's work here. Which runs come here is decided elsewhere: by the claim loop, or
by an engine that dispatches them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from penstock.errors import InvalidValue
from penstock.hosting.host_context import HostContext
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.ports import RunRecord, StoreCorrupt
from penstock.runtime.durable import failpoints

logger = logging.getLogger("penstock.hosting")

NANOS_PER_S = 1_000_000_000


class ActiveRuns:
    """The runs in progress on this host, by id."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self.by_id: dict[str, HostedRun] = {}
        self.tasks: dict[HostedRun, asyncio.Task[RunRecord | None]] = {}
        """Ends with the record the run was left with; None if another worker has taken it over, or it failed here."""
        self.on_left: Callable[[], None] | None = None
        """Called when a run has left the host, and its place is free."""
        self.on_took: Callable[[float], None] | None = None
        """Called with the duration of the work on each run, in seconds."""

    @property
    def waiting(self) -> int:
        """Number of runs that wait for an answer."""
        return sum(1 for hosted in self.by_id.values() if hosted.is_waiting)

    def begin(self, run: RunRecord, *, is_new: bool = False) -> asyncio.Task[RunRecord | None]:
        """Start to work on a run that this host has claimed."""
        if failpoints.hook is not None:
            failpoints.hook("claim.taken")
        before = self.by_id.get(run.id)
        if before is not None:  # this host's own claim was lost, and this host has the run again
            before.fence()
        hosted = self.by_id[run.id] = HostedRun(self._context, run, is_new=is_new)
        after = None if before is None else self.tasks.get(before)
        self._context.counted["claimed"] += 1
        task = self.tasks[hosted] = asyncio.create_task(self._work(hosted, after), name=f"run {run.id}")
        return task

    async def _work(self, hosted: HostedRun, after: asyncio.Task[RunRecord | None] | None) -> RunRecord | None:
        began_ns = self._context.clock.monotonic_ns()
        try:
            if after is not None:
                await asyncio.wait((after,))
            left = await hosted.work()
            if left is None:
                self._context.counted["lost"] += 1
            else:
                self._context.count_left(hosted.run, left)
            if self.on_took is not None:
                self.on_took((self._context.clock.monotonic_ns() - began_ns) / NANOS_PER_S)
            return left
        except (InvalidValue, StoreCorrupt) as error:
            await self._context.guard(partial(self._fail_unreadable, hosted.run, error))
        except Exception:
            self._context.counted["host_failures"] += 1
            logger.exception("this host could not finish run %s", hosted.run.id)
        finally:
            self.tasks.pop(hosted, None)
            if self.by_id.get(hosted.run.id) is hosted:
                del self.by_id[hosted.run.id]
            hosted.gone.set()
            if self.on_left is not None:
                self.on_left()
        return None

    async def _fail_unreadable(self, run: RunRecord, error: InvalidValue | StoreCorrupt) -> None:
        """Fail a run that cannot even be ended as usual: its row holds what cannot be read, or not be written back."""
        corrupt = error if isinstance(error, StoreCorrupt) else StoreCorrupt("runs", run.id, str(error))
        logger.error("run %s cannot be finished: %s", run.id, corrupt)
        runs, now_ms = self._context.stores.runs, self._context.now_ms()
        await runs.fail_unreadable(run.id, corrupt, now_ms=now_ms, epoch=run.epoch)

    def park(self, runs: Iterable[HostedRun]) -> None:
        """Stop runs so that another host continues them."""
        for hosted in list(runs):
            hosted.park()

    async def drained(self, timeout_s: float) -> None:
        """Wait until all runs have left, or the timeout expires."""
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()), timeout=timeout_s)
