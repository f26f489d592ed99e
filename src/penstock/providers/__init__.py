"""Containment for model calls that a program makes through existing clients, frameworks and HTTP libraries.

Imports neither a client nor an HTTP library until one is used.
"""

from penstock.providers.clients import contained_async_client, contained_client
from penstock.providers.hooks import HookFailed
from penstock.providers.reading.meter import ExcessOutput
from penstock.providers.scope import contained
from penstock.providers.uncontained import UncontainedRequest

__all__ = [
    "ExcessOutput",
    "HookFailed",
    "UncontainedRequest",
    "contained",
    "contained_async_client",
    "contained_client",
]
