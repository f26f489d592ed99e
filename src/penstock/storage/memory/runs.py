"""Runs in memory: their claims and status transitions, and the requests to cancel them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from penstock import checks
from penstock.hosting.ports import (
    CLAIMED,
    ENDED,
    NO_FILTER,
    TRANSITIONS,
    UNTIL_ENDED,
    USAGE,
    AddedRun,
    CancelRequest,
    Conflict,
    Fenced,
    RunFilter,
    RunOrder,
    RunRecord,
    RunStatus,
    StoreCorrupt,
)
from penstock.ids import new_run_id
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import (
    check_ended,
    check_resting,
    check_same_run,
    check_transition,
    check_was,
    checked_usage,
    lower_ascii,
)

RUN = RecordCodec(
    RunRecord,
    names=("id", "owner", "graph_id", "worker", "stop_reason", "queue"),
    texts=("error",),
    numbers=(
        *("graph_version", "created_ms", "started_ms", "ended_ms", "lease_until_ms", "epoch", "grants"),
        *USAGE,
        *("crash_count", "worked_ms", "resumed_ms", "priority", "fence"),
    ),
    documents=("input", "limits", "origin", "output", "halt"),
    objects=("limits", "origin"),
    optional=("worker", "stop_reason", "error", "started_ms", "ended_ms", "resumed_ms", "queue"),
    choices={"status": TRANSITIONS},
)

CHANGEABLE = (
    *("status", "limits", "started_ms", "ended_ms", "stop_reason", "error", "output"),
    *USAGE,
    *("crash_count", "worked_ms", "resumed_ms", "halt"),
)
"""The fields that a worker may change; only a claim assigns a run to a worker."""
CLEARED: Mapping[str, Any] = {
    "ended_ms": None,
    "stop_reason": None,
    "error": None,
    "output": None,
    "crash_count": 0,
    "halt": None,
}
"""The result fields, which are reset when a run is requeued."""
UNCLAIMED: Mapping[str, Any] = {"worker": None, "lease_until_ms": 0}


CLAIMABLE: frozenset[RunStatus] = CLAIMED | {"queued"}


class MemoryRunStore:
    """Runs by id; removing a run removes its data from the other stores."""

    def __init__(self, undo: UndoLog | None = None) -> None:
        self.undo = undo or UndoLog()
        """The undo log of transactions, shared with the stores that depend on this one."""
        self._runs: dict[str, RunRecord] = {}
        self._by_status: dict[RunStatus, dict[str, RunRecord]] = {status: {} for status in TRANSITIONS}
        """The same runs by status, so that claims need not scan ended runs, which are the majority."""
        self._on_remove: list[Callable[[str], None]] = []
        self._on_begin: list[Callable[[str, Sequence[JournalEntry]], None]] = []
        self._database_id = new_run_id()

    def on_remove(self, callback: Callable[[str], None]) -> None:
        """Register `callback(run_id)` to be called for every run that is removed."""
        self._on_remove.append(callback)

    def on_begin(self, begin: Callable[[str, Sequence[JournalEntry]], None]) -> None:
        """Register `begin(run_id, entries)` to be called just before a run with a journal is added."""
        self._on_begin.append(begin)

    def chats(self, statuses: Collection[RunStatus] = ()) -> set[str]:
        """Return the ids of the chats that have runs in one of these statuses, or in any status if empty."""
        return {str(RUN.decode(run).chat_id) for run in self._matching(None, statuses)}

    def fence(self, run_id: str, epoch: int) -> None:
        """Raise Fenced unless `epoch` is that of the newest claim; a run that does not exist has epoch 0."""
        run = self._runs.get(run_id)
        if epoch != (0 if run is None else run.epoch):
            raise Fenced(run_id, epoch)

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> AddedRun:
        encoded = RUN.encode(run)
        known = self._runs.get(run.id)
        if known is None:
            for begin in self._on_begin if journal else ():
                begin(run.id, journal)
            return AddedRun(self._store(encoded), is_new=True)
        before = RUN.decode(known)
        check_same_run(before, run)
        return AddedRun(before, is_new=False)

    async def get(self, run_id: str) -> RunRecord | None:
        run = self._runs.get(run_id)
        return None if run is None else RUN.decode(run)

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
        matching: RunFilter = NO_FILTER,
        order: RunOrder = "created",
    ) -> Sequence[RunRecord]:
        codec.limit(limit)
        rank: Callable[[RunRecord], Any] = _cost if order == "cost" else _age
        listed = (
            run
            for run in sorted(self._matching(owner, statuses), key=rank, reverse=True)
            if _is_listed(run, graph_id, chat_id, matching) and self._is_before(run, before, rank)
        )
        return [RUN.decode(run) for run in islice(listed, limit)]

    async def count(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        matching: RunFilter = NO_FILTER,
        at_most: int | None = None,
    ) -> int:
        if at_most is not None:
            codec.limit(at_most)
        counted = (True for run in self._matching(owner, statuses) if _is_listed(run, graph_id, chat_id, matching))
        return sum(islice(counted, at_most))

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        codec.name("worker", worker)
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        candidates = self._in(CLAIMABLE) if run_id is None else filter(None, [self._runs.get(run_id)])
        free = min((run for run in candidates if run.queue is None and _is_free(run, now_ms)), key=_age, default=None)
        return None if free is None else self._store(_claimed(free, worker, until_ms, now_ms))

    async def take(
        self, run_id: str, worker: str, fence: int, *, queue: str, now_ms: int, lease_ms: int
    ) -> RunRecord | None:
        codec.name("worker", worker)
        codec.name("queue", queue)
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        codec.number("fence", checks.integer("fence", fence, minimum=1))
        run = self._runs.get(run_id)
        if run is None or run.status not in CLAIMABLE:
            return None
        if run.fence == fence and run.worker == worker:
            return RUN.decode(run)
        if run.fence >= fence or not (run.fence or _is_free(run, now_ms)):
            return None
        return self._store(_claimed(run, worker, until_ms, now_ms)._replace(queue=queue, fence=fence))

    async def database_id(self) -> str:
        return self._database_id

    async def fail_unreadable(self, run_id: str, error: StoreCorrupt, *, now_ms: int, epoch: int | None = None) -> None:
        run = self._runs.get(run_id)
        if run is None or run.status in ENDED or (run.status in CLAIMED and run.epoch != epoch):
            return
        ended_ms = now_ms if run.ended_ms is None else run.ended_ms
        failed = run._replace(status="failed", error=f"{type(error).__name__}: {error}", ended_ms=ended_ms)
        self._store(failed._replace(worker=None, lease_until_ms=0))

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        mine = [run for id in {*run_ids} if (run := self._runs.get(id)) and run.worker == worker]
        for run in mine:
            self._put(RUN.change(run, {"lease_until_ms": max(until_ms, run.lease_until_ms)}))
        return {run.id for run in mine}

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise Fenced(run_id, epoch)
        if run.status not in CLAIMED:
            return self._unchanged(run, _changed(run, changes), "no worker has claimed it")
        status = changes.get("status", run.status)
        after = _changed(run, changes, {} if status in CLAIMED else UNCLAIMED)
        check_transition(run, after.status)
        return self._store(after)

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise Fenced(run_id, epoch)
        after = _changed(run, {"status": "queued", **({} if limits is None else {"limits": limits})})
        if run.status == "queued":
            return self._unchanged(run, after, "it is queued already, with other limits")
        check_was(run, was)
        check_transition(run, "queued")
        grants = run.grants if limits is None else run.grants + 1
        return self._store(RUN.change(after, {**CLEARED, "grants": grants}))

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        run = self._run(run_id)
        checks.choice("status", status, sorted(ENDED))
        after = _changed(run, {"ended_ms": now_ms, **changes, "status": status})
        if run.status in ENDED:
            return self._unchanged(run, after, "it has ended")
        if run.status in CLAIMED:
            raise Conflict(f"run {run_id!r} is {run.status}: {run.worker!r} has claimed it, and must end it")
        check_transition(run, status)
        return self._store(after)

    async def set_usage(self, run_id: str, epoch: int, **usage: int) -> RunRecord:
        run = self._run(run_id)
        if run.epoch != epoch:
            raise Fenced(run_id, epoch)
        check_resting(run)
        return self._store(RUN.change(run, checked_usage(usage)))

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        codec.limit(limit)
        ended = self._in(ENDED)
        old = sorted((run.ended_ms, run.id) for run in ended if run.ended_ms is not None and run.ended_ms < before_ms)
        removed = [id for _, id in old[:limit]]
        for id in removed:
            self._remove(id)
        return removed

    async def remove(self, run_id: str) -> None:
        run = self._runs.get(run_id)
        if run is not None:
            check_ended(run)
            self._remove(run_id)

    def _remove(self, run_id: str) -> None:
        run = self._runs.pop(run_id)
        del self._by_status[run.status][run_id]
        self.undo.step(lambda: self._index(run))
        for callback in self._on_remove:
            callback(run_id)

    def _run(self, run_id: str) -> RunRecord:
        try:
            return self._runs[run_id]
        except KeyError:
            raise KeyError(f"no run {run_id!r}") from None

    def _store(self, run: RunRecord) -> RunRecord:
        self._put(run)
        return RUN.decode(run)

    def _put(self, run: RunRecord) -> None:
        before = self._runs.get(run.id)
        if self.undo.is_open:
            self.undo.step(lambda: self._restore(run, before))
        if before is not None and before.status != run.status:
            del self._by_status[before.status][run.id]
        self._index(run)

    def _restore(self, run: RunRecord, before: RunRecord | None) -> None:
        del self._by_status[run.status][run.id], self._runs[run.id]
        if before is not None:
            self._index(before)

    def _index(self, run: RunRecord) -> None:
        self._runs[run.id] = self._by_status[run.status][run.id] = run

    def _unchanged(self, run: RunRecord, after: RunRecord, why: str) -> RunRecord:
        """Return the run if it is already in the requested state, so that requests can be repeated; Conflict if not."""
        if RUN.is_same(after, run):
            return RUN.decode(run)
        raise Conflict(f"run {run.id!r} is {run.status}: {why}")

    def _matching(self, owner: str | None, statuses: Collection[RunStatus]) -> Sequence[RunRecord]:
        for status in statuses:
            checks.choice("statuses", status, TRANSITIONS)
        runs = self._in({*(statuses or TRANSITIONS)})
        return [*runs] if owner is None else [run for run in runs if run.owner == owner]

    def _in(self, statuses: Collection[RunStatus]) -> Iterable[RunRecord]:
        return chain.from_iterable([self._by_status[status].values() for status in statuses])

    def _is_before(self, run: RunRecord, before: str | None, rank: Callable[[RunRecord], Any]) -> bool:
        if before is None:
            return True
        last = self._runs.get(before)
        return last is not None and bool(rank(run) < rank(last))


def _age(run: RunRecord) -> tuple[int, str]:
    return run.created_ms, run.id


def _cost(run: RunRecord) -> tuple[int, int, str]:
    return run.cost_nanos, *_age(run)


def _is_listed(run: RunRecord, graph_id: str | None, chat_id: str | None, matching: RunFilter) -> bool:
    return (
        (graph_id is None or run.graph_id == graph_id)
        and (chat_id is None or RUN.decode(run).chat_id == chat_id)
        and _matches(run, matching)
    )


def _matches(run: RunRecord, wanted: RunFilter) -> bool:
    text = None if wanted.text is None else lower_ascii(wanted.text)
    return (
        (wanted.since_ms is None or run.created_ms >= wanted.since_ms)
        and (wanted.until_ms is None or run.created_ms < wanted.until_ms)
        and (wanted.stop_reason is None or run.stop_reason == wanted.stop_reason)
        and (wanted.min_cost_nanos is None or run.cost_nanos >= wanted.min_cost_nanos)
        and (wanted.bills != "unresolved" or run.unresolved_nanos > 0)
        and (wanted.bills != "unknown" or run.unknown_costs > 0)
        and (wanted.origin is None or RUN.decode(run).origin.get("kind") == wanted.origin)
        and (text is None or text in lower_ascii(run.id) or text in lower_ascii(run.graph_id))
    )


def _claimed(run: RunRecord, worker: str, until_ms: int, now_ms: int) -> RunRecord:
    started_ms = now_ms if run.started_ms is None else run.started_ms
    return run._replace(
        status="running", worker=worker, lease_until_ms=until_ms, epoch=run.epoch + 1, started_ms=started_ms
    )


def _is_free(run: RunRecord, now_ms: int) -> bool:
    return run.status == "queued" or (run.status in CLAIMED and run.lease_until_ms <= now_ms)


def _changed(run: RunRecord, changes: Mapping[str, Any], besides: Mapping[str, Any] | None = None) -> RunRecord:
    for field in changes:
        checks.choice("changes", field, CHANGEABLE)
    return RUN.change(run, {**changes, **besides} if besides else changes)


REQUEST = RecordCodec(CancelRequest, names=("run_id", "by", "owner"), texts=("reason",), numbers=("at_ms", "until_ms"))


class MemoryCancelStore:
    """Cancel requests, at most one per run and owner."""

    def __init__(self, undo: UndoLog | None = None) -> None:
        self._undo = undo or UndoLog()
        self._requests: dict[str, dict[str, CancelRequest]] = {}
        """By run, then by owner; runs without a cancel request have no entry."""

    async def put(self, request: CancelRequest) -> CancelRequest:
        encoded = REQUEST.encode(request)
        known = self._requests.get(request.run_id, {}).get(request.owner)
        if known is not None and known.until_ms >= request.at_ms:
            encoded = replace(known, until_ms=max(known.until_ms, request.until_ms))
        self._undo.step(lambda: self._replace(request.run_id, request.owner, known))
        self._replace(request.run_id, request.owner, encoded)
        return encoded

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelRequest]:
        found: dict[str, CancelRequest] = {}
        for run_id, owner in owners.items():
            of_run = self._requests.get(run_id)
            if of_run is None:
                continue
            valid = [of_run[who] for who in {"", owner} if who in of_run and of_run[who].until_ms >= now_ms]
            if valid:
                found[run_id] = min(valid, key=lambda request: (request.at_ms, request.owner))
        return found

    async def of(self, run_id: str) -> Sequence[CancelRequest]:
        return sorted(self._requests.get(run_id, {}).values(), key=_request_order)

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelRequest]:
        codec.limit(limit)
        return sorted((request for request in self._all() if request.until_ms == UNTIL_ENDED), key=_request_order)[
            :limit
        ]

    async def drop(self, run_id: str, requests: Collection[CancelRequest] | None = None) -> None:
        for request in await self.of(run_id):
            if requests is None or request in requests:
                self._remove(request)

    async def prune(self, *, now_ms: int) -> int:
        over = [request for request in self._all() if request.until_ms < now_ms]
        for request in over:
            self._remove(request)
        return len(over)

    def _all(self) -> Iterator[CancelRequest]:
        return (request for of_run in self._requests.values() for request in of_run.values())

    def _remove(self, request: CancelRequest) -> None:
        self._undo.step(lambda: self._replace(request.run_id, request.owner, request))
        self._replace(request.run_id, request.owner, None)

    def _replace(self, run_id: str, owner: str, request: CancelRequest | None) -> None:
        of_run = self._requests.setdefault(run_id, {})
        if request is not None:
            of_run[owner] = request
            return
        of_run.pop(owner, None)
        if not of_run:
            del self._requests[run_id]


def _request_order(request: CancelRequest) -> tuple[int, str, str]:
    return request.at_ms, request.run_id, request.owner
