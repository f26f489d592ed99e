"""Chats in SQL, with what was said in them and attached to them.

Of the replies to a message, one is in view. A message that is added comes into view with everything above it; the chat
remembers the last one in view (`leaf`), so that a turn at the end of a conversation costs the same however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from penstock.chat.message import ChatMessage
from penstock.chat.pauses import pause_at
from penstock.chat.ports import Attachment, ChatRecord, Marked
from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict
from penstock.hosting.records import ENDED
from penstock.storage.databases.port import FEW, Database, Row, Transaction, Value, marks, portions
from penstock.storage.memory.chats import check_rests, followed, new_messages, referred
from penstock.storage.sql import codec
from penstock.storage.sql.memories import forget_chats

NONE = ""
"""The parent of what begins a chat, and the leaf where it is not known; no message has that id."""
COLUMNS = "id, owner, title, graph_id, created_ms, updated_ms, made_by"
SELECT = f"SELECT {COLUMNS} FROM chats"
INSERT = f"INSERT INTO chats ({COLUMNS}, leaf) VALUES (?, ?, ?, ?, ?, ?, ?, '') ON CONFLICT (id) DO NOTHING"
SELECT_UNUSED = (
    "SELECT id, owner FROM chats WHERE made_by <> '' AND updated_ms < ? "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.chat_id = chats.id) ORDER BY updated_ms, id LIMIT ?"
)
UNFINISHED = f"SELECT 1 FROM runs WHERE chat_id = ? AND status NOT IN ({marks(len(ENDED))}) LIMIT 1"
MARK = (
    "INSERT INTO chat_marks (key, chat_id, message_id) VALUES (?, ?, ?) "
    "ON CONFLICT (key) DO UPDATE SET chat_id = excluded.chat_id, message_id = "
    "CASE WHEN chat_marks.chat_id = excluded.chat_id AND chat_marks.message_id <> '' "
    "THEN excluded.message_id ELSE '' END"
)
"""A key that has led to two chats leads nowhere, for as long as the newer of them is there."""
SELECT_MESSAGES = "SELECT id, parent_id, role, content, at_ms, data, is_in_view FROM messages WHERE chat_id = ?"
SELECT_ALL = SELECT_MESSAGES.replace(" FROM ", ", number FROM ")
"""In no order: to sort them, a database would read them all before it gives the first."""
INSERT_MESSAGE = (
    "INSERT INTO messages (chat_id, id, parent_id, role, content, at_ms, data, is_in_view) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, 1)"
)
SELECT_BELOW = "SELECT id, parent_id FROM messages WHERE chat_id = ? AND parent_id IN"
SELECT_SEEN = "SELECT id FROM messages WHERE chat_id = ? AND is_in_view = 1 AND id IN"
DELETE_MESSAGES = "DELETE FROM messages WHERE chat_id = ? AND id IN"
SELECT_UPWARDS = (
    "WITH RECURSIVE above (id, parent_id, is_in_view) AS "
    "(SELECT id, parent_id, CAST(0 AS BIGINT) FROM messages WHERE chat_id = ? AND id = ? "
    "UNION ALL SELECT messages.id, messages.parent_id, messages.is_in_view "
    "FROM messages JOIN above ON messages.id = above.parent_id WHERE messages.chat_id = ?) "
    "SELECT id, parent_id FROM above WHERE is_in_view = 0"
)
"""A message, in view or not, and what above it is not in view: where one is, its siblings are not."""
BRING_INTO_VIEW = (
    "UPDATE messages SET is_in_view = CASE WHEN id = ? THEN 1 ELSE 0 END "
    "WHERE chat_id = ? AND parent_id = ? AND (is_in_view = 1 OR id = ?)"
)
INSERT_ATTACHMENT = (
    "INSERT INTO attachments (id, owner, name, media_type, size, created_ms, content) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (id) DO NOTHING"
)
USE = (
    "INSERT INTO attachment_uses (attachment_id, chat_id) VALUES (?, ?) ON CONFLICT (attachment_id, chat_id) DO NOTHING"
)
UNUSE = "DELETE FROM attachment_uses WHERE attachment_id = ? AND chat_id = ?"
SELECT_USED = "SELECT attachment_id, chat_id FROM attachment_uses WHERE chat_id <> ''"
SELECT_USER = "SELECT 1 FROM attachment_uses WHERE attachment_id = ? AND chat_id <> '' LIMIT 1"
IS_COUNTED = "SELECT 1 FROM attachment_uses WHERE attachment_id = ? AND chat_id = ''"
"""Every attachment has this row, but for those of a time when it was not written down who refers to them."""
SELECT_ATTACHMENT = "SELECT id, owner, name, media_type, size, created_ms, content FROM attachments WHERE id = ?"


class SqlChatStore:
    """A `ChatStore` over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, chat: ChatRecord) -> ChatRecord:
        values = _written(chat)

        async def act(transaction: Transaction) -> ChatRecord:
            await transaction.run(INSERT, *values)
            known, _ = await _there(transaction, chat.id)
            if known.owner != chat.owner:
                raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
            return known

        return await self._database.write(act, brief=True)

    async def get(self, chat_id: str) -> ChatRecord | None:
        async def act(transaction: Transaction) -> ChatRecord | None:
            row = await transaction.row(f"{SELECT} WHERE id = ?", codec.sought(chat_id))
            return None if row is None else _record(row)

        return await self._database.read(act, brief=True)

    async def list(
        self, *, owner: str | None = None, before: str | None = None, limit: int = 50
    ) -> Sequence[ChatRecord]:
        where, values = [], []
        for term, value in (
            ("owner = ?", owner),
            ("(updated_ms, id) < (SELECT updated_ms, id FROM chats WHERE id = ?)", before),
        ):
            if value is not None:
                where.append(term)
                values.append(codec.sought(value))
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        statement = f"{SELECT}{condition} ORDER BY updated_ms DESC, id DESC LIMIT ?"
        most = codec.limit(limit)

        async def act(transaction: Transaction) -> Sequence[ChatRecord]:
            return [_record(row) for row in await transaction.rows(statement, *values, most)]

        return await self._database.read(act)

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        values = codec.text("title", title), codec.number("updated_ms", now_ms)

        async def act(transaction: Transaction) -> ChatRecord:
            known, _ = await _there(transaction, chat_id)
            await transaction.run("UPDATE chats SET title = ?, updated_ms = ? WHERE id = ?", *values, known.id)
            return replace(known, title=title, updated_ms=now_ms)

        return await self._database.write(act, brief=True)

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        codec.number("updated_ms", now_ms)
        written: dict[str, tuple[Value, ...]] = {}
        for number, message in enumerate(messages):  # here and not in the act, for which all who write wait
            await pause_at(number)
            written[message.id] = _written_message(message)

        async def act(transaction: Transaction) -> None:
            _, leaf = await _there(transaction, chat_id)
            ids = {id for message in messages for id in (message.id, message.parent_id) if id is not None}
            new = new_messages(await _mentioned(transaction, chat_id, sorted(ids)), messages)
            if new:
                await transaction.run_many(INSERT_MESSAGE, [(chat_id, *written[message.id]) for message in new])
                await _used(transaction, chat_id, new)
                leaf = await _shown(transaction, chat_id, leaf, new)
                values = now_ms, leaf, chat_id
                await transaction.run("UPDATE chats SET updated_ms = ?, leaf = ? WHERE id = ?", *values)

        await self._database.write(act, brief=len(messages) + len(referred(messages)) <= FEW)

    async def take_back(self, chat_id: str, message_ids: Sequence[str], *, in_view: str | None) -> None:
        ids = [codec.sought(id) for id in message_ids]
        going = {*ids}

        async def act(transaction: Transaction) -> None:
            await _there(transaction, chat_id)
            if in_view is not None:
                await _said(transaction, chat_id, in_view)
            seen: list[Row] = []
            for some in portions(ids):
                for id, parent in await transaction.rows(f"{SELECT_BELOW} ({marks(len(some))})", chat_id, *some):
                    if id not in going:
                        raise Conflict(followed(id, parent))
                seen += await transaction.rows(f"{SELECT_SEEN} ({marks(len(some))})", chat_id, *some)
            attached = referred((await _mentioned(transaction, chat_id, ids)).values())
            for some in portions(ids):
                await transaction.run(f"{DELETE_MESSAGES} ({marks(len(some))})", chat_id, *some)
            if attached:
                staying = [_message(chat_id, row) for row in await transaction.rows(SELECT_MESSAGES, chat_id)]
                await transaction.run_many(UNUSE, [(codec.sought(id), chat_id) for id in attached - referred(staying)])
            if seen and in_view is not None and in_view not in going:
                await _bring_into_view(transaction, chat_id, in_view)
            await transaction.run("UPDATE chats SET leaf = ? WHERE id = ?", NONE, chat_id)

        await self._database.write(act)

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        codec.number("updated_ms", now_ms)

        async def act(transaction: Transaction) -> ChatMessage:
            await _there(transaction, chat_id)
            before = await _said(transaction, chat_id, message_id)
            after = replace(before, content=content, data=data)
            if _is_same(before, after):
                return before
            state = before.data.get("state")
            if state != "writing":
                raise Conflict(
                    f"message {message_id!r} of chat {chat_id!r} is not being written: its state is {state!r}"
                )
            values = codec.text("content", after.content), codec.document("data", after.data), chat_id, message_id
            await transaction.run("UPDATE messages SET content = ?, data = ? WHERE chat_id = ? AND id = ?", *values)
            await transaction.run("UPDATE chats SET updated_ms = ? WHERE id = ?", now_ms, chat_id)
            return after

        return await self._database.write(act, brief=True)

    async def message(self, chat_id: str, message_id: str) -> ChatMessage | None:
        asked = codec.sought(chat_id), codec.sought(message_id)

        async def act(transaction: Transaction) -> ChatMessage | None:
            row = await transaction.row(f"{SELECT_MESSAGES} AND id = ?", *asked)
            return None if row is None else _message(chat_id, row)

        return await self._database.read(act, brief=True)

    async def messages(self, chat_id: str) -> tuple[Sequence[ChatMessage], Sequence[str]]:
        async def act(transaction: Transaction) -> tuple[Sequence[ChatMessage], Sequence[str]]:
            found = await transaction.rows(SELECT_ALL, codec.sought(chat_id))
            rows = [row[:-1] for row in sorted(found, key=itemgetter(-1))]
            return [_message(chat_id, row) for row in rows], [row[0] for row in rows if row[-1]]

        return await self._database.read(act, brief=True)

    async def choose(self, chat_id: str, message_id: str) -> None:
        async def act(transaction: Transaction) -> None:
            await _there(transaction, chat_id)
            await _said(transaction, chat_id, message_id)
            await _bring_into_view(transaction, chat_id, message_id)
            await transaction.run("UPDATE chats SET leaf = ? WHERE id = ?", NONE, chat_id)

        await self._database.write(act)

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        named = codec.name("key", key)

        async def act(transaction: Transaction) -> None:
            await _there(transaction, chat_id)
            await _said(transaction, chat_id, message_id)
            await transaction.run(MARK, named, chat_id, message_id)

        await self._database.write(act, brief=True)

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        sought = [codec.sought(key) for key in keys]

        async def act(transaction: Transaction) -> Marked | None:
            places: dict[str, Row] = {}
            for some in portions(sought):
                found = f"SELECT key, chat_id, message_id FROM chat_marks WHERE key IN ({marks(len(some))})"
                places.update((row[0], row) for row in await transaction.rows(found, *some) if row[2])
            place = next((places[key] for key in sought if key in places), None)
            if place is None:
                return None
            below = f"{SELECT_MESSAGES} AND parent_id = ? ORDER BY number"
            rows = await transaction.rows(below, place[1], place[2])
            key, chat_id, message_id = place
            return Marked(key, chat_id, message_id, [_message(chat_id, row) for row in rows])

        return await self._database.read(act, brief=True)

    async def remove(self, chat_id: str) -> None:
        asked = codec.sought(chat_id)

        async def act(transaction: Transaction) -> None:
            try:
                chat, _ = await _there(transaction, asked)
            except KeyError:
                return
            said = [_message(asked, row) for row in await transaction.rows(SELECT_MESSAGES, asked)]
            unfinished = await transaction.row(UNFINISHED, asked, *sorted(ENDED))
            check_rests(asked, said, has_runs=unfinished is not None)
            await _removed(transaction, {chat.id: chat.owner})

        await self._database.write(act)

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def act(transaction: Transaction) -> Sequence[str]:
            rows = await transaction.rows(f"{SELECT_UNUSED}{transaction.dialect.skip_locked}", *values)
            owners = {str(row[0]): str(row[1]) for row in rows}
            await _removed(transaction, owners)
            return [*owners]

        return await self._database.write(act)

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        values = _written_attachment(attachment)
        if not isinstance(content, bytes):
            raise InvalidValue("content", f"this {type(content).__name__}", "bytes")
        if attachment.size != len(content):
            raise InvalidValue("size", attachment.size, f"what is attached: {len(content)} bytes")

        async def act(transaction: Transaction) -> Attachment:
            if await transaction.run(INSERT_ATTACHMENT, *values, content):
                await transaction.run(USE, attachment.id, NONE)
            row = await transaction.row(SELECT_ATTACHMENT, attachment.id)
            if row is None or _attachment(row) != (attachment, content):
                raise Conflict(f"attachment {attachment.id!r} is there and another; give this one an id of its own")
            return attachment

        return await self._database.write(act)

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        async def act(transaction: Transaction) -> tuple[Attachment, bytes] | None:
            row = await transaction.row(SELECT_ATTACHMENT, codec.sought(attachment_id))
            return None if row is None else _attachment(row)

        return await self._database.read(act)

    async def detach(self, attachment_id: str) -> None:
        async def act(transaction: Transaction) -> None:
            await _detached(transaction, codec.sought(attachment_id))

        await self._database.write(act)


def _written(chat: ChatRecord) -> tuple[Value, ...]:
    return (
        codec.name("id", chat.id),
        codec.name("owner", chat.owner),
        codec.text("title", chat.title),
        codec.name("graph_id", chat.graph_id),
        codec.number("created_ms", chat.created_ms),
        codec.number("updated_ms", chat.updated_ms),
        codec.name("made_by", chat.made_by),
    )


def _record(row: Row) -> ChatRecord:
    id, owner, title, *rest = row
    return ChatRecord(id, owner, codec.read_text("chats", id, title), *rest)


async def _there(transaction: Transaction, chat_id: str) -> tuple[ChatRecord, str]:
    """The chat and its leaf; nobody else changes it until the transaction has ended."""
    statement = f"SELECT {COLUMNS}, leaf FROM chats WHERE id = ?"
    row = await transaction.row(f"{statement}{transaction.dialect.update_lock}", codec.sought(chat_id))
    if row is None:
        raise KeyError(f"no chat {chat_id!r}")
    return _record(row[:-1]), row[-1]


def _written_message(message: ChatMessage) -> tuple[Value, ...]:
    return (
        codec.name("id", message.id),
        codec.optional_name("parent_id", message.parent_id) or NONE,
        message.role,
        codec.text("content", message.content),
        codec.number("at_ms", message.at_ms),
        codec.document("data", message.data),
    )


def _message(chat_id: str, row: Row) -> ChatMessage:
    id, parent_id, role, content, at_ms, data, _ = row
    key = f"{chat_id}/{id}"
    said, more = codec.read_text("messages", key, content), codec.read_object("messages", key, data)
    try:
        return ChatMessage(id, parent_id or None, role, said, at_ms, more)
    except InvalidValue as error:
        raise codec.StoreCorrupt("messages", key, str(error)) from None


async def _said(transaction: Transaction, chat_id: str, message_id: str) -> ChatMessage:
    row = await transaction.row(f"{SELECT_MESSAGES} AND id = ?", chat_id, codec.sought(message_id))
    if row is None:
        raise KeyError(f"no message {message_id!r} in chat {chat_id!r}")
    return _message(chat_id, row)


def _is_same(one: ChatMessage, other: ChatMessage) -> bool:
    same_data = codec.canonical("data", one.data) == codec.canonical("data", other.data)
    return same_data and replace(one, data={}) == replace(other, data={})


async def _mentioned(transaction: Transaction, chat_id: str, ids: Sequence[str]) -> Mapping[str, ChatMessage]:
    """Those of the messages that are there."""
    known: dict[str, ChatMessage] = {}
    for some in portions(ids):
        rows = await transaction.rows(f"{SELECT_MESSAGES} AND id IN ({marks(len(some))})", chat_id, *some)
        known.update((row[0], _message(chat_id, row)) for row in rows)
    return known


async def _shown(transaction: Transaction, chat_id: str, leaf: str, new: Sequence[ChatMessage]) -> str:
    """Bring each into view; the leaf afterwards."""
    followed = set()
    for message in new:
        # What follows the leaf has no siblings, and all above it is in view.
        if leaf == NONE or message.parent_id != leaf:
            await _bring_into_view(transaction, chat_id, message.id)
        followed.add(message.parent_id)
        leaf = NONE if message.id in followed else message.id
    return leaf


async def _bring_into_view(transaction: Transaction, chat_id: str, message_id: str) -> None:
    rows = await transaction.rows(SELECT_UPWARDS, chat_id, message_id, chat_id)
    await transaction.run_many(BRING_INTO_VIEW, [(id, chat_id, parent, id) for id, parent in rows])


async def _used(transaction: Transaction, chat_id: str, messages: Iterable[ChatMessage]) -> None:
    """Write down what the messages refer to; whoever is about to remove it waits, and then sees that."""
    for id in sorted(id for id in referred(messages) if codec.sought(id) == id):
        await transaction.row(f"{IS_COUNTED}{transaction.dialect.share_lock}", id)
        await transaction.run(USE, id, chat_id)


async def _removed(transaction: Transaction, owners: Mapping[str, str]) -> None:
    """Remove chats that are locked, by id, each of one owner, with everything that is their own."""
    used: set[tuple[str, str]] = set()
    for some in portions([*owners]):
        rows = await transaction.rows(f"{SELECT_USED} AND chat_id IN ({marks(len(some))})", *some)
        used.update((attachment_id, owners[chat_id]) for attachment_id, chat_id in rows)
    ids = [(id,) for id in owners]
    # As the index of uses has it: a database uses the index for what says the same in the same words.
    for table in ("attachment_uses WHERE chat_id <> '' AND", "chat_marks WHERE", "messages WHERE"):
        await transaction.run_many(f"DELETE FROM {table} chat_id = ?", ids)
    for attachment_id, owner in sorted(used):
        await _detached(transaction, attachment_id, owner)
    await transaction.run_many("DELETE FROM chats WHERE id = ?", ids)
    await forget_chats(transaction, owners)


async def _detached(transaction: Transaction, attachment_id: str, owner: str | None = None) -> None:
    """Remove bytes that no chat refers to, as far as that is known, and that are the owner's, if one is named."""
    counted = await transaction.row(f"{IS_COUNTED}{transaction.dialect.update_lock}", attachment_id)
    if counted is None or await transaction.row(SELECT_USER, attachment_id) is not None:
        return
    whose = "" if owner is None else " AND owner = ?"
    values = [attachment_id] if owner is None else [attachment_id, owner]
    if await transaction.run(f"DELETE FROM attachments WHERE id = ?{whose}", *values):
        await transaction.run("DELETE FROM attachment_uses WHERE attachment_id = ?", attachment_id)


def _written_attachment(attachment: Attachment) -> tuple[Value, ...]:
    return (
        codec.name("id", attachment.id),
        codec.name("owner", attachment.owner),
        codec.text("name", attachment.name),
        codec.text("media_type", attachment.media_type),
        codec.number("size", attachment.size),
        codec.number("created_ms", attachment.created_ms),
    )


def _attachment(row: Row) -> tuple[Attachment, bytes]:
    id, owner, name, media_type, size, created_ms, content = row
    named, kind = codec.read_text("attachments", id, name), codec.read_text("attachments", id, media_type)
    return Attachment(id, owner, named, kind, size, created_ms), bytes(content)
