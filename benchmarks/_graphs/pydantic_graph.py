# mypy: disable-error-code="import-not-found, no-any-return", allow-untyped-decorators
"""pydantic-graph's GraphBuilder.

A join there waits for all of one fork, not for three steps out of a hundred, so that the layers are written with a
barrier after each.
"""

import asyncio
import itertools
from typing import Any

from pydantic_graph import GraphBuilder, StepContext, reduce_list_append, reduce_sum

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run


def chain(shape: Chain) -> Run:
    return _runs(_chain(shape, traced=False), 0)


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    import logfire
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    processors = [SimpleSpanProcessor(spans)]
    logfire.configure(send_to_logfire=False, console=False, metrics=False, additional_span_processors=processors)
    traced = _runs(_chain(shape, traced=True), 0)

    async def run() -> int:
        spans.clear()
        return await traced()

    return run, lambda: sum("node" in span.name for span in spans.get_finished_spans())


def fan(shape: Fan) -> Run:
    graph = GraphBuilder(name="fan", input_type=int, output_type=int, auto_instrument=False)
    pause = shape.pause

    @graph.step
    async def places(ctx: StepContext[None, None, int]) -> list[int]:
        return list(range(ctx.inputs))

    @graph.step
    async def work(ctx: StepContext[None, None, int]) -> int:
        if pause:
            await pause()
        return ctx.inputs + 1

    total = graph.join(reduce_sum, initial=0)
    graph.add(
        graph.edge_from(graph.start_node).to(places),
        graph.edge_from(places).map().to(work),
        graph.edge_from(work).to(total),
        graph.edge_from(total).to(graph.end_node),
    )
    return _runs(graph.build(), shape.size)


def layers(shape: Layers) -> Run:
    graph = GraphBuilder(name="layers", state_type=dict, input_type=int, output_type=int, auto_instrument=False)

    async def work(ctx: StepContext[dict[str, int], None, str]) -> str:
        name, values = ctx.inputs, ctx.state
        await asyncio.sleep(shape.sleep_s[name])
        values[name] = shape.value(name, [values[need] for need in shape.depends_on[name]])
        return name

    async def total(ctx: StepContext[dict[str, int], None, list[str]]) -> int:
        return sum(ctx.state[name] for name in ctx.inputs)

    before = graph.start_node
    for layer in range(Layers.DEPTH):
        names = graph.step(_names(shape.layer(layer)), node_id=f"names{layer}")
        works = graph.step(work, node_id=f"work{layer}")
        done = graph.join(reduce_list_append, initial_factory=list, node_id=f"done{layer}")
        graph.add(
            graph.edge_from(before).to(names), graph.edge_from(names).map().to(works), graph.edge_from(works).to(done)
        )
        before = done
    last = graph.step(total, node_id="total")
    graph.add(graph.edge_from(before).to(last), graph.edge_from(last).to(graph.end_node))
    built = graph.build()

    async def run() -> int:
        result: int = await built.run(state={}, inputs=0)
        return result

    return run


def _names(names: list[str]) -> Any:
    async def step(ctx: StepContext[dict[str, int], None, Any]) -> list[str]:
        return names

    return step


def _chain(shape: Chain, traced: bool) -> Any:
    graph = GraphBuilder(name="chain", input_type=int, output_type=int, auto_instrument=traced)
    steps = [graph.step(_step(shape.pause), node_id=f"s{number}") for number in range(shape.size)]
    places = [graph.start_node, *steps, graph.end_node]
    graph.add(*[graph.edge_from(before).to(after) for before, after in itertools.pairwise(places)])
    return graph.build()


def _step(pause: Pause | None) -> Any:
    async def step(ctx: StepContext[None, None, int]) -> int:
        if pause:
            await pause()
        return ctx.inputs + 1

    return step


def _runs(graph: Any, inputs: int) -> Run:
    async def run() -> int:
        result: int = await graph.run(inputs=inputs)
        return result

    return run
