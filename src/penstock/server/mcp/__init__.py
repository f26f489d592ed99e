"""Graphs as tools of an MCP server.

tools      a graph as a tool, a run as its result       calls      what clients ask, answered
endpoint   streamable HTTP, stdin and stdout            sessions   how many are open, and which one gives way

Each graph is a tool: whoever calls it starts a run of their own, under the host's limits, and gets what it comes to.
What the nodes do is told as progress; a call that is cancelled cancels its run. A run that fails, is halted or
cancelled is the tool's error, in words that a model can act on. The list of tools is read anew each time.
"""

from penstock.server.mcp.endpoint import McpEndpoint, create_mcp, serve_stdio, server_for

__all__ = ["McpEndpoint", "create_mcp", "serve_stdio", "server_for"]
