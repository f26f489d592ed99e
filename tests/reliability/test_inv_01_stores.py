"""INV 1 at shared budgets: runs in several processes, by an invoice, with errors, cancels and kills, on every store.

Each process makes contained calls that a provider bills: a line in a file, written whole before the call can go on. At
no instant is more committed than the ceiling; in the end everything billed is spent or unresolved, nothing is held, and
what is left can be spent to the last unit.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, LedgerStore
from penstock.containment.limits import Limits
from penstock.errors import CancelledError, Halted
from penstock.runtime.billing.usage import Reported
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.shared import SharedBudget
from penstock.runtime.run import RunSettings
from penstock.stops import StopReason
from penstock.storage import SqliteLedgerStore
from penstock.storage.postgres.ledger import PostgresLedgerStore
from tests.soak import scaled
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server

__all__ = ["dsn", "ledger_database", "postgres_server"]

pytestmark = [pytest.mark.reliability]

PROCESSES = 4
ROUNDS = 3
LANES = 4
"""Calls that one process makes at the same time."""
CALLS = scaled(960, soak=10_000) // (PROCESSES * ROUNDS)
WORST = 100
UNIT = 1_000_000
"""Nano-dollars in the unit of the amounts here, a tenth of a cent."""
PATIENCE_S = 60.0
"""A noisy machine may hold a process up for long; this test is about money, not about time."""

SETTINGS = RunSettings(max_wait_s=0.05)
"""What a killed process held stays held until the round is over: it is of no use to wait for that."""

MakeStore = Callable[[], Any]


class Invoice:
    """What the provider bills: a line per call, written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def bill(self, units: int) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, f"{units}\n".encode())
        os.close(descriptor)

    def total(self) -> int:
        return UNIT * sum(map(int, self.path.read_text().split()))


class Billed(Exception):
    """A failure that says what it cost."""

    def __init__(self, units: int) -> None:
        super().__init__("failed, and billed")
        self.cost_usd = usd(units)


def usd(units: int) -> Decimal:
    return Decimal(units) / 1_000


class Provider:
    """Bills every call, fails three times in ten, and is sometimes cancelled while it works."""

    def __init__(self, invoice: Invoice, rng: random.Random, dies_at: int | None) -> None:
        self.invoice = invoice
        self.rng = rng
        self.dies_at = dies_at
        """The bill after which the process is gone before it can tell anybody."""
        self.bills = 0

    async def answer(self) -> Reported[str]:
        units, fate = self.rng.randint(1, WORST), self.rng.random()
        if fate < 0.1:
            raise ConnectionRefusedError("never reached")
        await asyncio.sleep(self.rng.choice([0, 0, 0.001]))
        self.invoice.bill(units)
        self.bills += 1
        if self.bills == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self.rng.choice([0, 0, 0.001]))
        if fate < 0.2:
            raise ConnectionResetError("billed an unknown amount")
        if fate < 0.3:
            raise Billed(units)
        return Reported.of("text", cost_usd=usd(units))


async def calls_of_a_lane(run: ExecutionContext, provider: Provider, calls: int) -> int:
    """How many of the calls the budget refused."""
    refused, rng = 0, provider.rng
    for _ in range(calls):
        asking = asyncio.ensure_future(run.allm(provider.answer, cost_hint_usd=usd(WORST)))
        if rng.random() < 0.2:
            for _ in range(rng.randint(0, 6)):
                await asyncio.sleep(rng.choice([0, 0, 0.001]))
            asking.cancel()
        try:
            await asking
        except Halted as error:
            if error.stop_reason is not StopReason.BUDGET_EXCEEDED:
                raise
            refused += 1
        except (asyncio.CancelledError, CancelledError, ConnectionError, Billed):
            continue
    return refused


async def work(make: MakeStore, provider: Provider, name: str) -> int:
    """One process's part; 0, or 1 if something was refused, or 3 if something stays held."""
    with make() as store:
        shared = SharedBudget(store, "run", prefix=f"{name}/1")
        with ExecutionContext(shared_budget=shared, settings=SETTINGS) as run:
            lanes = [calls_of_a_lane(run, provider, CALLS // LANES) for _ in range(LANES)]
            refused = sum(await asyncio.gather(*lanes))
        for _ in range(10_000):
            if await shared.aflush() == 0 and not store.held(f"{name}/"):
                return 1 if refused else 0
            await asyncio.sleep(0.001)
    return 3


def start(make: MakeStore, invoice: Invoice, slot: int, turn: int, kills: bool) -> int:
    """A process of its own; a quarter of them is killed at some moment, and another one just after a bill."""
    pid = os.fork()
    if pid:
        return pid
    status = 99
    try:
        rng = random.Random(f"{slot} {turn}")
        if kills and (slot + turn) % 4 == 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a process as SIGKILL does, at any moment
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.02, 0.6))
        dies_at = rng.randint(1, CALLS // 10) if kills and (slot + turn) % 4 == 3 else None
        status = asyncio.run(work(make, Provider(invoice, rng, dies_at), f"{slot}:{turn}"))
    finally:
        os._exit(status)


def watched(store: LedgerStore, pids: list[int], ceiling: int) -> list[int]:
    """How each process ended; looks at the budget all the while."""
    ends: dict[int, int] = {}
    while len(ends) < len(pids):
        now = store.balance("run")
        assert now.spent_nanos + now.held_nanos + now.unresolved_nanos <= ceiling
        for pid in pids:
            if pid not in ends and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                ends[pid] = os.waitstatus_to_exitcode(ended[1])
    return list(ends.values())


def attack(make: MakeStore, invoice: Invoice, ceiling: int, *, kills: bool) -> None:
    with make() as store:
        store.open_account("all", Limits(cost_nanos=ceiling))
        store.open_account("run", Limits(cost_nanos=ceiling), parent="all")
    ends: list[int] = []
    for turn in range(ROUNDS):
        pids = [start(make, invoice, slot, turn, kills) for slot in range(PROCESSES)]
        with make() as store:
            try:
                ends += watched(store, pids, ceiling)
            finally:
                for pid in pids:
                    with suppress(ProcessLookupError, ChildProcessError):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
            for slot in range(PROCESSES):
                SharedBudget(store, "run", prefix=f"{slot}:{turn}/2").recover()
    assert set(ends) <= {0, 1, -signal.SIGKILL, -signal.SIGALRM}, "a process found something wrong"
    assert (-signal.SIGKILL in ends) == kills
    assert (1 in ends) == (ceiling < ALL), "refused where there was room, or admitted where there was none"
    with make() as store:
        judge(store, invoice, ceiling)


def judge(store: LedgerStore, invoice: Invoice, ceiling: int) -> None:
    now = store.balance("run")
    assert (now.held_nanos, now.steps_open, dict(store.held())) == (0, 0, {})
    assert invoice.total() <= now.spent_nanos + now.unresolved_nanos <= ceiling
    assert now.unresolved_nanos == WORST * UNIT * len(store.unresolved())
    left = ceiling - now.spent_nanos - now.unresolved_nanos
    if left:
        assert store.hold("the rest", "run", Amounts(left)) is None, "refused what there is room for"
    assert store.hold("one too much", "run", Amounts(1)) is not None


CEILINGS = {"ceiling is hit": 0.15, "ceiling is far": 2.0}
ALL = PROCESSES * ROUNDS * CALLS * WORST * UNIT


@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("share", CEILINGS.values(), ids=CEILINGS)
def test_runs_in_four_processes_on_one_file_stay_inside_one_budget(share: float, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    attack(
        lambda: SqliteLedgerStore(path, busy_timeout_s=PATIENCE_S),
        Invoice(tmp_path / "invoice"),
        round(ALL * share),
        kills=True,
    )


@pytest.mark.requirement("X-1", "P-B4")
@pytest.mark.parametrize("share", CEILINGS.values(), ids=CEILINGS)
def test_runs_in_four_processes_on_one_server_stay_inside_one_budget(share: float, dsn: str, tmp_path: Path) -> None:
    attack(
        lambda: PostgresLedgerStore(dsn, timeout_s=PATIENCE_S),
        Invoice(tmp_path / "invoice"),
        round(ALL * share),
        kills=True,
    )


def test_without_kills_every_call_is_settled_by_its_own_process(tmp_path: Path) -> None:
    path, invoice = tmp_path / "ledger.db", Invoice(tmp_path / "invoice")
    attack(lambda: SqliteLedgerStore(path, busy_timeout_s=PATIENCE_S), invoice, 2 * ALL, kills=False)
