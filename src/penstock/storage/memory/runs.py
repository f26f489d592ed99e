"""Runs in memory: who has which, and where each may go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import AnotherRun, Conflict, Fenced
from penstock.hosting.records import CLAIMED, ENDED, TRANSITIONS, RunRecord, RunStatus
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.memory.shapes import Shape, is_same
from penstock.storage.sql import codec

RUN = Shape(
    RunRecord,
    names=("id", "owner", "graph_id", "worker", "stop_reason"),
    texts=("error",),
    numbers=(
        *("graph_version", "created_ms", "started_ms", "ended_ms", "lease_until_ms", "epoch"),
        *("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs"),
    ),
    documents=("input", "limits", "origin", "output"),
    objects=("limits", "origin"),
    optional=("worker", "stop_reason", "error", "started_ms", "ended_ms"),
    choices={"status": TRANSITIONS},
)

ASKED = ("owner", "graph_id", "graph_version", "input", "limits", "origin")
"""What makes a run another run."""
CHANGEABLE = (
    *("status", "limits", "started_ms", "ended_ms", "stop_reason", "error", "output"),
    *("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs"),
)
"""What a worker may change; who has a run changes by claims alone."""
CLEARED: Mapping[str, Any] = {"ended_ms": None, "stop_reason": None, "error": None, "output": None}
"""What a run that goes on has not come to yet."""
GIVEN_BACK: Mapping[str, Any] = {"worker": None, "lease_until_ms": 0}


CLAIMABLE: frozenset[RunStatus] = CLAIMED | {"queued"}


class MemoryRunStore:
    """Runs by id; what they left elsewhere goes with them."""

    def __init__(self) -> None:
        self._runs: dict[str, RunRecord] = {}
        self._by_status: dict[RunStatus, dict[str, RunRecord]] = {status: {} for status in TRANSITIONS}
        """The same runs: most have ended, and those that look for work need not go through them."""
        self._forgetting: list[Callable[[str], None]] = []
        self._beginning: list[Callable[[str, Sequence[JournalEntry]], None]] = []

    def on_forget(self, forget: Callable[[str], None]) -> None:
        """Have `forget(run_id)` called for every run that is removed."""
        self._forgetting.append(forget)

    def on_begin(self, begin: Callable[[str, Sequence[JournalEntry]], None]) -> None:
        """Have `begin(run_id, entries)` called for every run that comes with a journal, just before it is there."""
        self._beginning.append(begin)

    def chats(self, statuses: Collection[RunStatus] = ()) -> set[str]:
        """The chats that have runs in one of these statuses, or in any."""
        return {str(RUN.given(run).chat_id) for run in self._matching(None, statuses)}

    def fence(self, run_id: str, epoch: int) -> None:
        """Fenced unless this is the newest claim; a run that is not there was claimed 0 times."""
        run = self._runs.get(run_id)
        if epoch != (0 if run is None else run.epoch):
            raise Fenced(run_id, epoch)

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> RunRecord:
        kept = RUN.kept(run)
        known = self._runs.get(run.id)
        if known is None:
            for begin in self._beginning if journal else ():
                begin(run.id, journal)
            return self._keep(kept)
        before = RUN.given(known)
        check_same(before, run)
        return before

    async def get(self, run_id: str) -> RunRecord | None:
        run = self._runs.get(run_id)
        return None if run is None else RUN.given(run)

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[RunRecord]:
        codec.limit(limit)
        listed = (
            run
            for run in sorted(self._matching(owner, statuses), key=_age, reverse=True)
            if (graph_id is None or run.graph_id == graph_id)
            and (chat_id is None or RUN.given(run).chat_id == chat_id)
            and self._is_before(run, before)
        )
        return [RUN.given(run) for run in islice(listed, limit)]

    async def count(self, *, owner: str | None = None, statuses: Collection[RunStatus] = ()) -> int:
        return len(self._matching(owner, statuses))

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        codec.name("worker", worker)
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        asked = self._in(CLAIMABLE) if run_id is None else filter(None, [self._runs.get(run_id)])
        free = min((run for run in asked if _is_free(run, now_ms)), key=_age, default=None)
        if free is None:
            return None
        started_ms = now_ms if free.started_ms is None else free.started_ms
        return self._keep(
            free._replace(
                status="running",
                worker=worker,
                lease_until_ms=until_ms,
                epoch=free.epoch + 1,
                started_ms=started_ms,
            )
        )

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        mine = [run for id in {*run_ids} if (run := self._runs.get(id)) and run.worker == worker]
        for run in mine:
            self._put(RUN.changed(run, {"lease_until_ms": max(until_ms, run.lease_until_ms)}))
        return {run.id for run in mine}

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise Fenced(run_id, epoch)
        if run.status not in CLAIMED:
            return self._as_asked(run, _changed(run, changes), "nobody has claimed it")
        status = changes.get("status", run.status)
        after = _changed(run, changes, {} if status in CLAIMED else GIVEN_BACK)
        _check_way(run, after.status)
        return self._keep(after)

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise Fenced(run_id, epoch)
        after = _changed(run, {"status": "queued", **({} if limits is None else {"limits": limits})})
        if run.status == "queued":
            return self._as_asked(run, after, "it waits for its turn already, with other limits")
        check_was(run, was)
        _check_way(run, "queued")
        return self._keep(RUN.changed(after, CLEARED))

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        run = self._run(run_id)
        codec.one_of("status", status, ENDED)
        after = _changed(run, {"ended_ms": now_ms, **changes, "status": status})
        if run.status in ENDED:
            return self._as_asked(run, after, "it has ended")
        if run.status in CLAIMED:
            raise Conflict(f"run {run_id!r} is {run.status}: {run.worker!r} has claimed it, and must end it")
        _check_way(run, status)
        return self._keep(after)

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        codec.limit(limit)
        ended = self._in(ENDED)
        old = sorted((run.ended_ms, run.id) for run in ended if run.ended_ms is not None and run.ended_ms < before_ms)
        removed = [id for _, id in old[:limit]]
        for id in removed:
            self._forget(id)
        return removed

    async def remove(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None:
            check_ended(run)
            self._forget(run_id)

    def _forget(self, run_id: str) -> None:
        del self._by_status[self._runs.pop(run_id).status][run_id]
        for forget in self._forgetting:
            forget(run_id)

    def _run(self, run_id: str) -> RunRecord:
        try:
            return self._runs[run_id]
        except KeyError:
            raise KeyError(f"no run {run_id!r}") from None

    def _keep(self, run: RunRecord) -> RunRecord:
        self._put(run)
        return RUN.given(run)

    def _put(self, run: RunRecord) -> None:
        before = self._runs.get(run.id)
        if before is not None and before.status != run.status:
            del self._by_status[before.status][run.id]
        self._runs[run.id] = self._by_status[run.status][run.id] = run

    def _as_asked(self, run: RunRecord, after: RunRecord, why: str) -> RunRecord:
        """The run, if it is already what was asked for: an answer that was lost may be asked for again."""
        if RUN.is_same(after, run):
            return RUN.given(run)
        raise Conflict(f"run {run.id!r} is {run.status}: {why}")

    def _matching(self, owner: str | None, statuses: Collection[RunStatus]) -> Sequence[RunRecord]:
        for status in statuses:
            codec.one_of("statuses", status, TRANSITIONS)
        runs = self._in({*(statuses or TRANSITIONS)})
        return [*runs] if owner is None else [run for run in runs if run.owner == owner]

    def _in(self, statuses: Collection[RunStatus]) -> Iterable[RunRecord]:
        return chain.from_iterable([self._by_status[status].values() for status in statuses])

    def _is_before(self, run: RunRecord, before: str | None) -> bool:
        if before is None:
            return True
        last = self._runs.get(before)
        return last is not None and _age(run) < _age(last)


def _age(run: RunRecord) -> tuple[int, str]:
    return run.created_ms, run.id


def _is_free(run: RunRecord, now_ms: int) -> bool:
    return run.status == "queued" or (run.status in CLAIMED and run.lease_until_ms <= now_ms)


def _changed(run: RunRecord, changes: Mapping[str, Any], besides: Mapping[str, Any] | None = None) -> RunRecord:
    for field in changes:
        if field not in CHANGEABLE:
            raise InvalidValue("changes", field, f"one of {', '.join(CHANGEABLE)}")
    return RUN.changed(run, {**changes, **besides} if besides else changes)


def check_was(run: RunRecord, was: RunStatus | None) -> None:
    """Conflict if a run is not any more what somebody has seen it to be."""
    if was is not None and run.status != was:
        raise Conflict(f"run {run.id!r} is {run.status} by now, and was {was}; look at it again")


def check_same(known: RunRecord, run: RunRecord) -> None:
    """AnotherRun unless a run that is there is what is asked for; what is kept `about` it makes it no other."""
    differing = [field for field in ASKED if not is_same(_asked(known, field), _asked(run, field))]
    if differing:
        raise AnotherRun(known, differing)


def _asked(run: RunRecord, field: str) -> Any:
    value = getattr(run, field)
    return {**value, "about": None} if field == "origin" else value


def check_ended(run: RunRecord) -> None:
    """Conflict for a run that may still be worked on."""
    if run.status not in ENDED:
        raise Conflict(f"run {run.id!r} is {run.status} and has not ended: cancel it first, or wait for its end")


def _check_way(run: RunRecord, status: RunStatus) -> None:
    if status not in TRANSITIONS[run.status]:
        ways = ", ".join(sorted(TRANSITIONS[run.status])) or "nowhere"
        raise Conflict(f"run {run.id!r} is {run.status} and cannot become {status}; it can go to: {ways}")
