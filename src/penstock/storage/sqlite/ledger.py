"""Budgets in a SQLite file, shared by every process that opens it.

Each operation is one transaction with one conditional UPDATE over the account and all of its ancestors: it changes
every level, or none if one of them has no room. The arithmetic itself is that of `containment.accounts`: the changes of
an operation are computed on an empty account and added to each level, and a refusal is computed from the levels as they
were read. Checks in the tables back this up, so that impossible figures are never recorded.

A process that dies leaves its holds behind, still taken: it is unknown whether their calls had left. `held` lists them,
and a caller that knows that the process is gone leaves them unresolved, settles or releases them.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import FIGURES, Account, Balance, Hold, HoldState
from penstock.containment.ledger import (
    Amounts,
    TicketRequest,
    above_already,
    charged_not_held,
    check_page,
    check_same,
    held_not_charged,
    no_account,
    no_hold,
    under_another,
    waits_already,
)
from penstock.containment.limits import UNLIMITED, Limits, seconds_to_ns
from penstock.containment.tickets import Ticket, Waiting, no_ticket
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.notify import Wakeups
from penstock.stops import Stop
from penstock.storage.ledger_rows import (
    CEILINGS,
    Moment,
    StoredQueue,
    account_of,
    amounts_of,
    boot_id,
    columns_of,
    figures_of,
    is_held,
    limits_of,
    names_of_aged,
    refusal_of,
    stop_text,
    waiting_of,
)
from penstock.storage.sqlite.file import Schema, SqliteFile

T = TypeVar("T")

OPEN = "state IN ('held', 'unresolved')"
"""Worded as in the partial index: SQLite uses the index only for the same condition."""

TICKETS = (
    """CREATE TABLE tickets (
        key TEXT NOT NULL PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts (id),
        cost_nanos INTEGER NOT NULL,
        tokens_in INTEGER NOT NULL,
        tokens_out INTEGER NOT NULL,
        api_calls INTEGER NOT NULL,
        retry_drawn INTEGER NOT NULL,
        run TEXT NOT NULL,
        owner TEXT NOT NULL,
        under TEXT,
        number INTEGER NOT NULL,
        turn INTEGER NOT NULL,
        passed INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('waiting', 'admitted', 'refused')),
        stop TEXT NOT NULL,
        lease_ns INTEGER NOT NULL,
        left_ns INTEGER NOT NULL,
        renewed_boot TEXT NOT NULL,
        renewed_monotonic_ns INTEGER NOT NULL,
        renewed_wall_ns INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID""",
    "CREATE INDEX tickets_of ON tickets (account)",
    "CREATE INDEX held_under ON holds (under) WHERE under IS NOT NULL AND state = 'held'",
)
"""The calls that wait, and the calls under way by the hold they run under."""

UNHINTED = (
    """CREATE TABLE IF NOT EXISTS unhinted (
        key TEXT NOT NULL PRIMARY KEY,
        account INTEGER NOT NULL REFERENCES accounts (id) ON DELETE CASCADE,
        lease_ns INTEGER NOT NULL,
        renewed_boot TEXT NOT NULL,
        renewed_monotonic_ns INTEGER NOT NULL,
        renewed_wall_ns INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS dearest (
        account INTEGER PRIMARY KEY REFERENCES accounts (id) ON DELETE CASCADE,
        cost_nanos INTEGER NOT NULL
    ) STRICT""",
    "CREATE INDEX IF NOT EXISTS unhinted_of ON unhinted (account)",
)
"""Model calls without a hint that wait or are held, and the most that one has cost at an account.

Processes that know nothing of these tables may use the file meanwhile: their calls are held as they ask, and the rows
of an account that they remove go with it.
"""

SCHEMA = Schema(
    application_id=int.from_bytes(b"Pnst"),
    version=3,
    statements=(
        f"""CREATE TABLE accounts (
            id INTEGER PRIMARY KEY,
            name TEXT NOT NULL UNIQUE,
            parent INTEGER REFERENCES accounts (id),
            opened_boot TEXT NOT NULL,
            opened_monotonic_ns INTEGER NOT NULL,
            opened_wall_ns INTEGER NOT NULL,
            {", ".join(f"max_{name} INTEGER NOT NULL CHECK (max_{name} >= 0)" for name in CEILINGS)},
            {", ".join(f"{name} INTEGER NOT NULL DEFAULT 0 CHECK ({name} >= 0)" for name in FIGURES)},
            CHECK (committed >= held + unresolved),
            CHECK (tokens_committed = tokens_in + tokens_out + tokens_held + tokens_unresolved),
            CHECK (steps_done <= steps_taken)
        ) STRICT""",
        """CREATE TABLE levels (
            account INTEGER NOT NULL REFERENCES accounts (id),
            distance INTEGER NOT NULL,
            level INTEGER NOT NULL REFERENCES accounts (id),
            PRIMARY KEY (account, distance)
        ) STRICT, WITHOUT ROWID""",
        """CREATE TABLE holds (
            key TEXT NOT NULL PRIMARY KEY,
            account INTEGER NOT NULL REFERENCES accounts (id),
            state TEXT NOT NULL CHECK (
                state IN ('held', 'settled', 'released', 'withdrawn', 'unresolved', 'charged')),
            cost_nanos INTEGER NOT NULL,
            tokens_in INTEGER NOT NULL,
            tokens_out INTEGER NOT NULL,
            api_calls INTEGER NOT NULL,
            under TEXT
        ) STRICT, WITHOUT ROWID""",
        f"CREATE INDEX open_holds ON holds (state) WHERE {OPEN}",
        # Not a CHECK: ceilings may be lowered below what was taken. Only taking more must not pass them.
        """CREATE TRIGGER within_ceilings BEFORE UPDATE OF steps_taken, retries ON accounts
        WHEN NEW.steps_taken > max(OLD.steps_taken, NEW.max_steps) OR NEW.retries > max(OLD.retries, NEW.max_retries)
        BEGIN SELECT RAISE(ABORT, 'more steps or retries than the account has'); END""",
        """CREATE TABLE draws (
            key TEXT NOT NULL PRIMARY KEY,
            account INTEGER NOT NULL REFERENCES accounts (id)
        ) STRICT, WITHOUT ROWID""",
        # For removing an account: references to it are looked up in each of these.
        "CREATE INDEX holds_of ON holds (account)",
        "CREATE INDEX draws_of ON draws (account)",
        "CREATE INDEX accounts_above ON levels (level)",
        "CREATE INDEX accounts_under ON accounts (parent)",
        *TICKETS,
    ),
    upgrades={2: ("ALTER TABLE holds ADD COLUMN under TEXT", *TICKETS)},
    additions=UNHINTED,
)

ACCOUNT_COLUMNS = ", ".join(
    f"here.{name}"
    for name in (
        *("id", "name", "parent", "opened_boot", "opened_monotonic_ns", "opened_wall_ns"),
        *(f"max_{name}" for name in CEILINGS),
        *FIGURES,
    )
)
SELECT_ID = "SELECT id, EXISTS (SELECT 1 FROM tickets) AS has_tickets FROM accounts WHERE name = ?"
SELECT_ACCOUNT = f"SELECT {ACCOUNT_COLUMNS} FROM accounts AS here WHERE here.name = ?"
SELECT_LEVELS = f"""SELECT {ACCOUNT_COLUMNS} FROM levels JOIN accounts AS here ON here.id = levels.level
    WHERE levels.account = ? ORDER BY levels.distance"""
INSERT_ACCOUNT = f"""INSERT INTO accounts
    (name, parent, opened_boot, opened_monotonic_ns, opened_wall_ns, {", ".join(f"max_{name}" for name in CEILINGS)})
    VALUES (?, ?, ?, ?, ?, {", ".join("?" for _ in CEILINGS)}) ON CONFLICT (name) DO NOTHING"""
INSERT_LEVELS = """INSERT INTO levels (account, distance, level)
    SELECT :account, 0, :account
    UNION ALL SELECT :account, distance + 1, level FROM levels WHERE account = :parent"""
LEAVE_LEVELS = """DELETE FROM levels WHERE level IN (SELECT value FROM json_each(:levels))
    AND account IN (SELECT account FROM levels WHERE level = :account)"""
JOIN_LEVELS = """INSERT INTO levels (account, distance, level)
    SELECT below.account, below.distance + 1 + above.distance, above.level FROM levels AS below, levels AS above
    WHERE below.level = :account AND above.account = :parent"""
COUNT_ABOVE = f"""UPDATE accounts SET max_steps = {UNLIMITED}, max_retries = {UNLIMITED},
    {", ".join(f"{name} = {name} + :{name}" for name in FIGURES)} WHERE id = :level"""
"""Lifts ceilings that the figures may pass; GRANT has to follow to restore them."""
SELECT_HOLD = """SELECT account, state, cost_nanos, tokens_in, tokens_out, api_calls,
    (SELECT name FROM accounts WHERE id = account) AS name, EXISTS (SELECT 1 FROM tickets) AS has_tickets,
    EXISTS (SELECT 1 FROM unhinted WHERE unhinted.key = holds.key) AS is_unhinted
    FROM holds WHERE key = ?"""
INSERT_HOLD = "INSERT OR REPLACE INTO holds VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
ROOT_OF = "(SELECT level FROM levels WHERE account = {} ORDER BY distance DESC LIMIT 1)"
SELECT_TICKET = "SELECT *, (SELECT name FROM accounts WHERE id = account) AS name FROM tickets WHERE key = ?"
SELECT_TICKETS = f"""SELECT *, (SELECT lease_ns FROM unhinted WHERE unhinted.key = tickets.key) AS unhinted_lease_ns
    FROM tickets
    WHERE {ROOT_OF.format("tickets.account")} = {ROOT_OF.format("?")} ORDER BY number"""
SELECT_QUEUED = """SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM tickets
    WHERE substr(key, 1, :size) = :prefix ORDER BY number"""
SELECT_UNDER_WAY = """WITH RECURSIVE above (key, under) AS (
        SELECT key, under FROM holds WHERE state = 'held' AND key IN (SELECT value FROM json_each(?))
        UNION SELECT holds.key, holds.under FROM above JOIN holds ON holds.key = above.under WHERE holds.state = 'held')
    SELECT key, account, cost_nanos, tokens_in, tokens_out, api_calls, under FROM holds
    WHERE state = 'held' AND (key IN (SELECT key FROM above)
        OR (under IS NOT NULL AND under IN (SELECT key FROM above)))"""
SELECT_UNHINTED = f"""SELECT * FROM unhinted
    WHERE {ROOT_OF.format("unhinted.account")} = {ROOT_OF.format("?")}
    AND EXISTS (SELECT 1 FROM holds WHERE holds.key = unhinted.key AND state = 'held')"""
INSERT_UNHINTED = "INSERT OR REPLACE INTO unhinted VALUES (?, ?, ?, ?, ?, ?)"
DELETE_UNHINTED = "DELETE FROM unhinted WHERE key = ?"
LIMITED = f"""FROM levels JOIN accounts AS here ON here.id = levels.level
    WHERE levels.account = {{}} AND here.max_cost_nanos < {UNLIMITED}"""
SELECT_LIMITED = f"SELECT EXISTS (SELECT 1 {LIMITED.format('?')})"
RAISE_DEAREST = f"""INSERT INTO dearest (account, cost_nanos) SELECT here.id, ? {LIMITED.format("?")}
    ON CONFLICT (account) DO UPDATE SET cost_nanos = max(cost_nanos, excluded.cost_nanos)"""
RENEW_UNHINTED = f"""UPDATE unhinted SET renewed_boot = ?, renewed_monotonic_ns = ?, renewed_wall_ns = ? WHERE key = ?
    AND EXISTS (SELECT 1 FROM holds WHERE holds.key = unhinted.key AND state = 'held')
    AND EXISTS (SELECT 1 {LIMITED.format("unhinted.account")}
        AND here.id NOT IN (SELECT dearest.account FROM dearest))"""
SELECT_ALL_LEVELS = f"""SELECT {ACCOUNT_COLUMNS},
    (SELECT cost_nanos FROM dearest WHERE dearest.account = here.id) AS dearest
    FROM accounts AS here WHERE here.id IN (
    SELECT level FROM levels WHERE account IN (SELECT value FROM json_each(?)))"""
INSERT_TICKET = """INSERT INTO tickets VALUES (:key, :account, :cost_nanos, :tokens_in, :tokens_out, :api_calls,
    :retry_drawn, :run, :owner, :under, :number, :turn, :passed, :state, :stop, :lease_ns, :left_ns,
    :boot, :monotonic_ns, :wall_ns)"""
UPDATE_TICKET = "UPDATE tickets SET passed = ?, state = ?, stop = ? WHERE key = ?"
RENEW_TICKET = """UPDATE tickets SET left_ns = left_ns - ?, renewed_boot = ?, renewed_monotonic_ns = ?,
    renewed_wall_ns = ? WHERE key = ?"""
DELETE_TICKET = "DELETE FROM tickets WHERE key = ?"
SELECT_OPEN_HOLDS = f"""SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM holds
    WHERE {OPEN} AND state = :state AND substr(key, 1, :size) = :prefix"""
SELECT_DRAW = "SELECT account, (SELECT name FROM accounts WHERE id = account) AS name FROM draws WHERE key = ?"
SELECT_OPENED = """SELECT name, opened_boot, opened_monotonic_ns, opened_wall_ns FROM accounts
    WHERE id > CASE WHEN :after IS NULL THEN 0 ELSE (SELECT id FROM accounts WHERE name = :after) END
    AND substr(name, 1, :size) = :prefix ORDER BY id LIMIT :limit"""
SELECT_FORGETTABLE = f"""SELECT id FROM accounts WHERE name IN (SELECT value FROM json_each(?))
    AND NOT EXISTS (SELECT 1 FROM accounts AS below WHERE below.parent = accounts.id)
    AND NOT EXISTS (SELECT 1 FROM holds WHERE {OPEN} AND state = 'held' AND account = accounts.id)
    AND NOT EXISTS (SELECT 1 FROM tickets WHERE account = accounts.id)"""
FORGET = tuple(
    f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))"
    for table, column in (("holds", "account"), ("draws", "account"), ("levels", "account"), ("accounts", "id"))
)
UPDATE_HOLD = "UPDATE holds SET state = ? WHERE key = ?"
GRANT = f"UPDATE accounts SET {', '.join(f'max_{name} = ?' for name in CEILINGS)} WHERE id = ?"

LEVELS = "id IN (SELECT level FROM levels WHERE account = :account)"
HAS_ROOM = """NOT EXISTS (
    SELECT 1 FROM levels JOIN accounts AS here ON here.id = levels.level WHERE levels.account = :account AND (
        here.committed + :least_cost > here.max_cost_nanos
        OR here.steps_taken >= here.max_steps
        OR here.tokens_committed + :least_tokens > here.max_tokens
        OR here.api_calls + :least_calls > here.max_api_calls
        OR (here.retries >= here.max_retries AND NOT :retry_drawn)
        OR max(0, CASE here.opened_boot WHEN :boot THEN :monotonic_ns - here.opened_monotonic_ns
                  ELSE :wall_ns - here.opened_wall_ns END) >= here.max_time_ns))"""
DRAW_RETRY = """UPDATE accounts SET retries = retries + 1
    WHERE id IN (SELECT level FROM levels WHERE account = :account) AND NOT EXISTS (
        SELECT 1 FROM levels JOIN accounts AS here ON here.id = levels.level
        WHERE levels.account = :account AND here.retries >= here.max_retries)"""


TICKET_FIELDS = ("key", "retry_drawn", "run", "owner", "under", "number", "turn", "passed", "state")

Change = Callable[[Hold], None]
AtTicket = Callable[[sqlite3.Connection, StoredQueue, Mapping[str, Any], Moment], T]


@cache
def _change(figures: tuple[str, ...], condition: str = LEVELS) -> str:
    """Return the UPDATE of only these figures of each level: checks and triggers run for what changes alone."""
    return f"UPDATE accounts SET {', '.join(f'{name} = {name} + :{name}' for name in figures)} WHERE {condition}"


REACHED: dict[HoldState, Change] = {
    "held": lambda held: None,
    "unresolved": accounts.leave_unresolved,
    "settled": lambda held: accounts.settle(held, 0, 0, 0, True),
    "released": accounts.release,
    "withdrawn": accounts.withdraw,
}
"""The change that brings a hold from `held` into each state."""


class SqliteLedgerStore:
    """A `LedgerStore` in a file, for budgets that outlive a process or are shared by several.

    Threads may share it, and a forked child may go on using it. It waits `busy_timeout_s` for other writers. With
    `fsync` each operation also survives a power cut, and waits for the disk. `factory` makes its connections.
    """

    poll_s = 0.05
    """Calls that wait are woken by changes in this process; changes of other processes are found by polling."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock = SYSTEM_CLOCK,
        busy_timeout_s: float = 2.0,
        fsync: bool = False,
        factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> None:
        self._clock = clock
        self._boot = boot_id()
        timeout_s = seconds_to_ns(busy_timeout_s, "busy_timeout_s") / 1e9
        self._wakeups = Wakeups()
        self._file = SqliteFile(
            path,
            SCHEMA,
            make_error=LedgerUnavailable,
            busy_timeout_s=timeout_s,
            fsync=fsync,
            factory=factory,
            is_tolerant=True,  # the tickets of a queue are read together, and must not all fail because of one
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def try_inline(self, operation: Callable[[], T]) -> T:
        """Run `operation` on the event loop; WouldBlock if it would wait for another connection or for the disk."""
        with self._file.inline():
            return operation()

    def close(self) -> None:
        """Close the file; every later operation raises LedgerUnavailable."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        """Create the account if missing; raise LedgerError if it exists with other limits or another parent."""
        ceilings = [getattr(limits, name) for name in CEILINGS]
        with self._file.writing() as connection:
            parent_id = None if parent is None else _account_id(connection, parent)[0]
            opened = connection.execute(INSERT_ACCOUNT, (account, parent_id, *self._now(), *ceilings))
            if opened.rowcount:
                connection.execute(INSERT_LEVELS, {"account": opened.lastrowid, "parent": parent_id})
                return
            known = _row(connection, SELECT_ACCOUNT, account)
            if limits_of(known) != limits or known["parent"] != parent_id:
                raise LedgerError(f"account {account!r} exists with other limits or another parent")

    def grant(self, account: str, limits: Limits) -> None:
        """Replace the ceilings of the account; what was taken stays taken."""
        with self._file.writing() as connection:
            target, has_tickets = _account_id(connection, account)
            connection.execute(GRANT, (*(getattr(limits, name) for name in CEILINGS), target))
            woken = self._advance(connection, target) if has_tickets else []
        self._wakeups.wake(woken)

    def put_under(self, account: str, parent: str) -> None:
        """Count what the account has taken, and takes from now on, at `parent` and its ancestors as well."""
        with self._file.writing() as connection:
            target = _row(connection, SELECT_ACCOUNT, account)
            parent_id, has_tickets = _account_id(connection, parent)
            own, new = (
                {row["id"]: row for row in _rows(connection, SELECT_LEVELS, id)} for id in (target["id"], parent_id)
            )
            if target["id"] in new:
                raise above_already(account, parent)
            if parent_id in own:
                return
            if target["parent"] is not None and target["parent"] not in new:
                raise under_another(account, parent, own[target["parent"]]["name"])
            for id, level in new.items():
                if id not in own:
                    connection.execute(COUNT_ABOVE, {"level": id, **{name: target[name] for name in FIGURES}})
                    connection.execute(GRANT, (*(level[f"max_{name}"] for name in CEILINGS), id))
            _move(connection, target["id"], [*own][1:], parent_id)
            woken = self._advance(connection, target["id"]) if has_tickets else []
        self._wakeups.wake(woken)

    def hold(
        self,
        key: str,
        account: str,
        ask: Amounts,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | None:
        """Take `ask` from the account and every ancestor, or return the Stop that refuses; a key is taken once."""
        with self._file.writing() as connection:
            target, has_tickets = _account_id(connection, account)
            if is_held(key, _found(connection, SELECT_HOLD, key), account, ask, unhinted_lease_s is not None):
                return None
            now = self._now()
            if not has_tickets and (unhinted_lease_s is None or not _is_limited(connection, target)):
                if not _take(connection, target, ask, retry_drawn, now):
                    return refusal_of(_rows(connection, SELECT_LEVELS, target), ask, retry_drawn, now)
                connection.execute(INSERT_HOLD, (key, target, "held", *columns_of(ask), under))
                return None
            if _found(connection, SELECT_TICKET, key) is not None:
                raise waits_already(key)
            queue = _read_queue(connection, target, now, under)
            stop = queue.enter(queue.newcomer(key, target, ask, retry_drawn, under, None, unhinted_lease_s))
            _write_queue(connection, queue, now)
        self._wakeups.wake(queue.woken)
        return stop

    def join_queue(
        self,
        key: str,
        account: str,
        ask: Amounts,
        ticket: TicketRequest,
        *,
        retry_drawn: bool = False,
        under: str | None = None,
        unhinted_lease_s: float | None = None,
    ) -> Stop | Waiting | None:
        """Take `ask` as `hold` does, or wait with a ticket if only holds of other calls are in the way."""
        checks.instance("ticket", ticket, TicketRequest)
        with self._file.writing() as connection:
            target, _ = _account_id(connection, account)
            known = _found(connection, SELECT_TICKET, key)
            if known is not None:
                check_same("ticket", key, (known["name"], amounts_of(known)), (account, ask))
            elif is_held(key, _found(connection, SELECT_HOLD, key), account, ask, unhinted_lease_s is not None):
                return None
            now = self._now()
            queue = _read_queue(connection, target, now, under)
            if known is not None and key in queue.tickets:
                answer = _renewed(connection, queue, known, now)
            else:
                newcomer = queue.newcomer(key, target, ask, retry_drawn, under, ticket, unhinted_lease_s)
                answer = queue.enter_or_join(newcomer)
            _write_queue(connection, queue, now, ticket)
        self._wakeups.wake(queue.woken)
        return answer

    def renew(self, key: str) -> Stop | Waiting | None:
        """Renew the lease of a ticket; None if the call is admitted and holds, a Stop if it is refused."""
        with self._file.reading() as connection:
            row = _found(connection, SELECT_TICKET, key)
        if row is None:
            raise no_ticket(key)
        if row["state"] == "waiting" and 2 * _since_renewed(row, self._now()) < min(row["lease_ns"], row["left_ns"]):
            return waiting_of(row)  # only read, as long as the lease lasts: other processes poll
        return self._at_ticket(key, _renewed)

    def leave_queue(self, key: str) -> None:
        """Give the ticket back; if the call was admitted meanwhile, withdraw its hold."""
        self._at_ticket(key, lambda connection, queue, row, now: queue.leave(key))

    def renew_unhinted(self, key: str) -> bool:
        """Renew the lease of an un-hinted call that holds; False if no call has to wait for it, now or later."""
        with self._file.writing() as connection:
            return connection.execute(RENEW_UNHINTED, (*self._now(), key)).rowcount > 0

    def queued(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys that have a ticket, with what each waits for."""
        with self._file.reading() as connection:
            found = connection.execute(SELECT_QUEUED, {"prefix": prefix, "size": len(prefix)})
            return {key: Amounts(*ask) for key, *ask in found}

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when a change in this process may have another answer for the key; returns what ends this."""
        return self._wakeups.add(key, wake)

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        """Replace the hold by what was used; settling a settled key again changes nothing."""
        used = actual.cost_nanos, actual.tokens_in, actual.tokens_out
        self._end(key, "settled", lambda held: accounts.settle(held, *used, succeeded), actual.cost_nanos)

    def release(self, key: str) -> None:
        """End the hold of a call that failed and cost nothing."""
        self._end(key, "released", accounts.release)

    def withdraw(self, key: str) -> None:
        """End the hold of a call that never ran."""
        self._end(key, "withdrawn", accounts.withdraw)

    def leave_unresolved(self, key: str) -> None:
        """Mark the hold of a call that is over and whose bill is unknown."""
        self._end(key, "unresolved", accounts.leave_unresolved)

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        """Count what was spent outside any hold; a key is charged once, and never refused."""
        with self._file.writing() as connection:
            target, has_tickets = _account_id(connection, account)
            known = _found(connection, SELECT_HOLD, key)
            if known is not None and known["state"] != "charged":
                raise held_not_charged(key)
            if known is not None:
                check_same("charge", key, (known["name"], amounts_of(known)), (account, actual))
                return
            if has_tickets and _found(connection, SELECT_TICKET, key) is not None:
                raise waits_already(key)
            _add(connection, target, _charged(actual))
            connection.execute(INSERT_HOLD, (key, target, "charged", *columns_of(actual), None))
            woken = self._advance(connection, target) if has_tickets else []
        self._wakeups.wake(woken)

    def draw_retry(self, account: str, key: str | None = None) -> bool:
        """Take one retry from every level; return False if one has none left. A key draws once."""
        with self._file.writing() as connection:
            target, _ = _account_id(connection, account)
            known = None if key is None else _found(connection, SELECT_DRAW, key)
            if known is not None:
                check_same("retry", str(key), (known["name"], None), (account, None))
                return True
            drawn = connection.execute(DRAW_RETRY, {"account": target}).rowcount > 0
            if drawn and key is not None:
                connection.execute("INSERT INTO draws VALUES (?, ?)", (key, target))
            return drawn

    def balance(self, account: str) -> Balance:
        """Return the figures of the account, all from one instant; raise KeyError if it does not exist."""
        with self._file.reading() as connection:
            return accounts.balance(account_of(_row(connection, SELECT_ACCOUNT, account), self._now()))

    def balances(self, names: Sequence[str]) -> Mapping[str, Balance]:
        """Return the figures of these accounts, all from one instant; those that do not exist are left out."""
        with self._file.reading() as connection:
            now = self._now()
            rows = ((name, _found(connection, SELECT_ACCOUNT, name)) for name in names)
            return {name: accounts.balance(account_of(row, now)) for name, row in rows if row is not None}

    def unresolved(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys whose bill is unknown, with what each still holds."""
        return self._in_state("unresolved", prefix)

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """Return the keys of calls under way, or whose process died before it reported how they ended."""
        return self._in_state("held", prefix)

    def aged(self, age_s: float, *, prefix: str = "", after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        """Return accounts opened at least `age_s` ago, in order of opening; `after` ends the previous page."""
        age_ns, limit = check_page(age_s, limit)
        with self._file.reading() as connection:
            page = {"after": after, "limit": limit, "prefix": prefix, "size": len(prefix)}
            opened = _rows(connection, SELECT_OPENED, page)
        return names_of_aged(opened, age_ns, self._now())

    def forget(self, names: Collection[str]) -> int:
        """Remove accounts with all their keys, and return how many; their use stays counted at their ancestors."""
        with self._file.writing() as connection:
            gone = [id for (id,) in connection.execute(SELECT_FORGETTABLE, (json.dumps([*names]),))]
            for statement in FORGET:
                connection.execute(statement, (json.dumps(gone),))
            return len(gone)

    def _in_state(self, state: HoldState, prefix: str) -> Mapping[str, Amounts]:
        with self._file.reading() as connection:
            found = connection.execute(SELECT_OPEN_HOLDS, {"state": state, "prefix": prefix, "size": len(prefix)})
            return {key: Amounts(*ask) for key, *ask in found}

    def _end(self, key: str, to: HoldState, end: Change, cost: int = 0) -> None:
        with self._file.writing() as connection:
            hold = _found(connection, SELECT_HOLD, key)
            if hold is None:
                raise no_hold(key)
            if hold["state"] == "charged":
                raise charged_not_held(key)
            if hold["state"] == to:
                return
            _add(connection, hold["account"], _changes(hold, end))
            connection.execute(UPDATE_HOLD, (to, key))
            if hold["is_unhinted"]:
                if to == "settled":
                    connection.execute(RAISE_DEAREST, (cost, hold["account"]))
                if to != "unresolved":
                    connection.execute(DELETE_UNHINTED, (key,))
            woken: list[str] = []
            if hold["has_tickets"]:
                if connection.execute(DELETE_TICKET, (key,)).rowcount:  # its call had not picked it up
                    woken.append(key)
                woken += self._advance(connection, hold["account"])
        self._wakeups.wake(woken)

    def _advance(self, connection: sqlite3.Connection, account: int) -> list[str]:
        """Admit waiting calls after a change at the account; return the keys to wake."""
        now = self._now()
        queue = _read_queue(connection, account, now)
        _write_queue(connection, queue, now)
        return queue.woken

    def _at_ticket(self, key: str, do: AtTicket[T]) -> T:
        with self._file.writing() as connection:
            row = _found(connection, SELECT_TICKET, key)
            if row is None:
                raise no_ticket(key)
            now = self._now()
            queue = _read_queue(connection, row["account"], now)
            is_there = key in queue.tickets  # else it has expired, and others may have been admitted
            answer = do(connection, queue, row, now) if is_there else None
            _write_queue(connection, queue, now)
        self._wakeups.wake(queue.woken)
        if answer is None and not is_there:
            raise no_ticket(key)
        return answer  # type: ignore[return-value]

    def _now(self) -> Moment:
        return Moment(self._boot, self._clock.monotonic_ns(), self._clock.time_ns())


def _move(connection: sqlite3.Connection, account: int, leaving: Sequence[int], parent: int) -> None:
    """Put the account and its descendants under `parent` and its ancestors, and under nothing else."""
    connection.execute(LEAVE_LEVELS, {"account": account, "levels": json.dumps(leaving)})
    connection.execute(JOIN_LEVELS, {"account": account, "parent": parent})
    connection.execute("UPDATE accounts SET parent = ? WHERE id = ?", (parent, account))


def _take(connection: sqlite3.Connection, account: int, ask: Amounts, retry_drawn: bool, now: Moment) -> bool:
    tokens = ask.tokens_in + ask.tokens_out
    empty = Account("")
    if isinstance(accounts.hold(empty, ask.cost_nanos, tokens, ask.api_calls, 0), Stop):
        return False  # more than any budget can have, and perhaps more than a column can hold
    least = {
        "least_cost": ask.cost_nanos or 1,
        "least_tokens": tokens or 1,
        "least_calls": ask.api_calls or 1,
        "retry_drawn": retry_drawn,
    }
    taken = _added(figures_of(empty))
    change = {"account": account, **taken, **least, **now._asdict()}
    return connection.execute(_change(tuple(taken), f"{LEVELS} AND {HAS_ROOM}"), change).rowcount > 0


def _add(connection: sqlite3.Connection, account: int, changes: Mapping[str, int]) -> None:
    """Add to the figures of the account and every ancestor."""
    added = _added(changes)
    if added:
        connection.execute(_change(tuple(added)), {"account": account, **added})


def _added(changes: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, more in changes.items() if more}


def _rows(connection: sqlite3.Connection, statement: str, of: str | int | Mapping[str, Any]) -> list[dict[str, Any]]:
    found = connection.execute(statement, of if isinstance(of, Mapping) else (of,))
    names = [column[0] for column in found.description]
    return [dict(zip(names, row, strict=True)) for row in found]


def _found(connection: sqlite3.Connection, statement: str, of: str) -> dict[str, Any] | None:
    rows = _rows(connection, statement, of)
    return rows[0] if rows else None


def _row(connection: sqlite3.Connection, statement: str, name: str) -> dict[str, Any]:
    row = _found(connection, statement, name)
    if row is None:
        raise no_account(name)
    return row


def _account_id(connection: sqlite3.Connection, name: str) -> tuple[int, bool]:
    """Return the id of the account, and whether any call waits."""
    row = _row(connection, SELECT_ID, name)
    return row["id"], bool(row["has_tickets"])


def _read_queue(connection: sqlite3.Connection, account: int, now: Moment, under: str | None = None) -> StoredQueue:
    """Read the tickets of the account's tree, and the holds that they and a call under `under` are part of."""
    tickets = _rows(connection, SELECT_TICKETS, account)
    for row in tickets:
        row["is_expired"] = _since_renewed(row, now) >= min(row["lease_ns"], row["left_ns"])
        lease_ns = row["unhinted_lease_ns"]
        row["unhinted_lease_s"] = None if lease_ns is None else lease_ns / 1e9
    found = _rows(connection, SELECT_UNHINTED, account)
    unhinted = [row["key"] for row in found if _since_renewed(row, now) < row["lease_ns"]]
    above = json.dumps([under, *(row["under"] for row in tickets), *unhinted])
    holds = _rows(connection, SELECT_UNDER_WAY, above)
    ids = {account, *(row["account"] for row in (*tickets, *holds))}
    return StoredQueue(now, _rows(connection, SELECT_ALL_LEVELS, json.dumps([*ids])), tickets, holds, unhinted)


def _write_queue(
    connection: sqlite3.Connection, queue: StoredQueue, now: Moment, request: TicketRequest | None = None
) -> None:
    """Write what was decided; `request` is that of a call that has joined."""
    for ticket in queue.withdrawn:
        hold = _found(connection, SELECT_HOLD, ticket.key)
        assert hold is not None, "an admitted call holds"
        _add(connection, hold["account"], _changes(hold, accounts.withdraw))
        connection.execute(UPDATE_HOLD, ("withdrawn", ticket.key))
    for ticket in queue.removed:
        if ticket.unhinted_lease_s is not None and (ticket.state != "admitted" or ticket in queue.withdrawn):
            connection.execute(DELETE_UNHINTED, (ticket.key,))
    for ticket in (*queue.admitted, *queue.entered):
        account, ask = queue.account_id(ticket), queue.taken_for(ticket)
        if not _take(connection, account, ask, ticket.retry_drawn, now):
            raise LedgerUnavailable(f"{ticket.key!r} was admitted where there is no room for it")
        connection.execute(INSERT_HOLD, (ticket.key, account, "held", *columns_of(ask), ticket.under))
        _note_unhinted(connection, ticket, account, now)
    for ticket in queue.removed:
        connection.execute(DELETE_TICKET, (ticket.key,))
    for ticket in queue.changed:
        connection.execute(UPDATE_TICKET, (ticket.passed, ticket.state, stop_text(ticket.reason), ticket.key))
    if (joined := queue.joined) is not None and request is not None:
        row = {name: getattr(joined, name) for name in TICKET_FIELDS} | now._asdict()
        row |= asdict(queue.asks[joined.key])
        row |= {"account": queue.account_id(joined), "stop": stop_text(joined.reason)}
        row["lease_ns"] = seconds_to_ns(request.lease_s, "lease_s")
        row["left_ns"] = seconds_to_ns(request.max_wait_s, "max_wait_s")
        connection.execute(INSERT_TICKET, row)
        _note_unhinted(connection, joined, row["account"], now)


def _note_unhinted(connection: sqlite3.Connection, ticket: Ticket, account: int, now: Moment) -> None:
    if ticket.unhinted_lease_s is not None:
        lease_ns = seconds_to_ns(ticket.unhinted_lease_s, "unhinted_lease_s")
        connection.execute(INSERT_UNHINTED, (ticket.key, account, lease_ns, *now))


def _is_limited(connection: sqlite3.Connection, account: int) -> bool:
    """Whether a level of the account has a ceiling of money."""
    ((is_limited,),) = connection.execute(SELECT_LIMITED, (account,))
    return bool(is_limited)


def _renewed(
    connection: sqlite3.Connection, queue: StoredQueue, row: Mapping[str, Any], now: Moment
) -> Stop | Waiting | None:
    answer = queue.answer(row["key"])
    if isinstance(answer, Waiting):
        connection.execute(RENEW_TICKET, (_since_renewed(row, now), *now, row["key"]))
    return answer


def _since_renewed(row: Mapping[str, Any], now: Moment) -> int:
    return now.since_ns(Moment(row["renewed_boot"], row["renewed_monotonic_ns"], row["renewed_wall_ns"]))


def _charged(actual: Amounts) -> dict[str, int]:
    """Return what a charge adds to each figure of each level."""
    empty = Account("")
    accounts.charge(empty, *columns_of(actual))
    return figures_of(empty)


def _changes(hold: Mapping[str, Any], end: Change) -> dict[str, int]:
    """Return what ending the hold adds to each figure of each level; LedgerError if its state does not allow it."""
    empty = Account("")
    held = Hold(empty, hold["cost_nanos"], hold["tokens_in"] + hold["tokens_out"], hold["api_calls"])
    REACHED[hold["state"]](held)
    before = figures_of(empty)
    end(held)
    return {name: after - before[name] for name, after in figures_of(empty).items()}
