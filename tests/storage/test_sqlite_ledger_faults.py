"""A fault at any statement of any operation: it is reported, nothing is half done, and a retry is exact."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.accounts import Balance
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.errors import LedgerUnavailable
from penstock.storage import SqliteLedgerStore

pytestmark = [pytest.mark.reliability]

ASK = Amounts(cost_nanos=10, tokens_in=3, tokens_out=4, api_calls=1)
USED = Amounts(cost_nanos=6, tokens_in=3, tokens_out=2)
LEVELS = ("run", "step")
FAULTS = ("disk I/O error", "database or disk is full", "attempt to write a readonly database", "database is locked")


class Faulty(sqlite3.Connection):
    """Fails at the statement number `at`, counted from when it was armed: before it, or once it is done.

    With `stays` every statement after that fails too, the rollback among them, until it is disarmed.
    """

    at: int | None = None
    after = False
    stays = False
    fault = FAULTS[0]
    seen = 0
    opened = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        Faulty.opened += 1

    def execute(self, *statement: Any) -> sqlite3.Cursor:
        Faulty.seen += 1
        fails = Faulty.at is not None and (Faulty.seen == Faulty.at or (Faulty.stays and Faulty.seen > Faulty.at))
        if fails and not Faulty.after:
            raise sqlite3.OperationalError(Faulty.fault)
        answer = super().execute(*statement)
        if fails:
            raise sqlite3.OperationalError(Faulty.fault)
        return answer


@pytest.fixture(autouse=True)
def _disarmed() -> None:
    arm(None)


def arm(at: int | None, *, after: bool = False, stays: bool = False, fault: str = FAULTS[0]) -> None:
    Faulty.at, Faulty.after, Faulty.stays, Faulty.fault, Faulty.seen = at, after, stays, fault, 0


OPERATIONS: dict[str, Callable[[LedgerStore], object]] = {
    "open_account": lambda store: store.open_account("new", Limits(steps=1), parent="run"),
    "hold": lambda store: store.hold("new", "step", ASK),
    "hold what does not fit": lambda store: store.hold("large", "step", Amounts(1_000)),
    "settle": lambda store: store.settle("k", USED),
    "settle what is unresolved": lambda store: store.settle("lost", USED, succeeded=False),
    "release": lambda store: store.release("k"),
    "withdraw": lambda store: store.withdraw("k"),
    "leave_unresolved": lambda store: store.leave_unresolved("k"),
    "grant": lambda store: store.grant("run", Limits(cost_nanos=200)),
    "charge": lambda store: store.charge("new", "step", USED),
    "draw_retry by key": lambda store: store.draw_retry("step", "k"),
}


def prepare(store: LedgerStore) -> None:
    store.open_account("run", Limits(cost_nanos=100, retries=5))
    store.open_account("step", NO_LIMITS, parent="run")
    store.hold("k", "step", ASK)
    store.hold("lost", "step", ASK)
    store.leave_unresolved("lost")


def figures(store: LedgerStore) -> list[Balance]:
    return [store.balance(level) for level in LEVELS]


def fault_of(operation: Callable[[], object]) -> str | None:
    """The error of the store; None if it succeeded."""
    try:
        operation()
    except LedgerUnavailable as error:
        return str(error)
    return None


@pytest.mark.requirement("X-1")
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "until repaired"])
def test_a_fault_at_any_statement_leaves_all_or_nothing_and_a_retry_is_exact(
    operation: Callable[[LedgerStore], object], when: str, stays: bool, tmp_path: Path
) -> None:
    memory = MemoryLedgerStore()
    prepare(memory)
    untouched = figures(memory)
    answer = operation(memory)
    done = figures(memory)
    at = raised = 0
    while True:
        at += 1
        with SqliteLedgerStore(tmp_path / f"{at}.db", factory=Faulty) as store:
            prepare(store)
            arm(at, after=when == "after", stays=stays, fault=FAULTS[at % len(FAULTS)])
            error = fault_of(lambda: operation(store))
            reached, _ = Faulty.seen >= at, arm(None)
            raised += error is not None
            assert error is None or f"cannot record: {FAULTS[at % len(FAULTS)]}" in error
            assert figures(store) in (untouched, done), f"half done at statement {at}"
            if when == "before" or not reached:
                assert figures(store) == (untouched if reached else done)
            assert operation(store) == answer
            assert figures(store) == done, f"not exact after statement {at}"
        if not reached:
            break
    assert raised == at - 1 >= 4, "a fault was swallowed"


def test_a_retry_is_never_drawn_without_being_counted(tmp_path: Path) -> None:
    for at in range(1, 6):
        for after in (False, True):
            with SqliteLedgerStore(tmp_path / f"{at}{after}.db", factory=Faulty) as store:
                prepare(store)
                arm(at, after=after)
                drawn: list[bool] = []
                fault_of(lambda: drawn.append(store.draw_retry("step")))  # noqa: B023 - called at once
                arm(None)
                now = figures(store)
                assert now[0].retries == now[1].retries >= sum(drawn)
                drawn += [store.draw_retry("step") for _ in range(9)]
                assert sum(drawn) <= 5


def test_a_fault_at_any_statement_of_opening_leaves_a_file_that_can_be_opened(tmp_path: Path) -> None:
    for at in range(1, 100):
        path = tmp_path / f"{at}.db"
        arm(at)
        error = fault_of(lambda: SqliteLedgerStore(path, factory=Faulty).close())  # noqa: B023 - called at once
        reached, _ = Faulty.seen >= at, arm(None)
        assert (error is not None) == reached
        if not reached:
            break
        with SqliteLedgerStore(path, factory=Faulty) as store:
            prepare(store)
    assert at > 10


def test_a_connection_that_cannot_roll_back_is_closed(tmp_path: Path) -> None:
    with SqliteLedgerStore(tmp_path / "ledger.db", factory=Faulty) as store:
        prepare(store)
        before, opened = figures(store), Faulty.opened
        arm(3, stays=True)
        with pytest.raises(LedgerUnavailable):
            store.hold("new", "step", ASK)
        arm(None)
        assert figures(store) == before
        assert Faulty.opened == opened + 1


def test_an_interrupt_leaves_nothing_half_done(tmp_path: Path) -> None:
    class Interrupted(sqlite3.Connection):
        armed = False

        def execute(self, *statement: Any) -> sqlite3.Cursor:
            answer = super().execute(*statement)
            if Interrupted.armed and statement[0].startswith("UPDATE accounts"):
                raise KeyboardInterrupt
            return answer

    with SqliteLedgerStore(tmp_path / "ledger.db", factory=Interrupted) as store:
        prepare(store)
        before, Interrupted.armed = figures(store), True
        with pytest.raises(KeyboardInterrupt):
            store.hold("new", "step", ASK)
        Interrupted.armed = False
        assert figures(store) == before
        assert store.hold("new", "step", ASK) is None
