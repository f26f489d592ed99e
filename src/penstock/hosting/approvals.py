"""Approvals of a hosted run, stored so that any process can answer them.

An approval has a key that identifies it within its run. A resumed run that reaches it again finds the stored approval,
and its answer if there is one by now. While a run waits for an answer, its status is `waiting`. The host polls for the
answers of all its runs at once; an approval is withdrawn when its run has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from typing import Any, Protocol

from penstock.hosting.event_data import sanitize, to_json
from penstock.hosting.ports import ApprovalRecord, ApprovalStore, Conflict, Fenced, RunRecord, retry_unavailable
from penstock.nodes.approval import Answer, ApprovalRequest
from penstock.runtime.durable import failpoints
from penstock.tracing.record import CallRecord

MAX_KEY = 800
BY_TIME = "timeout"
"""The `answered_by` of an approval that timed out."""
ANSWERED = ("approved", "edited", "rejected")


class Asker(Protocol):
    """Callbacks of the run that requests approvals."""

    def fence(self) -> None:
        """Called when another worker has claimed the run."""

    async def waits_for(self, approval: ApprovalRecord) -> None:
        """Called when the run has started to wait for this approval."""

    async def got(self, approval: ApprovalRecord) -> None:
        """Called when the approval was answered."""

    async def gave_up(self, approval: ApprovalRecord) -> None:
        """Called when the run no longer waits for the answer."""


class RunApprovals:
    """Requests approvals for the nodes and agents of one run; `services["approvals"]` of a hosted run."""

    def __init__(
        self,
        store: ApprovalStore,
        run: RunRecord,
        asker: Asker,
        now_ms: Callable[[], int],
        key: Callable[[str], str] | None = None,
    ) -> None:
        self._store = store
        self._run = run
        self._asker = asker
        self._now_ms = now_ms
        self._key = key
        self._questions: Counter[str] = Counter()
        self.waiting: dict[str, asyncio.Future[ApprovalRecord]] = {}
        """Approvals that wait for an answer, by id."""
        self._came: dict[str, ApprovalRecord] = {}
        """Answers received here, by approval id."""

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> RunQuestion:
        """Return a question of this run; it is stored when its context is entered."""
        return RunQuestion(self, node_id, question, value, expects)

    def give(self, approval: ApprovalRecord) -> None:
        """Deliver an answer to the waiting caller."""
        waiting = self.waiting.get(approval.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(approval)

    def key_for(self, node_id: str) -> str:
        """Return the key of the next approval at this node."""
        if self._key is not None:
            return _short(self._key("approval"))
        self._questions[node_id] += 1
        return f"{node_id}#{self._questions[node_id]}"

    async def put(
        self, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> ApprovalRecord:
        """Store the approval if it is new, and return it as stored."""
        key, run = self.key_for(node_id), self._run
        id = "ap-" + sha256(f"{run.id} {key}".encode("utf-8", "replace")).hexdigest()[:32]
        record = ApprovalRecord(
            id, run.id, run.owner, key, node_id, sanitize(question), to_json(value),
            asked_ms=self._now_ms(), expects=to_json(expects),
        )  # fmt: skip
        try:
            approval = await retry_unavailable(lambda: self._store.ask(record, epoch=run.epoch))
        except Fenced:
            self._asker.fence()
            raise
        if failpoints.hook is not None:
            failpoints.hook("approval.put")
        if approval.state == "waiting":
            self.waiting[approval.id] = asyncio.get_running_loop().create_future()
            await self._asker.waits_for(approval)
            if failpoints.hook is not None:
                failpoints.hook("approval.waiting")
        else:  # it was answered while no worker had the run, or its event may not have been emitted
            await self._asker.got(approval)
        return approval

    def request_of(self, record: ApprovalRecord) -> ApprovalRequest:
        """Convert a stored approval to the request that nodes see."""
        waited_s = max(0, self._now_ms() - record.asked_ms) / 1_000
        about = record.id, record.run_id, record.node_id, record.question
        return ApprovalRequest(*about, record.value, record.expects, waited_s)

    async def answer_to(self, approval: ApprovalRecord) -> ApprovalRecord:
        """Wait for the answer, and return the answered approval."""
        waiting = self.waiting.get(approval.id)
        if waiting is None:
            return approval
        answered = self._came[approval.id] = await waiting
        self.waiting.pop(approval.id, None)
        await self._asker.got(answered)
        if failpoints.hook is not None:
            failpoints.hook("approval.got")
        return answered

    async def leave(self, approval: ApprovalRecord, *, goes_on: bool) -> None:
        """Stop waiting; if the caller continues without an answer, close the approval."""
        if goes_on and approval.id in self.waiting:
            await self.at_last(approval)
        self.waiting.pop(approval.id, None)

    async def at_last(self, approval: ApprovalRecord) -> ApprovalRecord | None:
        """Return a late answer, given here or elsewhere; otherwise close the approval and return None."""
        self.waiting.pop(approval.id, None)
        came = self._came.get(approval.id)
        closed = await self._closed(approval) if came is None else None
        if closed is None:
            await self._asker.gave_up(approval)
            return came
        standing, is_answer = closed
        await self._asker.got(standing)
        return standing if is_answer else None

    async def _closed(self, approval: ApprovalRecord) -> tuple[ApprovalRecord, bool] | None:
        """Close the approval; return it and whether it was already answered, or None if it is withdrawn or removed."""
        now_ms, reason = self._now_ms(), "no answer in time"
        try:
            closed = await retry_unavailable(
                lambda: self._store.answer(approval.id, "rejected", reason=reason, by=BY_TIME, now_ms=now_ms)
            )
        except Conflict:
            found = await retry_unavailable(lambda: self._store.get(approval.id))
            return (found, True) if found is not None and found.state in ANSWERED else None
        return closed, False


class RunQuestion:
    """One approval request, as a context manager: stored on entry, closed on exit if unanswered."""

    request: ApprovalRequest

    def __init__(
        self, approvals: RunApprovals, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None
    ) -> None:
        self._approvals = approvals
        self._put = node_id, question, value, expects
        self._record: ApprovalRecord | None = None

    async def __aenter__(self) -> RunQuestion:
        self._record = record = await self._approvals.put(*self._put)
        self.request = self._approvals.request_of(record)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        assert self._record is not None
        await self._approvals.leave(self._record, goes_on=kind is None)

    async def answer(self) -> Answer:
        """Wait for the answer."""
        assert self._record is not None
        return _as_answer(await self._approvals.answer_to(self._record))

    async def at_last(self) -> Answer | None:
        """Return a late answer; otherwise close the approval and return None."""
        assert self._record is not None
        came = await self._approvals.at_last(self._record)
        return None if came is None else _as_answer(came)


def _short(key: str) -> str:
    """Shorten a key to a length that stores accept, however deeply its graph is nested."""
    if len(key.encode("utf-8", "replace")) <= MAX_KEY:
        return sanitize(key)
    return sanitize(key[: MAX_KEY // 8]) + "#" + sha256(key.encode("utf-8", "replace")).hexdigest()


def _as_answer(approval: ApprovalRecord) -> Answer:
    if approval.state in ("approved", "edited"):
        return Answer(True, approval.answer, edited=approval.state == "edited")
    return Answer(False, reason=approval.reason or approval.state)


def only_waits_for_answers(under_way: Collection[CallRecord], asking: Collection[CallRecord]) -> bool:
    """Whether the innermost calls in progress in a run all wait for answers to their approvals.

    An agent has its own call inside the call that requested the approval; a model or tool call in progress there is a
    call that does not wait.
    """
    asks = {call.number for call in asking}
    above = {call.parent.number for call in under_way if call.parent is not None}
    return all(_is_asking(call, asks) for call in under_way if call.number not in above)


def _is_asking(call: CallRecord, asks: Collection[int]) -> bool:
    at: CallRecord | None = call
    while at is not None and at.number not in asks:
        if at.kind != "system":
            return False
        at = at.parent
    return at is not None
