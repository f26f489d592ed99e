"""The fake provider over real HTTP, for official SDKs and whole frameworks."""

from penstock.testing.provider.http.fates import (
    Cut,
    Fail,
    Fate,
    Fault,
    Garble,
    Hang,
    Say,
    Script,
    ToolCall,
    Truncate,
    by_chance,
)
from penstock.testing.provider.http.request import WireRequest, count_input_tokens, count_tokens
from penstock.testing.provider.http.server import Disconnect, FakeProviderServer

__all__ = [
    "Cut",
    "Disconnect",
    "Fail",
    "FakeProviderServer",
    "Fate",
    "Fault",
    "Garble",
    "Hang",
    "Say",
    "Script",
    "ToolCall",
    "Truncate",
    "WireRequest",
    "by_chance",
    "count_input_tokens",
    "count_tokens",
]
