"""INV 1 beyond money: steps, calls of models, tokens and retries that four processes share, some of which are killed.

Processes take from one account until it refuses; what was taken is a line in a file, written before it is settled. At
no instant is more taken than there is, what a dead process had taken is not taken by another, and in the end nothing
is left that fits.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.accounts import Balance
from penstock.containment.ledger import Amounts, LedgerStore
from penstock.containment.limits import Limits
from penstock.storage import SqliteLedgerStore
from penstock.storage.postgres.ledger import PostgresLedgerStore
from tests.soak import scaled
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server

__all__ = ["dsn", "ledger_database", "postgres_server"]

pytestmark = pytest.mark.reliability

PROCESSES = 4
ROUNDS = 3
CALLS = scaled(600, soak=6_000)
SHARE = CALLS // (PROCESSES * ROUNDS)
"""What a process takes at most, but in the last round."""
TOKENS = 7
REST = 3
"""Tokens that are left in the end, too few for a call."""
PATIENCE_S = 60.0

ALL = CALLS * TOKENS + REST

MakeStore = Callable[[], Any]
Dimension = tuple[Limits, int, int, Callable[[Balance], int]]

DIMENSIONS: dict[str, Dimension] = {
    "steps": (Limits(steps=CALLS), CALLS, 1, lambda now: now.steps + now.steps_open),
    "api calls": (Limits(api_calls=CALLS), CALLS, 1, lambda now: now.api_calls),
    "tokens": (Limits(tokens=ALL), ALL, TOKENS, lambda now: now.tokens_in + now.tokens_out + now.tokens_held),
    "retries": (Limits(retries=CALLS), CALLS, 1, lambda now: now.retries),
}
"""The limit, as limits and as a number; what one call takes of it; what is taken of it at some moment."""


class Taker:
    """One process: it takes, notes that it has taken, and settles; and is gone in the middle of one of them."""

    def __init__(self, store: LedgerStore, dimension: str, notes: Path, dies_at: int | None) -> None:
        self._store = store
        self._is_retry = dimension == "retries"
        _, self._limit, _, self._taken = DIMENSIONS[dimension]
        self._notes = notes
        self._dies_at = dies_at

    def take_all(self, name: str, most: int) -> None:
        for number in range(most):
            if not self.take(f"{name}:{number}", dies=number == self._dies_at):
                return
            assert self._taken(self._store.balance("run")) <= self._limit

    def take(self, key: str, *, dies: bool = False) -> bool:
        """One call, or one retry; False if there is none left."""
        if self._is_retry:
            is_taken = self._store.draw_retry("run", key)
        else:
            is_taken = self._store.hold(key, "run", Amounts(tokens_in=TOKENS, api_calls=1)) is None
        if is_taken:
            file = os.open(self._notes, os.O_WRONLY | os.O_APPEND)
            os.write(file, f"{key}\n".encode())
            os.close(file)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if is_taken and not self._is_retry:
            self._store.settle(key, Amounts(tokens_in=TOKENS))
        return is_taken


def start(make: MakeStore, dimension: str, notes: Path, slot: int, turn: int) -> int:
    """A process of its own; in all rounds but the last, half of them are killed."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        name, is_last = f"{slot}:{turn}", turn == ROUNDS - 1
        dies_at = random.Random(name).randrange(SHARE) if slot % 2 and not is_last else None
        with make() as store:
            Taker(store, dimension, notes, dies_at).take_all(name, 2 * CALLS if is_last else SHARE)
        status = 0
    finally:
        os._exit(status)


def attack(make: MakeStore, dimension: str, notes: Path) -> None:
    limits, limit, each, taken = DIMENSIONS[dimension]
    notes.touch()
    with make() as store:
        store.open_account("run", limits)
    ends: list[int] = []
    for turn in range(ROUNDS):
        pids = [start(make, dimension, notes, slot, turn) for slot in range(PROCESSES)]
        ends += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        with make() as store:
            for key in store.held():  # of those that are gone
                store.leave_unresolved(key)
    assert sorted(ends) == [-signal.SIGKILL] * 4 + [0] * 8, "a process found something wrong"
    with make() as store:
        now, keys = store.balance("run"), notes.read_text().split()
        given_back = len(store.unresolved()) if dimension == "steps" else 0  # a step is one that has succeeded
        assert len(keys) == len(set(keys))
        assert (len(keys) - given_back) * each == taken(now)
        assert taken(now) <= limit < taken(now) + each
        assert not Taker(store, dimension, notes, None).take("one more")


@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_four_processes_on_one_file_take_as_much_as_there_is_and_no_more(dimension: str, tmp_path: Path) -> None:
    attack(lambda: SqliteLedgerStore(tmp_path / "l.db", busy_timeout_s=PATIENCE_S), dimension, tmp_path / "notes")


@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_four_processes_on_one_server_take_as_much_as_there_is_and_no_more(
    dimension: str, dsn: str, tmp_path: Path
) -> None:
    attack(lambda: PostgresLedgerStore(dsn, timeout_s=PATIENCE_S), dimension, tmp_path / "notes")
