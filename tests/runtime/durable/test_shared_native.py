"""A shared budget at a ledger that is async itself: tasks await it on their loop, threads use it by its facade."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from penstock.containment.ledger import Amounts, MemoryLedgerStore
from penstock.containment.limits import Limits
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable.async_ledger import AsyncLedger, BlockingLedger, blocking
from penstock.runtime.durable.shared import SharedBudget
from tests.runtime.durable.test_shared import USD, never, until

T = TypeVar("T")


class Native:
    """An async ledger in memory, whose operations on the loop of the test wait where there is a gate."""

    poll_s = 1.0

    def __init__(self) -> None:
        self.inner = MemoryLedgerStore()
        self.inner.open_account("team", Limits(cost_nanos=3 * USD))
        self.gates: dict[str, asyncio.Event] = {}
        self.done: list[tuple[str, str]] = []
        """Each operation, and the thread it ran on."""

    def on_change(self, key: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.inner.on_change(key, wake)

    def run_blocking(self, operation: Coroutine[Any, Any, T]) -> T:
        with ThreadPoolExecutor(1, "facade") as pool:
            return pool.submit(asyncio.run, operation).result()

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def operate(*args: Any, **options: Any) -> Any:
            thread = threading.current_thread().name
            if name in self.gates and not thread.startswith("facade"):
                await self.gates[name].wait()
            self.done.append((name, thread.partition("_")[0]))
            return getattr(self.inner, name)(*args, **options)

        return operate


@pytest.fixture
def ledger() -> Native:
    return Native()


def shared_at(ledger: Native) -> SharedBudget:
    return SharedBudget(BlockingLedger(ledger), "team", prefix="run/1")  # type: ignore[arg-type]


async def text() -> str:
    return "text"


async def test_tasks_use_the_ledger_on_their_own_thread_and_threads_its_facade(ledger: Native) -> None:
    with ExecutionContext(shared_budget=shared_at(ledger)) as run:
        assert await run.allm(text, cost_hint_usd=1) == "text"
        assert ledger.done == [(name, threading.current_thread().name) for name in ("hold", "settle")]
        assert run.llm(lambda: "text", cost_hint_usd=1) == "text"
    assert ledger.done[2:] == [("hold", "facade"), ("settle", "facade")]
    assert ledger.inner.balance("team").spent_nanos == 2 * USD


async def test_a_sync_call_on_a_loop_does_not_wait_for_a_report_of_a_task_of_that_loop(ledger: Native) -> None:
    ledger.gates["settle"] = asyncio.Event()
    shared = shared_at(ledger)
    with ExecutionContext(shared_budget=shared) as run:
        first = asyncio.create_task(run.allm(text, cost_hint_usd=1))
        await until(lambda: shared._turn.task is not None)
        assert run.llm(lambda: "text", cost_hint_usd=1) == "text", "although the loop, which it keeps, has the turn"
        assert shared.waiting == 2
        ledger.gates["settle"].set()
        assert await first == "text"
        assert shared.waiting == 0, "the task has reported the end of the other call as well"
    assert ledger.inner.balance("team").spent_nanos == 2 * USD


async def test_an_act_queued_just_before_a_task_gives_its_turn_back_is_reported(
    ledger: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = shared_at(ledger)
    give = shared._turn.give
    left: list[int] = []

    def give_late(task: object) -> None:
        if not left:
            shared.charged("run/1/b", Amounts(1))
            left.append(shared.flush())
        give(task)

    monkeypatch.setattr(shared._turn, "give", give_late)
    shared.charged("run/1/a", Amounts(1))
    assert await shared.aflush() == 0
    assert left == [1], "the sync call left it to the task"


async def test_an_act_queued_while_a_task_reports_is_reported_by_the_task(ledger: Native) -> None:
    shared = shared_at(ledger)
    shared.charged("run/1/a", Amounts(1))
    gate = ledger.gates["charge"] = asyncio.Event()
    flushing = asyncio.create_task(shared.aflush())
    await until(lambda: shared._turn.task is not None)
    shared.charged("run/1/b", Amounts(1))
    assert await asyncio.to_thread(shared.flush) == 2, "the thread leaves it to the task"
    gate.set()
    assert await flushing == 0


async def test_acts_of_a_cancelled_report_are_reported_by_a_worker(ledger: Native) -> None:
    shared = shared_at(ledger)
    shared.charged("run/1/a", Amounts(1))
    ledger.gates["charge"] = asyncio.Event()
    flushing = asyncio.create_task(shared.aflush())
    await until(lambda: shared._turn.task is not None)
    flushing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    await until(lambda: shared.waiting == 0)
    assert ledger.done == [("charge", "facade")]


async def test_tasks_report_one_after_the_other_and_a_thread_makes_them_wait(ledger: Native) -> None:
    shared = shared_at(ledger)
    shared.charged("run/1/a", Amounts(1))
    with shared._turn.lock:
        flushing = [asyncio.create_task(asyncio.to_thread(asyncio.run, shared.aflush())) for _ in range(3)]
        flushing.append(asyncio.create_task(_flush(shared)))
        await until(lambda: len(shared._turn._wakes) == 4)
        assert ledger.done == []
    shared._turn.wake()
    assert await asyncio.gather(*flushing) == [0] * 4
    assert [name for name, _ in ledger.done] == ["charge"], "once, although four wanted to"


async def _flush(shared: SharedBudget) -> int:
    # On another loop than that of the test, whose thread has the lock.
    return await asyncio.to_thread(asyncio.run, shared.aflush())


def test_blocking_code_that_awaits_something_else_is_an_error() -> None:
    async def sleep() -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="awaited something that is no operation of its ledger"):
        blocking(sleep())


async def test_operations_that_may_look_at_many_rows_are_not_inline() -> None:
    class Store(MemoryLedgerStore):
        is_immediate = False

        def try_inline(self, operation: Callable[[], T]) -> T:
            inline.append(operation)
            return operation()

    inline: list[object] = []
    ledger = AsyncLedger(Store())
    await ledger.open_account("team", Limits())
    assert len(inline) == 1
    assert (await ledger.held(), await ledger.queued(), await ledger.unresolved()) == ({}, {}, {})
    assert (await ledger.aged(0), await ledger.forget(["team"])) == (["team"], 1)
    assert len(inline) == 1


async def test_a_call_stopped_while_it_holds_gives_back_what_the_ledger_takes_for_it(ledger: Native) -> None:
    shared = shared_at(ledger)
    ledger.gates["hold"] = asyncio.Event()
    with ExecutionContext(shared_budget=shared) as run:
        calling = asyncio.create_task(run.allm(never, cost_hint_usd=1))
        await until(lambda: shared.asking == 1)
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        ledger.gates["hold"].set()
        await until(lambda: not shared.asking and not shared.waiting)
    assert [name for name, _ in ledger.done] == ["hold", "withdraw"]
    assert ledger.inner.held() == {}
