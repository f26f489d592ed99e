"""The ways in which programs call a model through the official clients, each as a function that returns the text."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anthropic
import openai

from penstock import ExecutionContext, contain
from penstock.providers import contained
from penstock.testing.provider import FakeProviderServer

Call = Callable[[Any], str]
AsyncCall = Callable[[Any], Awaitable[str]]

MODEL = "fake-1"
PROMPT: Any = [{"role": "user", "content": "hello"}]
MAX = 100
"""Every call sets a maximum, so that its maximum cost is known."""


class Clients:
    """One client of each kind for one server."""

    def __init__(self, openai_client: Any, anthropic_client: Any) -> None:
        self.openai = openai_client
        self.anthropic = anthropic_client


@contextmanager
def clients(server: FakeProviderServer, **options: Any) -> Iterator[Clients]:
    """Sync clients."""
    with (
        openai.OpenAI(base_url=server.openai_url, api_key="k", **options) as one,
        anthropic.Anthropic(base_url=server.url, api_key="k", **options) as other,
    ):
        yield Clients(one, other)


@asynccontextmanager
async def async_clients(server: FakeProviderServer, **options: Any) -> AsyncIterator[Clients]:
    """Clients for a loop."""
    async with (
        openai.AsyncOpenAI(base_url=server.openai_url, api_key="k", **options) as one,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="k", **options) as other,
    ):
        yield Clients(one, other)


def chat(to: Clients) -> str:
    found = to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_completion_tokens=MAX)
    return str(found.choices[0].message.content)


def chat_stream(to: Clients) -> str:
    with to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=MAX, stream=True) as chunks:
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def responses(to: Clients) -> str:
    return str(to.openai.responses.create(model=MODEL, input="hello", max_output_tokens=MAX).output_text)


def responses_stream(to: Clients) -> str:
    with to.openai.responses.create(model=MODEL, input="hello", max_output_tokens=MAX, stream=True) as events:
        return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def messages(to: Clients) -> str:
    return str(to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=MAX).content[0].text)


def messages_stream(to: Clients) -> str:
    with to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=MAX, stream=True) as events:
        return "".join(event.delta.text for event in events if event.type == "content_block_delta")


async def achat(to: Clients) -> str:
    found = await to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_completion_tokens=MAX)
    return str(found.choices[0].message.content)


async def achat_stream(to: Clients) -> str:
    chunks = await to.openai.chat.completions.create(model=MODEL, messages=PROMPT, max_tokens=MAX, stream=True)
    async with chunks:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def aresponses(to: Clients) -> str:
    return str((await to.openai.responses.create(model=MODEL, input="hello", max_output_tokens=MAX)).output_text)


async def aresponses_stream(to: Clients) -> str:
    events = await to.openai.responses.create(model=MODEL, input="hello", max_output_tokens=MAX, stream=True)
    async with events:
        return "".join([event.delta async for event in events if event.type == "response.output_text.delta"])


async def amessages(to: Clients) -> str:
    return str((await to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=MAX)).content[0].text)


async def amessages_stream(to: Clients) -> str:
    events = await to.anthropic.messages.create(model=MODEL, messages=PROMPT, max_tokens=MAX, stream=True)
    async with events:
        return "".join([event.delta.text async for event in events if event.type == "content_block_delta"])


PLAIN: list[Call] = [chat, responses, messages]
STREAMS: list[Call] = [chat_stream, responses_stream, messages_stream]
CALLS: list[Call] = [*PLAIN, *STREAMS]
ASYNC_PLAIN: list[AsyncCall] = [achat, aresponses, amessages]
ASYNC_STREAMS: list[AsyncCall] = [achat_stream, aresponses_stream, amessages_stream]
ASYNC_CALLS: list[AsyncCall] = [*ASYNC_PLAIN, *ASYNC_STREAMS]


def outcome(call: Callable[[], Any]) -> Any:
    """What the call returns or raises."""
    try:
        return call()
    except BaseException as error:
        return error


def in_threads(count: int, call: Callable[[], Any]) -> list[Any]:
    """What the call comes to in so many threads at once, each with a copy of the caller's context."""
    outcomes: list[Any] = []
    start = threading.Barrier(count)

    def one() -> None:
        start.wait()
        outcomes.append(outcome(call))

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(one,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@contextmanager
def limits(server: FakeProviderServer, floor: int = 16, **options: Any) -> Iterator[ExecutionContext]:
    """A run at the server's prices, with these options of `contain`, and everything inside contained by it."""
    with contain(prices=server.provider.prices, **options) as run, contained(run, floor=floor):
        yield run
