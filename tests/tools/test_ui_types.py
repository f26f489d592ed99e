"""The UI's types of the API are those of the API."""

from __future__ import annotations

import asyncio

from tools.ui_types import TYPES, USED, description, typescript


def test_the_written_types_are_what_the_description_gives() -> None:
    given = typescript(asyncio.run(description()))
    assert TYPES.read_text("utf-8") == given, "the API has changed: run `make ui-types`"


def test_schemas_become_types() -> None:
    schemas = {name: {"type": "null"} for name in USED}
    facts = {
        "a": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
        "b": {"$ref": "#/components/schemas/Other"},
        "c": {"enum": ["x", "y"]},
        "d": {"type": "object", "additionalProperties": {"type": "integer"}},
        "e": {},
    }
    me = {"type": "object", "properties": facts, "required": ["a"]}
    other = {"type": "object", "properties": {}}
    text = typescript({"components": {"schemas": {**schemas, "Me": me, "Other": other, "Unused": me}}})
    expected = (
        '  a: (string | null)[];\n  b?: Other;\n  c?: "x" | "y";\n  d?: Record<string, number>;\n  e?: unknown;\n'
    )
    assert f"export interface Me {{\n{expected}}}" in text
    assert "export interface Other {\n}" in text
    assert "Unused" not in text
