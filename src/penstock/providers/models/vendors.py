"""The models of each provider: which client, which API, which key.

A provider's client is imported when its first model is created, which takes a second: create models before a loop
runs. You may pass your own client instead; it is used with its retries off, and not closed. Event hooks are added to
its HTTP client: they limit the size of responses to requests of our models, and do nothing else.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack

from penstock import checks
from penstock.containment.breaker import CircuitBreaker
from penstock.errors import InvalidValue, PenstockError
from penstock.providers.hooks import built_on
from penstock.providers.models.connections import Borrowed, Connections, shared
from penstock.providers.models.formats import Chat, Format, Messages, Responses
from penstock.providers.models.remote import Library, RemoteModel
from penstock.providers.reading.bodies import hooked
from penstock.runtime.billing.error_bill import ErrorBill

Api = Literal["chat", "responses"]

APIS: Mapping[Api, tuple[str, Format]] = MappingProxyType(
    {"chat": ("/chat/completions", Chat()), "responses": ("/responses", Responses())}
)
OPENAI_KEY = "OPENAI_API_KEY"
ANTHROPIC_KEY = "ANTHROPIC_API_KEY"
COMPATIBLE_KEY = "OPENAI_COMPATIBLE_API_KEY"
"""Separate from OpenAI's, so that an OpenAI key is never sent to another server."""
NO_KEY = "none"
"""Placeholder: the client requires a key, self-hosted servers rarely do."""
ACCOUNT_VARIABLES = (
    *(OPENAI_KEY, "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
    *(ANTHROPIC_KEY, "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE"),
)
"""Environment variables that the clients read."""
OLLAMA_HOST = "OLLAMA_HOST"
OLLAMA_URL = "http://localhost:11434"


class MissingPackage(PenstockError):
    """A provider's client is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(f"the package {package} is not installed: pip install 'penstock[{package}]'")


class MissingKey(PenstockError):
    """A provider requires a key, and none is configured."""

    def __init__(self, provider: str, variable: str) -> None:
        self.provider = provider
        self.variable = variable
        super().__init__(f"{provider} needs a key: set {variable}, or give api_key")


class Options(TypedDict, total=False):
    """Options of every model behind an API."""

    max_output_tokens: int
    """Output limit of a request that sets none."""
    floor: int
    """Smallest output limit a request is clamped to before it is refused instead."""
    retries: int
    """Maximum number of retries of a failed request."""
    breaker: CircuitBreaker | bool
    """A circuit that refuses requests while the provider fails; True selects the one shared within the process."""
    error_bill: ErrorBill | None
    """Cost of the provider's error answers: "free", "unresolved", or one of them by HTTP status. None decides by the
    status.
    """


class OpenAIModel(RemoteModel):
    """A model of OpenAI, through Chat Completions or, with `api="responses"`, through Responses."""

    provider = "openai"

    def __init__(
        self,
        name: str,
        *,
        api: Api = "chat",
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
        client: Any = None,
        **options: Unpack[Options],
    ) -> None:
        if api not in APIS:
            raise InvalidValue("api", api, "'chat' or 'responses'")
        self.path, format = APIS[api]
        if client is None and not (api_key or os.environ.get(OPENAI_KEY)):
            raise MissingKey("OpenAI", OPENAI_KEY)
        given = _given(base_url, api_key, timeout_s)
        library, connections = _openai(client, given)
        super().__init__(name, format, library, connections, **options)


class CompatibleModel(RemoteModel):
    """A model behind any server that imitates OpenAI's Chat Completions: vLLM, llama.cpp, LM Studio, a gateway."""

    path = "/chat/completions"

    def __init__(
        self,
        name: str,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.provider = f"openai-compatible:{base_url}"
        key = api_key or os.environ.get(COMPATIBLE_KEY) or NO_KEY
        given = _given(base_url, key, timeout_s)
        library, connections = _openai(None, given, is_openai=False)
        super().__init__(name, Chat("max_tokens"), library, connections, **options)


class AnthropicModel(RemoteModel):
    """A model of Anthropic, through Messages."""

    provider = "anthropic"
    path = "/v1/messages"
    tools_tokens = 600
    """Anthropic adds a system prompt for tools, of 300 to 550 tokens according to its documentation."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float | None = None,
        client: Any = None,
        **options: Unpack[Options],
    ) -> None:
        given = _given(base_url, api_key, timeout_s)
        library, connections = _anthropic(client, given)
        super().__init__(name, Messages(), library, connections, **options)


def ollama(name: str, **options: Any) -> CompatibleModel:
    """Return a model of the Ollama server named by OLLAMA_HOST, else of the one on this machine."""
    host = os.environ.get(OLLAMA_HOST) or OLLAMA_URL
    base_url = host if "://" in host else f"http://{host}"
    return CompatibleModel(name, f"{base_url.rstrip('/')}/v1", **options)


def _openai(client: Any, given: Mapping[str, Any], is_openai: bool = True) -> tuple[Library, Connections | Borrowed]:
    openai = _package("openai")
    library = Library(_http_library(openai).Response, openai.AsyncStream[object])
    if client is not None:
        return library, _borrowed(client, openai.AsyncOpenAI)

    def connect() -> Any:
        client = openai.AsyncOpenAI(**given, max_retries=0, http_client=_http_client(openai))
        if not is_openai:
            # The client reads them from variables that are meant for OpenAI.
            client.organization = client.project = None
        return client

    return library, shared(("openai", is_openai, *_settled(given)), partial(_tried, connect))


def _anthropic(client: Any, given: Mapping[str, Any]) -> tuple[Library, Connections | Borrowed]:
    anthropic = _package("anthropic")
    library = Library(_http_library(anthropic).Response, anthropic.AsyncStream[object])
    if client is not None:
        return library, _borrowed(client, anthropic.AsyncAnthropic)

    def connect() -> Any:
        client = anthropic.AsyncAnthropic(**given, max_retries=0, http_client=_http_client(anthropic))
        # Older clients have no credentials.
        if not (client.api_key or client.auth_token or getattr(client, "credentials", None)):
            raise MissingKey("Anthropic", ANTHROPIC_KEY)
        return client

    return library, shared(("anthropic", *_settled(given)), partial(_tried, connect))


def _settled(given: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the key of an account: the given options and the current environment variables."""
    variables = (os.environ.get(name) for name in ACCOUNT_VARIABLES)
    return (*given.values(), *variables)


def _tried(connect: Callable[[], Any]) -> Connections:
    """Return connections after creating one client: errors are raised here, and slow first-time work is done here."""
    connect()
    return Connections(connect)


def _borrowed(client: Any, kind: Any) -> Borrowed:
    if not isinstance(client, kind):
        raise InvalidValue("client", client, f"an {kind.__name__}")
    http_client = client._client
    http_client.event_hooks = hooked(http_client.event_hooks)
    return Borrowed(client.with_options(max_retries=0))


def _http_client(library: Any) -> Any:
    return library.DefaultAsyncHttpxClient(verify=_trusted(_http_library(library)), event_hooks=hooked())


def _http_library(library: Any) -> Any:
    return _package(built_on(library))


@cache
def _trusted(http_library: Any) -> Any:
    """Return the TLS context with the trusted certificates; cached, because loading them takes 20 ms."""
    return http_library.create_ssl_context()


def _given(base_url: str | None, api_key: str | None, timeout_s: Any) -> dict[str, Any]:
    """Return the client's arguments; without a timeout the client uses its own, of 10 minutes."""
    given: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    if timeout_s is None:
        return given
    return {**given, "timeout": checks.seconds("timeout_s", timeout_s, above_zero=True)}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackage(name) from error
