"""Graphs as tools, and runs as their results; pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import mcp_types as types

from penstock.chat.protocol import answer_text
from penstock.errors import InvalidValue
from penstock.hosting.records import ENDED, GraphRecord, HostedEvent, RunRecord
from penstock.money import to_usd
from penstock.server.openai.models import converses
from penstock.server.outages import public_error

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every client takes for the name of a tool."""
MARKED = re.compile(r".*_[0-9a-f]{16}")
"""A name that was made of an id: no graph has it by its id, so that nobody can take the place of another's."""
RUN = "penstock/run"
"""The key of a result's `_meta` that says which run it was, and what it cost."""

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any": {},
    "text": {"type": "string"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "list": {"type": "array"},
}
"""The types of an `input` node, as JSON Schema says them."""
TAKEN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "text"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "object": ((dict,), "an object"),
    "array": ((list,), "a list"),
}
"""What is of each type of JSON Schema, and how people call it."""


def tool_name(graph_id: str) -> str:
    """The name of a graph's tool: its id, or what is left of it with a mark that keeps it apart from others."""
    if NAME.fullmatch(graph_id) and not MARKED.fullmatch(graph_id):
        return graph_id
    mark = hashlib.sha256(graph_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', graph_id)[:47]}_{mark}"


def tool_of(graph: GraphRecord) -> types.Tool:
    """The graph as a tool."""
    given = graph.document.get("description")
    description = given if isinstance(given, str) and given else f"Runs the graph {graph.name or graph.id!r}."
    return types.Tool(
        name=tool_name(graph.id), title=graph.name or None, description=description, input_schema=_input_schema(graph)
    )


def _input_schema(graph: GraphRecord) -> dict[str, Any]:
    begins = [node for node in graph.document.get("nodes") or () if isinstance(node, dict)]
    entry = next((node for node in begins if node.get("type") == "input"), None)
    data = (entry or {}).get("data") or {}
    kind = "text" if converses(graph) else str(data.get("type", "text"))
    is_needed = converses(graph) or (entry is not None and data.get("default") is None)
    what = {**SCHEMAS.get(kind, {}), "description": "What the graph is given."}
    return {
        "type": "object",
        "properties": {"input": what},
        "required": ["input"] if is_needed else [],
        "additionalProperties": False,
    }


def input_of(graph: GraphRecord, arguments: Mapping[str, Any]) -> Any:
    """What a call gives its graph; InvalidValue if it is not what the tool says that it takes."""
    schema, given = _input_schema(graph), arguments.get("input")
    for name in arguments:
        if name != "input":
            raise InvalidValue("arguments", name, "input, and nothing else")
    if "input" in schema["required"] and given is None:
        raise InvalidValue("input", None, "given")
    kinds, called = TAKEN.get(schema["properties"]["input"].get("type", ""), ((object,), ""))
    if given is not None and (not isinstance(given, kinds) or (isinstance(given, bool) and int in kinds)):
        raise InvalidValue("input", given, called)
    return given


def progress_of(event: HostedEvent) -> str | None:
    """What an event says of how far a run has come; None for those that say nothing of it."""
    kind, _, what = event.type.partition(".")
    if kind == "node" and what != "progress":
        return f"{event.data.get('node_id')} {what}"
    return "waiting for an approval" if event.type == "run.waiting" else None


def failed(message: str, run: RunRecord | None = None) -> types.CallToolResult:
    """An error of the tool, for the model that called it."""
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True, _meta=_about(run))


def result_of(run: RunRecord) -> types.CallToolResult:
    """What a run came to, or why it came to nothing."""
    if run.status not in ENDED:  # nobody waits for it any more, because the server closes
        stands = "was parked" if run.status == "parked" else f"is {run.status}"
        later = "the server is closing, and goes on with it when it is started again; another call is another run"
        return failed(f"run {run.id} {stands}: {later}", run)
    if run.status != "completed":
        why = ": ".join(part for part in (run.stop_reason, public_error(run.stop_reason, run.error)) if part)
        was = "has failed" if run.status == "failed" else f"was {run.status}"
        return failed(f"run {run.id} {was}{': ' if why else ''}{why}", run)
    text = answer_text(run.output)
    structured = run.output if isinstance(run.output, dict) else None
    return types.CallToolResult(
        content=[types.TextContent(text=text)], structured_content=structured, _meta=_about(run)
    )


def _about(run: RunRecord | None) -> dict[str, Any] | None:
    if run is None:
        return None
    spent = {"cost_usd": to_usd(run.cost_nanos), "tokens_in": run.tokens_in, "tokens_out": run.tokens_out}
    spent |= {"unknown_costs": run.unknown_costs} if run.unknown_costs else {}
    return {RUN: {"id": run.id, "status": run.status, "stop_reason": run.stop_reason, **spent}}
