"""The number of runs by status, counted in the database at most once in `INTERVAL_S`, however often it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import get_args

from penstock.clock import Clock
from penstock.hosting.ports import RunStatus, RunStore, StoreUnavailable

INTERVAL_S = 5.0
_NANOS_PER_S = 1_000_000_000


class RunCounts:
    """Counts the runs of a store."""

    def __init__(self, runs: RunStore, clock: Clock) -> None:
        self._runs = runs
        self._clock = clock
        self._lock = asyncio.Lock()
        self._counted: Mapping[str, int] = {}
        self._next_ns = 0

    async def read(self) -> Mapping[str, int]:
        """Return the counts; empty while the store is unavailable, when other figures are still needed."""
        async with self._lock:  # of concurrent readers, one counts
            now_ns = self._clock.monotonic_ns()
            if now_ns >= self._next_ns:
                self._next_ns = now_ns + round(INTERVAL_S * _NANOS_PER_S)
                self._counted = await self._count()
            return self._counted

    async def _count(self) -> Mapping[str, int]:
        try:
            return {status: await self._runs.count(statuses=(status,)) for status in get_args(RunStatus)}
        except StoreUnavailable:
            return {}
