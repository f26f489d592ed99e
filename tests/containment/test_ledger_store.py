"""The in-memory ledger store does what every ledger store must."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from penstock.clock import Clock
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore
from penstock.containment.limits import NO_LIMITS
from penstock.errors import InvalidValue, LedgerError, LedgerUnavailable
from penstock.testing.contracts import LedgerStoreContract


@pytest.mark.requirement("X-1", "P-B4", "P-B5", "C-3")
class TestMemoryLedgerStore(LedgerStoreContract):
    def make_store(self, clock: Clock) -> LedgerStore:
        return MemoryLedgerStore(clock=clock)


class Breakable:
    """A store in memory behind a line that can be cut."""

    def __init__(self, store: LedgerStore) -> None:
        self._store = store
        self._is_cut = False

    def __getattr__(self, name: str) -> Any:
        if self._is_cut:
            raise LedgerUnavailable("the line is cut")
        return getattr(self._store, name)

    @contextmanager
    def cut(self) -> Iterator[None]:
        self._is_cut = True
        yield
        self._is_cut = False


class TestAStoreThatCanBeBroken(LedgerStoreContract):
    """The contract of a store with faults; this one shows that its part about faults can be run."""

    threads = 4
    holds_per_thread = 5

    def make_store(self, clock: Clock) -> LedgerStore:
        return Breakable(MemoryLedgerStore(clock=clock))

    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        assert isinstance(store, Breakable)
        return store.cut()


def test_a_key_that_was_withdrawn_and_is_held_elsewhere_is_not_forgotten_with_where_it_was() -> None:
    store = MemoryLedgerStore()
    for account in ("one", "other"):
        store.open_account(account, NO_LIMITS)
    for account in ("one", "other", "one", "other"):
        assert store.hold("key", account, Amounts(5)) is None
        store.withdraw("key")
    assert store.hold("key", "other", Amounts(5)) is None
    assert store.forget(["one", "other"]) == 1, "something is held from the other"
    assert store.held() == {"key": Amounts(5)}
    store.settle("key", Amounts(3))
    assert store.forget(["one", "other"]) == 1
    with pytest.raises(LedgerError, match="no hold 'key'"):
        store.release("key")


def test_a_store_remembers_nothing_of_what_it_forgot() -> None:
    store = MemoryLedgerStore()
    store.open_account("above", NO_LIMITS)
    store.open_account("run", NO_LIMITS, parent="above")
    store.hold("held", "run", Amounts(5))
    store.settle("held", Amounts(5))
    store.charge("charged", "run", Amounts(1))
    store.draw_retry("run", "drawn")
    assert store.forget(["run"]) == 1
    kept = {name: value for name, value in vars(store).items() if isinstance(value, dict) and value}
    assert list(kept) == ["_accounts"]
    assert list(store._accounts) == ["above"]


def test_the_contract_imports_nothing_but_the_standard_library_and_penstock() -> None:
    code = "import sys; before = {*sys.modules}; import penstock.testing.contracts; print(*{*sys.modules} - before)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in shown.stdout.split()}
    assert roots - sys.stdlib_module_names == {"penstock"}


def test_a_contract_without_a_store_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="make_store"):
        LedgerStoreContract()  # type: ignore[abstract]


@pytest.mark.parametrize("field", ["cost_nanos", "tokens_in", "tokens_out", "api_calls"])
@pytest.mark.parametrize("value", [-1, -(10**30), 0.5, float("nan"), True, None, "1"])
@pytest.mark.requirement("X-1")
def test_amounts_that_would_give_something_back_or_are_no_numbers_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be a whole number, zero or more, not "):
        Amounts(**{field: value})


def test_errors_name_the_request_and_what_is_stored() -> None:
    store = MemoryLedgerStore()
    store.open_account("run", NO_LIMITS)
    store.open_account("graph", NO_LIMITS, parent="run")
    store.hold("k", "run", Amounts(10))
    with pytest.raises(LedgerError, match=r"^hold 'k' was taken from 'run', not from 'graph'$"):
        store.hold("k", "graph", Amounts(10))
    with pytest.raises(LedgerError, match=r"^hold 'k' was taken for Amounts\(cost_nanos=10, .*not for Amounts"):
        store.hold("k", "run", Amounts(11))
    with pytest.raises(LedgerError, match=r"^no hold 'x': it was refused, or never taken$"):
        store.release("x")
    with pytest.raises(KeyError, match=r"no account 'unknown'; open it first"):
        store.balance("unknown")
