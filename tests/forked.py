"""Programs in processes of their own, forked by one that has imported everything already.

A fresh interpreter imports for a second or more before `penstock` says its first word; a fork takes milliseconds. What
a test starts with `Program` is what `python ARGUMENTS` would be: its own process, arguments, environment, directory and
streams, with signals, exit code and an ordinary end of the interpreter. Only the imports were made before. A test about
the start itself, or about what is imported, starts an interpreter.

The server is `python -m tests.forked SOCKET`. Each program has a connection: a JSON line with its streams beside it
goes there; its process id and, when it has ended, its exit status come back.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
MAX_REQUEST = 1_000_000
IMPORTED = (
    *("penstock.cli.app", "penstock.cli.service.serve_command", "tests.cli.remote.live", "uvicorn.lifespan.on"),
    *("penstock.cli.wrap.command", "uvicorn.lifespan.off", "penstock.server.mcp", "penstock.cli.remote.connection"),
)
"""What programs would import for a second or more; the third has the server. The table of prices is loaded, too."""

_address: str | None = None


@contextmanager
def fork_server() -> Iterator[None]:
    """A server that forks programs, until the block ends."""
    global _address
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        command = [sys.executable, "-m", "tests.forked", address]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            _address = address
            try:
                yield
            finally:
                _address = None
                process.kill()


class Program:
    """A program that was forked, used as a `subprocess.Popen` is."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdin: int = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        is_merged: bool = False,
    ) -> None:
        """`is_merged` sends what it complains about to its standard output, too."""
        assert _address is not None, "the test needs the fixture `forks`"
        self.returncode: int | None = None
        self.stdout, out = _pipe()
        self.stderr, err = _pipe()
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(_address)
        request = {
            "arguments": list(arguments),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        with open(os.devnull) as nothing:
            given = nothing.fileno() if stdin == subprocess.DEVNULL else stdin
            socket.send_fds(
                self._connection, [json.dumps(request).encode() + b"\n"], [given, out, out if is_merged else err]
            )
        os.close(out)
        os.close(err)
        self._answers = self._connection.makefile("r")
        self.pid = int(self._answers.readline())

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        self.stderr.close()
        self.wait()

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Its exit status once it has ended; minus the signal's number if it was killed."""
        if self.returncode is None:
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._connection.close()
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """What it printed to both streams, read until it has ended; short texts, which fit into a pipe."""
        printed = self.stdout.read(), self.stderr.read()
        self.wait()
        return printed


COMMAND = """#!{python} -IS
import json, os, signal, socket, sys

request = {{"arguments": ["-m", "penstock.cli", *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.connect("{address}")
socket.send_fds(server, [json.dumps(request).encode() + b"\\n"], [0, 1, 2])
answers = server.makefile()
program = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(program, number))
sys.exit(int(answers.readline()))
"""


def install_command(folder: Path) -> None:
    """Write a program `penstock` into a folder, for shells: it is forked, and gets their streams and signals."""
    assert _address is not None, "the test needs the fixture `forks`"
    file = folder / "penstock"
    file.write_text(COMMAND.format(python=sys.executable, address=_address))
    file.chmod(0o755)


def _pipe() -> tuple[IO[str], int]:
    reader, writer = os.pipe()
    return open(reader), writer


def _serve(address: str) -> dict[str, Any]:
    """Fork a program for each connection; returns only in the fork, with what is to be run."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the keepers are never waited for
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            ready, _, _ = select.select([listener.fileno(), 0], [], [])
            if 0 in ready:  # the process that started it is gone
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    return _keep(connection)


def _keep(connection: socket.socket) -> dict[str, Any]:
    """Fork the program, report its id and how it ends; returns only in the program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
    while not line.endswith(b"\n"):
        line += connection.recv(MAX_REQUEST)
    program = os.fork()
    if program == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return dict(json.loads(line))
    for stream in streams:
        os.close(stream)
    connection.sendall(b"%d\n" % program)
    gone, _, _ = select.select([connection.fileno(), os.pidfd_open(program)], [], [])
    if connection.fileno() in gone:  # the test has ended without it
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    with suppress(BrokenPipeError):
        connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """What `python ARGUMENTS` does."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    first, *others = request["arguments"]
    if first == "-m":
        sys.path[0] = request["cwd"]
        sys.argv[:] = others
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        sys.argv[:] = ["-c", *others[1:]]
        exec(others[0], {"__name__": "__main__"})
    else:
        sys.argv[:] = request["arguments"]
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("penstock").PriceBook().load()
    gc.collect()
    gc.freeze()  # the programs' collectors neither look at what was imported nor copy its pages
    _become(_serve(sys.argv[1]))
