"""Connections to upstreams: reused one after another, replaced when they were closed, given back whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import httpcore2
import pytest

from penstock.gateway import connections as module
from penstock.gateway.connections import Connections
from penstock.gateway.upstreams import chunks
from penstock.testing.provider import Cut, FakeProviderServer, Hang, Say

BODY = b'{"model": "fake-1", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}'


async def _send(connections: Connections, provider: FakeProviderServer) -> httpcore2.Response:
    url = httpcore2.URL(f"{provider.openai_url}/chat/completions")
    headers = [(b"host", b"x"), (b"content-length", str(len(BODY)).encode()), (b"content-type", b"application/json")]
    return await connections.send("POST", url, headers, BODY)


async def _exchange(connections: Connections, provider: FakeProviderServer) -> bytes:
    response = await _send(connections, provider)
    try:
        return b"".join([part async for part in chunks(response)])
    finally:
        await response.aclose()
        await response.aclose()  # closing twice gives the connection back once


async def test_connection_is_reused_and_further_ones_are_opened_for_requests_at_once() -> None:
    async with aclosing(Connections()) as connections, FakeProviderServer() as provider:
        for _ in range(3):
            assert b"hello" in await _exchange(connections, provider)
        assert {request.connection for request in provider.requests} == {1}
        await asyncio.gather(*(_exchange(connections, provider) for _ in range(4)))
    assert len({request.connection for request in provider.requests}) > 1


async def test_answer_that_is_not_read_to_its_end_closes_its_connection() -> None:
    async with (
        aclosing(Connections()) as connections,
        FakeProviderServer(script=[Say(then=Hang(None)), Say()]) as provider,
    ):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await _exchange(connections, provider)
        await _exchange(connections, provider)
    assert [request.connection for request in provider.requests] == [1, 2]


async def test_connection_that_the_upstream_has_closed_is_not_used_again() -> None:
    async with (
        aclosing(Connections()) as connections,
        FakeProviderServer(script=[Say(), Say("word " * 9, then=Cut()), Say()]) as provider,
    ):
        await _exchange(connections, provider)
        with pytest.raises((httpcore2.NetworkError, httpcore2.ProtocolError)):
            await _exchange(connections, provider)
        await _exchange(connections, provider)
    assert [request.connection for request in provider.requests] == [1, 1, 2]


async def test_requests_beyond_the_limit_wait_and_are_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(module, "CONNECT_S", 0.05)
    async with aclosing(Connections()) as connections, FakeProviderServer() as provider:
        first = await _send(connections, provider)
        with pytest.raises(httpcore2.PoolTimeout):
            await _send(connections, provider)
        await first.aclose()
        await _exchange(connections, provider)
