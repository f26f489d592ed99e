"""Random operations on a stored ledger have the same answers as on the one in memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore, TicketRequest
from penstock.containment.limits import UNLIMITED, Limits
from penstock.storage import SqliteLedgerStore
from penstock.storage.postgres.ledger import PostgresLedgerStore
from penstock.testing import ManualClock
from tests.storage.ledger_postgres import dsn, ledger_database, postgres_server

__all__ = ["dsn", "ledger_database", "postgres_server"]

ACCOUNTS = ("run", "graph", "step", "sibling", "later", "unknown")
PARENTS = {"run": None, "graph": "run", "step": "graph", "sibling": "run", "later": None}
Operation = Callable[[LedgerStore], object]


def some_limits(rng: random.Random) -> Limits:
    return Limits(
        *(rng.choice([UNLIMITED, UNLIMITED, rng.randint(0, 40)]) for _ in range(5)), rng.choice([UNLIMITED, 50])
    )


def some_amounts(rng: random.Random) -> Amounts:
    return Amounts(*(rng.choice([0, rng.randint(0, 12)]) for _ in range(3)), rng.randint(0, 2))


def random_operation(rng: random.Random) -> Operation:
    limits = some_limits(rng)
    other = rng.choice(ACCOUNTS)
    key, account, amounts, yes = str(rng.randint(0, 12)), rng.choice(ACCOUNTS), some_amounts(rng), rng.random() < 0.5
    operations: list[Operation] = [
        lambda store: store.settle(key, amounts, succeeded=yes),
        lambda store: store.release(key),
        lambda store: store.withdraw(key),
        lambda store: store.leave_unresolved(key),
        lambda store: store.draw_retry(account),
        lambda store: store.draw_retry(account, key),
        lambda store: store.charge(key, account, amounts),
        lambda store: store.grant(account, limits),
        lambda store: store.open_account(account, Limits(steps=1), parent="run"),
        lambda store: store.put_under(account, other),
        lambda store: store.renew(key),
        lambda store: store.leave_queue(key),
        lambda store: store.renew_unhinted(key),
    ]
    under = rng.choice([None, str(rng.randint(0, 12))])
    ticket = TicketRequest(rng.choice("ab"), rng.choice("xy"), lease_s=1_000)
    lease_s = rng.choice([None, 1_000.0])
    holds: list[Operation] = [
        lambda store: store.hold(key, account, amounts, retry_drawn=yes, under=under, unhinted_lease_s=lease_s),
        lambda store: store.join_queue(
            key, account, amounts, ticket, retry_drawn=yes, under=under, unhinted_lease_s=lease_s
        ),
    ]
    return rng.choice(holds if rng.random() < 0.5 else operations)


def answer(store: LedgerStore, operation: Operation) -> object:
    try:
        return operation(store)
    except Exception as error:
        return type(error), str(error)


def agree(store: LedgerStore, clock: ManualClock, rng: random.Random, operations: int) -> None:
    """Do the same at `store` and at one in memory, and compare the answers and figures after each operation."""
    memory = MemoryLedgerStore(clock=clock)
    for account, parent in PARENTS.items():
        limits = some_limits(rng)
        memory.open_account(account, limits, parent=parent)
        store.open_account(account, limits, parent=parent)
    for number in range(operations):
        clock.advance_ns(rng.randint(0, 1))
        operation = random_operation(rng)
        assert answer(store, operation) == answer(memory, operation), number
        for account in ACCOUNTS:
            look: Operation = lambda store, account=account: store.balance(account)  # noqa: E731
            assert answer(store, look) == answer(memory, look), number
        assert dict(store.unresolved()) == dict(memory.unresolved())
        assert dict(store.held("1")) == dict(memory.held("1"))
        assert dict(store.queued()) == dict(memory.queued())
        assert list(store.aged(0)) == list(memory.aged(0))


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_operations_has_the_same_answers_and_figures_in_a_file(seed: int, tmp_path: Path) -> None:
    clock = ManualClock(start_ns=1_000)
    with SqliteLedgerStore(tmp_path / "ledger.db", clock=clock) as store:
        agree(store, clock, random.Random(seed), 80)


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_operations_has_the_same_answers_and_figures_in_postgresql(seed: int, dsn: str) -> None:
    clock = ManualClock(start_ns=1_000)
    with PostgresLedgerStore(dsn, clock=clock, timeout_s=60) as store:
        agree(store, clock, random.Random(seed), 80)
