"""Runs in SQL.

A claim is one statement: it finds the oldest run that nobody has and takes it. What a worker writes afterwards carries
the epoch of its claim and is refused if the run has another one by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict, Fenced
from penstock.hosting.records import CLAIMED, ENDED, TRANSITIONS, RunRecord, RunStatus
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.databases.port import FEW, Database, Row, Transaction, Value, marks, portions
from penstock.storage.memory.runs import check_ended, check_same, check_was
from penstock.storage.sql import codec, entries, once
from penstock.storage.sql.memories import forget_runs

FIELDS = RunRecord._fields
COLUMNS = ", ".join(FIELDS)
ID, OUTPUT = FIELDS.index("id"), FIELDS.index("output")

WRITTEN: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "owner": codec.name,
    "graph_id": codec.name,
    "graph_version": codec.number,
    "input": codec.document,
    "limits": codec.object_document,
    "origin": codec.object_document,
    "status": codec.name,
    "created_ms": codec.number,
    "started_ms": codec.optional_number,
    "ended_ms": codec.optional_number,
    "worker": codec.optional_name,
    "lease_until_ms": codec.number,
    "epoch": codec.number,
    "stop_reason": codec.optional_name,
    "error": codec.optional_text,
    "output": codec.document,
    "cost_nanos": codec.number,
    "tokens_in": codec.number,
    "tokens_out": codec.number,
    "unresolved_nanos": codec.number,
    "unknown_costs": codec.number,
}
"""How each field becomes a column."""

DOCUMENTS = frozenset({"input", "limits", "origin", "output"})
CHANGEABLE = (
    *("status", "limits", "started_ms", "ended_ms", "stop_reason", "error", "output"),
    *("cost_nanos", "tokens_in", "tokens_out", "unresolved_nanos", "unknown_costs"),
)
"""What a worker may change; who has a run changes by claims alone."""
CLEARED: Mapping[str, Any] = {"ended_ms": None, "stop_reason": None, "error": None, "output": None}
"""What a run that goes on has not come to yet."""
GIVEN_BACK: Mapping[str, Any] = {"worker": None, "lease_until_ms": 0}
LEFT_BEHIND = (("events", "run_id"), ("journal", "run_id"), ("approvals", "run_id"), ("runs", "id"))
"""Where a run has left something, and by which column it is found there."""

FEW_HAVE: frozenset[RunStatus] = frozenset({"queued", *CLAIMED})
"""A host takes so many and no more; and there is an index of them."""
OPEN = "coalesce(status, '') IN ('queued', 'running', 'waiting')"
"""As the index has it: a database uses the index for what says the same in the same words."""
SELECT = f"SELECT {COLUMNS} FROM runs WHERE id = ?"
INSERT = (
    f"INSERT INTO runs ({COLUMNS}, chat_id) VALUES ({marks(len(FIELDS) + 1)}) "
    f"ON CONFLICT (id) DO NOTHING RETURNING {COLUMNS}"
)
CLAIM = (
    "UPDATE runs SET status = 'running', worker = ?, lease_until_ms = ?, epoch = epoch + 1, "
    "started_ms = coalesce(started_ms, ?) WHERE id = "
    f"(SELECT id FROM runs WHERE {OPEN} AND (status = 'queued' OR lease_until_ms <= ?)"
)
RENEW = "UPDATE runs SET lease_until_ms = CASE WHEN lease_until_ms < ? THEN ? ELSE lease_until_ms END WHERE worker = ?"
SELECT_ENDED = (
    "SELECT id FROM runs WHERE ended_ms IS NOT NULL AND ended_ms < ? "
    "AND coalesce(status, '') IN ('cancelled', 'completed', 'failed', 'halted') ORDER BY ended_ms, id LIMIT ?"
)


class SqlRunStore:
    """A `RunStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> RunRecord:
        values = [*_written(run), _chat_id(run)]
        rows = [entries.written(run.id, entry) for entry in journal]

        async def act(transaction: Transaction) -> RunRecord:
            row = await transaction.row(INSERT, *values)
            if row is not None:
                if rows:  # and nothing that was left under its id
                    await transaction.run(entries.FORGET, run.id)
                    await entries.keep(transaction, rows)
                return _record(row)
            known = await _there(transaction, run.id)
            check_same(known, run)
            return known

        return await self._database.write(act, brief=len(rows) <= FEW)

    async def get(self, run_id: str) -> RunRecord | None:
        async def act(transaction: Transaction) -> RunRecord | None:
            row = await transaction.row(SELECT, codec.sought(run_id))
            return None if row is None else await _read(transaction, row)

        return await self._database.read(act, brief=True)

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[RunRecord]:
        where, values = _where(statuses, owner=owner, graph_id=graph_id, chat_id=chat_id)
        if before is not None:
            where.append("(created_ms, id) < (SELECT created_ms, id FROM runs WHERE id = ?)")
            values.append(codec.sought(before))
        statement = f"SELECT {COLUMNS} FROM runs{_all(where)} ORDER BY created_ms DESC, id DESC LIMIT ?"
        values.append(codec.limit(limit))

        async def act(transaction: Transaction) -> Sequence[RunRecord]:
            return await _read_all(transaction, await transaction.rows(statement, *values))

        return await self._database.read(act)

    async def count(self, *, owner: str | None = None, statuses: Collection[RunStatus] = ()) -> int:
        where, values = _where(statuses, owner=owner)

        async def act(transaction: Transaction) -> int:
            row = await transaction.row(f"SELECT count(*) FROM runs{_all(where)}", *values)
            assert row is not None, "a count is one row"
            return int(row[0])

        return await self._database.read(act, brief=bool(statuses) and FEW_HAVE.issuperset(statuses))

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        values: list[Value] = [codec.name("worker", worker), until_ms, now_ms, now_ms]
        values += [] if run_id is None else [codec.sought(run_id)]
        statement = f"{CLAIM}{'' if run_id is None else ' AND id = ?'} ORDER BY created_ms, id LIMIT 1"

        async def act(transaction: Transaction) -> RunRecord | None:
            claim = f"{statement}{transaction.dialect.skip_locked}) RETURNING {COLUMNS}"
            row = await transaction.row(claim, *values)
            return None if row is None else _record(row)

        return await self._database.write(act, brief=True)

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        ids = sorted({codec.sought(run_id) for run_id in run_ids})  # in one order, so that no two wait for each other

        async def act(transaction: Transaction) -> Collection[str]:
            mine: set[str] = set()
            for some in portions(ids):
                statement = f"{RENEW} AND id IN ({marks(len(some))}) RETURNING id"
                rows = await transaction.rows(statement, until_ms, until_ms, codec.sought(worker), *some)
                mine.update(row[0] for row in rows)
            return mine

        return await self._database.write(act) if ids else set()

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        async def act(transaction: Transaction) -> RunRecord:
            known = await _there(transaction, run_id)
            if known.epoch != epoch:
                raise Fenced(run_id, epoch)
            after = _changed(known, changes)
            if known.status not in CLAIMED:
                return _as_asked(known, after, "nobody has claimed it")
            _check_way(known, after.status)
            return await _replaced(transaction, known, after, {} if after.status in CLAIMED else GIVEN_BACK)

        return await self._database.write(act, brief=once.is_short(changes.get("output")))

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        changes: dict[str, Any] = {"status": "queued"} if limits is None else {"status": "queued", "limits": limits}

        async def act(transaction: Transaction) -> RunRecord:
            known = await _there(transaction, run_id)
            if known.epoch != epoch:
                raise Fenced(run_id, epoch)
            after = _changed(known, changes)
            if known.status == "queued":
                return _as_asked(known, after, "it waits for its turn already, with other limits")
            check_was(known, was)
            _check_way(known, "queued")
            return await _replaced(transaction, known, after, CLEARED)

        return await self._database.write(act, brief=True)

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        changes = {"ended_ms": now_ms, **changes, "status": status}

        async def act(transaction: Transaction) -> RunRecord:
            known = await _there(transaction, run_id)
            codec.one_of("status", status, ENDED)
            after = _changed(known, changes)
            if known.status in ENDED:
                return _as_asked(known, after, "it has ended")
            if known.status in CLAIMED:
                raise Conflict(f"run {run_id!r} is {known.status}: {known.worker!r} has claimed it, and must end it")
            _check_way(known, status)
            return await _replaced(transaction, known, after, {})

        return await self._database.write(act, brief=True)

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def act(transaction: Transaction) -> Sequence[str]:
            rows = await transaction.rows(f"{SELECT_ENDED}{transaction.dialect.skip_locked}", *values)
            removed = [str(row[0]) for row in rows]
            await _forget(transaction, removed)
            return removed

        return await self._database.write(act)

    async def remove(self, run_id: str) -> None:
        async def act(transaction: Transaction) -> None:
            try:
                check_ended(await _there(transaction, run_id))
            except KeyError:
                return
            await _forget(transaction, [run_id])

        await self._database.write(act)


async def _forget(transaction: Transaction, run_ids: Sequence[str]) -> None:
    """Remove runs with all they left, and wake who reads of them."""
    for table, column in LEFT_BEHIND:
        await transaction.run_many(f"DELETE FROM {table} WHERE {column} = ?", [(id,) for id in run_ids])
    await forget_runs(transaction, run_ids)
    for id in run_ids:
        transaction.ring(f"run:{id}")


async def check_claim(transaction: Transaction, run_id: str, epoch: int, lock: str) -> None:
    """Fenced unless this is the newest claim, and stays so until the transaction has ended.

    A run that is not there was claimed 0 times.
    """
    row = await transaction.row(f"SELECT epoch FROM runs WHERE id = ?{lock}", run_id)
    if epoch != (0 if row is None else row[0]):
        raise Fenced(run_id, epoch)


def _written(run: RunRecord) -> list[Value]:
    codec.one_of("status", run.status, TRANSITIONS)
    return [write(field, getattr(run, field)) for field, write in WRITTEN.items()]


async def _read(transaction: Transaction, row: Row) -> RunRecord:
    (record,) = await _read_all(transaction, [row])
    return record


async def _read_all(transaction: Transaction, rows: Sequence[Row]) -> list[RunRecord]:
    outputs = await once.whole(transaction, [(row[ID], row[OUTPUT]) for row in rows])
    return [_record((*row[:OUTPUT], output, *row[OUTPUT + 1 :])) for row, output in zip(rows, outputs, strict=True)]


def _record(row: Row) -> RunRecord:
    kept = dict(zip(FIELDS, row, strict=True))
    id = kept["id"]
    kept["status"] = codec.read_one_of("runs", id, TRANSITIONS, kept["status"])
    for field in ("input", "output"):
        kept[field] = codec.read_document("runs", id, kept[field])
    for field in ("limits", "origin"):
        kept[field] = codec.read_object("runs", id, kept[field])
    kept["error"] = codec.read_optional_text("runs", id, kept["error"])
    return RunRecord(**kept)


def _chat_id(run: RunRecord) -> str | None:
    chat_id = run.chat_id
    return None if chat_id is None or codec.sought(chat_id) != chat_id else chat_id


async def _there(transaction: Transaction, run_id: str) -> RunRecord:
    row = await transaction.row(f"{SELECT}{transaction.dialect.update_lock}", codec.sought(run_id))
    if row is None:
        raise KeyError(f"no run {run_id!r}")
    return await _read(transaction, row)


async def _replaced(
    transaction: Transaction, known: RunRecord, after: RunRecord, further: Mapping[str, Any]
) -> RunRecord:
    """The run as it is then; only the columns that differ are written."""
    pairs = zip(FIELDS, _written(known), _written(after._replace(**further)), strict=True)
    changes = {field: new for field, old, new in pairs if new != old}
    if not changes:
        return known
    if after.status == "completed" and "output" in changes:
        changes["output"] = await once.left_out(transaction, known.id, str(changes["output"]))
    settings = ", ".join(f"{field} = ?" for field in changes)
    statement = f"UPDATE runs SET {settings} WHERE id = ? RETURNING {COLUMNS}"
    row = await transaction.row(statement, *changes.values(), known.id)
    assert row is not None, "it is there, and locked"
    return await _read(transaction, row)


def _as_asked(known: RunRecord, after: RunRecord, why: str) -> RunRecord:
    """The run, if it is already what was asked for: an answer that was lost may be asked for again."""
    if _canonical(known) == _canonical(after):
        return known
    raise Conflict(f"run {known.id!r} is {known.status}: {why}")


def _canonical(run: RunRecord) -> list[Any]:
    return [
        codec.canonical(field, getattr(run, field)) if field in DOCUMENTS else getattr(run, field) for field in FIELDS
    ]


def _changed(run: RunRecord, changes: Mapping[str, Any]) -> RunRecord:
    """The run with the changes; InvalidValue for one that cannot be made, or kept."""
    for field, value in changes.items():
        if field not in CHANGEABLE:
            raise InvalidValue("changes", field, f"one of {', '.join(CHANGEABLE)}")
        WRITTEN[field](field, value)
    if "status" in changes:
        codec.one_of("status", changes["status"], TRANSITIONS)
    return run._replace(**changes)


def _check_way(run: RunRecord, status: RunStatus) -> None:
    if status not in TRANSITIONS[run.status]:
        ways = ", ".join(sorted(TRANSITIONS[run.status])) or "nowhere"
        raise Conflict(f"run {run.id!r} is {run.status} and cannot become {status}; it can go to: {ways}")


def _where(statuses: Collection[RunStatus], **names: str | None) -> tuple[list[str], list[Value]]:
    asked = {field: codec.sought(value) for field, value in names.items() if value is not None}
    where = [f"{field} = ?" for field in asked]
    values: list[Value] = list(asked.values())
    if statuses:
        where.append(f"status IN ({marks(len(statuses))})")
        values.extend(codec.one_of("statuses", status, TRANSITIONS) for status in statuses)
    return where, values


def _all(where: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(where)}" if where else ""
