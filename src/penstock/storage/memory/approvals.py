"""Approvals and cancel requests, in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock import checks
from penstock.hosting.ports import Conflict
from penstock.hosting.records import UNTIL_ENDED, ApprovalRecord, ApprovalState, CancelRequest
from penstock.notify import Notifier, wait_until
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.undo import UndoLog
from penstock.storage.rules import APPROVAL_ANSWERS, APPROVAL_STATES

APPROVAL = RecordCodec(
    ApprovalRecord,
    names=("id", "run_id", "owner", "key", "node_id", "answered_by"),
    texts=("question", "reason"),
    numbers=("asked_ms", "answered_ms"),
    documents=("value", "answer", "expects"),
    optional=("answered_ms", "answered_by"),
    choices={"state": APPROVAL_STATES},
)
REQUEST = RecordCodec(CancelRequest, names=("run_id", "by", "owner"), texts=("reason",), numbers=("at_ms", "until_ms"))


class MemoryApprovalStore:
    """Approvals by id, and by run and key."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_remove(self._remove_run)
        self._approvals: dict[str, ApprovalRecord] = {}
        self._notifier = Notifier()

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        encoded = APPROVAL.encode(approval)
        self._runs.fence(approval.run_id, epoch)
        known = self._of_key(approval.run_id, approval.key)
        if known is None:
            if approval.id in self._approvals:
                raise Conflict(f"approval {approval.id!r} is another question; give this one an id of its own")
            return self._store(encoded)
        if known.state == "withdrawn":
            # Keep the id but store the new question: an approval must be for the value that the run has now.
            return self._store(replace(encoded, id=known.id, owner=known.owner))
        return APPROVAL.decode(known)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        approval = self._approvals.get(approval_id)
        return None if approval is None else APPROVAL.decode(approval)

    async def list(
        self,
        *,
        run_id: str | None = None,
        owner: str | None = None,
        states: Collection[ApprovalState] = (),
        before: str | None = None,
        limit: int = 100,
    ) -> Sequence[ApprovalRecord]:
        codec.limit(limit)
        for state in states:
            checks.choice("states", state, APPROVAL_STATES)
        found = self._where(
            lambda approval: (
                (run_id is None or approval.run_id == run_id)
                and (owner is None or approval.owner == owner)
                and (not states or approval.state in states)
                and self._is_after(approval, before)
            )
        )
        return [APPROVAL.decode(approval) for approval in found[:limit]]

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        checks.choice("state", state, APPROVAL_ANSWERS)
        known = self._approval(approval_id)
        answered = replace(APPROVAL.decode(known), state=state, answer=answer, reason=reason)
        after = APPROVAL.encode(replace(answered, answered_by=by, answered_ms=now_ms))
        if known.state == "waiting":
            return self._store(after)
        if APPROVAL.is_same(after, known):
            return APPROVAL.decode(known)
        raise Conflict(f"approval {approval_id!r} is {known.state} already: the first answer counts")

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        codec.number("now_ms", now_ms)
        self._runs.fence(run_id, epoch)
        for approval in self._where(lambda approval: approval.run_id == run_id and approval.state == "waiting"):
            self._store(replace(approval, state="withdrawn", answered_ms=now_ms))

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        ids = {*approval_ids}
        found = self._where(lambda approval: approval.id in ids and approval.state != "waiting")
        return {approval.id: APPROVAL.decode(approval) for approval in found}

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        is_answered = await wait_until(
            self._notifier,
            approval_id,
            lambda: self._approval(approval_id).state != "waiting",
            codec.timeout(timeout_s),
        )
        return APPROVAL.decode(self._approval(approval_id)) if is_answered else None

    def _approval(self, approval_id: str) -> ApprovalRecord:
        try:
            return self._approvals[approval_id]
        except KeyError:
            raise KeyError(f"no approval {approval_id!r}") from None

    def _store(self, approval: ApprovalRecord) -> ApprovalRecord:
        self._runs.undo.entry(self._approvals, approval.id)
        self._approvals[approval.id] = approval
        self._notifier.notify(approval.id)
        return APPROVAL.decode(approval)

    def _of_key(self, run_id: str, key: str) -> ApprovalRecord | None:
        return next(iter(self._where(lambda approval: (approval.run_id, approval.key) == (run_id, key))), None)

    def _where(self, is_wanted: Callable[[ApprovalRecord], bool]) -> Sequence[ApprovalRecord]:
        found = filter(is_wanted, self._approvals.values())
        return sorted(found, key=_age)

    def _is_after(self, approval: ApprovalRecord, before: str | None) -> bool:
        if before is None:
            return True
        last = self._approvals.get(before)
        return last is not None and _age(approval) > _age(last)

    def _remove_run(self, run_id: str) -> None:
        for approval in self._where(lambda approval: approval.run_id == run_id):
            self._runs.undo.entry(self._approvals, approval.id)
            del self._approvals[approval.id]
            self._notifier.notify(approval.id)


def _age(approval: ApprovalRecord) -> tuple[int, str]:
    return approval.asked_ms, approval.id


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
