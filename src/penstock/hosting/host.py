"""The run host: accepts runs, executes them, and lets clients follow, cancel, resume and fork them.

A run belongs to the stores, not to the client that submitted it or the host that executes it. Any number of hosts share
the stores, and an engine brings the runs to the hosts: the built-in claim loop, or the engine passed to the host.
In-memory state may vanish at any time: the run continues on another host.

Besides the tasks of its engine a host has two: one renews leases and polls for cancel requests and answers, one does
housekeeping. An unavailable store delays these tasks and never ends them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import date
from types import TracebackType
from typing import Any, NamedTuple, cast

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.accounts import Balance
from penstock.containment.ledger import Amounts
from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.bills import BillNotFound, Bills, HostedBill
from penstock.hosting.budgets import DayBudget, budgets_of_day, stored_budgets, stored_usage
from penstock.hosting.control import UNSET, ApprovalNotFound, Control, RunNotFound
from penstock.hosting.dispatched import DispatchedWork, Sweeper
from penstock.hosting.engine import Engine, EngineHealth, EngineUnavailable, Why
from penstock.hosting.figures import RunFigures
from penstock.hosting.host_context import HostContext, Prepared, RunHandler, SteadyClock, with_trace
from penstock.hosting.hosted_run import HostedRun
from penstock.hosting.limits import NO_CEILINGS, HostSettings, RunLimits
from penstock.hosting.ports import (
    CLAIMED,
    LOWEST_PRIORITY,
    PARKED,
    QUEUED,
    UNTIL_ENDED,
    USUAL_PRIORITY,
    AddedRun,
    ApprovalRecord,
    ApprovalState,
    CancelRequest,
    Conflict,
    GraphRecord,
    HostedEvent,
    HostStores,
    RunIdConflict,
    RunRecord,
    StoreCorrupt,
    StoreUnavailable,
    TransactionStores,
)
from penstock.hosting.queue import PARKING_S, ActiveRuns, Admission, CheckRoom, ClaimLoop, Overloaded
from penstock.hosting.reader import Reading, RunLogs
from penstock.hosting.retention import remove, remove_ended, sweep_accounts
from penstock.ids import new_run_id
from penstock.kernel.executor import ExecutorRegistry
from penstock.logs import note
from penstock.money import Usd, to_nanos
from penstock.nodes.approval import as_edited
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.runtime.bills import check_person
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.graphs.graph_runtime import as_services
from penstock.runtime.run import open_hosts
from penstock.runtime.watching.registry import CancelResult
from penstock.runtime.worker import limit_abandoned

__all__ = [
    "UNSET",
    "ApprovalNotFound",
    "BillNotFound",
    "CancelResult",
    "GraphArchived",
    "GraphNotFound",
    "HostSettings",
    "HostedBill",
    "Overloaded",
    "Prepared",
    "RunHandler",
    "RunHost",
    "RunLimits",
    "RunNotFound",
]

logger = logging.getLogger("penstock.hosting")

TIDY_S = 5.0
REMOVE_S = 60.0
SWEEP_S = 3_600.0
"""Interval between sweeps for orphaned accounts."""
NANOS_PER_S = 1_000_000_000


class GraphNotFound(PenstockError):
    """No graph has this id, or the graph has no such version."""

    def __init__(self, graph_id: str, version: int | None) -> None:
        self.graph_id = graph_id
        self.version = version
        which = f"graph {graph_id!r}" if version is None else f"version {version} of graph {graph_id!r}"
        super().__init__(f"there is no {which}; save it first")


class GraphArchived(PenstockError):
    """The graph is archived and cannot start new runs; its existing runs continue."""

    def __init__(self, graph_id: str) -> None:
        self.graph_id = graph_id
        super().__init__(f"graph {graph_id!r} is archived and cannot start new runs; restore it first")


Also = Callable[[Any], Awaitable[None]]
"""Callback that writes to the stores of the transaction it is passed."""


@dataclass(frozen=True, slots=True)
class _Submission:
    """A request to add a run."""

    run: RunRecord
    at_ms: int
    journal: Sequence[JournalEntry] = ()
    """Initial journal entries of the run."""
    version: int | None = None
    """Graph version to look up if `is_of_graph`; None is the newest."""
    is_of_graph: bool = False
    """Whether the graph version is looked up."""
    not_compared: Collection[str] = ()
    """Fields in which an existing run with the same id may differ."""
    also: Also | None = None


class _Admitted(NamedTuple):
    """The result of a submission."""

    run: RunRecord
    is_new: bool = False
    claimed: RunRecord | None = None
    """The run as claimed by this host."""
    cancel: CancelRequest | None = None
    """A cancel request stored before the run was added."""


class RunHost:
    """Runs graphs on behalf of clients, within the limits of its settings."""

    def __init__(
        self,
        stores: HostStores,
        *,
        executors: ExecutorRegistry | Mapping[str, Any] | None = None,
        services: Mapping[str, Any] | object | None = None,
        settings: HostSettings = HostSettings(),  # noqa: B008  # frozen
        prices: PriceBook | None = None,
        worker: str | None = None,
        clock: Clock = SYSTEM_CLOCK,
        engine: Engine | None = None,
        observe: Callable[[ExecutionContext], object] | None = None,
    ) -> None:
        """Without an `engine`, hosts claim runs from the stores that they share.

        `observe` is called with the context of each run before it starts, for example to export its spans.
        """
        self.stores = stores
        self.settings = settings
        self.services = as_services({"memory": stores.memories, **as_services(services)})
        """Services for nodes, by name; `memory` is the memory store of `stores` unless another one is given."""
        self._usual_limits = settings.default_limits.clipped(settings.ceilings)
        self._default_limits = self._usual_limits.to_dict()
        name = worker or f"{socket.gethostname()}:{os.getpid()}:{new_run_id()[-12:]}"
        self._context = HostContext(
            stores, settings, _registry(executors), self.services, name, clock, SteadyClock(clock)
        )
        self._context.prices = prices
        self._context.observe = observe
        self.handlers = self._context.handlers
        """Run handlers, by the `kind` in a run's origin."""
        self.on_delete = self._context.on_delete
        """Callbacks that remove further data together with removed runs."""
        self._runs = ActiveRuns(self._context)
        self._admission = Admission(self._context)
        self._control = Control(self._context, self._runs.by_id, self._fork)
        self._bills = Bills(self._context)
        self._claims = ClaimLoop(self._context, self._admission, self._runs) if engine is None else None
        """The embedded engine, which alone can claim a run in the transaction that adds it; None with another one."""
        self._engine: Engine = self._claims or cast("Engine", engine)
        self._sweeper = Sweeper(self._context)
        self._work: DispatchedWork | None = None
        coming: Collection[str] = () if self._claims is None else self._claims.coming
        self._reading = Reading(self._context, self._runs.by_id, coming)
        self._ticking: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._queued = 0
        self._next_renew_ns = 0
        self._next_remove_ns = 0
        self._next_sweep_ns = 0

    @property
    def worker(self) -> str:
        """The name of this host, unique among the hosts that share the stores."""
        return self._context.worker

    def now_ms(self) -> int:
        """Return the current time on the clock that stamps runs, events and approvals."""
        return self._context.now_ms()

    @property
    def figures(self) -> RunFigures:
        """Counters of this host by graph and by model, since it was created."""
        return self._context.figures

    @property
    def executors(self) -> ExecutorRegistry:
        """The executors of the node types in this host's graphs."""
        return self._context.executors

    # Start and close.

    async def __aenter__(self) -> RunHost:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the host's tasks; runs parked by other hosts are requeued first."""
        if self._ticking is not None:
            return
        self._reading.is_closed, self._reading.is_working = False, True
        limit_abandoned(self.settings.max_abandoned_threads)
        self._work = DispatchedWork(self._context, self._runs, self._control, await self._database_id())
        await self._engine.start(self._work)
        open_hosts.add(self)
        await self._context.guard(self._tidy)
        self._tidying = asyncio.create_task(self._keep(self._tidy, TIDY_S), name=f"{self.worker} tidies")
        self._ticking = asyncio.create_task(self._keep(self._tick, self.settings.tick_s), name=f"{self.worker} ticks")

    async def _database_id(self) -> str:
        return "" if self._claims is not None else await self.stores.runs.database_id()

    async def close(self, drain_s: float | None = None) -> None:
        """Take no further runs, wait up to `drain_s` for runs to end, and park the rest for the next host."""
        drain_s = self.settings.drain_s if drain_s is None else drain_s
        runs = self._runs
        await self._engine.drain()
        await _stopped(self._tidying)
        runs.park(hosted for hosted in runs.by_id.values() if hosted.is_waiting)
        await runs.drained(drain_s)
        runs.park(runs.by_id.values())
        await runs.drained(PARKING_S)
        await _stopped(*runs.tasks.values(), self._ticking)  # if the stores are unavailable, the leases will expire
        await self._context.batches.close()
        await self._engine.close()
        await self._context.guard(self._context.blocks.close)
        self._tidying = self._ticking = None
        open_hosts.discard(self)
        self._reading.close()

    # Public operations.

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
        also: Also | None = None,
        queue: str | None = None,
        priority: int = USUAL_PRIORITY,
    ) -> RunRecord:
        """Add a run to the queue; a host with room starts it immediately.

        Submitting is idempotent: the same `run_id` with the same arguments returns the existing run, even if it was
        granted more since or, without a `version`, if the graph has a newer one. `also(stores)` is called in the
        transaction that adds the run, to store data together with it; if it raises, the run is not added.

        With an engine, `queue` names the workers that get the run, and `priority`, from 1 (first) to 5, their order.

        Raises Overloaded if too many runs are queued, GraphNotFound, GraphArchived, Conflict if the id belongs to a
        different run, and InvalidValue for limits above the ceilings of the host.
        """
        origin = with_trace({"kind": "run"} if origin is None else origin)
        run = RunRecord(
            checks.identifier("run_id", new_run_id() if run_id is None else run_id),
            checks.text("owner", owner, minimum=1),
            graph_id,
            0,
            input,
            self._limits(limits),
            origin,
            queue=self._queue(queue),
            priority=checks.integer("priority", priority, minimum=1, maximum=LOWEST_PRIORITY),
        )
        return await self._add(_Submission(run, self._context.now_ms(), version=version, is_of_graph=True, also=also))

    async def graph_to_begin(self, graph_id: str, version: int | None = None) -> GraphRecord:
        """Return the graph that a new run would use; raise GraphNotFound or GraphArchived."""
        graph = await self.stores.graphs.get(graph_id, version)
        if graph is None:
            raise GraphNotFound(graph_id, version)
        if graph.is_archived:
            raise GraphArchived(graph_id)
        return graph

    async def get(self, run_id: str) -> RunRecord | None:
        """Return the current record of a run, or None if the id is unknown."""
        return await self.stores.runs.get(run_id)

    async def cancel(
        self, run_id: str, *, reason: str = "cancelled", by: str = "", owner: str | None = None
    ) -> CancelResult:
        """Cancel a run on any host; a run not submitted yet is cancelled on arrival, if the request has not expired.

        With an `owner`, the request applies only to a run of that owner; any other run is treated as nonexistent.
        """
        run_id, reason, by = checks.identifier("run_id", run_id), checks.text("reason", reason), checks.text("by", by)
        if owner is not None:
            checks.text("owner", owner, minimum=1)
        result = await self._control.cancel(run_id, reason, by, owner)
        await self._nudge(run_id, "cancel")
        return result

    async def remove(self, run_id: str) -> None:
        """Remove an ended run and all its data before its retention time; Conflict if it has not ended."""
        await remove(self._context, checks.identifier("run_id", run_id))

    async def resume(self, run_id: str) -> RunRecord:
        """Resume a parked, halted, cancelled or failed run from where it stopped."""
        return await self._dispatch(await self._control.resume(run_id))

    async def grant(
        self, run_id: str, more: RunLimits | Mapping[str, Any], *, by: str, within: RunLimits = NO_CEILINGS
    ) -> RunRecord:
        """Raise the limits of a halted run by `more`, and resume it.

        Raises Conflict, and grants nothing, if the run is not halted, if another request resumed it first, or if `more`
        does not raise the limit that halted the run. Raises InvalidValue if the new limits would exceed `within`.
        """
        granted = await self._control.grant(run_id, _as_limits(more), checks.text("by", by), within)
        return await self._dispatch(granted)

    @property
    def prices(self) -> PriceBook:
        """Model prices that the runs of this host are charged at."""
        return self._context.prices or default_prices()

    async def live_usage(self, runs: Iterable[RunRecord]) -> Mapping[str, Balance]:
        """Return the current figures of the runs in progress among `runs`, by id.

        Figures of a run on this host are read from memory, those of other runs from the ledger. A run without an
        account, such as a replay, has none. If the ledger is unavailable, runs on other hosts are left out.
        """
        claimed = [run for run in runs if run.status in CLAIMED]
        here = {run.id: hosted.balance for run in claimed if (hosted := self._runs.by_id.get(run.id)) is not None}
        found = {run_id: balance for run_id, balance in here.items() if balance is not None}
        return {**found, **await stored_usage(self._context, [run.id for run in claimed if run.id not in here])}

    async def budgets(self, run: RunRecord) -> list[Mapping[str, Any]]:
        """Return the run's own budget and the daily budgets above it from the ledger, as data of `budget` events."""
        return [data for _, data in await stored_budgets(self._context, run)]

    async def budgets_of_day(self, day: date, owners: Iterable[str], teams: Iterable[str] = ()) -> Sequence[DayBudget]:
        """Return the budgets of a day in `day_zone`: of all owners, and of these owners and teams, if they exist."""
        return await budgets_of_day(self._context, day, owners, teams)

    async def bills(self, run_id: str) -> list[HostedBill]:
        """Return the calls of a run with an unknown bill, which keep their holds, oldest first."""
        return await self._bills.unresolved(run_id)

    async def resolve_bill(
        self, run_id: str, call_id: str, *, cost_usd: Usd, by: str, tokens_in: int = 0, tokens_out: int = 0
    ) -> RunRecord:
        """Resolve an unresolved bill of an ended run at what the call really cost, which may be more than its hold.

        `by` is the person who resolves it, and is stored in the event `bill.resolved`. Raises BillNotFound, and
        Conflict if the run has not ended or the bill was resolved already.
        """
        checks.integer("tokens_in", tokens_in)
        checks.integer("tokens_out", tokens_out)
        actual = Amounts(to_nanos(cost_usd, "cost_usd"), tokens_in, tokens_out)
        return await self._bills.resolve(run_id, checks.text("call_id", call_id), actual, check_person(by))

    async def release_bill(self, run_id: str, call_id: str, *, by: str) -> RunRecord:
        """Release an unresolved bill of an ended run, whose call cost nothing; raises the errors of `resolve_bill`."""
        return await self._bills.resolve(run_id, checks.text("call_id", call_id), None, check_person(by))

    async def fork(
        self, run_id: str, *, owner: str, at: str, input: Any = UNSET, run_id_new: str | None = None
    ) -> RunRecord:
        """Add a new run that repeats node `at` and everything after it; `input` replaces the input of `at`."""
        new_id = checks.identifier("run_id_new", run_id_new or new_run_id())
        return await self._control.fork(run_id, checks.text("owner", owner, minimum=1), at, input, new_id)

    async def replay(self, run_id: str, *, owner: str) -> RunRecord:
        """Add a new run that replays the recorded results of another: it makes no calls and costs nothing."""
        return await self._control.replay(run_id, checks.text("owner", owner, minimum=1), new_run_id())

    def events(self, run_id: str, after: int = 0) -> AsyncGenerator[HostedEvent, None]:
        """Yield the stored events of a run after seq `after`, then new ones, up to the event that ends or parks it."""
        return self._reading.events(run_id, after)

    def run_logs(self) -> RunLogs:
        """Return a reader for one follower of a run: from memory while this host works on it, else from the stores."""
        return self._reading.logs()

    async def wait(self, run_id: str) -> RunRecord:
        """Wait until the run has ended, or is parked if this host is closed or not started; return the run."""
        return await self._reading.wait(run_id)

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str
    ) -> ApprovalRecord:
        """Answer an approval: approved, edited (with the `answer`) or rejected.

        Raises Conflict if it is no longer pending, ApprovalNotFound for an unknown id, and InvalidValue for an edited
        value that the node cannot use; the approval then stays pending.
        """
        if state == "edited":
            approval = await self.stores.approvals.get(approval_id)
            answer = answer if approval is None else as_edited(approval.expects, answer)
        try:
            approval = await self.stores.approvals.answer(
                approval_id, state, answer=answer, reason=reason, by=by, now_ms=self._context.now_ms()
            )
        except KeyError:
            raise ApprovalNotFound(approval_id) from None
        if failpoints.hook is not None:
            failpoints.hook("approval.answered")
        hosted = self._runs.by_id.get(approval.run_id)
        if hosted is not None:
            hosted.answered(approval)
        else:
            await self._nudge(approval.run_id, "answer")
        if approval.state == "withdrawn":
            raise Conflict(f"approval {approval_id!r} cannot be read, and was withdrawn: it cannot be answered")
        return approval

    async def engine_health(self) -> EngineHealth:
        """Return whether the engine of this host can be reached."""
        return await self._engine.health()

    def stats(self) -> dict[str, Any]:
        """Return the statistics of this host: current run counts, and totals since it was created."""
        waiting = self._runs.waiting
        return {
            "worker": self.worker,
            "running": len(self._runs.by_id) - waiting,
            "waiting": waiting,
            "queued": self._queued,
            "totals": dict(self._context.counted),
        }

    # Admission.

    def _queue(self, queue: str | None) -> str | None:
        if queue is not None and self._claims is not None:
            raise InvalidValue("queue", queue, "left out, because this host has no engine with queues")
        return self._engine.queue if queue is None else checks.text("queue", queue, minimum=1)

    def _limits(self, limits: RunLimits | Mapping[str, Any] | None) -> dict[str, Any]:
        if limits is None:
            return dict(self._default_limits)
        return _as_limits(limits).within(self.settings.ceilings).to_dict(self._usual_limits)

    async def _fork(
        self, run: RunRecord, journal: Sequence[JournalEntry] = (), *, not_compared: Collection[str] = ()
    ) -> RunRecord:
        """Add a run of a known graph version, with its initial journal."""
        run = run._replace(queue=self._engine.queue)
        return await self._add(_Submission(run, self._context.now_ms(), journal=journal, not_compared=not_compared))

    async def _add(self, submission: _Submission) -> RunRecord:
        """Add a run and start it if there is room; return the existing run if it is the same."""
        run_id, owner = submission.run.id, submission.run.owner
        claims = self._claims
        starts_here = claims is not None and claims.starts_here(owner)
        reserved = nullcontext() if claims is None else claims.reserved(owner, starts_here)
        with self._admission.place(owner) as check_room, reserved:
            try:
                admitted = await self.stores.transaction(
                    lambda stores: self._admit(stores, submission, check_room, starts_here),
                    inline=not submission.journal,
                )
            except (StoreUnavailable, asyncio.CancelledError):
                if claims is not None and starts_here:  # it may have been committed, and then this host has claimed it
                    claims.lost_sight_of(run_id)
                raise
        added, claimed = admitted.run, admitted.claimed
        note(run_id=run_id)
        if not admitted.is_new:
            if claims is not None:
                await claims.resolve(run_id)
            elif added.status == "queued":  # the response to its submission may have been lost before it was dispatched
                await self._dispatch(added)
            return added
        if failpoints.hook is not None:
            failpoints.hook("submit.added")
        self._context.counted["submitted"] += 1
        if claims is not None and claimed is not None:
            await claims.begin(claimed, is_new=True)
        elif admitted.cancel is not None and await self._control.end_unclaimed(added, admitted.cancel.reason):
            return await self._control.found(run_id)
        elif claims is not None:
            claims.added(run_id)
        else:
            await self._dispatch(added)
        return added

    async def _dispatch(self, run: RunRecord) -> RunRecord:
        """Have the engine dispatch a stored run; if it cannot now, the sweeper does so later."""
        try:
            await self._engine.dispatch(run)
        except EngineUnavailable as error:
            self._context.counted["engine_failures"] += 1
            logger.warning("run %s is queued, and dispatched later: %s", run.id, str(error))
        return run

    async def _nudge(self, run_id: str, why: Why) -> None:
        """Have the engine wake a run that waits in it."""
        if self._claims is not None:
            return
        try:
            run = await self.stores.runs.get(run_id)
            if run is not None and run.status not in CLAIMED:  # the worker of a claimed run looks for itself
                await self._engine.nudge(run, why)
        except EngineUnavailable as error:  # the sweeper finds what is stored
            self._context.counted["engine_failures"] += 1
            logger.warning("run %s learns of its %s later: %s", run_id, why, str(error))
        except (StoreUnavailable, StoreCorrupt):
            self._context.counted["store_failures"] += 1

    async def _admit(
        self, stores: TransactionStores, submission: _Submission, check_room: CheckRoom, starts_here: bool
    ) -> _Admitted:
        """Inside a transaction: add the run and its related data, and claim it if this host starts it immediately."""
        made = await self._made(stores, submission)
        added, is_new = await self._add_or_find(stores, made, submission)
        if not is_new:
            return _Admitted(added)
        waiting = await check_room(stores.runs)
        if submission.also is not None:
            await submission.also(stores)
        found = await stores.cancels.find({made.id: made.owner}, now_ms=submission.at_ms)
        cancel = found.get(made.id)
        if cancel is not None:
            await stores.cancels.put(replace(cancel, until_ms=UNTIL_ENDED))  # the run exists now
        elif self._claims is not None and starts_here and not waiting:
            claimed = await self._claims.claim(stores.runs, made.id)
            return _Admitted(added, is_new=True, claimed=claimed)
        await stores.events.append(made.id, 0, [HostedEvent(1, made.created_ms, "run.queued")])
        return _Admitted(added, is_new=True, cancel=cancel)

    async def _made(self, stores: TransactionStores, submission: _Submission) -> RunRecord:
        """Return the record to add; raise GraphNotFound, or GraphArchived unless the run exists already."""
        run = submission.run
        version = run.graph_version
        if submission.is_of_graph:
            head = await stores.graphs.head(run.graph_id, submission.version)
            if head is None:
                raise GraphNotFound(run.graph_id, submission.version)
            if head.is_archived and await stores.runs.get(run.id) is None:
                raise GraphArchived(run.graph_id)
            version = head.version
        return run._replace(graph_version=version, created_ms=submission.at_ms)

    async def _add_or_find(self, stores: TransactionStores, run: RunRecord, submission: _Submission) -> AddedRun:
        try:
            return await stores.runs.add(run, submission.journal)
        except RunIdConflict as error:
            not_compared = {*submission.not_compared} | (
                {"graph_version"} if submission.is_of_graph and submission.version is None else set()
            )
            differing = {*error.fields} - not_compared
            if not differing or (differing == {"limits"} and error.known.grants):
                return AddedRun(error.known, is_new=False)
            raise

    # The two tasks.

    async def _keep(self, turn: Callable[[], Awaitable[None]], every_s: float) -> None:
        while True:
            await self._context.guard(turn)
            await asyncio.sleep(every_s)

    async def _tick(self) -> None:
        if self._claims is not None:
            self._claims.wake()
        active = dict(self._runs.by_id)
        if not active:
            return
        now_ns = self._context.steady.time_ns()  # this clock includes suspends: after one, renew the leases at once
        if now_ns >= self._next_renew_ns:
            await self._renew(active)
            self._next_renew_ns = now_ns + round(self.settings.lease_s / 3 * NANOS_PER_S)
        owners = {run_id: hosted.run.owner for run_id, hosted in active.items()}
        requests = await self.stores.cancels.find(owners, now_ms=self._context.now_ms())
        for run_id, request in requests.items():
            active[run_id].cancel(request.reason)
        waiting = {id: hosted for hosted in active.values() for id in hosted.asks}
        if waiting:
            for id, approval in (await self.stores.approvals.answered(list(waiting))).items():
                waiting[id].answered(approval)
        for hosted in active.values():
            hosted.notice_idle()
        if self._claims is None and self._work is not None:
            self._work.park_idle()

    async def _renew(self, active: Mapping[str, HostedRun]) -> None:
        lease_ms = round(self.settings.lease_s * 1_000)
        mine = await self.stores.runs.renew(self.worker, list(active), now_ms=self._context.now_ms(), lease_ms=lease_ms)
        for run_id in active.keys() - set(mine):
            if active[run_id].decided is None:
                active[run_id].fence()

    async def _tidy(self) -> None:
        if self._claims is not None:
            await self._resume_parked()
        else:
            await self._sweep()
        if self.settings.day_blocks:
            await self._context.blocks.tidy()
        self._queued = await self.stores.runs.count(statuses=QUEUED)
        now_ns = self._context.clock.monotonic_ns()
        if now_ns >= self._next_remove_ns:
            self._next_remove_ns = now_ns + round(REMOVE_S * NANOS_PER_S)
            await remove_ended(self._context)
            if now_ns >= self._next_sweep_ns:
                await sweep_accounts(self._context)
                self._next_sweep_ns = now_ns + round(SWEEP_S * NANOS_PER_S)
            await self._control.prune_cancel_requests()

    async def _sweep(self) -> None:
        """Dispatch runs that are without work again."""
        for run in await self._sweeper.without_work():
            try:
                await self._engine.dispatch(run)
            except EngineUnavailable as error:
                self._context.counted["engine_failures"] += 1
                logger.warning("runs are dispatched later: %s", str(error))
                return

    async def _resume_parked(self) -> None:
        for run in await self.stores.runs.list(statuses=PARKED, limit=100):
            try:
                await self._dispatch(await self._control.resume(run.id, statuses=PARKED))
            except (Conflict, RunNotFound):
                continue  # another host resumed it first
            except StoreCorrupt as error:
                await self.stores.runs.fail_unreadable(run.id, error, now_ms=self._context.now_ms())


async def _stopped(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks, and wait until they have ended."""
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
