"""A token is cancelled once, by anybody, from anywhere; all that waits or works below it learns it, and why."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from penstock import (
    CancellationToken,
    CancelledError,
    CircuitBreaker,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    InvalidValue,
    RunSettings,
    WrapOptions,
)
from penstock.runtime import cancellation
from penstock.runtime.cancellation import Cancellation, Cause
from penstock.stops import Stop, StopReason
from penstock.testing import ManualClock, SimLoop, check_history, explore, sim_run

PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


def until(holds: Callable[[], object]) -> None:
    tick = threading.Event()
    for _ in range(3_000):
        if holds():
            return
        tick.wait(0.01)
    raise AssertionError("it never came to hold")


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# The tree, and the cause as data.


@pytest.mark.requirement("P-C1")
def test_a_fresh_token_is_not_cancelled_and_has_no_cause() -> None:
    token = CancellationToken()
    token.check()
    assert (token.is_cancelled, token.cause, token.reason, token.stop) == (False, None, None, None)


@pytest.mark.requirement("P-C1")
def test_a_cancel_reaches_all_below_and_nothing_above_or_beside() -> None:
    root = CancellationToken()
    left, right = root.child("left"), root.child("right")
    leaf = left.child("leaf")
    assert left.cancel("enough")
    assert [token.is_cancelled for token in (root, right, left, leaf)] == [False, False, True, True]
    assert (left.cause, leaf.cause) == ("user", "parent")
    assert left.stop is leaf.stop
    assert (leaf.reason, leaf.stop and leaf.stop.budget) == ("enough", "left")


@pytest.mark.requirement("P-C1")
@pytest.mark.parametrize("cause", ["user", "limit", "shutdown", "abandoned_stream"])
def test_a_cancel_may_have_a_cause_and_a_reason(cause: Cause) -> None:
    token = CancellationToken()
    below = token.child()
    token.cancel("why", cause=cause)
    assert (token.cause, below.cause, below.reason) == (cause, "parent", "why")


def test_the_stop_of_a_cancel_is_passed_to_all_tokens_below() -> None:
    token = CancellationToken()
    below = token.child().child()
    stop = Stop(StopReason.DIVERGED, "in circles")
    token.cancel(stop=stop, cause="limit")
    assert below.cancellation == Cancellation("parent", stop)
    with pytest.raises(CancelledError) as raised:
        below.check()
    assert raised.value.stop is stop


@pytest.mark.requirement("P-C1")
def test_the_first_reason_wins() -> None:
    token = CancellationToken()
    assert [token.cancel("first"), token.cancel("second"), token.cancel("third", cause="limit")] == [True, False, False]
    assert (token.reason, token.cause) == ("first", "user")


def test_a_child_that_was_cancelled_keeps_its_own_reason_when_its_parent_follows() -> None:
    token = CancellationToken()
    child = token.child()
    child.cancel("its own")
    token.cancel("all of you")
    assert (child.reason, child.cause) == ("its own", "user")


def test_exactly_one_of_a_hundred_cancelling_threads_is_the_first() -> None:
    token = CancellationToken()
    below = token.child()
    together, firsts = threading.Barrier(100), []

    def cancel(number: int) -> None:
        together.wait()
        if token.cancel(f"thread {number}"):
            firsts.append(f"thread {number}")

    threads = [in_a_thread(partial(cancel, number)) for number in range(100)]
    assert all(ended(thread) for thread in threads)
    assert firsts == [token.reason] == [below.reason]


@pytest.mark.requirement("P-C1")
def test_a_child_made_after_the_cancel_is_born_cancelled() -> None:
    token = CancellationToken()
    token.cancel("over")
    late = token.child("late").child("later")
    assert (late.is_cancelled, late.cause, late.reason) == (True, "parent", "over")


def test_no_child_slips_through_between_being_made_and_the_cancel_of_its_parent() -> None:
    for _ in range(50):
        token, together, made = CancellationToken(), threading.Barrier(2), list[CancellationToken]()

        def make(token: CancellationToken, together: threading.Barrier, made: list[CancellationToken]) -> None:
            together.wait()
            made.extend(token.child() for _ in range(20))

        thread = in_a_thread(partial(make, token, together, made))
        together.wait()
        token.cancel()
        assert ended(thread)
        assert all(child.cancellation is not None for child in made)


def test_unreferenced_children_are_collected() -> None:
    token = CancellationToken(deadline_s=60)
    gc.disable()
    try:
        gone = [weakref.ref(token.child(f"child {number}", deadline_s=30)) for number in range(100)]
        assert [child for child in gone if child() is not None] == []  # by counting alone: no cycle keeps them
    finally:
        gc.enable()


@pytest.mark.requirement("P-C1")
def test_a_cancel_passes_through_otherwise_unreferenced_tokens() -> None:
    token = CancellationToken()
    leaf = token.child("middle").child("leaf")
    run = ExecutionContext(cancellation=token.child("for the run"))
    gc.collect()
    token.cancel("from the top")
    assert (leaf.reason, run.cancellation.reason) == ("from the top", "from the top")


def test_a_deep_tree_is_cancelled_to_its_bottom() -> None:
    levels = [CancellationToken()]
    for _ in range(800):
        levels.append(levels[-1].child())
    levels[0].cancel("down")
    assert levels[-1].reason == "down"


# Deadlines.


@pytest.mark.requirement("P-C1")
def test_a_deadline_cancels_with_the_figures_of_whose_it_was() -> None:
    clock = ManualClock()
    token = CancellationToken(deadline_s=2, name="run", clock=clock)
    clock.advance(1.999)
    token.check()
    assert token.seconds_left() == pytest.approx(0.001)
    clock.advance(0.001)
    with pytest.raises(CancelledError):
        token.check()
    assert token.cause == "deadline"
    stop = token.stop
    assert stop is not None
    assert (stop.reason, stop.budget, stop.unit, stop.limit, stop.used) == ("timeout", "run", "seconds", 2.0, 2.0)
    assert token.seconds_left() == 0.0


def test_a_token_without_a_deadline_has_no_seconds_left() -> None:
    assert CancellationToken().child().seconds_left() is None


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "5", 1e10])
def test_an_invalid_deadline_is_refused_by_name(seconds: Any) -> None:
    with pytest.raises(InvalidValue, match="deadline_s"):
        CancellationToken(deadline_s=seconds)


def test_a_deadline_of_zero_has_passed_immediately() -> None:
    token = CancellationToken(deadline_s=0, clock=ManualClock())
    assert (token.is_cancelled, token.cause) == (True, "deadline")


def test_a_cancel_that_came_before_the_deadline_stays_the_reason() -> None:
    clock = ManualClock()
    token = CancellationToken(deadline_s=1, clock=clock)
    token.cancel("first")
    clock.advance(5)
    assert (token.is_cancelled, token.reason) == (True, "first")


@pytest.mark.requirement("P-C1")
@pytest.mark.parametrize(("own_s", "left_s"), [(None, 9.0), (3.0, 3.0), (100.0, 9.0)], ids=["none", "earlier", "later"])
def test_a_child_is_never_due_later_than_its_parent(own_s: float | None, left_s: float) -> None:
    clock = ManualClock()
    parent = CancellationToken(deadline_s=10, clock=clock)
    clock.advance(1)
    assert parent.child(deadline_s=own_s).seconds_left() == left_s


@pytest.mark.requirement("C-11")
@pytest.mark.parametrize("own_s", [None, 100.0, 0.5], ids=["none of its own", "a later one", "the same instant"])
def test_an_inherited_deadline_cancels_its_owner_and_all_tokens_below(
    own_s: float | None,
) -> None:
    clock = ManualClock()
    run = CancellationToken(deadline_s=1, name="run", clock=clock)
    clock.advance(0.5)
    call, beside = run.child("call", deadline_s=own_s), run.child("beside")
    inner = call.child("inner")
    clock.advance(1)
    assert inner.is_cancelled
    stop = inner.stop
    assert stop is not None
    assert (stop.budget, stop.limit, stop.used) == ("run", 1.0, 1.5)
    assert [token.cause for token in (run, call, beside, inner)] == ["deadline", "parent", "parent", "parent"]


def test_the_wall_clock_moves_no_deadline() -> None:
    clock = ManualClock()
    token = CancellationToken(deadline_s=10, clock=clock)
    clock.jump_wall(86_400)
    assert not token.is_cancelled
    clock.jump_wall(-2 * 86_400)
    clock.advance(10)
    assert token.is_cancelled


@pytest.mark.requirement("P-C1")
def test_a_waiter_wakes_at_the_deadline_and_not_before() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        token = CancellationToken(deadline_s=3600, clock=loop.clock)
        await token.child().child().wait()
        assert token.cause == "deadline"
        return loop.time()

    assert sim_run(main, seed=1) == pytest.approx(3600)


def test_a_waiter_is_not_lost_when_its_timer_fires_before_the_clock_agrees() -> None:
    class Slow:
        """A clock that runs a little behind the loop's."""

        def __init__(self, loop: SimLoop) -> None:
            self.loop = loop

        def monotonic_ns(self) -> int:
            return self.loop.clock.monotonic_ns() * 999 // 1000

        def time_ns(self) -> int:
            return self.loop.clock.time_ns()

    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        await CancellationToken(deadline_s=100, clock=Slow(loop)).wait()
        waited_s = loop.time()
        run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=100_000), clock=Slow(loop))
        assert await run.awrap_tool_call(lambda: asyncio.sleep(10_000)) is Decision.HALT
        return waited_s, loop.time() - waited_s

    for waited_s in sim_run(main, seed=1):
        assert waited_s == pytest.approx(100.1, abs=0.05)


def test_a_deadline_is_kept_on_a_second_loop_after_the_first_is_gone() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=200))
    assert asyncio.run(run.awrap_tool_call(lambda: asyncio.sleep(0))) is Decision.ALLOW

    async def on_the_second_loop() -> Decision:
        async with asyncio.timeout(PATIENCE_S):
            return await run.awrap_tool_call(asyncio.Event().wait)

    assert asyncio.run(on_the_second_loop()) is Decision.HALT
    assert run.cancellation.cause == "deadline"


def test_timers_of_loops_that_were_closed_do_not_pile_up() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=600_000))
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def ask() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await run.awrap_tool_call(lambda: asyncio.sleep(0))

    for _ in range(20):
        asyncio.run(ask())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1
    run.end()


async def test_the_timer_of_a_call_that_is_over_keeps_nothing_alive() -> None:
    run = ExecutionContext()
    outcome = await run.acall_tool(_done, WrapOptions(timeout_ms=3_600_000))
    token = weakref.ref(outcome.call.token)
    del outcome
    gc.collect()
    assert token() is None


async def test_a_loop_whose_timers_do_not_know_their_loop_will_do() -> None:
    class Bare:
        """What some loops return: a timer that can be cancelled, and nothing more."""

        def __init__(self, timer: asyncio.TimerHandle) -> None:
            self.cancel = timer.cancel
            self.when = timer.when

    loop = asyncio.get_running_loop()
    plain = loop.call_later
    loop.call_later = lambda *args, **options: Bare(plain(*args, **options))  # type: ignore[method-assign, assignment]
    run = ExecutionContext()
    assert await run.awrap_tool_call(_done, WrapOptions(timeout_ms=60_000)) is Decision.ALLOW
    forever = asyncio.Event()
    assert await run.awrap_tool_call(forever.wait, WrapOptions(timeout_ms=20)) is Decision.HALT


async def _done() -> str:
    return "done"


# Waiting.


@pytest.mark.requirement("P-C1")
async def test_waiting_on_a_cancelled_token_returns_immediately() -> None:
    token = CancellationToken()
    token.cancel()
    await token.wait()
    assert token.wait_sync() is True


@pytest.mark.requirement("P-C1")
@pytest.mark.parametrize("waiters", [1, 50])
async def test_a_cancel_from_another_thread_wakes_every_waiter_of_the_tree(waiters: int) -> None:
    root = CancellationToken()
    children = [root.child(str(number)) for number in range(waiters)]
    waiting = [asyncio.create_task(token.wait()) for token in (root, *children)]
    await turns(1)
    thread = in_a_thread(root.cancel)
    await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE_S)
    assert ended(thread)


@pytest.mark.requirement("P-C1")
def test_a_cancel_wakes_threads_that_wait() -> None:
    root = CancellationToken(deadline_s=3600)
    answers: list[bool] = []
    started = threading.Barrier(11)

    def wait(token: CancellationToken) -> None:
        started.wait()
        answers.append(token.wait_sync())

    threads = [in_a_thread(lambda: wait(root.child())) for _ in range(10)]
    started.wait()
    root.cancel()
    assert all(ended(thread) for thread in threads)
    assert answers == [True] * 10


@pytest.mark.parametrize("timeout_s", [0, 0.001, -1])
def test_a_thread_whose_wait_times_out_learns_that_nothing_was_cancelled(timeout_s: float) -> None:
    assert CancellationToken().wait_sync(timeout_s) is False
    assert CancellationToken(deadline_s=3600).wait_sync(timeout_s) is False


def test_a_waiting_thread_notices_the_deadline() -> None:
    token = CancellationToken(deadline_s=0.02)
    assert token.wait_sync(PATIENCE_S) is True
    assert token.cause == "deadline"


async def test_a_waiter_that_is_cancelled_itself_leaves_nothing_behind() -> None:
    token = CancellationToken(deadline_s=3600)
    waiting = asyncio.create_task(token.wait())
    await turns(2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert token._callbacks == {}
    assert not token.is_cancelled


def test_a_waiter_whose_loop_was_closed_under_it_does_not_keep_the_cancel_from_others() -> None:
    token = CancellationToken()
    called: list[str] = []
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(token.wait())
    loop.run_until_complete(asyncio.sleep(0))
    token.add_callback(lambda: called.append("other"))
    loop.close()
    assert token.cancel()
    assert called == ["other"]
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    waiting.get_coro().close()


async def test_a_waiter_on_a_runs_token_sees_an_outer_cancel_after_the_run_has_ended() -> None:
    outside = CancellationToken()
    run = ExecutionContext(cancellation=outside)
    waiting = asyncio.create_task(run.cancellation.wait())
    await turns(1)
    run.end()
    outside.cancel("shutting down")
    await asyncio.wait_for(waiting, PATIENCE_S)


# Callbacks.


@pytest.mark.requirement("P-C1")
def test_a_callback_is_called_once_however_often_the_token_is_cancelled() -> None:
    token, called = CancellationToken(), list[int]()
    token.add_callback(lambda: called.append(1))
    token.cancel()
    token.cancel()
    assert called == [1]


@pytest.mark.requirement("P-C1")
def test_a_callback_that_was_taken_back_is_not_called_and_may_be_taken_back_again() -> None:
    token, called = CancellationToken(), list[int]()
    remove = token.add_callback(lambda: called.append(1))
    remove()
    token.cancel()
    remove()
    assert called == []


@pytest.mark.requirement("P-C1")
def test_a_callback_on_a_cancelled_token_is_called_immediately() -> None:
    token, called = CancellationToken(), list[int]()
    token.cancel()
    remove = token.add_callback(lambda: called.append(1))
    assert called == [1]
    remove()
    token.cancel()
    assert called == [1]


@pytest.mark.requirement("P-C1")
def test_a_callback_that_raises_does_not_stop_the_others() -> None:
    token, called = CancellationToken(), list[str]()

    def fails() -> None:
        raise RuntimeError("no")

    for callback in (lambda: called.append("first"), fails, lambda: called.append("last")):
        token.add_callback(callback)
    below = token.child()
    below.add_callback(lambda: called.append("below"))
    assert token.cancel()
    assert called == ["first", "last", "below"]


@pytest.mark.requirement("C-14")
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, CancelledError])
def test_a_base_exception_of_a_callback_is_raised_after_the_others_were_called(kind: type[BaseException]) -> None:
    token, called = CancellationToken(), list[str]()

    def interrupted() -> None:
        raise kind

    token.add_callback(interrupted)
    token.add_callback(lambda: called.append("others"))
    with pytest.raises(kind):
        token.cancel()
    assert called == ["others"]
    assert token.is_cancelled


def test_a_callback_may_use_the_token_it_listens_to() -> None:
    token, called = CancellationToken(), list[object]()

    def look() -> None:
        called.append(token.reason)
        called.append(token.cancel("again"))
        called.append(token.child().reason)
        token.add_callback(lambda: called.append("nested"))

    token.add_callback(look)
    token.cancel("first")
    assert called == ["first", False, "first", "nested"]


def test_callbacks_added_during_a_cancel_are_each_called_exactly_once() -> None:
    for _ in range(50):
        token, together, calls = CancellationToken(), threading.Barrier(2), dict[int, int]()

        def count(calls: dict[int, int], number: int) -> None:
            calls[number] = calls.get(number, 0) + 1

        def add(token: CancellationToken, together: threading.Barrier, calls: dict[int, int]) -> None:
            together.wait()
            for number in range(30):
                token.add_callback(partial(count, calls, number))

        thread = in_a_thread(partial(add, token, together, calls))
        together.wait()
        token.cancel()
        assert ended(thread)
        assert calls == dict.fromkeys(range(30), 1)


# Reaching work under way.


@pytest.mark.requirement("C-4")
def test_an_interruption_that_arrives_after_the_call_does_not_hit_what_the_task_does_next() -> None:
    """The call ends between the cancel in the other thread and the moment the loop gets to deliver it."""

    async def main() -> str:
        run = ExecutionContext()

        async def work() -> str:
            # Blocks the loop on purpose: the delivery is in its queue when the call ends.
            assert ended(in_a_thread(partial(run.abort, "too late")))
            return "done"

        outcome = await run.acall_tool(work)
        assert outcome.decision is Decision.HALT
        await asyncio.sleep(0.001)
        await turns()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        return "what came next was left alone"

    assert asyncio.run(main()) == "what came next was left alone"


@pytest.mark.requirement("C-4", "P-C1")
def test_a_token_shared_by_tasks_of_two_loops_in_two_threads_reaches_both() -> None:
    run = ExecutionContext()
    under_way, decisions = threading.Barrier(3), list[Decision]()

    async def ask() -> None:
        async def work() -> None:
            asyncio.get_running_loop().call_soon(under_way.wait)
            await asyncio.Event().wait()

        decisions.append(await run.awrap_tool_call(work))
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    threads = [in_a_thread(lambda: asyncio.run(ask())) for _ in range(2)]
    under_way.wait(PATIENCE_S)
    run.abort("both")
    assert all(ended(thread) for thread in threads)
    assert decisions == [Decision.HALT] * 2


@pytest.mark.requirement("C-4")
def test_one_loop_cancels_the_work_of_another_and_continues() -> None:
    run = ExecutionContext()
    under_way, decisions = threading.Event(), list[Decision]()

    async def elsewhere() -> None:
        async def work() -> None:
            under_way.set()
            await asyncio.Event().wait()

        decisions.append(await run.awrap_tool_call(work))

    async def here() -> str:
        run.abort("from the other loop")
        await asyncio.sleep(0)
        return "went on"

    thread = in_a_thread(lambda: asyncio.run(elsewhere()))
    assert under_way.wait(PATIENCE_S)
    assert asyncio.run(here()) == "went on"
    assert ended(thread)
    assert decisions == [Decision.HALT]


def test_a_watched_task_whose_loop_was_closed_is_passed_over() -> None:
    run, called = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=60_000)), list[str]()
    loop = asyncio.new_event_loop()
    task = loop.create_task(run.acall_tool(asyncio.Event().wait))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    run.cancellation.add_callback(lambda: called.append("called"))
    run.abort("the loop is gone")
    run.end()
    assert called == ["called"]
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    task.get_coro().close()


@pytest.mark.requirement("C-4")
async def test_a_call_is_still_reached_after_a_call_inside_it_is_over() -> None:
    run, forever = ExecutionContext(), asyncio.Event()

    async def outer() -> None:
        assert await run.awrap_tool_call(_done) is Decision.ALLOW
        await forever.wait()

    asking = asyncio.create_task(run.awrap_tool_call(outer))
    await turns()
    run.abort("enough")
    assert await asyncio.wait_for(asking, PATIENCE_S) is Decision.HALT


@pytest.mark.requirement("C-4")
async def test_a_thousand_calls_in_flight_are_all_stopped_by_one_cancel() -> None:
    run = ExecutionContext()
    forever = asyncio.Event()
    asking = [asyncio.create_task(run.awrap_tool_call(forever.wait)) for _ in range(1_000)]
    await turns(2)
    run.abort("all of you")
    await turns(3)
    assert all(task.done() for task in asking)
    assert {task.result() for task in asking} == {Decision.HALT}


def test_in_any_order_a_cancel_stops_exactly_what_is_under_way() -> None:
    async def schedule(seed: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        run = ExecutionContext(clock=loop.clock)
        decided: list[tuple[float, Decision]] = []

        async def ask(seconds: float) -> None:
            decided.append((seconds, await run.awrap_tool_call(lambda: asyncio.sleep(seconds))))
            await asyncio.sleep(1)  # nothing may strike here
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

        asking = [asyncio.ensure_future(ask(seconds)) for seconds in (0.01, 0.02, 0.03, 0.04)]
        loop.call_later(0.025, run.abort, "in the middle")
        await asyncio.gather(*asking)
        assert sorted(decided) == [
            (s, Decision.ALLOW if s < 0.025 else Decision.HALT) for s in (0.01, 0.02, 0.03, 0.04)
        ]

    explore(schedule, schedules=100)


# A signal handler strikes anywhere.


@contextlib.contextmanager
def on_alarm(act: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: act())
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.requirement("C-4")
def test_a_signal_handler_that_aborts_wakes_a_loop_that_sleeps() -> None:
    run = ExecutionContext()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(PATIENCE_S, lambda: None)  # what wakes it if the signal does not
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert await run.awrap_tool_call(asyncio.Event().wait) is Decision.HALT
        return loop.time()

    started = time.monotonic()
    with on_alarm(lambda: run.abort("SIGALRM")):
        assert asyncio.run(main()) - started < PATIENCE_S / 2


@pytest.mark.requirement("P-C1")
def test_a_signal_handler_that_cancels_wakes_the_thread_it_interrupted() -> None:
    token = CancellationToken()
    with on_alarm(token.cancel):
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        assert token.wait_sync(PATIENCE_S) is True


def test_a_signal_handler_may_cancel_from_inside_a_callback_of_the_same_cancel() -> None:
    token, called = CancellationToken(), list[object]()
    with on_alarm(lambda: called.append(token.cancel("again"))):
        token.add_callback(lambda: signal.raise_signal(signal.SIGALRM))
        token.add_callback(lambda: called.append("next"))
        assert token.cancel("first")
    assert called == [False, "next"]
    assert token.reason == "first"


Scene = tuple[Callable[[], object], Callable[[], object], Callable[[int], None]]
"""What strikes, what is struck, and what must hold afterwards."""

PACKAGE = str(Path(cancellation.__file__).parents[1])


def strike(at: int, act: Callable[[], object], work: Callable[[], object]) -> bool:
    """Run `work` and, as a signal handler would, `act` in the middle: before the line number `at` of those it runs.

    Lines of this package and of `threading` count. False if `work` has no more than `at` lines.
    """
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith((PACKAGE, threading.__file__)):
            return None
        if event == "line":
            lines += 1
            if lines == at + 1:
                sys.settrace(None)
                act()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines > at


def settle(future: Future[bool], work: Callable[[], bool]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def strike_everywhere(make: Callable[[], Scene]) -> int:
    """Play the scene once for each line of what is struck; how many there are."""
    for at in range(5_000):
        act, work, check = make()
        struck: Future[bool] = Future()
        # In a thread of its own, so that a deadlock fails the test instead of stopping it.
        in_a_thread(partial(settle, struck, partial(strike, at, act, work)))
        if not struck.result(PATIENCE_S):
            return at
        check(at)
    raise AssertionError("it has no end")


@pytest.mark.requirement("P-C1")
@pytest.mark.parametrize("touched", ["wait_sync", "add_callback", "child", "is_cancelled", "cancel"])
def test_a_cancel_in_the_middle_of_any_line_of_the_token_neither_deadlocks_nor_gets_lost(touched: str) -> None:
    def make() -> Scene:
        token, called, made = CancellationToken(deadline_s=3600), list[int](), list[CancellationToken]()
        works: dict[str, Callable[[], object]] = {
            "wait_sync": lambda: token.wait_sync(0.0005),
            "add_callback": lambda: token.add_callback(lambda: called.append(1)),
            "child": lambda: made.append(token.child()),
            "is_cancelled": lambda: token.is_cancelled,
            "cancel": lambda: token.cancel("second"),
        }
        if touched == "cancel":
            token.add_callback(lambda: called.append(1))

        def check(at: int) -> None:
            assert token.cancellation is not None, at
            assert all(child.cancellation is not None for child in made), at
            assert called == ([1] if touched in ("add_callback", "cancel") else []), at

        return lambda: token.cancel("struck"), works[touched], check

    assert strike_everywhere(make) > 0


@pytest.mark.requirement("C-4", "C-14")
@pytest.mark.parametrize("mode", ["inline", "thread"])
def test_an_abort_in_the_middle_of_any_line_of_a_call_leaves_a_whole_record_and_nothing_held(mode: Any) -> None:
    options = WrapOptions(operation_name="ask", cost_estimate_hint=0.25)

    def make() -> Scene:
        run = ExecutionContext(
            ExecutionConfig(1, 10, 3), breaker=CircuitBreaker(), settings=RunSettings(sync_calls=mode)
        )

        def check(at: int) -> None:
            assert run.cancellation.reason == "struck", at
            assert run.wrap_tool_call(lambda: None) is Decision.HALT, at
            run.end()
            until(lambda: run.graph.closed)
            until(lambda: run.balance.unresolved_nanos == 0)
            figures = run.balance
            assert (figures.held_nanos, figures.steps_open) == (0, 0), at
            assert check_history(run.history(), ledger=figures) == [], at

        return lambda: run.abort("struck"), lambda: run.wrap_tool_call(lambda: None, options), check

    assert strike_everywhere(make) > 20
