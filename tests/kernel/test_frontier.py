"""A node runs once, after everything it waits for, and exactly if something live came to it.

And what becomes of the others when one node fails, and when a graph has what it needs.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.kernel.frontier import (
    DONE,
    READY,
    SKIPPED,
    WAITING,
    Frontier,
    Quorum,
    Settle,
    as_settle,
    frontier_for,
    quorum,
)
from penstock.kernel.plan import Plan, compile_plan, topological_order
from tests.kernel.graphs import HANDLES, edge_lists
from tests.soak import scaled

Edges = list[tuple[str, str, str]]


class Driven:
    """A frontier driven by names, with what was ready in the order it became so."""

    def __init__(self, ids: str, *edges: str) -> None:
        """`ab` is an edge from a to b, `a:yes:b` one from its handle yes."""
        split = [edge.split(":") if ":" in edge else [edge[0], "output", edge[1]] for edge in edges]
        self.plan = compile_plan(ids, [(source, handle, target) for source, handle, target in split])
        self.frontier = Frontier(self.plan)

    def start(self) -> str:
        return self._names(self.frontier.start())

    def finish(self, node: str, *used: str) -> str:
        """End a node with values on these handles; on all, if none is named."""
        return self._names(self.frontier.finish(self.plan.index[node], used or None))

    def drop(self, node: str) -> str:
        return self._names(self.frontier.drop(self.plan.index[node]))

    def state(self, node: str) -> int:
        return self.frontier.state[self.plan.index[node]]

    @property
    def skipped(self) -> str:
        return "".join(sorted(self._names(self.frontier.skipped)))

    def _names(self, nodes: list[int]) -> str:
        return "".join(self.plan.ids[node] for node in nodes)


def run_through(plan: Plan) -> list[int]:
    """Every node in the order in which it was ready."""
    frontier = Frontier(plan)
    order = frontier.start()
    for node in order:
        order += frontier.finish(node)
    assert frontier.remaining == 0
    return order


def test_a_diamond_joins_when_both_arms_have_ended() -> None:
    driven = Driven("abcd", "ab", "ac", "bd", "cd")
    assert driven.start() == "a"
    assert driven.finish("a") == "bc"
    assert driven.finish("c") == ""
    assert driven.finish("b") == "d"
    assert driven.finish("d") == ""
    assert driven.frontier.remaining == 0


def test_the_states_say_how_far_a_node_is() -> None:
    driven = Driven("abc", "a:yes:b", "a:no:c")
    assert [driven.state(node) for node in "abc"] == [WAITING, WAITING, WAITING]
    driven.start()
    assert driven.state("a") == READY
    driven.finish("a", "yes")
    assert [driven.state(node) for node in "abc"] == [DONE, READY, SKIPPED]


def test_a_branch_that_was_not_taken_is_skipped_to_its_end() -> None:
    driven = Driven("abcde", "a:yes:b", "a:no:c", "cd", "de")
    driven.start()
    assert driven.finish("a", "yes") == "b"
    assert driven.skipped == "cde"
    driven.finish("b")
    assert driven.frontier.remaining == 0


def test_branches_that_meet_again_run_with_the_one_that_was_taken() -> None:
    driven = Driven("abcd", "a:yes:b", "a:no:c", "bd", "cd")
    driven.start()
    driven.finish("a", "no")
    assert driven.skipped == "b"
    assert driven.finish("c") == "d"


def test_several_edges_into_one_node_are_all_waited_for() -> None:
    driven = Driven("abc", "ac", "ac", "bc")
    driven.start()
    assert driven.finish("a") == ""
    assert driven.finish("b") == "c"


def test_an_unconnected_output_skips_all_successors() -> None:
    driven = Driven("ab", "ab")
    driven.start()
    assert driven.finish("a", "elsewhere") == ""
    assert driven.skipped == "b"
    assert driven.frontier.remaining == 0


def test_what_hangs_on_a_dropped_node_alone_is_skipped() -> None:
    driven = Driven("abcd", "ac", "bc", "ad")
    driven.start()
    assert driven.drop("a") == ""
    assert driven.skipped == "d"
    assert driven.finish("b") == "c"


def test_one_live_edge_among_dead_ones_is_enough_in_any_order() -> None:
    for order in ("ab", "ba"):
        driven = Driven("abc", "ac", "bc")
        driven.start()
        ready = [driven.drop(node) if node == "a" else driven.finish(node) for node in order]
        assert ready == ["", "c"]


def test_a_node_after_a_skipped_one_runs_with_its_other_inputs() -> None:
    driven = Driven("axcd", "a:yes:c", "cd", "xd")
    driven.start()
    assert driven.finish("x") == ""
    assert driven.finish("a", "no") == "d"
    assert driven.skipped == "c"


def test_a_second_start_starts_nothing() -> None:
    driven = Driven("ab")
    assert driven.start() == "ab"
    assert driven.start() == ""
    driven.finish("a")
    assert driven.start() == ""


@pytest.mark.parametrize("twice", ["a", "b"])
def test_only_a_ready_node_can_end_and_only_once(twice: str) -> None:
    driven = Driven("ab", "ab")
    driven.start()
    driven.finish("a")
    if twice == "b":
        driven.finish("b")
    with pytest.raises(InvalidValue, match="ready"):
        driven.finish(twice)
    assert driven.frontier.remaining == (0 if twice == "b" else 1)


def test_a_waiting_node_cannot_end() -> None:
    driven = Driven("ab", "ab")
    driven.start()
    with pytest.raises(InvalidValue, match="ready"):
        driven.finish("b")


def test_two_runs_of_one_plan_do_not_share_anything() -> None:
    plan = compile_plan("ab", [("a", "output", "b")])
    first, second = Frontier(plan), Frontier(plan)
    first.start()
    first.finish(0)
    assert second.start() == [0]
    assert second.finish(0) == [1]


def test_a_chain_of_100_000_nodes_runs_in_order() -> None:
    ids = [f"n{at}" for at in range(100_000)]
    plan = compile_plan(ids, zip(ids[:-1], ["output"] * len(ids), ids[1:], strict=False))
    assert run_through(plan) == list(range(100_000))


def test_a_chain_of_100_000_nodes_is_skipped_without_recursion() -> None:
    ids = [f"n{at}" for at in range(100_000)]
    frontier = Frontier(compile_plan(ids, zip(ids[:-1], ["output"] * len(ids), ids[1:], strict=False)))
    frontier.start()
    assert frontier.drop(0) == []
    assert len(frontier.skipped) == 99_999
    assert frontier.remaining == 0


def test_ten_thousand_nodes_side_by_side_are_ready_at_once_and_joined_once() -> None:
    arms = [f"n{at}" for at in range(10_000)]
    edges = [("first", "output", arm) for arm in arms] + [(arm, "output", "last") for arm in arms]
    plan = compile_plan(["first", *arms, "last"], edges)
    frontier = Frontier(plan)
    ready = frontier.finish(frontier.start()[0])
    assert len(ready) == 10_000
    random.Random(1).shuffle(ready)
    joined = [after for node in ready for after in frontier.finish(node)]
    assert joined == [plan.index["last"]]


def expected_to_run(plan: Plan, used: dict[int, set[str] | None]) -> set[int]:
    """The naive model: in topological order, a node runs if it is an entry or one edge into it is live."""
    runs: set[int] = set()
    arriving: dict[int, list[bool]] = {node: [] for node in range(plan.size)}
    for node in topological_order(plan):
        if not arriving[node] or any(arriving[node]):
            runs.add(node)
        for after, handle in zip(plan.successors[node], plan.successor_handles[node], strict=True):
            gave = used[node]
            arriving[after].append(node in runs and (gave is None or handle in gave))
    return runs


@pytest.mark.reliability
@settings(max_examples=scaled(125, soak=5_000))
@given(edge_lists(acyclic=True), st.data())
def test_in_any_order_a_node_runs_once_after_its_edges_and_exactly_if_the_model_says_so(
    drawn: tuple[list[str], Edges], data: st.DataObject
) -> None:
    ids, edges = drawn
    entries = data.draw(st.none() | st.lists(st.sampled_from(ids), max_size=3) if ids else st.none())
    plan = compile_plan(ids, edges, entries)
    handles = st.none() | st.sets(st.sampled_from(HANDLES))
    used = {node: data.draw(handles) for node in range(plan.size)}
    frontier = Frontier(plan)
    ready = frontier.start()
    ran: list[int] = []
    while ready:
        node = ready.pop(data.draw(st.integers(0, len(ready) - 1)))
        assert all(before in ran or before in frontier.skipped for before in plan.predecessors[node])
        ran.append(node)
        ready += frontier.finish(node, used[node])
    assert len(ran) == len(set(ran))
    assert set(ran) == expected_to_run(plan, used)
    assert sorted([*ran, *frontier.skipped]) == list(range(plan.size))
    assert frontier.remaining == 0


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
