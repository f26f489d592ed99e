"""Traces and steps as plain data: made by hand, changed, written as JSON and read back."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    Budget,
    ErrorPolicy,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    Graph,
    InvalidValue,
    Reported,
    Session,
    Step,
    StepTrace,
)
from tests.flow.steps import Boom, const

pytestmark = pytest.mark.requirement("P-O4")

NOW = datetime(2026, 1, 1, 12, 0, 0, 250, UTC)


def step_trace(step_id: str = "a", **values: Any) -> StepTrace:
    return StepTrace(step_id, "n", "function", 1, 2, None, NOW, NOW + timedelta(seconds=1), 1_000.0, **values)


# Made and changed.


def test_a_trace_takes_every_field_of_the_dataclass() -> None:
    steps = [step_trace()]
    trace = ExecutionTrace(
        graph_id="g",
        start_time=NOW,
        end_time=NOW,
        status="failed",
        steps=steps,
        total_tokens=7,
        total_cost=0.25,
        error="Boom: no",
    )
    assert [one.name for one in dataclasses.fields(trace)] == [
        "graph_id",
        "start_time",
        "end_time",
        "status",
        "steps",
        "total_tokens",
        "total_cost",
        "error",
    ]
    assert trace.steps is steps
    assert (trace.total_tokens, trace.total_cost, trace.status, trace.error) == (7, 0.25, "failed", "Boom: no")
    assert trace == dataclasses.replace(trace)
    assert trace != dataclasses.replace(trace, total_tokens=8)
    assert dataclasses.asdict(trace)["steps"][0]["step_id"] == "a"


def test_a_trace_made_by_hand_can_be_changed_as_a_dataclass_can() -> None:
    trace = ExecutionTrace("g", NOW)
    trace.steps.append(step_trace("by append"))
    trace.add_step(step_trace("by add_step", tokens_used=5, cost_usd=0.5))
    assert ([step.step_id for step in trace.steps], trace.total_tokens) == (["by append", "by add_step"], 5)
    trace.total_tokens += 10
    trace.total_cost = 1.5
    trace.status, trace.end_time, trace.error = "cancelled", NOW, "stopped"
    trace.steps = [step_trace("other")]
    trace.steps[0].tokens_used = 3
    assert (trace.total_tokens, trace.total_cost, trace.steps[0].tokens_used) == (15, 1.5, 3)
    assert (trace.status, trace.end_time, trace.error) == ("cancelled", NOW, "stopped")
    assert trace.explain().startswith("Graph: g\nStatus: cancelled\n  other (function): 1000ms, 3 tokens")


async def test_the_steps_and_totals_of_a_graph_that_ran_can_be_changed_too() -> None:
    trace = ExecutionTrace("g")
    spend = FunctionNode("n", lambda ctx: Reported.of(1, input_tokens=5, cost_usd=0.5))
    graph = Graph("g").add_step(spend, "a")
    await graph.execute(ExecutionContext(trace=trace))
    trace.steps[0].metadata["seen"] = True
    trace.steps.append(step_trace("by hand"))
    trace.total_tokens, trace.total_cost = 1, 0.25
    await graph.execute(ExecutionContext(trace=trace))
    assert [step.step_id for step in trace.steps] == ["a", "by hand", "a"]
    assert (trace.steps[0].metadata["seen"], trace.total_tokens, trace.total_cost) == (True, 6, 0.75)


async def test_what_is_assigned_while_a_graph_runs_is_added_to_by_what_follows() -> None:
    trace = ExecutionTrace("g")

    def reset(ctx: ExecutionContext) -> Any:
        trace.steps = []
        trace.total_tokens = 100
        assert trace.total_tokens == 100
        return Reported.of(1, input_tokens=5)

    graph = Graph("g").add_step(FunctionNode("n", lambda ctx: Reported.of(1, input_tokens=5)), "a")
    graph.add_step(FunctionNode("n", reset), "b", depends_on=["a"])
    await graph.execute(ExecutionContext(trace=trace))
    assert ([step.step_id for step in trace.steps], trace.total_tokens) == (["b"], 105)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("graph_id", 5),
        ("start_time", "today"),
        ("end_time", 5),
        ("status", "done"),
        ("steps", (step_trace(),)),
        ("steps", ["a"]),
        ("total_tokens", -1),
        ("total_tokens", 1.5),
        ("total_cost", -1),
        ("error", Boom()),
    ],
)
def test_a_field_of_a_trace_that_cannot_be_right_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be"):
        ExecutionTrace(**{"graph_id": "g", field: value})


@pytest.mark.parametrize("step", [None, 5, {"step_id": "a"}, StepTrace])
def test_what_is_added_to_a_trace_is_a_step(step: Any) -> None:
    trace = ExecutionTrace(graph_id="g")
    with pytest.raises(InvalidValue, match=r"^step must be"):
        trace.add_step(step)
    assert (trace.steps, trace.total_tokens) == ([], 0)


# Read back.

TEXT = st.text(max_size=8)
TIMES = st.datetimes(timezones=st.sampled_from([None, UTC]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**50), 2**50) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
COUNTS = st.integers(0, 2**40)
STEPS = st.builds(
    StepTrace,
    step_id=TEXT,
    node_id=TEXT,
    node_type=TEXT,
    input=VALUES,
    output=VALUES,
    error=st.none() | TEXT,
    start_time=TIMES,
    end_time=TIMES,
    duration_ms=st.floats(0, 1e9),
    tokens_used=COUNTS,
    metadata=st.dictionaries(TEXT, VALUES, max_size=3),
    cost_usd=st.integers(0, 10**15).map(lambda nanos: nanos / 10**9),
    status=st.sampled_from(["success", "fail", "halt"]),
    attempt=st.integers(1, 9),
    call_id=TEXT,
    parent_step=st.none() | TEXT,
    depth=st.integers(0, 9),
)
TRACES = st.builds(
    ExecutionTrace,
    graph_id=TEXT,
    start_time=TIMES,
    end_time=st.none() | TIMES,
    status=st.sampled_from(["running", "completed", "failed", "cancelled"]),
    steps=st.lists(STEPS, max_size=3),
    total_tokens=COUNTS,
    total_cost=st.integers(0, 10**15).map(lambda nanos: nanos / 10**9),
    error=st.none() | TEXT,
)


@given(TRACES)
def test_a_trace_is_the_same_after_it_was_written_as_json_and_read(trace: ExecutionTrace) -> None:
    again = ExecutionTrace.from_dict(json.loads(json.dumps(trace.to_dict())))
    assert again == trace
    assert again.to_dict() == trace.to_dict()
    assert again.explain() == trace.explain()


@given(STEPS)
def test_a_step_is_the_same_after_it_was_written_as_json_and_read(step: StepTrace) -> None:
    assert StepTrace.from_dict(json.loads(json.dumps(step.to_dict()))) == step


async def test_the_trace_of_a_run_can_be_read_back() -> None:
    trace = ExecutionTrace("g")
    inner = Graph("inner").add_step(FunctionNode("n", lambda ctx: Reported.of(1, cost_usd=0.1)), "x")
    graph = Graph("g").add_step(inner, "a").add_step(const("two", 2), "b", depends_on=["a"])
    await graph.execute(ExecutionContext(trace=trace))
    again = ExecutionTrace.from_dict(trace.to_dict())
    assert (again.to_dict(), again.explain()) == (trace.to_dict(), trace.explain())


STARTED = {"graph_id": "g", "start_time": "2025-12-23T00:00:00+00:00"}
"""What a trace in JSON has at least."""


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, "^trace must be a JSON object"),
        ([], "^trace must be a JSON object"),
        ({"status": "running"}, "^trace must be an object with 'graph_id'"),
        ({"graph_id": "g", "colour": "red"}, "^trace must be an object of the fields graph_id, .*, not 'colour'"),
        ({"graph_id": "g"}, "^trace must be an object with 'start_time'"),
        ({**STARTED, "graph_id": None}, r"^trace\.graph_id must be a string"),
        ({"graph_id": "g", "start_time": "today"}, r"^trace\.start_time must be a time in ISO 8601"),
        ({**STARTED, "status": "done"}, r"^trace\.status must be one of running, completed, failed, cancelled"),
        ({**STARTED, "total_tokens": True}, r"^trace\.total_tokens must be a whole number"),
        ({**STARTED, "total_cost": float("nan")}, r"^trace\.total_cost must be a finite number"),
        ({**STARTED, "steps": {}}, r"^trace\.steps must be a list"),
        ({**STARTED, "steps": [5]}, r"^steps\[0\] must be a JSON object"),
        ({**STARTED, "steps": [{}]}, r"^steps\[0\] must be an object with 'step_id'"),
        (
            {**STARTED, "steps": [{**step_trace().to_dict(), "metadata": []}]},
            r"^steps\[0\]\.metadata must be an object",
        ),
        (
            {**STARTED, "steps": [{**step_trace().to_dict(), "duration_ms": "long"}]},
            r"^steps\[0\]\.duration_ms must be a finite number",
        ),
    ],
)
def test_a_document_that_is_no_trace_is_refused_by_what_is_wrong_with_it(document: Any, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        ExecutionTrace.from_dict(document)


# Steps made by hand.


async def test_a_step_made_by_hand_runs_as_one_that_the_graph_makes() -> None:
    first = Step(node=const("one", 1), id="a")
    second = Step(
        node=FunctionNode("fail", lambda ctx: 1 / 0),
        depends_on=["a"],
        error_policy=ErrorPolicy("skip", fallback_value="skipped"),
        sub_budget=Budget(max_steps=2),
    )
    graph = Graph("g").add_step(first).add_step(second, "b")
    third = graph.step(Step(node=FunctionNode("echo", lambda ctx: ctx.input), input_fn=lambda r: r["b"]), "c")
    assert (second.id, second.depends_on, repr(second)) == ("b", ["a"], "<Step 'b' of 'g' after a>")
    assert graph.get_step("a") is first
    second >> third
    assert await graph.execute() == {"a": 1, "b": "skipped", "c": "skipped"}


async def test_a_step_made_by_hand_may_refer_to_a_node_of_the_session() -> None:
    session = Session("s")
    session.register(const("one", 1))
    graph = Graph("g", session).add_step(Step(node_id="one", id="a"))
    assert await graph.execute() == {"a": 1}


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("node of step", {"node": None}),
        ("node of step", {"node": lambda ctx: 1}),
        ("node_id of step", {"node": const("n"), "node_id": "n"}),
        ("node_id of step", {"node_id": ""}),
        ("input_fn of step", {"node": const("n"), "input_fn": 5}),
        ("input of step", {"node": const("n"), "input": 1, "input_fn": lambda results: 1}),
        ("depends_on of step", {"node": const("n"), "depends_on": "a"}),
        ("error_policy of step", {"node": const("n"), "error_policy": "skip"}),
        ("sub_budget of step", {"node": const("n"), "sub_budget": 5}),
    ],
)
def test_a_step_made_by_hand_is_checked_as_one_that_the_graph_makes(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=f"^{message}"):
        Step(id="a", **arguments)


def test_a_step_made_by_hand_belongs_to_one_graph_under_one_id() -> None:
    step = Step(node=const("n"), id="a")
    assert repr(step) == "<Step 'a' of no graph yet>"
    graph = Graph("g")
    for wrong in (
        lambda: step >> Step(node=const("m"), id="b"),
        lambda: graph.add_step(step, "other"),
        lambda: graph.add_step(step, input=5),
    ):
        with pytest.raises(InvalidValue):
            wrong()
    graph.add_step(step)
    with pytest.raises(InvalidValue, match="in no graph yet"):
        Graph("h").add_step(step)
    with pytest.raises(InvalidValue, match="does not have yet"):
        graph.add_step(Step(node=const("n"), id="a"))
