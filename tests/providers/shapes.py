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
