"""The picture of a run: meters, tree, and what is left out where there is no room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.cli.showing.calls import Calls, Shown
from penstock.cli.showing.picture import Row, fitting, frame, meters, tree
from penstock.cli.showing.screen import Line
from penstock.front_door import contain
from penstock.runtime.options import WrapOptions


def text(lines: Sequence[Line]) -> list[str]:
    return ["".join(piece for piece, _ in line).rstrip() for line in lines]


def drawn(*calls: Shown, width: int = 80) -> list[str]:
    return text([row.line for row in tree(Shown("root", "system", below=list(calls)), width)])


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
    think = Shown("think", "llm", model="m-1", status="success", cost_usd=0.01)
    agent = Shown("agent", "system", below=[think, Shown("search", "tool")])
    assert drawn(Shown("plan", "llm", status="success"), agent) == [
        "✓ plan",
        "● agent     $0.0100  m-1  ✓ think $0.0100  ● search",
    ]


def test_calls_that_made_calls_have_a_line_below() -> None:
    inner = Shown("inner", "system", below=[Shown("think", "llm")])
    above, below = drawn(Shown("outer", "system", below=[inner]))
    assert (above, below.split()) == ("● outer", ["●", "inner", "●", "think"])
    assert below.startswith("  ●")


def test_where_the_line_is_full_the_newest_calls_are_kept() -> None:
    many = [Shown(f"call{at}", "tool", status="success") for at in range(20)]
    (line,) = drawn(Shown("agent", "system", below=many), width=60)
    assert line.endswith("✓ call18  ✓ call19")
    assert "+17  " in line


def test_a_failure_says_why_and_a_name_cannot_steer_the_terminal() -> None:
    failed = Shown("a\x1b[2Jb", "system", status="fail", why="ValueError: no\nending")
    (line,) = drawn(failed)
    assert line.split() == ["✗", "a\N{REPLACEMENT CHARACTER}[2Jb", "ValueError:", "no", "ending"]


def test_a_long_name_is_cut() -> None:
    (line,) = drawn(Shown("n" * 100, "system"))
    assert line == f"● {'n' * 27}…"


def test_where_there_are_too_many_rows_what_runs_is_kept_before_what_is_done() -> None:
    rows = [Row([(f"{at}", "")], "running" if at == 0 else "success") for at in range(10)]
    assert text(fitting(rows, 4)) == ["0", "8", "9", "  … and 7 more"]
    assert len(fitting(rows, 10)) == 10


def test_what_is_left_out_is_counted_in_calls_and_not_in_lines() -> None:
    with contain() as run:
        for _ in range(500):
            run.tool(str, 1, name="done")
        calls = Calls([f"step {at}" for at in range(2_000)])
        calls.take(run.history())
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
        calls = Calls(["first", "second"])
        calls.take(run.history())
        lines = text(frame(calls, run.balance, 0.0, 60, 24))
    assert lines == [
        "steps   ━━━━━──────────        1 of 3",
        "",
        "✓ first",
        "· second",
        "",
        "✓ done   ● under way   ■ stopped   ✗ failed",
    ]


def test_once_something_was_stopped_the_frame_says_what() -> None:
    with contain(max_cost_usd=0.1) as run:
        run.call_tool(lambda: 1, WrapOptions(cost_estimate_hint=0.2))
        calls = Calls()
        calls.take(run.history())
    last = text(frame(calls, run.balance, 0.0, 100, 24))[-1]
    assert last.startswith("■ first stop")
    assert last.endswith("$0.0000 spent + $0.0000 held + $0.2000 asked > $0.10")
