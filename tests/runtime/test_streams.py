"""Calls that stream: what they yielded before a stop is in the partial results, marked as incomplete."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from penstock import (
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    Decision,
    ExecutionContext,
    Halted,
    InvalidValue,
    RunSettings,
    StopReason,
    ToolCall,
    WrapOptions,
    contain,
)
from penstock.agents.model import Model, ModelRequest
from penstock.containment import IncompleteOutput
from penstock.runtime.streams import PieceBuffer, first_pieces
from penstock.testing import ManualClock, sim_run
from tests.flow.steps import sim_loop

pytestmark = pytest.mark.requirement("C-17")

Stopping = Callable[[ExecutionContext], object]
KEPT = IncompleteOutput(("one", "two"))


def uses_tokens(run: ExecutionContext) -> object:
    run.llm(lambda: run.report(output_tokens=200), name="used")
    return run.tool(lambda: None, name="refused")


def uses_steps(run: ExecutionContext) -> object:
    return [run.tool(lambda: None, name=f"step {number}") for number in range(10)]


def uses_money(run: ExecutionContext) -> object:
    return run.tool(lambda: None, name="dear", cost_hint_usd=5)


def lets_time_pass(run: ExecutionContext) -> object:
    clock = run._run.clock
    assert isinstance(clock, ManualClock)
    return clock.advance(60)


def aborts(run: ExecutionContext) -> object:
    return run.abort("enough")


def cancels(run: ExecutionContext) -> object:
    return run.cancellation.cancel("enough")


STOPS: dict[str, tuple[Stopping, StopReason]] = {
    "time": (lets_time_pass, StopReason.TIMEOUT),
    "money": (uses_money, StopReason.BUDGET_EXCEEDED),
    "steps": (uses_steps, StopReason.STEP_LIMIT_EXCEEDED),
    "tokens": (uses_tokens, StopReason.TOKEN_LIMIT_EXCEEDED),
    "cancel": (cancels, StopReason.ABORTED),
    "abort": (aborts, StopReason.ABORTED),
}


def limited(**settings: Any) -> ExecutionContext:
    token = CancellationToken(name="outside", clock=(clock := ManualClock()))
    return contain(
        name="run",
        max_cost_usd=1,
        max_steps=5,
        max_tokens=100,
        timeout_s=30,
        clock=clock,
        cancellation=token,
        **settings,
    )


def pieces(run: ExecutionContext, stop: Stopping) -> Iterator[str]:
    yield "one"
    yield "two"
    stop(run)
    yield "three" if run.cancellation.cancellation is None else "never"


def made(mode: Any, run: ExecutionContext, stop: Stopping, name: str = "talk") -> Any:
    """Make the streaming call in one of the ways there are."""
    if mode == "sync":
        return run.llm(lambda: pieces(run, stop), name=name, cost_hint_usd=0)

    async def streams() -> AsyncIterator[str]:
        for piece in pieces(run, stop):
            yield piece
            await asyncio.sleep(0)

    fn: Any = streams if mode == "async generator" else lambda: pieces(run, stop)
    return asyncio.run(run.allm(fn, name=name, cost_hint_usd=0))


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("mode", ["sync", "generator on the loop", "async generator"])
@pytest.mark.parametrize("where", ["inline", "thread"])
def test_the_partial_of_a_stop_has_what_a_streaming_call_yielded(where: Any, mode: str, kind: str) -> None:
    stop, reason = STOPS[kind]
    run = limited(sync_calls=where)
    with run, pytest.raises((Halted, CancelledError)) as raised:
        made(mode, run, stop)
    assert raised.value.stop.reason is reason
    kept = raised.value.partial["talk"]
    # A time limit and a cancel are noticed after the next piece, a refused call where it is made.
    expected = ("one", "two") if kind in ("money", "steps", "tokens") else ("one", "two", kept.pieces[-1])
    assert kept == IncompleteOutput(expected)
    assert len(kept.pieces) < 4
    assert run.partial_results["talk"] == kept


@pytest.mark.parametrize("way", ["wrap_llm_call", "wrap_tool_call"])
def test_a_wrapped_call_returns_halt_and_leaves_its_output_to_the_run(way: str) -> None:
    run = limited(sync_calls="inline")
    with run:
        decision = getattr(run, way)(lambda: pieces(run, uses_money), WrapOptions(operation_name="talk"))
    assert decision is Decision.HALT
    assert run.partial_results == {"talk": KEPT}


def test_a_wrapped_stream_that_nothing_stops_is_run_and_its_list_is_the_result() -> None:
    with contain() as run:
        assert run.wrap_llm_call(lambda: iter_of("a", "b"), WrapOptions(operation_name="talk")) is Decision.ALLOW
    assert run.partial_results == {"talk": ["a", "b"]}


def iter_of(*given: Any) -> Iterator[Any]:
    yield from given


def test_a_thread_that_is_left_behind_in_the_middle_of_a_stream_leaves_what_it_yielded() -> None:
    free, closed = threading.Event(), threading.Event()
    run = contain(sync_calls="thread")

    def stuck() -> Iterator[str]:
        try:
            yield "one"
            yield "two"
            run.abort("enough")
            free.wait()
            yield "late"
            yield "never"
        finally:
            closed.set()

    with run, pytest.raises(CancelledError) as raised:
        run.tool(stuck)
    assert raised.value.partial == run.partial_results == {"stuck": KEPT}
    free.set()
    assert closed.wait(10), "the stream is closed at its next piece"
    assert run.partial_results == {"stuck": KEPT}


def test_an_interruption_of_the_task_keeps_the_output_too() -> None:
    async def main() -> None:
        run = ExecutionContext()
        began = asyncio.Event()

        async def streams() -> AsyncIterator[str]:
            yield "one"
            yield "two"
            began.set()
            await asyncio.sleep(3_600)

        task = asyncio.ensure_future(run.atool(streams, name="talk"))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.partial_results == {"talk": KEPT}

    sim_run(main, seed=1)


def test_the_end_of_the_run_keeps_the_output_of_streams_that_are_open() -> None:
    async def main() -> None:
        began = asyncio.Event()

        async def streams() -> AsyncIterator[str]:
            yield "one"
            yield "two"
            began.set()
            await asyncio.sleep(3_600)

        with ExecutionContext() as run:
            task = asyncio.ensure_future(run.acall_tool(streams, WrapOptions(operation_name="talk")))
            await began.wait()
        assert run.partial_results == {"talk": KEPT}
        assert (await task).decision is Decision.HALT
        assert run.partial_results == {"talk": KEPT}  # once

    sim_run(main, seed=1)


def test_a_stream_that_returns_after_its_deadline_is_incomplete() -> None:
    clock = ManualClock()

    def slow() -> Iterator[str]:
        yield "one"
        yield "two"
        clock.advance(60)

    with contain(timeout_s=30, clock=clock, sync_calls="inline") as run:
        with pytest.raises(BudgetExceededError) as raised:
            run.tool(slow)
        assert raised.value.partial == {"slow": KEPT}


def test_a_stream_that_is_stopped_before_its_first_piece_leaves_nothing() -> None:
    def silent() -> Iterator[str]:
        uses_money(run)
        yield "never"

    run = limited(sync_calls="inline")
    with run, pytest.raises(BudgetExceededError) as raised:
        run.tool(silent)
    assert raised.value.partial == {}


def test_a_stream_that_fails_was_not_stopped() -> None:
    def breaks() -> Iterator[str]:
        yield "one"
        raise ValueError("broken")

    with contain() as run:
        with pytest.raises(ValueError, match="broken"):
            run.tool(breaks)
        assert run.partial_results == {}


def test_a_finished_result_keeps_its_name_and_the_incomplete_output_gets_the_call_id() -> None:
    run = limited(sync_calls="inline")
    with run:
        run.wrap_tool_call(lambda: pieces(run, uses_money), WrapOptions(operation_name="talk"))
        assert run.tool(lambda: "whole", name="talk") == "whole"
    assert run.partial_results == {"talk": "whole", "talk#n000002": KEPT}


def test_a_child_context_is_in_the_name() -> None:
    run = limited(sync_calls="inline")
    with run, run.spawn_child("research") as child, pytest.raises(CancelledError) as raised:
        child.tool(lambda: pieces(child, aborts), name="talk")
    assert list(raised.value.partial) == list(run.partial_results) == ["research/talk"]


# Bounds.


def test_the_first_pieces_of_an_endless_stream_are_kept_and_the_others_counted() -> None:
    clock = ManualClock()

    def endless() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1
            clock.advance(1)

    settings = RunSettings(max_kept_pieces=3, sync_calls="inline")
    run = ExecutionContext(clock=clock, settings=settings)
    with run, pytest.raises(BudgetExceededError) as raised:
        run.tool(endless, timeout_s=10)
    assert raised.value.partial == {"endless": IncompleteOutput((0, 1, 2), dropped=8)}
    with ExecutionContext(settings=RunSettings(max_kept_pieces=0)) as run, pytest.raises(CancelledError) as cancelled:
        run.tool(lambda: pieces(run, aborts), name="talk")
    assert cancelled.value.partial == {"talk": IncompleteOutput((), dropped=3)}


def test_as_many_incomplete_outputs_are_kept_as_results() -> None:
    with ExecutionContext(settings=RunSettings(max_kept_results=2)) as run:
        for number in range(5):
            with run.spawn_child(f"child {number}") as child:
                child.wrap_tool_call(lambda child=child: pieces(child, aborts), WrapOptions(operation_name="talk"))
    assert list(run.partial_results) == ["child 3/talk", "child 4/talk"]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "10"])
def test_the_bound_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="max_kept_pieces"):
        RunSettings(max_kept_pieces=wrong)


def test_a_buffer_keeps_the_first_pieces_and_no_more() -> None:
    buffer = PieceBuffer(2)
    assert buffer.output() is None
    assert first_pieces([], 2) is None
    for number in range(5):
        buffer.append(number)
    assert buffer.output() == first_pieces(list(range(5)), 2) == IncompleteOutput((0, 1), 3)


# Models.


class Streams(Model):
    """Yields text and a tool call, and then stops its own run."""

    def __init__(self, stop: Callable[[], object]) -> None:
        super().__init__("talker")
        self.stop = stop

    async def request_stream(self, request: ModelRequest) -> AsyncIterator[Any]:
        yield "Hel"
        yield "lo"
        yield ToolCall("1", "look", {})
        self.stop()
        await asyncio.sleep(3_600)


@pytest.mark.parametrize("kind", ["abort", "time"])
def test_a_streamed_answer_of_a_model_that_is_stopped_is_kept_by_the_models_name(kind: str) -> None:
    async def main() -> None:
        with contain(timeout_s=30, clock=sim_loop().clock) as run:
            model = Streams((lambda: run.abort("enough")) if kind == "abort" else (lambda: None))
            with pytest.raises((BudgetExceededError, CancelledError)) as raised:
                await model.generate(run, [], on_delta=lambda delta: None)
        kept = IncompleteOutput(("Hel", "lo", ToolCall("1", "look", {})))
        assert raised.value.partial == run.partial_results == {"talker": kept}

    sim_run(main, seed=1)
