"""Models behind APIs: OpenAI, Anthropic, and every server that imitates them.

    names         model("openai:gpt-4o")             formats/      requests and responses, one file per API
    vendors       which client, which API, which key events        server-sent events
    remote        requests, streams, the end marker  connections   one client for each event loop
    breakers      one circuit per provider and model embeddings    embedding_model("openai:…")

Imports a provider's client only when a model of that provider is created.
"""

from penstock.providers.models.breakers import Breakers, breakers
from penstock.providers.models.connections import close_connections
from penstock.providers.models.embeddings import RemoteEmbeddingModel, embedding_model
from penstock.providers.models.formats import UnsupportedRequest
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
    "CompatibleModel",
    "MissingKey",
    "MissingPackage",
    "OpenAIModel",
    "RemoteEmbeddingModel",
    "RemoteModel",
    "UnsupportedRequest",
    "breakers",
    "close_connections",
    "embedding_model",
    "model",
]
