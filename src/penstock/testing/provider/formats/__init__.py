"""The APIs that the server supports, one per file: the requests they accept, and the format of their answers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.testing.provider.formats import (
    bedrock,
    chat,
    completions,
    gemini,
    media,
    messages,
    ollama,
    responses,
)
from penstock.testing.provider.formats.format import Format
from penstock.testing.provider.request import WireRequest

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "/v1/chat/completions": chat.FORMAT,
        "/v1/responses": responses.FORMAT,
        "/v1/messages": messages.FORMAT,
        "/v1/completions": completions.FORMAT,
        "/v1/embeddings": media.EMBEDDINGS,
        "/v1/images/generations": media.IMAGES,
        "/v1/images/edits": media.IMAGES,
        "/v1/images/variations": media.IMAGES,
        "/v1/audio/speech": media.SPEECH,
        "/v1/audio/transcriptions": media.TRANSCRIPTIONS,
        "/v1/audio/translations": media.TRANSCRIPTIONS,
        "/v1/batches": media.BATCHES,
        "/v1/messages/batches": media.BATCHES,
        "/api/chat": ollama.CHAT,
        "/api/generate": ollama.GENERATE,
        "/api/embed": ollama.EMBED,
        "/api/embeddings": ollama.EMBEDDINGS,
    }
)
"""APIs by their path."""
ENDINGS: Mapping[str, Format] = MappingProxyType(
    {
        ":generateContent": gemini.GENERATE,
        ":streamGenerateContent": gemini.GENERATE,
        ":embedContent": gemini.EMBED,
        ":batchEmbedContents": gemini.BATCH_EMBED,
        "/converse": bedrock.CONVERSE,
        "/converse-stream": bedrock.CONVERSE,
        "/invoke": bedrock.INVOKE,
        "/invoke-with-response-stream": bedrock.INVOKE,
    }
)
"""APIs whose path names the model, by the part of the path after the name."""
FREE = ("/v1/messages/count_tokens", "/v1/moderations", ":countTokens")


def format_of(request: WireRequest) -> Format | None:
    """Return the API of a request; None if there is none at its path."""
    path = request.path
    if (format := FORMATS.get(path)) is not None:
        return format
    if path.endswith(":streamGenerateContent") and "alt=sse" not in request.query:
        return gemini.ARRAY
    if path.endswith("/invoke") and "embed" in path:
        return bedrock.EMBED
    return next((format for ending, format in ENDINGS.items() if path.endswith(ending)), None)


def is_free(path: str) -> bool:
    """Whether a provider does not charge for requests to this path."""
    return path.endswith(FREE)


def free_answer(request: WireRequest) -> dict[str, Any]:
    """Return the answer to a request that costs nothing."""
    if request.path.endswith(":countTokens"):
        return gemini.count(request)
    if request.path.endswith("/moderations"):
        return {"id": f"modr-{request.number}", "model": request.model, "results": [{"flagged": False}]}
    return {"input_tokens": request.input_tokens}


__all__ = ["FORMATS", "Format", "chat", "format_of", "free_answer", "is_free", "messages", "responses"]
