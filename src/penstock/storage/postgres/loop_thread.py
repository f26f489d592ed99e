"""An event loop on its own thread, for blocking code that has to call async code.

It knows nothing of the code it runs. Threads do not survive a fork: a child process starts its own at its next call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._started: list[object] = []
        """Keeps what was started alive: a loop has only weak references to its tasks."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run `work` on the loop and return its result; cancel it and raise TimeoutError after `timeout_s`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result(timeout_s)
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the loop, without waiting for it, until it ends or the thread is closed."""
        try:
            self._started.append(asyncio.run_coroutine_threadsafe(work, self._loop))
        except RuntimeError:
            work.close()
            raise

    def close(self) -> None:
        """Cancel the tasks that still run there, and wait for the thread to end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left))
        finally:
            self._loop.close()
