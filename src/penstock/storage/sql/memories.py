"""What runs remember beyond their end, in SQL.

A search is answered by an index of words: it reads the places of the words that are sought, counts them by memory, and
reads the few memories that are asked for. So it does not matter how long memories are, and what a search costs is
bounded by how many words it looks for and how many memories a space has.

The row of a space is locked by whoever writes into it, in PostgreSQL: the order of its memories, and how many it has,
are the same for everybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.nodes import memory
from penstock.nodes.memory import Memory
from penstock.storage.databases.port import Database, Transaction, Value, marks
from penstock.storage.memory.memories import to_keep
from penstock.storage.sql import codec

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


class SqlMemoryStore:
    """A `MemoryStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get(self, space: str, key: str) -> Memory | None:
        found = await self._found(space, f"{SELECT} AND key = ?", codec.sought(space), codec.sought(key))
        return found[0] if found else None

    async def put(self, space: str, key: str, value: Any) -> None:
        kept = to_keep(space, key, value)

        async def act(transaction: Transaction) -> None:
            row = await transaction.row(LOCK_SPACE, space)
            assert row is not None, "it is made if it is not there"
            number, size = row
            size += 1 - await transaction.run(FORGET_KEY, number, key)
            added = await transaction.row(INSERT, number, key, kept.written)
            assert added is not None, "what was under the key is gone"
            await transaction.run_many(INSERT_WORD, [(number, word, added[0]) for word in kept.words])
            if size > memory.MAX_MEMORIES:
                size -= await transaction.run(FORGET_OLDEST, number, size - memory.MAX_MEMORIES)
            await transaction.run(RESIZE, size, number)

        await self._database.write(act)

    async def search(self, space: str, text: str, limit: int = 10) -> Sequence[Memory]:
        most, sought = codec.limit(limit), memory.words_sought(text)
        if not sought:
            return await self._found(space, SELECT_NEWEST, codec.sought(space), most)
        return await self._found(space, _nearest(len(sought)), codec.sought(space), *sought, most)

    async def _found(self, space: str, statement: str, *values: Value) -> Sequence[Memory]:
        async def act(transaction: Transaction) -> Sequence[Memory]:
            rows = await transaction.rows(statement, *values)
            return [Memory(key, codec.read_document("memories", f"{space}/{key}", value)) for key, value in rows]

        return await self._database.read(act)


async def forget_runs(transaction: Transaction, run_ids: Iterable[str]) -> None:
    """Forget what runs remembered for themselves alone."""
    spaces = [(memory.space_of_run(id),) for id in run_ids]
    await transaction.run_many("DELETE FROM memory_spaces WHERE space = ?", spaces)


async def forget_chats(transaction: Transaction, chat_ids: Iterable[str]) -> None:
    """Forget what was remembered in chats."""
    spaces = [(memory.space_of_chat(id),) for id in chat_ids]
    await transaction.run_many("DELETE FROM memory_spaces WHERE space = ?", spaces)


def _nearest(words: int) -> str:
    """The statement for those that have most of so many words, the newer of two first."""
    nearest = (
        f"SELECT number, count(*) AS shared FROM memory_words WHERE space = {SPACE} AND word IN ({marks(words)}) "
        "GROUP BY number ORDER BY shared DESC, number DESC LIMIT ?"
    )
    return (
        f"SELECT memories.key, memories.value FROM ({nearest}) AS nearest JOIN memories "
        "ON memories.number = nearest.number ORDER BY nearest.shared DESC, nearest.number DESC"
    )
