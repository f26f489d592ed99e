"""External control of runs: cancel, resume, grant, fork and replay.

A cancel request is stored first, so that it survives the host that received it. It is then applied where the run is: on
this host, in the queue, or, within a tick, on another worker. The result is that the run is cancelled, that it had
already ended, or, if no worker responded in time, only that the request is stored.

A cancel request for an existing run is valid until the run has ended. A host that finds the run ended drops the
requests that it had read before, and no others: those came before the end or too late for it, whereas a newer request
may be for a run that was resumed. Requests left behind by a host that died in between are dropped by a resume, and
periodically by any host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.hosting.durability import INHERITED, journal_without
from penstock.hosting.event_data import BILL_RELEASED, BILL_RESOLVED, ENDINGS, STATUS_OF, sanitize, spent
from penstock.hosting.forking import check_input, inputs_of, nodes_from, whole_input
from penstock.hosting.halts import grant_refusal
from penstock.hosting.host_context import HostContext, with_trace
from penstock.hosting.hosted_run import GraphVersionNotFound, HostedRun
from penstock.hosting.limits import RunLimits
from penstock.hosting.ports import (
    CLAIMED,
    ENDED,
    INTERACTIVE_ATTEMPTS,
    PARKED,
    UNTIL_ENDED,
    CancelRequest,
    Conflict,
    EventStore,
    Fenced,
    HostedEvent,
    RunRecord,
    RunStatus,
    RunStore,
    StoreCorrupt,
    StoreUnavailable,
    TransactionStores,
    retry_unavailable,
)
from penstock.ids import new_run_id
from penstock.runtime.durable import failpoints
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.watching.registry import CancelResult
from penstock.stops import StopReason

POLL_INTERVAL_S = 0.05
"""Interval between checks whether another worker has stopped a run."""
MAX_ATTEMPTS = 60
MAX_REQUESTER = 200


class RunNotFound(PenstockError):
    """No run has this id."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"there is no run {run_id!r}: it was never submitted, or it ended long ago and was removed")


class ApprovalNotFound(PenstockError):
    """No approval has this id."""

    def __init__(self, approval_id: str) -> None:
        self.approval_id = approval_id
        super().__init__(f"there is no approval {approval_id!r}: it was never requested, or was removed with its run")


class _AlreadyResumed(Conflict):
    """The run to resume was already resumed by another request."""

    def __init__(self, run: RunRecord, by: HostedEvent | None) -> None:
        ahead = "another request has resumed it"
        if by is not None and by.type == "run.granted":
            ahead = f"{by.data.get('by')!r} has granted it more"
        super().__init__(
            f"run {run.id!r} has already continued: {ahead} a moment before, and this grant does not count; "
            "if it is halted again, grant it more then"
        )


class Unset(Enum):
    """Marks an argument that was not given, where None is a valid value."""

    UNSET = "unset"


UNSET = Unset.UNSET
RESUMABLE: frozenset[RunStatus] = (ENDED | PARKED) - {"completed"}


class Submit(Protocol):
    """Adds a run; an existing run counts as the same even if it differs in the `not_compared` fields."""

    async def __call__(
        self, run: RunRecord, journal: Sequence[JournalEntry] = (), *, not_compared: Collection[str] = ()
    ) -> RunRecord: ...


class Control:
    """Controls the runs in one host's stores."""

    def __init__(self, context: HostContext, active: Mapping[str, HostedRun], submit: Submit) -> None:
        self._context = context
        self._active = active
        self._submit = submit

    # Cancel.

    async def cancel(self, run_id: str, reason: str, by: str, owner: str | None) -> CancelResult:
        """Cancel a run on any host, or store the request for later; with an `owner`, only a run of that owner."""
        context, cancels = self._context, self._context.stores.cancels
        now_ms = context.now_ms()
        until_ms = now_ms + round(context.settings.early_cancel_s * 1_000)
        request = CancelRequest(run_id, sanitize(reason), sanitize(by)[:MAX_REQUESTER], now_ms, until_ms, owner or "")
        try:
            run = await context.stores.runs.get(run_id)
            if run is not None and _is_meant(owner, run):
                if run.status in ENDED:
                    return CancelResult.ENDED
                request = replace(request, until_ms=UNTIL_ENDED)
            before = await cancels.find({run_id: request.owner if run is None else run.owner}, now_ms=now_ms)
            kept = await cancels.put(request)
            if failpoints.hook is not None:
                failpoints.hook("cancel.kept")
            done = CancelResult.ALREADY_CANCELLED if before else CancelResult.CANCELLED
            return await self._apply(request, kept, owner, done)
        except StoreUnavailable:
            hosted = self._active.get(run_id)
            if hosted is None or hosted.is_fenced or not _is_meant(owner, hosted.run):
                raise
            return hosted.cancel(reason)

    async def _apply(
        self, request: CancelRequest, kept: CancelRequest, owner: str | None, done: CancelResult
    ) -> CancelResult:
        """Cancel a run that had not ended when the request came; return `done` if that ends it, else another result."""
        run_id, runs = request.run_id, self._context.stores.runs
        for _ in range(MAX_ATTEMPTS):
            run = await runs.get(run_id)
            if run is None or not _is_meant(owner, run):
                return CancelResult.REMEMBERED
            if run.status in ENDED:
                return await self._over(run.status, kept, done)
            hosted = self._active.get(run_id)
            if hosted is not None and _answers_for(hosted, run):
                hosted.cancel(request.reason)
                if kept.until_ms != UNTIL_ENDED:  # stored before the run existed; this host may die first
                    await self._store_for(run, request)
                return done
            if run.status not in CLAIMED and await self.end_unclaimed(run, request.reason):
                return done
            kept = await self._store_for(run, request)
            await asyncio.sleep(POLL_INTERVAL_S)
        last = await self._last(run_id)
        status = None if last is None else STATUS_OF.get(last.type)
        if status in ENDED:  # the worker that has it, or takes it over, only has to close it
            return await self._over(status, kept, done)
        return CancelResult.REMEMBERED  # its worker, or the next one, finds the request if it is not too late

    async def _over(self, status: RunStatus, kept: CancelRequest, done: CancelResult) -> CancelResult:
        """Drop the cancel request for a run that ends with `status`; return the result to report."""
        await self._context.stores.cancels.drop(kept.run_id, [kept])
        return done if status == "cancelled" else CancelResult.ENDED

    async def _store_for(self, run: RunRecord, request: CancelRequest) -> CancelRequest:
        """Return the cancel request that will stop this existing run: stored again if it was dropped for an earlier
        end, and made valid until the end if it was stored before the run existed."""
        cancels = self._context.stores.cancels
        found = (await cancels.find({run.id: run.owner}, now_ms=self._context.now_ms())).get(run.id)
        if found is not None and found.until_ms == UNTIL_ENDED:
            return found
        return await cancels.put(replace(request, until_ms=UNTIL_ENDED))

    async def prune_cancel_requests(self) -> None:
        """Drop cancel requests for ended or removed runs, left by hosts that did not get to drop them."""
        cancels, runs = self._context.stores.cancels, self._context.stores.runs
        for request in await cancels.lasting():
            with suppress(StoreCorrupt):  # a run that cannot be read keeps its requests, and the others go on
                run = await runs.get(request.run_id)
                if run is None or run.status in ENDED:
                    await cancels.drop(request.run_id, [request])

    async def end_unclaimed(self, run: RunRecord, reason: str) -> bool:
        """Cancel an unclaimed run; return False if a worker has claimed it, which then finds the cancel request."""
        context, now_ms = self._context, self._context.now_ms()
        changes: dict[str, Any] = {"stop_reason": str(StopReason.ABORTED), "error": sanitize(reason)}
        left = run._replace(status="cancelled", ended_ms=now_ms, **changes)
        handler = context.handler_of(run)
        data = {"reason": sanitize(reason), "cause": "user", **spent(run)}

        async def unit(stores: TransactionStores) -> None:
            last = await _last_event(stores.events, run.id)
            if last is None or last.type != ENDINGS["cancelled"]:  # version 0.1 stored the event before the status
                await append_event(stores, run, last, ENDINGS["cancelled"], data, now_ms)
            if handler is not None:
                await handler.on_end(left, stores)
            await stores.approvals.withdraw(run.id, run.epoch, now_ms=now_ms)
            await stores.runs.end(run.id, "cancelled", now_ms=now_ms, **changes)
            await stores.cancels.drop(run.id)

        try:
            await retry_unavailable(lambda: context.stores.transaction(unit, inline=True), INTERACTIVE_ATTEMPTS)
        except (Conflict, Fenced):
            return False
        if failpoints.hook is not None:
            failpoints.hook("cancel.committed")
        context.count_left(run, left)
        return True

    # Resume and grant.

    async def resume(self, run_id: str, *, statuses: Collection[RunStatus] = RESUMABLE) -> RunRecord:
        """Resume a parked, halted, cancelled or failed run from its journal."""
        requests = await self._context.stores.cancels.of(run_id)
        run = await self.found(run_id)
        if run.status not in statuses:
            raise Conflict(f"run {run.id!r} is {run.status}: there is nothing to resume")
        if run.status in ENDED:  # a parked run skips the check: it has to reach an end, whichever
            await self._context.check_resume(run)
        return await self._resume_with(run, requests, "run.queued", {})

    async def grant(self, run_id: str, more: RunLimits, by: str, within: RunLimits) -> RunRecord:
        """Raise the limits of a halted run by `more` and resume it; Conflict if the grant is not applied.

        Of several concurrent grants only one is applied: each halt is granted more once. A grant that does not raise
        the limit that halted the run is refused: the run would halt at the same place.
        """
        requests = await self._context.stores.cancels.of(run_id)
        run = await self.found(run_id)
        if run.status != "halted":
            raise Conflict(f"run {run_id!r} is {run.status}: only a run halted by a limit can be granted more")
        refusal = None if run.halt is None else grant_refusal(run, run.halt, more)
        if refusal is not None:
            raise Conflict(refusal)
        await self._context.check_resume(run)
        limits = RunLimits.from_dict(run.limits).plus(more).within(within).to_dict()
        grant = {"limits": limits, "by": sanitize(by), "grant_id": new_run_id()}
        return await self._resume_with(run, requests, "run.granted", grant)

    async def _resume_with(
        self, run: RunRecord, requests: Sequence[CancelRequest], event: str, data: Mapping[str, Any]
    ) -> RunRecord:
        """Resume a run: append the event and queue the run, in one transaction.

        Raises Conflict if another request has resumed it already. `requests` are the cancel requests that were read
        before the run was; if the run had ended, they are void.
        """

        last = await self._last(run.id)
        seq = 0 if last is None else last.seq

        async def unit(stores: TransactionStores) -> RunRecord:
            new = await stores.events.read(run.id, seq)
            behind = [event for event in new if event.type not in (BILL_RESOLVED, BILL_RELEASED)]
            if behind:  # resumed, by this request if its response was lost, or by another one
                now = await found(stores.runs, run.id)
                if data.get("grant_id") == behind[0].data.get("grant_id") or not data:
                    return now
                raise _AlreadyResumed(now, behind[0])
            newest = new[-1] if new else last
            await append_event(stores, run, newest, event, data, self._context.now_ms())  # the run is locked from here
            now = await found(stores.runs, run.id)
            if now.status != run.status:
                raise _AlreadyResumed(now, last)
            if requests and run.status in ENDED:  # a cancel request for a parked run still applies
                await stores.cancels.drop(run.id, requests)
            return await stores.runs.requeue(run.id, run.epoch, limits=data.get("limits"), was=run.status)

        try:
            queued = await self._transact(unit)
        except Fenced:
            raise Conflict(f"run {run.id!r} has already continued: another request was a moment ahead") from None
        except KeyError:  # it ended long ago, and has just been removed
            raise RunNotFound(run.id) from None
        if failpoints.hook is not None:
            failpoints.hook("grant.committed")
        return queued

    async def _transact(self, unit: Callable[[Any], Coroutine[Any, Any, RunRecord]]) -> RunRecord:
        """Run the unit; run it a second time if a conflicting transaction was committed meanwhile."""
        transaction = self._context.stores.transaction

        async def once() -> RunRecord:
            return await retry_unavailable(lambda: transaction(unit, inline=True), INTERACTIVE_ATTEMPTS)

        try:
            return await once()
        except _AlreadyResumed:
            raise
        except Conflict:
            return await once()

    # Fork and replay.

    async def fork(self, run_id: str, owner: str, at: str, input: Any, new_id: str) -> RunRecord:
        """Add a new run that inherits the old run's results before node `at` and executes the rest itself.

        It gets the limits of the old run, up to the host's ceilings: an admin's grant beyond them is not copied.
        """
        run = await self.found(run_id)
        record = await self._context.stores.graphs.get(run.graph_id, run.graph_version)
        if record is None:
            raise GraphVersionNotFound(run.graph_id, run.graph_version)
        graph = (await self._context.parsed(record)).graph
        again = nodes_from(graph, at)
        origin = {"kind": "fork", "run_id": run_id, "at": at, "of": _first_origin(run)}
        if input is not UNSET:
            check_input(graph, at, input)
            origin["input"] = whole_input(graph, at, input, inputs_of(run))
        behind = again - {at}  # nodes after `at` get new inputs
        origin |= _inputs({node: one for node, one in inputs_of(run).items() if node not in behind})
        limits = RunLimits.from_dict(run.limits).clipped(self._context.settings.ceilings)
        # The caller did not request these limits: a grant to the old run since then does not make this another fork.
        original = run._replace(limits=limits.to_dict())
        return await self._again(original, owner, new_id, origin, again, not_compared=("limits",))

    async def replay(self, run_id: str, owner: str, new_id: str) -> RunRecord:
        """Add a new run that replays the old one from its journal alone: it makes no calls and charges nothing."""
        run = await self.found(run_id)
        origin = {"kind": "replay", "run_id": run_id, "of": _first_origin(run), **_inputs(inputs_of(run))}
        return await self._again(run, owner, new_id, origin, frozenset())

    async def _again(
        self,
        run: RunRecord,
        owner: str,
        new_id: str,
        origin: Mapping[str, Any],
        without: Collection[str],
        not_compared: Collection[str] = (),
    ) -> RunRecord:
        """Add a run with the journal of another, in one step: the id cannot be taken by another run in between."""
        await self._context.check_resume(run)
        journal = await journal_without(self._context, run.id, without)
        await self.found(run.id)  # if it was removed meanwhile, the journal read may be incomplete
        if failpoints.hook is not None:
            failpoints.hook("fork.read")
        origin = with_trace({**origin, "about": {INHERITED: len(journal)}})
        new_run = RunRecord(new_id, owner, run.graph_id, run.graph_version, run.input, run.limits, origin)
        fork = await self._submit(new_run, journal, not_compared=not_compared)
        if failpoints.hook is not None:
            failpoints.hook("fork.added")
        return fork

    # Helpers.

    async def found(self, run_id: str) -> RunRecord:
        """Return the run; raise RunNotFound if it does not exist."""
        return await found(self._context.stores.runs, run_id)

    async def _last(self, run_id: str) -> HostedEvent | None:
        """Return the newest event of a run, or None."""
        return await retry_unavailable(lambda: _last_event(self._context.stores.events, run_id), INTERACTIVE_ATTEMPTS)


async def append_event(
    stores: TransactionStores,
    run: RunRecord,
    last: HostedEvent | None,
    event: str,
    data: Mapping[str, Any],
    now_ms: int,
) -> HostedEvent:
    """Append an event of an unclaimed run after `last`; Conflict if `last` is no longer its last event."""
    seq = 0 if last is None else last.seq
    new = [] if seq else [HostedEvent(1, run.created_ms, "run.queued")]
    new.append(HostedEvent(len(new) + seq + 1, now_ms, event, data))
    await stores.events.append(run.id, run.epoch, new)
    return new[-1]


async def found(runs: RunStore, run_id: str) -> RunRecord:
    """Return the run; raise RunNotFound if it does not exist."""
    run = await runs.get(run_id)
    if run is None:
        raise RunNotFound(run_id)
    return run


async def _last_event(events: EventStore, run_id: str) -> HostedEvent | None:
    seq = await events.last_seq(run_id)
    newest = await events.read(run_id, seq - 1, 1) if seq else ()
    return newest[-1] if newest else None


def _is_meant(owner: str | None, run: RunRecord) -> bool:
    """Whether a cancel request restricted to `owner` applies to this run; None applies to any run."""
    return owner is None or owner == run.owner


def _answers_for(hosted: HostedRun, run: RunRecord) -> bool:
    """Whether this host can stop the run: no other host has claimed it since, and its final status is undecided."""
    has_looked = hosted.log is not None  # until then, a stored final event may already determine the status
    return hosted.run.epoch == run.epoch and has_looked and hosted.decided is None and not hosted.is_fenced


def _first_origin(run: RunRecord) -> dict[str, Any]:
    """Return the origin of the run at the start of a chain of forks."""
    return dict(run.origin.get("of", run.origin))


def _inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the replaced node inputs that a fork or replay inherits, as an entry of its origin."""
    return {"inputs": dict(given)} if given else {}
