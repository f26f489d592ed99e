"""Sleeping until something has happened, on one event loop; whoever goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.storage.sql import codec


class Bells:
    """One bell per key."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    def ring(self, key: str) -> None:
        """Whoever waits for the key looks again."""
        for waiter in self._waiting.get(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, key: str, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Sleep until it is so, or the time is over; whether it is. Asked at once, and after each ring of the key."""
        codec.timeout(timeout_s)
        if is_so() or timeout_s <= 0:
            return is_so()
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    await self._ringing(key)
        except TimeoutError:
            return is_so()
        return True

    async def _ringing(self, key: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._waiting.setdefault(key, set())
        waiters.add(waiter)
        try:
            await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._waiting.get(key) is waiters:
                del self._waiting[key]
