"""Conversations around graph runs.

message        one message, as it is kept           document   a conversation as JSON, and back
conversation   the tree that messages form          scope      which agents of a graph the user talks to
service        five ways to say something           turn       one of them, on its way
answering      the run that answers                 protocol   what it is given, and what is kept of it
ports          what is needed of a database         limits     what a chat takes at most

What needs a host is loaded when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.chat.conversation import (
    ConversationInvalid,
    MessageTree,
    Place,
)
from penstock.chat.document import conversation_to_json, parse_conversation
from penstock.chat.message import ChatMessage
from penstock.chat.scope import ChatScope, services_for

if TYPE_CHECKING:
    from penstock.chat.limits import AttachmentUnknown as AttachmentUnknown
    from penstock.chat.limits import ChatLimitReached as ChatLimitReached
    from penstock.chat.limits import ChatUnknown as ChatUnknown
    from penstock.chat.limits import MessageUnknown as MessageUnknown
    from penstock.chat.ports import Attachment as Attachment
    from penstock.chat.ports import ChatRecord as ChatRecord
    from penstock.chat.ports import ChatStore as ChatStore
    from penstock.chat.service import ChatService as ChatService
    from penstock.chat.turn import ChatTurn as ChatTurn

LATER = {
    "Attachment": "ports",
    "AttachmentUnknown": "limits",
    "ChatLimitReached": "limits",
    "ChatRecord": "ports",
    "ChatService": "service",
    "ChatStore": "ports",
    "ChatTurn": "turn",
    "ChatUnknown": "limits",
    "MessageUnknown": "limits",
}
"""Where the names are that are loaded when they are used."""

__all__ = [
    "Attachment",
    "AttachmentUnknown",
    "ChatLimitReached",
    "ChatMessage",
    "ChatRecord",
    "ChatScope",
    "ChatService",
    "ChatStore",
    "ChatTurn",
    "ChatUnknown",
    "ConversationInvalid",
    "MessageTree",
    "MessageUnknown",
    "Place",
    "conversation_to_json",
    "parse_conversation",
    "services_for",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
