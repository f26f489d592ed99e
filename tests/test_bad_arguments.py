"""Arguments of traces, usages, hooks, steps and node options: each bad one is refused by an error that names it."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock import (
    Budget,
    ChainMetadata,
    ErrorPolicy,
    ExecutionContext,
    ExecutionTrace,
    FunctionNode,
    GraphInvalid,
    InvalidValue,
    ResourceUsage,
    RunSettings,
    Step,
    StepTrace,
    ToolCallContext,
    contain,
)
from tests.nodes.graphs import graph, node, problems

NOW = datetime(2025, 12, 23, tzinfo=UTC)
STEP: dict[str, Any] = {
    "step_id": "plan",
    "node_id": "planner",
    "node_type": "function",
    "input": "in",
    "output": "out",
    "error": None,
    "start_time": NOW,
    "end_time": NOW,
    "duration_ms": 12.0,
}
STEP_DOCUMENT = StepTrace(**STEP).to_dict()
TRACE_DOCUMENT = ExecutionTrace(graph_id="main", start_time=NOW, steps=[StepTrace(**STEP)]).to_dict()

HUGE = 10**400
"""A whole number that no float can hold."""
NOT_TEXT = (1, 1.5, True, b"text", ["a"], {"a": 1}, object())
NOT_WHOLE = ("7", 1.5, math.nan, math.inf, -1, True, [1])
NOT_AMOUNTS = ("7", math.nan, math.inf, -1, -0.5, True, [1], HUGE)
NOT_TIMES = (0, 1.5, "2025-12-23", NOW.date(), [])
NOT_MAPPINGS = ("a", 1, ["a"], [("a", "b")], {1: "a"}, object())
NOT_LABELS = (*NOT_MAPPINGS, {"a": 1}, {"a": None})
NONE = (None,)


def step_trace(**given: Any) -> StepTrace:
    return StepTrace(**{**STEP, **given})


def step_read(**given: Any) -> StepTrace:
    return StepTrace.from_dict({**STEP_DOCUMENT, **given})


def trace(**given: Any) -> ExecutionTrace:
    return ExecutionTrace(**{"graph_id": "main", "start_time": NOW, **given})


def trace_read(**given: Any) -> ExecutionTrace:
    return ExecutionTrace.from_dict({**TRACE_DOCUMENT, **given})


def nested_step_read(**given: Any) -> ExecutionTrace:
    return ExecutionTrace.from_dict({**TRACE_DOCUMENT, "steps": [STEP_DOCUMENT, {**STEP_DOCUMENT, **given}]})


def tool_call(**given: Any) -> ToolCallContext:
    return ToolCallContext(**{"request_id": "req-001", **given})


def chain_metadata(**given: Any) -> ChainMetadata:
    return ChainMetadata(**{"request_id": "req-001", "chain_id": "chain-001", **given})


def step(**given: Any) -> Step:
    return Step(**{"node": FunctionNode("n", lambda ctx: 1), **given})


STEP_FIELDS = {
    "step_id": (*NONE, *NOT_TEXT),
    "node_id": (*NONE, *NOT_TEXT),
    "node_type": (*NONE, *NOT_TEXT),
    "status": (*NONE, *NOT_TEXT),
    "call_id": (*NONE, *NOT_TEXT),
    "error": NOT_TEXT,
    "parent_step": NOT_TEXT,
    "duration_ms": (*NONE, *NOT_AMOUNTS),
    "cost_usd": (*NONE, math.nan, math.inf, -1, True, [1], HUGE, 10**30),
    "tokens_used": (*NONE, *NOT_WHOLE),
    "attempt": (*NONE, *NOT_WHOLE),
    "depth": (*NONE, *NOT_WHOLE, HUGE),
}
IDS = (*NONE, *NOT_TEXT)
BAD: list[tuple[Callable[..., object], dict[str, tuple[Any, ...]]]] = [
    (
        tool_call,
        {
            **dict.fromkeys(("request_id", "tool_name", "kind", "chain_id", "node_id", "org_id", "team"), IDS),
            **dict.fromkeys(("model", "user_id", "session_id", "endpoint"), NOT_TEXT),
            **dict.fromkeys(("tokens_in", "tokens_out"), NOT_WHOLE),
            "cost_usd": (*NONE, *NOT_AMOUNTS),
            "tags": (*NONE, *NOT_LABELS),
            "metadata": (*NONE, *NOT_MAPPINGS),
        },
    ),
    (
        chain_metadata,
        {
            **dict.fromkeys(("request_id", "chain_id", "org_id", "team", "service"), IDS),
            **dict.fromkeys(("user_id", "model"), NOT_TEXT),
            "tags": (*NONE, *NOT_LABELS),
        },
    ),
    (
        step_trace,
        {
            **STEP_FIELDS,
            "start_time": (*NONE, *NOT_TIMES),
            "end_time": (*NONE, *NOT_TIMES),
            "metadata": (*NONE, *NOT_MAPPINGS),
        },
    ),
    *[
        (
            read,
            {
                **STEP_FIELDS,
                "start_time": (*NONE, *NOT_TEXT, "yesterday", ""),
                "end_time": (*NONE, *NOT_TEXT, "25:00"),
                "metadata": (*NONE, "a", 1, ["a"], {1: "a"}),
            },
        )
        for read in (step_read, nested_step_read)
    ],
    (
        trace,
        {
            "graph_id": (*NONE, *NOT_TEXT),
            "start_time": (*NONE, *NOT_TIMES),
            "end_time": NOT_TIMES,
            "status": (*NONE, *NOT_TEXT, "done", ""),
            "steps": (*NONE, "a", 1, {}, [1], [STEP_DOCUMENT], (StepTrace(**STEP),)),
            "total_tokens": (*NONE, *NOT_WHOLE),
            "total_cost": (*NONE, math.nan, math.inf, -1, True, [1], HUGE),
            "error": NOT_TEXT,
        },
    ),
    (
        trace_read,
        {
            "graph_id": (*NONE, *NOT_TEXT),
            "start_time": (*NONE, *NOT_TEXT, "yesterday", ""),
            "end_time": (*NOT_TEXT, "25:00"),
            "status": (*NONE, *NOT_TEXT, "done", ""),
            "steps": (*NONE, "a", 1, {}, [1], [None], [[]], [{}]),
            "total_tokens": (*NONE, *NOT_WHOLE),
            "total_cost": (*NONE, "7", math.nan, math.inf, -1, True, [1], HUGE),
            "error": NOT_TEXT,
        },
    ),
    (
        ResourceUsage,
        {
            **dict.fromkeys(("tokens_used", "steps_executed", "api_calls", "retries_used"), (*NONE, *NOT_WHOLE)),
            "cost_dollars": (*NONE, math.nan, math.inf, -1, True, [1], HUGE),
            "start_time": (*NONE, *NOT_TIMES),
            "clock": (*NONE, 1, "noon", object()),
            "_start_monotonic": ("noon", math.nan, True, HUGE),
        },
    ),
    (
        ExecutionContext,
        {
            "usage": (1, "x", {}, {"tokens_used": 1}, Budget(), ResourceUsage),
            "trace": (1, "main", {}, object(), True),
            "upstream": NOT_MAPPINGS,
            "cancellation": (1, True, object()),
            "budget": (1, {}, ResourceUsage()),
        },
    ),
    (
        step,
        {
            "node": (*NONE, 1, "n", {}, object(), lambda ctx: 1),
            "id": (*NONE, *NOT_TEXT),
            "node_id": (1, "", ["n"]),
            "input_fn": (1, "fn", {}),
            "depends_on": ("a", 1, [1], [None], object()),
            "error_policy": (1, "skip", {"on_error": "skip"}),
            "sub_budget": (1, 0.5, {"max_tokens": 1}),
        },
    ),
    (
        RunSettings,
        {
            "record_payloads": (*NONE, True, 1, "", "all", "FULL", ["off"]),
            "max_payload_bytes": (*NONE, *NOT_WHOLE, 0, 255, HUGE),
        },
    ),
    (contain, {"record_payloads": (*NONE, True, 1, "", "all", ["off"])}),
    (
        ErrorPolicy,
        {
            "on_error": (*NONE, 1, "", "ignore", ["skip"]),
            **dict.fromkeys(("retry_count", "retry_delay_ms"), (*NONE, *NOT_WHOLE, HUGE)),
            **dict.fromkeys(("retry_backoff", "retry_jitter"), (*NONE, *NOT_AMOUNTS)),
            "timeout_ms": (*NOT_WHOLE, 0, HUGE),
        },
    ),
]
CASES = [
    pytest.param(make, field, value, id=f"{make.__name__} {field} {index}")
    for make, bad in BAD
    for field, values in bad.items()
    for index, value in enumerate(values)
]


@pytest.mark.parametrize(("make", "field", "value"), CASES)
def test_a_bad_argument_is_refused_by_its_name(make: Callable[..., object], field: str, value: Any) -> None:
    with pytest.raises(InvalidValue) as refused:
        make(**{field: value})
    assert field in refused.value.field
    assert f"{refused.value.field} must be " in str(refused.value)
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize("value", ["", "héllo ✓ 水", "\0", "x" * 100_000], ids=["empty", "unicode", "nul", "long"])
def test_any_text_is_accepted_where_text_is(value: str) -> None:
    assert tool_call(model=value, tags={value: value}, metadata={value: [value]}).tags == {value: value}
    assert step_read(step_id=value, error=value, metadata={value: value}).step_id == value
    assert trace_read(graph_id=value, error=value).to_dict()["error"] == value


@pytest.mark.requirement("P-B6")
def test_a_figure_of_a_usage_is_checked_when_it_is_assigned() -> None:
    usage = ResourceUsage(tokens_used=7)
    for value in (None, *NOT_WHOLE):
        with pytest.raises(InvalidValue, match=r"^tokens_used must be "):
            usage.tokens_used = value  # type: ignore[assignment]
    with pytest.raises(InvalidValue, match=r"^cost_dollars must be "):
        usage.cost_dollars = math.nan
    assert (usage.tokens_used, usage.cost_dollars) == (7, 0.0)


def test_a_step_of_a_trace_is_named_by_its_place() -> None:
    with pytest.raises(InvalidValue, match=r"^steps\[1\]\.tokens_used must be "):
        nested_step_read(tokens_used=-1)
    with pytest.raises(InvalidValue, match=r"^steps\[1\]\.cost_usd must be "):
        nested_step_read(cost_usd=10**30)


@pytest.mark.requirement("P-O4")
@pytest.mark.parametrize("missing", ["graph_id", "start_time"])
def test_a_trace_without_its_id_or_its_start_is_refused(missing: str) -> None:
    document = {name: value for name, value in TRACE_DOCUMENT.items() if name != missing}
    with pytest.raises(InvalidValue, match=f"trace must be an object with '{missing}'"):
        ExecutionTrace.from_dict(document)


@pytest.mark.requirement("P-O4")
@pytest.mark.parametrize("missing", STEP)
def test_a_step_of_a_trace_without_a_field_of_its_own_is_refused(missing: str) -> None:
    document = {name: value for name, value in STEP_DOCUMENT.items() if name != missing}
    with pytest.raises(InvalidValue, match=f"an object with '{missing}'"):
        StepTrace.from_dict(document)
    with pytest.raises(InvalidValue, match=rf"^steps\[0\] must be an object with '{missing}'"):
        ExecutionTrace.from_dict({**TRACE_DOCUMENT, "steps": [document]})


@pytest.mark.parametrize("read", [step_read, nested_step_read, trace_read])
def test_a_field_that_a_trace_does_not_have_is_refused(read: Callable[..., object]) -> None:
    with pytest.raises(InvalidValue, match=r"an object of the fields .*, not 'surprise'"):
        read(surprise=1)


@pytest.mark.parametrize("document", [None, 1, "{}", [], [TRACE_DOCUMENT]], ids=str)
def test_what_is_no_object_is_no_trace(document: Any) -> None:
    for kind in (ExecutionTrace, StepTrace):
        with pytest.raises(InvalidValue, match="a JSON object"):
            kind.from_dict(document)


BAD_OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "error_policy": {
        "on_error": (*NONE, 1, "", "ignore", ["skip"]),
        "retry_count": (*NONE, *NOT_WHOLE, HUGE),
        "retry_delay_ms": (*NONE, *NOT_WHOLE, HUGE),
        "retry_backoff": (*NONE, *NOT_AMOUNTS, 0.5),
        "retry_jitter": (*NONE, *NOT_AMOUNTS, 1.5),
        "timeout_ms": (*NOT_WHOLE, 0, HUGE),
        "fallback_handle": (1, "", "x" * 10_000, ["output"]),
        "surprise": (1,),
    },
    "budget": {
        "max_tokens": (*NOT_WHOLE,),
        "max_steps": (*NOT_WHOLE,),
        "max_api_calls": (*NOT_WHOLE,),
        "max_time_seconds": (*NOT_AMOUNTS,),
        "max_cost_dollars": (*NOT_AMOUNTS,),
        "surprise": (1,),
    },
}


def problems_of(data: dict[str, Any]) -> list[tuple[str, str]]:
    """The problems of a graph whose one node has this data, by path."""
    document = graph([node("a", "prompt-template", template="text", **data)])
    try:
        return problems(document)
    except GraphInvalid as invalid:  # such as NaN, which JSON does not have
        return [(problem.path, problem.detail) for problem in invalid.problems]


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        pytest.param(option, field, value, id=f"{option} {field} {index}")
        for option, bad in BAD_OPTIONS.items()
        for field, values in bad.items()
        for index, value in enumerate(values)
    ],
)
def test_a_bad_option_of_a_node_is_refused_by_its_path(option: str, field: str, value: Any) -> None:
    found = problems_of({option: {field: value}})
    assert any(path.startswith(f"$.nodes[0].data.{option}") and field in f"{path} {text}" for path, text in found), (
        found
    )


@pytest.mark.requirement("P-E5")
@pytest.mark.parametrize("option", BAD_OPTIONS)
@pytest.mark.parametrize("value", [1, "skip", [], True], ids=str)
def test_an_option_of_a_node_that_is_no_object_is_refused(option: str, value: Any) -> None:
    assert [path for path, _ in problems_of({option: value})] == [f"$.nodes[0].data.{option}"]
