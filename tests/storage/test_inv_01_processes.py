"""INV 1 across processes: spent + held never passes the ceiling, by an invoice, while processes are killed anywhere."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts
from penstock.containment.limits import Limits
from penstock.storage import SqliteLedgerStore
from tests.soak import scaled

pytestmark = [pytest.mark.reliability]

PROCESSES = 4
ROUNDS = scaled(5, soak=40)
CALLS = 300
WORST = 100
STATEMENTS_PER_CALL = 11
PATIENCE_S = 60.0
"""A noisy machine may hold a process up for long; this test is about money, not about time."""


class Doomed(sqlite3.Connection):
    """Kills its process at the statement number `at`."""

    at = 0
    seen = 0

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        Doomed.seen += 1
        if Doomed.seen == Doomed.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().execute(*statement)


class Invoice:
    """What the provider bills: a line per call in a file, written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def bill(self, nanos: int) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{nanos}\n".encode())
        os.close(descriptor)

    def total(self) -> int:
        return sum(map(int, self.path.read_text().split()))


def work(path: Path, invoice: Invoice, name: str, account: str, ceiling: int, rng: random.Random) -> int:
    """Make `CALLS` calls, a third of which fail; the number of refusals. It looks at the budget while each is held."""
    refused = 0
    with SqliteLedgerStore(path, busy_timeout_s=PATIENCE_S, factory=Doomed) as store:
        for number in range(CALLS):
            key = f"{name}:{number}"
            if store.hold(key, account, Amounts(WORST, api_calls=1)) is not None:
                refused += 1
                continue
            now = store.balance("run")
            assert now.spent_nanos + now.held_nanos + now.unresolved_nanos <= ceiling
            draw = rng.random()
            if draw < 0.1:
                store.release(key)
            elif draw < 0.2:
                store.withdraw(key)
            else:
                cost = rng.randint(1, WORST)
                invoice.bill(cost)
                if draw < 0.3:
                    store.leave_unresolved(key)
                else:
                    store.settle(key, Amounts(cost), succeeded=draw > 0.4)
    return refused


def start(path: Path, invoice: Invoice, slot: int, turn: int, ceiling: int, seed: int) -> int:
    """A process of its own; one in three dies before some statement of its work, one in three at any moment of it."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        rng = random.Random(f"{seed} {slot} {turn}")
        Doomed.seen, Doomed.at = 0, 0
        if (slot + turn) % 3 == 1:
            Doomed.at = rng.randint(10, CALLS * STATEMENTS_PER_CALL)
        elif (slot + turn) % 3 == 2:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process as SIGKILL does, also inside of SQLite
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.2))
        account = "narrow" if slot % 2 else "wide"
        refused = work(path, invoice, f"{slot}:{turn}", account, ceiling, rng)
        status = 1 if refused else 0
    finally:
        os._exit(status)


def run_all(path: Path, invoice: Invoice, ceiling: int, seed: int) -> list[int]:
    """How each process ended, after `ROUNDS` of them; what the dead ones held is left unresolved in between."""
    ends: list[int] = []
    for turn in range(ROUNDS):
        pids = [start(path, invoice, slot, turn, ceiling, seed) for slot in range(PROCESSES)]
        ends += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        with SqliteLedgerStore(path, busy_timeout_s=PATIENCE_S) as store:
            for key in store.held():
                store.leave_unresolved(key)
    return ends


@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("share", [0.08, 1.0], ids=["ceiling is hit", "ceiling is never hit"])
def test_four_processes_that_are_killed_anywhere_stay_inside_one_budget(share: float, tmp_path: Path) -> None:
    path, invoice = tmp_path / "ledger.db", Invoice(tmp_path / "invoice")
    ceiling = round(PROCESSES * ROUNDS * CALLS * WORST * share)
    with SqliteLedgerStore(path) as store:
        store.open_account("run", Limits(cost_nanos=ceiling))
        store.open_account("narrow", Limits(cost_nanos=ceiling // 2 if share < 1 else ceiling), parent="run")
        store.open_account("wide", Limits(), parent="run")
    ends = run_all(path, invoice, ceiling, seed=1)
    assert set(ends) <= {0, 1, -signal.SIGKILL, -signal.SIGALRM}, "a process found the budget passed, or an error"
    assert -signal.SIGKILL in ends
    assert (1 in ends) == (share < 1), "refused where there was room, or admitted where there was none"
    with SqliteLedgerStore(path) as store:
        run, narrow, wide = (store.balance(name) for name in ("run", "narrow", "wide"))
        assert (run.held_nanos, run.steps_open, dict(store.held())) == (0, 0, {})
        assert invoice.total() <= run.spent_nanos + run.unresolved_nanos <= ceiling
        assert run.unresolved_nanos == WORST * len(store.unresolved())
        for figure in ("spent_nanos", "unresolved_nanos", "steps", "attempts", "api_calls"):
            assert getattr(run, figure) == getattr(narrow, figure) + getattr(wide, figure), figure
        assert narrow.spent_nanos + narrow.unresolved_nanos <= narrow.limits.cost_nanos


def put_under_while_it_is_used(path: Path, slot: int) -> None:
    """Put the accounts of two runs under the day, and spend from them and below them, before and after."""
    with SqliteLedgerStore(path, busy_timeout_s=PATIENCE_S) as store:
        for number in range(CALLS // 10):
            run, key = f"run {number % 2}", f"{slot}:{number}"
            if number == 2 + slot:
                store.put_under("run 0", "day")
                store.put_under("run 1", "owner")
            store.open_account(f"{run} step {number}", Limits(), parent=run)
            store.hold(key, f"{run} step {number}" if number % 3 else run, Amounts(WORST, api_calls=1))
            if number % 4 == 1:
                store.settle(key, Amounts(WORST // 2))
            elif number % 4 == 2:
                store.leave_unresolved(key)


@pytest.mark.requirement("X-1")
def test_accounts_that_processes_put_under_a_budget_while_others_use_them_leave_exact_figures(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with SqliteLedgerStore(path) as store:
        for name, parent in (("day", None), ("owner", "day"), ("run 0", None), ("run 1", None)):
            store.open_account(name, Limits(), parent=parent)
    pids = []
    for slot in range(PROCESSES):
        pid = os.fork()
        if not pid:
            status = 99
            try:
                put_under_while_it_is_used(path, slot)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * PROCESSES
    with SqliteLedgerStore(path) as store:
        day, owner, *runs = (store.balance(name) for name in ("day", "owner", "run 0", "run 1"))
        for figure in ("spent_nanos", "held_nanos", "unresolved_nanos", "steps", "attempts", "api_calls"):
            assert getattr(day, figure) == sum(getattr(run, figure) for run in runs), figure
            assert getattr(owner, figure) == getattr(runs[1], figure), figure
        assert day.attempts == PROCESSES * (CALLS // 10)
