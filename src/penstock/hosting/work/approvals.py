"""Questions of a hosted run, kept where any process can answer them.

A question has a key: which one of the run it is. A run that is resumed and comes to it again finds the question it had
put, and the answer, if there is one by now. While a run waits for nothing but answers its status says so. Answers are
found by the host, which asks for those of all its runs at once; a question is withdrawn when its run has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any, Protocol

from penstock.hosting.points import passing
from penstock.hosting.ports import ApprovalStore, Conflict, Fenced
from penstock.hosting.records import ApprovalRecord, RunRecord
from penstock.hosting.work.patience import patiently
from penstock.hosting.work.told import clean, plain
from penstock.nodes.approval import Answer, ApprovalRequest

MAX_KEY = 800
BY_TIME = "timeout"
"""Who has answered a question that nobody answered in time."""
ANSWERED = ("approved", "edited", "rejected")


class Asker(Protocol):
    """What questions need of the run that puts them."""

    def lose(self) -> None:
        """Another worker has the run."""

    async def waits_for(self, approval: ApprovalRecord) -> None:
        """It has put this question."""

    async def got(self, approval: ApprovalRecord) -> None:
        """The question was answered."""

    async def gave_up(self, approval: ApprovalRecord) -> None:
        """It does not wait for the answer any more."""


class RunApprovals:
    """Where one run's nodes and agents put their questions; `services["approvals"]` of a hosted run."""

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
        self._asked: Counter[str] = Counter()
        self.waiting: dict[str, asyncio.Future[ApprovalRecord]] = {}
        """The questions that wait for an answer, by id."""
        self._came: dict[str, ApprovalRecord] = {}
        """The answers that came here."""

    def ask(
        self, run_id: str, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> RunQuestion:
        """A question of this run; it is put on entering."""
        return RunQuestion(self, node_id, question, value, expects)

    def give(self, approval: ApprovalRecord) -> None:
        """An answer has come."""
        waiting = self.waiting.get(approval.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(approval)

    def key_for(self, node_id: str) -> str:
        """Which question of the run comes next at this node."""
        if self._key is not None:
            return _short(self._key("approval"))
        self._asked[node_id] += 1
        return f"{node_id}#{self._asked[node_id]}"

    async def put(
        self, node_id: str, question: str, value: Any, expects: Mapping[str, Any] | None = None
    ) -> ApprovalRecord:
        """The question as it stands; put, if it is new."""
        key, run = self.key_for(node_id), self._run
        id = "ap-" + sha256(f"{run.id} {key}".encode("utf-8", "replace")).hexdigest()[:32]
        record = ApprovalRecord(
            id, run.id, run.owner, key, node_id, clean(question), plain(value),
            asked_ms=self._now_ms(), expects=plain(expects),
        )  # fmt: skip
        try:
            approval = await patiently(lambda: self._store.ask(record, epoch=run.epoch))
        except Fenced:
            self._asker.lose()
            raise
        passing("approval.put")
        if approval.state == "waiting":
            self.waiting[approval.id] = asyncio.get_running_loop().create_future()
            await self._asker.waits_for(approval)
            passing("approval.waiting")
        else:  # it was answered while nobody worked on the run, or nobody knows whether that was told
            await self._asker.got(approval)
        return approval

    def request_of(self, record: ApprovalRecord) -> ApprovalRequest:
        """The question as whoever asks knows it."""
        waited_s = max(0, self._now_ms() - record.asked_ms) / 1_000
        about = record.id, record.run_id, record.node_id, record.question
        return ApprovalRequest(*about, record.value, record.expects, waited_s)

    async def answer_to(self, approval: ApprovalRecord) -> ApprovalRecord:
        """The question once it does not wait any more."""
        waiting = self.waiting.get(approval.id)
        if waiting is None:
            return approval
        answered = self._came[approval.id] = await waiting
        self.waiting.pop(approval.id, None)
        await self._asker.got(answered)
        passing("approval.got")
        return answered

    async def leave(self, approval: ApprovalRecord, *, goes_on: bool) -> None:
        """Nobody waits any more; who goes on without an answer has decided, and the question is closed."""
        if goes_on and approval.id in self.waiting:
            await self.at_last(approval)
        self.waiting.pop(approval.id, None)

    async def at_last(self, approval: ApprovalRecord) -> ApprovalRecord | None:
        """The answer that was given after all, here or elsewhere; else None, and the question is closed."""
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
        """The question, closed, and whether somebody was quicker, with an answer; None if it is withdrawn or gone."""
        now_ms, reason = self._now_ms(), "nobody answered in time"
        try:
            closed = await patiently(
                lambda: self._store.answer(approval.id, "rejected", reason=reason, by=BY_TIME, now_ms=now_ms)
            )
        except Conflict:
            found = await patiently(lambda: self._store.get(approval.id))
            return (found, True) if found is not None and found.state in ANSWERED else None
        return closed, False


class RunQuestion:
    """One question, from being put to being left."""

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
        """Wait for it."""
        assert self._record is not None
        return _as_answer(await self._approvals.answer_to(self._record))

    async def at_last(self) -> Answer | None:
        """The answer that somebody has given after all."""
        assert self._record is not None
        came = await self._approvals.at_last(self._record)
        return None if came is None else _as_answer(came)


def _short(key: str) -> str:
    """A key that a store takes, however deep in nested graphs the question stands."""
    if len(key.encode("utf-8", "replace")) <= MAX_KEY:
        return clean(key)
    return clean(key[: MAX_KEY // 8]) + "#" + sha256(key.encode("utf-8", "replace")).hexdigest()


def _as_answer(approval: ApprovalRecord) -> Answer:
    if approval.state in ("approved", "edited"):
        return Answer(True, approval.answer, edited=approval.state == "edited")
    return Answer(False, reason=approval.reason or approval.state)
