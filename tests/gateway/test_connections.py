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


async def test_failed_request_gives_its_place_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    script = [Say(then=Cut()), Say()]
    async with aclosing(Connections()) as connections, FakeProviderServer(script=script) as provider:
        with pytest.raises((httpcore2.NetworkError, httpcore2.ProtocolError)):
            await _exchange(connections, provider)
        assert b"hello" in await _exchange(connections, provider)


async def test_idle_connection_that_was_closed_is_replaced() -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    url = httpcore2.URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    async with server, aclosing(Connections()) as connections:
        for _ in range(2):
            response = await connections.send("GET", url, [(b"host", b"x")], None)
            assert b"".join([part async for part in chunks(response)]) == b"ok"
            await response.aclose()
            await accepted[-1].wait_closed()
            await asyncio.sleep(0)  # the end of the connection arrives
    assert len(accepted) == 2
