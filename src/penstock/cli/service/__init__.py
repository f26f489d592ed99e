"""Commands around a server of one's own: `serve`, `mcp`, `db`, `doctor`."""
