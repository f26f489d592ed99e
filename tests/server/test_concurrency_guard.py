"""A server that is full says so like it says everything else."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.server.connection import MAX_CONNECTIONS
from penstock.server.settings import ServerSettings
from tests.server.served import GATE, SECRETS, TOKENS, listening, served, wire

FULL = ServerSettings(tokens=TOKENS, max_requests=2)


@pytest.mark.parametrize("path", ["/api/runs", "/ready", "/v1/models", "/nowhere"])
async def test_a_request_over_the_limit_is_refused_in_the_usual_format(path: str) -> None:
    async with (
        served(FULL) as server,
        listening(server.app) as address,
        server.client("ann") as ann,
        AsyncExitStack() as watching,
    ):
        await server.save("gate", GATE)
        run = await server.host.submit(owner="ann", graph_id="gate")
        before = (await ann.get(path)).status_code
        for _ in range(2):
            client = await watching.enter_async_context(wire(address))
            client.send("GET", f"/api/runs/{run.id}/events", Authorization=f"Bearer {SECRETS['ann']}")
            assert await client.status() == 200
        refused = await ann.get(path)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["x-request-id"]
        assert (await ann.get("/health")).status_code == 200  # it is there
        client.writer.transport.abort()
        while (answer := await ann.get(path)).status_code == 503:  # noqa: ASYNC110  until it is noticed
            await asyncio.sleep(0)
        assert answer.status_code == before
        server.gate.opened.set()


async def test_failed_requests_release_their_slot() -> None:
    async with served(FULL) as server, server.client("ann") as ann:
        for _ in range(5):
            assert (await ann.get("/api/runs/nothing")).status_code == 404
        asking = [asyncio.ensure_future(ann.get("/api/runs")) for _ in range(2)]
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert (await ann.get("/api/runs")).status_code == 200


def test_the_connection_limit_is_above_the_request_limit() -> None:
    assert ServerSettings().max_requests < MAX_CONNECTIONS
