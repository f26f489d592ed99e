"""Workers on Temporal whose database is away, with and without Temporal; that are late; and whose nodes block."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.engines.temporal import worker as temporal_worker
from penstock.hosting import dispatched
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.runtime.graphs.graph_runtime import FlowContext
from tests.engines.fleet import HEARTBEAT_S, SETTINGS, fleet_of
from tests.engines.temporal_server import TemporalServer, temporal_server
from tests.hosting.graphs import graph
from tests.soak import SOAK
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url", "temporal_server"]

pytestmark = pytest.mark.requirement("X-4")

GATED = graph(
    ("in", "input", {}),
    ("first", "llm-completion", {"model": "m"}),
    ("gate", "gate", {}),
    ("second", "llm-completion", {"model": "m"}),
    ("out", "output", {}),
    edges="in>first first>gate gate>second second>out",
)


@asynccontextmanager
async def away(url: str) -> AsyncIterator[None]:
    """The database takes no connections, and has cut those that it had."""
    name = urlsplit(url).path.removeprefix("/")
    connection = await asyncpg.connect(url.replace(f"/{name}", "/postgres"))
    try:
        await connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await connection.fetch("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)
        yield
    finally:
        await connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
        await connection.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_temporal_away", [False, True] if SOAK else [True])
async def test_runs_go_on_after_the_database_was_away_and_nothing_is_called_twice(
    is_temporal_away: bool, postgres_url: str, temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatched, "REDISPATCH_S", 0.2)
    monkeypatch.setattr("penstock.engines.temporal.engine.CALL_S", 0.5)
    monkeypatch.setattr("penstock.hosting.host.TIDY_S", 0.2)
    model = ScriptedModel(lambda request: f"answer {request.messages[-1].text}")
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.stores.graphs.save("gated", "ann", "gated", GATED, now_ms=0)
        services = {"models": {"m": model}}
        await fleet.worker("first", services=services)
        for run_id in ("r", "s"):
            await fleet.front.submit(owner="ann", graph_id="gated", run_id=run_id, input="x")
        await fleet.gate.has_come(2)
        async with away(postgres_url):
            if is_temporal_away:
                temporal_server.freeze()
            try:
                fleet.gate.opened.set()
                await asyncio.sleep(HEARTBEAT_S / 2)
            finally:
                if is_temporal_away:
                    temporal_server.thaw()
            await asyncio.sleep(HEARTBEAT_S)
        for run_id in ("r", "s"):
            left = await fleet.front.wait(run_id)
            assert (left.status, left.output) == ("completed", "answer answer x")
            events = await fleet.stores.events.read(run_id)
            assert [event.seq for event in events] == [*range(1, len(events) + 1)]
            assert sum(event.type == "run.completed" for event in events) == 1
        assert model.calls == 4, "each call was made once"


class Blocking:
    """A node that keeps the event loop of its worker, as no node should."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self) -> None:
        self.came = 0

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        self.came += 1
        until = time.monotonic() + data["seconds"]
        while time.monotonic() < until:
            pass
        return ExecutionResult({"output": inputs["input"]})


@pytest.mark.timeout(120)
async def test_a_node_that_blocks_its_worker_for_longer_than_a_heartbeat_is_not_taken_away(
    postgres_url: str, temporal_server: TemporalServer
) -> None:
    node = Blocking()
    document = graph(("in", "input", {}), ("b", "blocking", {"seconds": 1.25 * HEARTBEAT_S}), edges="in>b")
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        await fleet.stores.graphs.save("blocking", "ann", "blocking", document, now_ms=0)
        # Its lease in the database expires meanwhile, which says nothing where Temporal decides.
        await fleet.worker(settings=replace(SETTINGS, lease_s=1), blocking=node)
        await fleet.front.submit(owner="ann", graph_id="blocking", run_id="r", input="x")
        left = await fleet.front.wait("r")
    assert (left.status, left.epoch, left.crash_count, node.came) == ("completed", 1, 0, 1)


@pytest.mark.timeout(180)
async def test_runs_of_a_crowd_whose_heartbeats_are_late_each_end_once(
    postgres_url: str, temporal_server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other activity sends no heartbeat for longer than it may: it is given away, and writes nothing more."""
    keep_beating, number = temporal_worker.Activities._keep_beating, 0

    async def late(self: temporal_worker.Activities) -> None:
        nonlocal number
        number += 1
        if number % 2 and number < 2 * CROWD:
            await asyncio.sleep(3 * HEARTBEAT_S)
        await keep_beating(self)

    monkeypatch.setattr(temporal_worker.Activities, "_keep_beating", late)
    settings = replace(SETTINGS, max_running=CROWD, max_running_per_owner=2 * CROWD)
    async with fleet_of(postgres_url, temporal_server.url()) as fleet:
        for name in ("first", "second"):
            await fleet.worker(name, settings=settings)
        runs = [await fleet.front.submit(owner="ann", graph_id="gate", input=at) for at in range(CROWD)]
        await fleet.gate.has_come(CROWD + 3)  # some were given to another worker
        fleet.gate.opened.set()
        for at, run in enumerate(runs):
            left = await fleet.front.wait(run.id)
            assert (left.status, left.output) == ("completed", at)
            types = await fleet.types(run.id)
            assert types.count("run.completed") == 1
            assert types[-1] == "run.completed"


CROWD = 12
