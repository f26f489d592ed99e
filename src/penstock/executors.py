"""Graphs as data, and what node types of JSON graphs are made of."""

from __future__ import annotations

from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry, Handle, NodeExecutor
from penstock.kernel.frontier import Quorum
from penstock.kernel.graph import EdgeSpec, GraphSpec, NodeSpec, Problem
from penstock.runtime.graphs.node_execution import ExecutorMisbehaved, QuorumMissed
from penstock.runtime.scheduling.scheduler import NestedTooDeep

__all__ = [
    "EdgeSpec",
    "ExecutorMisbehaved",
    "ExecutorRegistry",
    "GraphSpec",
    "Handle",
    "NestedTooDeep",
    "NodeExecutor",
    "NodeSpec",
    "Problem",
    "Quorum",
    "QuorumMissed",
    "parse_graph",
]
