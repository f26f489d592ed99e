"""One client for each account and event loop.

The sockets of an async client belong to the loop that opened them, and a model may be used on one loop after the other,
or on several at once. So every loop gets a client of its own, which all models with the same address and key share.
It is closed automatically: it is held by an asynchronous generator, and `asyncio.run` ends those before it closes a
loop. It is not closed when a model is dropped, because the next model with the same account reuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from threading import Lock
from typing import Any

_lock = Lock()
_shared: dict[Hashable, Connections] = {}


class Connections:
    """The clients of one account, one for each event loop."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._held: dict[asyncio.AbstractEventLoop, tuple[Any, AsyncGenerator[None, None]]] = {}

    async def client(self) -> Any:
        """Return the client of the running loop, created on first use."""
        loop = asyncio.get_running_loop()
        found = self._held.get(loop)
        if found is not None:
            return found[0]
        client = self._connect()
        holding = self._hold(loop, client)
        self._held[loop] = (client, holding)
        await anext(holding)  # does not wait; registers the generator with the loop
        return client

    async def aclose(self) -> None:
        """Close the client of this loop, if there is one; the next request creates another."""
        found = self._held.get(asyncio.get_running_loop())
        if found is not None:
            await found[1].aclose()

    async def _hold(self, loop: asyncio.AbstractEventLoop, client: Any) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._held.pop(loop, None)
            await client.close()


class Borrowed:
    """A client that the caller made and closes."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def client(self) -> Any:
        """Return the client, whatever the loop."""
        return self._client


def shared(account: Hashable, make: Callable[[], Connections]) -> Connections:
    """Return the connections of an account, created on first use."""
    with _lock:
        found = _shared.get(account)
    if found is None:
        connections = make()
        with _lock:
            found = _shared.setdefault(account, connections)
    return found


async def close_connections() -> None:
    """Close all connections of this loop; for loops that `asyncio.run` does not end."""
    with _lock:
        every = list(_shared.values())
    for connections in every:
        await connections.aclose()
