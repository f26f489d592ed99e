"""Every HTTP library over TLS and through a proxy, as providers are reached: limits, and stops of a socket."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
import urllib.request
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import requests
import urllib3

from penstock import BudgetExceededError, CancelledError
from penstock.runtime import worker
from penstock.testing.provider import FakeProviderServer, Hang, Say
from tests.providers.sdk_calls import limits, outcome
from tests.providers.shapes import SHAPES
from tests.providers.stack_calls import (
    CHAT,
    JSON,
    bedrock_client,
    chat,
    encoded,
    over_httpx,
    over_httpx2,
    over_httpx2_async,
    over_httpx_async,
    over_lm15,
    over_lm15_async,
    read_bedrock,
)
from tests.providers.test_egress import authority

pytestmark = pytest.mark.requirement("X-11")

CALL_USD = 0.25
CEILING_USD = 0.50
UNVERIFIED = ssl._create_unverified_context()
MANY_WORDS = "hello " * 30


class Relay:
    """A server that speaks TLS in front of another one."""

    def __init__(self, server: FakeProviderServer, context: ssl.SSLContext | None) -> None:
        self.url = ""
        self.connections: set[asyncio.Task[Any] | None] = set()
        """The connections of clients that are open."""
        self._upstream = urlsplit(server.url)
        self._context = context
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """Run it in a thread; its connections end with it."""
        thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        thread.start()
        try:
            assert self._ready.wait(60)
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._relay, "127.0.0.1", 0, ssl=self._context) as listening:
            self.url = f"http{'s' if self._context else ''}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            self._ready.set()
            await self._stop.wait()
            listening.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(task := asyncio.current_task())
        upstream_reader, upstream = await self._connect(reader, writer)
        ways = [asyncio.create_task(_pump(reader, upstream)), asyncio.create_task(_pump(upstream_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (upstream, writer):  # whichever side hung up, the other learns of it
                end.transport.abort()
            self.connections.discard(task)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        return await asyncio.open_connection(self._upstream.hostname, self._upstream.port)


class Proxy(Relay):
    """An HTTP proxy: it opens tunnels for requests over TLS, and passes others on."""

    def __init__(self, server: FakeProviderServer) -> None:
        super().__init__(server, None)
        self.methods: list[str] = []

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, _ = head.split(b" ", 2)
        self.methods.append(method.decode())
        address = urlsplit(f"//{target.decode()}" if method == b"CONNECT" else target.decode())
        upstream_reader, upstream = await asyncio.open_connection(address.hostname, address.port)
        if method == b"CONNECT":
            writer.write(b"HTTP/1.1 200 connected\r\n\r\n")
        else:
            upstream.write(head.replace(target, address.path.encode(), 1))
        return upstream_reader, upstream


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder: Path = tmp_path_factory.mktemp("tls")
    return authority(folder, "provider.example").server


# Ways to send, each with a client that does not check the certificate.


def tls_over_urllib3(url: str, body: Any) -> bytes:
    with urllib3.PoolManager(retries=False, cert_reqs="CERT_NONE") as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        return pool.request("POST", url, body=encoded(body), headers=JSON).data


def tls_over_requests(url: str, body: Any) -> bytes:
    with requests.Session() as session, warnings.catch_warnings():
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        return session.post(url, json=body, verify=False).content


def tls_over_http_client(url: str, body: Any) -> bytes:
    address = urlsplit(url)
    connection = http.client.HTTPSConnection(address.netloc, context=UNVERIFIED)
    try:
        connection.request("POST", address.path, encoded(body), JSON)
        return connection.getresponse().read()
    finally:
        connection.close()


def tls_over_urllib(url: str, body: Any) -> bytes:
    request = urllib.request.Request(url, encoded(body), JSON, method="POST")
    with urllib.request.urlopen(request, context=UNVERIFIED) as response:
        return bytes(response.read())


def tls_over_botocore(url: str, body: Any) -> bytes:
    address = urlsplit(url)
    _, _, model, operation = address.path.split("/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        client = bedrock_client(f"{address.scheme}://{address.netloc}", verify=False)
        try:
            return read_bedrock(client, operation, model, body)
        finally:
            client.close()


async def tls_over_aiohttp(url: str, body: Any) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=False) as response:
        return await response.read()


Send = Callable[[str, Any], Any]
SENDS: list[Send] = [
    over_httpx2,
    over_httpx,
    over_lm15,
    tls_over_urllib3,
    tls_over_requests,
    tls_over_http_client,
    tls_over_urllib,
    tls_over_botocore,
    over_httpx2_async,
    over_httpx_async,
    over_lm15_async,
    tls_over_aiohttp,
]


def request_over(send: Send, relay: Relay, *, streams: bool = False) -> Callable[[], Any]:
    """One request, as sync work."""
    url = relay.url
    if send is tls_over_botocore:
        shape = SHAPES["converse stream" if streams else "converse"]
        return partial(send, url + shape.path, shape.body)

    def work() -> Any:
        found = send(url + CHAT, chat(stream=True) if streams else chat())
        return asyncio.run(_closed(relay, found)) if isinstance(found, Awaitable) else found

    return work


async def _closed(relay: Relay, found: Awaitable[Any]) -> Any:
    """Return what is found when its connection was closed: a library does not wait for that."""
    try:
        return await found
    finally:
        while relay.connections:  # noqa: ASYNC110  the relay is on another loop
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("send", SENDS)
def test_requests_over_tls_stay_under_the_ceiling(send: Send, certified: ssl.SSLContext) -> None:
    with FakeProviderServer.flat(CALL_USD) as server, Relay(server, certified).running() as relay:
        with limits(server, max_cost_usd=CEILING_USD) as run:
            found = [outcome(request_over(send, relay, streams=number == 1)) for number in range(4)]
        assert all(isinstance(answer, bytes) for answer in found[:2]), found
        assert all(isinstance(refused, BudgetExceededError) for refused in found[2:]), found
        assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD
        assert run.balance.attempts == len(server.requests) == 2
        assert (run.balance.held_nanos, run.uncontained_requests) == (0, 0)


@pytest.mark.parametrize("after", [None, 3], ids=["before the answer", "in the middle"])
@pytest.mark.parametrize("send", SENDS)
def test_a_stop_frees_a_caller_and_breaks_its_connection_over_tls(
    send: Send, after: int | None, certified: ssl.SSLContext
) -> None:
    fate = Say(MANY_WORDS, then=Hang() if after is None else Hang(after=after))
    with FakeProviderServer(script=[fate]) as server, Relay(server, certified).running() as relay:
        with limits(server, max_cost_usd=1) as run:
            stopper = threading.Thread(target=lambda: (server.wait_until(lambda: server.requests), run.abort("enough")))
            stopper.start()
            found = outcome(request_over(send, relay, streams=True))
            stopper.join()
        assert isinstance(found, CancelledError), found
        if send is not over_lm15 or after is not None:  # it has no socket to break before its response
            server.wait_until(lambda: server.disconnects and not worker.busy_workers())
    server.wait_until(lambda: not worker.busy_workers())
    assert run.balance.unresolved_nanos + run.balance.spent_nanos >= server.invoice.total_nanos
    assert run.balance.held_nanos == 0


# Through a proxy, which most libraries find in the environment.


def proxied_urllib3(url: str, body: Any, proxy: str) -> bytes:
    with (
        urllib3.ProxyManager(proxy, retries=False, cert_reqs="CERT_NONE") as pool,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", urllib3.exceptions.InsecureRequestWarning)
        return pool.request("POST", url, body=encoded(body), headers=JSON).data


def proxied_http_client(url: str, body: Any, proxy: str) -> bytes:
    address = urlsplit(url)
    if address.scheme == "https":
        connection = http.client.HTTPSConnection(urlsplit(proxy).netloc, context=UNVERIFIED)
        connection.set_tunnel(address.hostname or "", address.port)
        target = address.path
    else:
        connection, target = http.client.HTTPConnection(urlsplit(proxy).netloc), url  # type: ignore[assignment]
    try:
        connection.request("POST", target, encoded(body), JSON)
        return connection.getresponse().read()
    finally:
        connection.close()


async def proxied_aiohttp(url: str, body: Any, proxy: str) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body, ssl=False, proxy=proxy) as response:
        return await response.read()


BY_ENVIRONMENT: list[Send] = [
    over_httpx2,
    over_httpx,
    tls_over_requests,
    tls_over_urllib,
    tls_over_botocore,
    over_httpx2_async,
    over_httpx_async,
]
BY_ARGUMENT = [proxied_urllib3, proxied_http_client, proxied_aiohttp]


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
@pytest.mark.parametrize("send", [*BY_ENVIRONMENT, *BY_ARGUMENT])
def test_requests_through_a_proxy_stay_under_the_ceiling(
    send: Callable[..., Any], is_encrypted: bool, certified: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        FakeProviderServer.flat(CALL_USD) as server,
        Relay(server, certified if is_encrypted else None).running() as relay,
        Proxy(server).running() as proxy,
    ):
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, proxy.url)
        for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        through = partial(send, proxy=proxy.url) if send in BY_ARGUMENT else send
        with limits(server, max_cost_usd=CEILING_USD) as run:
            found = [outcome(request_over(through, relay)) for _ in range(4)]
        assert all(isinstance(answer, bytes) for answer in found[:2]), found
        assert all(isinstance(refused, BudgetExceededError) for refused in found[2:]), found
        assert set(proxy.methods) == {
            "CONNECT" if is_encrypted else "POST"
        }  # some open a tunnel before they are refused
        assert server.invoice.total_usd == run.balance.spent_usd == CEILING_USD
        assert run.balance.attempts == len(server.requests) == 2
        assert (run.balance.held_nanos, run.uncontained_requests) == (0, 0)
