"""SQL store of the audit log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from penstock import checks
from penstock.hosting.audit import AUDIT_SOURCES, NO_AUDIT_FILTER, AuditFilter, AuditRecord
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value, placeholders
from penstock.storage.rules import check_audit_filter

FIELDS = tuple(field.name for field in fields(AuditRecord))
COLUMNS = ", ".join(FIELDS)
ENCODERS: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "at_ms": codec.number,
    "actor": codec.name,
    "action": codec.name,
    "target": codec.name,
    "owner": codec.name,
    "source": lambda field, value: codec.name(field, checks.choice(field, value, AUDIT_SOURCES)),
    "details": codec.encode_object,
}
"""Encoder of each field's column value."""

SELECT = f"SELECT {COLUMNS} FROM audit"
INSERT = f"INSERT INTO audit ({COLUMNS}) VALUES ({placeholders(len(FIELDS))}) ON CONFLICT (id) DO NOTHING"
NAMED = "SELECT count(*) FROM audit WHERE actor = ? OR owner = ?"
RENAME = (
    "UPDATE audit SET actor = CASE WHEN actor = ? THEN ? ELSE actor END,"
    " owner = CASE WHEN owner = ? THEN ? ELSE owner END WHERE actor = ? OR owner = ?"
)
SELECT_OLD = "SELECT id FROM audit WHERE at_ms < ? ORDER BY at_ms, id LIMIT ?"
DELETE = "DELETE FROM audit WHERE id = ?"


class SqlAuditStore(SqlStore):
    """An `AuditStore` over a database."""

    async def append(self, entry: AuditRecord) -> None:
        values = [encode(field, getattr(entry, field)) for field, encode in ENCODERS.items()]

        async def body(transaction: Transaction) -> None:
            await transaction.run(INSERT, *values)

        await self._database.write(body, inline=True)

    async def list(
        self, matching: AuditFilter = NO_AUDIT_FILTER, *, before: str | None = None, limit: int = 100
    ) -> Sequence[AuditRecord]:
        check_audit_filter(matching)
        conditions = [*_conditions(matching)]
        if before is not None:
            place = "(at_ms, id) < (SELECT at_ms, id FROM audit WHERE id = ?)"
            conditions.append((place, [codec.lookup_key(before)]))
        where = " WHERE " + " AND ".join(text for text, _ in conditions) if conditions else ""
        values = [value for _, given in conditions for value in given]
        statement = f"{SELECT}{where} ORDER BY at_ms DESC, id DESC LIMIT ?"
        values.append(codec.limit(limit))

        async def body(transaction: Transaction) -> Sequence[AuditRecord]:
            return self._database.faults.readable(await transaction.rows(statement, *values), _decode)

        return await self._database.read(body, single=True)

    async def rename(self, name: str, pseudonym: str) -> int:
        old, new = codec.name("name", name), codec.name("pseudonym", pseudonym)

        async def body(transaction: Transaction) -> int:
            row = await transaction.row(NAMED, old, old)
            await transaction.run(RENAME, old, new, old, new, old, old)
            return 0 if row is None else row[0]

        return await self._database.write(body)

    async def remove_before(self, before_ms: int, *, limit: int = 1_000) -> int:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def body(transaction: Transaction) -> int:
            rows = await transaction.rows(f"{SELECT_OLD}{transaction.dialect.skip_locked}", *values)
            await transaction.run_many(DELETE, [(row[0],) for row in rows])
            return len(rows)

        return await self._database.write(body)


def _conditions(wanted: AuditFilter) -> Sequence[tuple[str, list[Value]]]:
    found: list[tuple[str, list[Value]]] = []
    if wanted.actor is not None:
        found.append(("(actor = ? OR owner = ?)", [wanted.actor] * 2))
    if wanted.action is not None:
        found.append(("(action = ? OR substr(action, 1, ?) = ?)", [wanted.action, *_prefix(wanted.action)]))
    if wanted.target is not None:
        found.append(("target = ?", [wanted.target]))
    if wanted.since_ms is not None:
        found.append(("at_ms >= ?", [wanted.since_ms]))
    if wanted.until_ms is not None:
        found.append(("at_ms < ?", [wanted.until_ms]))
    return found


def _prefix(action: str) -> tuple[Value, Value]:
    return len(action) + 1, f"{action}."


def _decode(row: Row) -> AuditRecord:
    values = dict(zip(FIELDS, row, strict=True))
    id = values["id"]
    values["source"] = codec.decode_one_of("audit", id, AUDIT_SOURCES, values["source"])
    values["details"] = codec.decode_object("audit", id, values["details"])
    return AuditRecord(**values)


CHECKS = (TableCheck("audit", COLUMNS, ("id",), ("",), _decode),)
