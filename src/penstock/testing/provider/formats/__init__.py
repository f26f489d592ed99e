"""The APIs that the server supports, one per file: the requests they accept, and the format of their answers."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.testing.provider.formats import chat, messages, responses
from penstock.testing.provider.formats.format import Format

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "/v1/chat/completions": chat.FORMAT,
        "/v1/responses": responses.FORMAT,
        "/v1/messages": messages.FORMAT,
    }
)

__all__ = ["FORMATS", "Format", "chat", "messages", "responses"]
