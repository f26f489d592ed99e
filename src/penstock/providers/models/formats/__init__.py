"""The model APIs, each in a file of its own: how a request is written, and how a response is read."""

from penstock.providers.models.formats.chat import Chat
from penstock.providers.models.formats.format import Format, StreamReader, UnsupportedRequest
from penstock.providers.models.formats.messages import Messages
from penstock.providers.models.formats.responses import Responses

__all__ = ["Chat", "Format", "Messages", "Responses", "StreamReader", "UnsupportedRequest"]
