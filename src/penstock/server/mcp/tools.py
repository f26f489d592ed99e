"""Convert graphs to tools, and runs to tool results; pure functions."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from mcp import types

from penstock.chat.turn import answer_text
from penstock.errors import InvalidValue
from penstock.hosting.ports import ENDED, GraphRecord, HostedEvent, RunRecord
from penstock.money import known_usd
from penstock.server.graph_check import is_conversational
from penstock.server.unavailable import public_error

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Tool names that every client accepts."""
HASHED = re.compile(r".*_[0-9a-f]{16}")
"""Names derived from an id by a hash; an id of this form is hashed too, so that it cannot shadow another graph."""
RUN = "penstock/run"
"""Key of a result's `_meta` with the run's id, status and cost."""

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "any": {},
    "text": {"type": "string"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "object": {"type": "object"},
    "list": {"type": "array"},
}
"""JSON Schema of each type of an `input` node."""
ACCEPTED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "text"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "object": ((dict,), "an object"),
    "array": ((list,), "a list"),
}
"""Python types of each JSON Schema type, and its name for people."""


def tool_name(graph_id: str) -> str:
    """Return the name of a graph's tool: its id if it is a valid name, else its valid part and a hash of the id."""
    if NAME.fullmatch(graph_id) and not HASHED.fullmatch(graph_id):
        return graph_id
    hashed = hashlib.sha256(graph_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{re.sub('[^A-Za-z0-9_-]', '_', graph_id)[:47]}_{hashed}"


def tool_of(graph: GraphRecord) -> types.Tool:
    """Return the tool of a graph."""
    given = graph.document.get("description")
    description = given if isinstance(given, str) and given else f"Runs the graph {graph.name or graph.id!r}."
    tool = {"name": tool_name(graph.id), "description": description, "inputSchema": _input_schema(graph)}
    return types.Tool.model_validate({**tool, "title": graph.name or None})


def _input_schema(graph: GraphRecord) -> dict[str, Any]:
    begins = [node for node in graph.document.get("nodes") or () if isinstance(node, dict)]
    entry = next((node for node in begins if node.get("type") == "input"), None)
    data = (entry or {}).get("data") or {}
    kind = "text" if is_conversational(graph) else str(data.get("type", "text"))
    is_needed = is_conversational(graph) or (entry is not None and data.get("default") is None)
    what = {**SCHEMAS.get(kind, {}), "description": "The input of the graph."}
    return {
        "type": "object",
        "properties": {"input": what},
        "required": ["input"] if is_needed else [],
        "additionalProperties": False,
    }


def input_of(graph: GraphRecord, arguments: Mapping[str, Any]) -> Any:
    """Return the graph's input from a call's arguments; raises InvalidValue if they do not match the tool's schema."""
    schema, given = _input_schema(graph), arguments.get("input")
    for name in arguments:
        if name != "input":
            raise InvalidValue("arguments", name, "only `input`")
    if "input" in schema["required"] and given is None:
        raise InvalidValue("input", None, "present")
    accepted, expected = ACCEPTED.get(schema["properties"]["input"].get("type", ""), ((object,), ""))
    if given is not None and (not isinstance(given, accepted) or (isinstance(given, bool) and int in accepted)):
        raise InvalidValue("input", given, expected)
    return given


def progress_of(event: HostedEvent) -> str | None:
    """Return the progress message of an event; None if it is not progress."""
    kind, _, what = event.type.partition(".")
    if kind == "node" and what != "progress":
        return f"{event.data.get('node_id')} {what}"
    return "waiting for an approval" if event.type == "run.waiting" else None


def failed(message: str, run: RunRecord | None = None) -> types.CallToolResult:
    """Return a tool error, for the model that called the tool."""
    return _result(message, run, isError=True)


def result_of(run: RunRecord) -> types.CallToolResult:
    """Return a run's output as a result, or the reason it has none as a tool error."""
    if run.status not in ENDED:  # the wait ended early because the server is closing
        state = "was parked" if run.status == "parked" else f"is {run.status}"
        later = (
            "the server is shutting down, and continues the run when it is back; another call would start another run"
        )
        return failed(f"run {run.id} {state}: {later}", run)
    if run.status != "completed":
        why = ": ".join(part for part in (run.stop_reason, public_error(run.stop_reason, run.error)) if part)
        outcome = "failed" if run.status == "failed" else f"was {run.status}"
        return failed(f"run {run.id} {outcome}{': ' if why else ''}{why}", run)
    return _result(answer_text(run.output), run, structuredContent=run.output if isinstance(run.output, dict) else None)


def _result(text: str, run: RunRecord | None, **more: Any) -> types.CallToolResult:
    """Return a result, which is made as the protocol names it: attributes differ between releases of the library."""
    content = [{"type": "text", "text": text}]
    return types.CallToolResult.model_validate({"content": content, "_meta": _about(run), **more})


def _about(run: RunRecord | None) -> dict[str, Any] | None:
    if run is None:
        return None
    cost_usd = known_usd(run.cost_nanos, run.unknown_costs)
    spent = {"cost_usd": cost_usd, "tokens_in": run.tokens_in, "tokens_out": run.tokens_out}
    spent |= {"unknown_costs": run.unknown_costs} if run.unknown_costs else {}
    return {RUN: {"id": run.id, "status": run.status, "stop_reason": run.stop_reason, **spent}}
