"""The call tree reads as a tree, whatever its size, its depth and the names in it."""

from __future__ import annotations

import pytest

from penstock.testing import ManualClock
from penstock.tracing.execution_graph import ExecutionGraph
from penstock.tracing.explain import MAX_LINES, explain


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def chain(depth: int) -> ExecutionGraph:
    graph = ExecutionGraph("run")
    node = graph.create_root("root")
    for _ in range(depth):
        node = graph.begin_node(node, "system", "deeper")
    return graph


def test_an_empty_graph_is_an_empty_text() -> None:
    assert explain(ExecutionGraph("run")) == ""


def test_a_small_tree_reads_like_this(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock)
    root = graph.create_root("agent")
    plan = graph.begin_node(root, "llm", "plan", model="large-1")
    graph.mark_running(plan)
    search = graph.begin_node(plan, "tool", "search")
    clock.advance(0.25)
    graph.mark_success(search, tokens_in=0)
    read = graph.begin_node(plan, "tool", "read")
    clock.advance(0.5)
    graph.mark_failure(read, "TimeoutError", "no answer", cost_usd="0.001")
    clock.advance(1)
    graph.mark_success(plan, 0.0425, tokens_in=1_200, tokens_out=80)
    refused = graph.begin_node(root, "llm", "write", model="large-1")
    graph.mark_halt(refused, "budget_exceeded: $0.05 of $0.05 used")
    broken = graph.begin_node(root, "tool", "parse")
    graph.mark_failure(broken, "ValueError")
    running = graph.begin_node(root, "system", "wait")
    graph.mark_running(running)
    graph.begin_node(running, "llm", "next")

    assert explain(graph).splitlines() == [
        "… agent  $0.0435",
        "├─ ✓ plan  llm large-1  $0.0425  1200→80 tokens  1.75 s",
        "│  ├─ ✓ search  tool  250.0 ms",
        "│  └─ ✗ read  tool  $0.001  500.0 ms  TimeoutError: no answer",
        "├─ ■ write  llm large-1  0.0 ms  budget_exceeded: $0.05 of $0.05 used",
        "├─ ✗ parse  tool  0.0 ms  ValueError",
        "└─ … wait",
        "   └─ · next  llm",
    ]


def test_a_late_bill_is_shown_with_its_call(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock)
    call = graph.call(graph.begin_node(graph.create_root("agent"), "llm", "ask"))
    graph.end(call, clock.monotonic_ns(), "halt", stop_reason="timeout", abandoned=True)
    assert explain(graph).splitlines()[1] == "└─ ■ ask  llm  0.0 ms  timeout  abandoned"
    graph.settle_late(call, clock.monotonic_ns(), 2_500_000, 10, 5)
    line = "└─ ■ ask  llm  $0.0025  10→5 tokens  0.0 ms  timeout  abandoned, settled late"
    assert explain(graph).splitlines()[1] == line


@pytest.mark.requirement("G-11")
def test_folded_calls_are_mentioned_where_they_were(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock, max_kept=2)
    root = graph.create_root("agent")
    for _ in range(3):
        graph.mark_success(graph.begin_node(root, "tool", "step"), "0.10")
    assert explain(graph).splitlines() == [
        "… agent  $0.30  (2 more calls folded, $0.20)",
        "└─ ✓ step  tool  $0.10  0.0 ms",
    ]


@pytest.mark.requirement("G-11")
def test_a_call_whose_parent_was_folded_is_below_the_nearest_kept_call(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock, max_kept=2)
    root = graph.create_root("agent")
    gone = graph.begin_node(root, "system", "gone")
    still_open = graph.begin_node(gone, "tool", "still open")
    graph.mark_success(gone, "0.10")
    graph.begin_node(still_open, "system", "inner")
    assert explain(graph).splitlines() == [
        "… agent  $0.10  (1 more calls folded, $0.10)",
        "└─ · still open  tool",
        "   └─ · inner",
    ]


@pytest.mark.requirement("G-11")
def test_the_cost_of_a_context_includes_calls_below_a_folded_call(clock: ManualClock) -> None:
    graph = ExecutionGraph("run", clock=clock, max_kept=2)
    root = graph.create_root("agent")
    gone = graph.begin_node(root, "system", "gone")
    last = graph.begin_node(gone, "tool", "last")
    graph.mark_success(gone, "0.10")
    graph.mark_success(last, "0.20")
    assert explain(graph).splitlines() == [
        "… agent  $0.30  (1 more calls folded, $0.10)",
        "└─ ✓ last  tool  $0.20  0.0 ms",
    ]


@pytest.mark.parametrize("depth", [10_000, 100_000])
def test_a_chain_deeper_than_the_stack_is_explained_in_bounded_lines(depth: int) -> None:
    lines = explain(chain(depth)).splitlines()
    assert len(lines) == MAX_LINES + 1
    assert lines[-1] == f"… and {depth + 1 - MAX_LINES} more calls"
    assert max(map(len, lines)) < 4 * MAX_LINES


def test_a_chain_can_be_explained_in_full() -> None:
    lines = explain(chain(2_000), max_lines=10_000).splitlines()
    assert len(lines) == 2_001
    assert lines[2] == "   └─ · deeper"


def test_a_wide_tree_is_cut_too() -> None:
    graph = ExecutionGraph("run")
    root = graph.create_root("root")
    for _ in range(50):
        graph.begin_node(root, "tool", "step")
    lines = explain(graph, max_lines=10).splitlines()
    assert lines[0] == "… root"
    assert lines[1:10] == ["├─ · step  tool"] * 9
    assert lines[10:] == ["… and 41 more calls"]


@pytest.mark.parametrize(
    "odd",
    ["two\nlines", "carriage\rreturn", "\x1b[31mred\x1b[0m", "bell\x07", "right\u202eleft", "lone \ud800", "nul\x00"],
    ids=ascii,
)
def test_every_text_is_made_printable(odd: str) -> None:
    graph = ExecutionGraph("run")
    root = graph.create_root(odd)
    graph.mark_failure(graph.begin_node(root, "llm", odd, model=odd), odd, odd)
    graph.mark_halt(graph.begin_node(root, "tool", odd), odd)
    text = explain(graph)
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text.splitlines()) == 3
    text.encode()


def test_names_in_any_script_are_left_alone() -> None:
    graph = ExecutionGraph("run")
    graph.create_root("検索 – Überprüfung 🔎")
    assert explain(graph) == "… 検索 – Überprüfung 🔎"


def test_what_looks_like_a_secret_is_not_shown() -> None:
    graph = ExecutionGraph("run")
    call = graph.begin_node(graph.create_root("agent"), "tool", "https://joe:hunter2@host/")
    graph.mark_running(call)
    graph.mark_failure(call, "ValueError", "refused: Bearer abc.def.ghi")
    text = explain(graph)
    assert "hunter2" not in text
    assert "abc.def" not in text
    assert "refused: Bearer [redacted]" in text
