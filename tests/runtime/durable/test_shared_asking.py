"""What a shared budget knows of requests that the store has not answered, or whose answers are not awaited."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, MemoryLedgerStore, WouldBlock
from penstock.containment.limits import Limits
from penstock.errors import KeyTaken, LedgerUnavailable
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.async_ledger import blocking
from penstock.runtime.durable.shared import SharedBudget

CENT = Amounts(10_000_000)


class Store(MemoryLedgerStore):
    """A store that records a hold, and answers when it may; or raises instead."""

    is_immediate = False

    def __init__(self) -> None:
        super().__init__()
        self.open_account("team", Limits(cost_nanos=CENT.cost_nanos))
        self.recorded, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        self.raises: BaseException | None = None

    def hold(self, *args: Any, **kwargs: Any) -> Any:
        if self.raises is not None:
            raise self.raises
        answer = super().hold(*args, **kwargs)
        self.recorded.set()
        assert self.may_answer.wait(10)
        return answer


@pytest.fixture
def store() -> Store:
    return Store()


def shared_at(store: Store) -> SharedBudget:
    return SharedBudget(store, "team", prefix="r/1")


@pytest.mark.parametrize("end", ["settled", "released", "withdrawn", "unresolved"])
def test_a_call_is_among_those_that_ask_until_it_is_known_how_it_ended(store: Store, end: str) -> None:
    shared = shared_at(store)
    assert blocking(shared.take("r/1/a", CENT, False)) is None
    assert shared.asking == 1
    getattr(shared, end)("r/1/a", *((Amounts(), True) if end == "settled" else ()))
    assert (shared.asking, shared.waiting) == (0, 1)


def test_a_call_that_was_refused_asks_no_more(store: Store) -> None:
    shared = shared_at(store)
    assert blocking(shared.take("r/1/a", Amounts(2 * CENT.cost_nanos), False)) is not None
    assert (shared.asking, shared.waiting) == (0, 0)


@pytest.mark.parametrize(("raises", "waiting"), [(LedgerUnavailable("away"), 1), (KeyTaken("r/1/a", "another"), 0)])
def test_a_call_that_could_not_be_recorded_asks_no_more(store: Store, raises: Exception, waiting: int) -> None:
    shared, store.raises = shared_at(store), raises
    assert blocking(shared.take("r/1/a", CENT, False)) is not None
    assert (shared.asking, shared.waiting) == (0, waiting)


def test_a_call_that_would_block_is_requested_again_on_a_worker(store: Store) -> None:
    shared, store.raises = shared_at(store), WouldBlock()
    with pytest.raises(WouldBlock):
        blocking(shared.take("r/1/a", CENT, False))
    assert (shared.asking, shared.waiting) == (0, 0)


def test_once_the_run_is_over_nothing_more_is_taken_and_what_was_taken_can_still_be_settled(store: Store) -> None:
    shared = shared_at(store)
    assert blocking(shared.take("r/1/a", Amounts(1), False)) is None
    shared.close()
    stop = blocking(shared.take("r/1/b", Amounts(1), False))
    assert stop is not None
    assert "its run is over" in stop.message
    shared.settled("r/1/a", CENT, True)
    assert shared.flush() == 0
    assert (shared.asking, store.balance("team").spent_nanos, [*store.held()]) == (0, CENT.cost_nanos, [])


async def test_a_call_whose_caller_has_left_asks_until_what_was_taken_for_it_is_to_be_given_back(store: Store) -> None:
    shared = shared_at(store)
    store.may_answer.clear()
    with ExecutionContext(shared_budget=shared) as context:
        calling = asyncio.create_task(context.allm(_never, cost_hint_usd="0.01"))
        await asyncio.to_thread(store.recorded.wait, 10)
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
    assert (shared.asking, store.balance("team").held_nanos) == (1, CENT.cost_nanos)
    store.may_answer.set()
    while shared.asking:  # noqa: ASYNC110  # a thread answers
        await asyncio.sleep(0.001)
    await shared.aflush()
    assert (shared.waiting, store.balance("team").held_nanos) == (0, 0)


async def _never() -> None:
    raise AssertionError("the call was stopped before it left")
