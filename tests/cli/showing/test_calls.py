"""The call tree as a picture keeps it."""

from __future__ import annotations

from contextlib import ExitStack
from threading import Event, Thread

from penstock import ExecutionContext
from penstock.cli.showing.calls import MAX_BELOW, MAX_DEPTH, Calls, Shown
from penstock.cli.showing.picture import tree
from penstock.front_door import contain


def folded(run: ExecutionContext, calls: Calls | None = None) -> Calls:
    calls = calls or Calls()
    calls.take(run.history())
    return calls


def test_calls_stand_below_the_call_that_made_them_with_cost_and_status() -> None:
    with contain(name="run") as run, run.spawn_child("agent") as agent:
        agent.tool(str, 1, name="think", cost_hint_usd=0.25)
    root = folded(run).root
    (child,) = root.below
    (think,) = child.below
    assert (root.name, child.name, think.path) == ("run", "agent", "agent/think")
    assert (think.status, think.said, root.total_usd) == ("success", "$0.2500", 0.25)


def test_what_is_planned_is_no_longer_once_it_has_begun() -> None:
    with contain() as run:
        run.tool(str, 1, name="first")
        calls = folded(run, Calls(["first", "second"]))
    assert list(calls.planned) == ["second"]


def test_a_refusal_and_the_first_stop_are_kept() -> None:
    with contain(max_steps=0) as run:
        run.call_tool(lambda: 1)
        run.call_tool(lambda: 2)
    calls = folded(run)
    assert [call.said for call in calls.root.below] == ["refused", "refused"]
    assert calls.first_stop is not None
    assert calls.first_stop.stop_reason == "step_limit_exceeded"


def test_a_failure_says_why() -> None:
    with contain() as run:
        run.call_tool(lambda: 1 / 0)
    assert folded(run).root.below[0].why.startswith("ZeroDivisionError")


def test_old_calls_are_counted_instead_of_kept_and_their_cost_stays() -> None:
    with contain() as run:
        for _ in range(MAX_BELOW + 50):
            run.tool(str, 1, cost_hint_usd=0.01)
    root = folded(run).root
    assert (len(root.below), root.left_out) == (MAX_BELOW, 50)
    assert round(root.total_usd, 9) == (MAX_BELOW + 50) / 100


def test_what_is_far_below_a_call_that_has_ended_is_folded() -> None:
    with contain() as run, run.spawn_child("a") as a, a.spawn_child("b") as b:
        b.tool(str, 1, cost_hint_usd=0.5)
    (shown,) = folded(run).root.below
    assert [(one.name, one.below, one.left_out, one.total_usd) for one in shown.below] == [("b", [], 1, 0.5)]


def test_a_tree_of_any_depth_is_kept_to_a_depth_and_its_cost_is_counted() -> None:
    with ExitStack() as open_ones:
        run = child = open_ones.enter_context(contain(name="run"))
        for _ in range(3_000):
            child = open_ones.enter_context(child.spawn_child("deeper"))
        child.tool(str, 1, cost_hint_usd=0.5)
        calls = folded(run)
        assert calls.root.total_usd == 0.5
        rows = list(tree(calls.root, 80))
    assert len(rows) == MAX_DEPTH - 1  # the last of them stands beside the one above it
    assert folded(run).root.total_usd == 0.5


def test_work_that_was_left_behind_was_cut_off_and_not_refused() -> None:
    release, started = Event(), Event()

    def blocks() -> None:
        started.set()
        release.wait(30)

    with contain() as run:
        stopping = Thread(target=lambda: started.wait(30) and run.abort("enough"))
        stopping.start()
        run.call_tool(blocks)
        release.set()
        stopping.join()
    assert [call.said for call in folded(run).root.below] == ["cut off"]


def test_an_end_without_its_beginning_is_passed_over() -> None:
    with contain() as run:
        run.tool(str, 1)
    calls = Calls()
    calls.take(run.history()[-2:])
    assert calls.root.below == []


def test_a_call_that_was_stopped_on_its_way_was_cut_off() -> None:
    assert Shown("x", "tool", status="halt").said == "cut off"
    assert Shown("x", "tool", status="halt", refused=True).said == "refused"
    assert Shown("x", "system", status="halt", below=[Shown("y", "tool")]).said == "stopped"
