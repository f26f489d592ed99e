"""The documentation of the API as one HTML page, rendered from its OpenAPI description.

The page needs no script and loads nothing, so it works offline and under the server's content security policy. This
module depends on OpenAPI, not on the routes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]
METHODS = ("get", "post", "put", "patch", "delete")
"""Methods on the page; HEAD would repeat GET."""
MAX_DEFAULT = 80
"""Longest default value on the page, in characters."""


def api_page(description: Json) -> str:
    """Render the page."""
    schemas: Json = description.get("components", {}).get("schemas", {})
    groups = _by_tag(description["paths"])
    contents = "".join(f'<li><a href="#{_anchor(tag)}">{escape(tag)}</a></li>' for tag in groups)
    return PAGE.format(
        title=escape(description["info"]["title"]),
        version=escape(description["info"]["version"]),
        contents=contents + '<li><a href="#types">types</a></li>',
        operations="".join(
            f'<h2 id="{_anchor(tag)}">{escape(tag)}</h2>{"".join(operations)}' for tag, operations in groups.items()
        ),
        types="".join(_type_section(name, schema) for name, schema in sorted(schemas.items())),
    )


def _by_tag(paths: Json) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method in METHODS:
            if (operation := operations.get(method)) is not None:
                tag = next(iter(operation.get("tags", ())), "other")
                groups.setdefault(tag, []).append(_operation(path, method, operation))
    return groups


def _operation(path: str, method: str, operation: Json) -> str:
    return (
        f'<section><h3><b class="{method}">{method.upper()}</b> <code>{escape(path)}</code></h3>'
        f"<p>{_prose(operation.get('description') or operation.get('summary', ''))}</p>"
        f"{''.join(_parameters(operation))}{''.join(_body(operation))}{''.join(_responses(operation))}</section>"
    )


def _parameters(operation: Json) -> Iterator[str]:
    rows = [
        (
            f"<tr><td><code>{escape(one['name'])}</code></td><td>{escape(one['in'])}"
            f"{', required' if one.get('required') else ''}</td><td>{_type(one.get('schema', {}))}</td>"
            f"<td>{_prose(one.get('description', ''))}</td></tr>"
        )
        for one in operation.get("parameters", ())
    ]
    if rows:
        yield f"<h4>Parameters</h4><table>{''.join(rows)}</table>"


def _body(operation: Json) -> Iterator[str]:
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<h4>Body</h4><p>{_type(content.get('schema', {}))} as <code>{escape(media_type)}</code></p>"


def _responses(operation: Json) -> Iterator[str]:
    rows = []
    for status, response in operation.get("responses", {}).items():
        types = [
            f"{_type(content.get('schema', {}))} as <code>{escape(media_type)}</code>"
            for media_type, content in response.get("content", {}).items()
        ]
        description = _prose(response.get("description", ""))
        rows.append(
            f"<tr><td><code>{escape(status)}</code></td><td>{'<br>'.join(types)}</td><td>{description}</td></tr>"
        )
    yield f"<h4>Responses</h4><table>{''.join(rows)}</table>"


def _type_section(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(field)}</code></td><td>{'required' if field in required else 'optional'}</td>"
        f"<td>{_type(shape)}{_default(shape)}</td><td>{_prose(shape.get('description', ''))}</td></tr>"
        for field, shape in schema.get("properties", {}).items()
    )
    fields = f"<table>{rows}</table>" if rows else f"<p>{_type({**schema, 'title': None})}</p>"
    about = _prose(schema.get("description", ""))
    return f'<section id="{_anchor("type-" + name)}"><h3>{escape(name)}</h3><p>{about}</p>{fields}</section>'


def _type(schema: Json) -> str:
    """Render a schema as an expression, with links to the named types."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f'<a href="#{_anchor("type-" + name)}">{escape(name)}</a>'
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(f"<code>{escape(json.dumps(value, ensure_ascii=False))}</code>" for value in values)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return " | ".join(dict.fromkeys(map(_type, schema[several])))
    kind = schema.get("type", "any value")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return escape(str(kind))


def _default(schema: Json) -> str:
    if schema.get("default") is None:
        return ""
    shown = json.dumps(schema["default"], ensure_ascii=False)
    return f", default <code>{escape(shown)}</code>" if len(shown) <= MAX_DEFAULT else ""


def _prose(text: str) -> str:
    """Render a docstring as HTML: escaped, with backticks as code and blank lines between paragraphs."""
    pieces = escape(text).split("`")
    coded = "".join(f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces))
    return coded.replace("\n\n", "<br><br>")


def _anchor(text: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in text)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title} API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root{{color-scheme:light dark}}
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
nav ul{{display:flex;flex-wrap:wrap;gap:.3rem 1.2rem;list-style:none;padding:0}}
h2{{margin-top:3rem;border-bottom:1px solid #8886;padding-bottom:.2rem}}
h3{{margin:0 0 .3rem;font-size:1rem}}h4{{margin:.8rem 0 .2rem;font-size:.85rem}}p{{margin:.3rem 0}}
section{{border:1px solid #8884;border-radius:.4rem;padding:.8rem 1rem;margin:1rem 0;overflow:auto}}
b{{font:700 .8rem ui-monospace,monospace;border:1px solid #8888;border-radius:.3rem;padding:.1rem .4rem}}
code{{font:.9em ui-monospace,monospace;overflow-wrap:anywhere}}
table{{border-collapse:collapse;font-size:.88rem}}td{{padding:.15rem 1rem .15rem 0;vertical-align:top}}
</style></head>
<body><h1>{title} API <small>{version}</small></h1>
<p>Send your token as <code>Authorization: Bearer TOKEN</code> if the server has tokens. Every error is JSON.
<a href="api/openapi.json">OpenAPI description</a></p>
<nav aria-label="Contents"><ul>{contents}</ul></nav>
{operations}
<h2 id="types">types</h2>{types}
</body></html>
"""
