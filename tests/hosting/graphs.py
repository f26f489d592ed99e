"""Graphs and executors that hosting tests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.hosting.engine import Engine
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import HostedEvent, HostStores
from penstock.kernel.executor import DataValue, ExecutionResult, Handle
from penstock.nodes import executors as node_executors
from penstock.runtime.billing.prices import PriceBook
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.node_execution import NodeEvent

SETTINGS = HostSettings(tick_s=0.05, lease_s=3, drain_s=0)


def graph(*nodes: tuple[str, str, dict[str, Any]], edges: str = "") -> dict[str, Any]:
    """A graph of nodes (id, type, data) and edges such as `a>b b.approved>c`."""
    return {
        "nodes": [{"id": id, "type": type, "position": {"x": 0, "y": 0}, "data": data} for id, type, data in nodes],
        "edges": [_edge(number, one) for number, one in enumerate(edges.split())],
    }


def _edge(number: int, text: str) -> dict[str, Any]:
    source, target = text.split(">")
    source, _, handle = source.partition(".")
    return {
        "id": f"e{number}",
        "source": source,
        "sourceHandle": handle or "output",
        "target": target,
        "targetHandle": "input",
        "data": {"channel": "flow"},
    }


def without_steps(events: Iterable[HostedEvent]) -> list[HostedEvent]:
    """The events without those of steps, which nodes tell too, and without budgets, which come when they are due."""
    return [event for event in events if event.type != "budget" and event.data.get("kind") != "system"]


ECHO = graph(("in", "input", {}), ("out", "output", {}), edges="in>out")
ASK = graph(
    ("in", "input", {}),
    ("ask", "approval", {"question": "May {{ input }} go?"}),
    ("yes", "output", {}),
    edges="in>ask ask.approved>yes",
)
GATE = graph(("in", "input", {}), ("gate", "gate", {}), ("out", "output", {}), edges="in>gate gate>out")


class Gate:
    """A node that waits until it is opened; counts who came."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.entered = asyncio.Event()
        self.came = 0
        self._news = asyncio.Event()

    async def has_come(self, times: int) -> None:
        """Wait until so many have come."""
        while self.came < times:
            self._news.clear()
            await self._news.wait()

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        self.came += 1
        self.entered.set()
        self._news.set()
        await self.opened.wait()
        return ExecutionResult({"output": inputs["input"]})


class Speaker:
    """A node that tells many pieces of text."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | ExecutionResult]:
        for number in range(data.get("pieces", 10)):
            yield NodeEvent.progress("delta", {"text": f"{number} ", "source": "speaker"})
        yield ExecutionResult({"output": DataValue("text", "done")})


class Breaker:
    """A node that raises."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def execute(self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext) -> Any:
        raise ValueError(data.get("message", "broken"))


def executors(**more: Any) -> dict[str, Any]:
    """The executors of all node types, and those of these tests."""
    return {**node_executors(), "speaker": Speaker(), "breaker": Breaker(), **more}


async def host_with(
    stores: HostStores,
    *,
    settings: HostSettings = SETTINGS,
    clock: Clock = SYSTEM_CLOCK,
    worker: str | None = None,
    services: Mapping[str, Any] | None = None,
    prices: PriceBook | None = None,
    engine: Engine | None = None,
    **more: Any,
) -> RunHost:
    """A host that is not started yet, whose stores have the graphs of these tests."""
    for name, document in (("echo", ECHO), ("ask", ASK), ("gate", GATE)):
        await stores.graphs.save(name, "ann", name, document, now_ms=0)
    return RunHost(
        stores,
        executors=executors(**more),
        settings=settings,
        clock=clock,
        worker=worker,
        services=services,
        prices=prices,
        engine=engine,
    )


class Sleeper:
    """A node that takes as long as its data says."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> ExecutionResult:
        await asyncio.sleep(data["seconds"])
        return ExecutionResult({"output": inputs["input"]})


async def killed(host: RunHost) -> None:
    """End all that a host does as if its process had died: nothing more is written, no lease is given back."""
    own = (None if host._claims is None else host._claims.task, host._ticking, host._tidying)
    tasks = [*host._runs.tasks.values(), *(task for task in own if task is not None)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Teller:
    """A node that emits many events."""

    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def __init__(self) -> None:
        self.emitted = 0

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> AsyncIterator[NodeEvent | ExecutionResult]:
        for number in range(data["events"]):
            yield NodeEvent.progress("number", number)
            self.emitted += 1
        yield ExecutionResult({"output": DataValue("any", None)})
