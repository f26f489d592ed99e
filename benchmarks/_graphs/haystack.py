# mypy: disable-error-code="import-not-found", allow-subclassing-any, allow-untyped-decorators
"""Haystack's Pipeline, run asynchronously: a component per step."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"  # it is read when haystack is imported

from haystack import Pipeline, component, tracing
from haystack.core.component.types import Variadic

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run

AT_ONCE = 1_000


@component
class AddOne:
    def __init__(self, pause: Pause | None) -> None:
        self.pause = pause

    @component.output_types(x=int)
    def run(self, x: int) -> dict[str, int]:
        return {"x": x + 1}

    @component.output_types(x=int)
    async def run_async(self, x: int) -> dict[str, int]:
        if self.pause:
            await self.pause()
        return {"x": x + 1}


@component
class Place:
    def __init__(self, place: int, pause: Pause | None) -> None:
        self.place = place
        self.pause = pause

    @component.output_types(x=int)
    def run(self, x: int) -> dict[str, int]:
        return {"x": self.place + 1}

    @component.output_types(x=int)
    async def run_async(self, x: int) -> dict[str, int]:
        if self.pause:
            await self.pause()
        return {"x": self.place + 1}


@component
class Layered:
    def __init__(self, name: str, shape: Layers) -> None:
        self.name = name
        self.shape = shape

    @component.output_types(x=int)
    def run(self, xs: Variadic[int]) -> dict[str, int]:
        return {"x": self.shape.value(self.name, xs)}

    @component.output_types(x=int)
    async def run_async(self, xs: Variadic[int]) -> dict[str, int]:
        await asyncio.sleep(self.shape.sleep_s[self.name])
        return {"x": self.shape.value(self.name, xs)}


@component
class Given:
    @component.output_types(x=int)
    def run(self, x: int) -> dict[str, int]:
        return {"x": x}

    @component.output_types(x=int)
    async def run_async(self, x: int) -> dict[str, int]:
        return {"x": x}


@component
class Total:
    @component.output_types(x=int)
    def run(self, xs: Variadic[int]) -> dict[str, int]:
        return {"x": sum(xs)}

    @component.output_types(x=int)
    async def run_async(self, xs: Variadic[int]) -> dict[str, int]:
        return {"x": sum(xs)}


def chain(shape: Chain) -> Run:
    pipeline = Pipeline()
    for number in range(shape.size):
        pipeline.add_component(f"s{number}", AddOne(shape.pause))
    for number in range(1, shape.size):
        pipeline.connect(f"s{number - 1}.x", f"s{number}.x")
    return _runs(pipeline, "s0", f"s{shape.size - 1}")


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    """With a tracer that keeps its spans in memory, which is the extension point for tracers."""
    tracer = MemoryTracer()
    tracing.enable_tracing(tracer)
    untraced = chain(shape)

    async def run() -> int:
        tracer.spans.clear()
        return await untraced()

    return run, lambda: sum(span.name == "haystack.component.run" for span in tracer.spans)


def fan(shape: Fan) -> Run:
    pipeline = Pipeline()
    pipeline.add_component("given", Given())
    pipeline.add_component("total", Total())
    for place in range(shape.size):
        pipeline.add_component(f"w{place}", Place(place, shape.pause))
        pipeline.connect("given.x", f"w{place}.x")
        pipeline.connect(f"w{place}.x", "total.xs")
    return _runs(pipeline, "given", "total")


def layers(shape: Layers) -> Run:
    pipeline = Pipeline()
    pipeline.add_component("given", Given())
    pipeline.add_component("total", Total())
    for name in shape.depends_on:
        pipeline.add_component(name, Layered(name, shape))
    for name, needs in shape.depends_on.items():
        for need in needs or ["given"]:
            pipeline.connect(f"{need}.x", f"{name}.xs")
    for name in shape.last:
        pipeline.connect(f"{name}.x", "total.xs")
    return _runs(pipeline, "given", "total")


def _runs(pipeline: Pipeline, first: str, last: str) -> Run:
    async def run() -> int:
        results = await pipeline.run_async({first: {"x": 0}}, concurrency_limit=AT_ONCE)
        result: int = results[last]["x"]
        return result

    return run


class MemorySpan(tracing.Span):
    def __init__(self, name: str, tags: dict[str, Any] | None) -> None:
        self.name = name
        self.tags = dict(tags or {})
        self.started_ns = time.perf_counter_ns()
        self.ended_ns = 0

    def set_tag(self, key: str, value: Any) -> None:
        self.tags[key] = value


class MemoryTracer(tracing.Tracer):
    def __init__(self) -> None:
        self.spans: list[MemorySpan] = []

    @contextlib.contextmanager
    def trace(
        self, operation_name: str, tags: dict[str, Any] | None = None, parent_span: Any = None
    ) -> Iterator[MemorySpan]:
        span = MemorySpan(operation_name, tags)
        self.spans.append(span)
        try:
            yield span
        finally:
            span.ended_ns = time.perf_counter_ns()

    def current_span(self) -> None:
        return None
