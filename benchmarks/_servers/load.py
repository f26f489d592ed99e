"""A client that costs little: HTTP/1.1 over kept connections, parsed only as far as needed.

It runs on the same machine as the server that is measured, so what it saves, the server gets.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

END = b"0\r\n\r\n"
"""The last chunk of a streamed answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a contestant; `{id}` in paths and bodies becomes another text each time."""

    path: str
    body: dict[str, Any]
    is_form: bool = False
    before: str = ""
    """A path to POST to before each request, such as for a session."""
    has: str = ""
    """What a right answer contains."""

    def prepared(self, host: str, secret: str = "") -> list[bytes]:
        """The requests to send, one after the other; with a token, if there is one."""
        number = uuid.uuid4().hex
        text = urlencode(self.body) if self.is_form else json.dumps(self.body)
        kind = "application/x-www-form-urlencoded" if self.is_form else "application/json"
        sent = [_head(host, self.before, b"{}", secret)] if self.before else []
        sent.append(_head(host, self.path, text.encode(), secret, kind))
        return [one.replace(b"{id}", number.encode()) for one in sent]


def _head(host: str, path: str, body: bytes, secret: str, kind: str = "application/json") -> bytes:
    length = len(body) + body.count(b"{id}") * 28
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n"
    authorization = f"Authorization: Bearer {secret}\r\n" if secret else ""
    return f"{head}{authorization}\r\n".encode() + body


@dataclass(slots=True)
class Answer:
    """What came back: when the first byte that contains the marker did, when the last, and all of it."""

    first_s: float = 0.0
    took_s: float = 0.0
    text: bytes = b""


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self._got: list[bytes] = []
        self._size, self._expected = 0, -1
        self._marker = b""
        self._first_s = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionResetError("the server closed the connection"))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()

    async def send(self, request: bytes, marker: bytes = b"") -> Answer:
        """Send a request, and wait for the whole answer; `first_s` is when the marker came."""
        self._done = asyncio.get_running_loop().create_future()
        self._got, self._size, self._expected, self._marker, self._first_s = [], 0, -1, marker, 0.0
        started = time.perf_counter()
        self._transport.write(request)
        await self._done
        first_s = self._first_s - started if self._first_s else 0.0
        return Answer(first_s, time.perf_counter() - started, b"".join(self._got))

    def data_received(self, data: bytes) -> None:
        self._got.append(data)
        self._size += len(data)
        if not self._first_s and self._marker and self._marker in data:
            self._first_s = time.perf_counter()
        if self._expected == -1:
            self._read_head()
        is_whole = data.endswith(END) if self._expected == -2 else self._size >= self._expected > 0
        if is_whole and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _read_head(self) -> None:
        head, found, _ = b"".join(self._got).partition(b"\r\n\r\n")
        if not found:
            return
        self._expected = -2
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self._expected = len(head) + 4 + int(value)


async def connect(url: str) -> Connection:
    """Connect to the server at a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    _, made = await asyncio.get_running_loop().create_connection(Connection, parts.hostname, parts.port)
    return made


async def ask(url: str, connection: Connection, request: Request, marker: bytes = b"", secret: str = "") -> Answer:
    """Send one request, and what comes before it; raises if the answer is not right."""
    answer = Answer()
    for one in request.prepared(urlsplit(url).netloc, secret):
        answer = await connection.send(one, marker)
        status = answer.text[9:12]
        if not status.startswith(b"2"):
            raise RuntimeError(f"answered {answer.text[:500].decode(errors='replace')}")
    if request.has.encode() not in answer.text:
        raise RuntimeError(f"{request.has!r} is not in {answer.text[-500:].decode(errors='replace')}")
    return answer


async def ask_many(urls: Sequence[str], request: Request, count: int, clients: int) -> list[Answer]:
    """So many requests by so many clients, spread over the servers."""
    left = iter(range(count))
    answers: list[Answer] = []

    async def client(number: int) -> None:
        url = urls[number % len(urls)]
        connection = await connect(url)
        try:
            for _ in left:
                answers.append(await ask(url, connection, request))
        finally:
            connection.close()

    async with asyncio.TaskGroup() as group:
        for number in range(clients):
            group.create_task(client(number))
    return answers


async def chat_at_once(
    url: str, request: Request, chats: int, spread_s: float, marker: bytes, secrets: Sequence[str] = ("",)
) -> list[Answer]:
    """So many chats that are all open together, begun over `spread_s` seconds, each one answer long.

    They are those of several people, if there are several secrets.
    """

    async def chat(number: int) -> Answer:
        await asyncio.sleep(spread_s * number / chats)
        connection = await connect(url)
        try:
            return await ask(url, connection, request, marker, secrets[number % len(secrets)])
        finally:
            connection.close()

    return list(await asyncio.gather(*(chat(number) for number in range(chats))))
