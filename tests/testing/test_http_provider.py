"""The fake provider over HTTP: real sockets, the shapes of real APIs, and an invoice that knows what was generated."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.money import to_nanos
from penstock.runtime.billing.prices import Price
from penstock.runtime.billing.usage import read_usage
from penstock.testing import (
    Answer,
    Behaviour,
    FailAfterBilling,
    FakeProvider,
    LieAboutUsage,
    NoUsage,
    Raise,
    RefuseFree,
    ScriptEnded,
    ServerError,
    Stall,
)
from penstock.testing.provider.fates import (
    Cut,
    Fail,
    Fate,
    Garble,
    Hang,
    Say,
    Script,
    ToolCall,
    Truncate,
    by_chance,
    on_the_wire,
)
from penstock.testing.provider.generation import generate
from penstock.testing.provider.http import FakeProviderServer
from penstock.testing.provider.request import WireRequest, count_input_tokens, count_tokens

PROMPT = [{"role": "user", "content": "hello"}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake-1", "messages": PROMPT, "stream_options": {"include_usage": True}},
    RESPONSES: {"model": "fake-1", "input": PROMPT},
    MESSAGES: {"model": "fake-1", "messages": PROMPT, "max_tokens": 1_000},
}
CAPS = [
    (CHAT, "max_tokens"),
    (CHAT, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES, "max_tokens"),
]
ENDINGS = {CHAT: "[DONE]", RESPONSES: "response.completed", MESSAGES: "message_stop"}
ADD = ToolCall("add", {"a": 1, "b": 2})

each_api = pytest.mark.parametrize("path", BODIES)


def serve(*script: Fate, **options: Any) -> FakeProviderServer:
    prices = FakeProvider(input_usd_per_mtok=1, output_usd_per_mtok=2)
    return FakeProviderServer(prices, script or None, **options)


def always(fate: Fate) -> Script:
    return lambda _: fate


@contextmanager
def connection(server: FakeProviderServer) -> Iterator[HTTPConnection]:
    wire = HTTPConnection("127.0.0.1", port(server), timeout=30)
    try:
        yield wire
    finally:
        wire.close()


def port(server: FakeProviderServer) -> int:
    return int(server.url.rpartition(":")[2])


def send(wire: HTTPConnection, path: str, **fields: Any) -> HTTPResponse:
    wire.request("POST", path, json.dumps({**BODIES[path], **fields}), {"authorization": "Bearer sk-canary"})
    return wire.getresponse()


def ask(server: FakeProviderServer, path: str = CHAT, **fields: Any) -> Any:
    """The plain answer, as data."""
    with connection(server) as wire:
        return json.loads(send(wire, path, **fields).read())


def status_of(server: FakeProviderServer, path: str = CHAT, **fields: Any) -> int:
    with connection(server) as wire:
        response = send(wire, path, **fields)
        response.read()
        return response.status


def stream(server: FakeProviderServer, path: str = CHAT, **fields: Any) -> list[Any]:
    """The data of every event; the mark of the end as the text it is."""
    with connection(server) as wire:
        return events(send(wire, path, stream=True, **fields).read())


def events(body: bytes) -> list[Any]:
    data = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: ")]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def text_in(path: str, answer: Any) -> str:
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"] or "")
    blocks = (
        answer["content"]
        if path == MESSAGES
        else [part for item in answer["output"] for part in item.get("content", ())]
    )
    return "".join(block.get("text", "") for block in blocks)


def tools_in(path: str, answer: Any) -> list[tuple[str, Any]]:
    if path == CHAT:
        calls = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls", ())]
    else:
        calls = [item for item in answer["content" if path == MESSAGES else "output"] if "name" in item]
    return [(call["name"], call["input"] if path == MESSAGES else json.loads(call["arguments"])) for call in calls]


def text_in_stream(path: str, found: list[Any]) -> str:
    deltas = [
        event["choices"][0]["delta"] for event in found if path == CHAT and event != "[DONE]" and event["choices"]
    ]
    if path == MESSAGES:
        deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    if path == RESPONSES:
        return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    return "".join(delta.get("text") or delta.get("content") or "" for delta in deltas)


def usage_in_stream(path: str, found: list[Any]) -> tuple[int, int]:
    if path == CHAT:
        usage = found[-2]["usage"]
    elif path == RESPONSES:
        usage = found[-1]["response"]["usage"]
    else:
        usage = found[-2]["usage"]
    return counts(usage)


def counts(usage: dict[str, int]) -> tuple[int, int]:
    taken = usage.get("input_tokens", usage.get("prompt_tokens"))
    given = usage.get("output_tokens", usage.get("completion_tokens"))
    assert taken is not None
    assert given is not None
    return taken, given


def ending_of(found: list[Any]) -> str:
    return found[-1] if isinstance(found[-1], str) else found[-1].get("type", "none")


@each_api
def test_an_answer_names_the_requested_model_and_its_usage_matches_the_invoice(path: str) -> None:
    with serve("four words of text") as server:
        answer = ask(server, path)
    line = server.invoice.lines[0]
    assert text_in(path, answer) == "four words of text"
    assert counts(answer["usage"]) == (line.input_tokens, line.output_tokens) == (count_input_tokens(BODIES[path]), 5)
    assert line.cost_nanos == line.input_tokens * 1_000 + line.output_tokens * 2_000
    assert line.outcome == "answered"


@each_api
def test_a_stream_says_the_same_as_a_plain_answer_and_ends_with_its_mark(path: str) -> None:
    with serve("four words of text", "four words of text") as server:
        answer, found = ask(server, path), stream(server, path)
    assert text_in_stream(path, found) == text_in(path, answer)
    assert usage_in_stream(path, found) == counts(answer["usage"])
    assert ending_of(found) == ENDINGS[path]
    plain, streamed = server.invoice.lines
    assert plain.cost_nanos == streamed.cost_nanos


def test_a_chat_stream_reports_usage_only_on_request() -> None:
    with serve() as server:
        found = stream(server, stream_options=None)
    assert all("usage" not in event for event in found[:-1])


@pytest.mark.parametrize(("path", "cap"), CAPS)
def test_no_more_is_generated_than_the_request_allows(path: str, cap: str) -> None:
    with serve(output_tokens=500) as server:
        answer = ask(server, path, **{cap: 7})
        assert usage_in_stream(path, stream(server, path, **{cap: 7})) == counts(answer["usage"])
    assert len(text_in(path, answer)) == 28
    assert [line.output_tokens for line in server.invoice.lines] == [7, 7]
    reasons = ("length", "incomplete", "max_tokens")
    found = answer.get("stop_reason") or answer.get("status") or answer["choices"][0]["finish_reason"]
    assert found in reasons


@each_api
@pytest.mark.parametrize("text", [None, "let me see"])
def test_tool_calls_arrive_plain_and_in_a_stream(path: str, text: str | None) -> None:
    with FakeProviderServer(script=always(Say(text, (ADD, ADD)))) as server:
        answer, found = ask(server, path), stream(server, path)
    assert tools_in(path, answer) == [("add", {"a": 1, "b": 2})] * 2
    assert text_in(path, answer) == text_in_stream(path, found) == (text or "")
    assert json.dumps(found).count(r"{\"a\":1,\"b\":2}") >= 2
    assert server.invoice.lines[0].output_tokens == count_tokens(text or "") + 2 * count_tokens('add{"a":1,"b":2}')


@each_api
def test_a_tool_call_that_does_not_fit_is_left_out(path: str) -> None:
    cap = next(name for api, name in CAPS if api == path)
    with serve(Say(tool_calls=(ADD, ADD))) as server:
        answer = ask(server, path, **{cap: 5})
    assert tools_in(path, answer) == [("add", {"a": 1, "b": 2})]
    assert server.invoice.lines[0].output_tokens == 4


@given(
    text=st.none() | st.text(max_size=200),
    calls=st.integers(0, 3),
    stated=st.none() | st.integers(0, 300),
    cap=st.none() | st.integers(1, 100),
    default=st.integers(0, 300),
)
def test_the_output_limit_holds_for_every_script(
    text: str | None, calls: int, stated: int | None, cap: int | None, default: int
) -> None:
    request = WireRequest(1, 1, "POST", CHAT, {}, 0, body={**BODIES[CHAT], "max_tokens": cap})
    found = generate(Say(text, (ADD,) * calls, stated), request, default)
    natural = count_tokens(found.text) + 4 * len(found.tool_calls)
    assert cap is None or max(found.output_tokens, natural) <= cap
    assert stated is not None or found.output_tokens == natural
    assert "".join(found.pieces) == found.text


def test_the_default_answer_is_an_echo_of_the_length_that_was_set() -> None:
    with serve(output_tokens=3) as server:
        assert text_in(CHAT, ask(server)) == "hello hello "


def test_a_script_can_depend_on_the_request() -> None:
    with FakeProviderServer(script=lambda request: request.last_text.upper()) as server:
        assert text_in(CHAT, ask(server)) == "HELLO"
        assert text_in(RESPONSES, ask(server, RESPONSES, input="louder")) == "LOUDER"
        parts = [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "parts"}]}]
        assert text_in(MESSAGES, ask(server, MESSAGES, messages=parts)) == "IN PARTS"


BEHAVIOURS: list[tuple[Behaviour, int | None]] = [
    (Answer(), 200),
    (Answer(cost_usd="0.25"), 200),
    (NoUsage(), 200),
    (LieAboutUsage(1, 1, real_input=100, real_output=50), 200),
    (Stall(0.001, then=Stall(0.001, then=Answer())), 200),
    (ServerError(billed=True), 500),
    (ServerError(503), 503),
    (RefuseFree(), 429),
    (RefuseFree(401), 401),
    (RefuseFree(400), 400),
    (FailAfterBilling(), None),
    (Raise(), None),
]


@pytest.mark.parametrize(("behaviour", "status"), BEHAVIOURS, ids=lambda case: repr(case)[:40])
def test_a_behaviour_costs_on_the_wire_what_it_costs_in_process(behaviour: Behaviour, status: int | None) -> None:
    provider = FakeProvider([behaviour, behaviour])
    try:
        provider.complete()
    except Exception:
        assert status != 200
    with FakeProviderServer(provider) as server:
        if status is None:
            with pytest.raises(ConnectionError):
                ask(server)
        else:
            assert status_of(server) == status
    inside, wire = provider.invoice.lines
    assert (wire.input_tokens, wire.output_tokens, wire.cost_nanos, wire.outcome) == (
        inside.input_tokens,
        inside.output_tokens,
        inside.cost_nanos,
        inside.outcome,
    )


def test_a_rate_limit_has_a_retry_time() -> None:
    with serve(RefuseFree(429, retry_after_s=1.5)) as server, connection(server) as wire:
        response = send(wire, CHAT)
        assert (response.status, response.headers["retry-after"]) == (429, "1.5")
        assert json.loads(response.read())["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("usage", "reported"), [("true", (10, 4)), ("zero", (0, 0)), ("absent", None), ((10**9, 10**9), (10**9, 10**9))]
)
@each_api
def test_the_reported_usage_does_not_change_the_invoice(path: str, usage: Any, reported: Any) -> None:
    with serve(Say("x" * 16, input_tokens=10, usage=usage)) as server:
        answer = ask(server, path)
    assert answer.get("usage") is None if reported is None else counts(answer["usage"]) == reported
    assert server.invoice.total_nanos == 10 * 1_000 + 4 * 2_000


@each_api
@pytest.mark.parametrize("after", [None, 0, 2])
def test_a_connection_that_is_cut_has_been_billed_whole(path: str, after: int | None) -> None:
    with serve(Say("x" * 40, then=Cut(after))) as server, pytest.raises((ConnectionError, HTTPException)):
        stream(server, path)
    line = server.invoice.lines[0]
    assert (line.output_tokens, line.outcome) == (10, "failed after billing")


def test_a_plain_answer_can_be_cut_in_the_middle() -> None:
    with (
        serve(Say(then=Cut(0))) as server,
        connection(server) as wire,
        pytest.raises((ConnectionError, HTTPException)),
    ):
        response = send(wire, CHAT)
        assert response.status == 200
        response.read()


@each_api
def test_a_truncated_stream_ends_in_good_order_without_its_mark(path: str) -> None:
    with serve(Say("x" * 40, then=Truncate(after=3))) as server:
        found = stream(server, path)
    assert text_in_stream(path, found) == "x" * 12
    assert ENDINGS[path] not in json.dumps(found)
    assert server.invoice.lines[0].output_tokens == 10


@each_api
@pytest.mark.parametrize("after", [0, 2, 99])
def test_a_garbled_stream_has_an_event_that_is_not_json(path: str, after: int) -> None:
    with serve(Say("x" * 16, then=Garble(after))) as server, pytest.raises(json.JSONDecodeError):
        stream(server, path)
    assert server.invoice.billed_calls == 1


@pytest.mark.parametrize("fault", [Garble(), Truncate()])
def test_a_plain_answer_can_be_no_json(fault: Garble | Truncate) -> None:
    with serve(Say(then=fault)) as server, pytest.raises(ValueError):
        ask(server)
    assert server.invoice.billed_calls == 1


def test_an_error_after_generating_is_billed() -> None:
    with serve(Say("x" * 40, then=Fail(502))) as server:
        assert status_of(server) == 502
    assert server.invoice.lines[0].outcome == "HTTP 502, billed"
    assert server.invoice.lines[0].output_tokens == 10


def test_a_slow_drip_arrives_whole() -> None:
    with serve(Say("x" * 16, drip_s=0.001, latency_s=0.001)) as server:
        assert text_in_stream(CHAT, stream(server)) == "x" * 16


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("after", [None, 2])
def test_a_caller_who_goes_away_is_noticed_while_the_server_hangs(streams: bool, after: int | None) -> None:
    with serve(Say("x" * 40, then=Hang(after))) as server:
        with connection(server) as wire:
            wire.request("POST", CHAT, json.dumps({**BODIES[CHAT], "stream": streams}))
            server.wait_until(lambda: server.in_flight == 1)
            assert server.disconnects == ()
        server.wait_until(lambda: server.disconnects)
        [left] = server.disconnects
        assert left.request is server.requests[0]
        assert left.at_ns >= left.request.at_ns
        server.wait_until(lambda: server.open_connections == 0)
    line = server.invoice.lines[0]
    assert (line.output_tokens, line.outcome) == (10, "cut off")


def test_a_provider_that_stops_generating_bills_the_streamed_output() -> None:
    with serve(Say("x" * 40, then=Hang(after=3)), keeps_generating=False) as server:
        with connection(server) as wire:
            response = send(wire, CHAT, stream=True)
            seen = 0
            while seen < 3:
                seen += b"xxxx" in response.readline()
            assert server.invoice.lines[0].output_tokens == 10
        server.wait_until(lambda: server.disconnects)
    line = server.invoice.lines[0]
    assert (line.output_tokens, line.outcome) == (3, "cut off")
    assert line.cost_nanos == line.input_tokens * 1_000 + 3 * 2_000


def test_a_plain_answer_has_been_generated_whole_when_its_caller_leaves() -> None:
    with serve(Say("x" * 40, then=Hang()), keeps_generating=False) as server:
        with connection(server) as wire:
            wire.request("POST", CHAT, json.dumps(BODIES[CHAT]))
            server.wait_until(lambda: server.in_flight == 1)
        server.wait_until(lambda: server.disconnects)
    assert server.invoice.lines[0].output_tokens == 10


def test_a_provider_that_bills_at_the_end_does_not_bill_a_caller_who_disconnected() -> None:
    with FakeProviderServer(FakeProvider(bill_on_start=False), [Say(then=Hang())]) as server:
        with connection(server) as wire:
            wire.request("POST", CHAT, json.dumps(BODIES[CHAT]))
            server.wait_until(lambda: server.in_flight == 1)
        server.wait_until(lambda: server.disconnects)
    assert server.invoice.total_nanos == 0


def test_a_caller_who_stays_is_no_disconnect() -> None:
    with serve() as server:
        for path in BODIES:
            ask(server, path)
            stream(server, path)
        server.wait_until(lambda: server.open_connections == 0)
        assert server.disconnects == ()


def test_the_server_stops_though_callers_hang_idle_or_have_just_connected() -> None:
    with FakeProviderServer(script=always(Say(then=Hang()))) as server:
        callers = [HTTPConnection("127.0.0.1", port(server)) for _ in range(4)]
        for caller in callers:
            caller.request("POST", CHAT, json.dumps(BODIES[CHAT]))
        server.wait_until(lambda: server.in_flight == 4)
        idle = [socket.create_connection(("127.0.0.1", port(server))) for _ in range(20)]
    for wire in (*callers, *idle):
        wire.close()


def test_a_server_that_is_stopped_at_once_leaves_nothing() -> None:
    for _ in range(20):
        with serve():
            pass


def test_requests_keep_what_was_on_the_wire_secrets_included() -> None:
    with serve() as server:
        ask(server, temperature=0.5)
    [request] = server.requests
    assert (request.method, request.path, request.model) == ("POST", CHAT, "fake-1")
    assert request.headers["authorization"] == "Bearer sk-canary"
    assert request.body["temperature"] == 0.5
    assert json.loads(request.raw) == request.body


def test_a_connection_is_kept_for_the_next_request() -> None:
    with serve() as server, connection(server) as wire:
        for path in (*BODIES, CHAT):
            send(wire, path).read()
            send(wire, path, stream=True).read()
    assert {request.connection for request in server.requests} == {1}
    assert len(server.requests) == 8


def test_sixteen_callers_at_once_cost_sixteen_times_the_price() -> None:
    with FakeProviderServer.flat(cost_usd=0.50) as server, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: ask(server, model=f"any-{number}"), range(16)))
        assert len({answer["id"] for answer in answers}) == 16
    assert server.invoice.total_nanos == 16 * to_nanos("0.50", "cost_usd")
    for model in ("fake-1", "any-1"):
        assert server.provider.prices.worst_case_nanos(model, 10**6, 10**6) == 500_000_000


def test_many_requests_are_in_flight_at_one_time() -> None:
    with FakeProviderServer(script=always(Say(then=Hang()))) as server:
        callers = [HTTPConnection("127.0.0.1", port(server)) for _ in range(64)]
        for caller in callers:
            caller.request("POST", CHAT, json.dumps(BODIES[CHAT]))
        server.wait_until(lambda: server.in_flight == 64)
        for caller in callers:
            caller.close()
        server.wait_until(lambda: len(server.disconnects) == 64)
        assert (server.in_flight, server.most_in_flight) == (0, 64)


def test_a_model_costs_what_the_price_book_says_and_one_without_a_price_what_the_provider_asks() -> None:
    with serve(output_tokens=10) as server:
        server.provider.prices.register("large-1", Price(100, 200))
        fields = {"messages": PROMPT}
        tokens = count_input_tokens(fields)
        ask(server, model="large-1")
        ask(server, model="no-such-model")
    large, unknown = server.invoice.lines
    assert (large.model, large.cost_nanos) == ("large-1", tokens * 100_000 + 10 * 200_000)
    assert (unknown.model, unknown.cost_nanos) == ("no-such-model", tokens * 1_000 + 10 * 2_000)


def test_one_invoice_has_the_calls_in_process_and_those_over_http() -> None:
    provider = FakeProvider()
    with FakeProviderServer(provider) as server:
        provider.complete()
        ask(server)
        provider.complete()
    assert [line.number for line in provider.invoice.lines] == [1, 2, 3]


@each_api
def test_what_the_ledger_reads_from_an_answer_is_what_the_invoice_says(path: str) -> None:
    with serve("some words") as server:
        found = read_usage(ask(server, path))
    line = server.invoice.lines[0]
    assert found is not None
    assert (found.input_tokens, found.output_tokens) == (line.input_tokens, line.output_tokens)
    assert server.provider.prices.cost(found).nanos == line.cost_nanos


def test_a_script_that_is_too_short_is_answered_with_an_error_and_raised_at_the_end() -> None:
    with pytest.raises(ScriptEnded, match="the script has 1 fates"), serve("only one") as server:
        assert status_of(server) == 200
        assert status_of(server) == 500
    assert server.invoice.calls == 1


def test_a_script_that_fails_does_not_hide_the_error_of_the_test() -> None:
    with pytest.raises(KeyError, match="mine"), FakeProviderServer(script=lambda _: 1 / 0) as server:  # type: ignore[arg-type,return-value]
        assert status_of(server) == 500
        raise KeyError("mine")


def test_chance_is_the_same_for_the_same_seed_and_follows_the_odds() -> None:
    def fates(seed: int) -> list[Fate]:
        script = by_chance([(0.25, RefuseFree()), (0.25, "text")], seed=seed)
        return [script(WireRequest(number, 1, "POST", CHAT, {}, 0)) for number in range(1_000)]

    assert fates(7) == fates(7) != fates(8)
    assert all(200 < fates(7).count(fate) < 300 for fate in (RefuseFree(), "text"))
    assert 400 < fates(7).count(Say()) < 600
    with pytest.raises(ValueError):
        by_chance([(0.9, "a"), (0.2, "b")], seed=1)


def test_a_stall_adds_to_the_latency() -> None:
    assert on_the_wire(Stall(2, then=Stall(3, then=Answer(latency_s=4))), latency_s=1).latency_s == 9
    assert on_the_wire(Stall(2, then=RefuseFree()), latency_s=1).latency_s == 3
    assert on_the_wire(Say(), latency_s=1).latency_s == 1
    assert on_the_wire(Say(latency_s=0), latency_s=1).latency_s == 0


def test_models_and_token_counts_are_free() -> None:
    with serve() as server, connection(server) as wire:
        wire.request("GET", "/v1/models?limit=5")
        assert json.loads(wire.getresponse().read())["data"][0]["id"] == "fake-1"
        wire.request("POST", "/v1/messages/count_tokens", json.dumps(BODIES[MESSAGES]))
        assert json.loads(wire.getresponse().read()) == {"input_tokens": count_input_tokens(BODIES[MESSAGES])}
    assert server.invoice.calls == 0


def test_a_body_of_megabytes_in_chunks_is_read_whole() -> None:
    text = "x" * 5_000_000
    body = json.dumps({**BODIES[CHAT], "messages": [{"role": "user", "content": text}]}).encode()
    parts = [body[at : at + 70_000] for at in range(0, len(body), 70_000)]
    with serve(output_tokens=1) as server, connection(server) as wire:
        wire.request("POST", CHAT, iter(parts), {"expect": "100-continue"}, encode_chunked=True)
        assert wire.getresponse().status == 200
    assert server.requests[0].raw == body
    assert server.invoice.lines[0].input_tokens > 1_250_000


def raw(server: FakeProviderServer, data: bytes) -> bytes:
    """What comes back for these bytes, up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port(server)), timeout=30) as wire:
        wire.sendall(data)
        wire.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: wire.recv(65_536), b""))


def post(body: bytes, *headers: bytes, path: bytes = CHAT.encode()) -> bytes:
    lines = (b"POST %b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *headers)
    return b"\r\n".join((*lines, b"", body))


def fields(**changes: Any) -> bytes:
    return json.dumps({**BODIES[CHAT], **changes}).encode()


HOSTILE: list[tuple[bytes, int]] = [
    (b"GARBAGE\r\n\r\n", 400),
    (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\n\r\n", 505),
    (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nfolded: a\r\n b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nspace : a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nbare: a\nb: c\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nlong: " + b"x" * 200_000 + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\n" + b"x" * 200_000, 431),
    (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab", 400),
    (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\na", 400),
    (b"POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\n", 413),
    (b"POST / HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
    (post(b"x" * 3_000_000), 413),
]
WRONG: list[tuple[bytes, int]] = [
    (b"GET %b HTTP/1.1\r\n\r\n" % CHAT.encode(), 405),
    (b"POST /v1/models HTTP/1.1\r\n\r\n", 405),
    (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", 404),
    (post(b""), 400),
    (post(b"{"), 400),
    (post(b"[]"), 400),
    (post(b"\xff\xfe"), 400),
    (post(b"[" * 100_000), 400),
    (post(fields(temperature=float("nan"))), 400),
    (post(b'{"model": ' + b"9" * 10_000 + b"}"), 400),
    (post(fields(model=None)), 400),
    (post(fields(model="")), 400),
    (post(fields(model="x" * 300)), 400),
    (post(fields(messages=[])), 400),
    (post(fields(messages=["text"])), 400),
    (post(fields(max_tokens=0)), 400),
    (post(fields(max_tokens=-1)), 400),
    (post(fields(max_tokens=True)), 400),
    (post(fields(max_tokens="many")), 400),
    (post(fields(stream="yes")), 400),
    (post(fields(n=2)), 400),
    (post(json.dumps({"model": "m", "messages": PROMPT}).encode(), path=MESSAGES.encode()), 400),
    (post(json.dumps({"model": "m"}).encode(), path=RESPONSES.encode()), 400),
]


@pytest.mark.parametrize(("data", "status"), HOSTILE + WRONG, ids=lambda case: repr(case)[:40])
def test_a_hostile_or_wrong_request_is_refused_for_free_and_the_server_lives_on(data: bytes, status: int) -> None:
    with serve(max_body_bytes=2_000_000) as server:
        assert raw(server, data).startswith(b"HTTP/1.1 %d " % status)
        assert server.invoice.calls == 0
        assert status_of(server) == 200


@given(st.binary(max_size=300))
def test_no_bytes_bring_the_server_down(data: bytes) -> None:
    with serve() as server:
        raw(server, data + b"\r\n\r\n")
        raw(server, post(data))
        assert status_of(server) == 200


def test_an_old_client_gets_a_stream_that_ends_with_the_connection() -> None:
    data = post(fields(stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0")
    with serve("one two three") as server, socket.create_connection(("127.0.0.1", port(server)), timeout=30) as wire:
        wire.sendall(data)
        answer = b"".join(iter(lambda: wire.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert text_in_stream(CHAT, events(body)) == "one two three"


def test_a_server_has_an_address_only_while_it_runs() -> None:
    server = serve()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url
    with server:
        assert server.openai_url == server.url + "/v1"
        with pytest.raises(RuntimeError, match="running already"):
            server.__enter__()
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.url


def test_waiting_for_what_does_not_come_says_what_there_is() -> None:
    with serve() as server, pytest.raises(TimeoutError, match="0 requests, 0 in flight, 0 disconnects"):
        server.wait_until(lambda: server.requests, timeout_s=0)


async def test_an_async_caller_who_is_cancelled_closes_the_socket_and_is_seen_to() -> None:
    async def call() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port(server))
        try:
            writer.write(post(fields()))
            await asyncio.Event().wait()
        finally:
            writer.close()

    async with FakeProviderServer(script=always(Say(then=Hang()))) as server:
        task = asyncio.create_task(call())
        await server.until(lambda: server.in_flight == 1)
        task.cancel()
        await server.until(lambda: server.disconnects)
    assert server.invoice.billed_calls == 1


SDK_CALLS: dict[str, Callable[[Any, Any], tuple[str, int, int]]] = {}


def sdk_call(function: Callable[[Any, Any], tuple[str, int, int]]) -> Callable[[Any, Any], tuple[str, int, int]]:
    SDK_CALLS[function.__name__] = function
    return function


@sdk_call
def chat(openai: Any, _: Any) -> tuple[str, int, int]:
    found = openai.chat.completions.create(model="fake-1", messages=PROMPT)
    return found.choices[0].message.content, found.usage.prompt_tokens, found.usage.completion_tokens


@sdk_call
def chat_stream(openai: Any, _: Any) -> tuple[str, int, int]:
    options = {"include_usage": True}
    with openai.chat.completions.stream(model="fake-1", messages=PROMPT, stream_options=options) as found:
        whole = found.get_final_completion()
    return whole.choices[0].message.content, whole.usage.prompt_tokens, whole.usage.completion_tokens


@sdk_call
def responses(openai: Any, _: Any) -> tuple[str, int, int]:
    found = openai.responses.create(model="fake-1", input=PROMPT)
    return found.output_text, found.usage.input_tokens, found.usage.output_tokens


@sdk_call
def responses_stream(openai: Any, _: Any) -> tuple[str, int, int]:
    with openai.responses.stream(model="fake-1", input=PROMPT) as found:
        whole = found.get_final_response()
    return whole.output_text, whole.usage.input_tokens, whole.usage.output_tokens


@sdk_call
def messages(_: Any, anthropic: Any) -> tuple[str, int, int]:
    found = anthropic.messages.create(model="fake-1", messages=PROMPT, max_tokens=100)
    return found.content[0].text, found.usage.input_tokens, found.usage.output_tokens


@sdk_call
def messages_stream(_: Any, anthropic: Any) -> tuple[str, int, int]:
    with anthropic.messages.stream(model="fake-1", messages=PROMPT, max_tokens=100) as found:
        whole = found.get_final_message()
    return whole.content[0].text, whole.usage.input_tokens, whole.usage.output_tokens


@pytest.mark.parametrize("call", SDK_CALLS.values(), ids=SDK_CALLS)
@pytest.mark.parametrize("say", [Say("some words"), Say("some words", (ADD,))], ids=["text", "tools"])
def test_the_official_sdks_accept_every_field_of_an_answer(call: Callable[[Any, Any], Any], say: Say) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    options: dict[str, Any] = {"api_key": "sk", "max_retries": 0, "_strict_response_validation": True}
    with (
        serve(say) as server,
        openai.OpenAI(base_url=server.openai_url, **options) as first,
        anthropic.Anthropic(base_url=server.url, **options) as second,
    ):
        found = call(first, second)
    line = server.invoice.lines[0]
    assert found == ("some words", line.input_tokens, line.output_tokens)
