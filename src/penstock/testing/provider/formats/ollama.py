"""Ollama: streams are lines of JSON, and a request streams unless it sets `stream` to false."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.testing.provider.formats.format import Fields, Format, Stream
from penstock.testing.provider.formats.media import has_model, no_stream, vector
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import WireRequest

CREATED = "2026-01-01T00:00:00Z"


def _terms(request: WireRequest) -> Fields | None:
    fields = request.fields
    limit = (fields.get("options") or {}).get("num_predict")
    return {
        **fields,
        "input": fields.get("prompt"),
        "max_tokens": limit if isinstance(limit, int) and limit > 0 else None,
        "stream": fields.get("stream") is not False,
    }


TextField = Callable[[str], dict[str, Any]]


def _of_chat(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}}


def _of_generate(text: str) -> dict[str, Any]:
    return {"response": text}


def _format(text_field: TextField) -> Format:
    def plain(generation: Generation) -> dict[str, Any]:
        return {**_head(generation), **text_field(generation.text), **_end(generation)}

    def stream(generation: Generation) -> Stream:
        pieces = [_line({**_head(generation), **text_field(piece), "done": False}) for piece in generation.pieces]
        return Stream(b"", tuple(pieces), _line({**_head(generation), **text_field(""), **_end(generation)}))

    return Format(
        has_model,
        plain,
        stream,
        _error,
        lambda _: {},
        _terms,
        stream_type="application/x-ndjson",
        separator=b"\n",
        padding=b"\n",
    )


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _head(generation: Generation) -> dict[str, Any]:
    return {"model": generation.model, "created_at": CREATED}


def _end(generation: Generation) -> dict[str, Any]:
    end: dict[str, Any] = {"done": True, "done_reason": "length" if generation.cut_short else "stop"}
    if generation.usage is not None:
        end |= {"prompt_eval_count": generation.usage[0], "eval_count": generation.usage[1]}
    return end


def _embed_terms(request: WireRequest) -> Fields | None:
    given = request.fields.get("input", request.fields.get("prompt"))
    shown = len(given) if isinstance(given, list) else 1
    return {"model": request.fields.get("model"), "input": given, "max_tokens": 0, "shown_answers": shown}


def _embed(generation: Generation) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "model": generation.model,
        "embeddings": [vector(str(index)) for index in range(generation.answers)],
    }
    return answer if generation.usage is None else {**answer, "prompt_eval_count": generation.usage[0]}


def _embedding(generation: Generation) -> dict[str, Any]:
    return {"embedding": vector("0")}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": message}


CHAT = _format(_of_chat)
GENERATE = _format(_of_generate)
EMBED = Format(has_model, _embed, no_stream, _error, lambda _: {}, _embed_terms)
EMBEDDINGS = Format(has_model, _embedding, no_stream, _error, lambda _: {}, _embed_terms)
