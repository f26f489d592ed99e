"""What it costs to begin a call under a parent that has ended does not grow with the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock import ExecutionGraph
from tests.reliability.operations import operations


def grown(calls: int, max_kept: int | None = None) -> tuple[ExecutionGraph, str, str]:
    """A graph with so many finished calls, its root, and its oldest finished call."""
    graph = ExecutionGraph(max_kept=max_kept)
    root = graph.create_root("root")
    old = graph.begin_node(root, "llm", "old")
    graph.mark_success(old)
    for _ in range(calls):
        graph.mark_success(graph.begin_node(root, "tool", "search"))
    return graph, root, old


def one_more(graph: ExecutionGraph, parent: str) -> Callable[[], None]:
    return lambda: graph.mark_success(graph.begin_node(parent, "tool", "search"))


@pytest.mark.requirement("G-3")
def test_beginning_under_an_old_parent_costs_the_same_in_a_run_a_hundred_times_as_long() -> None:
    costs = []
    for calls in (200, 20_000):
        graph, _, old = grown(calls)
        one_more(graph, old)()  # the first look at a finished call indexes those there are
        costs.append(operations(one_more(graph, old)))
    short, long = costs
    assert 0 < long <= short * 1.1


@pytest.mark.requirement("G-3")
def test_each_finished_call_is_indexed_once() -> None:
    graph, root, old = grown(100)
    one_more(graph, old)()
    under_old = operations(one_more(graph, old))
    for _ in range(1_000):
        one_more(graph, root)()
    catching_up = operations(one_more(graph, old))
    assert catching_up > under_old + 1_000
    assert operations(one_more(graph, old)) <= under_old * 1.1


@pytest.mark.requirement("G-3")
def test_calls_under_way_as_parents_need_no_index() -> None:
    graph, root, old = grown(100)
    one_more(graph, root)()
    assert graph._index is None
    one_more(graph, old)()
    assert graph._index is not None


@pytest.mark.requirement("G-3", "G-11")
def test_the_index_has_the_kept_calls_and_no_folded_one() -> None:
    graph, root, old = grown(0, max_kept=50)
    ids = [old]
    for number in range(500):
        parent = ids[-1 - number % 7] if number % 3 else root
        try:
            made = graph.begin_node(parent, "tool", "search")
        except KeyError:
            continue  # folded away
        graph.mark_success(made)
        ids.append(made)
        kept = graph.snapshot()["nodes"]
        found = {node for node in ids if _is_found(graph, node)}
        assert found == {node for node in ids if node in kept}
        assert graph._index is not None
        assert len(graph._index) <= len(kept)
    graph.mark_success(root)  # an ended root is never folded, and moves to the end
    for _ in range(200):
        graph.mark_success(graph.begin_node(root, "tool", "search"))
    assert _is_found(graph, root)
    newest = graph.begin_node(root, "tool", "search")
    graph.mark_success(newest)
    assert _is_found(graph, newest)
    assert {node for node in graph.snapshot()["nodes"] if not _is_found(graph, node)} == set()


def _is_found(graph: ExecutionGraph, node_id: str) -> bool:
    try:
        graph.call(node_id)
    except KeyError:
        return False
    return True
