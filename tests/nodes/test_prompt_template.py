"""The prompt-template node."""

from __future__ import annotations

import pytest

from penstock.nodes.parts.template import TemplateFailed
from tests.nodes.graphs import graph, node, output_of, problems


def filled(**data: object) -> dict[str, object]:
    nodes = [node("dam", "constant", value={"names": ["Hoover"]}), node("unit", "text", text="m")]
    return graph([*nodes, node("p", "prompt-template", **data)], ["dam > p.dam", "unit > p.unit"])


async def test_values_come_in_under_the_names_of_handles() -> None:
    assert (
        await output_of(filled(template="How high is {{ dam.names[0] }}, in {{ unit }}?"))
        == "How high is Hoover, in m?"
    )


async def test_inputs_take_precedence_over_written_values() -> None:
    written = {"unit": "feet", "tone": "brief"}
    assert await output_of(filled(template="{{ unit }}, {{ tone }}", values=written)) == "m, brief"


async def test_a_value_that_is_missing_is_an_error_or_nothing() -> None:
    with pytest.raises(TemplateFailed, match="tone has no value; there are values for: dam, unit"):
        await output_of(filled(template="{{ tone }}"))
    assert await output_of(filled(template="[{{ tone }}]", missing="empty")) == "[]"


def test_a_template_that_cannot_be_read_is_found_before_the_run() -> None:
    (problem,) = problems(filled(template="{{ dam.upper() }}"))
    assert problem[0] == "$.nodes[2].data.template"
    assert "at character 0" in problem[1]
