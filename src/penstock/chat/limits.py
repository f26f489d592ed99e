"""Limits of a chat, checks of arguments against them, and the errors for objects that are not found.

The error for another owner's chat, message or attachment is the same as for one that does not exist.
"""

from __future__ import annotations

from penstock.chat.conversation import MAX_DEPTH, MAX_MESSAGES
from penstock.chat.message import MAX_CHARACTERS, MAX_ID, can_be_written
from penstock.errors import InvalidValue, PenstockError

MAX_ATTACHMENTS = 20
"""Maximum number of attachments of a message."""
MAX_ATTACHMENT_BYTES = 20 * 1024 * 1024
MAX_NAME = 255
"""Maximum length of an attachment's name or media type, in characters."""
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
    "AttachmentNotFound",
    "ChatLimitReached",
    "ChatNotFound",
    "MessageNotFound",
    "must_be_named",
    "must_be_text",
    "must_fit",
]


class ChatLimitReached(InvalidValue):
    """A limit of the chat is exceeded: the size or number of `what` is `given`, the maximum is `most`."""

    def __init__(self, what: str, given: int, most: int, advice: str) -> None:
        super().__init__(what, given, f"at most {most:,}: {advice}")
        self.what = what
        self.given = given
        self.most = most


class ChatNotFound(PenstockError):
    """The caller has no chat with that id."""

    def __init__(self, chat_id: str) -> None:
        self.chat_id = chat_id
        super().__init__(f"there is no chat {chat_id!r}; list yours, or create one")


class MessageNotFound(PenstockError):
    """The chat has no message with that id."""

    def __init__(self, chat_id: str, message_id: str) -> None:
        self.chat_id = chat_id
        self.message_id = message_id
        super().__init__(f"there is no message {message_id!r} in chat {chat_id!r}; its tree has those there are")


class AttachmentNotFound(PenstockError):
    """The caller has no attachment with that id."""

    def __init__(self, attachment_id: str) -> None:
        self.attachment_id = attachment_id
        super().__init__(f"nothing is attached under {attachment_id!r}; attach it first, then name its id")


def must_fit(what: str, given: int, most: int, advice: str) -> None:
    """Raise ChatLimitReached if `given` exceeds `most`."""
    if given > most:
        raise ChatLimitReached(what, given, most, advice)


def must_be_text(field: str, text: object, most: int, advice: str) -> None:
    """Raise InvalidValue unless `text` is encodable text, ChatLimitReached with the advice if it is too long."""
    if not isinstance(text, str) or not can_be_written(text):
        raise InvalidValue(field, text, "text without unpaired surrogates")
    must_fit(field, len(text), most, advice)


def must_be_named(field: str, name: object) -> None:
    """Raise InvalidValue unless `name` can be the name of an owner or the id of an existing object."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID or "\0" in name or not can_be_written(name):
        raise InvalidValue(field, name, f"text of 1 to {MAX_ID} characters")
