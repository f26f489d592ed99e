"""The process that serves: stores, host and app opened in order, and closed in the other.

On a first interrupt it listens no more, ends the streams, lets runs come to their end for a while and parks the rest;
on a second one it parks them at once. Parked runs go on when the next server starts. Whoever waits for the end of a run
is answered when it has ended or is parked, so the runs come first and the answers after them.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.chat.service import ChatService
from penstock.clock import SYSTEM_CLOCK
from penstock.errors import InvalidValue
from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.records import ENDED, RunStatus
from penstock.runtime.billing.prices import PriceBook, default_prices
from penstock.server.app import create_app, parts_of
from penstock.server.errors import ApiError
from penstock.server.guards.asgi import App, Message, Receive, Scope, Send, refuse
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from penstock.tracing.redaction import redact

if TYPE_CHECKING:
    from fastapi import FastAPI

    from penstock.kernel.executor import ExecutorRegistry

CLOSING_S = 5
"""How long answers may take that are under way when the runs have ended or are parked."""
HURRIED_S = 1
"""How long they may take if somebody is in a hurry."""
HEADERS_S = 15.0
"""How long a client may take to say what it wants."""
MAX_CONNECTIONS = 2_000
IN_MEMORY = "memory:"
UNFINISHED: tuple[RunStatus, ...] = ("queued", "running", "waiting", "parked")
MANY = 1_000
"""Runs that are there when a server starts are counted as far as this."""
BACKLOG = 512


async def serve(
    settings: ServerSettings | None = None,
    *,
    url: str = IN_MEMORY,
    host_settings: HostSettings | None = None,
    executors: ExecutorRegistry | Mapping[str, Any] | None = None,
    services: Mapping[str, Any] | None = None,
    prices: PriceBook | None = None,
    prepare: Callable[[RunHost], Awaitable[None]] | None = None,
    announce: Callable[[str], None] = print,
    tell: Callable[[str], None] | None = None,
) -> None:
    """Serve until interrupted. `prepare` is awaited before anybody is let in, such as to save graphs to begin with.

    What becomes of the runs that are under way when it stops, it may `tell`.
    """
    settings = settings or ServerSettings()
    listener = listen(settings)
    try:
        async with await open_stores(url) as stores:
            settled = host_settings or HostSettings()
            host = RunHost(stores, executors=executors, services=services, settings=settled, prices=prices)
            app = create_app(host, ChatService(host, stores.chats), stores, settings)
            server = ServerProcess(app, host, tell, is_kept=stores.url != IN_MEMORY)
            # The table of prices takes a second to load: here, and not on the loop when the first model is asked.
            await asyncio.to_thread((prices or default_prices()).is_priced, "gpt-4o")
            with server.heeding_signals():
                unfinished = await stores.runs.list(statuses=UNFINISHED, limit=MANY)
                await host.start()
                try:
                    if prepare is not None:
                        await prepare(host)
                    announce(
                        greeting(settings, listener.getsockname()[1], stores.url, len(unfinished), settled.lease_s)
                    )
                    await server.serve([listener])
                finally:
                    await host.close(0)  # after a stop in order there is nothing left to park
    finally:
        listener.close()


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the address of the settings; InvalidValue if it cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # By its protocol asyncio knows it for TCP, and sends what is written at once. Else every answer on a connection
    # that is used again waits until the client has acknowledged the one before: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        expected = f"an address that is free to listen at ({error.strerror})"
        raise InvalidValue("address", f"{settings.host}:{settings.port}", expected) from None
    listener.setblocking(False)
    return listener


def greeting(settings: ServerSettings, port: int, url: str, unfinished: int = 0, lease_s: float = 0) -> str:
    """What is said when the server is up; `unfinished` runs were there before it."""
    name = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"http://{name}:{port}"
    is_kept = url != IN_MEMORY
    kept = f"in {redact(url)}" if is_kept else "in memory: everything is gone when the server ends"
    good = sum(not token.has_expired(SYSTEM_CLOCK.time_ns()) for token in settings.tokens)
    who = _number(good, "token") if settings.tokens else "anybody on this machine, nobody else"
    runs = _number(unfinished, "run") if unfinished < MANY else f"{MANY} runs or more"
    goes_on = (
        f"  goes on       with {runs}; what another server had at work when it was killed, {lease_s:g} s after that"
    )
    return "\n".join(
        (
            f"Penstock listens at {address}",
            f"  open          {address}/",
            f"  let in        {who}",
            f"  kept          {kept}",
            *([goes_on] if unfinished else ()),
            f"  OpenAI's API  {address}/v1        MCP  {address}/mcp",
            f"  stop          Ctrl-C; a second one {'parks' if is_kept else 'ends'} what runs at once",
        )
    )


def _stopping(runs: int, drain_s: float, *, is_kept: bool) -> str:
    then = f"a second Ctrl-C {'parks' if is_kept else 'ends'} what runs at once"
    return f"stopping: {_number(runs, 'run')} under way, with up to {drain_s:g} s to end; {then}"


def farewell(
    before: Mapping[str, int], after: Mapping[str, int], runs: int, lease_s: float, *, is_kept: bool = True
) -> str:
    """What is said when the server has stopped, of so many runs that were under way; by what was counted till then."""
    counted = {status: after.get(status, 0) - before.get(status, 0) for status in (*ENDED, "parked", "lost")}
    parked, unparked = counted["parked"], max(0, runs - sum(counted.values()))
    if not is_kept:
        return f"stopped: {_number(parked + unparked, 'run')} gone with the memory" if parked + unparked else "stopped"
    said = [f"{_number(parked, 'run')} parked, for the next server to go on with"] if parked else []
    if unparked:
        said.append(
            f"{_number(unparked, 'run')} could not be parked, as the database does not answer: "
            f"a server goes on {'with it' if unparked == 1 else 'with them'} after {lease_s:g} s"
        )
    return f"stopped: {'; '.join(said)}" if said else "stopped"


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


class ServerProcess(uvicorn.Server):
    """Uvicorn, that ends streams and runs before it waits for answers, and leaves the signals to us until then.

    The runs are those of `host`; without one, somebody else brings them to an end.
    """

    def __init__(
        self,
        app: FastAPI,
        host: RunHost | None = None,
        tell: Callable[[str], None] | None = None,
        *,
        is_kept: bool = True,
        **given: Any,
    ) -> None:
        super().__init__(configured(Answered(app), **given))
        self._host = host
        self._tell = tell
        self._is_kept = is_kept
        """Whether what is parked is still there for another server."""
        self._hurry = asyncio.Event()
        self._streams = parts_of(app).streams

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Nothing: it would give them back, and raise them again, before what runs is parked."""
        yield

    @contextmanager
    def heeding_signals(self) -> Generator[None, None, None]:
        """Stop in order on the first signal, and at once on the second; without signals on other threads."""
        is_main = threading.current_thread() is threading.main_thread()
        loop = asyncio.get_running_loop()
        heeded = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        for one in heeded:
            loop.add_signal_handler(one, self.stop)
        try:
            yield
        finally:
            for one in heeded:
                loop.remove_signal_handler(one)

    def stop(self) -> None:
        """Come to an end; asked again, without waiting for runs."""
        if self.should_exit:
            self._hurry.set()
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, end the streams, then the runs, and wait for answers that are under way."""
        self._listen_no_more(sockets or [])
        self._streams.close()
        try:
            if self._host is not None:
                await self._told(self._host)
        finally:
            if self._hurry.is_set():
                self.config.timeout_graceful_shutdown = HURRIED_S
            await super().shutdown(sockets)

    def _listen_no_more(self, sockets: list[socket.socket]) -> None:
        """As uvicorn does it itself, but before the runs end: nobody new is to wait for them."""
        for server in self.servers:
            server.close()
        for listener in sockets:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    async def _told(self, host: RunHost) -> None:
        """Close the host, and tell of the runs that are under way, if there are any."""
        tell, before = self._tell, host.stats()
        runs = before["running"] + before["waiting"]
        if tell is None or not runs:
            await self._close(host)
            return
        if before["running"]:
            with suppress(Exception):  # the runs come to their end, whether or not anybody can be told
                tell(_stopping(before["running"], host.settings.drain_s, is_kept=self._is_kept))
        await self._close(host)
        with suppress(Exception):
            tell(farewell(before["totals"], host.stats()["totals"], runs, host.settings.lease_s, is_kept=self._is_kept))

    async def _close(self, host: RunHost) -> None:
        """Let runs come to their end, or park them as soon as somebody is in a hurry."""
        draining = asyncio.ensure_future(host.close())
        hurrying = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if draining.done():
            draining.result()
            return
        draining.cancel()
        await asyncio.wait({draining})
        await host.close(0)


class Answered:
    """The app, whose answers are uvicorn's to cancel when the server closes: what has not begun by then is refused."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def seen(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, seen)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not has_begun:  # else the connection is closed in the middle, which is all that can be said
                await refuse(_closed(), scope, receive, send)


def _closed() -> ApiError:
    message = "the server has closed before it could answer; what was begun is kept, and is in the list of runs"
    return ApiError(503, message, headers={"x-should-retry": "false"})


class PatientProtocol(H11Protocol):
    """HTTP/1.1, that does not wait for ever for the rest of a request's head."""

    headers_s = HEADERS_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; it is looked at now and then until it is gone."""
        super().connection_made(transport)
        self._look = self.loop.call_later(self.headers_s, self._look_again, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._look.cancel()
        super().connection_lost(exc)

    def _look_again(self, before: object) -> None:
        """Close the connection if, since the last look, a head was being waited for, and the same one."""
        cycle: Any = self.cycle
        is_idle = self.timeout_keep_alive_task is not None  # then uvicorn's own clock is running
        waits_for_head = not is_idle and (cycle is None or cycle.response_complete)
        if waits_for_head and (cycle is None or cycle is before):
            self.transport.close()
            return
        self._look = self.loop.call_later(self.headers_s, self._look_again, cycle if waits_for_head else None)


def configured(app: App, **given: Any) -> uvicorn.Config:
    """How uvicorn is to serve the app: nothing is believed of proxies, nothing is said of what it is."""
    bounds = {"limit_concurrency": MAX_CONNECTIONS, "timeout_keep_alive": 15, "timeout_graceful_shutdown": CLOSING_S}
    quiet = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False}
    return uvicorn.Config(app, http=PatientProtocol, ws="none", lifespan="on", **{**bounds, **quiet, **given})
