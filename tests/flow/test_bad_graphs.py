"""Malformed graphs and values: each gets a clear error, and nothing breaks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from penstock import (
    Budget,
    CancelledError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    GraphInvalid,
    InvalidValue,
    PenstockError,
    RunEnded,
    Session,
    quorum,
)
from penstock.testing import explore

pytestmark = pytest.mark.requirement("P-G1")


def const(id: str = "n", value: Any = 1) -> FunctionNode:
    return FunctionNode(id, lambda ctx: value)


# Wrong types.


@pytest.mark.parametrize("id", [None, "", 3, b"g", ["g"], object()])
def test_an_id_is_a_name(id: Any) -> None:
    with pytest.raises(InvalidValue, match="id"):
        Graph(id)
    with pytest.raises(InvalidValue, match="id"):
        FunctionNode(id, lambda ctx: 1)
    with pytest.raises(InvalidValue, match="name"):
        Session(id)
    if id != "":  # then it is the node's
        with pytest.raises(InvalidValue, match="step_id"):
            Graph("g").add_step(const(), id)
    with pytest.raises(InvalidValue, match="node_id"):
        Graph("g").add_step_ref(id, "a")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("session", {"session": "default"}),
        ("session", {"session": {}}),
        ("max_parallel", {"max_parallel": 0}),
        ("max_parallel", {"max_parallel": -1}),
        ("max_parallel", {"max_parallel": 1.5}),
        ("max_parallel", {"max_parallel": True}),
        ("max_parallel", {"max_parallel": None}),
        ("max_parallel", {"max_parallel": "2"}),
        ("settle", {"settle": "whatever"}),
        ("settle", {"settle": None}),
        ("settle", {"settle": 2}),
        ("settle", {"settle": "quorum(0)"}),
        ("settle", {"settle": "quorum(-1)"}),
        ("settle", {"settle": ["first"]}),
        ("turn_timeout_s", {"turn_timeout_s": -1}),
        ("turn_timeout_s", {"turn_timeout_s": math.nan}),
        ("turn_timeout_s", {"turn_timeout_s": "30"}),
        ("turn_timeout_s", {"turn_timeout_s": None}),
        ("queue_persistent", {"queue_persistent": "yes"}),
        ("queue_persistent", {"queue_persistent": None}),
    ],
)
def test_what_a_graph_is_given_is_checked_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=field if "quorum" not in str(options) else "quorum|settle"):
        Graph("g", **options)


@pytest.mark.parametrize("needed", [0, -1, 1.0, True, None, "2", math.nan])
def test_a_quorum_is_a_whole_number_of_at_least_one(needed: Any) -> None:
    with pytest.raises(InvalidValue, match="quorum"):
        quorum(needed)


@pytest.mark.parametrize("node", [None, 3, "", object(), FunctionNode, {"id": "n"}])
def test_a_node_has_an_id_and_execute(node: Any) -> None:
    with pytest.raises(InvalidValue, match="node of step 'a'"):
        Graph("g").add_step(node, "a")
    with pytest.raises(InvalidValue, match="node of step 'a'"):
        Graph("g").step(node, "a")


def test_execute_has_to_be_something_to_call() -> None:
    node = type("Odd", (), {"id": "odd", "execute": "not a function"})()
    with pytest.raises(InvalidValue, match="node of step 'a'"):
        Graph("g").add_step(node, "a")


async def an_async_function(upstream: Any) -> Any:
    return upstream


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("input_fn", {"input_fn": 3}),
        ("input_fn", {"input_fn": "upstream"}),
        ("input_fn", {"input_fn": an_async_function}),
        ("input of", {"input": 3, "input_fn": lambda upstream: 1}),
        ("depends_on", {"depends_on": "other"}),
        ("depends_on", {"depends_on": 3}),
        ("depends_on", {"depends_on": [3]}),
        ("depends_on", {"depends_on": [None]}),
        ("depends_on", {"depends_on": [["other"]]}),
        ("error_policy", {"error_policy": "skip"}),
        ("error_policy", {"error_policy": {"on_error": "skip"}}),
        ("error_policy", {"error_policy": ErrorPolicy}),
        ("fallback_node", {"error_policy": ErrorPolicy("fallback", fallback_node=lambda ctx: 1)}),
        ("sub_budget", {"sub_budget": 5}),
        ("sub_budget", {"sub_budget": {"max_steps": 5}}),
        ("sub_budget", {"sub_budget": Budget}),
    ],
)
def test_what_a_step_is_given_is_checked_by_name_and_leaves_the_graph_as_it_was(
    field: str, options: dict[str, Any]
) -> None:
    graph = Graph("g")
    for add in (graph.add_step, graph.step):
        with pytest.raises(InvalidValue, match=f"{field}.*'a'"):
            add(const(), "a", **options)
    with pytest.raises(InvalidValue, match=f"{field}.*'a'"):
        graph.add_step_ref("n", "a", **options)
    assert graph.list_steps() == []


def test_a_step_id_is_taken_once() -> None:
    graph = Graph("g").add_step(const(), "a")
    with pytest.raises(InvalidValue, match="'a'"):
        graph.add_step(const(), "a")
    assert len(graph) == 1


@pytest.mark.parametrize(
    "fn", [None, 3, "code", FunctionNode("n", lambda ctx: 1)], ids=["none", "number", "text", "a node"]
)
def test_a_function_node_needs_a_function(fn: Any) -> None:
    with pytest.raises(InvalidValue, match="fn of node 'n'"):
        FunctionNode("n", fn)


@pytest.mark.parametrize("isolation", ["thread", "container", 1, True])
def test_isolation_is_process_or_nothing(isolation: Any) -> None:
    with pytest.raises(InvalidValue, match="isolation"):
        FunctionNode("n", lambda ctx: 1, isolation=isolation)


@pytest.mark.parametrize("options", [{"blocking": True}, {"isolation": "process"}])
def test_an_async_function_does_not_run_on_a_thread_or_in_a_process(options: Any) -> None:
    with pytest.raises(InvalidValue, match="async"):
        FunctionNode("n", an_async_function, **options)


@pytest.mark.parametrize("context", [3, "ctx", {}, object(), ExecutionContext])
async def test_a_graph_runs_in_a_context(context: Any) -> None:
    graph = Graph("g").add_step(const(), "a")
    with pytest.raises(InvalidValue, match="context"):
        await graph.execute(context)
    with pytest.raises(InvalidValue, match="context"):
        async for _ in graph.execute_stream(context):
            pass


def test_an_arrow_needs_steps() -> None:
    step = Graph("g").step(const(), "a")
    for other in (3, None, "b", [3], const()):
        with pytest.raises((InvalidValue, TypeError)):
            step >> other  # type: ignore[operator]


def test_a_chain_needs_steps_that_are_there() -> None:
    graph = Graph("g").add_step(const(), "a")
    with pytest.raises(KeyError, match="'nowhere'"):
        graph.chain("a", "nowhere")
    with pytest.raises(KeyError, match="'nowhere'"):
        graph.get_step("nowhere")
    assert graph.get_step("a").depends_on == []


# Dependencies.


def test_a_step_that_waits_for_itself_is_a_cycle() -> None:
    graph = Graph("g").add_step(const(), "a", depends_on=["a"])
    (problem,) = graph.validate()
    assert "wait for each other: a → a" in problem


def test_a_cycle_is_named_by_its_path() -> None:
    graph = Graph("g").add_step(const(), "start")
    for id, before in [("a", "c"), ("b", "a"), ("c", "b")]:
        graph.add_step(const(), id, depends_on=[before, "start"])
    (problem,) = graph.validate()
    assert "a → b → c → a" in problem
    with pytest.raises(GraphInvalid):
        graph.execution_order()


def test_a_dependency_that_is_named_twice_counts_once() -> None:
    graph = Graph("g").add_step(const(), "a").add_step(const(), "b", depends_on=["a", "a"])
    assert graph.get_step("b").depends_on == ["a"]
    assert graph.execution_order() == ["a", "b"]


def test_validate_lists_everything_that_is_wrong_at_once() -> None:
    session = Session()
    inner = Graph("inner", settle=quorum(5)).add_step(const(), "x").add_step(const(), "y", depends_on=["gone"])
    other = Graph("other", settle=quorum(5)).add_step(const(), "z")
    graph = Graph("g", session).add_step(const(), "a", depends_on=["nowhere", "neither"])
    graph.add_step(const(), "b", depends_on=["c"]).add_step(const(), "c", depends_on=["b"])
    graph.add_step(inner, "d").add_step(other, "e").add_step_ref("unknown node", "f")
    problems = graph.validate()
    for wrong in ("nowhere", "neither", "b → c → b", "gone", "quorum(5)", "unknown node"):
        assert any(wrong in problem for problem in problems), wrong
    assert len(problems) == len(set(problems)) == 6


async def test_everything_that_is_wrong_is_in_the_error_too() -> None:
    graph = Graph("g").add_step(const(), "a", depends_on=["x"]).add_step(const(), "b", depends_on=["y"])
    with pytest.raises(GraphInvalid) as raised:
        await graph.execute()
    assert len(raised.value.problems) == 2
    assert isinstance(raised.value, PenstockError)


def test_a_quorum_of_more_than_there_are_last_steps_is_a_problem() -> None:
    graph = Graph("g", settle=quorum(2)).add_step(const(), "a").add_step(const(), "b", depends_on=["a"])
    (problem,) = graph.validate()
    assert "quorum(2)" in problem


# Nesting.


def test_a_graph_that_contains_itself_is_named_with_its_path() -> None:
    graph = Graph("loop")
    graph.add_step(graph, "again")
    (problem,) = graph.validate()
    assert "contains itself" in problem
    assert "loop → loop" in problem


async def test_graphs_that_contain_each_other_are_refused() -> None:
    one, two = Graph("one"), Graph("two")
    one.add_step(two, "a")
    two.add_step(one, "b")
    assert "one → two → one" in one.validate()[0]
    with pytest.raises(GraphInvalid):
        await two.execute()


async def test_a_graph_that_contains_itself_by_way_of_a_fallback_ends_too() -> None:
    def breaks(ctx: ExecutionContext) -> None:
        raise LookupError

    graph = Graph("g")
    policy = ErrorPolicy("fallback", fallback_node=graph)
    graph.add_step(FunctionNode("b", breaks), "a", error_policy=policy)
    with pytest.raises(PenstockError):
        await graph.execute()


def deep(levels: int) -> Graph:
    graph = Graph("deepest").add_step(const(value="treasure"), "s")
    for level in range(levels - 1):
        graph = Graph(f"level {level}").add_step(graph, "s")
    return graph


async def test_sixty_four_levels_run() -> None:
    found: Any = await deep(64).execute()
    for _ in range(64):
        found = found["s"]
    assert found == "treasure"


async def test_sixty_five_levels_are_refused_before_anything_runs() -> None:
    graph = deep(65)
    (problem,) = graph.validate()
    assert "64" in problem
    with pytest.raises(GraphInvalid):
        await graph.execute()


def test_a_nest_of_a_thousand_levels_is_refused_without_overflowing_the_stack() -> None:
    assert "64" in deep(1_000).validate()[0]


async def test_a_graph_that_calls_itself_by_hand_is_stopped() -> None:
    graph = Graph("by hand")

    async def again(ctx: ExecutionContext) -> Any:
        return await graph.execute(ctx)

    graph.add_step(FunctionNode("again", again), "a")
    with pytest.raises(PenstockError, match="64"):
        await graph.execute()


def test_many_ways_to_one_nested_graph_are_looked_at_once() -> None:
    graph = Graph("deepest").add_step(const(), "s")
    for level in range(40):
        graph = Graph(f"level {level}").add_step(graph, "left").add_step(graph, "right")
    assert graph.validate() == []


# Sizes.


def test_a_hundred_thousand_steps_are_the_most() -> None:
    graph, node = Graph("g"), const()
    for at in range(100_000):
        graph.add_step(node, str(at))
    assert graph.validate() == []
    graph.add_step(node, "one too many")
    (problem,) = graph.validate()
    assert "100001" in problem
    assert "100000" in problem


async def test_a_chain_longer_than_pythons_stack_runs() -> None:
    graph = Graph("g").add_step(const(value=0), "0")
    node = FunctionNode("add", lambda ctx: ctx.input + 1)
    for at in range(1, 3_000):
        graph.add_step(node, str(at), depends_on=[str(at - 1)])
    assert (await graph.execute())["2999"] == 2_999


# Contexts and changes at odd times.


async def test_a_context_that_has_ended_runs_no_graph() -> None:
    graph, ran = Graph("g"), list[int]()
    graph.add_step(FunctionNode("r", lambda ctx: ran.append(1)), "a")
    with ExecutionContext() as ctx:
        child = ctx.spawn_child("child")
        ctx.complete_child(child)
        with pytest.raises(RunEnded, match="'g'"):
            await graph.execute(child)
    with pytest.raises(RunEnded):
        await graph.execute(ctx)
    with pytest.raises(RunEnded):
        async for _ in graph.execute_stream(ctx):
            pass
    assert ran == []


async def test_a_context_that_was_cancelled_before_runs_nothing() -> None:
    ran: list[int] = []
    graph = Graph("g").add_step(FunctionNode("r", lambda ctx: ran.append(1)), "a")
    ctx = ExecutionContext()
    ctx.abort("too late")
    with pytest.raises(CancelledError) as raised:
        await graph.execute(ctx)
    assert raised.value.reason == "too late"
    assert raised.value.partial == {}
    assert ran == []


def test_one_graph_may_run_twice_at_once_in_two_contexts_and_in_one() -> None:
    async def schedule(seed: int) -> None:
        async def echo(ctx: ExecutionContext) -> Any:
            await asyncio.sleep(1)
            return ctx.input

        graph = Graph("g", max_parallel=2).add_step(FunctionNode("e", echo), "a").add_step(FunctionNode("e", echo), "b")
        one, two = ExecutionContext(input=1), ExecutionContext(input=2)
        assert await asyncio.gather(graph.execute(one), graph.execute(two), graph.execute(one.with_input(3))) == [
            {"a": 1, "b": 1},
            {"a": 2, "b": 2},
            {"a": 3, "b": 3},
        ]
        assert (one.balance.steps, two.balance.steps) == (4, 2)

    explore(schedule, schedules=20)


def test_a_graph_that_is_changed_while_it_runs_finishes_as_it_was() -> None:
    async def schedule(seed: int) -> None:
        graph = Graph("g", max_parallel=3)

        async def slow(ctx: ExecutionContext) -> str:
            await asyncio.sleep(1)
            return "slow"

        def change(ctx: ExecutionContext) -> str:
            graph.add_step(const("new", "new"), "new").add_step(const("late"), "late", depends_on=["new"])
            graph.chain("free", "join")
            return "changed"

        graph.add_step(FunctionNode("c", change), "change").add_step(FunctionNode("s", slow), "slow")
        graph.add_step(const("free", "free"), "free")
        graph.add_step(FunctionNode("echo", lambda ctx: ctx.input), "join", depends_on=["change", "slow"])
        first = await graph.execute()
        assert set(first) == {"change", "slow", "free", "join"}
        assert first["join"] == {"change": "changed", "slow": "slow"}
        graph.get_step("change").node.fn = lambda ctx: "calm"
        second = await graph.execute()
        assert list(second) == ["change", "slow", "free", "join", "new", "late"]
        assert second["join"] == {"change": "calm", "slow": "slow", "free": "free"}

    explore(schedule, schedules=10)


# Odd nodes and values.


async def test_a_blocking_function_that_gives_a_coroutine_is_refused_and_the_coroutine_closed() -> None:
    node = FunctionNode("n", lambda ctx: an_async_function(ctx.input), blocking=True)
    with pytest.raises(InvalidValue, match="async function"):
        await Graph("g").add_step(node, "a").execute()


async def test_a_blocking_function_runs_on_a_thread_with_its_context() -> None:
    def blocks(ctx: ExecutionContext) -> Any:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return ctx.input, dict(ctx.upstream), ctx.tool(lambda: "called", name="inside")

    graph = Graph("g").add_step(const(value=1), "a")
    graph.add_step(FunctionNode("b", blocks, blocking=True), "b", depends_on=["a"])
    with ExecutionContext() as ctx:
        assert (await graph.execute(ctx))["b"] == (1, {"a": 1}, "called")
        (inside,) = [call for call in ctx.graph.calls()[1] if call.name == "inside"]
        assert inside.parent is not None
        assert inside.parent.name == "b"


class Exit(BaseException):
    """A BaseException of the user's own."""


@pytest.mark.parametrize("settle", ["fail_fast", "collect", "first"])
@pytest.mark.parametrize("raised", [Exit, KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_ends_the_graph_whatever_its_policy(raised: type[BaseException], settle: str) -> None:
    async def main() -> None:
        ended: list[str] = []

        def leave(ctx: ExecutionContext) -> None:
            raise raised

        async def wait(ctx: ExecutionContext) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("wait")

        graph = Graph("g", max_parallel=3, settle=settle).add_step(FunctionNode("w", wait), "w")
        graph.add_step(FunctionNode("l", leave), "l").add_step(const(), "never", depends_on=["l"])
        ctx = ExecutionContext()
        with pytest.raises(raised):
            await graph.execute(ctx)
        assert ended == ["wait"]
        assert ctx.balance.steps_open == 0

    asyncio.run(main())


@pytest.mark.parametrize("value", [None, 0, "", (), math.nan, math.inf, Ellipsis, NotImplemented, StopIteration("x")])
async def test_any_value_is_a_value(value: Any) -> None:
    graph = Graph("g").add_step(const(value=value), "a").add_step(FunctionNode("e", lambda ctx: [ctx.input]), "b")
    graph.chain("a", "b")
    results = await graph.execute()
    assert results["a"] is value
    assert results["b"][0] is value
    assert list(results) == ["a", "b"]


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration, GeneratorExit, RecursionError, MemoryError])
@pytest.mark.parametrize("is_async", [False, True])
async def test_errors_that_python_uses_for_itself_come_out_as_an_error_and_not_as_an_end(
    error: type[BaseException], is_async: bool
) -> None:
    def breaks(ctx: ExecutionContext) -> None:
        raise error

    async def breaks_later(ctx: ExecutionContext) -> None:
        await asyncio.sleep(0)
        raise error

    graph = Graph("g").add_step(FunctionNode("b", breaks_later if is_async else breaks), "a")
    with pytest.raises((error, RuntimeError)):
        await graph.execute()


async def test_an_error_that_cannot_be_shown_comes_out_as_it_is() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def breaks(ctx: ExecutionContext) -> None:
        raise Mute

    with pytest.raises(Mute):
        await Graph("g").add_step(FunctionNode("b", breaks), "a").execute()
    graph = Graph("g").add_step(FunctionNode("b", breaks), "a", error_policy=ErrorPolicy("skip", fallback_value=1))
    assert await graph.execute() == {"a": 1}


async def test_an_error_group_comes_out_as_it_is() -> None:
    def breaks(ctx: ExecutionContext) -> None:
        raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])

    with pytest.raises(ExceptionGroup, match="several"):
        await Graph("g").add_step(FunctionNode("b", breaks), "a").execute()


@pytest.mark.parametrize("id", ["ü", "☃", "a b", "a/b", "a.b", "\n", "\x1b[31m", "'", '"', "…" * 500, "\U0001f600"])
async def test_any_text_is_an_id(id: str) -> None:
    graph = Graph(id).add_step(const(id), id).add_step(const("other", 2), "other", depends_on=[id])
    with ExecutionContext() as ctx:
        assert await graph.execute(ctx) == {id: 1, "other": 2}
        assert "\x1b" not in ctx.explain()
    assert [event.step_id async for event in graph.execute_stream()] == [id, id, "other", "other"]
    assert graph.validate() == []
    graph.to_mermaid()
    str(graph)


async def test_a_node_that_lies_about_itself_breaks_only_its_step() -> None:
    class Liar:
        id = "liar"

        @property
        def execute(self) -> Callable[[ExecutionContext], Any]:
            return lambda ctx: (_ for _ in ()).throw(LookupError("lied"))

    graph = Graph("g", settle="collect").add_step(Liar(), "a").add_step(const(), "b")
    results = await graph.execute()
    assert results == {"b": 1}
    assert isinstance(results.errors["a"], LookupError)


async def test_a_function_with_the_wrong_parameters_fails_like_any_step() -> None:
    node = FunctionNode("n", lambda: 1)  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match="argument"):
        await Graph("g").add_step(node, "a").execute()
