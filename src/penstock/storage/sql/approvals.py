"""SQL store of approvals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock import checks
from penstock.hosting.ports import ApprovalRecord, ApprovalState, Conflict, StoreCorrupt
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value, chunks, placeholders
from penstock.storage.rules import APPROVAL_ANSWERS, APPROVAL_STATES
from penstock.storage.sql.events import check_claim

FIELDS = tuple(field.name for field in fields(ApprovalRecord))
COLUMNS = ", ".join(FIELDS)
ENCODERS: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "run_id": codec.name,
    "owner": codec.name,
    "key": codec.name,
    "node_id": codec.name,
    "question": codec.encode_text,
    "value": codec.encode_document,
    "state": codec.name,
    "answer": codec.encode_document,
    "reason": codec.encode_text,
    "asked_ms": codec.number,
    "answered_ms": codec.optional_number,
    "answered_by": codec.optional_name,
    "expects": codec.encode_document,
}
"""Encoder of each field's column value."""

SELECT = f"SELECT {COLUMNS} FROM approvals"
INSERT = f"INSERT INTO approvals ({COLUMNS}) VALUES ({placeholders(len(FIELDS))}) ON CONFLICT DO NOTHING"
REPLACE = f"UPDATE approvals SET {', '.join(f'{field} = ?' for field in FIELDS)} WHERE id = ?"
CLOSE = "UPDATE approvals SET state = 'withdrawn', answered_ms = ? WHERE id = ? AND state <> 'withdrawn'"
WITHDRAW = (
    "UPDATE approvals SET state = 'withdrawn', answered_ms = ? WHERE run_id = ? AND state = 'waiting' RETURNING id"
)


class SqlApprovalStore(SqlStore):
    """An `ApprovalStore` over a database."""

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        values = _encode(approval)

        async def body(transaction: Transaction) -> ApprovalRecord:
            await check_claim(transaction, approval.run_id, epoch, transaction.dialect.share_lock)
            await transaction.run(INSERT, *values)
            known = await self._locked(transaction, "run_id = ? AND key = ?", approval.run_id, approval.key)
            if known is None:
                raise Conflict(f"approval {approval.id!r} is another question; give this one an id of its own")
            if known.state != "withdrawn":
                return known
            # Keep the id but store the new question: an approval must be for the value that the run has now.
            return await _replace(transaction, replace(approval, id=known.id, owner=known.owner))

        return await self._database.write(body, inline=True)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        async def body(transaction: Transaction) -> ApprovalRecord | None:
            row = await transaction.row(f"{SELECT} WHERE id = ?", codec.lookup_key(approval_id))
            return None if row is None else self._decode_or_mark(row)

        return await self._database.read(body, inline=True, single=True)

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
        filters = {field: codec.lookup_key(value) for field, value in names.items() if value is not None}
        where = [f"{field} = ?" for field in filters]
        values: list[Value] = [*filters.values()]
        if states:
            where.append(f"state IN ({placeholders(len(states))})")
            values.extend(checks.choice("states", state, APPROVAL_STATES) for state in states)
        if before is not None:
            where.append("(asked_ms, id) > (SELECT asked_ms, id FROM approvals WHERE id = ?)")
            values.append(codec.lookup_key(before))
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        values.append(codec.limit(limit))

        async def body(transaction: Transaction) -> Sequence[ApprovalRecord]:
            rows = await transaction.rows(f"{SELECT}{condition} ORDER BY asked_ms, id LIMIT ?", *values)
            return [self._decode_or_mark(row) for row in rows]

        return await self._database.read(body, single=True)

    async def _locked(self, transaction: Transaction, condition: str, *values: Value) -> ApprovalRecord | None:
        """Lock the approval until the transaction ends, and return it; None if it does not exist."""
        row = await transaction.row(f"{SELECT} WHERE {condition}{transaction.dialect.update_lock}", *values)
        return None if row is None else self._decode_or_mark(row)

    def _decode_or_mark(self, row: Row) -> ApprovalRecord:
        """Decode a row; one that cannot be decoded is shown as withdrawn, with the reason as its question.

        It cannot be answered, because the value to approve is unknown. A run that waits for it continues as if it were
        rejected.
        """
        try:
            return _decode(row)
        except StoreCorrupt as error:
            self._database.faults.note(error)
            values = dict(zip(FIELDS, row, strict=True))
            text = codec.unreadable(error)
            lost = {"question": text, "reason": text, "value": None, "answer": None, "expects": None}
            return ApprovalRecord(**{**values, **lost, "state": "withdrawn"})

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        checks.choice("state", state, APPROVAL_ANSWERS)
        answered = {"state": state, "answer": answer, "reason": reason, "answered_by": by, "answered_ms": now_ms}

        async def body(transaction: Transaction) -> ApprovalRecord:
            known = await self._locked(transaction, "id = ?", codec.lookup_key(approval_id))
            if known is None:
                raise KeyError(f"no approval {approval_id!r}")
            for field, value in answered.items():
                ENCODERS[field](field, value)
            after = replace(known, **answered)
            if known.state == "waiting":
                return await _replace(transaction, after)
            if _canonical(known) == _canonical(after):
                return known
            if known.question.startswith(codec.UNREADABLE):
                # It cannot be answered: its run is notified, and continues as after a rejection.
                await transaction.run(CLOSE, now_ms, known.id)
                transaction.notify(_topic(known.id))
                return known
            raise Conflict(f"approval {approval_id!r} is {known.state} already: the first answer counts")

        return await self._database.write(body, inline=True)

    async def withdraw(self, run_id: str, epoch: int, *, now_ms: int) -> None:
        values = codec.number("now_ms", now_ms), codec.lookup_key(run_id)

        async def body(transaction: Transaction) -> None:
            await check_claim(transaction, codec.lookup_key(run_id), epoch, transaction.dialect.share_lock)
            for row in await transaction.rows(WITHDRAW, *values):
                transaction.notify(_topic(row[0]))

        await self._database.write(body)

    async def answered(self, approval_ids: Collection[str]) -> Mapping[str, ApprovalRecord]:
        ids = sorted({codec.lookup_key(approval_id) for approval_id in approval_ids})

        async def body(transaction: Transaction) -> Mapping[str, ApprovalRecord]:
            found: list[ApprovalRecord] = []
            for chunk in chunks(ids):
                statement = f"{SELECT} WHERE id IN ({placeholders(len(chunk))}) AND state <> 'waiting'"
                found += [self._decode_or_mark(row) for row in await transaction.rows(statement, *chunk)]
            return {approval.id: approval for approval in found}

        return await self._database.read(body, inline=True, single=True) if ids else {}

    async def wait(self, approval_id: str, timeout_s: float) -> ApprovalRecord | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + codec.timeout(timeout_s)
        while True:
            seen = self._database.version
            approval = await self.get(approval_id)
            if approval is None:
                raise KeyError(f"no approval {approval_id!r}")
            if approval.state != "waiting":
                return approval
            if (left := deadline - loop.time()) <= 0:
                return None
            await self._database.wait(_topic(approval_id), seen, left)


def _topic(approval_id: str) -> str:
    return f"approval:{approval_id}"


def _encode(approval: ApprovalRecord) -> list[Value]:
    checks.choice("state", approval.state, APPROVAL_STATES)
    return [encode(field, getattr(approval, field)) for field, encode in ENCODERS.items()]


def _decode(row: Row) -> ApprovalRecord:
    values = dict(zip(FIELDS, row, strict=True))
    id = values["id"]
    values["state"] = codec.decode_one_of("approvals", id, APPROVAL_STATES, values["state"])
    for field in ("value", "answer", "expects"):
        values[field] = codec.decode_document("approvals", id, values[field])
    for field in ("question", "reason"):
        values[field] = codec.decode_text("approvals", id, values[field])
    return ApprovalRecord(**values)


def _canonical(approval: ApprovalRecord) -> ApprovalRecord:
    value, answer = (codec.canonical(field, getattr(approval, field)) for field in ("value", "answer"))
    return replace(approval, value=value, answer=answer)


async def _replace(transaction: Transaction, approval: ApprovalRecord) -> ApprovalRecord:
    values = _encode(approval)
    await transaction.run(REPLACE, *values, approval.id)
    transaction.notify(_topic(approval.id))
    return _decode(values)


CHECKS = (TableCheck("approvals", COLUMNS, ("id",), ("",), _decode),)
