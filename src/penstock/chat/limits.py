"""What a chat takes at most, and what is said to who asks for more, or for what is not theirs.

Somebody else's chat, message or attachment is as unknown as one that never was: the message does not tell which.
"""

from __future__ import annotations

from penstock.chat.conversation import MAX_DEPTH, MAX_MESSAGES
from penstock.chat.message import MAX_CHARACTERS
from penstock.errors import InvalidValue, PenstockError

MAX_ATTACHMENTS = 20
"""So many things may be attached to one message."""
MAX_ATTACHMENT_BYTES = 20 * 1024 * 1024
MAX_NAME = 255
"""So many characters has the name of an attachment, or its media type."""
MAX_TITLE = 1_000
MAX_USER_TOOLS = 200

__all__ = [
    "MAX_ATTACHMENTS",
    "MAX_ATTACHMENT_BYTES",
    "MAX_CHARACTERS",
    "MAX_DEPTH",
    "MAX_MESSAGES",
    "MAX_NAME",
    "MAX_TITLE",
    "MAX_USER_TOOLS",
    "AttachmentUnknown",
    "ChatLimitReached",
    "ChatUnknown",
    "MessageUnknown",
    "must_fit",
]


class ChatLimitReached(InvalidValue):
    """More than a chat takes: `what` there is `given` of, and at most `most` is taken."""

    def __init__(self, what: str, given: int, most: int, to_do: str) -> None:
        super().__init__(what, given, f"at most {most:,}: {to_do}")
        self.what = what
        self.given = given
        self.most = most


class ChatUnknown(PenstockError):
    """There is no chat of that id for whoever asks."""

    def __init__(self, chat_id: str) -> None:
        self.chat_id = chat_id
        super().__init__(f"there is no chat {chat_id!r}; list yours, or create one")


class MessageUnknown(PenstockError):
    """There is no message of that id in the chat."""

    def __init__(self, chat_id: str, message_id: str) -> None:
        self.chat_id = chat_id
        self.message_id = message_id
        super().__init__(f"there is no message {message_id!r} in chat {chat_id!r}; its tree has those there are")


class AttachmentUnknown(PenstockError):
    """Nothing is attached under that id for whoever asks."""

    def __init__(self, attachment_id: str) -> None:
        self.attachment_id = attachment_id
        super().__init__(f"nothing is attached under {attachment_id!r}; attach it first, then name its id")


def must_fit(what: str, given: int, most: int, to_do: str) -> None:
    """ChatLimitReached if there is more than is taken."""
    if given > most:
        raise ChatLimitReached(what, given, most, to_do)
