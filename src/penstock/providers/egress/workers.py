"""Sync work that a task waits for, and walks away from if it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.runtime.worker import LoopJob

T = TypeVar("T")


async def on_worker(fn: Callable[[], T]) -> T:
    """The value of `fn`, run on a worker; a worker that nobody waits for any more finishes on its own."""
    job = LoopJob(fn, lambda _value, _error: None)
    try:
        value: T = await job.result()
    except BaseException:
        job.leave()
        raise
    return value
