"""`toolset`: several tools in one node, to link to any number of agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.kernel.executor import Handle
from penstock.nodes.parts.services import flatten_tools, offered_tool, runtime_of
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Name, Settings, Sized


@dataclass(frozen=True, slots=True)
class ToolsetData(Data):
    """Tools that the run offers, in addition to the linked ones."""

    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # never mutated


class Toolset(Checked[ToolsetData]):
    """Provides several tools to agents."""

    settings = Settings(ToolsetData, runs=False)
    uses = MappingProxyType({"tools": "tools"})
    inputs = (Handle("tools", channel="link", many="list"),)
    outputs = (Handle("tools", channel="link"),)
    follows = MappingProxyType({"materialize": ("tools",)})

    async def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> list[Any]:
        """Return the tools, linked ones first."""
        read = self.settings.read(data)
        linked = await runtime_of(context).resolve_links(str(context.node_id), "tools")
        return [*flatten_tools(linked), *flatten_tools([offered_tool(name, context) for name in read.tools])]
