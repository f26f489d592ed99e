"""SQL stores of runs, and of the requests to cancel them.

A claim is one statement: it finds the oldest run without a worker or with an expired lease, and takes it. The worker's
later writes carry the epoch of its claim and are refused if the run has another epoch by then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from penstock import checks
from penstock.errors import InvalidValue
from penstock.hosting.ports import (
    CLAIMED,
    ENDED,
    NO_FILTER,
    TRANSITIONS,
    UNTIL_ENDED,
    USAGE,
    AddedRun,
    BillState,
    CancelRequest,
    Conflict,
    Fenced,
    RunFilter,
    RunOrder,
    RunRecord,
    RunStatus,
    StoreCorrupt,
    is_short,
)
from penstock.ids import new_run_id
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import codec
from penstock.storage.port import INLINE_MAX_ROWS, Row, SqlStore, TableCheck, Transaction, Value, chunks, placeholders
from penstock.storage.rules import (
    check_ended,
    check_resting,
    check_same_run,
    check_transition,
    check_was,
    checked_usage,
    lower_ascii,
)
from penstock.storage.sql.events import encode_entry, replace_journal, restore_outputs, shorten_output, without_marks
from penstock.storage.sql.memories import forget_runs
from penstock.storage.sql.spending import roll_up

FIELDS = RunRecord._fields
COLUMNS = ", ".join(FIELDS)
ID, OUTPUT = FIELDS.index("id"), FIELDS.index("output")


def _encode_origin(field: str, value: object) -> str:
    """Encode an origin with its kind first: lists of runs are filtered by that beginning."""
    if isinstance(value, Mapping) and "kind" in value:
        value = {"kind": value["kind"], **value}
    return codec.encode_object(field, value)


ENCODERS: Mapping[str, Callable[[str, object], Value]] = {
    "id": codec.name,
    "owner": codec.name,
    "graph_id": codec.name,
    "graph_version": codec.number,
    "input": codec.encode_document,
    "limits": codec.encode_object,
    "origin": _encode_origin,
    "status": codec.name,
    "created_ms": codec.number,
    "started_ms": codec.optional_number,
    "ended_ms": codec.optional_number,
    "worker": codec.optional_name,
    "lease_until_ms": codec.number,
    "epoch": codec.number,
    "stop_reason": codec.optional_name,
    "error": codec.encode_optional_text,
    "output": codec.encode_document,
    "cost_nanos": codec.number,
    "tokens_in": codec.number,
    "tokens_out": codec.number,
    "unresolved_nanos": codec.number,
    "unknown_costs": codec.number,
    "grants": codec.number,
    "crash_count": codec.number,
    "worked_ms": codec.number,
    "resumed_ms": codec.optional_number,
    "halt": codec.encode_document,
    "queue": codec.optional_name,
    "priority": codec.number,
    "fence": codec.number,
}
"""Encoder of each field's column value."""


def _decode_epoch(table: str, run_id: str, epoch: int) -> int:
    if 0 <= epoch < codec.MAX_NUMBER:
        return epoch
    raise StoreCorrupt(table, run_id, f"{epoch} cannot be the number of its claims")


DECODERS: Mapping[str, Callable[[str, str, Any], Any]] = {
    "status": lambda table, id, value: codec.decode_one_of(table, id, TRANSITIONS, value),
    "input": codec.decode_document,
    "limits": codec.decode_object,
    "origin": codec.decode_object,
    "error": codec.decode_optional_text,
    "output": codec.decode_document,
    "halt": codec.decode_optional_object,
    "epoch": _decode_epoch,
}
"""Decoder of each column that is not stored as it is."""

UNREADABLE: Mapping[str, Any] = {
    "status": "failed",
    "input": None,
    "limits": {},
    "origin": {},
    "error": None,
    "output": None,
    "halt": None,
}
"""Shown instead of fields that cannot be decoded."""

DOCUMENTS = frozenset({"input", "limits", "origin", "output", "halt"})
CHANGEABLE = (
    *("status", "limits", "started_ms", "ended_ms", "stop_reason", "error", "output"),
    *USAGE,
    *("crash_count", "worked_ms", "resumed_ms", "halt"),
)
"""The fields that a worker may change; only a claim assigns a run to a worker."""
CLEARED: Mapping[str, Any] = {
    "ended_ms": None,
    "stop_reason": None,
    "error": None,
    "output": None,
    "crash_count": 0,
    "halt": None,
}
"""The result fields, which are reset when a run is requeued."""
UNCLAIMED: Mapping[str, Any] = {"worker": None, "lease_until_ms": 0}
RUN_TABLES = (
    *(("events", "run_id"), ("journal", "run_id"), ("approvals", "run_id"), ("payloads", "run_id")),
    ("runs", "id"),
)
"""Tables with rows of a run, each with the column of the run id."""

MAX_FAILED_PER_CLAIM = 100
"""Maximum number of unreadable runs that one claim fails before it leaves the rest to the next one."""
MAX_ERROR = 2_000
"""Maximum length of the error of a run that cannot be read."""
RARE_STATUSES: frozenset[RunStatus] = frozenset({"queued", *CLAIMED})
"""Statuses that few runs have: a host bounds their number, and an index covers them."""
OPEN = "coalesce(status, '') IN ('queued', 'running', 'waiting')"
"""Worded as in the partial index: a database uses the index only for the same condition."""
SELECT = f"SELECT {COLUMNS} FROM runs WHERE id = ?"
INSERT = f"INSERT INTO runs ({COLUMNS}, chat_id) VALUES ({placeholders(len(FIELDS) + 1)}) ON CONFLICT (id) DO NOTHING"
CLAIMS = (
    "UPDATE runs SET status = 'running', worker = ?, lease_until_ms = ?, "
    f"epoch = CASE WHEN epoch < {codec.MAX_NUMBER} THEN epoch + 1 ELSE epoch END, "
    "started_ms = coalesce(started_ms, ?)"
)
CLAIMABLE = f"FROM runs WHERE {OPEN} AND queue IS NULL AND (status = 'queued' OR lease_until_ms <= ?)"
CLAIM = f"{CLAIMS} WHERE id = (SELECT id {CLAIMABLE}"
SELECT_CLAIMABLE = f"SELECT 1 {CLAIMABLE} LIMIT 1"
TAKE = (
    f"{CLAIMS}, queue = ?, fence = ? WHERE id = ? AND {OPEN} AND fence < ? "
    f"AND (fence > 0 OR status = 'queued' OR lease_until_ms <= ?) RETURNING {COLUMNS}"
)
SELECT_DATABASE_ID = "SELECT id FROM database_identity WHERE number = 1"
INSERT_DATABASE_ID = "INSERT INTO database_identity (number, id) VALUES (1, ?) ON CONFLICT (number) DO NOTHING"
FAIL = (
    "UPDATE runs SET status = 'failed', worker = NULL, lease_until_ms = 0, error = ?, "
    "ended_ms = coalesce(ended_ms, ?) WHERE id = ?"
)
"""Ends a run whose row cannot be decoded; the columns that cannot be read stay as they are."""
FAIL_ANSWER = (
    """UPDATE messages SET data = """
    """replace(data, '"state":"writing"', '"state":"failed","error":"its run cannot be read"') """
    """WHERE chat_id = (SELECT chat_id FROM runs WHERE id = ?) AND data LIKE '%"state":"writing"%' AND data LIKE ?"""
)
"""Ends the answer that such a run was writing, so that its chat can go on. The handler of the run cannot do it."""
SELECT_CLAIM = "SELECT status, epoch FROM runs WHERE id = ?"
RENEW = "UPDATE runs SET lease_until_ms = CASE WHEN lease_until_ms < ? THEN ? ELSE lease_until_ms END WHERE worker = ?"
SELECT_ENDED = (
    "SELECT id FROM runs WHERE ended_ms IS NOT NULL AND ended_ms < ? "
    "AND coalesce(status, '') IN ('cancelled', 'completed', 'failed', 'halted') ORDER BY ended_ms, id LIMIT ?"
)


BILLS: Mapping[BillState, str] = {"unresolved": "unresolved_nanos > 0", "unknown": "unknown_costs > 0"}
"""Worded as in the partial indexes."""
RANKS: Mapping[RunOrder, Sequence[str]] = {"created": ("created_ms", "id"), "cost": ("cost_nanos", "created_ms", "id")}
"""Columns that a list is sorted by, all in descending order."""


class SqlRunStore(SqlStore):
    """A `RunStore` over a database."""

    async def add(self, run: RunRecord, journal: Sequence[JournalEntry] = ()) -> AddedRun:
        values, chat_id = _encode(run), _chat_id(run)
        rows = [encode_entry(run.id, entry) for entry in journal]

        async def body(transaction: Transaction) -> AddedRun:
            if await transaction.run(INSERT, *values, chat_id):
                if rows:
                    await replace_journal(transaction, run.id, rows)
                return AddedRun(_decode(values), is_new=True)
            known = await _locked_run(transaction, run.id)
            check_same_run(known, run)
            return AddedRun(known, is_new=False)

        return await self._database.write(body, inline=len(rows) <= INLINE_MAX_ROWS)

    async def get(self, run_id: str) -> RunRecord | None:
        async def body(transaction: Transaction) -> RunRecord | None:
            row = await transaction.row(SELECT, codec.lookup_key(run_id))
            return None if row is None else await _read(transaction, row)

        return await self._database.read(body, inline=True, single=True)

    async def list(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        before: str | None = None,
        limit: int = 50,
        matching: RunFilter = NO_FILTER,
        order: RunOrder = "created",
    ) -> Sequence[RunRecord]:
        where, values = _where(statuses, owner=owner, graph_id=graph_id, chat_id=chat_id)
        _add_filter(where, values, matching)
        rank = RANKS[order]
        if before is not None:
            where.append(f"({', '.join(rank)}) < (SELECT {', '.join(rank)} FROM runs WHERE id = ?)")
            values.append(codec.lookup_key(before))
        newest = ", ".join(f"{column} DESC" for column in rank)
        statement = f"SELECT {COLUMNS} FROM runs{_all(where)} ORDER BY {newest} LIMIT ?"
        values.append(codec.limit(limit))

        async def body(transaction: Transaction) -> Sequence[RunRecord]:
            rows = await _with_outputs(transaction, await transaction.rows(statement, *values))
            return [self._decode_or_mark(row) for row in rows]

        return await self._database.read(body, single=True)

    async def count(
        self,
        *,
        owner: str | None = None,
        statuses: Collection[RunStatus] = (),
        graph_id: str | None = None,
        chat_id: str | None = None,
        matching: RunFilter = NO_FILTER,
        at_most: int | None = None,
    ) -> int:
        where, values = _where(statuses, owner=owner, graph_id=graph_id, chat_id=chat_id)
        _add_filter(where, values, matching)
        is_rare = bool(statuses) and RARE_STATUSES.issuperset(statuses)
        statement = f"SELECT count(*) FROM runs{_all(where)}"
        if at_most is not None:
            statement = f"SELECT count(*) FROM (SELECT 1 FROM runs{_all(where)} LIMIT ?) AS counted"
            values.append(codec.limit(at_most))

        async def body(transaction: Transaction) -> int:
            row = await transaction.row(statement, *values)
            assert row is not None, "a count is one row"
            return int(row[0])

        return await self._database.read(body, inline=is_rare, single=True)

    async def claim(self, worker: str, *, now_ms: int, lease_ms: int, run_id: str | None = None) -> RunRecord | None:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        values: list[Value] = [codec.name("worker", worker), until_ms, now_ms, now_ms]
        values += [] if run_id is None else [codec.lookup_key(run_id)]
        statement = f"{CLAIM}{'' if run_id is None else ' AND id = ?'} ORDER BY created_ms, id LIMIT 1"
        if run_id is None and not await self._has_claimable(now_ms):
            return None  # nearly always: an idle host looks at every tick, and need not write to do so

        async def body(transaction: Transaction) -> RunRecord | None:
            claim = f"{statement}{transaction.dialect.skip_locked}) RETURNING {COLUMNS}"
            for _ in range(MAX_FAILED_PER_CLAIM):
                row = await transaction.row(claim, *values)
                if row is None:
                    return None
                try:
                    return _decode(row)
                except StoreCorrupt as error:  # no worker can run it; the next run can still be claimed
                    await self._fail(transaction, row[ID], error, now_ms)
            return None

        return await self._database.write(body, inline=True)

    async def _has_claimable(self, now_ms: int) -> bool:
        async def body(transaction: Transaction) -> bool:
            return await transaction.row(SELECT_CLAIMABLE, now_ms) is not None

        return await self._database.read(body, inline=True, single=True)

    async def take(
        self, run_id: str, worker: str, fence: int, *, queue: str, now_ms: int, lease_ms: int
    ) -> RunRecord | None:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        newer = codec.number("fence", checks.integer("fence", fence, minimum=1))
        key, name = codec.lookup_key(run_id), codec.name("worker", worker)
        values: list[Value] = [name, until_ms, now_ms, codec.name("queue", queue), newer, key, newer, now_ms]

        async def body(transaction: Transaction) -> RunRecord | None:
            row = await transaction.row(TAKE, *values)
            try:
                if row is not None:
                    return _decode(row)
                known = await transaction.row(SELECT, key)
                run = None if known is None else await _read(transaction, known)
            except StoreCorrupt as error:
                if row is not None:
                    await self._fail(transaction, key, error, now_ms)
                return None
            is_mine = run is not None and run.status in CLAIMED and (run.worker, run.fence) == (worker, fence)
            return run if is_mine else None

        return await self._database.write(body, inline=True)

    async def database_id(self) -> str:
        async def body(transaction: Transaction) -> str:
            row = await transaction.row(SELECT_DATABASE_ID)
            if row is None:
                await transaction.run(INSERT_DATABASE_ID, new_run_id())
                row = await transaction.row(SELECT_DATABASE_ID)
            assert row is not None, "it was just stored, here or by another process"
            return str(row[0])

        return await self._database.write(body)

    async def fail_unreadable(self, run_id: str, error: StoreCorrupt, *, now_ms: int, epoch: int | None = None) -> None:
        async def body(transaction: Transaction) -> None:
            row = await transaction.row(SELECT_CLAIM + transaction.dialect.update_lock, codec.lookup_key(run_id))
            if row is None or row[0] in ENDED or (row[0] in CLAIMED and row[1] != epoch):
                return
            await self._fail(transaction, run_id, error, now_ms)

        await self._database.write(body, inline=True)

    async def _fail(self, transaction: Transaction, run_id: str, error: StoreCorrupt, now_ms: int) -> None:
        self._database.faults.note(error)
        await transaction.run(FAIL, codec.encode_text("error", describe(error)), now_ms, run_id)
        await transaction.run(FAIL_ANSWER, run_id, f'%"run_id":{codec.encode_text("run_id", run_id)}%')
        transaction.notify(f"run:{run_id}")

    def _decode_or_mark(self, row: Row) -> RunRecord:
        """Decode a row for a list; one that cannot be decoded is shown as a failed run, with the reason as its error.

        So a page is complete, and a page boundary stays where it was.
        """
        try:
            return _decode(row)
        except StoreCorrupt as error:
            self._database.faults.note(error)
            values = dict(zip(FIELDS, row, strict=True))
            shown = {field: _decode_or_default(values["id"], field, values[field]) for field in UNREADABLE}
            return RunRecord(**{**values, **shown, "error": describe(error)})

    async def renew(self, worker: str, run_ids: Collection[str], *, now_ms: int, lease_ms: int) -> Collection[str]:
        until_ms = codec.number("lease_until_ms", now_ms + lease_ms)
        ids = sorted({codec.lookup_key(run_id) for run_id in run_ids})  # ordered, so that renewals cannot deadlock

        async def body(transaction: Transaction) -> Collection[str]:
            mine: set[str] = set()
            for chunk in chunks(ids):
                statement = f"{RENEW} AND id IN ({placeholders(len(chunk))}) RETURNING id"
                rows = await transaction.rows(statement, until_ms, until_ms, codec.lookup_key(worker), *chunk)
                mine.update(row[0] for row in rows)
            return mine

        return await self._database.write(body) if ids else set()

    async def update(self, run_id: str, epoch: int, **changes: Any) -> RunRecord:
        async def body(transaction: Transaction) -> RunRecord:
            known = await _locked_run(transaction, run_id)
            if known.epoch != epoch:
                raise Fenced(run_id, epoch)
            after = _changed(known, changes)
            if known.status not in CLAIMED:
                return _unchanged(known, after, "no worker has claimed it")
            check_transition(known, after.status)
            return await _replace(transaction, known, after, {} if after.status in CLAIMED else UNCLAIMED)

        return await self._database.write(body, inline=is_short(changes.get("output")))

    async def requeue(
        self, run_id: str, epoch: int, *, limits: Mapping[str, Any] | None = None, was: RunStatus | None = None
    ) -> RunRecord:
        changes: dict[str, Any] = {"status": "queued"} if limits is None else {"status": "queued", "limits": limits}

        async def body(transaction: Transaction) -> RunRecord:
            known = await _locked_run(transaction, run_id)
            if known.epoch != epoch:
                raise Fenced(run_id, epoch)
            after = _changed(known, changes)
            if known.status == "queued":
                return _unchanged(known, after, "it is queued already, with other limits")
            check_was(known, was)
            check_transition(known, "queued")
            grants = known.grants if limits is None else known.grants + 1
            return await _replace(transaction, known, after, {**CLEARED, "grants": grants})

        return await self._database.write(body, inline=True)

    async def end(self, run_id: str, status: RunStatus, *, now_ms: int, **changes: Any) -> RunRecord:
        changes = {"ended_ms": now_ms, **changes, "status": status}

        async def body(transaction: Transaction) -> RunRecord:
            known = await _locked_run(transaction, run_id)
            checks.choice("status", status, sorted(ENDED))
            after = _changed(known, changes)
            if known.status in ENDED:
                return _unchanged(known, after, "it has ended")
            if known.status in CLAIMED:
                raise Conflict(f"run {run_id!r} is {known.status}: {known.worker!r} has claimed it, and must end it")
            check_transition(known, status)
            return await _replace(transaction, known, after, {})

        return await self._database.write(body, inline=True)

    async def set_usage(self, run_id: str, epoch: int, **usage: int) -> RunRecord:
        figures = checked_usage(usage)

        async def body(transaction: Transaction) -> RunRecord:
            known = await _locked_run(transaction, run_id)
            if known.epoch != epoch:
                raise Fenced(run_id, epoch)
            check_resting(known)
            return await _replace(transaction, known, known._replace(**figures), {})

        return await self._database.write(body, inline=True)

    async def remove_ended(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def body(transaction: Transaction) -> Sequence[str]:
            rows = await transaction.rows(f"{SELECT_ENDED}{transaction.dialect.skip_locked}", *values)
            removed = [str(row[0]) for row in rows]
            await _delete_runs(transaction, removed)
            return removed

        return await self._database.write(body)

    async def remove(self, run_id: str) -> None:
        async def body(transaction: Transaction) -> None:
            try:
                check_ended(await _locked_run(transaction, run_id))
            except KeyError:
                return
            await _delete_runs(transaction, [run_id])

        await self._database.write(body)


async def _delete_runs(transaction: Transaction, run_ids: Sequence[str]) -> None:
    """Remove runs with all their rows, and wake the readers of their events."""
    for table, column in RUN_TABLES:
        await transaction.run_many(f"DELETE FROM {table} WHERE {column} = ?", [(id,) for id in run_ids])
    await roll_up(transaction, run_ids)
    await forget_runs(transaction, run_ids)
    for id in run_ids:
        transaction.notify(f"run:{id}")


def _encode(run: RunRecord) -> list[Value]:
    checks.choice("status", run.status, TRANSITIONS)
    return [encode(field, getattr(run, field)) for field, encode in ENCODERS.items()]


async def _read(transaction: Transaction, row: Row) -> RunRecord:
    (whole,) = await _with_outputs(transaction, [row])
    return _decode(whole)


async def _with_outputs(transaction: Transaction, rows: Sequence[Row]) -> list[Row]:
    """Return the rows with long outputs restored."""
    outputs = await restore_outputs(transaction, [(row[ID], row[OUTPUT]) for row in rows])
    return [(*row[:OUTPUT], output, *row[OUTPUT + 1 :]) for row, output in zip(rows, outputs, strict=True)]


def _decode(row: Row) -> RunRecord:
    values = dict(zip(FIELDS, row, strict=True))
    for field, decode in DECODERS.items():
        values[field] = decode("runs", values["id"], values[field])
    return RunRecord(**values)


def _decode_field(run_id: str, field: str, value: Value) -> Any:
    decode = DECODERS.get(field)
    return value if decode is None else decode("runs", run_id, value)


def _decode_or_default(run_id: str, field: str, value: Value) -> Any:
    try:
        return _decode_field(run_id, field, value)
    except StoreCorrupt:
        return UNREADABLE[field]


def describe(error: StoreCorrupt) -> str:
    """Return the error as the error of a run, in the form of every other failure: its class and its message."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR]


def _chat_id(run: RunRecord) -> str | None:
    chat_id = run.chat_id
    return None if chat_id is None or codec.lookup_key(chat_id) != chat_id else chat_id


async def _locked_run(transaction: Transaction, run_id: str) -> RunRecord:
    row = await transaction.row(f"{SELECT}{transaction.dialect.update_lock}", codec.lookup_key(run_id))
    if row is None:
        raise KeyError(f"no run {run_id!r}")
    return await _read(transaction, row)


async def _replace(
    transaction: Transaction, known: RunRecord, after: RunRecord, further: Mapping[str, Any]
) -> RunRecord:
    """Write the columns that differ, and return the run as stored."""
    # Fields that were not changed are the same objects, and need not be encoded to be compared.
    pairs = [
        (field, ENCODERS[field](field, old), ENCODERS[field](field, new))
        for field, old, new in zip(FIELDS, known, after._replace(**further), strict=True)
        if new is not old
    ]
    changes = {field: new for field, old, new in pairs if new != old}
    if not changes:
        return known
    stored = known._replace(**{field: _decode_field(known.id, field, new) for field, new in changes.items()})
    if after.status == "completed" and "output" in changes:
        changes["output"] = await shorten_output(transaction, known.id, str(changes["output"]))
    settings = ", ".join(f"{field} = ?" for field in changes)
    await transaction.run(f"UPDATE runs SET {settings} WHERE id = ?", *changes.values(), known.id)
    return stored


def _unchanged(known: RunRecord, after: RunRecord, why: str) -> RunRecord:
    """Return the run if it is already in the requested state, so that requests can be repeated; Conflict if not."""
    if _canonical(known) == _canonical(after):
        return known
    raise Conflict(f"run {known.id!r} is {known.status}: {why}")


def _canonical(run: RunRecord) -> list[Any]:
    return [
        codec.canonical(field, getattr(run, field)) if field in DOCUMENTS else getattr(run, field) for field in FIELDS
    ]


def _changed(run: RunRecord, changes: Mapping[str, Any]) -> RunRecord:
    """Return the run with the changes; raise InvalidValue for a change that is not allowed or cannot be stored."""
    for field, value in changes.items():
        checks.choice("changes", field, CHANGEABLE)
        ENCODERS[field](field, value)
    if "status" in changes:
        checks.choice("status", changes["status"], TRANSITIONS)
    return run._replace(**changes)


def _where(statuses: Collection[RunStatus], **names: str | None) -> tuple[list[str], list[Value]]:
    filters = {field: codec.lookup_key(value) for field, value in names.items() if value is not None}
    where = [f"{field} = ?" for field in filters]
    values: list[Value] = list(filters.values())
    if statuses:
        where.append(f"status IN ({placeholders(len(statuses))})")
        values.extend(checks.choice("statuses", status, TRANSITIONS) for status in statuses)
    return where, values


def _add_filter(where: list[str], values: list[Value], wanted: RunFilter) -> None:
    """Add the conditions of a filter, and their values."""
    conditions: tuple[tuple[str, Value], ...] = (
        ("created_ms >= ?", wanted.since_ms),
        ("created_ms < ?", wanted.until_ms),
        ("stop_reason = ?", None if wanted.stop_reason is None else codec.lookup_key(wanted.stop_reason)),
        ("cost_nanos >= ?", wanted.min_cost_nanos),
    )
    for condition, value in conditions:
        if value is not None:
            where.append(condition)
            values.append(value)
    if wanted.bills is not None:
        where.append(BILLS[wanted.bills])
    if wanted.origin is not None:
        beginning = codec.encode_object("origin", {"kind": wanted.origin}).removesuffix("}")
        where.append("substr(origin, 1, ?) = ?")
        values.extend([len(beginning), beginning])
    if wanted.text is not None:
        part = codec.lookup_key(lower_ascii(wanted.text))
        where.append("(lower(id) LIKE ? ESCAPE '!' OR lower(graph_id) LIKE ? ESCAPE '!')")
        values.extend([f"%{''.join(f'!{one}' if one in '!%_' else one for one in part)}%"] * 2)


def _all(where: Sequence[str]) -> str:
    return f" WHERE {' AND '.join(where)}" if where else ""


# Cancel requests.

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
UNREADABLE_REASON = "cancelled; the stored reason cannot be read"
DROP_CANCEL = f"DELETE FROM cancels WHERE {' AND '.join(f'{field} = ?' for field in CANCEL_FIELDS)}"
"""Compares every field: a request that was replaced or extended meanwhile is another one and stays."""

DROP_UNREADABLE_CANCEL = "DELETE FROM cancels WHERE run_id = ? AND owner = ? AND at_ms = ? AND until_ms = ?"


class SqlCancelStore(SqlStore):
    """A `CancelStore` over a database."""

    async def put(self, request: CancelRequest) -> CancelRequest:
        values = _encode_request(request)

        async def body(transaction: Transaction) -> CancelRequest:
            await transaction.run(PUT_CANCEL, *values)
            row = await transaction.row(f"{SELECT_CANCELS} run_id = ? AND owner = ?", request.run_id, request.owner)
            return request if row is None else self._decode(row)

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
                for request in map(self._decode, await transaction.rows(statement, *chunk, now)):
                    if request.owner in ("", owners[request.run_id]):
                        found.setdefault(request.run_id, request)
            return found

        return await self._database.read(body, inline=True, single=True) if ids else {}

    async def of(self, run_id: str) -> Sequence[CancelRequest]:
        return await self._where("run_id = ? ORDER BY at_ms, owner", codec.lookup_key(run_id))

    async def lasting(self, *, limit: int = 1_000) -> Sequence[CancelRequest]:
        return await self._where("until_ms = ? ORDER BY at_ms, run_id, owner LIMIT ?", UNTIL_ENDED, codec.limit(limit))

    async def _where(self, condition: str, *values: Value) -> Sequence[CancelRequest]:
        async def body(transaction: Transaction) -> Sequence[CancelRequest]:
            return [self._decode(row) for row in await transaction.rows(f"{SELECT_CANCELS} {condition}", *values)]

        return await self._database.read(body, single=True)

    def _decode(self, row: Row) -> CancelRequest:
        """Decode a request; one with an unreadable reason still cancels, because nothing but its reason is lost."""
        run_id, reason, by, at_ms, until_ms, owner = row
        try:
            text = codec.decode_text("cancels", run_id, reason)
        except StoreCorrupt as error:
            self._database.faults.note(error)
            text = UNREADABLE_REASON
        return CancelRequest(run_id, text, by, at_ms, until_ms, owner)

    async def drop(self, run_id: str, requests: Collection[CancelRequest] | None = None) -> None:
        meant = [request for request in requests or () if request.run_id == run_id]
        rows = [_encode_request(request) for request in meant if _is_readable(request)]
        unreadable = [
            (request.run_id, request.owner, request.at_ms, request.until_ms)
            for request in meant
            if not _is_readable(request)
        ]

        async def body(transaction: Transaction) -> None:
            if requests is None:
                await transaction.run("DELETE FROM cancels WHERE run_id = ?", codec.lookup_key(run_id))
            else:
                await transaction.run_many(DROP_CANCEL, rows)
                await transaction.run_many(DROP_UNREADABLE_CANCEL, unreadable)

        await self._database.write(body, inline=True)

    async def prune(self, *, now_ms: int) -> int:
        now = codec.number("now_ms", now_ms)
        return await self._database.write(
            lambda transaction: transaction.run("DELETE FROM cancels WHERE until_ms < ?", now)
        )


def _is_readable(request: CancelRequest) -> bool:
    """Whether every field of a stored request can be encoded again, so that a statement can find it by all of them."""
    try:
        _encode_request(request)
    except InvalidValue:
        return False
    return request.reason != UNREADABLE_REASON


def _encode_request(request: CancelRequest) -> tuple[Value, ...]:
    return (
        codec.name("run_id", request.run_id),
        codec.encode_text("reason", request.reason),
        codec.name("by", request.by),
        codec.number("at_ms", request.at_ms),
        codec.number("until_ms", request.until_ms),
        codec.name("owner", request.owner),
    )


CHECKS = (
    TableCheck("runs", COLUMNS, ("id",), ("",), lambda row: _decode([_without_marks(value) for value in row])),
    TableCheck(
        "cancels",
        "run_id, reason",
        ("run_id", "owner"),
        ("", ""),
        lambda row: codec.decode_text("cancels", row[0], row[1]),
    ),
)


def _without_marks(value: Any) -> Any:
    return without_marks(value) if isinstance(value, str) else value
