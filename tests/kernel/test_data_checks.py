"""Executors that look at the data of their nodes before a graph runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import MAX_PROBLEMS, GraphInvalid, GraphSpec, NodeSpec
from penstock.kernel.validate import compile_graph, validate


class Checks:
    """Finds that every key of the data is wrong."""

    def execute(self, data: Any, inputs: Any, context: Any) -> None: ...

    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[tuple[str, str]]:
        assert "checks" in executors
        return [(f".{key}", "this is wrong") for key in data]


class Plain:
    check = "no function"

    def execute(self, data: Any, inputs: Any, context: Any) -> None: ...


class Raises(Checks):
    def check(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> list[tuple[str, str]]:
        raise LookupError("x" * 1_000)


EXECUTORS = ExecutorRegistry({"checks": Checks(), "plain": Plain(), "raises": Raises()})


def test_a_problem_found_by_an_executor_has_its_path() -> None:
    graph = GraphSpec((NodeSpec("a", "plain", {"x": 1}), NodeSpec("b", "checks", {"x": 1, "y": 2})))
    found = validate(graph, EXECUTORS)
    assert [(one.code, str(one)) for one in found] == [
        ("bad_data", "$.nodes[1].data.x: this is wrong"),
        ("bad_data", "$.nodes[1].data.y: this is wrong"),
    ]
    with pytest.raises(GraphInvalid):
        compile_graph(graph, EXECUTORS)
    assert validate(graph) == []


def test_a_check_that_raises_is_a_problem_too() -> None:
    (found,) = validate(GraphSpec((NodeSpec("a", "raises"),)), EXECUTORS)
    assert found.path == "$.nodes[0].data"
    assert found.detail.startswith("it could not be checked: LookupError: xxx")
    assert len(found.detail) < 300


def test_data_that_is_no_object_is_not_handed_to_a_check() -> None:
    wrong: Any = [1]
    (found,) = validate(GraphSpec((NodeSpec("a", "raises", wrong),)), EXECUTORS)
    assert found.code == "wrong_type"


def test_no_more_problems_are_listed_than_there_may_be() -> None:
    nodes = tuple(NodeSpec(str(at), "checks", {"x": 1, "y": 2}) for at in range(MAX_PROBLEMS))
    assert len(validate(GraphSpec(nodes), EXECUTORS)) == MAX_PROBLEMS


def test_a_graph_without_problems_is_planned() -> None:
    assert len(compile_graph(GraphSpec((NodeSpec("a", "checks"), NodeSpec("b", "plain"))), EXECUTORS).ids) == 2
