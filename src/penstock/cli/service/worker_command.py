"""Implementation of `penstock worker`: execute runs until stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

from penstock.chat.service import ChatService
from penstock.cli.render.screen import print_text, printable
from penstock.cli.service.engines import open_engine
from penstock.cli.service.gc_tuning import freeze_heap
from penstock.cli.service.serve_command import Loaded, ServeArguments, export_of, host_settings_of, load_and_run
from penstock.hosting.host import RunHost
from penstock.storage import open_stores
from penstock.tracing.redaction import redact

REMOVES_NOTHING_DAYS = 18_000.0
"""Retention is a setting of the servers; a worker with another one must not remove what they keep."""


def work(arguments: ServeArguments) -> int:
    """Execute runs until stopped, and return the exit code."""
    for_ever = REMOVES_NOTHING_DAYS
    arguments = replace(arguments, keep_days=for_ever, keep_payload_days=for_ever, keep_audit_days=for_ever)
    return load_and_run(arguments, _work)


async def _work(arguments: ServeArguments, loaded: Loaded) -> None:
    assert arguments.engine is not None
    engine = open_engine(arguments.engine, arguments.db, arguments.lease_s)(queues=arguments.queues)
    async with AsyncExitStack() as stack:
        export = export_of(arguments)
        if export is not None:
            stack.push_async_callback(asyncio.to_thread, export.close)
        stores = await stack.enter_async_context(
            await open_stores(arguments.db, connections=arguments.db_connections, timeout_s=arguments.db_timeout_s)
        )
        host = RunHost(
            stores,
            executors=loaded.executors,
            services=loaded.nodes.services,
            settings=host_settings_of(arguments),
            prices=loaded.nodes.prices,
            engine=engine,
            observe=None if export is None else export.observe,
        )
        ChatService(host, stores.chats)
        await host.prices.aload()
        freeze_heap()
        stop, leave = asyncio.Event(), asyncio.Event()
        with _signals(stop, leave):
            await host.start()
            try:
                print_text("\n".join(_greeting(host, arguments, stores.url)))
                await stop.wait()
                await _close(host, leave)
            finally:
                await host.close(0)


@contextmanager
def _signals(stop: asyncio.Event, leave: asyncio.Event) -> Iterator[None]:
    """Set `stop` at the first signal, and `leave` at the second."""
    loop = asyncio.get_running_loop()

    def stopped() -> None:
        (leave if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _close(host: RunHost, leave: asyncio.Event) -> None:
    """Drain the runs for a limited time, then leave the rest to other workers; a second signal ends the drain."""
    running = host.stats()["running"]
    if running:
        print_text(f"stopping: {running} in progress, with up to {host.settings.drain_s:g} s to end")
    closing, leaving = asyncio.ensure_future(host.close()), asyncio.ensure_future(leave.wait())
    await asyncio.wait((closing, leaving), return_when=asyncio.FIRST_COMPLETED)
    for task in (closing, leaving):
        task.cancel()
    await asyncio.wait((closing, leaving))
    await host.close(0)
    parked = host.stats()["totals"].get("parked", 0)
    print_text(f"stopped: {parked} left to other workers" if parked else "stopped")


def _greeting(host: RunHost, arguments: ServeArguments, url: str) -> Iterator[str]:
    assert arguments.engine is not None
    yield f"Penstock worker {printable(host.worker)}"
    yield f"  engine        {printable(arguments.engine)}, queues {printable(', '.join(arguments.queues))}"
    yield f"  storage       {redact(url)}"
    yield f"  runs          up to {host.settings.max_running} at once, {host.settings.max_running_per_owner} of a user"
    yield "  stop          Ctrl-C; press Ctrl-C again to leave running runs immediately"
