"""Check whether every row of every table can be decoded.

The check reads page by page, each page in a transaction of its own, so that it holds no locks while others work. A row
that is written or removed meanwhile may or may not be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.hosting.ports import StoreCorrupt
from penstock.storage.faults import MAX_FAULTS
from penstock.storage.port import Database, Row, TableCheck, Transaction, Value
from penstock.storage.sql import approvals, audit, chats, events, graphs, memories, payloads, runs, tokens

CHECKS: Sequence[TableCheck] = (
    *runs.CHECKS,
    *events.CHECKS,
    *graphs.CHECKS,
    *approvals.CHECKS,
    *audit.CHECKS,
    *payloads.CHECKS,
    *chats.CHECKS,
    *memories.CHECKS,
    *tokens.CHECKS,
)
PLAIN = frozenset({"chat_marks", "attachment_uses", "memory_words", "spending", "database_identity"})
"""Tables without anything to decode: names and numbers, whose types the database checks."""
PAGE = 100


async def unreadable_rows(database: Database, pause_s: float = 0.0) -> list[StoreCorrupt]:
    """Return the rows that cannot be decoded, at most MAX_FAULTS; pauses after each page, to leave room for others."""
    found: list[StoreCorrupt] = []
    for check in CHECKS:
        after: tuple[Value, ...] | None = check.first
        while after is not None and len(found) < MAX_FAULTS:
            after, broken = await _check_page(database, check, after)
            found += broken
            await asyncio.sleep(pause_s)
    return found[:MAX_FAULTS]


async def _check_page(
    database: Database, check: TableCheck, after: tuple[Value, ...]
) -> tuple[tuple[Value, ...] | None, list[StoreCorrupt]]:
    """Return the key of the last row of the page after `after`, None for the last page, and the undecodable rows."""

    async def body(transaction: Transaction) -> tuple[tuple[Value, ...] | None, list[StoreCorrupt]]:
        rows = await transaction.rows(check.select, *after, PAGE)
        broken = [error for row in rows if (error := _error(check, row)) is not None]
        last = tuple(rows[-1][: len(check.keys)]) if len(rows) == PAGE else None
        return None if last == after else last, broken  # a key that is not UTF-8 would be returned for ever

    return await database.read(body)


def _error(check: TableCheck, row: Row) -> StoreCorrupt | None:
    try:
        check.decode(tuple(row[len(check.keys) :]))
    except StoreCorrupt as error:
        return error.with_traceback(None)
    return None
