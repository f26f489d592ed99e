# mypy: disable-error-code="import-not-found", allow-subclassing-any, allow-untyped-decorators
"""LlamaIndex Workflows: a step and an event class per node; what a step takes and gives is in its annotations."""

import asyncio
import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

from workflows import Context, Workflow, step
from workflows.events import Event, StartEvent, StopEvent

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run


def chain(shape: Chain) -> Run:
    events = [StartEvent, *(_event(f"E{number}") for number in range(1, shape.size)), StopEvent]
    steps = {
        f"s{number}": _step(f"s{number}", taken, given, shape.pause)
        for number, (taken, given) in enumerate(itertools.pairwise(events))
    }
    return _runs(type("Chained", (Workflow,), steps)(timeout=None))


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    from llama_index_instrumentation import get_dispatcher
    from llama_index_instrumentation.span_handlers import SimpleSpanHandler

    spans = SimpleSpanHandler()
    get_dispatcher().add_span_handler(spans)
    traced = chain(shape)

    async def run() -> int:
        spans.completed_spans.clear()
        return await traced()

    return run, lambda: sum(".s" in span.id_ for span in spans.completed_spans)


class Place(Event):
    x: int


class Done(Event):
    x: int


def fan(shape: Fan) -> Run:
    size, pause = shape.size, shape.pause

    class Fanned(Workflow):
        @step
        async def first(self, ctx: Context, ev: StartEvent) -> Place | None:
            for place in range(size):
                ctx.send_event(Place(x=place))
            return None

        @step(num_workers=size)
        async def work(self, ev: Place) -> Done:
            if pause:
                await pause()
            return Done(x=ev.x + 1)

        @step
        async def total(self, ctx: Context, ev: Done) -> StopEvent | None:
            done = ctx.collect_events(ev, [Done] * size)
            return StopEvent(result=sum(each.x for each in done)) if done else None

    return _runs(Fanned(timeout=None))


def layers(shape: Layers) -> Run:
    events = {name: _event(f"E_{name}") for name in shape.depends_on}
    steps = {name: _layered(name, shape, events) for name in shape.depends_on}

    last = [events[name] for name in shape.last]

    async def total(self: Workflow, ctx: Context, ev: Any) -> StopEvent | None:
        done = ctx.collect_events(ev, last)
        return StopEvent(result=sum(each.x for each in done)) if done else None

    total.__annotations__ = {"ctx": Context, "ev": functools.reduce(operator.or_, last), "return": StopEvent | None}
    total.__qualname__ = "Layered.total"
    steps["total"] = step(total)
    # Some steps of the inner layers are needed by no other step, which the validation takes for a mistake.
    return _runs(type("Layered", (Workflow,), steps)(timeout=None, disable_validation=True))


def _event(name: str) -> type[Event]:
    return type(name, (Event,), {"__annotations__": {"x": int}, "__module__": __name__})


def _step(name: str, taken: type[Event], given: type[Event], pause: Pause | None) -> Any:
    async def add_one(self: Workflow, ev: Any) -> Event:
        if pause:
            await pause()
        return given(result=ev.x + 1) if given is StopEvent else given(x=ev.x + 1)

    add_one.__annotations__ = {"ev": taken, "return": given}
    add_one.__name__, add_one.__qualname__ = name, f"Chained.{name}"
    return step(add_one)


def _layered(name: str, shape: Layers, events: dict[str, type[Event]]) -> Any:
    given, sleep_s = events[name], shape.sleep_s[name]

    async def begin(self: Workflow, ev: StartEvent) -> Event:
        await asyncio.sleep(sleep_s)
        return given(x=shape.value(name, ()))

    async def work(self: Workflow, a: Any, b: Any, c: Any) -> Event:
        await asyncio.sleep(sleep_s)
        return given(x=shape.value(name, (a.x, b.x, c.x)))

    needs = [events[need] for need in shape.depends_on[name]]
    function: Callable[..., Any] = work if needs else begin
    taken = dict(zip("abc", needs, strict=True)) if needs else {"ev": StartEvent}
    function.__annotations__ = {**taken, "return": given}
    function.__name__, function.__qualname__ = name, f"Layered.{name}"
    return step(function)


def _runs(workflow: Workflow) -> Run:
    async def run() -> int:
        result: int = await workflow.run(x=0)
        return result

    return run
