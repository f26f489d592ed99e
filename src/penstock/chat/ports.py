"""What a chat needs of a database.

As in hosting: every method is atomic, StoreUnavailable says that nothing was changed, and asking again is safe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.chat.message import ChatMessage


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """One chat, without what was said in it."""

    id: str
    owner: str
    title: str
    graph_id: str
    """The graph that answers."""
    created_ms: int
    updated_ms: int
    made_by: str = ""
    """What made it of itself, so that it goes when its runs do; nothing for one that somebody made."""


@dataclass(frozen=True, slots=True)
class Marked:
    """Where a key leads: a message, and what follows it."""

    key: str
    chat_id: str
    message_id: str
    replies: Sequence[ChatMessage]
    """In the order they were added."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a message refers to by id; its bytes are kept apart."""

    id: str
    owner: str
    name: str
    media_type: str
    size: int
    created_ms: int


class ChatStore(Protocol):
    """Chats, their messages, and what is attached to them. Messages go with their chat; one that nobody was let
    in to answer may be taken back."""

    async def create(self, chat: ChatRecord) -> ChatRecord:
        """Keep a new chat; one of that id and owner that is there already is given back. Conflict if another's."""

    async def get(self, chat_id: str) -> ChatRecord | None:
        """The chat; None if there is none of that id."""

    async def list(
        self, *, owner: str | None = None, before: str | None = None, limit: int = 50
    ) -> Sequence[ChatRecord]:
        """Chats, the one used last first; `before` is the id of the last one of the page before."""

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        """Give it another title; KeyError if there is none of that id."""

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        """Add them, all or none, each below a message that is there or among them; each comes into view.

        One that is there already, the same in every field, is skipped. Conflict if an id is taken by another or a
        parent is missing; KeyError without such a chat.
        """

    async def take_back(self, chat_id: str, message_ids: Sequence[str], *, in_view: str | None) -> None:
        """Remove what was added a moment ago, because nobody was let in to answer it; what is not there is skipped.

        Where it was in view, `in_view` comes into view again. Conflict if something that stays follows it; KeyError
        without such a chat, or without the message that is to come into view.
        """

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        """What an answer that was being written has become: `data["state"]` must have been "writing", Conflict else.

        Finishing it again with the same is fine.
        """

    async def message(self, chat_id: str, message_id: str) -> ChatMessage | None:
        """One message."""

    async def messages(self, chat_id: str) -> tuple[Sequence[ChatMessage], Sequence[str]]:
        """Everything that was said, in the order it was added, and the ids in view, as `MessageTree.of` takes them."""

    async def choose(self, chat_id: str, message_id: str) -> None:
        """Bring a message into view among its siblings; KeyError if it is not there."""

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        """Have a key lead to a message; KeyError if the message is not there.

        One that leads to another chat leads nowhere from then on, for nobody knows which of the two is meant.
        """

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        """Where the first of the keys leads that leads anywhere."""

    async def remove(self, chat_id: str) -> None:
        """Remove a chat: what was said, its keys, what is remembered in it, and bytes that no other chat refers to.

        Conflict while an answer is being written there, or a run of it has not ended. One that is not there is fine.
        """

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        """Remove chats that nobody made (`made_by`), that were used last before then, and of which no run is kept.

        Their ids, the one used longest ago first.
        """

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        """Keep bytes to refer to, in the `attachments` of a message's data, by `id`."""

    async def detach(self, attachment_id: str) -> None:
        """Remove bytes, unless a message refers to them."""

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        """What was attached under that id."""
