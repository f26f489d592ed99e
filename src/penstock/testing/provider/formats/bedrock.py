"""Amazon Bedrock: Converse, and the invocation of Anthropic's models; streams are frames of the AWS event stream."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any
from urllib.parse import unquote

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats import messages
from penstock.testing.provider.formats.format import Fields, Format, Stream
from penstock.testing.provider.formats.media import has_model, no_stream, vector
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import WireRequest

EVENT_STREAM = "application/vnd.amazon.eventstream"


def frame(kind: str, data: dict[str, Any]) -> bytes:
    """Encode one event."""
    names = {":event-type": kind, ":content-type": "application/json", ":message-type": "event"}
    headers = b"".join(_header(name, value) for name, value in names.items())
    payload = json.dumps(data, separators=(",", ":")).encode()
    prelude = struct.pack(">II", len(headers) + len(payload) + 16, len(headers))
    head = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return head + struct.pack(">I", zlib.crc32(head))


def _header(name: str, value: str) -> bytes:
    return struct.pack("B", len(name)) + name.encode() + struct.pack(">BH", 7, len(value)) + value.encode()


def _model(request: WireRequest) -> str:
    return unquote(request.path).removeprefix("/model/").rpartition("/")[0]


def _converse_terms(request: WireRequest) -> Fields | None:
    fields = request.fields
    if not isinstance(fields.get("messages"), list):
        return None
    return {
        "model": _model(request),
        "messages": fields["messages"],
        "system": fields.get("system"),
        "tools": fields.get("toolConfig"),
        "max_tokens": (fields.get("inferenceConfig") or {}).get("maxTokens"),
        "stream": request.path.endswith("/converse-stream"),
    }


def _converse(generation: Generation) -> dict[str, Any]:
    texts = [{"text": generation.text}] if generation.text else []
    content = [*texts, *({"toolUse": _tool_use(call)} for call in generation.tool_calls)]
    answer = {
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": _stop_reason(generation),
        "metrics": {"latencyMs": 1},
    }
    return answer if generation.usage is None else {**answer, "usage": _usage(*generation.usage)}


def _converse_stream(generation: Generation) -> Stream:
    opening = frame("messageStart", {"role": "assistant"})
    pieces = [
        frame("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": piece}}) for piece in generation.pieces
    ]
    pieces += [
        frame("contentBlockDelta", {"contentBlockIndex": 1, "delta": {"toolUse": {"input": call.arguments}}})
        for call in generation.tool_calls
    ]
    ending = frame("contentBlockStop", {"contentBlockIndex": 0})
    ending += frame("messageStop", {"stopReason": _stop_reason(generation)})
    usage = {} if generation.usage is None else {"usage": _usage(*generation.usage)}
    return Stream(opening, tuple(pieces), ending + frame("metadata", {**usage, "metrics": {"latencyMs": 1}}))


def _invoke_terms(request: WireRequest) -> Fields | None:
    fields = request.fields
    if not isinstance(fields.get("messages"), list):
        return None
    return {**fields, "model": _model(request), "stream": request.path.endswith("-stream")}


def _usage_headers(generation: Generation) -> dict[str, str]:
    if generation.usage is None:
        return {}
    taken, given = map(str, generation.usage)
    return {"x-amzn-bedrock-input-token-count": taken, "x-amzn-bedrock-output-token-count": given}


def _invoke_stream(generation: Generation) -> Stream:
    stream = messages.FORMAT.stream(generation)
    metrics: dict[str, Any] = {}
    if generation.usage is not None:
        taken, given = generation.usage
        metrics = {"amazon-bedrock-invocationMetrics": {"inputTokenCount": taken, "outputTokenCount": given}}
    *most, last = _data(stream.ending)
    ending = b"".join(map(_chunk, [*most, {**last, **metrics}]))
    return Stream(_chunks(stream.opening), tuple(map(_chunks, stream.pieces)), ending)


def _chunks(events: bytes) -> bytes:
    return b"".join(map(_chunk, _data(events)))


def _data(events: bytes) -> list[dict[str, Any]]:
    lines = [line for line in events.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines]


def _chunk(data: dict[str, Any]) -> bytes:
    return frame("chunk", {"bytes": base64.b64encode(json.dumps(data).encode()).decode(), "p": "abcd"})


def _embedding_terms(request: WireRequest) -> Fields | None:
    return {"model": _model(request), "input": request.fields.get("inputText"), "max_tokens": 0}


def _embedding(generation: Generation) -> dict[str, Any]:
    answer: dict[str, Any] = {"embedding": vector(generation.model)}
    return answer if generation.usage is None else {**answer, "inputTextTokenCount": generation.usage[0]}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"toolUseId": call.id, "name": call.name, "input": json.loads(str(call.arguments))}


def _stop_reason(generation: Generation) -> str:
    if generation.cut_short:
        return "max_tokens"
    return "tool_use" if generation.tool_calls else "end_turn"


def _usage(taken: int, given: int) -> dict[str, int]:
    return {"inputTokens": taken, "outputTokens": given, "totalTokens": taken + given}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"message": message}


def _headers(number: int) -> dict[str, str]:
    return {"x-amzn-requestid": f"aws-{number}"}


NEVER = b"\0no frame\0"
"""Frames have no separator: the last brace of a part is the one to damage."""

CONVERSE = Format(
    has_model,
    _converse,
    _converse_stream,
    _error,
    _headers,
    _converse_terms,
    stream_type=EVENT_STREAM,
    separator=NEVER,
    padding=frame("ping", {}),
)
INVOKE = Format(
    has_model,
    messages.FORMAT.plain,
    _invoke_stream,
    _error,
    _headers,
    _invoke_terms,
    stream_type=EVENT_STREAM,
    separator=NEVER,
    padding=frame("ping", {}),
    usage_headers=_usage_headers,
)
EMBED = Format(has_model, _embedding, no_stream, _error, _headers, _embedding_terms, usage_headers=_usage_headers)
