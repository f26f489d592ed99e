"""Stores that fail at a chosen call.

A database fails in two ways that matter: before it did anything, or after it did everything and the answer was lost.
They are indistinguishable from outside, so the caller of a store has to be correct in both. `FaultyStore` wraps any
store, sync or async, and makes one call fail; `every_call` repeats a scenario, with another call failing each time.

It knows nothing of the purpose of the stores: it counts calls of their public methods.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, cast, get_args

from penstock.errors import InvalidValue, LedgerUnavailable, PenstockError
from penstock.hosting.ports import StoreUnavailable

T = TypeVar("T")
Store = TypeVar("Store")

FaultKind = Literal["busy", "full", "readonly", "io", "gone", "write-then-timeout"]

FAULTS: Mapping[FaultKind, str] = {
    "busy": "others have locked the database; try again",
    "full": "there is no room left on the disk; free some and try again",
    "readonly": "the database can only be read; allow writing and try again",
    "io": "the disk failed; try again",
    "gone": "the connection is gone; try again",
    "write-then-timeout": "no answer arrived in time, and it may have been done; try again",
}
"""The message of each fault. All but the last happen before any work is done."""

NEVER_FAIL = frozenset({"close"})
"""Calls that are not counted: clean-up must always work."""
MOST_CALLS = 100_000
"""A scenario with more calls is assumed never to end."""


@dataclass(slots=True)
class Fault:
    """One call that fails: the `at`-th, from 1, of all stores that share this; never, if it is None."""

    kind: FaultKind
    at: int | None = 1
    calls: int = 0
    """Number of calls so far."""
    hit: str | None = None
    """The name of the method that failed."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise InvalidValue("kind", self.kind, f"one of {', '.join(FAULTS)}")
        if self.at is not None and (type(self.at) is not int or self.at < 1):
            raise InvalidValue("at", self.at, "the number of a call, from 1, or None")

    @property
    def is_lost_answer(self) -> bool:
        """Whether the work is done before the call fails."""
        return self.kind == "write-then-timeout"

    def is_next(self, method: str) -> bool:
        """Count a call, and return whether it is the one that fails."""
        with self._lock:  # a ledger is called from worker threads
            self.calls += 1
            if self.calls != self.at:
                return False
            self.hit = method
            return True


class FaultyStore(Generic[Store]):
    """A store whose `at`-th call fails: with StoreUnavailable if it is async, otherwise with LedgerUnavailable.

    A `Fault` passed instead of a kind is shared: the calls of all stores that have it are counted together.
    """

    def __init__(self, store: Store, fault: FaultKind | Fault, *, at: int | None = 1) -> None:
        self._store = store
        self._fault = fault if isinstance(fault, Fault) else Fault(fault, at)

    @property
    def calls(self) -> int:
        """Number of calls so far."""
        return self._fault.calls

    @property
    def hit(self) -> str | None:
        """The name of the method that failed; None if none has yet."""
        return self._fault.hit

    def __getattr__(self, name: str) -> Any:
        if name == "_store":  # not set yet, as during a copy: looking it up would recurse for ever
            raise AttributeError(name)
        value = getattr(self._store, name)
        if name.startswith("_") or name in NEVER_FAIL or not callable(value):
            return value
        return self._async_call(name, value) if inspect.iscoroutinefunction(value) else self._sync_call(name, value)

    def _async_call(self, name: str, method: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def call(*args: Any, **kwargs: Any) -> T:
            if not self._fault.is_next(name):
                return await method(*args, **kwargs)
            if self._fault.is_lost_answer:
                await method(*args, **kwargs)
            raise self._failure(name, StoreUnavailable)

        return call

    def _sync_call(self, name: str, method: Callable[..., T]) -> Callable[..., T]:
        def call(*args: Any, **kwargs: Any) -> T:
            if not self._fault.is_next(name):
                return method(*args, **kwargs)
            if self._fault.is_lost_answer:
                method(*args, **kwargs)
            raise self._failure(name, LedgerUnavailable)

        return call

    def _failure(self, name: str, kind: type[PenstockError]) -> PenstockError:
        return kind(f"{type(self._store).__name__}.{name}: {FAULTS[self._fault.kind]}")


class FaultyStores:
    """All stores of a service behind one `Fault`; closes the stores it wraps."""

    def __init__(self, stores: Any, fault: FaultKind | Fault, *, at: int | None = 1) -> None:
        self._stores = stores
        self.fault = fault if isinstance(fault, Fault) else Fault(fault, at)
        for name in (
            "runs",
            "events",
            "graphs",
            "approvals",
            "cancels",
            "journal",
            "payloads",
            "spending",
            "chats",
            "memories",
            "tokens",
            "audit",
            "people",
            "ledger",
        ):
            if hasattr(stores, name):
                setattr(self, name, FaultyStore(getattr(stores, name), self.fault))

    def __getattr__(self, name: str) -> Any:
        if name == "_stores":
            raise AttributeError(name)
        return getattr(self._stores, name)

    async def transaction(self, unit: Callable[[Any], Awaitable[T]], *, inline: bool = False) -> T:
        """Count as one call, whatever the unit does inside."""
        if not self.fault.is_next("transaction"):
            return cast("T", await self._stores.transaction(unit, inline=inline))
        if self.fault.is_lost_answer:
            await self._stores.transaction(unit, inline=inline)
        raise StoreUnavailable(f"transaction: {FAULTS[self.fault.kind]}")

    async def __aenter__(self) -> FaultyStores:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stores.close()


async def every_call(scenario: Callable[[Fault], Awaitable[object] | object], kind: FaultKind) -> int:
    """Run the scenario with each of its calls failing in turn, until none is left; return how many failed.

    The scenario creates its stores anew each time and wraps them with the fault it receives. An error names the failed
    call.
    """
    for at in range(1, MOST_CALLS):
        fault = Fault(kind, at)
        try:
            outcome = scenario(fault)
            if inspect.isawaitable(outcome):
                await outcome
        except BaseException as error:
            error.add_note(
                f"call {at} failed: {kind} in {fault.hit}" if fault.hit else f"none of {fault.calls} calls failed"
            )
            raise
        if fault.hit is None:
            return at - 1
    raise InvalidValue("scenario", scenario, f"one of fewer than {MOST_CALLS} calls")


async def ask_again(ask: Callable[[], Awaitable[T]]) -> T:
    """Call `ask`, and once more if the store was not available, as a careful caller does."""
    try:
        return await ask()
    except (StoreUnavailable, LedgerUnavailable):
        return await ask()
