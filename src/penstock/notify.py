"""Wake those that wait: tasks for a topic on an event loop (`Notifier`), and callers in any thread by key (`Wakeups`).

A `Notifier` is used on one event loop only. Its notifications are counted, so that one that comes between reading and
waiting is not lost.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Iterable

MAX_TOPICS = 1_000
"""Maximum number of topics whose versions are known: each run is a topic, and most are never waited for again."""


class Notifier:
    """Notifications by topic; a waiter passes `seen`, the value of `version` before it read the state."""

    __slots__ = ("_last", "_last_of_all", "_version", "_waiting")

    def __init__(self) -> None:
        self._version = 0
        self._last: dict[str, int] = {}
        """The version of the last notification of each topic."""
        self._last_of_all = 0
        """The version of the last notification of all topics."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}

    @property
    def has_waiters(self) -> bool:
        """Whether any task is waiting."""
        return bool(self._waiting)

    @property
    def version(self) -> int:
        """The number of notifications so far."""
        return self._version

    def notify(self, topic: str) -> None:
        """Wake the tasks that wait for the topic."""
        self._version += 1
        self._last[topic] = self._version
        if len(self._last) > MAX_TOPICS:  # drop all versions; a wait with an older `seen` then returns at once
            self._last_of_all = self._version
            self._last.clear()
        for waiter in self._waiting.get(topic, ()):
            _wake(waiter)

    def notify_all(self) -> None:
        """Wake all waiting tasks: notifications may have been missed."""
        self._version += 1
        self._last_of_all = self._version
        for waiters in self._waiting.values():
            for waiter in waiters:
                _wake(waiter)

    async def wait(self, topic: str, seen: int, timeout_s: float | None = None) -> None:
        """Wait until the topic has been notified since `seen`, or the timeout expires; None is no timeout."""
        if max(self._last.get(topic, 0), self._last_of_all) > seen or (timeout_s is not None and timeout_s <= 0):
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.setdefault(topic, set()).add(waiter)
        # A timer for each wait costs less than `asyncio.timeout`, which cancels the task.
        timer = None if timeout_s is None else loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._remove(topic, waiter)

    def _remove(self, topic: str, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting[topic]
        waiters.discard(waiter)
        if not waiters:
            del self._waiting[topic]


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def wait_until(notifier: Notifier, topic: str, condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition()` or the timeout, and return whether it holds; checked first and on each notification."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        if (left := deadline - loop.time()) <= 0:
            return False
        # Nothing is awaited since the check, so no notification can have come in between.
        await notifier.wait(topic, notifier.version, left)
    return True


class Wakeups:
    """Callbacks by key, for calls that wait; threads may use it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wakes: dict[str, list[Callable[[], None]]] = {}
        _WAKEUPS.add(self)

    def add(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` whenever the key is woken; return a function that ends this."""
        with self._lock:
            self._wakes.setdefault(key, []).append(wake)

        def remove() -> None:
            with self._lock:
                wakes = self._wakes.get(key, [])
                if wake in wakes:
                    wakes.remove(wake)
                if not wakes:
                    self._wakes.pop(key, None)

        return remove

    def wake(self, keys: Iterable[str]) -> None:
        """Call the callbacks of these keys, outside of every lock of a store."""
        with self._lock:
            found = [wake for key in keys for wake in self._wakes.get(key, ())]
        for wake in found:
            wake()

    def wake_all(self) -> None:
        """Call every callback: a change may have been missed."""
        self.wake(list(self._wakes))

    def _forget(self) -> None:
        """Forget everything in a forked child, where no call waits and the lock may be held by a lost thread."""
        self._lock = threading.Lock()
        self._wakes = {}


_WAKEUPS: weakref.WeakSet[Wakeups] = weakref.WeakSet()


def _after_fork() -> None:
    for wakeups in list(_WAKEUPS):
        wakeups._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
