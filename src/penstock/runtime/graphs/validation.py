"""Check whether a graph can run, including the options of its nodes: the kernel's validation plus the runtime's."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.kernel import validate as kernel
from penstock.kernel.executor import STANDARD_CONVERSIONS, Conversions, ExecutorRegistry
from penstock.kernel.graph import GraphSpec, Problem
from penstock.kernel.plan import Plan
from penstock.runtime.graphs.node_options import NODE_OPTIONS


def validate(
    graph: GraphSpec,
    executors: ExecutorRegistry | None = None,
    *,
    entries: Iterable[str] | None = None,
    conversions: Conversions = STANDARD_CONVERSIONS,
) -> list[Problem]:
    """Return every problem that prevents the graph from running, up to 10,000.

    With `executors`, types, handles and the settings of executors are checked too.
    """
    return kernel.validate(graph, executors, entries=entries, conversions=conversions, options=NODE_OPTIONS)


def compile_graph(
    graph: GraphSpec, executors: ExecutorRegistry | None, *, entries: Iterable[str] | None = None
) -> Plan:
    """Return the plan of a valid graph; raises GraphInvalid with all problems of any other."""
    return kernel.compile_graph(graph, executors, entries=entries, options=NODE_OPTIONS)
