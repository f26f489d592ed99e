# mypy: disable-error-code="import-not-found", allow-subclassing-any, allow-untyped-decorators
"""Burr: a graph is built once, each run is an application over it; the fan-out is its MapStates."""

import itertools
from collections.abc import AsyncIterator
from typing import Any

from burr.core import Action, Application, ApplicationBuilder, ApplicationContext, Graph, GraphBuilder, State, action
from burr.core.parallelism import MapStates

from benchmarks._graphs.shapes import Chain, Fan, Pause, Recorded, Run


def chain(shape: Chain) -> Run:
    graph = _chain(shape)
    last = f"s{shape.size - 1}"

    async def run() -> int:
        application = await _application(graph, "s0").abuild()
        return await _result(application, last, "x")

    return run


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    from burr.integrations.opentelemetry import OpenTelemetryBridge
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    graph = _chain(shape)
    last = f"s{shape.size - 1}"

    async def run() -> int:
        spans.clear()
        bridge = OpenTelemetryBridge(tracer=provider.get_tracer("benchmark"))
        application = await _application(graph, "s0").with_hooks(bridge).abuild()
        return await _result(application, last, "x")

    return run, lambda: sum(span.name.startswith("s") for span in spans.get_finished_spans())


def fan(shape: Fan) -> Run:
    pause, size = shape.pause, shape.size

    @action(reads=["place"], writes=["result"])
    async def work(state: State) -> State:
        if pause:
            await pause()
        return state.update(result=state["place"] + 1)

    class Everywhere(MapStates):
        def is_async(self) -> bool:
            return True

        def action(self, state: State, inputs: dict[str, Any]) -> Action:
            return work

        async def states(
            self, state: State, context: ApplicationContext, inputs: dict[str, Any]
        ) -> AsyncIterator[State]:
            for place in range(size):
                yield state.update(place=place)

        async def reduce(self, state: State, states: AsyncIterator[State]) -> State:
            return state.update(total=sum([each["result"] async for each in states]))

        @property
        def reads(self) -> list[str]:
            return []

        @property
        def writes(self) -> list[str]:
            return ["total"]

    graph = GraphBuilder().with_actions(fan=Everywhere()).with_transitions().build()

    async def run() -> int:
        application = await _application(graph, "fan").abuild()
        return await _result(application, "fan", "total")

    return run


def _chain(shape: Chain) -> Graph:
    actions = {f"s{number}": _step(shape.pause) for number in range(shape.size)}
    names = list(actions)
    return GraphBuilder().with_actions(**actions).with_transitions(*itertools.pairwise(names)).build()


def _step(pause: Pause | None) -> Any:
    @action(reads=["x"], writes=["x"])
    async def step(state: State) -> State:
        if pause:
            await pause()
        return state.update(x=state["x"] + 1)

    return step


def _application(graph: Graph, first: str) -> ApplicationBuilder:
    return ApplicationBuilder().with_graph(graph).with_entrypoint(first).with_state(x=0)


async def _result(application: Application, last: str, name: str) -> int:
    _, _, state = await application.arun(halt_after=[last])
    result: int = state[name]
    return result
