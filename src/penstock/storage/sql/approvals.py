"""SQL stores of approvals and cancel requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock import checks
from penstock.hosting.ports import Conflict
from penstock.hosting.records import UNTIL_ENDED, ApprovalRecord, ApprovalState, CancelRequest
from penstock.storage import codec
from penstock.storage.port import Database, Row, Transaction, Value, chunks, placeholders
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
WITHDRAW = (
    "UPDATE approvals SET state = 'withdrawn', answered_ms = ? WHERE run_id = ? AND state = 'waiting' RETURNING id"
)

CANCEL_FIELDS = ("run_id", "reason", "by_whom", "at_ms", "until_ms", "owner")
SELECT_CANCELS = f"SELECT {', '.join(CANCEL_FIELDS)} FROM cancels WHERE"
IS_OVER = "cancels.until_ms < excluded.at_ms"
PUT_CANCEL = (
    f"INSERT INTO cancels ({', '.join(CANCEL_FIELDS)}) VALUES ({placeholders(len(CANCEL_FIELDS))}) "
    "ON CONFLICT (run_id, owner) DO UPDATE SET until_ms = excluded.until_ms, "
    + ", ".join(
        f"{field} = CASE WHEN {IS_OVER} THEN excluded.{field} ELSE cancels.{field} END"
        for field in ("reason", "by_whom", "at_ms")
    )
    + f" WHERE {IS_OVER} OR cancels.until_ms < excluded.until_ms"
)
"""The first request counts unless it had expired when this one came; it is stored until the later `until_ms`."""
DROP_CANCEL = f"DELETE FROM cancels WHERE {' AND '.join(f'{field} = ?' for field in CANCEL_FIELDS)}"
"""Compares every field: a request that was replaced or extended meanwhile is another one and stays."""


class SqlApprovalStore:
    """An `ApprovalStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ask(self, approval: ApprovalRecord, *, epoch: int = 0) -> ApprovalRecord:
        values = _encode(approval)

        async def body(transaction: Transaction) -> ApprovalRecord:
            await check_claim(transaction, approval.run_id, epoch, transaction.dialect.share_lock)
            await transaction.run(INSERT, *values)
            known = await _locked_approval_of_key(transaction, approval)
            if known is None:
                raise Conflict(f"approval {approval.id!r} is another question; give this one an id of its own")
            if known.state != "withdrawn":
                return known
            # Keep the old id and take the new content: what is approved must be what the run has now.
            return await _replace(transaction, replace(approval, id=known.id, owner=known.owner))

        return await self._database.write(body, inline=True)

    async def get(self, approval_id: str) -> ApprovalRecord | None:
        async def body(transaction: Transaction) -> ApprovalRecord | None:
            row = await transaction.row(f"{SELECT} WHERE id = ?", codec.lookup_key(approval_id))
            return None if row is None else _decode(row)

        return await self._database.read(body, inline=True)

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
            return [_decode(row) for row in rows]

        return await self._database.read(body)

    async def answer(
        self, approval_id: str, state: ApprovalState, *, answer: Any = None, reason: str = "", by: str, now_ms: int
    ) -> ApprovalRecord:
        checks.choice("state", state, APPROVAL_ANSWERS)
        answered = {"state": state, "answer": answer, "reason": reason, "answered_by": by, "answered_ms": now_ms}

        async def body(transaction: Transaction) -> ApprovalRecord:
            known = await _locked_approval(transaction, approval_id)
            for field, value in answered.items():
                ENCODERS[field](field, value)
            after = replace(known, **answered)
            if known.state == "waiting":
                return await _replace(transaction, after)
            if _canonical(known) == _canonical(after):
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
                found += [_decode(row) for row in await transaction.rows(statement, *chunk)]
            return {approval.id: approval for approval in found}

        return await self._database.read(body, inline=True) if ids else {}

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


class SqlCancelStore:
    """A `CancelStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, request: CancelRequest) -> CancelRequest:
        values = _encode_request(request)

        async def body(transaction: Transaction) -> CancelRequest:
            await transaction.run(PUT_CANCEL, *values)
            row = await transaction.row(f"{SELECT_CANCELS} run_id = ? AND owner = ?", request.run_id, request.owner)
            return request if row is None else _decode_request(row)

        return await self._database.write(body, inline=True)

    async def find(self, owners: Mapping[str, str], *, now_ms: int) -> Mapping[str, CancelRequest]:
        ids = sorted({codec.lookup_key(run_id) for run_id in owners})
        now = codec.number("now_ms", now_ms)

        async def body(transaction: Transaction) -> Mapping[str, CancelRequest]:
            found: dict[str, CancelRequest] = {}
            for chunk in chunks(ids):
                statement = (
                    f"{SELECT_CANCELS} run_id IN ({placeholders(len(chunk))}) AND until_ms >= ? ORDER BY at_ms, owner"
                )
                for request in map(_decode_request, await transaction.rows(statement, *chunk, now)):
                    if request.owner in ("", owners[request.run_id]):
                        found.setdefault(request.run_id, request)
            return found

        return await self._database.read(body, inline=True) if ids else {}

    async def of(self, run_id: str) -> Sequence[CancelRequest]:
        return await self._where("run_id = ? ORDER BY at_ms, owner", codec.lookup_key(run_id))

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelRequest]:
        return await self._where("until_ms = ? ORDER BY at_ms, run_id, owner LIMIT ?", UNTIL_ENDED, codec.limit(limit))

    async def _where(self, condition: str, *values: Value) -> Sequence[CancelRequest]:
        async def body(transaction: Transaction) -> Sequence[CancelRequest]:
            return [_decode_request(row) for row in await transaction.rows(f"{SELECT_CANCELS} {condition}", *values)]

        return await self._database.read(body)

    async def drop(self, run_id: str, requests: Collection[CancelRequest] | None = None) -> None:
        rows = [_encode_request(request) for request in requests or () if request.run_id == run_id]

        async def body(transaction: Transaction) -> None:
            if requests is None:
                await transaction.run("DELETE FROM cancels WHERE run_id = ?", codec.lookup_key(run_id))
            else:
                await transaction.run_many(DROP_CANCEL, rows)

        await self._database.write(body, inline=True)

    async def prune(self, *, now_ms: int) -> int:
        now = codec.number("now_ms", now_ms)
        return await self._database.write(
            lambda transaction: transaction.run("DELETE FROM cancels WHERE until_ms < ?", now)
        )


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


async def _locked_approval_of_key(transaction: Transaction, approval: ApprovalRecord) -> ApprovalRecord | None:
    statement = f"{SELECT} WHERE run_id = ? AND key = ?{transaction.dialect.update_lock}"
    row = await transaction.row(statement, approval.run_id, approval.key)
    return None if row is None else _decode(row)


async def _locked_approval(transaction: Transaction, approval_id: str) -> ApprovalRecord:
    statement = f"{SELECT} WHERE id = ?{transaction.dialect.update_lock}"
    row = await transaction.row(statement, codec.lookup_key(approval_id))
    if row is None:
        raise KeyError(f"no approval {approval_id!r}")
    return _decode(row)


async def _replace(transaction: Transaction, approval: ApprovalRecord) -> ApprovalRecord:
    values = _encode(approval)
    await transaction.run(REPLACE, *values, approval.id)
    transaction.notify(_topic(approval.id))
    return _decode(values)


def _encode_request(request: CancelRequest) -> tuple[Value, ...]:
    return (
        codec.name("run_id", request.run_id),
        codec.encode_text("reason", request.reason),
        codec.name("by", request.by),
        codec.number("at_ms", request.at_ms),
        codec.number("until_ms", request.until_ms),
        codec.name("owner", request.owner),
    )


def _decode_request(row: Row) -> CancelRequest:
    run_id, reason, by, at_ms, until_ms, owner = row
    return CancelRequest(run_id, codec.decode_text("cancels", run_id, reason), by, at_ms, until_ms, owner)
