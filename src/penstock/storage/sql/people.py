"""SQL store of the data of a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.hosting.people import NAMED
from penstock.nodes.memory import space_of_owner
from penstock.storage import codec
from penstock.storage.port import SqlStore, Transaction
from penstock.storage.rules import check_nothing_owned

COUNTS = {place: "SELECT count(*) FROM {} WHERE {} = ?".format(*place.split(".")) for place in NAMED} | {
    "runs.owner": "SELECT count(*) FROM runs WHERE owner = ?",
    "chats.owner": "SELECT count(*) FROM chats WHERE owner = ?",
    "attachments.owner": "SELECT count(*) FROM attachments WHERE owner = ?",
}
MEMORIES = "SELECT size FROM memory_spaces WHERE space = ?"
ATTACHMENTS = "SELECT id FROM attachments WHERE owner = ? ORDER BY id"
REMOVE = (
    "DELETE FROM attachment_uses WHERE attachment_id IN (SELECT id FROM attachments WHERE owner = ?)",
    "DELETE FROM attachments WHERE owner = ?",
)
FORGET_SPACE = "DELETE FROM memory_spaces WHERE space = ?"
RENAME = {place: "UPDATE {0} SET {1} = ? WHERE {1} = ?".format(*place.split(".")) for place in NAMED}


class SqlPersonStore(SqlStore):
    """A `PersonStore` over a database."""

    async def places(self, name: str) -> Mapping[str, int]:
        key = codec.lookup_key(name)

        async def body(transaction: Transaction) -> Mapping[str, int]:
            return await _places(transaction, key)

        return await self._database.read(body)

    async def attachments(self, name: str) -> Sequence[str]:
        key = codec.lookup_key(name)

        async def body(transaction: Transaction) -> Sequence[str]:
            return [row[0] for row in await transaction.rows(ATTACHMENTS, key)]

        return await self._database.read(body)

    async def forget(self, name: str, pseudonym: str) -> Mapping[str, int]:
        old, new = codec.name("name", name), codec.name("pseudonym", pseudonym)

        async def body(transaction: Transaction) -> Mapping[str, int]:
            found = await _places(transaction, old)
            check_nothing_owned(name, found)
            for statement in REMOVE:
                await transaction.run(statement, old)
            await transaction.run(FORGET_SPACE, space_of_owner(old))
            for statement in RENAME.values():
                await transaction.run(statement, new, old)
            return found

        return await self._database.write(body)


async def _places(transaction: Transaction, name: str) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for place, statement in COUNTS.items():
        row = await transaction.row(statement, name)
        found[place] = 0 if row is None else int(row[0])
    row = await transaction.row(MEMORIES, space_of_owner(name))
    found["memories.owner"] = 0 if row is None else int(row[0])
    return {place: count for place, count in found.items() if count}
