"""INV 22: an exception from a signal handler, at any instruction, leaves the accounts and the tree consistent.

The injector raises at the k-th instruction of admission, settlement, waiting and recording, for every k. Real signals
follow, from a timer that fires as often as it can.
"""

from __future__ import annotations

import asyncio
import dis
import gc
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import penstock
from penstock import Budget, BudgetExceededError, ExecutionContext, RunSettings, contain
from penstock.containment import accounts
from penstock.containment.accounts import Account
from penstock.money import to_nanos
from penstock.runtime.call import running_call
from penstock.runtime.locking import unlock
from penstock.stores import MemoryLedgerStore, SharedBudget
from penstock.testing import check_history
from penstock.tracing import execution_graph
from penstock.tracing.events import SafetyTrace, ToolCallTrace
from tests.soak import SOAK, scaled

pytestmark = [pytest.mark.reliability]

SOURCE = Path(penstock.__file__).parent
INJECTED = {
    str(SOURCE / name)
    for name in (
        "containment/accounts.py",
        "containment/waiting.py",
        "runtime/admission.py",
        "runtime/bills.py",
        "runtime/remote_holds.py",
        "runtime/call.py",
        "runtime/execution.py",
        "runtime/locking.py",
        "runtime/run.py",
        "runtime/settlement.py",
        "runtime/waiting.py",
        "tracing/execution_graph.py",
        "tracing/record.py",
        "tracing/stats.py",
    )
}
SIGNALS = scaled(1_000, soak=100_000)
STRIDE = scaled(3, soak=1)


NOP = dis.opmap["NOP"]
"""No signal is handled there, and the compiler gives it no exception handler."""


class Interrupted(BaseException):
    """What the signal handler raises."""


class Injector:
    """Raises at the instruction of that number, counted over the files above."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        self.where = ""
        self.opcode = ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if frame.f_code.co_filename not in INJECTED:
                return None
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
        elif event == "opcode" and frame.f_code.co_code[frame.f_lasti] != NOP:
            self.count += 1
            if self.count == self.at:
                self.opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno} (instruction {frame.f_lasti})"
                raise Interrupted
        return self


@contextmanager
def injecting(at: int) -> Iterator[Injector]:
    injector = Injector(at)
    before = sys.gettrace()
    sys.settrace(injector)
    try:
        yield injector
    except Interrupted:
        pass
    finally:
        sys.settrace(before)


def nested(depth: int, usd: float = 10, **settings: Any) -> tuple[ExecutionContext, list[Account]]:
    """A run whose calls are paid from so many budgets, and these."""
    tokens = round(usd * 1_000)
    run = ExecutionContext(
        budget=Budget(max_cost_dollars=usd, max_tokens=tokens), settings=RunSettings(sync_calls="inline", **settings)
    )
    place = run
    for level in range(depth - 1):
        place = place.with_sub_budget(Budget(max_cost_dollars=usd - level, max_tokens=tokens - level))
    return place, accounts.levels_of(place._account)


def check(place: ExecutionContext, levels: list[Account], where: str) -> None:
    """The accounts agree with each other and with the tree, nothing is left open, and the next call works."""
    run = place._run
    assert not run.lock._is_owned(), where  # type: ignore[attr-defined]
    assert running_call.get() is None, where
    assert not run.queues, where
    open_calls = [record.name for record in run.graph.open_calls() if record is not run.graph.root]
    assert open_calls == [], where
    figures = [{name: getattr(level, name) for name in accounts.FIGURES} for level in levels]
    assert all(one == figures[0] for one in figures), (where, figures)
    level = levels[0]
    assert (level.held, level.tokens_held, level.steps_open) == (0, 0, 0), where
    spent = level.committed - level.unresolved
    records = run.graph._ended
    kept = sum(record.cost + (record.settled.cost if record.settled else 0) for record in records)
    assert spent == kept + sum(folded.cost for folded in run.graph.folded.values()), where
    assert level.unresolved == sum(to_nanos(bill.held_usd, "held") for bill in place.unresolved()), where
    if not run.graph.folded:
        assert level.retries == sum(record.retries for record in records), where
    if not run.graph.folded:
        assert run.unknown_costs == sum(record.extras.cost_unknown for record in records), where
    assert run.first_calls == (), where
    assert place.tool(lambda: "next", cost_hint_usd=0) == "next", where
    # At last the readers: they have locks of their own, and count each entry once.
    assert to_nanos(place.stats.total_cost, "cost") == spent, where
    assert [event.seq for event in place.history()] == list(range(run.graph._first_seq, run.graph.seq + 1)), where


def succeeds(place: ExecutionContext) -> None:
    def work() -> None:
        place.report(cost_usd=0.01, input_tokens=3, output_tokens=2)

    place.llm(work, cost_hint_usd=0.5)


def fails(place: ExecutionContext) -> None:
    def work() -> None:
        raise ValueError("broken")

    with suppress(ValueError):
        place.llm(work, cost_hint_usd=0.5)


def fails_at_a_known_cost(place: ExecutionContext) -> None:
    def work() -> None:
        place.report(cost_usd=0.01, input_tokens=3, output_tokens=2)
        raise ValueError("broken")

    with suppress(ValueError):
        place.llm(work, cost_hint_usd=0.5)


def is_refused(place: ExecutionContext) -> None:
    with suppress(BudgetExceededError):
        place.llm(lambda: None, cost_hint_usd=50)


def is_of_unknown_cost(place: ExecutionContext) -> None:
    place.llm(lambda: place.report(cost_usd=0.01))


def is_nested(place: ExecutionContext) -> None:
    place.tool(lambda: place.llm(lambda: place.report(cost_usd=0.01), cost_hint_usd=0.1), cost_hint_usd=0.2)


def is_stuck(place: ExecutionContext) -> None:
    def outer() -> None:
        with suppress(BudgetExceededError):
            place.llm(lambda: None, cost_hint_usd=3)

    place.tool(outer, cost_hint_usd=3.5)


def waits(place: ExecutionContext) -> None:
    async def main() -> None:
        async def work(number: int) -> None:
            await asyncio.sleep(0)
            place.report(cost_usd=0.01)
            if number == 0:
                raise ValueError("broken")

        await asyncio.gather(*(place.allm(work, n, cost_hint_usd=2.5) for n in range(3)), return_exceptions=True)

    asyncio.run(main())


def is_stuck_at_the_end_of_another(place: ExecutionContext) -> None:
    """When the other call inside has ended, nothing is left that the one which waits could wait for."""

    async def main() -> None:
        async def other() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)

        async def outer() -> None:
            inside = (place.allm(other, cost_hint_usd=0.1), place.allm(other, cost_hint_usd=3))
            await asyncio.gather(*inside, return_exceptions=True)

        await place.atool(outer, cost_hint_usd=3.5)

    asyncio.run(main())


SCENARIOS = [
    succeeds,
    fails,
    fails_at_a_known_cost,
    is_refused,
    is_of_unknown_cost,
    is_nested,
    is_stuck,
    is_stuck_at_the_end_of_another,
    waits,
]
CASES = [(scenario, depth) for scenario in SCENARIOS for depth in (1, 2, 7)]
if not SOAK:  # the longest take half a minute each
    CASES = [(scenario, depth) for scenario, depth in CASES if depth == 1 or (scenario, depth) == (succeeds, 7)]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("scenario", "depth"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_inv_22_an_exception_at_any_instruction_leaves_accounts_and_tree_consistent(
    scenario: Callable[[ExecutionContext], None], depth: int
) -> None:
    # In a soak every instruction; else one of three, and of what two scenarios share not the same ones.
    at = CASES.index((scenario, depth)) % STRIDE
    while True:
        at += STRIDE
        place, levels = nested(depth)
        with injecting(at) as injector:
            scenario(place)
        if not injector.where:
            break
        check(place, levels, injector.where)
    assert at > 200, "the injector saw the instructions"


def left_unresolved(place: ExecutionContext) -> None:
    def work() -> None:
        raise ConnectionError("lost")

    with suppress(ConnectionError):
        place.llm(work, cost_hint_usd=0.5)


def newest_bill(place: ExecutionContext) -> str:
    return next(reversed(place._run.bills or {}))


def resolves(place: ExecutionContext) -> None:
    place.resolve(newest_bill(place), cost_usd=0.7, by="Ada", input_tokens=3)


def releases(place: ExecutionContext) -> None:
    place.release(newest_bill(place), by="Ada")


def twenty_calls(place: ExecutionContext) -> None:
    for _ in range(20):
        succeeds(place)


def ends_more_than_is_kept(place: ExecutionContext) -> None:
    is_nested(place)


def records_a_call_from_elsewhere(place: ExecutionContext) -> None:
    place.record_event(ToolCallTrace(name="elsewhere", cost=0.25, cost_unknown=True))


def reads(place: ExecutionContext) -> None:
    assert place.stats.total_cost


ACTS = [
    (left_unresolved, resolves),
    (left_unresolved, releases),
    (succeeds, records_a_call_from_elsewhere),
    (twenty_calls, ends_more_than_is_kept),
    (twenty_calls, reads),
]


@pytest.mark.parametrize("depth", [1, 7] if SOAK else [2])
@pytest.mark.parametrize(("prepare", "act"), ACTS, ids=lambda each: str(each.__name__))
def test_inv_22_what_changes_a_run_beside_its_calls_is_done_wholly_or_not_at_all(
    prepare: Callable[[ExecutionContext], None],
    act: Callable[[ExecutionContext], None],
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(execution_graph, "TRIM_CHUNK", 4)
    at, is_long = 0, prepare is twenty_calls
    while True:
        at += scaled(13, soak=1) if is_long else STRIDE
        place, levels = nested(depth, max_kept_calls=8 if is_long else 100)
        prepare(place)
        with injecting(at) as injector:
            act(place)
        if not injector.where:
            break
        if act is reads:  # the injector strikes between the body and the end of a `with` block as well, no signal does
            unlock(place._run.lock)
        if act in (resolves, releases):  # also the name of the person is recorded, once
            recorded = [event.kind for event in place.history() if isinstance(event, SafetyTrace)]
            kept = list(place._run.safety_events or ())
            assert len(recorded) == len(kept) == (not place.unresolved()), injector.where
        check(place, levels, injector.where)
    assert at > 200, "the injector saw the instructions"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("prepare", "act"), [(succeeds, succeeds), (succeeds, fails), *ACTS[:3]], ids=lambda each: str(each.__name__)
)
def test_inv_22_a_shared_budget_learns_of_what_was_interrupted(
    prepare: Callable[[ExecutionContext], None], act: Callable[[ExecutionContext], None]
) -> None:
    at = 0
    while True:
        at += STRIDE
        store = MemoryLedgerStore()
        store.open_account("team", Budget(max_cost_dollars=10).limits())
        shared = SharedBudget(store, "team", prefix="r/1")
        place = ExecutionContext(shared_budget=shared, settings=RunSettings(sync_calls="inline"))
        prepare(place)
        with injecting(at) as injector:
            act(place)
        if not injector.where:
            break
        if injector.where.startswith("hold:") and injector.opcode == "RETURN_VALUE":
            continue  # the store loses a hold that it was about to return; no signal is handled there
        shared.flush()
        there, here = store.balance("team"), place.balance
        for figure in ("spent_nanos", "held_nanos", "unresolved_nanos", "tokens_in"):
            assert getattr(there, figure) == getattr(here, figure), (figure, injector.where)
    gc.collect()  # coroutines that were never awaited warn here, and not in another test
    assert at > 200, "the injector saw the instructions"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a finalizer, and lost
def test_inv_22_real_signals_leave_accounts_and_tree_consistent() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    place, levels = nested(7, 1e8, max_kept_calls=1_000)
    struck = 0
    try:
        ends = time.monotonic() + 600
        while struck < SIGNALS and time.monotonic() < ends:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.00002 + (struck % 97) * 0.0000017)  # once
                for _ in range(1_000):  # not for ever: an exception raised in a finalizer is lost
                    succeeds(place)
            except Interrupted:
                struck += 1
            if struck % 50 == 0:
                held = [(level.held, level.steps_open, level.tokens_held) for level in levels]
                assert held == [(0, 0, 0)] * 7, struck
                assert not place._run.lock._is_owned()  # type: ignore[attr-defined]
                for bill in place.unresolved():
                    place.release(bill.call_id, by="Ada")
                assert [level.unresolved for level in levels] == [0] * 7, struck
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert struck == SIGNALS
    assert running_call.get() is None
    assert [record.name for record in place._run.graph.open_calls()] == ["main"]
    check(place, levels, "at the end")


def test_inv_22_a_run_that_was_interrupted_has_a_consistent_history() -> None:
    for at in range(1, 2_000, 7):
        run = contain(max_cost_usd=1, sync_calls="inline")
        with injecting(at):
            succeeds(run)
        run.end()
        assert check_history(run.history()) == [], at
