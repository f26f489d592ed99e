"""A run at one moment: while it works, after it was stopped, after it has ended."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from datetime import UTC, datetime, timedelta

import pytest

from penstock import (
    Budget,
    ChainMetadata,
    ContextSnapshot,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    NodeRecord,
    RunSettings,
    ShieldPipeline,
    ToolCallContext,
    WrapOptions,
    contain,
)
from penstock.testing import ManualClock

START = datetime(2026, 1, 1, tzinfo=UTC)
META = ChainMetadata(request_id="req-1", chain_id="chain-1")


def nothing() -> None:
    pass


def fails() -> None:
    raise ValueError("no answer")


class Held:
    """A function that runs until it is let go."""

    def __init__(self) -> None:
        self.started, self._go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.started.set()
        assert self._go_on.wait(30)
        return "late"

    def let_go(self) -> None:
        self._go_on.set()


@pytest.mark.requirement("C-12")
def test_a_snapshot_has_every_field_of_a_run_and_of_its_calls() -> None:
    assert [field.name for field in dataclasses.fields(ContextSnapshot)][:10] == [
        "chain_id",
        "request_id",
        "step_count",
        "cost_usd_accumulated",
        "retries_used",
        "aborted",
        "abort_reason",
        "elapsed_ms",
        "nodes",
        "events",
    ]
    assert [field.name for field in dataclasses.fields(NodeRecord)] == [
        "node_id",
        "parent_id",
        "kind",
        "operation_name",
        "start_ts",
        "end_ts",
        "status",
        "cost_usd",
        "retries_used",
        "cost_unknown",
    ]


@pytest.mark.requirement("C-12")
def test_a_snapshot_has_the_figures_of_the_run() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(1, None, 5), metadata=META, clock=clock)
    clock.advance(1)
    ctx.llm(lambda: clock.advance(2), name="plan", cost_hint_usd=0.25)
    ctx.wrap_tool_call(fails, WrapOptions("search", cost_estimate_hint=0.10))
    snapshot = ctx.get_snapshot()
    assert (snapshot.chain_id, snapshot.request_id, snapshot.elapsed_ms) == ("chain-1", "req-1", 3_000)
    assert (snapshot.step_count, snapshot.attempts, snapshot.retries_used) == (1, 2, 1)
    assert (snapshot.cost_usd_accumulated, snapshot.held_usd, snapshot.unresolved_usd) == (0.25, 0, 0.10)
    assert (snapshot.aborted, snapshot.abort_reason, snapshot.events, snapshot.events_dropped) == (False, None, [], 0)
    assert snapshot.seq == len(ctx.history())
    assert snapshot.nodes == [
        NodeRecord(
            "n000002", None, "llm", "plan", START + timedelta(seconds=1), START + timedelta(seconds=3), "ok", 0.25, 0
        ),
        NodeRecord(
            "n000003", None, "tool", "search", START + timedelta(seconds=3), START + timedelta(seconds=3), "error", 0, 1
        ),
    ]


@pytest.mark.requirement("C-12")
def test_a_snapshot_cannot_be_changed_and_does_not_change() -> None:
    ctx = ExecutionContext()
    ctx.tool(nothing)
    before = ctx.get_snapshot()
    copied = dataclasses.asdict(before)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.step_count = 9  # type: ignore[misc]
    ctx.tool(nothing)
    ctx.abort("enough")
    before.nodes.clear()
    assert len(ctx.get_snapshot().nodes) == 2
    assert dataclasses.asdict(before) == copied | {"nodes": []}


@pytest.mark.requirement("C-12")
def test_a_running_call_is_listed_without_an_end_even_after_an_abort() -> None:
    work = Held()
    ctx = ExecutionContext(ExecutionConfig(1, None, None), settings=RunSettings(sync_calls="inline"))
    ctx.tool(lambda: "done", name="before")
    thread = threading.Thread(target=lambda: ctx.wrap_llm_call(work, WrapOptions("ask", cost_estimate_hint=0.25)))
    thread.start()
    assert work.started.wait(30)
    running = ctx.get_snapshot()
    ctx.abort("enough")
    stopped = ctx.get_snapshot()
    for snapshot in (running, stopped):
        done, under_way = snapshot.nodes
        assert (done.status, done.end_ts is not None) == ("ok", True)
        assert (under_way.operation_name, under_way.status, under_way.end_ts) == ("ask", "running", None)
        assert (snapshot.step_count, snapshot.attempts, snapshot.held_usd) == (1, 2, 0.25)
    assert (stopped.aborted, stopped.abort_reason) == (True, "enough")
    assert ctx.partial_results == {"before": "done"}
    work.let_go()
    thread.join()
    assert [node.status for node in ctx.get_snapshot().nodes] == ["ok", "aborted"]
    assert ctx.partial_results == {"before": "done"}


@pytest.mark.requirement("C-12")
async def test_calls_of_tasks_under_way_are_there_and_a_snapshot_may_be_taken_from_inside_one() -> None:
    ctx = ExecutionContext()
    seen: list[ContextSnapshot] = []

    async def look() -> None:
        await asyncio.sleep(0)
        seen.append(ctx.get_snapshot())

    await asyncio.gather(*(ctx.atool(look, name=f"task {number}") for number in range(3)))
    assert [node.status for node in seen[0].nodes] == ["running"] * 3
    assert [node.end_ts for node in ctx.get_snapshot().nodes].count(None) == 0


@pytest.mark.requirement("C-12")
def test_after_the_end_a_snapshot_stays_as_it_was() -> None:
    clock = ManualClock()
    with ExecutionContext(metadata=META, clock=clock) as ctx:
        ctx.tool(nothing)
        clock.advance(2)
    ended = ctx.get_snapshot()
    clock.advance(3_600)
    assert ctx.get_snapshot() == ended
    assert (ended.elapsed_ms, ctx.usage.time_elapsed_seconds) == (2_000, 2)


@pytest.mark.requirement("C-12")
def test_a_run_past_its_timeout_is_shown_as_aborted() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=1_000), clock=clock)
    clock.advance(1.5)
    snapshot = ctx.get_snapshot()
    assert (snapshot.aborted, snapshot.abort_reason) == (True, "timeout: 1.500 s elapsed of the 1 s of 'main'")


@pytest.mark.requirement("C-12")
def test_a_run_that_ended_in_time_is_not_aborted_when_its_deadline_passes_later() -> None:
    clock = ManualClock()
    with ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=1_000), clock=clock) as ctx:
        clock.advance(0.5)
    clock.advance(60)
    assert (ctx.get_snapshot().aborted, ctx.get_snapshot().abort_reason) == (False, None)


@pytest.mark.requirement("C-12")
def test_a_refusal_by_a_limit_is_not_an_abort() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 0, None))
    ctx.wrap_tool_call(nothing)
    snapshot = ctx.get_snapshot()
    assert (snapshot.aborted, snapshot.abort_reason) == (False, None)
    assert [event.event_type for event in snapshot.events] == ["step_limit_exceeded"]


@pytest.mark.requirement("C-12")
def test_the_status_of_a_call_is_how_it_ended() -> None:
    class Deny:
        def before_tool_call(self, ctx: ToolCallContext) -> Decision | None:
            return Decision.HALT if ctx.tool_name == "denied" else None

    release = threading.Event()
    ctx = ExecutionContext(pipeline=ShieldPipeline(tool_dispatch=Deny()))
    ctx.wrap_tool_call(nothing, WrapOptions("ok"))
    ctx.wrap_tool_call(fails, WrapOptions("error"))
    ctx.wrap_tool_call(nothing, WrapOptions("denied"))
    ctx.wrap_tool_call(lambda: release.wait(30), WrapOptions("timeout", timeout_ms=10))
    release.set()
    ctx.abort("enough")
    ctx.wrap_tool_call(nothing, WrapOptions("aborted"))
    status = {node.operation_name: node.status for node in ctx.get_snapshot().nodes}
    assert status == {"ok": "ok", "error": "error", "denied": "halted", "timeout": "timeout", "aborted": "aborted"}
    with contain(max_steps=1) as run:
        run.wrap_tool_call(nothing)
        run.wrap_tool_call(nothing)
    assert [node.status for node in run.get_snapshot().nodes] == ["ok", "halted"]


@pytest.mark.requirement("C-12", "G-10")
def test_the_parent_of_a_call_is_the_call_that_made_it_and_is_in_the_snapshot_itself() -> None:
    with ExecutionContext() as ctx:

        def outer() -> None:
            with ctx.spawn_child("agent") as agent:
                agent.llm(lambda: agent.tool(nothing, name="inner"), name="ask")

        ctx.tool(outer, name="outer")
        ctx.tool(nothing, name="beside")
    nodes = {node.node_id: node for node in ctx.get_snapshot().nodes}
    parents = {
        node.operation_name: nodes[node.parent_id].operation_name if node.parent_id else None for node in nodes.values()
    }
    assert parents == {"outer": None, "ask": "outer", "inner": "ask", "beside": None}


@pytest.mark.requirement("C-12")
def test_a_call_whose_parent_was_folded_is_listed_under_a_kept_ancestor() -> None:
    ctx = ExecutionContext(settings=RunSettings(max_kept_calls=4))
    for _ in range(20):
        ctx.tool(lambda: ctx.tool(nothing, name="inner"), name="outer")
    nodes = ctx.get_snapshot().nodes
    ids = {node.node_id for node in nodes}
    assert all(node.parent_id is None or node.parent_id in ids for node in nodes)
    assert ctx.get_snapshot().step_count == 40


@pytest.mark.requirement("C-12")
def test_the_figures_the_calls_and_the_events_of_a_snapshot_are_of_one_instant() -> None:
    ctx = ExecutionContext(ExecutionConfig(None, 600, None))
    together = threading.Barrier(5)

    def spend() -> None:
        together.wait()
        for _ in range(200):
            ctx.wrap_tool_call(nothing, WrapOptions("step", cost_estimate_hint=0.001))

    threads = [threading.Thread(target=spend) for _ in range(4)]
    for thread in threads:
        thread.start()
    together.wait()
    torn = []
    while any(thread.is_alive() for thread in threads):
        snapshot = ctx.get_snapshot()
        done = [node for node in snapshot.nodes if node.status == "ok"]
        if len(done) != snapshot.step_count or round(snapshot.cost_usd_accumulated * 1_000) != snapshot.step_count:
            torn.append(snapshot.seq)
    for thread in threads:
        thread.join()
    assert torn == []
    assert ctx.get_snapshot().step_count == 600


@pytest.mark.requirement("C-12")
def test_a_child_with_a_budget_of_its_own_has_figures_of_its_own() -> None:
    clock = ManualClock()
    ctx = ExecutionContext(clock=clock)
    ctx.tool(nothing)
    clock.advance(5)
    child = ctx.spawn_child("child", budget=Budget(max_steps=5))
    child.tool(nothing)
    clock.advance(1)
    child.abort("enough")
    assert (child.get_snapshot().step_count, ctx.get_snapshot().step_count) == (1, 2)
    assert (child.get_snapshot().elapsed_ms, ctx.get_snapshot().elapsed_ms) == (1_000, 6_000)
    assert (child.get_snapshot().aborted, ctx.get_snapshot().aborted) == (True, False)
