"""INV 24: a client that is slow, hostile or unknown cannot starve others.

A real server process, attacked from 127.0.0.1 by threads that send what was made before, so that the attack costs this
process little; a bystander at 127.0.0.2 makes ordinary requests. Rounds with and without the attack alternate, because
this machine has other work too, and the best pair counts: noise makes a round slower, never faster.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.forked import Program
from tests.soak import SOAK, scaled

pytestmark = [pytest.mark.reliability, pytest.mark.usefixtures("forks")]

SECRET = "ann-0123456789abcdef"
OTHER = "bob-0123456789abcdef"
BYSTANDER = "127.0.0.2"
REQUESTS = scaled(30, soak=400)
ROUNDS = 12
"""Most pairs that are measured; the first fair one is enough."""
IDLE = 2_000
RATIO = 3.0
PERCENTILE = 0.99 if SOAK else 0.95
"""Of few requests, the highest of all is only noise."""
PATIENCE_S = 20
HEAD = "Host: 127.0.0.1\r\nContent-Type: application/json\r\n"
TOKEN = f"Authorization: Bearer {SECRET}\r\n"
TINY = b"1\r\nx\r\n" * 5_000
BLOCK = b"x" * 65_536
AHEAD = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1_000
CHAT = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "hi"}]}).encode()
GRAPH = {
    "nodes": [
        {"id": "start", "type": "chat-start", "data": {}},
        {"id": "out", "type": "output", "data": {}},
    ],
    "edges": [{"id": "e", "source": "start", "target": "out", "data": {"channel": "flow"}}],
}

Address = tuple[str, int]


class Attack:
    """Threads that repeat an attack until it is over."""

    def __init__(self, address: Address, once: Callable[[socket.socket, Attack], None], clients: int) -> None:
        self._address = address
        self._once = once
        self.is_over = threading.Event()
        self.sent: list[int] = []
        """Bytes that each connection could send."""
        self._threads = [threading.Thread(target=self._repeat, daemon=True) for _ in range(clients)]

    def __enter__(self) -> Attack:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _repeat(self) -> None:
        while not self.is_over.is_set():
            with suppress(OSError), connected(self._address) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(BLOCK))
                client.settimeout(1.0)
                self._once(client, self)

    def send_on(self, client: socket.socket, head: bytes, piece: bytes) -> None:
        """Send the piece again and again until the server closes the connection."""
        client.sendall(head)
        sent = 0
        try:
            while not self.is_over.is_set():
                client.sendall(piece)
                sent += len(piece)
        finally:
            self.sent.append(sent)


def chunks_of_a_stranger(client: socket.socket, attack: Attack) -> None:
    attack.send_on(client, f"POST /api/runs HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode(), TINY)


def chunks_of_a_user(client: socket.socket, attack: Attack) -> None:
    token = f"Authorization: Bearer {OTHER}\r\n"
    attack.send_on(client, f"POST /api/runs HTTP/1.1\r\n{HEAD}{token}Transfer-Encoding: chunked\r\n\r\n".encode(), TINY)


def refused_body_that_goes_on(client: socket.socket, attack: Attack) -> None:
    attack.send_on(client, f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Length: 12000000000\r\n\r\n".encode(), BLOCK)


def refused_chunks_that_go_on(client: socket.socket, attack: Attack) -> None:
    head = f"POST /api/runs HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode()
    attack.send_on(client, head, b"10000\r\n" + BLOCK + b"\r\n")


def endless_head(client: socket.socket, attack: Attack) -> None:
    attack.send_on(client, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: ", BLOCK)


def requests_sent_ahead(client: socket.socket, attack: Attack) -> None:
    """Thousands of requests before the first response, which is not read either."""
    attack.send_on(client, b"", AHEAD)


def guessed_tokens(client: socket.socket, attack: Attack) -> None:
    request = f"GET /api/me HTTP/1.1\r\n{HEAD}Authorization: Bearer guess-0123456789abcdef\r\n\r\n".encode()
    while not attack.is_over.is_set():
        client.sendall(request)
        client.recv(65_536)


FLOODS = (
    chunks_of_a_stranger,
    chunks_of_a_user,
    refused_body_that_goes_on,
    refused_chunks_that_go_on,
    endless_head,
    requests_sent_ahead,
    guessed_tokens,
)


def idle_connections(address: Address, addresses: int) -> ExitStack:
    """As many connections as the server takes, from that many addresses, and nothing sent."""
    opened = ExitStack()
    for number in range(IDLE):
        opened.enter_context(connected(address, f"127.0.1.{1 + number % addresses}"))
    return opened


def slow_heads(address: Address) -> ExitStack:
    """Two hundred clients that send the head of a request byte by byte."""
    opened = ExitStack()
    clients = [opened.enter_context(connected(address)) for _ in range(200)]
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.05):
            for client in clients:
                with suppress(OSError):
                    client.send(b"G")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    opened.callback(thread.join)
    opened.callback(over.set)
    return opened


@contextmanager
def connected(address: Address, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    with closing(socket.create_connection(address, timeout=PATIENCE_S, source_address=(source, 0))) as client:
        yield client


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Address, Program]]:
    (tmp_path / "tokens").write_text(f"ann:user:{SECRET}\nbob:user:{OTHER}\n")
    (tmp_path / "echo.json").write_text(json.dumps(GRAPH))
    options = ["--port", "0", "--db", "memory:", "--tokens", str(tmp_path / "tokens"), "--allow-host", "127.0.0.2"]
    with Program(["-m", "penstock.cli", "serve", str(tmp_path / "echo.json"), *options]) as started:
        try:
            first = started.stdout.readline()
            assert first.startswith("Penstock is listening on "), first + started.stderr.read()
            yield ("127.0.0.1", int(first.split(":")[-1])), started
        finally:
            started.kill()


def bystander(address: Address) -> float:
    """A high percentile of how long ordinary requests take, in seconds."""
    return statistics.quantiles(times_of_a_bystander(address), n=100)[round(PERCENTILE * 100) - 1]


def times_of_a_bystander(address: Address) -> list[float]:
    """How long each of a number of ordinary requests takes, in seconds."""
    took: list[float] = []
    headers = {"Authorization": f"Bearer {SECRET}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(*address, timeout=PATIENCE_S, source_address=(BYSTANDER, 0))
    with closing(connection):
        for _ in range(REQUESTS):
            for method, path, body in (("GET", "/health", None), ("POST", "/v1/chat/completions", CHAT)):
                began = time.perf_counter()
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                answer.read()
                took.append(time.perf_counter() - began)
                assert answer.status == 200, answer.status
    return took


def assert_fair(address: Address, attack: Callable[[], ExitStack | Attack]) -> None:
    bystander(address)  # whatever is loaded on first use
    pairs = []
    for _ in range(ROUNDS):
        without = bystander(address)
        with attack():
            pairs.append((bystander(address) / without, without))
        if min(pairs)[0] <= RATIO:
            return
    raise AssertionError(f"with the attack, requests take {[round(ratio, 1) for ratio, _ in pairs]} times as long")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_does_not_starve_others(
    server: tuple[Address, Program], flood: Callable[[socket.socket, Attack], None]
) -> None:
    address, program = server
    assert_fair(address, lambda: Attack(address, flood, clients=2))
    program.kill()
    assert "Traceback" not in program.stderr.read()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("addresses", [1, 4])
def test_idle_connections_do_not_keep_others_out(server: tuple[Address, Program], addresses: int) -> None:
    """As many as the server takes, and several addresses together have no more than their shares."""
    address, _ = server
    assert_fair(address, lambda: idle_connections(address, addresses))


@pytest.mark.timeout(900)
def test_slow_heads_do_not_starve_others(server: tuple[Address, Program]) -> None:
    address, _ = server
    assert_fair(address, lambda: slow_heads(address))


def test_a_refused_client_is_disconnected_after_a_bounded_number_of_bytes(server: tuple[Address, Program]) -> None:
    address, _ = server
    for flood in (refused_body_that_goes_on, refused_chunks_that_go_on, chunks_of_a_stranger, endless_head):
        attack = Attack(address, flood, clients=0)
        with connected(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(BLOCK))
            with pytest.raises(OSError, match=r"reset|pipe|abort"):
                flood(client, attack)
        # 1 MiB is read after the refusal; the rest is what the buffers of both sockets hold.
        assert attack.sent[0] < 16 * 1024 * 1024, (flood.__name__, attack.sent)


def test_requests_that_are_sent_ahead_do_not_fill_the_memory(server: tuple[Address, Program]) -> None:
    """Their responses are read, so that nothing else makes the server stop reading."""
    address, program = server
    bystander(address)  # whatever is loaded on first use
    before = memory_of(program)
    with connected(address) as client:
        reader = threading.Thread(target=read_all, args=[client])
        reader.start()
        with suppress(OSError):
            client.sendall(AHEAD * 60)  # 2.4 MB, 60,000 requests
            client.shutdown(socket.SHUT_WR)
        reader.join(PATIENCE_S)
    assert memory_of(program) - before < 16 * 1024 * 1024


def read_all(client: socket.socket) -> None:
    with suppress(OSError):
        while client.recv(65_536):
            pass


def memory_of(program: Program) -> int:
    """Resident memory of a process, in bytes."""
    pages = Path(f"/proc/{program.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (f"POST /api/runs HTTP/1.1\r\n{HEAD}Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (f"POST /api/runs HTTP/1.1\r\n{HEAD}{TOKEN}Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (f"POST /api/runs HTTP/1.1\r\n{HEAD}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
        ("nonsense\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\n{HEAD}X: {'x' * 200_000}\r\n\r\n", 431),
    ],
)
def test_a_malformed_request_is_answered_and_the_connection_closed(
    server: tuple[Address, Program], request_bytes: str, status: int
) -> None:
    address, program = server
    with connected(address) as client:
        with suppress(OSError):
            client.sendall(request_bytes.encode())
        answer = b""
        with suppress(ConnectionResetError):
            while piece := client.recv(65_536):
                answer += piece
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["code"]
    assert bystander(address) > 0
    program.kill()
    assert "Traceback" not in program.stderr.read()
