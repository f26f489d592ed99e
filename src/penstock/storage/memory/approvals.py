"""Questions to people and wishes to stop, in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.hosting.ports import Conflict
from penstock.hosting.records import UNTIL_ENDED, ApprovalRecord, ApprovalState, CancelIntent
from penstock.storage.memory.bells import Bells
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.shapes import Shape
from penstock.storage.sql import codec

ANSWERS = ("approved", "edited", "rejected")
STATES = ("waiting", *ANSWERS, "withdrawn")

APPROVAL = Shape(
    ApprovalRecord,
    names=("id", "run_id", "owner", "key", "node_id", "answered_by"),
    texts=("question", "reason"),
    numbers=("asked_ms", "answered_ms"),
    documents=("value", "answer", "expects"),
    optional=("answered_ms", "answered_by"),
    choices={"state": STATES},
)
INTENT = Shape(CancelIntent, names=("run_id", "by", "owner"), texts=("reason",), numbers=("at_ms", "until_ms"))


class MemoryApprovalStore:
    """Questions by id, and by run and key."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = runs or MemoryRunStore()
        self._runs.on_forget(self._forget)
        self._approvals: dict[str, ApprovalRecord] = {}
        self._bells = Bells()

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        kept = APPROVAL.kept(approval)
        self._runs.fence(approval.run_id, epoch)
        known = self._put_before(approval.run_id, approval.key)
        if known is None:
            if approval.id in self._approvals:
                raise Conflict(f"approval {approval.id!r} is another question; give this one an id of its own")
            return self._keep(kept)
        if known.state == "withdrawn":
            # Under the id it had, and as it is asked now: what is approved is what the run has in hand.
            return self._keep(replace(kept, id=known.id, owner=known.owner))
        return APPROVAL.given(known)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        approval = self._approvals.get(approval_id)
        return None if approval is None else APPROVAL.given(approval)

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
            codec.one_of("states", state, STATES)
        found = self._where(
            lambda one: (
                (run_id is None or one.run_id == run_id)
                and (owner is None or one.owner == owner)
                and (not states or one.state in states)
                and self._is_behind(one, before)
            )
        )
        return [APPROVAL.given(approval) for approval in found[:limit]]

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        codec.one_of("state", state, ANSWERS)
        known = self._approval(approval_id)
        said = replace(APPROVAL.given(known), state=state, answer=answer, reason=reason)
        after = APPROVAL.kept(replace(said, answered_by=by, answered_ms=now_ms))
        if known.state == "waiting":
            return self._keep(after)
        if APPROVAL.is_same(after, known):
            return APPROVAL.given(known)
        raise Conflict(f"approval {approval_id!r} is {known.state} already: the first answer counts")

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        codec.number("now_ms", now_ms)
        self._runs.fence(run_id, epoch)
        for approval in self._where(lambda one: one.run_id == run_id and one.state == "waiting"):
            self._keep(replace(approval, state="withdrawn", answered_ms=now_ms))

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        asked = {*approval_ids}
        found = self._where(lambda one: one.id in asked and one.state != "waiting")
        return {approval.id: APPROVAL.given(approval) for approval in found}

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        is_answered = await self._bells.until(
            approval_id, lambda: self._approval(approval_id).state != "waiting", timeout_s
        )
        return APPROVAL.given(self._approval(approval_id)) if is_answered else None

    def _approval(self, approval_id: str) -> ApprovalRecord:
        try:
            return self._approvals[approval_id]
        except KeyError:
            raise KeyError(f"no approval {approval_id!r}") from None

    def _keep(self, approval: ApprovalRecord) -> ApprovalRecord:
        self._approvals[approval.id] = approval
        self._bells.ring(approval.id)
        return APPROVAL.given(approval)

    def _put_before(self, run_id: str, key: str) -> ApprovalRecord | None:
        return next(iter(self._where(lambda one: (one.run_id, one.key) == (run_id, key))), None)

    def _where(self, is_wanted: Callable[[ApprovalRecord], bool]) -> Sequence[ApprovalRecord]:
        found = filter(is_wanted, self._approvals.values())
        return sorted(found, key=_age)

    def _is_behind(self, approval: ApprovalRecord, before: str | None) -> bool:
        if before is None:
            return True
        last = self._approvals.get(before)
        return last is not None and _age(approval) > _age(last)

    def _forget(self, run_id: str) -> None:
        for approval in self._where(lambda one: one.run_id == run_id):
            del self._approvals[approval.id]
            self._bells.ring(approval.id)


def _age(approval: ApprovalRecord) -> tuple[int, str]:
    return approval.asked_ms, approval.id


class MemoryCancelStore:
    """One wish per run and owner."""

    def __init__(self) -> None:
        self._intents: dict[str, dict[str, CancelIntent]] = {}
        """By run, then by owner; a run that nothing is wished for is not in it."""

    async def put(self, intent: CancelIntent) -> CancelIntent:
        kept = INTENT.kept(intent)
        known = self._intents.get(intent.run_id, {}).get(intent.owner)
        if known is not None and known.until_ms >= intent.at_ms:
            kept = replace(known, until_ms=max(known.until_ms, intent.until_ms))
        self._intents.setdefault(intent.run_id, {})[intent.owner] = kept
        return kept

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelIntent]:
        found: dict[str, CancelIntent] = {}
        for run_id, owner in owners.items():
            wishes = self._intents.get(run_id)
            if wishes is None:
                continue
            counting = [wishes[one] for one in {"", owner} if one in wishes and wishes[one].until_ms >= now_ms]
            if counting:
                found[run_id] = min(counting, key=lambda intent: (intent.at_ms, intent.owner))
        return found

    async def of(self, run_id: str) -> Sequence[CancelIntent]:
        return sorted(self._intents.get(run_id, {}).values(), key=_wished)

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelIntent]:
        codec.limit(limit)
        return sorted((intent for intent in self._all() if intent.until_ms == UNTIL_ENDED), key=_wished)[:limit]

    async def drop(self, run_id: str, wishes: Collection[CancelIntent] | None = None) -> None:
        for intent in await self.of(run_id):
            if wishes is None or intent in wishes:
                self._forget(intent)

    async def prune(self, *, now_ms: int) -> int:
        over = [intent for intent in self._all() if intent.until_ms < now_ms]
        for intent in over:
            self._forget(intent)
        return len(over)

    def _all(self) -> Iterator[CancelIntent]:
        return (intent for of_run in self._intents.values() for intent in of_run.values())

    def _forget(self, intent: CancelIntent) -> None:
        del self._intents[intent.run_id][intent.owner]
        if not self._intents[intent.run_id]:
            del self._intents[intent.run_id]


def _wished(intent: CancelIntent) -> tuple[int, str, str]:
    return intent.at_ms, intent.run_id, intent.owner
