"""The runs of gateway keys: the usage of each on its day, and the removal of old ones.

A run of the gateway is an account of the ledger, below that of its key for the day, so every gateway on the database
counts on the same one. The usage of a removed run stays counted on its key.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import date, tzinfo

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment.accounts import Balance
from penstock.containment.ledger import LedgerStore
from penstock.errors import LedgerUnavailable
from penstock.gateway.key_accounts import GATEWAY_RUNS, run_account
from penstock.hosting.durability import day_of
from penstock.runtime.durable.async_ledger import AsyncLedger

PAGE = 500
SWEEP_S = 3_600.0
DAY_MS = 86_400_000
DAYS_KEPT = 2
"""Minimum number of days that runs are kept: gateways need not agree on the hour at which a day ends."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyRun:
    """A run of a gateway key on one day."""

    name: str
    """The run that the requests named; `day` for those that named none."""
    used: Balance


async def key_runs(
    ledger: AsyncLedger, key_id: str, day: date, *, after: str | None = None, limit: int = PAGE
) -> list[KeyRun]:
    """Return the runs of a key on a day in the order of their first requests; raises LedgerUnavailable.

    `after` is the name of the last run of the page before.
    """
    prefix, found = f"{GATEWAY_RUNS}{key_id}:", list[KeyRun]()
    last = None if after is None else run_account(key_id, after, day)
    while len(found) < limit and (page := await ledger.aged(0, prefix=prefix, after=last, limit=PAGE)):
        last = page[-1]
        for name in page:
            if _day_in(name) == day and len(found) < limit:
                with suppress(KeyError):  # removed meanwhile
                    run = name.removeprefix(prefix).rpartition(":")[0]
                    found.append(KeyRun(run, await ledger.balance(name)))
    return found


async def remove_past_runs(ledger: AsyncLedger, before: date) -> int:
    """Remove the runs of all keys from days before this one; return how many. Raises LedgerUnavailable.

    A run with an unresolved bill is kept, so that the bill can still be resolved.
    """
    wanted = {key.partition("/")[0] for key in await ledger.unresolved(GATEWAY_RUNS)}
    names: list[str] = []
    while page := await ledger.aged(0, prefix=GATEWAY_RUNS, after=names[-1] if names else None, limit=PAGE):
        names += page
    past = [name for name in names if name not in wanted and (day := _day_in(name)) is not None and day < before]
    return sum([await ledger.forget([name]) for name in past])  # one at a time: a run may have very many calls


@asynccontextmanager
async def swept(store: LedgerStore, keep_days: float, zone: tzinfo, clock: Clock = SYSTEM_CLOCK) -> AsyncIterator[None]:
    """Remove runs that are older than `keep_days` inside the block, once an hour."""

    async def sweep() -> None:
        ledger, kept_ms = AsyncLedger(store), round(max(keep_days, DAYS_KEPT) * DAY_MS)
        while True:
            with suppress(LedgerUnavailable):  # the sweep of the next hour is soon enough
                before = day_of(max(0, clock.time_ns() // 1_000_000 - kept_ms), zone)
                if removed := await remove_past_runs(ledger, before):
                    _logger.info("removed %d runs of gateway keys from before %s", removed, before)
            await asyncio.sleep(SWEEP_S)

    sweeping = asyncio.create_task(sweep(), name="penstock gateway runs")
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.wait((sweeping,))


def _day_in(name: str) -> date | None:
    """Return the day in the name of a run's account; None if it has none."""
    try:
        return date.fromisoformat(name.rpartition(":")[2])
    except ValueError:
        return None
