"""What every request passes: Host, Origin, sizes, tokens, bodies; each refusal by its code."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx2
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.server.auth import LOCAL, Rules, User
from penstock.server.errors import ApiError
from penstock.server.guards import (
    LINGER_BYTES,
    LINGER_S,
    UNKNOWN_LINGER_BYTES,
    AuthGuard,
    BodyGuard,
    OriginGuard,
    RequestContextGuard,
)
from penstock.server.metrics import Metrics
from penstock.server.settings import ServerSettings
from penstock.testing import sim_run
from tests.server.served import SECRETS, TOKENS, listening, served, wire

SETTINGS = ServerSettings(allowed_hosts=("penstock.example",), allowed_origins=("http://localhost:5173",))


async def fine(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"fine"})


async def fetch(app: ASGIApp, method: str = "GET", path: str = "/", **options: Any) -> httpx2.Response:
    client = options.pop("client", ("127.0.0.1", 1))
    transport = httpx2.ASGITransport(app=app, client=client)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as asker:
        return await asker.request(method, path, **options)


def code(answer: httpx2.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"] if answer.status_code >= 400 else ""


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "DELETE", "TRACE"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8642", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8642", 200),
        ("penstock.example", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.nip.io", 421),
        ("127.0.0.2", 421),
        ("0.0.0.0", 421),
        ("localhost:99999999", 400),
        ("localhost/..", 400),
        ("user@localhost", 400),
        ("", 400),
    ],
)
async def test_the_host_must_be_one_of_ours_on_every_method(method: str, host: str, status: int) -> None:
    answer = await fetch(OriginGuard(fine, SETTINGS), method, headers={"Host": host})
    assert answer.status_code == status


async def test_a_request_needs_exactly_one_host_header() -> None:
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "raw_path": b"/"}
    headers = [(b"host", b"localhost"), (b"host", b"evil.example")]
    guard = OriginGuard(fine, SETTINGS)
    for sent in (headers, []):
        assert guard._refusal({**scope, "headers": sent}).status == 400  # type: ignore[union-attr]


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "http://localhost:5173"}, 200),
        ({"Origin": "http://localhost:9999"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_pages_of_other_origins_are_refused_for_every_method(
    method: str, headers: dict[str, str], status: int
) -> None:
    answer = await fetch(OriginGuard(fine, SETTINGS), method, headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers


async def test_a_link_from_another_site_opens_only_the_start_page() -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    guard = OriginGuard(fine, SETTINGS)
    assert (await fetch(guard, headers=headers)).status_code == 200
    assert (await fetch(guard, path="/api/runs", headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("headers", "target", "status"),
    [
        ([(b"x", b"")] * 9, 50, None),
        ([(b"x", b"")] * 10, 50, 431),
        ([(b"x", b"y" * 86)], 50, None),
        ([(b"x", b"y" * 87)], 50, 431),
        ([], 100, None),
        ([], 101, 414),
    ],
)
async def test_headers_and_targets_at_the_limit_are_fine_and_one_more_is_not(
    headers: list[tuple[bytes, bytes]], target: int, status: int | None
) -> None:
    guard = OriginGuard(fine, ServerSettings(max_headers=10, max_header_bytes=100, max_target_bytes=100))
    scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"q" * 40, "raw_path": b"/" * (target - 40)}
    wrong = guard._refusal({**scope, "headers": [(b"host", b"localhost"), *headers]})
    assert (wrong.status if wrong else None) == status


async def test_every_response_has_security_headers_and_a_request_id() -> None:
    app = RequestContextGuard(fine, Metrics(), new_id=lambda: "id-1")
    answer = await fetch(app)
    assert answer.headers["x-request-id"] == "id-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe-eval" not in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"
    assert (await fetch(app, headers={"X-Request-Id": "mine"})).headers["x-request-id"] == "mine"
    odd = await fetch(app, headers={"X-Request-Id": "a b\tc"})
    assert odd.headers["x-request-id"] == "id-1"


async def test_an_unexpected_error_is_logged_by_location_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("canary-in-a-fault")

    metrics = Metrics()
    with caplog.at_level(logging.DEBUG):
        answer = await fetch(RequestContextGuard(broken, metrics))
    assert code(answer) == (500, "internal")
    assert "canary" not in answer.text + caplog.text
    assert "RuntimeError at" in caplog.text
    assert metrics.faults == 1


@pytest.mark.parametrize("sent", [None, "Bearer", "Bearer ", f"Basic {SECRETS['ann']}", SECRETS["ann"]])
async def test_a_request_without_a_token_is_refused_with_the_header_to_send(sent: str | None) -> None:
    headers = {} if sent is None else {"Authorization": sent}
    answer = await fetch(AuthGuard(fine, ServerSettings(tokens=TOKENS)), path="/api/runs", headers=headers)
    assert code(answer) == (401, "unauthorized")
    assert answer.json()["error"]["message"] == "send a token: Authorization: Bearer <secret>"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert SECRETS["ann"] not in answer.text


@pytest.mark.parametrize(
    "secret",
    [
        "wrong-wrong-wrong-wrong",
        f"{SECRETS['ann']}x",
        SECRETS["ann"][:-1],
        f"{SECRETS['ann']}, Bearer {SECRETS['root']}",
        '"\\<script>',
    ],
)
@pytest.mark.parametrize("path", ["/api/runs", "/v1/models", "/mcp", "/nowhere"])
async def test_an_unknown_token_is_refused_and_not_repeated(secret: str, path: str) -> None:
    gate = AuthGuard(fine, ServerSettings(tokens=TOKENS))
    answer = await fetch(gate, path=path, headers={"Authorization": f"Bearer {secret}"})
    assert code(answer) == (401, "token_unknown")
    message = "this server does not know this token; ask its operator for one"
    assert answer.json()["error"]["message"] == message
    assert answer.headers["www-authenticate"] == f'Bearer error="invalid_token", error_description="{message}"'
    assert secret not in answer.text + str(answer.headers)


async def test_open_routes_accept_an_unknown_token() -> None:
    gate = AuthGuard(fine, ServerSettings(tokens=TOKENS))
    assert (await fetch(gate, path="/health", headers={"Authorization": "Bearer wrong"})).status_code == 200


@pytest.mark.parametrize(("client", "status"), [("127.0.0.1", 200), ("::1", 200), ("192.0.2.1", 401), ("", 401)])
async def test_without_tokens_only_this_machine_has_access(client: str, status: int) -> None:
    answer = await fetch(AuthGuard(fine, ServerSettings()), path="/api/runs", client=(client, 1))
    assert answer.status_code == status


async def test_a_wrong_method_is_refused_with_the_allowed_ones() -> None:
    answer = await fetch(AuthGuard(fine, ServerSettings()), "DELETE", "/api/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize(
    "path", ["/api/runs/", "/API/runs", "/api//runs", "/api/runs/a/b", "/api/../metrics", "/api/runs/%2e%2e/x"]
)
def test_paths_match_exactly(path: str) -> None:
    assert Rules().find(path) is None


async def echoed(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


JSON = {"Content-Type": "application/json"}


async def pieces(*parts: bytes) -> Any:
    for part in parts:
        yield part


async def test_a_body_at_the_limit_is_fine_and_one_byte_more_is_not_chunked_or_not() -> None:
    guard = BodyGuard(echoed, ServerSettings(max_body_bytes=10, max_attachment_bytes=20))
    fit, over = b'"12345678"', b'"123456789"'
    assert (await fetch(guard, "POST", content=fit, headers=JSON)).content == fit
    assert code(await fetch(guard, "POST", content=over, headers=JSON)) == (413, "too_large")
    assert (await fetch(guard, "POST", content=pieces(fit[:4], fit[4:]), headers=JSON)).content == fit
    assert code(await fetch(guard, "POST", content=pieces(over[:6], over[6:]), headers=JSON)) == (413, "too_large")
    for size, status in ((20, 200), (21, 413)):
        assert (await fetch(guard, "POST", "/api/attachments", content=b"\xff" * size)).status_code == status


@pytest.mark.parametrize("length", ["99999999999999999999999999", "-1", "x"])
async def test_a_content_length_over_the_limit_is_refused_before_reading(length: str) -> None:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", length.encode())]}

    async def never() -> dict[str, Any]:
        raise AssertionError("nothing is to be read")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await BodyGuard(fine, ServerSettings())(scope, never, send)
    assert sent[0]["status"] == 413


MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("path", "size"),
    [
        ("/api/attachments", 20 * MIB + 1),
        ("/v1/chat/completions", 2 * MIB + 1),
        ("/api/graphs/validate", 2 * MIB + 1),
        ("/api/graphs/validate", 31 * MIB),
    ],
)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_client_that_sends_everything_before_reading_gets_the_413(
    path: str, size: int, is_chunked: bool
) -> None:
    def post(address: tuple[str, int]) -> tuple[int, Any, str | None]:
        whole = b"7" * size
        body = (whole[at : at + MIB] for at in range(0, size, MIB)) if is_chunked else whole
        headers = {"Authorization": f"Bearer {SECRETS['ann']}", "Content-Type": "application/json"}
        with closing(http.client.HTTPConnection(*address)) as client:
            client.request("POST", path, body, headers)
            answer = client.getresponse()
            return answer.status, json.loads(answer.read())["error"]["code"], answer.getheader("connection")

    async with served() as server, listening(server.app) as address:
        status, error, connection = await asyncio.to_thread(post, address)
    assert (status, connection) == (413, "close")
    assert error in {"too_large", None}  # OpenAI's API has codes of its own


class Sending:
    """A client whose body has come so far, and what it was answered."""

    def __init__(self, pieces: Iterator[dict[str, Any]]) -> None:
        self._pieces = pieces
        self.read = 0
        self.answered: list[dict[str, Any]] = []
        self.read_before_the_answer = 0

    async def receive(self) -> dict[str, Any]:
        for piece in self._pieces:
            self.read += len(piece.get("body", b""))
            return piece
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def send(self, message: Any) -> None:
        self.read_before_the_answer = self.read if not self.answered else self.read_before_the_answer
        self.answered.append(message)

    def whole(self) -> bytes:
        assert [bool(message.get("more_body")) for message in self.answered[-1:]] == [False]
        return b"".join(message.get("body", b"") for message in self.answered)


def more(size: int) -> dict[str, Any]:
    return {"type": "http.request", "body": b"x" * size, "more_body": True}


def too_much(sending: Sending, *headers: tuple[bytes, bytes], user: User | None = LOCAL) -> Any:
    sent = headers or ((b"transfer-encoding", b"chunked"),)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": list(sent), "state": {"user": user}}
    guard = RequestContextGuard(BodyGuard(fine, ServerSettings(max_body_bytes=10)), Metrics())
    return guard(scope, sending.receive, sending.send)


async def test_a_client_that_never_stops_sending_is_answered_and_drained_up_to_a_limit() -> None:
    for headers in ([], [(b"content-length", b"4096")]):
        endless = Sending(more(MIB) for _ in itertools.count())
        await too_much(endless, *headers)
        assert b"too_large" in endless.whole()
        assert endless.read_before_the_answer <= MIB
        assert LINGER_BYTES <= endless.read <= LINGER_BYTES + 2 * MIB


async def test_a_client_without_a_valid_token_is_drained_up_to_a_far_lower_limit() -> None:
    endless = Sending(more(MIB // 4) for _ in itertools.count())
    await too_much(endless, user=None)
    assert b"too_large" in endless.whole()
    assert (b"connection", b"close") in [*endless.answered[0]["headers"]]
    assert endless.read <= UNKNOWN_LINGER_BYTES + MIB


def test_a_client_that_stops_midway_is_drained_only_briefly() -> None:
    async def stopped() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        sending = Sending(iter([more(11)]))
        await too_much(sending)
        assert b"too_large" in sending.whole()
        return loop.time() - began

    assert sim_run(stopped, seed=1) == LINGER_S


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"11"), (b"expect", b"100-continue")],
        [(b"content-length", str(LINGER_BYTES + 1).encode())],
        [(b"content-length", b"9" * 30)],
    ],
)
async def test_a_client_that_expects_100_or_announces_far_too_much_is_not_drained(headers: Any) -> None:
    sending = Sending(more(MIB) for _ in itertools.count())
    await too_much(sending, *headers)
    assert (sending.read, b"too_large" in sending.whole()) == (0, True)


async def test_draining_ends_with_the_body_or_a_disconnect() -> None:
    last = {"type": "http.request", "body": b"x" * 11, "more_body": False}
    left = {"type": "http.disconnect"}
    for pieces in ([last], [more(11), last], [more(11), left]):
        sending = Sending(iter(pieces))
        await too_much(sending)
        assert b"too_large" in sending.whole()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": 'Application/JSON;charset="UTF-8"'}, 200),
        ({"Content-Type": "application/json; charset=utf-16"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({}, 415),
        ({**JSON, "Content-Encoding": "gzip"}, 415),
        ({**JSON, "Content-Encoding": "identity"}, 200),
    ],
)
async def test_bodies_must_be_json_with_that_content_type(headers: dict[str, str], status: int) -> None:
    answer = await fetch(BodyGuard(echoed, ServerSettings()), "POST", content=b"{}", headers=headers)
    assert answer.status_code == status


async def test_a_large_body_is_checked_like_a_small_one() -> None:
    guard = BodyGuard(echoed, ServerSettings())
    padding = b" " * 100_000
    assert (await fetch(guard, "POST", content=padding + b"{}", headers=JSON)).status_code == 200
    assert code(await fetch(guard, "POST", content=padding + b"[NaN]", headers=JSON)) == (422, "bad_number")


async def test_the_total_size_of_bodies_is_limited_and_released() -> None:
    guard = BodyGuard(echoed, ServerSettings(max_buffered_bytes=15))
    held, going = asyncio.Event(), asyncio.Event()

    async def slow() -> Any:
        yield b'"1234567'
        held.set()
        await going.wait()
        yield b'8"'

    first = asyncio.ensure_future(fetch(guard, "POST", content=slow(), headers=JSON))
    await held.wait()
    second = await fetch(guard, "POST", content=b'"12345678"', headers=JSON)
    assert (code(second), second.headers["retry-after"]) == ((503, "overloaded"), "1")
    going.set()
    assert (await first).status_code == 200
    assert (await fetch(guard, "POST", content=b'"12345678"', headers=JSON)).status_code == 200


async def test_a_slow_body_times_out_and_a_disconnect_releases_its_buffer() -> None:
    guard = BodyGuard(fine, ServerSettings(body_timeout_s=0.01, max_buffered_bytes=1_000))

    async def never() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    assert code(await fetch(guard, "POST", content=never(), headers=JSON)) == (408, "timeout")
    incoming = iter([{"type": "http.request", "body": b"x" * 900, "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(incoming)

    async def send(message: Any) -> None:
        raise AssertionError("the client has disconnected")

    await guard({"type": "http", "method": "POST", "path": "/", "headers": []}, receive, send)
    assert guard._free_bytes == 1_000


async def test_hostile_requests_over_a_socket_do_not_affect_the_next_one() -> None:
    hostile = [
        b'{"graph_id": ' * 5_000,
        b"9" * 5_000,
        b"\xff\xfe",
        b'"\\ud800"',
        b"[NaN]",
        b"\0",
        b"null",
        b'{"a":1,"a":2}',
    ]
    async with served() as server, listening(server.app) as address:
        for body in hostile:
            async with wire(address) as client:
                token = {"Authorization": f"Bearer {SECRETS['ann']}", "Content_Type": "application/json"}
                client.send("POST", "/api/runs", body, **token)
                assert await client.status() in {400, 422}
        async with wire(address) as client:
            client.send("POST", "/api/runs", Content_Length="9999999999", **token)
            assert await client.status() == 413
        async with wire(address) as client:
            client.send("GET", "/health")
            assert await client.status() == 200


def test_an_error_with_another_status_still_has_a_code() -> None:
    assert ApiError(418, "tea").code == "error"
