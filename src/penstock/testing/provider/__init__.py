"""A scripted model provider whose invoice is the judge of money."""

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
from penstock.testing.provider.invoice import Invoice, InvoiceLine

__all__ = [
    "Answer",
    "Behaviour",
    "FailAfterBilling",
    "FakeProvider",
    "Invoice",
    "InvoiceLine",
    "LieAboutUsage",
    "NoUsage",
    "ProviderHTTPError",
    "Raise",
    "RefuseFree",
    "ScriptEnded",
    "ServerError",
    "Stall",
]
