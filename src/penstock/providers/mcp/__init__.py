"""Tools of MCP servers, for agents.

Imports nothing of the protocol's library; that happens when a server is opened.
"""

from penstock.providers.mcp.servers import HttpServer, McpError, McpServers, StdioServer
from penstock.providers.mcp.tools import McpToolFailed, McpTools

__all__ = ["HttpServer", "McpError", "McpServers", "McpToolFailed", "McpTools", "StdioServer"]
