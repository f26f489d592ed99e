"""The daily budgets above a run, and all budgets of a run as the ledger has them.

Daily budgets change with every run of the owner, so they are read from the ledger, at most once in `INTERVAL_S` and
only while the run's own budget changes. A run that ends sooner reads nothing, and starts no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from typing import Literal, NamedTuple

from penstock.containment.accounts import Balance
from penstock.containment.limits import UNLIMITED
from penstock.errors import LedgerUnavailable
from penstock.hosting.budgets import Level, budget_event
from penstock.hosting.durability import ALL, OWNERS, RUNS, TEAMS, day_accounts
from penstock.hosting.event_data import EventPayload
from penstock.hosting.host_context import HostContext
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, RunRecord, retry_unavailable
from penstock.money import Usd, to_nanos

INTERVAL_S = 1.0
"""Shortest time between two readings of the daily budgets above one run."""


async def stored_budgets(context: HostContext, run: RunRecord) -> list[EventPayload]:
    """Return the budgets of a run from the ledger: its own, its owner's and that of all for its day, if there are any.

    Raises LedgerUnavailable.
    """
    all_owners, owner = day_accounts(run)
    names: tuple[tuple[str, Level], ...] = ((RUNS + run.id, "run"), (owner, "owner"), (all_owners, "all"))
    found = await _balances(context, [name for name, _ in names])
    return [
        budget_event(balance, level) for (_, level), balance in zip(names, found, strict=True) if balance is not None
    ]


class DayBudget(NamedTuple):
    """A daily budget, and what is taken of it; `limit_nanos` is None if it is unlimited."""

    level: Literal["all", "team", "owner"]
    name: str
    """The team or the owner; empty for all."""
    limit_nanos: int | None
    spent_nanos: int = 0
    held_nanos: int = 0
    unresolved_nanos: int = 0

    @property
    def left_nanos(self) -> int | None:
        """What is left of it; None if it is unlimited."""
        taken = self.spent_nanos + self.held_nanos + self.unresolved_nanos
        return None if self.limit_nanos is None else max(0, self.limit_nanos - taken)


async def budgets_of_day(
    context: HostContext, day: date, owners: Iterable[str], teams: Iterable[str] = ()
) -> list[DayBudget]:
    """Return the budgets of a day: that of all, and those of these teams and owners; without one, it is left out.

    A budget from which nothing was taken yet has no account; its limit is that of the settings. LedgerUnavailable.
    """
    settings = context.settings
    wanted: list[tuple[Literal["all", "team", "owner"], str, str, Usd | None]] = [
        ("all", "", f"{ALL}{day}", settings.daily_usd),
        *(("team", team, f"{TEAMS}{team}:{day}", None) for team in teams),
        *(("owner", owner, f"{OWNERS}{owner}:{day}", settings.owner_daily_usd) for owner in owners),
    ]
    found: list[DayBudget] = []
    balances = await _balances(context, [account for _, _, account, _ in wanted])
    for (level, name, _, most), balance in zip(wanted, balances, strict=True):
        if balance is not None:
            limit = balance.limits.cost_nanos
            taken = balance.spent_nanos, balance.held_nanos, balance.unresolved_nanos
            found.append(DayBudget(level, name, limit if limit < UNLIMITED else None, *taken))
        elif most is not None:
            found.append(DayBudget(level, name, to_nanos(most)))
    return found


async def stored_usage(context: HostContext, run_ids: Sequence[str]) -> dict[str, Balance]:
    """Return the figures of runs from the ledger, by id; runs without an account are left out."""
    if not run_ids:
        return {}
    try:
        found = await _balances(context, [RUNS + run_id for run_id in run_ids])
    except LedgerUnavailable:
        return {}  # the figures are only shown
    return {run_id: balance for run_id, balance in zip(run_ids, found, strict=True) if balance is not None}


def has_day_budget(context: HostContext, run: RunRecord) -> bool:
    """Whether a daily account above the run is open on this host."""
    all_owners, owner = day_accounts(run)
    return any(place in context.accounts for place in (all_owners, owner, f"{all_owners}/{owner}"))


class DayBudgetWatch:
    """Reports the daily budgets above one run while it runs."""

    def __init__(self, context: HostContext, run: RunRecord, emit: Callable[[EventPayload], None]) -> None:
        self._context = context
        self._run = run
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[None] | None = None
        self._reported: dict[str, Balance] = {}

    def notify(self) -> None:
        """Note that the run's own budget has changed, and so those above it; they are read a moment later."""
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL_S, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._reading is None or self._reading.done():
            self._reading = self._loop.create_task(self._report(), name=f"daily budgets of {self._run.id}")

    async def close(self) -> None:
        """Stop reading; if the daily budgets were reported before, report what the end of the run has changed."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            try:
                await asyncio.wait((self._reading,))
            finally:
                self._reading.cancel()  # without effect unless this task was cancelled
            await self._report()

    async def _report(self) -> None:
        all_owners, owner = day_accounts(self._run)
        names: tuple[tuple[str, Level], ...] = ((owner, "owner"), (all_owners, "all"))
        try:
            found = await _balances(self._context, [name for name, _ in names])
        except LedgerUnavailable:
            return  # the figures are only shown: the next change reads them again
        for (name, level), balance in zip(names, found, strict=True):
            if balance is not None and self._reported.get(name) != balance:
                self._reported[name] = balance
                self._emit(budget_event(balance, level))


async def _balances(context: HostContext, names: Sequence[str]) -> list[Balance | None]:
    found: list[Balance | None] = []
    for name in names:
        try:
            found.append(await retry_unavailable(partial(context.ledger.balance, name), INTERACTIVE_ATTEMPTS))
        except KeyError:  # no such account: no limit applies
            found.append(None)
    return found
