"""Conversations around graph runs.

conversation   messages, their tree and limits      document   conversations to JSON and back
scope          which agents the user talks to       ports      the store interface
service        the five entry points of a turn      turn       a turn in progress
run_handler    input and answer of chat runs

Modules that need a host are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.chat.conversation import (
    AttachmentNotFound,
    ChatLimitReached,
    ChatMessage,
    ChatNotFound,
    ConversationInvalid,
    MessageNotFound,
    MessageTree,
    Place,
)
from penstock.chat.document import conversation_to_json, parse_conversation
from penstock.chat.scope import ChatScope, services_for

if TYPE_CHECKING:
    from penstock.chat.ports import Attachment as Attachment
    from penstock.chat.ports import ChatRecord as ChatRecord
    from penstock.chat.ports import ChatStore as ChatStore
    from penstock.chat.service import ChatService as ChatService
    from penstock.chat.turn import ChatTurn as ChatTurn

LATER = {
    "Attachment": "ports",
    "ChatRecord": "ports",
    "ChatService": "service",
    "ChatStore": "ports",
    "ChatTurn": "turn",
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
