"""SQL store of memories, which outlive their run.

A search uses an index of words: it reads the index rows of the words in the query, counts them by memory, and reads
only the memories it returns. So the length of memories does not matter, and the cost of a search is bounded by the
number of words in the query and the number of memories in the space.

In PostgreSQL a writer locks the row of the space, so that all connections see its memories in the same order and
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from penstock.hosting.ports import StoreCorrupt
from penstock.nodes import memory
from penstock.nodes.memory import Memory
from penstock.storage import codec
from penstock.storage.port import Row, SqlStore, TableCheck, Transaction, Value, placeholders
from penstock.storage.rules import encode_memory

LOCK_SPACE = (
    "INSERT INTO memory_spaces (space, size) VALUES (?, 0) "
    "ON CONFLICT (space) DO UPDATE SET size = memory_spaces.size RETURNING number, size"
)
RESIZE = "UPDATE memory_spaces SET size = ? WHERE number = ?"
FORGET_KEY = "DELETE FROM memories WHERE space = ? AND key = ?"
FORGET_OLDEST = (
    "DELETE FROM memories WHERE number IN (SELECT number FROM memories WHERE space = ? ORDER BY number LIMIT ?)"
)
INSERT = "INSERT INTO memories (space, key, value) VALUES (?, ?, ?) RETURNING number"
INSERT_WORD = "INSERT INTO memory_words (space, word, number) VALUES (?, ?, ?)"
SPACE = "(SELECT number FROM memory_spaces WHERE space = ?)"
SELECT = f"SELECT key, value FROM memories WHERE space = {SPACE}"
SELECT_NEWEST = f"{SELECT} ORDER BY number DESC LIMIT ?"


class SqlMemoryStore(SqlStore):
    """A `MemoryStore` over a database."""

    async def get(self, space: str, key: str) -> Memory | None:
        async def body(transaction: Transaction) -> Memory | None:
            row = await transaction.row(f"{SELECT} AND key = ?", codec.lookup_key(space), codec.lookup_key(key))
            return None if row is None else _decode(space, row)

        return await self._database.read(body)

    async def put(self, space: str, key: str, value: Any) -> None:
        encoded = encode_memory(space, key, value)

        async def body(transaction: Transaction) -> None:
            row = await transaction.row(LOCK_SPACE, space)
            assert row is not None, "it is made if it is not there"
            number, size = row
            if not 0 <= size <= memory.MAX_MEMORIES:  # a wrong size would remove memories, or keep too many
                size = await _count(transaction, number)
            size += 1 - await transaction.run(FORGET_KEY, number, key)
            added = await transaction.row(INSERT, number, key, encoded.value)
            assert added is not None, "what was under the key is gone"
            await transaction.run_many(INSERT_WORD, [(number, word, added[0]) for word in encoded.words])
            if size > memory.MAX_MEMORIES:
                size -= await transaction.run(FORGET_OLDEST, number, size - memory.MAX_MEMORIES)
            await transaction.run(RESIZE, size, number)

        await self._database.write(body)

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        maximum, words = codec.limit(limit), memory.words_sought(text)
        if not words:
            return await self._select(space, SELECT_NEWEST, codec.lookup_key(space), maximum)
        return await self._select(space, _nearest(len(words)), codec.lookup_key(space), *words, maximum)

    async def _select(self, space: str, statement: str, *values: Value) -> Sequence[Memory]:
        async def body(transaction: Transaction) -> Sequence[Memory]:
            rows = await transaction.rows(statement, *values)
            return self._database.faults.readable(rows, partial(_decode, space))  # others may share the space

        return await self._database.read(body)


def _decode(space: str, row: Row) -> Memory:
    key, value = row
    return Memory(key, codec.decode_document("memories", f"{space}/{key}", value))


async def _count(transaction: Transaction, space: int) -> int:
    row = await transaction.row("SELECT count(*) FROM memories WHERE space = ?", space)
    assert row is not None, "a count is one row"
    return int(row[0])


async def forget_runs(transaction: Transaction, run_ids: Iterable[str]) -> None:
    """Remove the memories in the private spaces of runs."""
    spaces = [(memory.space_of_run(id),) for id in run_ids]
    await transaction.run_many("DELETE FROM memory_spaces WHERE space = ?", spaces)


async def forget_chats(transaction: Transaction, chat_ids: Iterable[str]) -> None:
    """Remove the memories in the spaces of chats."""
    spaces = [(memory.space_of_chat(id),) for id in chat_ids]
    await transaction.run_many("DELETE FROM memory_spaces WHERE space = ?", spaces)


def _nearest(words: int) -> str:
    """Return the statement that finds the memories with the most of `words` words, newer ones first among equals."""
    nearest = (
        f"SELECT number, count(*) AS shared FROM memory_words WHERE space = {SPACE} "
        f"AND word IN ({placeholders(words)}) GROUP BY number ORDER BY shared DESC, number DESC LIMIT ?"
    )
    return (
        f"SELECT memories.key, memories.value FROM ({nearest}) AS nearest JOIN memories "
        "ON memories.number = nearest.number ORDER BY nearest.shared DESC, nearest.number DESC"
    )


def _decode_space(row: Row) -> None:
    space, size = row
    if not 0 <= size <= memory.MAX_MEMORIES:
        raise StoreCorrupt("memory_spaces", space, f"{size} cannot be the number of its memories")


CHECKS = (
    TableCheck("memory_spaces", "space, size", ("number",), (codec.MIN_NUMBER,), _decode_space),
    TableCheck(
        "memories",
        "(SELECT memory_spaces.space FROM memory_spaces WHERE memory_spaces.number = memories.space), key, value",
        ("number",),
        (codec.MIN_NUMBER,),
        lambda row: _decode(row[0], row[1:]),
    ),
)
