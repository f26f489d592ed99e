"""Parse model requests by their path and body."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.providers.http.forms import form_of
from penstock.providers.http.request import (
    IMAGE_TOKENS,
    TOOL_TOKENS,
    ModelRequest,
    parse_request,
)
from penstock.testing.provider import count_input_tokens

MESSAGES = [{"role": "user", "content": "hello"}]


def parsed(path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **body: Any) -> ModelRequest:
    form = form_of("POST", "127.0.0.1", path)
    assert form is not None
    found = parse_request(form, headers or {}, json.dumps(body).encode())
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("method", "path", "api"),
    [
        ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/openai/deployments/mine/chat/completions", "chat"),
        ("POST", "/api/v1/responses", "responses"),
        ("POST", "/v1/messages", "messages"),
        ("POST", "/v1/messages/", "messages"),
        ("GET", "/v1/responses", None),
        ("POST", "/v1/embeddings", "embeddings"),
        ("POST", "/v1/messages/count_tokens", None),
        ("POST", "/v1/responses/resp_1/cancel", None),
    ],
)
def test_an_api_is_known_by_its_path(method: str, path: str, api: str | None) -> None:
    form = form_of(method, "127.0.0.1", path)
    assert (form.api if form else None) == api


@pytest.mark.parametrize("content", [b"", b"not JSON", b"[]", b'"text"', b'{"text": "hello"}', b"[" * 100_000])
def test_a_body_of_another_shape_is_not_a_model_request(content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        form = form_of("POST", "127.0.0.1", path)
        assert form is not None
        assert parse_request(form, {}, content) is None


@pytest.mark.parametrize("text", ["hello " * 1_000, "def f(x):\n    return x\n" * 200, "你好，世界" * 300, "x"])
def test_the_input_is_estimated_from_above(text: str) -> None:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": text}]}
    assert parsed(**body).input_tokens >= count_input_tokens(body)


def test_an_image_counts_as_an_image_and_not_by_its_bytes() -> None:
    pixels = "A" * 1_000_000
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixels}"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": pixels}},
        {"type": "input_image", "image_url": "https://example.com/cat.png"},
    ]
    found = parsed(model="m", messages=[{"role": "user", "content": parts}]).input_tokens
    assert 3 * IMAGE_TOKENS < found < 3 * IMAGE_TOKENS + 200


@pytest.mark.parametrize(("model", "detail", "tokens"), [("gpt-4o-mini", "high", 48_169), ("m", "original", 16_200)])
def test_an_image_counts_as_the_most_that_its_model_bills(model: str, detail: str, tokens: int) -> None:
    image = "data:image/png;base64,AAAA"
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image, "detail": detail}}]}]
    responses = [{"role": "user", "content": [{"type": "input_image", "image_url": image, "detail": detail}]}]
    assert parsed(model=model, messages=chat).input_tokens > tokens
    found = body_of("/v1/responses", {"model": model, "input": responses})
    assert found.input_tokens > tokens


def test_tools_add_instructions_to_the_input() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    without = parsed(model="m", messages=MESSAGES).input_tokens
    assert without + TOOL_TOKENS < parsed(model="m", messages=MESSAGES, tools=tools).input_tokens


@pytest.mark.parametrize(
    ("path", "body", "host", "cap"),
    [
        ("/v1/chat/completions", {"model": "gpt-4o"}, "api.openai.com", "max_completion_tokens"),
        ("/v1/chat/completions", {"model": "o3-mini"}, "proxy.internal", "max_completion_tokens"),
        ("/v1/chat/completions", {"model": "llama-3"}, "localhost", "max_tokens"),
        ("/v1/chat/completions", {"model": "mine"}, "me.openai.azure.com", "max_completion_tokens"),
        ("/v1/chat/completions", {"model": "gpt-4o", "max_tokens": 500}, "api.openai.com", "max_tokens"),
        ("/v1/chat/completions", {"model": "x", "max_completion_tokens": 500}, "localhost", "max_completion_tokens"),
        ("/v1/responses", {"model": "gpt-4o", "input": "hello"}, "api.openai.com", "max_output_tokens"),
        ("/v1/messages", {"model": "claude", "max_tokens": 500}, "api.anthropic.com", "max_tokens"),
    ],
)
def test_the_cap_is_written_into_the_field_that_the_api_knows(
    path: str, body: dict[str, Any], host: str, cap: str
) -> None:
    written = json.loads(parsed(path, messages=MESSAGES, **body).written(321, host))
    caps = {name: value for name, value in written.items() if name.startswith("max_")}
    assert caps == {cap: 321}


@pytest.mark.parametrize("cap", [0, 10])
def test_a_cap_of_the_client_is_never_raised(cap: int) -> None:
    written = json.loads(parsed(model="m", messages=MESSAGES, max_tokens=cap).written(321, "localhost"))
    assert written["max_tokens"] == cap


def test_a_cap_that_is_not_a_number_is_replaced() -> None:
    body = {"model": "m", "messages": MESSAGES, "max_completion_tokens": "100000", "max_tokens": 10}
    written = json.loads(parsed(**body).written(321, "localhost"))
    assert (written["max_completion_tokens"], written["max_tokens"]) == (321, 10)


@pytest.mark.parametrize(
    ("n", "answers"),
    [(5, 5), ("5", 5), (5.0, 5), (10**400, 10**400), (None, 1), (0, 1), (-3, 1), ("many", 1), (float("inf"), 1)],
)
def test_answer_counts_that_a_server_may_accept_are_counted(n: Any, answers: int) -> None:
    assert parsed(model="m", messages=MESSAGES, n=n).answers == answers


def test_everything_else_in_the_body_stays_as_it_was() -> None:
    body = {"model": "m", "messages": MESSAGES, "temperature": 0.5, "metadata": {"a": ["b", None, 1]}, "ü": "ß"}
    written = json.loads(parsed(**body).written(10, "localhost"))
    assert {**body, "max_tokens": 10} == written


def test_only_a_chat_stream_without_a_usage_report_is_rewritten_to_have_one() -> None:
    assert parsed(model="m", messages=MESSAGES, stream=True).adds_usage
    assert not parsed(model="m", messages=MESSAGES).adds_usage
    assert not parsed(model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}).adds_usage
    assert not parsed("/v1/responses", model="m", input="x", stream=True).adds_usage
    options = {"include_usage": False, "other": 1}
    written = json.loads(parsed(model="m", messages=MESSAGES, stream=True, stream_options=options).written(1, ""))
    assert written["stream_options"] == {"include_usage": True, "other": 1}


def test_thinking_needs_more_output_than_its_own_budget() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2_000}
    found = parsed("/v1/messages", model="claude", messages=MESSAGES, max_tokens=4_000, thinking=thinking)
    assert found.least_output_tokens == 2_001


@pytest.mark.parametrize(("count", "attempt"), [("0", 1), ("2", 3), ("-1", 1), ("many", 1), ("²", 1), ("9" * 9, 1)])
def test_the_attempt_is_read_from_the_clients_retry_header(count: str, attempt: int) -> None:
    assert parsed(headers={"x-stainless-retry-count": count}, model="m", messages=MESSAGES).attempt == attempt


def test_what_official_clients_post_to_an_unknown_path_has_an_unknown_cost_at_every_host() -> None:
    headers = {"x-stainless-lang": "python"}
    found = form_of("POST", "127.0.0.1", "/v1/batches", headers)
    assert found is not None
    assert found.api == "unknown"
    assert form_of("POST", "127.0.0.1", "/v1/batches") is None
    assert form_of("GET", "127.0.0.1", "/v1/models", headers) is None
    assert form_of("POST", "127.0.0.1", "/v1/messages/count_tokens", headers) is None


def body_of(path: str, body: dict[str, Any], host: str = "127.0.0.1", **headers: str) -> ModelRequest:
    form = form_of("POST", host, path)
    assert form is not None
    found = parse_request(form, headers, json.dumps(body).encode())
    assert found is not None
    return found


GEMINI, CONVERSE, INVOKE = "/models/m:generateContent", "/model/m/converse", "/model/m/invoke"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", {"prompt": "x"}, {"max_tokens": 16}),
        ("/v1/fim/completions", {"prompt": "x"}, {"max_tokens": 20}),
        (GEMINI, {"contents": []}, {"generationConfig": {"maxOutputTokens": 20}}),
        (
            GEMINI,
            {"contents": [], "generationConfig": {"topP": 1}},
            {"generationConfig": {"topP": 1, "maxOutputTokens": 20}},
        ),
        (
            GEMINI,
            {"contents": [], "generation_config": {"max_output_tokens": 99}},
            {"generation_config": {"max_output_tokens": 20}},
        ),
        (CONVERSE, {"messages": []}, {"inferenceConfig": {"maxTokens": 20}}),
        (CONVERSE, {"messages": [], "inferenceConfig": {"maxTokens": "99"}}, {"inferenceConfig": {"maxTokens": 20}}),
        (INVOKE, {"anthropic_version": "x"}, {"max_tokens": 20}),
        (INVOKE, {"prompt": "x", "max_gen_len": 99}, {"max_gen_len": 20}),
        (
            INVOKE,
            {"inputText": "x", "textGenerationConfig": {"maxTokenCount": 5}},
            {"textGenerationConfig": {"maxTokenCount": 5}},
        ),
        ("/api/chat", {"model": "m"}, {"options": {"num_predict": 20}}),
        (
            "/api/chat",
            {"model": "m", "options": {"num_predict": -1, "seed": 1}},
            {"options": {"num_predict": 20, "seed": 1}},
        ),
    ],
)
def test_the_maximum_is_written_where_each_api_has_it(
    path: str, body: dict[str, Any], expected: dict[str, Any]
) -> None:
    request = body_of(path, body)
    limit = 20 if request.form.default_cap is None else request.form.default_cap
    assert json.loads(request.written(limit, "127.0.0.1")) == {**body, **expected}


def test_a_body_that_is_not_changed_is_sent_byte_for_byte() -> None:
    content = b'{ "input" : ["a","b"], "model":"m" }'
    form = form_of("POST", "127.0.0.1", "/v1/embeddings")
    assert form is not None
    request = parse_request(form, {}, content)
    assert request is not None
    assert request.written(0, "127.0.0.1") == content
    assert (request.inputs, request.model) == (2, "m")


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (GEMINI, {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "A" * 100_000}}]}]}),
        (GEMINI, {"contents": [{"parts": [{"inline_data": {"mime_type": "image/png", "data": "A" * 100_000}}]}]}),
        (CONVERSE, {"messages": [{"content": [{"image": {"format": "png", "source": {"bytes": "A" * 100_000}}}]}]}),
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "", "images": ["A" * 100_000]}]}),
    ],
)
def test_images_of_other_apis_count_as_images(path: str, part: dict[str, Any]) -> None:
    assert IMAGE_TOKENS < body_of(path, part).input_tokens < IMAGE_TOKENS + 200


@pytest.mark.parametrize(
    ("path", "body", "output"),
    [
        (INVOKE, {"prompt": "x"}, "unknown"),
        ("/model/amazon.titan-embed-text-v2/invoke", {"inputText": "x"}, "none"),
        (INVOKE, {"messages": [], "max_tokens": 5}, "text"),
    ],
)
def test_an_invocation_is_read_by_the_body_of_its_vendor(path: str, body: dict[str, Any], output: str) -> None:
    assert body_of(path, body).form.output == output


def test_candidates_and_reasoning_of_gemini_are_read() -> None:
    config = {"candidateCount": 3, "maxOutputTokens": 50, "thinkingConfig": {"thinkingBudget": 1_000}}
    request = body_of(GEMINI, {"contents": [], "generationConfig": config})
    assert (request.answers, request.output_tokens, request.least_output_tokens) == (3, 50, 1_001)


@pytest.mark.parametrize(("host", "model"), [("api.openai.com", "/v1/chat/completions"), ("127.0.0.1", "")])
def test_a_body_that_cannot_be_read_has_an_unknown_cost(host: str, model: str) -> None:
    form = form_of("POST", host, "/v1/chat/completions")
    assert form is not None
    found = parse_request(form, {"content-encoding": "gzip"}, b"\x1f\x8b")
    assert found is not None
    assert (found.form.api, found.model) == ("unknown", model)


def test_a_body_that_cannot_be_read_is_not_a_request_where_other_services_have_the_path() -> None:
    form = form_of("POST", "127.0.0.1", "/v1/messages")
    assert form is not None
    assert parse_request(form, {"content-encoding": "gzip"}, b"\x1f\x8b") is None


@pytest.mark.parametrize("authorization", ["AWS4-HMAC-SHA256 Credential=x", "AWS4-ECDSA-P256-SHA256 Credential=x"])
def test_a_signed_body_is_fixed(authorization: str) -> None:
    assert body_of(CONVERSE, {"messages": []}, authorization=authorization).is_fixed
    assert not body_of(CONVERSE, {"messages": []}, authorization="Bearer x").is_fixed


@pytest.mark.parametrize(("header", "attempt"), [("attempt=1", 1), ("attempt=2; max=5", 2), ("attempt=x", 1), ("", 1)])
def test_the_attempt_of_amazons_clients_is_read(header: str, attempt: int) -> None:
    assert body_of(CONVERSE, {"messages": []}, **{"amz-sdk-request": header}).attempt == attempt


def test_the_number_of_answers_is_read_where_the_api_has_it() -> None:
    config = {"candidateCount": 1}
    assert body_of("/v1/chat/completions", {"messages": [], "n": 5, "generationConfig": config}).answers == 5
    assert body_of(GEMINI, {"contents": [], "n": 5, "generation_config": {"candidate_count": 2}}).answers == 2


def test_a_request_for_images_that_names_no_model_is_for_the_default() -> None:
    assert body_of("/v1/images/generations", {"prompt": "x"}).model == "dall-e-2"
