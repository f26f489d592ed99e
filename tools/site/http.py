"""The reference page of the HTTP API: every route of the OpenAPI description, who may call it, and its parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.server.auth import ACCESS
from tools.ui_types import description

Json = Mapping[str, Any]
TITLES = {"openai": "OpenAI's API", "mcp": "MCP"}
METHODS = ("get", "post", "put", "patch", "delete")
INTRODUCTION = """\
# HTTP API

Every route of a server, from its OpenAPI description. A running server has the description at `/api/openapi.json`, and
the same routes with their bodies at `/docs`. [Serving graphs](../server.md) explains streams, errors and access.

*Access* is the role that a token needs: `open` needs none, a `user` may do what a `viewer` may, an `admin` everything.
"""


def page() -> str:
    """Return the page."""
    api = asyncio.run(description())
    lines = [INTRODUCTION]
    for tag, routes in _by_tag(api["paths"]).items():
        lines += [f"## {TITLES.get(tag, tag.capitalize())}", ""]
        for method, path, operation in routes:
            lines += _route(method, path, operation)
    return "\n".join(lines)


def _by_tag(paths: Json) -> dict[str, list[tuple[str, str, Json]]]:
    groups: dict[str, list[tuple[str, str, Json]]] = {}
    for path, operations in paths.items():
        for method in METHODS:
            if method in operations:
                tag = (operations[method].get("tags") or ["other"])[0]
                groups.setdefault(tag, []).append((method.upper(), path, operations[method]))
    return groups


def _route(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"### `{method} {path}` {{: data-toc-label='{method} {path}' }}"
    yield ""
    yield operation.get("description") or operation.get("summary", "")
    yield ""
    facts = [f"Access: `{ACCESS.get(path, {}).get(method, 'admin')}`"]
    body = _body(operation.get("requestBody"))
    answer = next((_body(found) for code, found in operation["responses"].items() if code.startswith("2")), "")
    facts += [f"body: {body}"] if body else []
    facts += [f"response: {answer}"] if answer else []
    yield " · ".join(facts)
    yield ""
    parameters = operation.get("parameters", [])
    if parameters:
        yield "| parameter | in | type | |"
        yield "|---|---|---|---|"
        for one in parameters:
            text = " ".join(str(one.get("description", "")).split()).replace("|", "\\|")
            yield f"| `{one['name']}` | {one['in']} | {_type(one.get('schema', {}))} | {text} |"
        yield ""


def _body(holder: Any) -> str:
    content = (holder or {}).get("content", {})
    return ", ".join(dict.fromkeys(_type(part.get("schema", {}), kind) for kind, part in content.items()))


def _type(schema: Json, media: str = "") -> str:
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(map(_type, options)))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(schema.get("type") or (f"`{media}`" if media else "any"))
