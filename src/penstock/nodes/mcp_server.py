"""`mcp-server`: the tools of a server that was configured under a name.

A graph names the server, and can never say how it is started or where it is. Whoever runs the graph opens servers
around the run, closes them after it, and gives them as the service `mcp`, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from penstock.agents.tools import ToolChain
from penstock.kernel.executor import Handle
from penstock.nodes.parts.services import NotOffered, ServiceMissing
from penstock.nodes.parts.settings import Checked, Data, Name, Settings, Sized
from penstock.nodes.parts.toolbox import Chained, gathered
from penstock.runtime.graphs.flow_context import FlowContext


@dataclass(frozen=True, slots=True)
class McpServerData(Data):
    """Which server, and which of its tools."""

    server: Name
    """The name it was configured under."""
    tools: Annotated[list[Name], Sized(1, 200)] | None = None
    """Only these of its tools; all, if it is not given."""


class McpServer(Checked[McpServerData]):
    """Lends the tools of a server."""

    settings = Settings(McpServerData)
    inputs = ()
    outputs = (Handle("tools", channel="link"),)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> ToolChain:
        """The tools of the server, as one chain."""
        read = self.settings.read(data)
        servers = context.services.get("mcp")
        if servers is None:
            hint = "open servers by name, such as McpTools of penstock.providers.mcp"
            raise ServiceMissing("mcp", f"node {context.node_id!r}", hint)
        if read.server not in servers:
            raise NotOffered("MCP server", read.server, servers)
        found = servers[read.server]
        if not isinstance(found, ToolChain | list | tuple):
            hint = f"{read.server!r} open: async with servers.tools({read.server!r}) as opened"
            raise ServiceMissing("mcp", f"node {context.node_id!r}", hint)
        chain = gathered([found])
        return chain if read.tools is None else Chained([chain], read.tools)
