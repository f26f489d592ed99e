# mypy: disable-error-code="import-not-found"
"""LangGraph's StateGraph without a checkpointer; the fan-out is its Send, or a node for each of the many."""

import asyncio
import operator
from typing import Annotated, Any, TypedDict

from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from benchmarks._graphs.shapes import Chain, Fan, Layers, Pause, Recorded, Run

CONFIG: dict[str, Any] = {"recursion_limit": 1_000_000}


class Value(TypedDict):
    x: int


class Results(TypedDict):
    results: Annotated[list[int], operator.add]
    total: int


def _merged(values: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    values.update(more)  # in place: a copy for each write would make it slower
    return values


class Values(TypedDict):
    values: Annotated[dict[str, int], _merged]
    total: int


def chain(shape: Chain) -> Run:
    graph = _chain(shape)

    async def run() -> int:
        result: int = (await graph.ainvoke({"x": 0}, CONFIG))["x"]
        return result

    return run


def traced_chain(shape: Chain) -> tuple[Run, Recorded]:
    from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

    graph = _chain(shape)
    collected: list[Any] = []

    async def run() -> int:
        collector = RunCollectorCallbackHandler()
        result: int = (await graph.ainvoke({"x": 0}, {**CONFIG, "callbacks": [collector]}))["x"]
        collected[:] = collector.traced_runs
        return result

    return run, lambda: sum(len(each.child_runs) for each in collected)


def fan(shape: Fan, *, send: bool = True) -> Run:
    graph = (_sent if send else _spelled_out)(shape).compile()

    async def run() -> int:
        result: int = (await graph.ainvoke({"results": [], "total": 0}, CONFIG))["total"]
        return result

    return run


def layers(shape: Layers) -> Run:
    graph = StateGraph(Values)
    for name in shape.depends_on:
        graph.add_node(name, _layered(name, shape))
    for name, needs in shape.depends_on.items():
        graph.add_edge(needs or START, name)

    async def total(state: Values) -> dict[str, int]:
        return {"total": sum(state["values"][name] for name in shape.last)}

    graph.add_node("sum", total)
    graph.add_edge(shape.last, "sum")
    graph.add_edge("sum", END)
    compiled = graph.compile()

    async def run() -> int:
        result: int = (await compiled.ainvoke({"values": {}, "total": 0}, CONFIG))["total"]
        return result

    return run


def _chain(shape: Chain) -> Any:
    graph = StateGraph(Value)
    before = START
    for number in range(shape.size):
        graph.add_node(f"s{number}", _step(shape.pause))
        graph.add_edge(before, f"s{number}")
        before = f"s{number}"
    graph.add_edge(before, END)
    return graph.compile()


def _step(pause: Pause | None) -> Any:
    async def step(state: Value) -> Value:
        if pause:
            await pause()
        return {"x": state["x"] + 1}

    return step


def _layered(name: str, shape: Layers) -> Any:
    needs, sleep_s = shape.depends_on[name], shape.sleep_s[name]

    async def step(state: Values) -> dict[str, dict[str, int]]:
        await asyncio.sleep(sleep_s)
        return {"values": {name: shape.value(name, [state["values"][need] for need in needs])}}

    return step


async def _nothing(state: Results) -> dict[str, int]:
    return {}


async def _total(state: Results) -> dict[str, int]:
    return {"total": sum(state["results"])}


def _sent(shape: Fan) -> StateGraph:
    async def work(place: int) -> dict[str, list[int]]:
        if shape.pause:
            await shape.pause()
        return {"results": [place + 1]}

    graph = StateGraph(Results)
    graph.add_node("first", _nothing)
    graph.add_node("work", work)
    graph.add_node("sum", _total)
    graph.add_edge(START, "first")
    graph.add_conditional_edges("first", lambda _: [Send("work", place) for place in range(shape.size)], ["work"])
    graph.add_edge("work", "sum")
    graph.add_edge("sum", END)
    return graph


def _spelled_out(shape: Fan) -> StateGraph:
    graph = StateGraph(Results)
    graph.add_node("first", _nothing)
    graph.add_node("sum", _total)
    graph.add_edge(START, "first")
    names = [f"w{place}" for place in range(shape.size)]
    for place, name in enumerate(names):
        graph.add_node(name, _worker(place, shape.pause))
        graph.add_edge("first", name)
    graph.add_edge(names, "sum")
    graph.add_edge("sum", END)
    return graph


def _worker(place: int, pause: Pause | None) -> Any:
    async def work(state: Results) -> dict[str, list[int]]:
        if pause:
            await pause()
        return {"results": [place + 1]}

    return work
