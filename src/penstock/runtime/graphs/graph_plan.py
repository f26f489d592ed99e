"""A graph and the executors behind it, looked at once: what any number of its runs have in common.

Nothing in here changes from run to run, and nothing of a run is in here. Whoever keeps one sees to it that the graph
and its executors stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import EdgeSpec, GraphSpec
from penstock.kernel.validate import compile_graph
from penstock.runtime.graphs.node_work import NodePlan, plan_nodes

MAX_ENTRIES = 64
"""So many ways to begin one graph are remembered."""


class GraphPlan:
    """A graph that any number of runs can share, by the nodes that they begin with."""

    __slots__ = ("_by_entries", "executors", "graph", "incoming", "nodes", "outgoing")

    def __init__(self, graph: GraphSpec, executors: ExecutorRegistry) -> None:
        self.graph = graph
        self.executors = executors
        self.nodes = {node.id: node for node in graph.nodes}
        self.incoming: dict[str, list[EdgeSpec]] = {}
        self.outgoing: dict[str, list[EdgeSpec]] = {}
        for edge in graph.edges:
            self.incoming.setdefault(edge.target, []).append(edge)
            self.outgoing.setdefault(edge.source, []).append(edge)
        self._by_entries: dict[tuple[str, ...] | None, NodePlan] = {}

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


def _are_names(entries: Sequence[object] | None) -> bool:
    return entries is None or all(isinstance(one, str) for one in entries)
