"""The APIs that models are reached by, each in a file of its own: how a request is said, and how an answer is read."""

from penstock.providers.models.formats.chat import Chat
from penstock.providers.models.formats.format import CannotAsk, Format, StreamReader
from penstock.providers.models.formats.messages import Messages
from penstock.providers.models.formats.responses import Responses

__all__ = ["CannotAsk", "Chat", "Format", "Messages", "Responses", "StreamReader"]
