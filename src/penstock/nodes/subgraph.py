"""`subgraph`: a nested graph, run as a part of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import DataValue, ExecutionResult, ExecutorRegistry, Handle
from penstock.nodes.parts import nested
from penstock.nodes.parts.nested import GraphData
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Finding, Settings


@dataclass(frozen=True, slots=True)
class SubgraphData(Data):
    """The graph."""

    graph: GraphData


class Subgraph(Checked[SubgraphData]):
    """Runs a nested graph on the input, and outputs its result."""

    settings = Settings(SubgraphData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def look(self, data: SubgraphData, executors: ExecutorRegistry) -> Iterable[Finding]:
        """Report problems of the nested graph."""
        return nested.findings(data.graph, executors)

    def look_inside(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterable[Finding]:
        """Report problems of the nested graph."""
        return nested.findings_in(data, executors)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Events:
        """Yield the events of the nested graph, and its result."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        graph = await nested.plan_of(read.graph, context)
        async with aclosing(nested.run(graph, given, context)) as everything:
            async for event in everything:
                if isinstance(event, ExecutionResult):
                    yield ExecutionResult({"output": nested.only(event)})
                else:
                    yield nested.inside(event)
