"""Sync work on a worker thread that a task awaits, and abandons if it is cancelled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from penstock.runtime.worker import LoopJob

T = TypeVar("T")


async def on_worker(fn: Callable[[], T]) -> T:
    """Run `fn` on a worker and return its value; if the task is cancelled, the worker finishes on its own."""
    job = LoopJob(fn, lambda _value, _error: None)
    try:
        value: T = await job.result()
    except BaseException:
        job.leave()
        raise
    return value
