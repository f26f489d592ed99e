"""A scripted model provider, in process and over HTTP, whose invoice is the reference for costs."""

from penstock.testing.provider.behaviours import (
    Answer,
    Behaviour,
    FailAfterBilling,
    LieAboutUsage,
    NoUsage,
    ProviderHTTPError,
    Raise,
    RefuseFree,
    ServerError,
    Stall,
)
from penstock.testing.provider.fake import FakeProvider, ScriptEnded
from penstock.testing.provider.fates import Cut, Endless, Fail, Fate, Garble, Hang, Say, ToolCall, Truncate, by_chance
from penstock.testing.provider.http import Disconnect, FakeProviderServer
from penstock.testing.provider.invoice import Invoice, InvoiceLine
from penstock.testing.provider.request import WireRequest, count_input_tokens, count_tokens

__all__ = [
    "Answer",
    "Behaviour",
    "Cut",
    "Disconnect",
    "Endless",
    "Fail",
    "FailAfterBilling",
    "FakeProvider",
    "FakeProviderServer",
    "Fate",
    "Garble",
    "Hang",
    "Invoice",
    "InvoiceLine",
    "LieAboutUsage",
    "NoUsage",
    "ProviderHTTPError",
    "Raise",
    "RefuseFree",
    "Say",
    "ScriptEnded",
    "ServerError",
    "Stall",
    "ToolCall",
    "Truncate",
    "WireRequest",
    "by_chance",
    "count_input_tokens",
    "count_tokens",
]
