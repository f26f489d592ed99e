"""Models behind APIs: OpenAI, Anthropic, and every server that imitates them.

    names         model("openai:gpt-4o")             formats/      what is said and heard, one file per API
    vendors       which client, which API, which key events        server-sent events
    remote        asking, streaming, the end marker  connections   one client for each event loop
    breakers      one circuit per provider and model

Imports no provider's client; that happens when a model of it is made.
"""

from penstock.providers.models.breakers import Breakers, breakers
from penstock.providers.models.connections import close_connections
from penstock.providers.models.formats import CannotAsk
from penstock.providers.models.names import model
from penstock.providers.models.remote import RemoteModel
from penstock.providers.models.vendors import (
    AnthropicModel,
    CompatibleModel,
    MissingKey,
    MissingPackage,
    OpenAIModel,
)

__all__ = [
    "AnthropicModel",
    "Breakers",
    "CannotAsk",
    "CompatibleModel",
    "MissingKey",
    "MissingPackage",
    "OpenAIModel",
    "RemoteModel",
    "breakers",
    "close_connections",
    "model",
]
