"""Steps and nodes that stream: what they yielded before a stop is in `partial`, marked as incomplete."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    DataValue,
    ErrorPolicy,
    ExecutionContext,
    ExecutionResult,
    FunctionNode,
    Graph,
    Halted,
    RunSettings,
    StepTimeout,
    StopReason,
    current_call,
)
from penstock.agents.model import Model, ModelRequest
from penstock.containment import IncompleteOutput
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent, run_flow
from penstock.stores import Journal
from tests.flow.steps import const, sim_loop, simulated, takes
from tests.nodes.graphs import events_of, node
from tests.nodes.graphs import graph as document
from tests.runtime.durable.journalled import JsonJournals

pytestmark = pytest.mark.requirement("C-17")

KEPT = IncompleteOutput(("one", "two"))
Stopping = Callable[[ExecutionContext], object]


def uses_tokens(ctx: ExecutionContext) -> object:
    ctx.llm(lambda: ctx.report(output_tokens=200), name="used")
    return ctx.tool(lambda: None, name="refused")


STOPS: dict[str, tuple[Stopping, StopReason]] = {
    "time": (lambda ctx: None, StopReason.TIMEOUT),
    "money": (lambda ctx: ctx.tool(lambda: None, cost_hint_usd=5), StopReason.BUDGET_EXCEEDED),
    "steps": (lambda ctx: [ctx.tool(lambda: None) for _ in range(9)], StopReason.STEP_LIMIT_EXCEEDED),
    "tokens": (uses_tokens, StopReason.TOKEN_LIMIT_EXCEEDED),
    "cancel": (lambda ctx: ctx.cancellation.cancel("enough"), StopReason.ABORTED),
    "abort": (lambda ctx: ctx.abort("enough"), StopReason.ABORTED),
}


def streams(stop: Stopping, *, is_async: bool) -> FunctionNode:
    """A node that yields twice, does what stops its run, and would go on for an hour."""

    async def slowly(ctx: ExecutionContext) -> AsyncIterator[str]:
        yield "one"
        yield "two"
        stop(ctx)
        await asyncio.sleep(3_600)
        yield "never"

    def at_once(ctx: ExecutionContext) -> Iterator[str]:
        yield "one"
        yield "two"
        stop(ctx)
        if ctx.cancellation.cancellation is None:
            sim_loop().clock.move(sim_loop().time() + 3_600)  # a function that keeps the loop for an hour
        yield "late"
        yield "never"

    return FunctionNode("talker", slowly if is_async else at_once)


def limited(**settings: Any) -> ExecutionContext:
    budget = Budget(max_cost_dollars=1, max_steps=6, max_tokens=100, max_time_seconds=60)
    settings = {"sync_calls": "inline", **settings}
    return ExecutionContext(budget=budget, clock=sim_loop().clock, settings=RunSettings(**settings))


@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_watched", [True, False])
def test_the_partial_of_a_stopped_graph_has_what_a_streaming_step_yielded(
    is_watched: bool, is_async: bool, kind: str
) -> None:
    stop, reason = STOPS[kind]

    async def main() -> None:
        chain = Graph("g").add_step(const("first", 1), "first")
        chain.add_step(streams(stop, is_async=is_async), "talk", depends_on=["first"])
        with limited() as ctx, pytest.raises((Halted, CancelledError)) as raised:
            if is_watched:
                events = [event async for event in chain.execute_stream(ctx)]
                assert not events
            else:
                await chain.execute(ctx)
        assert raised.value.stop.reason is reason
        # A sync generator notices a time limit or a cancel after its next piece, everything else where it waits.
        late = not is_async and kind in ("time", "cancel", "abort")
        kept = IncompleteOutput(("one", "two", "late")) if late else KEPT
        assert raised.value.partial == {"first": 1, "talk": kept}
        assert ctx.partial_results["talk"] == kept
        assert ctx.partial_results["first"] == 1

    simulated(main)


def test_every_streaming_step_that_is_stopped_with_its_graph_keeps_its_output() -> None:
    async def main() -> None:
        wide = Graph("wide", max_parallel=4)
        for name in "abc":
            wide.add_step(streams(lambda ctx: None, is_async=True), name)
        wide.add_step(takes(5), "d")
        with limited() as ctx:
            asyncio.get_running_loop().call_later(10, ctx.abort)
            with pytest.raises(CancelledError) as raised:
                await wide.execute(ctx)
        assert raised.value.partial == {"d": "done", "a": KEPT, "b": KEPT, "c": KEPT}

    simulated(main)


def test_a_step_inside_a_graph_inside_a_graph_is_found_below_the_steps_around_it() -> None:
    async def main() -> None:
        inner = Graph("inner").add_step(streams(lambda ctx: ctx.abort("enough"), is_async=True), "talk")
        outer = Graph("outer").add_step(const("one", 1), "first").add_step(inner, "nested", depends_on=["first"])
        with limited() as ctx, pytest.raises(CancelledError) as raised:
            await outer.execute(ctx)
        assert raised.value.partial == {"first": 1, "nested": {"talk": KEPT}}
        assert ctx.partial_results == {"first": 1, "talk": KEPT}

    simulated(main)


def test_steps_that_are_not_recorded_keep_their_output_in_the_error() -> None:
    async def main() -> None:
        chain = Graph("g").add_step(streams(lambda ctx: ctx.abort("enough"), is_async=True), "talk")
        with ExecutionContext(settings=RunSettings(record_steps=False)) as ctx:
            outer = await ctx.acall_tool(lambda: chain.execute(ctx))
        assert isinstance(outer.call.error, CancelledError)
        assert outer.call.error.partial == {"talk": KEPT}
        assert ctx.partial_results == {}  # results of such steps are not there either

    simulated(main)


def test_the_time_limit_of_a_step_keeps_its_output_and_the_next_attempt_is_not_taken_for_it() -> None:
    async def main() -> None:
        attempts: list[int] = []

        async def talk(ctx: ExecutionContext) -> AsyncIterator[str]:
            attempts.append(len(attempts))
            yield "one"
            yield "two"
            await asyncio.sleep(3_600 if len(attempts) == 1 else 0)

        def graph(retries: int) -> Graph:
            policy = ErrorPolicy(on_error="retry" if retries else "fail", retry_count=retries, timeout_ms=1_000)
            return Graph("g").add_step(FunctionNode("talker", talk), "talk", error_policy=policy)

        with limited() as ctx, pytest.raises(StepTimeout):
            await graph(0).execute(ctx)
        assert ctx.partial_results == {"talk": KEPT}
        attempts.clear()
        with limited() as ctx:
            assert await graph(1).execute(ctx) == {"talk": ["one", "two"]}
        assert ctx.partial_results == {"talk": ["one", "two"], "talk#n000002": KEPT}

    simulated(main)


def test_a_collecting_graph_keeps_the_output_of_streams_that_were_stopped_and_not_of_those_that_failed() -> None:
    async def main() -> None:
        async def breaks(ctx: ExecutionContext) -> AsyncIterator[str]:
            yield "one"
            raise ValueError("broken")

        collecting = Graph("g", settle="collect").add_step(FunctionNode("breaks", breaks), "broken")
        collecting.add_step(streams(lambda ctx: ctx.tool(lambda: None, cost_hint_usd=5), is_async=True), "talk")
        with limited() as ctx, pytest.raises(BudgetExceededError) as raised:
            await collecting.execute(ctx)
        assert raised.value.partial == {"talk": KEPT}

    simulated(main)


def test_a_fallback_that_streams_keeps_its_output() -> None:
    async def main() -> None:
        def breaks(ctx: ExecutionContext) -> None:
            raise ValueError("broken")

        other = streams(lambda ctx: ctx.abort("enough"), is_async=False)
        policy = ErrorPolicy(on_error="fallback", fallback_node=other)
        falling = Graph("g").add_step(FunctionNode("breaks", breaks), "talk", error_policy=policy)
        with limited() as ctx, pytest.raises(CancelledError) as raised:
            await falling.execute(ctx)
        assert raised.value.partial == {"talk": IncompleteOutput(("one", "two", "late"))}

    simulated(main)


# On threads.


@pytest.mark.parametrize("is_watched", [True, False])
async def test_a_blocking_generator_streams_from_its_thread(is_watched: bool) -> None:
    def counts(ctx: ExecutionContext) -> Iterator[int]:
        assert threading.current_thread() is not threading.main_thread()
        yield from range(3)

    graph = Graph("g").add_step(FunctionNode("counts", counts, blocking=True), "count")
    if not is_watched:
        assert await graph.execute() == {"count": [0, 1, 2]}
        return
    events = [(event.event_type, event.data) async for event in graph.execute_stream()]
    assert events == [("started", None), *(("progress", at) for at in range(3)), ("completed", [0, 1, 2])]


async def test_a_blocking_generator_that_is_left_behind_leaves_its_output() -> None:
    free, closed = threading.Event(), threading.Event()

    def stuck(ctx: ExecutionContext) -> Iterator[str]:
        try:
            yield "one"
            yield "two"
            ctx.abort("enough")
            free.wait()
            yield "late"
            yield "never"
        finally:
            closed.set()

    graph = Graph("g").add_step(FunctionNode("stuck", stuck, blocking=True), "talk")
    with ExecutionContext() as ctx, pytest.raises(CancelledError) as raised:
        await graph.execute(ctx)
    assert raised.value.partial == ctx.partial_results == {"talk": KEPT}
    free.set()
    assert await asyncio.to_thread(closed.wait, 10)
    assert raised.value.partial == ctx.partial_results == {"talk": KEPT}


# Sync generators are streams.


async def test_a_sync_generator_streams_and_others_get_a_turn_between_its_pieces() -> None:
    turns: list[str] = []

    def counts(ctx: ExecutionContext) -> Iterator[int]:
        for at in range(3):
            turns.append(f"piece {at}")
            yield at

    async def others(ctx: ExecutionContext) -> None:
        for _ in range(3):
            turns.append("other")
            await asyncio.sleep(0)

    graph = Graph("g", max_parallel=2).add_step(FunctionNode("counts", counts), "count")
    graph.add_step(FunctionNode("others", others), "others")
    assert await graph.execute() == {"count": [0, 1, 2], "others": None}
    assert turns == ["piece 0", "other", "piece 1", "other", "piece 2", "other"]


async def test_a_call_inside_a_streaming_step_is_a_call_of_the_step() -> None:
    seen: list[str] = []

    def talk(ctx: ExecutionContext) -> Iterator[str]:
        call = current_call()
        assert call is not None
        seen.append(call.record.name)
        yield ctx.tool(lambda: "looked", name="look")

    assert await Graph("g").add_step(FunctionNode("talk", talk), "step").execute() == {"step": ["looked"]}
    assert seen == ["step"]


# Nodes of an editor's graph.


class Tells:
    """An executor that tells progress twice, does what it is given, and gives its result."""

    def __init__(self, form: str, act: Callable[[FlowContext], Any]) -> None:
        self.blocking = form == "blocking"
        self.execute = self._async if form == "async" else self._sync
        self._act = act

    async def _async(self, data: Any, inputs: Any, context: FlowContext) -> Any:
        yield NodeEvent.progress("word", "one")
        yield NodeEvent.progress("word", "two")
        self._act(context)
        await asyncio.sleep(0)
        yield ExecutionResult({"output": DataValue("text", "whole")})

    def _sync(self, data: Any, inputs: Any, context: FlowContext) -> Any:
        yield NodeEvent.progress("word", "one")
        yield NodeEvent.progress("word", "two")
        self._act(context)
        context.execution.check_cancelled()
        yield ExecutionResult({"output": DataValue("text", "whole")})


WORDS = IncompleteOutput((("word", "one"), ("word", "two")))


@pytest.mark.parametrize("form", ["async", "sync", "blocking"])
@pytest.mark.parametrize("kind", ["abort", "money"])
async def test_the_progress_of_a_node_that_was_stopped_is_kept(kind: str, form: str) -> None:
    stop, _ = STOPS[kind]
    executors = {"talks": Tells(form, lambda context: stop(context.execution))}
    ctx = ExecutionContext(budget=Budget(max_cost_dollars=1))
    with ctx, pytest.raises((CancelledError, BudgetExceededError)) as raised:
        async for _ in run_flow(document([node("talk", "talks")]), ctx, executors):
            pass
    assert raised.value.partial == ctx.partial_results == {"talk": WORDS}


@pytest.mark.parametrize("form", ["async", "sync", "blocking"])
async def test_of_a_node_without_an_end_no_more_than_the_first_pieces_are_kept(form: str) -> None:
    class Endless(Tells):
        def _sync(self, data: Any, inputs: Any, context: FlowContext) -> Any:
            for number in range(100):
                yield NodeEvent.progress("word", number)
            context.execution.abort("enough")
            context.execution.check_cancelled()

        async def _async(self, data: Any, inputs: Any, context: FlowContext) -> Any:
            for one in self._sync(data, inputs, context):
                yield one

    with ExecutionContext(settings=RunSettings(max_kept_pieces=2)) as ctx, pytest.raises(CancelledError) as raised:
        async for _ in run_flow(document([node("talk", "talks")]), ctx, {"talks": Endless(form, print)}):
            pass
    assert raised.value.partial == {"talk": IncompleteOutput((("word", 0), ("word", 1)), dropped=98)}


async def test_an_agent_node_that_is_stopped_keeps_the_pieces_of_its_answer() -> None:
    class Talks(Model):
        async def request_stream(self, request: ModelRequest) -> AsyncIterator[Any]:
            yield "one"
            yield "two"
            ctx.abort("enough")
            await asyncio.sleep(3_600)

    agent = document([node("agent", "agent", model="talker", stream=True)])
    with ExecutionContext(input="talk") as ctx, pytest.raises(CancelledError) as raised:
        await events_of(agent, run=ctx, services={"models": {"talker": Talks("talker")}})
    kept = raised.value.partial["agent"]
    assert [data["text"] for kind, data in kept.pieces if kind == "delta"] == ["one", "two"]
    assert [value for value in ctx.partial_results.values() if value == KEPT] == [KEPT]


# Journals.


@pytest.mark.parametrize("is_async", [True, False])
def test_a_resumed_run_streams_again_and_never_takes_incomplete_output_for_a_result(is_async: bool) -> None:
    async def main() -> None:
        store, ran = JsonJournals(), list[str]()

        def first(ctx: ExecutionContext) -> int:
            ran.append("first")
            return 1

        def graph(stop: Stopping) -> Graph:
            made = Graph("g").add_step(FunctionNode("first", first), "first")
            return made.add_step(streams(stop, is_async=is_async), "talk", depends_on=["first"])

        ctx = ExecutionContext(journal=await Journal.open(store, "r"), clock=sim_loop().clock)
        with ctx, pytest.raises(CancelledError) as raised:
            await graph(lambda ctx: ctx.abort("enough")).execute(ctx)
        assert isinstance(raised.value.partial["talk"], IncompleteOutput)
        assert not any("talk" in key for key in store.keys_of())
        with ExecutionContext(journal=await Journal.open(store, "r"), clock=sim_loop().clock) as ctx:
            found = await graph(lambda ctx: None).execute(ctx)
        assert ran == ["first"]  # found in the journal, unlike the stream
        whole = ["one", "two", "never"] if is_async else ["one", "two", "late", "never"]
        assert found == {"first": 1, "talk": whole}
        assert ctx.partial_results == found

    simulated(main)
