"""Tools of MCP servers, for agents.

Imports nothing of the MCP library until a server is opened.
"""

from penstock.providers.mcp.servers import HttpServer, McpError, StdioServer
from penstock.providers.mcp.tools import McpServers, McpToolFailed, McpTools

__all__ = ["HttpServer", "McpError", "McpServers", "McpToolFailed", "McpTools", "StdioServer"]
