"""A gateway on a socket, in front of a fake provider, for clients of every kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.front_door import ContainedRun, contain
from penstock.gateway.app import Gateway
from penstock.gateway.connections import Connections
from penstock.gateway.grants import Grant, OneKey
from penstock.gateway.loopback import serving
from penstock.gateway.upstreams import upstreams_in
from penstock.gateway.wires import Denied
from penstock.providers.http.exchange import Terms
from penstock.testing.provider import FakeProviderServer

KEY = "sk-penstock-test"
PROVIDER_KEY = "sk-of-the-provider"


@dataclass
class Served:
    """A running gateway."""

    url: str
    run: ContainedRun
    provider: FakeProviderServer
    denied: list[Denied]

    @property
    def openai(self) -> str:
        return f"{self.url}/openai/v1"


def environment(provider: FakeProviderServer) -> dict[str, str]:
    """The environment of a user whose provider is the fake one."""
    return {
        "OPENAI_BASE_URL": provider.openai_url,
        "OPENAI_API_KEY": PROVIDER_KEY,
        "ANTHROPIC_BASE_URL": provider.url,
        "ANTHROPIC_API_KEY": PROVIDER_KEY,
        "GOOGLE_GEMINI_BASE_URL": provider.url,
        "GOOGLE_API_KEY": PROVIDER_KEY,
    }


@contextmanager
def gateway(
    provider: FakeProviderServer,
    grants: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **limits: Any,
) -> Iterator[Served]:
    """Serve a gateway for one run under these limits, on a thread of its own, so that any client can block."""
    run = contain(**{"prices": provider.provider.prices, **limits})
    denied: list[Denied] = []
    ready, stop, url = threading.Event(), asyncio.Event(), ""

    async def serve() -> None:
        nonlocal url
        connections = Connections()
        keyring = OneKey(KEY, Grant(Terms(run, 4_096, 16), **(grants or {})))
        app = Gateway(upstreams_in(environ or environment(provider)), keyring, connections, denied.append)
        async with serving(app) as url:
            ready.set()
            await stop.wait()
        await connections.aclose()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        with run:
            yield Served(url, run, provider, denied)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.fixture
def provider() -> Iterator[FakeProviderServer]:
    """A provider that echoes, at $3 and $15 for a million tokens."""
    with FakeProviderServer() as server:
        yield server
