"""An MCP server process: messages of one line each, bounded in size, and a guaranteed shutdown.

The streams of the MCP library keep a line of any length in memory and wait for a hung server in steps of seconds; so
the pipes are read here. Any failure ends the stream of messages, which fails every waiting call, and `why` is the
reason. On exit, stdin is closed, the program gets a grace period to end by itself, and then its whole process group is
killed, including everything it started in that group.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from mcp.shared.message import SessionMessage

from penstock.providers.mcp.library import message_of
from penstock.providers.mcp.servers import StdioServer

PIECE = 65_536
MAX_WAITING = 256
"""Maximum number of messages queued for writing to the server."""
MAX_GARBAGE = 100
"""Maximum number of lines that are not messages; some programs print a short greeting."""
MAX_STDERR = 2_000
REAP_S = 5.0
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "SYSTEMROOT", "USERPROFILE", "TEMP")


class TooMuch(Exception):
    """The server sent a message that is too large, or too many lines that are not messages."""


class _Pipes(SubprocessStreamProtocol):
    """The pipes of a process; notices its exit at once, even if another process holds a pipe open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=PIECE, loop=loop)
        self.exited = asyncio.Event()
        self._pid: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.SubprocessTransport)
        self._pid = transport.get_pid()

    def process_exited(self) -> None:
        super().process_exited()
        self.kill()
        self.exited.set()

    def kill(self) -> None:
        """Kill the process group, unless the process has exited: its id may then belong to another process."""
        if self._pid is not None and not self.exited.is_set():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


class ServerProcess:
    """One run of a server's program."""

    def __init__(self, server: StdioServer) -> None:
        self._server = server
        self.why: str | None = None
        """Why the stream of messages ended; None while it is open."""
        self._stderr = b""

    @property
    def stderr(self) -> str:
        """The end of its standard error output."""
        return self._stderr.decode("utf-8", "replace").strip()

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Start the process and yield its receive and send streams, as the MCP library expects them."""
        transport, pipes = await self._start()
        incoming, received = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        sending, outgoing = anyio.create_memory_object_stream[SessionMessage](MAX_WAITING)
        pumps = [
            asyncio.ensure_future(pump)
            for pump in (self._read(pipes, incoming), self._write(pipes, outgoing), self._listen(pipes))
        ]
        try:
            yield received, sending
        finally:
            try:
                await self._end(pipes)
            finally:
                pipes.kill()
                transport.close()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                for stream in (incoming, received, sending, outgoing):
                    stream.close()

    async def _start(self) -> tuple[asyncio.SubprocessTransport, _Pipes]:
        loop = asyncio.get_running_loop()
        server = self._server
        env = {name: os.environ[name] for name in INHERITED if name in os.environ} | dict(server.env)
        return await loop.subprocess_exec(
            lambda: _Pipes(loop),
            *server.command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=env,
            cwd=server.cwd,
            start_new_session=True,
        )

    async def _end(self, pipes: _Pipes) -> None:
        if pipes.stdin is not None:
            pipes.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._server.grace_s):
                await pipes.exited.wait()
        pipes.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(REAP_S):
                await pipes.exited.wait()

    async def _read(self, pipes: _Pipes, incoming: Any) -> None:
        assert pipes.stdout is not None
        garbage = 0
        try:
            async for line in lines(pipes.stdout, self._server.max_message_bytes):
                message = _message(line)
                if message is not None:
                    await incoming.send(message)
                    continue
                garbage += 1
                if garbage > MAX_GARBAGE:
                    raise TooMuch("it writes lines that are no messages")
            self.why = "it closed its output"
        except TooMuch as error:
            self.why = str(error)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.why = "closed"
        finally:
            incoming.close()  # waiting callers learn that no answer will come
        while await pipes.stdout.read(PIECE):
            pass  # drain, or a program that still writes would block and never exit

    async def _write(self, pipes: _Pipes, outgoing: Any) -> None:
        assert pipes.stdin is not None
        with suppress(ConnectionError, anyio.ClosedResourceError):
            async for sent in outgoing:
                text: str = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                pipes.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await pipes.stdin.drain()

    async def _listen(self, pipes: _Pipes) -> None:
        assert pipes.stderr is not None
        while output := await pipes.stderr.read(PIECE):
            self._stderr = (self._stderr + output)[-MAX_STDERR:]


async def lines(stream: asyncio.StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the non-empty lines; raise TooMuch as soon as one is longer than allowed."""
    begun: list[bytes] = []
    size = 0
    while piece := await stream.read(PIECE):
        *ended, rest = piece.split(b"\n")
        for end in ended:
            if size + len(end) > max_bytes:
                raise TooMuch(f"it sent a message larger than {max_bytes:,} bytes")
            line = b"".join((*begun, end)).strip()
            begun, size = [], 0
            if line:
                yield line
        begun.append(rest)
        size += len(rest)
        if size > max_bytes:
            raise TooMuch(f"it sent a message larger than {max_bytes:,} bytes")


def _message(line: bytes) -> SessionMessage | None:
    try:
        return message_of(line)
    except (ValueError, RecursionError):
        return None
