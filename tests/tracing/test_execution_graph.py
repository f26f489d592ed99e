"""The call tree of a run: one root, ids that are never reused, totals that are exact, snapshots that stay true."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import json
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from decimal import Decimal
from types import FrameType, MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ExecutionContext, RunSettings
from penstock.errors import InvalidValue, RunEnded
from penstock.ids import call_number
from penstock.testing import ManualClock
from penstock.tracing.events import CallEnded, CallStarted, CustomTrace, RunCompleted
from penstock.tracing.execution_graph import EVENTS_PER_CALL_KEPT, TRIM_CHUNK, ExecutionGraph
from penstock.tracing.explain import explain
from penstock.tracing.lifecycle import TERMINAL
from penstock.tracing.record import ONLY_COST_UNKNOWN, CallRecord, Source
from tests.soak import scaled

NANOS = 1_000_000_000
START_MS = 1_767_225_600_000
"""Where a ManualClock's wall time starts."""

FIELDS = [
    "node_id",
    "parent_id",
    "kind",
    "name",
    "start_ts_ms",
    "end_ts_ms",
    "status",
    "model",
    "retries_used",
    "cost_usd",
    "tokens_in",
    "tokens_out",
    "stop_reason",
    "error_class",
    "metadata",
]


def nanos(usd: float) -> int:
    return round(usd * NANOS)


def rooted(**how: Any) -> tuple[ExecutionGraph, str]:
    graph = ExecutionGraph("run", **how)
    return graph, graph.create_root("root")


def node_of(graph: ExecutionGraph, node_id: str) -> dict[str, Any]:
    found: dict[str, Any] = graph.snapshot()["nodes"][node_id]
    return found


def closing(graph: ExecutionGraph) -> None:
    with graph.lock:
        graph.close(RunCompleted(seq=graph.seq + 1))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)`, `work(1)`, … in threads that begin together; what one of them raises is raised here."""
    together = threading.Barrier(count)

    def begin(n: int) -> None:
        together.wait()
        work(n)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, n) for n in range(count)]:
            done.result()


@contextmanager
def switching_at_every_line() -> Iterator[None]:
    """Threads started inside give way at each line of the code under test: races that are possible do happen."""

    def give_way(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_globals["__name__"].startswith("penstock."):
            return None
        time.sleep(0)
        return give_way

    threading.settrace(give_way)
    try:
        yield
    finally:
        threading.settrace(None)


@pytest.fixture
def fast_switching() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


# Ids.


@pytest.mark.requirement("G-1")
def test_ids_are_counted_from_one_with_six_digits() -> None:
    graph, root = rooted()
    ids = [root, *(graph.begin_node(root, "tool", "step") for _ in range(3))]
    assert ids == ["n000001", "n000002", "n000003", "n000004"]
    assert list(graph.snapshot()["nodes"]) == ids


@pytest.mark.requirement("G-1")
def test_ids_go_on_past_six_digits_in_order() -> None:
    graph, root = rooted()
    graph._last_number = 999_997
    ids = [graph.begin_node(root, "tool", "step") for _ in range(4)]
    assert ids == ["n999998", "n999999", "n1000000", "n1000001"]
    assert list(graph.snapshot()["nodes"]) == [root, *ids]
    assert sorted(ids, key=call_number) == ids
    child = graph.begin_node("n1000000", "llm", "below")
    assert (child, node_of(graph, child)["parent_id"]) == ("n1000002", "n1000000")


@pytest.mark.requirement("G-1")
def test_an_id_is_not_used_again_when_its_call_has_ended_failed_or_been_folded() -> None:
    graph, root = rooted(max_kept=2)
    ids = []
    for n in range(50):
        ids.append(graph.begin_node(root, "tool", "step"))
        with pytest.raises(InvalidValue):
            graph.begin_node(root, "nonsense", "step")  # type: ignore[arg-type]
        graph.mark_failure(ids[-1], "ValueError") if n % 2 else graph.mark_success(ids[-1])
    assert ids == [f"n{n:06d}" for n in range(2, 52)]


def test_a_run_without_a_chain_id_gets_one_of_its_own() -> None:
    one, other = ExecutionGraph(), ExecutionGraph()
    assert one.chain_id != other.chain_id
    assert one.snapshot()["chain_id"] == one.chain_id
    assert ExecutionGraph("given").snapshot()["chain_id"] == "given"


# The root.


@pytest.mark.requirement("G-2")
def test_the_root_is_a_running_system_call_at_depth_zero() -> None:
    graph, root = rooted()
    node = node_of(graph, root)
    assert (node["kind"], node["status"], node["parent_id"]) == ("system", "running", None)
    assert graph.call(root).depth == 0
    assert graph.snapshot()["root_id"] == root
    assert graph.aggregates["max_depth"] == 0


@pytest.mark.requirement("G-2")
def test_there_is_no_second_root() -> None:
    graph, root = rooted()
    with pytest.raises(RuntimeError, match="n000001"):
        graph.create_root("another")
    graph.mark_success(root)
    with pytest.raises(RuntimeError):
        graph.create_root("another")
    assert list(graph.snapshot()["nodes"]) == [root]


@pytest.mark.requirement("G-2")
@pytest.mark.usefixtures("fast_switching")
def test_of_many_threads_that_make_the_root_one_does() -> None:
    for _ in range(20):
        graph = ExecutionGraph("run")
        refused: list[RuntimeError] = []

        def make(n: int, graph: ExecutionGraph = graph, refused: list[RuntimeError] = refused) -> None:
            try:
                graph.create_root(f"root {n}")
            except RuntimeError as error:
                refused.append(error)

        in_threads(8, make)
        assert len(refused) == 7
        assert len(graph.snapshot()["nodes"]) == 1


def test_a_graph_without_a_root_is_empty_and_has_nothing_to_hang_a_call_on() -> None:
    graph = ExecutionGraph("run")
    snapshot = graph.snapshot()
    assert (snapshot["root_id"], snapshot["nodes"], snapshot["seq"]) == (None, {}, 0)
    assert all(figure == 0 for figure in snapshot["aggregates"].values())
    with pytest.raises(KeyError, match="n000001"):
        graph.begin_node("n000001", "tool", "step")


# Parents and depth.


@pytest.mark.requirement("G-3")
@pytest.mark.parametrize(
    "unknown",
    [
        "n000002",
        "n000000",
        "n999999",
        "n0000001",
        "n1",
        "N000001",
        "000001",
        "",
        "n-00001",
        "n00000१",
        "n" + "9" * 5_000,
    ],
    ids=lambda unknown: unknown[:12] or "empty",
)
def test_a_call_under_an_unknown_parent_is_refused_by_name(unknown: str) -> None:
    graph, root = rooted()
    with pytest.raises(KeyError) as refused:
        graph.begin_node(unknown, "tool", "step")
    assert repr(unknown) in str(refused.value.args[0])
    assert list(graph.snapshot()["nodes"]) == [root]
    assert graph.seq == 1
    for mark in (graph.mark_running, graph.mark_success, graph.mark_halt, graph.increment_retries, graph.call):
        with pytest.raises(KeyError):
            mark(unknown)
    with pytest.raises(KeyError):
        graph.mark_failure(unknown, "ValueError")


@pytest.mark.requirement("G-3")
@pytest.mark.parametrize("unknown", [None, 1, b"n000001", ("n000001",), object])
def test_a_malformed_id_is_an_unknown_parent_too(unknown: Any) -> None:
    graph, _ = rooted()
    with pytest.raises(KeyError):
        graph.begin_node(unknown, "tool", "step")


@pytest.mark.requirement("G-3")
def test_a_call_is_one_deeper_than_its_parent_and_max_depth_follows() -> None:
    graph, root = rooted()
    deepest = []
    nodes = [root]
    for parent in (0, 0, 1, 3, 3, 4, 2):
        nodes.append(graph.begin_node(nodes[parent], "tool", "step"))
        deepest.append(graph.aggregates["max_depth"])
    assert [graph.call(node).depth for node in nodes] == [0, 1, 1, 2, 3, 3, 4, 2]
    assert deepest == [1, 1, 2, 3, 3, 4, 4]
    assert graph.snapshot()["aggregates"]["max_depth"] == 4
    assert [node_of(graph, node)["parent_id"] for node in nodes[1:]] == [nodes[n] for n in (0, 0, 1, 3, 3, 4, 2)]


@pytest.mark.requirement("G-3")
def test_a_call_may_be_made_by_one_that_has_ended() -> None:
    graph, root = rooted()
    ended = graph.begin_node(root, "tool", "step")
    graph.mark_success(ended)
    late = graph.begin_node(ended, "tool", "after")
    assert graph.call(late).depth == 2


# Fields.


@pytest.mark.requirement("G-5")
def test_a_node_has_these_fifteen_fields(clock: ManualClock) -> None:
    graph, root = rooted(clock=clock)
    clock.advance(0.05)
    node = graph.begin_node(root, "llm", "plan", model="large-1", metadata={"request_id": "r-1"})
    graph.mark_running(node)
    graph.increment_retries(node)
    clock.advance(1.15)
    graph.mark_success(node, 0.0042, tokens_in=120, tokens_out=80)
    assert list(node_of(graph, root)) == list(node_of(graph, node)) == FIELDS
    assert node_of(graph, node) == {
        "node_id": "n000002",
        "parent_id": "n000001",
        "kind": "llm",
        "name": "plan",
        "start_ts_ms": START_MS + 50,
        "end_ts_ms": START_MS + 1_200,
        "status": "success",
        "model": "large-1",
        "retries_used": 1,
        "cost_usd": 0.0042,
        "tokens_in": 120,
        "tokens_out": 80,
        "stop_reason": None,
        "error_class": None,
        "metadata": {"request_id": "r-1"},
    }


@pytest.mark.requirement("G-5")
def test_figures_that_are_not_known_yet_are_none(clock: ManualClock) -> None:
    graph, root = rooted(clock=clock)
    node = node_of(graph, graph.begin_node(root, "tool", "search"))
    assert [node[name] for name in ("end_ts_ms", "tokens_in", "tokens_out", "stop_reason", "error_class")] == [None] * 5
    assert (node["cost_usd"], node["retries_used"], node["metadata"]) == (0.0, 0, {})


@pytest.mark.requirement("G-5")
def test_a_failure_carries_its_class_its_reason_and_its_bill() -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask")
    graph.mark_failure(node, "RateLimitError", "429", cost_usd=0.5, tokens_in=10, tokens_out=0)
    found = node_of(graph, node)
    assert (found["status"], found["error_class"], found["stop_reason"]) == ("fail", "RateLimitError", "429")
    assert (found["cost_usd"], found["tokens_in"], found["tokens_out"]) == (0.5, 10, 0)


@pytest.mark.requirement("G-5")
def test_a_halt_carries_its_reason_and_its_bill() -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask")
    graph.mark_halt(node, "cost ceiling exceeded", cost_usd="0.25", tokens_in=4, tokens_out=2)
    found = node_of(graph, node)
    assert (found["status"], found["error_class"], found["stop_reason"]) == ("halt", None, "cost ceiling exceeded")
    assert (found["cost_usd"], found["tokens_in"], found["tokens_out"]) == (0.25, 4, 2)


@pytest.mark.requirement("G-5")
def test_a_jump_of_the_wall_clock_does_not_reorder_a_run(clock: ManualClock) -> None:
    graph, root = rooted(clock=clock)
    clock.jump_wall(-86_400)
    clock.advance(2)
    node = graph.begin_node(root, "tool", "step")
    clock.jump_wall(86_400 * 2)
    clock.advance(1)
    graph.mark_success(node)
    snapshot = graph.snapshot()
    found = snapshot["nodes"][node]
    assert (found["start_ts_ms"], found["end_ts_ms"]) == (START_MS + 2_000, START_MS + 3_000)
    assert snapshot["snapshot_ts_ms"] == START_MS + 3_000


# Totals.


@pytest.mark.requirement("G-6")
def test_successes_failures_and_halts_are_summed_apart() -> None:
    graph, root = rooted()
    for kind, mark, figures in (
        ("llm", graph.mark_success, ("0.1", 10, 1)),
        ("llm", graph.mark_success, ("0.2", 20, 2)),
        ("tool", graph.mark_success, ("0.000000003", None, None)),
        ("system", graph.mark_success, ("0.000000004", 1, None)),
        ("llm", graph.mark_halt, ("0.01", 5, 6)),
    ):
        cost, tokens_in, tokens_out = figures
        node = graph.begin_node(root, kind, "call")  # type: ignore[arg-type]
        mark(node, cost_usd=cost, tokens_in=tokens_in, tokens_out=tokens_out)
    failed = graph.begin_node(root, "tool", "call")
    graph.increment_retries(failed)
    graph.mark_failure(failed, "ValueError", cost_usd="0.5", tokens_in=7, tokens_out=8)
    graph.begin_node(root, "llm", "open")
    assert graph.aggregates == graph.snapshot()["aggregates"]
    assert graph.aggregates == {
        "total_cost_usd": 0.300000007,
        "total_llm_calls": 2,
        "total_tool_calls": 1,
        "total_retries": 1,
        "total_tokens_in": 31,
        "total_tokens_out": 3,
        "max_depth": 1,
        "failed_calls": 1,
        "failed_cost_usd": 0.5,
        "failed_tokens_in": 7,
        "failed_tokens_out": 8,
        "halted_calls": 1,
        "halted_cost_usd": 0.01,
        "halted_tokens_in": 5,
        "halted_tokens_out": 6,
    }


@pytest.mark.requirement("G-6")
def test_a_hundred_failures_of_half_a_dollar_are_fifty_dollars() -> None:
    graph, root = rooted()
    for _ in range(100):
        graph.mark_failure(graph.begin_node(root, "llm", "ask"), "ServerError", cost_usd=0.5)
    assert graph.aggregates["failed_cost_usd"] == 50.0
    assert graph.aggregates["total_cost_usd"] == 0.0


@pytest.mark.requirement("G-7")
@given(st.lists(st.integers(0, 10**12), max_size=30))
def test_sums_are_exact_to_the_nano_dollar_and_never_go_down(costs: list[int]) -> None:
    graph, root = rooted()
    seen = [0]
    for cost in costs:
        graph.mark_success(graph.begin_node(root, "llm", "ask"), Decimal(cost) / NANOS)
        seen.append(nanos(graph.aggregates["total_cost_usd"]))
    assert seen == list(itertools.accumulate(costs, initial=0))


# Bad input.

NO_COSTS = [
    float("nan"),
    float("inf"),
    -float("inf"),
    -0.01,
    -1,
    True,
    None,
    "free",
    "NaN",
    "-1",
    [1],
    1e30,
    "1e999999",
]
NO_COUNTS = [float("nan"), 1.0, 1.5, -1, True, "5", [1], 10**5_000]


@pytest.mark.requirement("G-5")
@pytest.mark.parametrize("cost", NO_COSTS, ids=repr)
def test_an_invalid_amount_of_money_is_refused_by_name(cost: Any) -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask")
    with pytest.raises(InvalidValue, match="cost_usd"):
        graph.mark_success(node, cost)
    with pytest.raises(InvalidValue, match="cost_usd"):
        graph.mark_failure(node, "ValueError", cost_usd=cost)
    with pytest.raises(InvalidValue, match="cost_usd"):
        graph.mark_halt(node, cost_usd=cost)
    assert node_of(graph, node)["status"] == "created"
    assert graph.seq == 2


@pytest.mark.requirement("G-5")
@pytest.mark.parametrize("field", ["tokens_in", "tokens_out"])
@pytest.mark.parametrize("count", NO_COUNTS, ids=lambda count: "huge" if count == 10**5_000 else repr(count))
def test_an_invalid_number_of_tokens_is_refused_by_name(field: str, count: Any) -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask")
    with pytest.raises(InvalidValue, match=field):
        graph.mark_success(node, **{field: count})
    with pytest.raises(InvalidValue, match=field):
        graph.mark_failure(node, "ValueError", **{field: count})
    with pytest.raises(InvalidValue, match=field):
        graph.mark_halt(node, **{field: count})
    assert node_of(graph, node)["status"] == "created"
    json.dumps(graph.snapshot())


@pytest.mark.requirement("G-5")
@pytest.mark.parametrize("kind", ["", "LLM", "agent", None, 1, ["llm"], {"llm"}], ids=repr)
def test_an_unknown_kind_is_refused(kind: Any) -> None:
    graph, root = rooted()
    with pytest.raises(InvalidValue, match="kind must be"):
        graph.begin_node(root, kind, "step")
    assert graph.seq == 1


@pytest.mark.requirement("G-5")
@pytest.mark.parametrize("wrong", [5, b"text", ["text"], ValueError], ids=repr)
def test_fields_of_text_accept_only_text(wrong: Any) -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask")
    for field, act in (
        ("name", lambda: ExecutionGraph("other").create_root(wrong)),
        ("name", lambda: graph.begin_node(root, "tool", wrong)),
        ("model", lambda: graph.begin_node(root, "tool", "step", wrong)),
        ("error_class", lambda: graph.mark_failure(node, wrong)),
        ("stop_reason", lambda: graph.mark_failure(node, "ValueError", wrong)),
        ("stop_reason", lambda: graph.mark_halt(node, wrong)),
        ("metadata", lambda: graph.begin_node(root, "tool", "step", metadata=wrong)),
    ):
        with pytest.raises(InvalidValue, match=f"{field} must be"):
            act()
    assert graph.seq == 2
    assert node_of(graph, node)["status"] == "created"


@pytest.mark.parametrize("cap", [0, -1, True, 1.5, "many", float("inf")], ids=repr)
def test_a_cap_that_is_no_number_of_calls_is_refused(cap: Any) -> None:
    with pytest.raises(InvalidValue, match="max_kept"):
        ExecutionGraph("run", max_kept=cap)


ODD_NAMES = [
    "",
    "\ud800",
    "two\nlines",
    "\x1b[2J\x1b[31m",
    "\x00",
    "\u202e",
    "n000001",
    "a/b/../c",
    "🔎",
    "x" * 100_000,
]


@pytest.mark.requirement("G-8")
@pytest.mark.parametrize("name", ODD_NAMES, ids=lambda name: ascii(name[:8]))
def test_any_text_is_a_valid_name_and_is_returned_unchanged(name: str) -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", name, model=name, metadata={name: name})
    graph.mark_failure(node, name, name)
    again = json.loads(json.dumps(graph.snapshot(), allow_nan=False))["nodes"][node]
    assert (again["name"], again["model"], again["error_class"], again["stop_reason"]) == (name,) * 4
    assert graph.stats(Source("other")).total_cost == 0
    assert [event.to_dict()["name"] for event in graph.events(since=1)] == [name, name]


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def cyclic() -> dict[str, Any]:
    itself: dict[str, Any] = {"a": 1}
    itself["itself"] = itself
    return itself


@pytest.mark.requirement("G-8")
@pytest.mark.parametrize(
    "metadata",
    [
        cyclic(),
        {"huge": list(range(1_000_000))},
        {str(n): n for n in range(100_000)},
        {"text": "x" * 10_000_000},
        {"bytes": b"\xff" * 10, "bytearray": bytearray(5)},
        {"at": datetime(2026, 1, 1, tzinfo=UTC), "amount": Decimal("NaN")},
        {"nan": float("nan"), "inf": float("inf"), "digits": 10**5_000},
        {"set": {1, 2}, ("a", "tuple"): [1], None: None, 5: 5},
        {"object": object(), "unshowable": Unshowable(), Unshowable(): 1, "class": Unshowable},
        {"\ud800": "\ud800\x00\n\x1b"},
        MappingProxyType({"a": 1}),
    ],
    ids=["cycle", "list", "keys", "text", "bytes", "dates", "numbers", "odd keys", "objects", "unicode", "proxy"],
)
def test_any_metadata_can_be_recorded_and_shown(metadata: Any) -> None:
    graph = ExecutionGraph("run")
    root = graph.create_root("root", metadata)
    graph.mark_success(graph.begin_node(root, "tool", "step", metadata=metadata))
    assert len(json.dumps(graph.snapshot(), allow_nan=False)) < 2_000_000
    for event in graph.events():
        json.dumps(event.to_dict(), allow_nan=False)
    assert explain(graph)


# After the end.


@pytest.mark.requirement("G-4")
def test_nothing_is_begun_or_marked_once_the_run_has_ended() -> None:
    graph, root = rooted()
    left_open = graph.begin_node(root, "llm", "ask")
    ended = graph.begin_node(root, "tool", "search")
    graph.mark_success(ended, 0.5)
    closing(graph)
    before = graph.snapshot()
    for act in (
        lambda: graph.begin_node(root, "tool", "step"),
        lambda: graph.mark_running(left_open),
        lambda: graph.mark_success(left_open),
        lambda: graph.mark_failure(left_open, "ValueError"),
        lambda: graph.mark_halt(left_open),
        lambda: graph.increment_retries(left_open),
    ):
        with pytest.raises(RunEnded, match="run run has ended"):
            act()
    graph.mark_failure(ended, "ValueError")
    assert graph.closed
    assert graph.snapshot() | {"snapshot_ts_ms": 0} == before | {"snapshot_ts_ms": 0}
    assert isinstance(graph.events()[-1], RunCompleted)


def test_a_run_that_ended_without_a_root_gets_none() -> None:
    graph = ExecutionGraph("run")
    closing(graph)
    with pytest.raises(RunEnded):
        graph.create_root("late")
    assert graph.root is None


def test_a_bill_that_comes_after_the_end_of_the_run_is_not_recorded() -> None:
    graph, root = rooted()
    call = graph.call(graph.begin_node(root, "llm", "ask"))
    with graph.lock:
        graph.end(call, 0, "halt", abandoned=True)
    closing(graph)
    with graph.lock:
        graph.settle_late(call, 0, 5, 1, 1)
    assert graph.aggregates["halted_cost_usd"] == 0
    assert isinstance(graph.events()[-1], RunCompleted)


def test_open_calls_are_listed_newest_first() -> None:
    graph, root = rooted()
    nodes = [graph.begin_node(root, "tool", "step") for _ in range(4)]
    graph.mark_success(nodes[1])
    with graph.lock:
        assert [call.node_id for call in graph.open_calls()] == [nodes[3], nodes[2], nodes[0], root]


def test_the_notify_callback_runs_after_every_entry() -> None:
    graph = ExecutionGraph("run")
    notified: list[int] = []
    graph.notify = lambda: notified.append(graph.seq)
    root = graph.create_root("root")
    call = graph.call(graph.begin_node(root, "llm", "ask"))
    graph.mark_halt(call.node_id)
    with graph.lock:
        graph.settle_late(call, 0, 1, 0, 0)
        graph.append(CustomTrace(seq=graph.seq + 1))
    closing(graph)
    assert notified == [1, 2, 3, 4, 5, 6]


# Snapshots.


@pytest.mark.requirement("G-8")
def test_a_snapshot_is_json_and_says_when_and_for_which_seq_it_is_true(clock: ManualClock) -> None:
    graph, root = rooted(clock=clock)
    clock.advance(3)
    graph.mark_success(graph.begin_node(root, "tool", "step"))
    snapshot = graph.snapshot()
    assert list(snapshot) == ["chain_id", "root_id", "nodes", "aggregates", "seq", "snapshot_ts_ms"]
    assert json.loads(json.dumps(snapshot, allow_nan=False)) == snapshot
    assert (snapshot["seq"], snapshot["snapshot_ts_ms"]) == (3, START_MS + 3_000)


@pytest.mark.requirement("G-8")
def test_a_snapshot_does_not_change_with_the_graph_or_its_arguments() -> None:
    nested: dict[str, Any] = {"list": [1], "deep": {"a": [{"b": 1}]}}
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask", metadata=nested)
    snapshot = graph.snapshot()
    before = json.dumps(snapshot)
    nested["deep"]["a"][0]["b"] = 2
    nested["list"].append(2)
    nested["new"] = True
    graph.increment_retries(node)
    graph.mark_success(node, 5, 5, 5)
    graph.begin_node(node, "tool", "below")
    assert json.dumps(snapshot) == before


@pytest.mark.requirement("G-8")
def test_changing_a_snapshot_does_not_change_the_graph() -> None:
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask", metadata={"a": {"b": 1}})
    first = graph.snapshot()
    first["nodes"][node]["metadata"]["a"]["b"] = 2
    first["nodes"][node]["metadata"]["c"] = 3
    first["nodes"].clear()
    first["aggregates"]["total_cost_usd"] = 99
    second = graph.snapshot()
    assert second["nodes"][node]["metadata"] == {"a": {"b": 1}}
    assert second["aggregates"]["total_cost_usd"] == 0


@pytest.mark.requirement("G-8")
def test_metadata_is_copied_when_the_call_begins() -> None:
    given_by_caller = {"a": 1}
    graph, root = rooted()
    node = graph.begin_node(root, "llm", "ask", metadata=given_by_caller)
    given_by_caller["a"] = 2
    assert node_of(graph, node)["metadata"] == {"a": 1}


class WatchedLock:
    """A run's lock that remembers the most CPU time this thread held it for, and can act when it is free again."""

    def __init__(self) -> None:
        self.inner = threading.RLock()
        self.longest_ns = 0
        self.when_free: Callable[[], None] | None = None
        self._depth = 0
        self._since = 0

    def acquire(self) -> bool:
        self.inner.acquire()
        self._depth += 1
        if self._depth == 1:
            self._since = time.thread_time_ns()
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.longest_ns = max(self.longest_ns, time.thread_time_ns() - self._since)
        self.inner.release()
        if self._depth == 0 and self.when_free is not None:
            act, self.when_free = self.when_free, None
            act()

    def __enter__(self) -> WatchedLock:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def busy_graph(size: int) -> tuple[ExecutionGraph, WatchedLock]:
    lock = WatchedLock()
    graph, root = rooted(lock=lock)
    described = {"arguments": list(range(40)), "nested": {"a": {"b": "c"}}}
    for n in range(size - 1):
        node = graph.begin_node(root, "llm", f"call {n}", "large-1", described)
        graph.mark_success(node, 0.001, 10, 10)
    return graph, lock


@pytest.mark.requirement("G-8")
@pytest.mark.reliability
@pytest.mark.parametrize(
    "read",
    [
        ExecutionGraph.snapshot,
        lambda graph: graph.changes_since(0),
        lambda graph: graph.aggregates,
        lambda graph: graph.events(),
        lambda graph: graph.stats(Source("other")),
        explain,
    ],
    ids=["snapshot", "changes_since", "aggregates", "events", "stats", "explain"],
)
def test_reading_ten_thousand_calls_keeps_writers_out_for_less_than_five_ms(read: Callable[..., Any]) -> None:
    longest_ns = []
    for _ in range(3):
        graph, lock = busy_graph(10_000)
        lock.longest_ns = 0
        read(graph)
        assert lock.longest_ns > 0
        longest_ns.append(lock.longest_ns)
    assert min(longest_ns) < 5_000_000


@pytest.mark.requirement("G-8")
@pytest.mark.parametrize("rooted_before", [True, False])
def test_entries_written_during_a_snapshot_are_not_in_it(rooted_before: bool) -> None:
    lock, clock = WatchedLock(), ManualClock()
    graph = ExecutionGraph("run", lock=lock, clock=clock)  # type: ignore[arg-type]
    open_call = graph.begin_node(graph.create_root("root"), "llm", "ask") if rooted_before else None
    calm = graph.snapshot()

    def write() -> None:
        clock.advance(60)
        if open_call is None:
            parent = graph.create_root("root")
        else:
            parent = graph.begin_node(open_call, "tool", "below")
            graph.mark_success(open_call, 5, 5, 5)
        graph.mark_failure(graph.begin_node(parent, "llm", "deeper"), "ValueError", cost_usd=5)

    lock.when_free = write
    disturbed = graph.snapshot()
    assert graph.seq > calm["seq"], "nothing was written: the test shows nothing"
    assert disturbed == calm


@pytest.mark.requirement("G-8", "G-9")
@pytest.mark.reliability
@pytest.mark.usefixtures("fast_switching")
def test_snapshots_taken_while_eight_threads_write_are_true_for_their_seq() -> None:
    graph, root = rooted()
    snapshots: list[dict[str, Any]] = []
    writing = threading.Event()

    def write(worker: int) -> None:
        parent = root
        for n in range(400):
            node = graph.begin_node(parent, "tool" if n % 2 else "llm", f"{worker}.{n}")
            graph.mark_running(node)
            if n % 3 == 0:
                graph.mark_failure(node, "ValueError", cost_usd="0.000000007", tokens_in=2)
            elif n % 7 == 0:
                parent = node
            else:
                graph.mark_success(node, "0.000000011", tokens_in=1, tokens_out=3)

    def read() -> None:
        while not writing.is_set() or len(snapshots) < 5:
            snapshots.append(graph.snapshot())

    reader = threading.Thread(target=read)
    reader.start()
    in_threads(8, write)
    writing.set()
    reader.join()

    events = graph.events()
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert [snapshot["seq"] for snapshot in snapshots] == sorted(snapshot["seq"] for snapshot in snapshots)
    for snapshot in snapshots[:: max(1, len(snapshots) // 50)]:
        assert_true_for(snapshot, events[: snapshot["seq"]])


def assert_true_for(snapshot: dict[str, Any], events: list[Any]) -> None:
    started = {event.node_id: event for event in events if isinstance(event, CallStarted)}
    ended = {event.node_id: event for event in events if isinstance(event, CallEnded)}
    assert snapshot["nodes"].keys() == started.keys()
    depth: dict[str | None, int] = {None: -1}
    for node_id, node in snapshot["nodes"].items():
        depth[node_id] = depth[node["parent_id"]] + 1
        if node_id in ended:
            assert (node["status"], node["cost_usd"]) == (ended[node_id].status, ended[node_id].cost)
        else:
            assert node["status"] in ("created", "running")
            assert (node["end_ts_ms"], node["cost_usd"]) == (None, 0.0)
    totals = snapshot["aggregates"]
    for prefix, status in (("total", "success"), ("failed", "fail")):
        these = [event for event in ended.values() if event.status == status]
        assert nanos(totals[f"{prefix}_cost_usd"]) == sum(event.cost_nanos for event in these)
        assert totals[f"{prefix}_tokens_in"] == sum(event.input_tokens for event in these)
    assert totals["max_depth"] == max(depth.values())


# Changes.


def applied(snapshot: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nodes: dict[str, Any] = snapshot["nodes"] | changes["nodes"]
    return nodes


steps = st.lists(st.tuples(st.sampled_from(["begin", "success", "fail", "halt", "late", "event"]), st.integers(0, 99)))


def take(graph: ExecutionGraph, step: tuple[str, int]) -> None:
    """One step of a random run: `step` names what to do and, roughly, to which call."""
    act, which = step
    _, calls = graph.calls()
    call = calls[which % len(calls)]
    if act == "begin":
        graph.begin_node(call.node_id, "llm", "call")
    elif act == "event":
        with graph.lock:
            graph.append(CustomTrace(seq=graph.seq + 1))
    elif act == "late":
        with graph.lock:
            if not graph.end(call, 0, "halt", abandoned=True):
                graph.settle_late(call, 0, which, 1, 2)
    elif act == "success":
        graph.mark_success(call.node_id, Decimal(which) / NANOS, 1, which)
    elif act == "fail":
        graph.mark_failure(call.node_id, "ValueError", cost_usd=Decimal(which) / NANOS)
    else:
        graph.mark_halt(call.node_id)


@pytest.mark.requirement("G-8")
@given(steps, steps)
def test_the_changes_since_a_snapshot_are_the_difference_to_the_next(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    graph, _ = rooted()
    for step in before:
        take(graph, step)
    first = graph.snapshot()
    for step in after:
        take(graph, step)
    changes, second = graph.changes_since(first["seq"]), graph.snapshot()
    assert (changes["chain_id"], changes["seq"], changes["complete"]) == ("run", second["seq"], True)
    assert applied(first, changes) == second["nodes"]
    different = {id_ for id_, node in second["nodes"].items() if first["nodes"].get(id_) != node}
    assert different <= changes["nodes"].keys()
    json.dumps(changes, allow_nan=False)


@pytest.mark.requirement("G-8")
def test_a_delta_has_only_what_changed() -> None:
    graph, root = rooted()
    nodes = [graph.begin_node(root, "tool", "step") for _ in range(100)]
    seq = graph.seq
    graph.mark_success(nodes[50])
    assert list(graph.changes_since(seq)["nodes"]) == [nodes[50]]
    assert graph.changes_since(graph.seq)["nodes"] == {}


@pytest.mark.requirement("G-8", "G-11")
def test_changes_say_so_when_entries_they_need_are_gone() -> None:
    graph, root = rooted(max_kept=4)
    for _ in range(TRIM_CHUNK):
        graph.mark_success(graph.begin_node(root, "tool", "step"))
    assert graph.dropped_events
    oldest = graph.dropped_events
    assert [graph.changes_since(seq)["complete"] for seq in (0, oldest - 1, oldest, graph.seq)] == [
        False,
        False,
        True,
        True,
    ]


# Threads and tasks.


@pytest.mark.requirement("G-9")
@pytest.mark.reliability
@pytest.mark.usefixtures("fast_switching")
def test_sixty_four_threads_with_a_thousand_calls_each_lose_and_double_nothing() -> None:
    writers, calls = 64, 1_000
    graph, root = rooted()
    ids: list[list[str]] = [[] for _ in range(writers)]
    totals: list[int] = []

    def write(worker: int) -> None:
        for n in range(calls):
            node = graph.begin_node(root, "llm", "ask")
            ids[worker].append(node)
            if n % 10 == 0:
                graph.increment_retries(node)
            if n % 4 == 3:
                graph.mark_failure(node, "ValueError", cost_usd="0.000000005", tokens_in=2)
            else:
                graph.mark_success(node, "0.000000003", tokens_in=1, tokens_out=1)
            if n % 100 == 0:
                totals.append(nanos(graph.aggregates["total_cost_usd"]))

    in_threads(writers, write)
    made = [node for of_one in ids for node in of_one]
    assert len(set(made)) == writers * calls
    assert {call_number(node) for node in made} == set(range(2, writers * calls + 2))
    assert all(of_one == sorted(of_one) for of_one in ids)
    assert graph.seq == 1 + 2 * writers * calls
    found = graph.aggregates
    assert (found["total_llm_calls"], found["failed_calls"]) == (writers * 750, writers * 250)
    assert (nanos(found["total_cost_usd"]), nanos(found["failed_cost_usd"])) == (writers * 2_250, writers * 1_250)
    assert (found["total_tokens_in"], found["failed_tokens_in"]) == (writers * 750, writers * 500)
    assert found["total_retries"] == writers * 100
    assert {node["status"] for node in graph.snapshot()["nodes"].values()} == {"running", "success", "fail"}


@pytest.mark.requirement("G-9")
def test_threads_that_give_way_at_every_line_lose_and_double_nothing() -> None:
    graph, root = rooted(max_kept=5)
    ids: list[str] = []

    def write(worker: int) -> None:
        for _ in range(20):
            node = graph.begin_node(root, "llm", "ask")
            ids.append(node)
            graph.mark_success(node, "0.000000001", 1, 1)
            if worker == 0:
                assert everything(graph)["cost"] <= nanos(graph.aggregates["total_cost_usd"])

    with switching_at_every_line():
        in_threads(6, write)
    assert sorted(ids) == [f"n{n:06d}" for n in range(2, 122)]
    assert graph.aggregates["total_llm_calls"] == nanos(graph.aggregates["total_cost_usd"]) == 120
    assert everything(graph) == {"calls": 121, "cost": 120, "tokens_in": 120, "tokens_out": 120, "retries_used": 0}
    events = [event for event in graph.events() if isinstance(event, (CallStarted, CallEnded))]
    assert len(events) == graph.seq == 241
    assert len({(type(event), event.node_id) for event in events}) == 241


@pytest.mark.requirement("G-9")
@pytest.mark.usefixtures("fast_switching")
def test_threads_that_end_the_same_call_end_it_once() -> None:
    graph, root = rooted()
    nodes = [graph.begin_node(root, "llm", "ask") for _ in range(200)]

    def end(worker: int) -> None:
        for node in nodes:
            if worker % 2:
                graph.mark_success(node, "0.000000001")
            else:
                graph.mark_failure(node, "ValueError", cost_usd="0.000000001")

    in_threads(8, end)
    found = graph.aggregates
    assert found["total_llm_calls"] + found["failed_calls"] == len(nodes)
    assert nanos(found["total_cost_usd"]) + nanos(found["failed_cost_usd"]) == len(nodes)
    assert len([event for event in graph.events() if isinstance(event, CallEnded)]) == len(nodes)


@pytest.mark.requirement("G-9")
async def test_sixty_four_tasks_with_a_thousand_calls_each_lose_and_double_nothing() -> None:
    graph, root = rooted()

    async def write() -> None:
        for _ in range(1_000):
            node = graph.begin_node(root, "tool", "step")
            await asyncio.sleep(0)
            graph.mark_success(node, "0.000000001")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(64):
            tasks.create_task(write())
    assert graph.aggregates["total_tool_calls"] == 64_000
    assert nanos(graph.aggregates["total_cost_usd"]) == 64_000
    assert len(graph.snapshot()["nodes"]) == 64_001


# Who made the call.


def tree_of(ctx: ExecutionContext) -> dict[str, str | None]:
    """The name of each call's parent, by the call's name."""
    nodes = ctx.graph.snapshot()["nodes"]
    return {node["name"]: nodes[node["parent_id"]]["name"] if node["parent_id"] else None for node in nodes.values()}


@pytest.mark.requirement("G-10")
def test_a_call_made_inside_a_call_is_its_child_and_the_next_one_is_not() -> None:
    with ExecutionContext(name="main") as ctx:
        ctx.llm(lambda: ctx.tool(lambda: ctx.tool(int, name="inner"), name="search"), name="ask")
        ctx.llm(str, name="again")
    assert tree_of(ctx) == {"main": None, "ask": "main", "search": "ask", "inner": "search", "again": "main"}


@pytest.mark.requirement("G-10")
async def test_calls_of_concurrent_tasks_hang_under_the_call_that_made_them() -> None:
    async def agent(ctx: ExecutionContext, name: str) -> None:
        async def think() -> None:
            await asyncio.sleep(0)
            await asyncio.gather(*(ctx.atool(search, name=f"{name} tool {n}") for n in range(3)))

        async def search() -> None:
            await asyncio.sleep(0)

        await ctx.allm(think, name=name)

    async with ExecutionContext(name="main") as ctx:
        await asyncio.gather(*(agent(ctx, f"agent {n}") for n in range(10)))
    expected: dict[str, str | None] = {"main": None}
    for n in range(10):
        expected[f"agent {n}"] = "main"
        expected |= {f"agent {n} tool {m}": f"agent {n}" for m in range(3)}
    assert tree_of(ctx) == expected
    assert ctx.graph.aggregates["max_depth"] == 2


@pytest.mark.requirement("G-10")
def test_calls_of_threads_hang_under_the_call_that_made_them() -> None:
    with ExecutionContext(name="main") as ctx:

        def agent(n: int) -> None:
            ctx.llm(lambda: [ctx.tool(int, name=f"agent {n} tool {m}") for m in range(20)], name=f"agent {n}")

        def spread() -> None:
            here = [contextvars.copy_context() for _ in range(4)]
            in_threads(4, lambda n: here[n].run(agent, n))

        ctx.llm(spread, name="spread")
        in_threads(2, lambda n: agent(n + 4))
    tree = tree_of(ctx)
    assert [tree[f"agent {n}"] for n in range(6)] == ["spread"] * 4 + ["main"] * 2
    assert all(tree[f"agent {n} tool {m}"] == f"agent {n}" for n in range(6) for m in range(20))


# Bounded memory.


def everything(graph: ExecutionGraph) -> dict[str, int]:
    """What a snapshot tells in all: the calls it still has, and those folded into them."""
    total = {"calls": 0, "cost": 0, "tokens_in": 0, "tokens_out": 0, "retries_used": 0}
    for node in graph.snapshot()["nodes"].values():
        for part in (node | {"calls": 1}, node["metadata"].get("folded")):
            if part is not None:
                total["cost"] += nanos(part["cost_usd"])
                for name in ("calls", "tokens_in", "tokens_out", "retries_used"):
                    total[name] += part[name] or 0
    return total


@pytest.mark.requirement("G-11")
def test_the_oldest_finished_calls_are_folded_into_their_parent() -> None:
    graph, root = rooted(max_kept=3)
    nodes = [graph.begin_node(root, "llm", f"call {n}") for n in range(5)]
    for n, node in enumerate(nodes):
        graph.increment_retries(node)
        graph.mark_success(node, n, tokens_in=10 * n, tokens_out=n)
    snapshot = graph.snapshot()
    assert list(snapshot["nodes"]) == [root, *nodes[3:]]
    assert snapshot["nodes"][root]["metadata"] == {
        "folded": {"calls": 3, "cost_usd": 3.0, "tokens_in": 30, "tokens_out": 3, "retries_used": 3}
    }
    assert snapshot["aggregates"]["total_cost_usd"] == 10.0
    assert snapshot["aggregates"]["total_llm_calls"] == 5
    json.dumps(snapshot, allow_nan=False)


@pytest.mark.requirement("G-11")
def test_the_events_of_a_folded_call_still_name_the_call_that_made_it() -> None:
    graph, root = rooted(max_kept=2)
    agent = graph.begin_node(root, "system", "agent")
    inner = graph.begin_node(agent, "llm", "ask")
    graph.mark_success(agent)
    graph.mark_success(inner)
    for _ in range(3):
        graph.mark_success(graph.begin_node(root, "tool", "step"))
    assert set(graph.snapshot()["nodes"]).isdisjoint({agent, inner})
    made_by = {
        (event.node_id, event.parent_id) for event in graph.events() if isinstance(event, CallStarted | CallEnded)
    }
    assert {(inner, agent), (agent, root), (root, None)} <= made_by


def test_calls_are_shown_in_the_order_they_began_whatever_order_they_ended_in() -> None:
    graph, root = rooted()
    nodes = [graph.begin_node(root, "tool", f"call {n}") for n in range(6)]
    for node in (nodes[4], nodes[0], nodes[2]):
        graph.mark_success(node)
    assert list(graph.snapshot()["nodes"]) == [call.node_id for call in graph.calls()[1]] == [root, *nodes]
    assert [graph.call(node).node_id for node in nodes] == nodes


@pytest.mark.requirement("G-11")
def test_a_whole_finished_subtree_ends_up_in_the_parent_it_had() -> None:
    graph, root = rooted(max_kept=2)
    agent = graph.begin_node(root, "system", "agent")
    inner = graph.begin_node(agent, "llm", "ask")
    leaves = [graph.begin_node(inner, "tool", "search") for _ in range(3)]
    for leaf in leaves:
        graph.mark_success(leaf, 1)
    assert node_of(graph, inner)["metadata"]["folded"]["calls"] == 3
    graph.mark_success(inner, 10)
    assert node_of(graph, agent)["metadata"]["folded"]["cost_usd"] == 13.0
    graph.mark_success(agent, 100)
    graph.mark_success(graph.begin_node(root, "tool", "next"), 1_000)
    graph.mark_success(graph.begin_node(root, "tool", "next"), 1_000)
    assert node_of(graph, root)["metadata"]["folded"] == {
        "calls": 6,
        "cost_usd": 1_113.0,
        "tokens_in": 0,
        "tokens_out": 0,
        "retries_used": 0,
    }


@pytest.mark.requirement("G-11")
def test_calls_with_an_unknown_cost_share_their_extras_also_when_they_are_folded() -> None:
    with ExecutionContext(settings=RunSettings(max_kept_calls=16)) as run:
        calls = [run.call_llm(lambda: "text").call.record for _ in range(10)]
        assert {id(call.extras) for call in calls} == {id(ONLY_COST_UNKNOWN)}
        failed = run.call_llm(_fail).call.record
        for _ in range(40):
            run.call_llm(lambda: "text")
        assert [call.folded_from for call in (*calls, failed)] == [run.graph.root.number] * 11  # type: ignore[union-attr]
        assert all(call.cost_unknown for call in (*calls, failed))
        assert failed.error_class == "ConnectionError"
        assert len({id(call.extras) for call in calls}) < len(calls)


def _fail() -> None:
    raise ConnectionError


@pytest.mark.requirement("G-11")
def test_looking_up_a_folded_call_says_that_it_was_folded() -> None:
    graph, root = rooted(max_kept=1)
    node = graph.begin_node(root, "tool", "step")
    graph.mark_success(node)
    with pytest.raises(KeyError, match="'n000002' was folded into the totals"):
        graph.begin_node(node, "tool", "below")
    with pytest.raises(KeyError, match="'n000003' does not exist"):
        graph.mark_success("n000003")


@pytest.mark.requirement("G-4", "G-11")
def test_marking_a_call_again_has_no_effect_also_when_it_was_folded() -> None:
    graph, root = rooted(max_kept=1)
    node = graph.begin_node(root, "tool", "step")
    graph.mark_success(node, 1)
    before = graph.snapshot()
    graph.mark_running(node)
    graph.mark_success(node, 5)
    graph.mark_failure(node, "ValueError", cost_usd=5)
    graph.mark_halt(node, cost_usd=5)
    graph.increment_retries(node)
    assert graph.snapshot() | {"snapshot_ts_ms": 0} == before | {"snapshot_ts_ms": 0}


@pytest.mark.requirement("G-11")
def test_calls_under_way_are_never_folded_however_many_there_are() -> None:
    graph, root = rooted(max_kept=2)
    nodes = [graph.begin_node(root, "tool", "step") for _ in range(100)]
    graph.mark_success(nodes[50])
    assert list(graph.snapshot()["nodes"]) == [root, *nodes[:50], *nodes[51:]]
    for node in nodes:
        graph.mark_success(node, "0.01")
    assert len(graph.snapshot()["nodes"]) == 2
    assert nanos(graph.aggregates["total_cost_usd"]) == 99 * NANOS // 100


@pytest.mark.requirement("G-11")
def test_the_root_is_never_folded() -> None:
    graph, root = rooted(max_kept=1)
    open_call = graph.begin_node(root, "tool", "open")
    graph.mark_success(root)
    for _ in range(5):
        graph.mark_success(graph.begin_node(open_call, "tool", "step"), 1)
    graph.mark_success(open_call)
    assert list(graph.snapshot()["nodes"]) == [root]
    assert node_of(graph, root)["metadata"]["folded"]["calls"] == 6


@pytest.mark.requirement("G-11")
def test_a_bill_that_comes_after_its_call_was_folded_is_in_the_folded_sums() -> None:
    graph, root = rooted(max_kept=1)
    call = graph.call(graph.begin_node(root, "llm", "ask"))
    with graph.lock:
        graph.end(call, 0, "halt", abandoned=True)
        assert call.node_id not in graph.snapshot()["nodes"]
        graph.settle_late(call, 0, 7, 5, 6)
    folded = node_of(graph, root)["metadata"]["folded"]
    assert (nanos(folded["cost_usd"]), folded["tokens_in"], folded["tokens_out"], folded["calls"]) == (7, 5, 6, 1)
    assert nanos(graph.aggregates["halted_cost_usd"]) == 7


@pytest.mark.requirement("G-11")
@given(st.integers(1, 6), steps)
def test_kept_and_folded_calls_add_up_to_all_calls(cap: int, run: list[tuple[str, int]]) -> None:
    bounded, whole = rooted(max_kept=cap, clock=ManualClock())[0], rooted(clock=ManualClock())[0]
    calls: list[tuple[CallRecord, CallRecord]] = [(bounded.root, whole.root)]  # type: ignore[list-item]
    for act, which in run:
        pair = calls[which % len(calls)]
        for graph, call in zip((bounded, whole), pair, strict=True):
            with graph.lock:
                if act in ("success", "fail", "halt"):
                    graph.end(call, 0, act, which, which, 1)  # type: ignore[arg-type]
                elif act == "late" and call.end_seq <= graph.seq:
                    graph.settle_late(call, 0, which, 3, 4)
        if act == "begin":
            with bounded.lock, whole.lock:
                made = [g.begin(c, "llm", "x", None, c.source, 0) for g, c in zip((bounded, whole), pair, strict=True)]
            calls.append((made[0], made[1]))
    assert everything(bounded) == everything(whole)
    assert bounded.aggregates == whole.aggregates
    nodes = bounded.snapshot()["nodes"]
    under_way = {node_id for node_id, node in whole.snapshot()["nodes"].items() if node["status"] not in TERMINAL}
    assert under_way <= nodes.keys()
    assert len(nodes) <= cap + len(under_way)
    for node_id, node in nodes.items():
        assert node["parent_id"] in nodes or node_id == "n000001", "a parent that is not there"
    assert [event.to_dict() for event in bounded.events()] == [event.to_dict() for event in whole.events()]


@pytest.mark.requirement("G-11")
def test_the_log_is_trimmed_and_dropped_entries_are_counted() -> None:
    graph, root = rooted(max_kept=10)
    for _ in range(5_000):
        graph.mark_success(graph.begin_node(root, "tool", "step"), "0.000000001")
    kept = graph.events()
    assert len(kept) <= 10 * EVENTS_PER_CALL_KEPT + TRIM_CHUNK
    assert graph.dropped_events + len(kept) == graph.seq == 10_001
    assert kept[0].seq == graph.dropped_events + 1
    assert nanos(graph.aggregates["total_cost_usd"]) == 5_000


@pytest.mark.requirement("G-11")
def test_a_log_of_many_events_and_few_calls_is_trimmed_too() -> None:
    graph, root = rooted(max_kept=10)
    node = graph.begin_node(root, "llm", "ask")
    with graph.lock:
        for _ in range(20_000):
            graph.append(CustomTrace(seq=graph.seq + 1))
    graph.mark_success(node, 1, 2, 3)
    assert len(graph.events()) <= 10 * EVENTS_PER_CALL_KEPT + TRIM_CHUNK + 1
    assert graph.dropped_events + len(graph.events()) == graph.seq == 20_003
    assert (graph.aggregates["total_cost_usd"], graph.aggregates["total_tokens_out"]) == (1.0, 3)


@pytest.mark.requirement("G-9", "G-11")
@pytest.mark.reliability
@pytest.mark.usefixtures("fast_switching")
def test_sums_stay_exact_while_threads_write_read_fold_and_trim() -> None:
    graph, root = rooted(max_kept=20)
    wrong: list[str] = []

    def write(_: int) -> None:
        for _ in range(1_000):
            inner = graph.begin_node(root, "llm", "ask")
            call = graph.call(graph.begin_node(inner, "tool", "search"))
            graph.mark_success(inner, "0.000000010")
            with graph.lock:
                graph.end(call, 0, "halt", abandoned=True)
            with graph.lock:
                graph.settle_late(call, 0, 1, 1, 1)

    def read(_: int) -> None:
        for _ in range(150):
            seen, totals = everything(graph), graph.aggregates
            if seen["cost"] > nanos(totals["total_cost_usd"]) + nanos(totals["halted_cost_usd"]):
                wrong.append("a snapshot knew more than the totals afterwards")

    in_threads(8, lambda n: write(n) if n < 6 else read(n))
    assert wrong == []
    assert nanos(graph.aggregates["total_cost_usd"]) == 60_000
    assert nanos(graph.aggregates["halted_cost_usd"]) == 6_000
    assert everything(graph)["cost"] == 66_000
    assert everything(graph)["calls"] == 12_001
    assert graph.dropped_events + len(graph.events()) == graph.seq


def run_calls(graph: ExecutionGraph, count: int) -> None:
    """`count` model calls, each with a tool call inside it every other time, written the way the runtime does."""
    root = graph.root
    assert root is not None
    source = root.source
    for n in range(count // 2):
        with graph.lock:
            outer = graph.begin(root, "llm", "ask", "large-1", source, n)
        with graph.lock:
            inner = graph.begin(outer, "tool", "search", None, source, n)
        with graph.lock:
            graph.end(inner, n, "success", 1, 1, 1)
        with graph.lock:
            graph.end(outer, n, "success", 2, 1, 1)


@pytest.mark.requirement("G-11")
@pytest.mark.reliability
def test_memory_does_not_grow_with_the_number_of_calls() -> None:
    more = scaled(80_000, soak=180_000)
    graph, _ = rooted(max_kept=1_000)
    with ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        run_calls(graph, 20_000)
        early, _ = tracemalloc.get_traced_memory()
        run_calls(graph, more)
        late, _ = tracemalloc.get_traced_memory()
    assert late < early * 1.5
    assert late < 1_000 * 5_000
    assert graph.aggregates["total_llm_calls"] == (20_000 + more) // 2


@pytest.mark.requirement("G-11")
@pytest.mark.reliability
def test_memory_does_not_grow_with_the_length_of_a_chain_of_calls_that_each_outlive_their_maker() -> None:
    graph, root = rooted(max_kept=100)
    sizes = []
    with ExitStack() as stack:
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        node = root
        for _ in range(2):
            for _ in range(15_000):
                made_by, node = node, graph.begin_node(node, "system", "next")
                if made_by != root:
                    graph.mark_success(made_by, "0.000000001")
            sizes.append(tracemalloc.get_traced_memory()[0])
    assert sizes[1] < sizes[0] * 1.5
    assert graph.aggregates["max_depth"] == 30_000
    assert everything(graph)["calls"] == 30_001
    assert everything(graph)["cost"] == 29_999


@pytest.mark.requirement("G-1", "G-11")
@pytest.mark.reliability
def test_a_great_many_calls() -> None:
    calls = scaled(100_000, soak=1_000_000)
    graph, root = rooted(max_kept=1_000)
    run_calls(graph, calls)
    found = graph.aggregates
    assert (found["total_llm_calls"], found["total_tool_calls"]) == (calls // 2, calls // 2)
    assert nanos(found["total_cost_usd"]) == calls * 3 // 2
    assert graph.begin_node(root, "tool", "next") == f"n{calls + 2}"
    assert everything(graph)["calls"] == calls + 2
    assert everything(graph)["cost"] == calls * 3 // 2
    assert graph.seq == 2 * calls + 2
    assert len(graph.snapshot()["nodes"]) <= 1_001
