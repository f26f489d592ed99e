"""Streaming a graph run: which events are emitted, in what order, and what is left when the consumer stops reading."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    contain,
)
from penstock.events import StepEvent
from penstock.testing import check_history, explore
from tests.flow.steps import Boom, const, sim_loop, simulated, takes

pytestmark = pytest.mark.requirement("P-G1")

TERMINAL = {"completed", "error", "cancelled", "skipped"}


def breaks(ctx: ExecutionContext) -> None:
    raise Boom("broken")


def counts(to: int, seconds: float = 0.0) -> FunctionNode:
    async def count(ctx: ExecutionContext) -> AsyncIterator[int]:
        for at in range(to):
            await asyncio.sleep(seconds)
            yield at

    return FunctionNode("count", count)


async def collect(
    graph: Graph, context: ExecutionContext | None = None
) -> tuple[list[StepEvent], BaseException | None]:
    """All events of a stream, and the error that ended it."""
    events: list[StepEvent] = []
    try:
        async for event in graph.execute_stream(context):
            events.append(event)
    except (Exception, CancelledError) as error:
        return events, error
    return events, None


def brief(events: list[StepEvent]) -> list[tuple[str, str]]:
    return [(event.event_type, event.step_id) for event in events]


# Which events are emitted.


async def test_each_step_emits_its_start_and_its_end_with_the_result() -> None:
    graph = Graph("g").add_step(const("one", 1), "a").add_step(const("two", 2), "b", depends_on=["a"])
    with ExecutionContext() as ctx:
        events, _ = await collect(graph, ctx)
    assert brief(events) == [("started", "a"), ("completed", "a"), ("started", "b"), ("completed", "b")]
    assert [event.data for event in events] == [None, 1, None, 2]
    assert {event.graph_id for event in events} == {"g"}
    assert {event.run_id for event in events} == {ctx.run_id}
    assert [event.node_id for event in events] == ["one", "one", "two", "two"]
    assert sorted(event.timestamp for event in events) == [event.timestamp for event in events]


def test_started_is_emitted_before_the_work_is_done() -> None:
    async def main() -> None:
        ended: list[str] = []

        async def slow(ctx: ExecutionContext) -> None:
            await asyncio.sleep(10)
            ended.append("slow")

        async for event in Graph("g").add_step(FunctionNode("s", slow), "a").execute_stream():
            assert bool(ended) == (event.event_type == "completed")

    simulated(main)


async def test_a_streaming_node_emits_its_pieces_and_returns_their_list() -> None:
    events, _ = await collect(Graph("g").add_step(counts(3), "a"))
    assert [(event.event_type, event.data) for event in events] == [
        ("started", None),
        ("progress", 0),
        ("progress", 1),
        ("progress", 2),
        ("completed", [0, 1, 2]),
    ]


def test_pieces_are_emitted_as_they_come() -> None:
    async def main() -> None:
        times = [
            sim_loop().time()
            async for event in Graph("g").add_step(counts(3, seconds=1), "a").execute_stream()
            if event.event_type == "progress"
        ]
        assert times == [1, 2, 3]

    simulated(main)


async def test_steps_of_nested_graphs_have_their_whole_path() -> None:
    deepest = Graph("deepest").add_step(counts(1), "z")
    inner = Graph("inner").add_step(deepest, "y")
    events, _ = await collect(Graph("outer").add_step(inner, "x").add_step(const("b"), "b"))
    assert brief(events) == [
        ("started", "x"),
        ("started", "x/y"),
        ("started", "x/y/z"),
        ("progress", "x/y/z"),
        ("completed", "x/y/z"),
        ("completed", "x/y"),
        ("completed", "x"),
        ("started", "b"),
        ("completed", "b"),
    ]
    assert [event.graph_id for event in events][:3] == ["outer", "inner", "deepest"]


async def test_only_steps_are_in_the_path_of_a_step() -> None:
    inner = Graph("inner").add_step(const("y"), "y")
    by_tool = FunctionNode("t", lambda ctx: ctx.atool(inner.execute, ctx, name="tool"))
    outer = Graph("outer").add_step(by_tool, "x")
    with ExecutionContext() as ctx:
        events, _ = await ctx.atool(collect, outer, ctx, name="consumer")
    assert {event.step_id for event in events} == {"x", "x/y"}


async def test_events_of_a_stream_inside_a_step_go_to_its_own_reader_alone() -> None:
    inner = Graph("inner").add_step(const("y"), "y")
    seen: list[StepEvent] = []

    async def streams(ctx: ExecutionContext) -> None:
        events, _ = await collect(inner, ctx)
        seen.extend(events)

    events, _ = await collect(Graph("outer").add_step(FunctionNode("s", streams), "x"))
    assert brief(events) == [("started", "x"), ("completed", "x")]
    assert brief(seen) == [("started", "y"), ("completed", "y")]


async def test_a_retried_step_starts_once_and_ends_once() -> None:
    left = [2]

    def flaky(ctx: ExecutionContext) -> str:
        if left[0]:
            left[0] -= 1
            raise Boom
        return "done"

    policy = ErrorPolicy("retry", retry_count=2, retry_delay_ms=0)
    events, _ = await collect(Graph("g").add_step(FunctionNode("f", flaky), "a", error_policy=policy))
    assert brief(events) == [("started", "a"), ("completed", "a")]


async def test_a_skipped_step_and_a_fallback_complete_with_the_replacement_value() -> None:
    graph = Graph("g").add_step(FunctionNode("f", breaks), "a", error_policy=ErrorPolicy("skip", fallback_value=5))
    graph.add_step(FunctionNode("f", breaks), "b", error_policy=ErrorPolicy("fallback", fallback_node=counts(2)))
    events, _ = await collect(graph)
    assert [(event.event_type, event.step_id, event.data) for event in events] == [
        ("started", "a", None),
        ("completed", "a", 5),
        ("started", "b", None),
        ("progress", "b", 0),
        ("progress", "b", 1),
        ("completed", "b", [0, 1]),
    ]


async def test_a_failure_is_emitted_and_then_raised() -> None:
    graph = Graph("g").add_step(FunctionNode("f", breaks), "a").add_step(const("b"), "b", depends_on=["a"])
    events, error = await collect(graph)
    assert isinstance(error, Boom)
    assert brief(events)[:2] == [("started", "a"), ("error", "a")]
    assert events[1].data is error
    assert ("started", "b") not in brief(events)


async def test_steps_that_did_not_run_because_of_a_failure_are_skipped() -> None:
    graph = Graph("g", settle="collect").add_step(FunctionNode("f", breaks), "a")
    graph.add_step(const("b"), "b", depends_on=["a"]).add_step(const("c"), "c")
    events, error = await collect(graph)
    assert error is None
    assert set(brief(events)) == {
        ("started", "a"),
        ("error", "a"),
        ("skipped", "b"),
        ("started", "c"),
        ("completed", "c"),
    }


async def test_a_step_refused_by_a_limit_is_skipped_with_the_reason() -> None:
    graph = Graph("g").add_step(const("a"), "a").add_step(const("b"), "b", depends_on=["a"])
    events, error = await collect(graph, ExecutionContext(budget=Budget(max_steps=1)))
    assert isinstance(error, BudgetExceededError)
    assert brief(events) == [("started", "a"), ("completed", "a"), ("skipped", "b")]
    assert "step" in str(events[-1].data)


@pytest.mark.parametrize("policy", [None, ErrorPolicy("retry", retry_count=1)])
async def test_a_step_with_a_policy_refused_by_a_limit_is_skipped_like_any_other(policy: ErrorPolicy | None) -> None:
    graph = Graph("g").add_step(const("a"), "a").add_step(const("b"), "b", depends_on=["a"], error_policy=policy)
    events, error = await collect(graph, ExecutionContext(budget=Budget(max_steps=1)))
    assert isinstance(error, BudgetExceededError)
    assert brief(events) == [("started", "a"), ("completed", "a"), ("skipped", "b")]


def test_steps_stopped_by_a_cancel_are_cancelled() -> None:
    async def main() -> None:
        loop = sim_loop()
        ctx = ExecutionContext(clock=loop.clock)
        loop.call_later(1, ctx.abort, "enough")
        graph = Graph("g", max_parallel=2).add_step(takes(100), "a").add_step(takes(100), "b")
        events, error = await collect(graph, ctx)
        assert isinstance(error, CancelledError)
        assert error.reason == "enough"
        assert sorted(brief(events)) == [("cancelled", "a"), ("cancelled", "b"), ("started", "a"), ("started", "b")]

    simulated(main)


def test_every_started_step_has_one_end_in_every_interleaving() -> None:
    async def schedule(seed: int) -> None:
        settle = ["fail_fast", "collect", "first", "quorum(2)"][seed % 4]
        inner = Graph("inner", max_parallel=2).add_step(takes(1), "x").add_step(counts(3, seconds=0.5), "y")
        graph = Graph("g", max_parallel=3, settle=settle).add_step(inner, "i").add_step(takes(seed % 3), "a")
        graph.add_step(FunctionNode("f", breaks), "b", depends_on=["a"]).add_step(takes(2), "c").chain("c", "b")
        graph.add_step(FunctionNode("f", breaks), "d", depends_on=["a"], error_policy=ErrorPolicy("skip"))
        ctx = ExecutionContext(clock=sim_loop().clock)
        if seed % 5 == 0:
            sim_loop().call_later(seed % 4, ctx.abort)
        events, _ = await collect(graph, ctx)
        open_steps: set[str] = set()
        ended: list[str] = []
        for event in events:
            if event.event_type == "started":
                assert event.step_id not in open_steps
                open_steps.add(event.step_id)
            elif event.event_type == "progress":
                assert event.step_id in open_steps
            elif event.event_type == "skipped":
                assert event.step_id not in open_steps
                ended.append(event.step_id)
            else:
                assert event.event_type in TERMINAL
                open_steps.remove(event.step_id)
                ended.append(event.step_id)
        assert open_steps == set()
        assert len(ended) == len(set(ended))

    explore(schedule, schedules=200)


async def test_a_stream_has_the_results_that_execute_returns() -> None:
    graph = Graph("g").add_step(const("one", {"x": 1}), "a").add_step(counts(2), "b", depends_on=["a"])
    events, _ = await collect(graph)
    assert {event.step_id: event.data for event in events if event.event_type == "completed"} == await graph.execute()


async def test_an_event_is_json() -> None:
    events, _ = await collect(Graph("g").add_step(const("odd", {1: {2}}), "a"))
    assert json.loads(json.dumps([event.to_dict() for event in events]))[1]["step_id"] == "a"


async def test_an_empty_graph_emits_nothing() -> None:
    assert await collect(Graph("g")) == ([], None)


async def test_a_graph_that_cannot_run_raises_when_its_stream_is_read() -> None:
    events, error = await collect(Graph("g").add_step(const("a"), "a", depends_on=["nowhere"]))
    assert events == []
    assert "nowhere" in str(error)


# Leaving it.


@pytest.mark.requirement("P-P3")
def test_leaving_a_stream_in_the_middle_leaves_no_task_and_no_hold() -> None:
    async def schedule(seed: int) -> None:
        loop = sim_loop()
        inner = Graph("inner", max_parallel=2).add_step(takes(5), "x").add_step(counts(50, seconds=0.1), "y")
        graph = Graph("g", max_parallel=4).add_step(inner, "i").add_step(takes(100), "a").add_step(takes(1), "b")
        with ExecutionContext(clock=loop.clock) as ctx:
            seen = 0
            async with aclosing(graph.execute_stream(ctx)) as stream:  # type: ignore[type-var]
                async for _ in stream:
                    seen += 1
                    if seen > seed % 12:
                        break
            assert len(asyncio.all_tasks()) == 1
            assert ctx.balance.steps_open == 0
            assert ctx.graph.open_calls() in ([], [ctx.graph.calls()[1][0]])
            assert not ctx.cancellation.is_cancelled, "only the graph was cancelled, not the run around it"
        assert check_history(ctx.history(), ledger=ctx.balance) == []

    explore(schedule, schedules=100)


@pytest.mark.requirement("P-P3")
def test_an_error_of_the_reader_stops_the_graph_and_propagates() -> None:
    async def main() -> None:
        graph = Graph("g").add_step(takes(100), "a")
        with pytest.raises(ZeroDivisionError):
            async with aclosing(graph.execute_stream()) as stream:  # type: ignore[type-var]
                async for _ in stream:
                    raise ZeroDivisionError
        assert sim_loop().time() < 100
        assert len(asyncio.all_tasks()) == 1

    simulated(main)


@pytest.mark.requirement("P-P3")
def test_a_reader_whose_task_is_cancelled_takes_the_graph_with_it() -> None:
    async def schedule(seed: int) -> None:
        ended: list[str] = []

        async def tidies_up(ctx: ExecutionContext) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(1)
                ended.append("tidy")

        async def read() -> None:
            async with aclosing(graph.execute_stream()) as stream:  # type: ignore[type-var]
                async for _ in stream:
                    pass

        graph = Graph("g", max_parallel=2).add_step(FunctionNode("t", tidies_up), "a").add_step(takes(100), "b")
        task = asyncio.create_task(read())
        await asyncio.sleep(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["tidy"]
        assert len(asyncio.all_tasks()) == 1
        assert sim_loop().time() == 6

    explore(schedule, schedules=50)


@pytest.mark.requirement("P-P3")
def test_a_stream_that_is_only_dropped_stops_its_graph_soon() -> None:
    async def main() -> None:
        async def begin() -> None:
            async for _ in (
                Graph("g", max_parallel=2).add_step(takes(100), "a").add_step(takes(100), "b").execute_stream()
            ):
                break

        await begin()
        gc.collect()
        await asyncio.sleep(1)
        assert len(asyncio.all_tasks()) == 1

    simulated(main)


@pytest.mark.requirement("P-P3", "P-C2")
async def test_leaving_a_stream_does_not_wait_for_a_node_that_blocks_its_thread() -> None:
    release = threading.Event()
    node = FunctionNode("b", lambda ctx: release.wait(30), blocking=True)
    try:
        with ExecutionContext() as ctx:
            async with aclosing(Graph("g").add_step(node, "a").execute_stream(ctx)) as stream:  # type: ignore[type-var]
                async for event in stream:
                    assert event.event_type == "started"
                    break
            assert not release.is_set()
            (left,) = [call for call in ctx.graph.calls()[1] if call.name == "a"]
            assert (left.status, left.abandoned) == ("halt", True)
            assert ctx.balance.steps_open == 0
    finally:
        release.set()


@pytest.mark.parametrize("leaving", [KeyboardInterrupt, SystemExit])
async def test_what_ends_the_program_is_raised_to_a_reader_who_has_left(leaving: type[BaseException]) -> None:
    async def interrupted_while_it_cleans_up(ctx: ExecutionContext) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise leaving

    stream = Graph("g").add_step(FunctionNode("n", interrupted_while_it_cleans_up), "a").execute_stream()
    assert (await anext(stream)).event_type == "started"  # type: ignore[arg-type]
    await asyncio.sleep(0)
    with pytest.raises(leaving):
        await stream.aclose()  # type: ignore[attr-defined]


async def test_a_stream_that_was_never_read_runs_nothing() -> None:
    ran: list[int] = []
    stream = Graph("g").add_step(FunctionNode("r", lambda ctx: ran.append(1)), "a").execute_stream()
    await stream.aclose()  # type: ignore[attr-defined]
    assert ran == []


@pytest.mark.requirement("P-P3")
def test_a_persistent_node_is_free_again_after_its_reader_has_left() -> None:
    async def main() -> None:
        node = FunctionNode("t", lambda ctx: asyncio.sleep(100), persistent=True)
        async with aclosing(Graph("g").add_step(node, "a").execute_stream()) as stream:  # type: ignore[type-var]
            async for _ in stream:
                break
        await Graph("other", turn_timeout_s=0).add_step(node, "b").execute()

    simulated(main)


def test_a_reader_who_is_slow_holds_up_a_node_that_streams_faster_than_it_reads() -> None:
    async def main() -> None:
        made: list[int] = []

        async def fast(ctx: ExecutionContext) -> AsyncIterator[int]:
            for at in range(10_000):
                made.append(at)
                yield at

        read = 0
        async for event in Graph("g").add_step(FunctionNode("f", fast), "a").execute_stream():
            if event.event_type == "progress":
                read += 1
                assert len(made) - read < 2_000
                await asyncio.sleep(0.001)
        assert read == 10_000

    simulated(main)


async def test_a_stream_without_a_context_is_a_run_of_its_own_that_ends() -> None:
    seen: list[ExecutionContext] = []
    events, _ = await collect(Graph("g").add_step(FunctionNode("see", seen.append), "a"))
    assert len(events) == 2
    assert seen[0].termination_reason == "success"


async def test_two_readers_of_one_graph_see_their_own_run() -> None:
    graph = Graph("g").add_step(counts(3), "a")
    with contain() as one, contain() as two:
        (first, _), (second, _) = await asyncio.gather(collect(graph, one), collect(graph, two))
    assert {event.run_id for event in first} == {one.run_id}
    assert {event.run_id for event in second} == {two.run_id}
    assert brief(first) == brief(second)
