"""Options of `penstock serve` and `penstock mcp`; the implementation is imported when a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli.exits import Refused
from penstock.cli.options import (
    AllowModels,
    CostCeiling,
    Daily,
    DailyBlocks,
    Database,
    DayZone,
    DbConnections,
    DbTimeout,
    Drain,
    EngineUrl,
    Executors,
    Graphs,
    Lease,
    LogFormatOption,
    MaxCost,
    MaxRunning,
    MaxRunningPerUser,
    Models,
    OtlpEndpoint,
    PayloadRecording,
    Prices,
    RecordPayloads,
    TeamDaily,
    TokensFile,
    Tools,
    UnknownCostOption,
    UnknownCosts,
    Unpriced,
    Upstreams,
    UserDaily,
    numeric,
    team_budgets,
)
from penstock.cli.render.screen import print_error
from penstock.cli.values import number, whole_number

DEFAULT_DATABASE = "sqlite:///penstock.db"


def serve(
    graphs: Graphs = None,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, numeric(whole_number, "N", "Port; default: 8642, 0 for any free port.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name by which clients reach the server, such as penstock.example. Repeatable.",
        ),
    ] = None,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CIDR",
            help="Address or network of a proxy in front, whose X-Forwarded-For is believed. Repeatable.",
        ),
    ] = None,
    root_path: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Path under which a proxy offers the server, such as /penstock."),
    ] = None,
    db: Database = None,
    db_connections: DbConnections = 8,
    db_timeout: DbTimeout = 10,
    tokens: TokensFile = None,
    models: Models = None,
    allow_model: AllowModels = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    max_running: MaxRunning = 64,
    max_running_per_user: MaxRunningPerUser = 8,
    max_cost: MaxCost = "1",
    max_steps: Annotated[int, numeric(whole_number, "N", "Default step limit of a run.", minimum=1)] = 1_000,
    timeout: Annotated[
        float, numeric(number, "SECONDS", "Default time limit of a run; includes waiting for approval.", minimum=0.001)
    ] = 3_600,
    cost_ceiling: CostCeiling = None,
    steps_ceiling: Annotated[
        int | None, numeric(whole_number, "N", "Highest step limit that a run may request.", minimum=1)
    ] = None,
    timeout_ceiling: Annotated[
        float | None, numeric(number, "SECONDS", "Highest time limit that a run may request.", minimum=0.001)
    ] = None,
    user_daily: UserDaily = None,
    daily: Daily = None,
    day_zone: DayZone = "UTC",
    daily_blocks: DailyBlocks = False,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Serve model APIs below /gateway too, as `penstock gateway` does.")
    ] = False,
    team_daily: TeamDaily = None,
    upstream: Upstreams = None,
    unknown_cost: UnknownCostOption = UnknownCosts.COUNT,
    keep_days: Annotated[float, numeric(number, "DAYS", "Retention of ended runs.", minimum=0.01)] = 30,
    record_payloads: RecordPayloads = PayloadRecording.OFF,
    keep_payloads: Annotated[
        float,
        numeric(
            number, "DAYS", "Retention of stored requests and responses.", minimum=0.01, envvar="PENSTOCK_KEEP_PAYLOADS"
        ),
    ] = 7,
    keep_audit: Annotated[
        float, numeric(number, "DAYS", "Retention of the audit log.", minimum=0.01, envvar="PENSTOCK_KEEP_AUDIT")
    ] = 365,
    lease: Lease = 15,
    drain: Drain = 10,
    engine: EngineUrl = None,
    queue: Annotated[
        str, typer.Option(metavar="NAME", help="With --engine: queue of the workers that get the runs.")
    ] = "default",
    log_format: LogFormatOption = None,
    otlp_endpoint: OtlpEndpoint = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Load graphs and programs again when their files change.")
    ] = False,
) -> int:
    """Serve graphs and agents over HTTP: REST, the OpenAI API, MCP, and a page that explains how to use them.

    Without tokens, the server listens on this machine only, and all local users may do everything. Runs survive a
    restart or crash of the server if the database does. Ctrl-C waits for running runs to end, then parks the rest;
    press Ctrl-C again to park running runs immediately.

    A graph or program that cannot be served is reported, and the others are served.

    \b
    Examples:
      penstock serve
      penstock serve app.py:graph agent.py:agent graphs/ --reload
      penstock serve graphs/ --db sqlite:///penstock.db --models my_models.py:models
      penstock serve --prices my_prices.py:prices --unknown-prices refuse --daily 20 --user-daily 2
      penstock serve --host 0.0.0.0 --allow-host penstock.example --tokens tokens.txt --cost-ceiling 5
      penstock serve --tokens tokens.txt --allow-model 'openai:gpt-4o*' --allow-model 'anthropic:*'
      penstock serve --allow-host penstock.example --trusted-proxy 10.0.0.0/8 --root-path /penstock
      penstock serve --db postgresql://localhost/penstock --log-format json 2>> penstock.log
      penstock serve --gateway --team-daily 100 --upstream ollama=http://127.0.0.1:11434/v1
      penstock serve --db postgresql://db/penstock --engine temporal://temporal:7233/default

    \b
    Exit codes:
      0 stopped   2 no graph is valid, or the database or the tokens cannot be used
      64 wrong command line, no graph is found, or the address cannot be used
    """
    from penstock.cli.loading.services import ServiceOptions
    from penstock.cli.service.serve_command import GatewayOptions, ServeArguments, serve_graphs

    if reload and not graphs:
        raise Refused("--reload needs graphs or programs to watch, such as: penstock serve app.py:graph --reload")
    if (team_daily or upstream or unknown_cost is not UnknownCosts.COUNT) and not gateway:
        raise Refused("--team-daily, --upstream and --unknown-cost are for the gateway; add --gateway")
    return serve_graphs(
        ServeArguments(
            graphs=tuple(graphs or ()),
            gateway=GatewayOptions(team_budgets(team_daily), tuple(upstream or ()), unknown_cost.value)
            if gateway
            else None,
            host=host,
            port=port,
            allow_host=tuple(allow_host or ()),
            trusted_proxy=tuple(trusted_proxy or ()),
            root_path=root_path,
            db=db or DEFAULT_DATABASE,
            db_connections=db_connections,
            db_timeout_s=db_timeout,
            tokens=tokens,
            services=ServiceOptions(models, tools, prices, unknown_prices, allow_model),
            executors=tuple(executors or ()),
            max_running=max_running,
            max_running_per_user=max_running_per_user,
            max_cost=max_cost,
            cost_ceiling=cost_ceiling,
            max_steps=max_steps,
            steps_ceiling=steps_ceiling,
            timeout_s=timeout,
            timeout_ceiling_s=timeout_ceiling,
            user_daily=user_daily,
            daily=daily,
            day_zone=day_zone,
            daily_blocks=daily_blocks,
            keep_days=keep_days,
            record_payloads=record_payloads.mode,
            keep_payload_days=keep_payloads,
            keep_audit_days=keep_audit,
            lease_s=lease,
            drain_s=drain,
            log_format=log_format,
            otlp_endpoint=otlp_endpoint,
            reload=reload,
            engine=engine,
            queues=(queue,),
        )
    )


def mcp(
    graphs: Graphs = None,
    db: Database = None,
    models: Models = None,
    allow_model: AllowModels = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    max_cost: MaxCost = "1",
    cost_ceiling: CostCeiling = None,
) -> int:
    """Serve graphs and agents as tools of an MCP server on standard input and output.

    Runs are kept in memory unless you set --db.

    \b
    Examples:
      penstock mcp graphs/ agent.py:agent
      penstock mcp graphs/ --db sqlite:///penstock.db --models my_models.py:models

    \b
    Exit codes:
      0 the client has disconnected   2 a graph is not valid, or the database cannot be used   64 wrong command line
    """
    from penstock.cli.loading.services import ServiceOptions
    from penstock.cli.service.serve_command import ServeArguments, serve_tools
    from penstock.providers.mcp.installed import mcp_problem

    if (problem := mcp_problem()) is not None:
        raise Refused(problem)
    for name, stream in (("standard input", sys.stdin), ("standard output", sys.stdout)):
        if stream is None or stream.closed:
            raise Refused(f"an MCP client needs standard input and output, and {name} is closed")
    if sys.stdin.isatty():
        print_error("waiting for an MCP client on standard input, which is a terminal; Ctrl-D exits")
    return serve_tools(
        ServeArguments(
            graphs=tuple(graphs or ()),
            db=db or "memory:",
            services=ServiceOptions(models, tools, prices, unknown_prices, allow_model),
            executors=tuple(executors or ()),
            max_cost=max_cost,
            cost_ceiling=cost_ceiling,
        )
    )
