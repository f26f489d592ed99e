"""Branching and joining: conditional and merge."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.nodes.merge import MergeFailed
from penstock.nodes.parts.condition import ConditionFailed
from tests.nodes.graphs import events_of, graph, node, output_of, problems


def branches(when: str) -> dict[str, Any]:
    nodes = [node("in", "input"), node("c", "conditional", when=when)]
    nodes += [node("high", "text", text="high"), node("low", "text", text="low"), node("out", "output")]
    return graph(nodes, ["in > c", "c.true > high", "c.false > low", "high > out", "low > out"])


@pytest.mark.parametrize(("value", "way", "other"), [(3, "high", "low"), (1, "low", "high")])
async def test_one_way_is_taken_and_the_other_is_skipped(value: int, way: str, other: str) -> None:
    events, result = await events_of(branches("input > 2"), value)
    assert result.outputs["output"].value == way
    assert [one.node_id for one in events if one.event_type == "skipped"] == [other]


async def test_the_input_is_passed_on_unchanged() -> None:
    nodes = [node("in", "input"), node("c", "conditional", when="input.ok")]
    assert await output_of(graph(nodes, ["in > c"]), {"ok": True}) == {"true": {"ok": True}}


async def test_a_condition_that_cannot_be_answered_is_the_nodes_error() -> None:
    with pytest.raises(ConditionFailed):
        await output_of(branches("input > 2"), "text")


def test_a_condition_that_cannot_be_read_is_found_before_the_run() -> None:
    assert problems(branches("state > 2")) == [("$.nodes[1].data.when", "there is no 'state'; there are: input")]


def test_a_way_that_is_not_there_is_found_before_the_run() -> None:
    nodes = [node("in", "input"), node("c", "conditional", when="true"), node("out", "output")]
    assert problems(graph(nodes, ["in > c", "c.maybe > out"])) == [
        ("$.edges[1].sourceHandle", "'c' has no handle 'maybe'; it has: true, false")
    ]


def joined(*values: Any, **data: Any) -> dict[str, Any]:
    nodes = [node(f"c{at}", "constant", value=value) for at, value in enumerate(values)]
    return graph([*nodes, node("m", "merge", **data)], [f"c{at} > m" for at in range(len(values))])


@pytest.mark.parametrize(
    ("data", "values", "merged"),
    [
        ({}, ("a", 1, None), ["a", 1, None]),
        ({"mode": "first"}, ("a", 1), "a"),
        ({"mode": "text"}, ("a", 1, {"b": True}), 'a\n\n1\n\n{"b": true}'),
        ({"mode": "text", "separator": ", "}, ("a", "b"), "a, b"),
        ({"mode": "object"}, ({"a": 1}, {"b": 2, "a": 1}), {"a": 1, "b": 2}),
    ],
)
async def test_values_are_joined_in_the_order_of_the_edges(data: Any, values: Any, merged: Any) -> None:
    assert await output_of(joined(*values, **data)) == merged


async def test_only_the_branches_that_were_taken_are_joined() -> None:
    nodes = [node("in", "input"), node("c", "conditional", when="input > 2"), node("a", "text", text="a")]
    nodes += [node("b", "text", text="b"), node("m", "merge")]
    assert await output_of(graph(nodes, ["in > c", "c.true > a", "c.false > b", "a > m", "b > m"]), 1) == ["b"]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (({"a": 1}, {"a": 2}), "two objects have the key 'a', with different values"),
        (({"a": 1}, 3), "3 is not an object"),
    ],
)
async def test_what_cannot_be_one_object_is_an_error_and_never_the_last_that_wins(values: Any, why: str) -> None:
    with pytest.raises(MergeFailed, match=why):
        await output_of(joined(*values, mode="object"))


async def test_nothing_has_no_text() -> None:
    with pytest.raises(MergeFailed, match="None cannot be converted to text"):
        await output_of(joined("a", None, mode="text"))


def test_a_mode_that_is_not_there_is_found_before_the_run() -> None:
    ((path, _),) = problems(joined(1, mode="last"))
    assert path == "$.nodes[1].data.mode"
