"""`penstock serve`: its options; what they lead to is loaded when there is something to serve."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.loading.values import number, whole_number
from penstock.cli.options import (
    Database,
    Executors,
    MaxCost,
    Models,
    MostCost,
    Prices,
    TokensFile,
    Tools,
    Unpriced,
    UserDaily,
    dollars,
    numeric,
)

USUAL_DATABASE = "sqlite:///penstock.db"

Graphs = Annotated[
    list[str] | None,
    typer.Argument(metavar="GRAPHS", help="Files of graphs, or directories of them; examples, if there are none."),
]


def serve(
    graphs: Graphs = None,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen: 127.0.0.1 if not said.")] = None,
    port: Annotated[int | None, numeric(whole_number, "N", "Which port: 8642 if not said, 0 for any.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name under which others reach the server, such as penstock.example; may be given several times.",
        ),
    ] = None,
    db: Database = None,
    tokens: TokensFile = None,
    models: Models = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    max_running: Annotated[int, numeric(whole_number, "N", "Work on at most N runs at once.", least=1)] = 64,
    max_running_per_user: Annotated[int, numeric(whole_number, "N", "At most N of one user.", least=1)] = 8,
    max_cost: MaxCost = "1",
    max_steps: Annotated[int, numeric(whole_number, "N", "How many steps it may take then.", least=1)] = 1_000,
    timeout: Annotated[
        float, numeric(number, "SECONDS", "How long it may take then; waiting for an answer counts.", least=0.001)
    ] = 3_600,
    most_cost: MostCost = None,
    most_steps: Annotated[int | None, numeric(whole_number, "N", "How many steps at most.", least=1)] = None,
    most_timeout: Annotated[float | None, numeric(number, "SECONDS", "How much time at most.", least=0.001)] = None,
    user_daily: UserDaily = None,
    daily: Annotated[str | None, dollars("What all may spend in a day.")] = None,
    keep_days: Annotated[float, numeric(number, "DAYS", "How long ended runs are kept.", least=0.01)] = 30,
    lease: Annotated[
        float,
        numeric(number, "SECONDS", "A server silent for so long is dead; others go on with its runs.", least=0.1),
    ] = 15,
    drain: Annotated[
        float, numeric(number, "SECONDS", "How long runs may take to end when the server stops.", least=0)
    ] = 10,
) -> int:
    """Serve graphs: REST, OpenAI's API, MCP, and a page that says how.

    Without tokens it listens on this machine alone, and whoever is on it may do everything. With a database runs
    survive the server, killed or not: they go on when it is started again. Ctrl-C lets runs end for a while and parks
    the others; a second one parks them at once.

    \b
    Examples:
      penstock serve
      penstock serve graphs/ --db sqlite:///penstock.db --models my_models.py:models
      penstock serve --prices my_prices.py:prices --unknown-prices refuse --daily 20 --user-daily 2
      penstock serve --host 0.0.0.0 --allow-host penstock.example --tokens tokens.txt --most-cost 5
      penstock serve --db postgresql://localhost/penstock

    \b
    Exit codes:
      0 stopped   2 a graph is not valid, or the database or the tokens cannot be used
      64 wrong command line, or an address that cannot be had
    """
    from penstock.cli.loading.offers import Named
    from penstock.cli.service.serving import Asked, serve_graphs

    return serve_graphs(
        Asked(
            graphs=tuple(graphs or ()),
            host=host,
            port=port,
            allow_host=tuple(allow_host or ()),
            db=db or USUAL_DATABASE,
            tokens=tokens,
            named=Named(models, tools, prices, unknown_prices),
            executors=tuple(executors or ()),
            max_running=max_running,
            max_running_per_user=max_running_per_user,
            max_cost=max_cost,
            most_cost=most_cost,
            max_steps=max_steps,
            most_steps=most_steps,
            timeout_s=timeout,
            most_timeout_s=most_timeout,
            user_daily=user_daily,
            daily=daily,
            keep_days=keep_days,
            lease_s=lease,
            drain_s=drain,
        )
    )
