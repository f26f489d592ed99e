"""What a client may try with a path, a header or a body: nothing reaches the provider that was not admitted."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from penstock.testing.provider import Endless, FakeProviderServer, Say
from tests.gateway.conftest import KEY, PROVIDER_KEY, Served, gateway

CHAT: dict[str, Any] = {"model": "fake-1", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 50}
BEARER = {"authorization": f"Bearer {KEY}"}
MiB = 1024 * 1024


@pytest.fixture
def served(provider: FakeProviderServer) -> Iterator[Served]:
    with gateway(provider, max_cost_usd=1) as served:
        yield served


def raw(served: Served, head: str, body: bytes = b"") -> bytes:
    """Send a request as it is written, which no client library would; return what is answered."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        lines = f"{head}\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n"
        connection.sendall(lines.encode("latin-1") + body)
        received = b""
        while part := connection.recv(65_536):
            received += part
    return received


@pytest.mark.parametrize(
    "path",
    [
        "/openai/v1/models/../batches",
        "/openai/v1/models/../../files",
        "/openai/v1/models/%2e%2e/batches",
        "/openai/v1/models/..%2fbatches",
        "/openai/v1/./models",
        "/openai/../anthropic/v1/models",
        "/openai/v1/models/x/../../files",
        "/gemini/v1beta/models/../files",
        "//openai//v1/batches",
        "/openai/v1/responses/resp_1%3f/../..",
        "/../openai/v1/batches",
        "/openai%2f..%2fopenai/v1/batches",
        "http://127.0.0.1/openai/v1/batches",
    ],
)
def test_path_that_resolves_to_another_one_is_not_passed_on(served: Served, path: str) -> None:
    answer = raw(served, f"GET {path} HTTP/1.1")
    assert int(answer.split()[1]) in (400, 404, 405)
    assert served.provider.requests == ()


@pytest.mark.parametrize("path", ["/openai/v1/chat%2Fcompletions", "/openai/v1/chat/completions/"])
def test_path_that_is_written_otherwise_is_contained_as_what_it_is(served: Served, path: str) -> None:
    body = json.dumps(CHAT).encode()
    answer = raw(served, f"POST {path} HTTP/1.1\r\ncontent-length: {len(body)}", body)
    assert int(answer.split()[1]) == 200
    (request,) = served.provider.requests
    assert request.path == "/v1/chat/completions"
    assert served.run.balance.spent_nanos == served.provider.invoice.total_nanos > 0


def test_characters_that_end_a_line_stay_a_part_of_the_path(served: Served) -> None:
    raw(served, "GET /openai/v1/models/x%0d%0aauthorization:%20Bearer%20mine%0d%0a HTTP/1.1")
    assert [request.path for request in served.provider.requests] in (
        [],
        ["/v1/models/x%0D%0Aauthorization:%20Bearer%20mine%0D%0A"],
    )
    assert all(request.headers["authorization"] == f"Bearer {PROVIDER_KEY}" for request in served.provider.requests)


def test_headers_of_the_connection_and_credentials_do_not_leave(served: Served) -> None:
    hidden = {
        "connection": "keep-alive, x-mine",
        "x-mine": "1",
        "te": "trailers",
        "proxy-authorization": "Basic eA==",
        "cookie": "session=1",
        "x-goog-api-key": "another",
        "x-forwarded-for": "10.0.0.1",
        "x-http-method-override": "DELETE",
        "x-penstock-run": "a-run",
    }
    sent = [(name.encode(), value.encode()) for name, value in {**BEARER, **hidden, "x-kept": "ü"}.items()]
    assert httpx.post(f"{served.openai}/chat/completions", json=CHAT, headers=sent).status_code == 200
    (request,) = served.provider.requests
    assert not (hidden.keys() - {"connection"}) & request.headers.keys()
    assert request.headers["x-kept"].encode("latin-1").decode() == "ü"
    assert request.headers["authorization"] == f"Bearer {PROVIDER_KEY}"


def test_request_inside_the_body_of_another_is_not_sent(served: Served) -> None:
    inner = b"POST /v1/batches HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    both = f"content-length: {len(inner) + 5}\r\ntransfer-encoding: chunked"
    answer = raw(served, f"POST /openai/v1/chat/completions HTTP/1.1\r\n{both}", b"0\r\n\r\n" + inner)
    assert all(int(line.split()[1]) >= 400 for line in answer.splitlines() if line.startswith(b"HTTP/1.1"))
    assert served.provider.requests == ()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("what", ["text", "line", "padding"])
def test_compressed_answer_without_an_end_is_cut(what: Any, streams: bool) -> None:
    with FakeProviderServer(script=[Say("hello", then=Endless(what, compressed=True))]) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=1) as served:
            body = {**CHAT, "stream": streams}
            answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=BEARER, timeout=60)
            provider.wait_until(lambda: provider.disconnects)
    assert "error" in answer.text
    assert len(answer.content) < 20 * MiB
    assert served.run.balance.held_nanos == 0


@contextmanager
def compressing(kind: str, body: str) -> Iterator[str]:
    """A provider that compresses its one answer, although it was not requested."""
    packed = gzip.compress(body.encode())
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            received = b""
            while not received.endswith(b"}"):
                received += connection.recv(65_536)
            assert b"accept-encoding: identity" in received.lower()
            connection.sendall(head.encode() + packed[:20])
            connection.sendall(packed[20:])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        answering.join()


@pytest.mark.parametrize("streams", [True, False])
def test_compressed_answer_is_unpacked_and_its_usage_is_read(provider: FakeProviderServer, streams: bool) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    choice = {"index": 0, "finish_reason": "stop", "delta": {"content": "Über"}, "message": {"content": "Über"}}
    message = json.dumps({"id": "c", "model": "fake-1", "choices": [choice], "usage": usage}, ensure_ascii=False)
    body = f"data: {message}\n\ndata: [DONE]\n\n" if streams else message
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    kind = "text/event-stream" if streams else "application/json"
    with compressing(kind, body) as url, gateway(provider, environ={"OPENAI_BASE_URL": url}, max_cost_usd=1) as served:
        sent = {**BEARER, "accept-encoding": "gzip, br"}
        answer = httpx.post(f"{served.openai}/chat/completions", json={**CHAT, **options}, headers=sent)
    assert (answer.status_code, answer.text) == (200, body)
    assert "content-encoding" not in answer.headers
    balance = served.run.balance
    assert (balance.tokens_in, balance.tokens_out, balance.held_nanos, balance.unresolved_nanos) == (5, 9, 0, 0)


PIECES = ["Über ", "🌊🌊", "日本語", "é", " end"]


@contextmanager
def byte_by_byte() -> Iterator[str]:
    """A provider whose stream comes in chunks of one byte: each character of several bytes is cut."""
    events = [{"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "fake-1", "choices": [
        {"index": 0, "delta": {"content": piece}, "finish_reason": None}]} for piece in PIECES]  # fmt: skip
    events[-1]["choices"][0]["finish_reason"] = "stop"  # type: ignore[index]
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    last = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "fake-1",
        "choices": [],
        "usage": usage,
    }
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n" for event in (*events, last)]
    body = "".join([*lines, "data: [DONE]\r\n\r\n"]).encode()
    chunked = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in body) + b"0\r\n\r\n"

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while not received.endswith(b"}"):  # unread bytes would reset the connection at its end
                received += connection.recv(65_536)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            for start in range(0, len(chunked), 7):  # also not at the edges of chunks
                connection.sendall(chunked[start : start + 7])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer, args=(listener,))
        answering.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        answering.join()


def test_stream_that_is_cut_in_the_middle_of_characters_arrives_whole(provider: FakeProviderServer) -> None:
    with byte_by_byte() as url, gateway(provider, environ={"OPENAI_BASE_URL": url}, max_cost_usd=1) as served:
        body = {**CHAT, "stream": True}
        answer = httpx.post(f"{served.openai}/chat/completions", json=body, headers=BEARER)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [event["choices"][0]["delta"]["content"] for event in events] == PIECES
    assert answer.text.rstrip().endswith("data: [DONE]")
    balance = served.run.balance
    assert (balance.tokens_in, balance.tokens_out, balance.held_nanos) == (5, 9, 0)
