"""Requests in the shape of every API, as the fake provider answers them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "fake-1"
MAX = 100
HELLO = [{"role": "user", "content": "hello"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
CONVERSATION = [{"role": "user", "content": [{"text": "hello"}]}]
ANTHROPIC = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": MAX, "messages": HELLO}
GEMINI = {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": MAX}}
CONVERSE = {"messages": CONVERSATION, "inferenceConfig": {"maxTokens": MAX}}
OPTIONS = {"num_predict": MAX}
SIGNATURE = {"authorization": "AWS4-HMAC-SHA256 Credential=AKIA/20260101/us-east-1/bedrock/aws4_request, Signature=00"}


@dataclass(frozen=True)
class Shape:
    """One way to request an answer."""

    path: str
    body: dict[str, Any]
    streams: bool = False
    has_output: bool = True
    reports: bool = True
    """Whether its answers report the usage."""
    headers: dict[str, str] = field(default_factory=dict)
    file: tuple[str, bytes] | None = None
    """Name and content of a file: it is sent with the fields of the body as a multipart form."""
    host: str = ""
    """The host that is addressed, which is one of a provider; empty for that of the server."""


SHAPES = {
    "completions": Shape("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": MAX}),
    "completions stream": Shape(
        "/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": MAX, "stream": True}, streams=True
    ),
    "embeddings": Shape("/v1/embeddings", {"model": MODEL, "input": ["hello", "you"]}, has_output=False),
    "gemini": Shape(f"/v1beta/models/{MODEL}:generateContent", GEMINI),
    "gemini events": Shape(f"/v1beta/models/{MODEL}:streamGenerateContent?alt=sse", GEMINI, streams=True),
    "gemini array": Shape(f"/v1beta/models/{MODEL}:streamGenerateContent", GEMINI, streams=True),
    "vertex": Shape(f"/v1/projects/p/locations/l/publishers/google/models/{MODEL}:generateContent", GEMINI),
    "gemini embedding": Shape(
        f"/v1beta/models/{MODEL}:embedContent", {"content": CONTENTS[0]}, has_output=False, reports=False
    ),
    "gemini embeddings": Shape(
        f"/v1beta/models/{MODEL}:batchEmbedContents",
        {"requests": [{"content": CONTENTS[0]}] * 3},
        has_output=False,
        reports=False,
    ),
    "converse": Shape(f"/model/{MODEL}/converse", CONVERSE),
    "converse stream": Shape(f"/model/{MODEL}/converse-stream", CONVERSE, streams=True),
    "signed converse": Shape(f"/model/{MODEL}/converse", CONVERSE, headers=SIGNATURE),
    "signed converse stream": Shape(f"/model/{MODEL}/converse-stream", CONVERSE, streams=True, headers=SIGNATURE),
    "invoke": Shape(f"/model/{MODEL}/invoke", ANTHROPIC),
    "invoke stream": Shape(f"/model/{MODEL}/invoke-with-response-stream", ANTHROPIC, streams=True),
    "ollama chat": Shape("/api/chat", {"model": MODEL, "messages": HELLO, "stream": False, "options": OPTIONS}),
    "ollama chat stream": Shape("/api/chat", {"model": MODEL, "messages": HELLO, "options": OPTIONS}, streams=True),
    "ollama generate": Shape("/api/generate", {"model": MODEL, "prompt": "hello", "stream": False, "options": OPTIONS}),
    "ollama generate stream": Shape(
        "/api/generate", {"model": MODEL, "prompt": "hello", "options": OPTIONS}, streams=True
    ),
    "ollama embed": Shape("/api/embed", {"model": MODEL, "input": "hello"}, has_output=False),
    "ollama embeddings": Shape("/api/embeddings", {"model": MODEL, "prompt": "hello"}, has_output=False, reports=False),
}

CHAT = {"model": MODEL, "messages": HELLO, "max_tokens": MAX}
RESPONSES = {"model": MODEL, "input": "hello", "max_output_tokens": MAX}
SOUND = ("file", b"\0" * 1_000)

OFFICIAL = {
    "chat": Shape("/v1/chat/completions", CHAT),
    "chat stream": Shape("/v1/chat/completions", {**CHAT, "stream": True}, streams=True),
    "responses": Shape("/v1/responses", RESPONSES),
    "responses stream": Shape("/v1/responses", {**RESPONSES, "stream": True}, streams=True),
    "messages": Shape("/v1/messages", CHAT),
    "messages stream": Shape("/v1/messages", {**CHAT, "stream": True}, streams=True),
}
"""The APIs of OpenAI's and Anthropic's clients."""

MEDIA = {
    "images": Shape("/v1/images/generations", {"model": MODEL, "prompt": "a cat"}),
    "image edit": Shape("/v1/images/edits", {"model": MODEL, "prompt": "more"}, file=("image", b"\0" * 1_000)),
    "image variation": Shape("/v1/images/variations", {"model": MODEL}, file=("image", b"\0" * 1_000)),
    "speech": Shape("/v1/audio/speech", {"model": "tts-1", "voice": "alloy", "input": "hello"}, reports=False),
    "transcription": Shape("/v1/audio/transcriptions", {"model": MODEL}, file=SOUND),
    "transcription stream": Shape(
        "/v1/audio/transcriptions", {"model": MODEL, "stream": "true"}, streams=True, file=SOUND
    ),
    "translation": Shape("/v1/audio/translations", {"model": MODEL}, file=SOUND),
}
"""Pictures and sound."""

UNPRICED = {
    "openai batch": Shape("/v1/batches", {"input_file_id": "file-1"}, reports=False, host="api.openai.com"),
    "anthropic batch": Shape("/v1/messages/batches", {"requests": []}, reports=False, host="api.anthropic.com"),
}
"""Paths of known providers that have no API of their own here: their cost is unknown."""

UNSIGNED = {name: shape for name, shape in SHAPES.items() if not shape.headers}
EVERY = {**OFFICIAL, **UNSIGNED, **MEDIA, **UNPRICED}
"""One request of every kind that needs no signature."""
