"""A server that is a process: its messages, one a line, each bounded; and its end, which comes whatever it does.

The streams of the protocol's own library keep a line of any length in memory and wait for a hung server in steps of
seconds; so the pipes are read here. What may go wrong ends the stream of messages, which fails every call that waits,
and `why` says what it was. On leaving, the input is closed, the program gets a moment to end by itself, and then its
whole process group is killed: nothing that it started in that group lives on.
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
from mcp_types import jsonrpc_message_adapter

from penstock.providers.mcp.servers import StdioServer

PIECE = 65_536
MAX_WAITING = 256
"""Messages to the server that may wait to be written."""
MAX_GARBAGE = 100
"""Lines that are no message; some programs print a greeting, and none needs more than this."""
MAX_STDERR = 2_000
REAP_S = 5.0
INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "SYSTEMROOT", "USERPROFILE", "TEMP")


class TooMuch(Exception):
    """The server sends what no server needs to send."""


class _Pipes(SubprocessStreamProtocol):
    """The pipes of a process; knows of its end as soon as it comes, whoever still holds a pipe open."""

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
        """Kill the process group: the process, and what it started. Once it has ended, its number is another's."""
        if self._pid is not None and not self.exited.is_set():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)


class ServerProcess:
    """One run of a server's program."""

    def __init__(self, server: StdioServer) -> None:
        self._server = server
        self.why: str | None = None
        """What ended the messages; None as long as they come."""
        self._stderr = b""

    @property
    def stderr(self) -> str:
        """The last it has said on its standard error."""
        return self._stderr.decode("utf-8", "replace").strip()

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Any, Any]]:
        """Its messages and a way to send some, as the protocol's library takes them."""
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
            incoming.close()  # whoever waits for an answer learns that none will come
        while await pipes.stdout.read(PIECE):
            pass  # a program that still writes would never come to its end

    async def _write(self, pipes: _Pipes, outgoing: Any) -> None:
        assert pipes.stdin is not None
        with suppress(ConnectionError, anyio.ClosedResourceError):
            async for sent in outgoing:
                text: str = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                pipes.stdin.write(text.encode("utf-8", "replace") + b"\n")
                await pipes.stdin.drain()

    async def _listen(self, pipes: _Pipes) -> None:
        assert pipes.stderr is not None
        while said := await pipes.stderr.read(PIECE):
            self._stderr = (self._stderr + said)[-MAX_STDERR:]


async def lines(stream: asyncio.StreamReader, max_bytes: int) -> AsyncIterator[bytes]:
    """The lines that are not empty; TooMuch as soon as one is longer than allowed."""
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
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except (ValueError, RecursionError):
        return None
