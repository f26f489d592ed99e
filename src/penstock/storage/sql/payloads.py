"""SQL store of recorded payloads."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import checks
from penstock.hosting.ports import PayloadRecord
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value, placeholders
from penstock.storage.rules import PAYLOAD_RECORDINGS, check_payloads
from penstock.storage.sql.events import check_claim

FIELDS = PayloadRecord._fields
COLUMNS = ", ".join(FIELDS)
SELECT = f"SELECT {COLUMNS} FROM payloads WHERE run_id = ? AND call_id = ?"
INSERT = (
    f"INSERT INTO payloads ({COLUMNS}) VALUES ({placeholders(len(FIELDS))})"
    " ON CONFLICT (run_id, call_id) DO UPDATE SET " + ", ".join(f"{field} = excluded.{field}" for field in FIELDS[2:])
)
SELECT_OLD = "SELECT run_id, call_id FROM payloads WHERE at_ms < ? ORDER BY at_ms, run_id, call_id LIMIT ?"
DELETE = "DELETE FROM payloads WHERE run_id = ? AND call_id = ?"


class SqlPayloadStore(SqlStore):
    """A `PayloadStore` over a database."""

    async def put(self, run_id: str, payloads: Sequence[PayloadRecord], *, epoch: int = 0) -> None:
        check_payloads(run_id, payloads)
        rows = [_encode(payload) for payload in payloads]

        async def body(transaction: Transaction) -> None:
            await check_claim(transaction, codec.lookup_key(run_id), epoch, transaction.dialect.share_lock)
            await transaction.run_many(INSERT, rows)

        await self._database.write(body)

    async def get(self, run_id: str, call_id: str) -> PayloadRecord | None:
        async def body(transaction: Transaction) -> PayloadRecord | None:
            row = await transaction.row(SELECT, codec.lookup_key(run_id), codec.lookup_key(call_id))
            return None if row is None else _decode(row)

        return await self._database.read(body, single=True)

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def body(transaction: Transaction) -> int:
            rows = await transaction.rows(f"{SELECT_OLD}{transaction.dialect.skip_locked}", *values)
            await transaction.run_many(DELETE, [(row[0], row[1]) for row in rows])
            return len(rows)

        return await self._database.write(body)


def _encode(payload: PayloadRecord) -> tuple[Value, ...]:
    checks.choice("recording", payload.recording, PAYLOAD_RECORDINGS)
    return (
        codec.name("run_id", payload.run_id),
        codec.name("call_id", payload.call_id),
        codec.number("epoch", payload.epoch),
        payload.recording,
        codec.encode_document("request", payload.request),
        codec.encode_document("response", payload.response),
        codec.number("at_ms", payload.at_ms),
    )


def _decode(row: Row) -> PayloadRecord:
    run_id, call_id, epoch, recording, request, response, at_ms = row
    key = f"{run_id}/{call_id}"
    known = codec.decode_one_of("payloads", key, PAYLOAD_RECORDINGS, recording)
    given, returned = (codec.decode_document("payloads", key, text) for text in (request, response))
    return PayloadRecord(run_id, call_id, epoch, known, given, returned, at_ms)


CHECKS = (TableCheck("payloads", COLUMNS, ("run_id", "call_id"), ("", ""), _decode),)
