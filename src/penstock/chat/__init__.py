"""Conversations around graph runs.

message        one message, as it is kept           document   a conversation as JSON, and back
conversation   the tree that messages form          scope      which agents of a graph the user talks to
"""

from penstock.chat.conversation import (
    ConversationInvalid,
    MessageTree,
    Place,
)
from penstock.chat.document import conversation_to_json, parse_conversation
from penstock.chat.message import ChatMessage
from penstock.chat.scope import ChatScope, services_for

__all__ = [
    "ChatMessage",
    "ChatScope",
    "ConversationInvalid",
    "MessageTree",
    "Place",
    "conversation_to_json",
    "parse_conversation",
    "services_for",
]
