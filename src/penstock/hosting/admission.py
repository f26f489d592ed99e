"""What a host takes on: how many runs may wait, and whose run is worked on next.

The queue is the same for all hosts that share the stores; how many run at once is each host's own. Two hosts that take
on runs in the same moment may exceed a queue by what each of them let in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping

from penstock.errors import PenstockError
from penstock.hosting.records import CLAIMED, QUEUED, RunRecord
from penstock.hosting.work.workplace import Workplace

MAX_RETRY_AFTER_S = 60.0
FIRST_GUESS_S = 1.0
WEIGHT = 0.2
"""How much the newest run counts in what a run is thought to take."""
MAX_WAITING = 16
"""For each run that may be worked on, so many may wait for answers."""


class Overloaded(PenstockError):
    """A run was not taken on: too many wait already. It is not there; submit it again after `retry_after_s`."""

    def __init__(self, queued: int, limit: int, retry_after_s: float, owner: str | None = None) -> None:
        self.queued = queued
        self.limit = limit
        self.owner = owner
        self.retry_after_s = retry_after_s
        whose = "" if owner is None else f" of {owner!r}"
        super().__init__(f"{queued} runs{whose} wait already, of {limit} that may; try again in {retry_after_s:g} s")


class Admission:
    """Who may queue, and who is next."""

    def __init__(self, at: Workplace) -> None:
        self._at = at
        self._lock = asyncio.Lock()
        self._places: Counter[str] = Counter()
        """What is let in and not in the queue yet, by owner: a place is kept for it."""
        self._takes_s = FIRST_GUESS_S

    async def admit(
        self, owner: str, add: Callable[[], Awaitable[RunRecord]], first: Callable[[], Awaitable[None]] | None = None
    ) -> RunRecord:
        """Add a run, or say that there is no room for it; one after the other, so that a count stays true.

        What has to be done `first` is done when there is room, and the run has its place for as long as that takes.
        """
        async with self._lock:
            await self._must_have_room(owner)
            if first is None:
                return await add()
            self._places[owner] += 1
        try:
            await first()
            return await add()
        finally:
            self._places[owner] -= 1
            self._places += Counter()  # owners that have none are forgotten

    async def _must_have_room(self, owner: str) -> None:
        """Raise Overloaded if nothing more may queue now."""
        # Before the queue is counted: what moves there meanwhile is counted twice, and never not at all.
        kept, own = self._places.total(), self._places[owner]
        queued = kept + await self._queued(None)
        self._check(queued, None, self._at.settings.max_queued)
        if queued >= self._at.settings.max_queued_per_owner:  # else no owner can have that many
            self._check(own + await self._queued(owner), owner, self._at.settings.max_queued_per_owner)

    def took(self, seconds: float) -> None:
        """A run took so long: what retrying later is told by."""
        self._takes_s += WEIGHT * (seconds - self._takes_s)

    async def claim(self, here: Callable[[], Mapping[str, int]], begin: Callable[[RunRecord], bool]) -> None:
        """Claim the oldest runs, one after the other, of owners who have fewer here than may run at once.

        `here` counts what is worked on, by owner; it is asked again before each. `begin` is given each run, and says
        whether there is to be another.
        """
        while not self._full(here()):
            claimed = await self._claim(None)
            if claimed is None or not begin(claimed):
                return
        for run in await self._queue():  # somebody has enough: the queue is gone through, once, for the others
            claimed = None if run.owner in self._full(here()) else await self._claim(run.id)
            if claimed is not None and not begin(claimed):
                return

    def is_choosing(self, here: Mapping[str, int]) -> bool:
        """Whether somebody has enough, and waits while others go first."""
        return bool(self._full(here))

    def _full(self, here: Mapping[str, int]) -> set[str]:
        if not here:
            return set()  # as nearly always
        return {owner for owner, count in here.items() if count >= self._at.settings.max_running_per_owner}

    async def _claim(self, run_id: str | None) -> RunRecord | None:
        at = self._at
        lease_ms = round(at.settings.lease_s * 1_000)
        return await at.stores.runs.claim(at.worker, now_ms=at.now_ms(), lease_ms=lease_ms, run_id=run_id)

    async def _queue(self) -> Iterable[RunRecord]:
        """What may be claimed, the oldest first."""
        runs, now_ms = self._at.stores.runs, self._at.now_ms()
        queued = await runs.list(statuses=QUEUED, limit=self._at.settings.max_queued)
        left = [run for run in await runs.list(statuses=CLAIMED, limit=1_000) if run.lease_until_ms <= now_ms]
        return sorted([*queued, *left], key=lambda run: (run.created_ms, run.id))

    async def _queued(self, owner: str | None) -> int:
        return await self._at.stores.runs.count(owner=owner, statuses=QUEUED)

    def _check(self, queued: int, owner: str | None, limit: int) -> None:
        if queued >= limit:
            self._at.counted["overloaded"] += 1
            ahead = queued / self._at.settings.max_running
            wait_s = min(max(1.0, ahead * self._takes_s), MAX_RETRY_AFTER_S)
            raise Overloaded(queued, limit, round(wait_s, 1), owner)
