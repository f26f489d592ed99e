"""A model of each API, pointed at a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from penstock import ExecutionContext
from penstock.agents import Message, TextDelta, TruncatedResponse
from penstock.agents.messages import Delta
from penstock.agents.model import ModelResponse
from penstock.providers.models import AnthropicModel, CompatibleModel, OpenAIModel, RemoteModel
from penstock.testing.provider import FakeProviderServer

Make = Callable[..., RemoteModel]

NAME = "fake-1"
FAILURES = (openai.APIError, anthropic.APIError, TruncatedResponse)
"""What a provider that fails is seen as."""


def chat(server: FakeProviderServer, **options: Any) -> RemoteModel:
    return OpenAIModel(NAME, base_url=server.openai_url, api_key="k", **options)


def responses(server: FakeProviderServer, **options: Any) -> RemoteModel:
    return OpenAIModel(NAME, api="responses", base_url=server.openai_url, api_key="k", **options)


def messages(server: FakeProviderServer, **options: Any) -> RemoteModel:
    return AnthropicModel(NAME, base_url=server.url, api_key="k", **options)


def compatible(server: FakeProviderServer, **options: Any) -> RemoteModel:
    return CompatibleModel(NAME, server.openai_url, **options)


# What the first model of a provider reads from disk (modules, certificates) is read here, where no loop waits for it.
OpenAIModel(NAME, api_key="k")
AnthropicModel(NAME, api_key="k")

MODELS: list[Make] = [chat, responses, messages, compatible]

each_api = pytest.mark.parametrize("make", MODELS)
streamed_or_not = pytest.mark.parametrize("streams", [False, True], ids=["plain", "streamed"])


async def ask(model: RemoteModel, run: ExecutionContext, streams: bool, prompt: str = "hello") -> ModelResponse:
    """Ask for an answer, whole or in pieces."""
    ignored: list[Delta] = []
    return await model.generate(run, [Message.user(prompt)], on_delta=ignored.append if streams else None)


def texts(deltas: list[Delta]) -> list[str]:
    """The pieces of text."""
    return [delta.text for delta in deltas if isinstance(delta, TextDelta)]
