"""Compression: for clients that accept gzip, whole responses and streams whose events still arrive one by one."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import httpx2
import pytest

from penstock.server.guards import accepts_gzip
from tests.server.served import CHAT, ECHO, GATE, Served, eventually, listening, parse_events, parts, served

PLAIN = ["", "identity", "br, zstd", "gzip;q=0", "gzip; q=0.000, identity", "*", "notgzip"]


@pytest.mark.parametrize("value", ["gzip", "gzip, deflate, br", "br;q=1.0, GZIP;q=0.8", "gzip;q=0.001", "deflate,gzip"])
def test_client_that_names_gzip_accepts_it(value: str) -> None:
    assert accepts_gzip({"headers": [(b"accept-encoding", value.encode())]})


@pytest.mark.parametrize("value", PLAIN)
def test_client_that_does_not_name_gzip_or_refuses_it_does_not_accept_it(value: str) -> None:
    assert not accepts_gzip({"headers": [(b"accept-encoding", value.encode())]})


def test_gzip_in_a_second_header_is_accepted() -> None:
    assert accepts_gzip({"headers": [(b"accept-encoding", b"br"), (b"accept-encoding", b"gzip")]})
    assert not accepts_gzip({"headers": []})


async def gated(server: Served) -> str:
    """Start a run that waits at its gate."""
    await server.save("gate", GATE)
    run = await server.host.submit(owner="ann", graph_id="gate")
    await server.gate.entered.wait()
    return run.id


def requester(server: Served, address: tuple[str, int], accepts: str = "gzip") -> httpx2.AsyncClient:
    headers = {"Authorization": server.client("ann").headers["Authorization"], "Accept-Encoding": accepts}
    return httpx2.AsyncClient(base_url="http://{}:{}".format(*address), headers=headers)


@pytest.mark.parametrize("path", ["/api/stream?runs={}@0", "/api/runs/{}/events"])
async def test_compressed_stream_is_decoded_event_by_event_and_is_whole_when_the_server_closes(path: str) -> None:
    async with served() as server:
        run = await gated(server)
        async with (
            listening(server.app) as address,
            requester(server, address) as client,
            client.stream("GET", path.format(run)) as answer,
        ):
            assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "Accept-Encoding")
            decoder, text = zlib.decompressobj(31), ""
            async for piece in answer.aiter_raw():
                text += decoder.decompress(piece).decode()
                assert not text or text.endswith("\n\n"), "what has arrived is decoded whole"
                if "event: call.started" in text:
                    server.gate.opened.set()  # the stream goes on: what came before was not held back
                if "event: run.completed" in text:
                    parts(server.app).streams.close()
        assert decoder.eof
        events = [event["data"] for event in parse_events(text)]
        assert [one["seq"] for one in events] == [*range(1, await server.stores.events.last_seq(run) + 1)]


@pytest.mark.parametrize("accepts", PLAIN)
async def test_client_that_does_not_accept_gzip_gets_plain_events_and_plain_pages(accepts: str) -> None:
    async with served() as server, listening(server.app) as address, requester(server, address, accepts) as client:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo")
        await server.host.wait(run.id)
        for path in (f"/api/runs/{run.id}/events", f"/api/stream?runs={run.id}@0&follow=false", "/api/openapi.json"):
            async with client.stream("GET", path) as answer:
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            assert "content-encoding" not in answer.headers, path
            assert answer.headers["vary"] == "Accept-Encoding", path
            assert raw.startswith((b"retry: ", b"{")), path


async def test_compressed_stream_is_resumed_at_the_last_event_received() -> None:
    async with served() as server, server.client("ann", **{"Accept-Encoding": "gzip"}) as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo")
        await server.host.wait(run.id)
        whole = parse_events((await ann.get(f"/api/runs/{run.id}/events")).text)
        for at, event in enumerate(whole[:-1]):
            rest = await ann.get(f"/api/runs/{run.id}/events", headers={"Last-Event-ID": event["id"]})
            assert rest.headers["content-encoding"] == "gzip"
            assert parse_events(rest.text) == whole[at + 1 :]


async def test_disconnect_from_a_compressed_stream_is_noticed() -> None:
    async with served() as server:
        run = await gated(server)
        metrics = parts(server.app).metrics
        async with listening(server.app) as address:
            async with (
                requester(server, address) as client,
                client.stream("GET", f"/api/runs/{run}/events") as answer,
            ):
                await anext(answer.aiter_raw())
                assert metrics.open_streams == 1
            async with asyncio.timeout(20):
                await eventually(lambda: metrics.open_streams == 0)
        server.gate.opened.set()
        await server.host.wait(run)


@pytest.mark.parametrize(
    ("path", "body", "encoding"),
    [
        ("/api/runs?stream=true", {"graph_id": "chat"}, "gzip"),
        ("/api/agents/chat/chat?stream=true", {"content": "hello"}, "gzip"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, None),
        ("/v1/responses", {"input": "hello"}, None),
    ],
)
async def test_streams_of_new_runs_are_compressed_except_those_of_openais_api(
    path: str, body: dict[str, Any], encoding: str | None
) -> None:
    async with served() as server, server.client("ann", **{"Accept-Encoding": "gzip"}) as ann:
        await server.save("chat", CHAT)
        given = {"model": "chat", "stream": True, **body} if path.startswith("/v1") else body
        answer = await ann.post(path, json=given)
        assert answer.status_code < 300, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers.get("content-encoding") == encoding


async def test_export_is_compressed_like_every_large_response_and_is_the_same_text() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo")
        await server.host.wait(run.id)
        bodies = []
        for accepts in ("gzip", "identity"):
            async with ann.stream("GET", f"/api/runs/{run.id}/export", headers={"Accept-Encoding": accepts}) as answer:
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            bodies.append(gzip.decompress(raw) if answer.headers.get("content-encoding") == "gzip" else raw)
            assert ("content-encoding" in answer.headers) is (accepts == "gzip")
    assert bodies[0] == bodies[1] != b""


async def test_small_responses_are_not_compressed_and_large_ones_are() -> None:
    async with served() as server, server.client("ann", **{"Accept-Encoding": "gzip"}) as ann:
        async with ann.stream("GET", "/api/openapi.json") as answer:
            assert answer.headers["content-encoding"] == "gzip"
            raw = b"".join([piece async for piece in answer.aiter_raw()])
        plain = await ann.get("/api/openapi.json", headers={"Accept-Encoding": "identity"})
        assert gzip.decompress(raw) == plain.content
        assert "content-encoding" not in (await ann.get("/api/me")).headers
