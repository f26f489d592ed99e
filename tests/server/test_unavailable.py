"""A database that is away: clients get advice, and only the log names its location."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.containment.breaker import CircuitBreaker
from penstock.containment.ledger import MemoryLedgerStore
from penstock.errors import Halted, LedgerUnavailable
from penstock.hosting.ports import HostedEvent, StoreUnavailable
from penstock.server.auth import User
from penstock.server.errors import api_error, public_text
from penstock.server.mcp import server_for
from penstock.server.unavailable import (
    LOG,
    MAX_MESSAGES,
    MESSAGES,
    QUIET_S,
    LogThrottle,
    public,
    public_error,
    public_message,
)
from penstock.stops import Stop, StopReason
from penstock.testing import ManualClock
from tests.mcp_library import MCPError, in_memory
from tests.nodes.graphs import graph, node
from tests.server.openai_service import PRICE, chat_with, last
from tests.server.served import ECHO, Served, served
from tests.server.served import parse_events as parse_events

WHERE = "'/srv/secret/place.db' of postgresql://keeper@db.internal:5432/books"
SECRETS = ("/srv", "place.db", "keeper", "db.internal", ":5432")


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """The log's messages, with a filter that has let nothing pass yet."""
    with _listening() as words:
        yield words


@contextmanager
def _listening() -> Iterator[list[str]]:
    words: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    listening, before = Listening(), list(LOG.filters)
    LOG.filters[:] = [LogThrottle()]
    LOG.addHandler(listening)
    try:
        yield words
    finally:
        LOG.removeHandler(listening)
        LOG.filters[:] = before


def shows_nothing(text: str) -> bool:
    return not any(secret in text for secret in SECRETS)


@pytest.mark.parametrize(
    ("error", "code"),
    [(StoreUnavailable(WHERE), "store_unavailable"), (LedgerUnavailable(WHERE), "ledger_unavailable")],
)
def test_clients_get_advice_and_the_log_gets_the_location(error: Exception, code: str, logged: list[str]) -> None:
    found = api_error(error)
    assert (found.status, found.code, str(found), found.headers["Retry-After"]) == (503, code, MESSAGES[code], "2")
    assert "retry" in MESSAGES[code]
    assert public_text(error) == MESSAGES[code]
    assert logged == [f"{code}: {WHERE}"]


def test_the_same_message_is_logged_once_per_interval() -> None:
    clock = ManualClock()
    often = LogThrottle(clock)

    def passes(words: str) -> bool:
        return often.filter(logging.LogRecord("x", logging.WARNING, "", 0, "%s", (words,), None))

    assert [passes("full") for _ in range(3)] == [True, False, False]
    assert passes("closed")
    clock.advance(QUIET_S - 1)
    assert not passes("full")
    clock.advance(1)
    assert [passes("full") for _ in range(3)] == [True, False, False]
    assert sum(passes(str(at)) for at in range(1_000)) == MAX_MESSAGES - 1


class Away:
    """Any store, of which every call fails."""

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable(WHERE)

        return fail


REQUESTS: list[tuple[str, str, str, Any]] = [
    ("graphs", "GET", "/api/graphs/g", None),
    ("graphs", "GET", "/api/graphs", None),
    ("graphs", "PUT", "/api/graphs/g", {"document": ECHO}),
    ("graphs", "POST", "/api/runs", {"graph_id": "g"}),
    ("graphs", "POST", "/api/agents/g/chat", {"content": "x"}),
    ("graphs", "GET", "/v1/models", None),
    ("graphs", "POST", "/v1/chat/completions", {"model": "g", "messages": [{"role": "user", "content": "x"}]}),
    ("graphs", "POST", "/v1/responses", {"model": "g", "input": "x", "stream": True}),
    ("graphs", "GET", "/ready", None),
    ("runs", "GET", "/api/runs", None),
    ("runs", "GET", "/api/runs/r/events", None),
    ("runs", "POST", "/api/runs/r/cancel", None),
    ("runs", "GET", "/v1/responses/resp_r", None),
    ("chats", "GET", "/api/chats", None),
    ("chats", "POST", "/api/chats", {"graph_id": "g"}),
    ("chats", "GET", "/api/attachments/a", None),
    ("approvals", "GET", "/api/approvals", None),
]


@pytest.mark.parametrize(("store", "method", "path", "body"), REQUESTS)
async def test_no_response_reveals_the_location_of_a_database(
    store: str, method: str, path: str, body: Any, logged: list[str]
) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("g", ECHO)
        there, away = getattr(server.stores, store), Away()
        setattr(server.stores, store, away)
        server.chats._chats = server.stores.chats
        answers = [await ann.request(method, path, json=body) for _ in range(3)]
        setattr(server.stores, store, there)
        for answer in answers:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), answer.text
            assert shows_nothing(answer.text)
            assert "is unavailable" in answer.json()["error"]["message"]
        assert logged == [f"store_unavailable: {WHERE}"]


async def test_no_stream_reveals_the_location_of_a_database(logged: list[str]) -> None:
    async with served() as server, server.client("ann") as ann:
        await server.save("echo", ECHO)
        run = await server.host.submit(owner="ann", graph_id="echo", input="x")
        await server.host.wait(run.id)
        server.stores.events.read = Away().read  # type: ignore[method-assign]
        text = (await ann.get(f"/api/runs/{run.id}/events")).text
        assert [(one["event"], one["data"]["message"]) for one in parse_events(text)] == [
            ("error", MESSAGES["store_unavailable"])
        ]
        assert (shows_nothing(text), logged) == (True, [f"store_unavailable: {WHERE}"])
        del server.stores.events.read  # type: ignore[attr-defined]


@asynccontextmanager
async def over_mcp(server: Served) -> AsyncIterator[Any]:
    stores: Any = server.stores
    async with in_memory(server_for(server.host, server.chats, stores, user=User("ann", "user"))) as client:
        yield client


def text_of(result: Any) -> str:
    return "".join(part.text for part in result.content)


class Unable(MemoryLedgerStore):
    """A ledger that can be opened, and records no call."""

    def hold(self, *_: Any, **__: Any) -> Any:
        raise LedgerUnavailable(WHERE)


class Broken:
    """A node whose store is away."""

    async def execute(self, *_: Any) -> Any:
        raise StoreUnavailable(WHERE)


async def test_a_run_stopped_by_the_ledger_does_not_reveal_its_location() -> None:
    """Over every way there is to a run: REST, its events, its export, chats, OpenAI's API and MCP."""
    models = {"parrot": ScriptedModel(last, name="parrot", usage=PRICE)}
    async with served(models=models) as server, server.client("ann") as ann, over_mcp(server) as mcp:
        server.stores.ledger = Unable()
        await server.save("parrot", chat_with("parrot"))
        turn = (await ann.post("/api/agents/parrot/chat", json={"content": "x"})).json()
        run = await server.host.wait(turn["run_id"])
        assert (run.status, run.stop_reason) == ("halted", "ledger_unavailable")
        assert not shows_nothing(str(run.error)), "the record keeps what an operator looks for"
        about = f"/api/runs/{run.id}"
        paths = (about, "/api/runs", f"{about}/events", f"{about}/export", f"/api/chats/{turn['chat_id']}")
        texts = [(await ann.get(path)).text for path in (*paths, f"/v1/responses/resp_{run.id}")]
        texts.append((await ann.get(f"{about}/events", headers={"Accept": "application/json"})).text)
        for stream in (False, True):
            body = {"model": "parrot", "messages": [{"role": "user", "content": "x"}], "stream": stream}
            texts.append((await ann.post("/v1/chat/completions", json=body)).text)
            request_body = {"model": "parrot", "input": "x", "stream": stream}
            texts.append((await ann.post("/v1/responses", json=request_body)).text)
        result = await mcp.call_tool("parrot", {"input": "x"})
        texts.append(text_of(result))
        for text in texts:
            assert shows_nothing(text), text
            assert MESSAGES["ledger_unavailable"] in text


async def test_an_open_circuit_does_not_reveal_the_address_of_its_provider() -> None:
    circuit = CircuitBreaker(1, 60, name="openai-compatible:http://keeper.db.internal:5432/v1:parrot")
    circuit.record_failure()

    def refuse(_: Any) -> Any:
        raise Halted(Stop(StopReason.CIRCUIT_OPEN, circuit.check().reason))

    models = {"parrot": ScriptedModel(refuse, name="parrot", usage=PRICE)}
    async with served(models=models) as server, server.client("ann") as ann, over_mcp(server) as mcp:
        await server.save("parrot", chat_with("parrot"))
        turn = (await ann.post("/api/agents/parrot/chat", json={"content": "x"})).json()
        run = await server.host.wait(turn["run_id"])
        assert (run.status, run.stop_reason, shows_nothing(str(run.error))) == ("halted", "circuit_open", False)
        about = f"/api/runs/{run.id}"
        paths = (about, f"{about}/events", f"{about}/export", f"/api/chats/{turn['chat_id']}")
        texts = [(await ann.get(path)).text for path in (*paths, f"/v1/responses/resp_{run.id}")]
        texts.append(text_of(await mcp.call_tool("parrot", {"input": "x"})))
        for text in texts:
            assert shows_nothing(text), text
            assert "it tries again in" in text


async def test_a_node_with_an_unavailable_store_fails_without_revealing_its_location() -> None:
    async with served() as server, server.client("ann") as ann:
        server.host.executors.register("broken", Broken())
        await server.save("broken", graph([node("start", "chat-start"), node("b", "broken")], ["start > b"]))
        turn = (await ann.post("/api/agents/broken/chat", json={"content": "x"})).json()
        run = await server.host.wait(turn["run_id"])
        assert run.status == "failed"
        about = f"/api/runs/{run.id}"
        for path in (about, f"{about}/events", f"{about}/export", f"/api/chats/{turn['chat_id']}"):
            text = (await ann.get(path)).text
            assert shows_nothing(text), text
            assert MESSAGES["store_unavailable"] in text


def test_other_errors_are_shown_unchanged() -> None:
    event = HostedEvent(1, 2, "run.failed", {"error": "ValueError", "message": "StoreUnavailable: no"})
    assert public(event) is event
    assert public_error("budget_exceeded", "all spent") == "all spent"
    assert public_error(None, None) is None
    assert public_message({"state": "failed", "error": "ValueError: StoreUnavailable"}) == {
        "state": "failed",
        "error": "ValueError: StoreUnavailable",
    }


async def test_mcp_errors_do_not_reveal_their_message(logged: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """What the protocol's own server does not know, it would tell as it is."""
    async with served() as server, over_mcp(server) as mcp:
        await server.save("echo", ECHO)
        there, server.stores.graphs = server.stores.graphs, Away()  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(MCPError, match="is unavailable"):
                await mcp.list_tools()
            with pytest.raises(MCPError, match="is unavailable"):
                await mcp.call_tool("echo", {"input": "x"})
        server.stores.graphs = None  # type: ignore[assignment]
        with pytest.raises(MCPError, match="its log has the location"):
            await mcp.list_tools()
        server.stores.graphs = there
        assert [tool.name for tool in (await mcp.list_tools()).tools] == ["echo"]
    assert logged == [f"store_unavailable: {WHERE}"]
    assert "an MCP request failed: AttributeError" in caplog.text


async def test_an_invalid_graph_is_not_a_tool_and_a_call_lists_its_problems() -> None:
    async with served() as server, over_mcp(server) as mcp:
        await server.save("echo", ECHO)
        await server.save("draft", {"nodes": [node("a", "no-such-type")], "edges": []})
        assert [tool.name for tool in (await mcp.list_tools()).tools] == ["echo"]
        result = await mcp.call_tool("draft", {"input": "x"})
        assert (result.is_error, "no-such-type" in text_of(result)) == (True, True)
        assert await server.stores.runs.list() == []
