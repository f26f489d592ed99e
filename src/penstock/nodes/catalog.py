"""Node types as people choose them: a title, a sentence, a category, and hints for the form of their settings.

Editors read these; running a graph does not. A type from another package is described by its executor: `title` and
`category` as attributes, the first line of its docstring as the sentence, and `hints` by the name of the setting.

Hints are keywords of the JSON Schema of a setting:

- `x-penstock-picker`: the setting names a `model`, `tool`, `program` or `mcp-server`, or is a `graph` or a `prompt`.
- `x-penstock-language`: the text is a `template` or a `cel` condition.
- `x-penstock-handles`: `placeholders` of the text are input handles; the text is the name of an `output` handle.
- `x-penstock-widget`: `long-text` for a text of several lines, `text` for one line.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.runtime.graphs.document_schema import data_schema

Hints = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """The entry of a node type in a palette."""

    title: str
    description: str
    category: str


CATEGORIES = ("Begin and end", "Models", "Text and values", "Branches", "Nested graphs", "Tools", "Services", "Other")
"""The order in which a palette lists the built-in categories; those of other packages follow."""

TITLES: Mapping[str, tuple[str, str]] = {
    "input": ("Input", "Begin and end"),
    "chat-start": ("Chat start", "Begin and end"),
    "output": ("Output", "Begin and end"),
    "agent": ("Agent", "Models"),
    "team": ("Team of agents", "Models"),
    "llm-completion": ("Model request", "Models"),
    "embedding": ("Embedding", "Models"),
    "prompt-template": ("Prompt template", "Text and values"),
    "text": ("Text", "Text and values"),
    "constant": ("Constant", "Text and values"),
    "conditional": ("Condition", "Branches"),
    "merge": ("Merge", "Branches"),
    "subgraph": ("Nested graph", "Nested graphs"),
    "map": ("For each item", "Nested graphs"),
    "loop": ("Loop", "Nested graphs"),
    "tool": ("Tool", "Tools"),
    "toolset": ("Set of tools", "Tools"),
    "mcp-server": ("MCP server", "Tools"),
    "approval": ("Approval", "Services"),
    "http-request": ("HTTP request", "Services"),
    "memory": ("Memory", "Services"),
    "program": ("Python program", "Services"),
}
"""Title and category of each built-in type."""

PICKER, LANGUAGE, HANDLES, WIDGET = (f"x-penstock-{name}" for name in ("picker", "language", "handles", "widget"))

HINTS: Mapping[str, Hints] = {
    "model": {PICKER: "model"},
    "tools": {PICKER: "tool"},
    "tool": {PICKER: "tool"},
    "graph": {PICKER: "graph"},
    "program": {PICKER: "program"},
    "server": {PICKER: "mcp-server"},
    "instructions": {PICKER: "prompt", WIDGET: "long-text"},
    "template": {PICKER: "prompt", LANGUAGE: "template", HANDLES: "placeholders", WIDGET: "long-text"},
    "text": {WIDGET: "long-text"},
    "when": {LANGUAGE: "cel", WIDGET: "text"},
    "until": {LANGUAGE: "cel", WIDGET: "text"},
    "url": {LANGUAGE: "template", WIDGET: "text"},
    "question": {WIDGET: "text"},
    "separator": {WIDGET: "text"},
    "description": {WIDGET: "long-text"},
    "fallback_handle": {HANDLES: "output"},
}
"""Hints of settings by name; a setting of the same name means the same in every built-in type."""

DESCRIPTIONS: Mapping[str, str] = {
    "model": "A model that this server offers, or a provider's, such as openai:gpt-4o.",
    "instructions": "What the model is to do, sent before every request.",
    "max_iterations": "Maximum number of rounds.",
    "max_output_tokens": "Maximum length of one answer.",
    "temperature": "0 for the most likely answer, higher for more variety.",
    "template": "Each {{ name }} is an input of the node.",
    "when": "A CEL condition on input, such as input.size() > 3.",
    "max_items": "A longer list fails the node.",
    "parallel": "How many items are worked on at the same time.",
    "type": "The value is converted to this type.",
    "default": "Used if there is no other value.",
    "error_policy": "What happens when the node fails: retries first, then what “On error” says.",
    "budget": "What one run of the node may use; an empty field is no limit of its own.",
    "on_error": "What happens after the last attempt: fail the run, skip the node, or pass a value on.",
    "retry_count": "Attempts after the first one.",
    "timeout_ms": "An attempt that takes longer is stopped.",
    "fallback_value": "Passed on if the node fails for good.",
    "fallback_handle": "The output that the fallback leaves by; a name of your own gives failures a branch.",
    "max_cost_usd": "Checked before each call: the node cannot spend more.",
}
"""Sentences for settings without a docstring."""

DEFINITIONS: Mapping[str, str] = {
    "BudgetData": "Budget",
    "CallData": "Tool call",
    "ErrorPolicyData": "Error policy",
    "ScriptData": "Scripted replies",
}
"""Titles of the objects that settings have."""


def node_info(node_type: str, executor: Any) -> NodeInfo:
    """Return the title, sentence and category of a type."""
    title, category = TITLES.get(node_type, (None, None))
    return NodeInfo(
        title or _text(executor, "title") or node_type,
        (inspect.getdoc(type(executor)) or "").partition("\n")[0].replace("`", ""),
        category or _text(executor, "category") or "Other",
    )


def hinted_schema(executor: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of the data of a type, with descriptions and hints for a form; None if it has none."""
    schema = data_schema(executor)
    if schema is None:
        return None
    own: Any = getattr(executor, "hints", None)
    documented = _attribute_docs(getattr(getattr(executor, "settings", None), "shape", None))
    given = own if isinstance(own, Mapping) else {}
    definitions = {
        name: {**_with_hints(part, {}, {}), "title": DEFINITIONS.get(name, name)}
        for name, part in schema.get("$defs", {}).items()
    }
    return {**_with_hints(schema, documented, given), **({"$defs": definitions} if definitions else {})}


def hints_of(executor: Any) -> dict[str, Hints]:
    """Return the hints of each setting of a type, by name; none for a type without a schema."""
    properties = (data_schema(executor) or {}).get("properties")
    own: Any = getattr(executor, "hints", None)
    given = own if isinstance(own, Mapping) else {}
    names = properties if isinstance(properties, Mapping) else ()
    return {name: {**HINTS.get(name, {}), **given.get(name, {})} for name in names}


def _with_hints(schema: Mapping[str, Any], documented: Mapping[str, str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object's schema with the descriptions and hints of its properties."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return dict(schema)
    changed = {name: _described(name, part, documented, own) for name, part in properties.items()}
    return {**schema, "properties": changed}


def _described(
    name: str, schema: Mapping[str, Any], documented: Mapping[str, str], own: Mapping[str, Any]
) -> dict[str, Any]:
    description = documented.get(name) or DESCRIPTIONS.get(name)
    extra = {**HINTS.get(name, {}), **own.get(name, {})}
    if name == "model" and "anyOf" in schema:
        extra["anyOf"] = [{"title": "Name", **one} if one.get("type") == "string" else one for one in schema["anyOf"]]
    return {**schema, **({"description": description} if description else {}), **extra}


def _attribute_docs(shape: Any) -> dict[str, str]:
    """Return the docstrings under the fields of a class; empty where its source is not there to be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(shape)))
    except (OSError, TypeError, SyntaxError):
        return {}
    return dict(_docs_in(tree.body[0])) if tree.body else {}


def _docs_in(tree: ast.stmt) -> Iterator[tuple[str, str]]:
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for field, after in pairwise(body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            yield field.target.id, inspect.cleandoc(str(after.value.value)).replace("`", "")


def _text(executor: Any, name: str) -> str | None:
    found = getattr(executor, name, None)
    return found if isinstance(found, str) and found else None
