"""Readiness check: the stores and the ledger can be read and written.

A database that is locked, read-only or full can still be read. So the check also writes something without effect: a
cancel request, already expired, for an id that no run can have, and a ledger account that is removed immediately.
The route is open and may be called at any rate: the check writes at most once a second and reuses the last outcome.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.clock import Clock
from penstock.containment.limits import Limits
from penstock.errors import PenstockError
from penstock.hosting.ports import CancelRequest
from penstock.runtime.durable.async_ledger import AsyncLedger
from penstock.server.errors import ApiError
from penstock.server.unavailable import log_outage

if TYPE_CHECKING:
    from penstock.storage import Stores

FRESH_S = 1.0
"""How long the outcome of the last write is reused."""
ROWS_INTERVAL_S = 3_600.0
"""Interval between complete checks of the stored rows; the first is at startup."""
ROWS_PAUSE_S = 0.05
"""Pause after each page of such a check."""
PROBE = "/ready"
"""A name that no run, user or account can have."""


class Readiness:
    """Checks that the stores and the ledger of a server are readable and writable."""

    def __init__(self, stores: Stores, timeout_s: float, clock: Clock) -> None:
        self._stores = stores
        self._timeout_s = timeout_s
        self._clock = clock
        self._writing = asyncio.Lock()
        self._written_ns: int | None = None
        self._is_writable = False

    async def check(self) -> None:
        """Return if the server is ready; raises ApiError (503), after the timeout at the latest, if it is not."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read()
                is_writable = await self._check_writable()
        except (TimeoutError, PenstockError) as error:
            log_outage(error)
            is_writable = False
        if not is_writable:
            message = "a store or the ledger is unavailable or cannot be written"
            raise ApiError(503, message, code="store_unavailable", retry_after_s=2)

    async def watch_rows(self) -> None:
        """Check at intervals, until cancelled, that every stored row can be decoded; unreadable rows become faults."""
        while True:
            with suppress(PenstockError):
                await self._stores.check_rows(pause_s=ROWS_PAUSE_S)
            await asyncio.sleep(ROWS_INTERVAL_S)

    async def _read(self) -> None:
        await self._stores.runs.get(PROBE)
        await self._stores.graphs.get(PROBE)
        with suppress(KeyError):  # a missing account is a successful read
            await AsyncLedger(self._stores.ledger).balance(PROBE)

    async def _check_writable(self) -> bool:
        async with self._writing:
            now_ns = self._clock.monotonic_ns()
            if self._written_ns is None or now_ns - self._written_ns >= FRESH_S * 1_000_000_000:
                self._is_writable = False  # remains False if the timeout cancels the write
                try:
                    await self._write()
                    self._is_writable = True
                finally:
                    self._written_ns = self._clock.monotonic_ns()
            return self._is_writable

    async def _write(self) -> None:
        now_ms = self._clock.time_ns() // 1_000_000
        await self._stores.cancels.put(CancelRequest(PROBE, "", PROBE, now_ms, now_ms - 1))
        ledger = AsyncLedger(self._stores.ledger)
        await ledger.open_account(PROBE, Limits())
        await ledger.forget([PROBE])
