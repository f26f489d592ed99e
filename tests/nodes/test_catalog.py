"""What a palette shows of node types: every built-in one is described, and hints name settings that exist."""

from __future__ import annotations

from penstock.nodes import executors
from penstock.nodes.catalog import CATEGORIES, DESCRIPTIONS, HINTS, TITLES, hinted_schema, node_info


def test_every_built_in_type_has_a_title_a_sentence_and_a_category() -> None:
    built_in = executors()
    assert set(TITLES) == set(built_in)
    for node_type, executor in built_in.items():
        info = node_info(node_type, executor)
        assert info.title != node_type
        assert info.description.endswith("."), node_type
        assert info.category in CATEGORIES, node_type


def test_hints_and_sentences_are_of_settings_that_exist() -> None:
    names: set[str] = set()
    for executor in executors().values():
        schema = hinted_schema(executor) or {}
        for part in (schema, *schema.get("$defs", {}).values()):
            names |= part.get("properties", {}).keys()
    assert names.issuperset(HINTS)
    assert names.issuperset(DESCRIPTIONS)


class Foreign:
    """Does something else.

    At length.
    """

    title = "Something else"
    category = "Ours"
    hints = {"where": {"x-penstock-picker": "tool"}}  # noqa: RUF012

    def execute(self, data: object, inputs: object, context: object) -> None:
        """Do nothing."""

    def schema(self) -> dict[str, object]:
        return {"type": "object", "properties": {"where": {"type": "string"}}}


def test_a_type_of_another_package_describes_itself() -> None:
    info = node_info("foreign", Foreign())
    assert (info.title, info.description, info.category) == ("Something else", "Does something else.", "Ours")
    schema = hinted_schema(Foreign())
    assert schema is not None
    assert schema["properties"]["where"] == {"type": "string", "x-penstock-picker": "tool"}


def test_a_type_without_a_description_is_named_by_its_type() -> None:
    class Bare:
        def execute(self, data: object, inputs: object, context: object) -> None:
            pass

    assert (node_info("bare", Bare()).title, node_info("bare", Bare()).category) == ("bare", "Other")
    assert hinted_schema(Bare()) is None
