"""Approvals in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock import checks
from penstock.hosting.ports import ApprovalRecord, ApprovalState, Conflict
from penstock.notify import Notifier, wait_until
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.runs import MemoryRunStore
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
