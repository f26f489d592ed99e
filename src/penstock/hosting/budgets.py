"""The budgets of a run as data of `budget` events: amounts spent, held, waiting, unresolved and left at each level.

`BudgetReporter` reads the accounts of a run in this process, its own and those of its nodes, agents and tools. It
reports a change at most every `MIN_INTERVAL_S`; a refusal, a waiting call and the end of the run are reported
immediately. It has no task: the trace forwarder calls it before each write of events, and a timer schedules a later
write.

Daily budgets change with every run of the owner, so `DayBudgetWatch` reads them from the ledger, at most once in
`DAY_INTERVAL_S` and only while the run's own budget changes. A shorter run reads nothing, and starts no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from typing import Any, Literal, NamedTuple

from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance
from penstock.containment.limits import NO_LIMITS, UNLIMITED
from penstock.errors import LedgerUnavailable
from penstock.hosting.durability import ALL, NOTHING_EARLIER, OWNERS, RUNS, TEAMS, Earlier, day_accounts
from penstock.hosting.event_data import EventPayload, to_json
from penstock.hosting.host_context import HostContext
from penstock.hosting.ports import INTERACTIVE_ATTEMPTS, RunRecord, retry_unavailable
from penstock.money import Usd, to_nanos, to_usd
from penstock.runtime.call import Call
from penstock.runtime.context import ExecutionContext

Level = Literal["run", "node", "owner", "all"]
"""The run's own budget; that of a node, an agent or a tool in it; the daily budget of its owner, or of all owners."""

MIN_INTERVAL_S = 0.25
"""Shortest time between two reports of changes of one run."""
MAX_NODE_BUDGETS = 100
"""Maximum number of budgets inside a run that are reported at once."""

NO_AMOUNTS: Mapping[str, float] = {}


def budget_event(
    balance: Balance, level: Level, *, node_id: str | None = None, waiting: Mapping[str, float] = NO_AMOUNTS
) -> EventPayload:
    """Convert the figures of one account; `waiting` has the amounts that waiting calls need, by unit."""
    return "budget", {
        "budget": to_json(balance.name),
        "level": level,
        "node_id": node_id,
        "units": [*_units(balance, waiting)],
    }


def _units(balance: Balance, waiting: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Yield the figures by unit, named as in stops: money always, the others if they are limited or used."""
    limits = balance.limits
    committed = balance.spent_nanos + balance.held_nanos + balance.unresolved_nanos
    is_limited = limits.cost_nanos < UNLIMITED
    yield {
        "unit": "usd",
        "spent": to_usd(balance.spent_nanos),
        "held": to_usd(balance.held_nanos),
        "unresolved": to_usd(balance.unresolved_nanos),
        "waiting": waiting.get("usd", 0.0),
        "limit": to_usd(limits.cost_nanos) if is_limited else None,
        "left": to_usd(max(0, limits.cost_nanos - committed)) if is_limited else None,
    }
    counts = (
        ("steps", balance.steps, balance.steps_open, limits.steps),
        ("tokens", balance.tokens_in + balance.tokens_out, balance.tokens_held, limits.tokens),
        ("api calls", balance.api_calls, 0, limits.api_calls),
        ("retries", balance.retries, 0, limits.retries),
    )
    for unit, spent, held, limit in counts:
        is_limited = limit < UNLIMITED
        if is_limited or spent or held:
            yield {
                "unit": unit,
                "spent": spent,
                "held": held,
                "unresolved": 0,
                "waiting": waiting.get(unit, 0),
                "limit": limit if is_limited else None,
                "left": max(0, limit - spent - held) if is_limited else None,
            }


class BudgetReporter:
    """Reports the budgets of one run in this process as they change."""

    def __init__(self, context: ExecutionContext, schedule: Callable[[], None], earlier: Earlier) -> None:
        """`schedule` schedules a write of events, before which `events` is called again."""
        self._graph = context.graph
        self._own = context._account
        self._schedule = schedule
        self._earlier = earlier
        self._loop = asyncio.get_running_loop()
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._reported: Balance | None = None
        self._reported_waiting: Mapping[str, float] = NO_AMOUNTS
        self._inside: dict[int, tuple[Account, Balance, str | None]] = {}
        """Budgets inside the run that calls in progress use, by identity: their figures and node as last reported."""
        self.is_urgent = False
        """Whether a refusal or a wait has to be reported without delay."""
        self.on_report: Callable[[], None] | None = None
        """Called when the run's own budget was reported, because those above it have changed too."""

    def events(
        self, node_of: Callable[[int], str | None], waiting: Mapping[str, float], *, at_once: bool = False
    ) -> list[EventPayload]:
        """Return the budgets that have changed since the last report, if a report is due or wanted `at_once`.

        `node_of` returns the path of the node of a call in progress, by the number of the call.
        """
        own = self._own_balance()
        if not self._has_changed(own, waiting):
            return []
        now_s = self._loop.time()
        if now_s < self._due_s and not self.is_urgent and not at_once:
            if self._timer is None:
                self._timer = self._loop.call_at(self._due_s, self._on_due)
            return []
        self._due_s, self.is_urgent = now_s + MIN_INTERVAL_S, False
        self._reported, self._reported_waiting = own, dict(waiting)
        if self.on_report is not None:
            self.on_report()
        return [budget_event(own, "run", waiting=waiting), *self._inner_events(node_of)]

    def _own_balance(self) -> Balance:
        """Return the figures of the run, with what earlier claims took from the same limit."""
        with self._graph.lock:
            own = accounts.balance(self._own)
        if self._earlier == NOTHING_EARLIER:
            return own
        spent, unresolved = self._earlier
        return replace(own, spent_nanos=own.spent_nanos + spent, unresolved_nanos=own.unresolved_nanos + unresolved)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_due(self) -> None:
        self._timer = None
        self._schedule()

    def _has_changed(self, own: Balance, waiting: Mapping[str, float]) -> bool:
        if self._reported is None:
            return bool(own.attempts or own.spent_nanos or waiting or own.unresolved_nanos)
        return own != self._reported or waiting != self._reported_waiting

    def _inner_events(self, node_of: Callable[[int], str | None]) -> list[EventPayload]:
        """Return the changed budgets inside the run; a budget that no call uses any more is reported one last time."""
        in_use = self._accounts_in_use()
        events = []
        for key, (account, number) in in_use.items():
            with self._graph.lock:
                balance = accounts.balance(account)
            known = self._inside.get(key)
            node_id = node_of(number) if known is None else known[2]
            if known is None or known[1] != balance:
                events.append(budget_event(balance, "node", node_id=node_id))
            self._inside[key] = account, balance, node_id
        for key in self._inside.keys() - in_use.keys():
            account, reported, node_id = self._inside.pop(key)
            with self._graph.lock:
                balance = accounts.balance(account)
            if balance != reported:
                events.append(budget_event(balance, "node", node_id=node_id))
        return events

    def _accounts_in_use(self) -> dict[int, tuple[Account, int]]:
        """Return the limited accounts of calls in progress, each with the number of the oldest call that uses it."""
        found: dict[int, tuple[Account, int]] = {}
        with self._graph.lock:
            for record in self._graph.open_calls():  # newest first, so that the oldest call is the last one written
                call = record.owner
                account = call.context._account if isinstance(call, Call) else None
                while account is not None and account is not self._own:
                    key = id(account)
                    if account.limits != NO_LIMITS and (key in found or len(found) < MAX_NODE_BUDGETS):
                        found[key] = account, record.number
                    account = account.parent
        return found


DAY_INTERVAL_S = 1.0
"""Shortest time between two readings of the daily budgets above one run."""


async def stored_budgets(context: HostContext, run: RunRecord) -> list[EventPayload]:
    """Return the budgets of a run from the ledger: its own, and the daily budgets of its owner and of all owners.

    Budgets without an account are left out. Raises LedgerUnavailable.
    """
    all_owners, owner = day_accounts(run, context.settings.zone)
    names: tuple[tuple[str, Level], ...] = ((RUNS + run.id, "run"), (owner, "owner"), (all_owners, "all"))
    found = await _balances(context, [name for name, _ in names])
    return [
        budget_event(balance, level) for (_, level), balance in zip(names, found, strict=True) if balance is not None
    ]


class DayBudget(NamedTuple):
    """A daily budget, and the amounts taken from it; `limit_nanos` is None if it is unlimited."""

    level: Literal["all", "team", "owner"]
    name: str
    """The team or the owner; empty for all."""
    limit_nanos: int | None
    spent_nanos: int = 0
    held_nanos: int = 0
    unresolved_nanos: int = 0

    @property
    def left_nanos(self) -> int | None:
        """Amount that is left; None if the budget is unlimited."""
        taken = self.spent_nanos + self.held_nanos + self.unresolved_nanos
        return None if self.limit_nanos is None else max(0, self.limit_nanos - taken)


async def budgets_of_day(
    context: HostContext, day: date, owners: Iterable[str], teams: Iterable[str] = ()
) -> list[DayBudget]:
    """Return the budgets of a day: that of all owners, and those of these teams and owners, as far as they exist.

    A budget from which nothing was taken yet has no account; its limit comes from the settings. Raises
    LedgerUnavailable.
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
    all_owners, owner = day_accounts(run, context.settings.zone)
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
        """Note that the run's own budget has changed, and with it the daily budgets, which are read a moment later."""
        if self._timer is None:
            self._timer = self._loop.call_later(DAY_INTERVAL_S, self._start)

    def _start(self) -> None:
        self._timer = None
        if self._reading is None or self._reading.done():
            self._reading = self._loop.create_task(self._report(), name=f"daily budgets of {self._run.id}")

    async def close(self) -> None:
        """Stop reading; if the daily budgets were read before, report the changes made by the end of the run."""
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            try:
                await asyncio.wait((self._reading,))
            finally:
                self._reading.cancel()  # without effect unless this task was cancelled
            await self._report()

    async def _report(self) -> None:
        all_owners, owner = day_accounts(self._run, self._context.settings.zone)
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
    """Return the figures of these accounts; None for an account that does not exist, and so sets no limit."""
    found = await retry_unavailable(partial(context.ledger.balances, names), INTERACTIVE_ATTEMPTS)
    return [found.get(name) for name in names]
