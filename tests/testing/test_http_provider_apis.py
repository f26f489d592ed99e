"""The fake provider speaks every API over HTTP, and bills what it generates."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from penstock.testing.provider import FakeProviderServer, Say

HELLO = [{"role": "user", "content": "hello"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hello"}]}]
CONVERSATION = [{"role": "user", "content": [{"text": "hello"}]}]
ANTHROPIC = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 20, "messages": HELLO}

PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"model": "fake-1", "prompt": "hello", "max_tokens": 20}),
    "embeddings": ("/v1/embeddings", {"model": "fake-1", "input": ["a", "b"]}),
    "images": ("/v1/images/generations", {"model": "fake-1", "prompt": "a cat", "n": 2}),
    "batches": ("/v1/batches", {"input_file_id": "file-1"}),
    "gemini": (
        "/v1beta/models/fake-1:generateContent",
        {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 20}},
    ),
    "gemini embedding": ("/v1beta/models/fake-1:embedContent", {"content": CONTENTS[0]}),
    "converse": ("/model/fake-1/converse", {"messages": CONVERSATION, "inferenceConfig": {"maxTokens": 20}}),
    "invoke": ("/model/fake-1/invoke", ANTHROPIC),
    "ollama chat": (
        "/api/chat",
        {"model": "fake-1", "messages": HELLO, "stream": False, "options": {"num_predict": 20}},
    ),
    "ollama generate": ("/api/generate", {"model": "fake-1", "prompt": "hello", "stream": False}),
    "ollama embed": ("/api/embed", {"model": "fake-1", "input": ["a"]}),
}


@pytest.mark.parametrize(("path", "body"), PLAIN.values(), ids=PLAIN)
def test_a_plain_request_is_answered_and_billed(path: str, body: dict[str, Any]) -> None:
    with FakeProviderServer() as server:
        answer = httpx2.post(server.url + path, json=body)
    assert answer.status_code == 200
    assert isinstance(answer.json(), dict)
    (line,) = server.invoice.lines
    assert line.billed
    assert line.output_tokens <= 100


def test_each_prompt_and_each_of_its_answers_is_billed() -> None:
    body = {"model": "fake-1", "prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 5}
    with FakeProviderServer() as server:
        answer = httpx2.post(f"{server.openai_url}/completions", json=body).json()
    (line,) = server.invoice.lines
    assert len(answer["choices"]) == 4
    assert line.output_tokens == 2 * 3 * 5 == answer["usage"]["completion_tokens"]


def test_sound_is_billed_by_characters_and_bytes() -> None:
    with (
        FakeProviderServer(script=[Say(), "spoken words"]) as server,
        openai.OpenAI(base_url=server.openai_url, api_key="k") as client,
    ):
        audio = client.audio.speech.create(model="fake-1", voice="alloy", input="x" * 100).read()
        text = client.audio.transcriptions.create(model="fake-1", file=("a.mp3", b"\0" * 10_000))
    spoken, heard = server.invoice.lines
    assert (spoken.input_tokens, spoken.output_tokens) == (100, 0)
    assert len(audio) > 100_000
    assert text.text == "spoken words"
    assert (heard.input_tokens, heard.output_tokens) == (101, 3)


def test_gemini_streams_events_or_one_array() -> None:
    body = {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 3}}
    with FakeProviderServer(script=["one two three"] * 2) as server:
        url = f"{server.url}/v1beta/models/fake-1:streamGenerateContent"
        events = httpx2.post(url, params={"alt": "sse"}, json=body)
        array = httpx2.post(url, json=body)
    chunks = [json.loads(line[6:]) for line in events.text.splitlines() if line]
    assert chunks == [{**chunk, "responseId": "gemini-1"} for chunk in array.json()]
    assert chunks[-1]["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == 3


def test_ollama_streams_lines_unless_streaming_is_turned_off() -> None:
    with FakeProviderServer(script=["one two three"]) as server:
        answer = httpx2.post(f"{server.url}/api/chat", json={"model": "fake-1", "messages": HELLO})
    *pieces, end = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(piece["message"]["content"] for piece in pieces) == "one two three"
    assert (end["done"], end["eval_count"]) == (True, 4)


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/messages/count_tokens", "/v1beta/models/fake-1:countTokens"])
def test_free_paths_are_not_billed(path: str) -> None:
    with FakeProviderServer() as server:
        assert httpx2.post(server.url + path, json={"model": "fake-1", "input": "x"}).status_code == 200
    assert server.invoice.lines == ()
