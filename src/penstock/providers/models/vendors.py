"""The models of each provider: which client, which API, which key.

A provider's client is imported when the first model of it is made, which takes a second: make models before a loop
runs. A client of one's own may be given instead; it is used with its retries off, and not closed.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, TypedDict, Unpack

from penstock.containment.breaker import CircuitBreaker
from penstock.errors import InvalidValue, PenstockError
from penstock.providers.models.connections import Borrowed, Connections, shared
from penstock.providers.models.formats import Chat, Format, Messages, Responses
from penstock.providers.models.remote import Library, RemoteModel

Api = Literal["chat", "responses"]

APIS: Mapping[Api, tuple[str, Format]] = MappingProxyType(
    {"chat": ("/chat/completions", Chat()), "responses": ("/responses", Responses())}
)
OPENAI_KEY = "OPENAI_API_KEY"
ANTHROPIC_KEY = "ANTHROPIC_API_KEY"
COMPATIBLE_KEY = "OPENAI_COMPATIBLE_API_KEY"
"""Not OpenAI's: a key is sent to nobody but whom it is for."""
NO_KEY = "none"
"""Clients insist on one; servers of one's own rarely do."""
ACCOUNT_VARIABLES = (
    *(OPENAI_KEY, "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
    *(ANTHROPIC_KEY, "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_PROFILE"),
)
"""Variables that clients read."""
OLLAMA_HOST = "OLLAMA_HOST"
OLLAMA_URL = "http://localhost:11434"


class MissingPackage(PenstockError):
    """A provider's client is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package
        super().__init__(f"the package {package} is not installed: pip install 'penstock[{package}]'")


class MissingKey(PenstockError):
    """A provider wants a key, and there is none."""

    def __init__(self, provider: str, variable: str) -> None:
        self.provider = provider
        self.variable = variable
        super().__init__(f"{provider} needs a key: set {variable}, or give api_key")


class Options(TypedDict, total=False):
    """What every model behind an API can be told."""

    max_output_tokens: int
    """What an answer may have at most where nobody says otherwise."""
    floor: int
    """So much output has to be affordable for a call to make sense."""
    retries: int
    """How often a request that failed is sent again."""
    breaker: CircuitBreaker | bool
    """A circuit that refuses requests while the provider fails; True takes the one shared by all who ask for it."""


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
    """Anthropic puts a text of its own before the tools, of 300 to 550 tokens by its documentation."""

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
    """A model of an Ollama server: the one that OLLAMA_HOST names, else the one on this machine."""
    host = os.environ.get(OLLAMA_HOST) or OLLAMA_URL
    base_url = host if "://" in host else f"http://{host}"
    return CompatibleModel(name, f"{base_url.rstrip('/')}/v1", **options)


def _openai(client: Any, given: Mapping[str, Any], is_openai: bool = True) -> tuple[Library, Connections | Borrowed]:
    openai = _package("openai")
    library = Library(_package("httpx2").Response, openai.AsyncStream[object])
    if client is not None:
        return library, _borrowed(client, openai.AsyncOpenAI)

    def connect() -> Any:
        made = openai.AsyncOpenAI(**given, max_retries=0, http_client=_http_client(openai))
        if not is_openai:
            made.organization = made.project = None  # which the client takes from variables that are meant for OpenAI
        return made

    return library, shared(("openai", is_openai, *_settled(given)), partial(_tried, connect))


def _anthropic(client: Any, given: Mapping[str, Any]) -> tuple[Library, Connections | Borrowed]:
    anthropic = _package("anthropic")
    library = Library(_package("httpx2").Response, anthropic.AsyncStream[object])
    if client is not None:
        return library, _borrowed(client, anthropic.AsyncAnthropic)

    def connect() -> Any:
        made = anthropic.AsyncAnthropic(**given, max_retries=0, http_client=_http_client(anthropic))
        if not (made.api_key or made.auth_token or made.credentials):
            raise MissingKey("Anthropic", ANTHROPIC_KEY)
        return made

    return library, shared(("anthropic", *_settled(given)), partial(_tried, connect))


def _settled(given: Mapping[str, Any]) -> tuple[object, ...]:
    """What tells one account from another: what was given, and what the environment says now."""
    said = (os.environ.get(name) for name in ACCOUNT_VARIABLES)
    return (*given.values(), *said)


def _tried(connect: Callable[[], Any]) -> Connections:
    """Connections whose client can be made: what is wrong shows here, and what takes time at first is done here."""
    connect()
    return Connections(connect)


def _borrowed(client: Any, kind: Any) -> Borrowed:
    if not isinstance(client, kind):
        raise InvalidValue("client", client, f"an {kind.__name__}")
    return Borrowed(client.with_options(max_retries=0))


def _http_client(library: Any) -> Any:
    return library.DefaultAsyncHttpxClient(verify=_trusted())


@cache
def _trusted() -> Any:
    """Whom we trust, read once: it takes 20 ms."""
    return _package("httpx2").create_ssl_context()


def _given(base_url: str | None, api_key: str | None, timeout_s: Any) -> dict[str, Any]:
    """What the client is made with; without a timeout it has its own, of 10 minutes."""
    given: dict[str, Any] = {"base_url": base_url, "api_key": api_key}
    if timeout_s is None:
        return given
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InvalidValue("timeout_s", timeout_s, "a number of seconds, more than zero")
    return {**given, "timeout": timeout_s}


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackage(name) from error
