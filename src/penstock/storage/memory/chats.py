"""Chats in memory, with what was said in them and attached to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.chat.message import ChatMessage
from penstock.chat.ports import Attachment, ChatRecord, Marked
from penstock.errors import InvalidValue
from penstock.hosting.ports import Conflict
from penstock.hosting.records import CLAIMED, PARKED, QUEUED, RunStatus
from penstock.storage.memory.runs import MemoryRunStore
from penstock.storage.memory.shapes import Shape, is_same
from penstock.storage.sql import codec

CHAT = Shape(
    ChatRecord,
    names=("id", "owner", "graph_id", "made_by"),
    texts=("title",),
    numbers=("created_ms", "updated_ms"),
)
MESSAGE = Shape(ChatMessage, names=("id", "parent_id"), texts=("content",), numbers=("at_ms",), optional=("parent_id",))
ATTACHMENT = Shape(Attachment, names=("id", "owner"), texts=("name", "media_type"), numbers=("size", "created_ms"))

UNFINISHED: frozenset[RunStatus] = QUEUED | CLAIMED | PARKED


@dataclass(slots=True)
class _Chat:
    record: ChatRecord
    messages: dict[str, ChatMessage] = field(default_factory=dict)
    """By id, in the order they were added."""
    in_view: dict[str | None, str] = field(default_factory=dict)
    """Of the replies to each message, and of what begins the chat, the one in view."""
    keys: set[str] = field(default_factory=set)
    """Those that lead to a message here."""
    attached: set[str] = field(default_factory=set)
    """What its messages refer to."""

    def bring_into_view(self, *messages: ChatMessage) -> None:
        """Each after the other, the last above all: from it back, each way up ends where a later one has been."""
        settled: set[str | None] = set()
        for message in reversed(messages):
            for one in self._upwards(message):
                if one.parent_id in settled:
                    break
                settled.add(one.parent_id)
                self.in_view[one.parent_id] = one.id

    def _upwards(self, message: ChatMessage) -> Iterator[ChatMessage]:
        yield message
        while message.parent_id is not None:
            message = self.messages[message.parent_id]
            yield message


class MemoryChatStore:
    """Chats by id; one that has runs in `runs` is in use."""

    def __init__(self, runs: MemoryRunStore | None = None) -> None:
        self._runs = MemoryRunStore() if runs is None else runs
        self._chats: dict[str, _Chat] = {}
        self._marks: dict[str, tuple[str, str | None]] = {}
        """Where each key leads, in the chat that was marked with it last; nowhere, if that was not the only one."""
        self._attachments: dict[str, tuple[Attachment, bytes]] = {}
        self._uses: dict[str, int] = {}
        """How many chats refer to each attachment."""
        self._forgetting: list[Callable[[str], None]] = []

    def on_forget(self, forget: Callable[[str], None]) -> None:
        """Have `forget(chat_id)` called for every chat that is removed."""
        self._forgetting.append(forget)

    async def create(self, chat: ChatRecord) -> ChatRecord:
        kept = CHAT.kept(chat)
        known = self._chats.setdefault(chat.id, _Chat(kept)).record
        if known.owner != chat.owner:
            raise Conflict(f"chat {chat.id!r} is another owner's; give this one an id of its own")
        return known

    async def get(self, chat_id: str) -> ChatRecord | None:
        chat = self._chats.get(chat_id)
        return None if chat is None else chat.record

    async def list(
        self, *, owner: str | None = None, before: str | None = None, limit: int = 50
    ) -> Sequence[ChatRecord]:
        codec.limit(limit)
        if before is not None and before not in self._chats:
            return []
        last = None if before is None else _use(self._chats[before].record)
        chats = [chat.record for chat in self._chats.values() if owner is None or chat.record.owner == owner]
        after = [chat for chat in chats if last is None or _use(chat) < last]
        return sorted(after, key=_use, reverse=True)[:limit]

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        chat = self._chat(chat_id)
        chat.record = CHAT.changed(chat.record, {"title": title, "updated_ms": now_ms})
        return chat.record

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        chat = self._chat(chat_id)
        record = CHAT.changed(chat.record, {"updated_ms": now_ms})
        new = new_messages(chat.messages, [MESSAGE.kept(message).copied() for message in messages])
        if new:
            chat.record = record
            chat.messages.update((message.id, message) for message in new)
            chat.bring_into_view(*new)
            for id in referred(new) - chat.attached:
                chat.attached.add(id)
                self._uses[id] = self._uses.get(id, 0) + 1

    async def take_back(self, chat_id: str, message_ids: Sequence[str], *, in_view: str | None) -> None:
        chat = self._chat(chat_id)
        going = {id: chat.messages[id] for id in message_ids if id in chat.messages}
        back = None if in_view is None else self._message(chat, in_view)
        for message in chat.messages.values():
            if message.parent_id in going and message.id not in going:
                raise Conflict(followed(message.id, str(message.parent_id)))
        seen = [message for message in going.values() if chat.in_view.get(message.parent_id) == message.id]
        for message in seen:
            del chat.in_view[message.parent_id]
        for id in going:
            del chat.messages[id]
        for id in (referred(going.values()) - referred(chat.messages.values())) & chat.attached:
            chat.attached.discard(id)
            self._uses[id] -= 1
        if seen and back is not None and back.id not in going:
            chat.bring_into_view(back)

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        chat = self._chat(chat_id)
        before = self._message(chat, message_id)
        after = MESSAGE.kept(replace(before, content=content, data=data))
        if _is_same(after, before):
            return before.copied()
        if before.data.get("state") != "writing":
            state = before.data.get("state")
            raise Conflict(f"message {message_id!r} of chat {chat_id!r} is not being written: its state is {state!r}")
        chat.record = CHAT.changed(chat.record, {"updated_ms": now_ms})
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

    async def choose(self, chat_id: str, message_id: str) -> None:
        chat = self._chat(chat_id)
        chat.bring_into_view(self._message(chat, message_id))

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        chat = self._chat(chat_id)
        self._message(chat, message_id)
        codec.name("key", key)
        known = self._marks.get(key, (chat_id, message_id))
        self._chats[known[0]].keys.discard(key)
        self._marks[key] = (chat_id, message_id if known[0] == chat_id and known[1] is not None else None)
        chat.keys.add(key)

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        leading = ((key, *self._marks[key]) for key in keys if key in self._marks)
        key, chat_id, message_id = next((one for one in leading if one[2] is not None), (None, "", None))
        if key is None or message_id is None:
            return None
        said = self._chats[chat_id].messages.values()
        below = [message.copied() for message in said if message.parent_id == message_id]
        return Marked(key, chat_id, message_id, below)

    async def remove(self, chat_id: str) -> None:
        chat = self._chats.get(chat_id)
        if chat is None:
            return
        check_rests(chat_id, chat.messages.values(), has_runs=chat_id in self._runs.chats(UNFINISHED))
        self._forget(chat)

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        codec.number("before_ms", before_ms), codec.limit(limit)
        made = [chat for chat in self._chats.values() if chat.record.made_by]
        old = sorted([chat for chat in made if chat.record.updated_ms < before_ms], key=lambda one: _use(one.record))
        with_runs = self._runs.chats() if old else set()
        removed = [chat for chat in old if chat.record.id not in with_runs][:limit]
        for chat in removed:
            self._forget(chat)
        return [chat.record.id for chat in removed]

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        kept = ATTACHMENT.kept(attachment)
        if not isinstance(content, bytes):
            raise InvalidValue("content", f"this {type(content).__name__}", "bytes")
        if attachment.size != len(content):
            raise InvalidValue("size", attachment.size, f"what is attached: {len(content)} bytes")
        if self._attachments.setdefault(attachment.id, (kept, content)) != (attachment, content):
            raise Conflict(f"attachment {attachment.id!r} is there and another; give this one an id of its own")
        return kept

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        return self._attachments.get(attachment_id)

    async def detach(self, attachment_id: str) -> None:
        if not self._uses.get(attachment_id):
            self._attachments.pop(attachment_id, None)

    def _forget(self, chat: _Chat) -> None:
        record = chat.record
        del self._chats[record.id]
        for key in chat.keys:
            del self._marks[key]
        for id in chat.attached:
            self._uses[id] -= 1
            if not self._uses[id]:
                del self._uses[id]
                if id in self._attachments and self._attachments[id][0].owner == record.owner:
                    del self._attachments[id]
        for forget in self._forgetting:
            forget(record.id)

    def _chat(self, chat_id: str) -> _Chat:
        try:
            return self._chats[chat_id]
        except KeyError:
            raise KeyError(f"no chat {chat_id!r}") from None

    @staticmethod
    def _message(chat: _Chat, message_id: str) -> ChatMessage:
        try:
            return chat.messages[message_id]
        except KeyError:
            raise KeyError(f"no message {message_id!r} in chat {chat.record.id!r}") from None


def new_messages(known: Mapping[str, ChatMessage], messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """Those that are not there yet, each below one that is there or among them; Conflict if they do not fit."""
    new: dict[str, ChatMessage] = {}
    for message in messages:
        there = known.get(message.id) or new.get(message.id)
        if there is None:
            new[message.id] = message
        elif not _is_same(there, message):
            raise Conflict(f"message {message.id!r} is there and another; give this one an id of its own")
    _check_places(known, new)
    return [*new.values()]


def referred(messages: Iterable[ChatMessage]) -> set[str]:
    """The ids of what the messages have attached."""
    found: set[str] = set()
    for message in messages:
        attached = message.data.get("attachments")
        for one in attached if isinstance(attached, Sequence) else ():
            if isinstance(one, Mapping) and isinstance(id := one.get("id"), str):
                found.add(id)
    return found


def check_rests(chat_id: str, messages: Iterable[ChatMessage], *, has_runs: bool) -> None:
    """Conflict while somebody is being answered in a chat."""
    if has_runs or any(message.data.get("state") == "writing" for message in messages):
        raise Conflict(f"an answer is being written in chat {chat_id!r}: wait for its run, or cancel it")


def followed(message_id: str, by_id: str) -> str:
    """Why a message is not taken back."""
    return f"message {message_id!r} follows {by_id!r}, which therefore stays"


def _check_places(known: Mapping[str, ChatMessage], new: Mapping[str, ChatMessage]) -> None:
    """Conflict unless the way up from each new message ends at one that is there, or at the beginning.

    Where a way meets one that was gone before, it is known to end well: a long history is gone through once.
    """
    placed: set[str] = set()
    for message in new.values():
        above, way = message.parent_id, {message.id}
        while above is not None and above not in known and above not in placed:
            if above not in new or above in way:
                raise Conflict(f"message {message.id!r} has no place: {above!r} is not there, or follows itself")
            way.add(above)
            above = new[above].parent_id
        placed |= way


def _use(chat: ChatRecord) -> tuple[int, str]:
    return chat.updated_ms, chat.id


def _is_same(one: ChatMessage, other: ChatMessage) -> bool:
    return _said(one) == _said(other) and one.data.keys() == other.data.keys() and is_same(one.data, other.data)


def _said(message: ChatMessage) -> tuple[object, ...]:
    return message.id, message.parent_id, message.role, message.content, message.at_ms
