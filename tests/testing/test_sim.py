"""The simulated loop: virtual time, seeded order, and failures that say how to see them again."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from penstock.clock import Clock
from penstock.testing import SimClock, SimDeadlock, SimLivelock, SimLoop, SimRefused, explore, sim_run
from penstock.testing import sim as sim_module


def running_loop() -> SimLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return loop


async def order_of(count: int = 6) -> tuple[int, ...]:
    order: list[int] = []

    async def append(number: int) -> None:
        await asyncio.sleep(0)
        order.append(number)

    await asyncio.gather(*(append(number) for number in range(count)))
    return tuple(order)


async def forever() -> None:
    await asyncio.Event().wait()


@contextlib.contextmanager
def a_loop() -> Iterator[SimLoop]:
    loop = SimLoop(1)
    try:
        yield loop
    finally:
        loop.close()


def test_an_hour_passes_at_once_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert sim_run(main, seed=1) == 3600.0
    assert time.monotonic() - began < 60


def test_a_year_is_reached_although_asyncio_waits_a_day_at_most() -> None:
    async def main() -> float:
        await asyncio.sleep(365 * 86_400)
        return asyncio.get_running_loop().time()

    assert sim_run(main, seed=1) == 365 * 86_400


def test_time_does_not_advance_while_anything_is_ready() -> None:
    async def main() -> float:
        timer = asyncio.create_task(asyncio.sleep(0.000_001))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert not timer.done()
        return asyncio.get_running_loop().time()

    assert sim_run(main, seed=1) == 0.0


def test_the_clock_of_the_loop_shows_its_virtual_time() -> None:
    async def main() -> tuple[int, int]:
        clock: Clock = running_loop().clock
        monotonic, wall = clock.monotonic_ns(), clock.time_ns()
        await asyncio.sleep(1.5)
        return clock.monotonic_ns() - monotonic, clock.time_ns() - wall

    assert sim_run(main, seed=1) == (1_500_000_000, 1_500_000_000)
    loop = SimLoop(1)
    assert isinstance(loop.clock, SimClock)
    loop.close()


def test_the_same_seed_is_the_same_order() -> None:
    assert sim_run(order_of, seed=7) == sim_run(order_of, seed=7)


def test_a_seed_keeps_its_order_from_version_to_version() -> None:
    assert [sim_run(order_of, seed=seed) for seed in range(4)] == [
        (4, 2, 3, 1, 5, 0),
        (1, 5, 3, 2, 0, 4),
        (5, 3, 1, 0, 4, 2),
        (2, 4, 1, 5, 3, 0),
    ]


def test_a_seed_keeps_the_order_of_timers_that_tie_also_after_a_sweep() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        timers = [running_loop().call_later(1 + number % 2, order.append, number) for number in range(120)]
        await asyncio.sleep(0)
        for timer in timers[:54] + timers[60:114]:
            timer.cancel()
        await asyncio.sleep(3)
        return order

    assert [sim_run(main, seed=seed) for seed in range(2)] == [
        [54, 58, 114, 56, 116, 118, 55, 117, 57, 119, 59, 115],
        [56, 58, 114, 116, 54, 118, 59, 117, 57, 119, 55, 115],
    ]


def test_a_few_hundred_seeds_find_every_order_of_four() -> None:
    assert len(set(explore(lambda _: order_of(4), schedules=400))) == 24


def test_timers_of_one_instant_fire_in_any_order() -> None:
    async def main(_: int) -> str:
        order: list[str] = []
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, order.append, "a")
        loop.call_later(0.1 + 0.2, order.append, "b")
        await asyncio.sleep(1)
        return "".join(order)

    assert set(explore(main, schedules=30)) == {"ab", "ba"}


def test_earlier_timers_fire_before_later_ones_whatever_the_seed() -> None:
    async def main(_: int) -> list[int]:
        order: list[int] = []
        for number in (3, 1, 2):
            asyncio.get_running_loop().call_later(number, order.append, number)
        await asyncio.sleep(4)
        return order

    assert all(order == [1, 2, 3] for order in explore(main, schedules=30))


def test_a_cancelled_timer_neither_fires_nor_holds_up_the_end() -> None:
    async def main() -> float:
        fired: list[int] = []
        handles = [asyncio.get_running_loop().call_later(10, fired.append, n) for n in range(500)]
        for handle in handles:
            handle.cancel()
        await asyncio.sleep(20)
        assert fired == []
        return asyncio.get_running_loop().time()

    assert sim_run(main, seed=1) == 20


@pytest.mark.parametrize(("timers", "cancelled", "kept"), [(200, 101, 99), (200, 100, 200), (100, 99, 100)])
def test_cancelled_timers_are_swept_out_once_they_are_the_majority_of_many(
    timers: int, cancelled: int, kept: int
) -> None:
    async def main() -> int:
        loop = running_loop()
        # The one at the head stays: those behind it are not dropped for having come first.
        handles = [loop.call_later(10 + number, int) for number in range(timers)]
        for handle in handles[timers - cancelled :]:
            handle.cancel()
            handle.cancel()  # counts once
        await asyncio.sleep(0)
        return len(loop._scheduled)

    assert sim_run(main, seed=1) == kept


def test_a_cancelled_callback_is_skipped() -> None:
    async def main() -> list[int]:
        ran: list[int] = []
        handles = [running_loop().call_soon(ran.append, number) for number in range(4)]
        handles[1].cancel()
        running_loop().call_later(1, handles[0].cancel)  # too late
        await asyncio.sleep(2)
        return sorted(ran)

    assert sim_run(main, seed=1) == [0, 2, 3]


def test_a_timer_that_cancels_one_of_the_same_instant_may_come_in_time_or_not() -> None:
    async def main(_: int) -> list[str]:
        ran: list[str] = []
        loop = running_loop()
        handle = loop.call_later(1, ran.append, "victim")
        loop.call_later(1, handle.cancel)
        await asyncio.sleep(2)
        return ran

    outcomes = explore(main, schedules=30)
    assert [] in outcomes
    assert ["victim"] in outcomes


def test_objects_of_a_callback_are_released_after_its_turn() -> None:
    class Thing:
        pass

    with a_loop() as loop:
        ended_at: list[float] = []

        def thing() -> Thing:
            made = Thing()
            weakref.finalize(made, lambda: ended_at.append(loop.time()))
            return made

        loop.call_soon(id, thing())
        loop.call_later(1, id, thing())
        loop.call_later(2, loop.stop)
        loop.run_forever()
        assert ended_at == [0.0, 1.0]


def test_only_cancelled_timers_that_are_still_set_are_counted() -> None:
    async def main() -> list[int]:
        loop, counts = running_loop(), []
        await asyncio.sleep(1)  # cancels its timer when it has fired
        counts.append(loop._timer_cancelled_count)
        for timers in (10, 1000):
            for handle in [loop.call_later(1, int) for _ in range(timers)]:
                handle.cancel()
            counts.append(loop._timer_cancelled_count)
            await asyncio.sleep(0)
            counts.append(loop._timer_cancelled_count)
        return counts

    assert sim_run(main, seed=1) == [0, 10, 0, 1000, 0]


def test_a_callback_runs_in_the_context_it_was_made_in_or_given() -> None:
    number = contextvars.ContextVar[int]("number")

    async def main() -> list[int]:
        seen: list[int] = []
        loop = running_loop()
        number.set(1)
        given = contextvars.copy_context()
        number.set(2)
        for context in (None, given):
            loop.call_soon(lambda: seen.append(number.get()), context=context)
            loop.call_later(1, lambda: seen.append(number.get()), context=context)
        number.set(3)
        await asyncio.sleep(2)
        return sorted(seen)

    assert sim_run(main, seed=1) == [1, 1, 2, 2]


def test_a_loop_that_was_stopped_before_takes_one_turn_and_runs_again() -> None:
    with a_loop() as loop:
        ran: list[str] = []
        loop.stop()
        loop.run_forever()  # nothing is ready, and that is no deadlock
        loop.call_soon(ran.append, "soon")
        loop.call_later(1, ran.append, "later")
        loop.stop()
        loop.run_forever()
        assert ran == ["soon"]
        loop.call_later(1, loop.stop)
        loop.run_forever()
        assert (sorted(ran), loop.time()) == (["later", "soon"], 1.0)


def test_a_turn_that_stops_the_loop_runs_to_its_end() -> None:
    with a_loop() as loop:
        ran: list[int] = []
        loop.call_soon(loop.stop)
        for number in range(5):
            loop.call_soon(ran.append, number)
        loop.run_forever()
        assert sorted(ran) == list(range(5))


def test_a_closed_loop_takes_nothing() -> None:
    with a_loop() as loop:
        loop.call_soon(print)
        loop.call_later(1, print)
    sleep = asyncio.sleep(0)
    for call in (
        lambda: loop.call_soon(print),
        lambda: loop.call_later(1, print),
        lambda: loop.call_at(1, print),
        lambda: loop.create_task(sleep),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    sleep.close()


def test_a_time_has_to_be_a_number() -> None:
    with a_loop() as loop:
        for call in (loop.call_later, loop.call_at):
            for time_s in (None, "5", b"5"):
                with pytest.raises(TypeError):
                    call(time_s, print)
        assert loop.call_at(5, loop.stop).when() == 5
        loop.run_forever()
        assert loop.time() == 5


def test_a_timer_in_the_past_is_due_now() -> None:
    with a_loop() as loop:
        loop.call_later(-5, loop.stop)
        loop.run_forever()
        assert loop.time() == 0


def test_debug_mode_checks_callbacks_and_threads() -> None:
    with a_loop() as loop:
        loop.set_debug(True)
        for call in (loop.call_soon, lambda callback: loop.call_later(1, callback)):
            with pytest.raises(TypeError, match="callable object"):
                call(5)
            with pytest.raises(TypeError, match="coroutines cannot be used"):
                call(forever)
        refused: list[str] = []

        def intrude() -> None:
            for call in (loop.call_soon, lambda callback: loop.call_later(1, callback)):
                try:
                    call(print)
                except RuntimeError as error:
                    refused.append(str(error))

        def start() -> None:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            loop.stop()

        loop.call_soon(start)
        loop.run_forever()
        assert len(refused) == 2
        assert "Non-thread-safe" in refused[0]


def test_debug_mode_names_the_line_that_made_a_callback_also_when_it_is_cancelled() -> None:
    with a_loop() as loop:
        early = loop.call_later(1, print)
        loop.set_debug(True)
        handles = [loop.call_soon(print), loop.call_later(1, print), loop.call_at(1, print)]
        for handle in handles:
            assert re.search(r"created at .*test_sim\.py:\d+>$", repr(handle))
        looks = [repr(handle) for handle in (early, *handles)]
        for handle in (early, *handles):
            handle.cancel()
        for handle, before in zip((early, *handles), looks, strict=True):
            assert handle.cancelled()
            assert before.split("print")[1] in repr(handle)
        loop.call_later(2, loop.stop)
        loop.run_forever()


def test_debug_mode_logs_where_a_callback_was_made_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    with a_loop() as loop:
        loop.set_debug(True)
        loop.call_soon(lambda: 1 // 0)
        loop.call_soon(loop.call_exception_handler, {"message": "complaint"})
        loop.call_later(1, loop.stop)
        loop.run_forever()
        assert [type(error) for error in loop.unhandled] == [ZeroDivisionError]
        loop.call_exception_handler({"message": "afterwards"})
    *both, afterwards = (record.getMessage() for record in caplog.records)
    failed, complaint = sorted(both, key=lambda text: text.startswith("complaint"))
    assert "source_traceback: Object created at" in failed
    assert "handle_traceback: Handle created at" in complaint
    assert afterwards == "afterwards"


def test_a_custom_task_factory_is_used() -> None:
    made: list[str] = []

    def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        made.append(coro.__name__)
        return asyncio.Task(coro, loop=loop, **options)

    async def main() -> None:
        running_loop().set_task_factory(make)
        await asyncio.create_task(asyncio.sleep(0), name="ones own")
        running_loop().set_task_factory(None)
        task = asyncio.create_task(asyncio.sleep(0), name="the loop's")
        assert task.get_name() == "the loop's"
        await task

    sim_run(main, seed=1)
    assert made == ["sleep"]


def test_a_task_runs_in_the_context_it_is_given() -> None:
    number = contextvars.ContextVar[int]("number")

    async def read() -> int:
        return number.get()

    async def main() -> int:
        number.set(1)
        given = contextvars.copy_context()
        number.set(2)
        return await asyncio.create_task(read(), context=given)

    assert sim_run(main, seed=1) == 1


async def aborted_group() -> tuple[int, ...]:
    cancelled: list[int] = []

    async def wait(number: int) -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            cancelled.append(number)
            raise

    async def fail() -> None:
        await asyncio.sleep(1)
        raise ValueError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(wait(number))
            group.create_task(fail())
    return tuple(cancelled)


def test_the_order_in_which_a_task_group_cancels_belongs_to_the_seed() -> None:
    ballast = [object() for _ in range(1000)]
    first = [sim_run(aborted_group, seed=seed) for seed in range(20)]
    del ballast  # other addresses the second time
    assert first == [sim_run(aborted_group, seed=seed) for seed in range(20)]
    assert len(set(first)) > 15


def test_a_seed_means_the_same_in_another_process() -> None:
    code = (
        "import asyncio; from penstock.testing import sim_run\n"
        "async def main():\n"
        "    order = []\n"
        "    async def one(n): await asyncio.sleep(0); order.append(n)\n"
        "    tasks = {asyncio.create_task(one(n)) for n in range(8)}\n"
        "    await asyncio.wait(tasks)\n"
        "    return order, [tasks.pop().get_coro().cr_code.co_name for _ in tasks.copy()]\n"
        "print(sim_run(main, seed=5))"
    )
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_a_race_is_found_and_its_seed_replays_it() -> None:
    async def lost_update(_: int = 0) -> None:
        balance = 0

        async def add() -> None:
            nonlocal balance
            before = balance
            await asyncio.sleep(0)
            balance = before + 1

        async def later() -> None:
            await asyncio.sleep(0)
            await add()

        await asyncio.gather(add(), later())
        assert balance == 2

    with pytest.raises(AssertionError) as found:
        explore(lost_update, schedules=100, first_seed=1000)
    note = next(note for note in found.value.__notes__ if note.startswith("SimLoop seed="))
    seed = int(note.split("=")[1].split(":")[0])
    assert seed >= 1000
    with pytest.raises(AssertionError):
        sim_run(lost_update, seed=seed)


def test_a_failure_in_making_main_carries_the_seed_too() -> None:
    def main() -> Any:
        raise LookupError("no main")

    with pytest.raises(LookupError) as found:
        sim_run(main, seed=3)
    assert "seed=3" in found.value.__notes__[0]


def test_waiting_for_what_never_comes_is_a_deadlock_that_names_who_waits() -> None:
    async def main() -> None:
        stuck = asyncio.create_task(forever(), name="stuck-reader")
        await stuck

    with pytest.raises(SimDeadlock, match=r"stuck-reader \(forever at .*test_sim\.py:\d+\)") as found:
        sim_run(main, seed=9)
    assert "seed=9" in found.value.__notes__[-1]


def test_spinning_without_time_passing_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_module, "STEPS_PER_INSTANT", 1000)

    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(SimLivelock, match="main"):
        sim_run(main, seed=1)


def test_many_steps_are_no_livelock_as_long_as_time_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_module, "STEPS_PER_INSTANT", 100)

    async def main() -> None:
        for _ in range(1000):
            await asyncio.sleep(1)

    sim_run(main, seed=1)


def test_threads_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(SimRefused, match="run_in_executor"):
            await asyncio.to_thread(time.monotonic)
        with pytest.raises(SimRefused, match="no threads"):
            asyncio.get_running_loop().run_in_executor(None, print)

    sim_run(main, seed=1)


def test_a_call_from_another_thread_is_refused_and_one_from_its_own_is_not() -> None:
    refused: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except SimRefused as error:
                refused.append(str(error))

        thread = threading.Thread(target=intrude, name="intruder")
        thread.start()
        thread.join()
        woken = asyncio.Event()
        loop.call_soon_threadsafe(woken.set)
        await woken.wait()

    sim_run(main, seed=1)
    assert len(refused) == 1
    assert "'intruder'" in refused[0]


async def test_a_simulation_inside_a_running_loop_is_refused() -> None:
    with pytest.raises(SimRefused, match="plain function"):
        sim_run(forever, seed=1)


def test_an_error_of_a_callback_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError) as found:
        sim_run(main, seed=4)
    assert "seed=4" in found.value.__notes__[-1]


def test_an_error_of_an_unawaited_task_fails_the_run() -> None:
    async def fail() -> None:
        raise LookupError("no listener")

    async def main() -> None:
        asyncio.create_task(fail())  # noqa: RUF006 - that no one keeps it is the point
        await asyncio.sleep(1)

    with pytest.raises(LookupError, match="no listener"):
        sim_run(main, seed=1)


def test_the_failure_of_main_comes_first_and_the_others_are_noted() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        raise ValueError("main")

    with pytest.raises(ValueError, match="main") as found:
        sim_run(main, seed=1)
    assert any("ZeroDivisionError" in note for note in found.value.__notes__)


def test_a_handler_of_ones_own_takes_over_what_callbacks_raise() -> None:
    async def main() -> list[str]:
        seen: list[str] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: seen.append(type(context["exception"]).__name__))
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        return seen

    assert sim_run(main, seed=1) == ["ZeroDivisionError"]


def test_what_outlives_main_is_cancelled_and_may_clean_up() -> None:
    log: list[str] = []

    async def worker() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(5)
            log.append("clean")

    async def main() -> str:
        task = asyncio.create_task(worker())
        await asyncio.sleep(1)
        assert not task.done()
        return "result"

    assert sim_run(main, seed=1) == "result"
    assert log == ["clean"]


def test_a_cleanup_that_fails_fails_the_run() -> None:
    async def worker() -> None:
        try:
            await forever()
        finally:
            raise LookupError("cleanup")

    async def main() -> None:
        task = asyncio.create_task(worker())
        await asyncio.sleep(1)
        assert not task.done()

    with pytest.raises(LookupError, match="cleanup"):
        sim_run(main, seed=1)


def stubborn(times: int, wait: Callable[[], Awaitable[None]]) -> Callable[[], Any]:
    async def swallow() -> None:
        for _ in range(times):
            with contextlib.suppress(asyncio.CancelledError):
                await wait()

    async def main() -> None:
        task = asyncio.create_task(swallow(), name="stubborn")
        await asyncio.sleep(1)
        assert not task.done()

    return main


def test_a_task_that_swallows_its_first_cancels_is_cancelled_again() -> None:
    sim_run(stubborn(3, forever), seed=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_that_swallows_every_cancel_is_named() -> None:
    with pytest.raises(SimDeadlock, match=r"cancelled 5 times.*stubborn"):
        sim_run(stubborn(8, forever), seed=1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_task_that_sleeps_and_swallows_every_cancel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_module, "STEPS_PER_INSTANT", 1000)

    async def nap() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def main() -> None:
        task = asyncio.create_task(nap(), name="napper")
        await asyncio.sleep(0.01)
        assert not task.done()

    with pytest.raises(SimLivelock, match="napper"):
        sim_run(main, seed=1)


def test_open_async_generators_are_closed_in_a_repeatable_order() -> None:
    async def main(closed: list[int]) -> None:
        async def numbers(number: int) -> AsyncIterator[int]:
            try:
                yield number
            finally:
                await asyncio.sleep(0)
                closed.append(number)

        generators = [numbers(number) for number in range(6)]
        for generator in generators:
            await anext(generator)
        asyncio.get_running_loop().kept = generators  # type: ignore[attr-defined]

    def closed_with(seed: int) -> tuple[int, ...]:
        closed: list[int] = []
        sim_run(lambda: main(closed), seed=seed)
        return tuple(closed)

    assert sorted(closed_with(1)) == list(range(6))
    assert [closed_with(seed) for seed in range(10)] == [closed_with(seed) for seed in range(10)]


def test_a_dropped_async_generator_is_closed_while_the_loop_runs() -> None:
    async def main() -> list[str]:
        log: list[str] = []

        async def numbers() -> AsyncIterator[int]:
            try:
                yield 1
            finally:
                await asyncio.sleep(0)
                log.append("closed")

        async for _ in numbers():
            break
        await asyncio.sleep(1)
        return log

    assert sim_run(main, seed=1) == ["closed"]


def test_the_pieces_of_asyncio_work_as_they_do() -> None:
    async def main(_: int) -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await forever()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), 1)
        lock, inside, most = asyncio.Lock(), 0, 0

        async def guarded() -> None:
            nonlocal inside, most
            async with lock:
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.1)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(guarded())
        assert most == 1
        queue: asyncio.Queue[int] = asyncio.Queue(1)
        producer = asyncio.create_task(_produce(queue))
        assert [await queue.get() for _ in range(5)] == list(range(5))
        await producer
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(n)) for n in (1, 2)], return_when=asyncio.FIRST_COMPLETED
        )
        assert (len(done), len(pending)) == (1, 1)
        return "done"

    assert set(explore(main, schedules=50)) == {"done"}


async def _produce(queue: asyncio.Queue[int]) -> None:
    for number in range(5):
        await queue.put(number)


def test_ten_thousand_tasks_each_run_to_their_end() -> None:
    async def main() -> int:
        done = 0

        async def one(number: int) -> None:
            nonlocal done
            async with asyncio.timeout(100):
                await asyncio.sleep(number % 7)
            done += 1

        await asyncio.gather(*(one(number) for number in range(10_000)))
        return done

    assert sim_run(main, seed=1) == 10_000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_or_exit_propagates_with_its_seed(kind: type[BaseException]) -> None:
    def leave() -> None:
        raise kind

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, leave)
        await forever()

    with pytest.raises(kind) as found:
        sim_run(main, seed=2)
    assert "seed=2" in found.value.__notes__[-1]


@pytest.mark.reliability
def test_a_thousand_small_schedules_take_less_than_a_few_seconds_of_one_core() -> None:
    took_s = []
    for _ in range(5):  # the best counts: other work on the machine only adds
        began = time.process_time()
        explore(lambda _: order_of(), schedules=200)
        took_s.append(time.process_time() - began)
    assert 5 * min(took_s) < 5
