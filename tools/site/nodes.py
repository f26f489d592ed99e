"""The reference page of node types: handles and settings, from the schemas that editors read."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.executors import ExecutorRegistry
from penstock.nodes.catalog import CATEGORIES, hinted_schema, node_info

Json = Mapping[str, Any]


def page() -> str:
    """Return the page."""
    lines = [
        "# Node types",
        "",
        "Every built-in node type of JSON graphs. [Nodes](../nodes.md) shows each of them running.",
        "",
    ]
    registry = ExecutorRegistry.from_entry_points()
    types = sorted(registry, key=lambda name: (CATEGORIES.index(node_info(name, registry[name]).category), name))
    for name in types:
        lines += _section(name, registry[name])
    return "\n".join(lines)


def _section(name: str, executor: Any) -> Iterator[str]:
    info = node_info(name, executor)
    yield f"## {name}"
    yield ""
    yield f"**{info.title}** ({info.category}). {html.escape(info.description, quote=False)}"
    yield ""
    schema = hinted_schema(executor)
    if schema is None or not schema.get("properties"):
        yield "No settings."
        yield ""
        return
    yield "| setting | type | default | |"
    yield "|---|---|---|---|"
    for key, part in schema["properties"].items():
        default = f"`{part['default']}`" if part.get("default") not in (None, "") else ""
        needed = "required" if key in schema.get("required", ()) else default
        text = html.escape(" ".join(part.get("description", "").split()), quote=False).replace("|", "\\|")
        yield f"| `{key}` | {_type(part)} | {needed} | {text} |"
    yield ""


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_type(one) for one in options if one.get("type") != "null"))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", "\\>"), ("maximum", "≤"))
        if key in schema
    ]
    kind = (
        f"list of {_type(schema.get('items', {}))}" if schema.get("type") == "array" else str(schema.get("type", "any"))
    )
    return ", ".join([kind, *bounds])
