"""The code examples of the design document on the execution graph, quoted as written there and run.

Only the import line is changed (`tests/scenarios/examples.py`), and what an example leaves out (`...`) is given.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import EllipsisType, SimpleNamespace
from typing import Any, Optional

import pytest

from penstock import (
    ChainMetadata,
    ContextSnapshot,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    ExecutionGraph,
    NodeRecord,
    WrapOptions,
)
from penstock.testing import ManualClock
from penstock.tracing.lifecycle import TRANSITIONS
from tests.scenarios.examples import digest, filled_in, run, takes_what_is_declared

MS = 1_000_000

LIFECYCLE = """\
   created -> running -> success | fail | halt
   created -> fail | halt        (pre-running terminal, e.g., budget exceeded)
"""
GRAPH = """\
class ExecutionGraph:
    def __init__(self, chain_id: Optional[str] = None) -> None: ...
"""
CREATE_ROOT = """\
root_id = graph.create_root(name="agent_run", metadata={"request_id": "req-001"})
"""
BEGIN_NODE = """\
plan_id = graph.begin_node(
    parent_id=root_id,
    kind="llm",
    name="plan_step",
    model="claude-sonnet-4-6",
)
"""
MARK_RUNNING = """\
graph.mark_running(plan_id)
"""
MARK_SUCCESS = """\
graph.mark_success(plan_id, cost_usd=0.0042, tokens_in=120, tokens_out=80)
"""
MARK_FAILURE = """\
graph.mark_failure(plan_id, error_class="RateLimitError", stop_reason="429 from provider")
"""
MARK_HALT = """\
graph.mark_halt(plan_id, stop_reason="cost ceiling exceeded")
"""
SNAPSHOT = """\
snap = graph.snapshot()
# snap["chain_id"]         -> str
# snap["root_id"]          -> str | None
# snap["nodes"]            -> dict[node_id, node_fields_dict]
# snap["aggregates"]       -> dict with totals and max_depth
# snap["snapshot_ts_ms"]   -> int (epoch ms when snapshot was taken)
"""
CONTEXT = """\
from veronica_core.containment.execution_graph import ExecutionGraph

class ExecutionContext:
    def __init__(self, config, pipeline=None, metadata=None, ...):
        ...
        self._graph = ExecutionGraph(chain_id=self._metadata.chain_id)
        self._root_id = self._graph.create_root(
            name="chain",
            metadata={"request_id": self._metadata.request_id},
        )

    def _wrap(self, fn, kind, options):
        opts = options or WrapOptions()

        # Graph: begin node, link to last node or root.
        with self._lock:
            parent_id = self._nodes[-1].node_id if self._nodes else self._root_id
        graph_node_id = self._graph.begin_node(
            parent_id=parent_id,
            kind=kind,
            name=opts.operation_name or kind,
            model=self._metadata.model,
        )

        halt_reason = self._check_limits()
        if halt_reason is not None:
            self._graph.mark_halt(graph_node_id, stop_reason=halt_reason)
            return Decision.HALT

        self._graph.mark_running(graph_node_id)

        try:
            fn()
        except BaseException as exc:
            self._graph.mark_failure(graph_node_id, error_class=type(exc).__name__)
            return Decision.RETRY

        self._graph.mark_success(graph_node_id, cost_usd=opts.cost_estimate_hint)
        return Decision.ALLOW
"""
GET_SNAPSHOT = """\
def get_snapshot(self):
    snap = self._graph.snapshot()
    return ContextSnapshot(
        ...,
        graph=snap,  # or store separately
    )
"""
NORMAL_CHAIN = """\
{
  "chain_id": "chain-abc-123",
  "root_id": "n000001",
  "nodes": {
    "n000001": {
      "node_id": "n000001",
      "parent_id": null,
      "kind": "system",
      "name": "agent_run",
      "start_ts_ms": 1740000000000,
      "end_ts_ms": null,
      "status": "running",
      "model": null,
      "retries_used": 0,
      "cost_usd": 0.0,
      "tokens_in": null,
      "tokens_out": null,
      "stop_reason": null,
      "error_class": null,
      "metadata": {"request_id": "req-001"}
    },
    "n000002": {
      "node_id": "n000002",
      "parent_id": "n000001",
      "kind": "llm",
      "name": "plan_step",
      "start_ts_ms": 1740000000050,
      "end_ts_ms": 1740000001200,
      "status": "success",
      "model": "claude-sonnet-4-6",
      "retries_used": 0,
      "cost_usd": 0.0042,
      "tokens_in": 120,
      "tokens_out": 80,
      "stop_reason": null,
      "error_class": null,
      "metadata": {}
    },
    "n000003": {
      "node_id": "n000003",
      "parent_id": "n000002",
      "kind": "tool",
      "name": "web_search",
      "start_ts_ms": 1740000001250,
      "end_ts_ms": 1740000002100,
      "status": "success",
      "model": null,
      "retries_used": 0,
      "cost_usd": 0.0,
      "tokens_in": null,
      "tokens_out": null,
      "stop_reason": null,
      "error_class": null,
      "metadata": {"query": "VERONICA containment"}
    }
  },
  "aggregates": {
    "total_cost_usd": 0.0042,
    "total_llm_calls": 1,
    "total_tool_calls": 1,
    "total_retries": 0,
    "total_tokens_out": 820,
    "max_depth": 2
  },
  "snapshot_ts_ms": 1740000002200
}
"""
HALTED_CHAIN = """\
{
  "chain_id": "chain-xyz-456",
  "root_id": "n000001",
  "nodes": {
    "n000001": {
      "node_id": "n000001",
      "parent_id": null,
      "kind": "system",
      "name": "agent_run",
      "start_ts_ms": 1740000010000,
      "end_ts_ms": null,
      "status": "running",
      "model": null,
      "retries_used": 0,
      "cost_usd": 0.0,
      "tokens_in": null,
      "tokens_out": null,
      "stop_reason": null,
      "error_class": null,
      "metadata": {}
    },
    "n000002": {
      "node_id": "n000002",
      "parent_id": "n000001",
      "kind": "llm",
      "name": "step_1",
      "start_ts_ms": 1740000010100,
      "end_ts_ms": 1740000011500,
      "status": "success",
      "model": "claude-sonnet-4-6",
      "retries_used": 0,
      "cost_usd": 0.95,
      "tokens_in": 5000,
      "tokens_out": 3000,
      "stop_reason": null,
      "error_class": null,
      "metadata": {}
    },
    "n000003": {
      "node_id": "n000003",
      "parent_id": "n000001",
      "kind": "llm",
      "name": "step_2",
      "start_ts_ms": 1740000011600,
      "end_ts_ms": 1740000011601,
      "status": "halt",
      "model": "claude-sonnet-4-6",
      "retries_used": 0,
      "cost_usd": 0.0,
      "tokens_in": null,
      "tokens_out": null,
      "stop_reason": "cost ceiling exceeded",
      "error_class": null,
      "metadata": {}
    }
  },
  "aggregates": {
    "total_cost_usd": 0.95,
    "total_llm_calls": 1,
    "total_tool_calls": 0,
    "total_retries": 0,
    "total_tokens_out": 3000,
    "max_depth": 1
  },
  "snapshot_ts_ms": 1740000011650
}
"""
BLOCKS = (
    LIFECYCLE,
    GRAPH,
    CREATE_ROOT,
    BEGIN_NODE,
    MARK_RUNNING,
    MARK_SUCCESS,
    MARK_FAILURE,
    MARK_HALT,
    SNAPSHOT,
    CONTEXT,
    GET_SNAPSHOT,
    NORMAL_CHAIN,
    HALTED_CHAIN,
)


def test_the_quotations_are_the_code_blocks_of_the_document() -> None:
    assert digest(*BLOCKS) == "6088be0b7b4d972f28fd1aebd879c55566a782cf8f9cad195883dfa01c6f93bc"


def started() -> tuple[ExecutionGraph, str, str]:
    """A graph with a root and one model call under it, made by the calls of the document's API section."""
    names = run(CREATE_ROOT + BEGIN_NODE, graph=ExecutionGraph())
    return names["graph"], names["root_id"], names["plan_id"]


# Section 3, the lifecycle.

MARKS: dict[str, Callable[[ExecutionGraph, str], None]] = {
    "running": lambda graph, node: graph.mark_running(node),
    "success": lambda graph, node: graph.mark_success(node, cost_usd=0),
    "fail": lambda graph, node: graph.mark_failure(node, error_class="OSError"),
    "halt": lambda graph, node: graph.mark_halt(node),
}


def paths() -> Iterator[tuple[str, ...]]:
    """Every sequence of statuses that the document draws."""
    for line in LIFECYCLE.splitlines():
        *before, ends = [part.strip() for part in line.partition("(")[0].split("->")]
        for end in ends.split("|"):
            yield (*before, end.strip())


@pytest.mark.requirement("G-4")
@pytest.mark.parametrize("path", list(paths()), ids=" ".join)
def test_a_node_takes_every_path_of_the_lifecycle_and_stays_at_its_end(path: tuple[str, ...]) -> None:
    graph, _, plan_id = started()
    seen = [graph.snapshot()["nodes"][plan_id]["status"]]
    for status in path[1:]:
        MARKS[status](graph, plan_id)
        seen.append(graph.snapshot()["nodes"][plan_id]["status"])
    assert tuple(seen) == path
    for mark in MARKS.values():
        mark(graph, plan_id)
        assert graph.snapshot()["nodes"][plan_id]["status"] == path[-1]


@pytest.mark.requirement("G-4")
def test_the_lifecycle_has_no_path_that_the_document_does_not_draw() -> None:
    drawn = {step for path in paths() for step in pairwise(path)}
    assert drawn == {(before, after) for before, afters in TRANSITIONS.items() for after in afters}


# Section 5, the API.


@pytest.mark.requirement("G-1")
def test_a_graph_is_made_as_declared() -> None:
    declared = run(GRAPH, Optional=Optional)["ExecutionGraph"]
    assert takes_what_is_declared(ExecutionGraph.__init__, declared.__init__)
    assert ExecutionGraph().chain_id != ExecutionGraph(chain_id="chain-001").chain_id == "chain-001"


@pytest.mark.requirement("G-2")
def test_create_root_gives_the_one_root() -> None:
    graph, root_id, _ = started()
    root = graph.snapshot()["nodes"][root_id]
    assert (root["kind"], root["parent_id"], root["metadata"]) == ("system", None, {"request_id": "req-001"})
    with pytest.raises(RuntimeError):
        run(CREATE_ROOT, graph=graph)


@pytest.mark.requirement("G-3")
def test_begin_node_creates_a_child_one_level_deeper() -> None:
    graph, root_id, plan_id = started()
    snap = graph.snapshot()
    assert (snap["nodes"][plan_id]["status"], snap["nodes"][plan_id]["parent_id"]) == ("created", root_id)
    assert snap["nodes"][plan_id]["model"] == "claude-sonnet-4-6"
    assert snap["aggregates"]["max_depth"] == 1
    with pytest.raises(KeyError):
        graph.begin_node(parent_id="n999999", kind="llm", name="plan_step")


@pytest.mark.requirement("G-4", "G-7")
def test_mark_running_and_mark_success_are_idempotent_and_count_once() -> None:
    graph, _, plan_id = started()
    for _ in range(2):
        run(MARK_RUNNING, graph=graph, plan_id=plan_id)
        assert graph.snapshot()["nodes"][plan_id]["status"] == "running"
    for _ in range(2):
        run(MARK_SUCCESS, graph=graph, plan_id=plan_id)
    graph.mark_running(plan_id)
    snap = graph.snapshot()
    plan = snap["nodes"][plan_id]
    assert (plan["status"], plan["cost_usd"], plan["tokens_in"], plan["tokens_out"]) == ("success", 0.0042, 120, 80)
    assert (snap["aggregates"]["total_cost_usd"], snap["aggregates"]["total_llm_calls"]) == (0.0042, 1)


@pytest.mark.requirement("G-4")
def test_mark_failure_is_allowed_before_mark_running() -> None:
    graph, _, plan_id = started()
    run(MARK_FAILURE, graph=graph, plan_id=plan_id)
    graph.mark_success(plan_id, cost_usd=0.0042)
    plan = graph.snapshot()["nodes"][plan_id]
    assert (plan["status"], plan["error_class"], plan["stop_reason"]) == (
        "fail",
        "RateLimitError",
        "429 from provider",
    )
    assert graph.snapshot()["aggregates"]["total_cost_usd"] == 0


@pytest.mark.requirement("G-4")
def test_mark_halt_records_a_stop_by_policy() -> None:
    graph, _, plan_id = started()
    run(MARK_HALT, graph=graph, plan_id=plan_id)
    graph.mark_failure(plan_id, error_class="RateLimitError")
    plan = graph.snapshot()["nodes"][plan_id]
    assert (plan["status"], plan["stop_reason"], plan["error_class"]) == ("halt", "cost ceiling exceeded", None)


@pytest.mark.requirement("G-7")
def test_increment_retries_is_added_to_the_total_when_the_node_ends() -> None:
    graph, _, plan_id = started()
    graph.increment_retries(plan_id)
    graph.increment_retries(plan_id)
    assert graph.snapshot()["aggregates"]["total_retries"] == 0
    graph.mark_success(plan_id, cost_usd=0.0042)
    assert graph.snapshot()["nodes"][plan_id]["retries_used"] == 2
    assert graph.snapshot()["aggregates"]["total_retries"] == 2


@pytest.mark.requirement("G-8")
def test_snapshot_is_a_json_copy_of_the_whole_graph() -> None:
    graph, root_id, plan_id = started()
    snap = run(SNAPSHOT, graph=graph)["snap"]
    assert isinstance(snap["chain_id"], str)
    assert snap["root_id"] == root_id
    assert list(snap["nodes"]) == [root_id, plan_id]
    assert snap["aggregates"]["max_depth"] == 1
    assert isinstance(snap["snapshot_ts_ms"], int)
    written = json.dumps(snap)
    graph.mark_success(plan_id, cost_usd=0.0042)
    snap["nodes"][root_id]["metadata"]["request_id"] = "changed"
    assert json.loads(written)["nodes"][plan_id]["status"] == "created"
    assert graph.snapshot()["nodes"][root_id]["metadata"] == {"request_id": "req-001"}


# Section 6, a context of the user's own over the graph.

LEFT_OUT = {", ...):": "):"}
"""The signature of the document ends in `...`, which is not Python."""


def sketched_context() -> Any:
    """The class of the document, with what it uses and does not show."""
    names = {"WrapOptions": WrapOptions, "Decision": Decision}
    sketch = run(filled_in(CONTEXT, LEFT_OUT), **names)["ExecutionContext"]

    class Limited(sketch):  # type: ignore[misc]
        def __init__(self, config: ExecutionConfig, metadata: ChainMetadata) -> None:
            self._config, self._metadata = config, metadata
            self._lock = threading.Lock()
            self._nodes: list[Any] = []
            self._steps = 0
            super().__init__(config, metadata=metadata)

        def _check_limits(self) -> str | None:
            return "step limit exceeded" if self._steps >= self._config.max_steps else None

        def _wrap(self, fn: Any, kind: str, options: WrapOptions | None = None) -> Decision:
            decision: Decision = super()._wrap(fn, kind, options)
            self._steps += decision is Decision.ALLOW
            return decision

    return Limited


CONFIG = ExecutionConfig(max_cost_usd=1.0, max_steps=1, max_retries_total=3)
META = ChainMetadata(request_id="req-001", chain_id="chain-001", model="claude-sonnet-4-6")


@pytest.mark.requirement("G-4", "G-6")
def test_the_integration_pattern_runs_over_the_graph() -> None:
    ctx = sketched_context()(CONFIG, metadata=META)
    decisions = [
        ctx._wrap(lambda: 1 / 0, "tool"),
        ctx._wrap(lambda: "plan", "llm", WrapOptions(operation_name="plan_step", cost_estimate_hint=0.0042)),
        ctx._wrap(lambda: "never", "llm"),
    ]
    assert decisions == [Decision.RETRY, Decision.ALLOW, Decision.HALT]
    snap = ctx._graph.snapshot()
    root, failed, planned, halted = snap["nodes"].values()
    assert (snap["chain_id"], root["name"], root["metadata"]) == ("chain-001", "chain", {"request_id": "req-001"})
    assert (failed["name"], failed["status"], failed["error_class"]) == ("tool", "fail", "ZeroDivisionError")
    assert (planned["name"], planned["status"], planned["cost_usd"]) == ("plan_step", "success", 0.0042)
    assert (halted["name"], halted["status"], halted["stop_reason"]) == ("llm", "halt", "step limit exceeded")
    assert {one["model"] for one in (failed, planned, halted)} == {"claude-sonnet-4-6"}


@pytest.mark.requirement("G-3")
def test_the_integration_pattern_links_a_node_to_the_last_one() -> None:
    ctx = sketched_context()(CONFIG, metadata=META)
    ctx._nodes.append(SimpleNamespace(node_id=ctx._graph.begin_node(ctx._root_id, "llm", "plan_step")))
    ctx._wrap(lambda: "page", "tool")
    _, plan, fetched = ctx._graph.snapshot()["nodes"].values()
    assert fetched["parent_id"] == plan["node_id"]


@pytest.mark.requirement("G-10")
def test_the_context_of_the_library_records_the_same_nodes() -> None:
    ctx = ExecutionContext(ExecutionConfig(max_cost_usd=1.0, max_steps=1, max_retries_total=3))
    assert ctx.wrap_tool_call(lambda: 1 / 0) is Decision.RETRY
    assert ctx.wrap_llm_call(lambda: "plan", WrapOptions(operation_name="plan_step")) is Decision.ALLOW
    assert ctx.wrap_llm_call(lambda: "never") is Decision.HALT
    _, *calls = ctx.graph.snapshot()["nodes"].values()
    assert [(call["name"], call["status"]) for call in calls] == [
        ("tool", "fail"),
        ("plan_step", "success"),
        ("llm", "halt"),
    ]


def test_a_context_snapshot_carries_the_graph_snapshot() -> None:
    ctx = ExecutionContext(CONFIG, metadata=META)
    ctx.wrap_llm_call(lambda: "plan", WrapOptions(operation_name="plan_step"))
    taken = ctx.get_snapshot()
    others = {name: getattr(taken, name) for name in ContextSnapshot.__dataclass_fields__ if name != "graph"}

    def with_the_others(left_out: EllipsisType, *, graph: dict[str, Any]) -> ContextSnapshot:
        assert left_out is ...
        return ContextSnapshot(**others, graph=graph)

    get_snapshot = run(GET_SNAPSHOT, ContextSnapshot=with_the_others)["get_snapshot"]
    made = get_snapshot(SimpleNamespace(_graph=ctx.graph))
    assert isinstance(made.nodes[0], NodeRecord)
    assert made.graph["nodes"] == ctx.graph.snapshot()["nodes"]
    assert taken.graph is not None
    assert taken.graph["nodes"] == made.graph["nodes"]


# Section 7, the two example snapshots.


def is_as_printed(snap: dict[str, Any], printed: str) -> None:
    """Everything that the document prints is in the snapshot, which also has its `seq` and more aggregates."""
    expected = json.loads(printed)
    aggregates = expected.pop("aggregates")
    assert snap.pop("aggregates").items() >= aggregates.items()
    assert snap.pop("seq") > 0
    assert snap == expected


@pytest.mark.requirement("G-1", "G-5", "G-6", "G-8")
def test_the_snapshot_of_a_normal_chain() -> None:
    clock = ManualClock(wall_start_ns=1740000000000 * MS)
    graph = ExecutionGraph(chain_id="chain-abc-123", clock=clock)
    root_id = graph.create_root(name="agent_run", metadata={"request_id": "req-001"})
    clock.advance_ns(50 * MS)
    plan_id = graph.begin_node(parent_id=root_id, kind="llm", name="plan_step", model="claude-sonnet-4-6")
    graph.mark_running(plan_id)
    clock.advance_ns(1150 * MS)
    graph.mark_success(plan_id, cost_usd=0.0042, tokens_in=120, tokens_out=80)
    clock.advance_ns(50 * MS)
    search_id = graph.begin_node(
        parent_id=plan_id, kind="tool", name="web_search", metadata={"query": "VERONICA containment"}
    )
    graph.mark_running(search_id)
    clock.advance_ns(850 * MS)
    graph.mark_success(search_id, cost_usd=0.0)
    clock.advance_ns(100 * MS)
    snap = json.loads(json.dumps(graph.snapshot()))

    # The document prints 820, which is not the sum of its nodes (docs/decisions.md).
    is_as_printed(snap, NORMAL_CHAIN.replace('"total_tokens_out": 820', '"total_tokens_out": 80'))


@pytest.mark.requirement("G-1", "G-5", "G-6", "G-8")
def test_the_snapshot_of_a_halted_chain() -> None:
    clock = ManualClock(wall_start_ns=1740000010000 * MS)
    graph = ExecutionGraph(chain_id="chain-xyz-456", clock=clock)
    root_id = graph.create_root(name="agent_run")
    clock.advance_ns(100 * MS)
    first = graph.begin_node(parent_id=root_id, kind="llm", name="step_1", model="claude-sonnet-4-6")
    graph.mark_running(first)
    clock.advance_ns(1400 * MS)
    graph.mark_success(first, cost_usd=0.95, tokens_in=5000, tokens_out=3000)
    clock.advance_ns(100 * MS)
    second = graph.begin_node(parent_id=root_id, kind="llm", name="step_2", model="claude-sonnet-4-6")
    clock.advance_ns(1 * MS)
    graph.mark_halt(second, stop_reason="cost ceiling exceeded")
    clock.advance_ns(49 * MS)
    snap = json.loads(json.dumps(graph.snapshot()))

    is_as_printed(snap, HALTED_CHAIN)
