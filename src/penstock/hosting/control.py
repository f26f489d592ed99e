"""What people do to a run from outside: stop it, let it go on, grant it more, take it up elsewhere.

A cancel is written down before anything else, so that it survives whoever took it. Then it strikes where the run is:
here, in the queue, or, within a tick, on another worker. The run ends cancelled, or whoever asked is told that it was
over; or, if nobody has answered for the run in time, that the wish is kept, and no more than that.

A wish for a run that is there counts until the run has ended, and is void then. Whoever finds that the run has ended
drops the wishes that they had seen before they found it, and no others: those came before the end, or too late for it,
and one that was put since may be for a run that goes on. What is left by who died in between is dropped by a resume,
and by any host from time to time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.hosting.limits import RunLimits
from penstock.hosting.points import passing
from penstock.hosting.ports import Conflict, Fenced, StoreUnavailable
from penstock.hosting.records import (
    CLAIMED,
    ENDED,
    PARKED,
    UNTIL_ENDED,
    CancelIntent,
    HostedEvent,
    RunRecord,
    RunStatus,
)
from penstock.hosting.work.durable import INHERITED, journal_without
from penstock.hosting.work.execution import GraphGone, HostedRun
from penstock.hosting.work.forking import check_input, inputs_of, nodes_from, whole_input
from penstock.hosting.work.halts import halt_of, why_no_grant
from penstock.hosting.work.patience import A_FEW, patiently
from penstock.hosting.work.told import ENDINGS, STATUS_OF, clean, spent
from penstock.hosting.work.workplace import Workplace
from penstock.ids import new_run_id
from penstock.runtime.durable.ports import JournalEntry
from penstock.runtime.watching.registry import CancelResult
from penstock.stops import StopReason

LOOK_S = 0.05
"""How often it is looked whether another worker has stopped a run."""
LOOKS = 60
MAX_BY = 200
GOES_ON = ("run.queued", "run.granted")
"""What is said of a run that goes on after its end."""


class UnknownRun(PenstockError):
    """There is no run of that id."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(f"there is no run {run_id!r}: it was never submitted, or it ended long ago and was removed")


class UnknownApproval(PenstockError):
    """There is no question of that id."""

    def __init__(self, approval_id: str) -> None:
        self.approval_id = approval_id
        super().__init__(f"there is no approval {approval_id!r}: it was never asked for, or went with its run")


class Unset(Enum):
    """What was not given, where None is a value."""

    UNSET = "unset"


UNSET = Unset.UNSET
RESUMABLE: frozenset[RunStatus] = (ENDED | PARKED) - {"completed"}


class Submit(Protocol):
    """How a run is taken on; one that is there is the same also if it differs in what is `unasked`."""

    async def __call__(
        self, run: RunRecord, journal: Sequence[JournalEntry] = (), *, unasked: Collection[str] = ()
    ) -> RunRecord: ...


class Control:
    """The controls of the runs of one host's stores."""

    def __init__(self, at: Workplace, here: Mapping[str, HostedRun], submit: Submit, wake: Callable[[], None]) -> None:
        self._at = at
        self._here = here
        self._submit = submit
        self._wake = wake

    # Cancel.

    async def cancel(self, run_id: str, reason: str, by: str, owner: str | None) -> CancelResult:
        """Stop a run, wherever it is, or remember to; with an `owner`, only one of theirs."""
        at, cancels = self._at, self._at.stores.cancels
        now_ms = at.now_ms()
        until_ms = now_ms + round(at.settings.early_cancel_s * 1_000)
        intent = CancelIntent(run_id, clean(reason), clean(by)[:MAX_BY], now_ms, until_ms, owner or "")
        try:
            run = await at.stores.runs.get(run_id)
            if run is not None and _is_meant(owner, run):
                if run.status in ENDED:
                    return CancelResult.ENDED
                intent = replace(intent, until_ms=UNTIL_ENDED)
            before = await cancels.find({run_id: intent.owner if run is None else run.owner}, now_ms=now_ms)
            kept = await cancels.put(intent)
            passing("cancel.kept")
            done = CancelResult.ALREADY_CANCELLED if before else CancelResult.CANCELLED
            return await self._strike(intent, kept, owner, done)
        except StoreUnavailable:
            hosted = self._here.get(run_id)
            if hosted is None or hosted.is_lost or not _is_meant(owner, hosted.run):
                raise
            return hosted.cancel(reason)

    async def _strike(
        self, intent: CancelIntent, kept: CancelIntent, owner: str | None, done: CancelResult
    ) -> CancelResult:
        """Stop a run that had not ended when the intent came: `done` if it ends by that, or what else is true."""
        run_id, runs = intent.run_id, self._at.stores.runs
        for _ in range(LOOKS):
            run = await runs.get(run_id)
            if run is None or not _is_meant(owner, run):
                return CancelResult.REMEMBERED
            if run.status in ENDED:
                return await self._over(run.status, kept, done)
            hosted = self._here.get(run_id)
            if hosted is not None and _answers_for(hosted, run):
                hosted.cancel(intent.reason)
                if kept.until_ms != UNTIL_ENDED:  # it was put ahead; this host may die before the run has ended
                    await self._kept_for(run, intent)
                return done
            if run.status not in CLAIMED and await self.end_unclaimed(run, intent.reason):
                return done
            kept = await self._kept_for(run, intent)
            await asyncio.sleep(LOOK_S)
        last = await self._last(run_id)
        told = None if last is None else STATUS_OF.get(last.type)
        if told in ENDED:  # whoever has it, or takes it over, only has to close it
            return await self._over(told, kept, done)
        return CancelResult.REMEMBERED  # whoever takes it over finds the wish, and its worker, if it is not too late

    async def _over(self, status: RunStatus, kept: CancelIntent, done: CancelResult) -> CancelResult:
        """Drop the wish for a run that ends so; what is true of it."""
        await self._at.stores.cancels.drop(kept.run_id, [kept])
        return done if status == "cancelled" else CancelResult.ENDED

    async def _kept_for(self, run: RunRecord, intent: CancelIntent) -> CancelIntent:
        """The wish that a run which is there will be stopped by: put anew if it was dropped as one for an end before,
        and as one that counts until the end if it was put ahead."""
        cancels = self._at.stores.cancels
        found = (await cancels.find({run.id: run.owner}, now_ms=self._at.now_ms())).get(run.id)
        if found is not None and found.until_ms == UNTIL_ENDED:
            return found
        return await cancels.put(replace(intent, until_ms=UNTIL_ENDED))

    async def forget_wishes(self) -> None:
        """Drop what is wished for runs that have ended, or are gone: whoever wished it did not come to that."""
        cancels, runs = self._at.stores.cancels, self._at.stores.runs
        for intent in await cancels.lasting():
            run = await runs.get(intent.run_id)
            if run is None or run.status in ENDED:
                await cancels.drop(intent.run_id, [intent])

    async def end_unclaimed(self, run: RunRecord, reason: str) -> bool:
        """End a run that no worker has; False if one has it by now, and then that one finds the cancel.

        The event comes first, as it does everywhere: a worker that claims the run in between finds it, and closes it.
        """
        at, now_ms = self._at, self._at.now_ms()
        wishes = await at.stores.cancels.of(run.id)
        changes: dict[str, Any] = {"stop_reason": str(StopReason.ABORTED), "error": clean(reason)}
        left = run._replace(status="cancelled", ended_ms=now_ms, **changes)
        kind = at.kind_of(run)
        if kind is not None:
            await kind.ended(left)
        try:
            data = {"reason": clean(reason), "cause": "user", **spent(run)}
            last = await self._last(run.id)
            if last is None or last.type != ENDINGS["cancelled"]:  # else whoever told it died before it was so
                await self._tell(run, last, ENDINGS["cancelled"], data)
            passing("cancel.told")
            await patiently(lambda: at.stores.approvals.withdraw(run.id, run.epoch, now_ms=now_ms), A_FEW)
            await patiently(lambda: at.stores.runs.end(run.id, "cancelled", now_ms=now_ms, **changes), A_FEW)
        except (Conflict, Fenced):
            return False
        await at.stores.cancels.drop(run.id, wishes)
        at.count_left(run, left)
        return True

    # Going on.

    async def resume(self, run_id: str, *, statuses: Collection[RunStatus] = RESUMABLE) -> RunRecord:
        """Let a run that was parked, halted or cancelled, or that failed, go on from its journal."""
        wishes = await self._at.stores.cancels.of(run_id)
        run = await self.found(run_id)
        if run.status not in statuses:
            raise Conflict(f"run {run.id!r} is {run.status}: there is nothing to resume")
        if run.status in ENDED:  # one that is parked comes to its end, whatever that is
            await self._at.check_again(run)
        queued, _ = await self._go_on(run, wishes, "run.queued", {})
        return queued

    async def grant(self, run_id: str, more: RunLimits, by: str, within: RunLimits) -> RunRecord:
        """Raise the ceilings of a run that was halted by `more`, and let it go on; Conflict if that does not count.

        Of several that come at the same moment one counts: what was halted once is granted more once. One that gives
        nothing of what has halted the run is refused: it would halt at the same place.
        """
        wishes = await self._at.stores.cancels.of(run_id)
        run = await self.found(run_id)
        if run.status != "halted":
            raise Conflict(f"run {run_id!r} is {run.status}: only a run that a limit has halted is granted more")
        halt = halt_of(await self._last(run.id))
        refusal = None if halt is None else why_no_grant(run, halt, more)
        if refusal is not None:
            raise Conflict(refusal)
        await self._at.check_again(run)
        limits = RunLimits.from_dict(run.limits).plus(more).within(within).to_dict()
        grant = {"limits": limits, "by": clean(by), "grant_id": new_run_id()}
        queued, told = await self._go_on(run, wishes, "run.granted", grant)
        if told.data.get("grant_id") != grant["grant_id"]:
            raise _not_counted(run, told)
        return queued

    async def _go_on(
        self, run: RunRecord, wishes: Sequence[CancelIntent], event: str, data: Mapping[str, Any]
    ) -> tuple[RunRecord, HostedEvent]:
        """Let a run go on by the first thing that was said after its end; the run, and what that was.

        The event comes before the status, or a worker would close what it finds ended. Whoever is second, or comes
        after somebody who died in between, says nothing and does the rest for the first. The `wishes` to stop it are
        those that were seen before the run was: if it had ended, they are void.
        """
        runs, cancels = self._at.stores.runs, self._at.stores.cancels
        try:
            told = await self._first_to_say(run, event, data)
        except Fenced:
            raise Conflict(f"run {run.id!r} goes on already: somebody else was a moment ahead") from None
        passing("grant.told")
        if wishes and run.status in ENDED:  # a cancel of a run that is parked is still to be done
            await patiently(lambda: cancels.drop(run.id, wishes), A_FEW)
        try:
            limits = told.data.get("limits")
            queued = await patiently(
                lambda: runs.requeue(run.id, run.epoch, limits=limits, was=run.status), A_FEW
            )  # a cancel in between, of a run that was parked, stands
        except Fenced:  # it went on by what was told, and was claimed since
            queued = await self.found(run.id)
        except KeyError:  # it ended long ago, and was removed just now
            raise UnknownRun(run.id) from None
        passing("grant.requeued")
        self._wake()
        return queued, told

    async def _first_to_say(self, run: RunRecord, event: str, data: Mapping[str, Any]) -> HostedEvent:
        """What was said first after the end of a run: this, or what somebody else has said."""
        last = await self._last(run.id)
        if run.status in PARKED and last is not None and STATUS_OF.get(last.type) in ENDED:
            # Whoever ends it has told so, and has not come to the status; if they died, nobody else would.
            await self.end_unclaimed(run, str(last.data.get("reason", "")))
            raise Conflict(f"run {run.id!r} was cancelled a moment ago; resume it if it is to go on")
        if not _goes_on(last):
            try:
                return await self._tell(run, last, event, data)
            except Conflict:
                last = await self._last(run.id)
                if not _goes_on(last):
                    raise
        assert last is not None
        return last

    # Taking it up elsewhere.

    async def fork(self, run_id: str, owner: str, at: str, input: Any, new_id: str) -> RunRecord:
        """A new run that has what the old one did before `at`, and does the rest itself.

        It may use what that one might, up to the ceilings: what an admin has granted one run is not everyone's to copy.
        """
        run = await self.found(run_id)
        record = await self._at.stores.graphs.get(run.graph_id, run.graph_version)
        if record is None:
            raise GraphGone(run.graph_id, run.graph_version)
        graph = (await self._at.parsed(record)).graph
        again = nodes_from(graph, at)
        origin = {"kind": "fork", "run_id": run_id, "at": at, "of": _first_origin(run)}
        if input is not UNSET:
            check_input(graph, at, input)
            origin["input"] = whole_input(graph, at, input, inputs_of(run))
        behind = again - {at}  # they get what comes now
        origin |= _inputs({node: one for node, one in inputs_of(run).items() if node not in behind})
        limits = RunLimits.from_dict(run.limits).clipped(self._at.settings.ceilings)
        # Nobody has asked for these limits: what the old run was granted since makes it no other fork.
        asked_of = run._replace(limits=limits.to_dict())
        return await self._again(asked_of, owner, new_id, origin, again, unasked=("limits",))

    async def replay(self, run_id: str, owner: str, new_id: str) -> RunRecord:
        """A new run that goes the way of the old one by its journal alone: nothing is called, nothing is charged."""
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
        unasked: Collection[str] = (),
    ) -> RunRecord:
        """A run with the journal of another, which it has from the moment it is there: nobody else can have the id."""
        await self._at.check_again(run)
        journal = await journal_without(self._at, run.id, without)
        await self.found(run.id)  # else it was removed, and what was read of it may not be all
        passing("fork.read")
        origin = {**origin, "about": {INHERITED: len(journal)}}
        asked = RunRecord(new_id, owner, run.graph_id, run.graph_version, run.input, run.limits, origin)
        fork = await self._submit(asked, journal, unasked=unasked)
        passing("fork.added")
        return fork

    # Inside.

    async def found(self, run_id: str) -> RunRecord:
        """The run; UnknownRun if there is none."""
        run = await self._at.stores.runs.get(run_id)
        if run is None:
            raise UnknownRun(run_id)
        return run

    async def _last(self, run_id: str) -> HostedEvent | None:
        """The newest event of a run."""
        events = self._at.stores.events
        seq = await patiently(lambda: events.last_seq(run_id), A_FEW)
        newest = await patiently(lambda: events.read(run_id, seq - 1, 1), A_FEW) if seq else ()
        return newest[-1] if newest else None

    async def _tell(self, run: RunRecord, last: HostedEvent | None, event: str, data: Mapping[str, Any]) -> HostedEvent:
        """Write an event of a run that no worker has behind its last one; Conflict if that is the last no more."""
        seq = 0 if last is None else last.seq
        told = [] if seq else [HostedEvent(1, run.created_ms, "run.queued")]  # whoever was to tell it never came to it
        told.append(HostedEvent(len(told) + seq + 1, self._at.now_ms(), event, data))
        await patiently(lambda: self._at.stores.events.append(run.id, run.epoch, told), A_FEW)
        return told[-1]


def _is_meant(owner: str | None, run: RunRecord) -> bool:
    """Whether a cancel of that owner's run is one of this run."""
    return owner is None or owner == run.owner


def _answers_for(hosted: HostedRun, run: RunRecord) -> bool:
    """Whether the run is this host's to stop: no other has claimed it since, and what it ends as is open."""
    has_looked = hosted.log is not None  # what was told of its end before, it is held to
    return hosted.run.epoch == run.epoch and has_looked and hosted.decided is None and not hosted.is_lost


def _goes_on(last: HostedEvent | None) -> bool:
    """Whether somebody has said that a run goes on, and it is not so yet, or was not when it was looked at."""
    return last is not None and last.type in GOES_ON and last.seq > 1


def _not_counted(run: RunRecord, told: HostedEvent) -> Conflict:
    ahead = f"{told.data.get('by')!r} has granted it more" if told.type == "run.granted" else "somebody has resumed it"
    return Conflict(
        f"run {run.id!r} goes on already: {ahead} a moment before, and this grant does not count; "
        "if it is halted again, grant it more then"
    )


def _first_origin(run: RunRecord) -> dict[str, Any]:
    """Where a run comes from, over however many forks."""
    return dict(run.origin.get("of", run.origin))


def _inputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a run that takes up another was given there already, as its origin has it."""
    return {"inputs": dict(given)} if given else {}
