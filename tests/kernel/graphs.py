"""Graphs to test with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from penstock.kernel.executor import Handle
from penstock.kernel.graph import Channel, EdgeSpec, GraphSpec, NodeSpec


def graph(nodes: str | Iterable[str], *edges: str | EdgeSpec, type: str = "step") -> GraphSpec:
    """A graph of these nodes, and of these edges; `ab` is a flow edge from a to b."""
    made = [edge if isinstance(edge, EdgeSpec) else flow(*edge, id=f"e{at}") for at, edge in enumerate(edges)]
    return GraphSpec(tuple(NodeSpec(node, type) for node in nodes), tuple(made))


def flow(
    source: str, target: str, source_handle: str = "output", target_handle: str = "input", *, id: str = ""
) -> EdgeSpec:
    return edge("flow", source, target, source_handle, target_handle, id=id)


def link(
    source: str, target: str, source_handle: str = "output", target_handle: str = "input", *, id: str = ""
) -> EdgeSpec:
    return edge("link", source, target, source_handle, target_handle, id=id)


def edge(channel: Channel, source: str, target: str, source_handle: str, target_handle: str, *, id: str) -> EdgeSpec:
    name = id or f"{channel}:{source}.{source_handle}:{target}.{target_handle}"
    return EdgeSpec(name, source, target, channel, source_handle, target_handle)


def chain(length: int) -> GraphSpec:
    nodes = tuple(NodeSpec(f"n{at}", "step") for at in range(length))
    edges = tuple(EdgeSpec(f"e{at}", f"n{at}", f"n{at + 1}", "flow") for at in range(length - 1))
    return GraphSpec(nodes, edges)


class Stub:
    """An executor that declares handles and does nothing."""

    def __init__(self, inputs: Iterable[Handle] | None = None, outputs: Iterable[Handle] | None = None) -> None:
        self.inputs = None if inputs is None else list(inputs)
        self.outputs = None if outputs is None else list(outputs)

    def execute(self, data: Any, inputs: Any, context: Any) -> Any: ...

    def materialize(self, data: Any, output_handle: str, context: Any) -> Any: ...


HANDLES = ("output", "yes", "no")


@st.composite
def edge_lists(draw: st.DrawFn, *, acyclic: bool) -> tuple[list[str], list[tuple[str, str, str]]]:
    """Node ids in any order, and edges of (source, handle, target), several between the same two nodes among them."""
    size = draw(st.integers(0, 9))
    ids = draw(st.permutations([f"n{at}" for at in range(size)]))
    if size < (2 if acyclic else 1):
        return ids, []
    ends = st.tuples(st.integers(0, size - 1), st.sampled_from(HANDLES), st.integers(0, size - 1))
    drawn = draw(st.lists(ends, max_size=16))
    if acyclic:
        drawn = [(min(a, b), handle, max(a, b)) for a, handle, b in drawn if a != b]
    return draw(st.permutations(ids)), [(f"n{a}", handle, f"n{b}") for a, handle, b in drawn]
