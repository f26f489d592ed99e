"""An event loop on its own thread, for blocking code that has to call async code.

It knows nothing of the code it runs. Threads do not survive a fork: a child process starts its own at its next call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until it is closed."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._started: list[object] = []
        """Keeps the started work alive: a loop has only weak references to its tasks."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on the loop, without waiting for it, until it ends or the thread is closed."""
        self._started.append(_submit(work, self.loop))

    async def result(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work` on this loop to a task of another loop; RuntimeError if the thread is closed."""
        future = _submit(work, self.loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                raise RuntimeError("the thread was closed") from None
            raise

    def close(self) -> None:
        """Cancel the tasks that still run there, and wait for the thread to end."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left))
        finally:
            self.loop.close()


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run `work` on a loop of another thread and return its result; cancel it and raise TimeoutError after that."""
    future = _submit(work, loop)
    try:
        return future.result(timeout_s)
    except BaseException:
        future.cancel()
        raise


def _submit(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> Future[T]:
    try:
        return asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        raise
