"""Calls of unknown cost: counted once, by whichever process learns of them."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from penstock.containment.ledger import Amounts, MemoryLedgerStore
from penstock.containment.limits import Limits
from penstock.errors import LedgerUnavailable
from penstock.runtime.billing.prices import Price, PriceBook
from penstock.runtime.billing.usage import Reported
from penstock.runtime.calls import WrapOptions
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.journal import Journal, shortened
from penstock.runtime.durable.ports import JournalStore
from penstock.runtime.durable.shared import UNPRICED, SharedBudget
from penstock.storage.memory import MemoryStores
from tests.nodes.graphs import events_of, graph, node
from tests.runtime.durable.journalled import PRICES, Log, Thinker
from tests.runtime.durable.test_shared import until_sync

ONE_CALL = graph([node("agent", "agent", model="thinker")])
NO_PRICES = PriceBook(use_genai_prices=False)


class Dead(BaseException):
    """The process is no more."""


class Mortal(MemoryLedgerStore):
    """A store that a process dies at: at this act, and at all that come after it."""

    def __init__(self) -> None:
        super().__init__()
        self.open_account("run", Limits())
        self.dies_at: str | None = None

    def settle(self, key: str, actual: Amounts, *, succeeded: bool = True) -> None:
        if self.dies_at == "settle":
            raise Dead
        super().settle(key, actual, succeeded=succeeded)

    def charge(self, key: str, account: str, actual: Amounts) -> None:
        if self.dies_at == "charge":
            raise LedgerUnavailable("away")
        super().charge(key, account, actual)


def shared_with(store: MemoryLedgerStore, epoch: int = 1, unknown: str | None = "unknown") -> SharedBudget:
    return SharedBudget(store, "run", prefix=f"r/{epoch}", unknown=unknown)


def test_the_store_counts_what_the_run_counts() -> None:
    shared = shared_with(Mortal())
    assert shared.unknown_costs() == 0
    with ExecutionContext(shared_budget=shared, prices=NO_PRICES) as here:
        with suppress(ConnectionError):
            here.llm(_gone)
        here.llm(lambda: "text")
        here.llm(lambda: Reported.of("text", input_tokens=5, model="who"))
        here.llm(lambda: Reported.of("text", cost_usd=0.5))
        here.llm(lambda: "text", cost_hint_usd=0.5)
        here.tool(lambda: "text")
        assert here.get_snapshot().unknown_costs == shared.unknown_costs() == 3


def _gone() -> None:
    raise ConnectionError


def test_a_bill_that_comes_later_is_known_to_the_store_too() -> None:
    shared = shared_with(Mortal())
    with ExecutionContext(shared_budget=shared) as here:
        call = here.call_llm(lambda: "text").call
        assert shared.unknown_costs() == 1
        call.settle(cost_usd="0.5")
        assert (shared.unknown_costs(), here.get_snapshot().unknown_costs) == (0, 0)


def test_an_abandoned_call_counts_as_unknown_until_it_reports_its_cost() -> None:
    shared, gate = shared_with(Mortal()), threading.Event()

    def slow() -> Reported[str]:
        assert gate.wait(60)
        return Reported.of("late", cost_usd="0.5")

    here = ExecutionContext(shared_budget=shared)
    call = here.call_llm(slow, WrapOptions(timeout_ms=10)).call
    assert (here.get_snapshot().unknown_costs, call.record.cost_unknown) == (1, True)
    assert shared.unknown_costs() == 1
    gate.set()
    until_sync(lambda: call.state == "settled")
    here.end()
    until_sync(lambda: (here.get_snapshot().unknown_costs, shared.unknown_costs()) == (0, 0))


def test_a_call_that_still_runs_when_the_run_ends_is_of_unknown_cost() -> None:
    shared, gate, under_way = shared_with(Mortal()), threading.Event(), threading.Event()

    def slow() -> str:
        under_way.set()
        assert gate.wait(60)
        return "late"

    here = ExecutionContext(shared_budget=shared)
    thread = threading.Thread(target=lambda: here.call_llm(slow))
    thread.start()
    assert under_way.wait(60)
    here.end()
    assert (here.get_snapshot().unknown_costs, shared.unknown_costs()) == (1, 1)
    gate.set()
    thread.join(60)
    until_sync(lambda: shared.waiting == 0)
    assert (here.get_snapshot().unknown_costs, shared.unknown_costs()) == (1, 1)


@pytest.mark.parametrize("dies_at", ["settle", "charge"])
def test_recovery_counts_the_unknown_costs_of_a_dead_process_exactly_once(dies_at: str) -> None:
    store = Mortal()
    store.dies_at = dies_at
    with suppress(Dead), ExecutionContext(shared_budget=shared_with(store)) as here:
        here.llm(lambda: "text")
    assert [key for key in store.held() if key.endswith(UNPRICED)] == ["r/1/n000002/unpriced"]
    store.dies_at = None
    after = shared_with(store, 2)
    assert after.recover() == ("r/1/n000002/unpriced",)
    assert after.unknown_costs() == 1
    assert (after.recover(), after.unknown_costs()) == ((), 1)


def test_a_free_call_is_not_of_unknown_cost_when_its_process_dies() -> None:
    store = Mortal()
    store.dies_at = "settle"
    free = PriceBook(registered={"free": Price(0, 0)}, use_genai_prices=False)
    with suppress(Dead), ExecutionContext(shared_budget=shared_with(store), prices=free) as here:
        here.llm(lambda: "text", cost_hint_usd=0)
    assert list(store.held()) == ["r/1/n000002"]
    after = shared_with(store, 2)
    after.recover()
    assert after.unknown_costs() == 0


def test_without_an_account_for_unknown_costs_nothing_is_reported_to_the_store() -> None:
    store = Mortal()
    shared = shared_with(store, unknown=None)
    with ExecutionContext(shared_budget=shared) as here:
        here.llm(lambda: "text")
        assert (here.get_snapshot().unknown_costs, shared.unknown_costs()) == (1, 0)
    assert list(store.aged(0)) == ["run"]


async def replayed(store: JournalStore, prices: PriceBook) -> ExecutionContext:
    """One pass over a graph of one model call."""
    here = ExecutionContext(input="go", prices=prices, journal=await Journal.open(store, "r"))
    await events_of(ONE_CALL, run=here, services={"models": {"thinker": Thinker(Log())}, "tools": {}})
    here.end()
    return here


async def test_a_call_that_is_found_in_the_journal_is_still_of_unknown_cost() -> None:
    store = MemoryStores().journal
    assert [(await replayed(store, NO_PRICES)).get_snapshot().unknown_costs for _ in range(2)] == [1, 1]
    entries = await store.load("r")
    assert len(entries) == 2
    await store.shorten("r", shortened(entries))
    assert await store.load("r") != entries
    again = await replayed(store, NO_PRICES)
    assert again.get_snapshot().unknown_costs == 1
    assert [call.cost_unknown for call in again.graph.calls()[1] if call.kind == "llm"] == [True]


async def test_a_call_whose_cost_is_known_is_found_so() -> None:
    store = MemoryStores().journal
    assert [(await replayed(store, PRICES)).get_snapshot().unknown_costs for _ in range(2)] == [0, 0]
