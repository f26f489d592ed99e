"""A plan holds what the entries reach, in an order that can be run, or names the circle that cannot."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.kernel.plan import CycleFound, Plan, compile_plan, topological_order
from tests.kernel.graphs import edge_lists

Edges = list[tuple[str, str, str]]


def pairs(*edges: str) -> Edges:
    """`ab` is an edge from a to b."""
    return [(edge[0], "output", edge[1]) for edge in edges]


def reached_from(entries: set[str], edges: Edges) -> set[str]:
    """The naive answer: follow edges until nothing new turns up."""
    reached = set(entries)
    while more := {target for source, _, target in edges if source in reached} - reached:
        reached |= more
    return reached


def has_cycle(ids: set[str], edges: Edges) -> bool:
    """The naive answer: take away what nothing leads to until only circles are left."""
    left = set(ids)
    while free := left - {target for source, _, target in edges if source in left and target in left}:
        left -= free
    return bool(left)


def test_a_diamond_waits_for_both_arms() -> None:
    plan = compile_plan("abcd", pairs("ab", "ac", "bd", "cd"))
    assert plan.entries == [0]
    assert plan.successors == [(1, 2), (3,), (3,), ()]
    assert plan.predecessors == [[], [0], [0], [1, 2]]
    assert plan.incoming == [0, 1, 1, 2]
    assert [plan.ids[node] for node in topological_order(plan)] == ["a", "b", "c", "d"]


def test_handles_stay_with_their_edges() -> None:
    plan = compile_plan("abc", [("b", "no", "c"), ("a", "yes", "c"), ("a", "no", "b")])
    assert plan.successors == [(2, 1), (2,), ()]
    assert plan.successor_handles == [("yes", "no"), ("no",), ()]


def test_a_duplicate_edge_counts_twice() -> None:
    plan = compile_plan("ab", [("a", "yes", "b"), ("a", "no", "b")])
    assert plan.successors[0] == (1, 1)
    assert plan.incoming == [0, 2]


def test_a_graph_without_nodes_is_a_plan_without_nodes() -> None:
    assert compile_plan("", []).size == 0


def test_only_nodes_reachable_from_the_entries_are_planned() -> None:
    plan = compile_plan("xabyc", pairs("ab", "bc", "xc", "xy"), ["a"])
    assert plan.ids == ["a", "b", "c"]
    assert plan.index == {"a": 0, "b": 1, "c": 2}
    assert plan.incoming == [0, 1, 1], "c does not wait for x, which never runs"


def test_a_cycle_elsewhere_does_no_harm() -> None:
    assert compile_plan("abxyz", pairs("ab", "xy", "yx", "zz", "xb"), ["a"]).ids == ["a", "b"]


def test_a_cycle_inside_names_its_path() -> None:
    with pytest.raises(CycleFound, match="b → c → d → b") as caught:
        compile_plan("abcdex", pairs("ab", "bc", "cd", "db", "de"), ["a"])
    assert caught.value.path == ("b", "c", "d", "b")


def test_a_node_that_leads_to_itself_is_a_cycle() -> None:
    with pytest.raises(CycleFound) as caught:
        compile_plan("ab", pairs("ab", "bb"))
    assert caught.value.path == ("b", "b")


def test_without_entries_a_cycle_anywhere_counts() -> None:
    with pytest.raises(CycleFound):
        compile_plan("abc", pairs("bc", "cb"))


def test_an_entry_that_another_leads_to_waits_for_it() -> None:
    plan = compile_plan("abc", pairs("ab", "bc"), ["b", "a", "b"])
    assert [plan.ids[node] for node in plan.entries] == ["a"]
    assert plan.size == 3


def test_no_entries_are_no_nodes() -> None:
    assert compile_plan("ab", pairs("ab"), []).size == 0


@pytest.mark.parametrize(
    ("ids", "edges", "entries"),
    [("aab", [], None), ("ab", pairs("ax"), None), ("ab", pairs("xa"), None), ("ab", [], ["x"])],
)
def test_a_duplicate_or_missing_id_is_refused(ids: str, edges: Edges, entries: list[str] | None) -> None:
    with pytest.raises(InvalidValue):
        compile_plan(ids, edges, entries)


def test_a_long_cycle_is_named_without_filling_the_screen() -> None:
    ids = [f"n{at}" for at in range(50_000)]
    with pytest.raises(CycleFound) as caught:
        compile_plan(ids, zip(ids, ["output"] * len(ids), [*ids[1:], ids[0]], strict=True))
    assert len(caught.value.path) == 50_001
    assert len(str(caught.value)) < 300


def test_a_cycle_can_be_copied_and_sent() -> None:
    error = CycleFound(["a", "b", "a"])
    for copied in (copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert (copied.path, str(copied)) == (error.path, str(error))


@given(edge_lists(acyclic=False), st.data())
def test_reachable_nodes_and_cycles_match_a_naive_search(drawn: tuple[list[str], Edges], data: st.DataObject) -> None:
    ids, edges = drawn
    entries = data.draw(st.none() | st.lists(st.sampled_from(ids), max_size=3) if ids else st.none())
    expected = set(ids) if entries is None else reached_from(set(entries), edges)
    inside = [edge for edge in edges if edge[0] in expected]
    try:
        plan = compile_plan(ids, edges, entries)
    except CycleFound as cycle:
        assert has_cycle(expected, inside)
        path = cycle.path
        assert path[0] == path[-1]
        assert len(set(path)) == len(path) - 1
        assert set(pairwise(path)) <= {(source, target) for source, _, target in inside}
    else:
        assert not has_cycle(expected, inside)
        assert set(plan.ids) == expected
        assert edges_of(plan) == sorted(inside)
        place = {node: at for at, node in enumerate(topological_order(plan))}
        assert len(place) == plan.size
        assert all(place[plan.index[source]] < place[plan.index[target]] for source, _, target in inside)


def edges_of(plan: Plan) -> Edges:
    return sorted(
        (plan.ids[node], handle, plan.ids[after])
        for node in range(plan.size)
        for after, handle in zip(plan.successors[node], plan.successor_handles[node], strict=True)
    )
