"""Who waits for what on an event loop, and how they are woken.

It belongs to one loop and is used there alone. A ring is counted, so that one that comes between looking and waiting is
not lost.
"""

from __future__ import annotations

import asyncio


class Bells:
    """One bell per topic; waiting is by `seen`, what `rung` had said before one looked."""

    def __init__(self) -> None:
        self._rung = 0
        self._last: dict[str, int] = {}
        """When each topic that somebody waits for was rung last, by the count."""
        self._everything = 0
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    @property
    def is_awaited(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiting)

    @property
    def rung(self) -> int:
        """How many rings there have been."""
        return self._rung

    def ring(self, topic: str) -> None:
        """Wake those who wait for the topic."""
        self._rung += 1
        self._last[topic] = self._rung
        if len(self._last) > 10_000:  # what nobody waits for is forgotten; who looked before that is woken for nothing
            self._forget()
        for waiter in self._waiting.get(topic, ()):
            _wake(waiter)

    def ring_all(self) -> None:
        """Wake everybody: something may have happened that nobody told of."""
        self._rung += 1
        self._everything = self._rung
        for waiters in self._waiting.values():
            for waiter in waiters:
                _wake(waiter)

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        """Sleep until the topic has been rung since, or the time is over."""
        if timeout_s <= 0 or max(self._last.get(topic, 0), self._everything) > seen:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(topic, set()).add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self._leave(topic, waiter)

    def _leave(self, topic: str, waiter: asyncio.Future[None]) -> None:
        waiter.cancel()
        waiters = self._waiting[topic]
        waiters.discard(waiter)
        if not waiters:
            del self._waiting[topic]

    def _forget(self) -> None:
        self._everything = self._rung
        self._last.clear()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
