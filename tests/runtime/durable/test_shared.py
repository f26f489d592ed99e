"""A budget that several processes share, at the door: what is held there, and what becomes of it."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from penstock.containment import accounts
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import Amounts, LedgerStore, MemoryLedgerStore, WouldBlock
from penstock.containment.limits import Budget, BudgetExceededError, ExecutionConfig, Limits
from penstock.errors import CancelledError, Halted, InvalidValue, LedgerError, LedgerUnavailable
from penstock.runtime.billing.usage import Reported
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.durable import shared as shared_budget
from penstock.runtime.durable.async_ledger import blocking
from penstock.runtime.durable.shared import MAX_INLINE_ACTS, SharedBudget
from penstock.stops import StopReason
from penstock.tracing.events import CallEnded, SafetyTrace

USD = 1_000_000_000


class Store:
    """A store in memory that fails, loses its answer or makes its callers wait on demand."""

    def __init__(self, **limits: int) -> None:
        self.inner = MemoryLedgerStore()
        self.inner.open_account("team", Limits(**limits))
        self.fails: dict[str, Exception] = {}
        self.loses_answers = False
        self.gates: dict[str, threading.Event] = {}
        self.reached = threading.Event()
        self.poll_s = self.inner.poll_s

    def __getattr__(self, name: str) -> Any:
        act = getattr(self.inner, name)

        def do(*args: Any, **options: Any) -> Any:
            if name in self.gates:
                self.reached.set()
                assert self.gates[name].wait(60)
            if name in self.fails:
                if self.loses_answers:
                    act(*args, **options)
                raise self.fails[name]
            return act(*args, **options)

        return do

    @property
    def figures(self) -> tuple[int, int, int]:
        """Spent, held and unresolved, in nano-dollars."""
        now = self.inner.balance("team")
        return now.spent_nanos, now.held_nanos, now.unresolved_nanos


def shared_with(store: Store, claim: str = "run/1") -> SharedBudget:
    return SharedBudget(store, "team", prefix=claim)


def never() -> None:
    raise AssertionError("it was not to run")


async def anever() -> None:
    raise AssertionError("it was not to run")


async def until(is_true: Callable[[], bool]) -> None:
    """Let the loop and the workers go on until it is so."""
    for _ in range(20_000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never was")


def until_sync(is_true: Callable[[], bool]) -> None:
    asyncio.run(until(is_true))


# A call that goes well.


def test_a_sync_call_is_held_and_settled_at_the_store_too() -> None:
    store = Store(cost_nanos=3 * USD)
    seen = []
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        assert run.llm(lambda: seen.append(store.figures) or "text", cost_hint_usd=1) == "text"
        assert seen == [(0, USD, 0)]
        assert store.figures == (USD, 0, 0)
    assert store.inner.balance("team").steps == 1


async def test_an_async_call_is_held_and_settled_at_the_store_too() -> None:
    store = Store(cost_nanos=3 * USD)

    async def ask() -> Reported[str]:
        assert dict(store.inner.held()) == {"run/1/n000002": Amounts(USD, 0, 0, 1)}
        return Reported.of("text", cost_usd=0.25, input_tokens=10, output_tokens=5)

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        assert await run.allm(ask, cost_hint_usd=1) == "text"
        now = store.inner.balance("team")
        assert (now.spent_nanos, now.tokens_in, now.tokens_out, now.api_calls) == (USD // 4, 10, 5, 1)
        assert dict(store.inner.held()) == {}


class Prompt(Store):
    """A store that decides itself whether it may be called inline."""

    def __init__(self, **limits: int) -> None:
        super().__init__(**limits)
        self.is_free = True
        self.held_by: list[str] = []

    def try_inline(self, ask: Callable[[], Any]) -> Any:
        if not self.is_free:
            raise WouldBlock
        return ask()

    def hold(self, *args: Any, **options: Any) -> Any:
        self.held_by.append(threading.current_thread().name.partition("-worker")[0])
        return self.inner.hold(*args, **options)


def ask(run: ExecutionContext, is_async: bool) -> Any:
    """What a call that costs half a dollar answers."""
    reported = Reported.of("text", cost_usd=0.5)

    async def aask() -> Reported[str]:
        return reported

    if is_async:
        return asyncio.run(run.allm(aask, cost_hint_usd=1))
    return run.llm(lambda: reported, cost_hint_usd=1)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_immediate_store_is_called_in_the_callers_thread(is_async: bool) -> None:
    store = Prompt()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        for is_free in (True, False, True):
            store.is_free = is_free
            assert ask(run, is_async) == "text"
    here = threading.current_thread().name
    assert store.held_by == [here, "penstock", here]
    assert store.figures == (3 * USD // 2, 0, 0)


def test_an_inline_answer_counts_even_if_the_store_raises_afterwards() -> None:
    class Forgetful(Prompt):
        def try_inline(self, ask: Callable[[], Any]) -> Any:
            ask()
            raise LedgerUnavailable("it has happened, and is not known")

    store = Forgetful()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        assert ask(run, is_async=False) == "text"
    assert store.figures == (USD // 2, 0, 0)


def test_an_inline_request_does_not_wait_for_a_flush_in_another_thread() -> None:
    store = Prompt()
    shared = shared_with(store)
    with ThreadPoolExecutor(1) as pool:
        gate = store.gates["settle"] = threading.Event()
        store.inner.hold("run/1/k", "team", Amounts(1))
        shared._open.add("run/1/k")
        shared.settled("run/1/k", Amounts(1), True)
        flushing = pool.submit(shared.flush)
        assert store.reached.wait(60)
        with pytest.raises(WouldBlock):
            shared.try_inline(shared.aflush)
        gate.set()
        assert flushing.result(60) == 0
    assert shared.try_inline(shared.aflush) == 0


def test_a_retry_not_drawn_at_the_store_is_not_drawn_when_the_request_is_repeated() -> None:
    class Busy(Prompt):
        def hold(self, *args: Any, **options: Any) -> Any:
            self.is_free = not self.is_free
            if self.is_free:
                return super().hold(*args, **options)
            raise WouldBlock  # at the first time of each

    store = Busy(retries=0)
    shared = shared_with(store)
    shared.retry_drawn("run/1/a")
    assert shared.flush() == 0, "the store had none to draw"
    with pytest.raises(WouldBlock):
        shared.try_inline(lambda: shared.take("run/1/b", Amounts(1), True))
    stop = blocking(shared.take("run/1/b", Amounts(1), True))
    assert stop is not None
    assert stop.reason is StopReason.RETRY_BUDGET_EXCEEDED


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_during_an_inline_request_leaves_nothing_held(is_async: bool) -> None:
    class Interrupted(Prompt):
        def hold(self, *args: Any, **options: Any) -> Any:
            super().hold(*args, **options)
            raise KeyboardInterrupt

    store = Interrupted()
    shared = shared_with(store)
    with ExecutionContext(shared_budget=shared) as run:
        with pytest.raises(KeyboardInterrupt):
            ask(run, is_async)
        assert shared.flush() == 0
        assert store.figures == (0, 0, 0)
        assert accounts.balance(run._account).held_nanos == 0


def test_an_inline_request_does_not_flush_a_long_queue() -> None:
    shared = shared_with(Prompt())
    for number in range(MAX_INLINE_ACTS + 1):
        shared.charged(f"k{number}", Amounts(1))
    with pytest.raises(WouldBlock):
        shared.try_inline(shared.aflush)
    assert shared.flush() == 0
    assert shared.try_inline(shared.aflush) == 0


async def test_tools_are_charged_at_the_store_and_steps_are_not() -> None:
    store = Store(cost_nanos=3 * USD)
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        assert await run.atool(lambda: 7, cost_hint_usd=1) == 7
        assert run.tool(lambda: 8, cost_hint_usd=1) == 8
        run.spawn_child("child").end()
    assert store.figures == (2 * USD, 0, 0)
    assert store.inner.balance("team").attempts == 2


async def test_runs_that_share_an_account_have_one_budget() -> None:
    store = Store(cost_nanos=3 * USD)
    runs = [ExecutionContext(shared_budget=shared_with(store, f"run/{number}")) for number in range(5)]
    calls = [run.acall_llm(lambda: "text", _hinted(1)) for run in runs]
    outcomes = await asyncio.gather(*calls)
    assert sum(outcome.call.stop is None for outcome in outcomes) == 3
    assert store.figures == (3 * USD, 0, 0)


def _hinted(usd: float, **more: Any) -> Any:
    from penstock.runtime.calls import WrapOptions

    return WrapOptions(cost_estimate_hint=usd, **more)


# What refuses.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_call_that_the_store_refuses_does_not_run_and_has_the_reason(is_async: bool) -> None:
    store = Store(cost_nanos=USD)
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        with pytest.raises(BudgetExceededError) as refused:
            asyncio.run(run.allm(anever, cost_hint_usd=2)) if is_async else run.llm(never, cost_hint_usd=2)
        assert refused.value.owner == "team"
        assert refused.value.budget == Budget(max_cost_dollars=1.0)
        assert run.stop is not None
        assert run.stop.reason is StopReason.BUDGET_EXCEEDED
        assert (run.balance.held_nanos, run.balance.attempts) == (0, 0)
        assert run.get_snapshot().nodes[-1].status in ("halted", "aborted")
    assert store.figures == (0, 0, 0)


def test_a_call_that_the_run_refuses_is_not_requested_from_the_store() -> None:
    store = Store()
    with ExecutionContext(ExecutionConfig(0.5, None, None), shared_budget=shared_with(store)) as run:
        assert run.call_llm(never, _hinted(1)).call.stop is not None
    assert store.inner.balance("team").attempts == 0


FAULTS = [
    LedgerUnavailable("gone"),
    LedgerError("another call has the key"),
    KeyError("no account 'team'"),
    OSError(5, "Input/output error"),
    sqlite3.OperationalError("disk I/O error"),
    TimeoutError("too long"),
    ConnectionResetError(),
    RuntimeError("can't start new thread"),
    ValueError("not even a fault of a store"),
    MemoryError(),
    RecursionError(),
]


@pytest.mark.requirement("P-B4")
@pytest.mark.parametrize("loses_answers", [False, True], ids=["not recorded", "recorded, and the answer lost"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_no_call_leaves_while_the_ledger_cannot_record(fault: Exception, is_async: bool, loses_answers: bool) -> None:
    store = Store()
    store.fails["hold"], store.loses_answers = fault, loses_answers
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        for _ in range(2):
            with pytest.raises(Halted) as refused:
                asyncio.run(run.allm(anever, cost_hint_usd=1)) if is_async else run.llm(never, cost_hint_usd=1)
            assert refused.value.stop_reason is StopReason.LEDGER_UNAVAILABLE
            assert "'team' cannot be held: " in refused.value.reason
        assert run.balance.held_nanos == run.balance.attempts == 0
        store.fails.clear()
        assert run.llm(lambda: "text", cost_hint_usd=1) == "text"
    assert store.figures == (USD, 0, 0), "what was recorded without our knowing was given back"
    assert store.inner.balance("team").attempts == 1


def test_a_refused_call_gives_the_breaker_its_permit_back() -> None:
    breaker = CircuitBreaker(failure_threshold=1, recovery_timeout=1e-9)
    store = Store()
    with ExecutionContext(shared_budget=shared_with(store), breaker=breaker) as run:
        run.call_llm(_broken)
        store.fails["hold"] = LedgerUnavailable("gone")
        assert run.call_llm(never).call.stop.reason is StopReason.LEDGER_UNAVAILABLE  # type: ignore[union-attr]
        store.fails.clear()
        assert run.llm(lambda: "the half-open breaker lets one through") == "the half-open breaker lets one through"


def _broken() -> None:
    raise ConnectionResetError("cut off")


# What a call comes to.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("error", "figures"),
    [
        (ConnectionResetError("cut off"), (0, 0, USD)),
        (ConnectionRefusedError("never connected"), (0, 0, 0)),
        (type("Billed", (Exception,), {"cost_usd": 0.5})(), (USD // 2, 0, 0)),
    ],
    ids=["unknown bill", "free", "billed"],
)
def test_a_failure_is_reported_as_it_was_settled(
    error: Exception, figures: tuple[int, int, int], is_async: bool
) -> None:
    store = Store()

    def work() -> None:
        raise error

    async def awork() -> None:
        raise error

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        outcome = asyncio.run(run.acall_llm(awork, _hinted(1))) if is_async else run.call_llm(work, _hinted(1))
        assert store.figures == figures
        assert (run.balance.spent_nanos, run.balance.held_nanos, run.balance.unresolved_nanos) == figures
        if figures[2]:
            outcome.call.settle(cost_usd=0.75)
            until_sync(lambda: store.figures == (3 * USD // 4, 0, 0))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_call_leaves_it_unresolved_at_the_store(kind: type[BaseException]) -> None:
    store = Store()

    def work() -> None:
        raise kind

    with pytest.raises(kind), ExecutionContext(shared_budget=shared_with(store)) as run:
        run.llm(work, cost_hint_usd=1)
    until_sync(lambda: store.figures == (0, 0, USD))


async def test_a_call_that_is_cancelled_from_outside_is_unresolved_at_the_store() -> None:
    store = Store()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        task = asyncio.create_task(run.allm(work, cost_hint_usd=1))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: store.figures == (0, 0, USD))


@pytest.mark.parametrize("ends_first", [False, True], ids=["while the run goes on", "after its end"])
def test_an_abandoned_call_is_unresolved_until_its_bill_comes(ends_first: bool) -> None:
    store = Store()
    go_on = threading.Event()

    def work() -> Reported[str]:
        assert go_on.wait(60)
        return Reported.of("late", cost_usd=0.25, input_tokens=3)

    run = ExecutionContext(shared_budget=shared_with(store))
    with suppress(Halted):
        run.llm(work, cost_hint_usd=1, timeout_s=0.3)  # long enough for the work to start on a busy machine
    until_sync(lambda: store.figures == (0, 0, USD))
    if ends_first:
        run.end()
    go_on.set()
    until_sync(lambda: store.figures == (USD // 4, 0, 0))
    assert store.inner.balance("team").tokens_in == 3
    run.end()


def test_the_bill_of_an_abandoned_call_is_reported_by_the_thread_that_knows_it() -> None:
    store, go_on = Store(), threading.Event()
    shared = shared_with(store)
    with ExecutionContext(shared_budget=shared) as run:
        call = run.call_llm(lambda: go_on.wait(60), _hinted(1, timeout_ms=300)).call
        with run._run.lock:
            accounts.settle(call, 7, 0, 0, True)  # as the worker does, which is stopped here for a moment
        shared_budget.note_end(shared, call)
        assert shared.flush() == 0
        assert store.figures == (0, 0, USD)
        shared_budget.note_late_bill(shared, call, 7, 0, 0)
        shared.flush()
        assert store.figures == (7, 0, 0)
        call._state = "unresolved"  # nothing is left for the function to settle but what this test has done
        go_on.set()


async def test_calls_still_running_when_the_run_ends_are_unresolved_at_the_store() -> None:
    store = Store()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        await asyncio.Event().wait()

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        task = asyncio.create_task(run.acall_llm(work, _hinted(1)))
        await begun.wait()
    await task
    await until(lambda: store.figures == (0, 0, USD))


def test_spending_without_a_hold_is_charged() -> None:
    store = Store()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        run.record_event(CallEnded(name="elsewhere", call_kind="llm", status="success", cost=5e-9, input_tokens=2))
    until_sync(lambda: store.figures == (5, 0, 0))
    now = store.inner.balance("team")
    assert (now.tokens_in, now.api_calls) == (2, 1)


async def test_the_reported_cost_of_a_graph_step_is_charged() -> None:
    from penstock.flow.graph import Graph
    from penstock.flow.node import FunctionNode

    store = Store()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        graph = Graph("g").add_step(FunctionNode("a", lambda ctx: Reported.of(1, cost_usd=0.5)), "a")
        await graph.execute(run)
        await until(lambda: store.figures == (USD // 2, 0, 0))


# Cancelled during a call of the store.


async def test_a_cancel_frees_a_caller_who_waits_for_the_store_and_what_was_taken_is_given_back() -> None:
    store = Store()
    store.gates["hold"] = threading.Event()
    shared = shared_with(store)
    with ExecutionContext(shared_budget=shared) as run:
        asking = asyncio.create_task(run.allm(anever, cost_hint_usd=1))
        await until(store.reached.is_set)
        run.abort("enough")
        with pytest.raises(CancelledError):
            await asking
        assert run.balance.held_nanos == 0
        store.gates["hold"].set()
        await until(lambda: store.inner._holds != {} and not store.inner.held())
        assert (shared.waiting, store.figures) == (0, (0, 0, 0))


async def test_a_task_cancelled_during_a_hold_request_holds_nothing() -> None:
    store = Store()
    store.gates["hold"] = threading.Event()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        asking = asyncio.create_task(run.allm(anever, cost_hint_usd=1))
        await until(store.reached.is_set)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert run.get_snapshot().nodes[-1].status in ("halted", "aborted")
        store.gates["hold"].set()
        await until(lambda: not dict(store.inner.held()) and store.inner._holds != {})
        assert store.figures == (0, 0, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_deadline_during_a_hold_request_stops_the_call(is_async: bool) -> None:
    store = Store()
    store.gates["hold"] = threading.Event()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        with pytest.raises(BudgetExceededError) as stopped:
            if is_async:
                asyncio.run(run.allm(anever, cost_hint_usd=1, timeout_s=0.05))
            else:
                run.llm(never, cost_hint_usd=1, timeout_s=0.05)
        assert stopped.value.stop_reason is StopReason.TIMEOUT
        store.gates["hold"].set()
        until_sync(lambda: store.inner._holds != {} and not store.inner.held())
    assert store.figures == (0, 0, 0)


def test_a_cancel_from_another_thread_frees_a_sync_caller_who_waits_for_the_store() -> None:
    store = Store()
    store.gates["hold"] = threading.Event()
    token = CancellationToken()

    def cancel() -> None:
        assert store.reached.wait(60)
        token.cancel("enough")

    thread = threading.Thread(target=cancel)
    thread.start()
    with ExecutionContext(shared_budget=shared_with(store), cancellation=token) as run, pytest.raises(CancelledError):
        run.llm(never, cost_hint_usd=1)
    thread.join()
    store.gates["hold"].set()
    until_sync(lambda: store.inner._holds != {} and not store.inner.held())
    assert store.figures == (0, 0, 0)


async def test_a_cancel_while_the_end_is_reported_does_not_wait_for_the_store() -> None:
    store = Store()
    store.gates["settle"] = threading.Event()
    with ExecutionContext(shared_budget=shared_with(store)) as run:
        asking = asyncio.create_task(run.acall_llm(lambda: "text", _hinted(1)))
        await until(store.reached.is_set)
        run.abort("enough")
        assert (await asking).value == "text", "it had succeeded before"
        store.gates["settle"].set()
        await until(lambda: store.figures == (USD, 0, 0))


# Ends that could not be recorded.


@pytest.mark.parametrize("loses_answers", [False, True], ids=["not recorded", "recorded, and the answer lost"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_end_that_cannot_be_reported_waits_and_the_run_continues(is_async: bool, loses_answers: bool) -> None:
    store = Store()
    shared = shared_with(store)
    store.fails["settle"], store.loses_answers = LedgerUnavailable("gone"), loses_answers
    with ExecutionContext(shared_budget=shared) as run:
        for _ in range(3):
            assert (asyncio.run(run.allm(_text, cost_hint_usd=1)) if is_async else run.llm(str, cost_hint_usd=1)) == ""
        assert shared.waiting == 3
        if not loses_answers:
            assert store.figures == (0, 3 * USD, 0), "an end that is not recorded stays held, which is the careful side"
        safety = [event for event in run.history() if isinstance(event, SafetyTrace)]
        assert [(one.event_type, one.hook) for one in safety] == [("ledger_unavailable", "SharedBudget")], (
            "emitted once"
        )
        assert "'team' could not record how 'run/1/n000002' ended" in safety[0].reason
        store.fails.clear()
        run.llm(str, cost_hint_usd=1)
        assert (shared.waiting, store.figures) == (0, (4 * USD, 0, 0))


async def _text() -> str:
    return ""


async def test_waiting_acts_can_be_flushed_without_another_call() -> None:
    store = Store()
    shared = shared_with(store)
    store.fails["settle"] = LedgerUnavailable("gone")
    with ExecutionContext(shared_budget=shared) as run:
        await run.allm(_text, cost_hint_usd=1)
    assert await shared.aflush() == 1
    store.fails.clear()
    assert await shared.aflush() == 0
    assert store.figures == (USD, 0, 0)


def test_one_act_that_always_fails_does_not_block_the_others() -> None:
    class Picky(Store):
        def __getattr__(self, name: str) -> Any:
            act = super().__getattr__(name)

            def do(key: str, *args: Any, **options: Any) -> Any:
                if name == "settle" and args[0].cost_nanos > 10 * USD:
                    raise LedgerUnavailable("a number is too large")
                return act(key, *args, **options)

            return do

    store = Picky()
    shared = shared_with(store)
    with ExecutionContext(shared_budget=shared) as run:
        run.llm(lambda: Reported.of("", cost_usd=11), cost_hint_usd=1)
        for _ in range(4):
            run.llm(str, cost_hint_usd=1)
        shared.flush()
        shared.flush()
    assert (shared.waiting, store.figures) == (1, (4 * USD, USD, 0))


def test_a_hold_that_was_ended_elsewhere_keeps_that_end() -> None:
    store = Store()
    shared = shared_with(store)
    with ExecutionContext(shared_budget=shared) as run:
        run.llm(lambda: [store.inner.release(key) for key in store.inner.held()], cost_hint_usd=1)
        safety = [event for event in run.history() if isinstance(event, SafetyTrace)]
    assert "a hold that is released cannot become settled" in safety[0].reason
    assert (shared.waiting, store.figures) == (0, (0, 0, 0))


# Retries.


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_retries_are_drawn_at_the_store_too(is_async: bool) -> None:
    store = Store(retries=10)
    attempts: list[int] = []

    def work() -> str:
        attempts.append(1)
        if len(attempts) < 4:
            raise ConnectionRefusedError
        return "text"

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        value = asyncio.run(run.allm(work, retries=5)) if is_async else run.llm(work, retries=5)
    assert (value, store.inner.balance("team").retries) == ("text", 3)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_retry_budget_that_others_have_used_up_refuses_the_next_attempt(is_async: bool) -> None:
    store = Store(retries=2)
    attempts: list[int] = []

    def work() -> None:
        attempts.append(1)
        raise ConnectionRefusedError

    with ExecutionContext(shared_budget=shared_with(store)) as run:
        with pytest.raises(BudgetExceededError) as stopped:
            asyncio.run(run.allm(work, retries=9)) if is_async else run.llm(work, retries=9)
        assert stopped.value.stop_reason is StopReason.RETRY_BUDGET_EXCEEDED
    assert len(attempts) == 3, "one, and the two retries that there are"
    assert store.inner.balance("team").retries == 2


# Claims.


def test_recovery_makes_only_the_holds_of_earlier_claims_unresolved() -> None:
    store = Store()
    for key in ("run/1/a", "run/1/b", "run/2/a", "run/20/a", "run-2/1/a", "other/1/a"):
        assert store.inner.hold(key, "team", Amounts(1)) is None
    store.inner.settle("run/1/b", Amounts(1))
    assert sorted(shared_with(store, "run/2").recover()) == ["run/1/a", "run/20/a"]
    assert set(store.inner.unresolved()) == {"run/1/a", "run/20/a"}
    assert set(store.inner.held()) == {"run/2/a", "run-2/1/a", "other/1/a"}
    assert shared_with(store, "run/2").recover() == ()


async def test_a_claim_that_was_adopted_while_it_was_at_work_still_settles() -> None:
    store = Store()

    async def work() -> Reported[None]:
        assert await shared_with(store, "run/2").arecover() == ("run/1/n000002",)
        return Reported.of(None, cost_usd=0.5)

    with ExecutionContext(shared_budget=shared_with(store, "run/1")) as run:
        await run.allm(work, cost_hint_usd=1)
    assert store.figures == (USD // 2, 0, 0)


def test_recovery_raises_if_the_store_is_unavailable() -> None:
    store = Store()
    store.inner.hold("run/1/a", "team", Amounts(1))
    store.fails["leave_unresolved"] = LedgerUnavailable("gone")
    with pytest.raises(LedgerUnavailable):
        shared_with(store, "run/2").recover()


@pytest.mark.parametrize("prefix", ["", "run", "/", "run/", "/1", None, 7])
def test_an_invalid_prefix_is_refused(prefix: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^prefix must be"):
        SharedBudget(MemoryLedgerStore(), "team", prefix=prefix)


@pytest.mark.parametrize("account", ["", None, 7])
def test_an_account_without_a_name_is_refused(account: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^account must be"):
        SharedBudget(MemoryLedgerStore(), account, prefix="run/1")


def test_an_invalid_shared_budget_is_refused() -> None:
    store: LedgerStore = MemoryLedgerStore()
    with pytest.raises(InvalidValue, match=r"^shared_budget must be SharedBudget or None"):
        ExecutionContext(shared_budget=store)  # type: ignore[arg-type]


ENDED_BEFORE: dict[str, Callable[[MemoryLedgerStore, str], None]] = {
    "settled": lambda store, key: store.settle(key, Amounts(USD)),
    "released": lambda store, key: store.release(key),
    "unresolved": lambda store, key: store.leave_unresolved(key),
    "held for another": lambda store, key: None,
}


@pytest.mark.parametrize("how", ENDED_BEFORE)
async def test_a_call_whose_key_is_another_calls_does_not_leave_and_takes_nothing_from_that_one(how: str) -> None:
    store = Store()
    store.inner.hold("run/1/n000002", "team", Amounts(2 * USD, api_calls=1))
    ENDED_BEFORE[how](store.inner, "run/1/n000002")
    before = store.inner.balance("team")
    shared = shared_with(store)
    async with ExecutionContext(shared_budget=shared) as run:
        with pytest.raises(Halted, match=r"needs a key of its own|was taken for") as refused:
            await run.allm(anever, cost_hint_usd=1)
        await shared.aflush()
    assert refused.value.stop.reason is StopReason.LEDGER_UNAVAILABLE
    assert store.inner.balance("team") == before
