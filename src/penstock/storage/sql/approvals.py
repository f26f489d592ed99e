"""Questions to people and wishes to stop, in SQL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.hosting.ports import Conflict
from penstock.hosting.records import UNTIL_ENDED, ApprovalRecord, ApprovalState, CancelIntent
from penstock.storage.databases.port import Database, Row, Transaction, Value, marks, portions
from penstock.storage.sql import codec
from penstock.storage.sql.runs import check_claim

ANSWERS = ("approved", "edited", "rejected")
STATES = ("waiting", *ANSWERS, "withdrawn")
FIELDS = tuple(one.name for one in fields(ApprovalRecord))
COLUMNS = ", ".join(FIELDS)
WRITTEN: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "run_id": codec.name,
    "owner": codec.name,
    "key": codec.name,
    "node_id": codec.name,
    "question": codec.text,
    "value": codec.document,
    "state": codec.name,
    "answer": codec.document,
    "reason": codec.text,
    "asked_ms": codec.number,
    "answered_ms": codec.optional_number,
    "answered_by": codec.optional_name,
    "expects": codec.document,
}
"""How each field becomes a column."""

SELECT = f"SELECT {COLUMNS} FROM approvals"
INSERT = f"INSERT INTO approvals ({COLUMNS}) VALUES ({marks(len(FIELDS))}) ON CONFLICT DO NOTHING"
REPLACE = f"UPDATE approvals SET {', '.join(f'{field} = ?' for field in FIELDS)} WHERE id = ?"
WITHDRAW = (
    "UPDATE approvals SET state = 'withdrawn', answered_ms = ? WHERE run_id = ? AND state = 'waiting' RETURNING id"
)

CANCEL_FIELDS = ("run_id", "reason", "by_whom", "at_ms", "until_ms", "owner")
SELECT_CANCELS = f"SELECT {', '.join(CANCEL_FIELDS)} FROM cancels WHERE"
IS_OVER = "cancels.until_ms < excluded.at_ms"
PUT_CANCEL = (
    f"INSERT INTO cancels ({', '.join(CANCEL_FIELDS)}) VALUES ({marks(len(CANCEL_FIELDS))}) "
    "ON CONFLICT (run_id, owner) DO UPDATE SET until_ms = excluded.until_ms, "
    + ", ".join(
        f"{field} = CASE WHEN {IS_OVER} THEN excluded.{field} ELSE cancels.{field} END"
        for field in ("reason", "by_whom", "at_ms")
    )
    + f" WHERE {IS_OVER} OR cancels.until_ms < excluded.until_ms"
)
"""The first wish counts, unless its time was over when this one came, and for as long as either is to be kept."""
DROP_CANCEL = f"DELETE FROM cancels WHERE {' AND '.join(f'{field} = ?' for field in CANCEL_FIELDS)}"
"""As it stands: if it was put anew, or is to be kept longer by now, it is another."""


class SqlApprovalStore:
    """An `ApprovalStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        values = _written(approval)

        async def act(transaction: Transaction) -> ApprovalRecord:
            await check_claim(transaction, approval.run_id, epoch, transaction.dialect.share_lock)
            await transaction.run(INSERT, *values)
            known = await _put_before(transaction, approval)
            if known is None:
                raise Conflict(f"approval {approval.id!r} is another question; give this one an id of its own")
            if known.state != "withdrawn":
                return known
            # Under the id it had, and as it is asked now: what is approved is what the run has in hand.
            return await _keep(transaction, replace(approval, id=known.id, owner=known.owner))

        return await self._database.write(act, brief=True)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        async def act(transaction: Transaction) -> ApprovalRecord | None:
            row = await transaction.row(f"{SELECT} WHERE id = ?", codec.sought(approval_id))
            return None if row is None else _record(row)

        return await self._database.read(act, brief=True)

    async def list(
        self,
        *,
        run_id: str | None = None,
        owner: str | None = None,
        states: Collection[ApprovalState] = (),
        before: str | None = None,
        limit: int = 100,
    ) -> Sequence[ApprovalRecord]:
        names = {"run_id": run_id, "owner": owner}
        asked = {field: codec.sought(value) for field, value in names.items() if value is not None}
        where = [f"{field} = ?" for field in asked]
        values: list[Value] = [*asked.values()]
        if states:
            where.append(f"state IN ({marks(len(states))})")
            values.extend(codec.one_of("states", state, STATES) for state in states)
        if before is not None:
            where.append("(asked_ms, id) > (SELECT asked_ms, id FROM approvals WHERE id = ?)")
            values.append(codec.sought(before))
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        values.append(codec.limit(limit))

        async def act(transaction: Transaction) -> Sequence[ApprovalRecord]:
            rows = await transaction.rows(f"{SELECT}{condition} ORDER BY asked_ms, id LIMIT ?", *values)
            return [_record(row) for row in rows]

        return await self._database.read(act)

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        codec.one_of("state", state, ANSWERS)
        said = {"state": state, "answer": answer, "reason": reason, "answered_by": by, "answered_ms": now_ms}

        async def act(transaction: Transaction) -> ApprovalRecord:
            known = await _there(transaction, approval_id)
            for field, value in said.items():
                WRITTEN[field](field, value)
            after = replace(known, **said)
            if known.state == "waiting":
                return await _keep(transaction, after)
            if _canonical(known) == _canonical(after):
                return known
            raise Conflict(f"approval {approval_id!r} is {known.state} already: the first answer counts")

        return await self._database.write(act, brief=True)

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        values = codec.number("now_ms", now_ms), codec.sought(run_id)

        async def act(transaction: Transaction) -> None:
            await check_claim(transaction, codec.sought(run_id), epoch, transaction.dialect.share_lock)
            for row in await transaction.rows(WITHDRAW, *values):
                transaction.ring(_topic(row[0]))

        await self._database.write(act)

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        ids = sorted({codec.sought(approval_id) for approval_id in approval_ids})

        async def act(transaction: Transaction) -> Mapping[str, ApprovalRecord]:
            found: list[ApprovalRecord] = []
            for some in portions(ids):
                statement = f"{SELECT} WHERE id IN ({marks(len(some))}) AND state <> 'waiting'"
                found += [_record(row) for row in await transaction.rows(statement, *some)]
            return {approval.id: approval for approval in found}

        return await self._database.read(act, brief=True) if ids else {}

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + codec.timeout(timeout_s)
        while True:
            seen = self._database.rung
            approval = await self.get(approval_id)
            if approval is None:
                raise KeyError(f"no approval {approval_id!r}")
            if approval.state != "waiting":
                return approval
            if (left := until - loop.time()) <= 0:
                return None
            await self._database.wait(_topic(approval_id), seen, left)


class SqlCancelStore:
    """A `CancelStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, intent: CancelIntent) -> CancelIntent:
        values = _written_intent(intent)

        async def act(transaction: Transaction) -> CancelIntent:
            await transaction.run(PUT_CANCEL, *values)
            row = await transaction.row(f"{SELECT_CANCELS} run_id = ? AND owner = ?", intent.run_id, intent.owner)
            return intent if row is None else _intent(row)

        return await self._database.write(act, brief=True)

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelIntent]:
        ids = sorted({codec.sought(run_id) for run_id in owners})
        now = codec.number("now_ms", now_ms)

        async def act(transaction: Transaction) -> Mapping[str, CancelIntent]:
            found: dict[str, CancelIntent] = {}
            for some in portions(ids):
                statement = f"{SELECT_CANCELS} run_id IN ({marks(len(some))}) AND until_ms >= ? ORDER BY at_ms, owner"
                for intent in map(_intent, await transaction.rows(statement, *some, now)):
                    if intent.owner in ("", owners[intent.run_id]):
                        found.setdefault(intent.run_id, intent)
            return found

        return await self._database.read(act, brief=True) if ids else {}

    async def of(self, run_id: str) -> Sequence[CancelIntent]:
        return await self._where("run_id = ? ORDER BY at_ms, owner", codec.sought(run_id))

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelIntent]:
        return await self._where("until_ms = ? ORDER BY at_ms, run_id, owner LIMIT ?", UNTIL_ENDED, codec.limit(limit))

    async def _where(self, condition: str, *values: Value) -> Sequence[CancelIntent]:
        async def act(transaction: Transaction) -> Sequence[CancelIntent]:
            return [_intent(row) for row in await transaction.rows(f"{SELECT_CANCELS} {condition}", *values)]

        return await self._database.read(act)

    async def drop(self, run_id: str, wishes: Collection[CancelIntent] | None = None) -> None:
        those = [_written_intent(intent) for intent in wishes or () if intent.run_id == run_id]

        async def act(transaction: Transaction) -> None:
            if wishes is None:
                await transaction.run("DELETE FROM cancels WHERE run_id = ?", codec.sought(run_id))
            else:
                await transaction.run_many(DROP_CANCEL, those)

        await self._database.write(act, brief=True)

    async def prune(self, *, now_ms: int) -> int:
        now = codec.number("now_ms", now_ms)
        return await self._database.write(
            lambda transaction: transaction.run("DELETE FROM cancels WHERE until_ms < ?", now)
        )


def _topic(approval_id: str) -> str:
    return f"approval:{approval_id}"


def _written(approval: ApprovalRecord) -> list[Value]:
    codec.one_of("state", approval.state, STATES)
    return [write(field, getattr(approval, field)) for field, write in WRITTEN.items()]


def _record(row: Row) -> ApprovalRecord:
    kept = dict(zip(FIELDS, row, strict=True))
    id = kept["id"]
    kept["state"] = codec.read_one_of("approvals", id, STATES, kept["state"])
    for field in ("value", "answer", "expects"):
        kept[field] = codec.read_document("approvals", id, kept[field])
    for field in ("question", "reason"):
        kept[field] = codec.read_text("approvals", id, kept[field])
    return ApprovalRecord(**kept)


def _canonical(approval: ApprovalRecord) -> ApprovalRecord:
    value, answer = (codec.canonical(field, getattr(approval, field)) for field in ("value", "answer"))
    return replace(approval, value=value, answer=answer)


async def _put_before(transaction: Transaction, approval: ApprovalRecord) -> ApprovalRecord | None:
    statement = f"{SELECT} WHERE run_id = ? AND key = ?{transaction.dialect.update_lock}"
    row = await transaction.row(statement, approval.run_id, approval.key)
    return None if row is None else _record(row)


async def _there(transaction: Transaction, approval_id: str) -> ApprovalRecord:
    statement = f"{SELECT} WHERE id = ?{transaction.dialect.update_lock}"
    row = await transaction.row(statement, codec.sought(approval_id))
    if row is None:
        raise KeyError(f"no approval {approval_id!r}")
    return _record(row)


async def _keep(transaction: Transaction, approval: ApprovalRecord) -> ApprovalRecord:
    values = _written(approval)
    await transaction.run(REPLACE, *values, approval.id)
    transaction.ring(_topic(approval.id))
    return _record(values)


def _written_intent(intent: CancelIntent) -> tuple[Value, ...]:
    return (
        codec.name("run_id", intent.run_id),
        codec.text("reason", intent.reason),
        codec.name("by", intent.by),
        codec.number("at_ms", intent.at_ms),
        codec.number("until_ms", intent.until_ms),
        codec.name("owner", intent.owner),
    )


def _intent(row: Row) -> CancelIntent:
    run_id, reason, by, at_ms, until_ms, owner = row
    return CancelIntent(run_id, codec.read_text("cancels", run_id, reason), by, at_ms, until_ms, owner)
