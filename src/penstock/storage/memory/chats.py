"""Chats in memory, with their messages and attachments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.chat.conversation import ChatMessage, Place
from penstock.chat.ports import Attachment, ChatPreview, ChatRecord, Marked, PathWindow
from penstock.hosting.ports import CLAIMED, PARKED, QUEUED, Conflict, RunStatus
from penstock.storage import codec
from penstock.storage.memory.record_codec import RecordCodec
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.rules import (
    attachment_ids,
    check_attached,
    check_idle,
    check_writing,
    is_same_message,
    new_messages,
    search_terms,
    searchable,
)

CHAT = RecordCodec(
    ChatRecord,
    names=("id", "owner", "graph_id", "made_by"),
    texts=("title",),
    numbers=("created_ms", "updated_ms"),
)
MESSAGE = RecordCodec(
    ChatMessage, names=("id", "parent_id"), texts=("content",), numbers=("at_ms",), optional=("parent_id",)
)
ATTACHMENT = RecordCodec(
    Attachment, names=("id", "owner"), texts=("name", "media_type"), numbers=("size", "created_ms")
)

UNFINISHED: frozenset[RunStatus] = QUEUED | CLAIMED | PARKED


@dataclass(slots=True)
class _Chat:
    record: ChatRecord
    messages: dict[str, ChatMessage] = field(default_factory=dict)
    """By id, in the order they were added."""
    in_view: dict[str | None, str] = field(default_factory=dict)
    """The id of the reply in view, by parent id; None has the first message in view."""
    keys: set[str] = field(default_factory=set)
    """The keys that belong to this chat."""
    attached: set[str] = field(default_factory=set)
    """The ids of the attachments that its messages refer to."""

    def copied(self) -> _Chat:
        """Return a copy of the chat with its own containers."""
        return _Chat(self.record, {**self.messages}, {**self.in_view}, {*self.keys}, {*self.attached})

    def bring_into_view(self, *messages: ChatMessage) -> None:
        """Bring the messages into view in order, the last taking precedence.

        Goes from the last to the first; the walk up from each message stops where a later one has passed.
        """
        settled: set[str | None] = set()
        for message in reversed(messages):
            for shown in self.upwards(message):
                if shown.parent_id in settled:
                    break
                settled.add(shown.parent_id)
                self.in_view[shown.parent_id] = shown.id

    def contains(self, terms: Sequence[str]) -> bool:
        """Whether the title or a message contains one of the terms of a search."""
        texts = [self.record.title, *(message.content for message in self.messages.values())]
        encoded = (searchable(codec.encode_text("text", text)) for text in texts)
        return any(term in text for text in encoded for term in terms)

    def end_below(self, message_id: str | None) -> str | None:
        """Return the last message in view below a message, or the message itself."""
        while message_id in self.in_view:
            message_id = self.in_view[message_id]
        return message_id

    def places(self, path: Sequence[ChatMessage]) -> list[Place]:
        """Return the position of each message of a path among its siblings."""
        siblings: dict[str | None, list[str]] = {message.parent_id: [] for message in path}
        for message in self.messages.values():
            if message.parent_id in siblings:
                siblings[message.parent_id].append(message.id)
        return [Place.among(siblings[message.parent_id], message.id) for message in path]

    def upwards(self, message: ChatMessage) -> Iterator[ChatMessage]:
        """Iterate over a message and its ancestors."""
        yield message
        while message.parent_id is not None:
            message = self.messages[message.parent_id]
            yield message


class MemoryChatStore:
    """Chats by id; a chat that has runs in `runs` is in use."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = MemoryRunStore() if runs is None else runs
        self._undo = self._runs.undo
        self._chats: dict[str, _Chat] = {}
        self._marks: dict[str, tuple[str, str | None]] = {}
        """The last chat of each key and the message in it; the message is None if several chats have the key."""
        self._attachments: dict[str, tuple[Attachment, bytes]] = {}
        self._uses: dict[str, int] = {}
        """The number of chats that refer to each attachment."""
        self._on_remove: list[Callable[[str], None]] = []

    def on_remove(self, callback: Callable[[str], None]) -> None:
        """Register `callback(chat_id)` to be called for every chat that is removed."""
        self._on_remove.append(callback)

    async def create(self, chat: ChatRecord) -> ChatRecord:
        encoded = CHAT.encode(chat)
        self._undo.entry(self._chats, chat.id)
        known = self._chats.setdefault(chat.id, _Chat(encoded)).record
        if known.owner != chat.owner:
            raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
        return known

    async def get(self, chat_id: str) -> ChatRecord | None:
        chat = self._chats.get(chat_id)
        return None if chat is None else chat.record

    async def list(
        self,
        *,
        owner: str | None = None,
        graph_id: str | None = None,
        text: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[ChatRecord]:
        codec.limit(limit)
        terms = None if text is None else search_terms(text)
        if before is not None and before not in self._chats:
            return []
        last = None if before is None else _use(self._chats[before].record)
        found = [
            chat.record
            for chat in self._chats.values()
            if owner in (None, chat.record.owner)
            and graph_id in (None, chat.record.graph_id)
            and (last is None or _use(chat.record) < last)
            and (terms is None or chat.contains(terms))
        ]
        return sorted(found, key=_use, reverse=True)[:limit]

    async def previews(self, chat_ids: Sequence[str]) -> Mapping[str, ChatPreview]:
        chats = {id: self._chats[id] for id in chat_ids if id in self._chats}
        ends = {id: chat.end_below(None) for id, chat in chats.items()}
        return {id: ChatPreview.of(chats[id].messages[end]) for id, end in ends.items() if end is not None}

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        chat = self._chat_to_change(chat_id)
        chat.record = CHAT.change(chat.record, {"title": title, "updated_ms": now_ms})
        return chat.record

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        chat = self._chat_to_change(chat_id)
        record = CHAT.change(chat.record, {"updated_ms": now_ms})
        new = new_messages(chat.messages, [MESSAGE.encode(message).copied() for message in messages])
        if new:
            chat.record = record
            chat.messages.update((message.id, message) for message in new)
            chat.bring_into_view(*new)
            for id in attachment_ids(new) - chat.attached:
                chat.attached.add(id)
                self._undo.entry(self._uses, id)
                self._uses[id] = self._uses.get(id, 0) + 1

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        chat = self._chat_to_change(chat_id)
        before = self._message(chat, message_id)
        after = MESSAGE.encode(replace(before, content=content, data=data))
        if is_same_message(after, before):
            return before.copied()
        check_writing(chat_id, before)
        chat.record = CHAT.change(chat.record, {"updated_ms": now_ms})
        chat.messages[message_id] = after
        return after.copied()

    async def message(self, chat_id: str, message_id: str) -> ChatMessage | None:
        chat = self._chats.get(chat_id)
        message = None if chat is None else chat.messages.get(message_id)
        return None if message is None else message.copied()

    async def messages(self, chat_id: str) -> tuple[Sequence[ChatMessage], Sequence[str]]:
        chat = self._chats.get(chat_id)
        if chat is None:
            return [], []
        return [message.copied() for message in chat.messages.values()], [*chat.in_view.values()]

    async def path(self, chat_id: str, message_id: str | None = None, *, above: int = 0, below: int = 0) -> PathWindow:
        codec.limit(above), codec.limit(below)
        chat = self._chats.get(chat_id) if message_id is None else self._chat(chat_id)
        middle = chat.end_below(None) if chat is not None and message_id is None else message_id
        if chat is None or middle is None:
            return PathWindow()
        path = [
            message for message, _ in zip(chat.upwards(self._message(chat, middle)), range(above + 1), strict=False)
        ]
        path.reverse()
        while below and path[-1].id in chat.in_view:
            path.append(chat.messages[chat.in_view[path[-1].id]])
            below -= 1
        shown = [message.copied() for message in path]
        return PathWindow(shown, chat.places(path), chat.end_below(path[-1].id))

    async def choose(self, chat_id: str, message_id: str) -> None:
        chat = self._chat_to_change(chat_id)
        chat.bring_into_view(self._message(chat, message_id))

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        chat = self._chat_to_change(chat_id)
        self._message(chat, message_id)
        codec.name("key", key)
        known = self._marks.get(key, (chat_id, message_id))
        self._chat_to_change(known[0]).keys.discard(key)
        self._undo.entry(self._marks, key)
        self._marks[key] = (chat_id, message_id if known[0] == chat_id and known[1] is not None else None)
        chat.keys.add(key)

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        leading = ((key, *self._marks[key]) for key in keys if key in self._marks)
        key, chat_id, message_id = next((mark for mark in leading if mark[2] is not None), (None, "", None))
        if key is None or message_id is None:
            return None
        messages = self._chats[chat_id].messages.values()
        below = [message.copied() for message in messages if message.parent_id == message_id]
        return Marked(key, chat_id, message_id, below)

    async def remove(self, chat_id: str) -> None:
        chat = self._chats.get(chat_id)
        if chat is None:
            return
        check_idle(chat_id, chat.messages.values(), has_runs=chat_id in self._runs.chats(UNFINISHED))
        self._remove(chat)

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        codec.number("before_ms", before_ms), codec.limit(limit)
        generated = [chat for chat in self._chats.values() if chat.record.made_by]
        old = sorted(
            [chat for chat in generated if chat.record.updated_ms < before_ms], key=lambda chat: _use(chat.record)
        )
        with_runs = self._runs.chats() if old else set()
        removed = [chat for chat in old if chat.record.id not in with_runs][:limit]
        for chat in removed:
            self._remove(chat)
        return [chat.record.id for chat in removed]

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        encoded = ATTACHMENT.encode(attachment)
        check_attached(attachment, content)
        self._undo.entry(self._attachments, attachment.id)
        if self._attachments.setdefault(attachment.id, (encoded, content)) != (attachment, content):
            raise Conflict(f"attachment {attachment.id!r} exists and is different; give this one an id of its own")
        return encoded

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        return self._attachments.get(attachment_id)

    async def detach(self, attachment_id: str) -> None:
        if not self._uses.get(attachment_id):
            self._undo.entry(self._attachments, attachment_id)
            self._attachments.pop(attachment_id, None)

    def _remove(self, chat: _Chat) -> None:
        record, undo = chat.record, self._undo
        undo.entry(self._chats, record.id)
        del self._chats[record.id]
        for key in chat.keys:
            undo.entry(self._marks, key)
            del self._marks[key]
        for id in chat.attached:
            undo.entry(self._uses, id)
            self._uses[id] -= 1
            if not self._uses[id]:
                del self._uses[id]
                if id in self._attachments and self._attachments[id][0].owner == record.owner:
                    undo.entry(self._attachments, id)
                    del self._attachments[id]
        for callback in self._on_remove:
            callback(record.id)

    def _chat(self, chat_id: str) -> _Chat:
        try:
            return self._chats[chat_id]
        except KeyError:
            raise KeyError(f"no chat {chat_id!r}") from None

    def _chat_to_change(self, chat_id: str) -> _Chat:
        """Return the chat, and restore its current state if the open transaction fails."""
        chat = self._chat(chat_id)
        if self._undo.is_open:
            self._undo.step(partial(self._chats.__setitem__, chat_id, chat.copied()))
        return chat

    @staticmethod
    def _message(chat: _Chat, message_id: str) -> ChatMessage:
        try:
            return chat.messages[message_id]
        except KeyError:
            raise KeyError(f"no message {message_id!r} in chat {chat.record.id!r}") from None


def _use(chat: ChatRecord) -> tuple[int, str]:
    return chat.updated_ms, chat.id
