"""A fleet under test: a host that clients talk to, and hosts that work, each with connections of its own.

The same tests run over three kinds: hosts that share SQLite, hosts that share PostgreSQL, and Temporal on PostgreSQL.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from penstock.chat.service import ChatService
from penstock.engines.temporal import TemporalEngine, TemporalSettings
from penstock.hosting.engine import Engine
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import RunRecord
from penstock.ids import new_run_id
from penstock.storage.stores import Stores, open_stores
from tests.hosting.graphs import Gate, host_with

SETTINGS = HostSettings(tick_s=0.05, lease_s=2, drain_s=0, park_waiting_s=0.3)
HEARTBEAT_S = 2.0


class Fleet:
    """The hosts of one test."""

    def __init__(self, url: str, temporal: str | None) -> None:
        self.url = url
        self.temporal = temporal
        """URL of the Temporal server; None for hosts that claim runs."""
        self.queue = new_run_id()
        """Of this fleet only: the server is shared with other tests."""
        self.gate = Gate()
        self.hosts: dict[RunHost, Stores] = {}
        self._front: RunHost | None = None

    @property
    def front(self) -> RunHost:
        """The host that clients talk to; it executes nothing."""
        assert self._front is not None
        return self._front

    @property
    def stores(self) -> Stores:
        return self.hosts[self.front]

    def engine(self, *queues: str) -> Engine | None:
        if self.temporal is None:
            return None
        settings = TemporalSettings.parse(self.temporal)
        return TemporalEngine(settings, queues=queues, queue=self.queue, heartbeat_s=HEARTBEAT_S)

    async def open_front(self) -> None:
        stores = await open_stores(self.url)
        front = await host_with(stores, settings=SETTINGS, worker="front", engine=self.engine())
        if self.temporal is not None:
            await front.start()
        else:  # it submits, and claims nothing
            front._reading.is_working = True
        self._front = front
        self.hosts[front] = stores
        self.chats = ChatService(front, stores.chats)

    async def worker(
        self, name: str = "worker", *queues: str, settings: HostSettings = SETTINGS, **more: Any
    ) -> RunHost:
        stores = await open_stores(self.url)
        engine = self.engine(*(queues or (self.queue,)))
        services: Mapping[str, Any] | None = more.pop("services", None)
        host = await host_with(
            stores, settings=settings, worker=name, engine=engine, services=services, gate=self.gate, **more
        )
        ChatService(host, stores.chats)
        await host.start()
        self.hosts[host] = stores
        return host

    async def close(self, host: RunHost) -> None:
        """Close a host in order: its runs go to others."""
        stores = self.hosts.pop(host)
        await host.close()
        await stores.close()

    async def run(self, run_id: str) -> RunRecord:
        run = await self.stores.runs.get(run_id)
        assert run is not None
        return run

    async def until(self, run_id: str, *statuses: str) -> RunRecord:
        while (run := await self.run(run_id)).status not in statuses:  # noqa: ASYNC110  # it is in the database
            await asyncio.sleep(0.01)
        return run

    async def types(self, run_id: str) -> list[str]:
        return [event.type for event in await self.stores.events.read(run_id) if event.type.startswith("run.")]


@asynccontextmanager
async def fleet_of(url: str, temporal: str | None) -> AsyncIterator[Fleet]:
    fleet = Fleet(url, temporal)
    await fleet.open_front()
    try:
        yield fleet
    finally:
        for host in [*fleet.hosts]:
            await fleet.close(host)
