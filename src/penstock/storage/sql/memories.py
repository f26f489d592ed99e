"""SQL store of what runs remember beyond their end.

A search uses an index of words: it reads the index rows of the words in the query, counts them by memory, and reads
only the memories it returns. So the length of memories does not matter, and the cost of a search is bounded by the
number of words in the query and the number of memories in the space.

In PostgreSQL a writer locks the row of the space: the order and the number of its memories are the same for all
connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.nodes import memory
from penstock.nodes.memory import Memory
from penstock.storage import codec
from penstock.storage.port import SqlStore, Transaction, Value, placeholders
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
        found = await self._select(space, f"{SELECT} AND key = ?", codec.lookup_key(space), codec.lookup_key(key))
        return found[0] if found else None

    async def put(self, space: str, key: str, value: Any) -> None:
        encoded = encode_memory(space, key, value)

        async def body(transaction: Transaction) -> None:
            row = await transaction.row(LOCK_SPACE, space)
            assert row is not None, "it is made if it is not there"
            number, size = row
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
            return [Memory(key, codec.decode_document("memories", f"{space}/{key}", value)) for key, value in rows]

        return await self._database.read(body)


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
