"""`penstock mcp`: graphs as tools of an MCP server on standard input and output, for clients that start one."""

from __future__ import annotations

import sys

from penstock.cli.exits import Refused
from penstock.cli.options import Database, Executors, MaxCost, Models, MostCost, Prices, Tools, Unpriced
from penstock.cli.service.serve import Graphs
from penstock.cli.showing.screen import complain


def mcp(
    graphs: Graphs = None,
    db: Database = None,
    models: Models = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    max_cost: MaxCost = "1",
    most_cost: MostCost = None,
) -> int:
    """Be an MCP server on standard input and output; each graph is a tool.

    Nothing is kept unless --db says where.

    \b
    Examples:
      penstock mcp graphs/
      penstock mcp graphs/ --db sqlite:///penstock.db --models my_models.py:models

    \b
    Exit codes:
      0 the client has left   2 a graph is not valid, or the database cannot be used   64 wrong command line
    """
    from penstock.cli.loading.offers import Named
    from penstock.cli.service.serving import Asked, serve_tools

    for name, stream in (("standard input", sys.stdin), ("standard output", sys.stdout)):
        if stream is None or stream.closed:
            raise Refused(f"an MCP client speaks to this on standard input and output, and {name} is closed")
    if sys.stdin.isatty():
        complain("this waits for an MCP client on standard input, and here is a terminal; Ctrl-D ends it")
    return serve_tools(
        Asked(
            graphs=tuple(graphs or ()),
            db=db or "memory:",
            named=Named(models, tools, prices, unknown_prices),
            executors=tuple(executors or ()),
            max_cost=max_cost,
            most_cost=most_cost,
        )
    )
