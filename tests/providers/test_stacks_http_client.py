"""http.client and the libraries on top of it, under the limits of a run: bodies, reads, failures, stops."""

from __future__ import annotations

import contextvars
import gc
import http.client
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests
import urllib3

from penstock import BudgetExceededError, CancelledError, contain
from penstock.providers import ExcessOutput, contained
from penstock.providers.stacks.gathering import Gathered, RequestTooLarge
from penstock.providers.uncontained import UncontainedRequest
from penstock.runtime import worker
from penstock.testing.provider import Cut, Endless, FakeProviderServer, Hang, RefuseFree, Say, ServerError
from tests.providers.sdk_calls import limits, outcome
from tests.providers.servers import redirecting_to
from tests.providers.stack_calls import (
    CHAT,
    ON_HTTP_CLIENT,
    Send,
    chat,
    encoded,
    over_http_client,
    over_requests,
    over_urllib,
    over_urllib3,
)

pytestmark = pytest.mark.requirement("X-5")

TEXT = "hello " * 30
HANGS = Say(TEXT, then=Hang())
HANGS_IN_THE_MIDDLE = Say(TEXT, then=Hang(after=3))


@contextmanager
def connected(server: FakeProviderServer) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    try:
        yield connection
    finally:
        connection.close()


def text_of(answer: bytes) -> str:
    """The text of a chat completion, plain or streamed."""
    if answer.startswith(b"{"):
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.splitlines() if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for each in events for choice in json.loads(each)["choices"])


def when(condition: Callable[[], object], act: Callable[[], object], server: FakeProviderServer) -> threading.Thread:
    """A thread that does `act` once the condition is true of the server."""

    def wait() -> None:
        server.wait_until(condition)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


# The request.


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
def test_what_is_refused_never_leaves(send: Send) -> None:
    with FakeProviderServer() as server, limits(server, max_cost_usd=0) as run, pytest.raises(BudgetExceededError):
        send(server.url + CHAT, chat())
    assert server.requests == ()
    assert run.balance.attempts == 0


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
def test_a_request_is_clamped_to_what_the_budget_buys_and_wants_no_compression(send: Send) -> None:
    with FakeProviderServer() as server, limits(server, max_cost_usd=0.001) as run:
        send(server.url + CHAT, chat(max_tokens=100_000))
    [sent] = server.requests
    assert sent.fields["max_tokens"] < 100
    assert sent.headers["accept-encoding"] == "identity"
    assert sent.headers["content-length"] == str(len(sent.raw))
    assert run.balance.spent_nanos == server.invoice.total_nanos


BODIES: dict[str, Callable[[], Any]] = {
    "bytes": lambda: encoded(chat()),
    "bytearray": lambda: bytearray(encoded(chat())),
    "memoryview": lambda: memoryview(encoded(chat())),
    "text": lambda: encoded(chat()).decode(),
    "file": lambda: io.BytesIO(encoded(chat())),
    "text file": lambda: io.StringIO(encoded(chat()).decode()),
    "generator": lambda: (bytes([byte]) for byte in encoded(chat())),
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_kind_of_body_is_read_and_counted(kind: str) -> None:
    body = BODIES[kind]
    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection.request("POST", CHAT, body())
        assert text_of(connection.getresponse().read())
        if kind != "text file":
            with urllib3.PoolManager() as pool:
                assert text_of(pool.request("POST", server.url + CHAT, body=body()).data)
            with requests.Session() as session:
                assert session.post(server.url + CHAT, data=body()).status_code == 200
    assert run.balance.steps == len(server.requests) >= 1
    assert run.balance.spent_nanos == server.invoice.total_nanos


def test_a_request_that_is_written_piece_by_piece_is_counted() -> None:
    body = encoded(chat())
    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", len(body))
        connection.putheader("X-Several", "one", "two")
        connection.endheaders()
        for at in range(0, len(body), 10):
            assert server.requests == ()
            connection.send(body[at : at + 10])
        assert text_of(connection.getresponse().read())
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0
    assert "one" in server.requests[0].headers["x-several"]


def begin(connection: http.client.HTTPConnection, path: str, length: int) -> None:
    """Begin a request that a test continues in a block."""
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", length)


@pytest.mark.parametrize("is_watching", [False, True], ids=["no block", "a block elsewhere"])
def test_a_request_whose_headers_are_sent_in_a_block_belongs_to_it(is_watching: bool) -> None:
    body = encoded(chat(max_tokens=100_000))
    with FakeProviderServer() as server, connected(server) as connection, ExitStack() as stack:
        if is_watching:
            contextvars.copy_context().run(stack.enter_context, contained(stack.enter_context(contain())))
        begin(connection, CHAT, len(body))
        with limits(server, max_cost_usd=0.001) as run:
            connection.endheaders()
            connection.send(body)
            assert text_of(connection.getresponse().read())
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0
    assert server.requests[0].fields["max_tokens"] < 100


@pytest.mark.parametrize(("path", "reported"), [(CHAT, 1), ("/v1/other", 0)], ids=["model", "other"])
def test_a_request_whose_body_alone_is_sent_in_a_block_is_reported(path: str, reported: int) -> None:
    body = encoded(chat())
    with FakeProviderServer() as server, connected(server) as connection:
        begin(connection, path, len(body))
        connection.endheaders()
        with limits(server) as run, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for at in range(0, len(body), 10):
                connection.send(body[at : at + 10])
            assert connection.getresponse().read()
            assert run.uncontained_requests == len(warned) == reported
    assert server.requests[0].raw == body
    assert run.balance.attempts == 0


def test_a_strict_run_refuses_the_body_of_a_request_that_was_begun_before_it() -> None:
    body = encoded(chat())
    with FakeProviderServer() as server, connected(server) as connection:
        begin(connection, CHAT, len(body))
        connection.endheaders()
        with limits(server, strict=True), pytest.raises(UncontainedRequest, match="around the libraries"):
            connection.send(body)
        connection.close()
        assert server.invoice.lines == ()


def test_a_request_that_was_sent_before_a_block_is_not_reported_in_it() -> None:
    body = encoded(chat())
    with FakeProviderServer() as server, connected(server) as connection:
        begin(connection, CHAT, len(body))
        connection.endheaders(body)
        with limits(server) as run, warnings.catch_warnings():
            warnings.simplefilter("error")
            assert connection.getresponse().read()
            connection.close()
            assert run.uncontained_requests == 0


BEFORE_THE_HOOKS = """
import http.client, sys, warnings

url, path, sends_headers = sys.argv[1:]
body = b'{"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hello"}]}'
connection = http.client.HTTPConnection(url.removeprefix("http://"))
connection.putrequest("POST", path)
connection.putheader("Content-Length", len(body))
if sends_headers == "before":
    connection.endheaders()
from penstock import contain
from penstock.providers import contained

warnings.simplefilter("ignore")
with contain(max_cost_usd=1) as run, contained(run):
    if sends_headers == "inside":
        connection.endheaders()
    connection.send(body)
    connection.getresponse().read()
    print(run.balance.attempts, run.uncontained_requests)
"""


@pytest.mark.parametrize(
    ("sends_headers", "path", "expected"),
    [("inside", CHAT, "1 0"), ("inside", "/other", "0 0"), ("before", CHAT, "0 1")],
)
def test_a_request_begun_before_the_first_block_of_a_process_is_counted_or_reported(
    sends_headers: str, path: str, expected: str
) -> None:
    with FakeProviderServer() as server:
        arguments = [sys.executable, "-c", BEFORE_THE_HOOKS, server.url, path, sends_headers]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (ended.stdout.strip(), ended.returncode) == (expected, 0), ended.stderr
        assert len(server.requests) == 1


def test_a_request_that_expects_100_continue_is_counted() -> None:
    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection.request("POST", CHAT, encoded(chat()), {"Expect": "100-continue"})
        assert text_of(connection.getresponse().read())
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models", None),
        ("HEAD", "/v1/models", None),
        ("POST", CHAT, b"not JSON"),
        ("POST", CHAT, None),
        ("POST", "/v1/messages", encoded({"channel": "general", "text": "hello"})),
        ("POST", "/elsewhere", (b"a generator" for _ in range(3))),
    ],
)
def test_a_request_that_is_not_for_a_model_passes_unchanged(method: str, path: str, body: Any) -> None:
    with FakeProviderServer() as server, limits(server, max_cost_usd=0) as run, connected(server) as connection:
        connection.request(method, path, body)
        connection.getresponse().read()
    assert (server.requests[0].method, server.requests[0].path) == (method, path)
    if isinstance(body, bytes):
        assert server.requests[0].raw == body
    assert run.balance.attempts == 0


def test_a_body_without_a_bound_is_refused_before_it_is_kept() -> None:
    gathered = Gathered(max_bytes=10)
    gathered.add(b"0123456789")
    with pytest.raises(RequestTooLarge, match="larger than 10 bytes"):
        gathered.add(b"0")


def test_a_redirect_is_free_and_its_target_is_contained() -> None:
    with FakeProviderServer() as server, redirecting_to(server.url) as elsewhere, limits(server) as run:
        assert text_of(over_requests(elsewhere + CHAT, chat()))
    assert (run.balance.attempts, run.balance.steps) == (2, 1)
    assert run.balance.spent_nanos == server.invoice.total_nanos > 0
    assert run.balance.unresolved_nanos == 0


# The response.


def read_by(response: Any, how: str) -> bytes:
    """Everything in the response, read in that way."""
    match how:
        case "read":
            return bytes(response.read())
        case "read(n)":
            return b"".join(iter(lambda: response.read(7), b""))
        case "read1":
            return b"".join(iter(lambda: response.read1(1_000), b""))
        case "readinto":
            buffer, found = bytearray(100), bytearray()
            while count := response.readinto(buffer):
                found += buffer[:count]
            return bytes(found)
        case "readline":
            return b"".join(iter(response.readline, b""))
        case "peek":
            found = bytearray()
            while ahead := response.peek(10):
                found += response.read(len(ahead))
            return bytes(found)
    return b"".join(response)


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", ["read", "read(n)", "read1", "readinto", "readline", "peek", "iteration"])
def test_every_way_to_read_gets_the_answer_and_frees_the_connection(how: str, streams: bool) -> None:
    with FakeProviderServer(script=lambda _: TEXT) as server, limits(server) as run, connected(server) as connection:
        for _ in range(2):
            connection.request("POST", CHAT, encoded(chat(stream=streams)))
            with connection.getresponse() as response:
                answer = read_by(response, how)
            assert text_of(answer) == TEXT
            assert b'"prompt_tokens"' not in answer or not streams  # the usage was requested by us alone
    assert {request.connection for request in server.requests} == {1}
    assert run.balance.spent_nanos == server.invoice.total_nanos
    assert run.balance.steps == 2


@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("how", ["data", "read", "read(n)", "read1", "readinto", "stream", "read_chunked", "lines"])
def test_every_way_of_urllib3_to_read_gets_the_answer_and_frees_the_connection(how: str, streams: bool) -> None:
    if how == "read_chunked" and not streams:
        pytest.skip("for chunked responses")
    with (
        FakeProviderServer(script=lambda _: TEXT) as server,
        limits(server) as run,
        urllib3.PoolManager() as pool,
    ):
        for _ in range(2):
            response: Any = pool.request(
                "POST", server.url + CHAT, body=encoded(chat(stream=streams)), preload_content=False
            )
            match how:
                case "data":
                    answer = response.data
                case "stream":
                    answer = b"".join(response.stream(50))
                case "read_chunked":
                    answer = b"".join(response.read_chunked())
                case "lines":
                    response.auto_close = False  # or urllib3 closes it before the reader has seen the end
                    with io.BufferedReader(response, 64) as lines:
                        answer = b"".join(lines)
                case _:
                    answer = read_by(response, how)
            assert text_of(answer) == TEXT
    assert {request.connection for request in server.requests} == {1}
    assert run.balance.spent_nanos == server.invoice.total_nanos


def test_the_events_of_a_stream_arrive_one_by_one() -> None:
    with (
        FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server,
        limits(server),
        requests.Session() as session,
        session.post(server.url + CHAT, json=chat(stream=True), stream=True) as response,
    ):
        lines = response.iter_lines(chunk_size=None)
        assert next(lines).startswith(b"data: ")  # the provider sends no more than three events


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
@pytest.mark.parametrize("status", [401, 429, 500])
def test_an_error_status_reaches_the_caller_and_is_free(send: Send, status: int) -> None:
    with FakeProviderServer(script=[RefuseFree(status)]) as server, limits(server) as run:
        assert f"the script says {status}".encode() in send(server.url + CHAT, chat())
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == run.balance.held_nanos == 0


def test_the_connection_of_an_error_answer_is_used_again() -> None:
    with FakeProviderServer(script=[RefuseFree(429), "hello"]) as server, limits(server), urllib3.PoolManager() as pool:
        url, body = server.url + CHAT, encoded(chat())
        assert [pool.request("POST", url, body=body, retries=False).status for _ in range(2)] == [429, 200]
    assert {request.connection for request in server.requests} == {1}


def test_each_attempt_of_urllib3_itself_is_a_call(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "urllib3.connectionpool")  # its warning keeps the error, and so the socket
    retries = urllib3.Retry(3, allowed_methods=None, status_forcelist=[503], backoff_factor=0)
    script = [ServerError(503), Say(TEXT, then=Cut()), "hello"]
    with (
        FakeProviderServer(script=script) as server,
        limits(server) as run,
        urllib3.PoolManager(retries=retries) as pool,
    ):
        assert pool.request("POST", server.url + CHAT, body=encoded(chat())).status == 200
    assert run.balance.attempts == len(server.requests) == 3
    assert run.balance.spent_nanos + run.balance.unresolved_nanos >= server.invoice.total_nanos
    assert run.balance.unresolved_nanos > 0


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
def test_a_connection_that_is_refused_is_free(send: Send) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    with FakeProviderServer() as server, limits(server) as run:
        error = outcome(lambda: send(closed + CHAT, chat()))
    assert isinstance(error, OSError | urllib3.exceptions.HTTPError)
    assert run.balance.attempts == 1
    assert run.balance.spent_nanos == run.balance.unresolved_nanos == run.balance.held_nanos == 0


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("after", [None, 3], ids=["before the headers", "in the middle"])
def test_a_server_that_hangs_up_leaves_the_bill_open(send: Send, streams: bool, after: int | None) -> None:
    with FakeProviderServer(script=[Say(TEXT, then=Cut(after))]) as server, limits(server) as run:
        error = outcome(lambda: send(server.url + CHAT, chat(stream=streams)))
    network = OSError | http.client.HTTPException | urllib3.exceptions.HTTPError
    assert isinstance(error, network)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0
    assert run.balance.held_nanos == 0


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("endless", [Endless(), Endless("line"), Endless("padding"), Endless(compressed=True)], ids=str)
def test_an_endless_answer_is_cut(send: Send, streams: bool, endless: Endless) -> None:
    with FakeProviderServer(script=[Say(TEXT, then=endless)]) as server, limits(server) as run:
        with pytest.raises(ExcessOutput):
            send(server.url + CHAT, chat(stream=streams))
        server.wait_until(lambda: server.disconnects)
    assert run.balance.spent_nanos + run.balance.unresolved_nanos >= server.invoice.total_nanos


def test_an_endless_error_answer_is_cut() -> None:
    with FakeProviderServer(script=[Say(TEXT, then=Endless("padding", status=500))]) as server, limits(server):
        with pytest.raises(Exception, match="larger than"):
            over_http_client(server.url + CHAT, chat())
        server.wait_until(lambda: server.disconnects)


def test_a_connection_that_was_cut_is_not_used_again() -> None:
    script = [Say(TEXT, then=Endless()), "hello"]
    with FakeProviderServer(script=script) as server, limits(server), urllib3.PoolManager() as pool:
        url, body = server.url + CHAT, encoded(chat())
        with pytest.raises(ExcessOutput):
            pool.request("POST", url, body=body, retries=False)
        assert pool.request("POST", url, body=body, retries=False).status == 200
    assert [request.connection for request in server.requests] == [1, 2]


def test_a_response_that_is_closed_early_is_unresolved_and_its_connection_is_broken() -> None:
    with (
        FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server,
        limits(server) as run,
        connected(server) as connection,
    ):
        connection.request("POST", CHAT, encoded(chat(stream=True)))
        response = connection.getresponse()
        assert response.read1(10)
        response.close()
        server.wait_until(lambda: server.disconnects)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


# Connections that write to their sockets themselves.


class WritesItself(http.client.HTTPConnection):
    """A connection with a `send` of its own."""

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        self.sock.sendall(data)


class WritesAndReadsItself(WritesItself):
    def getresponse(self) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self.sock, method="POST")
        response.begin()
        return response


@pytest.mark.parametrize("kind", [WritesItself, WritesAndReadsItself])
@pytest.mark.parametrize(("path", "reported"), [(CHAT, 1), ("/v1/other", 0)], ids=["model", "other"])
def test_a_connection_that_writes_to_its_socket_itself_is_reported(
    kind: type[http.client.HTTPConnection], path: str, reported: int
) -> None:
    with FakeProviderServer() as server, limits(server) as run, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        connection = kind(server.url.removeprefix("http://"))
        connection.request("POST", path, encoded(chat()))
        assert connection.getresponse().read()
        connection.close()
        assert run.uncontained_requests == len(warned) == len(server.invoice.lines) == reported
        assert run.balance.spent_usd == 0


def test_a_request_that_was_never_sent_is_not_reported() -> None:
    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection.putrequest("POST", CHAT)
        with pytest.raises(ValueError, match="Invalid header"):
            connection.putheader("authorization", "a key\nwith a line break")
        connection.close()
        assert run.uncontained_requests == 0


# Responses that are never read.


def test_the_hold_of_a_response_that_is_never_read_becomes_unresolved() -> None:
    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection.request("POST", CHAT, encoded(chat()))
        response: Any = connection.getresponse()
        assert run.balance.held_nanos > 0
        connection.close()
        del response
        gc.collect()
        server.wait_until(lambda: run.balance.held_nanos == 0)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
def test_the_hold_of_a_request_without_a_response_becomes_unresolved(closes: bool) -> None:
    with FakeProviderServer() as server, limits(server) as run:
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as wire:
            connection: Any = http.client.HTTPConnection("127.0.0.1")
            connection.sock = wire
            connection.request("POST", CHAT, encoded(chat()))
            assert run.balance.held_nanos > 0
            if closes:
                connection.close()
            del connection
            gc.collect()
            assert run.balance.held_nanos == 0
        server.wait_until(lambda: len(server.requests) == 1)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


# Stops.


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
def test_an_abort_frees_a_caller_that_waits_for_headers(send: Send) -> None:
    with FakeProviderServer(script=[HANGS]) as server, limits(server) as run:
        aborting = when(lambda: len(server.requests) == 1, lambda: run.abort("enough"), server)
        with pytest.raises(CancelledError, match="enough"):
            send(server.url + CHAT, chat())
        aborting.join()
        server.wait_until(lambda: server.disconnects)
        server.wait_until(lambda: worker.busy_workers() == 0)
    assert run.balance.held_nanos == 0
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.parametrize("send", [over_urllib3, over_requests, over_http_client, over_urllib])
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "stream"])
def test_an_abort_frees_a_caller_that_reads(send: Send, streams: bool) -> None:
    with FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server, limits(server) as run, _answered() as answered:
        aborting = when(lambda: answered.is_set() and worker.busy_workers(), lambda: run.abort("enough"), server)
        with pytest.raises(CancelledError, match="enough"):
            send(server.url + CHAT, chat(stream=streams))
        aborting.join()
        server.wait_until(lambda: server.disconnects)
        server.wait_until(lambda: worker.busy_workers() == 0)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
@pytest.mark.parametrize("fate", [HANGS, HANGS_IN_THE_MIDDLE], ids=["before the answer", "in the middle"])
def test_the_deadline_of_the_run_frees_a_caller(send: Send, fate: Say) -> None:
    with FakeProviderServer(script=[fate]) as server, limits(server, timeout_s=0.2):
        with pytest.raises(BudgetExceededError, match="timeout"):
            send(server.url + CHAT, chat(stream=True))
        server.wait_until(lambda: server.disconnects)
        server.wait_until(lambda: worker.busy_workers() == 0)
    assert len(server.requests) == 1


def test_an_abort_frees_a_caller_that_connects_and_nothing_is_sent() -> None:
    connecting, may_connect = threading.Event(), threading.Event()

    def connect(*address: Any) -> socket.socket:
        connecting.set()
        may_connect.wait()
        return socket.create_connection(*address)

    with FakeProviderServer() as server, limits(server) as run, connected(server) as connection:
        connection._create_connection = connect  # type: ignore[attr-defined]
        aborting = when(connecting.is_set, lambda: run.abort("enough"), server)
        with pytest.raises(CancelledError, match="enough"):
            connection.request("POST", CHAT, encoded(chat()))
        aborting.join()
        may_connect.set()
        server.wait_until(lambda: worker.busy_workers() == 0)
    assert server.requests == ()
    assert run.balance.held_nanos == 0


def test_an_abort_closes_the_socket_of_a_response_that_is_not_being_read() -> None:
    with (
        FakeProviderServer(script=[HANGS_IN_THE_MIDDLE]) as server,
        limits(server) as run,
        connected(server) as connection,
    ):
        connection.request("POST", CHAT, encoded(chat(stream=True)))
        response = connection.getresponse()
        assert response.readline()
        run.abort("enough")
        server.wait_until(lambda: server.disconnects)
        with pytest.raises(CancelledError, match="enough"):
            response.read()


@pytest.mark.parametrize("send", ON_HTTP_CLIENT)
def test_inline_calls_stay_in_the_thread_that_makes_them(send: Send) -> None:
    with FakeProviderServer() as server, limits(server, sync_calls="inline") as run:
        before = threading.active_count()
        assert text_of(send(server.url + CHAT, chat()))
        assert threading.active_count() <= before
    assert run.balance.spent_nanos == server.invoice.total_nanos


def test_the_timeout_of_the_client_itself_leaves_the_bill_open() -> None:
    with (
        FakeProviderServer(script=[HANGS]) as server,
        limits(server) as run,
        requests.Session() as session,
        pytest.raises(requests.ReadTimeout),
    ):
        session.post(server.url + CHAT, json=chat(), timeout=0.2)
    assert run.balance.unresolved_nanos >= server.invoice.total_nanos > 0


def test_without_a_scope_requests_pass_unchanged() -> None:
    with (
        FakeProviderServer() as server,
        contain() as run,
        contained(run),
        pytest.warns(RuntimeWarning, match="belongs to no run"),
    ):
        contextvars.Context().run(over_urllib3, server.url + CHAT, chat(max_tokens=7))
    assert server.requests[0].raw == encoded(chat(max_tokens=7))
    assert run.balance.attempts == 0


@contextmanager
def _answered() -> Iterator[threading.Event]:
    """Set when a response has begun: a caller that waits after that reads its body."""
    answered = threading.Event()
    original = http.client.HTTPConnection.getresponse

    def getresponse(connection: Any) -> Any:
        response = original(connection)
        answered.set()
        return response

    http.client.HTTPConnection.getresponse = getresponse  # type: ignore[method-assign]
    try:
        yield answered
    finally:
        http.client.HTTPConnection.getresponse = original  # type: ignore[method-assign]
