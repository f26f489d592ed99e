"""Implementation of `penstock gateway`: open the database, serve until interrupted, settle the rest."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn

from penstock.cli.exits import Refused
from penstock.cli.wrap.child import harden_process
from penstock.cli.wrap.declared import declared_upstreams
from penstock.errors import InvalidValue
from penstock.gateway.service import GatewayService
from penstock.gateway.stored_keys import GatewaySettings
from penstock.gateway.upstreams import Upstream
from penstock.runtime.billing.prices import PriceBook
from penstock.server.serve import CannotListen, configured, listen
from penstock.server.settings import ServerSettings
from penstock.storage import open_stores
from penstock.storage.stores import CONNECTIONS, TIMEOUT_S
from penstock.tracing.redaction import redact


@dataclass(frozen=True, slots=True)
class GatewayArguments:
    """The parsed command line of `penstock gateway`."""

    host: str
    port: int
    db: str
    settings: GatewaySettings
    prices: PriceBook
    upstreams: tuple[str, ...] = ()
    db_connections: int = CONNECTIONS
    db_timeout_s: float = TIMEOUT_S


async def serve_gateway(arguments: GatewayArguments, announce: Callable[[str], None]) -> None:
    """Serve until interrupted."""
    upstreams = declared_upstreams(arguments.upstreams)
    harden_process()
    try:
        listener = listen(ServerSettings(host=arguments.host, port=arguments.port))
    except CannotListen as error:
        raise Refused(f"{error}; use --port to choose another port, or 0 for any free one") from None
    except InvalidValue as invalid:
        raise Refused(str(invalid)) from None
    try:
        stores = await open_stores(arguments.db, connections=arguments.db_connections, timeout_s=arguments.db_timeout_s)
        async with stores:
            await arguments.prices.aload()
            async with GatewayService(upstreams, arguments.prices, arguments.settings).opened(stores) as gateway:
                server = _Server(configured(gateway))
                announce(_greeting(arguments, listener.getsockname()[1], upstreams))
                with server.stopped_by_signals():
                    await server.serve([listener])
    finally:
        listener.close()


def _greeting(arguments: GatewayArguments, port: int, upstreams: dict[str, Upstream]) -> str:
    name = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    rows = [
        f"  /{upstream.name:<12} {redact(upstream.url)}{'' if upstream.key else '  (no key)'}"
        for upstream in upstreams.values()
    ]
    address = f"http://{name}:{port}"
    create = f"penstock tokens create NAME --gateway --db {redact(arguments.db)}"
    return "\n".join((f"Penstock gateway is listening on {address}", *rows, f"  keys          {create}"))


class _Server(uvicorn.Server):
    """A uvicorn server that shuts down in order at a signal, and does not raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: `stopped_by_signals` handles the signals."""
        yield

    @contextmanager
    def stopped_by_signals(self) -> Generator[None, None, None]:
        """Stop at SIGINT and SIGTERM inside the block."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
