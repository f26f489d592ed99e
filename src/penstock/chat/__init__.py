"""Conversations around graph runs.

message        one message, as stored               document   conversations to JSON and back
conversation   the tree of messages                 scope      which agents of a graph the user talks to
service        the five entry points of a turn      turn       a turn in progress
run_handler    runs that answer in a chat           protocol   run input and stored answers
ports          the store interface                  limits     size limits and not-found errors

Modules that need a host are imported on first use.
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
    from penstock.chat.limits import AttachmentNotFound as AttachmentNotFound
    from penstock.chat.limits import ChatLimitReached as ChatLimitReached
    from penstock.chat.limits import ChatNotFound as ChatNotFound
    from penstock.chat.limits import MessageNotFound as MessageNotFound
    from penstock.chat.ports import Attachment as Attachment
    from penstock.chat.ports import ChatRecord as ChatRecord
    from penstock.chat.ports import ChatStore as ChatStore
    from penstock.chat.service import ChatService as ChatService
    from penstock.chat.turn import ChatTurn as ChatTurn

LATER = {
    "Attachment": "ports",
    "AttachmentNotFound": "limits",
    "ChatLimitReached": "limits",
    "ChatRecord": "ports",
    "ChatService": "service",
    "ChatStore": "ports",
    "ChatTurn": "turn",
    "ChatNotFound": "limits",
    "MessageNotFound": "limits",
}
"""The submodule of each name that is imported on first use."""

__all__ = [
    "Attachment",
    "AttachmentNotFound",
    "ChatLimitReached",
    "ChatMessage",
    "ChatNotFound",
    "ChatRecord",
    "ChatScope",
    "ChatService",
    "ChatStore",
    "ChatTurn",
    "ConversationInvalid",
    "MessageNotFound",
    "MessageTree",
    "Place",
    "conversation_to_json",
    "parse_conversation",
    "services_for",
]


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
