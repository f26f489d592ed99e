"""Hosted runs as OpenTelemetry spans."""

from __future__ import annotations

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors as standard_executors
from penstock.runtime.billing.usage import Usage
from penstock.runtime.context import ExecutionContext
from penstock.storage.memory import MemoryStores
from penstock.telemetry.service import ServiceExport
from tests.hosting.graphs import graph

READ = graph(("in", "input", {}), ("read", "llm-completion", {"model": "m"}), edges="in>read")
SETTINGS = HostSettings(tick_s=0.05, drain_s=0)


def model() -> ScriptedModel:
    usage = Usage.of(cost_usd="0.25", input_tokens=3, output_tokens=2)
    return ScriptedModel(lambda request: "a secret answer", name="gpt-x", usage=usage)


async def ran(host: RunHost) -> str:
    await host.stores.graphs.save("reader", "ann", "reader", READ, now_ms=1)
    run = await host.submit(owner="ann", graph_id="reader", input="a secret dam")
    assert (await host.wait(run.id)).status == "completed"
    return run.id


async def test_each_hosted_run_is_a_trace_with_its_calls_and_no_messages() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    export = ServiceExport(provider)
    services = {"models": {"m": model()}}
    async with RunHost(
        MemoryStores(), executors=standard_executors(), services=services, settings=SETTINGS, observe=export.observe
    ) as host:
        runs = [await ran(host) for _ in range(2)]
    await asyncio.to_thread(export.close)
    spans = memory.get_finished_spans()
    calls = [span for span in spans if span.name == "chat gpt-x"]
    assert sorted(str((span.attributes or {})["penstock.run_id"]) for span in calls) == sorted(runs)
    assert len({span.context.trace_id for span in spans}) == 2
    assert [(span.attributes or {})["penstock.cost.usd"] for span in calls] == [0.25, 0.25]
    assert "secret" not in "".join(span.to_json() for span in spans)


async def test_a_tracer_that_fails_stops_no_run() -> None:
    def broken(context: ExecutionContext) -> None:
        raise RuntimeError("no tracer")

    services = {"models": {"m": model()}}
    async with RunHost(
        MemoryStores(), executors=standard_executors(), services=services, settings=SETTINGS, observe=broken
    ) as host:
        await ran(host)
        assert host.stats()["totals"]["observer_failures"] == 1
