"""Graphs as tools of an MCP server.

tools      a graph as a tool, a run as its result       calls      handlers of tools/list and tools/call
endpoint   streamable HTTP, stdin and stdout            sessions   session limits and eviction
library    what differs between releases of the MCP library

Each graph is a tool: a call starts a run owned by the caller, under the host's limits, and returns its result.
Events of the nodes are reported as progress; cancelling a call cancels its run. A run that fails, is halted or is
cancelled becomes a tool error, in words that a model can act on. The list of tools is read from the store each time.
"""

from penstock.server.mcp.endpoint import McpEndpoint, create_mcp, serve_stdio, server_for

__all__ = ["McpEndpoint", "create_mcp", "serve_stdio", "server_for"]
