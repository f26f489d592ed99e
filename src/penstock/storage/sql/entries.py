"""What is written of an entry of a journal, in SQL: by whoever works on a run, or with a run that begins with some."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.databases.port import Transaction, Value, marks
from penstock.storage.sql import codec

KINDS = ("node", "llm", "tool", "value")
COLUMNS = "key, kind, value, cost_nanos, tokens_in, tokens_out, at_ms"
FORGET = "DELETE FROM journal WHERE run_id = ?"
INSERT = f"INSERT INTO journal (run_id, {COLUMNS}) VALUES ({marks(8)}) ON CONFLICT (run_id, key) DO NOTHING"


def written(run_id: str, entry: JournalEntry) -> tuple[Value, ...]:
    """The columns of an entry; InvalidValue for what cannot be kept."""
    return (
        run_id,
        codec.name("key", entry.key),
        codec.one_of("kind", entry.kind, KINDS),
        codec.document("value", entry.value),
        codec.number("cost_nanos", entry.cost_nanos),
        codec.number("tokens_in", entry.tokens_in),
        codec.number("tokens_out", entry.tokens_out),
        codec.number("at_ms", entry.at_ms),
    )


async def keep(transaction: Transaction, rows: Sequence[tuple[Value, ...]]) -> None:
    """Keep what was `written`; a key that is there already is skipped."""
    await transaction.run_many(INSERT, rows)
