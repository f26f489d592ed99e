"""What is taken for a model request outside of any block: the body decides where other services have the same paths."""

from __future__ import annotations

import asyncio
import contextvars
import warnings
from typing import Any

import aiohttp
import pytest

from penstock import contain, contained
from penstock.providers import UncontainedRequest
from penstock.testing.provider import FakeProviderServer
from tests.providers.sdk_calls import limits, outcome
from tests.providers.shapes import HELLO, OFFICIAL
from tests.providers.stack_calls import ASYNC, CHAT, SYNC, AsyncSend, Body, Send, chat, encoded

pytestmark = pytest.mark.requirement("X-11")

MESSAGES = OFFICIAL["messages"].body

OTHERS: dict[str, tuple[str, Body]] = {
    "a chat program's messages": ("/api/rooms/7/messages", {"text": "hello", "to": "anna"}),
    "messages in bulk": ("/v1/messages", {"messages": ["hello"], "priority": 1}),
    "a page's own chat": ("/api/chat", {"messages": HELLO, "session": "7"}),
    "a page's own generator": ("/api/generate", {"prompt": "a logo"}),
}
"""Requests of other services, with paths that model APIs have too."""
MODELS: dict[str, tuple[str, Body]] = {
    "messages": ("/v1/messages", MESSAGES),
    "messages without a maximum": ("/v1/messages", {"model": "fake-1", "messages": HELLO}),
    "ollama": ("/api/chat", {"model": "fake-1", "messages": HELLO}),
}


def outside(send: Send | AsyncSend, url: str, body: Body) -> Any:
    """Send a request in a context without any block."""

    def sent() -> Any:
        found = send(url, body)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return contextvars.Context().run(sent)


@pytest.mark.parametrize("request_of", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("send", [*SYNC, *ASYNC])
def test_a_request_of_another_service_outside_of_a_block_is_not_reported(
    send: Send | AsyncSend, request_of: tuple[str, Body]
) -> None:
    path, body = request_of
    with FakeProviderServer() as server, limits(server, strict=True) as run, warnings.catch_warnings():
        warnings.simplefilter("error")
        outside(send, server.url + path, body)
    assert run.uncontained_requests == 0
    assert server.requests[0].body == body


@pytest.mark.parametrize("request_of", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("send", [*SYNC, *ASYNC])
def test_a_model_request_outside_of_a_block_is_reported_by_its_body(
    send: Send | AsyncSend, request_of: tuple[str, Body]
) -> None:
    path, body = request_of
    with FakeProviderServer() as server, contain() as run, contained(run):
        with pytest.warns(RuntimeWarning, match="belongs to no run"):
            outside(send, server.url + path, body)
        sent = len(server.requests)
    assert run.uncontained_requests == sent == 1
    assert server.requests[0].body == body


@pytest.mark.parametrize("request_of", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("send", [*SYNC, *ASYNC])
def test_a_run_that_adopts_pays_for_a_model_request_outside_of_a_block(
    send: Send | AsyncSend, request_of: tuple[str, Body]
) -> None:
    path, body = request_of
    with FakeProviderServer() as server, limits(server, adopt=True) as run:
        outside(send, server.url + path, body)
    assert run.balance.attempts == len(server.requests) == 1
    assert run.balance.spent_nanos == server.invoice.total_nanos
    assert run.uncontained_requests == 0


def test_messages_without_a_maximum_get_one_inside_a_block() -> None:
    path, body = MODELS["messages without a maximum"]
    with FakeProviderServer() as server, limits(server) as run:
        SYNC[0](server.url + path, body)
    assert run.balance.attempts == 1
    assert server.requests[0].body["max_tokens"] == 4_096


@pytest.mark.parametrize("data", [encoded(chat()), encoded(chat()).decode()], ids=["bytes", "text"])
def test_a_body_that_aiohttp_gives_a_content_type_of_its_own_is_a_model_request_too(data: Any) -> None:
    async def send(url: str, body: Body) -> bytes:
        async with aiohttp.ClientSession() as session, session.post(url, data=data) as response:
            return await response.read()

    with FakeProviderServer() as server, limits(server, strict=True):
        assert isinstance(outcome(lambda: outside(send, server.url + CHAT, {})), UncontainedRequest)
    assert server.requests == ()
