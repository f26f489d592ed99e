"""Detect the dead gateways on a database, and leave their calls unresolved.

A gateway that is killed leaves its calls held, and no process would ever settle them. So each gateway has an account of
its own in the ledger, whose step limit it replaces by the next number every `BEAT_S`. The others watch the numbers of
those gateways that hold something; by their own clocks, so that clocks need not agree. A number that has not changed
for `LEASE_S` belongs to a dead gateway: its holds are left unresolved, because the provider may charge for them.

A gateway that was only stalled loses nothing by this: an unresolved hold stays taken, and can still be settled.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.ledger import LedgerStore
from penstock.containment.limits import NO_LIMITS
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.gateway.key_accounts import GATEWAY_RUNS
from penstock.runtime.durable.async_ledger import AsyncLedger

PROCESSES = "gateway-process:"
"""Prefix of the account of a gateway."""
BEAT_S = 5.0
LEASE_S = 30.0
"""After this time without a beat, a gateway counts as dead."""
_MARK = re.compile(rf"{GATEWAY_RUNS}[^/]+/(?P<mark>[0-9a-f]{{12}})-")
"""Matches the key of a call of the gateway, and the mark of its process in it."""
_NANOS_PER_S = 1_000_000_000
_logger = logging.getLogger(__name__)


class Processes:
    """The gateways on one ledger, from the point of view of one of them."""

    def __init__(self, store: LedgerStore, mark: str, clock: Clock = SYSTEM_CLOCK) -> None:
        """`mark` identifies this process; it is part of the keys of its calls."""
        self._ledger = AsyncLedger(store)
        self._mark = mark
        self._clock = clock
        self._beats = 0
        self._seen: dict[str, tuple[int | None, int]] = {}
        """The last number of each other gateway that holds something, and when it was first read."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Beat, and look after dead gateways, inside the block."""
        with suppress(LedgerUnavailable):  # a busy database: the next beat comes soon enough
            await self.beat()
        watching = asyncio.create_task(self._watch(), name="penstock gateway processes")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait((watching,))
            with suppress(LedgerUnavailable):
                await self._ledger.forget([PROCESSES + self._mark])

    async def _watch(self) -> None:
        while True:
            with suppress(LedgerUnavailable):  # nothing is sent without the ledger either
                await self.beat()
                await self.resolve_dead()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Show that this gateway is alive."""
        self._beats += 1
        limits = replace(NO_LIMITS, steps=self._beats)
        try:
            await self._ledger.grant(PROCESSES + self._mark, limits)
        except KeyError:
            await self._ledger.open_account(PROCESSES + self._mark, limits)

    async def resolve_dead(self) -> int:
        """Leave the holds of dead gateways unresolved; return how many."""
        held: dict[str, list[str]] = defaultdict(list)
        for key in await self._ledger.held(GATEWAY_RUNS):
            if (found := _MARK.match(key)) is not None and found["mark"] != self._mark:
                held[found["mark"]].append(key)
        self._seen = {mark: seen for mark, seen in self._seen.items() if mark in held}
        dead = [mark for mark in held if not await self._is_alive(mark)]
        for mark in dead:
            for key in held[mark]:
                await self._leave_unresolved(key)
            await self._ledger.forget([PROCESSES + mark])
            _logger.warning("a gateway was killed; %d of its calls have an unknown bill", len(held[mark]))
        return sum(len(held[mark]) for mark in dead)

    async def _is_alive(self, mark: str) -> bool:
        """Whether the gateway's number has changed within the lease."""
        number, now_ns = await self._number(mark), self._clock.monotonic_ns()
        before = self._seen.get(mark)
        if before is None or before[0] != number:
            self._seen[mark] = number, now_ns
            return True
        return now_ns - before[1] <= LEASE_S * _NANOS_PER_S

    async def _number(self, mark: str) -> int | None:
        try:
            return (await self._ledger.balance(PROCESSES + mark)).limits.steps
        except KeyError:
            return None

    async def _leave_unresolved(self, key: str) -> None:
        try:
            await self._ledger.leave_unresolved(key)
        except LedgerUnavailable:
            raise
        except LedgerError:  # it has ended since `held` was read
            pass
