"""SQL stores of the events and the journals of runs.

The output of a run is in its last event, in its record and in its journal. A long output is stored in the event alone,
which is removed with the run; the other places hold a mark with the seq of the event. A mark is enclosed in characters
that JSON writes as escapes, so that no other stored text looks like one. Readers get the whole output.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from operator import itemgetter

from penstock import checks
from penstock.hosting.ports import SHORT_OUTPUT, Fenced, HostedEvent
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import codec
from penstock.storage.port import INLINE_MAX_ROWS, Row, SqlStore, TableCheck, Transaction, Value, placeholders
from penstock.storage.rules import JOURNAL_KINDS, check_next_events, different_event

INSERT = "INSERT INTO events (run_id, seq, at_ms, type, data) VALUES (?, ?, ?, ?, ?)"
SELECT = "SELECT seq, at_ms, type, data FROM events WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?"
SELECT_OF_TYPES = SELECT.replace("ORDER", "AND type IN ({types}) ORDER")
SELECT_LAST_SEQ = "SELECT coalesce(max(seq), 0) FROM events WHERE run_id = ?"
SELECT_CLAIM_AND_LAST = (
    "SELECT epoch, (SELECT coalesce(max(seq), 0) FROM events WHERE events.run_id = runs.id) FROM runs WHERE id = ?"
)
"""Waits for the lock of a concurrent writer. If that was an earlier attempt under the same claim, with an unknown
outcome, the snapshot may be older than its events: then the next insert conflicts, and the transaction is run again."""
SELECT_LAST = "SELECT seq, data FROM events WHERE run_id = ? ORDER BY seq DESC LIMIT 1"
SELECT_ANY = "SELECT run_id, seq, data FROM events"

JOURNAL_COLUMNS = "key, kind, value, cost_nanos, tokens_in, tokens_out, at_ms"
INSERT_ENTRY = (
    f"INSERT INTO journal (run_id, {JOURNAL_COLUMNS}) VALUES ({placeholders(8)}) ON CONFLICT (run_id, key) DO NOTHING"
)
UPDATE_ENTRY = (
    "UPDATE journal SET kind = ?, value = ?, cost_nanos = ?, tokens_in = ?, tokens_out = ?, at_ms = ? "
    "WHERE run_id = ? AND key = ?"
)
SELECT_ENTRIES = f"SELECT {JOURNAL_COLUMNS}, number FROM journal WHERE run_id = ?"
"""Unordered: to sort the rows, a database would read them all before it returns the first."""
DELETE_ENTRIES = "DELETE FROM journal WHERE run_id = ?"
REPLACE_OUTPUT = "UPDATE journal SET value = replace(value, ?, ?) WHERE run_id = ? AND value <> replace(value, ?, ?)"

OUTPUT_PREFIX = '{"output":'
"""Start of the data of an event that a mark can point to."""
MARK = re.compile("\x01([0-9]{1,18})\x01")
MAX_EVENTS_PER_LOOKUP = 50
"""Maximum number of events to look up in one statement."""

_raw_decode = json.JSONDecoder().raw_decode


async def check_claim(transaction: Transaction, run_id: str, epoch: int, lock: str) -> None:
    """Raise Fenced unless `epoch` is that of the newest claim; `lock` keeps it so until the transaction ends.

    A run that does not exist has epoch 0. A transaction that has locked the claim already need not do so again.
    """
    if transaction.claims.get(run_id) == (epoch, transaction.dialect.update_lock):
        return
    row = await transaction.row(f"SELECT epoch FROM runs WHERE id = ?{lock}", run_id)
    if epoch != (0 if row is None else row[0]):
        raise Fenced(run_id, epoch)


async def _check_claim_and_last_seq(transaction: Transaction, run_id: str, epoch: int) -> int:
    """Check the claim like `check_claim`, and return the sequence number of the newest event."""
    lock = transaction.dialect.update_lock
    row = await transaction.row(f"{SELECT_CLAIM_AND_LAST}{lock}", run_id)
    if epoch != (0 if row is None else row[0]):
        raise Fenced(run_id, epoch)
    if row is None:
        return await _last_seq(transaction, run_id)
    transaction.claims[run_id] = epoch, lock
    return int(row[1])


class SqlEventStore(SqlStore):
    """An `EventStore` over a database."""

    async def append(self, run_id: str, epoch: int, events: Sequence[HostedEvent]) -> None:
        codec.name("run_id", run_id)
        rows = [(run_id, *_encode_event(event)) for event in events]

        async def body(transaction: Transaction) -> None:
            last = await _check_claim_and_last_seq(transaction, run_id, epoch)
            if not events:
                return
            check_next_events(run_id, last, [event.seq for event in events])
            known = last - events[0].seq + 1
            if known > 0:
                await _check_stored(transaction, run_id, events[:known])
            await transaction.run_many(INSERT, rows[known:])
            transaction.notify(f"run:{run_id}")

        await self._database.write(body, inline=len(events) <= INLINE_MAX_ROWS)

    async def read(
        self, run_id: str, after_seq: int = 0, limit: int = 1_000, types: Sequence[str] = ()
    ) -> Sequence[HostedEvent]:
        select = SELECT_OF_TYPES.format(types=placeholders(len(types))) if types else SELECT
        values: list[Value] = [codec.lookup_key(run_id), _clamp_seq(after_seq)]
        values += [*map(codec.lookup_key, types), codec.limit(limit)]

        async def body(transaction: Transaction) -> Sequence[HostedEvent]:
            return _decode_events(run_id, await transaction.rows(select, *values))

        return await self._database.read(body, inline=True, single=True)

    async def last_seq(self, run_id: str) -> int:
        key = codec.lookup_key(run_id)
        return await self._database.read(lambda transaction: _last_seq(transaction, key), inline=True, single=True)

    async def wait(self, run_id: str, after_seq: int, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + codec.timeout(timeout_s)
        while True:
            seen = self._database.version
            if await self.last_seq(run_id) > _clamp_seq(after_seq):
                return True
            if (left := deadline - loop.time()) <= 0:
                return False
            await self._database.wait(f"run:{run_id}", seen, left)


def _encode_event(event: HostedEvent) -> tuple[Value, ...]:
    numbers = codec.numbers(event, "seq", "at_ms")
    return *numbers, codec.name("type", event.type), codec.encode_object("data", event.data)


def _decode_events(run_id: str, rows: Sequence[Row]) -> list[HostedEvent]:
    data = codec.decode_objects("events", lambda index: f"{run_id}/{rows[index][0]}", [row[3] for row in rows])
    return [HostedEvent(seq, at_ms, kind, each) for (seq, at_ms, kind, _), each in zip(rows, data, strict=True)]


async def _last_seq(transaction: Transaction, run_id: str) -> int:
    row = await transaction.row(SELECT_LAST_SEQ, run_id)
    assert row is not None, "a maximum is one row"
    return int(row[0])


async def _check_stored(transaction: Transaction, run_id: str, events: Sequence[HostedEvent]) -> None:
    """Raise Conflict if the stored events with these sequence numbers differ."""
    rows = await transaction.rows(SELECT, run_id, events[0].seq - 1, len(events))
    for stored, event in zip(_decode_events(run_id, rows), events, strict=True):
        if _canonical(stored) != _canonical(event):
            raise different_event(run_id, event.seq)


def _canonical(event: HostedEvent) -> tuple[int, int, str, str]:
    return event.seq, event.at_ms, event.type, codec.canonical("data", event.data)


def _clamp_seq(after: int) -> int:
    return min(max(after, 0), codec.MAX_NUMBER)


# The journal.


class SqlJournalStore(SqlStore):
    """A `JournalStore` over a database."""

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        async def body(transaction: Transaction) -> Sequence[JournalEntry]:
            rows = sorted(await transaction.rows(SELECT_ENTRIES, codec.lookup_key(run_id)), key=itemgetter(-1))
            values = await restore_outputs(transaction, [(run_id, row[2]) for row in rows])
            return [_decode_entry(run_id, row, value) for row, value in zip(rows, values, strict=True)]

        return await self._database.read(body, inline=True, single=True)

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        rows = [encode_entry(run_id, entry) for entry in entries]

        async def body(transaction: Transaction) -> None:
            await check_claim(transaction, run_id, epoch, transaction.dialect.share_lock)
            await transaction.run_many(INSERT_ENTRY, rows)

        await self._database.write(body, inline=len(entries) <= INLINE_MAX_ROWS)

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        rows = [(*values, run_id, key) for _, key, *values in (encode_entry(run_id, entry) for entry in entries)]

        async def body(transaction: Transaction) -> None:
            await check_claim(transaction, run_id, epoch, transaction.dialect.share_lock)
            await transaction.run_many(UPDATE_ENTRY, rows)

        await self._database.write(body, inline=len(entries) <= INLINE_MAX_ROWS)

    async def forget(self, run_id: str) -> None:
        async def body(transaction: Transaction) -> None:
            await transaction.run(DELETE_ENTRIES, codec.lookup_key(run_id))

        await self._database.write(body)


async def replace_journal(transaction: Transaction, run_id: str, rows: Sequence[tuple[Value, ...]]) -> None:
    """Make rows of `encode_entry` the journal of a new run, replacing any entries left under its id."""
    await transaction.run(DELETE_ENTRIES, run_id)
    await transaction.run_many(INSERT_ENTRY, rows)


def encode_entry(run_id: str, entry: JournalEntry) -> tuple[Value, ...]:
    """Return the column values of an entry; raise InvalidValue if it cannot be stored."""
    return (
        run_id,
        codec.name("key", entry.key),
        checks.choice("kind", entry.kind, JOURNAL_KINDS),
        codec.encode_document("value", entry.value),
        *codec.numbers(entry, "cost_nanos", "tokens_in", "tokens_out", "at_ms"),
    )


def _decode_entry(run_id: str, row: Row, value: str) -> JournalEntry:
    key, kind, _, *figures, _ = row
    which = f"{run_id}/{key}"
    known = codec.decode_one_of("journal", which, JOURNAL_KINDS, kind)
    return JournalEntry(key, known, codec.decode_document("journal", which, value), *figures)


# Long outputs, stored once.


async def shorten_output(transaction: Transaction, run_id: str, output: str) -> str:
    """Return the output of a completed run as it is to be stored; a mark also replaces it in the run's journal."""
    row = await transaction.row(SELECT_LAST, run_id) if len(output) > SHORT_OUTPUT else None
    if row is None or not _has_output(row[1], output):
        return output
    mark = f"\x01{row[0]}\x01"
    await transaction.run(REPLACE_OUTPUT, output, mark, run_id, output, mark)
    return mark


async def restore_outputs(transaction: Transaction, stored: Sequence[tuple[str, str]]) -> list[str]:
    """Return the texts of `(run_id, text)` pairs with marks replaced by outputs; a mark without an output stays."""
    wanted = sorted({(run_id, int(seq)) for run_id, text in stored if "\x01" in text for seq in MARK.findall(text)})
    if not wanted:
        return [text for _, text in stored]
    outputs = {(run_id, seq): _output(data) for run_id, seq, data in await _events(transaction, wanted)}
    return [_replace_marks(outputs, run_id, text) for run_id, text in stored]


def _replace_marks(outputs: Mapping[tuple[str, int], str | None], run_id: str, text: str) -> str:
    return MARK.sub(lambda found: outputs.get((run_id, int(found[1]))) or found[0], text)


async def _events(transaction: Transaction, wanted: Sequence[tuple[str, int]]) -> list[Row]:
    """Return these events, and possibly others of the same runs."""
    found: list[Row] = []
    for first in range(0, len(wanted), MAX_EVENTS_PER_LOOKUP):
        runs, seqs = zip(*wanted[first : first + MAX_EVENTS_PER_LOOKUP], strict=True)
        where = f"run_id IN ({placeholders(len(runs))}) AND seq IN ({placeholders(len(seqs))})"
        found += await transaction.rows(f"{SELECT_ANY} WHERE {where}", *runs, *seqs)
    return found


def _has_output(data: str, output: str) -> bool:
    return data.startswith(f"{OUTPUT_PREFIX}{output}") and data[len(OUTPUT_PREFIX) + len(output)] in ",}"


def _output(data: str) -> str | None:
    """Return the output in the data of an event, in its stored spelling; None if there is none that can be read."""
    try:
        _, end = _raw_decode(data, len(OUTPUT_PREFIX))
    except (ValueError, RecursionError):
        return None
    return data[len(OUTPUT_PREFIX) : end] if data.startswith(OUTPUT_PREFIX) else None


def without_marks(text: str) -> str:
    """Return stored text with null in place of each mark, to check that the rest can be decoded."""
    return MARK.sub("null", text)


CHECKS = (
    TableCheck(
        "events",
        "run_id, seq, at_ms, type, data",
        ("run_id", "seq"),
        ("", codec.MIN_NUMBER),
        lambda row: _decode_events(row[0], [row[1:]]),
    ),
    TableCheck(
        "journal",
        "run_id, key, kind, value, cost_nanos, tokens_in, tokens_out, at_ms, number",
        ("number",),
        (codec.MIN_NUMBER,),
        lambda row: _decode_entry(row[0], row[1:], without_marks(row[3])),
    ),
)
