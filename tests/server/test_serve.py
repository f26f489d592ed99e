"""The process: it listens, drains, parks, and goes on where it was."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, InternalServerError
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import InvalidValue
from penstock.server.serve import ServerProcess, ShutdownResponder, farewell, greeting, listen
from penstock.server.settings import ServerSettings
from tests.forked import Program
from tests.server.served import SECRETS, TOKENS, eventually, served, wire
from tests.server.test_mcp_sessions import ACCEPT, HELLO

pytestmark = pytest.mark.usefixtures("forks")

PROGRAM = """
import asyncio, sys
from pathlib import Path
from penstock.hosting.host import HostSettings
from penstock.nodes import executors
from penstock.server.serve import serve
from penstock.server.settings import ServerSettings
from penstock.kernel.executor import ExecutionResult
from penstock.kernel.executor import DataValue

class Wait:
    async def execute(self, data, inputs, context):
        if sys.argv[2] == "wait":
            await asyncio.Event().wait()
        elif sys.argv[2] != "go on":
            await asyncio.to_thread(Path(sys.argv[2]).read_text)
        return ExecutionResult(outputs={"output": DataValue("text", "done")})

async def prepare(host):
    waits, asks = ({"id": type, "type": type, "data": {}} for type in ("wait", "approval"))
    begins = {"id": "in", "type": "input", "data": {}}
    edge = {"id": "e", "source": "in", "target": "approval", "data": {"channel": "flow"}}
    for id, nodes, edges in (("wait", [waits], []), ("approval", [begins, asks], [edge])):
        await host.stores.graphs.save(id, "local", id, {"nodes": nodes, "edges": edges}, now_ms=1)

settings = HostSettings(drain_s=float(sys.argv[3]), tick_s=0.05)
asyncio.run(serve(
    ServerSettings(port=0), url="sqlite:///" + sys.argv[1], host_settings=settings,
    executors={**executors(), "wait": Wait()}, prepare=prepare, announce=lambda text: print(text, flush=True),
))
print("closed", flush=True)
"""


@asynccontextmanager
async def process(*args: str) -> AsyncGenerator[tuple[Program, str], None]:
    """A server of its own, and its address."""
    with Program(["-c", PROGRAM, *args]) as started:
        try:
            first = await asyncio.to_thread(started.stdout.readline)
            assert first.startswith("Penstock is listening on "), first + started.stderr.read()
            yield started, first.split()[-1]
        finally:
            started.kill()


async def ended(started: Program) -> str:
    out, error = await asyncio.to_thread(started.communicate)
    assert started.returncode == 0, error
    assert "Traceback" not in error
    return out


async def test_running_runs_are_parked_at_shutdown_and_continue_at_the_next_start(tmp_path: Path) -> None:
    database = str(tmp_path / "data.db")
    async with process(database, "wait", "600") as (first, address), httpx2.AsyncClient(base_url=address) as client:
        run = (await client.post("/api/runs", json={"graph_id": "wait"})).json()
        async with client.stream("GET", f"/api/runs/{run['id']}/events") as stream:
            async for line in stream.aiter_lines():
                if line == "event: node.started":
                    break
        first.send_signal(signal.SIGINT)
        # Streams end, and no new client is let in, while the run is waited for; a second interrupt parks it at once.
        while True:
            try:
                await client.get("/health")
            except httpx2.TransportError:
                break
        first.send_signal(signal.SIGINT)
        assert "closed" in await ended(first)
    async with process(database, "go on", "0") as (second, address), httpx2.AsyncClient(base_url=address) as client:
        reported = await client.get(f"/api/runs/{run['id']}/events")
        types = [json.loads(line[6:])["type"] for line in reported.text.splitlines() if line.startswith("data: ")]
        assert "run.parked" in types
        assert types[-1] == "run.completed"
        second.send_signal(signal.SIGTERM)
        assert "closed" in await ended(second)


# Clients that wait for a run when the server stops


Given = list[tuple[str, dict[str, Any]]]
MESSAGES = [{"role": "user", "content": "x"}]
CALL = {"jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": {"name": "wait", "arguments": {"input": "x"}}}
REQUESTS: Given = [
    ("/v1/chat/completions", {"model": "wait", "messages": MESSAGES}),
    ("/v1/responses", {"model": "wait", "input": "x"}),
]


async def under_way(client: httpx2.AsyncClient, number: int) -> list[dict[str, Any]]:
    """So many runs, once they have all begun, and those with a question wait for its answer."""
    while True:
        runs = (await client.get("/api/runs")).json()["runs"]
        states = ["waiting" if run["graph_id"] == "approval" else "running" for run in runs]
        if len(runs) == number and [run["status"] for run in runs] == states:
            return list(runs)


async def listens_no_more(client: httpx2.AsyncClient) -> None:
    while True:
        try:
            await client.get("/health")
        except httpx2.TransportError:
            return


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_client_waiting_for_a_parked_run_gets_the_address_to_find_it_at(tmp_path: Path, signals: int) -> None:
    drain_s = "0" if signals == 1 else "600"
    async with (
        process(str(tmp_path / "data.db"), "wait", drain_s) as (server, address),
        httpx2.AsyncClient(base_url=address, headers=ACCEPT, timeout=60) as client,
    ):
        session = (await client.post("/mcp", json=HELLO)).headers["mcp-session-id"]
        called = asyncio.ensure_future(client.post("/mcp", json=CALL, headers={"Mcp-Session-Id": session}))
        waiting = [asyncio.ensure_future(client.post(path, json=body)) for path, body in REQUESTS]
        await under_way(client, len(REQUESTS) + 1)
        server.send_signal(signal.SIGTERM)
        if signals == 2:
            await listens_no_more(client)
            server.send_signal(signal.SIGTERM)
        for answer in await asyncio.gather(*waiting):
            assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "false"), answer.text
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("service_unavailable_error", "parked")
            assert f"GET /v1/responses/resp_{error['run_id']}" in error["message"]
            assert f"GET /api/runs/{error['run_id']}" in error["message"]
        *_, reported = [line[6:] for line in (await called).text.splitlines() if line.startswith("data: {")]
        result = json.loads(reported)["result"]
        assert (result["isError"], " was parked: " in result["content"][0]["text"]) == (True, True)
        assert "closed" in await ended(server)


async def test_the_sdk_does_not_retry_a_parked_run(tmp_path: Path) -> None:
    database = str(tmp_path / "data.db")
    async with (
        process(database, "wait", "0") as (first, address),
        httpx2.AsyncClient(base_url=address, timeout=60) as http,
        AsyncOpenAI(api_key="-", base_url=f"{address}/v1") as client,
    ):
        requested = asyncio.ensure_future(client.responses.create(model="wait", input="x"))
        (run,) = await under_way(http, 1)
        first.send_signal(signal.SIGTERM)
        with pytest.raises(InternalServerError) as parked:
            await requested
        assert (parked.value.code, parked.value.body["run_id"]) == ("parked", run["id"])  # type: ignore[index]
        assert "closed" in await ended(first)
    async with (
        process(database, "go on", "0") as (second, address),
        httpx2.AsyncClient(base_url=address, timeout=60) as http,
        AsyncOpenAI(api_key="-", base_url=f"{address}/v1") as client,
    ):
        await http.get(f"/api/runs/{run['id']}/events")  # up to its end
        later = await client.responses.retrieve(f"resp_{run['id']}")
        assert (later.status, later.output_text) == ("completed", "done")
        assert len((await http.get("/api/runs")).json()["runs"]) == 1
        second.send_signal(signal.SIGTERM)
        assert "closed" in await ended(second)


async def test_a_run_that_ends_while_draining_is_answered(tmp_path: Path) -> None:
    let_go = tmp_path / "let go"
    os.mkfifo(let_go)
    async with (
        process(str(tmp_path / "data.db"), str(let_go), "600") as (server, address),
        httpx2.AsyncClient(base_url=address, timeout=60) as client,
    ):
        requested = asyncio.ensure_future(
            client.post("/v1/chat/completions", json={"model": "wait", "messages": MESSAGES})
        )
        await under_way(client, 1)
        server.send_signal(signal.SIGTERM)
        await listens_no_more(client)
        await asyncio.to_thread(let_go.write_text, "now")
        answer = await requested
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == "done"
        assert "closed" in await ended(server)


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_cancelled_request_gets_503_unless_its_response_has_begun(
    has_begun: bool,
) -> None:
    sent: list[Message] = []
    reached = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        reached.set()
        await asyncio.Event().wait()

    async def receive() -> Message:
        raise AssertionError("the body is not to be read")

    async def send(message: Message) -> None:
        sent.append(message)

    answering = asyncio.ensure_future(ShutdownResponder(app)({"type": "http", "path": "/v1/responses"}, receive, send))
    await reached.wait()
    answering.cancel()
    await answering
    start, *body = sent
    if has_begun:
        assert (start["status"], body) == (200, [])
        return
    assert start["status"] == 503
    assert (b"x-should-retry", b"false") in start["headers"]
    assert json.loads(body[0]["body"])["error"]["type"] == "server_error"


async def test_a_client_still_sending_at_shutdown_gets_503() -> None:
    listener = listen(ServerSettings(port=0))
    async with served() as it, wire(listener.getsockname()) as client:
        server = ServerProcess(it.app, timeout_graceful_shutdown=0)
        serving = asyncio.ensure_future(server.serve([listener]))
        head = {
            "Content_Type": "application/json",
            "Content_Length": "100",
            "Authorization": f"Bearer {SECRETS['ann']}",
        }
        client.send("POST", "/v1/responses", b"{", **head)
        await eventually(lambda: server.started and bool(server.server_state.tasks))
        server.stop()
        assert await client.status() == 503
        assert b'"type":"server_error"' in await client.until(b"}}")
        await serving
    listener.close()


# Where it listens


def test_a_port_in_use_is_reported_with_its_address() -> None:
    taken = listen(ServerSettings(port=0))
    try:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidValue, match=f"127.0.0.1:{port}"):
            listen(ServerSettings(port=port))
    finally:
        taken.close()


async def test_responses_are_sent_without_waiting_for_acknowledgements() -> None:
    listener, sent_at_once = listen(ServerSettings(port=0)), asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent_at_once.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(connected, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await sent_at_once == 1
        writer.close()
        await writer.wait_closed()


def test_the_greeting_has_the_number_of_unfinished_runs() -> None:
    assert "resuming" not in greeting(ServerSettings(), 1, "sqlite:x")
    line = "  resuming      1 unfinished run; the runs of a killed server 15 s after it died"
    assert line in greeting(ServerSettings(), 1, "sqlite:x", 1, 15).splitlines()
    assert " 1000 or more unfinished runs;" in greeting(ServerSettings(), 1, "sqlite:x", 1_000, 15)


@pytest.mark.parametrize(
    ("after", "is_persistent", "expected"),
    [
        ({"parked": 5}, True, "stopped: 3 runs parked for the next server"),
        ({"parked": 2, "failed": 3}, True, "stopped"),
        ({"parked": 2, "failed": 3}, False, "stopped"),
        ({"parked": 4, "completed": 1}, False, "stopped: 2 runs lost with the memory"),
        ({"parked": 2}, False, "stopped: 3 runs lost with the memory"),
        (
            {"parked": 3, "lost": 1},
            True,
            "stopped: 1 run parked for the next server; 1 run could not be parked because the database is "
            "unavailable: a server takes over after 15 s",
        ),
    ],
)
def test_the_farewell_has_the_outcome_of_active_runs(after: dict[str, int], is_persistent: bool, expected: str) -> None:
    assert farewell({"parked": 2}, after, 3, 15, is_persistent=is_persistent) == expected


def test_the_greeting_has_address_access_and_storage() -> None:
    text = greeting(ServerSettings(), 8642, "memory:")
    assert "http://127.0.0.1:8642/" in text
    assert "lost when the server stops" in text
    assert "clients on this machine only" in text
    wide = greeting(ServerSettings(host="::", tokens=TOKENS), 1, "postgresql://u:canary-secret@db/x")
    assert "http://[::]:1" in wide
    assert "canary" not in wide
