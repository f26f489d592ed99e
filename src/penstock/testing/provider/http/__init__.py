"""The fake provider over real HTTP, for official SDKs and whole frameworks."""

from penstock.testing.provider.http.server import Disconnect, FakeProviderServer

__all__ = ["Disconnect", "FakeProviderServer"]
