"""Where sync steps run: on a worker if a time limit or a given token may have to release the graph, else in place."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    Session,
    StepTimeout,
    contain,
)

LONG_S = 3_600.0


def is_on_loop_thread(ctx: ExecutionContext) -> bool:
    return threading.current_thread() is threading.main_thread()


async def where(graph: Graph, step: str = "a", **options: Any) -> bool:
    """Whether the step ran on the thread of the event loop."""
    with contain(**options) as run:
        results = await graph.execute(run)
    return bool(results[step])


def one_step(**options: Any) -> Graph:
    graph = Graph("g")
    graph.step(is_on_loop_thread, "a", **options)
    return graph


@pytest.mark.requirement("C-4")
@pytest.mark.parametrize(
    ("step", "run", "on_loop"),
    [
        ({}, {}, True),
        ({}, {"timeout_s": LONG_S}, False),
        ({}, {"timeout_s": LONG_S, "sync_calls": "inline"}, True),
        ({}, {"sync_calls": "thread"}, False),
        ({"error_policy": ErrorPolicy(timeout_ms=3_600_000)}, {}, False),
        ({"error_policy": ErrorPolicy(timeout_ms=3_600_000)}, {"sync_calls": "inline"}, True),
        ({"error_policy": ErrorPolicy("retry", retry_count=1)}, {}, True),
        ({"sub_budget": Budget(max_time_seconds=LONG_S)}, {}, False),
        ({"sub_budget": Budget(max_steps=5)}, {}, True),
        ({"blocking": False}, {"timeout_s": LONG_S}, True),
        ({"blocking": True}, {}, False),
    ],
)
async def test_a_sync_step_runs_on_a_worker_if_it_may_have_to_be_abandoned(
    step: dict[str, Any], run: dict[str, Any], on_loop: bool
) -> None:
    assert await where(one_step(**step), **run) is on_loop


async def test_a_sync_step_of_a_run_with_a_given_token_runs_on_a_worker() -> None:
    assert not await where(one_step(), cancellation=CancellationToken())


async def test_a_step_that_refers_to_a_node_of_the_session_runs_on_a_worker_too() -> None:
    session = Session("s")
    session.register(FunctionNode("node", is_on_loop_thread))
    graph = Graph("g", session=session)
    graph.step("node", "a")
    assert await where(graph)
    assert not await where(graph, timeout_s=LONG_S)


async def test_one_graph_runs_with_and_without_a_time_limit() -> None:
    graph = one_step()
    assert [await where(graph), await where(graph, timeout_s=LONG_S), await where(graph)] == [True, False, True]


@pytest.mark.requirement("C-4")
async def test_the_time_limit_of_the_run_releases_the_graph_from_a_sync_step() -> None:
    release, abandoned = threading.Event(), threading.Event()

    def stuck(ctx: ExecutionContext) -> None:
        release.wait(60)
        abandoned.set()

    graph = Graph("g")
    graph.step(stuck, "stuck")
    with contain(timeout_s=0.05) as run:
        try:
            with pytest.raises(BudgetExceededError):
                await graph.execute(run)
            assert not abandoned.is_set()
        finally:
            release.set()
    assert abandoned.wait(60)


async def test_a_cancel_releases_the_graph_and_other_steps_run_meanwhile() -> None:
    token, release = CancellationToken(), threading.Event()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stuck(ctx: ExecutionContext) -> None:
        loop.call_soon_threadsafe(began.set)
        release.wait(60)

    async def beside(ctx: ExecutionContext) -> None:
        await began.wait()
        token.cancel("enough")

    graph = Graph("g", max_parallel=2)
    graph.step(stuck, "stuck")
    graph.step(beside, "beside")
    with contain(cancellation=token) as run:
        try:
            with pytest.raises(CancelledError):
                await graph.execute(run)
        finally:
            release.set()


async def test_the_timeout_of_a_policy_ends_a_sync_step_and_the_next_attempt_counts() -> None:
    release, attempts = threading.Event(), []

    def slow_at_first(ctx: ExecutionContext) -> str:
        attempts.append(None)
        if len(attempts) == 1:
            release.wait(60)
        return "done"

    graph = Graph("g")
    graph.step(slow_at_first, "a", error_policy=ErrorPolicy("retry", retry_count=1, timeout_ms=200))
    try:
        with contain() as run:
            assert await graph.execute(run) == {"a": "done"}
    finally:
        release.set()
    assert len(attempts) == 2


async def test_without_a_retry_the_timeout_of_a_sync_step_is_its_error() -> None:
    release = threading.Event()
    graph = Graph("g")
    graph.step(lambda ctx: release.wait(60), "a", error_policy=ErrorPolicy(timeout_ms=20))
    try:
        with pytest.raises(StepTimeout):
            await graph.execute()
    finally:
        release.set()


async def test_an_awaitable_returned_by_a_sync_step_is_awaited_on_the_event_loop() -> None:
    async def later() -> bool:
        await asyncio.sleep(0)
        return threading.current_thread() is threading.main_thread()

    graph = Graph("g")
    graph.step(lambda ctx: later(), "a")
    assert await where(graph, timeout_s=LONG_S)


async def test_a_coroutine_that_comes_after_the_time_limit_is_closed() -> None:
    release, made = threading.Event(), threading.Event()

    async def never() -> None:
        raise AssertionError("it is never awaited")

    def late(ctx: ExecutionContext) -> Any:
        release.wait(60)
        made.set()
        return never()

    graph = Graph("g")
    graph.step(late, "a")
    with contain(timeout_s=0.05) as run:
        try:
            with pytest.raises(BudgetExceededError):
                await graph.execute(run)
        finally:
            release.set()
    assert made.wait(60)


async def test_a_generator_streams_from_its_worker() -> None:
    def pieces(ctx: ExecutionContext) -> Iterator[bool]:
        yield threading.current_thread() is threading.main_thread()
        yield threading.current_thread() is threading.main_thread()

    graph = Graph("g")
    graph.step(pieces, "a")
    with contain(timeout_s=LONG_S) as run:
        assert await graph.execute(run) == {"a": [False, False]}


async def test_calls_of_a_sync_step_on_a_worker_are_in_the_tree_below_it_and_may_wait() -> None:
    def step(ctx: ExecutionContext) -> str:
        return ctx.tool(lambda: "found", name="look", cost_hint_usd=0.1)

    graph = Graph("g")
    graph.step(step, "a")
    with contain(timeout_s=LONG_S, max_cost_usd=1) as run:
        assert await graph.execute(run) == {"a": "found"}
    assert "└─ ✓ look" in run.explain()
    assert run.balance.held_nanos == 0


async def test_a_coroutine_that_was_returned_during_the_stop_is_closed() -> None:
    returned = threading.Event()

    async def never() -> None:
        raise AssertionError("it is never awaited")

    class Returns:
        """Cancels the run from its own thread, after the value was made and before the loop has it."""

        def __call__(self, ctx: ExecutionContext) -> Any:
            token.cancel("enough")
            returned.set()
            return never()

    token = CancellationToken()
    graph = Graph("g")
    graph.step(FunctionNode("node", Returns()), "a")
    with contain(cancellation=token) as run, pytest.raises(CancelledError):
        await graph.execute(run)
    assert returned.wait(60)


@pytest.mark.parametrize("limit", [{"timeout_s": LONG_S}, {}])
async def test_a_sync_fallback_runs_on_a_worker_where_its_step_would(limit: dict[str, Any]) -> None:
    async def fails(ctx: ExecutionContext) -> None:
        raise ValueError("no")

    policy = ErrorPolicy("fallback", fallback_node=FunctionNode("other", is_on_loop_thread))
    graph = Graph("g")
    graph.step(fails, "a", error_policy=policy)
    assert await where(graph, **limit) is not bool(limit)


async def test_an_async_generator_of_a_sync_step_streams_on_the_loop() -> None:
    async def pieces() -> AsyncIterator[int]:
        yield 1
        yield 2

    graph = Graph("g")
    graph.step(lambda ctx: pieces(), "a")
    with contain(timeout_s=LONG_S) as run:
        assert await graph.execute(run) == {"a": [1, 2]}
