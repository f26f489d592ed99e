"""Contexts in contexts: a child's calls are a sub-tree, its figures count above at once, its end is its own."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from penstock import (
    Budget,
    BudgetExceededError,
    CancellationToken,
    CancelledError,
    ChildCompleteTrace,
    ChildSpawnTrace,
    Decision,
    ExecutionConfig,
    ExecutionContext,
    InvalidValue,
    RunEnded,
    RunSettings,
    StopReason,
    TerminationReason,
    WrapOptions,
    contain,
)
from penstock.testing import ManualClock, check_history, explore
from penstock.testing.sim import SimLoop
from tests.soak import scaled


def nothing() -> None:
    pass


def fails() -> None:
    raise ConnectionRefusedError


# Being born.


@pytest.mark.requirement("T-4")
def test_a_child_knows_its_parent_its_depth_and_its_data_and_the_parent_knows_it() -> None:
    run = ExecutionContext(input="question", upstream={"a": 1}, session="s", data="parent's own")
    child = run.spawn_child("compaction", data={"mine": True})
    other = run.spawn_child("search")
    assert (child.parent, child.name, child.depth, run.depth, run.parent) == (run, "compaction", 1, 0, None)
    assert run.children == (child, other)
    assert (child.data, other.data, run.data) == ({"mine": True}, None, "parent's own")
    assert (child.input, child.upstream, child.session) == ("question", {"a": 1}, "s")
    assert (child.run_id, child.metadata, child.graph, child.ledger) == (
        run.run_id,
        run.metadata,
        run.graph,
        run.ledger,
    )


@pytest.mark.requirement("T-4", "T-2")
def test_start_and_end_of_a_child_are_events_of_its_parent() -> None:
    clock = ManualClock()
    run = ExecutionContext(clock=clock)
    run.start_iteration()
    child = run.spawn_child("compaction")
    clock.advance(1.5)
    run.complete_child(child)
    spawned, completed = [event for event in run.events if isinstance(event, ChildSpawnTrace | ChildCompleteTrace)]
    assert isinstance(spawned, ChildSpawnTrace)
    assert isinstance(completed, ChildCompleteTrace)
    assert (spawned.child_name, spawned.node_id, spawned.depth, spawned.iteration) == ("compaction", "n000002", 0, 1)
    assert (completed.child_name, completed.node_id) == ("compaction", "n000002")
    assert (completed.termination_reason, completed.duration_ms) == (TerminationReason.SUCCESS, 1_500)
    json.dumps([spawned.to_dict(), completed.to_dict()])
    run.start_iteration()  # emitted events do not change, whenever they are read
    assert [one for one in run.events if one.seq in (spawned.seq, completed.seq)] == [spawned, completed]


@pytest.mark.requirement("T-4")
def test_fifty_levels_are_fine() -> None:
    run = context = ExecutionContext(ExecutionConfig(None, 51, None))
    chain = [run]
    for level in range(50):
        context = context.spawn_child(f"level {level + 1}")
        chain.append(context)
        context.tool(nothing)
    assert context.depth == 50
    assert [each.stats.tool_call_count for each in chain] == [50, *range(50, 0, -1)]
    assert [each.stats.own.tool_call_count for each in chain] == [0] + [1] * 50  # type: ignore[union-attr]
    for child, parent in zip(reversed(chain), reversed(chain[:-1]), strict=False):
        parent.complete_child(child)
    run.end()
    assert context.events[0].source.count("/") == 50
    assert check_history(run.history()) == []


@pytest.mark.requirement("T-4")
def test_children_of_the_same_name_are_distinguished() -> None:
    run = ExecutionContext()
    children = [run.spawn_child(name) for name in ("worker", "worker", "worker#2", "worker", "worker")]
    for number, child in enumerate(children):
        for _ in range(number + 1):
            child.tool(nothing)
    assert [child.name for child in children] == ["worker", "worker", "worker#2", "worker", "worker"]
    sources = [child.events[0].source for child in children]
    assert len(set(sources)) == 5
    assert sources[:2] == ["main/worker", "main/worker#2"]
    assert [child.stats.tool_call_count for child in children] == [1, 2, 3, 4, 5]
    assert run.with_input(1).spawn_child("worker").events[0].source not in sources


@pytest.mark.requirement("T-4")
def test_children_of_the_same_name_are_distinguished_when_threads_spawn_them_together() -> None:
    run, together = ExecutionContext(), threading.Barrier(16)
    found: list[ExecutionContext] = []

    def spawn() -> None:
        together.wait()
        for _ in range(50):
            found.append(run.spawn_child("worker"))

    threads = [threading.Thread(target=spawn) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sources = {event.source for event in run.history() if event.depth == 1}
    assert len(sources) == len(run.children) == len(found) == 800


@pytest.mark.requirement("T-4")
@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("name", {"name": None}),
        ("name", {"name": 5}),
        ("budget", {"name": "child", "budget": 0.50}),
        ("budget", {"name": "child", "budget": ExecutionConfig(1, 1, 1)}),
        ("cancellation", {"name": "child", "cancellation": "now"}),
    ],
)
def test_a_child_that_cannot_be_is_refused_by_name_and_leaves_nothing_open(field: str, given: dict[str, Any]) -> None:
    with ExecutionContext() as run:
        before = len(run.history())
        with pytest.raises(InvalidValue) as refused:
            run.spawn_child(**given)
        assert refused.value.field == field
        assert (len(run.history()), run.children) == (before, ())


@pytest.mark.requirement("T-4")
def test_a_child_of_a_child_that_has_ended_is_refused() -> None:
    run = ExecutionContext()
    child = run.spawn_child("child")
    child.end()
    with pytest.raises(RunEnded, match=r"context 'main/child' of run .* has ended: child 'late' came after its end"):
        child.spawn_child("late")
    run.end()
    assert check_history(run.history()) == []


# Coming to an end.


@pytest.mark.requirement("T-4")
def test_completing_a_child_again_changes_nothing() -> None:
    run = ExecutionContext()
    child = run.spawn_child("child")
    run.complete_child(child)
    before = run.history()
    run.complete_child(child, TerminationReason.ERROR)
    child.end(ValueError())
    with child:
        pass
    assert (run.history(), child.termination_reason) == (before, TerminationReason.SUCCESS)


@pytest.mark.requirement("T-4")
@pytest.mark.parametrize("reason", list(TerminationReason))
def test_complete_child_accepts_a_termination_reason(reason: TerminationReason) -> None:
    run = ExecutionContext()
    child = run.spawn_child("child")
    run.complete_child(child, reason)
    assert child.termination_reason is reason


@pytest.mark.requirement("T-4")
def test_a_context_completes_only_its_own_children() -> None:
    run, other = ExecutionContext(name="run"), ExecutionContext(name="other")
    child = run.spawn_child("child")
    grandchild = child.spawn_child("grandchild")
    for parent, wrong in ((other, child), (run, grandchild), (run, run), (child, child), (run, "child"), (run, None)):
        with pytest.raises(InvalidValue, match=f"child must be a child of '{parent.name}'"):
            parent.complete_child(wrong)  # type: ignore[arg-type]
    assert (child.termination_reason, grandchild.termination_reason) == (None, None)


@pytest.mark.requirement("T-4")
def test_a_handle_at_the_parents_place_completes_and_one_at_the_childs_is_completed() -> None:
    run = ExecutionContext()
    first, second = run.with_input(1).spawn_child("first"), run.spawn_child("second")
    assert run.children == (first, second)
    run.complete_child(first)
    run.with_upstream({}).complete_child(second.with_input(2))
    assert (first.termination_reason, second.termination_reason) == ("success", "success")


# Stopping.


@pytest.mark.requirement("T-4", "C-4")
def test_a_child_that_is_aborted_stops_alone() -> None:
    run = ExecutionContext()
    child, sibling = run.spawn_child("child"), run.spawn_child("sibling")
    grandchild = child.spawn_child("grandchild")
    child.abort("not needed")
    assert [each.wrap_tool_call(nothing) for each in (child, grandchild)] == [Decision.HALT] * 2
    assert [each.wrap_tool_call(nothing) for each in (run, sibling)] == [Decision.ALLOW] * 2
    child.end()
    run.end()
    assert (child.termination_reason, run.termination_reason) == ("context_canceled", "success")
    assert run.get_snapshot().events[0].metadata["budget"] == "child"


@pytest.mark.requirement("T-4", "C-4")
async def test_the_abort_of_a_parent_reaches_work_that_runs_in_its_grandchildren() -> None:
    run = ExecutionContext()
    grandchild = run.spawn_child("child").spawn_child("grandchild")
    running = asyncio.create_task(grandchild.acall_tool(lambda: asyncio.sleep(30)))
    await asyncio.sleep(0)
    run.abort("enough")
    outcome = await asyncio.wait_for(running, 30)
    assert (outcome.decision, outcome.call.stop.message) == (Decision.HALT, "enough")  # type: ignore[union-attr]
    with pytest.raises(CancelledError, match="enough"):
        grandchild.check_cancelled()


@pytest.mark.requirement("T-4", "C-4")
def test_a_child_with_a_token_of_its_own_obeys_that_and_its_parent_and_the_token_outlives_it() -> None:
    for stopped_by in ("token", "parent"):
        run, token = ExecutionContext(), CancellationToken(name="button")
        child, sibling = run.spawn_child("child", cancellation=token), run.spawn_child("sibling")
        assert child.wrap_tool_call(nothing) is Decision.ALLOW
        token.cancel("pressed") if stopped_by == "token" else run.abort("enough")
        assert child.wrap_tool_call(nothing) is Decision.HALT
        assert (sibling.wrap_tool_call(nothing) is Decision.ALLOW) == (stopped_by == "token")
        assert (run.wrap_tool_call(nothing) is Decision.ALLOW) == (stopped_by == "token")
        assert token.is_cancelled == (stopped_by == "token")
        assert child.stop.message == ("pressed" if stopped_by == "token" else "enough")  # type: ignore[union-attr]


@pytest.mark.requirement("T-4", "C-4")
def test_the_token_of_a_child_frees_who_waits_for_its_sync_work() -> None:
    token, started, release, finished = CancellationToken(), threading.Event(), threading.Event(), threading.Event()
    child = ExecutionContext().spawn_child("child", cancellation=token)

    def slow() -> None:
        started.set()
        release.wait(30)
        finished.set()

    def press() -> None:
        assert started.wait(30)
        token.cancel("pressed")

    presser = threading.Thread(target=press)
    presser.start()
    outcome = child.call_tool(slow)
    assert not finished.is_set()
    assert (outcome.decision, outcome.call.stop.message) == (Decision.HALT, "pressed")  # type: ignore[union-attr]
    release.set()
    presser.join()


@pytest.mark.requirement("T-4", "C-4")
def test_the_deadline_of_the_token_of_a_child_is_kept() -> None:
    clock = ManualClock()
    run = ExecutionContext(clock=clock, settings=RunSettings(sync_calls="inline"))
    child = run.spawn_child("child", cancellation=CancellationToken(deadline_s=2, name="button", clock=clock))
    clock.advance(1)
    assert child.wrap_tool_call(nothing) is Decision.ALLOW
    clock.advance(1)
    assert (child.wrap_tool_call(nothing), run.wrap_tool_call(nothing)) == (Decision.HALT, Decision.ALLOW)
    assert child.stop.budget == "button"  # type: ignore[union-attr]


@pytest.mark.requirement("T-4")
def test_children_that_have_ended_no_longer_listen_to_their_token() -> None:
    token = CancellationToken()
    run = ExecutionContext()
    for number in range(100):
        with run.spawn_child(f"child {number}", cancellation=token):
            pass
    token.cancel("pressed")
    assert not any(child.cancellation.is_cancelled for child in run.children)


@pytest.mark.requirement("T-4")
def test_a_cancel_after_the_end_of_a_child_did_not_stop_it() -> None:
    token = CancellationToken()
    run = ExecutionContext()
    with run.spawn_child("done", cancellation=token) as done:
        pass
    left_open = run.spawn_child("left open", cancellation=token)
    run.end()
    token.cancel("pressed")
    assert [each.stop for each in (done, left_open, run)] == [None] * 3
    assert not any(each.get_snapshot().aborted for each in (done, left_open, run))


@pytest.mark.requirement("T-4")
def test_the_time_limit_of_a_child_stops_the_child_and_the_run_continues() -> None:
    release = threading.Event()
    run = ExecutionContext()
    with run.spawn_child("child", budget=Budget(max_time_seconds=0.02)) as child:
        outcome = child.call_tool(lambda: release.wait(30))
        release.set()
        assert outcome.call.stop.reason is StopReason.TIMEOUT  # type: ignore[union-attr]
        assert outcome.call.stop.budget == "child"  # type: ignore[union-attr]
    assert child.termination_reason == "limit_exceeded"
    assert run.wrap_tool_call(nothing) is Decision.ALLOW


@pytest.mark.requirement("T-4")
def test_a_child_stopped_by_its_parents_deadline_names_the_parent() -> None:
    release = threading.Event()
    run = ExecutionContext(ExecutionConfig(None, None, None, timeout_ms=20), name="run")
    with run.spawn_child("child") as child:
        outcome = child.call_tool(lambda: release.wait(30))
        release.set()
    assert (outcome.call.stop.budget, outcome.call.stop.limit) == ("run", 0.02)  # type: ignore[union-attr]
    assert child.termination_reason == "limit_exceeded"


@pytest.mark.requirement("P-B4", "T-4")
def test_a_child_without_a_budget_draws_on_the_nearest_one_above() -> None:
    run = ExecutionContext(budget=Budget(max_steps=3), name="run")
    child = run.spawn_child("child", budget=Budget(max_steps=2))
    grandchild = child.spawn_child("grandchild")
    assert (grandchild.budget, child.budget) == (Budget(max_steps=2), Budget(max_steps=2))
    grandchild.tool(nothing)
    child.tool(nothing)
    with pytest.raises(BudgetExceededError) as refused:
        grandchild.tool(nothing)
    assert (refused.value.owner, refused.value.usage.steps_executed) == ("child", 2)
    run.tool(nothing)
    with pytest.raises(BudgetExceededError) as refused:
        run.spawn_child("late").tool(nothing)
    assert refused.value.owner == "run"


@pytest.mark.requirement("T-3", "C-3")
def test_the_failures_of_children_draw_on_the_retries_of_the_run() -> None:
    run = ExecutionContext(ExecutionConfig(None, None, 2))
    decisions = [run.spawn_child("child").wrap_tool_call(fails) for _ in range(4)]
    assert decisions == [Decision.RETRY, Decision.RETRY, Decision.HALT, Decision.HALT]


# Figures.


@pytest.mark.requirement("T-3")
def test_a_childs_figures_count_in_its_parent_immediately_and_separately_in_the_child() -> None:
    run = ExecutionContext()
    run.llm(lambda: run.report(cost_usd=0.10, input_tokens=10, output_tokens=1, model="large-1"))
    child = run.spawn_child("compaction")
    child.llm(lambda: child.report(cost_usd=0.02, input_tokens=200, output_tokens=20, model="small-1"))
    grandchild = child.spawn_child("search")
    grandchild.tool(nothing, name="look")
    grandchild.wrap_tool_call(fails, WrapOptions("look"))
    stats = run.stats
    assert (stats.total_input_tokens, stats.total_output_tokens, stats.total_cost) == (210, 21, 0.12)
    assert stats.input_tokens_by_model == {"large-1": 10, "small-1": 200}
    assert stats.output_tokens_by_model == {"large-1": 1, "small-1": 20}
    assert (stats.cost_by_model, stats.cost_by_child) == ({"large-1": 0.10, "small-1": 0.02}, {"compaction": 0.02})
    assert (stats.tool_call_count, stats.tool_calls_by_name, stats.failed_count) == (2, {"look": 2}, 1)
    assert stats.own is not None
    assert (stats.own.total_cost, stats.own.tool_call_count, stats.own.own) == (0.10, 0, None)
    assert (child.stats.total_cost, child.stats.tool_call_count) == (0.02, 2)
    assert child.stats.own is not None
    assert child.stats.own.tool_call_count == 0
    assert grandchild.stats.total_cost == 0


@pytest.mark.requirement("T-3")
def test_figures_do_not_wait_for_the_child_to_be_completed_and_do_not_count_twice_when_it_is() -> None:
    run = ExecutionContext()
    child = run.spawn_child("child")
    child.tool(nothing, cost_hint_usd=0.25)
    assert run.stats.total_cost == run.balance.spent_usd == 0.25
    run.complete_child(child)
    assert run.stats.total_cost == run.balance.spent_usd == 0.25


@pytest.mark.requirement("T-3")
def test_figures_are_exact_when_many_children_work_at_the_same_time() -> None:
    run, together = ExecutionContext(), threading.Barrier(16)

    def work(number: int) -> None:
        together.wait()
        for _ in range(20):
            with run.spawn_child(f"worker {number}") as child:
                child.llm(lambda c=child: c.report(cost_usd=0.001, input_tokens=7, output_tokens=3, model="m-1"))
                child.tool(nothing, name="look")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = run.stats
    assert (stats.total_input_tokens, stats.total_output_tokens, stats.total_cost) == (2_240, 960, 0.32)
    assert (stats.model_call_count, stats.tool_calls_by_name) == (320, {"look": 320})
    assert sum(child.stats.total_input_tokens for child in run.children) == 2_240
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []


# Where things happen.


@pytest.mark.requirement("T-2")
def test_every_event_of_a_child_has_its_path_its_depth_and_its_own_iteration() -> None:
    run = ExecutionContext()
    run.start_iteration()
    with run.spawn_child("loop") as child:
        for _ in range(2):
            child.start_iteration()
        child.llm(nothing)
        child.trace_custom("note")
        child.end_iteration("terminate")
    run.tool(nothing)
    run.end_iteration()
    assert {(event.source, event.depth) for event in child.events} == {("main/loop", 1)}
    assert [(event.kind, event.iteration) for event in child.events] == [
        ("call_started", 0),
        ("iteration_started", 1),
        ("iteration_started", 2),
        ("call_started", 2),
        ("call_ended", 2),
        ("custom", 2),
        ("iteration_ended", 2),
        ("call_ended", 0),
    ]
    assert [event.iteration for event in run.events if event.kind == "call_started"] == [0, 1]
    assert (run.iteration, child.iteration) == (1, 2)


@pytest.mark.requirement("T-4", "G-10")
def test_a_child_spawned_inside_a_call_hangs_under_that_call() -> None:
    with contain() as run:

        def tool() -> None:
            with run.spawn_child("agent") as agent:
                agent.llm(nothing, name="ask")

        run.tool(tool, name="delegate")
        run.spawn_child("beside").end()
    nodes = run.graph.snapshot()["nodes"]
    parent_of = {node["name"]: nodes[node["parent_id"]]["name"] for node in nodes.values() if node["parent_id"]}
    assert parent_of == {"delegate": "main", "agent": "delegate", "ask": "agent", "beside": "main"}


async def one_family(seed: int) -> None:
    """Parents and children on one loop: some abort, some are completed early, some are never completed."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    run = ExecutionContext(ExecutionConfig(None, 6 + seed % 3, None), clock=loop.clock)

    async def live(parent: ExecutionContext, level: int) -> None:
        child = parent.spawn_child("child")
        await child.acall_tool(lambda: asyncio.sleep(0.01 * (seed % 3)))
        if level:
            await asyncio.gather(live(child, level - 1), live(child, level - 1), return_exceptions=True)
        if (seed + level) % 4 == 0:
            child.abort("enough")
        if (seed + level) % 5:
            parent.complete_child(child)

    await asyncio.gather(live(run, 2), live(run, 1), return_exceptions=True)
    run.end()
    assert check_history(run.history(), ledger=run.balance) == []
    spawned = [event.node_id for event in run.history() if isinstance(event, ChildSpawnTrace)]
    completed = [event.node_id for event in run.history() if isinstance(event, ChildCompleteTrace)]
    assert sorted(spawned) == sorted(completed)


@pytest.mark.requirement("T-4")
@pytest.mark.reliability
def test_in_any_order_every_child_that_was_born_ends_once_and_inside_its_parent() -> None:
    explore(one_family, schedules=scaled(125, soak=5_000))
