"""OpenAI's APIs for embeddings, images, sound and batches."""

from __future__ import annotations

import base64
from email import message_from_bytes
from typing import Any

from penstock.testing.provider.formats.format import (
    Fields,
    Format,
    Stream,
    event,
    json_object,
    openai_error,
    openai_headers,
)
from penstock.testing.provider.generation import Generation
from penstock.testing.provider.request import WireRequest

DIMENSIONS = 8
AUDIO_BYTES_PER_CHARACTER = 1_000
BYTES_PER_AUDIO_TOKEN = 100


def form_fields(request: WireRequest) -> dict[str, Any] | None:
    """Return the fields of a multipart form, a file as its bytes; None if the body is no such form."""
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        return None
    message = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + request.raw)
    fields: dict[str, Any] = {}
    for part in message.get_payload() if message.is_multipart() else ():
        name = part.get_param("name", header="content-disposition")  # type: ignore[union-attr]  # a part is a message
        content = part.get_payload(decode=True)  # type: ignore[union-attr]
        fields[str(name)] = content if part.get_filename() else content.decode()  # type: ignore[union-attr]
    return fields


def vector(text: str) -> list[float]:
    """Return a small vector for a text; the same text has the same."""
    return [round((sum(text.encode()) * (index + 1)) % 97 / 97, 6) for index in range(DIMENSIONS)]


def counted(usage: tuple[int, int]) -> dict[str, int]:
    """Return the usage in the format of images and sound."""
    taken, given = usage
    return {"input_tokens": taken, "output_tokens": given, "total_tokens": taken + given}


def has_model(fields: Fields) -> str | None:
    """Return the problem of a request without a model, or None."""
    return None if isinstance(fields.get("model"), str) and fields["model"] else "model: a name is needed"


def no_stream(_: Generation) -> Stream:
    """Return an empty stream: the API has none."""
    return Stream(b"", (), b"")


def _embedding_terms(request: WireRequest) -> Fields | None:
    fields = json_object(request)
    if fields is None:
        return None
    given = fields.get("input")
    shown = len(given) if isinstance(given, list) and given and isinstance(given[0], str | list) else 1
    return {"model": fields.get("model"), "input": given, "max_tokens": 0, "shown_answers": shown}


def _embeddings(generation: Generation) -> dict[str, Any]:
    data = [
        {"object": "embedding", "index": index, "embedding": vector(str(index))} for index in range(generation.answers)
    ]
    answer = {"object": "list", "data": data, "model": generation.model}
    if generation.usage is None:
        return answer
    return {**answer, "usage": {"prompt_tokens": generation.usage[0], "total_tokens": generation.usage[0]}}


def _image_terms(request: WireRequest) -> Fields | None:
    fields = request.body if isinstance(request.body, dict) else form_fields(request)
    if fields is None:
        return None
    number = int(fields.get("n") or 1)
    return {"model": fields.get("model") or "dall-e-2", "input": fields.get("prompt", ""), "answers": number}


def _images(generation: Generation) -> dict[str, Any]:
    pixels = base64.b64encode(generation.text.encode() * 50).decode()
    answer: dict[str, Any] = {"created": generation.created_s, "data": [{"b64_json": pixels}] * generation.answers}
    return answer if generation.usage is None else {**answer, "usage": counted(generation.usage)}


def _speech_terms(request: WireRequest) -> Fields | None:
    fields = json_object(request)
    if fields is None:
        return None
    text = str(fields.get("input", ""))
    return {"model": fields.get("model"), "input": text, "input_tokens": len(text), "max_tokens": 0}


def _speech(generation: Generation) -> bytes:
    return b"ID3" + bytes(range(256)) * (generation.input_tokens * AUDIO_BYTES_PER_CHARACTER // 256 + 1)


def _sound_terms(request: WireRequest) -> Fields | None:
    fields = form_fields(request)
    if fields is None:
        return None
    tokens = len(fields.get("file", b"")) // BYTES_PER_AUDIO_TOKEN + 1
    return {**fields, "input": "sound", "input_tokens": tokens, "stream": fields.get("stream") == "true"}


def _transcript(generation: Generation) -> dict[str, Any]:
    answer: dict[str, Any] = {"text": generation.text}
    return answer if generation.usage is None else {**answer, "usage": {"type": "tokens", **counted(generation.usage)}}


def _transcript_stream(generation: Generation) -> Stream:
    pieces = [event({"type": "transcript.text.delta", "delta": piece}) for piece in generation.pieces]
    return Stream(b"", tuple(pieces), event({"type": "transcript.text.done", **_transcript(generation)}))


def _batch_terms(request: WireRequest) -> Fields | None:
    return {"model": "", "input": request.raw.decode("utf-8", "replace")}


def _batch(generation: Generation) -> dict[str, Any]:
    return {"id": f"batch_{generation.number}", "object": "batch", "status": "validating"}


EMBEDDINGS = Format(has_model, _embeddings, no_stream, openai_error, openai_headers, _embedding_terms)
IMAGES = Format(has_model, _images, no_stream, openai_error, openai_headers, _image_terms)
SPEECH = Format(has_model, _speech, no_stream, openai_error, openai_headers, _speech_terms, plain_type="audio/mpeg")
TRANSCRIPTIONS = Format(has_model, _transcript, _transcript_stream, openai_error, openai_headers, _sound_terms)
BATCHES = Format(lambda _: None, _batch, no_stream, openai_error, openai_headers, _batch_terms)
"""Billed like a text of the length of the request, which the answer does not report."""
