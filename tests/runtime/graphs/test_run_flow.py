"""Running a graph as an editor writes it: what executors may return, its events, what stops it, what comes back."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import FrozenInstanceError, fields, replace
from itertools import pairwise
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancelledError,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    GraphInvalid,
    Halted,
    InvalidValue,
    RunEnded,
    quorum,
)
from penstock.kernel.document import graph_to_json, parse_graph
from penstock.kernel.executor import ConversionFailed, DataValue, ExecutionResult, Handle
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.kernel.routing import RoutingFailed
from penstock.runtime.graphs.graph_runtime import FlowContext, GraphRuntime
from penstock.runtime.graphs.node_execution import (
    LIFECYCLE,
    TERMINAL,
    ExecutorMisbehaved,
    NodeEvent,
    NodeExecution,
    QuorumMissed,
    run_flow,
)
from penstock.runtime.scheduling.listener import Listener
from penstock.testing import SimLoop, check_history, explore, sim_run
from tests.kernel.graphs import flow, link
from tests.soak import scaled

# A busy machine may stall anywhere, in a node too.
pytestmark = pytest.mark.filterwarnings("ignore:step .* kept the event loop:RuntimeWarning")

parse_graph({"nodes": [], "edges": []})  # whatever is loaded once is loaded now, and not on an event loop

SCHEDULES = scaled(500, soak=50_000)


class Runs:
    """An executor made of a function."""

    def __init__(self, execute: Callable[[Any, Any, Any], Any], **attributes: Any) -> None:
        self.execute = execute
        vars(self).update(attributes)


def text(value: Any) -> DataValue:
    return DataValue("text", value)


def graph(*edges: EdgeSpec, **types: str) -> GraphSpec:
    return GraphSpec(tuple(NodeSpec(name, type, {"name": name}) for name, type in types.items()), edges)


def chain(names: str, type: str = "say") -> GraphSpec:
    edges = [flow(a, b) for a, b in pairwise(names)]
    return graph(*edges, **dict.fromkeys(names, type))


def path(data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> DataValue:
    """What came, and the node's own name after it."""
    came = inputs["input"].value if inputs else ""
    return text(f"{came}{context.node_id}")


SAY = {"say": Runs(path)}


async def collect(
    spec: Any, context: Any, executors: Any = None, **options: Any
) -> tuple[list[NodeEvent], ExecutionResult]:
    events: list[NodeEvent] = []
    async with aclosing(run_flow(spec, context, executors, **options)) as stream:
        async for one in stream:
            if isinstance(one, ExecutionResult):
                return events, one
            events.append(one)
    raise AssertionError("the run gave no result")


async def collect_until_raised(
    error: type[BaseException], spec: Any, context: Any, executors: Any, **options: Any
) -> tuple[list[NodeEvent], BaseException]:
    events: list[NodeEvent] = []
    with pytest.raises(error) as caught:
        async with aclosing(run_flow(spec, context, executors, **options)) as stream:
            async for one in stream:
                assert isinstance(one, NodeEvent)
                events.append(one)
    return events, caught.value


def short(events: list[NodeEvent]) -> list[str]:
    return [f"{event.node_id} {event.event_type}" for event in events]


# What comes back.


@pytest.mark.requirement("K-4", "K-9")
async def test_a_chain_emits_every_node_and_returns_the_last_output() -> None:
    with ExecutionContext() as run:
        events, result = await collect(chain("abc"), run, SAY)
    assert short(events) == [f"{node} {what}" for node in "abc" for what in ("started", "completed")]
    assert result == ExecutionResult({"output": text("abc")})
    assert {event.run_id for event in events} == {run.run_id}
    assert {event.node_type for event in events} == {"say"}
    assert events[1].data == {"output": text("a")}
    assert check_history(run.history(), ledger=run.balance) == []


async def test_a_graph_may_be_json_text_bytes_a_mapping_a_spec_or_a_runtime() -> None:
    spec = chain("ab")
    document = graph_to_json(spec)
    as_runtime = GraphRuntime(spec, run_id="r", executors=SAY)
    for given in (document, json.dumps(document), json.dumps(document).encode(), spec, as_runtime):
        executors = None if given is as_runtime else SAY
        with ExecutionContext() as run:
            _, result = await collect(given, run, executors)
        assert result.outputs == {"output": text("ab")}


async def test_several_last_nodes_give_their_outputs_under_their_names() -> None:
    with ExecutionContext() as run:
        _, result = await collect(graph(flow("a", "b"), flow("a", "c"), c="say", b="say", a="say"), run, SAY)
    assert result.outputs == {"c.output": text("ac"), "b.output": text("ab")}
    assert list(result.outputs) == ["c.output", "b.output"]


async def test_an_unused_value_is_an_output_although_the_node_has_successors() -> None:
    spec = graph(flow("a", "b", "no"), flow("c", "b"), a="choose", b="say", c="say")
    context = FlowContext(state={"chosen": ["yes"]})
    _, result = await collect(spec, context, {**SAY, "choose": Runs(choose)})
    assert result.outputs == {"a.yes": text("yes"), "b.output": text("cb")}


async def test_a_graph_without_nodes_gives_nothing() -> None:
    with ExecutionContext() as run:
        assert await collect(graph(), run, SAY) == ([], ExecutionResult())


async def test_nodes_are_calls_in_the_tree_with_their_own_calls_below_them() -> None:
    def ask(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        return text(context.execution.tool(lambda: "x", name=f"tool of {context.node_id}", cost_hint_usd=0.5))

    with ExecutionContext() as run:
        await collect(chain("ab", "ask"), run, {"ask": Runs(ask)})
        calls = run.graph.snapshot()["nodes"]
    parents = {one["name"]: calls[one["parent_id"]]["name"] for one in calls.values() if one["parent_id"]}
    assert parents == {"a": "main", "tool of a": "a", "b": "main", "tool of b": "b"}
    assert run.balance.spent_usd == 1.0


async def test_an_executor_is_given_its_data_its_inputs_and_its_place() -> None:
    seen: list[FlowContext] = []

    def look(data: Mapping[str, Any], inputs: Any, context: FlowContext) -> None:
        assert data == {"name": "a"}
        assert inputs == {}
        seen.append(context)

    services = {"clock": 5}
    given = FlowContext(chat_id="c", run_id="r", state={"n": 1}, services=services)
    events, _ = await collect(graph(a="look"), given, {"look": Runs(look)})
    (context,) = seen
    assert (context.node_id, context.chat_id, context.run_id) == ("a", "c", "r")
    assert context.state is given.state
    assert context.services == services
    assert isinstance(context.runtime, GraphRuntime)
    assert context.runtime.get_node("a").type == "look"
    assert (context.execution.run_id, context.execution.termination_reason) == ("r", "success")
    assert events[0].run_id == "r"


async def test_state_and_cache_are_shared_by_the_nodes_of_a_run() -> None:
    def count(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        context.state["n"] = context.state.get("n", 0) + 1
        assert context.runtime is not None
        context.runtime.cache_set(context.node_id, context.state["n"])
        return DataValue("number", context.runtime.cache_get("a") * 10 + context.state["n"])

    with ExecutionContext() as run:
        _, result = await collect(chain("abc", "count"), run, {"count": Runs(count)})
    assert result.outputs["output"].value == 13


async def test_a_context_in_the_services_is_used_and_left_open() -> None:
    with ExecutionContext(ExecutionConfig(None, 10, None)) as run:
        await collect(chain("abc"), FlowContext(services={"execution_context": run}), SAY)
        assert run.termination_reason is None
        assert run.balance.steps == 3


async def test_a_runtime_takes_what_a_flow_context_says_in_place_of_its_own() -> None:
    runtime = GraphRuntime(chain("ab"), run_id="r", chat_id="c", services={"x": 1}, executors=SAY)
    events, _ = await collect(runtime, FlowContext(run_id="other", services={"execution": {"entry_node_ids": ["b"]}}))
    assert short(events) == ["b started", "b completed"]
    assert (events[0].run_id, runtime.chat_id, runtime.services["x"]) == ("other", "c", 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": None}, "context must be"),
        ({"max_parallel": 0}, "max_parallel must be"),
        ({"max_parallel": True}, "max_parallel must be"),
        ({"settle": "sometimes"}, "settle must be"),
        ({"executors": 5}, "executors must be"),
        ({"context": FlowContext(services={"execution_context": 5})}, "an ExecutionContext, or left out"),
        ({"context": FlowContext(services={"execution": {"entry_node_ids": "ab"}})}, "a list of node ids"),
    ],
)
async def test_nonsense_is_refused_with_its_name(options: dict[str, Any], words: str) -> None:
    given = {"context": FlowContext(), "executors": SAY, **options}
    with pytest.raises(InvalidValue, match=words):
        await collect(chain("ab"), **{"context": given.pop("context"), **given})


async def test_an_ended_run_runs_nothing() -> None:
    with ExecutionContext() as run:
        pass
    with pytest.raises(RunEnded, match="graph 'graph'"):
        await collect(chain("ab"), run, SAY)


async def test_a_runtime_runs_once_at_a_time() -> None:
    gate = asyncio.Event()

    async def wait(data: Any, inputs: Any, context: Any) -> None:
        await gate.wait()

    runtime = GraphRuntime(graph(a="wait"), run_id="r", executors={"wait": Runs(wait)})
    async with aclosing(run_flow(runtime, FlowContext())) as stream:
        await anext(stream)
        with pytest.raises(InvalidValue, match="not running already"):
            await collect(runtime, FlowContext())
    gate.set()
    await collect(runtime, FlowContext())


# What executors answer.


def result_of(data: Any, inputs: Any, context: Any) -> ExecutionResult:
    return ExecutionResult({"output": text("x")}, [NodeEvent.progress("tick", 1)])


async def awaited(data: Any, inputs: Any, context: Any) -> ExecutionResult:
    await asyncio.sleep(0)
    return result_of(data, inputs, context)


def future_of(data: Any, inputs: Any, context: Any) -> Any:
    return asyncio.ensure_future(awaited(data, inputs, context))


async def streamed(data: Any, inputs: Any, context: Any) -> AsyncIterator[Any]:
    yield NodeEvent.progress("tick", 1)
    await asyncio.sleep(0)
    yield text("x")


async def streamed_later(data: Any, inputs: Any, context: Any) -> Any:
    await asyncio.sleep(0)
    return streamed(data, inputs, context)


def generated(data: Any, inputs: Any, context: Any) -> Iterator[Any]:
    yield NodeEvent.progress("tick", 1)
    yield ExecutionResult({"output": text("x")})


def generated_and_returned(data: Any, inputs: Any, context: Any) -> Iterator[Any]:
    yield NodeEvent("someone else", "x", "tick", "y", 1)
    return text("x")


@pytest.mark.requirement("K-4", "K-9")
@pytest.mark.parametrize(
    "execute",
    [result_of, awaited, future_of, streamed, streamed_later, generated, generated_and_returned],
    ids=lambda fn: fn.__name__,
)
@pytest.mark.parametrize("blocking", [False, True])
async def test_every_kind_of_executor_has_the_same_life(execute: Any, blocking: bool) -> None:
    sync = execute in (result_of, generated, generated_and_returned)
    executor = Runs(execute, blocking=blocking and sync)
    with ExecutionContext() as run:
        events, result = await collect(graph(a="t"), run, {"t": executor})
    assert short(events) == ["a started", "a tick", "a completed"]
    assert (events[1].data, events[1].node_type, events[1].run_id) == (1, "t", run.run_id)
    assert result.outputs == {"output": text("x")}


@pytest.mark.requirement("K-4", "K-7")
@pytest.mark.parametrize("kind", ["sync", "async", "stream", "generator"])
async def test_an_executor_that_gives_nothing_completes_and_leads_to_nothing(kind: str) -> None:
    async def nothing() -> None: ...

    async def stream() -> AsyncIterator[NodeEvent]:
        yield NodeEvent.progress("tick")

    answers = {"sync": lambda: None, "async": nothing, "stream": stream, "generator": lambda: iter(())}
    executors = {**SAY, "none": Runs(lambda *_: answers[kind]())}
    with ExecutionContext() as run:
        events, result = await collect(
            graph(flow("a", "b"), flow("b", "c"), a="none", b="say", c="say"), run, executors
        )
    assert [one for one in short(events) if "tick" not in one] == [
        *("a started", "a completed", "b skipped", "c skipped"),
    ]
    assert result.outputs == {}


async def after_result(*_: Any) -> AsyncIterator[Any]:
    yield text("x")
    yield NodeEvent.progress("tick")


async def lifecycle_in_stream(*_: Any) -> AsyncIterator[Any]:
    yield NodeEvent.progress("completed")


async def odd_piece(*_: Any) -> AsyncIterator[Any]:
    yield "delta"


async def awaitable_of_awaitable(*_: Any) -> Any:
    return awaited(*_)


def after_returned(*_: Any) -> Iterator[Any]:
    yield text("x")
    return text("y")


TELLS = "emitted 'started', a lifecycle event"
MISBEHAVIOURS: list[tuple[Any, str]] = [
    (lambda *_: 5, "returned 5, which is neither a result nor a stream"),
    (lambda *_: {"output": 5}, "neither a result nor a stream"),
    (lambda *_: [text("x")], "neither a result nor a stream"),
    (lambda *_: ExecutionResult({"output": 5}), "returned 5 on handle 'output', which is not a DataValue"),  # type: ignore[dict-item]
    (lambda *_: ExecutionResult({5: text("x")}), "returned a value on 5, which is not the name of a handle"),  # type: ignore[dict-item]
    (lambda *_: ExecutionResult(5), "returned the outputs 5"),  # type: ignore[arg-type]
    (lambda *_: ExecutionResult({"odd": text("x")}), "returned a value on handle 'odd'; it declares: output"),
    (lambda *_: ExecutionResult({"part": text("x")}), "returned a value on handle 'part'; it declares: output"),
    (lambda *_: ExecutionResult({}, [NodeEvent.progress("started")]), TELLS),
    (lambda *_: ExecutionResult({}, ["x"]), "emitted 'x', which is not a NodeEvent"),
    (lambda *_: ExecutionResult({}, [NodeEvent.progress("")]), "which is not a NodeEvent with a type"),
    (lambda *_: iter([text("x"), NodeEvent.progress("tick")]), "after its result"),
    (after_result, "after its result"),
    (after_returned, "after its result"),
    (lifecycle_in_stream, "emitted 'completed', a lifecycle event: only the runtime emits those"),
    (odd_piece, "yielded 'delta', which is neither a NodeEvent nor a result"),
    (awaitable_of_awaitable, "an awaitable of an awaitable"),
]


@pytest.mark.requirement("K-4", "K-9")
@pytest.mark.parametrize(("execute", "what"), MISBEHAVIOURS)
async def test_an_executor_that_misbehaves_is_an_error_that_names_the_node(execute: Any, what: str) -> None:
    executor = Runs(execute, outputs=[Handle("output"), Handle("part", channel="link")])
    with ExecutionContext() as run:
        events, error = await collect_until_raised(ExecutorMisbehaved, graph(a="t"), run, {"t": executor})
    assert isinstance(error, ExecutorMisbehaved)
    assert what in str(error)
    assert (error.node_id, error.node_type) == ("a", "t")
    assert short(events) == ["a started", "a error"]
    assert events[-1].data is error
    assert check_history(run.history()) == []


@pytest.mark.parametrize("execute", [awaited, streamed])
async def test_an_executor_that_blocks_is_no_async_one(execute: Any) -> None:
    with ExecutionContext() as run:
        _, error = await collect_until_raised(
            ExecutorMisbehaved, graph(a="t"), run, {"t": Runs(execute, blocking=True)}
        )
    assert "is blocking and returned something async" in str(error)


async def test_a_stream_is_closed_when_its_node_fails() -> None:
    closed = []

    async def stream(*_: Any) -> AsyncIterator[Any]:
        try:
            yield 5
        finally:
            closed.append(True)

    with ExecutionContext() as run:
        await collect_until_raised(ExecutorMisbehaved, graph(a="t"), run, {"t": Runs(stream)})
    assert closed == [True]


async def test_a_blocking_executor_runs_on_a_thread_and_emits_from_there() -> None:
    where: list[int] = []

    def work(data: Any, inputs: Any, context: FlowContext) -> Iterator[Any]:
        where.append(threading.get_ident())
        for at in range(3_000):
            yield NodeEvent.progress("tick", at)
        yield path(data, inputs, context)

    with ExecutionContext() as run:
        events, result = await collect(chain("ab", "work"), run, {"work": Runs(work, blocking=True)})
    assert threading.get_ident() not in where
    assert [event.data for event in events if event.event_type == "tick"] == [*range(3_000)] * 2
    assert result.outputs == {"output": text("ab")}


async def test_a_cancelled_blocking_executor_is_abandoned_and_emits_no_more() -> None:
    entered, go_on, left = threading.Event(), threading.Event(), threading.Event()

    def work(data: Any, inputs: Any, context: FlowContext) -> Iterator[Any]:
        try:
            entered.set()
            go_on.wait(30)
            yield NodeEvent.progress("late")
        finally:
            left.set()

    with ExecutionContext() as run:
        events: list[Any] = []
        with pytest.raises(CancelledError):
            async for one in run_flow(graph(a="work"), run, {"work": Runs(work, blocking=True)}):
                events.append(one)
                await asyncio.to_thread(entered.wait, 30)
                run.abort("enough")
        assert short(events) == ["a started", "a cancelled"]
        go_on.set()
        await asyncio.to_thread(left.wait, 30)
    await asyncio.sleep(0)
    assert short(events) == ["a started", "a cancelled"]


async def test_a_slow_reader_holds_back_a_stream_but_no_lifecycle() -> None:
    given = 0

    async def stream(*_: Any) -> AsyncIterator[Any]:
        nonlocal given
        for given in range(10_000):  # noqa: B007
            yield NodeEvent.progress("tick")

    with ExecutionContext() as run:
        async with aclosing(run_flow(graph(a="stream", b="say"), run, {"stream": Runs(stream), **SAY})) as events:
            await anext(events)
            for _ in range(100):
                await asyncio.sleep(0)
            assert 900 < given < 1_100
            rest = [one async for one in events]
    assert len(rest) == 3 + 10_000 + 1


async def test_outputs_may_be_any_mapping_and_are_kept_as_they_were() -> None:
    outputs = {"output": text("a")}

    def give(*_: Any) -> ExecutionResult:
        return ExecutionResult(MappingProxyType(outputs))

    def change(data: Any, inputs: Any, context: Any) -> DataValue:
        outputs.clear()
        return text(inputs["input"].value + "b")

    with ExecutionContext() as run:
        spec = graph(flow("a", "b"), flow("a", "c"), a="give", b="change", c="change")
        _, result = await collect(spec, run, {"give": Runs(give), "change": Runs(change)})
    assert [one.value for one in result.outputs.values()] == ["ab", "ab"]


# Branches, routing, types.


def choose(data: Any, inputs: Any, context: FlowContext) -> ExecutionResult:
    chosen = context.state["chosen"]
    return ExecutionResult({name: text(name) for name in chosen})


BRANCHING = graph(
    flow("a", "yes", "yes"), flow("a", "no", "no"), flow("yes", "end"), flow("no", "end"), flow("no", "deep"),
    a="choose", yes="say", no="say", end="say", deep="say",
)  # fmt: skip


@pytest.mark.requirement("K-7")
@pytest.mark.parametrize(
    ("chosen", "ran", "skipped", "outputs"),
    [
        (["yes"], ["a", "yes", "end"], ["no", "deep"], {"output": text("yesyesend")}),
        (
            ["no"],
            ["a", "no", "end", "deep"],
            ["yes"],
            {"end.output": text("nonoend"), "deep.output": text("nonodeep")},
        ),
        ([], ["a"], ["yes", "no", "end", "deep"], {}),
        (["other"], ["a"], ["yes", "no", "end", "deep"], {"other": text("other")}),
    ],
)
async def test_only_the_branch_that_was_given_a_value_runs(
    chosen: list[str], ran: list[str], skipped: list[str], outputs: dict[str, Any]
) -> None:
    context = FlowContext(state={"chosen": chosen})
    events, result = await collect(BRANCHING, context, {**SAY, "choose": Runs(choose)})
    assert [event.node_id for event in events if event.event_type == "completed"] == ran
    assert {event.node_id for event in events if event.event_type == "skipped"} == set(skipped)
    assert [event.event_type for event in events[len(ran) * 2 :]] == ["skipped"] * len(skipped)
    assert result.outputs == outputs


@pytest.mark.requirement("K-7")
async def test_two_values_for_a_handle_that_takes_one_are_an_error_of_the_node_that_names_both() -> None:
    context = FlowContext(state={"chosen": ["yes", "no"]})
    events, error = await collect_until_raised(RoutingFailed, BRANCHING, context, {**SAY, "choose": Runs(choose)})
    assert "yes.output and no.output each sent one" in str(error)
    assert "end started" in short(events)
    assert "end error" in short(events)


@pytest.mark.requirement("K-7")
@pytest.mark.parametrize(("many", "arrived"), [("list", ["a", "b"]), ("first", "a")])
async def test_several_edges_into_a_handle_mean_what_it_declares(many: Any, arrived: Any) -> None:
    merge = Runs(
        lambda data, inputs, context: DataValue("any", inputs["input"].value), inputs=[Handle("input", many=many)]
    )
    with ExecutionContext() as run:
        spec = graph(flow("a", "c"), flow("b", "c"), c="merge", b="say", a="say")
        _, result = await collect(spec, run, {**SAY, "merge": merge})
    assert result.outputs["output"].value == arrived


@pytest.mark.requirement("K-8")
@pytest.mark.parametrize(("given", "wanted", "arrived"), [("5", "number", 5), ("5", "any", "5"), ("x", "list", ["x"])])
async def test_a_value_arrives_in_the_type_its_handle_takes(given: str, wanted: str, arrived: Any) -> None:
    executors = {
        "give": Runs(lambda *_: text(given)),
        "take": Runs(lambda data, inputs, context: inputs["input"], inputs=[Handle("input", wanted)]),
    }
    with ExecutionContext() as run:
        _, result = await collect(graph(flow("a", "b"), a="give", b="take"), run, executors)
    assert result.outputs["output"].value == arrived


@pytest.mark.requirement("K-8")
async def test_a_conversion_that_fails_is_an_error_of_the_node_with_its_path() -> None:
    ran = []
    executors = {
        "give": Runs(lambda *_: text("many")),
        "take": Runs(lambda *_: ran.append(1), inputs=[Handle("input", "number")]),
    }
    with ExecutionContext() as run:
        events, error = await collect_until_raised(
            ConversionFailed, graph(flow("a", "b"), a="give", b="take"), run, executors
        )
        calls = run.graph.snapshot()["nodes"].values()
    assert str(error).startswith("a.output → b.input: text cannot become number")
    assert short(events) == ["a started", "a completed", "b started", "b error"]
    assert [one["status"] for one in calls if one["name"] == "b"] == ["fail"]
    assert ran == []


@pytest.mark.requirement("K-8")
async def test_a_required_input_that_did_not_come_is_an_error_of_the_node() -> None:
    executors = {
        "choose": Runs(choose),
        "take": Runs(lambda *_: None, inputs=[Handle("x"), Handle("y", required=True)]),
    }
    spec = graph(flow("a", "b", "yes", "x"), flow("a", "b", "no", "y"), a="choose", b="take")
    _, error = await collect_until_raised(RoutingFailed, spec, FlowContext(state={"chosen": ["yes"]}), executors)
    assert str(error) == "b.y: a value is required, but none arrived"


# Where it begins.


SCOPES: list[Callable[[list[str]], Any]] = [
    lambda ids: SimpleNamespace(entry_node_ids=ids),
    lambda ids: {"entry_node_ids": ids},
    lambda ids: {"entry_node_ids": tuple(ids)},
]


@pytest.mark.requirement("K-6")
@pytest.mark.parametrize("scope", SCOPES)
async def test_only_nodes_reachable_from_the_entries_run_and_a_cycle_elsewhere_does_no_harm(scope: Any) -> None:
    edges = [flow("a", "b"), flow("x", "y"), flow("y", "x"), flow("c", "b")]
    spec = graph(*edges, **dict.fromkeys("abcxyz", "say"))
    events, result = await collect(spec, FlowContext(services={"execution": scope(["a"])}), SAY)
    assert short(events) == ["a started", "a completed", "b started", "b completed"]
    assert result.outputs == {"output": text("ab")}


@pytest.mark.requirement("K-6")
async def test_a_cycle_among_what_would_run_is_named_before_anything_runs() -> None:
    ran: list[str] = []
    spec = graph(flow("a", "x"), flow("x", "y"), flow("y", "x"), a="say", x="say", y="say")
    executors = {"say": Runs(lambda *_: ran.append("x"))}
    context = FlowContext(services={"execution": {"entry_node_ids": ["a"]}})
    _, error = await collect_until_raised(GraphInvalid, spec, context, executors)
    assert "the nodes wait for each other: x → y → x" in str(error)
    assert ran == []


@pytest.mark.requirement("K-6")
async def test_an_entry_that_is_not_there_is_a_problem_of_the_graph() -> None:
    context = FlowContext(services={"execution": {"entry_node_ids": ["nowhere"]}})
    _, error = await collect_until_raised(GraphInvalid, chain("ab"), context, SAY)
    assert "unknown_entry" in str(error)


@pytest.mark.requirement("K-6")
async def test_nodes_that_are_only_linked_to_do_not_run() -> None:
    class Part:
        def execute(self, data: Any, inputs: Any, context: Any) -> DataValue:
            return text("ran")

        def materialize(self, data: Any, output_handle: str, context: Any) -> str:
            return "linked"

    async def use(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        assert context.runtime is not None
        return DataValue("list", await context.runtime.resolve_links("a", "parts"))

    with ExecutionContext() as run:
        spec = graph(link("p", "a", target_handle="parts"), a="use", p="part")
        events, result = await collect(spec, run, {"use": Runs(use), "part": Part()})
    assert short(events) == ["a started", "a completed"]
    assert result.outputs["output"].value == ["linked"]


@pytest.mark.requirement("K-5")
async def test_nodes_that_run_at_once_share_an_artifact_and_are_no_cycle() -> None:
    made = []

    class Part:
        async def materialize(self, data: Any, output_handle: str, context: FlowContext) -> object:
            made.append(context.node_id)
            await asyncio.sleep(0)
            return object()

    async def use(data: Any, inputs: Any, context: FlowContext) -> DataValue:
        assert context.runtime is not None
        assert context.node_id is not None
        (one,) = await context.runtime.resolve_links(context.node_id, "parts")
        return DataValue("any", one)

    users = dict.fromkeys("abcd", "use")
    with ExecutionContext() as run:
        spec = graph(*(link("p", name, target_handle="parts") for name in users), p="part", **users)
        _, result = await collect(spec, run, {"use": Runs(use), "part": Part()})
        calls = run.graph.snapshot()["nodes"].values()
    assert made == ["p"]
    assert len({id(one.value) for one in result.outputs.values()}) == 1
    assert [one["name"] for one in calls].count("materialize p.output") == 1


@pytest.mark.requirement("K-5")
async def test_an_artifact_that_fails_draws_on_the_retry_budget_once() -> None:
    class Part:
        def materialize(self, data: Any, output_handle: str, context: FlowContext) -> None:
            raise ValueError("no part")

    async def use(data: Any, inputs: Any, context: FlowContext) -> None:
        assert context.runtime is not None
        await context.runtime.resolve_links("a", "parts")

    with ExecutionContext(ExecutionConfig(None, None, 5)) as run:
        spec = graph(link("p", "a", target_handle="parts"), a="use", p="part")
        events, error = await collect_until_raised(ValueError, spec, run, {"use": Runs(use), "part": Part()})
        assert run.balance.retries == 1
    assert short(events) == ["a started", "a error"]
    assert any("'a'" in note for note in error.__notes__)


# What stops it.


def fail(*_: Any) -> None:
    raise ValueError("boom")


@pytest.mark.requirement("K-9")
async def test_a_failure_stops_the_others_and_is_raised_after_every_terminal_event() -> None:
    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    async def fail_later(*_: Any) -> None:
        await asyncio.sleep(0)
        raise ValueError("boom")

    spec = graph(flow("a", "c"), a="forever", b="fail", c="say")
    executors = {**SAY, "forever": Runs(forever), "fail": Runs(fail_later)}
    with ExecutionContext() as run:
        events, error = await collect_until_raised(ValueError, spec, run, executors)
    assert short(events) == ["a started", "b started", "b error", "a cancelled"]
    assert error.__notes__ == ["in step 'b' of graph 'graph'"]
    assert run.termination_reason is not None
    assert check_history(run.history(), ledger=run.balance) == []


async def test_a_collecting_run_continues_with_nodes_independent_of_the_failure() -> None:
    spec = graph(flow("a", "b"), flow("c", "d"), a="fail", b="say", c="say", d="say")
    with ExecutionContext() as run:
        events, result = await collect(spec, run, {**SAY, "fail": Runs(fail)}, settle="collect")
    assert short(events) == [
        *("a started", "a error", "c started", "c completed", "d started", "d completed", "b skipped"),
    ]
    assert result.outputs == {"output": text("cd")}


async def test_a_race_is_over_with_the_first_last_node() -> None:
    async def forever(*_: Any) -> None:
        await asyncio.Event().wait()

    with ExecutionContext() as run:
        spec = graph(a="forever", b="say")
        events, result = await collect(spec, run, {**SAY, "forever": Runs(forever)}, settle="first")
    assert short(events) == ["a started", "b started", "b completed", "a cancelled"]
    assert result.outputs == {"output": text("b")}


async def test_a_quorum_that_the_branches_taken_cannot_reach_is_an_error() -> None:
    spec = graph(flow("a", "b", "yes"), flow("a", "c", "no"), a="choose", b="say", c="say")
    executors = {**SAY, "choose": Runs(choose)}
    context = FlowContext(state={"chosen": ["yes"]})
    _, error = await collect_until_raised(QuorumMissed, spec, context, executors, settle=quorum(2))
    assert "quorum(2)" in str(error)


@pytest.mark.requirement("K-9")
@pytest.mark.parametrize("blocking", [False, True])
async def test_a_limit_stops_the_run_and_the_node_it_refused_is_skipped(blocking: bool) -> None:
    with ExecutionContext(ExecutionConfig(None, 2, None)) as run:
        events, error = await collect_until_raised(
            BudgetExceededError, chain("abcd"), run, {"say": Runs(path, blocking=blocking)}
        )
    assert short(events) == ["a started", "a completed", "b started", "b completed", "c skipped"]
    assert "step" in str(events[-1].data)
    assert isinstance(error, BudgetExceededError)
    assert list(error.partial) == ["a", "b"]


@pytest.mark.requirement("K-9")
async def test_an_abort_cancels_what_runs() -> None:
    async def abort(data: Any, inputs: Any, context: FlowContext) -> None:
        run.abort("enough")
        await asyncio.Event().wait()

    with ExecutionContext() as run:
        events, error = await collect_until_raised(
            CancelledError, graph(flow("a", "b"), a="abort", b="say"), run, {**SAY, "abort": Runs(abort)}
        )
    assert short(events) == ["a started", "a cancelled"]
    assert isinstance(error, CancelledError)
    assert error.reason == "enough"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("kind", ["sync", "async", "blocking"])
async def test_what_ends_the_program_passes_through_with_everything_ended(
    error: type[BaseException], kind: str
) -> None:
    ended = []

    async def forever(*_: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    def quit_now(*_: Any) -> None:
        raise error("now")

    async def quit_later(*_: Any) -> None:
        await asyncio.sleep(0)
        raise error("now")

    executor = Runs(quit_later if kind == "async" else quit_now, blocking=kind == "blocking")
    with ExecutionContext() as run:
        events, caught = await collect_until_raised(
            error, graph(a="forever", b="quit"), run, {"forever": Runs(forever), "quit": executor}
        )
    assert str(caught) == "now"
    assert ended == [True]
    assert short(events)[:2] == ["a started", "b started"]
    assert sorted(short(events)[2:]) == ["a cancelled", "b cancelled"]


@pytest.mark.requirement("K-9")
async def test_leaving_in_the_middle_cancels_the_run_and_waits_until_nothing_is_left() -> None:
    ended = []

    async def forever(data: Any, inputs: Any, context: FlowContext) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append(context.execution.cancellation.stop)
            raise

    with ExecutionContext() as run:
        async with aclosing(run_flow(graph(a="t", b="t"), run, {"t": Runs(forever)})) as stream:
            await anext(stream)
            await anext(stream)
        assert len(ended) == 2
        assert "the reader of the stream has left" in str(ended[0])
        assert run.cancellation.cause is None
    assert check_history(run.history(), ledger=run.balance) == []


async def test_a_run_of_its_own_is_ended_however_it_is_left() -> None:
    seen: list[ExecutionContext] = []

    async def look(data: Any, inputs: Any, context: FlowContext) -> None:
        seen.append(context.execution)
        await asyncio.sleep(0)
        if data["name"] == "f":
            raise ValueError

    executors = {"look": Runs(look)}
    await collect(graph(a="look"), FlowContext(), executors)
    await collect_until_raised(ValueError, graph(f="look"), FlowContext(), executors)
    async with aclosing(run_flow(graph(c="look"), FlowContext(), executors)) as stream:
        await anext(stream)
        await asyncio.sleep(0)
    assert [str(one.termination_reason) for one in seen] == ["success", "error", "context_canceled"]


async def test_a_flow_inside_a_step_of_a_graph_is_part_of_its_run() -> None:
    async def inner(ctx: ExecutionContext) -> Any:
        _, result = await collect(chain("ab"), ctx, SAY)
        return result.outputs["output"].value

    outer = Graph("outer").add_step(FunctionNode("node", inner), "inner", error_policy=ErrorPolicy())
    with ExecutionContext() as run:
        assert await outer.execute(run) == {"inner": "ab"}
        calls = run.graph.snapshot()["nodes"]
    names = {one["name"]: calls[one["parent_id"]]["name"] for one in calls.values() if one["parent_id"]}
    assert names == {"inner": "main", "a": "inner", "b": "inner"}


async def test_as_many_nodes_run_at_once_as_allowed() -> None:
    running = most = 0

    async def work(*_: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        running -= 1

    names = {f"n{at}": "work" for at in range(50)}
    for allowed in (1, 3):
        most = 0
        with ExecutionContext() as run:
            await collect(graph(**names), run, {"work": Runs(work)}, max_parallel=allowed)
        assert most == allowed


# Events.


async def test_an_event_is_json_whatever_is_in_it() -> None:
    event = NodeEvent("a", "t", "completed", "r", {"output": DataValue("any", {1, 2}), "x": object})
    document = json.loads(json.dumps(event.to_dict()))
    assert document["data"]["output"] == {"type": "any", "value": [1, 2]}
    assert list(document) == ["node_id", "node_type", "event_type", "run_id", "data", "timestamp"]
    assert document["timestamp"].endswith("+00:00")
    assert NodeEvent("a", "t", "error", "r", ValueError("boom")).to_dict()["data"] == {
        "error": "ValueError",
        "message": "boom",
    }


async def test_an_event_of_a_run_equals_one_made_by_hand() -> None:
    events, _ = await collect(chain("a"), ExecutionContext(), SAY)
    for event in events:
        made = NodeEvent(**{one.name: getattr(event, one.name) for one in fields(NodeEvent)})
        assert type(event) is NodeEvent
        assert made == event == pickle.loads(pickle.dumps(event)) == copy(event) == replace(event)
        assert repr(made) == repr(event)
        with pytest.raises(FrozenInstanceError):
            event.timestamp = made.timestamp  # type: ignore[misc]


def test_events_have_the_time_of_the_runs_clock() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)

        async def wait(*_: Any) -> None:
            await asyncio.sleep(60)

        with ExecutionContext(clock=loop.clock) as run:
            events, _ = await collect(graph(a="wait"), run, {"wait": Runs(wait)})
        return [event.timestamp.isoformat() for event in events]

    started, ended = sim_run(main, seed=0)
    assert started[:16] != ended[:16]
    assert started[16:] == ended[16:]


async def test_progress_after_the_end_of_a_node_is_dropped() -> None:
    listener: Listener[NodeEvent] = Listener()
    graph = GraphSpec((NodeSpec("a", "t"),), (), "g")
    runtime = GraphRuntime(graph, run_id="r", executors={"t": Runs(lambda data, inputs, context: None)})
    with ExecutionContext() as run:
        execution = NodeExecution(runtime, run, "fail_fast", 1, listener)
        execution._emit_lifecycle("started", 0, None)
        execution._emit_progress(0, "tick", None)
        execution._emit_lifecycle("cancelled", 0, CancelledError())
        execution._emit_progress(0, "late", None)
    assert short(list(listener.events)) == ["a started", "a tick", "a cancelled"]


def test_a_context_without_a_run_says_what_it_lacks() -> None:
    with pytest.raises(InvalidValue, match="execution_context"):
        FlowContext().execution  # noqa: B018


# Every interleaving.


class Boom(Exception):
    pass


async def one_schedule(seed: int) -> None:
    """A small random graph of every kind of executor, with errors, limits, cancels and swallowed cancels."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    chance = random.Random(seed)
    alive = 0

    async def live(context: FlowContext) -> None:
        """Some async work that takes a cancel in its own way."""
        nonlocal alive
        alive += 1
        mood = chance.random()
        try:
            for _ in range(chance.randint(1, 2)):
                try:
                    await asyncio.sleep(chance.choice([0, 0, 0.01, 0.03, 0.2]))
                except asyncio.CancelledError:
                    if mood < 0.2:
                        continue  # swallowed, once
                    if mood < 0.4:
                        await asyncio.sleep(chance.choice([0, 0.02]))  # a cleanup that takes its time
                    if mood < 0.5:
                        raise Boom from None
                    raise
            if mood > 0.9:
                raise Boom
            if mood > 0.87:
                context.execution.abort("from inside")
            if mood > 0.8:
                await context.execution.atool(asyncio.sleep, 0.01, cost_hint_usd=0.01)
        finally:
            alive -= 1

    def outputs() -> ExecutionResult:
        handles = chance.choice([("output",), ("output", "no"), ("no",), ()])
        return ExecutionResult({name: text("x") for name in handles})

    def sync(data: Any, inputs: Any, context: FlowContext) -> Any:
        if chance.random() < 0.1:
            raise Boom
        return outputs()

    async def later(data: Any, inputs: Any, context: FlowContext) -> Any:
        await live(context)
        return outputs()

    async def stream(data: Any, inputs: Any, context: FlowContext) -> AsyncIterator[Any]:
        yield NodeEvent.progress("tick")
        try:
            await live(context)
            yield NodeEvent.progress("tock")
        finally:
            await asyncio.sleep(0)
        if chance.random() < 0.9:
            yield outputs()

    def generator(data: Any, inputs: Any, context: FlowContext) -> Iterator[Any]:
        yield NodeEvent.progress("tick")
        yield outputs()

    async def linked(data: Any, inputs: Any, context: FlowContext) -> Any:
        assert context.runtime is not None
        assert context.node_id is not None
        await context.runtime.resolve_links(context.node_id, "parts")
        return outputs()

    class Part:
        async def materialize(self, data: Any, output_handle: str, context: FlowContext) -> None:
            await live(context)

    takes = [Handle("input", many="list"), Handle("parts", channel="link", many="list")]
    functions = {"sync": sync, "later": later, "stream": stream, "generator": generator, "linked": linked}
    executors = {"part": Part(), **{name: Runs(one, inputs=takes) for name, one in functions.items()}}
    size = chance.randint(1, 6)
    names = [f"n{at}" for at in range(size)]
    nodes = [NodeSpec(name, chance.choice(list(functions))) for name in names]
    nodes += [NodeSpec("p", "part"), NodeSpec("q", "part")]
    edges = [link(part, node.id, target_handle="parts") for node in nodes if node.type == "linked" for part in "pq"]
    for at in range(chance.randint(0, 8) if size > 1 else 0):
        a, b = sorted(chance.sample(range(size), 2))
        edges.append(flow(names[a], names[b], chance.choice(["output", "no"]), id=f"e{at}"))
    run = ExecutionContext(
        ExecutionConfig(
            max_cost_usd=chance.choice([None, None, 0.015]),
            max_steps=chance.choice([None, None, 3]),
            max_retries_total=chance.choice([None, 2]),
            timeout_ms=chance.choice([0, 0, 15, 100]),
        ),
        budget=chance.choice([None, Budget(max_api_calls=5)]),
        clock=loop.clock,
    )
    options: dict[str, Any] = {
        "settle": chance.choice(["fail_fast", "fail_fast", "collect", "first"]),
        "max_parallel": chance.choice([1, 2, 16]),
    }
    events: list[NodeEvent] = []
    results: list[ExecutionResult] = []
    leave_after = chance.choice([None, None, None, 1, 3])

    spec = GraphSpec(tuple(nodes), tuple(edges))

    async def consume() -> None:
        async with aclosing(run_flow(spec, run, executors, **options)) as stream:
            async for one in stream:
                if isinstance(one, ExecutionResult):
                    results.append(one)
                    continue
                events.append(one)
                if len(events) == leave_after:
                    return
                if chance.random() < 0.1:
                    await asyncio.sleep(0.005)

    reader = asyncio.ensure_future(consume())
    if chance.random() < 0.3:
        when = chance.choice([0, 0.005, 0.01, 0.03])
        loop.call_later(when, run.abort, "from outside")
        if chance.random() < 0.5:
            loop.call_later(when + chance.choice([0, 0.01]), run.abort, "again")
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        loop.call_later(chance.choice([0, 0.005, 0.01, 0.03]), reader.cancel)
    (ended,) = await asyncio.gather(reader, return_exceptions=True)
    expected = (Boom, Halted, CancelledError, asyncio.CancelledError, ExceptionGroup, QuorumMissed)
    assert ended is None or isinstance(ended, expected), ended
    assert alive == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    run.end()
    left = len(events) == leave_after
    assert_lives(events, complete=not left and not isinstance(ended, asyncio.CancelledError))
    assert len(results) == (ended is None and not left)
    figures = run.balance
    assert figures.held_nanos == figures.steps_open == 0
    assert check_history(run.history(), ledger=figures) == []
    started = [event.node_id for event in events if event.event_type == "started"]
    calls = [event.name for event in run.history() if event.kind == "call_started"]  # type: ignore[attr-defined]
    assert all(calls.count(name) == 1 for name in started)


def assert_lives(events: list[NodeEvent], *, complete: bool) -> None:
    """One start, before everything else; one end, after everything else; a node that was skipped has neither."""
    lives: dict[str, list[str]] = {}
    for event in events:
        lives.setdefault(event.node_id, []).append(event.event_type)
    for node, life in lives.items():
        what = f"{node}: {life}"
        if "skipped" in life:
            assert life == ["skipped"], what
            continue
        assert life[0] == "started", what
        assert life.count("started") == 1, what
        ends = [one for one in life if one in TERMINAL]
        assert len(ends) <= 1, what
        assert not ends or life[-1] in TERMINAL, what
        assert not complete or ends, what
        assert set(life) - LIFECYCLE <= {"tick", "tock"}, what


@pytest.mark.requirement("K-9")
@pytest.mark.reliability
@pytest.mark.timeout(900)
def test_no_interleaving_breaks_the_life_of_a_node() -> None:
    explore(one_schedule, schedules=SCHEDULES)


@pytest.mark.requirement("K-9")
@pytest.mark.reliability
@pytest.mark.parametrize("abort_after", range(0, 24, 2))
async def test_an_abort_at_any_event_leaves_every_blocking_node_with_one_end(abort_after: int) -> None:
    def work(data: Any, inputs: Any, context: FlowContext) -> Iterator[Any]:
        for _ in range(5):
            yield NodeEvent.progress("tick")
        yield path(data, inputs, context)

    spec = graph(flow("a", "c"), flow("b", "d"), **dict.fromkeys("abcd", "work"))
    events: list[NodeEvent] = []
    with ExecutionContext() as run:
        try:
            async with aclosing(run_flow(spec, run, {"work": Runs(work, blocking=True)})) as stream:
                async for one in stream:
                    if isinstance(one, NodeEvent):
                        events.append(one)
                    if len(events) == abort_after:
                        run.abort("enough")
        except CancelledError:
            assert abort_after > 0
    assert_lives(events, complete=True)
    assert run.balance.held_nanos == run.balance.steps_open == 0
    assert check_history(run.history(), ledger=run.balance) == []
