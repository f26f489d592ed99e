"""What `penstock serve` does: load what it is given, check it, and serve it until somebody says stop."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.chat.service import ChatService
from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.graph import tell_problems
from penstock.cli.loading.executors import load_executors
from penstock.cli.loading.offers import Given, Named, NotAGraph, Offers, load_documents, load_offers
from penstock.cli.loading.values import read_bytes
from penstock.cli.options import URL, UnknownPrices
from penstock.cli.service.collecting import collected_seldom, set_apart
from penstock.cli.service.keeping import Kept, keep_examples, keep_files
from penstock.cli.showing.screen import printable, say, write
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidValue, PenstockError
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.limits import RunLimits
from penstock.kernel.document import parse_graph
from penstock.kernel.executor import ExecutorRegistry
from penstock.kernel.graph import GraphSpec
from penstock.server.auth import names_of, spenders
from penstock.server.examples import EXAMPLES, example_graphs
from penstock.server.runnable import problems_in
from penstock.server.serve import serve
from penstock.server.settings import ServerSettings
from penstock.storage import Stores, open_stores

ADVICE = {
    "address": "; --port names another, and 0 takes any that is free",
    "allowed_hosts": "; --allow-host and PENSTOCK_ALLOWED_HOSTS name them",
    "host": "; --tokens says who may come in from elsewhere",
    "url": "; --db says which",
}
"""What on the command line mends a setting, by the setting."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for, as it was written."""

    graphs: tuple[str, ...]
    db: str
    named: Named
    executors: tuple[str, ...]
    max_cost: str
    most_cost: str | None = None
    max_steps: int = 1_000
    most_steps: int | None = None
    timeout_s: float = 3_600
    most_timeout_s: float | None = None
    host: str | None = None
    port: int | None = None
    allow_host: tuple[str, ...] = ()
    tokens: str | None = None
    max_running: int = 64
    max_running_per_user: int = 8
    user_daily: str | None = None
    daily: str | None = None
    keep_days: float = 30
    lease_s: float = 15
    drain_s: float = 10


@dataclass(frozen=True, slots=True)
class Loaded:
    """What there is to serve."""

    given: list[Given]
    keep: Callable[[RunHost, list[Given]], Awaitable[Kept]]
    executors: ExecutorRegistry
    offers: Offers
    kept: Kept = field(default_factory=Kept)
    """What became of what is given, once the host has it."""

    async def begin(self, host: RunHost) -> None:
        """All is there that there will be from now on."""
        await self.save(host)
        set_apart()

    async def save(self, host: RunHost) -> None:
        """Keep the graphs where the host finds them."""
        kept = await self.keep(host, self.given)
        self.kept.ids.extend(kept.ids)
        self.kept.notes.extend(kept.notes)
        self.kept.unable.update(kept.unable)
        self.kept.conversing.update(kept.conversing)


def serve_graphs(asked: Asked) -> int:
    """Serve over HTTP until interrupted; the exit code."""
    return _served(asked, _serve_http)


def serve_tools(asked: Asked) -> int:
    """Be an MCP server on standard input and output until they are closed; the exit code."""
    return _served(asked, _serve_stdio)


def _served(asked: Asked, how: Callable[[Asked, Loaded], Coroutine[Any, Any, None]]) -> int:
    try:
        given = _given(asked)
    except NotAGraph as wrong:
        return tell_problems(wrong.where, wrong.problems, sys.stderr)
    executors = load_executors(asked.executors, _all_nodes(given))
    for one in given:
        if problems := problems_in(one.document, executors):
            return tell_problems(one.where, problems, sys.stderr)
    loaded = Loaded(given, keep_files if asked.graphs else keep_examples, executors, load_offers(asked.named))
    try:
        with collected_seldom():
            asyncio.run(how(asked, loaded))
    except InvalidValue as invalid:
        raise Refused(f"{invalid}{ADVICE.get(invalid.field, '')}") from None
    except PenstockError as error:
        raise Failed(str(error)) from None
    return Exit.OK


async def _serve_http(asked: Asked, loaded: Loaded) -> None:
    settings = _settings(asked)
    await serve(
        settings,
        url=asked.db,
        host_settings=_host_settings(asked),
        executors=loaded.executors,
        services=loaded.offers.services,
        prices=loaded.offers.prices,
        prepare=loaded.begin,
        tell=say,
        announce=lambda greeting: say("\n".join(_greeted(greeting, asked, loaded, settings))),
    )


async def _serve_stdio(asked: Asked, loaded: Loaded) -> None:
    from penstock.server.mcp import serve_stdio

    async with await open_stores(asked.db) as stores, _host(stores, asked, loaded) as host:
        await loaded.save(host)
        for note in loaded.kept.notes:
            write(note, sys.stderr)
        await serve_stdio(host, ChatService(host, stores.chats), stores)


def _greeted(greeting: str, asked: Asked, loaded: Loaded, settings: ServerSettings) -> Iterator[str]:
    """The server's own greeting, and what whoever has started it is to know."""
    yield greeting
    yield from _how(greeting, loaded.kept, settings)
    yield from _beware(asked, settings)
    yield from _expired(settings)


def _host(stores: Stores, asked: Asked, loaded: Loaded) -> RunHost:
    return RunHost(
        stores,
        executors=loaded.executors,
        services=loaded.offers.services,
        settings=_host_settings(asked),
        prices=loaded.offers.prices,
    )


def _given(asked: Asked) -> list[Given]:
    if asked.graphs:
        return load_documents(asked.graphs)
    return [Given(id, document, f"example {id}", EXAMPLES[id]) for id, document in example_graphs().items()]


def _all_nodes(given: list[Given]) -> GraphSpec:
    """Every node of every graph, for whoever asks which types are used."""
    nodes = tuple(node for one in given for node in parse_graph(one.document).nodes)
    return GraphSpec(id="all", nodes=nodes, edges=())


def _settings(asked: Asked) -> ServerSettings:
    environ = dict(os.environ)
    if asked.tokens is not None:
        read_bytes(Path(asked.tokens), "--tokens")  # so that a file that is not there is called by the option's name
        environ["PENSTOCK_TOKENS_FILE"] = asked.tokens
    if asked.allow_host:
        environ["PENSTOCK_ALLOWED_HOSTS"] = ",".join((environ.get("PENSTOCK_ALLOWED_HOSTS", ""), *asked.allow_host))
    said = {"host": asked.host, "port": asked.port}
    return ServerSettings.from_env(environ, **{name: one for name, one in said.items() if one is not None})


def _host_settings(asked: Asked) -> HostSettings:
    return HostSettings(
        max_running=asked.max_running,
        max_running_per_owner=min(asked.max_running_per_user, asked.max_running),
        default_limits=RunLimits(asked.max_cost, max_steps=asked.max_steps, timeout_s=asked.timeout_s),
        ceilings=RunLimits(asked.most_cost, max_steps=asked.most_steps, timeout_s=asked.most_timeout_s),
        owner_daily_usd=asked.user_daily,
        daily_usd=asked.daily,
        keep_days=asked.keep_days,
        lease_s=asked.lease_s,
        drain_s=asked.drain_s,
    )


def _beware(asked: Asked, settings: ServerSettings) -> Iterator[str]:
    """What a daily budget cannot hold, and where nothing holds anybody."""
    has_budget = asked.user_daily is not None or asked.daily is not None
    if has_budget and asked.named.unknown_prices is not UnknownPrices.REFUSE:
        yield "  beware        calls of models without a price hold nothing: --unknown-prices refuse lets none leave"
    if settings.host in ("0.0.0.0", "::") and not settings.allowed_hosts:
        yield "  beware        others are answered only under a name that the server knows: --allow-host NAME says one"
    people = spenders(settings.tokens, SYSTEM_CLOCK.time_ns())
    if len(people) > 1 and asked.most_cost is None and asked.user_daily is None:
        each = f"each of {len(people)} users may let a run cost whatever they say"
        yield f"  beware        {each}: --most-cost limits a run, --user-daily a day"


def _expired(settings: ServerSettings) -> list[str]:
    """Whom the server knows, and does not let in any more."""
    now_ns = SYSTEM_CLOCK.time_ns()
    expired = [token for token in settings.tokens if token.has_expired(now_ns)]
    return [f"  expired       tokens of {names_of(expired)}: renew these lines, or take them out"] if expired else []


def _how(greeting: str, kept: Kept, settings: ServerSettings) -> list[str]:
    """What there is to talk to, what is to be known of it, and the command that does."""
    if not kept.ids:
        return ["  graphs        those that come with the package are archived; what was saved is there"]
    address = greeting.partition("\n")[0].rpartition(" ")[2]  # it knows the port, be it any that was free
    chat = "nothing yet, for none of these can run" if kept.to_try is None else _chat(kept.to_try, address, settings)
    return [f"  graphs        {printable(', '.join(kept.ids))}", *kept.notes, f"  try it        {chat}"]


def _chat(graph_id: str, address: str, settings: ServerSettings) -> str:
    """The command that talks to a graph, and what it needs to be let in."""
    where = "" if address == URL else f" --url {address}"
    token = ", with your token in PENSTOCK_TOKEN" if settings.tokens else ""
    return f"{_program()} chat {shlex.quote(graph_id)}{where}{token}"


def _program() -> str:
    """This command, as whoever reads it can call it: by its name alone only where that is found."""
    if shutil.which("penstock") is not None:
        return "penstock"
    name = Path(sys.argv[0]).name
    if name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m penstock.cli"
    return shlex.quote(sys.argv[0]) if name == "penstock" else "penstock"
