"""`tool`: a tool for agents: one that the run offers by name, or a nested graph.

A graph used as a tool receives the arguments of the call as its input, an object; its output is the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

from penstock.agents.tools import TOOL_NAME, Tool, as_tool
from penstock.kernel.executor import ExecutionResult, ExecutorRegistry, Handle
from penstock.nodes.parts import nested
from penstock.nodes.parts.nested import GraphData
from penstock.nodes.parts.services import offered_tool, tool_name
from penstock.runtime.call import running_call
from penstock.runtime.context import ExecutionContext
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import (
    BudgetData,
    Checked,
    Data,
    Finding,
    Flag,
    Json,
    Name,
    Seconds,
    Settings,
    Text,
)

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class ToolData(Data):
    """The tool or the graph, and the limits of a call."""

    tool: Name | None = None
    """Name of a tool that the run offers."""
    graph: GraphData | None = None
    name: Name | None = None
    """Name for the model; the tool's own name, or the node's id, if omitted."""
    description: Text | None = None
    parameters: Json | None = None
    """JSON Schema of the arguments, for a graph."""
    needs_approval: Flag = False
    timeout_s: Seconds | None = None
    budget: BudgetData | None = None
    """Budget of one call."""


class ToolNode(Checked[ToolData]):
    """Provides a tool to the agents it is linked to."""

    settings = Settings(ToolData, runs=False)
    uses = MappingProxyType({"tool": "tools"})
    inputs = ()
    outputs = (Handle("tool", channel="link"),)

    def look(self, data: ToolData, executors: ExecutorRegistry) -> Iterator[Finding]:
        """Check that exactly one of `tool` and `graph` is set, and report problems of the graph."""
        if (data.tool is None) == (data.graph is None):
            yield "", "exactly one of `tool` (a tool that the run offers) and `graph` must be set"
        if data.name is not None and not TOOL_NAME.fullmatch(data.name):
            yield ".name", "models take names of 1 to 64 letters, digits, _ and -"
        if data.tool is not None and data.parameters is not None:
            yield ".parameters", "a tool that the run offers has its own"
        if data.parameters is not None and data.parameters.get("type") != "object":
            yield ".parameters", "the arguments of a tool are an object: its JSON Schema has the type object"
        if data.graph is not None:
            yield from nested.findings(data.graph, executors)

    def look_inside(self, data: Mapping[str, Any], executors: ExecutorRegistry) -> Iterable[Finding]:
        """Report problems of the nested graph."""
        return nested.findings_in(data, executors)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> Tool:
        """Return the tool."""
        read = self.settings.read(data)
        if read.tool is not None:
            return _with(as_tool(offered_tool(read.tool, context)), read)
        return _graph_tool(read, context)


def _with(found: Tool, data: ToolData) -> Tool:
    """Return the tool with the node's settings, whose timeout and approval only tighten those of the tool."""
    if data == ToolData(tool=data.tool):
        return found
    timeouts = [timeout_s for timeout_s in (found.timeout_s, data.timeout_s) if timeout_s is not None]
    return Tool(
        found.fn,
        name=data.name or found.name,
        description=found.spec.description if data.description is None else data.description,
        timeout_s=min(timeouts, default=None),
        budget=found.budget if data.budget is None else data.budget.budget(),
        cost_usd=found.cost_usd,
        needs_approval=found.needs_approval or data.needs_approval,
        parameters=found.spec.parameters if found._parameters is None else None,
    )


def _graph_tool(data: ToolData, context: FlowContext) -> Tool:
    assert data.graph is not None
    document = data.graph

    async def run(**arguments: Any) -> Any:
        call = running_call.get()
        assert call is not None, "a tool runs in a call"
        place = cast(ExecutionContext, call.context)
        graph = await nested.plan_of(document, context)
        async with aclosing(nested.run(graph, arguments, context, place)) as everything:
            async for event in everything:
                if isinstance(event, ExecutionResult):
                    return nested.only(event).value
        return None

    name = data.name or tool_name(str(context.node_id))
    return Tool(
        run,
        name=name,
        description=data.description or "",
        timeout_s=data.timeout_s,
        budget=None if data.budget is None else data.budget.budget(),
        needs_approval=data.needs_approval,
        parameters=data.parameters or NO_PARAMETERS,
    )
