"""The store interface of chats.

As in hosting: every method is atomic and idempotent, and StoreUnavailable means that nothing was changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.chat.conversation import ChatMessage, Place
from penstock.hosting.ports import TransactionStores


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """One chat, without its messages."""

    id: str
    owner: str
    title: str
    graph_id: str
    """The graph that produces the answers."""
    created_ms: int
    updated_ms: int
    made_by: str = ""
    """The component that created the chat automatically: it is removed with its runs. Empty if a user created it."""


MAX_PREVIEW = 200
"""Maximum length of the content of a preview, in characters."""


@dataclass(frozen=True, slots=True)
class ChatPreview:
    """The last message in view of a chat, with the beginning of its content."""

    message_id: str
    role: str
    content: str
    at_ms: int
    state: str | None
    """The `state` of an answer, such as `writing`."""

    @classmethod
    def of(cls, message: ChatMessage) -> ChatPreview:
        """Return the preview of a message."""
        return cls(message.id, message.role, message.content[:MAX_PREVIEW], message.at_ms, message_state(message.data))


def message_state(data: Mapping[str, Any]) -> str | None:
    """Return the state in the data of a message; None if it has none."""
    state = data.get("state")
    return state if isinstance(state, str) else None


@dataclass(frozen=True, slots=True)
class PathWindow:
    """Consecutive messages of one path through a chat, and the position of each among its siblings."""

    messages: Sequence[ChatMessage] = ()
    places: Sequence[Place] = ()
    end_id: str | None = None
    """The last message of the path, which may be below the window; None if the chat is empty."""

    @property
    def has_earlier(self) -> bool:
        """Whether the path has messages before the first one of the window."""
        return bool(self.messages) and self.messages[0].parent_id is not None

    @property
    def has_later(self) -> bool:
        """Whether the path has messages after the last one of the window."""
        return bool(self.messages) and self.messages[-1].id != self.end_id


@dataclass(frozen=True, slots=True)
class Marked:
    """The target of a key: a message and its replies."""

    key: str
    chat_id: str
    message_id: str
    replies: Sequence[ChatMessage]
    """In the order they were added."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that a message refers to by id; its bytes are stored separately."""

    id: str
    owner: str
    name: str
    media_type: str
    size: int
    created_ms: int


class ChatStore(Protocol):
    """Stores chats, their messages, and attachments. Messages are removed with their chat."""

    async def create(self, chat: ChatRecord) -> ChatRecord:
        """Store a new chat, or return the existing one with that id and owner; Conflict if it is another owner's."""

    async def get(self, chat_id: str) -> ChatRecord | None:
        """Return the chat; None if it does not exist."""

    async def list(
        self,
        *,
        owner: str | None = None,
        graph_id: str | None = None,
        text: str | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> Sequence[ChatRecord]:
        """Return a page of chats, most recently used first; `before` is the id of the previous page's last chat.

        With `text`, only chats with that text in the title or in a message. The case of ASCII letters is ignored;
        other text is found as given, in lower case, in upper case and capitalized. White space matches line ends.
        """

    async def previews(self, chat_ids: Sequence[str]) -> Mapping[str, ChatPreview]:
        """Return the last message in view of each chat that has one."""

    async def rename(self, chat_id: str, title: str, *, now_ms: int) -> ChatRecord:
        """Change the title of a chat; KeyError if it does not exist."""

    async def add_messages(self, chat_id: str, messages: Sequence[ChatMessage], *, now_ms: int) -> None:
        """Add all messages or none, each below an existing or added message, and bring each into view.

        An existing message that is equal in every field is skipped. Conflict if an id belongs to a different message
        or a parent is missing; KeyError if the chat does not exist.
        """

    async def finish_message(
        self, chat_id: str, message_id: str, content: str, data: Mapping[str, Any], *, now_ms: int
    ) -> ChatMessage:
        """Store the final content and data of an answer; Conflict unless its `data["state"]` is "writing".

        Idempotent: finishing it again with the same values succeeds.
        """

    async def message(self, chat_id: str, message_id: str) -> ChatMessage | None:
        """Return one message; None if it does not exist."""

    async def messages(self, chat_id: str) -> tuple[Sequence[ChatMessage], Sequence[str]]:
        """Return all messages, in the order they were added, and the ids in view: the arguments of `MessageTree.of`."""

    async def path(self, chat_id: str, message_id: str | None = None, *, above: int = 0, below: int = 0) -> PathWindow:
        """Return a message with up to `above` ancestors and up to `below` messages in view below it.

        Without a message, it is the last one in view. KeyError if the chat has no such message.
        """

    async def choose(self, chat_id: str, message_id: str) -> None:
        """Bring a message into view among its siblings; KeyError if it does not exist."""

    async def mark(self, key: str, chat_id: str, message_id: str) -> None:
        """Point a key to a message; KeyError if the message does not exist.

        A key that already points to another chat points nowhere from then on, because it is ambiguous.
        """

    async def marked(self, keys: Sequence[str]) -> Marked | None:
        """Return the target of the first key that points to a message; None if none does."""

    async def remove(self, chat_id: str) -> None:
        """Remove a chat with its messages, keys, memories, and attachments that no other chat refers to.

        Conflict while an answer is being written or a run of the chat has not ended. Does nothing if it does not exist.
        """

    async def remove_unused(self, before_ms: int, *, limit: int = 1_000) -> Sequence[str]:
        """Remove automatically created chats (`made_by`) last used before `before_ms` that have no stored runs.

        Returns their ids, the least recently used first.
        """

    async def attach(self, attachment: Attachment, content: bytes) -> Attachment:
        """Store an attachment; messages refer to it by `id` in the `attachments` of their data."""

    async def detach(self, attachment_id: str) -> None:
        """Remove an attachment, unless a message refers to it."""

    async def attachment(self, attachment_id: str) -> tuple[Attachment, bytes] | None:
        """Return an attachment and its bytes; None if it does not exist."""


class ChatTransaction(TransactionStores, Protocol):
    """The stores of a transaction, including the chat store."""

    @property
    def chats(self) -> ChatStore: ...
