"""The accounts of gateway keys in the ledger of a database: the budget of a key for a day, and what it has spent.

A key has an account for each day, in the time zone of the budgets. Its parents are, for the same day, the account of
its owner, that of the owner's team and that of all keys. A budget for the whole life of a key limits each day to the
amount that is left of it at the beginning of that day.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, timedelta, tzinfo

from penstock.containment.accounts import Balance
from penstock.containment.limits import NO_LIMITS, Budget, Limits
from penstock.hosting.durability import day_of
from penstock.hosting.tokens import TokenRecord
from penstock.money import Usd, to_nanos
from penstock.runtime.durable.async_ledger import AsyncLedger

KEYS, GATEWAY_RUNS = "key:", "gateway:"
"""Prefixes of account names: of a key (by id and day), and of a run of the gateway (by key, name and day)."""


@dataclass(frozen=True, slots=True)
class KeySpend:
    """The amount that a key has spent on one day, and the rest of its budget for that day."""

    day: date
    limit_nanos: int | None
    """Maximum amount that the key may spend on the day; None without a budget."""
    spent_nanos: int = 0
    held_nanos: int = 0
    unresolved_nanos: int = 0
    api_calls: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def left_nanos(self) -> int | None:
        """Amount that the key may still spend; None without a budget."""
        if self.limit_nanos is None:
            return None
        return max(0, self.limit_nanos - self.spent_nanos - self.held_nanos - self.unresolved_nanos)


def key_account(key_id: str, day: date) -> str:
    """Return the name of the account of a key for a day."""
    return f"{KEYS}{key_id}:{day}"


def run_account(key_id: str, run: str, day: date) -> str:
    """Return the name of the account of a run of the gateway for a day."""
    return f"{GATEWAY_RUNS}{key_id}:{run}:{day}"


def call_id_of(ledger_key: str) -> str:
    """Return the id of a gateway call from its key in the ledger, without the id of the gateway key."""
    return ledger_key.removeprefix(GATEWAY_RUNS).partition(":")[2]


def money(usd: Usd | None) -> Limits:
    """Return the limits of an account with this budget."""
    return NO_LIMITS if usd is None else Budget(max_cost_dollars=usd).limits()


async def limit_on(ledger: AsyncLedger, key: TokenRecord, day: date, zone: tzinfo = UTC) -> int | None:
    """Return the limit of the key for the day: its daily budget, or the rest of its whole budget if that is less."""
    limits = key.limits or {}
    daily, total = limits.get("daily_usd"), limits.get("max_cost_usd")
    daily_nanos = None if daily is None else to_nanos(daily, "daily_usd")
    if total is None:
        return daily_nanos
    left_nanos = max(0, to_nanos(total, "max_cost_usd") - await _committed_before(ledger, key, day, zone))
    return left_nanos if daily_nanos is None else min(left_nanos, daily_nanos)


async def spend_on(ledger: AsyncLedger, key: TokenRecord, day: date, zone: tzinfo = UTC) -> KeySpend:
    """Return the key's spending on the day; raises LedgerUnavailable."""
    limit_nanos, balance = await limit_on(ledger, key, day, zone), await _balance(ledger, key_account(key.id, day))
    if balance is None:
        return KeySpend(day, limit_nanos)
    money = balance.spent_nanos, balance.held_nanos, balance.unresolved_nanos
    return KeySpend(day, limit_nanos, *money, balance.api_calls, balance.tokens_in, balance.tokens_out)


def days_until(key: TokenRecord, last: date, zone: tzinfo = UTC) -> list[date]:
    """Return the days from the one on which the key was created to this one."""
    first = min(last, day_of(key.created_ms, zone))
    return [first + timedelta(days=number) for number in range((last - first).days + 1)]


async def _committed_before(ledger: AsyncLedger, key: TokenRecord, day: date, zone: tzinfo) -> int:
    """Return the amount that the key has spent and holds on the days before."""
    return await _committed(ledger, [key_account(key.id, past) for past in days_until(key, day, zone)[:-1]])


async def _committed(ledger: AsyncLedger, names: Collection[str]) -> int:
    found = [await _balance(ledger, name) for name in names]
    return sum(one.spent_nanos + one.held_nanos + one.unresolved_nanos for one in found if one is not None)


async def _balance(ledger: AsyncLedger, account: str) -> Balance | None:
    try:
        return await ledger.balance(account)
    except KeyError:  # nothing was spent from it yet
        return None
