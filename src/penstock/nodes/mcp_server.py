"""`mcp-server`: the tools of a configured MCP server.

A graph names the server, and can never set its command or address. The caller of the run opens servers before it,
closes them after it, and passes them as the service `mcp`, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from penstock.agents.tools import ToolChain
from penstock.kernel.executor import Handle
from penstock.nodes.parts.services import CombinedTools, NotOffered, ServiceMissing, combine_tools
from penstock.runtime.graphs.graph_runtime import FlowContext
from penstock.runtime.graphs.settings import Checked, Data, Name, Settings, Sized


@dataclass(frozen=True, slots=True)
class McpServerData(Data):
    """The server, and a selection of its tools."""

    server: Name
    """Name in the configuration."""
    tools: Annotated[list[Name], Sized(1, 200)] | None = None
    """The tools to offer; all if omitted."""


class McpServer(Checked[McpServerData]):
    """Provides the tools of an MCP server to agents."""

    settings = Settings(McpServerData, runs=False)
    uses = MappingProxyType({"server": "mcp"})
    inputs = ()
    outputs = (Handle("tools", channel="link"),)

    def materialize(self, data: Mapping[str, Any], output_handle: str, context: FlowContext) -> ToolChain:
        """Return the tools of the server, as one chain."""
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
        chain = combine_tools([found])
        return chain if read.tools is None else CombinedTools([chain], read.tools)
