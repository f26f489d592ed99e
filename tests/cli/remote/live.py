"""A server for commands to talk to: real stores in memory, a real socket, a loop on a thread of its own.

And what stands between: a proxy that cuts connections, and a terminal with a user who types.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import os
import pty
import select
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.agents.model import Model
from penstock.chat.service import ChatService
from penstock.hosting.host import HostSettings, RunHost
from penstock.nodes import executors as standard_executors
from penstock.runtime.billing.prices import PriceBook
from penstock.server.app import create_app
from penstock.server.auth import Token
from penstock.server.examples import ExampleModel, example_graphs
from penstock.server.serve import ServerProcess, listen
from penstock.server.settings import ServerSettings
from penstock.storage.memory import MemoryStores

T = TypeVar("T")

ANN, BOB = "ann-0123456789abcdef", "bob-0123456789abcdef"
TOKENS = (Token.of("ann", "user", ANN), Token.of("bob", "user", BOB))
PATIENCE_S = 20
"""After so long what is not shown on a terminal is taken to be never shown, so that the test can say what was."""
PENSTOCK = [sys.executable, "-m", "penstock.cli"]


@dataclass
class Live:
    """A server that is up."""

    url: str
    stores: MemoryStores
    host: RunHost
    loop: asyncio.AbstractEventLoop

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """What the work comes to, on the server's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def start(self, graph_id: str, input: Any = None, *, owner: str = "local", **limits: Any) -> str:
        """The id of a new run."""
        return self.do(self.host.submit(owner=owner, graph_id=graph_id, input=input, limits=limits or None)).id

    def ended(self, run_id: str) -> str:
        """The status of a run once it has ended."""
        return self.do(self.host.wait(run_id)).status

    def until(self, run_id: str, kind: str) -> Mapping[str, Any]:
        """Wait until the run has emitted such an event; its data."""

        async def found() -> Mapping[str, Any]:
            async for event in self.host.events(run_id):
                if event.type == kind:
                    return event.data
            raise AssertionError(f"the run ended without {kind}")

        return self.do(found())


@dataclass
class _Starting:
    up: threading.Event = field(default_factory=threading.Event)
    live: Live | None = None
    server: ServerProcess | None = None
    error: BaseException | None = None


@contextmanager
def serving(
    words_per_second: float = 0,
    *,
    tokens: Sequence[Token] = (),
    graphs: Mapping[str, Mapping[str, Any]] | None = None,
    port: int = 0,
    model: Model | None = None,
    prices: PriceBook | None = None,
) -> Iterator[Live]:
    """A server with the example graphs and the example model, or another in its place, until the block ends."""
    starting = _Starting()

    async def serve() -> None:
        stores = MemoryStores()
        settings = ServerSettings(port=port, tokens=tuple(tokens))
        listener = listen(settings)
        models = {"example": model or ExampleModel(words_per_second=words_per_second)}
        quick = HostSettings(tick_s=0.05, drain_s=0)
        executors, services = standard_executors(), {"models": models}
        async with RunHost(stores, executors=executors, services=services, settings=quick, prices=prices) as host:
            given = example_graphs() if graphs is None else graphs
            for id, document in given.items():
                await stores.graphs.save(id, "server", id, document, now_ms=1)
            app = create_app(host, ChatService(host, stores.chats), stores, settings)
            starting.server = ServerProcess(app)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            starting.live = Live(url, stores, host, asyncio.get_running_loop())
            starting.up.set()
            await starting.server.serve([listener])
        listener.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            starting.error = error
        finally:
            starting.up.set()

    thread = threading.Thread(target=run)
    thread.start()
    starting.up.wait()
    try:
        if starting.error is not None:
            raise starting.error
        assert starting.live is not None
        yield starting.live
    finally:
        if starting.live is not None and starting.server is not None and thread.is_alive():
            starting.live.loop.call_soon_threadsafe(starting.server.stop)
        thread.join()


@contextmanager
def cutting(url: str, after_bytes: Sequence[int]) -> Iterator[str]:
    """A way to the server on which the first connections are cut when so many bytes have come back; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    target = ("127.0.0.1", int(url.rpartition(":")[2]))
    threads: list[threading.Thread] = []
    left = list(after_bytes)

    def accept() -> None:
        while True:
            try:
                here, _ = listener.accept()
            except OSError:
                return
            there = socket.create_connection(target)
            most = left.pop(0) if left else None
            for one in ((here, there, None), (there, here, most)):
                threads.append(threading.Thread(target=pump, args=one))
                threads[-1].start()

    def pump(source: socket.socket, sink: socket.socket, most: int | None) -> None:
        passed = 0
        with suppress(OSError):
            while piece := source.recv(4096):
                if most is not None and passed + len(piece) > most:
                    sink.sendall(piece[: most - passed])
                    break
                sink.sendall(piece)
                passed += len(piece)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for thread in threads:
            thread.join()


class Terminal:
    """A program on a terminal of its own, and a user who types."""

    CONTROLLING = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    )
    """With a controlling terminal, Ctrl-C is a signal."""

    def __init__(self, *arguments: str, columns: int = 100, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CONTROLLING, *PENSTOCK, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=kept | {"TERM": "xterm", "PYTHONUTF8": "1"} | env,
        )
        os.close(theirs)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.shown = ""
        self._seen = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def until(self, text: str) -> str:
        """Wait until that is shown, after what was waited for before; what was shown up to there."""
        while (at := self.shown.find(text, self._seen)) < 0:
            is_there, _, _ = select.select([self._ours], [], [], PATIENCE_S)
            piece = self._read() if is_there else ""
            if not piece:
                raise AssertionError(f"{text!r} was never shown: {self.shown[self._seen :]!r}")
            self.shown += piece
        before = self.shown[self._seen : at]
        self._seen = at + len(text)
        return before

    def type(self, keys: str) -> None:
        """Press those keys."""
        os.write(self._ours, keys.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C until something is shown for it: what comes just before a read begins is not heard by it."""
        before = len(self.shown)
        while True:
            self.type("\x03")
            while select.select([self._ours], [], [], 3)[0] and (piece := self._read()):
                self.shown += piece
                if self.shown[before:].replace("^C", ""):
                    return
            if self.process.poll() is not None:
                return

    def end(self) -> int:
        """Read to the end; the exit code."""
        while select.select([self._ours], [], [], PATIENCE_S)[0] and (piece := self._read()):
            self.shown += piece
        return self.process.wait(PATIENCE_S)

    def _read(self) -> str:
        """The next characters; nothing at the end."""
        try:
            while piece := os.read(self._ours, 65_536):
                if text := self._decoder.decode(piece):  # a character may come in two pieces
                    return text
        except OSError:  # how Linux says that the other side has closed
            pass
        return ""
