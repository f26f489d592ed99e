"""The MCP server: the official client, in memory, over streamable HTTP and over stdin and stdout."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from penstock.chat.service import ChatService
from penstock.errors import InvalidValue
from penstock.hosting.ports import GraphRecord
from penstock.server.auth import User
from penstock.server.mcp import server_for
from penstock.server.mcp.calls import LIMITS
from penstock.server.mcp.tools import RUN, input_of, tool_name, tool_of
from penstock.server.schemas import MAX_MONEY_USD
from tests import mcp_library
from tests.mcp_library import MODES, MCPError
from tests.nodes.graphs import graph, node
from tests.server.openai_service import ANNA, BERT, GRAPHS, Served, serving

HELLO: dict[str, Any] = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}},
}


@asynccontextmanager
async def in_memory(served: Served) -> AsyncIterator[Any]:
    chats = ChatService(served.host, served.stores.chats)
    server = server_for(served.host, chats, served.stores, user=User("anna", "user"))
    async with mcp_library.in_memory(server) as client:
        yield client


@asynccontextmanager
async def over_http(served: Served, key: str = ANNA, mode: str = "auto") -> AsyncIterator[Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with mcp_library.over_http(f"{served.url}/mcp", headers, mode) as client:
        yield client


def text(result: Any) -> str:
    return "".join(part.text for part in result.content)


# Graphs as tools


@pytest.mark.parametrize("id", ["a", "A-b_9", "x" * 64, "my.graph", "a:b", "x" * 100, "a.b", "a_b"])
def test_every_graph_has_a_valid_tool_name(id: str) -> None:
    name = tool_name(id)
    assert len(name) <= 64
    assert all(c.isascii() and (c.isalnum() or c in "_-") for c in name)
    assert tool_name(id) == name


def test_tool_names_are_unique() -> None:
    ids = ["a.b", "a:b", "a_b", "x" * 65, "x" * 66, "x" * 64, "a-b"]
    assert len({tool_name(id) for id in ids}) == len(ids)


@pytest.mark.parametrize("id", ["ann:nightly", "x" * 65, "my.graph", "é"])
def test_a_hashed_tool_name_is_no_graphs_own_id(id: str) -> None:
    made = tool_name(id)
    assert tool_name(made) != made
    assert tool_name(tool_name(made)) not in (id, made, tool_name(made))


def record(document: dict[str, Any], **more: Any) -> GraphRecord:
    return GraphRecord("g", 1, "anna", "The graph", {**document, **more}, "digest")


@pytest.mark.parametrize(
    ("document", "input", "required"),
    [
        (GRAPHS["parrot"], {"type": "string"}, ["input"]),
        (graph([node("in", "input")]), {"type": "string"}, ["input"]),
        (graph([node("in", "input", type="any")]), {}, ["input"]),
        (graph([node("in", "input", type="number")]), {"type": "number"}, ["input"]),
        (graph([node("in", "input", type="list", default=[1])]), {"type": "array"}, []),
        (graph([node("c", "constant", value=1)]), {"type": "string"}, []),
        ({}, {"type": "string"}, []),
    ],
)
def test_the_schema_of_a_tool_is_that_of_the_graphs_input(
    document: dict[str, Any], input: dict[str, Any], required: list[str]
) -> None:
    schema = tool_of(record(document)).model_dump(by_alias=True)["inputSchema"]
    assert schema["properties"]["input"] == {**input, "description": "The input of the graph."}
    assert schema["required"] == required
    assert schema["additionalProperties"] is False


def test_a_tool_is_described_by_its_graph() -> None:
    assert tool_of(record({})).description == "Runs the graph 'The graph'."
    assert tool_of(record({}, description="Adds.")).description == "Adds."
    assert tool_of(record({}, description=3)).title == "The graph"


@pytest.mark.parametrize(
    ("kind", "taken", "refused", "called"),
    [
        ("text", ["", "5"], [5, True, {}, []], "text"),
        ("number", [5, 0.5], ["5", True, {}, []], "a number"),
        ("boolean", [True, False], [1, "true", [], {}], "true or false"),
        ("object", [{}, {"a": 1}], ["{}", 1, True, []], "an object"),
        ("list", [[], [1]], [1, "x", True, {}], "a list"),
        ("any", [1, "x", True, [], {}], [], ""),
    ],
)
def test_a_tool_accepts_only_what_its_schema_allows(
    kind: str, taken: list[Any], refused: list[Any], called: str
) -> None:
    needed, with_default = (record(graph([node("in", "input", type=kind, **more)])) for more in ({}, {"default": 1}))
    for value in taken:
        assert input_of(needed, {"input": value}) is value
    for value in refused:
        for one in (needed, with_default):
            with pytest.raises(InvalidValue, match=f"input must be {called}"):
                input_of(one, {"input": value})
    assert input_of(with_default, {"input": None}) is input_of(with_default, {}) is None


# Calls


async def test_a_graph_that_was_just_saved_can_be_called() -> None:
    async with serving() as served, in_memory(served) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == sorted(GRAPHS)
        await served.stores.graphs.save("my.new", "anna", "New", GRAPHS["plain"], now_ms=1)
        name = tool_name("my.new")
        assert name in [tool.name for tool in (await client.list_tools()).tools]
        assert text(await client.call_tool(name, {"input": "x"})) == "x"
        await served.stores.graphs.archive("my.new")
        assert name not in [tool.name for tool in (await client.list_tools()).tools]
        with pytest.raises(MCPError, match="there is no tool"):
            await client.call_tool(name, {"input": "x"})


async def test_a_call_is_a_run_and_reports_its_cost() -> None:
    async with serving() as served, in_memory(served) as client:
        result = await client.call_tool("parrot", {"input": "Hi 🙂"})
        assert (text(result), result.is_error) == ("Hi 🙂", False)
        about = (result.meta or {})[RUN]
        assert (about["status"], about["cost_usd"], about["tokens_out"]) == ("completed", 0.25, 3)
        assert (await served.run(about["id"])).owner == "anna"


async def test_output_that_is_not_text_is_returned_as_structured_content() -> None:
    async with serving() as served, in_memory(served) as client:
        document = graph([node("in", "input", type="object"), node("out", "output")], ["in > out"])
        await served.stores.graphs.save("thing", "anna", "Thing", document, now_ms=1)
        result = await client.call_tool("thing", {"input": {"a": [1, None]}})
        assert result.structured_content == {"a": [1, None]}
        assert text(result) == '{"a": [1, null]}'


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("parrot", {}, "input must be present"),
    ("parrot", {"input": None}, "input must be present"),
    ("parrot", {"input": 3}, "input must be text"),
    ("parrot", {"input": "x", "more": 1}, "only `input`"),
    ("plain", {"input": 3}, "input must be text, not 3"),
    ("plain", {"input": {"a": 1}}, "input must be text"),
    ("broken", {"input": "x"}, "the model fell over"),
]


async def test_a_run_without_a_result_is_a_tool_error() -> None:
    async with serving() as served, in_memory(served) as client:
        for name, arguments, says in WRONG:
            result = await client.call_tool(name, arguments)
            assert result.is_error
            assert says in text(result)


async def test_requested_limits_hold() -> None:
    async with serving() as served, in_memory(served) as client:
        result = await client.call_tool("greedy", {"input": "x"}, meta={LIMITS: {"max_api_calls": 1}})
        assert result.is_error
        assert "api_call_limit_exceeded" in text(result)
        result = await client.call_tool("greedy", {"input": "x"}, meta={LIMITS: {"max_dreams": 3}})
        assert "max_api_calls" in text(result)
        too_much = {"max_cost_usd": MAX_MONEY_USD + 1}
        result = await client.call_tool("greedy", {"input": "x"}, meta={LIMITS: too_much})
        assert "max_cost_usd must be at most 1000000" in text(result)


@pytest.mark.requirement("X-6")
@pytest.mark.parametrize("mode", MODES)
async def test_graphs_are_called_over_http(mode: str) -> None:
    async with serving() as served, over_http(served, BERT, mode) as client:
        assert "parrot" in [tool.name for tool in (await client.list_tools()).tools]
        reported: list[str | None] = []

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            reported.append(message)

        result = await client.call_tool("parrot", {"input": "Hi"}, progress_callback=on_progress)
        assert text(result) == "Hi"
        assert reported == ["start started", "start completed", "agent started", "agent completed"]
        (run,) = await served.runs()
        assert run.owner == "bert"


@pytest.mark.parametrize("mode", MODES)
async def test_cancelling_a_call_cancels_its_run(mode: str, tmp_path: Path) -> None:
    async with serving(url=f"sqlite:///{tmp_path}/it.db") as served, over_http(served, mode=mode) as client:
        calling = asyncio.ensure_future(client.call_tool("slow", {"input": "x"}))
        await served.gate.reached.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        (run,) = await served.runs()
        ended = await served.run(run.id)
        assert ended.status == "cancelled"
        assert "cancelled" in str(ended.error)


async def test_a_session_belongs_to_its_user() -> None:
    async with serving() as served, httpx2.AsyncClient(base_url=served.url, timeout=30) as http:
        headers = {"Accept": "application/json, text/event-stream"}
        mine = {**headers, "Authorization": f"Bearer {ANNA}"}
        answer = await http.post("/mcp", json=HELLO, headers=mine)
        session = {"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-06-18"}
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        theirs = {**headers, **session, "Authorization": f"Bearer {BERT}"}
        assert (await http.post("/mcp", json=ping, headers=theirs)).status_code == 404
        assert (await http.post("/mcp", json=ping, headers={**mine, **session})).status_code == 200
        assert (await http.post("/mcp", json=ping, headers={**headers, **session})).status_code == 401


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_in_progress_at_shutdown_reports_that_its_run_was_parked(mode: str) -> None:
    async with serving() as served, over_http(served, mode=mode) as client:
        calling = asyncio.ensure_future(client.call_tool("slow", {"input": "x"}))
        await served.gate.reached.wait()
        served.app.state.server.streams.close()
        await served.host.close(0)
        result = await calling
        (run,) = await served.runs()
        assert (result.is_error, run.status) == (True, "parked")
        assert text(result).startswith(f"run {run.id} was parked: the server is shutting down")
        assert (result.meta or {})[RUN]["status"] == "parked"


async def test_a_listening_stream_ends_cleanly_at_shutdown() -> None:
    headers = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {ANNA}"}
    async with serving() as served, httpx2.AsyncClient(base_url=served.url, headers=headers, timeout=30) as http:
        session = (await http.post("/mcp", json=HELLO)).headers["mcp-session-id"]
        async with http.stream("GET", "/mcp", headers={"Mcp-Session-Id": session}) as listening:
            assert listening.status_code == 200
            served.app.state.server.streams.close()
            assert [piece async for piece in listening.aiter_bytes()] == [], "and not broken off"
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
        assert (await http.post("/mcp", json=ping, headers={"Mcp-Session-Id": session})).status_code == 200


async def test_ending_a_session_in_which_a_client_listens_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    headers = {"Accept": "application/json, text/event-stream", "Authorization": f"Bearer {ANNA}"}
    async with serving() as served, httpx2.AsyncClient(base_url=served.url, headers=headers, timeout=30) as http:
        session = {"Mcp-Session-Id": (await http.post("/mcp", json=HELLO)).headers["mcp-session-id"]}
        async with http.stream("GET", "/mcp", headers=session) as listening:
            assert (await http.delete("/mcp", headers=session)).status_code == 200
            assert [piece async for piece in listening.aiter_bytes()] == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_shutdown_does_not_cancel_the_runs_of_calls() -> None:
    async with serving() as served:
        async with over_http(served) as client:
            calling = asyncio.ensure_future(client.call_tool("slow", {"input": "x"}))
            await served.gate.reached.wait()
            served.app.state.server.streams.close()
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
        served.gate.opened.set()
        (run,) = await served.runs()
        assert (await served.run(run.id)).status == "completed"


STDIO = """
import asyncio, os
from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost
from penstock.nodes import executors
from penstock.server.mcp import serve_stdio
from penstock.storage.memory import MemoryStores

async def main():
    stores = MemoryStores()
    nodes = [{"id": "in", "type": "input", "data": {}}, {"id": "out", "type": "output", "data": {}}]
    edge = {"id": "e", "source": "in", "target": "out", "data": {"channel": "flow"}}
    document = {"id": "g", "nodes": nodes, "edges": [edge]}
    await stores.graphs.save("plain", "local", "Plain", document, now_ms=1)
    async with RunHost(stores, executors=executors()) as host:
        submit = host.submit
        async def printing(**options):
            print("printed", flush=True)
            os.write(1, b"written")
            return await submit(**options)
        host.submit = printing
        await serve_stdio(host, ChatService(host, stores.chats), stores)

asyncio.run(main())
"""


@pytest.mark.requirement("X-6")
async def test_graphs_are_called_over_stdin_and_stdout() -> None:
    async with mcp_library.over_stdio(sys.executable, ["-c", STDIO]) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["plain"]
        assert text(await client.call_tool("plain", {"input": "ü\n"})) == "ü\n"


def test_what_a_graph_prints_does_not_reach_standard_output() -> None:
    command = [sys.executable, "-c", STDIO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        begun = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        params = {"name": "plain", "arguments": {"input": "x"}}
        for message in (HELLO, begun, {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params}):
            program.stdin.write(json.dumps(message).encode() + b"\n")
        program.stdin.flush()
        answers = [json.loads(program.stdout.readline()) for _ in range(2)]
        program.stdin.close()
        assert [answer["id"] for answer in answers] == [1, 2]
        assert answers[1]["result"]["content"] == [{"type": "text", "text": "x"}]
        assert program.stdout.read() == b""
        assert b"printed\nwritten" in program.stderr.read()
