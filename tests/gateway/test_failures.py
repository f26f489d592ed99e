"""Bad input, and upstreams that are down, slow, lying or end early: the provider's error shape, and nothing held."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.gateway import client as client_side
from penstock.runtime.billing.prices import PriceBook
from penstock.testing.provider import Cut, Endless, FakeProviderServer, Garble, LieAboutUsage, Say, Truncate
from tests.gateway.conftest import KEY, PROVIDER_KEY, Served, gateway

CHAT: dict[str, Any] = {"model": "fake-1", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 50}
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def served(provider: FakeProviderServer) -> Iterator[Served]:
    with gateway(provider, max_cost_usd=1) as served:
        yield served


def post(served: Served, body: Any = None, **options: Any) -> httpx.Response:
    options.setdefault("headers", BEARER)
    if "content" not in options:
        options["json"] = CHAT if body is None else body
    return httpx.post(f"{served.openai}/chat/completions", timeout=30, **options)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic eA=="}])
@pytest.mark.parametrize("path", ["/openai/v1/chat/completions", "/anthropic/v1/messages"])
def test_wrong_key_is_refused_without_repeating_it(served: Served, path: str, headers: dict[str, str]) -> None:
    answer = httpx.post(served.url + path, json=CHAT, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "wrong" not in answer.text
    assert served.provider.requests == ()


@pytest.mark.parametrize(
    "content", [b"", b"no json", b"[1, 2]", b'{"model": "fake-1"', b'{"model": "fake-1"}', b"\xff\xfe", b"[" * 100_000]
)
def test_body_that_is_no_request_is_refused(served: Served, content: bytes) -> None:
    answer = post(served, content=content)
    assert answer.status_code == 400
    assert "must be a JSON object with the fields" in answer.json()["error"]["message"]
    assert served.provider.requests == ()


def test_compressed_request_is_refused(served: Served) -> None:
    answer = post(served, content=gzip.compress(b"{}"), headers={**BEARER, "content-encoding": "gzip"})
    assert answer.status_code == 415


def test_enormous_body_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_side, "MAX_BODY_BYTES", 10_000)
    answer = post(served, {**CHAT, "padding": "x" * 10_000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_signature_of_another_service_does_not_exempt_from_the_clamp(provider: FakeProviderServer) -> None:
    headers = {"authorization": "AWS4-HMAC-SHA256 Credential=x", "x-api-key": KEY}
    with gateway(provider, max_cost_usd="0.001") as served:
        assert post(served, {**CHAT, "max_tokens": 100_000}, headers=headers).status_code == 200
    assert provider.requests[0].body["max_tokens"] < 100
    assert provider.requests[0].headers["authorization"] == f"Bearer {PROVIDER_KEY}"


def test_model_without_a_price_is_counted_as_unknown(provider: FakeProviderServer) -> None:
    with gateway(provider, max_cost_usd=1, prices=PriceBook(use_genai_prices=False)) as served:
        assert post(served).status_code == 200
    assert "unknown" in served.run.explain()


def test_upstream_that_is_down_costs_nothing(provider: FakeProviderServer) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # taken, and not listening
        with gateway_at(f"http://127.0.0.1:{bound.getsockname()[1]}/v1", provider) as down:
            answer = post(down)
    assert answer.status_code == 502
    assert "the upstream openai cannot be reached" in answer.json()["error"]["message"]
    assert down.run.balance.unresolved_nanos == down.run.balance.held_nanos == 0


def gateway_at(url: str, provider: FakeProviderServer) -> Any:
    return gateway(provider, environ={"OPENAI_BASE_URL": url, "OPENAI_API_KEY": PROVIDER_KEY}, max_cost_usd=1)


CUT = {"reset": Say(then=Cut()), "half": Say("hello " * 50, then=Cut(1))}


@pytest.mark.parametrize("name", CUT)
def test_answer_that_is_cut_is_an_error_whose_bill_stays_unresolved(name: str) -> None:
    with FakeProviderServer(script=[CUT[name]]) as provider, gateway(provider, max_cost_usd=1) as served:
        answer = post(served)
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "api_error"
    assert served.run.balance.held_nanos == 0
    assert served.run.balance.unresolved_nanos >= provider.invoice.total_nanos


def test_stream_that_is_cut_ends_with_an_error_event() -> None:
    with FakeProviderServer(script=[CUT["half"]]) as provider, gateway(provider, max_cost_usd=1) as served:
        answer = post(served, {**CHAT, "stream": True})
    assert answer.status_code == 200
    assert '"type": "api_error"' in answer.text.rstrip().splitlines()[-1]
    assert served.run.balance.unresolved_nanos >= provider.invoice.total_nanos


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("fault", [Garble(1), Truncate(1)])
def test_incomplete_answer_is_passed_on_and_its_bill_stays_unresolved(fault: Garble | Truncate, streams: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    say, body = Say("hello " * 50, then=fault), {**CHAT, **options}
    with FakeProviderServer(script=[say]) as plain:
        direct = httpx.post(f"{plain.openai_url}/chat/completions", json=body)
    with FakeProviderServer(script=[say]) as provider, gateway(provider, max_cost_usd=1) as served:
        answer = post(served, body)
    assert (answer.status_code, len(answer.content)) == (200, len(direct.content))
    assert served.run.balance.held_nanos == 0
    assert served.run.balance.spent_nanos + served.run.balance.unresolved_nanos >= provider.invoice.total_nanos


@pytest.mark.parametrize("streams", [True, False])
def test_answer_without_an_end_is_cut_at_its_hold(streams: bool) -> None:
    with FakeProviderServer(script=[Say("hello", then=Endless())]) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=1) as served:
            answer = post(served, {**CHAT, "stream": streams})
            provider.wait_until(lambda: provider.disconnects)
    assert answer.status_code == (200 if streams else 402)
    assert "error" in answer.text
    assert len(answer.content) < 1_000_000
    assert served.run.balance.held_nanos == 0


def test_lie_about_usage_is_not_believed() -> None:
    with FakeProviderServer(script=[LieAboutUsage(0, 0, 10, 50, "word " * 40)]) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=1) as served:
            post(served)
    assert served.run.balance.spent_nanos >= provider.invoice.total_nanos


def test_redirect_is_neither_followed_nor_passed_on(provider: FakeProviderServer) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        gateway_at(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", provider) as served,
    ):
        answering = threading.Thread(target=_redirect_once, args=(listener, provider.openai_url))
        answering.start()
        answer = post(served)
        answering.join()
    assert answer.status_code == 502
    assert "redirect" in answer.json()["error"]["message"]
    assert provider.requests == ()


def _redirect_once(listener: socket.socket, to: str) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.recv(65_536)
        connection.sendall(
            f"HTTP/1.1 307 Moved\r\nlocation: {to}/chat/completions\r\ncontent-length: 0\r\n\r\n".encode()
        )


@pytest.mark.parametrize("path", ["chat/completions", "models"])
def test_key_that_the_upstream_repeats_in_its_error_does_not_reach_the_client(
    provider: FakeProviderServer, path: str
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        gateway_at(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", provider) as served,
    ):
        answering = threading.Thread(target=_repeat_key_once, args=(listener,))
        answering.start()
        method, body = ("GET", None) if path == "models" else ("POST", CHAT)
        answer = httpx.request(method, f"{served.openai}/{path}", headers=BEARER, json=body)
        answering.join()
    assert (answer.status_code, answer.json()) == (401, {"error": {"message": "wrong key: ***"}})
    assert answer.headers["www-authenticate"] == "Bearer ***"


def _repeat_key_once(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65_536)
        assert PROVIDER_KEY.encode() in received
        body = json.dumps({"error": {"message": f"wrong key: {PROVIDER_KEY}"}})
        head = f"HTTP/1.1 401 No\r\nwww-authenticate: Bearer {PROVIDER_KEY}\r\ncontent-length: {len(body)}\r\n"
        connection.sendall(f"{head}connection: close\r\n\r\n{body}".encode())
        while connection.recv(65_536):  # unread bytes would reset the connection at its end
            pass


def test_keys_never_appear_in_an_answer(served: Served) -> None:
    for path in ("/openai/v1/chat/completions", "/openai/v1/nothing", "/nowhere", "/anthropic/v1/messages"):
        answer = httpx.post(served.url + path, json=CHAT, headers=BEARER)
        assert PROVIDER_KEY not in answer.text + str(answer.headers)
        assert KEY not in answer.text


def test_client_that_stops_reading_is_cut_and_its_hold_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_side, "IDLE_S", 0.2)
    with FakeProviderServer(script=[Say("word", then=Endless())]) as provider:  # noqa: SIM117
        with gateway(provider, max_cost_usd=1_000) as served:
            body = json.dumps({**CHAT, "max_tokens": 50_000_000, "stream": True}).encode()
            host, port = served.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as reader:
                reader.sendall(
                    f"POST /openai/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
                    f"content-length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                provider.wait_until(lambda: provider.disconnects)
                provider.wait_until(lambda: served.run.balance.held_nanos == 0)
    balance = served.run.balance
    assert balance.spent_nanos + balance.unresolved_nanos > 0


def test_body_that_does_not_arrive_is_refused_and_holds_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_side, "BODY_S", 0.1)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(
            f"POST /openai/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {KEY}\r\n"
            "content-length: 100\r\n\r\n{".encode()
        )
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")
    assert served.run.balance.attempts == 0


def test_fault_of_the_gateway_itself_is_an_error_in_the_shape_of_the_wire(
    provider: FakeProviderServer, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(provider, {"models": (5,)}) as served:  # no pattern, so that looking for a match raises
        answer = post(served)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "TypeError" in caplog.text
