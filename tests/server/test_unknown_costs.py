"""A model without a price, over HTTP: every place that shows money shows the calls of unknown cost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest

from penstock.runtime.billing.usage import Usage
from penstock.server.mcp.tools import RUN
from tests.server.openai_service import ANNA, Served, serving
from tests.server.served import parse_events
from tests.server.test_mcp import over_http
from tests.server.test_metrics import parsed

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def unpriced() -> AsyncIterator[Served]:
    """A server whose models report tokens that have no price."""
    async with serving() as server:
        for model in server.models.values():
            model.usage = Usage(7, 3)
        yield server


@asynccontextmanager
async def http(server: Served) -> AsyncIterator[httpx2.AsyncClient]:
    headers = {"Authorization": f"Bearer {ANNA}"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:
        yield client


async def test_a_run_its_events_and_the_metrics_count_calls_of_unknown_cost() -> None:
    async with unpriced() as server, http(server) as client:
        body = {"graph_id": "greedy", "input": "hello", "limits": {"max_cost_usd": "0.01"}}
        run = (await client.post("/api/runs", json=body)).json()
        await server.run(run["id"])
        shown = (await client.get(f"/api/runs/{run['id']}")).json()
        listed = (await client.get("/api/runs")).json()["runs"]
        events = parse_events((await client.get(f"/api/runs/{run['id']}/events")).text)
        metrics = parsed(server.app.state.server.metrics.text(server.host.stats()))
    assert (shown["status"], shown["cost_usd"], shown["cost_nanos"], shown["unknown_costs"]) == (
        "completed",
        None,
        0,
        2,
    )
    assert [(one["cost_usd"], one["unknown_costs"]) for one in listed] == [(None, 2)]
    ended = [event["data"]["data"] for event in events if event["event"] == "call.ended"]
    assert [call["cost_usd"] for call in ended if call["kind"] == "llm"] == [None, None]
    assert events[-1]["data"]["data"]["unknown_costs"] == 2
    (counted,) = metrics["penstock_runs_unknown_costs_total"].samples.values()
    assert counted == 2


async def test_a_chat_completion_of_unknown_cost_is_not_reported_as_free() -> None:
    async with unpriced() as server, server.client() as client:
        answer = await client.chat.completions.create(model="greedy", messages=HELLO)
        stream = await client.chat.completions.create(
            model="greedy", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        *_, last = [chunk async for chunk in stream]
        run = await server.run(answer.model_extra["penstock"]["run_id"])  # type: ignore[index]
        chats = await server.stores.chats.messages(run.origin["chat_id"])
    for usage in (answer.usage, last.usage):
        assert usage is not None
        assert (usage.total_tokens, usage.model_extra) == (20, {"cost": None, "unknown_costs": 2})
    facts = answer.model_extra["penstock"]  # type: ignore[index]
    assert (facts["status"], facts["cost_usd"], facts["unknown_costs"]) == ("completed", None, 2)
    answers = [one.data for one in chats[0] if one.role == "assistant"]
    assert [(data["cost_usd"], data["unknown_costs"]) for data in answers] == [(None, 2)]


async def test_a_response_of_unknown_cost_is_not_reported_as_free() -> None:
    async with unpriced() as server, server.client() as client:
        response = await client.responses.create(model="greedy", input="hello")
    assert response.usage is not None
    assert response.usage.model_extra == {"cost": None, "unknown_costs": 2}


async def test_an_mcp_tool_reports_unknown_costs() -> None:
    async with unpriced() as server, over_http(server) as client:
        result = await client.call_tool("greedy", {"input": "hello"})
    assert result.meta is not None
    assert (result.meta[RUN]["cost_usd"], result.meta[RUN]["unknown_costs"]) == (None, 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_known_costs_are_reported_without_a_count(path: str) -> None:
    content = {"messages": HELLO} if path.endswith("completions") else {"input": "hello"}
    async with serving() as server, http(server) as client:
        answer = (await client.post(path, json={"model": "greedy", **content})).json()
    assert answer["usage"]["cost"] == 0.5
    assert "unknown_costs" not in answer["usage"]
    assert "unknown_costs" not in str(answer)
