"""The handles of each node of a document: those of its type, those its settings add, and those that only edges name.

An editor draws them, and they depend on data: the placeholders of a template are inputs, the `fallback_handle` of an
error policy is an output. A document with problems, such as a draft, has handles as far as it can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.kernel.document import read_loosely
from penstock.kernel.executor import ExecutorRegistry, Handle, NodeExecutor
from penstock.kernel.graph import CHANNELS, Channel, EdgeSpec, GraphSpec, NodeSpec
from penstock.nodes.catalog import HANDLES, PICKER, hints_of
from penstock.nodes.parts.template import placeholders
from penstock.runtime.graphs.node_options import NODE_OPTIONS


@dataclass(frozen=True, slots=True)
class ResolvedHandle:
    """A handle of one node; not `declared` if only an edge names it although the type does not have it."""

    handle: Handle
    declared: bool = True


@dataclass(frozen=True, slots=True)
class NodeHandles:
    """The handles on both sides of a node."""

    inputs: tuple[ResolvedHandle, ...]
    outputs: tuple[ResolvedHandle, ...]


def resolved_handles(document: Mapping[str, Any], executors: ExecutorRegistry) -> dict[str, NodeHandles]:
    """Return the handles of every node by its path; those of a nested graph are at `each/read`."""
    graph, _ = read_loosely(document)
    return {} if graph is None else dict(_handles_in(graph, executors, ""))


def _handles_in(graph: GraphSpec, executors: ExecutorRegistry, prefix: str) -> Iterator[tuple[str, NodeHandles]]:
    into: dict[str, list[EdgeSpec]] = {}
    out_of: dict[str, list[EdgeSpec]] = {}
    for edge in graph.edges:
        into.setdefault(edge.target, []).append(edge)
        out_of.setdefault(edge.source, []).append(edge)
    for node in graph.nodes:
        executor = None
        if node.type in executors:
            executor = executors[node.type]
        path = f"{prefix}{node.id}"
        inputs = executors.handles(node.type, "inputs")
        outputs = executors.handles(node.type, "outputs")
        fallback = NODE_OPTIONS.output(node.data)
        arriving = [(edge.target_handle, edge.channel) for edge in into.get(node.id, ())]
        leaving = [(edge.source_handle, edge.channel) for edge in out_of.get(node.id, ())]
        yield (
            path,
            NodeHandles(
                _one_side(inputs, _placeholders(executor, node) if inputs is None else (), arriving),
                _one_side(outputs, [fallback] if fallback else (), leaving),
            ),
        )
        for nested in _graphs_inside(executor, node):
            yield from _handles_in(nested, executors, f"{path}/")


def _one_side(
    declared: Mapping[str, Handle] | None, added: Iterable[str], named: Iterable[tuple[str, Channel]]
) -> tuple[ResolvedHandle, ...]:
    found = {name: ResolvedHandle(handle) for name, handle in (declared or {}).items()}
    for name in added:
        found.setdefault(name, ResolvedHandle(Handle(name)))
    for name, channel in named:
        if name and name not in found:
            known: Channel = channel if channel in CHANNELS else "flow"
            found[name] = ResolvedHandle(Handle(name, channel=known), declared is None)
    return tuple(found.values())


def _placeholders(executor: NodeExecutor | None, node: NodeSpec) -> Iterator[str]:
    for setting, hints in hints_of(executor).items():
        text = node.data.get(setting)
        if hints.get(HANDLES) == "placeholders" and isinstance(text, str):
            yield from placeholders(text)


def _graphs_inside(executor: NodeExecutor | None, node: NodeSpec) -> Iterator[GraphSpec]:
    for setting, hints in hints_of(executor).items():
        inner = node.data.get(setting)
        if hints.get(PICKER) == "graph" and isinstance(inner, Mapping):
            graph, _ = read_loosely(inner, is_part=True)
            if graph is not None:
                yield graph
