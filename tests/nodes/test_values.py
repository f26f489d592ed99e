"""Nodes that begin and end graphs, and those that hold values."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.kernel.executor import ConversionFailed
from tests.nodes.graphs import events_of, graph, node, output_of, problems


@pytest.mark.parametrize(
    ("value", "type"),
    [
        ("a", "text"),
        (3, "number"),
        (2.5, "number"),
        (True, "boolean"),
        ([1], "list"),
        ({"a": 1}, "object"),
        (None, "any"),
    ],
)
async def test_a_constant_outputs_its_value_with_its_type(value: Any, type: str) -> None:
    _, result = await events_of(graph([node("c", "constant", value=value)]))
    assert (result.outputs["output"].type, result.outputs["output"].value) == (type, value)


async def test_a_text_is_output_unchanged_and_is_not_a_template() -> None:
    assert await output_of(graph([node("t", "text", text="as {{ it }} is")])) == "as {{ it }} is"


async def test_the_input_node_outputs_the_input_of_the_run() -> None:
    ends = graph([node("in", "input"), node("out", "output")], ["in > out"])
    assert await output_of(ends, {"a": 1}) == {"a": 1}


async def test_an_input_that_was_not_given_is_its_default() -> None:
    assert await output_of(graph([node("in", "input", default=7)])) == 7
    assert await output_of(graph([node("in", "input")])) is None


async def test_an_input_becomes_the_type_that_is_wanted_or_is_refused() -> None:
    wants_a_number = graph([node("in", "input", type="number")])
    assert await output_of(wants_a_number, "3") == 3
    with pytest.raises(ConversionFailed, match=r"in\.output: text cannot become number"):
        await output_of(wants_a_number, "three")


async def test_an_output_is_of_the_type_that_is_promised() -> None:
    ends = graph([node("c", "constant", value={"a": 1}), node("out", "output", type="text")], ["c > out"])
    assert await output_of(ends) == '{"a": 1}'
    ends["nodes"][1]["data"]["type"] = "number"
    with pytest.raises(ConversionFailed, match="object cannot become number"):
        await output_of(ends)


def test_wrong_data_is_found_before_the_run() -> None:
    wrong = graph(
        [
            node("c", "constant"),
            node("t", "text", text=3),
            node("in", "input", type="integer"),
            node("out", "output", typ="text"),
        ],
        ["c > out"],
    )
    assert [path for path, _ in problems(wrong)] == [
        "$.nodes[0].data.value",
        "$.nodes[1].data.text",
        "$.nodes[2].data.type",
        "$.nodes[3].data.typ",
    ]


def test_an_output_without_an_edge_is_a_problem() -> None:
    assert problems(graph([node("out", "output")])) == [
        ("$.nodes[0]", "handle 'input' of 'out' needs an edge and has none")
    ]
