"""Budgets in a SQLite file, shared by every process that opens it.

Each act is one transaction with one conditional UPDATE over the account and all of its ancestors: it changes every
level, or none if one of them has no room. The arithmetic itself is that of `containment.accounts`: what an act changes
is worked out on an empty account and added to each level, and what a refusal says is worked out on the levels as they
were read. Checks in the tables stand behind it, so that figures that cannot be are never recorded.

A process that dies leaves its holds behind, taken: nobody knows whether their calls had left. `held` lists them, and
whoever knows that the process is gone leaves them unresolved, settles or releases them.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.containment import accounts
from penstock.containment.accounts import FIGURES, Account, Balance, Hold, HoldState
from penstock.containment.ledger import (
    Amounts,
    above_already,
    charged_not_held,
    check_held,
    check_page,
    check_same,
    held_not_charged,
    no_account,
    no_hold,
    under_another,
)
from penstock.containment.limits import UNLIMITED, Limits, seconds_to_ns
from penstock.errors import LedgerError, LedgerUnavailable
from penstock.stops import Stop
from penstock.storage.ledger_rows import (
    CEILINGS,
    Moment,
    account_of,
    asked_of,
    boot_id,
    columns_of,
    figures_of,
    limits_of,
    names_of_aged,
    refusal_of,
)
from penstock.storage.sqlite_file import Schema, SqliteFile

T = TypeVar("T")

OPEN = "state IN ('held', 'unresolved')"
"""As the index has it: SQLite uses the index for what says the same in the same words."""

SCHEMA = Schema(
    application_id=int.from_bytes(b"Pnst"),
    version=2,
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
            api_calls INTEGER NOT NULL
        ) STRICT, WITHOUT ROWID""",
        f"CREATE INDEX open_holds ON holds (state) WHERE {OPEN}",
        # No check: ceilings may be lowered below what was taken. It is the taking that may not pass them.
        """CREATE TRIGGER within_ceilings BEFORE UPDATE OF steps_taken, retries ON accounts
        WHEN NEW.steps_taken > max(OLD.steps_taken, NEW.max_steps) OR NEW.retries > max(OLD.retries, NEW.max_retries)
        BEGIN SELECT RAISE(ABORT, 'more steps or retries than the account has'); END""",
        """CREATE TABLE draws (
            key TEXT NOT NULL PRIMARY KEY,
            account INTEGER NOT NULL REFERENCES accounts (id)
        ) STRICT, WITHOUT ROWID""",
        # For forgetting an account: who refers to it is looked for in each of these.
        "CREATE INDEX holds_of ON holds (account)",
        "CREATE INDEX draws_of ON draws (account)",
        "CREATE INDEX accounts_above ON levels (level)",
        "CREATE INDEX accounts_under ON accounts (parent)",
    ),
)

ACCOUNT_COLUMNS = ", ".join(
    f"here.{name}"
    for name in (
        *("id", "name", "parent", "opened_boot", "opened_monotonic_ns", "opened_wall_ns"),
        *(f"max_{name}" for name in CEILINGS),
        *FIGURES,
    )
)
SELECT_ID = "SELECT id FROM accounts WHERE name = ?"
SELECT_ACCOUNT = f"SELECT {ACCOUNT_COLUMNS} FROM accounts AS here WHERE here.name = ?"
SELECT_LEVELS = f"""SELECT {ACCOUNT_COLUMNS} FROM levels JOIN accounts AS here ON here.id = levels.level
    WHERE levels.account = ? ORDER BY levels.distance"""
INSERT_ACCOUNT = f"""INSERT INTO accounts
    (name, parent, opened_boot, opened_monotonic_ns, opened_wall_ns, {", ".join(f"max_{name}" for name in CEILINGS)})
    VALUES (?, ?, ?, ?, ?, {", ".join("?" for _ in CEILINGS)})"""
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
"""It may pass a ceiling, and is to be followed by a grant of what the account may use."""
SELECT_HOLD = """SELECT account, state, cost_nanos, tokens_in, tokens_out, api_calls,
    (SELECT name FROM accounts WHERE id = account) AS name FROM holds WHERE key = ?"""
INSERT_HOLD = "INSERT OR REPLACE INTO holds VALUES (?, ?, ?, ?, ?, ?, ?)"
SELECT_OPEN_HOLDS = f"""SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM holds
    WHERE {OPEN} AND state = :state AND substr(key, 1, :size) = :prefix"""
SELECT_DRAW = "SELECT account, (SELECT name FROM accounts WHERE id = account) AS name FROM draws WHERE key = ?"
SELECT_OPENED = """SELECT name, opened_boot, opened_monotonic_ns, opened_wall_ns FROM accounts
    WHERE id > CASE WHEN :after IS NULL THEN 0 ELSE (SELECT id FROM accounts WHERE name = :after) END
    ORDER BY id LIMIT :limit"""
SELECT_FORGETTABLE = f"""SELECT id FROM accounts WHERE name IN (SELECT value FROM json_each(?))
    AND NOT EXISTS (SELECT 1 FROM accounts AS below WHERE below.parent = accounts.id)
    AND NOT EXISTS (SELECT 1 FROM holds WHERE {OPEN} AND state = 'held' AND account = accounts.id)"""
FORGET = tuple(
    f"DELETE FROM {table} WHERE {column} IN (SELECT value FROM json_each(?))"
    for table, column in (("holds", "account"), ("draws", "account"), ("levels", "account"), ("accounts", "id"))
)
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


Change = Callable[[Hold], None]


@cache
def _change(figures: tuple[str, ...], condition: str = LEVELS) -> str:
    """The statement that adds to these figures of each level: checks and triggers are asked of what changes alone."""
    return f"UPDATE accounts SET {', '.join(f'{name} = {name} + :{name}' for name in figures)} WHERE {condition}"


REACHED: dict[HoldState, Change] = {
    "held": lambda held: None,
    "unresolved": accounts.leave_unresolved,
    "settled": lambda held: accounts.settle(held, 0, 0, 0, True),
    "released": accounts.release,
    "withdrawn": accounts.withdraw,
}
"""How a hold that is held comes into each state."""


class SqliteLedgerStore:
    """A `LedgerStore` in a file, for budgets that outlive a process or are shared by several.

    Threads may share it, and a forked child may go on using it. It waits `busy_timeout_s` for other writers. With
    `fsync` each act also survives a power cut, and waits for the disk. `factory` makes its connections.
    """

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
        patience_s = seconds_to_ns(busy_timeout_s, "busy_timeout_s") / 1e9
        self._file = SqliteFile(
            path, SCHEMA, fault=LedgerUnavailable, busy_timeout_s=patience_s, fsync=fsync, factory=factory
        )

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    def at_once(self, ask: Callable[[], T]) -> T:
        """What `ask` makes of this store on an event loop; WouldWait if others are in the way, or the disk would be."""
        with self._file.without_waiting():
            return ask()

    def close(self) -> None:
        """Give the file back; every act after that raises LedgerUnavailable."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open_account(self, account: str, limits: Limits, *, parent: str | None = None) -> None:
        """Make the account if it is not there; LedgerError if it is there with other limits or another parent."""
        ceilings = [getattr(limits, name) for name in CEILINGS]
        with self._file.writing() as connection:
            above = None if parent is None else _account_id(connection, parent)
            known = _found(connection, SELECT_ACCOUNT, account)
            if known is None:
                new = connection.execute(INSERT_ACCOUNT, (account, above, *self._now(), *ceilings)).lastrowid
                connection.execute(INSERT_LEVELS, {"account": new, "parent": above})
            elif limits_of(known) != limits or known["parent"] != above:
                raise LedgerError(f"account {account!r} exists with other limits or another parent")

    def grant(self, account: str, limits: Limits) -> None:
        """Replace the ceilings of the account; what was taken stays taken."""
        with self._file.writing() as connection:
            target = _account_id(connection, account)
            connection.execute(GRANT, (*(getattr(limits, name) for name in CEILINGS), target))

    def put_under(self, account: str, parent: str) -> None:
        """Count what the account has taken, and takes from now on, at `parent` and all above it as well."""
        with self._file.writing() as connection:
            target, above = _row(connection, SELECT_ACCOUNT, account), _account_id(connection, parent)
            own, new = (
                {row["id"]: row for row in _rows(connection, SELECT_LEVELS, id)} for id in (target["id"], above)
            )
            if target["id"] in new:
                raise above_already(account, parent)
            if above in own:
                return
            if target["parent"] is not None and target["parent"] not in new:
                raise under_another(account, parent, own[target["parent"]]["name"])
            for id, level in new.items():
                if id not in own:
                    connection.execute(COUNT_ABOVE, {"level": id, **{name: target[name] for name in FIGURES}})
                    connection.execute(GRANT, (*(level[f"max_{name}"] for name in CEILINGS), id))
            _move(connection, target["id"], [*own][1:], above)

    def hold(self, key: str, account: str, ask: Amounts, *, retry_drawn: bool = False) -> Stop | None:
        """Take `ask` from the account and every ancestor, or say what refuses; a key is taken once."""
        with self._file.writing() as connection:
            target = _account_id(connection, account)
            known = _found(connection, SELECT_HOLD, key)
            if known is not None and known["state"] == "charged":
                raise charged_not_held(key)
            if known is not None and known["state"] != "withdrawn":
                check_held(key, known["state"])
                check_same("hold", key, (known["name"], asked_of(known)), (account, ask))
                return None
            now = self._now()
            if not _take(connection, target, ask, retry_drawn, now):
                return refusal_of(_rows(connection, SELECT_LEVELS, target), ask, retry_drawn, now)
            connection.execute(INSERT_HOLD, (key, target, "held", *columns_of(ask)))
            return None

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        """Replace the hold by what was used; settling a settled key again changes nothing."""
        used = actual.cost_nanos, actual.tokens_in, actual.tokens_out
        self._end(key, "settled", lambda held: accounts.settle(held, *used, succeeded))

    def release(self, key: str) -> None:
        """The call failed and cost nothing."""
        self._end(key, "released", accounts.release)

    def withdraw(self, key: str) -> None:
        """The call never ran."""
        self._end(key, "withdrawn", accounts.withdraw)

    def leave_unresolved(self, key: str) -> None:
        """The call is over and its bill is unknown."""
        self._end(key, "unresolved", accounts.leave_unresolved)

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        """Count what was spent outside any hold; a key is charged once, and never refused."""
        with self._file.writing() as connection:
            target = _account_id(connection, account)
            known = _found(connection, SELECT_HOLD, key)
            if known is not None and known["state"] != "charged":
                raise held_not_charged(key)
            if known is not None:
                check_same("charge", key, (known["name"], asked_of(known)), (account, actual))
                return
            _add(connection, target, _charged(actual))
            connection.execute(INSERT_HOLD, (key, target, "charged", *columns_of(actual)))

    def draw_retry(self, account: str, key: str | None = None) -> bool:
        """Take one retry from every level; False if one has none left. A key draws once."""
        with self._file.writing() as connection:
            target = _account_id(connection, account)
            known = None if key is None else _found(connection, SELECT_DRAW, key)
            if known is not None:
                check_same("retry", str(key), (known["name"], None), (account, None))
                return True
            drawn = connection.execute(DRAW_RETRY, {"account": target}).rowcount > 0
            if drawn and key is not None:
                connection.execute("INSERT INTO draws VALUES (?, ?)", (key, target))
            return drawn

    def balance(self, account: str) -> Balance:
        """The figures of the account, all of one instant; KeyError if there is none of that name."""
        with self._file.reading() as connection:
            return accounts.balance(account_of(_row(connection, SELECT_ACCOUNT, account), self._now()))

    def unresolved(self) -> Mapping[str, Amounts]:
        """The keys whose bill is unknown, with what each still holds."""
        return self._in_state("unresolved")

    def held(self, prefix: str = "") -> Mapping[str, Amounts]:
        """The keys of calls that are under way, or whose process died before it said how they ended."""
        return self._in_state("held", prefix)

    def aged(self, age_s: float, *, after: str | None = None, limit: int = 1_000) -> Sequence[str]:
        """Accounts that were opened at least so long ago, in the order they were opened in; `after` the last before."""
        age_ns, limit = check_page(age_s, limit)
        with self._file.reading() as connection:
            opened = _rows(connection, SELECT_OPENED, {"after": after, "limit": limit})
        return names_of_aged(opened, age_ns, self._now())

    def forget(self, names: Collection[str]) -> int:
        """Remove accounts, and every key that was theirs; how many. What they used stays counted above them."""
        with self._file.writing() as connection:
            gone = [id for (id,) in connection.execute(SELECT_FORGETTABLE, (json.dumps([*names]),))]
            for statement in FORGET:
                connection.execute(statement, (json.dumps(gone),))
            return len(gone)

    def _in_state(self, state: HoldState, prefix: str = "") -> Mapping[str, Amounts]:
        with self._file.reading() as connection:
            found = connection.execute(SELECT_OPEN_HOLDS, {"state": state, "prefix": prefix, "size": len(prefix)})
            return {key: Amounts(*ask) for key, *ask in found}

    def _end(self, key: str, to: HoldState, end: Change) -> None:
        with self._file.writing() as connection:
            hold = _found(connection, SELECT_HOLD, key)
            if hold is None:
                raise no_hold(key)
            if hold["state"] == "charged":
                raise charged_not_held(key)
            if hold["state"] == to:
                return
            _add(connection, hold["account"], _changes(hold, end))
            connection.execute("UPDATE holds SET state = ? WHERE key = ?", (to, key))

    def _now(self) -> Moment:
        return Moment(self._boot, self._clock.monotonic_ns(), self._clock.time_ns())


def _move(connection: sqlite3.Connection, account: int, leaving: Sequence[int], parent: int) -> None:
    """Put the account, and all under it, under `parent` and what is above that, and under nothing else."""
    connection.execute(LEAVE_LEVELS, {"account": account, "levels": json.dumps(leaving)})
    connection.execute(JOIN_LEVELS, {"account": account, "parent": parent})
    connection.execute("UPDATE accounts SET parent = ? WHERE id = ?", (parent, account))


def _take(connection: sqlite3.Connection, account: int, ask: Amounts, retry_drawn: bool, now: Moment) -> bool:
    tokens = ask.tokens_in + ask.tokens_out
    empty = Account("")
    if isinstance(accounts.hold(empty, ask.cost_nanos, tokens, ask.api_calls, 0), Stop):
        return False  # more than any budget can have, and perhaps more than a column can
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


def _account_id(connection: sqlite3.Connection, name: str) -> int:
    number = _row(connection, SELECT_ID, name)["id"]
    assert isinstance(number, int)
    return number


def _charged(actual: Amounts) -> dict[str, int]:
    """What a charge adds to each figure of each level."""
    empty = Account("")
    accounts.charge(empty, *columns_of(actual))
    return figures_of(empty)


def _changes(hold: Mapping[str, Any], end: Change) -> dict[str, int]:
    """What ending the hold adds to each figure of each level; LedgerError if it cannot end so from where it is."""
    empty = Account("")
    held = Hold(empty, hold["cost_nanos"], hold["tokens_in"] + hold["tokens_out"], hold["api_calls"])
    REACHED[hold["state"]](held)
    before = figures_of(empty)
    end(held)
    return {name: after - before[name] for name, after in figures_of(empty).items()}
