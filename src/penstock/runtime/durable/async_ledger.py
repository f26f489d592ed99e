"""Ledger stores in async code, and an async ledger in code that blocks.

`AsyncLedger` is the async port: the operations of a `LedgerStore` as coroutines. They run on the caller's event loop if
the store is an async ledger behind `BlockingLedger`, inline if the store can answer without waiting, and otherwise on a
worker. `blocking` runs a coroutine that awaits nothing else on a thread that may block, so that sync and async callers
share one body. `keep_lease` renews the lease of a call that others wait for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from penstock.containment.ledger import LedgerStore, WouldBlock
from penstock.runtime import worker

P = ParamSpec("P")
T = TypeVar("T")
Late = Callable[[Any, BaseException | None], None]
"""Receives the result or the error of a job whose caller has left."""


RENEWALS = 3
"""How often a lease is renewed within its length."""
MAX_FAILURES = 20
"""A store that fails so often in a row is given up."""


class _Mode(threading.local):
    """Whether the operations of this thread may block it."""

    may_block = False


mode = _Mode()


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits only operations of an `AsyncLedger`, which block this thread."""
    before, mode.may_block = mode.may_block, True
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        mode.may_block = before
    work.close()
    raise RuntimeError("blocking code awaited something that is no operation of its ledger")


def _operation(
    method: Callable[Concatenate[LedgerStore, P], T], *, inline: bool = True
) -> Callable[Concatenate[AsyncLedger, P], Coroutine[Any, Any, T]]:
    """Return the method as a coroutine function; `inline` is for one that reads and writes few rows, by key."""

    async def run(self: AsyncLedger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        answer: T = await self._run(method.__name__, inline, args, kwargs)
        return answer

    return update_wrapper(run, method)


class AsyncLedger:
    """The async port of a ledger: the operations of a `LedgerStore`, for tasks and for code under `blocking`."""

    def __init__(self, store: LedgerStore) -> None:
        self.store = store
        self.is_immediate = getattr(store, "is_immediate", False) is True
        """Whether no operation takes long enough to need a worker; false, unless the store declares otherwise."""
        self.try_inline: Callable[[Callable[[], Any]], Any] | None = getattr(store, "try_inline", None)
        """The store's method for callers that cannot wait, if it has one."""
        self._native = store.ledger if isinstance(store, BlockingLedger) else None

    open_account = _operation(LedgerStore.open_account)
    grant = _operation(LedgerStore.grant)
    put_under = _operation(LedgerStore.put_under)
    hold = _operation(LedgerStore.hold)
    join_queue = _operation(LedgerStore.join_queue)
    renew = _operation(LedgerStore.renew)
    leave_queue = _operation(LedgerStore.leave_queue)
    renew_unhinted = _operation(LedgerStore.renew_unhinted)
    queued = _operation(LedgerStore.queued, inline=False)
    settle = _operation(LedgerStore.settle)
    release = _operation(LedgerStore.release)
    withdraw = _operation(LedgerStore.withdraw)
    leave_unresolved = _operation(LedgerStore.leave_unresolved)
    charge = _operation(LedgerStore.charge)
    draw_retry = _operation(LedgerStore.draw_retry)
    balance = _operation(LedgerStore.balance)
    balances = _operation(LedgerStore.balances)
    unresolved = _operation(LedgerStore.unresolved, inline=False)
    held = _operation(LedgerStore.held, inline=False)
    aged = _operation(LedgerStore.aged, inline=False)
    forget = _operation(LedgerStore.forget, inline=False)

    async def _run(self, name: str, inline: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._native is not None and not mode.may_block:
            return await getattr(self._native, name)(*args, **kwargs)
        operation = partial(getattr(self.store, name), *args, **kwargs)
        if self.is_immediate or mode.may_block:
            return operation()
        if inline and self.try_inline is not None:
            with suppress(WouldBlock):
                return self.try_inline(operation)
        return await worker.LoopJob(operation, ignore).result()

    def job(self, work: Callable[[], Coroutine[Any, Any, T]], on_late: Late) -> worker.LoopJob:
        """Return a job for operations of this ledger that a task waits for, and may leave behind.

        A worker finishes it even if the loop ends; a task is cancelled then, as is the operation in the database.
        """
        if self._native is not None:
            return worker.TaskJob(work, on_late)
        return worker.LoopJob(lambda: blocking(work()), on_late)


def ignore(value: object, error: BaseException | None) -> None:
    """Discard the result of a job whose caller has left."""


class NativeLedger(Protocol):
    """A ledger whose operations are those of `AsyncLedger`, on any event loop."""

    @property
    def poll_s(self) -> float:
        """See `LedgerStore.poll_s`."""

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """See `LedgerStore.on_change`; it returns at once, on any thread."""

    def run_blocking(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation of this ledger on an event loop of its own, and wait for it."""


def _blocking(method: Callable[Concatenate[LedgerStore, P], T]) -> Callable[Concatenate[BlockingLedger, P], T]:
    def run(self: BlockingLedger, /, *args: P.args, **kwargs: P.kwargs) -> T:
        operation: Coroutine[Any, Any, T] = getattr(self.ledger, method.__name__)(*args, **kwargs)
        return self.ledger.run_blocking(operation)

    return update_wrapper(run, method)


class BlockingLedger:
    """An async ledger as a `LedgerStore`, for callers that block."""

    def __init__(self, ledger: NativeLedger) -> None:
        self.ledger = ledger

    open_account = _blocking(LedgerStore.open_account)
    grant = _blocking(LedgerStore.grant)
    put_under = _blocking(LedgerStore.put_under)
    hold = _blocking(LedgerStore.hold)
    join_queue = _blocking(LedgerStore.join_queue)
    renew = _blocking(LedgerStore.renew)
    leave_queue = _blocking(LedgerStore.leave_queue)
    renew_unhinted = _blocking(LedgerStore.renew_unhinted)
    queued = _blocking(LedgerStore.queued)
    settle = _blocking(LedgerStore.settle)
    release = _blocking(LedgerStore.release)
    withdraw = _blocking(LedgerStore.withdraw)
    leave_unresolved = _blocking(LedgerStore.leave_unresolved)
    charge = _blocking(LedgerStore.charge)
    draw_retry = _blocking(LedgerStore.draw_retry)
    balance = _blocking(LedgerStore.balance)
    balances = _blocking(LedgerStore.balances)
    unresolved = _blocking(LedgerStore.unresolved)
    held = _blocking(LedgerStore.held)
    aged = _blocking(LedgerStore.aged)
    forget = _blocking(LedgerStore.forget)

    @property
    def poll_s(self) -> float:
        """Longest time after which a waiting call renews its ticket."""
        return self.ledger.poll_s

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when the answer for the key may have changed; return a function that ends this."""
        return self.ledger.on_change(key, wake)


class _Leases:
    """The leases of model calls of unknown cost, which others may wait for at a store: renewed while the calls run.

    A lease is for the death of the process: without it, a call of a dead one would keep the calls of others waiting.
    One worker renews all leases of this process, and only while there are any. A lease that the store needs no longer,
    because the cost is known by now or the call has ended, is dropped.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal handler may make a call in the middle of a change
        self.renewals: dict[tuple[int, str], Callable[[], bool]] = {}
        """What renews a lease, and returns whether it is still needed; by the id of its budget, and key."""
        self.budgets: dict[tuple[int, str], weakref.ref[object]] = {}
        """A budget that is gone settles nothing any more."""
        self.ended = threading.Event()
        """Set when there is none any more."""
        self.is_running = False

    def keep(self, budget: object, key: str, renew: Callable[[], bool], lease_s: float) -> None:
        name = id(budget), key
        with self.lock:
            self.budgets[name] = weakref.ref(budget, lambda _: self.drop(name))
            self.renewals[name] = renew
            self.ended.clear()
            if self.is_running:
                return
            self.is_running = True
        try:
            worker.start(worker.Job(lambda: self._renew_all(lease_s / RENEWALS), ignore))
        except BaseException as error:  # no thread is available: the lease ends unless the call does
            self.is_running = False
            if not isinstance(error, RuntimeError):
                raise

    def drop(self, name: tuple[int, str]) -> None:
        if name in self.renewals:
            with self.lock:
                self.renewals.pop(name, None)
                self.budgets.pop(name, None)
                if not self.renewals:
                    self.ended.set()

    def _renew_all(self, interval_s: float) -> None:
        failures: dict[tuple[int, str], int] = {}
        while True:
            self.ended.wait(interval_s)
            with self.lock:
                if not self.renewals:
                    self.is_running = False
                    return
                renewals = []
                with suppress(RuntimeError):  # a budget went in the middle of this: the next time
                    renewals = list(self.renewals.items())
            for name, renew in renewals:
                is_needed, failed = True, True
                with suppress(Exception):
                    is_needed, failed = renew(), False
                failures[name] = failures.get(name, 0) + 1 if failed else 0
                if not is_needed or failures[name] >= MAX_FAILURES:
                    failures.pop(name)
                    self.drop(name)


_leases = _Leases()


def keep_lease(budget: object, key: str, renew: Callable[[], bool], lease_s: float) -> None:
    """Renew a lease of a budget from now on, until `renew` returns False."""
    _leases.keep(budget, key, renew, lease_s)


def drop_lease(budget: object, key: str) -> None:
    """Renew the lease no more, if it is renewed at all."""
    _leases.drop((id(budget), key))


def _after_fork() -> None:
    global _leases
    _leases = _Leases()  # those of the parent are renewed there


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
