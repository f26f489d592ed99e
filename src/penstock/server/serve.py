"""The server process: opens stores, host and app in this order, and closes them in reverse.

The first interrupt stops listening, ends the streams, drains the runs for a limited time and parks the rest; the second
parks them immediately. Parked runs continue when the next server starts. A request that waits for the end of a run is
answered when the run has ended or is parked, so the host is closed before the server waits for open responses.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.chat.service import ChatService
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidValue
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import ENDED, RunStatus
from penstock.providers.mcp.installed import mcp_problem
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.server.app import create_app, state_of
from penstock.server.connection import MAX_ACCEPTED, ConnectionLimit, allowed_connections, bounded
from penstock.server.errors import ApiError, send_error
from penstock.server.settings import ServerSettings, is_loopback
from penstock.server.ui_files import load_ui
from penstock.storage import open_stores
from penstock.storage.stores import CONNECTIONS, TIMEOUT_S
from penstock.tracing.redaction import redact

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.gateway.service import GatewayService
    from penstock.hosting.engine import Engine
    from penstock.kernel.executor import ExecutorRegistry
    from penstock.runtime.context import ExecutionContext
    from penstock.storage import Stores

CLOSING_S = 5
"""Grace period for open responses after all runs have ended or are parked."""
IMMEDIATE_CLOSING_S = 1
"""The same grace period after a second interrupt."""
IN_MEMORY = "memory:"
UNFINISHED: tuple[RunStatus, ...] = ("queued", "running", "waiting", "parked")
MAX_COUNTED = 1_000
"""Highest number to which unfinished runs are counted at startup."""
BACKLOG = 512
"""Maximum number of connections that wait to be accepted."""


async def serve(
    settings: ServerSettings | None = None,
    *,
    url: str = IN_MEMORY,
    host_settings: HostSettings | None = None,
    executors: ExecutorRegistry | Mapping[str, Any] | None = None,
    services: Mapping[str, Any] | object | None = None,
    prices: PriceBook | None = None,
    gateway: GatewayService | None = None,
    observe: Callable[[ExecutionContext], object] | None = None,
    prepare: Callable[[RunHost], Awaitable[None]] | None = None,
    engine: Engine | None = None,
    connections: int = CONNECTIONS,
    db_timeout_s: float = TIMEOUT_S,
    announce: Callable[[str], None] = print,
    report: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted, with the `gateway`, if there is one, below /gateway.

    `prepare` is awaited before requests are accepted, such as to save initial graphs. `observe` is called with the
    context of each run before it starts, such as to export its spans. With an `engine`, workers elsewhere execute the
    runs. `connections` and `db_timeout_s` are for PostgreSQL, see `open_stores`. `report` receives messages about what
    happens to active runs during shutdown.
    """
    settings = settings or ServerSettings()
    listener = listen(settings)
    try:
        async with AsyncExitStack() as stack:
            stores = await stack.enter_async_context(
                await open_stores(url, connections=connections, timeout_s=db_timeout_s)
            )
            models = None if gateway is None else await stack.enter_async_context(gateway.opened(stores))
            stored = await count_tokens(settings, stores)
            host_settings = host_settings or HostSettings()
            host = RunHost(
                stores,
                executors=executors,
                services=services,
                settings=host_settings,
                prices=prices,
                observe=observe,
                engine=engine,
            )
            ui = await asyncio.to_thread(load_ui)
            app = create_app(host, ChatService(host, stores.chats), stores, settings, ui=ui, gateway=models)
            server = ServerProcess(app, host, report, is_persistent=stores.url != IN_MEMORY)
            await (prices or default_prices()).aload()  # at startup, so that the first model call does not wait for it
            with server.handling_signals():
                unfinished = await stores.runs.list(statuses=UNFINISHED, limit=MAX_COUNTED)
                await host.start()
                try:
                    if prepare is not None:
                        await prepare(host)
                    port = listener.getsockname()[1]
                    announce(greeting(settings, port, stores.url, len(unfinished), host_settings.lease_s, stored))
                    await server.serve([listener])
                finally:
                    await host.close(0)  # after an orderly stop, no runs are left to park
    finally:
        listener.close()


async def count_tokens(settings: ServerSettings, stores: Stores) -> int | None:
    """Return how many tokens of the database are valid; None if it needs none, because it never had an admin's.

    Raises InvalidValue if the server would listen beyond this machine without any token.
    """
    if not await stores.tokens.has_admin():
        if not settings.tokens and not is_loopback(settings.host):
            expected = "a loopback address such as 127.0.0.1, because neither tokens nor the database have an admin"
            raise InvalidValue("host", settings.host, expected)
        return None
    now_ms = SYSTEM_CLOCK.time_ns() // 1_000_000
    return sum(token.is_active(now_ms) for token in await stores.tokens.list(limit=MAX_COUNTED))


class CannotListen(InvalidValue):
    """The server cannot listen on its address; the value is the address."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__("address", address, f"an address to listen on ({reason})")
        self.reason = reason
        self.args = (f"cannot listen on {address}: {reason}",)  # plainer than "address must be ..."


def listen(settings: ServerSettings) -> socket.socket:
    """Open a listening socket at the address of the settings; raises CannotListen."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is IPPROTO_TCP. Without it, every response on a reused
    # connection waits until the client has acknowledged the previous one: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        reason = "the port is already in use" if is_taken else str(error.strerror or error)
        raise CannotListen(f"{settings.host}:{settings.port}", reason) from None
    listener.setblocking(False)
    return listener


def greeting(
    settings: ServerSettings, port: int, url: str, unfinished: int = 0, lease_s: float = 0, stored: int | None = None
) -> str:
    """Render the startup message.

    `unfinished` is the number of runs left by earlier servers, `stored` that of valid tokens in the database; None if
    it has none.
    """
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{port}"
    is_persistent = url != IN_MEMORY
    storage = redact(url) if is_persistent else "in memory: everything is lost when the server stops"
    valid = sum(not token.has_expired(SYSTEM_CLOCK.time_ns()) for token in settings.tokens)
    in_database = "" if stored is None else f"{_number(stored, 'token')} in the database"
    in_settings = _number(valid, "token") if settings.tokens else ""
    access = ", ".join(filter(None, (in_settings, in_database))) or "clients on this machine only, without a token"
    runs = (
        _number(unfinished, "unfinished run") if unfinished < MAX_COUNTED else f"{MAX_COUNTED} or more unfinished runs"
    )
    mcp = mcp_problem() or f"{address}/mcp"
    resumes = f"  resuming      {runs}; the runs of a killed server {lease_s:g} s after it died"
    return "\n".join(
        (
            f"Penstock is listening on {address}",
            f"  start page    {address}/",
            f"  access        {access}",
            f"  storage       {storage}",
            *([resumes] if unfinished else ()),
            f"  OpenAI API    {address}/v1        MCP  {mcp}",
            f"  stop          Ctrl-C; {_second_interrupt(is_persistent=is_persistent)}",
        )
    )


def _second_interrupt(*, is_persistent: bool) -> str:
    return f"press Ctrl-C again to {'park' if is_persistent else 'end'} running runs immediately"


def _stopping(runs: int, drain_s: float, *, is_persistent: bool) -> str:
    deadline = f"{_number(runs, 'run')} in progress, with up to {drain_s:g} s to end"
    return f"stopping: {deadline}; {_second_interrupt(is_persistent=is_persistent)}"


def farewell(
    before: Mapping[str, int], after: Mapping[str, int], runs: int, lease_s: float, *, is_persistent: bool = True
) -> str:
    """Render the shutdown message for `runs` active runs, from the host's totals before and after closing."""
    counted = {status: after.get(status, 0) - before.get(status, 0) for status in (*ENDED, "parked", "lost")}
    parked, unparked = counted["parked"], max(0, runs - sum(counted.values()))
    if not is_persistent:
        return f"stopped: {_number(parked + unparked, 'run')} lost with the memory" if parked + unparked else "stopped"
    outcomes = [f"{_number(parked, 'run')} parked for the next server"] if parked else []
    if unparked:
        outcomes.append(
            f"{_number(unparked, 'run')} could not be parked because the database is unavailable: "
            f"a server takes over after {lease_s:g} s"
        )
    return f"stopped: {'; '.join(outcomes)}" if outcomes else "stopped"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class ServerProcess(uvicorn.Server):
    """A uvicorn server that ends streams and runs before it waits for open responses, and handles signals itself.

    It closes `host`, if there is one; otherwise the caller ends the runs.
    """

    def __init__(
        self,
        app: FastAPI,
        host: RunHost | None = None,
        report: Callable[[str], None] | None = None,
        *,
        is_persistent: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(configured(ShutdownResponder(app), state_of(app).settings, **given))
        self._host = host
        self._report = report
        self._is_persistent = is_persistent
        """Whether parked runs are persistent, so that another server can resume them."""
        self._second_interrupt = asyncio.Event()
        self._streams = state_of(app).streams

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: uvicorn would restore the handlers and raise the signals again before the runs are parked."""
        yield

    @contextmanager
    def handling_signals(self) -> Generator[None, None, None]:
        """Stop in order on the first signal, immediately on the second; on other threads, handle no signals."""
        is_main = threading.current_thread() is threading.main_thread()
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for number in signals:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Request shutdown; a second call parks runs without draining them."""
        if self.should_exit:
            self._second_interrupt.set()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio uses one number for this and for how many it accepts in one turn

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end the streams, then the runs, and wait for open responses."""
        self._stop_listening(sockets or [])
        self._streams.close()
        try:
            if self._host is not None:
                await self._close_and_report(self._host)
        finally:
            if self._second_interrupt.is_set():
                self.config.timeout_graceful_shutdown = IMMEDIATE_CLOSING_S
            await super().shutdown(sockets)

    def _stop_listening(self, sockets: list[socket.socket]) -> None:
        """Close listeners as uvicorn does, but before the runs end, so that no new request waits for them."""
        for server in self.servers:
            server.close()
        for listener in sockets:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _close_and_report(self, host: RunHost) -> None:
        """Close the host, and report the active runs, if there are any."""
        report, before = self._report, host.stats()
        runs = before["running"] + before["waiting"]
        if report is None or not runs:
            await self._close(host)
            return
        if before["running"]:
            with suppress(Exception):  # a failing callback must not keep the host from closing
                report(_stopping(before["running"], host.settings.drain_s, is_persistent=self._is_persistent))
        await self._close(host)
        totals, lease_s = host.stats()["totals"], host.settings.lease_s
        with suppress(Exception):
            report(farewell(before["totals"], totals, runs, lease_s, is_persistent=self._is_persistent))

    async def _close(self, host: RunHost) -> None:
        """Drain the runs; park them as soon as a second interrupt arrives."""
        draining = asyncio.ensure_future(host.close())
        interrupted = asyncio.ensure_future(self._second_interrupt.wait())
        await asyncio.wait({draining, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        interrupted.cancel()
        if draining.done():
            draining.result()
            return
        draining.cancel()
        await asyncio.wait({draining})
        await host.close(0)


class ShutdownResponder:
    """Wraps the app: a request that uvicorn cancels at shutdown is answered with 503 if no response has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def observe(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, observe)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:  # else closing the connection midway is the only signal left
                await send_error(_closed(), scope, receive, send)


def _closed() -> ApiError:
    message = "the server shut down before it could answer; a run that was started is kept, and is in the list of runs"
    return ApiError(503, message, headers={"x-should-retry": "false"})


def configured(app: ASGIApp, settings: ServerSettings | None = None, **given: Any) -> uvicorn.Config:
    """Return the uvicorn configuration; this process may open more files from now on.

    `ClientGuard` reads proxy headers, no Server header is sent, and invalid HTTP requests do not fill the log.
    """
    settings = settings or ServerSettings()
    limit = ConnectionLimit(
        settings.max_connections_per_client, settings.proxy_networks, max_connections=allowed_connections()
    )
    bounds = {"backlog": MAX_ACCEPTED, "timeout_keep_alive": 15, "timeout_graceful_shutdown": CLOSING_S}
    quiet = {"log_config": None, "log_level": logging.ERROR, "access_log": False, "server_header": False}
    own = {"http": bounded(limit), "ws": "none", "lifespan": "on", "proxy_headers": False}
    return uvicorn.Config(app, **{**own, **bounds, **quiet, **given})
