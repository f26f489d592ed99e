"""A node runs once, after everything it waits for, and exactly if something live came to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.kernel.frontier import DONE, READY, SKIPPED, WAITING, Frontier
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


def test_one_live_edge_among_dead_ones_is_enough_whenever_it_came() -> None:
    for order in ("ab", "ba"):
        driven = Driven("abc", "ac", "bc")
        driven.start()
        ready = [driven.drop(node) if node == "a" else driven.finish(node) for node in order]
        assert ready == ["", "c"]


def test_a_node_that_waits_for_a_skipped_one_runs_with_what_came_before() -> None:
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
