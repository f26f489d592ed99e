"""`toolset`: several tools as one, to link to any number of agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.kernel.executor import Handle
from penstock.nodes.parts.nested import runtime_of
from penstock.nodes.parts.settings import Checked, Data, Name, Settings, Sized
from penstock.nodes.parts.toolbox import offered, pieces
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class ToolsetData(Data):
    """Tools that the run offers, beside those that are linked."""

    tools: Annotated[list[Name], Sized(0, 200)] = ()  # type: ignore[assignment]  # nobody changes it


class Toolset(Checked[ToolsetData]):
    """Lends all of its tools."""

    settings = Settings(ToolsetData)
    inputs = (Handle("tools", channel="link", many="list"),)
    outputs = (Handle("tools", channel="link"),)
    follows = MappingProxyType({"materialize": ("tools",)})

    async def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> list[Any]:
        """The tools, those that are linked first."""
        read = self.settings.read(data)
        linked = await runtime_of(context).resolve_links(str(context.node_id), "tools")
        return [*pieces(linked), *pieces([offered(name, context) for name in read.tools])]
