"""A graph with its executors, analysed once and shared by any number of runs.

Nothing in a plan changes from run to run, and it holds no state of a run. The owner of a plan must not change the graph
or its executors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.kernel.document import is_large, parse_graph
from penstock.kernel.executor import ExecutorRegistry, Handle
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec
from penstock.kernel.plan import Plan
from penstock.kernel.values import ANY
from penstock.runtime.call import CallSpec
from penstock.runtime.graphs.node_options import options_of, own_data
from penstock.runtime.graphs.validation import compile_graph
from penstock.runtime.scheduling.recovery import StepOptions

T = TypeVar("T")

Feed = tuple[str, str, str, str]
"""The only edge into a node: source, source handle, target handle, and the type the target handle accepts."""

MAX_ENTRIES = 64
"""Maximum number of entry-node combinations cached for one graph."""


@dataclass(frozen=True, slots=True)
class NodePlan:
    """The nodes of a plan by number, each with everything needed to run it."""

    plan: Plan
    specs: list[NodeSpec]
    data: list[Mapping[str, Any]]
    """The settings of each node's executor."""
    runs: list[Callable[..., Any]]
    """Each node's `execute`."""
    inputs: list[Mapping[str, Handle] | None]
    outputs: list[Mapping[str, Handle] | None]
    incoming: list[tuple[EdgeSpec, ...]]
    """The flow edges into each node, in the order of the graph."""
    feeds: list[Feed | None]
    """The single edge of each node whose one value needs no routing."""
    calls: list[CallSpec]
    options: list[StepOptions | None] | None
    pure: frozenset[int]
    """Nodes whose executor declares that they always return the same, call nothing and change nothing."""


def plan_nodes(
    plan: Plan, nodes: Mapping[str, NodeSpec], incoming: Mapping[str, list[EdgeSpec]], executors: ExecutorRegistry
) -> NodePlan:
    """Look up once everything needed to run the nodes of `plan`."""
    specs = [nodes[one] for one in plan.ids]
    behind = {one: executors[one] for one in {spec.type for spec in specs}}
    inputs = {one: executors.handles(one, "inputs") for one in behind}
    outputs = {one: executors.handles(one, "outputs") for one in behind}
    metadata = {one: {"node_type": one} for one in behind}
    blocking = {one for one, executor in behind.items() if getattr(executor, "blocking", False)}
    options = [options_of(spec, spec.type in blocking) for spec in specs]
    arriving = [tuple([edge for edge in incoming.get(one, ()) if edge.channel == "flow"]) for one in plan.ids]
    return NodePlan(
        plan,
        specs,
        [own_data(spec.data) for spec in specs],
        [behind[spec.type].execute for spec in specs],
        [inputs[spec.type] for spec in specs],
        [outputs[spec.type] for spec in specs],
        arriving,
        [_feed(edges, inputs[spec.type]) for spec, edges in zip(specs, arriving, strict=True)],
        [CallSpec("system", spec.id, metadata=metadata[spec.type]) for spec in specs],
        options if any(options) else None,
        frozenset(at for at, spec in enumerate(specs) if getattr(behind[spec.type], "is_pure", False) is True),
    )


def _feed(edges: tuple[EdgeSpec, ...], declared: Mapping[str, Handle] | None) -> Feed | None:
    if len(edges) != 1:
        return None
    (edge,) = edges
    wanted = ANY
    if declared is not None:
        handle = declared[edge.target_handle]
        if handle.many == "list" or any(one.required for one in declared.values() if one is not handle):
            return None
        wanted = handle.type
    return edge.source, edge.source_handle, edge.target_handle, wanted


class GraphPlan:
    """A graph that any number of runs can share, with a plan for each combination of entry nodes."""

    __slots__ = ("_by_entries", "_inside", "_is_large", "executors", "graph", "incoming", "nodes", "outgoing")

    def __init__(self, graph: GraphSpec, executors: ExecutorRegistry, *, is_large: bool = False) -> None:
        self.graph = graph
        self.executors = executors
        self.nodes = {node.id: node for node in graph.nodes}
        self.incoming: dict[str, list[EdgeSpec]] = {}
        self.outgoing: dict[str, list[EdgeSpec]] = {}
        for edge in graph.edges:
            self.incoming.setdefault(edge.target, []).append(edge)
            self.outgoing.setdefault(edge.source, []).append(edge)
        self._by_entries: dict[tuple[str, ...] | None, NodePlan] = {}
        self._inside: dict[str, tuple[str, GraphPlan]] = {}
        """Graphs in the data of nodes, by node id, each with the text it was read from; small graphs only."""
        self._is_large = is_large

    @classmethod
    async def of(cls, document: Mapping[str, Any], executors: ExecutorRegistry) -> GraphPlan:
        """Parse the graph in a document; a large one is parsed on a thread."""
        graph = await aside(document, parse_graph)
        return cls(graph, executors, is_large=is_large(document))

    def with_executors(self, executors: ExecutorRegistry) -> GraphPlan:
        """Return a plan of the same graph with other executors."""
        return GraphPlan(self.graph, executors, is_large=self._is_large)

    async def get_ready(self, entries: Sequence[str] | None = None) -> None:
        """Prepare to begin with these nodes without blocking the event loop: a large graph is analysed on a thread."""
        if self._is_large and _has_threads():
            await asyncio.to_thread(self.beginning_with, entries)

    async def inside(self, node_id: str, document: Mapping[str, Any]) -> GraphPlan:
        """Return the graph in a node's data, shared by all runs of that node; a large one is parsed each time."""
        written = None if is_large(document) else _written(document)
        known = self._inside.get(node_id)
        if known is not None and known[0] == written:
            return known[1]
        plan = await GraphPlan.of(document, self.executors)
        await plan.get_ready()
        if written is not None:
            self._inside[node_id] = written, plan
        return plan

    def beginning_with(self, entries: Sequence[str] | None) -> NodePlan:
        """Return the plan from these nodes, or from all without predecessors; raises GraphInvalid if it cannot run."""
        key = None if entries is None else tuple(entries)
        known = self._by_entries.get(key) if _are_names(key) else None
        if known is None:
            plan = compile_graph(self.graph, self.executors, entries=entries)
            known = plan_nodes(plan, self.nodes, self.incoming, self.executors)
            if len(self._by_entries) >= MAX_ENTRIES:
                self._by_entries.clear()
            self._by_entries[key] = known
        return known


async def aside(document: Mapping[str, Any], read: Callable[[Mapping[str, Any]], T]) -> T:
    """Apply `read` to a document: on a thread if it is large, so that the event loop is not blocked."""
    return await asyncio.to_thread(read, document) if is_large(document) and _has_threads() else read(document)


def _has_threads() -> bool:
    """Return whether the loop supports threads; a loop with a reproducible schedule does not."""
    return getattr(asyncio.get_running_loop(), "has_threads", True)


def _written(document: Mapping[str, Any]) -> str | None:
    """Return a text that identifies the document and distinguishes 1, True and 1.0; None if there is none."""
    try:
        return repr(document)
    except Exception:  # contains objects that are not JSON, or is nested too deeply
        return None


def _are_names(entries: Sequence[object] | None) -> bool:
    return entries is None or all(isinstance(one, str) for one in entries)
