"""Processes that tests may kill, forked by a server that has imported everything already.

A fresh interpreter imports for seconds; a fork takes milliseconds. A driver module calls `serve(work)` in a process of
its own; a test starts that process as a `ForkServer` and has it fork one child after another. The server reads a JSON
line for each child and answers with a JSON line that says how the child ended.

A child may be killed at a failpoint (`crash_at`), or a given time after it has passed one (`starts_at` and
`kill_after_s`): it reports that moment over a pipe, so that the time does not include opening a database or waiting for
a lease.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.runtime.billing.prices import PriceBook
from penstock.testing import crash_points

ROOT = Path(__file__).parents[2]

Work = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class ForkServer:
    """The server process, seen from a test. `worked_s` is how long its last child worked, or None if it did not."""

    def __init__(self, driver: str) -> None:
        self.worked_s: float | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", driver], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, **command: Any) -> int:
        """Run a child to its end and return its exit status; minus the signal's number if it was killed."""
        self.start(**command)
        return self.wait()

    def start(self, **command: Any) -> None:
        """Start a child, one at a time."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Wait for the child to end and return its exit status."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        self.worked_s = answer["worked_s"]
        return int(answer["status"])

    def close(self) -> None:
        self._process.communicate(timeout=60)


def serve(work: Work) -> None:
    """Fork a child for each line of input, and print how it ended and how long it worked."""
    _prepare()
    for line in sys.stdin:
        command = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _run_child(work, command, writer)
        os.close(writer)
        status, worked_s = _wait_for(child, reader, command.get("kill_after_s"))
        os.close(reader)
        sys.stdout.write(json.dumps({"status": status, "worked_s": worked_s}) + "\n")
        sys.stdout.flush()


def _prepare() -> None:
    """Load what each child would: the driver of PostgreSQL and the prices; keep their collectors away from it."""
    PriceBook().load()
    with suppress(ImportError):
        importlib.import_module("penstock.storage.postgres.ledger")
    gc.collect()
    gc.freeze()


def _run_child(work: Work, command: dict[str, Any], writer: int) -> None:
    status = 1
    try:
        if starts_at := command.get("starts_at"):
            crash_points.arm(starts_at, die=lambda: _report_start(writer))
        else:
            crash_points.arm(command.get("crash_at") or "")
        asyncio.run(work(command))
        status = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(status)


def _report_start(writer: int) -> None:
    os.write(writer, b".")


def _wait_for(child: int, reader: int, kill_after_s: float | None) -> tuple[int, float | None]:
    """The child's exit status and how long it worked; a child that ends before its work starts closes the pipe."""
    started = time.monotonic() if os.read(reader, 1) else None
    if started is not None and kill_after_s is not None:
        has_ended, _, _ = select.select([reader], [], [], kill_after_s)
        if not has_ended:
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), None if started is None else time.monotonic() - started
