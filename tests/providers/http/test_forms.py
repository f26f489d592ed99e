"""Recognise model requests by method, host and path."""

from __future__ import annotations

import pytest

from penstock.providers.http.forms import form_of, is_model_socket, is_provider_host

pytestmark = pytest.mark.requirement("X-11")

CLAUDE = "anthropic.claude-3-5-sonnet-20240620-v1:0"
PROFILE = "arn:aws:bedrock:us-east-1:1:inference-profile/us.anthropic.claude"


@pytest.mark.parametrize(
    ("path", "api", "model", "streams"),
    [
        ("/v1/completions", "completions", "", None),
        ("/v1/fim/completions", "completions", "", None),
        ("/v1/agents/completions", "chat", "", None),
        ("/v1/embeddings", "embeddings", "", False),
        ("/v1/images/edits", "images", "", None),
        ("/v1/audio/speech", "speech", "", None),
        ("/v1/audio/translations", "transcriptions", "", None),
        ("/v1beta/models/gemini-2.5-pro:generateContent", "gemini", "gemini-2.5-pro", False),
        ("/v1beta/models/gemini-2.5-pro:streamGenerateContent?alt=sse", "gemini", "gemini-2.5-pro", True),
        ("/v1/projects/p/locations/l/publishers/google/models/g:generateContent", "gemini", "g", False),
        ("/v1/projects/p/locations/l/publishers/anthropic/models/c@1:streamRawPredict", "messages", "c@1", True),
        ("/v1beta/models/e:batchEmbedContents", "embeddings", "e", False),
        (f"/model/{CLAUDE}/converse", "converse", CLAUDE, False),
        (f"/model/{CLAUDE.replace(':', '%3A')}/converse-stream", "converse", CLAUDE, True),
        (f"/model/{PROFILE.replace('/', '%2F')}/invoke", "invoke", PROFILE, False),
        (f"/model/{PROFILE}/invoke-with-response-stream", "invoke", PROFILE, True),
        ("/api/chat", "ollama", "", None),
        ("/api/generate", "ollama", "", None),
        ("/api/embed", "embeddings", "", False),
        ("/api/embeddings", "embeddings", "", False),
        ("/v1/images", None, "", None),
        ("/models/m:countTokens", None, "", None),
        ("/v1/moderations", None, "", None),
        (f"/model/{CLAUDE}/count-tokens", None, "", None),
        ("/chat", None, "", None),
    ],
)
def test_a_path_is_recognised_at_every_host(path: str, api: str | None, model: str, streams: bool | None) -> None:
    form = form_of("POST", "proxy.internal", path)
    if form is None:
        assert api is None
    else:
        assert (form.api, form.model, form.streams) == (api, model, streams)


def test_a_deployment_of_azure_is_the_model_if_the_body_names_none() -> None:
    form = form_of("POST", "mine.openai.azure.com", "/openai/deployments/gpt-4o-mini/chat/completions")
    assert form is not None
    assert (form.api, form.deployment, form.model) == ("chat", "gpt-4o-mini", "")


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("api.openai.com", True),
        ("API.OpenAI.com", True),
        ("api.openai.com:443", True),
        ("eu.api.openai.com", True),
        ("mine.openai.azure.com", True),
        ("europe-west4-aiplatform.googleapis.com", True),
        ("bedrock-runtime.us-east-1.amazonaws.com", True),
        ("bedrock-runtime-fips.us-gov-west-1.amazonaws.com", True),
        ("openrouter.ai", True),
        ("s3.us-east-1.amazonaws.com", False),
        ("storage.googleapis.com", False),
        ("notapi.openai.com.example.org", False),
        ("127.0.0.1", False),
    ],
)
def test_hosts_of_providers_are_known(host: str, is_known: bool) -> None:
    assert is_provider_host(host) is is_known


@pytest.mark.parametrize(
    ("host", "path", "is_model"),
    [
        ("127.0.0.1", "/v1/responses", True),
        ("proxy.example", "/team/v1/realtime?model=gpt-realtime", True),
        ("proxy.example", "/v1/realtime/translations/", True),
        ("proxy.example", "/openai/v1/live/sessions", True),
        ("proxy.example", "/openai/realtime", True),
        ("proxy.example", "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent", True),
        ("API.openai.com:443", "/v9/anything", True),
        ("us-central1-aiplatform.googleapis.com", "/ws/other", True),
        ("proxy.example", "/realtime/v1/websocket", False),
        ("proxy.example", "/v1/realtime-scores", False),
        ("proxy.example", "/video/live/sessions", False),
        ("proxy.example", "/", False),
        ("", "", False),
    ],
)
def test_a_websocket_to_a_model_api_is_known_by_its_host_or_its_path(host: str, path: str, is_model: bool) -> None:
    assert is_model_socket(host, path) is is_model


@pytest.mark.parametrize(
    ("method", "host", "path", "api"),
    [
        ("POST", "api.openai.com", "/v1/batches", "unknown"),
        ("post", "api.openai.com", "/v1/batches?x=1", "unknown"),
        ("POST", "api.openai.com", "/v1/fine_tuning/jobs", "unknown"),
        ("POST", "api.openai.com", "/v1/threads/t/runs", "unknown"),
        ("POST", "api.anthropic.com", "/v1/complete", "unknown"),
        ("POST", "api.anthropic.com", "/v1/messages/batches", "unknown"),
        ("POST", "api.openai.com", "/v1/threads", None),
        ("POST", "api.openai.com", "/v1/threads/t/messages", None),
        ("POST", "api.openai.com", "/v1/responses/r/cancel", None),
        ("POST", "api.openai.com", "/v1/responses/input_tokens", None),
        ("POST", "api.anthropic.com", "/v1/messages/count_tokens", None),
        ("POST", "generativelanguage.googleapis.com", "/upload/v1beta/files", None),
        ("GET", "api.openai.com", "/v1/batches", None),
        ("DELETE", "api.openai.com", "/v1/files/f", None),
        ("POST", "example.org", "/v1/batches", None),
    ],
)
def test_other_posts_to_a_provider_have_an_unknown_cost(method: str, host: str, path: str, api: str | None) -> None:
    form = form_of(method, host, path)
    assert (form.api if form else None) == api
