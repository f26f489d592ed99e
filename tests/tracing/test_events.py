"""Every event is frozen, has its place in a log without gaps, and turns into JSON."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, ClassVar, get_args

import pytest

from penstock import ExecutionContext
from penstock.errors import InvalidValue
from penstock.stops import TerminationReason
from penstock.testing import ManualClock, check_history
from penstock.tracing import events
from penstock.tracing.events import (
    CallEnded,
    CallSettled,
    CallStarted,
    ChildCompleteTrace,
    CustomTrace,
    LimitTrace,
    ModelCallTrace,
    RunCompleted,
    ToolCallTrace,
    TraceEvent,
)
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.record import Source

UNION: tuple[type[TraceEvent], ...] = get_args(events.Event)

START_MS = 1_767_225_600_000
"""Where a ManualClock's wall time starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved(CustomTrace):
    """A kind of event that a user made."""

    kind: ClassVar[str] = "retrieved"
    documents: int = 0
    where: object = None


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# The union.


@pytest.mark.requirement("T-2")
def test_the_union_has_every_kind_of_event_there_is() -> None:
    kinds = {found for found in vars(events).values() if isinstance(found, type) and issubclass(found, TraceEvent)}
    assert set(UNION) == kinds - {TraceEvent}


@pytest.mark.requirement("T-2")
@pytest.mark.parametrize("kind", [*UNION, Retrieved], ids=lambda kind: kind.__name__)
def test_an_event_of_every_kind_is_frozen_and_turns_into_json(kind: type[TraceEvent]) -> None:
    event = kind(run_id="run", seq=3, at_ms=1, source="main", depth=1, iteration=2, parent_id="n000001")
    fields_by_name = event.to_dict()
    assert json.loads(json.dumps(fields_by_name, allow_nan=False)) == fields_by_name
    assert fields_by_name["kind"] == kind.kind
    assert set(fields_by_name) == {"kind"} | {one.name for one in fields(kind)}
    for name in ("run_id", "seq", "at_ms", "source", "depth", "iteration", "parent_id"):
        assert fields_by_name[name] == getattr(event, name)
    with pytest.raises(FrozenInstanceError):
        event.seq = 4  # type: ignore[misc]


@pytest.mark.requirement("T-12")
def test_tool_call_trace_takes_the_fields_of_every_call_and_the_tool_name() -> None:
    assert events.CallFields.__annotations__.keys() == {one.name for one in fields(CallEnded)}
    event = ToolCallTrace(tool_name="search", input={"q": 1}, output=[2], cost=0.5)
    assert (event.name, event.tool_name, event.cost, event.call_kind) == ("search", "search", 0.5, "tool")
    assert event == ToolCallTrace(name="search", input={"q": 1}, output=[2], cost=0.5)
    assert replace(event, name="find").tool_name == replace(event, tool_name="find").name == "find"
    assert replace(event, cost=1.0).input == {"q": 1}
    assert (event.to_dict()["input"], event.to_dict()["output"]) == ({"q": 1}, [2])
    with pytest.raises(TypeError):
        ToolCallTrace(tool="search")  # type: ignore[call-arg]
    for wrong in (3, 0, None, [], b"search"):
        with pytest.raises(InvalidValue, match="tool_name"):
            ToolCallTrace(tool_name=wrong)  # type: ignore[arg-type]


@pytest.mark.requirement("T-2")
def test_a_kind_names_one_class_save_for_the_ends_of_calls() -> None:
    named: dict[str, set[type[TraceEvent]]] = {}
    for kind in UNION:
        named.setdefault(kind.kind, set()).add(kind)
    assert named.pop("call_ended") == {CallEnded, ModelCallTrace, ToolCallTrace}
    assert all(len(kinds) == 1 for kinds in named.values())


@pytest.mark.requirement("T-2")
def test_values_unknown_to_json_become_text() -> None:
    odd: dict[Any, Any] = {"at": datetime(2026, 1, 1, tzinfo=UTC), "nan": math.nan, 1: {2}}
    event = Retrieved(name="odd", data=odd, where=object)
    assert event.to_dict()["data"] == {"at": "2026-01-01T00:00:00+00:00", "nan": "nan", "1": [2]}
    assert event.to_dict()["where"] == "<class 'object'>"
    completed = ChildCompleteTrace(termination_reason=TerminationReason.MAX_ITERATIONS)
    assert completed.to_dict()["termination_reason"] == "max_iterations"
    assert LimitTrace(limit=math.inf).to_dict()["limit"] == "inf"


def test_an_event_knows_its_time_its_cost_in_nanos_and_its_tool() -> None:
    event = ToolCallTrace(at_ms=START_MS + 1_500, cost=0.1, name="search")
    assert event.timestamp == datetime(2026, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    assert event.cost_nanos == 100_000_000
    assert event.tool_name == "search"
    assert (event.call_kind, ModelCallTrace().call_kind, CallEnded().call_kind) == ("tool", "llm", "system")


# The log of a graph.


@pytest.mark.requirement("G-5")
def test_a_start_event_has_what_began_and_where(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock)
    root = graph.create_root("agent", {"request_id": "r-1"})
    clock.advance(1.5)
    graph.begin_node(root, "llm", "ask", model="large-1", metadata={"attempt": 1})
    first, second = graph.events()
    assert first == CallStarted(
        run_id="run",
        seq=1,
        at_ms=START_MS,
        source="main",
        node_id="n000001",
        name="agent",
        metadata={"request_id": "r-1"},
    )
    assert second == CallStarted(
        run_id="run",
        seq=2,
        at_ms=START_MS + 1_500,
        source="main",
        parent_id="n000001",
        node_id="n000002",
        call_kind="llm",
        name="ask",
        model="large-1",
        metadata={"attempt": 1},
    )


@pytest.mark.requirement("G-5")
@pytest.mark.parametrize(
    ("kind", "event_class"), [("llm", ModelCallTrace), ("tool", ToolCallTrace), ("system", CallEnded)]
)
def test_an_end_event_has_the_outcome_and_the_cost(kind: Any, event_class: type[CallEnded], clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock)
    node = graph.begin_node(graph.create_root("agent"), kind, "work", model="m")
    graph.increment_retries(node)
    clock.advance(0.25)
    graph.mark_failure(node, "TimeoutError", "slow", cost_usd="0.000000001", tokens_in=7)
    ended = graph.events()[-1]
    assert type(ended) is event_class
    assert ended == event_class(
        run_id="run",
        seq=3,
        at_ms=START_MS + 250,
        source="main",
        parent_id="n000001",
        node_id=node,
        call_kind=kind,
        name="work",
        model="m",
        status="fail",
        cost=1e-9,
        input_tokens=7,
        output_tokens=0,
        duration_ms=250.0,
        retries_used=1,
        stop_reason="slow",
        error="TimeoutError",
    )
    assert ended.cost_nanos == 1


@pytest.mark.requirement("G-6")
def test_a_bill_that_comes_late_is_an_event_and_counts_once(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock)
    node = graph.begin_node(graph.create_root("agent"), "llm", "ask")
    call = graph.call(node)
    graph.end(call, 0, "halt", cost=2, tokens_in=1, tokens_out=1, stop_reason="timeout", abandoned=True)
    before = graph.snapshot()
    graph.settle_late(call, 5_000_000, 40, 10, 20)
    graph.settle_late(call, 6_000_000, 99, 99, 99)
    *_, ended, settled = graph.events()
    assert isinstance(ended, CallEnded)
    assert (ended.abandoned, ended.cost_nanos, ended.input_tokens) == (True, 2, 1)
    assert settled == CallSettled(
        run_id="run",
        seq=4,
        at_ms=START_MS + 5,
        source="main",
        parent_id="n000001",
        node_id=node,
        cost=4e-8,
        input_tokens=10,
        output_tokens=20,
    )
    after = graph.snapshot()
    assert [round(shot["nodes"][node]["cost_usd"] * 1e9) for shot in (before, after)] == [2, 42]
    assert (after["nodes"][node]["tokens_in"], after["nodes"][node]["tokens_out"]) == (11, 21)
    assert after["nodes"][node]["metadata"] == {"abandoned": True}
    assert round(after["aggregates"]["halted_cost_usd"] * 1e9) == 42
    assert (after["aggregates"]["halted_tokens_in"], after["aggregates"]["halted_tokens_out"]) == (11, 21)
    assert after["aggregates"]["halted_calls"] == 1


def test_a_foreign_event_is_returned_as_it_was_written() -> None:
    graph = ExecutionGraph("run")
    graph.create_root("agent")
    mine = Retrieved(seq=graph.seq + 1, documents=3)
    graph.append(mine)
    assert graph.events()[-1] is mine


def test_changing_the_data_of_an_event_changes_no_record() -> None:
    graph = ExecutionGraph("run")
    root = graph.create_root("agent", {"a": 1})
    (started,) = graph.events()
    assert isinstance(started, CallStarted)
    started.metadata["a"] = 2  # type: ignore[index]
    assert graph.snapshot()["nodes"][root]["metadata"] == {"a": 1}


def ten_entries() -> ExecutionGraph:
    graph = ExecutionGraph("run")
    root = graph.create_root("agent")
    for _ in range(3):
        graph.mark_success(graph.begin_node(root, "tool", "step"))
        graph.append(CustomTrace(seq=graph.seq + 1))
    return graph


@pytest.mark.parametrize(
    ("since", "limit", "expected"),
    [
        (0, None, range(1, 11)),
        (4, None, range(5, 11)),
        (4, 3, range(5, 8)),
        (4, 0, range(0)),
        (9, 5, range(10, 11)),
        (10, None, range(0)),
        (99, 5, range(0)),
        (-3, 2, range(1, 3)),
    ],
)
def test_events_are_listed_after_a_seq_and_up_to_a_limit(since: int, limit: int | None, expected: range) -> None:
    assert [event.seq for event in ten_entries().events(since, limit)] == list(expected)


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(InvalidValue, match="limit must be"):
        ten_entries().events(limit=-1)


@pytest.mark.requirement("G-11")
def test_events_after_a_trim_still_have_their_own_seq() -> None:
    graph = ExecutionGraph("run", max_kept=10)
    root = graph.create_root("agent")
    nodes = []
    for _ in range(1_000):
        nodes.append(graph.begin_node(root, "tool", "step"))
        graph.mark_success(nodes[-1])
    assert graph.dropped_events
    kept = graph.events()
    assert [event.seq for event in kept] == list(range(graph.dropped_events + 1, graph.seq + 1))
    assert graph.events(since=graph.dropped_events + 5, limit=2) == kept[5:7]
    assert graph.events(since=0, limit=2) == kept[:2]
    ended = [event for event in kept if isinstance(event, ToolCallTrace)]
    assert [event.node_id for event in ended] == nodes[-len(ended) :]


# The log of a run.


@pytest.mark.requirement("T-2")
def test_the_run_fills_in_time_place_and_iteration_for_the_users_kinds_too(clock: ManualClock) -> None:
    with ExecutionContext(name="main", clock=clock) as ctx:
        child = ctx.spawn_child("research")
        child.start_iteration()
        child.start_iteration()
        clock.advance(2)
        child.record_event(Retrieved(documents=3))
        (event,) = [event for event in ctx.history() if isinstance(event, Retrieved)]
    assert (event.documents, event.run_id, event.source) == (3, ctx.run_id, "main/research")
    assert (event.depth, event.iteration, event.at_ms) == (1, 2, START_MS + 2_000)
    assert event.parent_id == ctx.history()[2].node_id  # type: ignore[attr-defined]
    assert ctx.history()[event.seq - 1] == event


@pytest.mark.requirement("T-2")
def test_the_history_of_a_whole_run_has_no_contradiction_and_is_json() -> None:
    def fail() -> None:
        raise ValueError("no")

    with ExecutionContext() as ctx:
        ctx.llm(lambda: ctx.tool(lambda: "found", name="search"), name="ask", cost_hint_usd=0.01)
        ctx.wrap_tool_call(fail)
        with ctx.spawn_child("helper") as helper:
            helper.trace_custom("note", {"n": 1})
    assert check_history(ctx.history()) == []
    assert isinstance(ctx.history()[-1], RunCompleted)
    for event in ctx.history():
        json.dumps(event.to_dict(), allow_nan=False)


def test_the_source_of_an_event_is_the_path_of_contexts() -> None:
    main = Source("main")
    graph = ExecutionGraph("run", source=main)
    graph.create_root("agent")
    inner = Source("deep", Source("child", main))
    inner.iteration = 4
    with graph.lock:
        graph.begin(graph.root, "tool", "step", None, inner, graph.clock.monotonic_ns())
    event = graph.events()[-1]
    assert (event.source, event.depth, event.iteration) == ("main/child/deep", 2, 4)
