"""Models by name, and the errors for unknown names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock import contain
from penstock.errors import InvalidValue
from penstock.providers.models import AnthropicModel, CompatibleModel, MissingKey, MissingPackage, OpenAIModel, model
from penstock.testing.provider import FakeProviderServer
from tests.providers.remote_models import ask


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OLLAMA_HOST", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("name", "kind", "called", "path"),
    [
        ("openai:gpt-4o", OpenAIModel, "gpt-4o", "/chat/completions"),
        ("openai-responses:gpt-4o", OpenAIModel, "gpt-4o", "/responses"),
        ("anthropic:claude-sonnet-4-5", AnthropicModel, "claude-sonnet-4-5", "/v1/messages"),
        ("openai-compatible:http://localhost:8080/v1:name", CompatibleModel, "name", "/chat/completions"),
        ("ollama:llama3:8b", CompatibleModel, "llama3:8b", "/chat/completions"),
    ],
)
def test_a_name_says_provider_and_model(name: str, kind: type, called: str, path: str) -> None:
    made = model(name, api_key="k")
    assert (type(made), made.name, made.path) == (kind, called, path)


@pytest.mark.parametrize(
    ("name", "provider", "called"),
    [
        ("http://localhost:8080/v1:name", "http://localhost:8080/v1", "name"),
        ("http://localhost:8080:name", "http://localhost:8080", "name"),
        ("https://host/a/b:llama3:8b", "https://host/a/b", "llama3:8b"),
        ("https://host:org/name", "https://host", "org/name"),
        ("http://[::1]:8080/v1:name", "http://[::1]:8080/v1", "name"),
    ],
)
def test_an_address_and_a_name_are_distinguished(name: str, provider: str, called: str) -> None:
    made = model(f"openai-compatible:{name}")
    assert (made.provider, made.name) == (f"openai-compatible:{provider}", called)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-4o", "providers are openai:, openai-responses:, anthropic:, openai-compatible:, ollama:"),
        ("mistral:large", "providers are openai:"),
        ("openai:", "there is nothing after openai:"),
        ("anthropic:  ", "there is nothing after anthropic:"),
        ("openai-compatible:", "there is nothing after"),
        ("openai-compatible:localhost:8080:name", "an address and a name"),
        ("openai-compatible:http://localhost:8080/v1", "an address and a name"),
        ("openai-compatible:http://localhost:8080", "an address and a name"),
        ("openai-compatible:http://me:secret@host/v1:name", "an address and a name"),
        ("openai:" + "x" * 300, "1 to 256 characters"),
    ],
)
def test_the_error_for_an_invalid_name_says_what_is_expected(name: str, expected: str) -> None:
    with pytest.raises(InvalidValue, match=expected):
        model(name, api_key="k")


@pytest.mark.parametrize(
    ("name", "variable"), [("openai:gpt-4o", "OPENAI_API_KEY"), ("anthropic:claude-sonnet-4-5", "ANTHROPIC_API_KEY")]
)
def test_a_missing_key_names_its_variable(
    name: str, variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where a profile might be found
    with pytest.raises(MissingKey, match=variable):
        model(name)
    monkeypatch.setenv(variable, "k")
    assert model(name).name == name.partition(":")[2]


@pytest.mark.parametrize(("name", "package"), [("openai:gpt-4o", "openai"), ("anthropic:claude", "anthropic")])
def test_a_missing_package_names_the_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"pip install 'penstock\[{package}\]'"):
        model(name, api_key="k")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_output_tokens", 0),
        ("floor", 0),
        ("retries", -1),
        ("timeout_s", 0),
        ("breaker", "yes"),
        ("client", object()),
    ],
)
def test_an_option_that_cannot_be_is_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=option):
        model("openai:gpt-4o", **{"api_key": "k", option: value})


@pytest.mark.parametrize("host", ["127.0.0.1:{port}", "http://127.0.0.1:{port}/"])
async def test_ollama_is_where_its_variable_says(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeProviderServer(script=["moo"]) as server:
        monkeypatch.setenv("OLLAMA_HOST", host.format(port=server.url.rpartition(":")[2]))
        async with contain() as run:
            assert (await ask(model("ollama:llama3"), run, streams=False)).text == "moo"


async def test_a_compatible_server_gets_no_secret_that_is_meant_for_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"):
        monkeypatch.setenv(name, "secret")
    async with FakeProviderServer() as server:
        async with contain() as run:
            await ask(CompatibleModel("m", server.openai_url), run, streams=False)
        assert "secret" not in str(dict(server.requests[0].headers))


def test_importing_the_models_imports_no_client() -> None:
    code = (
        "import sys, penstock.providers.models; print({'openai', 'anthropic', 'httpx2', 'pydantic'} & {*sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
