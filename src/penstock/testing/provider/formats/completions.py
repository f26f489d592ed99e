"""OpenAI's legacy Completions: every prompt is answered, `n` times."""

from __future__ import annotations

from typing import Any

from penstock.testing.provider.formats.format import (
    Fields,
    Format,
    Stream,
    common_problem,
    event,
    openai_error,
    openai_headers,
)
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import WireRequest

DEFAULT_MAX_TOKENS = 16


def _terms(request: WireRequest) -> Fields | None:
    if not isinstance(request.body, dict):
        return None
    fields, prompt = request.fields, request.fields.get("prompt")
    many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts, shown = len(prompt) if isinstance(prompt, list) and many else 1, fields.get("n") or 1
    return {
        "max_tokens": DEFAULT_MAX_TOKENS,
        **fields,
        "input": prompt,
        "answers": prompts * max(shown, fields.get("best_of") or 1),
        "shown_answers": prompts * shown,
    }


def _problem(fields: Fields) -> str | None:
    if not isinstance(fields.get("prompt"), str | list):
        return "prompt: a text or a list is needed"
    return common_problem(fields)


def _plain(generation: Generation) -> dict[str, Any]:
    choices = [_choice(index, generation.text, _finish_reason(generation)) for index in range(generation.answers)]
    answer = {**_head(generation), "choices": choices}
    return answer if generation.usage is None else {**answer, "usage": _usage(*generation.usage)}


def _stream(generation: Generation) -> Stream:
    indexes = range(generation.answers)
    pieces = [_chunk(generation, index, piece) for index in indexes for piece in generation.pieces]
    ending = b"".join(_chunk(generation, index, "", _finish_reason(generation)) for index in indexes)
    if generation.usage_in_stream and generation.usage is not None:
        ending += event({**_head(generation), "choices": [], "usage": _usage(*generation.usage)})
    return Stream(b"", tuple(pieces), ending + b"data: [DONE]\n\n")


def _chunk(generation: Generation, index: int, text: str, finish_reason: str | None = None) -> bytes:
    usage = {"usage": None} if generation.usage_in_stream else {}
    return event({**_head(generation), "choices": [_choice(index, text, finish_reason)], **usage})


def _choice(index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"text": text, "index": index, "logprobs": None, "finish_reason": finish_reason}


def _head(generation: Generation) -> dict[str, Any]:
    return {
        "id": f"cmpl-{generation.number}",
        "object": "text_completion",
        "created": generation.created_s,
        "model": generation.model,
    }


def _finish_reason(generation: Generation) -> str:
    return "length" if generation.cut_short else "stop"


def _usage(taken: int, given: int) -> dict[str, int]:
    return {"prompt_tokens": taken, "completion_tokens": given, "total_tokens": taken + given}


FORMAT = Format(_problem, _plain, _stream, openai_error, openai_headers, _terms)
