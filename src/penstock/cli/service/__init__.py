"""Commands to run and maintain a server: `serve`, `mcp`, `db`, `doctor`."""
