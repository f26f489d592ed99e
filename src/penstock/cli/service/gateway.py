"""`penstock gateway`: model APIs for a team, on the database of a server; imports its implementation when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.exits import Exit, Refused
from penstock.cli.options import (
    Database,
    DayZone,
    DbConnections,
    DbTimeout,
    LogFormatOption,
    Prices,
    TeamDaily,
    UnknownCostOption,
    UnknownCosts,
    Unpriced,
    Upstreams,
    UserDaily,
    dollars,
    numeric,
    team_budgets,
)
from penstock.cli.render.screen import write
from penstock.cli.values import number, whole_number


def gateway(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, numeric(whole_number, "N", "Port; 0 for any free port.", minimum=0, maximum=65_535)] = 8643,
    db: Database = None,
    db_connections: DbConnections = 8,
    db_timeout: DbTimeout = 10,
    daily: Annotated[str | None, dollars("Daily budget of all keys together.", "PENSTOCK_DAILY")] = None,
    user_daily: UserDaily = None,
    day_zone: DayZone = "UTC",
    team_daily: TeamDaily = None,
    max_output: Annotated[
        int, numeric(whole_number, "N", "Output limit of a request that sets none, in tokens.", minimum=1)
    ] = 4_096,
    upstream: Upstreams = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    unknown_cost: UnknownCostOption = UnknownCosts.COUNT,
    keep_days: Annotated[float, numeric(number, "DAYS", "Retention of the runs of keys.", minimum=0.01)] = 30,
    log_format: LogFormatOption = None,
) -> int:
    """Serve the APIs of OpenAI, Anthropic and Google to a team, with a budget for each key.

    Clients send a key of the gateway instead of a provider's: create them with `penstock tokens create NAME --gateway`
    on the same database; changes are in force within a second. Provider keys are read from OPENAI_API_KEY,
    ANTHROPIC_API_KEY and GOOGLE_API_KEY, or from the files that OPENAI_API_KEY_FILE and so on name. Several gateways
    may serve one database: they hold at the same budgets.

    \b
    Examples:
      penstock tokens create ann --gateway --daily 5 --db sqlite:///penstock.db
      penstock gateway --db sqlite:///penstock.db --user-daily 20 --team-daily 100 --team-daily research=500
      penstock gateway --db postgresql://localhost/penstock --host 0.0.0.0 --upstream ollama=http://127.0.0.1:11434/v1

    \b
    Exit codes:
      0 stopped   2 the database cannot be used   64 wrong command line
    """
    try:
        from penstock.cli.service.gateway_command import GatewayArguments, serve_gateway
        from penstock.cli.service.log_output import logging_to_stderr
    except ImportError as error:
        raise Refused(f"penstock gateway needs {error.name}: pip install 'penstock[server]'") from None
    from penstock.cli.loading.services import ServiceOptions, load_price_book
    from penstock.cli.service.db import named_database, run_on_database
    from penstock.gateway.stored_keys import GatewaySettings

    settings = GatewaySettings(
        daily, user_daily, team_budgets(team_daily), max_output, unknown_cost.value, day_zone, keep_days
    )
    price_book = load_price_book(ServiceOptions(prices=prices, unknown_prices=unknown_prices))
    arguments = GatewayArguments(
        host, port, named_database(db), settings, price_book, tuple(upstream or ()), db_connections, db_timeout
    )
    with logging_to_stderr(log_format):
        run_on_database(serve_gateway(arguments, lambda text: write(text, sys.stderr)))
    return Exit.OK
