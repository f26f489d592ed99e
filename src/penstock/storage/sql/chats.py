"""SQL store of chats, with their messages and attachments.

Of the replies to a message, one is in view. Adding a message brings it and all its ancestors into view. The chat stores
the last message in view (`leaf`), so that a turn at the end of a conversation costs the same however long it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from penstock.chat.conversation import ChatMessage, Place, yield_every
from penstock.chat.ports import (
    MAX_PREVIEW,
    Attachment,
    ChatPreview,
    ChatRecord,
    Marked,
    PathWindow,
    message_state,
)
from penstock.errors import InvalidValue
from penstock.hosting.ports import ENDED, Conflict, StoreCorrupt
from penstock.storage import codec
from penstock.storage.port import INLINE_MAX_ROWS, Row, SqlStore, TableCheck, Transaction, Value, chunks, placeholders
from penstock.storage.rules import (
    ENCODED_SPACE,
    attachment_ids,
    check_attached,
    check_idle,
    check_writing,
    is_same_message,
    new_messages,
    search_terms,
)
from penstock.storage.sql.memories import forget_chats

NONE = ""
"""Parent of the first messages of a chat, and the leaf when it is unknown; no message has this id."""
COLUMNS = "id, owner, title, graph_id, created_ms, updated_ms, made_by"
SELECT = f"SELECT {COLUMNS} FROM chats"
INSERT = f"INSERT INTO chats ({COLUMNS}, leaf) VALUES (?, ?, ?, ?, ?, ?, ?, '') ON CONFLICT (id) DO NOTHING"
SELECT_UNUSED = (
    "SELECT id, owner FROM chats WHERE made_by <> '' AND updated_ms < ? "
    "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.chat_id = chats.id) ORDER BY updated_ms, id LIMIT ?"
)
UNFINISHED = f"SELECT 1 FROM runs WHERE chat_id = ? AND status NOT IN ({placeholders(len(ENDED))}) LIMIT 1"
MARK = (
    "INSERT INTO chat_marks (key, chat_id, message_id) "
    "SELECT ?, chat_id, id FROM messages WHERE chat_id = ? AND id = ? "
    "ON CONFLICT (key) DO UPDATE SET chat_id = excluded.chat_id, message_id = "
    "CASE WHEN chat_marks.chat_id = excluded.chat_id AND chat_marks.message_id <> '' "
    "THEN excluded.message_id ELSE '' END"
)
"""Marks a message, if it exists. A key that was marked in two chats resolves to nothing for as long as the newer chat
exists."""
SELECT_MESSAGES = "SELECT id, parent_id, role, content, at_ms, data, is_in_view FROM messages WHERE chat_id = ?"
SELECT_ALL = SELECT_MESSAGES.replace(" FROM ", ", number FROM ")
"""Unordered: to sort the rows, a database would read them all before it returns the first."""
INSERT_MESSAGE = (
    "INSERT INTO messages (chat_id, id, parent_id, role, content, at_ms, data, is_in_view) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, 1)"
)
SELECT_UPWARDS = (
    "WITH RECURSIVE above (id, parent_id, is_in_view) AS "
    "(SELECT id, parent_id, CAST(0 AS BIGINT) FROM messages WHERE chat_id = ? AND id = ? "
    "UNION ALL SELECT messages.id, messages.parent_id, messages.is_in_view "
    "FROM messages JOIN above ON messages.id = above.parent_id WHERE messages.chat_id = ?) "
    "SELECT id, parent_id FROM above WHERE is_in_view = 0"
)
"""A message, in view or not, and its ancestors not in view; the siblings of a message in view never are."""
BRING_INTO_VIEW = (
    "UPDATE messages SET is_in_view = CASE WHEN id = ? THEN 1 ELSE 0 END "
    "WHERE chat_id = ? AND parent_id = ? AND (is_in_view = 1 OR id = ?)"
)
SELECT_ANCESTORS = (
    "WITH RECURSIVE above (id, parent_id, height) AS "
    "(SELECT id, parent_id, CAST(0 AS BIGINT) FROM messages WHERE chat_id = ? AND id = ? "
    "UNION ALL SELECT messages.id, messages.parent_id, above.height + 1 "
    "FROM messages JOIN above ON messages.id = above.parent_id WHERE messages.chat_id = ? AND above.height < ?) "
    "SELECT id FROM above ORDER BY height DESC"
)
"""A message and up to a number of ancestors, the topmost first."""
SELECT_BELOW = (
    "WITH RECURSIVE below (id, depth) AS "
    "(SELECT id, CAST(1 AS BIGINT) FROM messages WHERE chat_id = ? AND parent_id = ? AND is_in_view = 1 "
    "UNION ALL SELECT messages.id, below.depth + 1 FROM messages JOIN below ON messages.parent_id = below.id "
    "WHERE messages.chat_id = ? AND messages.is_in_view = 1 AND below.depth < ?) SELECT id FROM below ORDER BY depth"
)
"""Up to a number of messages in view below a message."""
SELECT_PREVIEWS = (
    f"SELECT chat_id, id, role, substr(content, 1, {12 * MAX_PREVIEW + 1}), at_ms, data FROM messages WHERE "
)
"""A character takes up to 12 encoded, so this is at least the content of a preview."""
WHOLE_CHARACTERS = re.compile(r'"(?:[^"\\]|\\u[0-9a-f]{4}|\\[^u])*')
"""The beginning of an encoded text, without an escape that was cut."""
INSERT_ATTACHMENT = (
    "INSERT INTO attachments (id, owner, name, media_type, size, created_ms, content) VALUES (?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (id) DO NOTHING"
)
USE = (
    "INSERT INTO attachment_uses (attachment_id, chat_id) VALUES (?, ?) ON CONFLICT (attachment_id, chat_id) DO NOTHING"
)
SELECT_USED = "SELECT attachment_id, chat_id FROM attachment_uses WHERE chat_id <> ''"
SELECT_USER = "SELECT 1 FROM attachment_uses WHERE attachment_id = ? AND chat_id <> '' LIMIT 1"
IS_COUNTED = "SELECT 1 FROM attachment_uses WHERE attachment_id = ? AND chat_id = ''"
"""Every attachment has this row, except those added before references were recorded."""
SELECT_ATTACHMENT = "SELECT id, owner, name, media_type, size, created_ms, content FROM attachments WHERE id = ?"


class SqlChatStore(SqlStore):
    """A `ChatStore` over a database."""

    async def create(self, chat: ChatRecord) -> ChatRecord:
        values = _encode_chat(chat)

        async def body(transaction: Transaction) -> ChatRecord:
            if await transaction.run(INSERT, *values):
                return chat
            known = await _locked_chat(transaction, chat.id)
            if known.owner != chat.owner:
                raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
            return known

        return await self._database.write(body, inline=True)

    async def get(self, chat_id: str) -> ChatRecord | None:
        async def body(transaction: Transaction) -> ChatRecord | None:
            row = await transaction.row(f"{SELECT} WHERE id = ?", codec.lookup_key(chat_id))
            return None if row is None else _decode_chat(row)

        return await self._database.read(body, inline=True)

    async def list(
        self,
        *,
        owner: str | None = None,
        graph_id: str | None = None,
        text: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[ChatRecord]:
        where, values = [], []
        for term, value in (
            ("owner = ?", owner),
            ("graph_id = ?", graph_id),
            ("(updated_ms, id) < (SELECT updated_ms, id FROM chats WHERE id = ?)", before),
        ):
            if value is not None:
                where.append(term)
                values.append(codec.lookup_key(value))
        if text is not None:
            patterns = [_pattern(term) for term in search_terms(text)]
            where.append(_contains(len(patterns)))
            values.extend([*patterns, *patterns])
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        statement = f"{SELECT}{condition} ORDER BY updated_ms DESC, id DESC LIMIT ?"
        maximum = codec.limit(limit)

        async def body(transaction: Transaction) -> Sequence[ChatRecord]:
            return [self._decode_or_mark(row) for row in await transaction.rows(statement, *values, maximum)]

        return await self._database.read(body)

    async def previews(self, chat_ids: Sequence[str]) -> Mapping[str, ChatPreview]:
        keys = [codec.lookup_key(id) for id in chat_ids]

        async def body(transaction: Transaction) -> Mapping[str, ChatPreview]:
            found: list[Row] = []
            for chunk in chunks(keys):
                ends = f"SELECT id, leaf FROM chats WHERE id IN ({placeholders(len(chunk))})"
                for chat_id, leaf in await transaction.rows(ends, *chunk):
                    end = leaf or await _end_below(transaction, chat_id, NONE)
                    found.extend(await transaction.rows(f"{SELECT_PREVIEWS}chat_id = ? AND id = ?", chat_id, end))
            return dict(self._database.faults.readable(found, _decode_preview))

        return await self._database.read(body)

    def _decode_or_mark(self, row: Row) -> ChatRecord:
        """Decode a row for a list; one that cannot be decoded is shown with the reason as its title."""
        try:
            return _decode_chat(row)
        except StoreCorrupt as error:
            self._database.faults.note(error)
            id, owner, _, *rest = row
            return ChatRecord(id, owner, codec.unreadable(error), *rest)

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        values = codec.encode_text("title", title), codec.number("updated_ms", now_ms)

        async def body(transaction: Transaction) -> ChatRecord:
            known = await _locked_chat(transaction, chat_id)
            await transaction.run("UPDATE chats SET title = ?, updated_ms = ? WHERE id = ?", *values, known.id)
            return replace(known, title=title, updated_ms=now_ms)

        return await self._database.write(body, inline=True)

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        codec.number("updated_ms", now_ms)
        encoded: dict[str, tuple[Value, ...]] = {}
        for number, message in enumerate(messages):  # outside the transaction, which blocks all other writers
            await yield_every(number)
            encoded[message.id] = _encode_message(message)

        async def body(transaction: Transaction) -> None:
            leaf = await _lock_chat(transaction, chat_id)
            ids = {id for message in messages for id in (message.id, message.parent_id) if id is not None}
            new = new_messages(await _messages_by_id(transaction, chat_id, sorted(ids)), messages)
            if new:
                await transaction.run_many(INSERT_MESSAGE, [(chat_id, *encoded[message.id]) for message in new])
                await _record_attachments(transaction, chat_id, new)
                leaf = await _show_new(transaction, chat_id, leaf, new)
                values = now_ms, leaf, chat_id
                await transaction.run("UPDATE chats SET updated_ms = ?, leaf = ? WHERE id = ?", *values)

        await self._database.write(body, inline=len(messages) + len(attachment_ids(messages)) <= INLINE_MAX_ROWS)

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        codec.number("updated_ms", now_ms)

        async def body(transaction: Transaction) -> ChatMessage:
            await _lock_chat(transaction, chat_id)
            before = await _message_by_id(transaction, chat_id, message_id)
            after = replace(before, content=content, data=data)
            if is_same_message(before, after):
                return before
            check_writing(chat_id, before)
            values = (
                codec.encode_text("content", after.content),
                codec.encode_document("data", after.data),
                chat_id,
                message_id,
            )
            await transaction.run("UPDATE messages SET content = ?, data = ? WHERE chat_id = ? AND id = ?", *values)
            await transaction.run("UPDATE chats SET updated_ms = ? WHERE id = ?", now_ms, chat_id)
            return after

        return await self._database.write(body, inline=True)

    async def message(self, chat_id: str, message_id: str) -> ChatMessage | None:
        ids = codec.lookup_key(chat_id), codec.lookup_key(message_id)

        async def body(transaction: Transaction) -> ChatMessage | None:
            row = await transaction.row(f"{SELECT_MESSAGES} AND id = ?", *ids)
            return None if row is None else _decode_message(chat_id, row)

        return await self._database.read(body, inline=True)

    async def messages(self, chat_id: str) -> tuple[Sequence[ChatMessage], Sequence[str]]:
        async def body(transaction: Transaction) -> tuple[Sequence[ChatMessage], Sequence[str]]:
            found = await transaction.rows(SELECT_ALL, codec.lookup_key(chat_id))
            rows = [row[:-1] for row in sorted(found, key=itemgetter(-1))]
            return [_decode_message(chat_id, row) for row in rows], [row[0] for row in rows if row[-1]]

        return await self._database.read(body, inline=True)

    async def path(self, chat_id: str, message_id: str | None = None, *, above: int = 0, below: int = 0) -> PathWindow:
        codec.limit(above), codec.limit(below)
        key = codec.lookup_key(chat_id)

        async def body(transaction: Transaction) -> PathWindow:
            if message_id is None:
                row = await transaction.row("SELECT leaf FROM chats WHERE id = ?", key)
                middle = NONE if row is None else row[0] or await _end_below(transaction, key, NONE)
            else:
                middle = (await _message_by_id(transaction, key, message_id)).id
            if middle == NONE:
                return PathWindow()
            return await _window(transaction, key, middle, above, below)

        return await self._database.read(body)

    async def choose(self, chat_id: str, message_id: str) -> None:
        async def body(transaction: Transaction) -> None:
            await _lock_chat(transaction, chat_id)
            await _message_by_id(transaction, chat_id, message_id)
            await _bring_into_view(transaction, chat_id, message_id)
            leaf = await _end_below(transaction, chat_id, message_id)
            await transaction.run("UPDATE chats SET leaf = ? WHERE id = ?", leaf, chat_id)

        await self._database.write(body)

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        checked_key = codec.name("key", key)

        async def body(transaction: Transaction) -> None:
            await _lock_chat(transaction, chat_id)
            if not await transaction.run(MARK, checked_key, chat_id, codec.lookup_key(message_id)):
                raise _no_message(chat_id, message_id)

        await self._database.write(body, inline=True)

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        lookup_keys = [codec.lookup_key(key) for key in keys]

        async def body(transaction: Transaction) -> Marked | None:
            places: dict[str, Row] = {}
            for chunk in chunks(lookup_keys):
                found = f"SELECT key, chat_id, message_id FROM chat_marks WHERE key IN ({placeholders(len(chunk))})"
                places.update((row[0], row) for row in await transaction.rows(found, *chunk) if row[2])
            place = next((places[key] for key in lookup_keys if key in places), None)
            if place is None:
                return None
            below = f"{SELECT_MESSAGES} AND parent_id = ? ORDER BY number"
            rows = await transaction.rows(below, place[1], place[2])
            key, chat_id, message_id = place
            return Marked(key, chat_id, message_id, [_decode_message(chat_id, row) for row in rows])

        return await self._database.read(body, inline=True)

    async def remove(self, chat_id: str) -> None:
        key = codec.lookup_key(chat_id)

        async def body(transaction: Transaction) -> None:
            try:
                (owner,) = await _locked_row(transaction, "owner", key)
            except KeyError:
                return
            # A chat that cannot be read can still be removed, so that its owner can get rid of it.
            rows = await transaction.rows(SELECT_MESSAGES, key)
            messages = self._database.faults.readable(rows, partial(_decode_message, key))
            unfinished = await transaction.row(UNFINISHED, key, *sorted(ENDED))
            check_idle(key, messages, has_runs=unfinished is not None)
            await _remove_chats(transaction, {key: str(owner)})

        await self._database.write(body)

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        values = codec.number("before_ms", before_ms), codec.limit(limit)

        async def body(transaction: Transaction) -> Sequence[str]:
            rows = await transaction.rows(f"{SELECT_UNUSED}{transaction.dialect.skip_locked}", *values)
            owners = {str(row[0]): str(row[1]) for row in rows}
            await _remove_chats(transaction, owners)
            return [*owners]

        return await self._database.write(body)

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        values = _encode_attachment(attachment)
        check_attached(attachment, content)

        async def body(transaction: Transaction) -> Attachment:
            if await transaction.run(INSERT_ATTACHMENT, *values, content):
                await transaction.run(USE, attachment.id, NONE)
            row = await transaction.row(SELECT_ATTACHMENT, attachment.id)
            if row is None or _decode_attachment(row) != (attachment, content):
                raise Conflict(f"attachment {attachment.id!r} exists and is different; give this one an id of its own")
            return attachment

        return await self._database.write(body)

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        async def body(transaction: Transaction) -> tuple[Attachment, bytes] | None:
            row = await transaction.row(SELECT_ATTACHMENT, codec.lookup_key(attachment_id))
            return None if row is None else _decode_attachment(row)

        return await self._database.read(body)

    async def detach(self, attachment_id: str) -> None:
        async def body(transaction: Transaction) -> None:
            await _remove_if_unreferenced(transaction, codec.lookup_key(attachment_id))

        await self._database.write(body)


def _encode_chat(chat: ChatRecord) -> tuple[Value, ...]:
    return (
        codec.name("id", chat.id),
        codec.name("owner", chat.owner),
        codec.encode_text("title", chat.title),
        codec.name("graph_id", chat.graph_id),
        codec.number("created_ms", chat.created_ms),
        codec.number("updated_ms", chat.updated_ms),
        codec.name("made_by", chat.made_by),
    )


def _decode_chat(row: Row) -> ChatRecord:
    id, owner, title, *rest = row
    return ChatRecord(id, owner, codec.decode_text("chats", id, title), *rest)


async def _locked_chat(transaction: Transaction, chat_id: str) -> ChatRecord:
    """Lock the chat until the transaction ends, and return it; raise KeyError if it does not exist."""
    return _decode_chat(await _locked_row(transaction, COLUMNS, chat_id))


async def _lock_chat(transaction: Transaction, chat_id: str) -> str:
    """Lock the chat until the transaction ends, and return its leaf; raise KeyError if it does not exist."""
    (leaf,) = await _locked_row(transaction, "leaf", chat_id)
    return str(leaf)


async def _locked_row(transaction: Transaction, columns: str, chat_id: str) -> Row:
    statement = f"SELECT {columns} FROM chats WHERE id = ?{transaction.dialect.update_lock}"
    row = await transaction.row(statement, codec.lookup_key(chat_id))
    if row is None:
        raise KeyError(f"no chat {chat_id!r}")
    return row


def _encode_message(message: ChatMessage) -> tuple[Value, ...]:
    return (
        codec.name("id", message.id),
        codec.optional_name("parent_id", message.parent_id) or NONE,
        message.role,
        codec.encode_text("content", message.content),
        codec.number("at_ms", message.at_ms),
        codec.encode_document("data", message.data),
    )


def _decode_message(chat_id: str, row: Row) -> ChatMessage:
    id, parent_id, role, content, at_ms, data, _ = row
    key = f"{chat_id}/{id}"
    text, fields = codec.decode_text("messages", key, content), codec.decode_object("messages", key, data)
    try:
        return ChatMessage(id, parent_id or None, role, text, at_ms, fields)
    except InvalidValue as error:
        raise StoreCorrupt("messages", key, str(error)) from None


async def _message_by_id(transaction: Transaction, chat_id: str, message_id: str) -> ChatMessage:
    row = await transaction.row(f"{SELECT_MESSAGES} AND id = ?", chat_id, codec.lookup_key(message_id))
    if row is None:
        raise _no_message(chat_id, message_id)
    return _decode_message(chat_id, row)


def _no_message(chat_id: str, message_id: str) -> KeyError:
    return KeyError(f"no message {message_id!r} in chat {chat_id!r}")


async def _messages_by_id(transaction: Transaction, chat_id: str, ids: Sequence[str]) -> Mapping[str, ChatMessage]:
    """Return those of the messages that exist, by id."""
    known: dict[str, ChatMessage] = {}
    for chunk in chunks(ids):
        rows = await transaction.rows(f"{SELECT_MESSAGES} AND id IN ({placeholders(len(chunk))})", chat_id, *chunk)
        known.update((row[0], _decode_message(chat_id, row)) for row in rows)
    return known


async def _end_below(transaction: Transaction, chat_id: str, message_id: str) -> str:
    """Return the last message in view below a message, or the message itself; NONE below NONE for an empty chat."""
    rows = await transaction.rows(SELECT_BELOW, chat_id, message_id, chat_id, codec.MAX_NUMBER)
    return str(rows[-1][0]) if rows else message_id


async def _window(transaction: Transaction, chat_id: str, middle: str, above: int, below: int) -> PathWindow:
    ids = [str(row[0]) for row in await transaction.rows(SELECT_ANCESTORS, chat_id, middle, chat_id, above)]
    if below:
        ids += [str(row[0]) for row in await transaction.rows(SELECT_BELOW, chat_id, middle, chat_id, below)]
    known = await _messages_by_id(transaction, chat_id, ids)
    messages = [known[id] for id in ids]
    places = await _places(transaction, chat_id, messages)
    return PathWindow(messages, places, await _end_below(transaction, chat_id, ids[-1]))


async def _places(transaction: Transaction, chat_id: str, messages: Sequence[ChatMessage]) -> list[Place]:
    """Return the position of each message among its siblings."""
    siblings: dict[str, list[str]] = {}
    for chunk in chunks([message.parent_id or NONE for message in messages]):
        condition = f"chat_id = ? AND parent_id IN ({placeholders(len(chunk))})"
        statement = f"SELECT id, parent_id FROM messages WHERE {condition} ORDER BY number"
        for id, parent_id in await transaction.rows(statement, chat_id, *chunk):
            siblings.setdefault(parent_id, []).append(id)
    return [Place.among(siblings[message.parent_id or NONE], message.id) for message in messages]


def _decode_preview(row: Row) -> tuple[str, ChatPreview]:
    chat_id, id, role, content, at_ms, data = row
    key = f"{chat_id}/{id}"
    if len(content) > 12 * MAX_PREVIEW and (whole := WHOLE_CHARACTERS.match(content)):
        content = f'{whole[0]}"'
    text = codec.decode_text("messages", key, content)[:MAX_PREVIEW]
    return chat_id, ChatPreview(id, role, text, at_ms, message_state(codec.decode_object("messages", key, data)))


def _contains(count: int) -> str:
    """Return the condition that the title or a message of a chat matches one of `count` patterns."""

    def matches(column: str) -> str:
        for escape in ENCODED_SPACE:
            column = f"replace({column}, '{escape}', ' ')"
        return " OR ".join([f"lower({column}) LIKE ? ESCAPE '!'"] * count)

    messages = f"SELECT 1 FROM messages WHERE chat_id = chats.id AND ({matches('content')})"
    return f"({matches('title')} OR EXISTS ({messages}))"


def _pattern(term: str) -> str:
    """Return the LIKE pattern of any text that contains the term."""
    return f"%{''.join(f'!{one}' if one in '!%_' else one for one in term)}%"


async def _show_new(transaction: Transaction, chat_id: str, leaf: str, new: Sequence[ChatMessage]) -> str:
    """Bring each new message into view and return the leaf afterwards."""
    followed = set()
    for message in new:
        # A reply to the leaf has no siblings, and all its ancestors are in view.
        if leaf == NONE or message.parent_id != leaf:
            await _bring_into_view(transaction, chat_id, message.id)
        followed.add(message.parent_id)
        leaf = NONE if message.id in followed else message.id
    return leaf


async def _bring_into_view(transaction: Transaction, chat_id: str, message_id: str) -> None:
    rows = await transaction.rows(SELECT_UPWARDS, chat_id, message_id, chat_id)
    await transaction.run_many(BRING_INTO_VIEW, [(id, chat_id, parent, id) for id, parent in rows])


async def _record_attachments(transaction: Transaction, chat_id: str, messages: Iterable[ChatMessage]) -> None:
    """Record the attachments the messages refer to; a concurrent removal waits, and then sees the reference."""
    for id in sorted(id for id in attachment_ids(messages) if codec.lookup_key(id) == id):
        await transaction.row(f"{IS_COUNTED}{transaction.dialect.share_lock}", id)
        await transaction.run(USE, id, chat_id)


async def _remove_chats(transaction: Transaction, owners: Mapping[str, str]) -> None:
    """Remove locked chats, given as owner by chat id, with everything that belongs to them."""
    used: set[tuple[str, str]] = set()
    for chunk in chunks([*owners]):
        rows = await transaction.rows(f"{SELECT_USED} AND chat_id IN ({placeholders(len(chunk))})", *chunk)
        used.update((attachment_id, owners[chat_id]) for attachment_id, chat_id in rows)
    ids = [(id,) for id in owners]
    # `chat_id <> ''` is worded as in the partial index: a database uses it only for the same condition.
    for table in ("attachment_uses WHERE chat_id <> '' AND", "chat_marks WHERE", "messages WHERE"):
        await transaction.run_many(f"DELETE FROM {table} chat_id = ?", ids)
    for attachment_id, owner in sorted(used):
        await _remove_if_unreferenced(transaction, attachment_id, owner)
    await transaction.run_many("DELETE FROM chats WHERE id = ?", ids)
    await forget_chats(transaction, owners)


async def _remove_if_unreferenced(transaction: Transaction, attachment_id: str, owner: str | None = None) -> None:
    """Remove an attachment that is known to be unreferenced; with `owner`, only if it is that owner's."""
    counted = await transaction.row(f"{IS_COUNTED}{transaction.dialect.update_lock}", attachment_id)
    if counted is None or await transaction.row(SELECT_USER, attachment_id) is not None:
        return
    condition = "" if owner is None else " AND owner = ?"
    values = [attachment_id] if owner is None else [attachment_id, owner]
    if await transaction.run(f"DELETE FROM attachments WHERE id = ?{condition}", *values):
        await transaction.run("DELETE FROM attachment_uses WHERE attachment_id = ?", attachment_id)


def _encode_attachment(attachment: Attachment) -> tuple[Value, ...]:
    return (
        codec.name("id", attachment.id),
        codec.name("owner", attachment.owner),
        codec.encode_text("name", attachment.name),
        codec.encode_text("media_type", attachment.media_type),
        codec.number("size", attachment.size),
        codec.number("created_ms", attachment.created_ms),
    )


def _decode_attachment(row: Row) -> tuple[Attachment, bytes]:
    id, owner, name, media_type, size, created_ms, content = row
    named, kind = codec.decode_text("attachments", id, name), codec.decode_text("attachments", id, media_type)
    return Attachment(id, owner, named, kind, size, created_ms), bytes(content)


CHECKS = (
    TableCheck("chats", COLUMNS, ("id",), ("",), _decode_chat),
    TableCheck(
        "messages",
        "chat_id, id, parent_id, role, content, at_ms, data, is_in_view",
        ("number",),
        (codec.MIN_NUMBER,),
        lambda row: _decode_message(row[0], row[1:]),
    ),
    TableCheck(
        "attachments",
        "id, owner, name, media_type, size, created_ms, ''",
        ("id",),
        ("",),
        lambda row: _decode_attachment((*row[:-1], b"")),
    ),
)
