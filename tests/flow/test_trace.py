"""What a graph did, step by step: complete, in order, with its parents, and for next to nothing."""

from __future__ import annotations

import asyncio
import json
import math
from datetime import UTC, datetime, timedelta
from threading import Event, Thread
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    InvalidValue,
    Reported,
    RunSettings,
    StepTrace,
)
from penstock.testing import Answer, FakeProvider, explore
from tests.flow.steps import Boom, const, sim_loop, simulated

pytestmark = pytest.mark.requirement("P-O1")


def fails_times(times: int, value: Any = "done") -> FunctionNode:
    left = [times]

    def run(ctx: ExecutionContext) -> Any:
        if left[0]:
            left[0] -= 1
            raise Boom("not yet")
        return value

    return FunctionNode("flaky", run)


async def traced(graph: Graph, **options: Any) -> tuple[ExecutionTrace, BaseException | None]:
    """The trace of a run of `graph`, and what it raised."""
    trace = ExecutionTrace(graph.id)
    with ExecutionContext(trace=trace, **options) as ctx:
        try:
            await graph.execute(ctx)
        except (Exception, CancelledError) as error:
            return trace, error
    return trace, None


# What a step's trace says.


async def test_a_trace_says_which_costs_are_unknown() -> None:
    def ask(ctx: ExecutionContext) -> None:
        ctx.llm(lambda: "an answer without usage")
        ctx.llm(lambda: Reported.of("priced", cost_usd=ctx.input))

    graph = Graph("g").add_step(FunctionNode("nothing known", ask), "a", input=0)
    graph.add_step(FunctionNode("some known", ask), "b", input=0.25, depends_on=["a"])
    graph.add_step(const("free", 1), "c", depends_on=["b"])
    trace, _ = await traced(graph)
    assert [(step.cost_usd, step.unknown_costs) for step in trace.steps] == [(0, 1), (0.25, 1), (0, 0)]
    assert (trace.total_cost, trace.unknown_costs) == (0.25, 2)
    lines = trace.explain().splitlines()
    assert lines[2].endswith(", cost unknown (1 call)")
    assert lines[3].endswith(", cost at least $0.25, 1 call unknown")
    assert lines[-1] == "Total: 0 tokens, cost at least $0.25, 2 calls unknown"
    document = json.loads(json.dumps(trace.to_dict()))
    assert (document["unknown_costs"], "unknown_costs" in document["steps"][2]) == (2, False)
    read = ExecutionTrace.from_dict(document)
    assert (read.unknown_costs, read.explain()) == (2, trace.explain())
    with pytest.raises(InvalidValue, match=r"trace\.unknown_costs must be a whole number"):
        ExecutionTrace.from_dict({**document, "unknown_costs": -1})
    read.add_step(trace.steps[0])
    assert read.unknown_costs == 3


def test_a_step_has_its_ids_input_output_times_and_place_in_the_tree() -> None:
    async def main() -> None:
        async def slow(ctx: ExecutionContext) -> int:
            await asyncio.sleep(2)
            return int(ctx.input) + 1

        graph = Graph("g").add_step(const("one", 41), "a").add_step(FunctionNode("add", slow), "b", depends_on=["a"])
        trace = ExecutionTrace("g")
        with ExecutionContext(trace=trace, clock=sim_loop().clock) as ctx:
            await graph.execute(ctx)
        first, second = trace.steps
        assert (first.step_id, first.node_id, first.node_type) == ("a", "one", "function")
        assert (second.input, second.output, second.error) == (41, 42, None)
        assert second.duration_ms == 2_000
        assert second.end_time - second.start_time == timedelta(seconds=2)
        assert second.start_time == first.end_time
        assert second.start_time.tzinfo is not None
        assert ctx.graph.call(second.call_id).name == "b"
        assert (second.attempt, second.status, second.parent_step, second.depth) == (1, "success", None, 0)

    simulated(main)


async def test_a_failed_step_has_its_error_and_no_output() -> None:
    trace, error = await traced(Graph("g").add_step(fails_times(1), "a", input=3))
    (step,) = trace.steps
    assert isinstance(error, Boom)
    assert step.error == "Boom: not yet"
    assert (step.input, step.output, step.status) == (3, None, "fail")


async def test_a_class_of_the_users_own_is_named_by_its_class() -> None:
    class Browser:
        id = "b"

        def execute(self, context: ExecutionContext) -> None:
            pass

    trace, _ = await traced(Graph("g").add_step(Browser(), "a").add_step(Graph("inner"), "b"))
    assert [step.node_type for step in trace.steps] == ["Browser", "graph"]


async def test_steps_are_listed_in_the_order_they_began() -> None:
    graph = Graph("g")
    for id, before in [("d", ["b"]), ("b", ["a"]), ("a", [])]:
        graph.add_step(const(id), id, depends_on=before)
    trace, _ = await traced(graph)
    assert [step.step_id for step in trace.steps] == ["a", "b", "d"]


# Attempts, skips, fallbacks, refusals.


async def test_every_attempt_is_listed_with_its_number() -> None:
    policy = ErrorPolicy("retry", retry_count=3, retry_delay_ms=0)
    trace, _ = await traced(Graph("g").add_step(fails_times(2), "a", error_policy=policy))
    assert [(step.attempt, step.status, step.output) for step in trace.steps] == [
        (1, "fail", None),
        (2, "fail", None),
        (3, "success", "done"),
    ]
    assert "attempt 3" in trace.explain()


async def test_a_skip_is_listed_after_its_failure() -> None:
    policy = ErrorPolicy("skip", fallback_value="instead")
    trace, _ = await traced(Graph("g").add_step(fails_times(9), "a", error_policy=policy))
    failed, skipped = trace.steps
    assert (failed.step_id, failed.status) == ("a", "fail")
    assert (skipped.step_id, skipped.output) == ("a", "instead")
    assert "Boom" in skipped.metadata["skip"]
    assert "skipped" in trace.explain()
    assert trace.status == "completed"


@pytest.mark.requirement("P-E3")
async def test_a_fallback_node_is_listed_with_its_name_and_the_step_it_replaces() -> None:
    policy = ErrorPolicy("fallback", fallback_node=const("other", 7))
    trace, _ = await traced(Graph("g").add_step(fails_times(9), "a", error_policy=policy))
    failed, fallback = trace.steps
    assert failed.status == "fail"
    assert (fallback.step_id, fallback.output, fallback.metadata["fallback"]) == ("a", 7, "other")
    assert "Boom" in fallback.metadata["instead_of"]
    assert "fallback other" in trace.explain()


@pytest.mark.requirement("P-E3")
async def test_a_fallback_value_is_listed() -> None:
    policy = ErrorPolicy("fallback", fallback_value=7)
    trace, _ = await traced(Graph("g").add_step(fails_times(9), "a", error_policy=policy))
    assert [(step.status, step.output) for step in trace.steps] == [("fail", None), ("success", 7)]


async def test_a_refused_step_is_listed_with_the_reason() -> None:
    graph = Graph("g").add_step(const("one"), "a").add_step(const("two"), "b").add_step(const("three"), "c")
    trace, error = await traced(graph, budget=Budget(max_steps=1))
    assert isinstance(error, BudgetExceededError)
    assert [(step.step_id, step.status) for step in trace.steps] == [("a", "success"), ("b", "halt")]
    assert "step" in str(trace.steps[1].error)
    assert trace.status == "failed"
    assert "BudgetExceededError" in str(trace.error)


# Nesting.


async def test_steps_of_a_nested_graph_name_their_outer_step() -> None:
    deepest = Graph("deepest").add_step(const("z"), "z")
    inner = Graph("inner").add_step(const("x"), "x").add_step(deepest, "y", depends_on=["x"])
    trace, _ = await traced(Graph("outer").add_step(const("a"), "a").add_step(inner, "b", depends_on=["a"]))
    assert [(step.step_id, step.parent_step, step.depth) for step in trace.steps] == [
        ("a", None, 0),
        ("b", None, 0),
        ("x", "b", 1),
        ("y", "b", 1),
        ("z", "y", 2),
    ]
    assert "\n      z (function)" in trace.explain()


async def test_a_nested_graph_is_listed_once_for_each_attempt() -> None:
    inner = Graph("inner").add_step(const("x"), "x").add_step(fails_times(1), "y", depends_on=["x"])
    policy = ErrorPolicy("retry", retry_count=1, retry_delay_ms=0)
    trace, _ = await traced(Graph("outer").add_step(inner, "b", error_policy=policy))
    steps = [(step.step_id, step.status, step.attempt) for step in trace.steps]
    assert steps == [
        ("b", "fail", 1),
        ("x", "success", 1),
        ("y", "fail", 1),
        ("b", "success", 2),
        ("x", "success", 1),
        ("y", "success", 1),
    ]


async def test_steps_of_the_same_name_in_two_graphs_keep_their_own_values() -> None:
    inner = Graph("inner").add_step(const("i", "inner"), "same")
    outer = Graph("outer").add_step(const("o", "outer"), "same").add_step(inner, "nest", depends_on=["same"])
    trace, _ = await traced(outer)
    assert [(step.step_id, step.depth, step.output) for step in trace.steps if step.step_id == "same"] == [
        ("same", 0, "outer"),
        ("same", 1, "inner"),
    ]


async def test_a_graph_run_by_a_tool_is_listed_below_the_step_that_used_the_tool() -> None:
    inner = Graph("inner").add_step(const("x"), "x")
    by_tool = FunctionNode("t", lambda ctx: ctx.atool(inner.execute, ctx, name="tool"))
    trace, _ = await traced(Graph("outer").add_step(by_tool, "a"))
    assert [(step.step_id, step.parent_step, step.depth) for step in trace.steps] == [("a", None, 0), ("x", "a", 1)]


# Status and totals.


async def test_a_trace_runs_from_its_start_to_its_end() -> None:
    trace = ExecutionTrace("g", start_time=datetime(2024, 1, 1, tzinfo=UTC))
    seen: list[str] = []
    graph = Graph("g").add_step(FunctionNode("look", lambda ctx: seen.append(trace.status)), "a")
    assert (trace.status, trace.end_time) == ("running", None)
    await graph.execute(ExecutionContext(trace=trace))
    assert seen == ["running"]
    assert (trace.status, trace.error) == ("completed", None)
    assert trace.start_time == datetime(2024, 1, 1, tzinfo=UTC)
    assert trace.end_time is not None


async def test_a_failure_that_was_recovered_from_inside_leaves_the_trace_completed() -> None:
    inner = Graph("inner").add_step(fails_times(9), "x")
    trace, _ = await traced(Graph("outer").add_step(inner, "a", error_policy=ErrorPolicy("skip")))
    assert (trace.status, trace.error) == ("completed", None)


async def test_a_graph_that_failed_is_failed_and_says_with_what() -> None:
    trace, _ = await traced(Graph("g").add_step(fails_times(9), "a"))
    assert (trace.status, trace.error) == ("failed", "Boom: not yet")
    assert trace.end_time is not None


async def test_an_error_that_cannot_be_shown_is_still_the_one_that_is_raised() -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def fail(ctx: ExecutionContext) -> None:
        raise Unspeakable

    trace, raised = await traced(Graph("g").add_step(FunctionNode("n", fail), "a"))
    assert isinstance(raised, Unspeakable)
    assert (trace.status, trace.error) == ("failed", "Unspeakable: <no message: its __str__ raised RuntimeError>")


def test_a_graph_that_was_cancelled_is_cancelled_and_its_running_steps_are_halted() -> None:
    async def main() -> None:
        loop = sim_loop()
        token = CancellationToken(clock=loop.clock)
        loop.call_later(1, token.cancel, "enough")
        forever = FunctionNode("f", lambda ctx: asyncio.sleep(1e6))
        graph = Graph("g", max_parallel=2).add_step(const("one"), "a").add_step(forever, "b").add_step(forever, "c")
        settings = RunSettings(sync_calls="inline")  # in virtual time
        trace, error = await traced(graph, cancellation=token, clock=loop.clock, settings=settings)
        assert isinstance(error, CancelledError)
        assert trace.status == "cancelled"
        assert {step.step_id: step.status for step in trace.steps} == {"a": "success", "b": "halt", "c": "halt"}
        assert all("enough" in str(step.error) for step in trace.steps if step.status == "halt")

    simulated(main)


async def test_a_step_that_was_left_behind_on_its_thread_says_so() -> None:
    release, started = Event(), Event()
    token, trace = CancellationToken(), ExecutionTrace("g")

    def blocks(ctx: ExecutionContext) -> None:
        started.set()
        release.wait(30)

    graph = Graph("g").add_step(FunctionNode("b", blocks, blocking=True), "a")
    stopping = Thread(target=lambda: started.wait(30) and token.cancel("enough"))
    stopping.start()
    try:
        with pytest.raises(CancelledError):
            await graph.execute(ExecutionContext(trace=trace, cancellation=token))
    finally:
        release.set()
        stopping.join()
    (step,) = trace.steps
    assert step.metadata["abandoned"] is True
    assert ", halt, abandoned" in trace.explain()


async def test_a_task_that_is_cancelled_leaves_a_cancelled_trace() -> None:
    started = asyncio.Event()

    async def wait(ctx: ExecutionContext) -> None:
        started.set()
        await asyncio.Event().wait()

    trace = ExecutionTrace("g")
    graph = Graph("g").add_step(FunctionNode("w", wait), "a")
    task = asyncio.create_task(graph.execute(ExecutionContext(trace=trace)))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert trace.status == "cancelled"


async def test_tokens_and_cost_are_those_of_everything_inside_a_step_and_count_once_in_the_total() -> None:
    provider = FakeProvider(lambda at: Answer(input_tokens=100, output_tokens=50))

    async def ask(ctx: ExecutionContext) -> None:
        await ctx.allm(provider.acomplete)

    inner = Graph("inner").add_step(FunctionNode("ask", ask), "x").add_step(FunctionNode("ask", ask), "y")
    trace, _ = await traced(Graph("g").add_step(inner, "a").add_step(const("one"), "b"), prices=provider.prices)
    tokens = {step.step_id: step.tokens_used for step in trace.steps}
    assert tokens == {"a": 300, "x": 150, "y": 150, "b": 0}
    assert trace.total_tokens == 300
    assert trace.total_cost == pytest.approx(provider.invoice.total_nanos / 1e9)
    assert "300 tokens" in trace.explain()


async def test_a_failed_attempt_keeps_its_cost() -> None:
    spent: list[int] = []

    def spend(ctx: ExecutionContext) -> Any:
        ctx.report(cost_usd=0.5, input_tokens=10)
        spent.append(1)
        if len(spent) == 1:
            raise Boom
        return "done"

    policy = ErrorPolicy("retry", retry_count=1, retry_delay_ms=0)
    trace, _ = await traced(Graph("g").add_step(FunctionNode("s", spend), "a", error_policy=policy))
    assert [step.cost_usd for step in trace.steps] == [0.5, 0.5]
    assert (trace.total_cost, trace.total_tokens) == (1.0, 20)


async def test_totals_hold_also_when_the_run_keeps_only_a_few_calls() -> None:
    async def ask(ctx: ExecutionContext) -> None:
        await ctx.atool(lambda: Reported.of(1, cost_usd=0.01, input_tokens=1))

    graph = Graph("g")
    for at in range(50):
        graph.add_step(FunctionNode("ask", ask), f"s{at}")
    trace, _ = await traced(graph, settings=RunSettings(max_kept_calls=5))
    assert len(trace.steps) == 50
    assert trace.total_tokens == 50


# For people and machines.


async def test_explain_shows_the_full_history() -> None:
    policy = ErrorPolicy("retry", retry_count=1, retry_delay_ms=0)
    inner = Graph("inner").add_step(const("x"), "inner step")
    graph = Graph("plan").add_step(const("one"), "first").add_step(fails_times(1), "flaky one", error_policy=policy)
    graph.add_step(inner, "nested").add_step(fails_times(9), "last", depends_on=["nested"])
    trace, _ = await traced(graph)
    lines = trace.explain().splitlines()
    assert lines[:2] == ["Graph: plan", "Status: failed"]
    order = ["first", "flaky one", "flaky one", "nested", "inner step", "last"]
    assert [line.strip().split(" (")[0] for line in lines[2:] if "(" in line] == order
    assert sum("Error: Boom: not yet" in line for line in lines) == 2


async def test_a_trace_is_json_whatever_the_values_are() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError

    graph = Graph("g").add_step(const("nan", math.nan), "a").add_step(const("set", {1, 2}), "b")
    graph.add_step(const("odd", Odd()), "c").add_step(const("bytes", b"\xff"), "d")
    graph.add_step(const("report", Reported.of("text", cost_usd=1)), "e").add_step(fails_times(9), "ü\n\x1b[31m")
    trace, _ = await traced(graph)
    document = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    assert [step["step_id"] for step in document["steps"]] == ["a", "b", "c", "d", "e", "ü\n\x1b[31m"]
    assert document["graph_id"] == "g"
    assert document["status"] == "failed"
    assert document["steps"][4]["output"] == "text"


async def test_a_step_that_no_graph_ran_can_be_added() -> None:
    trace = ExecutionTrace("g")
    now = datetime.now(UTC)
    trace.add_step(StepTrace("by hand", "n", "function", 1, 2, None, now, now, 0.0, tokens_used=7))
    assert [step.step_id for step in trace.steps] == ["by hand"]
    assert trace.total_tokens == 7
    assert trace.steps[0].metadata == {}


async def test_one_trace_may_see_several_runs() -> None:
    trace = ExecutionTrace("g")
    graph = Graph("g").add_step(const("one"), "a")
    for _ in range(2):
        await graph.execute(ExecutionContext(trace=trace))
    assert [step.step_id for step in trace.steps] == ["a", "a"]
    assert trace.status == "completed"


# What it costs.


@pytest.mark.requirement("P-O2")
async def test_tracing_is_opt_in_and_adds_no_records() -> None:
    graph = Graph("g")
    for at in range(20):
        graph.add_step(const("n", at), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    trace = ExecutionTrace("g")
    with ExecutionContext() as plain, ExecutionContext(trace=trace) as watched:
        await graph.execute(plain)
        await graph.execute(watched)
    assert [type(event) for event in watched.history()] == [type(event) for event in plain.history()]
    assert len(watched.graph.calls()[1]) == len(plain.graph.calls()[1])
    assert plain.trace is None


@pytest.mark.requirement("P-O2")
async def test_while_a_graph_runs_a_trace_keeps_one_entry_and_one_input_per_step_and_makes_nothing() -> None:
    graph = Graph("g")
    for at in range(20):
        graph.add_step(const("n", [at]), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    trace = ExecutionTrace("g")
    with ExecutionContext(trace=trace) as ctx:
        await graph.execute(ctx)
        (section,) = trace._sections
        records = {id(call) for call in ctx.graph.calls()[1]}
        assert len(section.journal) == len(section.inputs) == 20
        assert all(id(record) in records for record in section.journal), "the run's own records, not copies"
        assert section.inputs[7] is ctx.partial_results["s6"], "the input itself, not a copy"


def test_a_trace_can_be_read_at_any_time_in_every_interleaving() -> None:
    async def schedule(seed: int) -> None:
        trace = ExecutionTrace("g")
        graph = Graph("g", max_parallel=3)
        for at in range(6):
            graph.add_step(FunctionNode("w", lambda ctx: asyncio.sleep(1)), f"s{at}")
        task = asyncio.create_task(graph.execute(ExecutionContext(trace=trace, clock=sim_loop().clock)))
        seen = 0
        while not task.done():
            steps = trace.steps
            assert len(steps) >= seen
            seen = len(steps)
            trace.explain()
            await asyncio.sleep(0.3)
        await task
        assert len(trace.steps) == 6

    explore(schedule, schedules=20)
