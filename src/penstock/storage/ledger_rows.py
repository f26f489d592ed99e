"""The rows of a ledger in a database, and what they are in `containment`.

What the ledgers of all databases have in common: names of columns, and how a row is read. It knows no database.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from penstock.containment import accounts
from penstock.containment.accounts import FIGURES, Account
from penstock.containment.ledger import Amounts
from penstock.containment.limits import Limits
from penstock.stops import Stop

CEILINGS = ("cost_nanos", "steps", "tokens", "api_calls", "retries", "time_ns")


class Moment(NamedTuple):
    """A reading of both clocks: monotonic time means something until the machine starts anew, wall time after that."""

    boot: str
    monotonic_ns: int
    wall_ns: int

    def since_opened_ns(self, row: Mapping[str, Any]) -> int:
        """How old the account is; statements that take ask the same of every level."""
        if row["opened_boot"] == self.boot:
            since: int = self.monotonic_ns - row["opened_monotonic_ns"]
        else:
            since = self.wall_ns - row["opened_wall_ns"]
        return max(0, since)


def account_of(row: Mapping[str, Any], now: Moment, above: Account | None = None) -> Account:
    """The account as it was read, seen at the moment 0: it was opened as long before as it is old now."""
    account = Account(row["name"], limits_of(row), above, -now.since_opened_ns(row))
    for name in FIGURES:
        setattr(account, name, row[name])
    return account


def names_of_aged(rows: Iterable[Mapping[str, Any]], age_ns: int, now: Moment) -> list[str]:
    """Those of accounts that are at least so old, of rows in the order they were opened in."""
    return [row["name"] for row in takewhile(lambda row: now.since_opened_ns(row) >= age_ns, rows)]


def refusal_of(levels: Sequence[Mapping[str, Any]], ask: Amounts, retry_drawn: bool, now: Moment) -> Stop:
    """What refuses the call, from the account and those above it as they were read, the nearest first."""
    nearest: Account | None = None
    for row in reversed(levels):
        nearest = account_of(row, now, nearest)
    assert nearest is not None, "an account is a level of its own"
    stop = accounts.hold(nearest, ask.cost_nanos, ask.tokens_in + ask.tokens_out, ask.api_calls, 0, retry_drawn)
    assert isinstance(stop, Stop), "a call was refused that nothing refuses"
    return stop


def fits_anywhere(ask: Amounts) -> bool:
    """Whether a budget could have that much, and so a column."""
    taken = accounts.hold(Account(""), ask.cost_nanos, ask.tokens_in + ask.tokens_out, ask.api_calls, 0)
    return not isinstance(taken, Stop)


def limits_of(row: Mapping[str, Any]) -> Limits:
    """The ceilings in a row of an account."""
    return Limits(**{name: row[f"max_{name}"] for name in CEILINGS})


def asked_of(hold: Mapping[str, Any]) -> Amounts:
    """What was asked for, in a row of a hold."""
    return Amounts(hold["cost_nanos"], hold["tokens_in"], hold["tokens_out"], hold["api_calls"])


def columns_of(amounts: Amounts) -> tuple[int, int, int, int]:
    """The amounts in the order of their columns."""
    return amounts.cost_nanos, amounts.tokens_in, amounts.tokens_out, amounts.api_calls


def figures_of(account: Account) -> dict[str, int]:
    """The figures of an account by the names of their columns."""
    return {name: getattr(account, name) for name in FIGURES}


def boot_id() -> str:
    """What is the same in every process until the machine starts anew; where nothing says so, of this store alone."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
