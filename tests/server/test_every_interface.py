"""One graph on one server: over REST with a resumed event stream, as an OpenAI model, and as an MCP tool."""

from __future__ import annotations

import httpx2
import pytest
from openai import AsyncOpenAI

from tests.mcp_library import over_http
from tests.server.served import SECRETS, edge, listening, node, parse_events, served, wire
from tests.server.test_mcp import text

pytestmark = pytest.mark.requirement("X-6")

DOCUMENT = {
    "nodes": [node("start", "chat-start"), node("gate", "gate"), node("out", "output")],
    "edges": [edge("start", "gate"), edge("gate", "out")],
}
TOKEN = SECRETS["ann"]
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}


async def test_a_graph_saved_once_is_a_rest_resource_a_model_and_a_tool() -> None:
    async with served() as server, listening(server.app) as (host, port):
        url = f"http://{host}:{port}"
        async with (
            httpx2.AsyncClient(base_url=url, headers=AUTHORIZATION, timeout=30) as rest,
            AsyncOpenAI(api_key=TOKEN, base_url=f"{url}/v1", timeout=30, max_retries=0) as openai,
            over_http(f"{url}/mcp", AUTHORIZATION) as mcp,
        ):
            saved = await rest.put("/api/graphs/gate", json={"name": "Gate", "document": DOCUMENT})
            assert saved.status_code == 200, saved.text

            # REST: the client disconnects in the middle of the run and resumes the stream behind the last event it saw.
            started = await rest.post("/api/runs", json={"graph_id": "gate", "input": "hello"})
            assert started.status_code == 201, started.text
            events = f"/api/runs/{started.json()['id']}/events"
            async with wire((host, port)) as first:
                first.send("GET", events, **AUTHORIZATION)
                await first.until(b"\r\n\r\n")
                await server.gate.entered.wait()
                seen = parse_events((await first.until(b"event: run.started\n") + await first.until(b"\n\n")).decode())
            server.gate.opened.set()
            resumed = await rest.get(events, headers={"Last-Event-ID": seen[-1]["id"]})
            rest_of_run = parse_events(resumed.text)
            whole = [*seen, *rest_of_run]
            assert [int(event["id"]) for event in whole] == list(range(1, len(whole) + 1))
            assert (seen[-1]["event"], whole[-1]["event"]) == ("run.started", "run.completed")
            run = (await rest.get(f"/api/runs/{started.json()['id']}")).json()
            assert (run["status"], run["output"]) == ("completed", "hello")
            assert (await rest.get(events, headers={"Last-Event-ID": whole[-1]["id"]})).status_code == 204

            # OpenAI: whole and in pieces.
            assert "gate" in [model.id async for model in openai.models.list()]
            user_messages = [{"role": "user", "content": "hello"}]
            answer = await openai.chat.completions.create(model="gate", messages=user_messages)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == "hello"
            stream = await openai.chat.completions.create(model="gate", messages=user_messages, stream=True)  # type: ignore[call-overload]
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "hello"

            # MCP.
            assert "gate" in [tool.name for tool in (await mcp.list_tools()).tools]
            assert text(await mcp.call_tool("gate", {"input": "hello"})) == "hello"

            runs = (await rest.get("/api/runs")).json()
            assert [(one["graph_id"], one["status"]) for one in runs["runs"]] == [("gate", "completed")] * 4
