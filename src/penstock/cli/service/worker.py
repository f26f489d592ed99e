"""Options of `penstock worker`; the implementation is imported when the command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.exits import Refused
from penstock.cli.options import (
    AllowModels,
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
    MaxRunning,
    MaxRunningPerUser,
    Models,
    OtlpEndpoint,
    PayloadRecording,
    Prices,
    RecordPayloads,
    Tools,
    Unpriced,
    UserDaily,
)


def worker(
    graphs: Graphs = None,
    db: Database = None,
    db_connections: DbConnections = 8,
    db_timeout: DbTimeout = 10,
    engine: EngineUrl = None,
    queue: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Queue to take runs from; default: default. Repeatable.")
    ] = None,
    models: Models = None,
    tools: Tools = None,
    executors: Executors = None,
    prices: Prices = None,
    unknown_prices: Unpriced = None,
    allow_model: AllowModels = None,
    max_running: MaxRunning = 64,
    max_running_per_user: MaxRunningPerUser = 8,
    user_daily: UserDaily = None,
    daily: Daily = None,
    day_zone: DayZone = "UTC",
    daily_blocks: DailyBlocks = False,
    record_payloads: RecordPayloads = PayloadRecording.OFF,
    lease: Lease = 15,
    drain: Drain = 10,
    log_format: LogFormatOption = None,
    otlp_endpoint: OtlpEndpoint = None,
) -> int:
    """Execute the runs that an engine dispatches, for servers started with the same --db and --engine.

    Give it the same graphs, models, tools, prices and budgets as the servers: a run waits for a worker that has what
    its graph names. Start as many workers as you need, on any machine. Ctrl-C lets running runs end and leaves the rest
    to other workers; press Ctrl-C again to leave them immediately.

    \b
    Examples:
      penstock worker --db postgresql://db/penstock --engine temporal://temporal:7233/default
      penstock worker agent.py:agent --db … --engine … --models my_models.py:models --queue default --queue gpu

    \b
    Exit codes:
      0 stopped   2 the database or the engine cannot be used   64 wrong command line
    """
    from penstock.cli.loading.services import ServiceOptions
    from penstock.cli.service.serve_command import ServeArguments
    from penstock.cli.service.worker_command import work

    if engine is None or db is None:
        missing = "--engine temporal://host:7233/namespace" if db is not None else "--db postgresql://…"
        raise Refused(f"a worker needs {missing}, as its servers have it")
    return work(
        ServeArguments(
            graphs=tuple(graphs or ()),
            db=db,
            db_connections=db_connections,
            db_timeout_s=db_timeout,
            services=ServiceOptions(models, tools, prices, unknown_prices, allow_model),
            executors=tuple(executors or ()),
            max_cost="1",
            max_running=max_running,
            max_running_per_user=max_running_per_user,
            user_daily=user_daily,
            daily=daily,
            day_zone=day_zone,
            daily_blocks=daily_blocks,
            record_payloads=record_payloads.mode,
            lease_s=lease,
            drain_s=drain,
            log_format=log_format,
            otlp_endpoint=otlp_endpoint,
            engine=engine,
            queues=tuple(queue or ("default",)),
        )
    )
