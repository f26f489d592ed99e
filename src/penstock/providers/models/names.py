"""Models by name: `model("openai:gpt-4o")`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from penstock import checks
from penstock.errors import InvalidValue
from penstock.providers.models.remote import RemoteModel
from penstock.providers.models.vendors import AnthropicModel, CompatibleModel, OpenAIModel, ollama

ADDRESSED = re.compile(
    r"(?P<url>https?://(?:\[[0-9A-Fa-f:.]+\]|[^/:@\s]+)(?::(?P<port>\d+))?(?P<path>/[^:\s]*)?):(?P<name>.+)"
)
"""An address, a colon and a name; the name may contain colons."""

NO_NAME = re.compile(r"\d+(?:/|$)|[^/]*@")
"""Directly after a host this is a port, or the password of an address with credentials, and not a name."""


def _compatible(rest: str, **options: Any) -> CompatibleModel:
    found = ADDRESSED.fullmatch(rest)
    if found is None or (found["port"] is None and found["path"] is None and NO_NAME.match(found["name"])):
        raise InvalidValue(
            "model",
            f"openai-compatible:{rest}",
            "an address and a name, as openai-compatible:http://localhost:8080/v1:name",
        )
    return CompatibleModel(found["name"], found["url"], **options)


PROVIDERS: Mapping[str, Callable[..., RemoteModel]] = MappingProxyType(
    {
        "openai": OpenAIModel,
        "openai-responses": partial(OpenAIModel, api="responses"),
        "anthropic": AnthropicModel,
        "openai-compatible": _compatible,
        "ollama": ollama,
    }
)


def model(name: str, **options: Any) -> RemoteModel:
    """Return the model called `name`: its provider, a colon, and the provider's name for it.

    `options` are those of the provider's class: `max_output_tokens`, `retries`, `breaker`, `api_key`, `base_url`, …
    """
    checks.text("model", name)
    provider, colon, rest = name.partition(":")
    make = PROVIDERS.get(provider)
    if make is None or not colon:
        known = ", ".join(f"{provider}:" for provider in PROVIDERS)
        raise InvalidValue("model", name, f"a provider and a name, such as 'openai:gpt-4o'; providers are {known}")
    if not rest.strip():
        raise InvalidValue("model", name, f"a provider and a name: there is nothing after {provider}:")
    return make(rest, **options)
