"""Recorded payloads as span attributes, by the GenAI conventions of OpenTelemetry.

The conventions name the messages of models and the arguments and results of tools. The input and output of a function
that is not a `Model` are not messages, and get attribute names of Penstock's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.tracing.events import ModelCallTrace, ToolCallTrace
from penstock.tracing.redaction import Redaction


def payload_attributes(event: ModelCallTrace | ToolCallTrace, rules: Redaction) -> dict[str, str | int]:
    """Return the input and output of a call, redacted; empty if they were not recorded."""
    given, returned = rules.uncut(event.input), rules.uncut(event.output)
    if isinstance(event, ToolCallTrace):
        attributes = {"gen_ai.tool.call.arguments": given, "gen_ai.tool.call.result": returned}
    elif _are_messages(given):
        answer = returned if isinstance(returned, dict) else {"content": returned}
        attributes = {"gen_ai.input.messages": [_message(message) for message in given if "role" in message]}
        attributes["gen_ai.output.messages"] = None if returned is None else [_message({"role": "assistant", **answer})]
        attributes["penstock.input.omitted_messages"] = given[0].get("omitted_messages")
    else:
        attributes = {"penstock.call.input": given, "penstock.call.output": returned}
    return {
        name: value if isinstance(value, str | int) else json.dumps(value, ensure_ascii=False)
        for name, value in attributes.items()
        if value is not None
    }


def _are_messages(given: object) -> bool:
    """Return whether the input of a model call is messages, possibly with a marker for omitted ones."""
    if not isinstance(given, list) or not given:
        return False
    return all(isinstance(item, dict) and ("role" in item or "omitted_messages" in item) for item in given)


def _message(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return one message in the form of the conventions: a role, and parts."""
    content = source.get("content")
    if source["role"] == "tool":
        parts = [{"type": "tool_call_response", "id": source.get("tool_call_id"), "response": content}]
    else:
        parts = [_part(part) for part in (content if isinstance(content, list) else [content]) if part]
        parts += [{"type": "tool_call", **call} for call in source.get("tool_calls") or () if isinstance(call, dict)]
    message = {"role": source["role"], "parts": parts}
    return message | {name: source[name] for name in ("finish_reason", "truncated", "original_bytes") if name in source}


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict) or "media_type" not in part:
        return {"type": "text", "content": part}
    media_type = str(part["media_type"])
    modality = media_type.partition("/")[0]
    return {"type": "uri", "modality": modality, "mime_type": media_type, "uri": part.get("url")}
