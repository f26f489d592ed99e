"""`ContextSnapshot.graph`: the call tree of the snapshot's own moment, rendered only if it is read."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest

from penstock import ContextSnapshot, ExecutionConfig, ExecutionContext, ExecutionGraph, RunSettings, WrapOptions
from penstock.testing import ManualClock
from penstock.tracing import execution_graph, views
from penstock.tracing.graph_state import GraphState


def fails() -> None:
    raise ValueError("no answer")


@pytest.mark.requirement("C-12", "G-8")
def test_a_snapshot_carries_the_call_tree() -> None:
    clock = ManualClock()
    run = ExecutionContext(ExecutionConfig(0.50, None, None), clock=clock)
    run.llm(lambda: run.tool(lambda: 1, name="search"), name="plan", cost_hint_usd=0.25)
    run.wrap_llm_call(lambda: 1, WrapOptions("ask", cost_estimate_hint=0.40))
    run.wrap_tool_call(fails)
    snapshot = run.get_snapshot()
    assert snapshot.graph == run.graph.snapshot()
    assert snapshot.graph is snapshot.graph
    assert snapshot.graph["seq"] == snapshot.seq
    assert [node["status"] for node in snapshot.graph["nodes"].values()] == [
        "running",
        "success",
        "success",
        "halt",
        "fail",
    ]
    assert snapshot.graph["nodes"]["n000003"]["parent_id"] == "n000002"
    assert snapshot.graph["aggregates"]["total_cost_usd"] == 0.25


@pytest.mark.requirement("C-12", "G-8")
@pytest.mark.parametrize("max_kept", [None, 1, 5, 40])
@pytest.mark.parametrize("counted", [True, False])
def test_the_call_tree_is_that_of_its_moment_however_late_it_is_read(
    max_kept: int | None, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_graph, "TRIM_CHUNK", 16)
    clock = ManualClock()
    run = ExecutionContext(clock=clock, settings=RunSettings(max_kept_calls=max_kept, sync_calls="inline"))
    taken: list[tuple[ContextSnapshot, dict[str, Any]]] = []

    def look() -> None:
        clock.advance(1)
        # The graph's own snapshot brings its sums up to date; reading that of a context does not.
        taken.append((run.get_snapshot(), run.graph.snapshot() if counted else run.get_snapshot().graph))

    def answer(depth: int) -> str:
        look()
        run.report(cost_usd=0.01, input_tokens=10, output_tokens=1, model=f"model-{depth}")
        if depth:
            run.call_llm(lambda: answer(depth - 1), WrapOptions(f"call-{depth}", retry_policy_override=1))
        look()
        return "…"

    for number in range(15):
        with run.spawn_child("child") as child:
            child.call_llm(lambda: answer(3), WrapOptions(f"top-{number}"))
            child.wrap_tool_call(fails, WrapOptions(retry_policy_override=2))
            look()
        outcome = run.call_llm(fails, WrapOptions("late", cost_estimate_hint=0.5))
        look()
        outcome.call.settle(cost_usd=0.4, input_tokens=3, output_tokens=4)
        look()
    run.end()
    look()
    assert (run.graph.dropped_events > 0) is (max_kept is not None)
    for lazy, eager in reversed(taken):
        assert lazy.graph == eager


@pytest.mark.requirement("C-12")
def test_a_node_under_way_is_rendered_as_it_was() -> None:
    run = ExecutionContext()
    taken: list[ContextSnapshot] = []

    def ask() -> str:
        taken.append(run.get_snapshot())
        run.report(model="found-later", cost_usd=0.1)
        return "…"

    run.llm(ask, name="ask")
    run.end()
    node = taken[0].graph["nodes"]["n000002"]
    assert (node["status"], node["model"], node["end_ts_ms"], node["cost_usd"]) == ("running", None, None, 0.0)
    assert run.get_snapshot().graph["nodes"]["n000002"]["model"] == "found-later"


@pytest.mark.requirement("G-8", "G-11")
def test_a_call_that_outlived_its_folded_parent_hangs_where_it_did_although_it_is_folded_since() -> None:
    graph = ExecutionGraph(clock=ManualClock(), max_kept=4)
    root = graph.create_root("root")

    def finished(count: int) -> None:
        for _ in range(count):
            graph.mark_success(graph.begin_node(root, "tool", "filler"))

    parent = graph.begin_node(root, "llm", "parent")
    child = graph.begin_node(parent, "tool", "child")
    graph.mark_success(parent)
    finished(4)
    graph.mark_success(child)
    eager = graph.snapshot()
    with graph.lock:
        lazy = GraphState(graph._capture())
    assert parent not in eager["nodes"]
    assert eager["nodes"][child]["parent_id"] == root
    finished(8)
    assert child not in graph.snapshot()["nodes"]
    assert lazy.render() == eager


def test_a_snapshot_whose_graph_is_not_read_renders_no_finished_call(monkeypatch: pytest.MonkeyPatch) -> None:
    run, rendered = ExecutionContext(), list[str]()
    render = views.node

    def counting(call: Any, *more: Any) -> dict[str, Any]:
        rendered.append(call.node_id)
        return render(call, *more)

    monkeypatch.setattr(views, "node", counting)
    for _ in range(100):
        run.tool(lambda: 1)
    snapshot = run.get_snapshot()
    assert rendered == ["n000001"]  # the root, which is under way
    assert len(snapshot.graph["nodes"]) == len(rendered) == 101
    assert len(snapshot.graph["nodes"]) == len(rendered)


def test_a_snapshot_can_be_copied_pickled_and_made_into_data() -> None:
    run = ExecutionContext()
    run.tool(lambda: 1, name="search")
    tree = run.get_snapshot().graph
    for made in (copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), dataclasses.replace):
        snapshot = run.get_snapshot()
        again = made(snapshot)
        assert again == snapshot
        assert again.graph["nodes"] == tree["nodes"]
    assert dataclasses.asdict(run.get_snapshot())["graph"]["nodes"] == tree["nodes"]
    assert json.loads(json.dumps(run.get_snapshot().graph))["nodes"] == tree["nodes"]
    assert "aggregates" not in repr(run.get_snapshot())
