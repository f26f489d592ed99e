"""Notifications between processes, sent only where a process waits for them.

A NOTIFY costs every commit a lock of the whole server, and every listening process a wake-up. So topics are spread over
a few channels, and a process that waits for a topic takes a shared advisory lock of its channel, on the connection that
listens. A transaction that has news for the topic tries to take the same lock exclusively, until its end: if it gets
the lock, no process listens and it sends nothing; if it does not, it notifies. A process that begins to listen while
such a transaction has the lock waits for its end, and its caller reads the news itself.

The locks and channels belong to the session, so a process that dies leaves none behind. A process listens on a channel
until no caller has waited on it for a while.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from penstock.notify import Notifier

CHANNEL = "penstock"
"""Prefix of the channels, and the channel of servers older than the locks: they notify there, and poll otherwise."""
CHANNELS = 64
LOCK_CLASS = int.from_bytes(b"pens")
"""First half of the advisory locks; the number of the channel is the second."""
NOTIFY = (
    "SELECT pg_notify('penstock_' || channel, topic) FROM unnest($1::text[], $2::text[]) AS news(topic, channel) "
    f"WHERE NOT pg_try_advisory_xact_lock({LOCK_CLASS}, channel::int4)"
)
LOCK = f"SELECT pg_advisory_lock_shared({LOCK_CLASS}, {{0}})"
RECONNECT_S = 0.5
LINGER_S = 10.0
"""How long a process keeps listening on a channel after the last wait."""
LOCK_WAIT_S = 2.0
"""Longest wait for a transaction that has news for a channel to end; after that, its news is found by polling."""


def channel_of(topic: str) -> int:
    """Return the number of the channel of a topic, the same in every process."""
    return zlib.crc32(topic.encode()) % CHANNELS


class Listener:
    """The connection of a process that receives notifications, and the channels that it listens on."""

    def __init__(self, notifier: Notifier, connect: Callable[[], Any], errors: tuple[type[BaseException], ...]) -> None:
        self._notifier = notifier
        self._connect = connect
        self._errors = errors
        self._last_use: dict[int, float] = {}
        """When a caller last waited on each channel that is listened on."""
        self._wanted: set[int] = set()
        self._waiting: dict[int, int] = {}
        """Number of callers that wait on each channel."""
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def wait(self, topic: str, seen: int, timeout_s: float) -> None:
        """Wait for a notification of the topic since `seen`; return soon if its channel was not listened on before."""
        loop, channel = asyncio.get_running_loop(), channel_of(topic)
        if self._task is None:
            self._task = loop.create_task(self._listen(), name="penstock-postgres-listen")
        if channel in self._last_use:
            self._last_use[channel] = loop.time()
        elif channel not in self._wanted:
            self._wanted.add(channel)
            self._changed.set()
        self._waiting[channel] = self._waiting.get(channel, 0) + 1
        try:
            await self._notifier.wait(topic, seen, timeout_s)
        finally:
            self._waiting[channel] -= 1
            if not self._waiting[channel]:
                del self._waiting[channel]

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _listen(self) -> None:
        """Wake local waiters on notifications from the server, until cancelled."""
        while True:
            with suppress(*self._errors):
                await self._listen_until_lost()
            self._wanted |= self._last_use.keys()
            self._last_use.clear()
            await asyncio.sleep(RECONNECT_S)

    async def _listen_until_lost(self) -> None:
        connection = await self._connect()
        try:
            connection.add_termination_listener(lambda _: self._changed.set())
            await connection.execute(f"SET lock_timeout = {round(LOCK_WAIT_S * 1_000)}")
            await connection.add_listener(CHANNEL, self._on_notification)
            self._changed.set()
            while not connection.is_closed():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._changed.wait()
                self._changed.clear()
                await self._begin(connection)
                await self._end_unused(connection)
        finally:
            connection.terminate()

    async def _begin(self, connection: Any) -> None:
        """Listen on the wanted channels, and wake all waiters to check for themselves."""
        if not self._wanted:
            return
        while self._wanted:
            channel = self._wanted.pop()
            try:
                await connection.add_listener(f"penstock_{channel}", self._on_notification)
                await connection.execute(LOCK.format(channel))
            except asyncpg.LockNotAvailableError:
                await connection.remove_listener(f"penstock_{channel}", self._on_notification)
                continue  # the next wait tries again
            except BaseException:
                self._wanted.add(channel)
                raise
            self._last_use[channel] = asyncio.get_running_loop().time()
        self._notifier.notify_all()  # for changes made before, and while the connection was lost

    async def _end_unused(self, connection: Any) -> None:
        until = asyncio.get_running_loop().time() - LINGER_S
        for channel in [one for one, used in self._last_use.items() if used < until and one not in self._waiting]:
            del self._last_use[channel]
            await connection.execute(f"SELECT pg_advisory_unlock_shared({LOCK_CLASS}, {channel})")
            await connection.remove_listener(f"penstock_{channel}", self._on_notification)

    def _on_notification(self, connection: object, pid: int, channel: str, topic: object) -> None:
        self._notifier.notify(str(topic))
