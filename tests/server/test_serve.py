"""The process: it listens, drains, parks, and goes on where it was."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.errors import InvalidValue
from penstock.server.serve import greeting, listen
from penstock.server.settings import ServerSettings
from tests.server.served import TOKENS

PROGRAM = """
import asyncio, sys
from penstock.hosting.host import HostSettings
from penstock.server.serve import serve
from penstock.server.settings import ServerSettings
from penstock.kernel.executor import ExecutionResult
from penstock.kernel.values import DataValue

class Wait:
    async def execute(self, data, inputs, context):
        if sys.argv[2] == "wait":
            await asyncio.Event().wait()
        return ExecutionResult(outputs={"output": DataValue("text", "done")})

async def prepare(host):
    document = {"nodes": [{"id": "w", "type": "wait", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}
    await host.stores.graphs.save("wait", "local", "wait", document, now_ms=1)

settings = HostSettings(drain_s=float(sys.argv[3]), tick_s=0.05)
asyncio.run(serve(
    ServerSettings(port=0), url="sqlite:///" + sys.argv[1], host_settings=settings, executors={"wait": Wait()},
    prepare=prepare, announce=lambda text: print(text, flush=True),
))
print("closed", flush=True)
"""


@asynccontextmanager
async def process(*args: str) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str], None]:
    """A server of its own, and its address."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert started.stdout is not None
    try:
        first = (await started.stdout.readline()).decode()
        assert first.startswith("Penstock listens at "), first + (await _rest(started.stderr))
        yield started, first.split()[-1]
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def _rest(stream: Any) -> str:
    return str((await stream.read()).decode())


async def ended(started: asyncio.subprocess.Process) -> str:
    out, error = await started.communicate()
    assert started.returncode == 0, error.decode()
    assert b"Traceback" not in error
    return out.decode()


async def test_what_runs_is_parked_at_the_end_and_goes_on_at_the_next_beginning(tmp_path: Path) -> None:
    database = str(tmp_path / "data.db")
    async with process(database, "wait", "600") as (first, address), httpx2.AsyncClient(base_url=address) as client:
        run = (await client.post("/api/runs", json={"graph_id": "wait"})).json()
        async with client.stream("GET", f"/api/runs/{run['id']}/events") as stream:
            async for line in stream.aiter_lines():
                if line == "event: node.started":
                    break
        first.send_signal(signal.SIGINT)
        # Streams end, and nobody new is let in, while the run is waited for; a second interrupt parks it at once.
        while True:
            try:
                await client.get("/health")
            except httpx2.TransportError:
                break
        first.send_signal(signal.SIGINT)
        assert "closed" in await ended(first)
    async with process(database, "go on", "0") as (second, address), httpx2.AsyncClient(base_url=address) as client:
        told = await client.get(f"/api/runs/{run['id']}/events")
        types = [json.loads(line[6:])["type"] for line in told.text.splitlines() if line.startswith("data: ")]
        assert "run.parked" in types
        assert types[-1] == "run.completed"
        second.send_signal(signal.SIGTERM)
        assert "closed" in await ended(second)


def test_an_address_that_is_taken_is_said_by_name() -> None:
    taken = listen(ServerSettings(port=0))
    try:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValue, match=f"127.0.0.1:{port}"):
            listen(ServerSettings(port=port))
    finally:
        taken.close()


async def test_an_answer_is_sent_at_once_and_does_not_wait_for_the_one_before_to_be_acknowledged() -> None:
    listener, sent_at_once = listen(ServerSettings(port=0)), asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent_at_once.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await sent_at_once == 1
        writer.close()
        await writer.wait_closed()


def test_the_greeting_says_where_for_whom_and_how_long() -> None:
    text = greeting(ServerSettings(), 8642, "memory:")
    assert "http://127.0.0.1:8642/" in text
    assert "gone when the server ends" in text
    assert "nobody else" in text
    wide = greeting(ServerSettings(host="::", tokens=TOKENS), 1, "postgresql://u:canary-secret@db/x")
    assert "http://[::]:1" in wide
    assert "canary" not in wide
