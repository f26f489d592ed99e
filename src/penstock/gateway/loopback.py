"""Serve a gateway on a loopback port of its own, for as long as one command runs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager

import uvicorn

from penstock.gateway.app import Gateway

HOST = "127.0.0.1"
BACKLOG = 512
CLOSING_S = 2
"""Grace period for open responses when the command has ended."""


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Do nothing: signals are forwarded to the command."""
        yield


@asynccontextmanager
async def serving(gateway: Gateway) -> AsyncIterator[str]:
    """Serve inside the block; yield the base URL."""
    listener = _listen()
    # uvicorn would log only requests that a stop has cut, whose clients have been answered.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        gateway,
        ws="none",
        lifespan="off",
        timeout_keep_alive=60,
        timeout_graceful_shutdown=CLOSING_S,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]), name="penstock gateway")
    try:
        yield f"http://{HOST}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait((task,))
        listener.close()


def _listen() -> socket.socket:
    # With the protocol named, asyncio sets TCP_NODELAY: without it, each reused connection waits for acknowledgements.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind((HOST, 0))
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
