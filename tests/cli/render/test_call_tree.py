"""The call tree: how events fold into it, and how it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Event, Thread

import pytest

from penstock import ExecutionContext, Reported
from penstock.cli.render.call_tree import (
    MAX_BELOW,
    MAX_DEPTH,
    Calls,
    Row,
    ShownCall,
    describe_call,
    fitting,
    frame,
    meters,
    tree,
)
from penstock.cli.render.local import Shown, run_event
from penstock.cli.render.screen import Line
from penstock.front_door import contain
from penstock.runtime.calls import WrapOptions


def folded(run: ExecutionContext, calls: Calls | None = None) -> Calls:
    calls, log = calls or Calls(), run.history()
    for trace in log:
        if isinstance(trace, Shown):
            calls.add(run_event(trace, log[0].at_ms))
    return calls


def test_calls_stand_below_the_call_that_made_them_with_cost_and_status() -> None:
    with contain(name="run") as run, run.spawn_child("agent") as agent:
        agent.tool(str, 1, name="think", cost_hint_usd=0.25)
    root = folded(run).root
    (child,) = root.below
    (think,) = child.below
    assert (root.name, child.name, think.path) == ("run", "agent", "agent/think")
    assert (think.status, think.result, root.total_usd) == ("success", "$0.2500", 0.25)


def test_calls_of_unknown_cost_are_unknown_in_their_line_and_in_every_sum_above() -> None:
    with contain(name="run") as run, run.spawn_child("agent") as agent:
        agent.llm(lambda: "an answer without usage", name="ask")
        with agent.spawn_child("priced") as priced:
            priced.llm(lambda: Reported.of("text", cost_usd=0.25), name="ask")
            priced.llm(lambda: "an answer without usage", name="guess")
    calls, log, described = Calls(), run.history(), []
    for event in [run_event(trace, log[0].at_ms) for trace in log if isinstance(trace, Shown)]:
        if (ended := calls.add(event)) is not None:
            described.append(describe_call(event.data, ended))
    assert described[:4] == [
        "✓ llm agent/ask · cost unknown",
        "✓ llm agent/priced/ask · $0.25",
        "✓ llm agent/priced/guess · cost unknown",
        "✓ step agent/priced · at least $0.25, 1 call unknown",
    ]
    (agent_call,) = calls.root.below
    assert [call.result for call in agent_call.below] == ["unknown", "≥ $0.2500"]
    assert (calls.root.unknown_costs, calls.root.short_cost) == (2, "≥ $0.2500")


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
    assert [call.result for call in calls.root.below] == ["refused", "refused"]
    assert calls.first_stop is not None
    assert calls.first_stop.data["stop_reason"] == "step_limit_exceeded"


def test_failure_has_its_reason() -> None:
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
    assert [call.result for call in folded(run).root.below] == ["cut off"]


def test_an_end_without_its_beginning_is_passed_over() -> None:
    with contain() as run:
        run.tool(str, 1)
    calls = Calls()
    for trace in run.history()[-2:]:
        if isinstance(trace, Shown):
            calls.add(run_event(trace, 0))
    assert calls.root.below == []


def test_a_call_that_was_stopped_on_its_way_was_cut_off() -> None:
    assert ShownCall("x", "tool", status="halt", refused=False).result == "cut off"
    assert ShownCall("x", "tool", status="halt").result == "stopped"
    assert ShownCall("x", "tool", status="halt", refused=True).result == "refused"
    assert ShownCall("x", "system", status="halt", below=[ShownCall("y", "tool")]).result == "stopped"


def text(lines: Sequence[Line]) -> list[str]:
    return ["".join(piece for piece, _ in line).rstrip() for line in lines]


def drawn(*calls: ShownCall, width: int = 80) -> list[str]:
    return text([row.line for row in tree(ShownCall("root", "system", below=list(calls)), width)])


def test_a_bar_for_each_limit_and_figures_for_the_rest() -> None:
    with contain(max_cost_usd=0.5, max_steps=4) as run:
        run.tool(str, 1, cost_hint_usd=0.25)
        lines = text(meters(run.balance, 1.25, 60))
    assert lines == [
        "cost    ━━━━━━━━───────  $0.2500 of $0.50",
        "steps   ━━━━───────────        1 of 4",
        "time 1.2 s",
    ]


def test_what_is_held_is_drawn_apart_from_what_is_spent() -> None:
    with contain(max_cost_usd=1) as run:

        def look() -> list[str]:
            return text(meters(run.balance, 0, 65))

        line = run.tool(look, cost_hint_usd=0.5)[0]
    assert line == "cost    ╍╍╍╍╍╍╍╍╍╍──────────  $0.0000 of $1.00 + $0.5000 held"


@pytest.mark.parametrize("limit", [0, 0.001, 10**8])
def test_a_limit_of_any_size_has_a_bar(limit: float) -> None:
    with contain(max_cost_usd=limit) as run:
        (line, *_) = text(meters(run.balance, 0, 20))
    assert line.startswith("cost    ")


def test_calls_that_made_none_stand_beside_the_one_that_made_them() -> None:
    think = ShownCall("think", "llm", model="m-1", status="success", cost_usd=0.01)
    agent = ShownCall("agent", "system", below=[think, ShownCall("search", "tool")])
    assert drawn(ShownCall("plan", "llm", status="success"), agent) == [
        "✓ plan",
        "● agent     $0.0100  m-1  ✓ think $0.0100  ● search",
    ]


def test_calls_that_made_calls_have_a_line_below() -> None:
    inner = ShownCall("inner", "system", below=[ShownCall("think", "llm")])
    above, below = drawn(ShownCall("outer", "system", below=[inner]))
    assert (above, below.split()) == ("● outer", ["●", "inner", "●", "think"])
    assert below.startswith("  ●")


def test_where_the_line_is_full_the_newest_calls_are_kept() -> None:
    many = [ShownCall(f"call{at}", "tool", status="success") for at in range(20)]
    (line,) = drawn(ShownCall("agent", "system", below=many), width=60)
    assert line.endswith("✓ call18  ✓ call19")
    assert "+17  " in line


def test_failure_has_its_reason_and_a_name_cannot_control_the_terminal() -> None:
    failed = ShownCall("a\x1b[2Jb", "system", status="fail", why="ValueError: no\nending")
    (line,) = drawn(failed)
    assert line.split() == ["✗", "a\N{REPLACEMENT CHARACTER}[2Jb", "ValueError:", "no", "ending"]


def test_a_long_name_is_cut() -> None:
    (line,) = drawn(ShownCall("n" * 100, "system"))
    assert line == f"● {'n' * 27}…"


def test_where_there_are_too_many_rows_what_runs_is_kept_before_what_is_done() -> None:
    rows = [Row([(f"{at}", "")], "running" if at == 0 else "success") for at in range(10)]
    assert text(fitting(rows, 4)) == ["0", "8", "9", "  … and 7 more"]
    assert len(fitting(rows, 10)) == 10


def test_what_is_left_out_is_counted_in_calls_and_not_in_lines() -> None:
    with contain() as run:
        for _ in range(500):
            run.tool(str, 1, name="done")
        calls = folded(run, Calls([f"step {at}" for at in range(2_000)]))
        lines = text(frame(calls, run.balance, 0.0, 60, 12))
    assert len(lines) == 11
    assert sum("done" in line for line in lines[2:-2]) == 6
    assert lines[-3] == f"  … and {2_500 - 6:,} more"


@pytest.mark.parametrize("room", [-5, 0, 1, 2])
def test_the_smallest_screen_shows_something(room: int) -> None:
    rows = [Row([(f"{at}", "")], "running") for at in range(3)]
    assert text(fitting(rows, room)) == ["2", "  … and 2 more"]


def test_a_frame_has_meters_tree_plan_and_key() -> None:
    with contain(max_steps=3) as run:
        run.tool(str, 1, name="first")
        calls = folded(run, Calls(["first", "second"]))
        lines = text(frame(calls, run.balance, 0.0, 60, 24))
    assert lines == [
        "steps   ━━━━━──────────        1 of 3",
        "",
        "✓ first",
        "· second",
        "",
        "✓ done   ● under way   ■ stopped   ✗ failed",
    ]


def test_frame_shows_the_first_stop() -> None:
    with contain(max_cost_usd=0.1) as run:
        run.call_tool(lambda: 1, WrapOptions(cost_estimate_hint=0.2))
        calls = folded(run, Calls())
    last = text(frame(calls, run.balance, 0.0, 100, 24))[-1]
    assert last.startswith("■ first stop")
    assert last.endswith("$0.0000 spent + $0.0000 held + $0.2000 requested > $0.10")
