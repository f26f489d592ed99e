"""Model APIs as programs already reach them: the official clients, under containment.

Imports neither a client nor an HTTP library; that happens when something is used.
"""

from penstock.providers.clients import contained_async_client, contained_client
from penstock.providers.scope import contained

__all__ = ["contained", "contained_async_client", "contained_client"]
