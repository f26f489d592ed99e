"""INV 6: a client that does not read costs little, delays no other, resumes exactly, and can leave at any time."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.hosting.ports import HostedEvent, RunRecord
from penstock.server.serve import ServerProcess, listen
from penstock.server.settings import ServerSettings
from tests.server.served import SECRETS, Served, eventually, parse_events, parts, running, served
from tests.soak import scaled

CLIENTS = 100
MAX_BYTES_EACH = 256 * 1024
EVENTS = scaled(1_000, soak=20_000)
SMALL = 4_096
"""What the sockets' own buffers hold, so that a client that does not read is noticed soon."""

pytestmark = pytest.mark.reliability


async def long_log(server: Served, size: int = 1_000) -> None:
    """A running run with many events."""
    await server.stores.runs.add(RunRecord("long", "ann", "none", 1))
    run = await server.stores.runs.claim("worker", now_ms=10**13, lease_ms=10**12)
    assert run is not None
    events = [HostedEvent(seq, 1, "text.delta", {"text": f"{seq} " + "x" * size}) for seq in range(1, EVENTS + 1)]
    await server.stores.events.append("long", run.epoch, events)


async def end_it(server: Served) -> None:
    last = HostedEvent(EVENTS + 1, 1, "run.completed", {})
    await server.stores.events.append("long", 1, [last])
    await server.stores.runs.update("long", 1, status="completed")


def small_listener() -> socket.socket:
    listener = listen(ServerSettings(port=0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
    return listener


@asynccontextmanager
async def watchers(address: Any, count: int) -> AsyncGenerator[list[socket.socket], None]:
    """Clients that have requested the run's events and read nothing."""
    loop = asyncio.get_running_loop()
    request = (
        f"GET /api/runs/long/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRETS['ann']}\r\n\r\n"
    ).encode()
    clients = []
    try:
        for _ in range(count):
            client = socket.socket()
            clients.append(client)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
            client.setblocking(False)
            await loop.sock_connect(client, address)
            await loop.sock_sendall(client, request)
        yield clients
    finally:
        for client in clients:
            client.close()


def stalled(process: ServerProcess) -> int:
    """Connections whose client has let the server's buffer run full."""
    return sum(1 for one in process.server_state.connections if one.flow.write_paused)  # type: ignore[union-attr]


async def everything(client: socket.socket) -> str:
    """All that a client is sent until the answer is over."""
    loop = asyncio.get_running_loop()
    got = bytearray()
    while not got.endswith(b"\r\n0\r\n\r\n"):
        got += await loop.sock_recv(client, 65_536)
    _, _, body = bytes(got).partition(b"\r\n\r\n")
    return unchunked(body).decode()


def unchunked(body: bytes) -> bytes:
    whole = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        whole += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]
    return bytes(whole)


async def test_a_hundred_stalled_clients_use_little_memory_and_delay_no_other() -> None:
    settings = ServerSettings(max_streams_per_user=CLIENTS + 5, heartbeat_s=86_400)
    async with served(settings) as server:
        await long_log(server)
        listener = small_listener()
        address = listener.getsockname()
        async with running(server.app, listener) as process:
            gc.collect()
            tracemalloc.start()
            try:
                async with watchers(address, CLIENTS) as clients:
                    await eventually(lambda: stalled(process) == CLIENTS)
                    gc.collect()
                    held, _ = tracemalloc.get_traced_memory()
                    assert held / CLIENTS <= MAX_BYTES_EACH, f"{held / CLIENTS:,.0f} bytes for each client"
                    tracemalloc.stop()
                    await end_it(server)
                    async with server.client() as quick:
                        events = parse_events((await quick.get("/api/runs/long/events")).text)
                        assert [int(one["id"]) for one in events] == list(range(1, EVENTS + 2))
                        assert (await quick.get("/health")).status_code == 200
                    late = parse_events(await everything(clients[0]))
                    assert late == events
            finally:
                tracemalloc.stop()
            await eventually(lambda: parts(server.app).metrics.open_streams == 0)


async def test_clients_that_leave_in_the_middle_leave_nothing_running() -> None:
    settings = ServerSettings(max_streams_per_user=CLIENTS, heartbeat_s=86_400)
    async with served(settings) as server:
        await long_log(server)
        listener = small_listener()
        address = listener.getsockname()
        async with running(server.app, listener) as process:
            for _ in range(3):
                async with watchers(address, CLIENTS):
                    await eventually(lambda: stalled(process) == CLIENTS)
                await eventually(lambda: parts(server.app).metrics.open_streams == 0)
                await eventually(lambda: not process.server_state.connections)
            async with server.client() as next_one:
                assert (await next_one.get("/health")).status_code == 200


async def test_a_server_with_stalled_clients_closes() -> None:
    settings = ServerSettings(max_streams_per_user=CLIENTS, heartbeat_s=86_400)
    async with served(settings) as server:
        await long_log(server)
        listener = small_listener()
        address = listener.getsockname()
        async with running(server.app, listener) as process, watchers(address, 5):
            await eventually(lambda: stalled(process) == 5)
            process.stop()
            await eventually(lambda: parts(server.app).metrics.open_streams == 0)
