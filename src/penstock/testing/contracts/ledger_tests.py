"""The common part of the contracts of ledger stores: making a store for a test, and using it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from functools import cached_property
from typing import TypeVar

from penstock.clock import Clock
from penstock.containment.accounts import Balance
from penstock.containment.ledger import Amounts, LedgerStore
from penstock.containment.limits import NO_LIMITS, Limits
from penstock.stops import Stop
from penstock.testing.clock import ManualClock
from penstock.testing.contracts.threads import at_once

T = TypeVar("T")

ASK = Amounts(cost_nanos=10, tokens_in=3, tokens_out=4, api_calls=1)
USED = Amounts(cost_nanos=6, tokens_in=3, tokens_out=2)
FIGURES = [field.name for field in fields(Balance) if field.name not in ("name", "limits")]


class LedgerStoreTests(ABC):
    """A new, empty store for each test."""

    threads = 16
    """Number of threads in the concurrent tests; at least two."""
    holds_per_thread = 10
    """Number of holds each thread requests."""

    @abstractmethod
    def make_store(self, clock: Clock) -> LedgerStore:
        """Return a new, empty store that takes its time from `clock`."""

    def close_store(self, store: LedgerStore) -> None:  # noqa: B027 - most stores have nothing to give back
        """Release the resources of the store; called once after each test that made one."""

    def broken(self, store: LedgerStore) -> AbstractContextManager[None] | None:
        """Return a context in which `store` cannot record; None if the store cannot be broken."""
        return None

    @cached_property
    def clock(self) -> ManualClock:
        return ManualClock()

    @cached_property
    def store(self) -> LedgerStore:
        return self.make_store(self.clock)

    def teardown_method(self) -> None:
        if "store" in self.__dict__:
            self.close_store(self.store)

    def open_tree(self, limits: Limits = NO_LIMITS) -> None:
        """Open three levels: step under graph under run, with `limits` on the run."""
        self.store.open_account("run", limits)
        self.store.open_account("graph", NO_LIMITS, parent="run")
        self.store.open_account("step", NO_LIMITS, parent="graph")

    def take(self, key: str, account: str = "step", ask: Amounts = ASK) -> None:
        assert self.store.hold(key, account, ask) is None

    def use_all_kinds(self, account: str) -> None:
        """Use the account in every possible way; one of its holds stays held, one unresolved."""
        for key in ("held", "unresolved", "settled", "failed", "released"):
            self.take(f"{account} {key}", account)
        self.store.leave_unresolved(f"{account} unresolved")
        self.store.settle(f"{account} settled", USED)
        self.store.settle(f"{account} failed", USED, succeeded=False)
        self.store.release(f"{account} released")
        self.store.charge(f"{account} charged", account, USED)
        assert self.store.draw_retry(account)

    def refused(self, key: str, account: str, ask: Amounts = ASK) -> Stop:
        stop = self.store.hold(key, account, ask)
        assert stop is not None, f"{account} had no room for {ask}"
        return stop

    def endings(self) -> dict[str, Callable[[str], None]]:
        """Return every way for a hold to end, as functions of the key of the hold."""
        return {
            "settle": lambda key: self.store.settle(key, USED),
            "release": self.store.release,
            "withdraw": self.store.withdraw,
            "leave_unresolved": self.store.leave_unresolved,
        }

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds, which another thread makes true."""
        while not condition():
            time.sleep(0.001)

    def figures(self, account: str = "step") -> dict[str, int]:
        return {name: getattr(self.store.balance(account), name) for name in FIGURES}

    def at_once(self, work: Callable[[int], T], threads: int | None = None) -> list[T]:
        """Return the results of `work` on each thread; the threads yield to each other at every line of the store."""
        package = type(self.store).__module__.partition(".")[0]
        return at_once(threads or self.threads, work, within=package)


def figures(**nonzero: int) -> dict[str, int]:
    """Return all figures of a balance, 0 where not given."""
    return dict.fromkeys(FIGURES, 0) | nonzero


@contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    """Fail unless the body raises `kind`."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")
