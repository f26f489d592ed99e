"""A ResourceUsage bound to an account: it shows the ledger's figures, and additions to it are charged.

Figures only grow. An addition by a node is charged immediately to the account of its context and to every outer budget,
so the next call, step or `check_budget` sees it. Lowering a figure is refused and changes no account.
"""

from __future__ import annotations

import threading
from typing import Protocol

from penstock import checks
from penstock.clock import Clock, utc_from_ns
from penstock.containment import accounts
from penstock.containment.accounts import Account, Balance
from penstock.containment.ledger import Amounts, Ledger
from penstock.containment.limits import Limits, ResourceUsage, measurement
from penstock.errors import InvalidValue
from penstock.ids import new_run_id
from penstock.money import to_nanos, to_usd
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.run import Run
from penstock.tracing.record import OPEN, CallRecord

_binding = threading.Lock()
"""Held while a usage is bound to a context, so that two contexts in two threads cannot both be its first."""


class Metered(Protocol):
    """The part of a context that its usage needs."""

    _run: Run
    _account: Account
    _base: CallRecord

    @property
    def balance(self) -> Balance:
        """The figures of its account, all of one instant."""

    def _now_or_end(self) -> int:
        """Now, or the time at which the context ended, in monotonic nanoseconds."""


class Meter:
    """Reads one account and charges it, on behalf of a ResourceUsage."""

    __slots__ = ("account", "base", "ledger", "shared")

    def __init__(self, ledger: Ledger, account: Account) -> None:
        self.ledger = ledger
        self.account = account
        self.base: CallRecord | None = None
        """The record of the context: its time ends with it."""
        self.shared: SharedBudget | None = None
        """Account at a store that is charged as well."""

    def read(self, name: str) -> float:
        """Return the current figure of that name from the ledger."""
        with self.ledger.lock:
            counted = _counted(self.account, name)
        return to_usd(counted) if name == "cost_dollars" else counted

    def set(self, name: str, value: float) -> None:
        """Charge the difference between `value` and the figure; raise InvalidValue if it is negative."""
        if name == "cost_dollars":
            wanted = to_nanos(value, name)
        else:
            wanted = checks.integer(name, value)
        with self.ledger.lock:
            counted = _counted(self.account, name)
            if wanted < counted:
                shown = to_usd(counted) if name == "cost_dollars" else counted
                raise InvalidValue(name, value, f"{shown} or more: what was counted is not taken back")
            more = wanted - counted
            cost = more if name == "cost_dollars" else 0
            tokens = more if name == "tokens_used" else 0
            api_calls = more if name == "api_calls" else 0
            steps = more if name == "steps_executed" else 0
            retries = more if name == "retries_used" else 0
            accounts.charge(self.account, cost, tokens, 0, api_calls, steps, retries)
        if self.shared is not None and (cost or tokens or api_calls):
            self.shared.charged(self.shared.key(f"usage-{new_run_id()}"), Amounts(cost, tokens, 0, api_calls))
            self.shared.flush_soon()

    def elapsed_s(self) -> float:
        """Return the seconds since the account was opened, up to the end of its context."""
        base = self.base
        now_ns = self.ledger.clock.monotonic_ns() if base is None or base.end_seq == OPEN else base.ended_ns
        return (now_ns - self.account.opened_ns) / 1_000_000_000


def _counted(account: Account, name: str) -> int:
    """Return the figure of that name, cost in nano-dollars. The caller holds the lock."""
    if name == "cost_dollars":
        return account.committed - account.held - account.unresolved
    if name == "tokens_used":
        return account.tokens_in + account.tokens_out
    if name == "steps_executed":
        return account.steps_done
    return account.api_calls if name == "api_calls" else account.retries


def usage_of(handle: Metered) -> ResourceUsage:
    """Return the usage of a context: the one passed to its run if it is bound to the same account, else a new one."""
    run = handle._run
    given = run.usage
    if given is not None and _account_of(given) is handle._account:
        return given
    meter = Meter(run.ledger, handle._account)
    meter.base, meter.shared = handle._base, run.shared
    started = utc_from_ns(run.wall_time_ns(handle._account.opened_ns))
    usage = ResourceUsage(start_time=started, clock=run.clock)
    usage._attach(meter)
    return usage


def measure(handle: Metered) -> ResourceUsage:
    """Return the current usage of a context, as constant figures."""
    figures, account, run = handle.balance, handle._account, handle._run
    return measurement(
        figures.tokens_in + figures.tokens_out,
        figures.steps,
        figures.api_calls,
        figures.spent_usd,
        figures.retries,
        utc_from_ns(run.wall_time_ns(account.opened_ns)),
        (handle._now_or_end() - account.opened_ns) / 1_000_000_000,
    )


def open_ledger(usage: ResourceUsage, name: str, limits: Limits, clock: Clock) -> Ledger:
    """Return a ledger whose root starts from the figures and the time of `usage`, and bind `usage` to it.

    A usage bound to another run stays charged by that run as well: its account becomes a child of the new root.
    """
    with _binding:
        own = Ledger(name, limits, clock=clock)
        meter = usage._counter
        if meter is None:
            _start_from(own.root, usage, clock)
        else:
            assert isinstance(meter, Meter)
            if meter.account.parent is not None:
                raise InvalidValue("usage", usage, "the usage of a whole run; a copy (copy.copy) can be started from")
            if clock is not meter.ledger.clock:
                raise InvalidValue("clock", clock, "the clock of the context that the usage was given to before")
            own.lock, own.room = meter.ledger.lock, meter.ledger.room  # one lock for accounts of one tree
            with own.lock:
                own.root.opened_ns = meter.account.opened_ns
                accounts.set_limits(own.root, limits)
                accounts.put_under(meter.account, own.root)
        usage._attach(Meter(own, own.root))
        return own


def follow(usage: ResourceUsage, base: CallRecord, shared: SharedBudget | None) -> None:
    """Bind the usage to the record of its context, which has begun."""
    meter = usage._counter
    assert isinstance(meter, Meter)
    meter.base, meter.shared = base, shared


def _start_from(root: Account, usage: ResourceUsage, clock: Clock) -> None:
    counts = (usage.tokens_used, usage.api_calls, usage.steps_executed, usage.retries_used)
    for field, count in zip(("tokens_used", "api_calls", "steps_executed", "retries_used"), counts, strict=True):
        checks.integer(f"usage.{field}", count)
    tokens, api_calls, steps, retries = counts
    root.opened_ns = clock.monotonic_ns() - round(usage.time_elapsed_seconds * 1_000_000_000)
    accounts.set_limits(root, root.limits)
    accounts.charge(root, to_nanos(usage.cost_dollars, "usage.cost_dollars"), tokens, 0, api_calls, steps, retries)


def _account_of(usage: ResourceUsage) -> Account | None:
    meter = usage._counter
    return meter.account if isinstance(meter, Meter) else None
