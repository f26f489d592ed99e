"""WebSockets to model APIs, which are not contained: each is reported, or refused before its handshake."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hashlib
import socket
import threading
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import httpx
import httpx2
import openai
import pytest
import websocket
import websockets.asyncio.client
import websockets.sync.client

from penstock import CancelledError, contain, contained
from penstock.errors import RunEnded
from penstock.providers import UncontainedRequest
from penstock.providers.current import already_held
from tests.providers.sdk_calls import outcome

pytestmark = pytest.mark.requirement("X-11")

Open = Callable[[str], Any]
PATH = "/v1/responses"

UPGRADE = {
    "connection": "upgrade",
    "upgrade": "WebSocket",
    "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA==",
    "sec-websocket-version": "13",
}


class Handshakes:
    """A server that answers the handshake of a WebSocket, and then says goodbye."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        """The paths at which a WebSocket was opened."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    @contextmanager
    def running(self) -> Iterator[Handshakes]:
        self._thread.start()
        try:
            yield self
        finally:
            self._listening.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                wire, _ = self._listening.accept()
            except OSError:
                return
            with wire:
                self._answer(wire)

    def _answer(self, wire: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (data := wire.recv(65_536)):  # refused after it had connected
                return
            head += data
        lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        self.paths.append(lines[0].split()[1])
        digest = hashlib.sha1(fields["sec-websocket-key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
        wire.sendall(
            b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
            b"sec-websocket-accept: " + base64.b64encode(digest) + b"\r\n\r\n" + b"\x88\x02\x03\xe8"
        )
        wire.recv(65_536)


@pytest.fixture
def server() -> Iterator[Handshakes]:
    with Handshakes().running() as running:
        yield running


# Ways to open one.


def with_websockets(address: str) -> None:
    with websockets.sync.client.connect(f"ws://{address}", proxy=None):
        pass


async def with_websockets_async(address: str) -> None:
    async with websockets.asyncio.client.connect(f"ws://{address}", proxy=None):
        pass


async def with_the_legacy_client_of_websockets(address: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from websockets.legacy.client import connect
    async with connect(f"ws://{address}"):
        pass


def with_websocket_client(address: str) -> None:
    websocket.create_connection(f"ws://{address}", timeout=10).close()


async def with_aiohttp(address: str) -> None:
    async with aiohttp.ClientSession() as session, session.ws_connect(f"ws://{address}"):
        pass


def with_httpx2(address: str) -> None:
    with httpx2.Client(verify=False) as client, client.stream("GET", f"http://{address}", headers=UPGRADE) as response:
        assert response.status_code == 101


async def with_httpx_async(address: str) -> None:
    async with (
        httpx.AsyncClient(verify=False) as client,
        client.stream("GET", f"http://{address}", headers=UPGRADE) as response,
    ):
        assert response.status_code == 101


WAYS = [
    with_websockets,
    with_websockets_async,
    with_the_legacy_client_of_websockets,
    with_websocket_client,
    with_aiohttp,
    with_httpx2,
    with_httpx_async,
]


def opened(way: Open, server: Handshakes, path: str = PATH) -> Any:
    """Open a WebSocket and close it; return the error, if there is one."""

    def work() -> Any:
        found = way(server.address + path)
        return asyncio.run(found) if asyncio.iscoroutine(found) else found

    return outcome(work)


def reported() -> Any:
    return pytest.warns(RuntimeWarning, match=r"to 127\.0\.0\.1 is sent over a WebSocket and is not limited")


@pytest.mark.parametrize("way", WAYS)
def test_a_websocket_to_a_model_api_is_reported(way: Open, server: Handshakes) -> None:
    with contain(max_cost_usd=1) as run, contained(run), reported():
        assert opened(way, server) is None
    assert run.uncontained_requests == len(server.paths) == 1
    assert "1 uncontained request to 127.0.0.1" in run.explain()


@pytest.mark.parametrize("way", WAYS)
def test_a_strict_run_refuses_a_websocket_to_a_model_api(way: Open, server: Handshakes) -> None:
    with contain(strict=True) as run, contained(run):
        refused = opened(way, server)
    assert isinstance(refused, UncontainedRequest)
    assert refused.run_id == run.run_id
    assert "send it as a plain HTTP request" in str(refused)
    assert server.paths == []


@pytest.mark.parametrize("way", WAYS)
def test_a_websocket_to_another_service_is_not_reported(way: Open, server: Handshakes) -> None:
    with contain(strict=True) as run, contained(run), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert opened(way, server, "/socket/v1/responses-of-a-survey") is None
    assert (run.uncontained_requests, len(server.paths)) == (0, 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_websocket_outside_of_a_block_is_reported_while_a_block_is_open(way: Open, server: Handshakes) -> None:
    with contain(adopt=True, max_cost_usd=1) as run, contained(run), reported():
        assert contextvars.Context().run(opened, way, server) is None
    assert run.uncontained_requests == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert opened(way, server) is None
    assert (run.uncontained_requests, len(server.paths)) == (1, 2)


@pytest.mark.parametrize("way", WAYS)
def test_a_websocket_is_refused_once_its_run_was_stopped_or_has_ended(way: Open, server: Handshakes) -> None:
    outcomes: list[Any] = []
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (ended.wait(60), outcomes.append(opened(way, server))))
    with contain(max_cost_usd=1) as run, contained(run, on_stop="ignore"):
        thread.start()
        run.abort("enough")
        outcomes.append(opened(way, server))
    ended.set()
    thread.join()
    stopped, late = outcomes
    assert isinstance(stopped, CancelledError)
    assert isinstance(late, CancelledError)  # the stop of the run, as for any other request
    with contain(max_cost_usd=1) as run:
        block = contained(run)
        with block:
            context = contextvars.copy_context()
    assert isinstance(context.run(opened, way, server), RunEnded)
    assert (server.paths, run.uncontained_requests) == ([], 0)


def test_a_websocket_whose_cost_the_caller_holds_is_not_reported(server: Handshakes) -> None:
    with contain(strict=True) as run, contained(run), already_held():
        assert opened(with_websockets, server) is None
    assert run.uncontained_requests == 0


# The official client, which opens its own.


def with_responses(client: openai.OpenAI) -> None:
    with client.responses.connect():
        pass


def with_realtime(client: openai.OpenAI) -> None:
    with client.realtime.connect(model="fake-1"):
        pass


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")  # their own
@pytest.mark.parametrize("way", [with_responses, with_realtime])
def test_a_session_of_the_official_client_is_reported_or_refused(
    way: Callable[[openai.OpenAI], None], server: Handshakes
) -> None:
    with openai.OpenAI(base_url=f"http://{server.address}/v1", api_key="k") as client:
        with contain(max_cost_usd=1) as run, contained(run), reported():
            way(client)
        assert run.uncontained_requests == len(server.paths) == 1
        with contain(strict=True) as run, contained(run), pytest.raises(UncontainedRequest):
            way(client)
    assert len(server.paths) == 1


async def with_responses_async(client: openai.AsyncOpenAI) -> None:
    async with client.responses.connect():
        pass


async def with_realtime_async(client: openai.AsyncOpenAI) -> None:
    async with client.realtime.connect(model="fake-1"):
        pass


@pytest.mark.parametrize("way", [with_responses_async, with_realtime_async])
async def test_a_session_of_the_official_async_client_is_reported_or_refused(
    way: Callable[[openai.AsyncOpenAI], Awaitable[None]], server: Handshakes
) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{server.address}/v1", api_key="k") as client:
        with contain(max_cost_usd=1) as run, contained(run), reported():
            await way(client)
        assert run.uncontained_requests == len(server.paths) == 1
        with contain(strict=True) as run, contained(run), pytest.raises(UncontainedRequest):
            await way(client)
    assert len(server.paths) == 1
