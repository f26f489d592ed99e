"""Steps from functions: `graph.step(ask)` and `@graph.step`, and which id such a step gets."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest

from penstock import (
    Budget,
    ErrorPolicy,
    ExecutionConfig,
    ExecutionContext,
    FunctionNode,
    Graph,
    InvalidValue,
    Session,
    Step,
)
from tests.flow import typed_steps

pytestmark = pytest.mark.requirement("P-G1")


def ask(ctx: ExecutionContext) -> str:
    """Ask."""
    return f"ask {ctx.input}"


async def answer(ctx: ExecutionContext) -> str:
    return f"answer {ctx.input}"


class Desk:
    """An object with a method that can be a step."""

    def note(self, ctx: ExecutionContext) -> str:
        return f"note {ctx.input}"

    def __call__(self, ctx: ExecutionContext) -> str:
        return f"desk {ctx.input}"


# graph.step(function)


async def test_a_function_is_a_step_named_after_it() -> None:
    graph = Graph("g")
    first = graph.step(ask)
    second = graph.step(answer)
    first >> second
    assert (first.id, first.node_id, second.id) == ("ask", "ask", "answer")
    assert await graph.execute(ExecutionContext(input="x")) == {"ask": "ask x", "answer": "answer ask x"}


async def test_add_step_takes_a_function_too() -> None:
    graph = Graph("g").add_step(ask).add_step(answer, depends_on=[ask])
    assert await graph.execute(ExecutionContext(input="x")) == {"ask": "ask x", "answer": "answer ask x"}


async def test_a_function_can_be_several_steps_under_ids_of_their_own() -> None:
    graph = Graph("g")
    steps = [graph.step(ask, f"ask about {topic}", topic) for topic in ("dams", "gates")]
    assert [step.id for step in steps] == ["ask about dams", "ask about gates"]
    assert {step.node_id for step in steps} == {"ask"}
    assert await graph.execute() == {"ask about dams": "ask dams", "ask about gates": "ask gates"}


async def test_a_node_is_a_step_named_after_it() -> None:
    graph = Graph("g")
    assert graph.step(FunctionNode("plan", ask)).id == "plan"
    inner = Graph("inner").add_step(ask)
    assert graph.step(inner, depends_on=["plan"]).id == "inner"
    assert (await graph.execute(ExecutionContext(input="x")))["inner"] == {"ask": "ask ask x"}


async def test_the_id_of_a_node_of_the_session_is_a_step() -> None:
    session = Session()
    session.register(FunctionNode("ask", ask))
    graph = Graph("g", session=session)
    assert graph.step("ask").id == "ask"
    again = graph.step("ask", "again", depends_on=["ask"])
    assert (again.id, again.node_id, again.node) == ("again", "ask", None)
    assert (await graph.execute(ExecutionContext(input="x")))["again"] == "ask ask x"


async def test_a_generator_function_streams() -> None:
    graph = Graph("g")

    @graph.step
    async def count(ctx: ExecutionContext) -> Any:
        yield 1
        yield 2

    events = [event.event_type async for event in graph.execute_stream()]
    assert events == ["started", "progress", "progress", "completed"]


# Which id.


def test_a_method_a_partial_and_a_nested_function_are_named_after_their_function() -> None:
    def nested(ctx: ExecutionContext) -> int:
        return 1

    def with_topic(ctx: ExecutionContext, topic: str) -> str:
        return topic

    graph = Graph("g")
    steps = [graph.step(fn) for fn in (Desk().note, partial(with_topic, topic="dams"), nested)]
    assert [step.id for step in steps] == ["note", "with_topic", "nested"]


@pytest.mark.parametrize("fn", [lambda ctx: 1, Desk(), partial(lambda ctx: 1), partial(partial(Desk()))])
async def test_a_function_without_a_name_needs_a_step_id(fn: Any) -> None:
    graph = Graph("g")
    with pytest.raises(InvalidValue, match="step_id must be given for a function without a name"):
        graph.step(fn)
    assert graph.list_steps() == []
    step = graph.step(fn, "one")
    assert (step.id, step.node_id) == ("one", "one")
    assert list(await graph.execute()) == ["one"]


def test_two_steps_of_one_name_are_refused_with_what_to_do() -> None:
    graph = Graph("g")
    graph.step(ask)
    with pytest.raises(InvalidValue) as refused:
        graph.step(ask)
    assert str(refused.value) == "step_id must be an id that graph 'g' does not have yet, not 'ask'"
    assert graph.list_steps() == ["ask"]


@pytest.mark.parametrize("node", [FunctionNode, Desk, Graph])
def test_a_class_is_neither_a_node_nor_a_function(node: Any) -> None:
    with pytest.raises(InvalidValue, match="node must be a function, an object with an id and execute"):
        Graph("g").step(node)


# @graph.step


async def test_a_decorated_function_is_a_step_and_still_a_function() -> None:
    graph = Graph("g")

    @graph.step
    def fetch(ctx: ExecutionContext) -> str:
        """Fetch it."""
        return f"page on {ctx.input}"

    @graph.step(depends_on=[fetch])
    async def read(ctx: ExecutionContext) -> int:
        return len(ctx.input)

    assert isinstance(fetch, Step)
    assert fetch is graph.get_step("fetch")
    assert read.depends_on == ["fetch"]
    context = ExecutionContext(input="dams")
    assert fetch(context) == "page on dams"
    assert await read(context) == 4
    assert await graph.execute(context) == {"fetch": "page on dams", "read": 12}


def test_a_decorated_function_keeps_its_name_its_docstring_and_its_signature() -> None:
    step = Graph("g").step(ask)
    assert (step.__name__, step.__qualname__, step.__doc__, step.__module__) == ("ask", "ask", "Ask.", __name__)
    assert step.__wrapped__ is ask
    assert inspect.signature(step) == inspect.signature(ask)


async def test_a_decorator_takes_the_options_of_a_step() -> None:
    graph = Graph("g")
    policy, budget = ErrorPolicy("skip", fallback_value=0), Budget(max_steps=5)

    @graph.step(step_id="the loud one", input=3, error_policy=policy, sub_budget=budget)
    def loud(ctx: ExecutionContext) -> int:
        assert ctx.input == 3
        raise OSError("too loud")

    assert (loud.id, loud.node_id) == ("the loud one", "loud")
    assert (loud.error_policy, loud.sub_budget) == (policy, budget)
    assert await graph.execute(ExecutionContext(ExecutionConfig(None, None, None))) == {"the loud one": 0}


async def test_a_blocking_function_runs_on_a_thread() -> None:
    graph = Graph("g")

    @graph.step(blocking=True)
    def read(ctx: ExecutionContext) -> bool:
        import asyncio

        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()
        return True

    assert await graph.execute() == {"read": True}


def test_blocking_is_for_functions_alone() -> None:
    graph = Graph("g")
    for node in (FunctionNode("n", ask), "n", Step(FunctionNode("n", ask))):
        with pytest.raises(InvalidValue, match="blocking must be set on the node"):
            graph.step(node, "a", blocking=True)
    with pytest.raises(InvalidValue, match="blocking of node 'answer'"):
        graph.step(answer, blocking=True)
    assert graph.list_steps() == []


async def test_a_decorated_function_can_be_a_step_of_another_graph_or_again_of_its_own() -> None:
    one, other = Graph("one"), Graph("other")
    fetch = one.step(ask)
    assert other.step(fetch).id == "ask"
    one.step(fetch, "again", depends_on=[fetch])
    assert await one.execute(ExecutionContext(input="x")) == {"ask": "ask x", "again": "ask ask x"}
    assert await other.execute(ExecutionContext(input="x")) == {"ask": "ask x"}


def test_a_decorator_is_applied_to_a_function() -> None:
    graph = Graph("g")
    decorate: Any = graph.step(depends_on=[])
    for wrong in (FunctionNode("n", ask), "n", None, Desk):
        with pytest.raises(InvalidValue, match="function"):
            decorate(wrong)


# References.


def test_steps_functions_and_ids_are_references() -> None:
    graph = Graph("g")
    fetch = graph.step(ask)
    graph.step(answer, depends_on=[ask])
    graph.step(FunctionNode("a", ask), "a", depends_on=[fetch, answer, "ask"])
    graph.add_step_ref("shout", "shout", depends_on=[fetch])
    assert graph.get_step("a").depends_on == ["ask", "answer"]
    assert graph.get_step("shout").depends_on == ["ask"]


def test_chain_takes_steps_functions_and_ids() -> None:
    graph = Graph("g")
    note = Desk().note
    first, _, third = graph.step(ask, "first"), graph.step(note), graph.step(FunctionNode("n", ask), "third")
    graph.chain(first, note, "third")
    assert third.depends_on == ["note"]
    assert graph.get_step("note").depends_on == ["first"]


def test_a_reference_to_a_function_must_be_to_one_step() -> None:
    graph = Graph("g")
    with pytest.raises(InvalidValue, match="depends_on of step 'b' must be a step of graph 'g'"):
        graph.step(answer, "b", depends_on=[ask])
    graph.step(ask, "one")
    graph.step(ask, "two")
    with pytest.raises(InvalidValue, match="a function that is one step of graph 'g'; it is 'one' and 'two'"):
        graph.step(answer, depends_on=[ask])
    with pytest.raises(InvalidValue, match="a function that is one step"):
        graph.chain(ask, "two")
    assert graph.list_steps() == ["one", "two"]


def test_a_step_of_another_graph_is_no_reference() -> None:
    graph, other = Graph("g"), Graph("other")
    elsewhere = other.step(ask)
    with pytest.raises(InvalidValue, match="must be a step of graph 'g'"):
        graph.step(answer, depends_on=[elsewhere])
    graph.step(ask)
    with pytest.raises(InvalidValue, match="must be a step of graph 'g'"):
        graph.chain("ask", elsewhere)
    with pytest.raises(InvalidValue, match="must be a list, such as"):
        other.step(answer, depends_on=elsewhere)  # type: ignore[arg-type]


def test_only_steps_can_follow_an_arrow() -> None:
    graph = Graph("g")
    first = graph.step(ask)
    graph.step(answer)
    for wrong in (answer, "answer", 3):
        with pytest.raises(InvalidValue, match="a step of graph 'g'"):
            first >> wrong  # type: ignore[operator]


# Types.


@pytest.mark.parametrize("run", range(2))
async def test_the_typed_example_runs(run: int) -> None:
    await typed_steps.call_directly(ExecutionContext(input=["x"]))
    results = await typed_steps.graph.execute(ExecutionContext(input="dams"))
    assert (results["count"], results["shout"]) == (2, "2 PAGES")
