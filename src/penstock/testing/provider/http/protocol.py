"""The part of HTTP/1.1 a provider needs: read requests, send answers, and detect disconnects.

Strict where a request could be read in two ways. Knows nothing of models or money.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
BUFFER = 16 * 1024
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing the socket is a reset, which cannot be mistaken for a normal end."""

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(;[^\r\n]*)?\r\n")


class BadRequest(Exception):
    """The request is answered with `status`, and nothing else happens."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Head:
    """The first lines of a request."""

    method: str
    path: str
    version: str
    headers: Mapping[str, str]
    query: str = ""

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow on the same connection."""
        options = self.headers.get("connection", "").lower()
        return "keep-alive" in options if self.version == "HTTP/1.0" else "close" not in options


class Wire(asyncio.StreamReaderProtocol):
    """A connection whose `gone` is set the moment the other side closes it, even while no read is pending."""

    def __init__(self, connected: Callable[[Wire, asyncio.StreamReader, asyncio.StreamWriter], None]) -> None:
        reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
        super().__init__(reader, lambda reader, writer: connected(self, reader, writer))
        self.gone = asyncio.Event()

    def eof_received(self) -> bool | None:
        """Treat a half-close as a disconnect: no client that still wants the answer does that."""
        self.gone.set()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Mark the connection as gone when it is closed or broken."""
        self.gone.set()
        super().connection_lost(exc)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the head of the next request; None if the other side closed the connection between two requests."""
    try:
        text = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(431, f"the head is over {MAX_HEAD_BYTES} bytes") from None
    except asyncio.IncompleteReadError:
        return None
    request_line, *lines = text[:-4].decode("latin-1").split("\r\n")
    parts = request_line.split(" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not parts[1].startswith("/"):
        raise BadRequest(400, "the request line is not METHOD /path HTTP/1.1")
    if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    path, _, query = parts[1].partition("?")
    return Head(parts[0], path, parts[2], _headers(lines), query)


def _headers(lines: list[str]) -> dict[str, str]:
    if len(lines) > MAX_HEADERS:
        raise BadRequest(431, f"more than {MAX_HEADERS} headers")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _TOKEN.fullmatch(name) or "\n" in value or "\r" in value or "\0" in value:
            raise BadRequest(400, "a header is not NAME: value")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


async def read_body(reader: asyncio.StreamReader, head: Head, max_bytes: int) -> bytes:
    """Return the whole body; raises BadRequest if it is too long, or its length can be read in two ways."""
    coding, length = head.headers.get("transfer-encoding"), head.headers.get("content-length")
    if coding is not None and (length is not None or coding.lower() != "chunked" or head.version == "HTTP/1.0"):
        raise BadRequest(400, "a body has either a Content-Length or Transfer-Encoding: chunked")
    if coding is not None:
        return await _read_chunks(reader, max_bytes)
    if length is None:
        return b""
    if not (length.isascii() and length.isdecimal() and len(length) < 16):
        raise BadRequest(400, "Content-Length is not one number")
    if int(length) > max_bytes:
        raise BadRequest(413, f"the body is over {max_bytes} bytes")
    return await reader.readexactly(int(length))


async def _read_chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    body = bytearray()
    while size := await _chunk_size(reader):
        if len(body) + size > max_bytes:
            raise BadRequest(413, f"the body is over {max_bytes} bytes")
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise BadRequest(400, "a chunk does not end where it says")
    while await _line(reader) != b"\r\n":  # trailers are skipped
        pass
    return bytes(body)


async def _chunk_size(reader: asyncio.StreamReader) -> int:
    found = _CHUNK_SIZE.fullmatch(await _line(reader))
    if found is None:
        raise BadRequest(400, "a chunk does not begin with its size")
    return int(found[1], 16)


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil(b"\r\n")
    except asyncio.LimitOverrunError:
        raise BadRequest(400, f"a line of the body is over {MAX_HEAD_BYTES} bytes") from None


class Exchange:
    """The answering side of one request."""

    def __init__(self, writer: asyncio.StreamWriter, head: Head | None) -> None:
        self._writer = writer
        self._chunks = False
        self._can_chunk = head is not None and head.version == "HTTP/1.1"
        self.keeps_alive = head is not None and head.keeps_alive
        """Whether another request may follow, in the current state."""
        self.bytes_sent = 0
        """Bytes of the body handed to the connection."""

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a whole answer at once."""
        await self.begin(status, headers, len(body))
        await self.write(body)
        await self.end()

    async def begin(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        """Send the head; without a `length` the body is sent in chunks, or ends with the connection."""
        self._chunks = length is None and self._can_chunk
        self.keeps_alive &= length is not None or self._chunks
        framing = {"transfer-encoding": "chunked"} if self._chunks else {}
        if length is not None:
            framing = {"content-length": str(length)}
        framing["connection"] = "keep-alive" if self.keeps_alive else "close"
        lines = [f"HTTP/1.1 {status} {_phrase(status)}", *(f"{k}: {v}" for k, v in {**headers, **framing}.items())]
        self._writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        await self._writer.drain()

    async def write(self, part: bytes) -> None:
        """Send a part of the body."""
        if part:
            self.bytes_sent += len(part)
            self._writer.write(b"%x\r\n%b\r\n" % (len(part), part) if self._chunks else part)
        await self._writer.drain()

    async def end(self) -> None:
        """End the body."""
        if self._chunks:
            self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    def shrink_buffers(self) -> None:
        """Keep little in the buffers of this side, so that `bytes_sent` is close to the number of bytes the caller has
        read.
        """
        wire: socket.socket | None = self._writer.get_extra_info("socket")
        if wire is not None:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._writer.transport.set_write_buffer_limits(BUFFER)

    def go_on(self) -> None:
        """Send `100 Continue` to a caller that expects it before sending the body."""
        self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def reset(self) -> None:
        """Break the connection, as a crash would."""
        self.keeps_alive = False
        wire: socket.socket | None = self._writer.get_extra_info("socket")
        if wire is not None:
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._writer.transport.abort()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
