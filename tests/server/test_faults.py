"""A server whose stores or clients do not do what they should."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI

from penstock.containment.ledger import MemoryLedgerStore
from penstock.errors import LedgerUnavailable, PenstockError
from penstock.hosting.ports import StoreCorrupt, StoreUnavailable
from penstock.server.connection import ClientConnection
from penstock.server.settings import ServerSettings
from penstock.storage.memory import MemoryGraphStore
from tests.server.served import CHAT, ECHO, SECRETS, TOKENS, listening, parts, served, wire


class Away(MemoryGraphStore):
    """A store that cannot be reached."""

    async def get(self, *_: Any, **__: Any) -> Any:
        raise StoreUnavailable("the disk is full at /secret/place?password=canary-123456")

    save = head = list = versions = get


class Corrupt(MemoryGraphStore):
    """A store with a row that cannot be read."""

    async def get(self, *_: Any, **__: Any) -> Any:
        raise StoreCorrupt("graphs", "canary-key", "canary-123456")

    save = head = list = get


class Broken(MemoryGraphStore):
    """A store with a fault of its own."""

    async def get(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("canary-123456")

    save = head = list = get


REQUESTS = [
    ("GET", "/api/graphs/g", None),
    ("POST", "/api/runs", {"graph_id": "g"}),
    ("GET", "/v1/models", None),
    ("POST", "/v1/responses", {"model": "g", "input": "x", "stream": True}),
]


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_an_unreadable_row_is_a_typed_error_without_its_content(
    method: str, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        server.stores.graphs = Corrupt()
        answer = await ann.request(method, path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "unreadable_row")
        assert ("canary" in answer.text, "penstock doctor" in answer.text) == (False, True)
        assert "the row 'canary-key' of table 'graphs' cannot be read" in caplog.text
        assert "penstock_http_faults_total 0" in (await root.get("/metrics")).text


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
async def test_an_unexpected_error_of_our_own_is_logged_and_counted_as_a_fault(
    method: str, path: str, body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as server, server.client("ann") as ann, server.client("root") as root:
        server.stores.graphs = Broken()
        answer = await ann.request(method, path, json=body, headers={"X-Request-Id": "r-1"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "canary" not in answer.text
        assert "request r-1 failed: AssertionError at " in caplog.text
        assert "penstock_http_faults_total 1" in (await root.get("/metrics")).text


class LogBroken(PenstockError):
    """An error that the server does not expect."""


async def test_a_failing_stream_reports_the_error_and_the_log_has_the_location(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo", input="x")
        await server.host.wait(run.id)

        async def fails(*_: Any, **__: Any) -> Any:
            raise LogBroken("canary-123456")

        server.stores.events.read = fails  # type: ignore[method-assign]
        text = (await ann.get(f"/api/runs/{run.id}/events")).text
        del server.stores.events.read  # type: ignore[attr-defined]
        assert ('"code":"internal"' in text, "canary" in text) == (True, False)
        assert "a stream failed: LogBroken at " in caplog.text


class Breaks:
    """A store that works until a run exists, then fails so many times; the run itself is never looked up."""

    def __init__(self, real: Any, runs: Any, error: Exception, times: int) -> None:
        self._real, self._runs, self._error, self._left = real, runs, error, times

    async def __call__(self, *args: Any, **options: Any) -> Any:
        if self._left and await self._runs.list():
            self._left -= 1
            raise self._error
        return await self._real(*args, **options)


COMPLETION = ("chat.completions", {"messages": [{"role": "user", "content": "hi"}]})
RESPONSE = ("responses", {"input": "hi"})


@pytest.mark.parametrize(
    ("endpoint", "content"), [COMPLETION, RESPONSE, ("responses", {**RESPONSE[1], "background": True})]
)
@pytest.mark.parametrize("graph", ["chat", "echo"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (StoreUnavailable("gone"), 503, "store_unavailable"),
        (StoreCorrupt("runs", "k", "canary"), 500, "internal"),
    ],
)
async def test_the_sdk_does_not_repeat_a_request_whose_run_was_started(
    endpoint: str, content: dict[str, Any], graph: str, error: Exception, status: int, code: str
) -> None:
    async with served() as server, server.client("ann") as inside:
        await server.save("chat", CHAT)
        await server.save("echo", ECHO)

        async def fails(*_: Any, **__: Any) -> Any:
            raise error
            yield

        server.host.get = Breaks(server.host.get, server.stores.runs, error, 1)  # type: ignore[method-assign]
        server.host.events = fails  # type: ignore[method-assign]
        async with AsyncOpenAI(api_key=SECRETS["ann"], base_url="http://localhost/v1", http_client=inside) as client:
            create = (client.chat.completions if endpoint == "chat.completions" else client.responses).create
            with pytest.raises(APIStatusError) as refused:
                await create(model=graph, **content)  # type: ignore[operator]
        (run,) = await server.stores.runs.list()
        assert (refused.value.status_code, refused.value.code) == (status, code)
        assert refused.value.response.headers["x-should-retry"] == "false"
        assert f"GET /api/runs/{run.id}" in refused.value.message
        assert "canary" not in refused.value.message


@pytest.mark.parametrize(("endpoint", "content"), [COMPLETION, RESPONSE])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_answered_from_its_events_alone_once_its_run_was_started(
    endpoint: str, content: dict[str, Any], stream: bool
) -> None:
    """The record of a new run is not read again: there is nothing between its start and its answer that can fail."""
    async with served() as server, server.client("ann") as ann:
        await server.save("chat", CHAT)
        broken = Breaks(server.host.get, server.stores.runs, StoreUnavailable("gone"), 1)
        server.host.get = broken  # type: ignore[method-assign]
        path = "/v1/chat/completions" if endpoint == "chat.completions" else "/v1/responses"
        answer = await ann.post(path, json={"model": "chat", **content, "stream": stream})
        assert (answer.status_code, '"error":{' in answer.text) == (200, False)
        assert parts(server.app).metrics.open_streams == 0


@pytest.mark.parametrize(("endpoint", "content"), [COMPLETION, RESPONSE])
async def test_the_sdk_does_not_repeat_a_request_whose_run_cannot_be_followed(
    endpoint: str, content: dict[str, Any]
) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)

        async def fails(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("gone")
            yield

        server.host.events = fails  # type: ignore[method-assign]
        path = "/v1/chat/completions" if endpoint == "chat.completions" else "/v1/responses"
        refused = await ann.post(path, json={"model": "echo", **content})
        (run,) = await server.stores.runs.list()
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "false")
        assert refused.json()["error"]["penstock"] == {"run_id": run.id}
        assert "retry" not in refused.json()["error"]["message"]


async def test_if_the_state_of_a_new_run_cannot_be_read_the_error_names_the_run() -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        first = (await ann.post("/api/runs", json={"graph_id": "echo", "input": "x"})).json()["id"]
        await server.host.wait(first)
        known, works = {first}, server.stores.events.last_seq

        async def fails(run_id: str) -> int:
            if run_id in known:
                return await works(run_id)
            raise StoreUnavailable("gone")

        server.stores.events.last_seq = fails  # type: ignore[method-assign]
        for path, body in (
            ("/api/runs", {"graph_id": "echo"}),
            (f"/api/runs/{first}/fork", {"at": "out"}),
            (f"/api/runs/{first}/replay", None),
        ):
            refused = await ann.post(path, json=body)
            ids = {run.id for run in await server.stores.runs.list()}
            (new,) = ids - known
            known.add(new)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "store_unavailable")
            assert refused.headers["x-run-id"] == new
            assert (f"run {new} was started" in error["message"], "retry" in error["message"]) == (True, False)


class Silent(MemoryGraphStore):
    """A store that never answers."""

    async def get(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/graphs/g", None),
        ("GET", "/api/graphs", None),
        ("PUT", "/api/graphs/g", {"document": ECHO}),
        ("POST", "/api/runs", {"graph_id": "g"}),
        ("GET", "/v1/models", None),
        ("GET", "/ready", None),
    ],
)
async def test_an_unavailable_store_is_a_503_with_retry_after(method: str, path: str, body: Any) -> None:
    async with served() as server, server.client("ann") as ann:
        server.stores.graphs = Away()
        answer = await ann.request(method, path, json=body)
        assert answer.status_code == 503, answer.text
        assert answer.headers["retry-after"] == "2"
        assert "canary" not in answer.text
        assert (await ann.get("/health")).status_code == 200


async def test_ready_does_not_wait_for_a_store_that_never_answers() -> None:
    async with served(ServerSettings(tokens=TOKENS, ready_timeout_s=0.01)) as server, server.client() as anonymous:
        server.stores.graphs = Silent()
        assert (await anonymous.get("/ready")).status_code == 503


class Unreadable(MemoryLedgerStore):
    """A ledger that cannot be reached."""

    def balance(self, account: str) -> Any:
        raise LedgerUnavailable("gone")


async def test_a_server_without_its_ledger_is_not_ready() -> None:
    async with served() as server, server.client() as anonymous:
        assert (await anonymous.get("/ready")).status_code == 200
        server.stores.ledger = Unreadable()
        assert (await anonymous.get("/ready")).json()["error"]["code"] == "store_unavailable"


@pytest.mark.parametrize("sent_bytes", [b"", b"GET", b"GET /health HTTP/1.1\r\nHost: loc"])
async def test_a_client_that_does_not_finish_its_request_is_disconnected(
    sent_bytes: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClientConnection, "headers_s", 0.01)
    async with served() as server, listening(server.app) as address, wire(address) as client:
        client.writer.write(sent_bytes)
        assert await client.reader.read() == b""


async def test_the_second_request_of_a_connection_has_a_timeout_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientConnection, "headers_s", 0.01)
    async with served() as server, listening(server.app) as address, wire(address) as client:
        client.send("GET", "/health")
        assert await client.status() == 200
        await client.until(b"}")
        client.writer.write(b"GET /health HTTP/1.1\r\n")
        assert await client.reader.read() == b""


async def test_a_request_in_progress_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClientConnection, "headers_s", 0.001)
    settings = ServerSettings(ready_timeout_s=0.2)
    async with served(settings) as server, listening(server.app) as address, wire(address) as client:
        server.stores.graphs = Silent()
        client.send("GET", "/ready")
        assert await client.status() == 503
