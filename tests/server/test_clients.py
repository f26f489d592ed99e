"""Clients behind proxies, under a path, at their share of connections, that send ahead, and with wrong tokens."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest

from penstock.errors import InvalidValue
from penstock.server.clients import MAX_ADDRESSES, TokenThrottle, client_behind, network_of, parse_networks
from penstock.server.connection import MAX_PIPELINED, ConnectionLimit, bounded
from penstock.server.settings import ServerSettings
from penstock.testing.clock import ManualClock
from tests.server.served import GATE, SECRETS, TOKENS, Wire, listening, served, wire

PROXIES = parse_networks(["10.0.0.0/8", "::1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("203.0.113.9", ["198.51.100.1"], "203.0.113.9"),  # no proxy of ours: its header is anybody's
        ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", ["1.2.3.4", "198.51.100.1", "10.0.0.2"], "198.51.100.1"),  # the client wrote 1.2.3.4 itself
        ("10.0.0.1", ["10.0.0.3"], "10.0.0.3"),
        ("10.0.0.1", ["unknown"], "10.0.0.1"),
        ("10.0.0.1", [" 198.51.100.1:4711 "], "198.51.100.1"),
        ("::1", ["[2001:db8::7]:443"], "2001:db8::7"),
        ("::ffff:10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("socket", ["198.51.100.1"], "socket"),
    ],
)
def test_a_client_is_the_last_address_that_is_no_trusted_proxy(peer: str, forwarded: list[str], client: str) -> None:
    assert client_behind(peer, forwarded, PROXIES) == client


def test_a_network_that_one_client_may_own_counts_as_one() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2:3") != network_of("2001:db8:0:1::1")
    assert network_of("192.0.2.1") == "192.0.2.1"


def test_invalid_proxies_and_paths_are_refused_by_name() -> None:
    with pytest.raises(InvalidValue, match="trusted_proxies"):
        ServerSettings(trusted_proxies=("10.0.0.0/99",))
    for path in ("penstock", "/penstock/", "/a b", "//"):
        with pytest.raises(InvalidValue, match="root_path"):
            ServerSettings(root_path=path)


def test_proxies_and_path_are_read_from_the_environment() -> None:
    environ = {"PENSTOCK_TRUSTED_PROXIES": "10.0.0.0/8, ::1", "PENSTOCK_ROOT_PATH": "/penstock/"}
    settings = ServerSettings.from_env(environ)
    assert (settings.trusted_proxies, settings.root_path) == (("10.0.0.0/8", "::1"), "/penstock")


async def test_without_tokens_only_a_client_of_this_machine_is_let_in_through_a_proxy() -> None:
    async with served(ServerSettings(trusted_proxies=("127.0.0.1",))) as server:
        for forwarded, status in (("198.51.100.1", 401), ("127.0.0.1", 200)):
            async with server.client(**{"X-Forwarded-For": forwarded}) as client:
                assert (await client.get("/api/me")).status_code == status
    async with served(ServerSettings()) as server, server.client(**{"X-Forwarded-For": "198.51.100.1"}) as client:
        assert (await client.get("/api/me")).status_code == 200  # not a proxy: what it says does not count


@pytest.mark.parametrize("prefix", ["", "/penstock"])
async def test_a_server_under_a_path_works_whether_or_not_the_proxy_removes_it(prefix: str) -> None:
    settings = ServerSettings(root_path="/penstock", trusted_proxies=("127.0.0.1",))
    async with served(settings) as server, server.client(**{"X-Forwarded-Proto": "https"}) as client:
        page = (await client.get(f"{prefix}/")).text
        assert 'href="/penstock/api/openapi.json"' in page
        assert "https://localhost:8642/penstock/v1" in page
        description = (await client.get(f"{prefix}/api/openapi.json")).json()
        assert description["servers"] == [{"url": "/penstock"}]
        assert (await client.get(f"{prefix}/api/runs")).status_code == 200
        assert (await client.get("/penstocks/api/runs")).status_code == 404


async def test_an_address_has_a_share_of_the_connections() -> None:
    settings = ServerSettings(tokens=TOKENS, max_connections_per_client=2)
    async with served(settings) as server, listening(server.app) as address, AsyncExitStack() as opened:
        first, second = [await opened.enter_async_context(wire(address)) for _ in range(2)]
        for client in (first, second):
            client.send("GET", "/health")
            assert await client.status() == 200
            await client.until(b"}")
        third = await opened.enter_async_context(wire(address))
        assert await third.status() == 503
        assert b"overloaded" in await third.reader.read()
        first.writer.transport.abort()
        while True:  # until the server has noticed
            fourth = await opened.enter_async_context(wire(address))
            fourth.send("GET", "/health")
            if await fourth.status() == 200:
                break


async def test_connections_of_a_trusted_proxy_are_not_counted() -> None:
    settings = ServerSettings(tokens=TOKENS, max_connections_per_client=1, trusted_proxies=("127.0.0.1",))
    async with served(settings) as server, listening(server.app) as address, AsyncExitStack() as opened:
        for number in range(3):
            client = await opened.enter_async_context(wire(address))
            client.send("GET", "/health", X_Forwarded_For=f"198.51.100.{number}")
            assert await client.status() == 200


async def answers(client: Wire) -> bool:
    """Whether the server answers on this connection; False if it has closed it."""
    client.send("GET", "/health")
    try:
        answered = await client.status() == 200
        await client.until(b"}")
    except (ConnectionError, asyncio.IncompleteReadError):
        return False
    return answered


async def test_a_new_connection_takes_the_place_of_the_longest_idle_one_of_the_address_that_has_most() -> None:
    limited = bounded(ConnectionLimit(10, max_connections=4))
    async with served() as server, listening(server.app, http=limited) as address, AsyncExitStack() as opened:

        async def connect(source: str) -> Wire:
            client = await opened.enter_async_context(wire(address, source=source))
            assert await answers(client)
            return client

        other = await connect("127.0.0.2")
        first, second, third = [await connect("127.0.0.3") for _ in range(3)]
        assert await answers(first)  # now the second has been idle for longest
        newcomers = [await connect("127.0.0.4") for _ in range(2)]
        assert [await answers(one) for one in (other, first, second, third)] == [True, True, False, False]
        assert all([await answers(one) for one in newcomers])


async def test_connections_that_are_in_use_keep_their_places() -> None:
    settings = ServerSettings(tokens=TOKENS)
    limited = bounded(ConnectionLimit(10, max_connections=2))
    async with served(settings) as server, listening(server.app, http=limited) as address, AsyncExitStack() as opened:
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate")
        for _ in range(2):
            stream = await opened.enter_async_context(wire(address))
            stream.send("GET", f"/api/runs/{run.id}/events", Authorization=f"Bearer {SECRETS['ann']}")
            assert await stream.status() == 200
        refused = await opened.enter_async_context(wire(address, source="127.0.0.2"))
        assert await refused.status() == 503
        assert b"the server has too many open connections; retry in a moment" in await refused.reader.read()
        server.gate.opened.set()
        assert (await server.host.wait(run.id)).status == "completed"
        assert b"run.completed" in await stream.reader.readuntil(b"0\r\n\r\n")
        later = await opened.enter_async_context(wire(address, source="127.0.0.2"))
        assert await answers(later)  # the streams have ended, so their connections are idle


async def test_requests_that_are_sent_ahead_are_answered_in_order_up_to_a_limit() -> None:
    targets = [f"/none/{number}" for number in range(MAX_PIPELINED)]
    async with served() as server, listening(server.app) as address, wire(address) as client:
        for target in ("/health", *targets):
            client.send("GET", target, Authorization=f"Bearer {SECRETS['ann']}")
        assert await client.status() == 200
        await client.until(b"}")
        for _ in targets:
            assert await client.status() == 404
            await client.until(b"}}")
        assert await answers(client)  # the connection is as good as before


@pytest.mark.parametrize("is_answered", [False, True])
async def test_a_client_that_sends_too_many_requests_ahead_is_disconnected(is_answered: bool) -> None:
    """With a 503 if no response is under way; a response that is under way ends where it is."""
    async with served() as server, listening(server.app) as address, wire(address) as client:
        await server.save("gate", GATE)
        if is_answered:
            run = await server.host.submit(owner="ann", graph_id="gate")
            client.send("GET", f"/api/runs/{run.id}/events", Authorization=f"Bearer {SECRETS['ann']}")
            assert await client.status() == 200
            await client.until(b"run.started")
        client.writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * (MAX_PIPELINED + 2 - is_answered))
        rest = await client.reader.read()
        if is_answered:
            assert b"HTTP/1.1" not in rest
        else:
            assert rest.startswith(b"HTTP/1.1 503 ")
            assert rest.count(b"HTTP/1.1 ") == 1
            assert b'"overloaded"' in rest
        server.gate.opened.set()


async def test_a_request_that_is_sent_ahead_does_not_hide_that_its_client_has_left() -> None:
    settings = ServerSettings(tokens=TOKENS, retry_grace_s=0)
    async with served(settings) as server, listening(server.app) as address:
        await server.save("gate", GATE)
        async with wire(address) as client:
            message = b'{"model": "gate", "messages": [{"role": "user", "content": "hello"}]}'
            head = {"Authorization": f"Bearer {SECRETS['ann']}", "Content-Type": "application/json"}
            client.send("POST", "/v1/chat/completions", message, **head)
            await server.gate.entered.wait()
            client.send("GET", "/health")
        (run,) = await server.host.stores.runs.list()
        assert (await server.host.wait(run.id)).status == "cancelled"


@pytest.mark.parametrize(("soft", "hard", "connections"), [(256, 512, 256), (256, 4_096, 2_000)])
def test_a_server_opens_half_as_many_connections_as_it_may_open_files(soft: int, hard: int, connections: int) -> None:
    program = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from penstock.server.connection import allowed_connections\n"
        "print(allowed_connections(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(connections), str(min(hard, 4_000))]


async def test_wrong_tokens_are_throttled_and_known_clients_are_not() -> None:
    settings = ServerSettings(tokens=TOKENS, max_failed_tokens_per_minute=3)
    clock = ManualClock()
    async with served(settings, clock=clock) as server, server.client("ann") as ann, server.client("bob") as bob:
        assert (await ann.get("/api/me")).status_code == 200
        async with server.client(Authorization="Bearer guess-0123456789abcdef") as stranger:
            statuses = [(await stranger.get("/api/me")).status_code for _ in range(5)]
            assert statuses == [401, 401, 401, 429, 429]
            refused = await stranger.get("/api/me")
            assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("too_many_tokens", "20")
            assert (await stranger.get("/health")).status_code == 200
            # A right token that was never used from here looks like a wrong one.
            assert (await bob.get("/api/me")).json() == refused.json()
            assert (await ann.get("/api/me")).status_code == 200
            clock.advance(20)
            assert (await bob.get("/api/me")).status_code == 200
            assert [(await stranger.get("/api/me")).status_code for _ in range(2)] == [401, 429]


def test_the_throttle_forgets_old_addresses() -> None:
    throttle = TokenThrottle(1)
    for number in range(MAX_ADDRESSES + 10):
        throttle.fail(f"client-{number}", 0)
        throttle.accept(f"client-{number}", SECRETS["ann"].encode())
    assert len(throttle._failed) == len(throttle._accepted) == MAX_ADDRESSES
    assert throttle.wait_s("client-0", b"other", 0) == 0
    assert throttle.wait_s(f"client-{MAX_ADDRESSES}", b"other", 0) == 60
