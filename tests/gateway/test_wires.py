"""Every path that the gateway offers, and every one that it refuses: what the client and the provider see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.testing.provider import FakeProviderServer, Say, ToolCall
from tests.gateway.conftest import KEY, PROVIDER_KEY, Served, gateway

MESSAGES = [{"role": "user", "content": "hello there"}]
CONTENTS = [{"role": "user", "parts": [{"text": "hello there"}]}]
GEMINI = "/v1beta/models/fake-1"

CALLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "chat": ("openai", "/v1/chat/completions", {"model": "fake-1", "messages": MESSAGES, "max_tokens": 20}),
    "chat stream": (
        "openai",
        "/v1/chat/completions",
        {
            "model": "fake-1",
            "messages": MESSAGES,
            "max_tokens": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "responses": ("openai", "/v1/responses", {"model": "fake-1", "input": "hello", "max_output_tokens": 20}),
    "responses stream": (
        "openai",
        "/v1/responses",
        {"model": "fake-1", "input": "hello", "max_output_tokens": 20, "stream": True},
    ),
    "completions": ("openai", "/v1/completions", {"model": "fake-1", "prompt": "hello", "max_tokens": 20}),
    "embeddings": ("openai", "/v1/embeddings", {"model": "fake-1", "input": ["hello", "there"]}),
    "images": ("openai", "/v1/images/generations", {"model": "fake-1", "prompt": "a dam"}),
    "speech": ("openai", "/v1/audio/speech", {"model": "fake-1", "input": "hello", "voice": "alloy"}),
    "messages": ("anthropic", "/v1/messages", {"model": "fake-1", "messages": MESSAGES, "max_tokens": 20}),
    "messages stream": (
        "anthropic",
        "/v1/messages",
        {"model": "fake-1", "messages": MESSAGES, "max_tokens": 20, "stream": True},
    ),
    "count_tokens": ("anthropic", "/v1/messages/count_tokens", {"model": "fake-1", "messages": MESSAGES}),
    "generate": (
        "gemini",
        f"{GEMINI}:generateContent",
        {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 20}},
    ),
    "generate stream": (
        "gemini",
        f"{GEMINI}:streamGenerateContent?alt=sse",
        {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 20}},
    ),
    "generate array": (
        "gemini",
        f"{GEMINI}:streamGenerateContent",
        {"contents": CONTENTS, "generationConfig": {"maxOutputTokens": 20}},
    ),
    "embed": ("gemini", f"{GEMINI}:embedContent", {"content": {"parts": [{"text": "hello"}]}}),
    "count": ("gemini", f"{GEMINI}:countTokens", {"contents": CONTENTS}),
}
FREE = {"count_tokens", "count"}
AUTH = {"openai": "authorization", "anthropic": "x-api-key", "gemini": "x-goog-api-key"}
CONNECTION = {"host", "date", "server", "connection", "transfer-encoding", "content-length", "accept-encoding"}
"""Headers of one connection, which differ on both sides of any proxy."""


def credentials(wire: str, key: str) -> dict[str, str]:
    return {AUTH[wire]: f"Bearer {key}" if wire == "openai" else key}


@pytest.fixture
def served(provider: FakeProviderServer) -> Iterator[Served]:
    with gateway(provider, max_cost_usd=1) as served:
        yield served


@pytest.mark.requirement("X-12")
@pytest.mark.parametrize("name", CALLS)
def test_client_and_provider_see_the_same_with_and_without_the_gateway(name: str) -> None:
    wire, path, body = CALLS[name]
    body = {**body, "unknown_field": {"nested": [1, None, "ü"]}}
    extra = {"x-custom": "kept", "anthropic-beta": "some-feature"}
    with FakeProviderServer() as plain:
        direct = httpx.post(plain.url + path, json=body, headers={**extra, **credentials(wire, PROVIDER_KEY)})
    with FakeProviderServer() as provider, gateway(provider, max_cost_usd=1) as served:
        through = httpx.post(f"{served.url}/{wire}{path}", json=body, headers={**extra, **credentials(wire, KEY)})
    assert through.status_code == direct.status_code == 200
    assert _timeless(through.text) == _timeless(direct.text)
    assert _headers(through.headers) == _headers(direct.headers)
    (expected,), (seen,) = plain.requests, provider.requests
    assert (seen.method, seen.path, seen.query) == (expected.method, expected.path, expected.query)
    assert seen.body == expected.body
    assert _headers(seen.headers) == _headers(expected.headers)
    assert served.run.balance.held_nanos == served.run.balance.unresolved_nanos == 0
    if name == "speech":  # its answer reports no usage, and its sound cannot be estimated
        assert "unknown" in served.run.explain()
    elif name == "embed":  # its answer reports no usage: it costs what was held
        assert served.run.balance.spent_nanos >= provider.invoice.total_nanos
    elif name not in FREE:
        assert served.run.balance.spent_nanos == provider.invoice.total_nanos > 0


def _headers(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in CONNECTION}


def _timeless(text: str) -> str:
    """The text without the seconds at which an answer was made."""
    return "".join(part for part in text.replace("\n", " ").split('"') if not part.strip(":, ").isdecimal())


def test_usage_that_the_client_did_not_request_is_read_and_removed(served: Served) -> None:
    body = {"model": "fake-1", "messages": MESSAGES, "stream": True}
    answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=credentials("openai", KEY))
    assert "data: [DONE]" in answer.text
    assert '"usage":{' not in answer.text.replace(" ", "")
    (request,) = served.provider.requests
    assert request.body["stream_options"] == {"include_usage": True}
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos > 0


def test_output_is_clamped_to_what_the_ceiling_buys(provider: FakeProviderServer) -> None:
    with gateway(provider, max_cost_usd="0.001") as served:
        body = {"model": "fake-1", "messages": MESSAGES, "max_tokens": 100_000}
        answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=credentials("openai", KEY))
    assert answer.status_code == 200
    assert provider.requests[0].body["max_tokens"] < 100
    assert provider.invoice.total_usd <= 0.001


@pytest.mark.parametrize("path", ["/openai/v1/chat/completions", "/openai/chat/completions"])
def test_path_of_the_version_may_be_left_out(served: Served, path: str) -> None:
    body = {"model": "fake-1", "messages": MESSAGES}
    answer = httpx.post(served.url + path, json=body, headers=credentials("openai", KEY))
    assert answer.status_code == 200


def test_anthropics_path_is_served_with_and_without_its_version(served: Served) -> None:
    body = {"model": "fake-1", "messages": MESSAGES, "max_tokens": 9}
    for path in ("/messages", "/v1/messages"):  # two clients of one variable send one each
        answer = httpx.post(f"{served.url}/anthropic{path}", json=body, headers=credentials("anthropic", KEY))
        assert answer.status_code == 200
    assert {request.path for request in served.provider.requests} == {"/v1/messages"}


def test_geminis_key_may_be_in_the_query_and_does_not_leave(served: Served) -> None:
    url = f"{served.url}/gemini{GEMINI}:generateContent?key={KEY}&alt=json"
    assert httpx.post(url, json={"contents": CONTENTS}).status_code == 200
    (request,) = served.provider.requests
    assert request.query == "alt=json"
    assert request.headers["x-goog-api-key"] == PROVIDER_KEY


def test_models_are_listed_by_the_provider(served: Served) -> None:
    answer = httpx.get(f"{served.openai}/models", headers=credentials("openai", KEY))
    assert [model["id"] for model in answer.json()["data"]] == ["fake-1"]


def test_transcription_in_a_form_is_passed_on(served: Served) -> None:
    answer = httpx.post(
        f"{served.openai}/audio/transcriptions",
        data={"model": "fake-1"},
        files={"file": ("sound.wav", b"RIFF" * 100)},
        headers=credentials("openai", KEY),
    )
    assert answer.status_code == 200
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos


@pytest.mark.parametrize("method", ["HEAD", "GET"])
@pytest.mark.parametrize("path", ["/anthropic", "/openai/v1", "/gemini/"])
def test_probe_of_the_base_is_answered(served: Served, method: str, path: str) -> None:
    assert httpx.request(method, served.url + path).status_code == 200


REFUSED = [
    ("openai", "POST", "/v1/batches", "batches"),
    ("openai", "POST", "/v1/files", "files"),
    ("openai", "POST", "/v1/assistants", "assistants"),
    ("openai", "POST", "/v1/threads/t1/runs", "threads"),
    ("openai", "GET", "/v1/realtime", "realtime"),
    ("openai", "GET", "/v1/responses/resp_1", "responses"),
    ("openai", "POST", "/v1/something", "POST /something"),
    ("anthropic", "POST", "/v1/messages/batches", "messages/batches"),
    ("anthropic", "POST", "/v1/files", "files"),
    ("gemini", "POST", "/v1beta/files", "files"),
    ("gemini", "POST", f"{GEMINI}:batchGenerateContent", "batchGenerateContent"),
    ("gemini", "POST", "/upload/v1beta/files", "files"),
]


@pytest.mark.parametrize(("wire", "method", "path", "name"), REFUSED)
def test_path_that_cannot_be_held_for_is_refused_by_name(
    served: Served, wire: str, method: str, path: str, name: str
) -> None:
    answer = httpx.request(method, f"{served.url}/{wire}{path}", headers=credentials(wire, KEY))
    assert answer.status_code == 404
    assert f"{name} is not offered by the gateway" in _message(answer)
    assert served.provider.requests == ()


@pytest.mark.parametrize("user_agent", ["openai/1", "codex_exec/0.169.0"])
def test_websocket_of_responses_is_refused_so_that_clients_send_a_plain_request(
    served: Served, user_agent: str
) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x", "sec-websocket-version": "13"}
    headers = {**upgrade, **credentials("openai", KEY), "user-agent": user_agent}
    answer = httpx.get(f"{served.openai}/responses", headers=headers)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (426, "false")
    assert httpx.get(f"{served.openai}/responses", headers=credentials("openai", KEY)).status_code == 405
    assert "realtime is not offered" in _message(httpx.get(f"{served.openai}/realtime", headers=headers))


def test_background_response_is_refused(served: Served) -> None:
    body = {"model": "fake-1", "input": "hello", "background": True}
    answer = httpx.post(f"{served.openai}/responses", json=body, headers=credentials("openai", KEY))
    assert answer.status_code == 400
    assert "background: true is not offered" in _message(answer)
    assert served.provider.requests == ()


ADDRESS, IMAGE, PDF = "https://example.org/a", "data:image/png;base64,AA==", "data:application/pdf;base64,AA=="


def _saying(part: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [part]}]


def _parts(part: dict[str, Any]) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": [part]}]}


UNKNOWN: list[tuple[str, str, dict[str, Any], str]] = [
    ("openai", "/v1/responses", {"input": "x", "previous_response_id": "r"}, "previous_response_id"),
    ("openai", "/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "the tool web_search"),
    ("openai", "/v1/images/generations", {"prompt": "x"}, "a request to images"),
    (
        "anthropic",
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{"type": "web_search_20250305", "name": "s"}]},
        "web_",
    ),
    ("gemini", f"{GEMINI}:generateContent", {"contents": CONTENTS, "tools": [{"googleSearch": {}}]}, "googleSearch"),
    (
        "openai",
        "/v1/chat/completions",
        {"messages": _saying({"type": "image_url", "image_url": {"url": ADDRESS}})},
        "an image by its address",
    ),
    ("openai", "/v1/chat/completions", {"messages": MESSAGES, "service_tier": "priority"}, "service_tier: priority"),
    ("anthropic", "/v1/messages", {"messages": MESSAGES, "speed": "fast"}, "speed: fast"),
    (
        "openai",
        "/v1/responses",
        {"input": _saying({"type": "input_image", "image_url": ADDRESS})},
        "an image by its address",
    ),
    (
        "anthropic",
        "/v1/messages",
        {"messages": _saying({"type": "image", "source": {"type": "url", "url": ADDRESS}})},
        "an image by its address",
    ),
    ("gemini", f"{GEMINI}:generateContent", _parts({"fileData": {"fileUri": ADDRESS}}), "a file by reference"),
    (
        "openai",
        "/v1/responses",
        {"input": _saying({"type": "input_file", "filename": "a.pdf", "file_data": PDF})},
        "a document",
    ),
    (
        "anthropic",
        "/v1/messages",
        {"messages": _saying({"type": "document", "source": {"type": "base64", "data": "AA=="}})},
        "a document",
    ),
    (
        "gemini",
        f"{GEMINI}:generateContent",
        _parts({"inlineData": {"mimeType": "application/pdf", "data": "AA=="}}),
        "a document",
    ),
]
KNOWN: list[tuple[str, str, dict[str, Any]]] = [
    ("openai", "/v1/chat/completions", {"messages": _saying({"type": "image_url", "image_url": {"url": IMAGE}})}),
    ("openai", "/v1/responses", {"input": _saying({"type": "input_image", "image_url": IMAGE})}),
    (
        "anthropic",
        "/v1/messages",
        {"max_tokens": 9, "messages": _saying({"type": "image", "source": {"type": "base64", "data": "AA=="}})},
    ),
    ("gemini", f"{GEMINI}:generateContent", _parts({"inlineData": {"mimeType": "image/png", "data": "AA=="}})),
    ("openai", "/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "image_url"}]}),
    ("openai", "/v1/chat/completions", {"messages": MESSAGES, "service_tier": "flex"}),
]
"""What looks alike, and is covered by its hold."""


@pytest.mark.parametrize(("wire", "path", "body", "name"), UNKNOWN)
@pytest.mark.parametrize("policy", ["refuse", "count"])
def test_request_of_unknown_worst_case_follows_the_declared_policy(
    provider: FakeProviderServer, wire: str, path: str, body: dict[str, Any], name: str, policy: str
) -> None:
    with gateway(provider, {"unknown_cost": policy}, max_cost_usd=1) as served:
        body = {"model": "fake-1", "max_tokens": 9, **body} if wire == "anthropic" else {"model": "fake-1", **body}
        answer = httpx.post(f"{served.url}/{wire}{path}", json=body, headers=credentials(wire, KEY))
    if policy == "count":
        assert answer.status_code == 200
        assert served.run.balance.spent_nanos == provider.invoice.total_nanos
    else:
        assert answer.status_code == 400
        assert f"the cost of {name}" in _message(answer) or name in _message(answer)
        assert provider.requests == ()


@pytest.mark.parametrize(("wire", "path", "body"), KNOWN)
def test_request_whose_worst_case_is_known_is_passed_on(
    provider: FakeProviderServer, wire: str, path: str, body: dict[str, Any]
) -> None:
    with gateway(provider, {"unknown_cost": "refuse"}, max_cost_usd=1) as served:
        sent = {"model": "fake-1", **body}
        answer = httpx.post(f"{served.url}/{wire}{path}", json=sent, headers=credentials(wire, KEY))
    assert answer.status_code == 200


def test_model_outside_of_the_allow_list_is_refused(provider: FakeProviderServer) -> None:
    with gateway(provider, {"models": ("fake-*", "gpt-5")}) as served:
        for model, status in (("fake-1", 200), ("gpt-5-large", 403)):
            body = {"model": model, "messages": MESSAGES}
            answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=credentials("openai", KEY))
            assert answer.status_code == status
    assert "it allows fake-*, gpt-5" in _message(answer)


SHAPES: dict[str, Any] = {
    "openai": {"error": {"message": str, "type": "insufficient_quota", "param": None, "code": "budget_exceeded"}},
    "anthropic": {"type": "error", "error": {"type": "billing_error", "message": str}},
    "gemini": {"error": {"code": 402, "message": str, "status": "RESOURCE_EXHAUSTED"}},
}


@pytest.mark.parametrize("name", ["chat", "messages", "generate"])
def test_refusal_has_the_providers_shape_and_is_not_retried(provider: FakeProviderServer, name: str) -> None:
    wire, path, body = CALLS[name]
    with gateway(provider, max_cost_usd=0) as served:
        answer = httpx.post(f"{served.url}/{wire}{path}", json=body, headers=credentials(wire, KEY))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (402, "false")
    assert "retry-after" not in answer.headers
    assert _typed(answer.json()) == SHAPES[wire]


@pytest.mark.requirement("X-9")
@pytest.mark.parametrize("name", ["chat", "messages", "generate"])
def test_a_request_that_only_holds_of_others_stand_in_the_way_of_may_be_retried(
    provider: FakeProviderServer, name: str
) -> None:
    wire, path, body = CALLS[name]
    with gateway(provider, max_cost_usd="0.10", max_wait_s=0) as served:

        def post() -> httpx.Response:
            return httpx.post(f"{served.url}/{wire}{path}", json=body, headers=credentials(wire, KEY))

        refused = served.run.tool(post, name="the other call", cost_hint_usd="0.0999")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        assert "x-should-retry" not in refused.headers
        assert provider.invoice.total_usd == 0


def test_codex_is_refused_with_an_exhausted_quota(provider: FakeProviderServer) -> None:
    with gateway(provider, max_cost_usd=0) as served:
        headers = {"user-agent": "codex_cli_rs/0.166.0", **credentials("openai", KEY)}
        body = {"model": "fake-1", "input": "hello"}
        answer = httpx.post(f"{served.openai}/responses", json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")


def test_tool_calls_pass_in_both_directions() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with FakeProviderServer(script=[Say(tool_calls=(ToolCall("look", {"at": "dams"}),))]) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=1) as served:
            body = {"model": "fake-1", "messages": MESSAGES, "tools": tools}
            answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=credentials("openai", KEY))
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"at": "dams"}
    assert provider.requests[0].body["tools"] == tools


def _message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def _typed(body: Any) -> Any:
    if isinstance(body, dict):
        return {name: str if name == "message" else _typed(value) for name, value in body.items()}
    return body
