"""Every call moves along one table, ends once, and is counted once, whatever is marked in whatever order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from penstock.tracing.events import CallEnded, CallStarted
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.lifecycle import KINDS, TERMINAL, TRANSITIONS, CallKind, Status, mermaid

ENDS: tuple[Status, ...] = ("success", "fail", "halt")
NANOS = 1_000_000_000


def nanos(usd: float) -> int:
    return round(usd * NANOS)


# The table.


@pytest.mark.requirement("G-4")
def test_the_table_is_the_one_that_was_promised() -> None:
    assert {status: set(onward) for status, onward in TRANSITIONS.items()} == {
        "created": {"running", "fail", "halt"},
        "running": {"success", "fail", "halt"},
        "success": set(),
        "fail": set(),
        "halt": set(),
    }


def test_every_status_is_in_the_table_and_the_terminal_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(get_args(Status))
    assert set(ENDS) == TERMINAL
    assert {"llm", "tool", "system"} == KINDS


def test_the_diagram_is_drawn_from_the_table() -> None:
    assert mermaid().splitlines() == [
        "stateDiagram-v2",
        "    [*] --> created",
        "    created --> fail",
        "    created --> halt",
        "    created --> running",
        "    running --> fail",
        "    running --> halt",
        "    running --> success",
        "    success --> [*]",
        "    fail --> [*]",
        "    halt --> [*]",
    ]


# One call.


def call_in(status: Status) -> tuple[ExecutionGraph, str]:
    graph = ExecutionGraph("run")
    node = graph.begin_node(graph.create_root("root"), "llm", "ask")
    if status == "created":
        return graph, node
    graph.mark_running(node)
    if status != "running":
        mark(graph, node, status, cost_usd=0.25, tokens_in=10, tokens_out=5)
    return graph, node


def mark(graph: ExecutionGraph, node: str, status: Status, **bill: Any) -> None:
    if status == "running":
        graph.mark_running(node)
    elif status == "success":
        graph.mark_success(node, **bill)
    elif status == "fail":
        graph.mark_failure(node, "TimeoutError", "too slow", **bill)
    else:
        graph.mark_halt(node, "ceiling", **bill)


def node_of(graph: ExecutionGraph, node: str) -> dict[str, Any]:
    found: dict[str, Any] = graph.snapshot()["nodes"][node]
    return found


@pytest.mark.requirement("G-4")
@pytest.mark.parametrize(
    ("before", "after"), [(before, after) for before, onward in TRANSITIONS.items() for after in sorted(onward)]
)
def test_a_call_can_go_wherever_the_table_leads(before: Status, after: Status) -> None:
    graph, node = call_in(before)
    mark(graph, node, after)
    assert node_of(graph, node)["status"] == after


@pytest.mark.requirement("G-4")
@pytest.mark.parametrize(("ended", "marked"), list(itertools.product(ENDS, ["running", *ENDS])))
def test_a_call_that_has_ended_is_not_changed_by_any_mark(ended: Status, marked: Status) -> None:
    graph, node = call_in(ended)
    before = graph.snapshot()
    mark(graph, node, marked, **({} if marked == "running" else {"cost_usd": 9, "tokens_in": 9, "tokens_out": 9}))
    graph.increment_retries(node)
    after = graph.snapshot()
    assert after | {"snapshot_ts_ms": 0} == before | {"snapshot_ts_ms": 0}
    assert len([event for event in graph.events() if isinstance(event, CallEnded)]) == 1


@pytest.mark.requirement("G-4")
def test_success_on_a_call_that_is_only_created_passes_through_running() -> None:
    graph, node = call_in("created")
    graph.mark_success(node, 0.5)
    assert node_of(graph, node)["status"] == "success"
    assert nanos(graph.aggregates["total_cost_usd"]) == NANOS // 2


@pytest.mark.requirement("G-4")
@pytest.mark.parametrize("before", ["created", "running"])
@pytest.mark.parametrize("end", ENDS)
def test_a_mark_that_is_refused_changes_nothing(before: Status, end: Status) -> None:
    graph, node = call_in(before)
    with pytest.raises(ValueError, match="cost_usd"):
        mark(graph, node, end, cost_usd=float("nan"))
    assert node_of(graph, node)["status"] == before
    mark(graph, node, end, cost_usd=0.5)
    assert node_of(graph, node)["status"] == end


# Many calls, any order.


@dataclass
class Expected:
    """What one call should be by now."""

    kind: CallKind
    parent: str | None
    depth: int
    status: Status = "created"
    cost: int = 0
    tokens_in: int | None = None
    tokens_out: int | None = None
    retries: int = 0


@dataclass
class ExpectedRun:
    """A second, naive account of the run: everything is recomputed from all calls, each time."""

    calls: dict[str, Expected] = field(default_factory=dict)

    def ended(self, status: Status, kind: CallKind | None = None) -> list[Expected]:
        return [c for c in self.calls.values() if c.status == status and kind in (None, c.kind)]

    def aggregates(self) -> dict[str, int]:
        figures = {
            "total_llm_calls": len(self.ended("success", "llm")),
            "total_tool_calls": len(self.ended("success", "tool")),
            "total_retries": sum(c.retries for c in self.calls.values() if c.status in TERMINAL),
            "max_depth": max((c.depth for c in self.calls.values()), default=0),
            "failed_calls": len(self.ended("fail")),
            "halted_calls": len(self.ended("halt")),
        }
        for prefix, status in (("total", "success"), ("failed", "fail"), ("halted", "halt")):
            ended = self.ended(status)  # type: ignore[arg-type]
            figures[f"{prefix}_cost_usd"] = sum(c.cost for c in ended)
            figures[f"{prefix}_tokens_in"] = sum(c.tokens_in or 0 for c in ended)
            figures[f"{prefix}_tokens_out"] = sum(c.tokens_out or 0 for c in ended)
        return figures


costs = st.integers(0, 10**12)
tokens = st.none() | st.integers(0, 10**6)


class AnyOrder(RuleBasedStateMachine):
    """All marks, in any order, on several calls: the graph against the naive account."""

    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.graph = ExecutionGraph("run")
        self.expected = ExpectedRun()
        self.before: dict[str, int] = {}

    @initialize(target=nodes)
    def root(self) -> str:
        root = self.graph.create_root("root")
        self.expected.calls[root] = Expected("system", None, 0, "running")
        return root

    @rule(target=nodes, parent=nodes, kind=st.sampled_from(sorted(KINDS)))
    def begin(self, parent: str, kind: CallKind) -> str:
        node = self.graph.begin_node(parent, kind, "call")
        assert node not in self.expected.calls
        self.expected.calls[node] = Expected(kind, parent, self.expected.calls[parent].depth + 1)
        return node

    @rule(node=nodes)
    def run(self, node: str) -> None:
        self.graph.mark_running(node)
        if self.expected.calls[node].status == "created":
            self.expected.calls[node].status = "running"

    @rule(node=nodes)
    def retry(self, node: str) -> None:
        self.graph.increment_retries(node)
        if self.expected.calls[node].status not in TERMINAL:
            self.expected.calls[node].retries += 1

    @rule(node=nodes, end=st.sampled_from(ENDS), cost=costs, tokens_in=tokens, tokens_out=tokens)
    def end(self, node: str, end: Status, cost: int, tokens_in: int | None, tokens_out: int | None) -> None:
        usd = Decimal(cost) / NANOS
        mark(self.graph, node, end, cost_usd=usd, tokens_in=tokens_in, tokens_out=tokens_out)
        call = self.expected.calls[node]
        if call.status not in TERMINAL:
            call.status, call.cost, call.tokens_in, call.tokens_out = end, cost, tokens_in, tokens_out

    @invariant()
    def every_call_is_as_expected(self) -> None:
        nodes = self.graph.snapshot()["nodes"]
        assert list(nodes) == list(self.expected.calls)
        for node, call in self.expected.calls.items():
            found = nodes[node]
            assert (found["status"], found["kind"], found["parent_id"]) == (call.status, call.kind, call.parent)
            assert (found["tokens_in"], found["tokens_out"]) == (call.tokens_in, call.tokens_out)
            assert (nanos(found["cost_usd"]), found["retries_used"]) == (call.cost, call.retries)
            assert (found["end_ts_ms"] is not None) == (call.status in TERMINAL)

    @invariant()
    def totals_are_exact_and_never_go_down(self) -> None:
        found = {
            name: nanos(figure) if name.endswith("_usd") else figure for name, figure in self.graph.aggregates.items()
        }
        assert found == self.expected.aggregates()
        assert all(found[name] >= figure for name, figure in self.before.items())
        self.before = found

    @invariant()
    def the_log_has_one_start_and_at_most_one_end_for_each_call(self) -> None:
        events = self.graph.events()
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        started = [event.node_id for event in events if isinstance(event, CallStarted)]
        ended = [event.node_id for event in events if isinstance(event, CallEnded)]
        assert started == list(self.expected.calls)
        assert sorted(ended) == sorted(node for node, call in self.expected.calls.items() if call.status in TERMINAL)


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.requirement("G-4", "G-6", "G-7")
class TestAnyOrder(AnyOrder.TestCase):  # type: ignore[misc,valid-type]
    """The machine above, as a test."""


@pytest.mark.requirement("G-7")
def test_a_retry_joins_the_totals_once_and_only_when_its_call_ends() -> None:
    graph, node = call_in("running")
    graph.increment_retries(node)
    graph.increment_retries(node)
    assert node_of(graph, node)["retries_used"] == 2
    assert graph.aggregates["total_retries"] == 0
    graph.mark_failure(node, "TimeoutError")
    graph.mark_failure(node, "TimeoutError")
    assert graph.aggregates["total_retries"] == 2
