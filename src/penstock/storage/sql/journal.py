"""What runs have done, in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from penstock.runtime.durable.ports import JournalEntry
from penstock.storage.databases.port import FEW, Database, Row, Transaction
from penstock.storage.sql import codec, once
from penstock.storage.sql.entries import COLUMNS, FORGET, KINDS, keep, written
from penstock.storage.sql.runs import check_claim

FIGURES = ("kind", "value", "cost_nanos", "tokens_in", "tokens_out", "at_ms")
UPDATE = f"UPDATE journal SET {', '.join(f'{name} = ?' for name in FIGURES)} WHERE run_id = ? AND key = ?"
SELECT = f"SELECT {COLUMNS}, number FROM journal WHERE run_id = ?"
"""In no order: to sort them, a database would read them all before it gives the first."""


class SqlJournalStore:
    """A `JournalStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, run_id: str) -> Sequence[JournalEntry]:
        async def act(transaction: Transaction) -> Sequence[JournalEntry]:
            rows = sorted(await transaction.rows(SELECT, codec.sought(run_id)), key=itemgetter(-1))
            values = await once.whole(transaction, [(run_id, row[2]) for row in rows])
            return [_entry(run_id, row, value) for row, value in zip(rows, values, strict=True)]

        return await self._database.read(act, brief=True)

    async def append(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        rows = [written(run_id, entry) for entry in entries]

        async def act(transaction: Transaction) -> None:
            await check_claim(transaction, run_id, epoch, transaction.dialect.share_lock)
            await keep(transaction, rows)

        await self._database.write(act, brief=len(entries) <= FEW)

    async def shorten(self, run_id: str, entries: Sequence[JournalEntry], *, epoch: int = 0) -> None:
        codec.name("run_id", run_id)
        rows = [(*figures, run_id, key) for _, key, *figures in (written(run_id, entry) for entry in entries)]

        async def act(transaction: Transaction) -> None:
            await check_claim(transaction, run_id, epoch, transaction.dialect.share_lock)
            await transaction.run_many(UPDATE, rows)

        await self._database.write(act, brief=len(entries) <= FEW)

    async def forget(self, run_id: str) -> None:
        async def act(transaction: Transaction) -> None:
            await transaction.run(FORGET, codec.sought(run_id))

        await self._database.write(act)


def _entry(run_id: str, row: Row, value: str) -> JournalEntry:
    key, kind, _, *figures, _ = row
    which = f"{run_id}/{key}"
    known = codec.read_one_of("journal", which, KINDS, kind)
    return JournalEntry(key, known, codec.read_document("journal", which, value), *figures)
