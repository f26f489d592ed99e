"""Google's Gemini: the model is in the path; a stream is events with `alt=sse`, and one JSON array without."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from penstock.testing.provider.fates import ToolCall
from penstock.testing.provider.formats.format import Fields, Format, Stream, event
from penstock.testing.provider.formats.media import has_model, no_stream, vector
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import WireRequest, count_tokens

STATUSES: Mapping[int, str] = {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}


def _terms(request: WireRequest) -> Fields | None:
    fields = request.fields
    if not isinstance(fields.get("contents"), list):
        return None
    config = fields.get("generationConfig") or {}
    read = [fields[name] for name in ("contents", "systemInstruction", "tools") if fields.get(name) is not None]
    return {
        "model": model_of(request.path),
        "messages": fields["contents"],
        "tools": read[1:] or None,
        "max_tokens": config.get("maxOutputTokens"),
        "answers": config.get("candidateCount") or 1,
        "stream": request.path.endswith(":streamGenerateContent"),
    }


def model_of(path: str) -> str:
    """Return the model that the path names."""
    return path.rpartition("/")[2].partition(":")[0]


def _plain(generation: Generation) -> dict[str, Any]:
    parts = [{"text": generation.text}] if generation.text or not generation.tool_calls else []
    candidates = [
        _candidate([*parts, *map(_function_call, generation.tool_calls)], index, _finish_reason(generation))
        for index in range(generation.answers)
    ]
    return _chunk(generation, candidates, generation.usage)


def _chunks(generation: Generation) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the pieces of a stream and its end; each reports the usage up to it."""
    indexes = range(generation.answers)
    parts = [*({"text": piece} for piece in generation.pieces), *map(_function_call, generation.tool_calls)]
    so_far = None if generation.usage is None else (generation.usage[0], 1)
    pieces = [_chunk(generation, [_candidate([part], index)], so_far) for index in indexes for part in parts]
    end = [_candidate([{"text": ""}], index, _finish_reason(generation)) for index in indexes]
    return pieces, _chunk(generation, end, generation.usage)


def _events(generation: Generation) -> Stream:
    pieces, ending = _chunks(generation)
    return Stream(b"", tuple(map(event, pieces)), event(ending))


def _array(generation: Generation) -> Stream:
    pieces, ending = _chunks(generation)
    return Stream(b"[", tuple(_json(piece) + b"\n,\r\n" for piece in pieces), _json(ending) + b"\n]")


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _candidate(parts: list[dict[str, Any]], index: int, finish_reason: str | None = None) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": parts}, "index": index}
    return candidate if finish_reason is None else {**candidate, "finishReason": finish_reason}


def _chunk(generation: Generation, candidates: list[dict[str, Any]], usage: tuple[int, int] | None) -> dict[str, Any]:
    chunk = {"candidates": candidates, "modelVersion": generation.model, "responseId": f"gemini-{generation.number}"}
    return chunk if usage is None else {**chunk, "usageMetadata": _usage(*usage)}


def _function_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = json.loads(str(call.arguments))
    except ValueError:
        arguments = {"text": call.arguments}
    return {"functionCall": {"name": call.name, "args": arguments}}


def _finish_reason(generation: Generation) -> str:
    return "MAX_TOKENS" if generation.cut_short else "STOP"


def _usage(taken: int, given: int) -> dict[str, int]:
    return {"promptTokenCount": taken, "candidatesTokenCount": given, "totalTokenCount": taken + given}


def _embedding_terms(request: WireRequest) -> Fields | None:
    fields = request.fields
    requests = fields.get("requests", [fields])
    return {"model": model_of(request.path), "input": requests, "max_tokens": 0, "shown_answers": len(requests)}


def _embedding(generation: Generation) -> dict[str, Any]:
    return {"embedding": {"values": vector("0")}}


def _embeddings(generation: Generation) -> dict[str, Any]:
    return {"embeddings": [{"values": vector(str(index))} for index in range(generation.answers)]}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "status": STATUSES.get(status, "INTERNAL")}}


def _headers(number: int) -> dict[str, str]:
    return {"x-gemini-service-tier": "standard", "server-timing": f"gfet4t7; dur={number}"}


def count(request: WireRequest) -> dict[str, Any]:
    """Return the answer of `countTokens`, which is free."""
    return {"totalTokens": count_tokens(json.dumps(request.fields.get("contents")))}


def _format(plain: Callable[[Generation], dict[str, Any]], terms: Callable[[WireRequest], Fields | None]) -> Format:
    return Format(has_model, plain, no_stream, _error, _headers, terms)


GENERATE = Format(has_model, _plain, _events, _error, _headers, _terms)
ARRAY = Format(
    has_model,
    _plain,
    _array,
    _error,
    _headers,
    _terms,
    stream_type="application/json; charset=UTF-8",
    separator=b"\n",
    padding=b" \n",
)
EMBED = _format(_embedding, _embedding_terms)
BATCH_EMBED = _format(_embeddings, _embedding_terms)
