"""Whether the server can do its work: its stores and its ledger can be read, and written to.

A database that is locked, read-only or full can still be read. So something is written that changes nothing: the wish
to cancel a run of an id that no run can have, whose time is over already, and an account that is forgotten at once.
Anybody may ask, as often as they like: it is written once a second at most, and in between the last outcome counts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.clock import Clock
from penstock.containment.ledger import LedgerStore
from penstock.containment.limits import Limits
from penstock.errors import PenstockError
from penstock.hosting.records import CancelIntent
from penstock.server.errors import ApiError
from penstock.server.outages import note

if TYPE_CHECKING:
    from penstock.storage import Stores

FRESH_S = 1.0
"""For so long it is believed what came of the last writing."""
NOBODY = "/ready"
"""A name that no run, user or account can have."""


class Readiness:
    """What is looked at to say that the server is ready."""

    def __init__(self, stores: Stores, timeout_s: float, clock: Clock) -> None:
        self._stores = stores
        self._timeout_s = timeout_s
        self._clock = clock
        self._writing = asyncio.Lock()
        self._written_ns: int | None = None
        self._is_writable = False

    async def check(self) -> None:
        """Return if the server can do its work; ApiError, within the time that it may take, if it cannot."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read()
                is_writable = await self._can_be_written()
        except (TimeoutError, PenstockError) as error:
            note(error)
            is_writable = False
        if not is_writable:
            message = "a store or the ledger does not answer, or cannot be written to"
            raise ApiError(503, message, code="store_unavailable", retry_after_s=2)

    async def _read(self) -> None:
        await self._stores.runs.get(NOBODY)
        await self._stores.graphs.get(NOBODY)
        await asyncio.to_thread(_look_into, self._stores.ledger)

    async def _can_be_written(self) -> bool:
        async with self._writing:
            now_ns = self._clock.monotonic_ns()
            if self._written_ns is None or now_ns - self._written_ns >= FRESH_S * 1_000_000_000:
                self._is_writable = False  # and stays so if the time is over before there is an answer
                try:
                    await self._write()
                    self._is_writable = True
                finally:
                    self._written_ns = self._clock.monotonic_ns()
            return self._is_writable

    async def _write(self) -> None:
        now_ms = self._clock.time_ns() // 1_000_000
        await self._stores.cancels.put(CancelIntent(NOBODY, "", NOBODY, now_ms, now_ms - 1))
        await asyncio.to_thread(_write_into, self._stores.ledger)


def _look_into(ledger: LedgerStore) -> None:
    """LedgerUnavailable if it cannot be read; that there is no such account is an answer."""
    with suppress(KeyError):
        ledger.balance(NOBODY)


def _write_into(ledger: LedgerStore) -> None:
    ledger.open_account(NOBODY, Limits())
    ledger.forget([NOBODY])
