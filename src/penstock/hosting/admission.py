"""Admission of runs: how many may be queued, and which run is claimed next.

The queue is shared by all hosts that share the stores; the number of concurrent runs is each host's own. Two hosts that
admit runs at the same moment may exceed the queue limit by the runs that each of them admitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from penstock.errors import PenstockError
from penstock.hosting.host_context import HostContext
from penstock.hosting.ports import CLAIMED, QUEUED, RunRecord, RunStore

MAX_RETRY_AFTER_S = 60.0
FIRST_GUESS_S = 1.0
WEIGHT = 0.2
"""Weight of the newest run in the moving average of run durations."""
MAX_WAITING = 16
"""Maximum number of runs waiting for answers, per run that may execute concurrently."""


CheckRoom = Callable[[RunStore], Awaitable[int]]
"""Returns the number of runs queued ahead of one that was just added."""


class Overloaded(PenstockError):
    """A run was not added because too many are queued; submit it again after `retry_after_s`."""

    def __init__(self, queued: int, limit: int, retry_after_s: float, owner: str | None = None) -> None:
        self.queued = queued
        self.limit = limit
        self.owner = owner
        self.retry_after_s = retry_after_s
        whose = "" if owner is None else f" of {owner!r}"
        super().__init__(f"{queued} runs{whose} wait already, of {limit} that may; try again in {retry_after_s:g} s")


class Admission:
    """Decides which runs may be queued, and which is claimed next."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._places: Counter[str] = Counter()
        """Number of runs per owner that are being added and may not be in the queue yet."""
        self._takes_s = FIRST_GUESS_S

    @contextmanager
    def place(self, owner: str) -> Iterator[CheckRoom]:
        """Reserve a place in the queue for a run of this owner that is about to be added, until the block exits.

        Yields the check to call after adding the run, in the same transaction: Overloaded if there is no room.
        """
        others, own = self._places.total(), self._places[owner]
        self._places[owner] += 1

        async def check(runs: RunStore) -> int:
            # Runs being added concurrently may be counted twice, but are never missed.
            queued = others + await runs.count(statuses=QUEUED) - 1
            self._check(queued, None, self._context.settings.max_queued)
            if queued >= self._context.settings.max_queued_per_owner:  # otherwise no owner can have that many
                of_owner = own + await runs.count(owner=owner, statuses=QUEUED) - 1
                self._check(of_owner, owner, self._context.settings.max_queued_per_owner)
            return queued

        try:
            yield check
        finally:
            self._places[owner] -= 1
            self._places += Counter()  # drops owners whose count is zero

    def took(self, seconds: float) -> None:
        """Record the duration of a run, from which `retry_after_s` is estimated."""
        self._takes_s += WEIGHT * (seconds - self._takes_s)

    async def claim(self, active: Callable[[], Mapping[str, int]], begin: Callable[[RunRecord], bool]) -> None:
        """Claim the oldest runs, one by one, of owners below their limit of concurrent runs on this host.

        `active` returns the number of active runs by owner and is called before each claim. `begin` is called with each
        run and returns whether to claim another.
        """
        while not self._full(active()):
            claimed = await self.claim_with(self._context.stores.runs, None)
            if claimed is None or not begin(claimed):
                return
        for run in await self._queue():  # some owner is at the limit: scan the queue once for the others
            claimed = (
                None if run.owner in self._full(active()) else await self.claim_with(self._context.stores.runs, run.id)
            )
            if claimed is not None and not begin(claimed):
                return

    def is_choosing(self, active: Mapping[str, int]) -> bool:
        """Whether an owner is at the limit, so that runs of other owners are claimed first."""
        return bool(self._full(active))

    def _full(self, active: Mapping[str, int]) -> set[str]:
        if not active:
            return set()  # the usual case
        return {owner for owner, count in active.items() if count >= self._context.settings.max_running_per_owner}

    async def claim_with(self, runs: RunStore, run_id: str | None) -> RunRecord | None:
        """Claim a run for this host, the oldest if `run_id` is None."""
        context = self._context
        lease_ms = round(context.settings.lease_s * 1_000)
        return await runs.claim(context.worker, now_ms=context.now_ms(), lease_ms=lease_ms, run_id=run_id)

    async def _queue(self) -> Iterable[RunRecord]:
        """Return the runs that may be claimed, oldest first."""
        runs, now_ms = self._context.stores.runs, self._context.now_ms()
        queued = await runs.list(statuses=QUEUED, limit=self._context.settings.max_queued)
        left = [run for run in await runs.list(statuses=CLAIMED, limit=1_000) if run.lease_until_ms <= now_ms]
        return sorted([*queued, *left], key=lambda run: (run.created_ms, run.id))

    def _check(self, queued: int, owner: str | None, limit: int) -> None:
        if queued >= limit:
            self._context.counted["overloaded"] += 1
            ahead = queued / self._context.settings.max_running
            wait_s = min(max(1.0, ahead * self._takes_s), MAX_RETRY_AFTER_S)
            raise Overloaded(queued, limit, round(wait_s, 1), owner)
