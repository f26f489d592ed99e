"""Removal of data that is no longer needed: old runs and their data, cancel requests, and accounts.

The accounts of a run are removed after the run, in a separate operation: a host that dies in between leaves them, and
daily accounts belong to no run. So accounts older than the retention time are swept periodically. Several hosts may do
all of this concurrently and repeatedly: the last user of the removed data is a run that no longer exists.

The ledger keeps accounts that have child accounts or open holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import partial

from penstock.hosting.audit import AuditStore
from penstock.hosting.durability import (
    ALL,
    OWNERS,
    RUNS,
    TEAMS,
    UNKNOWN,
    day_accounts,
    day_of,
    forget_accounts,
)
from penstock.hosting.host_context import HostContext
from penstock.hosting.ports import (
    CLAIMED,
    INTERACTIVE_ATTEMPTS,
    PARKED,
    QUEUED,
    PayloadStore,
    StoreCorrupt,
    retry_unavailable,
)
from penstock.runtime.durable.blocks import BLOCKS, end_block, is_block

OF_RUNS = (RUNS, UNKNOWN)
"""Prefixes of the accounts of a single run, followed by its id."""
DAY_S = 86_400
DAYS_KEPT = 2
"""Minimum number of days that daily accounts are kept, so that a day's cost outlives runs removed sooner."""
LONGEST_S = 1e9
PAGE = 500
MAX_PAGES = 20
"""Maximum number of pages of payloads or audit entries removed at once."""
RUNS_PAGE, MAX_RUN_PAGES = 1_000, 50
"""Number of runs removed in one transaction, and maximum number of such transactions each minute: together they keep up
with more than 800 ended runs a second."""
PORTION = 50
"""Number of accounts removed at once, after a check that their runs no longer exist."""


async def remove_ended(context: HostContext) -> None:
    """Remove the runs that ended before the retention time, with all their data, and expired cancel requests."""
    before_ms = context.now_ms() - round(context.settings.keep_days * DAY_S * 1_000)
    for _ in range(MAX_RUN_PAGES):
        removed = await context.stores.runs.remove_ended(before_ms, limit=RUNS_PAGE)
        context.counted["removed"] += len(removed)
        await forget_accounts(context, [prefix + run_id for run_id in removed for prefix in OF_RUNS])
        if len(removed) < RUNS_PAGE:
            break
    for forget in context.on_delete.values():
        await forget(before_ms)
    await remove_payloads(context)
    await remove_audit(context)
    await context.stores.cancels.prune(now_ms=context.now_ms())


async def remove_payloads(context: HostContext) -> None:
    """Remove recorded payloads older than their own retention time; a later call removes those beyond `MAX_PAGES`."""
    await _remove_before(context, context.settings.keep_payload_days, context.stores.payloads)


async def remove_audit(context: HostContext) -> None:
    """Remove audit entries older than their retention time; a later call removes those beyond `MAX_PAGES`."""
    await _remove_before(context, context.settings.keep_audit_days, context.stores.audit)


async def _remove_before(context: HostContext, keep_days: float, store: PayloadStore | AuditStore) -> None:
    before_ms = context.now_ms() - round(keep_days * DAY_S * 1_000)
    for _ in range(MAX_PAGES):
        removed = await store.remove_before(before_ms, limit=PAGE)
        if removed < PAGE:
            return


async def remove(context: HostContext, run_id: str) -> None:
    """Remove one ended run, with all its data; Conflict if it has not ended."""
    await context.stores.runs.remove(run_id)
    await forget_accounts(context, [prefix + run_id for prefix in OF_RUNS])


async def sweep_accounts(context: HostContext) -> None:
    """Remove the accounts of runs that no longer exist, then daily accounts past their retention time."""
    names = await _aged(context)
    of_runs = [name for name in names if name.startswith(OF_RUNS)]
    for first in range(0, len(of_runs), PORTION):
        await forget_accounts(context, await _without_run(context, of_runs[first : first + PORTION]))
    days = [name for name in names if _is_past(context, name)]
    if days:
        wanted = await _wanted_days(context)
        for block in days:
            if is_block(block):  # no worker has ended it
                await retry_unavailable(partial(end_block, context.ledger, block), INTERACTIVE_ATTEMPTS)
        for prefix in (BLOCKS, OWNERS, TEAMS, ALL):  # parents after their children
            await forget_accounts(context, [name for name in days if name.startswith(prefix) and name not in wanted])


async def _aged(context: HostContext) -> list[str]:
    """Return the names of all accounts older than the retention time."""
    age_s = min(context.settings.keep_days * DAY_S, LONGEST_S)
    names: list[str] = []

    async def page() -> Sequence[str]:
        return await context.ledger.aged(age_s, after=names[-1] if names else None, limit=PAGE)

    while found := await retry_unavailable(page, INTERACTIVE_ATTEMPTS):
        names += found
    return names


async def _without_run(context: HostContext, names: Sequence[str]) -> list[str]:
    return [name for name in names if not await _exists(context, name.partition(":")[2])]


async def _exists(context: HostContext, run_id: str) -> bool:
    try:
        return await context.stores.runs.get(run_id) is not None
    except StoreCorrupt:
        return True


async def _wanted_days(context: HostContext) -> set[str]:
    """Return the daily accounts that unfinished runs may still open."""
    wanted: set[str] = set()
    before: str | None = None
    while page := await context.stores.runs.list(statuses=QUEUED | PARKED | CLAIMED, before=before, limit=PAGE):
        wanted.update(name for run in page for name in day_accounts(run, context.settings.zone))
        before = page[-1].id
    return wanted


def _is_past(context: HostContext, name: str) -> bool:
    """Whether this is a daily account past its retention time."""
    if not name.startswith((BLOCKS, OWNERS, TEAMS, ALL)):
        return False
    try:
        day = date.fromisoformat(name.rpartition(":")[2])
    except ValueError:  # not created by a host
        return False
    kept_ms = round(max(context.settings.keep_days, DAYS_KEPT) * DAY_S * 1_000)
    return day < day_of(max(0, context.now_ms() - kept_ms), context.settings.zone)
