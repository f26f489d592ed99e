"""The host: takes runs on, works on them, and lets people follow, stop and take up again what they asked for.

A run belongs to the stores, not to whoever submitted it, nor to the host that works on it. Any number of hosts share
the stores; each claims what it can work on, under a lease that it renews, and what a dead one had is claimed by others
when its lease has run out. So whatever is here in memory may vanish at any time.

Three tasks belong to a host: one claims, one keeps the leases and looks for cancels and answers, one tidies up. A store
that is away makes them wait, and never ends them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import InvalidValue, LedgerUnavailable, PenstockError
from penstock.hosting.admission import MAX_WAITING, Admission, Overloaded
from penstock.hosting.control import UNSET, Control, UnknownApproval, UnknownRun
from penstock.hosting.limits import RunLimits
from penstock.hosting.points import passing
from penstock.hosting.ports import AnotherRun, Conflict, Fenced, HostStores, StoreUnavailable
from penstock.hosting.reading import Reading
from penstock.hosting.records import (
    PARKED,
    QUEUED,
    UNTIL_ENDED,
    ApprovalRecord,
    ApprovalState,
    GraphHead,
    GraphRecord,
    HostedEvent,
    RunRecord,
)
from penstock.hosting.settings import NO_CEILINGS, HostSettings
from penstock.hosting.work.claims import was_granted
from penstock.hosting.work.execution import HostedRun
from penstock.hosting.work.retention import remove, remove_ended, sweep_accounts
from penstock.hosting.work.workplace import Prepared, RunKind, SteadyClock, Workplace
from penstock.ids import AN_ID, ID, new_run_id
from penstock.kernel.executor import ExecutorRegistry
from penstock.nodes.approval import as_edited
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.watching.registry import CancelResult

__all__ = [
    "UNSET",
    "CancelResult",
    "GraphArchived",
    "HostSettings",
    "Overloaded",
    "Prepared",
    "RunHost",
    "RunKind",
    "RunLimits",
    "UnknownApproval",
    "UnknownGraph",
    "UnknownRun",
]

journal_of_failures = logging.getLogger("penstock.hosting")

TIDY_S = 5.0
PARKING_S = 2.0
"""How long a host that closes waits for the stores to take what it parks."""
REMOVE_S = 60.0
SWEEP_S = 3_600.0
"""How often it is looked for accounts that were left behind."""
NANOS_PER_S = 1_000_000_000


class UnknownGraph(PenstockError):
    """There is no graph of that id, or no such version of it."""

    def __init__(self, graph_id: str, version: int | None) -> None:
        self.graph_id = graph_id
        self.version = version
        which = f"graph {graph_id!r}" if version is None else f"version {version} of graph {graph_id!r}"
        super().__init__(f"there is no {which}; save it first")


class GraphArchived(PenstockError):
    """A graph that was archived begins nothing new; what it has begun goes on."""

    def __init__(self, graph_id: str) -> None:
        self.graph_id = graph_id
        again = f"PUT /api/graphs/{graph_id} again, or put it back into the list of the store"
        super().__init__(f"graph {graph_id!r} is archived, and begins nothing new; to bring it back, {again}")


class RunHost:
    """Runs graphs for whoever asks, within what its settings allow."""

    def __init__(
        self,
        stores: HostStores,
        *,
        executors: ExecutorRegistry | Mapping[str, Any] | None = None,
        services: Mapping[str, Any] | None = None,
        settings: HostSettings = HostSettings(),  # noqa: B008  # frozen
        prices: PriceBook | None = None,
        worker: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.stores = stores
        self.settings = settings
        self.services: Mapping[str, Any] = {"memory": stores.memories, **(services or {})}
        """What nodes depend on, by name; their memory is that of the stores, unless another one is given."""
        self._usual_limits = settings.default_limits.clipped(settings.ceilings)
        name = worker or f"{socket.gethostname()}:{os.getpid()}:{new_run_id()[-12:]}"
        self._at = Workplace(stores, settings, _registry(executors), self.services, name, clock, SteadyClock(clock))
        self._at.prices = prices
        self.kinds = self._at.kinds
        """What is to be done around runs, by the kind that their origin names."""
        self.forgetting = self._at.forgetting
        """What is to be removed with runs that are not kept any more."""
        self._here: dict[str, HostedRun] = {}
        self._tasks: dict[HostedRun, asyncio.Task[None]] = {}
        self._admission = Admission(self._at)
        self._control = Control(self._at, self._here, self._add, self._wake)
        self._wanted = asyncio.Event()
        self._coming: dict[str, int] = {}
        """What was submitted here and is not claimed yet, and how often the queue had been looked at before."""
        self._looks = 0
        self._reading = Reading(self._at, self._here, self._coming)
        self._is_thorough = True
        """Whether the next look at the queue is for whatever is there, and not only for what came here."""
        self._has_left_some = True
        """Whether the last look at the queue may have left something there for want of room."""
        self._is_closing = False
        self._claiming: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._queued = 0
        self._next_renew_ns = 0
        self._next_remove_ns = 0
        self._next_sweep_ns = 0

    @property
    def worker(self) -> str:
        """The name of this host among all that share the stores."""
        return self._at.worker

    @property
    def executors(self) -> ExecutorRegistry:
        """What stands behind the node types of its graphs."""
        return self._at.executors

    # Beginning and end.

    async def __aenter__(self) -> RunHost:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Begin to work: first on what other hosts have parked."""
        if self._claiming is not None:
            return
        self._reading.is_closed, self._reading.is_working = False, True
        await self._once(self._tidy)
        self._is_closing = False
        self._claiming = asyncio.create_task(self._keep_claiming(), name=f"{self.worker} claims")
        self._tidying = asyncio.create_task(self._keep(self._tidy, TIDY_S), name=f"{self.worker} tidies")
        self._ticking = asyncio.create_task(self._keep(self._tick, self.settings.tick_s), name=f"{self.worker} ticks")

    async def close(self, drain_s: float | None = None) -> None:
        """Take on nothing more, let runs end for `drain_s`, park the others; the next host goes on with those."""
        drain_s = self.settings.drain_s if drain_s is None else drain_s
        self._is_closing = True
        self._wake()
        if self._claiming is not None:  # what it is about to claim would be nobody's until the lease has run out
            await asyncio.wait((self._claiming,), timeout=PARKING_S)
        await _stopped(self._claiming, self._tidying)
        self._park(hosted for hosted in self._here.values() if hosted.is_waiting)
        await self._drained(drain_s)
        self._park(self._here.values())
        await self._drained(PARKING_S)
        await _stopped(*self._tasks.values(), self._ticking)  # stores that are away: the leases will run out
        self._claiming = self._tidying = self._ticking = None
        self._reading.close()

    def _park(self, runs: Iterable[HostedRun]) -> None:
        for hosted in list(runs):
            hosted.park()

    async def _drained(self, timeout_s: float) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=timeout_s)

    # What people ask for.

    async def submit(
        self,
        *,
        owner: str,
        graph_id: str,
        version: int | None = None,
        input: Any = None,
        limits: RunLimits | Mapping[str, Any] | None = None,
        run_id: str | None = None,
        origin: Mapping[str, Any] | None = None,
        first: Callable[[], Awaitable[None]] | None = None,
    ) -> RunRecord:
        """Take a run on. Asked again with the same `run_id` and the same of everything, it is the run that is there,
        whatever it was granted since; and, if no `version` is named, of whichever was the newest then.

        Overloaded if too many wait, UnknownGraph, GraphArchived, Conflict if the id is another run's, InvalidValue for
        limits above what may be asked for. What is to be written `first`, because the run will look for it, is written
        when nothing of this stands in the way any more, and just before the run is there.
        """
        head = await self._to_begin(graph_id, version, run_id)
        run = RunRecord(
            _checked_id("run_id", new_run_id() if run_id is None else run_id),
            _checked_owner(owner),
            graph_id,
            head.version,
            input,
            self._limits(limits),
            {"kind": "run"} if origin is None else dict(origin),
        )
        unasked = ("graph_version",) if version is None else ()
        return await self._add(run, is_new=run_id is None, first=first, unasked=unasked)

    async def graph_to_begin(self, graph_id: str, version: int | None = None) -> GraphRecord:
        """The graph that a new run would be of; UnknownGraph, or GraphArchived."""
        graph = await self.stores.graphs.get(graph_id, version)
        if graph is None:
            raise UnknownGraph(graph_id, version)
        if graph.is_archived:
            raise GraphArchived(graph_id)
        return graph

    async def get(self, run_id: str) -> RunRecord | None:
        """The run as it stands; None if there is none of that id."""
        return await self.stores.runs.get(run_id)

    async def cancel(
        self, run_id: str, *, reason: str = "cancelled", by: str = "", owner: str | None = None
    ) -> CancelResult:
        """Stop a run wherever it is; one that is not there yet is stopped when it comes, if that is not too late.

        With an `owner` only a run of theirs is meant: another's is left alone, as if it were not there.
        """
        run_id, reason, by = _checked_id("run_id", run_id), _checked_text("reason", reason), _checked_text("by", by)
        return await self._control.cancel(run_id, reason, by, None if owner is None else _checked_owner(owner))

    async def remove(self, run_id: str) -> None:
        """Remove a run that has ended with all it has left, before its time; Conflict if it has not ended."""
        await remove(self._at, _checked_id("run_id", run_id))

    async def resume(self, run_id: str) -> RunRecord:
        """Let a run that was parked, halted or cancelled, or that failed, go on from where it was."""
        return await self._control.resume(run_id)

    async def grant(
        self, run_id: str, more: RunLimits | Mapping[str, Any], *, by: str, within: RunLimits = NO_CEILINGS
    ) -> RunRecord:
        """Raise the ceilings of a run that was halted by `more`, and let it go on.

        Conflict if it is not halted, or somebody else was first: then this grant does not count; or if it gives nothing
        of what has halted the run. InvalidValue if they would be above `within`.
        """
        return await self._control.grant(run_id, _as_limits(more), _checked_text("by", by), within)

    async def fork(
        self, run_id: str, *, owner: str, at: str, input: Any = UNSET, run_id_new: str | None = None
    ) -> RunRecord:
        """A new run that does node `at`, and all behind it, again; `input` replaces what came into `at`."""
        new_id = _checked_id("run_id_new", run_id_new or new_run_id())
        return await self._control.fork(run_id, _checked_owner(owner), at, input, new_id)

    async def replay(self, run_id: str, *, owner: str) -> RunRecord:
        """A new run that goes the way of an old one by what was recorded: nothing is called, nothing is paid."""
        return await self._control.replay(run_id, _checked_owner(owner), new_run_id())

    def events(self, run_id: str, after: int = 0) -> AsyncGenerator[HostedEvent, None]:
        """What happened to a run after that event, then what happens, up to the event that ends or parks it."""
        return self._reading.events(run_id, after)

    async def wait(self, run_id: str) -> RunRecord:
        """The run once it has ended; or is parked, if this host was closed or not started."""
        return await self._reading.wait(run_id)

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str
    ) -> ApprovalRecord:
        """Answer a question: approved, edited (with the `answer`) or rejected.

        Conflict if it waits no more, UnknownApproval if there is none of that id, InvalidValue for an edit that whoever
        asked could not go on with; then the question still waits.
        """
        if state == "edited":
            asked = await self.stores.approvals.get(approval_id)
            answer = answer if asked is None else as_edited(asked.expects, answer)
        try:
            approval = await self.stores.approvals.answer(
                approval_id, state, answer=answer, reason=reason, by=by, now_ms=self._at.now_ms()
            )
        except KeyError:
            raise UnknownApproval(approval_id) from None
        passing("approval.answered")
        hosted = self._here.get(approval.run_id)
        if hosted is not None:
            hosted.answered(approval)
        return approval

    def stats(self) -> dict[str, Any]:
        """Figures of this host: what it works on now, and what has happened since it was made."""
        waiting = sum(1 for hosted in self._here.values() if hosted.is_waiting)
        return {
            "worker": self.worker,
            "running": len(self._here) - waiting,
            "waiting": waiting,
            "queued": self._queued,
            "totals": dict(self._at.counted),
        }

    # Taking on.

    def _limits(self, asked: RunLimits | Mapping[str, Any] | None) -> dict[str, Any]:
        return _as_limits({} if asked is None else asked).within(self.settings.ceilings).to_dict(self._usual_limits)

    async def _to_begin(self, graph_id: str, version: int | None, run_id: str | None) -> GraphHead:
        """What a run would be of; UnknownGraph, or GraphArchived unless the run is there already."""
        head = await self.stores.graphs.head(graph_id, version)
        if head is None:
            raise UnknownGraph(graph_id, version)
        if head.is_archived and (run_id is None or await self.stores.runs.get(run_id) is None):
            raise GraphArchived(graph_id)
        return head

    async def _add(
        self,
        run: RunRecord,
        journal: Sequence[JournalEntry] = (),
        *,
        is_new: bool = False,
        first: Callable[[], Awaitable[None]] | None = None,
        unasked: Collection[str] = (),
    ) -> RunRecord:
        """Keep a run with the journal it begins with, and let it begin; the one that is there, if that is asked for."""
        made = RunRecord(
            run.id, run.owner, run.graph_id, run.graph_version, run.input, run.limits, run.origin,
            created_ms=self._at.now_ms(),
        )  # fmt: skip
        try:
            added = await self._admission.admit(run.owner, lambda: self._taken_on(made, journal, unasked), first)
        except Overloaded:
            if is_new or await self.stores.runs.get(run.id) is None:
                raise
            return await self._taken_on(run, journal, unasked)  # one that is there needs no room: it again, or Conflict
        if (added.created_ms, added.status) != (made.created_ms, made.status):
            return added  # it was there
        passing("submit.added")
        self._at.counted["submitted"] += 1
        if not self._begins_at_once(run.owner):  # else it is told with its beginning
            await self._tell_queued(added)
        passing("submit.told")
        intent = (await self.stores.cancels.find({run.id: run.owner}, now_ms=self._at.now_ms())).get(run.id)
        if intent is not None:
            await self.stores.cancels.put(replace(intent, until_ms=UNTIL_ENDED))  # now it is for a run that is there
            if await self._control.end_unclaimed(added, intent.reason):
                return await self._control.found(run.id)
        self._coming[run.id] = self._looks
        self._wanted.set()
        return added

    async def _taken_on(self, run: RunRecord, journal: Sequence[JournalEntry], unasked: Collection[str]) -> RunRecord:
        try:
            return await self.stores.runs.add(run, journal)
        except AnotherRun as error:
            differing = {*error.fields} - {*unasked}
            if not differing or (differing == {"limits"} and await was_granted(self.stores.events, run.id)):
                return error.known
            raise

    async def _tell_queued(self, run: RunRecord) -> None:
        with suppress(Conflict, Fenced):  # a worker was quicker, and has told it
            await self.stores.events.append(run.id, 0, [HostedEvent(1, run.created_ms, "run.queued")])

    def _wake(self) -> None:
        self._is_thorough = True
        self._wanted.set()

    # The three loops.

    async def _keep_claiming(self) -> None:
        while not self._is_closing:
            self._wanted.clear()
            await self._once(self._claim)
            await self._wanted.wait()

    async def _keep(self, turn: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await self._once(turn)
            await asyncio.sleep(every_s)

    async def _once(self, turn: Callable[[], Awaitable[None]]) -> None:
        try:
            await turn()
        except (StoreUnavailable, LedgerUnavailable):
            self._at.counted["store_failures"] += 1
        except Exception:  # whatever it is, the other runs of this host go on
            self._at.counted["host_failures"] += 1
            journal_of_failures.exception("a host could not do its round; it goes on with the next")

    async def _claim(self) -> None:
        """Claim what there is room for: all that is queued or, if only some have just come here, as long as they last.

        What others were given, they claim; whatever they leave is found when everything is looked at, every tick.
        """
        is_thorough = self._is_thorough or self._has_left_some
        self._is_thorough, self._has_left_some = False, True
        self._looks += 1
        if not self._may_begin():
            return

        def begin(run: RunRecord) -> bool:
            self._begin(run)
            self._coming.pop(run.id, None)
            return self._may_begin() and (is_thorough or bool(self._coming))

        await self._admission.claim(self._by_owner, begin)
        self._has_left_some = not self._may_begin() or self._admission.is_choosing(self._by_owner())
        for run_id in [id for id, looks in self._coming.items() if looks < self._looks]:
            del self._coming[run_id]  # somebody else has it

    def _may_begin(self) -> bool:
        if self._is_closing:
            return False
        here, most = self._here, self.settings.max_running
        if len(here) < most:  # however many of them wait
            return True
        waiting = sum(1 for hosted in here.values() if hosted.is_waiting)
        return len(here) - waiting < most and waiting < most * MAX_WAITING

    def _begins_at_once(self, owner: str) -> bool:
        """Whether a run of this owner is claimed here as soon as it is there, with all that came before it."""
        if self._claiming is None or self._coming or not self._may_begin():
            return False
        return self._by_owner().get(owner, 0) < self.settings.max_running_per_owner

    def _by_owner(self) -> dict[str, int]:
        """How many runs of each owner are worked on; nothing while none can have as many as may run at once."""
        count: dict[str, int] = {}
        if len(self._here) < self.settings.max_running_per_owner:
            return count
        for hosted in self._here.values():
            if not hosted.is_waiting:
                count[hosted.run.owner] = count.get(hosted.run.owner, 0) + 1
        return count

    def _begin(self, run: RunRecord) -> None:
        passing("claim.taken")
        before = self._here.get(run.id)
        if before is not None:  # our own lease had run out, and we were the first to claim it again
            before.lose()
        hosted = self._here[run.id] = HostedRun(self._at, run)
        after = None if before is None else self._tasks.get(before)
        self._at.counted["claimed"] += 1
        self._tasks[hosted] = asyncio.create_task(self._work(hosted, after), name=f"run {run.id}")

    async def _work(self, hosted: HostedRun, after: asyncio.Task[None] | None) -> None:
        began_ns = self._at.clock.monotonic_ns()
        try:
            if after is not None:
                await asyncio.wait((after,))
            left = await hosted.work()
            if left is None:
                self._at.counted["lost"] += 1
            else:
                self._at.count_left(hosted.run, left)
            self._admission.took((self._at.clock.monotonic_ns() - began_ns) / NANOS_PER_S)
        except Exception:
            self._at.counted["host_failures"] += 1
            journal_of_failures.exception("run %s could not be brought to its end here", hosted.run.id)
        finally:
            self._tasks.pop(hosted, None)
            if self._here.get(hosted.run.id) is hosted:
                del self._here[hosted.run.id]
            hosted.gone.set()
            if self._has_left_some:  # there is room now for what was left in the queue
                self._wake()

    async def _tick(self) -> None:
        self._wake()
        here = dict(self._here)
        if not here:
            return
        now_ns = self._at.steady.time_ns()  # after a suspend, the leases have to be looked after at once
        if now_ns >= self._next_renew_ns:
            await self._renew(here)
            self._next_renew_ns = now_ns + round(self.settings.lease_s / 3 * NANOS_PER_S)
        owners = {run_id: hosted.run.owner for run_id, hosted in here.items()}
        intents = await self.stores.cancels.find(owners, now_ms=self._at.now_ms())
        for run_id, intent in intents.items():
            here[run_id].cancel(intent.reason)
        asked = {id: hosted for hosted in here.values() for id in hosted.asks}
        if asked:
            for id, approval in (await self.stores.approvals.answered(list(asked))).items():
                asked[id].answered(approval)
        for hosted in here.values():
            hosted.notice_idle()

    async def _renew(self, here: Mapping[str, HostedRun]) -> None:
        lease_ms = round(self.settings.lease_s * 1_000)
        mine = await self.stores.runs.renew(self.worker, list(here), now_ms=self._at.now_ms(), lease_ms=lease_ms)
        for run_id in here.keys() - set(mine):
            if here[run_id].decided is None:
                here[run_id].lose()

    async def _tidy(self) -> None:
        for run in await self.stores.runs.list(statuses=PARKED, limit=100):
            with suppress(Conflict, UnknownRun):  # another host was quicker
                await self._control.resume(run.id, statuses=PARKED)
        self._queued = await self.stores.runs.count(statuses=QUEUED)
        now_ns = self._at.clock.monotonic_ns()
        if now_ns >= self._next_remove_ns:
            self._next_remove_ns = now_ns + round(REMOVE_S * NANOS_PER_S)
            await remove_ended(self._at)
            if now_ns >= self._next_sweep_ns:
                await sweep_accounts(self._at)
                self._next_sweep_ns = now_ns + round(SWEEP_S * NANOS_PER_S)
            await self._control.forget_wishes()


async def _stopped(*tasks: asyncio.Task[None] | None) -> None:
    """End tasks, and wait until they have."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending)


def _registry(executors: ExecutorRegistry | Mapping[str, Any] | None) -> ExecutorRegistry:
    if executors is None:
        return ExecutorRegistry.from_entry_points()
    return executors if isinstance(executors, ExecutorRegistry) else ExecutorRegistry(executors)


def _as_limits(given: RunLimits | Mapping[str, Any]) -> RunLimits:
    return given if isinstance(given, RunLimits) else RunLimits.from_dict(given)


def _checked_text(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(field, value, "text")
    return value


def _checked_id(field: str, value: object) -> str:
    if not isinstance(value, str) or ID.fullmatch(value) is None:
        raise InvalidValue(field, value, f"an id: {AN_ID}")
    return value


def _checked_owner(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidValue("owner", value, "the name of whom the run belongs to")
    return value
