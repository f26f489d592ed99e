"""Implementation of `penstock serve` and `penstock mcp`: load the graphs, check them, and serve until stopped."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.chat.service import ChatService
from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.graph import print_problems
from penstock.cli.loading.served import GraphFile, NotServed, Served, load_served
from penstock.cli.loading.services import NodeServices, ServiceOptions, load_executors, load_services
from penstock.cli.options import URL, LogFormat, UnknownPrices
from penstock.cli.render.screen import print_error, print_text, printable, write
from penstock.cli.service.engines import open_engine
from penstock.cli.service.gc_tuning import freeze_heap, relaxed_gc
from penstock.cli.service.log_output import logging_to_stderr
from penstock.cli.service.reloading import Reloader
from penstock.cli.service.seed_graphs import SavedGraphs, save_example_graphs, save_graph_files
from penstock.cli.values import read_bytes
from penstock.cli.wrap.declared import declared_upstreams
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidValue, PenstockError
from penstock.gateway.grants import UnknownCost
from penstock.gateway.service import GatewayService
from penstock.gateway.stored_keys import GatewaySettings
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.limits import RunLimits
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import Problem
from penstock.nodes.checking import problems_in
from penstock.nodes.program import SERVICE as PROGRAMS
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.server.auth import names_of, spenders
from penstock.server.examples import EXAMPLES, example_graphs
from penstock.server.gateway_mount import PREFIX
from penstock.server.serve import serve
from penstock.server.settings import ServerSettings
from penstock.storage import Stores, open_stores
from penstock.storage.stores import CONNECTIONS, TIMEOUT_S
from penstock.telemetry.collector import otlp_provider
from penstock.telemetry.service import ServiceExport
from penstock.tracing.payloads import RecordPayloads

ENDPOINT = re.compile(r"https?://[^\s/?#]+\S*")
ADVICE = {
    "address": "; use --port to choose another port, or 0 for any free one",
    "allowed_hosts": "; set them with --allow-host or PENSTOCK_ALLOWED_HOSTS",
    "root_path": "; set it with --root-path or PENSTOCK_ROOT_PATH",
    "trusted_proxies": "; set them with --trusted-proxy or PENSTOCK_TRUSTED_PROXIES",
    "host": "; name the users who may connect from elsewhere with --tokens",
    "url": "; set it with --db",
    "engine": "; set it with --engine",
}
"""How to correct a setting on the command line, by setting."""


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """Options of the gateway that `--gateway` adds."""

    team_daily: Mapping[str, str]
    upstreams: tuple[str, ...]
    unknown_cost: UnknownCost


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """The options of the command line."""

    graphs: tuple[str, ...]
    db: str
    services: ServiceOptions
    executors: tuple[str, ...]
    max_cost: str
    db_connections: int = CONNECTIONS
    db_timeout_s: float = TIMEOUT_S
    cost_ceiling: str | None = None
    max_steps: int = 1_000
    steps_ceiling: int | None = None
    timeout_s: float = 3_600
    timeout_ceiling_s: float | None = None
    host: str | None = None
    port: int | None = None
    allow_host: tuple[str, ...] = ()
    trusted_proxy: tuple[str, ...] = ()
    root_path: str | None = None
    tokens: str | None = None
    max_running: int = 64
    max_running_per_user: int = 8
    user_daily: str | None = None
    daily: str | None = None
    day_zone: str = "UTC"
    daily_blocks: bool = False
    keep_days: float = 30
    record_payloads: RecordPayloads = "off"
    keep_payload_days: float = 7
    keep_audit_days: float = 365
    lease_s: float = 15
    drain_s: float = 10
    log_format: LogFormat | None = None
    otlp_endpoint: str | None = None
    reload: bool = False
    engine: str | None = None
    queues: tuple[str, ...] = ("default",)
    """Queues that a worker takes runs from; for a server, the one that it submits to."""
    gateway: GatewayOptions | None = None
    """Options of the gateway; None without one."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The graphs to serve, and the services of their nodes."""

    served: Served
    seed: Callable[[RunHost, Sequence[GraphFile]], Awaitable[SavedGraphs]]
    executors: ExecutorRegistry
    nodes: NodeServices
    saved: SavedGraphs = field(default_factory=SavedGraphs)
    """The result of saving the graphs; empty before that."""

    async def begin(self, host: RunHost) -> None:
        """Save the graphs, then freeze the heap: all long-lived objects exist now."""
        await self.save(host)
        freeze_heap()

    async def save(self, host: RunHost) -> None:
        """Save the graphs in the host's store."""
        saved = await self.seed(host, list(self.served.files.values()))
        self.saved.notes.extend(f"  not served    {printable(str(refused))}" for refused in self.served.refused)
        self.saved.ids.extend(saved.ids)
        self.saved.notes.extend(saved.notes)
        self.saved.unable.update(saved.unable)
        self.saved.conversing.update(saved.conversing)


Transport = Callable[[ServeArguments, Loaded], Coroutine[Any, Any, None]]


def serve_graphs(arguments: ServeArguments) -> int:
    """Serve over HTTP until interrupted, and return the exit code."""
    return load_and_run(arguments, _serve_http)


def serve_tools(arguments: ServeArguments) -> int:
    """Run an MCP server on standard input and output until they are closed, and return the exit code."""
    return load_and_run(arguments, _serve_stdio)


def load_and_run(arguments: ServeArguments, transport: Transport) -> int:
    """Load the graphs and services, run the transport with them, and return the exit code."""
    served = load_served(arguments.graphs) if arguments.graphs else _examples()
    executors = load_executors(arguments.executors, served.node_types)
    nodes = load_services(arguments.services)
    nodes = NodeServices({**nodes.services, PROGRAMS: served.programs}, nodes.prices)
    served.add_embeddings(nodes.services["models"])
    served.remove_invalid(lambda document: problems_in(document, executors, nodes.services))
    if not served.files:
        return _nothing_to_serve(served.refused)
    loaded = Loaded(served, save_graph_files if arguments.graphs else save_example_graphs, executors, nodes)
    try:
        with relaxed_gc(), logging_to_stderr(arguments.log_format):
            asyncio.run(transport(arguments, loaded))
    except InvalidValue as invalid:
        raise Refused(f"{invalid}{ADVICE.get(invalid.field, '')}") from None
    except PenstockError as error:
        raise Failed(str(error)) from None
    return Exit.OK


def _nothing_to_serve(refused: Sequence[NotServed]) -> int:
    """Print why no graph can be served, and return the exit code for the first reason."""
    for one in refused:
        if one.problems:
            print_problems(one.where, one.problems, sys.stderr)
        else:
            print_error(one.why)
    return refused[0].code


async def _serve_http(arguments: ServeArguments, loaded: Loaded) -> None:
    settings = _settings(arguments)
    engine = None if arguments.engine is None else open_engine(arguments.engine, arguments.db, arguments.lease_s)
    async with AsyncExitStack() as stack:
        prepare = [loaded.begin]
        if arguments.reload:
            prepare.append((await stack.enter_async_context(_reloader(arguments, loaded))).start)

        async def prepared(host: RunHost) -> None:
            for step in prepare:
                await step(host)

        export = export_of(arguments)
        if export is not None:
            stack.push_async_callback(asyncio.to_thread, export.close)
        await serve(
            settings,
            url=arguments.db,
            connections=arguments.db_connections,
            db_timeout_s=arguments.db_timeout_s,
            host_settings=host_settings_of(arguments),
            executors=loaded.executors,
            services=loaded.nodes.services,
            prices=loaded.nodes.prices,
            gateway=_gateway(arguments, loaded.nodes.prices),
            observe=None if export is None else export.observe,
            prepare=prepared,
            engine=None if engine is None else engine(queue=arguments.queues[0]),
            report=print_text,
            announce=lambda greeting: print_text("\n".join(_greeting(greeting, arguments, loaded, settings))),
        )


def export_of(arguments: ServeArguments) -> ServiceExport | None:
    """Return the export of runs to a collector, if the command line requests one; Refused if it cannot be created."""
    if arguments.otlp_endpoint is None:
        return None
    if not ENDPOINT.fullmatch(arguments.otlp_endpoint):
        raise Refused(
            f"--otlp-endpoint must be a URL such as http://localhost:4318/v1/traces, not {arguments.otlp_endpoint}"
        )
    try:
        return ServiceExport(otlp_provider(arguments.otlp_endpoint))
    except ModuleNotFoundError as missing:
        raise Refused(f"--otlp-endpoint: {missing}") from None


def _gateway(arguments: ServeArguments, prices: PriceBook | None) -> GatewayService | None:
    options = arguments.gateway
    if options is None:
        return None
    settings = GatewaySettings(
        arguments.daily,
        arguments.user_daily,
        options.team_daily,
        unknown_cost=options.unknown_cost,
        day_zone=arguments.day_zone,
        keep_days=arguments.keep_days,
    )
    return GatewayService(declared_upstreams(options.upstreams), prices or default_prices(), settings)


def _reloader(arguments: ServeArguments, loaded: Loaded) -> Reloader:
    def check(document: Mapping[str, Any]) -> Sequence[Problem]:
        return problems_in(document, loaded.executors, loaded.nodes.services)

    return Reloader(arguments.graphs, loaded.served, check, print_text)


async def _serve_stdio(arguments: ServeArguments, loaded: Loaded) -> None:
    from penstock.server.mcp import serve_stdio

    async with await open_stores(arguments.db) as stores, _host(stores, arguments, loaded) as host:
        await loaded.save(host)
        for note in loaded.saved.notes:
            write(note, sys.stderr)
        await serve_stdio(host, ChatService(host, stores.chats), stores)


def _greeting(greeting: str, arguments: ServeArguments, loaded: Loaded, settings: ServerSettings) -> Iterator[str]:
    """Yield the server's own greeting, then hints and warnings for the operator."""
    yield greeting
    if arguments.gateway is not None:
        yield f"  gateway       {_address(greeting)}{PREFIX}        keys: penstock tokens create NAME --gateway"
    yield from _graph_lines(greeting, loaded.saved, settings)
    if arguments.engine is not None:
        yield f"  engine        {printable(arguments.engine)}, queue {arguments.queues[0]}; runs need a penstock worker"
    yield from _warnings(arguments, settings)
    yield from _expired(settings)


def _host(stores: Stores, arguments: ServeArguments, loaded: Loaded) -> RunHost:
    return RunHost(
        stores,
        executors=loaded.executors,
        services=loaded.nodes.services,
        settings=host_settings_of(arguments),
        prices=loaded.nodes.prices,
    )


def _examples() -> Served:
    examples = example_graphs().items()
    return Served({id: GraphFile(id, document, f"example {id}", EXAMPLES[id]) for id, document in examples})


def _settings(arguments: ServeArguments) -> ServerSettings:
    environ = dict(os.environ)
    if arguments.tokens is not None:
        read_bytes(Path(arguments.tokens), "--tokens")  # so that the error for a missing file names the option
        environ["PENSTOCK_TOKENS_FILE"] = arguments.tokens
    if arguments.allow_host:
        environ["PENSTOCK_ALLOWED_HOSTS"] = ",".join((environ.get("PENSTOCK_ALLOWED_HOSTS", ""), *arguments.allow_host))
    if arguments.trusted_proxy:
        proxies = (environ.get("PENSTOCK_TRUSTED_PROXIES", ""), *arguments.trusted_proxy)
        environ["PENSTOCK_TRUSTED_PROXIES"] = ",".join(proxies)
    if arguments.root_path is not None:
        environ["PENSTOCK_ROOT_PATH"] = arguments.root_path
    options = {
        "host": arguments.host,
        "port": arguments.port,
        "tokens_in_database": True,
    }  # `serve` checks the database
    return ServerSettings.from_env(environ, **{name: value for name, value in options.items() if value is not None})


def host_settings_of(arguments: ServeArguments) -> HostSettings:
    return HostSettings(
        max_running=arguments.max_running,
        max_running_per_owner=min(arguments.max_running_per_user, arguments.max_running),
        default_limits=RunLimits(arguments.max_cost, max_steps=arguments.max_steps, timeout_s=arguments.timeout_s),
        ceilings=RunLimits(
            arguments.cost_ceiling, max_steps=arguments.steps_ceiling, timeout_s=arguments.timeout_ceiling_s
        ),
        owner_daily_usd=arguments.user_daily,
        daily_usd=arguments.daily,
        day_zone=arguments.day_zone,
        day_blocks=arguments.daily_blocks,
        keep_days=arguments.keep_days,
        record_payloads=arguments.record_payloads,
        keep_payload_days=arguments.keep_payload_days,
        keep_audit_days=arguments.keep_audit_days,
        lease_s=arguments.lease_s,
        drain_s=arguments.drain_s,
    )


def _warnings(arguments: ServeArguments, settings: ServerSettings) -> Iterator[str]:
    """Yield warnings: unpriced calls under a daily budget, unknown host names, users without a cost limit."""
    has_budget = arguments.user_daily is not None or arguments.daily is not None
    if has_budget and arguments.services.unknown_prices is not UnknownPrices.REFUSE:
        yield "  warning       calls of models without a price are not limited; refuse them: --unknown-prices refuse"
    if settings.host in ("0.0.0.0", "::") and not settings.allowed_hosts:
        yield "  warning       clients elsewhere are refused; name the host that they use with --allow-host NAME"
    people = spenders(settings.tokens, SYSTEM_CLOCK.time_ns())
    if len(people) > 1 and arguments.cost_ceiling is None and arguments.user_daily is None:
        unlimited = f"each of {len(people)} users may start runs without a cost ceiling"
        yield f"  warning       {unlimited}; set --cost-ceiling per run or --user-daily per day"


def _expired(settings: ServerSettings) -> list[str]:
    """Return a warning that lists expired tokens, if there are any."""
    now_ns = SYSTEM_CLOCK.time_ns()
    expired = [token for token in settings.tokens if token.has_expired(now_ns)]
    return [f"  expired       tokens of {names_of(expired)}: renew or remove these lines"] if expired else []


def _graph_lines(greeting: str, saved: SavedGraphs, settings: ServerSettings) -> list[str]:
    """Return lines with the available graphs, notes on them, and a chat command to try."""
    if not saved.ids:
        return ["  graphs        the examples are archived; saved graphs are available"]
    chat = "none of these graphs can run" if saved.to_try is None else _chat(saved.to_try, _address(greeting), settings)
    return [f"  graphs        {printable(', '.join(saved.ids))}", *saved.notes, f"  try it        {chat}"]


def _address(greeting: str) -> str:
    """Return the address of the server, with its actual port, also for port 0."""
    return greeting.partition("\n")[0].rpartition(" ")[2]


def _chat(graph_id: str, address: str, settings: ServerSettings) -> str:
    """Return the chat command for a graph, and a hint if it needs a token."""
    where = "" if address == URL else f" --url {address}"
    token = ", with your token in PENSTOCK_TOKEN" if settings.tokens else ""
    return f"{_program()} chat {shlex.quote(graph_id)}{where}{token}"


def _program() -> str:
    """Return a shell command that starts this program; the bare name only if it is on the PATH."""
    if shutil.which("penstock") is not None:
        return "penstock"
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m penstock.cli"
    return shlex.quote(sys.argv[0]) if name == "penstock" else "penstock"
