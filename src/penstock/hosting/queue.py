"""The queue of runs: how many may wait, which run is claimed next, and the embedded engine, which claims them.

The queue is shared by all hosts that share the stores; the number of concurrent runs is each host's own. Two hosts that
admit runs at the same moment may exceed the queue limit by the runs that each of them admitted.

Each host claims the runs it has room for, under a lease that it renews; when a host dies, its leases expire and other
hosts claim its runs. A host with room claims a submitted run in the transaction that adds it. One task claims the
others: when a run is submitted here, when a slot becomes free, and at each tick. Each run that a host works on has a
task, whether the claim loop or another engine brought it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.engine import EngineHealth, Why, Work
from penstock.hosting.host_context import HostContext
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.ports import CLAIMED, QUEUED, RunRecord, RunStore, StoreCorrupt
from penstock.runtime.durable import failpoints

logger = logging.getLogger("penstock.hosting")

NANOS_PER_S = 1_000_000_000


class ActiveRuns:
    """The runs in progress on this host, by id."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self.by_id: dict[str, HostedRun] = {}
        self.tasks: dict[HostedRun, asyncio.Task[RunRecord | None]] = {}
        """The task of each run. It returns the record the run was left with; None if another worker has taken the run
        over, or it failed here."""
        self.on_left: Callable[[], None] | None = None
        """Called when a run has left the host, and its slot is free."""
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
        """Fail a run that cannot be ended as usual, because its row has a value that cannot be read or written back."""
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


PARKING_S = 2.0
"""How long a closing host waits for the stores to accept the runs it parks."""


class ClaimLoop:
    """An `Engine` of hosts that share a database, and nothing else."""

    queue: str | None = None

    def __init__(self, context: HostContext, admission: Admission, runs: ActiveRuns) -> None:
        self._context = context
        self._admission = admission
        self._runs = runs
        self._wanted = asyncio.Event()
        self._starting: Counter[str] = Counter()
        """Number of runs per owner that are being added and start on this host immediately."""
        self._unsure: set[str] = set()
        """Runs whose admission may have been committed, with a claim, although the store's response was lost."""
        self.coming: dict[str, int] = {}
        """Runs submitted here and not claimed yet, each with the value of `_looks` at its submission."""
        self._looks = 0
        self._is_thorough = True
        """Whether the next pass over the queue considers all queued runs, not only those submitted here."""
        self._has_left_some = True
        """Whether the last pass may have left runs in the queue for lack of room."""
        self.is_closing = False
        self.task: asyncio.Task[None] | None = None
        runs.on_took = admission.took
        runs.on_left = self._room

    # The engine.

    async def start(self, work: Work) -> None:
        """Start the task that claims runs."""
        self.is_closing = False
        self.task = asyncio.create_task(self._keep_claiming(), name=f"{self._context.worker} claims")

    async def drain(self) -> None:
        """Claim no further run."""
        self.is_closing = True
        self.wake()
        if self.task is not None:  # a claim in progress would leave its run idle until the lease expires
            await asyncio.wait((self.task,), timeout=PARKING_S)
            self.task.cancel()
            await asyncio.wait((self.task,))

    async def close(self) -> None:
        """Forget the task, so that the loop can be started again."""
        self.task = None

    async def dispatch(self, run: RunRecord) -> None:
        """Look for queued runs: this one is among them."""
        self.wake()

    async def nudge(self, run: RunRecord, why: Why) -> None:
        """Do nothing: the host of the run looks for answers and cancel requests at each tick."""

    async def health(self) -> EngineHealth:
        """Return that the engine works: it has no part that could be unreachable."""
        return EngineHealth(is_ok=True, found="embedded")

    def wake(self) -> None:
        """Consider all queued runs, now."""
        self._is_thorough = True
        self._wanted.set()

    # Runs that are submitted here.

    def starts_here(self, owner: str) -> bool:
        """Whether this host has room for a run of this owner, and no run submitted here is queued ahead of it."""
        if self.task is None or self.coming or not self._may_begin():
            return False
        return self._by_owner().get(owner, 0) < self._context.settings.max_running_per_owner

    @contextmanager
    def reserved(self, owner: str, starts_here: bool) -> Iterator[None]:
        """Reserve a slot for a run that is about to start here, so that no other run takes it in the meantime."""
        if not starts_here:
            yield
            return
        self._starting[owner] += 1
        try:
            yield
        finally:
            self._starting[owner] -= 1
            self._starting += Counter()

    async def claim(self, runs: RunStore, run_id: str) -> RunRecord | None:
        """Claim a run in the transaction that adds it."""
        return await self._admission.claim_with(runs, run_id)

    def lost_sight_of(self, run_id: str) -> None:
        """Find out later whether this run was added, and claimed: the store's response was lost."""
        self._unsure.add(run_id)

    def added(self, run_id: str) -> None:
        """Claim a run that was added without a claim."""
        self.coming[run_id] = self._looks
        self._wanted.set()

    async def begin(self, claimed: RunRecord, *, is_new: bool = False) -> None:
        """Start a run that was claimed at its admission, or park it if this host is closing."""
        if self.is_closing:
            await self._context.stores.runs.update(claimed.id, claimed.epoch, status="parked")
        else:
            self._runs.begin(claimed, is_new=is_new)

    async def resolve(self, run_id: str) -> None:
        """Start a run whose admission was committed although the store's response was lost."""
        if run_id not in self._unsure:
            return
        run = None
        with suppress(StoreCorrupt):  # its claim expires, and the next claim fails it
            run = await self._context.stores.runs.get(run_id)
        self._unsure.discard(run_id)
        is_ours = run is not None and run.status in CLAIMED and (run.worker, run.epoch) == (self._context.worker, 1)
        if run is not None and is_ours and run_id not in self._runs.by_id:
            await self.begin(run)

    # Claims.

    async def _keep_claiming(self) -> None:
        while not self.is_closing:
            self._wanted.clear()
            await self._context.guard(self._claim)
            await self._wanted.wait()

    async def _claim(self) -> None:
        """Claim runs while there is room: any queued run in a thorough pass, else until those submitted here are gone.

        Other hosts claim the runs submitted to them; runs they leave are found by the thorough pass of each tick.
        """
        for run_id in [*self._unsure]:
            await self.resolve(run_id)
        is_thorough = self._is_thorough or self._has_left_some
        self._is_thorough, self._has_left_some = False, True
        self._looks += 1
        if not self._may_begin():
            return

        def begin(run: RunRecord) -> bool:
            self._runs.begin(run)
            self.coming.pop(run.id, None)
            return self._may_begin() and (is_thorough or bool(self.coming))

        await self._admission.claim(self._by_owner, begin)
        self._has_left_some = not self._may_begin() or self._admission.is_choosing(self._by_owner())
        for run_id in [id for id, looks in self.coming.items() if looks < self._looks]:
            del self.coming[run_id]  # another host has claimed it

    def _room(self) -> None:
        if self._has_left_some:  # there is room now for runs left in the queue
            self.wake()

    def _may_begin(self) -> bool:
        if self.is_closing:
            return False
        most = self._context.settings.max_running
        taken = len(self._runs.by_id) + self._starting.total()
        if taken < most:  # regardless of how many of them are waiting
            return True
        waiting = self._runs.waiting
        return taken - waiting < most and waiting < most * MAX_WAITING

    def _by_owner(self) -> dict[str, int]:
        """Number of active runs per owner; empty while no owner can have reached the per-owner limit."""
        count: dict[str, int] = dict(self._starting)
        if len(self._runs.by_id) + len(count) < self._context.settings.max_running_per_owner:
            return {}
        for hosted in self._runs.by_id.values():
            if not hosted.is_waiting:
                count[hosted.run.owner] = count.get(hosted.run.owner, 0) + 1
        return count
