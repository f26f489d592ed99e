"""`subgraph`: a graph inside the graph, which is a part of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.kernel.values import DataValue
from penstock.nodes.parts import nested
from penstock.nodes.parts.nested import GraphData
from penstock.nodes.parts.settings import BudgetData, Checked, Data, Finding, Settings
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class SubgraphData(Data):
    """The graph, and what it may use."""

    graph: GraphData
    budget: BudgetData | None = None


class Subgraph(Checked[SubgraphData]):
    """Runs a graph on what comes in, and gives what it comes to."""

    settings = Settings(SubgraphData)
    inputs = (Handle("input"),)
    outputs = (Handle("output"),)

    def look(self, data: SubgraphData, executors: ExecutorRegistry) -> Iterable[Finding]:
        """What keeps the graph inside from running."""
        return nested.findings(data.graph, executors)

    async def execute(
        self, data: Mapping[str, Any], inputs: Mapping[str, DataValue], context: FlowContext
    ) -> nested.Told:
        """What is told inside, and what it comes to."""
        read = self.settings.read(data)
        given = inputs["input"].value if "input" in inputs else context.execution.input
        place = nested.place_of(context, read.budget)
        graph = await nested.plan_of(read.graph, context)
        async with aclosing(nested.run(graph, given, context, place)) as everything:
            async for told in everything:
                if isinstance(told, ExecutionResult):
                    yield ExecutionResult({"output": nested.only(told)})
                else:
                    yield nested.inside(told)
