"""Pass the bytes of a response through a reader that may end it.

The library is httpx2 or httpx, which has the same API; this module never imports either.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.providers.reading.codings import ACCEPTED, Unpacker, Unreadable, coding_of
from penstock.providers.reading.families import in_the_families

ERROR_BYTES = 1024 * 1024
"""Maximum size of a response without an answer: an error status, a redirect."""


class UnreadableAnswer(PenstockError):
    """A response has a coding that was not requested, or does not match it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the provider's answer cannot be read: {why}")


class Sink(Protocol):
    """Reads the bytes of a response."""

    def take(self, data: bytes) -> bytes:
        """Read bytes as they arrive; return the bytes to pass on."""

    def end(self) -> bytes:
        """Read the end; return the remaining bytes to pass on."""


class Capped:
    """Passes every byte on, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._count = 0

    def take(self, data: bytes) -> bytes:
        self._count += len(data)
        if self._count > self._max_bytes:
            raise UnreadableAnswer(f"it is larger than {self._max_bytes:,} bytes")
        return data

    def end(self) -> bytes:
        return b""


class _Decoded:
    """Decompresses a body for another sink."""

    def __init__(self, sink: Sink, coding: str) -> None:
        self._sink = sink
        self._unpacker = Unpacker(coding)

    def take(self, data: bytes) -> bytes:
        return self._passed(self._unpacker.feed(data))

    def end(self) -> bytes:
        return self._passed(self._unpacker.end()) + self._sink.end()

    def _passed(self, pieces: Iterator[bytes]) -> bytes:
        try:
            return b"".join(map(self._sink.take, pieces))
        except Unreadable as error:
            raise UnreadableAnswer(str(error)) from None


class _Refusing:
    """Refuses a body that cannot be decompressed in bounded pieces."""

    def __init__(self, why: str) -> None:
        self._why = why

    def take(self, data: bytes) -> bytes:
        raise UnreadableAnswer(self._why)

    def end(self) -> bytes:
        raise UnreadableAnswer(self._why)


def decoded(sink: Sink, header: str) -> Sink:
    """Return `sink`, behind a decompressor for this Content-Encoding if the body has one."""
    try:
        coding = coding_of(header)
    except Unreadable as error:
        return _Refusing(str(error))
    return sink if coding is None else _Decoded(sink, coding)


def without_coding(headers: Any) -> None:
    """Remove the headers that no longer hold for a body that was decompressed here."""
    if "content-encoding" in headers:
        for name in ("content-encoding", "content-length"):
            headers.pop(name, None)


def limit(response: Any, body: type, sink: Sink | None = None) -> None:
    """Let `sink` read the body of a response; by default at most `ERROR_BYTES`, for a response without an answer."""
    coding = response.headers.get("content-encoding", "")
    response.stream = stream_class(response, body)(response.stream, decoded(sink or Capped(ERROR_BYTES), coding))
    without_coding(response.headers)


def stream_class(response: Any, body: type) -> Any:
    """Return `body` as a subclass of the stream class of the response's library, which the library requires."""
    kind = "AsyncByteStream" if hasattr(body, "__aiter__") else "SyncByteStream"
    return _stream_class(type(response).__module__.partition(".")[0], kind, body)


@lru_cache(maxsize=16)
def _stream_class(library: str, kind: str, body: type) -> Any:
    return type(body.__name__, (body, getattr(importlib.import_module(library), kind)), {})


class Limited:
    """A response body that is read synchronously, through a sink; closed when the sink ends it."""

    def __init__(self, stream: Any, sink: Sink) -> None:
        self._stream = stream
        self._sink = sink

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._stream:
                if passed := self._sink.take(chunk):
                    yield passed
            if rest := self._sink.end():
                yield rest
        except PenstockError as error:
            self.close()
            raise in_the_families(error) from None

    def close(self) -> None:
        self._stream.close()


class AsyncLimited:
    """A response body that is read on an event loop, through a sink; closed when the sink ends it."""

    def __init__(self, stream: Any, sink: Sink) -> None:
        self._stream = stream
        self._sink = sink

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._stream:
                if passed := self._sink.take(chunk):
                    yield passed
            if rest := self._sink.end():
                yield rest
        except PenstockError as error:
            await self.aclose()
            raise in_the_families(error) from None

    async def aclose(self) -> None:
        await self._stream.aclose()


# For clients of our own.

_sink: ContextVar[Sink | None] = ContextVar("penstock_sink", default=None)
"""Reads the response to the request that this task is sending."""


@contextmanager
def reading(sink: Sink) -> Iterator[None]:
    """Let `sink` read the response to the request that is sent inside this context, by a client with our hooks."""
    outside = _sink.set(sink)
    try:
        yield
    finally:
        with suppress(ValueError):  # closed from another context, with nothing to reset
            _sink.reset(outside)


def hooked(hooks: Mapping[str, Sequence[Any]] = MappingProxyType({})) -> dict[str, list[Any]]:
    """Return event hooks for an httpx client: those it has, and ours, which do nothing outside of `reading`."""
    ours = {"request": _accept_codings, "response": _limit_response}
    others = {name: [hook for hook in found if hook is not ours.get(name)] for name, found in hooks.items()}
    return others | {name: [*others.get(name, ()), hook] for name, hook in ours.items()}


async def _accept_codings(request: Any) -> None:
    if _sink.get() is not None:
        request.headers["accept-encoding"] = ACCEPTED


async def _limit_response(response: Any) -> None:
    sink = _sink.get()
    if sink is not None:
        limit(response, AsyncLimited, sink if response.status_code < 300 else None)
