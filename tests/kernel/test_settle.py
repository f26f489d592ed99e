"""What becomes of the others when one node fails, and when a graph has what it needs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.kernel.frontier import SKIPPED, Frontier
from penstock.kernel.plan import Plan, compile_plan
from penstock.kernel.settle import Quorum, Settle, as_settle, frontier_for, quorum


def plan_of(edges: str, nodes: str = "abcdefgh") -> Plan:
    """A plan from `ab bc`: a leads to b, b to c."""
    used = [node for node in nodes if node in edges]
    return compile_plan(used, [(edge[0], "output", edge[1]) for edge in edges.split() if len(edge) == 2])


def drive(plan: Plan, settle: Settle, failing: str = "", needs_all: bool = True) -> tuple[str, str, Frontier]:
    """Run one node after the other; which ran, which were skipped."""
    frontier = frontier_for(plan, settle, needs_all=needs_all)
    queue, ran = frontier.start(), ""
    while queue and not frontier.decided:
        node = queue.pop(0)
        ran += plan.ids[node]
        queue += frontier.fail(node) if plan.ids[node] in failing else frontier.finish(node)
    return ran, "".join(sorted(plan.ids[node] for node in frontier.skipped)), frontier


@pytest.mark.parametrize(
    ("settle", "edges", "failing", "ran", "skipped", "decided"),
    [
        ("fail_fast", "ab ac bd cd", "", "abcd", "", False),
        ("fail_fast", "ab ac bd cd", "b", "ab", "", True),
        ("collect", "ab ac bd cd", "b", "abc", "d", False),
        ("collect", "a b c", "ab", "abc", "", False),
        ("first", "a b c", "", "a", "", True),
        ("first", "a b c", "a", "ab", "", True),
        ("first", "a b c", "abc", "abc", "", True),
        ("first", "ab c", "", "ac", "", True),
        (Quorum(2), "a b c", "a", "abc", "", True),
        (Quorum(2), "a b c", "ab", "ab", "", True),
        (Quorum(2), "ab c d", "a", "acd", "b", True),
        (Quorum(3), "ab c d", "a", "a", "b", True),
    ],
)
def test_each_policy_settles_as_it_says(
    settle: Settle, edges: str, failing: str, ran: str, skipped: str, decided: bool
) -> None:
    did, left, frontier = drive(plan_of(edges), settle, failing)
    if settle != "fail_fast":
        assert left == skipped
    assert (did, frontier.decided) == (ran, decided)


def test_a_race_knows_whether_it_was_won() -> None:
    won = drive(plan_of("a b c"), "first", "a")[2]
    lost = drive(plan_of("a b c"), "first", "abc")[2]
    assert getattr(won, "is_won", None) is True
    assert getattr(lost, "is_won", None) is False


def test_a_node_that_needs_all_is_skipped_when_one_edge_is_dead_and_runs_otherwise() -> None:
    plan = plan_of("ac bc")
    assert drive(plan, "collect", "a")[:2] == ("ab", "c")
    assert drive(plan, "collect", "a", needs_all=False)[:2] == ("abc", "")


@pytest.mark.parametrize("written", ["fail_fast", "collect", "first", Quorum(2)])
def test_a_policy_may_be_given_as_it_is(written: Settle) -> None:
    assert as_settle(written) == written


def test_a_quorum_may_be_written_as_text() -> None:
    assert as_settle("quorum(3)") == quorum(3) == Quorum(3)
    assert str(quorum(3)) == "quorum(3)"


@pytest.mark.parametrize("wrong", ["fast", "quorum(0)", "quorum(-1)", "quorum()", "quorum(1e3)", 1, None, [], "FIRST"])
def test_anything_else_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InvalidValue, match=r"settle|quorum"):
        as_settle(wrong)


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "2", None])
def test_a_quorum_is_a_whole_number_from_one_on(wrong: int) -> None:
    with pytest.raises(InvalidValue, match="quorum"):
        quorum(wrong)


@given(st.integers(0, 10**9))
def test_in_any_order_a_node_runs_if_and_only_if_all_it_needs_have_run(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 8)
    names = [f"n{number}" for number in range(size)]
    edges = [(a, "output", b) for at, b in enumerate(names) for a in names[:at] if rng.random() < 0.4]
    failing = {name for name in names if rng.random() < 0.3}
    plan = compile_plan(names, edges)
    frontier = frontier_for(plan, "collect", needs_all=True)
    ready, ran = set(frontier.start()), set()
    while ready:
        node = rng.choice(sorted(ready))
        ready.remove(node)
        name = plan.ids[node]
        ran.add(name)
        ready |= set(frontier.fail(node) if name in failing else frontier.finish(node))
    fine: set[str] = set()
    for name in names:
        if all(source in fine for source, _, target in edges if target == name) and name not in failing:
            fine.add(name)
    expected = {name for name in names if all(source in fine for source, _, target in edges if target == name)}
    assert ran == expected
    assert {plan.ids[node] for node, state in enumerate(frontier.state) if state == SKIPPED} == set(names) - expected
    assert frontier.remaining == 0
