"""A stop of the run reaches the task inside a `contained` block, whatever the framework in between waits for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from penstock import BudgetExceededError, CancelledError, contain, contained


def abort_from_a_thread(run: Any) -> threading.Thread:
    thread = threading.Thread(target=run.abort)
    thread.start()
    return thread


async def forever() -> None:
    await asyncio.Event().wait()


def cancels() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_a_task_that_waits_for_something_of_its_own_is_interrupted() -> None:
    with contain() as run:
        with pytest.raises(CancelledError, match="aborted"), contained(run):
            abort_from_a_thread(run)
            await forever()
        assert cancels() == 0


async def test_a_framework_that_gathers_errors_as_answers_is_interrupted() -> None:
    """LangChain's `agenerate` reads an answer from everything that is no Exception."""

    async def agenerate(run: Any) -> list[str]:
        results: list[Any] = await asyncio.gather(run.atool(forever), return_exceptions=True)
        return [result.generations for result in results if not isinstance(result, Exception)]

    with contain() as run, pytest.raises(CancelledError), contained(run):
        abort_from_a_thread(run)
        await agenerate(run)


async def test_a_framework_whose_queue_is_never_filled_is_interrupted() -> None:
    """AutoGen's teams wait at a queue; the task that fills it ends with whatever is no Exception."""

    async def team(run: Any) -> Any:
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def speak() -> None:
            try:
                await run.atool(forever)
            except Exception as error:
                queue.put_nowait(error)

        speaking = asyncio.create_task(speak())
        try:
            return await queue.get()
        finally:
            await asyncio.gather(speaking, return_exceptions=True)

    with contain() as run, pytest.raises(CancelledError), contained(run):
        abort_from_a_thread(run)
        await team(run)


async def test_the_time_limit_interrupts_the_task_with_the_error_of_the_limit() -> None:
    with contain(timeout_s=0.02) as run, pytest.raises(BudgetExceededError, match="timeout"), contained(run):
        await forever()
    assert cancels() == 0


async def test_nested_blocks_of_one_task_raise_one_error() -> None:
    with contain() as run, pytest.raises(CancelledError), contained(run), contained(run):
        abort_from_a_thread(run)
        await forever()
    assert cancels() == 0


async def test_a_call_of_the_run_raises_its_own_error_where_it_waits() -> None:
    async def waits() -> None:
        run.abort()
        await forever()

    with contain() as run, contained(run):
        with pytest.raises(CancelledError):
            await run.atool(waits)
        await asyncio.sleep(0)  # and the task is not interrupted a second time
    assert cancels() == 0


async def test_a_cancel_from_outside_propagates_as_it_is() -> None:
    async def inside() -> None:
        with contain() as run, contained(run):
            started.set()
            await forever()

    started = asyncio.Event()
    task = asyncio.create_task(inside())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancel_from_outside_takes_precedence_over_the_stop() -> None:
    async def inside() -> None:
        with contained(run):
            started.set()
            await forever()

    started = asyncio.Event()
    with contain() as run:
        task = asyncio.create_task(inside())
        await started.wait()
        run.abort()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_framework_that_swallows_the_cancel_leaves_none_behind() -> None:
    with contain() as run, contained(run):
        abort_from_a_thread(run)
        with pytest.raises(asyncio.CancelledError):
            await forever()
    assert cancels() == 0


async def test_a_task_that_stops_its_own_run_goes_on() -> None:
    with contain() as run, contained(run):
        run.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(CancelledError):
            await run.atool(forever)
    assert cancels() == 0


async def test_a_task_that_enters_a_block_of_a_stopped_run_is_interrupted_where_it_first_waits() -> None:
    with contain() as run:
        run.abort("enough")
        for _ in range(2):
            with pytest.raises(CancelledError, match="enough"), contained(run), contained(run):
                await forever()
            assert cancels() == 0
        with contained(run, on_stop="ignore"):
            assert cancels() == 0  # nothing waits
        await asyncio.sleep(0)
    assert cancels() == 0


async def test_a_task_that_enters_a_block_of_a_run_that_has_ended_is_not_interrupted() -> None:
    with contain() as run:
        left_behind = asyncio.create_task(run.atool(forever))
        await asyncio.sleep(0)  # it has begun
    with pytest.raises(CancelledError, match="has ended"):
        await left_behind
    with contained(run):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert cancels() == 0


async def test_a_stop_after_the_block_does_not_interrupt() -> None:
    with contain() as run:
        with contained(run):
            await asyncio.sleep(0)
        run.abort()
        await asyncio.sleep(0)
    assert cancels() == 0


async def test_an_error_of_the_program_passes_through_a_stopped_block() -> None:
    with contain() as run, pytest.raises(LookupError), contained(run):
        abort_from_a_thread(run)
        try:
            await forever()
        finally:
            raise LookupError
