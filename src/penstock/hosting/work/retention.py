"""What is removed when nobody needs it any more: old runs, what goes with them, cancels, and accounts.

The account of a run goes with the run, in another act: whoever dies in between leaves it, and accounts of days go with
nothing. So from time to time the oldest accounts are looked at, those alone that are older than what is kept. All of it
may be done by several hosts at once, and by each again: what is removed was asked for last by a run that is not there.

Accounts that others are under, or that something is held from, the ledger keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from penstock.hosting.records import CLAIMED, PARKED, QUEUED
from penstock.hosting.work.durable import (
    ALL,
    OWNERS,
    RUNS,
    UNKNOWN,
    ask_ledger,
    day_accounts,
    day_of,
    forget_accounts,
)
from penstock.hosting.work.workplace import Workplace

OF_RUNS = (RUNS, UNKNOWN)
"""The accounts that a run has to itself begin so, and go on with its id."""
DAY_S = 86_400
DAYS_KEPT = 2
"""So long at the least are the accounts of a day kept: what it cost can be read, also if its runs are gone sooner."""
LONGEST_S = 1e9
PAGE = 500
PORTION = 50
"""So many accounts are forgotten at once, after it was looked whether their runs are there."""


async def remove_ended(at: Workplace) -> None:
    """Remove the runs that ended so long ago that they are not kept, with all they have left, and old cancels."""
    before_ms = at.now_ms() - round(at.settings.keep_days * DAY_S * 1_000)
    removed = await at.stores.runs.remove_ended(before_ms)
    at.counted["removed"] += len(removed)
    await forget_accounts(at, [prefix + run_id for run_id in removed for prefix in OF_RUNS])
    for forget in at.forgetting.values():
        await forget(before_ms)
    await at.stores.cancels.prune(now_ms=at.now_ms())


async def remove(at: Workplace, run_id: str) -> None:
    """Remove one run that has ended, with all it has left; Conflict if it has not."""
    await at.stores.runs.remove(run_id)
    await forget_accounts(at, [prefix + run_id for prefix in OF_RUNS])


async def sweep_accounts(at: Workplace) -> None:
    """Forget the accounts of runs that are not there any more, then those of days that are not kept."""
    names = await _aged(at)
    of_runs = [name for name in names if name.startswith(OF_RUNS)]
    for first in range(0, len(of_runs), PORTION):
        await forget_accounts(at, await _without_run(at, of_runs[first : first + PORTION]))
    days = [name for name in names if _is_past(at, name)]
    if days:
        wanted = await _wanted_days(at)
        for prefix in (OWNERS, ALL):  # the one of all is above those of the owners
            await forget_accounts(at, [name for name in days if name.startswith(prefix) and name not in wanted])


async def _aged(at: Workplace) -> list[str]:
    """Every account that is older than what is kept."""
    ledger, age_s = at.stores.ledger, min(at.settings.keep_days * DAY_S, LONGEST_S)
    names: list[str] = []

    def page() -> Sequence[str]:
        return ledger.aged(age_s, after=names[-1] if names else None, limit=PAGE)

    while found := await ask_ledger(at, page):
        names += found
    return names


async def _without_run(at: Workplace, names: Sequence[str]) -> list[str]:
    return [name for name in names if await at.stores.runs.get(name.partition(":")[2]) is None]


async def _wanted_days(at: Workplace) -> set[str]:
    """The accounts of days that runs which have not ended may still come to open."""
    wanted: set[str] = set()
    before: str | None = None
    while page := await at.stores.runs.list(statuses=QUEUED | PARKED | CLAIMED, before=before, limit=PAGE):
        wanted.update(name for run in page for name in day_accounts(run))
        before = page[-1].id
    return wanted


def _is_past(at: Workplace, name: str) -> bool:
    """Whether an account is that of a day which is not kept."""
    if not name.startswith((OWNERS, ALL)):
        return False
    try:
        day = date.fromisoformat(name.rpartition(":")[2])
    except ValueError:  # of somebody else
        return False
    kept_ms = round(max(at.settings.keep_days, DAYS_KEPT) * DAY_S * 1_000)
    return day < day_of(max(0, at.now_ms() - kept_ms))
