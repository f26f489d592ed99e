"""The APIs that the server speaks, each in a file of its own: what it asks, and what its answers look like."""

from collections.abc import Mapping
from types import MappingProxyType

from penstock.testing.provider.http.formats import chat, messages, responses
from penstock.testing.provider.http.formats.format import Format

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "/v1/chat/completions": chat.FORMAT,
        "/v1/responses": responses.FORMAT,
        "/v1/messages": messages.FORMAT,
    }
)
