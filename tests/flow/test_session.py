"""Nodes by name: who finds them, when, and the error when they do not exist."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    ErrorPolicy,
    ExecutionContext,
    FunctionNode,
    Graph,
    GraphInvalid,
    InvalidValue,
    Session,
)
from tests.flow.steps import const

pytestmark = pytest.mark.requirement("P-G1")


def with_nodes(*nodes: Any) -> Session:
    session = Session()
    for node in nodes:
        session.register(node)
    return session


def test_a_session_knows_its_nodes_by_id_in_the_order_they_came() -> None:
    one, two = const("one"), const("two")
    session = with_nodes(two, one)
    assert session.list_nodes() == ["two", "one"]
    assert session.get_node("one") is one
    assert session.get_node("three") is None
    assert "one" in session
    assert "three" not in session


def test_a_session_has_a_name() -> None:
    assert Session().name == "default"
    assert Session("mine").name == "mine"
    assert "mine" in repr(Session("mine"))


def test_an_id_is_taken_once_and_registering_a_node_again_changes_nothing() -> None:
    one = const("same")
    session = with_nodes(one, one)
    with pytest.raises(InvalidValue, match="'same'"):
        session.register(const("same"))
    assert session.get_node("same") is one


def test_a_node_that_is_forgotten_makes_room_for_another() -> None:
    session, other = with_nodes(const("same")), const("same")
    session.unregister("same")
    session.unregister("never there")
    session.register(other)
    assert session.get_node("same") is other


@pytest.mark.parametrize("node", [None, 3, "name", object(), type("NoExecute", (), {"id": "x"})(), FunctionNode])
def test_what_is_no_node_cannot_be_registered(node: Any) -> None:
    with pytest.raises(InvalidValue):
        Session().register(node)


def test_a_graph_registers_itself_in_the_session_it_is_given() -> None:
    session = Session()
    graph = Graph("g", session)
    assert session.get_node("g") is graph
    with pytest.raises(InvalidValue, match="'g'"):
        Graph("g", session)


async def test_a_step_that_refers_to_a_node_runs_it() -> None:
    session = with_nodes(const("one", 41), FunctionNode("add", lambda ctx: ctx.input + 1))
    graph = Graph("g", session).add_step_ref("one", "a").add_step_ref("add", "b", depends_on=["a"])
    assert await graph.execute() == {"a": 41, "b": 42}
    assert await graph.execute(ExecutionContext()) == {"a": 41, "b": 42}


async def test_the_session_of_the_run_comes_before_that_of_the_graph() -> None:
    graph = Graph("g", with_nodes(const("n", "the graph's"))).add_step_ref("n", "a")
    assert await graph.execute(ExecutionContext(session=with_nodes(const("n", "the run's")))) == {"a": "the run's"}


async def test_a_node_is_looked_up_when_the_graph_runs_and_may_change_between_runs() -> None:
    session = Session()
    graph = Graph("g", session).add_step_ref("n", "a")
    assert len(graph.validate()) == 1
    session.register(const("n", 1))
    assert graph.validate() == []
    assert await graph.execute() == {"a": 1}
    session.unregister("n")
    session.register(const("n", 2))
    assert await graph.execute() == {"a": 2}


async def test_a_session_reaches_nested_graphs() -> None:
    inner = Graph("inner").add_step_ref("n", "x")
    outer = Graph("outer").add_step(inner, "a")
    assert await outer.execute(ExecutionContext(session=with_nodes(const("n", 5)))) == {"a": {"x": 5}}


async def test_a_graph_can_be_referred_to() -> None:
    session = Session()
    Graph("inner", session).add_step(const("n", 3), "x")
    assert await Graph("outer", session).add_step_ref("inner", "a").execute() == {"a": {"x": 3}}


async def test_a_graph_that_refers_to_itself_is_stopped_before_the_stack_is() -> None:
    session = Session()
    graph = Graph("loop", session).add_step_ref("loop", "again")
    with pytest.raises(Exception, match="64") as raised:
        await graph.execute()
    assert "loop" in str(raised.value)


async def test_every_node_that_is_not_there_is_named_before_anything_runs() -> None:
    ran: list[int] = []
    session = with_nodes(FunctionNode("there", lambda ctx: ran.append(1)))
    graph = Graph("g", session).add_step_ref("there", "a").add_step_ref("gone", "b").add_step_ref("lost", "c")
    assert [name for name in ("gone", "lost") if any(name in problem for problem in graph.validate())] == [
        "gone",
        "lost",
    ]
    with pytest.raises(GraphInvalid) as raised:
        await graph.execute()
    assert len(raised.value.problems) == 2
    assert "'there'" not in str(raised.value).partition("(")[0]
    assert ran == []


async def test_a_reference_without_any_session_says_so() -> None:
    graph = Graph("g").add_step_ref("n", "a")
    assert graph.validate() == [], "the run may bring one"
    with pytest.raises(GraphInvalid, match="no session"):
        await graph.execute()


@pytest.mark.parametrize("session", ["default", 5, {"n": 1}, object()])
async def test_a_session_that_is_none_is_named_as_such(session: Any) -> None:
    graph = Graph("g").add_step_ref("n", "a")
    with pytest.raises(InvalidValue, match="session"):
        await graph.execute(ExecutionContext(session=session))


async def test_a_reference_may_have_everything_a_step_may_have() -> None:
    def breaks(ctx: ExecutionContext) -> None:
        raise LookupError

    session = with_nodes(FunctionNode("bad", breaks), FunctionNode("echo", lambda ctx: ctx.input))
    graph = Graph("g", session)
    graph.add_step_ref("bad", "a", error_policy=ErrorPolicy("skip", fallback_value=1))
    graph.add_step_ref("echo", "b", input=7).add_step_ref("echo", "c", input_fn=lambda up: up["b"], depends_on=["b"])
    assert await graph.execute() == {"a": 1, "b": 7, "c": 7}
    graph.add_step_ref("echo", "d", sub_budget=Budget(max_steps=0))
    with pytest.raises(BudgetExceededError):
        await graph.execute()
