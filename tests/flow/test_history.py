"""The audit log per node: what is in it, that nothing stops it for long, and that it never touches the run."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.containment.limits import Budget
from penstock.errors import InvalidValue
from penstock.flow import history as module
from penstock.flow.graph import Graph
from penstock.flow.history import History, file_name, history_file, read_history
from penstock.flow.node import FunctionNode
from penstock.flow.trace import ExecutionTrace
from penstock.policies import ErrorPolicy
from penstock.runtime.billing.usage import Reported
from penstock.runtime.context import ExecutionContext
from penstock.stops import TerminationReason
from penstock.tracing.events import CallEnded, CallSettled, CallStarted, RunCompleted, TraceEvent

FIELDS = [
    *("ts", "seq", "run_id", "op", "node_id", "step_id", "graph_id", "call_id", "parent_id", "attempt", "name"),
    *("duration_ms", "cost_usd", "tokens", "error"),
]
PATIENCE_S = 30.0


def run(graph: Graph, history: History, **options: Any) -> ExecutionContext:
    """Run it to whatever end, and wait until the history has everything."""
    context = ExecutionContext(**options)
    subscription = context.observe(history)
    with suppress(Exception):
        asyncio.run(graph.execute(context))
    context.end()
    assert subscription.drain(PATIENCE_S)
    assert subscription.failures == 0
    return context


def ops(entries: Any) -> list[str]:
    return [entry["op"] for entry in entries]


def one_step(fn: Any, **options: Any) -> Graph:
    graph = Graph("g")
    graph.add_step(FunctionNode("node", fn), "step", **options)
    return graph


def steps(run_id: str, *nodes: str, start: int = 1) -> list[TraceEvent]:
    """The events of steps that each use a node and succeed."""
    found: list[TraceEvent] = []
    for number, node in enumerate(nodes):
        seq, call = start + 2 * number, f"call-{start + number}"
        about = {"graph": "g", "step": "s", "node": node, "node_type": "function"}
        found += [
            CallStarted(run_id=run_id, seq=seq, node_id=call, name="s", metadata=about),
            CallEnded(run_id=run_id, seq=seq + 1, node_id=call, name="s"),
        ]
    return found


# What is written.


@pytest.mark.requirement("P-O3")
def test_each_node_has_a_file_with_a_line_for_each_operation(tmp_path: Path) -> None:
    def work(ctx: ExecutionContext) -> str:
        ctx.llm(lambda: Reported.of("secret answer", cost_usd=0.25, input_tokens=3, output_tokens=4), name="ask")
        ctx.tool(lambda: "secret page", name="fetch")
        ctx.llm(lambda: "secret answer without usage", name="guess")
        return "secret result"

    graph = Graph("g")
    graph.add_step(FunctionNode("worker", work), "first", input="secret input")
    graph.add_step(FunctionNode("closer", lambda ctx: None), "last", depends_on=["first"])
    history = History(tmp_path)
    context = run(graph, history)

    assert sorted(path.name for path in (tmp_path / "default").iterdir()) == ["closer.jsonl", "worker.jsonl"]
    text = (tmp_path / "default" / "worker.jsonl").read_text()
    entries = [json.loads(line) for line in text.splitlines()]
    assert ops(entries) == ["run", "llm", "tool", "llm", "end"]
    assert all(list(entry) == FIELDS for entry in entries)
    assert {(e["run_id"], e["node_id"], e["step_id"], e["graph_id"]) for e in entries} == {
        (context.run_id, "worker", "first", "g")
    }
    began, call, fetched, guessed, ended = entries
    assert (call["name"], call["cost_usd"], call["tokens"], call["error"]) == ("ask", 0.25, 7, None)
    assert (fetched["name"], fetched["parent_id"]) == ("fetch", began["call_id"])
    assert (fetched["cost_usd"], guessed["cost_usd"]) == (0, None), "an unknown cost is not zero"
    assert began["call_id"] == ended["call_id"]
    assert (began["duration_ms"], type(ended["duration_ms"])) == (None, float)
    assert [e["seq"] for e in entries] == sorted(e["seq"] for e in entries)
    assert datetime.fromisoformat(began["ts"]).utcoffset() == timedelta(0)
    assert "secret" not in text
    assert (history.written, history.lost, history.failures) == (7, 0, 0)


@pytest.mark.requirement("P-O3")
def test_entries_are_joined_to_a_trace_by_node_and_time(tmp_path: Path) -> None:
    trace = ExecutionTrace("g")
    graph = Graph("g")
    for name in ("a", "b", "c"):
        graph.add_step(FunctionNode(f"node-{name}", lambda ctx: ctx.tool(lambda: 1, name="t")), name)
    run(graph, History(tmp_path, "here"), trace=trace)
    run(graph, History(tmp_path, "here"))
    assert len(trace.steps) == 3
    for step in trace.steps:
        entries = list(read_history(tmp_path, step.node_id, "here", step.start_time, step.end_time))
        assert ops(entry for entry in entries if entry["call_id"] == step.call_id) == ["run", "end"]
        assert {entry["node_id"] for entry in entries} == {step.node_id}
        assert len(list(read_history(tmp_path, step.node_id, "here"))) == 6


def test_attempts_skips_and_fallbacks_are_distinguished(tmp_path: Path) -> None:
    def boom(ctx: ExecutionContext) -> None:
        raise ValueError("no")

    history = History(tmp_path)
    again = {"retry_count": 1, "retry_delay_ms": 0}
    run(one_step(boom, error_policy=ErrorPolicy(on_error="skip", **again)), history)
    run(one_step(boom, error_policy=ErrorPolicy(on_error="fallback", fallback_value=1)), history)
    entries = list(read_history(tmp_path, "node"))
    assert ops(entries) == ["run", "error", "run", "error", "skip", "end", "run", "error", "fallback", "end"]
    assert [entry["attempt"] for entry in entries[:4]] == [1, 1, 2, 2]
    assert entries[1]["error"] == "ValueError: no"
    assert entries[4]["error"] == entries[8]["error"] == "ValueError: no"


def test_a_refused_step_and_a_stop_are_written(tmp_path: Path) -> None:
    run(one_step(lambda ctx: 1), History(tmp_path), budget=Budget(max_steps=0))
    halted, limit = [entry for entry in read_history(tmp_path, "node") if entry["op"] != "run"]
    assert (halted["op"], limit["op"]) == ("halt", "limit_reached")
    assert "step" in halted["error"]
    assert limit["call_id"] == halted["call_id"]


def test_what_a_child_context_does_inside_a_step_belongs_to_its_node(tmp_path: Path) -> None:
    def work(ctx: ExecutionContext) -> None:
        with ctx.spawn_child("helper") as child:
            child.tool(lambda: 1, name="deep")
            child.trace_custom("noted", {"secret": 1})

    run(one_step(work), History(tmp_path))
    entries = list(read_history(tmp_path, "node"))
    assert {"run", "child_spawned", "tool", "custom", "system", "end"} <= set(ops(entries))
    assert [entry["name"] for entry in entries if entry["op"] == "custom"] == ["noted"]
    assert "secret" not in history_file(tmp_path, "node").read_text()


def test_steps_of_an_inner_graph_have_their_own_files(tmp_path: Path) -> None:
    inner = Graph("inner")
    inner.add_step(FunctionNode("leaf", lambda ctx: 1), "s")
    outer = Graph("outer")
    outer.add_step(inner, "nested")
    run(outer, History(tmp_path))
    assert ops(read_history(tmp_path, "inner")) == ["run", "end"]
    assert [(e["op"], e["graph_id"]) for e in read_history(tmp_path, "leaf")] == [("run", "inner"), ("end", "inner")]


def test_calls_outside_every_step_are_not_written(tmp_path: Path) -> None:
    context = ExecutionContext()
    subscription = context.observe(History(tmp_path))
    context.tool(lambda: 1)
    context.end()
    assert subscription.drain(PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_a_late_bill_is_still_written_to_the_node(tmp_path: Path) -> None:
    history = History(tmp_path)
    history(steps("run", "node"))
    history([CallSettled(run_id="run", seq=3, node_id="call-1", cost=0.5, input_tokens=1)])
    *_, last = read_history(tmp_path, "node")
    assert (last["op"], last["cost_usd"], last["tokens"]) == ("call_settled", 0.5, 1)


def test_what_is_remembered_of_a_run_is_bounded_and_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ENDED", 10)
    history = History(tmp_path)
    history(steps("run", *["node"] * 50))
    assert len(history._runs["run"]._ended) == 10
    history([RunCompleted(run_id="run", termination_reason=TerminationReason.SUCCESS)])
    assert history._runs == {}


def test_many_runs_share_one_history(tmp_path: Path) -> None:
    history = History(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run(one_step(lambda ctx: ctx.tool(lambda: 1)), history), range(8)))
    entries = read_history(tmp_path, "node")
    assert sorted(ops(entries)) == sorted(["run", "tool", "end"] * 8)
    assert entries.torn == 0


def test_many_writers_share_one_directory(tmp_path: Path) -> None:
    def write(number: int) -> None:
        history = History(tmp_path)
        for batch in range(20):
            history(steps(f"run-{number}", "node", "other", start=1 + 4 * batch))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    entries = read_history(tmp_path, "node")
    assert len(list(entries)) == 4 * 20 * 2
    assert entries.torn == 0


# Names of files.


IDS = st.text(min_size=1) | st.sampled_from(["a", "A", "con", "CON.txt", "nul", "..", "a/b", "a\\b", "é", "e\u0301"])


@given(st.lists(IDS, min_size=2, max_size=2, unique=True))
def test_every_id_has_a_safe_name_and_no_two_share_one_whatever_the_case(ids: list[str]) -> None:
    one, other = (file_name(id) for id in ids)
    assert one.lower() != other.lower()
    for name in (one, other):
        assert name.isascii()
        assert 0 < len(name) <= 100
        assert not set(name) & set('/\\:*?"<>|\0 ')
        assert name[0] != "."
        assert name[-1] not in ". "
        assert name.partition(".")[0] not in {"con", "prn", "aux", "nul", "com1", "lpt9"}


@pytest.mark.parametrize(("one", "other"), [("a", "A"), ("aB", "Ab"), ("é", "e\u0301"), ("a", "a "), ("a/b", "a-b")])
def test_ids_that_a_file_system_may_confuse_have_different_names(one: str, other: str) -> None:
    assert file_name(one).lower() != file_name(other).lower()


@pytest.mark.parametrize("id", ["research", "fetch_page-2", "v1.2", "9"])
def test_a_plain_id_is_its_own_name(id: str) -> None:
    assert file_name(id) == id


def test_an_id_cannot_lead_out_of_the_directory(tmp_path: Path) -> None:
    inside = tmp_path / "history"
    node = "../../" + "x" * 5_000
    history = History(inside, "../up")
    history(steps("run", node, "\ud800", "Ab", "aB"))
    assert history.written == 8
    assert [path.name for path in tmp_path.iterdir()] == ["history"]
    assert len(list(inside.glob("*/*.jsonl"))) == 4
    assert len(list(read_history(inside, node, "../up"))) == 2


def test_a_server_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="server must be text that is not empty"):
        History(tmp_path, "")


# Disks.


def test_a_file_that_was_moved_or_deleted_is_made_anew(tmp_path: Path) -> None:
    history = History(tmp_path)
    path = history_file(tmp_path, "node")
    history(steps("run", "node"))
    path.rename(path.with_suffix(".1"))
    history(steps("run", "node", start=3))
    path.unlink()
    path.parent.joinpath("node.1").unlink()
    path.parent.rmdir()
    history(steps("run", "node", start=5))
    assert [entry["seq"] for entry in read_history(tmp_path, "node")] == [5, 6]
    assert history.failures == 0


def test_nothing_stays_open_however_many_nodes_there_are(tmp_path: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    History(tmp_path)(steps("run", *(f"node-{number}" for number in range(300))))
    assert len(os.listdir("/dev/fd")) == before
    assert len(list((tmp_path / "default").iterdir())) == 300


def test_a_directory_that_cannot_be_written_is_counted_and_the_run_is_whole(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    history = History(tmp_path / "file")
    context = run(one_step(lambda ctx: 1), history)
    assert context.termination_reason is TerminationReason.SUCCESS
    assert isinstance(history.last_error, OSError)
    assert history.failures > 0
    assert (history.written, history.lost) == (0, 2)


def test_a_disk_that_fills_up_in_the_middle_of_a_line_costs_what_was_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, write = History(tmp_path), os.write
    history(steps("run", "node"))
    room = 250

    def full(file: int, data: bytes) -> int:
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken, room = write(file, data[:room]), 0
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        history(steps("run", "node", start=3))
    assert isinstance(history.last_error, OSError)
    assert history.last_error.errno == errno.ENOSPC
    lost = history.lost
    assert 0 < lost <= 2
    history(steps("run", "node", start=5))
    entries = read_history(tmp_path, "node")
    assert len(list(entries)) == history.written == 6 - lost
    assert entries.torn == 1
    assert (history.failures, history.lost) == (1, lost)


# Reading.


def lines(path: Path, texts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(texts))


def entry(ts: str, node: str = "node") -> str:
    return json.dumps({"ts": ts, "node_id": node}) + "\n"


def test_lines_that_are_torn_or_foreign_are_passed_over_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 100)
    good = entry("2026-01-01T00:00:00.000+00:00")
    torn = [good[:9], "[1]", "\x00\x00", '{"ts": 1, "node_id": "node"}', "x" * 350, '{"ts": "yes"}']
    lines(history_file(tmp_path, "node"), [good, *(f"{one}\n" for one in torn), "\n", good, good.rstrip("\n")])
    entries = read_history(tmp_path, "node")
    for _ in range(2):
        assert len(list(entries)) == 2
        assert entries.torn == len(torn) + 1


@pytest.mark.parametrize(
    ("since", "until", "found"),
    [(None, None, [0, 1, 2]), (1, None, [1, 2]), (None, 1, [0, 1]), (1, 1, [1]), (1.5, 2, [2]), (2.5, None, [])],
)
def test_entries_between_two_times(tmp_path: Path, since: float | None, until: float | None, found: list[int]) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def at(second: float | None) -> datetime | None:
        # A little later, as the clock of a step is finer than that of an entry.
        return None if second is None else start + timedelta(seconds=second, microseconds=900)

    stamps = [(start + timedelta(seconds=second)).isoformat(timespec="milliseconds") for second in range(3)]
    lines(history_file(tmp_path, "node"), [entry(stamp) for stamp in stamps])
    entries = read_history(tmp_path, "node", since=at(since), until=at(until))
    assert [stamps.index(one["ts"]) for one in entries] == found


def test_a_start_that_was_rounded_up_to_the_next_millisecond_finds_its_entry(tmp_path: Path) -> None:
    lines(history_file(tmp_path, "node"), [entry("2026-01-01T00:00:00.122+00:00")])
    since = datetime(2026, 1, 1, 0, 0, 0, 123_000, tzinfo=UTC)
    assert len(list(read_history(tmp_path, "node", since=since))) == 1
    assert list(read_history(tmp_path, "node", since=since + timedelta(microseconds=1))) == []


def test_the_first_moment_of_all_is_a_time_too(tmp_path: Path) -> None:
    lines(history_file(tmp_path, "node"), [entry("2026-01-01T00:00:00.122+00:00")])
    assert len(list(read_history(tmp_path, "node", since=datetime.min.replace(tzinfo=UTC)))) == 1


def test_another_node_in_the_same_file_is_not_mistaken_for_it(tmp_path: Path) -> None:
    lines(history_file(tmp_path, "node"), [entry("2026-01-01T00:00:00.122+00:00", "other")])
    assert list(read_history(tmp_path, "node")) == []


def test_a_node_that_never_ran_has_no_entries(tmp_path: Path) -> None:
    assert list(read_history(tmp_path, "unknown")) == []


@pytest.mark.parametrize("at", [datetime(2026, 1, 1), "2026-01-01"])  # noqa: DTZ001
def test_a_time_without_a_zone_is_refused(tmp_path: Path, at: Any) -> None:
    with pytest.raises(InvalidValue, match="since"):
        read_history(tmp_path, "node", since=at)
