"""One step at a time, in the order of asking; no turn is lost, and a wait that can never end is refused at once."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from penstock.containment.safety import Decision
from penstock.errors import CancelledError, DeadlockError, InvalidValue, PenstockError
from penstock.runtime.cancellation import CancellationToken
from penstock.runtime.context import ExecutionContext
from penstock.runtime.scheduling import exclusive
from penstock.runtime.scheduling.exclusive import Holder, Turn, turn_of
from penstock.stops import Stop, StopReason
from penstock.testing import ManualClock, SimDeadlock, SimLoop, explore, sim_run
from penstock.testing.contracts.threads import at_once
from tests.soak import scaled

LONG_S = 3_600.0
PATIENCE_S = 30.0
"""Far more than anything here takes: only a failing test waits for it."""


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def asking(
    turn: Turn, holder: Holder, token: CancellationToken | None = None, timeout_s: float = LONG_S
) -> asyncio.Task[None]:
    """A task that takes the turn and keeps it."""
    return asyncio.ensure_future(turn.take(holder, token or CancellationToken(), timeout_s))


async def taken(turn: Turn, name: str = "first", parent: Holder | None = None) -> Holder:
    holder = Holder(name, parent)
    await turn.take(holder, CancellationToken(), LONG_S)
    return holder


async def is_free(turn: Turn) -> bool:
    """Whether the turn is free and its queue empty; takes it and gives it back."""
    if turn.waiting:
        return False
    await turn.take(probe := Holder("probe"), CancellationToken(), 0)
    turn.give_back(probe)
    return True


def runs_without_suspending(work: Coroutine[Any, Any, None]) -> bool:
    try:
        work.send(None)
    except StopIteration:
        return True
    work.close()
    return False


@pytest.fixture(autouse=True)
def no_entry_left_in_the_books() -> Iterator[None]:
    yield
    assert exclusive._books._under == {}
    assert not exclusive._books._changes


# Taking and giving back.


async def test_a_free_turn_is_taken_without_suspending() -> None:
    turn = Turn("terminal")
    assert runs_without_suspending(turn.take(Holder("a"), CancellationToken(), 0))
    assert not runs_without_suspending(turn.take(Holder("b"), CancellationToken(), LONG_S))
    assert turn.waiting == 0


async def test_the_turn_goes_round_in_the_order_of_asking() -> None:
    turn, order = Turn("terminal"), list[int]()
    first = await taken(turn)

    async def use(number: int) -> None:
        holder = await taken(turn, str(number))
        order.append(number)
        turn.give_back(holder)

    users = [asyncio.ensure_future(use(number)) for number in range(10)]
    await rounds()
    assert (turn.waiting, order) == (10, [])
    turn.give_back(first)
    await asyncio.gather(*users)
    assert order == list(range(10))
    assert await is_free(turn)


async def test_a_turn_being_handed_over_is_not_free_for_a_newcomer() -> None:
    turn = Turn("terminal")
    first = await taken(turn)
    second = asking(turn, Holder("second"))
    await rounds()
    turn.give_back(first)
    assert not runs_without_suspending(turn.take(Holder("newcomer"), CancellationToken(), LONG_S))
    await second


async def test_only_the_one_whose_turn_it_is_can_give_it_back() -> None:
    turn, holder, other = Turn("terminal"), Holder("edit"), Holder("fetch")
    with pytest.raises(InvalidValue, match=r"whose turn it is at 'terminal' \(it is free\), not 'fetch'"):
        turn.give_back(other)
    await turn.take(holder, CancellationToken(), 0)
    with pytest.raises(PenstockError, match=r"whose turn it is at 'terminal' \('edit' has it\), not 'fetch'"):
        turn.give_back(other)
    turn.give_back(holder)
    with pytest.raises(PenstockError):
        turn.give_back(holder)
    assert await is_free(turn)


async def test_a_turn_cannot_be_given_back_before_its_wait_has_ended() -> None:
    turn, next_holder = Turn("terminal"), Holder("next")
    first = await taken(turn)
    waiting = asking(turn, next_holder)
    await rounds()
    turn.give_back(first)
    with pytest.raises(InvalidValue):
        turn.give_back(next_holder)
    await waiting
    turn.give_back(next_holder)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
async def test_an_invalid_timeout_is_refused(timeout_s: float) -> None:
    turn = Turn("terminal")
    with pytest.raises(InvalidValue, match="timeout_s"):
        await turn.take(Holder("a"), CancellationToken(), timeout_s)
    assert await is_free(turn)


# Cancelling.


async def test_a_cancelled_token_acquires_nothing_even_if_it_is_free() -> None:
    turn, token = Turn("terminal"), CancellationToken()
    token.cancel("enough")
    with pytest.raises(CancelledError):
        await turn.take(Holder("a"), token, LONG_S)
    assert await is_free(turn)


async def test_a_cancel_ends_the_wait_and_carries_its_stop() -> None:
    turn, token = Turn("terminal"), CancellationToken()
    first = await taken(turn)
    waiting = asking(turn, Holder("second"), token)
    await rounds()
    stop = Stop(StopReason.BUDGET_EXCEEDED, "all spent")
    token.cancel(stop=stop)
    with pytest.raises(CancelledError) as raised:
        await waiting
    assert raised.value.stop is stop
    assert turn.waiting == 0
    turn.give_back(first)
    assert await is_free(turn)


async def test_a_deadline_of_the_token_ends_the_wait() -> None:
    turn, token = Turn("terminal"), CancellationToken(deadline_s=0.01)
    await taken(turn)
    with pytest.raises(CancelledError) as raised:
        await turn.take(Holder("second"), token, LONG_S)
    assert raised.value.stop.reason is StopReason.TIMEOUT
    assert turn.waiting == 0
    token.close()


async def test_a_cancelled_task_is_not_interrupted_again_by_the_end_of_its_wait() -> None:
    turn, token = Turn("terminal"), CancellationToken()
    await taken(turn)

    async def ask() -> int:
        with pytest.raises(CancelledError):
            await turn.take(Holder("second"), token, LONG_S)
        await rounds()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    waiting = asyncio.ensure_future(ask())
    await rounds()
    token.cancel()
    token.cancel()
    assert await waiting == 0


async def test_a_wait_inside_a_call_of_the_same_token_takes_the_cancel_for_both() -> None:
    turn, run = Turn("terminal"), ExecutionContext()
    await taken(turn)
    raised: list[BaseException] = []

    async def ask() -> None:
        try:
            await turn.take(Holder("second"), run.cancellation, LONG_S)
        except BaseException as error:
            raised.append(error)
            raise

    waiting = asyncio.ensure_future(run.awrap_tool_call(ask))
    await rounds()
    run.abort("enough")
    assert await waiting is Decision.HALT
    assert [type(error) for error in raised] == [CancelledError]
    assert turn.waiting == 0


async def test_a_cancel_of_the_task_from_elsewhere_is_kept() -> None:
    turn = Turn("terminal")
    first = await taken(turn)
    waiting = asking(turn, Holder("second"))
    await rounds()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert turn.waiting == 0
    turn.give_back(first)
    assert await is_free(turn)


Ending = Callable[[asyncio.Task[None], CancellationToken], None]


def by_token(waiting: asyncio.Task[None], token: CancellationToken) -> None:
    token.cancel()


def by_task(waiting: asyncio.Task[None], token: CancellationToken) -> None:
    waiting.cancel()


def by_both(waiting: asyncio.Task[None], token: CancellationToken) -> None:
    token.cancel()
    waiting.cancel()
    waiting.cancel()


@pytest.mark.parametrize("end", [by_token, by_task, by_both])
@pytest.mark.parametrize("rounds_between", range(4))
@pytest.mark.parametrize("cancel_first", [False, True])
async def test_a_turn_that_meets_a_cancel_at_the_hand_over_is_passed_on(
    end: Ending, rounds_between: int, cancel_first: bool
) -> None:
    turn, token = Turn("terminal"), CancellationToken()
    first, third = await taken(turn), Holder("third")
    waiting, next_one = asking(turn, cancelled := Holder("second"), token), asking(turn, third)
    await rounds()
    if cancel_first:
        end(waiting, token)
        await rounds(rounds_between)
        turn.give_back(first)
    else:
        turn.give_back(first)
        await rounds(rounds_between)
        end(waiting, token)
    try:
        await waiting
    except (CancelledError, asyncio.CancelledError):
        pass
    else:
        assert not cancel_first
        turn.give_back(cancelled)
    await next_one
    turn.give_back(third)
    assert await is_free(turn)


# Waiting too long.


def test_a_wait_that_times_out_is_an_error_and_leaves_the_queue() -> None:
    async def main() -> None:
        turn = Turn("terminal")
        first = await taken(turn, "edit")
        with pytest.raises(DeadlockError) as raised:
            await turn.take(Holder("fetch"), CancellationToken(), 30)
        assert asyncio.get_running_loop().time() == 30
        assert (raised.value.node, raised.value.waited_s) == ("terminal", 30)
        assert str(raised.value) == (
            "no turn at 'terminal' within 30 s: 'edit' still has it; "
            "allow a longer wait, or shorten the steps that use it"
        )
        assert turn.waiting == 0
        turn.give_back(first)
        assert await is_free(turn)

    sim_run(main, seed=0)


def test_a_wait_without_end_is_allowed_and_sets_no_timer() -> None:
    async def main() -> None:
        turn = Turn("terminal")
        first = await taken(turn)
        waiting = asking(turn, Holder("second"), timeout_s=float("inf"))
        await asyncio.sleep(10 * LONG_S)
        turn.give_back(first)
        await waiting
        await turn.take(Holder("third"), CancellationToken(), float("inf"))

    with pytest.raises(SimDeadlock):
        sim_run(main, seed=0)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_wait_that_is_over_leaves_no_timer(cancelled: bool) -> None:
    async def main() -> None:
        loop, turn, token = asyncio.get_running_loop(), Turn("terminal"), CancellationToken()
        assert isinstance(loop, SimLoop)
        first = await taken(turn)
        waiting = asking(turn, Holder("second"), token)
        await rounds()
        assert len(loop._scheduled) == 1
        token.cancel() if cancelled else turn.give_back(first)
        await asyncio.wait([waiting])
        assert isinstance(waiting.exception(), CancelledError) is cancelled
        assert all(due.timer.cancelled() for due in loop._scheduled)

    sim_run(main, seed=0)


def test_a_timeout_at_the_instant_of_the_hand_over_is_one_or_the_other() -> None:
    async def main(seed: int) -> str:
        loop, turn = asyncio.get_running_loop(), Turn("terminal")
        first, second = await taken(turn), Holder("second")
        loop.call_later(1, turn.give_back, first)
        try:
            await turn.take(second, CancellationToken(), 1)
        except DeadlockError:
            await asyncio.sleep(1)
            assert await is_free(turn)
            return "too late"
        turn.give_back(second)
        assert await is_free(turn)
        return "in time"

    assert set(explore(main, schedules=50)) == {"in time", "too late"}


def test_an_error_from_another_process_is_the_same_error() -> None:
    made = DeadlockError("terminal", 30.0, "why"), DeadlockError("terminal", None, "why"), DeadlockError("no lock")
    for error in made:
        for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert (str(other), vars(other)) == (str(error), vars(error))


@pytest.mark.requirement("P-P2")
def test_a_deadlock_can_be_raised_with_a_message_of_ones_own() -> None:
    error = DeadlockError("Timeout acquiring lock for node 'terminal'")
    assert str(error) == error.why == "Timeout acquiring lock for node 'terminal'"
    assert (error.node, error.waited_s) == (None, None)


# Waits that can never end.


async def test_a_holder_that_takes_its_turn_again_is_refused_immediately() -> None:
    turn = Turn("terminal")
    holder = await taken(turn, "edit")
    with pytest.raises(DeadlockError) as raised:
        await turn.take(holder, CancellationToken(), LONG_S)
    assert raised.value.waited_s is None
    assert str(raised.value) == (
        "the wait for 'terminal' could never end: 'edit' waits for 'terminal', which it has itself; "
        "acquire such nodes in the same order everywhere, or release one before acquiring the next"
    )
    turn.give_back(holder)
    assert await is_free(turn)


async def test_a_step_inside_the_holder_is_refused_immediately_at_any_depth() -> None:
    turn = Turn("terminal")
    outer = await taken(turn, "outer")
    inner = outer
    for depth in range(5_000):
        inner = Holder(f"inner {depth}", inner)
    with pytest.raises(DeadlockError) as raised:
        await turn.take(inner, CancellationToken(), LONG_S)
    assert raised.value.why == (
        "'inner 4999' waits for 'terminal', which 'outer' has until 'inner 4999' inside it has ended"
    )


async def test_a_step_beside_the_holder_waits() -> None:
    turn, graph = Turn("terminal"), Holder("graph")
    left = await taken(turn, "left", graph)
    right = asking(turn, Holder("right", graph))
    above = asking(turn, graph)
    await rounds()
    assert turn.waiting == 2
    turn.give_back(left)
    await right
    above.cancel()
    with suppress(asyncio.CancelledError):
        await above


@pytest.mark.parametrize("length", [2, 3, 10])
async def test_the_wait_that_closes_a_cycle_is_refused_and_the_others_continue(length: int) -> None:
    turns = [Turn(f"node {i}") for i in range(length)]
    holders = [await taken(turn, f"step {i}") for i, turn in enumerate(turns)]
    waiting = [asking(turns[i + 1], holders[i]) for i in range(length - 1)]
    await rounds()
    with pytest.raises(DeadlockError) as raised:
        await turns[0].take(holders[-1], CancellationToken(), LONG_S)
    assert raised.value.waited_s is None
    assert raised.value.why == "; ".join(
        f"'step {(i - 1) % length}' waits for 'node {i}', which 'step {i}' has" for i in range(length)
    )
    turns[-1].give_back(holders[-1])
    for i in reversed(range(length - 1)):
        await waiting[i]
        turns[i + 1].give_back(holders[i])
        turns[i].give_back(holders[i])
    assert all([await is_free(turn) for turn in turns])


async def test_a_cycle_through_nested_calls_of_a_holder_is_a_cycle() -> None:
    terminal, browser = Turn("terminal"), Turn("browser")
    edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
    inside_edit = asking(browser, Holder("inside edit", edit))
    await rounds()
    with pytest.raises(DeadlockError) as raised:
        await terminal.take(Holder("inside fetch", fetch), CancellationToken(), LONG_S)
    assert raised.value.why == (
        "'inside fetch' waits for 'terminal', which 'edit' has until 'inside edit' inside it has ended; "
        "'inside edit' waits for 'browser', which 'fetch' has until 'inside fetch' inside it has ended"
    )
    browser.give_back(fetch)
    await inside_edit


async def test_one_of_many_parallel_waits_inside_a_holder_is_enough_for_a_circle() -> None:
    terminal, browser, other = Turn("terminal"), Turn("browser"), Turn("other")
    edit, fetch, stranger = await taken(terminal, "edit"), await taken(browser, "fetch"), await taken(other, "stranger")
    waiting = [asking(turn, Holder(f"in edit, at {turn.name}", edit)) for turn in (other, browser, other)]
    await rounds()
    with pytest.raises(DeadlockError, match="in edit, at browser"):
        await terminal.take(fetch, CancellationToken(), LONG_S)
    browser.give_back(fetch)
    other.give_back(stranger)
    await waiting[0]
    waiting[2].cancel()
    await asyncio.wait(waiting)


async def test_a_long_queue_without_a_cycle_is_not_a_deadlock() -> None:
    turns = [Turn(f"node {i}") for i in range(5)]
    holders = [await taken(turn, f"step {i}") for i, turn in enumerate(turns)]
    waiting = [asking(turns[i + 1], holders[i]) for i in range(4)]
    waiting += [asking(turn, Holder("another")) for turn in turns]
    await rounds()
    assert [turn.waiting for turn in turns] == [1, 2, 2, 2, 2]
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)


async def test_a_hand_over_that_closes_a_circle_refuses_who_waits_inside_the_new_holder() -> None:
    turn, outer = Turn("terminal"), Holder("outer")
    first = await taken(turn)
    waiting = asking(turn, outer)
    await rounds()
    inside = asking(turn, Holder("inside", outer))
    await rounds()
    assert turn.waiting == 2
    turn.give_back(first)
    await waiting
    with pytest.raises(DeadlockError, match=r"which 'outer' has until 'inside' inside it has ended"):
        await inside
    turn.give_back(outer)
    assert await is_free(turn)


async def test_a_hand_over_to_the_one_inside_first_closes_no_circle() -> None:
    turn, outer = Turn("terminal"), Holder("outer")
    first, inside = await taken(turn), Holder("inside", outer)
    waiting_inside = asking(turn, inside)
    await rounds()
    waiting = asking(turn, outer)
    await rounds()
    turn.give_back(first)
    await waiting_inside
    turn.give_back(inside)
    await waiting
    turn.give_back(outer)


def by_token_in_a_thread(waiting: asyncio.Task[None], token: CancellationToken) -> None:
    thread = threading.Thread(target=token.cancel)
    thread.start()
    thread.join(PATIENCE_S)


@pytest.mark.parametrize("end", [by_token, by_token_in_a_thread, by_task, by_both])
async def test_a_wait_that_is_being_cancelled_is_not_part_of_a_cycle(end: Ending) -> None:
    terminal, browser, token = Turn("terminal"), Turn("browser"), CancellationToken()
    edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
    leaving = asking(browser, edit, token)
    await rounds()
    end(leaving, token)
    assert browser.waiting == 1  # it has not noticed yet
    waiting = terminal.take(fetch, CancellationToken(), LONG_S)
    assert not runs_without_suspending(waiting)
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        await leaving


async def test_a_wait_whose_deadline_has_passed_unnoticed_is_not_part_of_a_cycle() -> None:
    clock = ManualClock()
    terminal, browser, token = Turn("terminal"), Turn("browser"), CancellationToken(deadline_s=60, clock=clock)
    edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
    leaving = asking(browser, edit, token)
    await rounds()
    clock.advance(60)
    assert not runs_without_suspending(terminal.take(fetch, CancellationToken(), LONG_S))
    with pytest.raises(CancelledError):
        token.check()
    with pytest.raises(CancelledError):
        await leaving
    token.close()


async def test_a_hand_over_that_is_about_to_be_passed_on_is_not_part_of_a_cycle() -> None:
    terminal, browser, token = Turn("terminal"), Turn("browser"), CancellationToken()
    edit, fetch, outer = await taken(terminal, "edit"), await taken(browser, "fetch"), Holder("outer")
    leaving, inside = asking(terminal, outer, token), asking(browser, Holder("inside", outer))
    await rounds()
    terminal.give_back(edit)
    token.cancel()
    await terminal.take(fetch, CancellationToken(), LONG_S)
    with pytest.raises(CancelledError):
        await leaving
    browser.give_back(fetch)
    await inside


def test_a_wait_that_has_timed_out_is_not_part_of_a_cycle() -> None:
    async def main(seed: int) -> bool:
        loop, terminal, browser = asyncio.get_running_loop(), Turn("terminal"), Turn("browser")
        edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
        leaving = asking(browser, edit, timeout_s=1)
        was_in_line = loop.create_future()

        def ask() -> None:
            was_in_line.set_result(browser.waiting == 1)
            assert not runs_without_suspending(terminal.take(fetch, CancellationToken(), LONG_S))

        async def ask_at_the_same_instant() -> None:
            await asyncio.sleep(1)
            ask()

        with pytest.raises(DeadlockError, match="within 1 s"):
            await asyncio.gather(leaving, ask_at_the_same_instant())
        return bool(await was_in_line)

    assert set(explore(main, schedules=50)) == {False, True}


def test_a_hand_over_at_the_last_instant_is_part_of_a_circle() -> None:
    async def main(seed: int) -> str:
        terminal, browser, outer = Turn("terminal"), Turn("browser"), Holder("outer")
        edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
        waiting, inside = asking(terminal, outer, timeout_s=1), asking(browser, Holder("inside", outer))
        await asyncio.sleep(1)
        in_time = terminal.waiting == 1
        terminal.give_back(edit)
        if in_time:
            with pytest.raises(DeadlockError, match="could never end"):
                await terminal.take(fetch, CancellationToken(), LONG_S)
        browser.give_back(fetch)
        await asyncio.wait([waiting, inside])
        assert (waiting.exception() is None) is in_time
        return "in time" if in_time else "too late"

    assert set(explore(main, schedules=50)) == {"in time", "too late"}


# Loops and threads.


async def test_a_waiter_whose_loop_is_closed_is_skipped() -> None:
    turn = Turn("terminal")
    first = await taken(turn)
    await asyncio.to_thread(abandon_a_wait, turn)
    second = asking(turn, Holder("second"))
    await rounds()
    assert turn.waiting == 2
    turn.give_back(first)
    await second
    assert turn.waiting == 0
    gc.collect()


def abandon_a_wait(turn: Turn, then: Callable[[], None] = lambda: None, holder: Holder | None = None) -> None:
    """Ask on a loop that is closed while the task still waits; `then` is done just before."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(turn.take(holder or Holder("abandoned"), CancellationToken(), LONG_S))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(rounds())
    then()
    loop.close()


async def test_a_wait_whose_loop_is_closed_is_not_part_of_a_cycle() -> None:
    terminal, browser = Turn("terminal"), Turn("browser")
    edit, fetch = await taken(terminal, "edit"), await taken(browser, "fetch")
    await asyncio.to_thread(abandon_a_wait, browser, holder=edit)
    assert not runs_without_suspending(terminal.take(fetch, CancellationToken(), LONG_S))
    browser.give_back(fetch)
    gc.collect()
    assert await is_free(browser)


async def test_a_turn_handed_to_a_loop_that_closes_before_it_notices_goes_to_the_next_who_asks() -> None:
    turn = Turn("terminal")
    first = await taken(turn)
    await asyncio.to_thread(abandon_a_wait, turn, lambda: turn.give_back(first))
    second = Holder("second")
    assert runs_without_suspending(turn.take(second, CancellationToken(), 0))
    turn.give_back(second)
    gc.collect()
    assert await is_free(turn)


async def test_a_turn_handed_to_a_closed_loop_is_passed_on_at_the_latest_by_the_next_timeout() -> None:
    turn = Turn("terminal")
    first = await taken(turn)
    waiting: list[asyncio.Task[None]] = []
    home = asyncio.get_running_loop()

    async def get_in_line() -> None:
        waiting.append(asking(turn, Holder("second"), timeout_s=0.05))
        await rounds()

    def behind() -> None:
        asyncio.run_coroutine_threadsafe(get_in_line(), home).result(PATIENCE_S)
        turn.give_back(first)

    await asyncio.to_thread(abandon_a_wait, turn, behind)
    await waiting[0]
    gc.collect()


def test_a_wait_that_the_garbage_collector_ends_passes_its_turn_on_or_leaves_the_line() -> None:
    turn, loop = Turn("terminal"), asyncio.new_event_loop()

    async def main() -> None:
        first = await taken(turn)
        waiting = turn.take(Holder("forgotten"), CancellationToken(), LONG_S)
        waiting.send(None)
        assert turn.waiting == 1
        waiting.close()
        assert turn.waiting == 0
        waiting = turn.take(Holder("forgotten"), CancellationToken(), LONG_S)
        waiting.send(None)
        turn.give_back(first)
        waiting.close()
        assert await is_free(turn)

    loop.run_until_complete(main())
    loop.close()


async def test_a_wait_that_is_ended_between_its_cancel_and_the_news_of_it_ends_quietly() -> None:
    turn = Turn("terminal")
    first = await taken(turn)

    def cancel_and_close() -> None:
        loop, token = asyncio.new_event_loop(), CancellationToken()
        task = loop.create_task(turn.take(Holder("abandoned"), token, LONG_S))
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(rounds())
        loop.call_soon(token.cancel)
        loop.stop()
        loop.run_forever()
        assert task.cancelling() == 1
        loop.close()

    await asyncio.to_thread(cancel_and_close)
    turn.give_back(first)
    gc.collect()
    assert await is_free(turn)


def test_a_turn_given_back_in_the_middle_of_any_line_of_another_change_is_given_back() -> None:
    """As the garbage collector does when it ends a coroutine whose `finally` gives a turn back."""

    async def main(at: int) -> bool:
        other, turn = Turn("browser"), Turn("terminal")
        holder, first = await taken(other, "holder"), await taken(turn)
        waiting = asking(other, follower := Holder("follower")), asking(turn, second := Holder("second"))
        await rounds()
        with striking(at, lambda: other.give_back(holder)) as struck:
            turn.give_back(first)
        if not struck:
            other.give_back(holder)
        await asyncio.gather(*waiting)
        other.give_back(follower)
        turn.give_back(second)
        assert await is_free(other)
        assert await is_free(turn)
        return bool(struck)

    assert strike_every_line(main) > 20


@pytest.mark.parametrize("what", ["give back", "cancel", "both"])
def test_a_hand_over_or_a_cancel_in_the_middle_of_any_line_of_asking_is_noticed(what: str) -> None:
    async def main(at: int) -> bool:
        turn, token, second = Turn("terminal"), CancellationToken(), Holder("second")
        first = await taken(turn)

        async def ask() -> None:
            try:
                await turn.take(second, token, LONG_S)
            except CancelledError:
                assert what != "give back"
            else:
                assert what != "cancel"
                turn.give_back(second)
            await rounds()  # nothing may strike here
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0

        def act() -> None:
            if what != "cancel":
                turn.give_back(first)
            if what != "give back":
                token.cancel()

        with striking(at, act) as struck:
            waiting = asyncio.ensure_future(ask())
            await rounds()
        if not struck:
            act()
        await waiting
        if what == "cancel":
            turn.give_back(first)
        assert await is_free(turn)
        return bool(struck)

    assert strike_every_line(main) > 20


def strike_every_line(main: Callable[[int], Coroutine[Any, Any, bool]]) -> int:
    """Run `main(0)`, `main(1)` and so on until it says that there was no such line; how many there were."""
    with ThreadPoolExecutor(1) as pool:  # so that a deadlock fails the test instead of stopping it
        lines = 0
        while pool.submit(asyncio.run, main(lines)).result(PATIENCE_S):
            lines += 1
    return lines


@contextmanager
def striking(at: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Do `act` before line number `at` of the lines under test that run meanwhile; the list says whether it did."""
    struck: list[int] = []
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != exclusive.__file__:
            return None
        if event == "line":
            lines += 1
            if lines == at + 1:
                sys.settrace(None)
                struck.append(at)
                act()
                return None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield struck
    finally:
        sys.settrace(before)


class Room:
    """Where only one may be at a time."""

    def __init__(self, name: str) -> None:
        self.turn = Turn(name)
        self.inside: Holder | None = None
        self.visits = 0

    @asynccontextmanager
    async def visit(self, holder: Holder, token: CancellationToken, timeout_s: float) -> AsyncIterator[None]:
        await self.turn.take(holder, token, timeout_s)
        assert self.inside is None, f"{holder.name} meets {self.inside}"
        self.inside = holder
        self.visits += 1
        try:
            yield
        finally:
            assert self.inside is holder
            self.inside = None
            self.turn.give_back(holder)


def test_loops_in_different_threads_share_one_turn() -> None:
    room = Room("terminal")

    async def use(name: str) -> None:
        for number in range(15):
            async with room.visit(Holder(f"{name} {number}"), CancellationToken(), PATIENCE_S):
                await asyncio.sleep(0)

    async def users(thread: int) -> None:
        await asyncio.gather(*(use(f"{thread}/{task}") for task in range(3)))

    at_once(2, lambda thread: asyncio.run(users(thread)), within="penstock.runtime.scheduling.exclusive")
    assert (room.visits, room.turn.waiting, room.inside) == (2 * 3 * 15, 0, None)


def test_threads_that_are_cancelled_and_time_out_lose_no_turn() -> None:
    room = Room("terminal")

    async def use(chance: random.Random, name: str) -> None:
        for number in range(15):
            token = CancellationToken()
            timeout_s = chance.choice([0.0, 0.001, PATIENCE_S, PATIENCE_S])
            canceller = threading.Timer(chance.random() * 0.002, token.cancel) if chance.random() < 0.4 else None
            if canceller is not None:
                canceller.start()
            with suppress(CancelledError, DeadlockError):
                async with room.visit(Holder(f"{name} {number}"), token, timeout_s):
                    await asyncio.sleep(0)
            if canceller is not None:
                canceller.cancel()
                await asyncio.to_thread(canceller.join)

    async def users(thread: int) -> None:
        chance = random.Random(thread)
        await asyncio.gather(*(use(chance, f"{thread}/{task}") for task in range(3)))

    at_once(2, lambda thread: asyncio.run(users(thread)), within="penstock.runtime.scheduling.exclusive")
    assert (room.turn.waiting, room.inside) == (0, None)
    assert asyncio.run(is_free(room.turn))
    assert room.visits > 0


def test_a_circle_between_two_threads_is_refused_in_one_of_them() -> None:
    rooms = Turn("terminal"), Turn("browser")
    both_hold = threading.Barrier(2)

    async def take_both(thread: int) -> str:
        mine, other = rooms[thread], rooms[1 - thread]
        holder = await taken(mine, f"step {thread}")
        both_hold.wait(PATIENCE_S)
        try:
            await other.take(holder, CancellationToken(), LONG_S)
        except DeadlockError:
            return "refused"
        else:
            other.give_back(holder)
            return "had both"
        finally:
            mine.give_back(holder)

    for _ in range(20):
        outcomes = at_once(
            2, lambda thread: asyncio.run(take_both(thread)), within="penstock.runtime.scheduling.exclusive"
        )
        assert sorted(outcomes) == ["had both", "refused"]


# Any order.


async def live(room: Room, other: Room, name: str, chance: random.Random, outcomes: list[str]) -> None:
    """Visit two rooms a few times, one after the other, and leave whenever cancelled."""
    loop = asyncio.get_running_loop()
    for number in range(3):
        token = CancellationToken()
        if chance.random() < 0.5:
            loop.call_later(chance.choice([0, 1, 2, 3]), token.cancel)
            loop.call_later(chance.choice([0, 1, 2, 3]), token.cancel)
        for at in (room, other):
            try:
                async with at.visit(Holder(f"{name} {number}"), token, chance.choice([0, 1, 2, LONG_S])):
                    await asyncio.sleep(chance.choice([0, 0, 1, 2]))
                outcomes.append("in")
            except CancelledError:
                outcomes.append("cancelled")
            except DeadlockError as error:
                outcomes.append("too late" if error.waited_s is not None else f"a circle that cannot be: {error}")
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


@pytest.mark.reliability
def test_in_any_order_of_visits_cancels_and_timeouts_no_two_meet_and_no_turn_is_lost() -> None:
    seen: set[str] = set()

    async def schedule(seed: int) -> None:
        chance, outcomes = random.Random(seed), list[str]()
        a, b = Room("a"), Room("b")
        users = [
            asyncio.ensure_future(live(*pair, name, chance, outcomes))
            for pair, name in (((a, b), "left"), ((b, a), "right"), ((a, b), "third"))
        ]
        loop = asyncio.get_running_loop()
        if chance.random() < 0.3:  # a user is cancelled from outside altogether
            loop.call_later(chance.choice([0, 1, 2, 3]), users[2].cancel)
        results = await asyncio.gather(*users, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert (a.inside, b.inside) == (None, None)
        assert await is_free(a.turn)
        assert await is_free(b.turn)
        seen.update(outcomes)

    explore(schedule, schedules=scaled(750, soak=3_000))
    assert seen == {"in", "cancelled", "too late"}


@pytest.mark.reliability
def test_in_any_order_a_holder_that_takes_a_second_turn_gets_both_or_is_refused_immediately() -> None:
    async def schedule(seed: int) -> int:
        chance, refusals = random.Random(seed), list[DeadlockError]()
        rooms = [Room(name) for name in "abc"]
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)

        async def nest(holder: Holder, left: list[Room]) -> None:
            token = CancellationToken()
            if chance.random() < 0.2:
                loop.call_later(chance.choice([0, 1, 2]), token.cancel)
            try:
                async with left[0].visit(holder, token, LONG_S):
                    await asyncio.sleep(chance.choice([0, 1]))
                    if left[1:]:
                        await nest(chance.choice([holder, Holder(f"in {holder.name}", holder)]), left[1:])
            except CancelledError:
                pass
            except DeadlockError as error:
                refusals.append(error)

        await asyncio.gather(*(nest(Holder(f"step {i}"), chance.sample(rooms, 3)) for i in range(4)))
        assert loop.time() < LONG_S
        assert all([room.inside is None and await is_free(room.turn) for room in rooms])
        assert all(error.waited_s is None for error in refusals)
        return len(refusals)

    counts = explore(schedule, schedules=scaled(250, soak=1_000))
    assert {0, 1, 2} <= set(counts)


# The turn of a node.


class Plain:
    pass


class Slotted:
    __slots__ = ()


class Equal:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize("make", [Plain, Slotted, Equal, list, dict, object])
def test_each_node_has_one_turn_of_its_own_whatever_it_is_made_of(make: Callable[[], object]) -> None:
    one, other = make(), make()
    turn = turn_of(one, "one")
    assert turn_of(one, "renamed") is turn
    assert turn.name == "one"
    assert turn_of(other, "other") is not turn


def test_the_turn_of_a_node_goes_with_it() -> None:
    node = Plain()
    turn = weakref.ref(turn_of(node, "node"))
    assert turn() is not None
    del node
    gc.collect()
    assert turn() is None


def test_a_node_without_weak_references_is_kept_alive() -> None:
    keys = {id(node) for node in [Slotted() for _ in range(3)] if turn_of(node, "node")}
    assert not keys & {id(Slotted()) for _ in range(100)}


def test_concurrent_threads_get_the_same_turn_of_a_node() -> None:
    for _ in range(20):
        node = Plain()
        turns = at_once(4, lambda _: turn_of(node, "node"), within="penstock.runtime.scheduling.exclusive")  # noqa: B023
        assert len(set(turns)) == 1
