"""Hosted runs as OpenTelemetry spans."""

from __future__ import annotations

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.agents.scripted import ScriptedModel
from penstock.hosting import trace_context
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


async def test_a_run_is_a_child_of_the_span_that_submitted_it_whichever_host_executes_it() -> None:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    export, stores, tracer = ServiceExport(provider), MemoryStores(), provider.get_tracer("client")
    services = {"models": {"m": model()}}
    front = RunHost(stores, executors=standard_executors(), services=services, settings=SETTINGS)
    await stores.graphs.save("reader", "ann", "reader", READ, now_ms=1)
    with tracer.start_as_current_span("request") as request:
        submitted = await front.submit(owner="ann", graph_id="reader", run_id="in-a-span", input="x")
    with tracer.start_as_current_span("another request"):  # submitted again, it is the same run
        assert await front.submit(owner="ann", graph_id="reader", run_id="in-a-span", input="x") == submitted
    await front.submit(owner="ann", graph_id="reader", run_id="outside", input="x")
    with tracer.start_as_current_span("the program that is a worker"):
        async with RunHost(
            stores, executors=standard_executors(), services=services, settings=SETTINGS, observe=export.observe
        ) as host:
            for run_id in ("in-a-span", "outside"):
                assert (await host.wait(run_id)).status == "completed"
            with tracer.start_as_current_span("fork") as forking:
                fork = await host.fork("in-a-span", owner="ann", at="read")
                await host.wait(fork.id)
    await asyncio.to_thread(export.close)
    parents = {
        (span.attributes or {}).get("penstock.run_id"): span.parent
        for span in memory.get_finished_spans()
        if span.name.startswith("invoke_workflow")
    }
    for run_id, span in (("in-a-span", request), (fork.id, forking)):
        parent = parents[run_id]
        assert parent is not None
        assert (parent.trace_id, parent.span_id) == (span.get_span_context().trace_id, span.get_span_context().span_id)
    assert parents["outside"] is None


def test_a_trace_that_is_not_valid_is_ignored() -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert trace_context.parse(good, "a=1") == {"traceparent": good, "tracestate": "a=1"}
    assert trace_context.parse(f"cc{good[2:]}-more") == {"traceparent": f"cc{good[2:]}-more"}
    zeros = good.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), good.replace("b7ad6b7169203331", "0" * 16)
    for bad in ("", "x", good.upper(), f"ff{good[2:]}", f"{good}\n", good[:-1], *zeros, "\ud800", good * 100):
        assert trace_context.parse(bad) == {}, bad
    assert trace_context.parse(good, "a" * 513) == trace_context.parse(good, "é") == {"traceparent": good}
    for about in (None, [], {"trace": "x"}, {"trace": {"traceparent": None}}, {"trace": {"tracestate": "a=1"}}):
        with trace_context.restored({"kind": "run", "about": about}):
            assert trace_context.current.get() == {}
