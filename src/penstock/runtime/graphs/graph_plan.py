"""A graph and the executors behind it, looked at once: what any number of its runs have in common.

Nothing in here changes from run to run, and nothing of a run is in here. Whoever keeps one sees to it that the graph
and its executors stay as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.kernel.document import is_large, parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import EdgeSpec, GraphSpec
from penstock.kernel.validate import compile_graph
from penstock.runtime.graphs.node_work import NodePlan, plan_nodes

T = TypeVar("T")

MAX_ENTRIES = 64
"""So many ways to begin one graph are remembered."""


class GraphPlan:
    """A graph that any number of runs can share, by the nodes that they begin with."""

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
        """Graphs in the data of nodes, by the nodes, and what they were read from; those alone that are small."""
        self._is_large = is_large

    @classmethod
    async def of(cls, document: Mapping[str, Any], executors: ExecutorRegistry) -> GraphPlan:
        """The graph in a document; a large one is read on a thread."""
        graph = await aside(document, parse_graph)
        return cls(graph, executors, is_large=is_large(document))

    def with_executors(self, executors: ExecutorRegistry) -> GraphPlan:
        """The same graph with others behind it."""
        return GraphPlan(self.graph, executors, is_large=self._is_large)

    async def get_ready(self, entries: Sequence[str] | None = None) -> None:
        """See to it that nobody waits while it begins with these nodes: a large one is looked at on a thread."""
        if self._is_large and _has_threads():
            await asyncio.to_thread(self.beginning_with, entries)

    async def inside(self, node_id: str, document: Mapping[str, Any]) -> GraphPlan:
        """The graph in the data of a node, which any number of runs of that node share; a large one is read anew."""
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
        """What running it from these nodes on takes, or from all that nothing leads to; GraphInvalid says why not."""
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
    """What `read` makes of a document: on a thread if it is large, so that nobody has to wait for it."""
    return await asyncio.to_thread(read, document) if is_large(document) and _has_threads() else read(document)


def _has_threads() -> bool:
    """Whether the loop can have something done on a thread; one whose schedule is to be repeated cannot."""
    return getattr(asyncio.get_running_loop(), "has_threads", True)


def _written(document: Mapping[str, Any]) -> str | None:
    """The document, so that it can be told from any other, 1 from True and 1.0 too; None if that cannot be had."""
    try:
        return repr(document)
    except Exception:  # what is in it is somebody's, and no JSON; or nested far too deep
        return None


def _are_names(entries: Sequence[object] | None) -> bool:
    return entries is None or all(isinstance(one, str) for one in entries)
