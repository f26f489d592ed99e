"""Graphs written in Python: what each step is given, in what order they run, what comes back."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from penstock import (
    Budget,
    CancelledError,
    ExecutionContext,
    FunctionNode,
    Graph,
    GraphInvalid,
    InvalidValue,
    Node,
    Reported,
    Results,
    RunSettings,
    Session,
    Step,
    contain,
    current_context,
)
from penstock.testing import check_history, sim_run

pytestmark = pytest.mark.requirement("P-G1")


def node(id: str, fn: Callable[[ExecutionContext], Any] | None = None) -> FunctionNode:
    """A node that returns its input, or the result of `fn`."""
    return FunctionNode(id, fn or (lambda ctx: ctx.input))


def const(id: str, value: Any) -> FunctionNode:
    return FunctionNode(id, lambda ctx: value)


class Shout:
    """A node of the user's own."""

    id = "shout"

    async def execute(self, context: ExecutionContext) -> str:
        return f"{context.input}!"


# What a step is given.


async def test_a_first_step_without_input_gets_the_input_of_the_graph() -> None:
    graph = Graph("g").add_step(node("echo"), "a")
    assert await graph.execute(ExecutionContext(input="hello")) == {"a": "hello"}


async def test_the_input_of_a_step_comes_before_what_it_waits_for() -> None:
    graph = Graph("g").add_step(const("one", 1), "a").add_step(node("echo"), "b", input=7, depends_on=["a"])
    assert await graph.execute(ExecutionContext(input="unused")) == {"a": 1, "b": 7}


@pytest.mark.parametrize("given", [0, "", False, [], {}])
async def test_an_input_that_counts_as_false_is_an_input(given: Any) -> None:
    graph = Graph("g").add_step(const("one", 1), "a").add_step(node("echo"), "b", input=given, depends_on=["a"])
    assert (await graph.execute())["b"] == given


async def test_input_fn_makes_the_input_from_the_results_so_far() -> None:
    graph = Graph("g")
    graph.add_step(const("two", 2), "a").add_step(const("three", 3), "b", depends_on=["a"])
    graph.add_step(node("echo"), "c", input_fn=lambda upstream: upstream["a"] * upstream["b"], depends_on=["b"])
    assert (await graph.execute())["c"] == 6


async def test_one_dependency_gives_its_result_and_several_a_dict_of_theirs() -> None:
    graph = Graph("g").add_step(const("one", 1), "a").add_step(const("two", 2), "b")
    graph.add_step(node("echo"), "single", depends_on=["a"])
    graph.add_step(node("echo"), "double", depends_on=["b", "a"])
    results = await graph.execute()
    assert results["single"] == 1
    assert results["double"] == {"b": 2, "a": 1}


async def test_a_hundred_steps_in_a_row_count_to_a_hundred() -> None:
    graph = Graph("count")
    for at in range(100):
        graph.add_step(node("add", lambda ctx: ctx.input + 1), f"s{at}", depends_on=[f"s{at - 1}"] if at else None)
    results = await graph.execute(ExecutionContext(input=0))
    assert results["s99"] == 100


@pytest.mark.requirement("P-B7")
async def test_upstream_has_all_results_so_far_and_belongs_to_the_step_alone() -> None:
    seen: list[dict[str, Any]] = []

    def look(ctx: ExecutionContext) -> int:
        seen.append(dict(ctx.upstream))
        ctx.upstream["forged"] = 1
        assert ctx.upstream["forged"] == 1
        return len(seen)

    given = {"before": 0}
    graph = Graph("g").add_step(node("look", look), "a").add_step(node("look", look), "b")
    graph.add_step(node("look", look), "c", depends_on=["a"])
    ctx = ExecutionContext(upstream=given)
    assert await graph.execute(ctx) == {"a": 1, "b": 2, "c": 3}
    assert seen == [{"before": 0}, {"before": 0, "a": 1}, {"before": 0, "a": 1, "b": 2}]
    assert given == ctx.upstream == {"before": 0}


@pytest.mark.requirement("P-B7")
async def test_upstream_is_a_dict_that_can_be_written_as_json_and_copied() -> None:
    def use(ctx: ExecutionContext) -> str:
        assert type(ctx.upstream) is dict
        assert ctx.upstream is ctx.upstream
        assert copy.deepcopy(ctx.upstream) == ctx.upstream
        return json.dumps(ctx.upstream, sort_keys=True)

    inner = Graph("inner").add_step(const("two", 2), "two").add_step(node("use", use), "use", depends_on=["two"])
    outer = Graph("outer").add_step(const("one", 1), "one").add_step(node("use", use), "use", depends_on=["one"])
    outer.add_step(inner, "inner", depends_on=["use"])
    results = await outer.execute(ExecutionContext(upstream={"zero": 0}))
    assert results["use"] == '{"one": 1, "zero": 0}'
    seen = json.loads(results["inner"]["use"])
    assert seen == {"zero": 0, "one": 1, "use": results["use"], "two": 2}
    assert type(ExecutionContext().upstream) is dict


@pytest.mark.requirement("P-B7")
async def test_a_step_that_returns_its_upstream_does_not_contain_itself() -> None:
    graph = Graph("g").add_step(const("one", 1), "a")
    graph.add_step(node("all", lambda ctx: ctx.upstream), "b", depends_on=["a"])
    graph.add_step(node("all", lambda ctx: ctx.input), "c", input_fn=lambda upstream: upstream, depends_on=["b"])
    results = await graph.execute()
    assert results == {"a": 1, "b": {"a": 1}, "c": {"a": 1, "b": {"a": 1}}}
    assert json.loads(json.dumps(results)) == results


@pytest.mark.requirement("P-B7")
async def test_a_step_that_does_not_read_its_upstream_makes_no_copy() -> None:
    contexts: list[ExecutionContext] = []
    inner = Graph("inner").add_step(node("keep", contexts.append), "x")
    await Graph("g").add_step(node("keep", contexts.append), "a").add_step(inner, "b").execute()
    assert [ctx._upstream for ctx in contexts] == [None, None]
    first, second = contexts
    assert first.upstream == {"a": None, "b": {"x": None}}
    assert second.upstream == {**first.upstream, "x": None}


@pytest.mark.requirement("P-B7")
async def test_a_handle_made_inside_a_step_has_an_upstream_of_its_own() -> None:
    def narrow(ctx: ExecutionContext) -> tuple[dict[str, Any], ...]:
        ctx.upstream["mine"] = 1
        handle, child = ctx.with_upstream({"more": 2}), ctx.spawn_child("child")
        handle.upstream["its"] = child.upstream["its"] = 3
        return ctx.upstream, handle.upstream, child.upstream

    graph = Graph("g").add_step(const("one", 1), "a").add_step(node("narrow", narrow), "b", depends_on=["a"])
    with ExecutionContext() as run:
        own, handle, child = (await graph.execute(run))["b"]
    assert own == {"a": 1, "mine": 1}
    assert handle == {"a": 1, "mine": 1, "more": 2, "its": 3}
    assert child == {"a": 1, "mine": 1, "its": 3}


@pytest.mark.requirement("P-B7")
def test_upstream_has_what_was_there_when_the_step_first_read_it() -> None:
    async def slow(ctx: ExecutionContext) -> str:
        await asyncio.sleep(1)
        return "slow"

    async def look_twice(ctx: ExecutionContext) -> tuple[list[str], list[str]]:
        before = sorted(ctx.upstream)
        await asyncio.sleep(2)
        return before, sorted(ctx.upstream)

    async def look_late(ctx: ExecutionContext) -> list[str]:
        await asyncio.sleep(2)
        return sorted(ctx.upstream)

    async def main() -> None:
        inner = Graph("inner").add_step(const("i", 0), "first")
        inner.add_step(node("look", look_twice), "look", depends_on=["first"])
        inner.add_step(node("late", look_late), "late", depends_on=["first"])
        outer = Graph("outer", max_parallel=3).add_step(node("slow", slow), "slow").add_step(inner, "inner")
        results = await outer.execute()
        assert results["inner"]["look"] == (["first"], ["first"])
        assert results["inner"]["late"] in (["first", "slow"], ["first", "look", "slow"])

    sim_run(main, seed=1)


async def test_the_context_of_a_step_is_that_of_the_run_in_all_other_respects() -> None:
    session = Session("s")
    seen: list[ExecutionContext] = []
    graph = Graph("g").add_step(node("see", seen.append), "a")
    with ExecutionContext(data={"k": 1}, session=session, budget=Budget(max_steps=5)) as ctx:
        await graph.execute(ctx)
    assert seen[0].run_id == ctx.run_id
    assert seen[0].data == {"k": 1}
    assert seen[0].session is session
    assert seen[0].budget == Budget(max_steps=5)
    assert seen[0].depth == 0


async def test_a_step_can_spawn_children_and_change_its_context_like_any_code() -> None:
    async def delegate(ctx: ExecutionContext) -> Any:
        with ctx.spawn_child("helper") as child:
            found = await child.atool(lambda: 3, name="look")
        with ctx.with_sub_budget(Budget(max_steps=1)).with_input("x") as narrowed:
            assert narrowed.input == "x"
            return found + await narrowed.atool(lambda: 4, name="again")

    with ExecutionContext() as ctx:
        assert await Graph("g").add_step(node("delegate", delegate), "a").execute(ctx) == {"a": 7}
        assert [child.name for child in ctx.children] == ["helper"]
    assert check_history(ctx.history()) == []


# Nodes.


async def test_a_node_may_be_sync_async_awaitable_or_a_class() -> None:
    async def later(ctx: ExecutionContext) -> str:
        await asyncio.sleep(0)
        return "async"

    def promised(ctx: ExecutionContext) -> asyncio.Future[str]:
        promise = asyncio.get_running_loop().create_future()
        promise.set_result("future")
        return promise

    graph = Graph("g").add_step(const("plain", "sync"), "a").add_step(node("later", later), "b")
    graph.add_step(node("promised", promised), "c").add_step(Shout(), "d", input="hey")
    assert await graph.execute() == {"a": "sync", "b": "async", "c": "future", "d": "hey!"}
    assert isinstance(Shout(), Node)
    assert isinstance(graph, Node)


async def test_a_streaming_node_has_the_list_of_its_pieces_as_value() -> None:
    async def count(ctx: ExecutionContext) -> Any:
        for at in range(3):
            yield at

    assert await Graph("g").add_step(FunctionNode("count", count), "a").execute() == {"a": [0, 1, 2]}


async def test_one_node_may_stand_in_many_steps() -> None:
    double = node("double", lambda ctx: ctx.input * 2)
    graph = Graph("g").add_step(double, "a", input=1).add_step(double, "b", depends_on=["a"])
    assert await graph.add_step(double, "c", depends_on=["b"]).execute() == {"a": 2, "b": 4, "c": 8}


async def test_a_graph_is_a_node_and_its_results_are_its_value() -> None:
    inner = Graph("inner").add_step(node("double", lambda ctx: ctx.input * 2), "x")
    outer = Graph("outer").add_step(const("five", 5), "a").add_step(inner, "b", depends_on=["a"])
    outer.add_step(node("sum", lambda ctx: sum(ctx.input.values())), "c", depends_on=["b"])
    assert await outer.execute() == {"a": 5, "b": {"x": 10}, "c": 10}


async def test_a_graph_can_be_used_twice_in_another_one_and_by_itself() -> None:
    inner = Graph("inner").add_step(node("double", lambda ctx: ctx.input * 2), "x")
    outer = Graph("outer", max_parallel=2).add_step(inner, "a", input=1).add_step(inner, "b", input=2)
    assert await outer.execute() == {"a": {"x": 2}, "b": {"x": 4}}
    assert await inner.execute(ExecutionContext(input=3)) == {"x": 6}


async def test_a_value_reported_with_its_usage_is_handed_on_bare_and_its_usage_counted() -> None:
    report = node("report", lambda ctx: Reported.of("text", cost_usd=0.25, input_tokens=10))
    graph = Graph("g").add_step(report, "a").add_step(node("echo"), "b", depends_on=["a"])
    with contain() as run:
        assert await graph.execute(run) == {"a": "text", "b": "text"}
        assert run.balance.spent_usd == 0.25
        assert run.usage.tokens_used == 10


async def test_a_reported_value_is_handed_on_bare_also_where_steps_are_not_recorded() -> None:
    report = node("report", lambda ctx: Reported.of("text", cost_usd=0.25, input_tokens=10))
    graph = Graph("g").add_step(report, "a").add_step(node("echo"), "b", depends_on=["a"])
    with ExecutionContext(settings=RunSettings(record_steps=False)) as ctx:
        assert await graph.execute(ctx) == {"a": "text", "b": "text"}
        assert ctx.balance.spent_usd == 0.25


@pytest.mark.parametrize("record_steps", [True, False])
async def test_whether_steps_are_recorded_changes_nothing_that_comes_back(record_steps: bool) -> None:
    def fails(ctx: ExecutionContext) -> None:
        raise LookupError("no")

    graph = Graph("g", settle="collect").add_step(const("one", 1), "a").add_step(node("bad", fails), "b")
    graph.add_step(node("echo"), "c", depends_on=["b"]).add_step(node("echo"), "d", depends_on=["a"])
    with ExecutionContext(settings=RunSettings(record_steps=record_steps)) as ctx:
        results = await graph.execute(ctx)
    assert results == {"a": 1, "d": 1}
    assert [type(error) for error in results.errors.values()] == [LookupError]
    assert results.skipped == ["c"]


async def test_a_step_that_calls_another_graph_by_hand_runs_it_inside_its_own_call() -> None:
    inner = Graph("inner").add_step(const("one", 1), "x")

    async def by_hand(ctx: ExecutionContext) -> Any:
        return await inner.execute(ctx)

    with ExecutionContext() as ctx:
        assert await Graph("outer").add_step(node("hand", by_hand), "a").execute(ctx) == {"a": {"x": 1}}
        assert parents(ctx) == {"a": "main", "x": "a"}


# Order.


async def test_steps_run_in_the_order_they_become_ready_and_results_stand_in_the_order_they_were_added() -> None:
    ran: list[str] = []
    graph = Graph("g")
    for id, before in [("d", ["b", "c"]), ("b", ["a"]), ("c", ["a"]), ("a", [])]:
        graph.add_step(node(id, lambda ctx, id=id: ran.append(id)), id, depends_on=before)  # type: ignore[misc]
    results = await graph.execute()
    assert ran == ["a", "b", "c", "d"]
    assert list(results) == ["d", "b", "c", "a"]
    assert graph.execution_order() == ["a", "b", "c", "d"]


async def test_arrows_and_chains_say_who_waits_for_whom() -> None:
    graph = Graph("g")
    a, b, c, d = (graph.step(node(id), id) for id in "abcd")
    assert isinstance(a, Step)
    a >> [b, c] >> d
    graph.add_step(node("e"), "e").add_step(node("f"), "f").chain("d", "e", "f")
    assert {id: graph.get_step(id).depends_on for id in graph.list_steps()} == {
        "a": [],
        "b": ["a"],
        "c": ["a"],
        "d": ["b", "c"],
        "e": ["d"],
        "f": ["e"],
    }
    assert len(graph) == 6
    assert (await graph.execute(ExecutionContext(input=1)))["d"] == {"b": 1, "c": 1}


def test_an_arrow_between_two_graphs_is_refused() -> None:
    a, b = Graph("one").step(node("a"), "a"), Graph("two").step(node("b"), "b")
    with pytest.raises(InvalidValue, match="a step of graph 'one'"):
        a >> b


def test_an_arrow_that_is_drawn_twice_is_one() -> None:
    graph = Graph("g")
    a, b = graph.step(node("a"), "a"), graph.step(node("b"), "b")
    a >> b
    a >> b
    graph.chain("a", "b")
    assert b.depends_on == ["a"]


def test_a_dependency_may_be_named_before_it_is_added() -> None:
    graph = Graph("g").add_step(node("b"), "b", depends_on=["a"]).add_step(node("a"), "a")
    assert graph.validate() == []
    assert graph.execution_order() == ["a", "b"]


async def test_an_empty_graph_has_no_results() -> None:
    assert await Graph("nothing").execute() == {}
    assert Graph("nothing")
    assert Graph("nothing").validate() == []


async def test_a_graph_can_be_read_as_text_and_as_a_picture() -> None:
    graph = Graph("g")
    graph.step(node("fetch"), "fetch") >> graph.step(node("sum"), "sum up")
    assert "fetch" in str(graph)
    assert "sum up" in str(graph)
    assert graph.to_mermaid().startswith("flowchart")
    assert "2 step(s)" in repr(graph)


# What a run sees of it.


def parents(ctx: ExecutionContext) -> dict[str, str]:
    """Which call each call was made by, by name."""
    return {call.name: call.parent.name for call in ctx.graph.calls()[1] if call.parent is not None}


async def test_steps_are_system_calls_under_the_call_that_runs_the_graph() -> None:
    inner = Graph("inner").add_step(node("ask", lambda ctx: ctx.atool(lambda: 1, name="look")), "x")
    graph = Graph("outer").add_step(inner, "a")
    with ExecutionContext() as ctx:
        await ctx.atool(graph.execute, ctx, name="plan")
        assert parents(ctx) == {"plan": "main", "a": "plan", "x": "a", "look": "x"}
        kinds = {call.name: call.kind for call in ctx.graph.calls()[1]}
    assert kinds["a"] == kinds["x"] == "system"
    assert check_history(ctx.history(), ledger=ctx.balance) == []


async def test_a_step_is_one_step_in_the_ledger_and_so_is_each_call_inside_it() -> None:
    async def twice(ctx: ExecutionContext) -> None:
        await ctx.atool(lambda: 1)
        await ctx.atool(lambda: 2)

    with ExecutionContext() as ctx:
        await Graph("g").add_step(node("twice", twice), "a").add_step(node("b"), "b").execute(ctx)
        assert ctx.balance.steps == 4


async def test_the_record_of_a_step_names_graph_step_and_node() -> None:
    with ExecutionContext() as ctx:
        await Graph("plan").add_step(Shout(), "first").execute(ctx)
        (record,) = [call for call in ctx.graph.calls()[1] if call.name == "first"]
    assert record.metadata == {"graph": "plan", "step": "first", "node": "shout", "node_type": "Shout"}


async def test_without_a_context_a_graph_is_a_run_of_its_own() -> None:
    seen: list[ExecutionContext] = []
    graph = Graph("g").add_step(node("see", seen.append), "a")
    await graph.execute()
    await graph.execute()
    assert seen[0].run_id != seen[1].run_id
    assert seen[0].termination_reason == "success"
    assert current_context() is None


async def test_a_graph_runs_in_a_strict_run_and_the_calls_inside_it_need_their_hints() -> None:
    graph = Graph("g").add_step(node("ask", lambda ctx: ctx.atool(lambda: 1, cost_hint_usd=0)), "a")
    with contain(strict=True, max_cost_usd=1) as run:
        assert await graph.execute(run) == {"a": 1}


async def test_results_are_a_dict_with_nothing_failed_or_skipped() -> None:
    results = await Graph("g").add_step(const("one", 1), "a").execute()
    assert isinstance(results, dict)
    assert isinstance(results, Results)
    assert results.errors == {}
    assert results.skipped == []


# Interrupting.


def test_interrupt_cancels_every_execution_under_way_and_says_whether_there_was_one() -> None:
    async def main() -> None:
        async def wait(ctx: ExecutionContext) -> None:
            await asyncio.sleep(3600)

        graph = Graph("g").add_step(const("one", 1), "a").add_step(node("wait", wait), "b", depends_on=["a"])
        assert graph.interrupt() is False
        tasks = [asyncio.create_task(execute(graph)) for _ in range(3)]
        await asyncio.sleep(1)
        assert graph.interrupt("enough") is True
        for error in await asyncio.gather(*tasks):
            assert isinstance(error, CancelledError)
            assert "enough" in error.reason
            assert error.partial == {"a": 1}
        assert graph.interrupt() is False

    sim_run(main, seed=1)


async def execute(graph: Graph) -> BaseException | Mapping[str, Any]:
    """The results, or what was raised instead."""
    try:
        return await graph.execute()
    except CancelledError as error:
        return error


async def test_an_interrupt_of_an_inner_graph_reaches_only_what_is_inside_it() -> None:
    inner = Graph("inner")
    inner.add_step(node("stop", lambda ctx: inner.interrupt()), "x")
    inner.add_step(node("never"), "y", depends_on=["x"])
    outer = Graph("outer", settle="collect").add_step(inner, "a").add_step(const("one", 1), "b")
    results = await outer.execute()
    assert results == {"b": 1}
    assert isinstance(results.errors["a"], CancelledError)


async def test_a_graph_that_cannot_run_says_so_before_anything_runs() -> None:
    ran: list[str] = []
    graph = Graph("g").add_step(node("a", lambda ctx: ran.append("a")), "a")
    graph.add_step(node("b"), "b", depends_on=["nowhere"])
    with pytest.raises(GraphInvalid, match="nowhere"):
        await graph.execute()
    assert ran == []
