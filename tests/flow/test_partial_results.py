"""What a failed graph had finished, on the exception it raises."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

from penstock import Budget, BudgetExceededError, CancelledError, ExecutionContext, FunctionNode, Graph, RunSettings
from penstock.stores import Journal
from tests.flow.steps import Boom, const
from tests.runtime.durable.journalled import JsonJournals


def fails(error: BaseException) -> FunctionNode:
    """A node that raises this object."""

    def fail(ctx: ExecutionContext) -> None:
        raise error

    return FunctionNode("fails", fail)


def failing(error: BaseException, **options: Any) -> Graph:
    """Two steps that finish, and then one that fails."""
    graph = Graph("g", **options).add_step(const("one", 1), "a").add_step(const("two", 2), "b", depends_on=["a"])
    return graph.add_step(fails(error), "c", depends_on=["b"])


async def raised_by(graph: Graph, context: ExecutionContext | None = None) -> Any:
    with pytest.raises(BaseException) as raised:
        await graph.execute(context)
    return raised.value


@pytest.mark.requirement("P-E6")
async def test_an_ordinary_exception_carries_the_results_that_had_finished() -> None:
    error = await raised_by(failing(Boom()))
    assert type(error) is Boom
    assert error.partial_results == {"a": 1, "b": 2}
    assert error.__notes__ == ["in step 'c' of graph 'g'"]


@pytest.mark.requirement("P-E6")
def test_an_exception_of_a_graph_run_from_sync_code_carries_them_and_can_be_pickled() -> None:
    with pytest.raises(Boom) as raised:
        asyncio.run(failing(Boom()).execute())
    for error in (raised.value, copy.copy(raised.value), pickle.loads(pickle.dumps(raised.value))):
        assert error.partial_results == {"a": 1, "b": 2}


@pytest.mark.requirement("P-E6")
async def test_a_durable_run_raises_with_them_and_again_when_it_is_resumed() -> None:
    store = JsonJournals()
    for _ in range(2):
        error = await raised_by(failing(Boom()), ExecutionContext(journal=await Journal.open(store, "r")))
        assert error.partial_results == {"a": 1, "b": 2}


@pytest.mark.requirement("P-E6")
async def test_a_graph_without_recorded_steps_raises_with_them_too() -> None:
    error = await raised_by(failing(Boom()), ExecutionContext(settings=RunSettings(record_steps=False)))
    assert error.partial_results == {"a": 1, "b": 2}


@pytest.mark.requirement("P-E6")
async def test_an_exception_of_an_inner_graph_has_the_results_of_each_level() -> None:
    outer = Graph("outer").add_step(const("zero", 0), "before").add_step(failing(Boom()), "inner")
    error = await raised_by(outer)
    assert error.partial_results == {"before": 0, "inner": {"a": 1, "b": 2}}


@pytest.mark.requirement("P-E6")
async def test_an_object_that_is_raised_again_carries_the_newest_results_only() -> None:
    error = Boom()
    await raised_by(failing(error))
    again = Graph("again").add_step(const("x", "x"), "x").add_step(fails(error), "y", depends_on=["x"])
    assert await raised_by(again) is error
    assert error.partial_results == {"x": "x"}  # type: ignore[attr-defined]


@pytest.mark.requirement("P-E6")
async def test_too_few_successes_raise_a_group_with_the_results_that_had_finished() -> None:
    graph = Graph("race", settle="first").add_step(const("one", 1), "a")
    for name in ("b", "c"):
        graph.add_step(fails(Boom(name)), name, depends_on=["a"])
    error = await raised_by(graph)
    assert isinstance(error, ExceptionGroup)
    assert error.partial_results == {"a": 1}  # type: ignore[attr-defined]


class Sealed(Exception):
    """Refuses every attribute, as a frozen dataclass does."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to field {name!r}")


class Own(Exception):
    """Has partial results of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.partial_results = ["its own"]


@pytest.mark.requirement("P-E6")
async def test_an_exception_that_refuses_attributes_is_raised_as_it_is() -> None:
    with ExecutionContext() as ctx:
        error = await raised_by(Graph("outer").add_step(failing(Sealed()), "inner"), ctx)
        assert type(error) is Sealed
        assert not hasattr(error, "partial_results")
        assert ctx.partial_results == {"a": 1, "b": 2}


@pytest.mark.requirement("P-E6")
async def test_partial_results_that_an_exception_brings_along_stay_its_own() -> None:
    error = await raised_by(Graph("outer").add_step(failing(Own()), "inner"))
    assert error.partial_results == ["its own"]


@pytest.mark.requirement("P-E6")
async def test_halts_and_cancels_have_them_by_the_same_name() -> None:
    error = await raised_by(failing(Boom()), ExecutionContext(budget=Budget(max_steps=1)))
    assert isinstance(error, BudgetExceededError)
    assert error.partial_results == error.partial == {"a": 1}

    ctx = ExecutionContext()
    graph = Graph("g").add_step(const("one", 1), "a")
    graph.add_step(FunctionNode("stop", lambda ctx: ctx.abort("enough")), "b", depends_on=["a"])
    cancelled = await raised_by(graph, ctx)
    assert isinstance(cancelled, CancelledError)
    assert cancelled.partial_results == cancelled.partial == {"a": 1}
