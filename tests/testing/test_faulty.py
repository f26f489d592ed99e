"""A store with injected faults: it fails once, at the chosen operation, as the store itself would."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.containment.ledger import Amounts, MemoryLedgerStore
from penstock.containment.limits import Limits
from penstock.errors import InvalidValue, LedgerUnavailable
from penstock.hosting.ports import CancelRequest, HostedEvent, RunRecord, StoreUnavailable
from penstock.storage import SqliteLedgerStore
from penstock.storage.memory import MemoryCancelStore, MemoryRunStore, MemoryStores
from penstock.testing.faulty import FAULTS, Fault, FaultKind, FaultyStore, FaultyStores, ask_again, every_call

RUN = RunRecord("r", "ann", "g", 1)
ASK = Amounts(cost_nanos=10)
BEFORE: tuple[FaultKind, ...] = ("busy", "full", "readonly", "io", "gone")


@pytest.mark.parametrize("kind", BEFORE)
async def test_a_fault_comes_before_anything_was_done(kind: FaultKind) -> None:
    runs = MemoryRunStore()
    faulty = FaultyStore(runs, kind)
    with pytest.raises(StoreUnavailable, match=r"MemoryRunStore\.add: .*try again"):
        await faulty.add(RUN)
    assert await runs.count() == 0
    assert (faulty.calls, faulty.hit) == (1, "add")
    assert (await faulty.add(RUN)).run == RUN, "the next one succeeds"
    assert faulty.calls == 2


async def test_a_lost_answer_comes_after_all_was_done() -> None:
    runs = MemoryRunStore()
    faulty = FaultyStore(runs, "write-then-timeout")
    with pytest.raises(StoreUnavailable, match="it may have been done"):
        await faulty.add(RUN)
    assert await runs.get("r") == RUN


async def test_the_call_that_was_named_fails_and_no_other() -> None:
    faulty = FaultyStore(MemoryRunStore(), "io", at=3)
    await faulty.add(RUN)
    assert await faulty.get("r") == RUN
    assert faulty.hit is None
    with pytest.raises(StoreUnavailable, match="count: the disk failed"):
        await faulty.count()
    for _ in range(5):
        assert await faulty.count() == 1
    assert (faulty.calls, faulty.hit) == (8, "count")


async def test_without_a_number_nothing_fails_and_calls_are_counted() -> None:
    faulty = FaultyStore(MemoryRunStore(), "busy", at=None)
    for _ in range(3):
        await faulty.count()
    assert (faulty.calls, faulty.hit) == (3, None)


async def test_errors_of_the_store_itself_are_raised_and_counted() -> None:
    faulty = FaultyStore(MemoryRunStore(), "write-then-timeout", at=2)
    for _ in range(2):
        with pytest.raises(KeyError):
            await faulty.requeue("unknown", 0)
    assert (faulty.calls, faulty.hit) == (2, "requeue"), "there was no answer to lose"


def test_a_sync_store_fails_as_a_ledger_does() -> None:
    for kind in FAULTS:
        ledger = MemoryLedgerStore()
        ledger.open_account("run", Limits(cost_nanos=100))
        faulty = FaultyStore(ledger, kind, at=2)
        assert faulty.balance("run").held_nanos == 0
        with pytest.raises(LedgerUnavailable, match=r"MemoryLedgerStore\.hold"):
            faulty.hold("k", "run", ASK)
        assert ledger.balance("run").held_nanos == (10 if kind == "write-then-timeout" else 0)
        assert faulty.hold("k", "run", ASK) is None
        assert ledger.balance("run").held_nanos == 10


def a_ledger_at_work(ledger: Any) -> None:
    """Every operation of a ledger, each repeated if it could not be done."""
    acts: list[Callable[[], object]] = [
        lambda: ledger.open_account("day", Limits(cost_nanos=1_000)),
        lambda: ledger.open_account("run", Limits(cost_nanos=500, retries=2), parent="day"),
        *(lambda key=key: ledger.hold(key, "run", ASK) for key in "abcd"),
        lambda: ledger.settle("a", Amounts(cost_nanos=7)),
        lambda: ledger.release("b"),
        lambda: ledger.withdraw("c"),
        lambda: ledger.leave_unresolved("d"),
        lambda: ledger.draw_retry("run", "e"),
        lambda: ledger.charge("f", "run", Amounts(cost_nanos=3)),
        lambda: ledger.grant("run", Limits(cost_nanos=600, retries=2)),
        lambda: ledger.settle("d", Amounts(cost_nanos=9)),
    ]
    for act in acts:
        try:
            act()
        except LedgerUnavailable:
            act()


@pytest.mark.parametrize("kind", ["busy", "write-then-timeout"])
@pytest.mark.parametrize("is_kept", [False, True], ids=["memory", "sqlite"])
async def test_a_ledger_is_the_same_whichever_of_its_acts_fails(kind: FaultKind, is_kept: bool, tmp_path: Path) -> None:
    paths = (tmp_path / f"{number}.db" for number in itertools.count())

    def figures(fault: Fault) -> list[object]:
        with SqliteLedgerStore(next(paths)) if is_kept else nullcontext(MemoryLedgerStore()) as ledger:
            a_ledger_at_work(FaultyStore(ledger, fault))
            return [ledger.balance("run"), ledger.balance("day"), dict(ledger.held()), dict(ledger.unresolved())]

    expected = await asyncio.to_thread(figures, Fault(kind, None))

    async def scenario(fault: Fault) -> None:
        assert await asyncio.to_thread(figures, fault) == expected

    assert await every_call(scenario, kind) == 14


async def test_stores_that_share_a_fault_are_counted_together() -> None:
    fault = Fault("gone", at=2)
    runs, cancels = FaultyStore(MemoryRunStore(), fault), FaultyStore(MemoryCancelStore(), fault)
    await runs.add(RUN)
    with pytest.raises(StoreUnavailable, match=r"MemoryCancelStore\.drop"):
        await cancels.drop("r")
    assert (runs.calls, cancels.calls, runs.hit) == (2, 2, "drop")


async def test_all_stores_of_a_service_fail_as_one_and_closing_never_does() -> None:
    async with FaultyStores(MemoryStores(), "busy", at=1) as stores:
        assert stores.url == "memory:"
        with pytest.raises(LedgerUnavailable):
            stores.ledger.open_account("run", Limits())
        await stores.runs.add(RUN)
        await stores.events.append("r", 0, [HostedEvent(1, 0, "x")])
        assert stores.fault.calls == 3
    await stores.close()


async def test_every_call_of_a_scenario_fails_once() -> None:
    failed: list[str | None] = []

    async def scenario(fault: Fault) -> None:
        stores = FaultyStores(MemoryStores(), fault)
        await ask_again(lambda: stores.runs.add(RUN))
        await ask_again(lambda: stores.events.append("r", 0, [HostedEvent(1, 0, "x")]))
        await ask_again(lambda: stores.events.last_seq("r"))
        failed.append(fault.hit)

    assert await every_call(scenario, "write-then-timeout") == 3
    assert failed == ["add", "append", "last_seq", None]


async def test_a_sync_scenario_will_do() -> None:
    def scenario(fault: Fault) -> None:
        ledger = FaultyStore(MemoryLedgerStore(), fault)
        for _ in range(2):
            try:
                ledger.open_account("run", Limits())
            except LedgerUnavailable:
                continue

    assert await every_call(scenario, "full") == 2


async def test_a_scenario_that_cannot_bear_a_fault_says_which() -> None:
    async def careless(fault: Fault) -> None:
        stores = FaultyStores(MemoryStores(), fault)
        await ask_again(lambda: stores.runs.add(RUN))
        await stores.runs.count()

    with pytest.raises(StoreUnavailable) as caught:
        await every_call(careless, "busy")
    assert caught.value.__notes__ == ["call 2 failed: busy in count"]

    async def wrong(fault: Fault) -> None:
        assert fault.at is None

    with pytest.raises(AssertionError) as failed:
        await every_call(wrong, "busy")
    assert failed.value.__notes__ == ["none of 0 calls failed"]


async def test_asking_again_asks_once_more_and_not_for_ever() -> None:
    attempts = 0

    async def never() -> None:
        nonlocal attempts
        attempts += 1
        raise StoreUnavailable("gone for good")

    with pytest.raises(StoreUnavailable):
        await ask_again(never)
    assert attempts == 2


async def test_only_calls_are_counted() -> None:
    faulty = FaultyStore(MemoryStores(), "busy")
    assert faulty.url == "memory:"
    assert faulty.calls == 0
    with pytest.raises(AttributeError, match="nothing"):
        faulty.nothing  # noqa: B018
    await faulty.close()
    assert faulty.calls == 0


async def test_a_copy_fails_with_the_one_it_is_of() -> None:
    faulty = FaultyStore(MemoryRunStore(), "busy", at=2)
    copied = copy.copy(faulty)
    assert await copied.count() == 0
    with pytest.raises(StoreUnavailable):
        await faulty.count()
    assert copy.copy(FaultyStores(MemoryStores(), "busy")).url == "memory:"


@pytest.mark.parametrize(("kind", "at"), [("slow", 1), ("busy", 0), ("busy", -1), ("busy", 1.5), ("busy", True)])
def test_a_fault_that_cannot_be_is_refused(kind: FaultKind, at: int) -> None:
    with pytest.raises(InvalidValue):
        FaultyStore(MemoryCancelStore(), kind, at=at)


async def test_a_cancel_is_remembered_once_whichever_call_fails() -> None:
    intent = CancelRequest("r", "enough", "ann", 100, 200)
    for kind in FAULTS:

        async def scenario(fault: Fault) -> None:
            cancels = MemoryCancelStore()
            faulty = FaultyStore(cancels, fault)
            assert await ask_again(lambda: faulty.put(intent)) == intent
            assert await cancels.find({"r": "ann"}, now_ms=100) == {"r": intent}

        assert await every_call(scenario, kind) == 1
