"""Decode the rows of a ledger into the objects of `containment`.

Shared by the ledgers of all databases: column names, and how a row is decoded. Independent of any database.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from penstock.containment import accounts
from penstock.containment.accounts import FIGURES, Account, Hold
from penstock.containment.ledger import (
    Amounts,
    TicketRequest,
    as_held,
    charged_not_held,
    check_held,
    check_same,
    new_ticket,
    taken_for,
)
from penstock.containment.limits import Limits
from penstock.containment.tickets import Queue, Ticket, UnderWay, Waiting, limited
from penstock.errors import InvalidValue
from penstock.stops import Stop, StopReason

CEILINGS = ("cost_nanos", "steps", "tokens", "api_calls", "retries", "time_ns")


class Moment(NamedTuple):
    """A reading of both clocks: monotonic time is valid until the machine reboots, wall time is used after that."""

    boot: str
    monotonic_ns: int
    wall_ns: int

    def since_opened_ns(self, row: Mapping[str, Any]) -> int:
        """Return the age of the account; SQL statements that take a hold compute the same for every level."""
        return self.since_ns(Moment(row["opened_boot"], row["opened_monotonic_ns"], row["opened_wall_ns"]))

    def since_ns(self, before: Moment) -> int:
        """Return the time since another reading of the clocks."""
        is_same_boot = before.boot == self.boot
        return max(0, self.monotonic_ns - before.monotonic_ns if is_same_boot else self.wall_ns - before.wall_ns)


def account_of(row: Mapping[str, Any], now: Moment, parent: Account | None = None) -> Account:
    """Return the account of a row on a clock where now is 0: its opening time is minus its age."""
    account = Account(row["name"], limits_of(row), parent, -now.since_opened_ns(row))
    for name in FIGURES:
        setattr(account, name, row[name])
    return account


def accounts_of(rows: Iterable[Mapping[str, Any]], now: Moment) -> dict[int, Account]:
    """Return accounts by id, from their rows and those of all their ancestors; see `account_of`."""
    by_id = {row["id"]: row for row in rows}
    made: dict[int, Account] = {}

    for nearest in by_id:
        missing, id = [], nearest
        while id is not None and id not in made:
            missing.append(id)
            id = by_id[id]["parent"]
        for id in reversed(missing):
            row = by_id[id]
            made[id] = account_of(row, now, None if row["parent"] is None else made[row["parent"]])
    return made


class StoredQueue(Queue):
    """A queue that was read from rows, and what is needed to write it back."""

    def __init__(
        self,
        now: Moment,
        account_rows: Iterable[Mapping[str, Any]],
        ticket_rows: Sequence[Mapping[str, Any]],
        hold_rows: Iterable[Mapping[str, Any]],
        unhinted: Collection[str],
    ) -> None:
        """`ticket_rows` say in `is_expired` which have expired; tickets with impossible amounts are left out.

        `account_rows` say in `dearest` what is None where no un-hinted call was settled.
        """
        account_rows = list(account_rows)
        ticket_rows = [row for row in ticket_rows if _has_amounts(row)]
        self.accounts = accounts_of(account_rows, now)
        self._ids = {account: id for id, account in self.accounts.items()}
        self.asks = {row["key"]: amounts_of(row) for row in ticket_rows}
        under_way = {}
        for row in hold_rows:
            amounts = row["cost_nanos"], row["tokens_in"] + row["tokens_out"], row["api_calls"]
            under_way[row["key"]] = UnderWay(Hold(self.accounts[row["account"]], *amounts), row["under"])
        dearest = {self.accounts[row["id"]]: row["dearest"] for row in account_rows if row["dearest"] is not None}
        super().__init__([self._ticket(row) for row in ticket_rows], under_way, 0, unhinted, dearest)

    def newcomer(
        self,
        key: str,
        account: int,
        ask: Amounts,
        retry_drawn: bool,
        under: str | None,
        request: TicketRequest | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Ticket:
        """Return the ticket of a call that has just come."""
        self.asks[key] = ask
        target = self.accounts[account]
        lease_s = unhinted_lease_s if limited(target) else None
        return new_ticket(key, target, ask, retry_drawn, under, request, lease_s)

    def taken_for(self, ticket: Ticket) -> Amounts:
        """Return what the call of a ticket holds."""
        return taken_for(ticket, self.asks[ticket.key])

    def account_id(self, ticket: Ticket) -> int:
        """Return the id of a ticket's account."""
        return self._ids[ticket.account]

    def _ticket(self, row: Mapping[str, Any]) -> Ticket:
        request = TicketRequest(row["run"], row["owner"])
        account, retry_drawn = self.accounts[row["account"]], bool(row["retry_drawn"])
        lease_s = row["unhinted_lease_s"]
        ticket = new_ticket(row["key"], account, amounts_of(row), retry_drawn, row["under"], request, lease_s)
        ticket.number, ticket.turn, ticket.passed = row["number"], row["turn"], row["passed"]
        ticket.state, ticket.reason, ticket.is_expired = row["state"], stop_of(row["stop"]), bool(row["is_expired"])
        return ticket


def is_held(key: str, known: Mapping[str, Any] | None, account: str, ask: Amounts, is_unhinted: bool = False) -> bool:
    """Whether exactly this is held, by the hold row of the key; KeyTaken if the key was used for something else."""
    if known is None or known["state"] == "withdrawn":
        return False
    if known["state"] == "charged":
        raise charged_not_held(key)
    check_held(key, known["state"])
    held = amounts_of(known)
    check_same("hold", key, (known["name"], held), (account, as_held(ask, held, is_unhinted)))
    return True


def waiting_of(row: Mapping[str, Any]) -> Waiting:
    """Return the answer to a call that still waits, from the row of its ticket."""
    return Waiting(stop_of(row["stop"]), row["number"])


def stop_text(stop: Stop | None) -> str:
    """Return a stop as JSON."""
    assert stop is not None, "who has a ticket was refused before"
    return json.dumps(asdict(stop))


UNREADABLE_STOP = Stop(StopReason.LEDGER_UNAVAILABLE, "the stored reason why this call waits cannot be read")


def stop_of(text: str) -> Stop:
    """Return the stop in a JSON text; a general one if it cannot be read.

    All tickets of a queue are read together: an unreadable one must not keep the others waiting.
    """
    try:
        fields = json.loads(text)
        return Stop(**{**fields, "reason": StopReason(fields["reason"])})
    except (TypeError, KeyError, ValueError, RecursionError):
        return UNREADABLE_STOP


def names_of_aged(rows: Iterable[Mapping[str, Any]], age_ns: int, now: Moment) -> list[str]:
    """Return the names of the accounts that are at least `age_ns` old; rows are in the order they were opened."""
    return [row["name"] for row in takewhile(lambda row: now.since_opened_ns(row) >= age_ns, rows)]


def refusal_of(levels: Sequence[Mapping[str, Any]], ask: Amounts, retry_drawn: bool, now: Moment) -> Stop:
    """Return the stop that refuses the call, from the rows of the account and its ancestors, the nearest first."""
    nearest: Account | None = None
    for row in reversed(levels):
        nearest = account_of(row, now, nearest)
    assert nearest is not None, "an account is a level of its own"
    stop = accounts.hold(nearest, ask.cost_nanos, ask.tokens_in + ask.tokens_out, ask.api_calls, 0, retry_drawn)
    assert isinstance(stop, Stop), "a call was refused that nothing refuses"
    return stop


def fits_columns(ask: Amounts) -> bool:
    """Whether the amounts are within what an unlimited budget, and so a column, can hold."""
    taken = accounts.hold(Account(""), ask.cost_nanos, ask.tokens_in + ask.tokens_out, ask.api_calls, 0)
    return not isinstance(taken, Stop)


def limits_of(row: Mapping[str, Any]) -> Limits:
    """Return the ceilings in an account row."""
    return Limits(**{name: row[f"max_{name}"] for name in CEILINGS})


def _has_amounts(row: Mapping[str, Any]) -> bool:
    try:
        return fits_columns(amounts_of(row))
    except InvalidValue:
        return False


def amounts_of(hold: Mapping[str, Any]) -> Amounts:
    """Return the requested amounts in a hold row."""
    return Amounts(hold["cost_nanos"], hold["tokens_in"], hold["tokens_out"], hold["api_calls"])


def columns_of(amounts: Amounts) -> tuple[int, int, int, int]:
    """Return the amounts in column order."""
    return amounts.cost_nanos, amounts.tokens_in, amounts.tokens_out, amounts.api_calls


def figures_of(account: Account) -> dict[str, int]:
    """Return the figures of an account by column name."""
    return {name: getattr(account, name) for name in FIGURES}


def boot_id() -> str:
    """Return an id that all processes share until the machine reboots; where the system has none, a random one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return uuid.uuid4().hex
