"""Requests of an HTTP library, sent as model calls.

The library is httpx2, or httpx, which is the same with other names; it is never imported here, only met. `send` and
`asend` stand before the transport that really talks to the network, so that each attempt of a client comes through.

How a stop reaches a request in flight. An async one is interrupted where it waits, and the library closes its socket.
A sync one waits on a worker: the caller is let go at once, and the socket is shut down, which ends the worker's wait.
Between two reads of an answer nobody waits; the cancel itself shuts the socket down, and the next read raises.
"""

from __future__ import annotations

import socket
from asyncio import current_task
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from penstock.errors import CancelledError
from penstock.providers.http.asked import form_of, is_from_an_sdk, understood
from penstock.providers.http.exchange import Exchange, Terms, admit, refuse_unpriced
from penstock.runtime import worker
from penstock.runtime.call import stop_of
from penstock.runtime.cancellation import CancellationToken, absorb, taken_back

MARK = "penstock.exchange"
"""Under this name a request carries its exchange among its extensions, by which its socket is found."""

_END = object()


def send(terms: Terms, original: Callable[[Any, Any], Any], transport: Any, request: Any) -> Any:
    """Send the request; as a contained call, if it is one of a model."""
    exchange = _admitted(terms, request, request.read)
    if exchange is None:
        return original(transport, request)
    exchange.hold()
    request = _rewritten(request, exchange)
    cut = partial(_cut_request, transport, exchange)
    try:
        response = _waited(exchange, partial(original, transport, request), _close_late, cut)
    except BaseException as error:
        told = exchange.failed(error)
        if told is error:
            raise
        raise told from error
    return _received(exchange, response, "SyncByteStream", _Body)


async def asend(terms: Terms, original: Callable[[Any, Any], Awaitable[Any]], transport: Any, request: Any) -> Any:
    """Send the request; as a contained call, if it is one of a model."""
    if form_of(request.method, request.url.path) is not None:
        await request.aread()
    exchange = _admitted(terms, request, lambda: request.content)
    if exchange is None:
        return await original(transport, request)
    await exchange.ahold()
    request = _rewritten(request, exchange)
    try:
        response = await _reached(exchange.token, lambda: original(transport, request))
    except BaseException as error:
        told = exchange.failed(error)
        if told is error:
            raise
        raise told from error
    return _received(exchange, response, "AsyncByteStream", _AsyncBody)


def _admitted(terms: Terms, request: Any, content: Callable[[], bytes]) -> Exchange | None:
    """The exchange, if the request asks something of a model."""
    method, path, headers = request.method, request.url.path, request.headers
    form = form_of(method, path)
    asked = None if form is None else understood(form, headers, content())
    if asked is not None:
        return admit(terms, asked)
    if is_from_an_sdk(method, path, headers):
        refuse_unpriced(terms, path)
    return None


def _rewritten(request: Any, exchange: Exchange) -> Any:
    """The request as it is sent: with the body that was paid for, and in a coding that can be read on the way back."""
    headers = request.headers.copy()
    headers.pop("content-length", None)
    headers["accept-encoding"] = "identity"
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=exchange.body(request.url.host),
        extensions={**request.extensions, MARK: exchange},
    )


def _received(exchange: Exchange, response: Any, stream_kind: str, body: type) -> Any:
    """The response with its body watched; one that is no answer as it is."""
    if response.status_code >= 300:
        exchange.refused_by(response.status_code)
        return response
    headers, cut = response.headers, partial(_cut_response, response)
    exchange.opened(headers.get("content-type", ""), headers.get("content-encoding", ""), cut)
    if exchange.asked.adds_usage:
        headers.pop("content-length", None)
    kind = _stream_class(type(response).__module__.partition(".")[0], stream_kind, body)
    response.stream = kind(exchange, response.stream, cut)
    return response


@lru_cache(maxsize=8)
def _stream_class(library: str, stream_kind: str, body: type) -> Any:
    """`body` as a stream of the library, which takes no others."""
    import importlib

    return type(body.__name__, (body, getattr(importlib.import_module(library), stream_kind)), {})


class _Body:
    """The body of an answer, as it is read."""

    def __init__(self, exchange: Exchange, stream: Any, cut: Callable[[], None]) -> None:
        self._exchange = exchange
        self._stream = stream
        self._cut = cut
        self._is_left = False
        """A worker is still reading: it closes the stream when it is done."""

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        chunks = iter(self._stream)
        try:
            while (chunk := self._next(chunks)) is not _END:
                if passed := exchange.answer.take(chunk):
                    yield passed
            if rest := exchange.answer.end():
                yield rest
        except GeneratorExit:
            raise
        except BaseException as error:
            told = exchange.failed(error)
            if told is error:
                raise
            raise told from error
        exchange.ended()

    def close(self) -> None:
        self._exchange.closed()
        if not self._is_left:
            self._stream.close()

    def _next(self, chunks: Iterator[bytes]) -> Any:
        return _waited(self._exchange, lambda: next(chunks, _END), self._read_late, self._leave)

    def _leave(self) -> None:
        self._is_left = True
        self._cut()

    def _read_late(self, value: object, error: BaseException | None) -> None:
        with suppress(Exception):
            self._stream.close()


class _AsyncBody:
    """The body of an answer, as it is read on a loop."""

    def __init__(self, exchange: Exchange, stream: Any, cut: Callable[[], None]) -> None:
        self._exchange = exchange
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        chunks = self._stream.__aiter__()
        try:
            while (chunk := await _reached(exchange.token, lambda: anext(chunks, _END))) is not _END:
                if passed := exchange.answer.take(chunk):
                    yield passed
            if rest := exchange.answer.end():
                yield rest
        except GeneratorExit:
            raise
        except BaseException as error:
            told = exchange.failed(error)
            if told is error:
                raise
            raise told from error
        exchange.ended()

    async def aclose(self) -> None:
        self._exchange.closed()
        await self._stream.aclose()


def _waited(
    exchange: Exchange,
    work: Callable[[], Any],
    late: Callable[[Any, BaseException | None], None],
    leave: Callable[[], None],
) -> Any:
    """What `work` returns; a stop of the call gets the caller free at once, and `late` gets what comes after that."""
    token = exchange.token
    if exchange.blocks_inline:
        token.check()
        return work()
    job = worker.Job(work, late)
    remove = token.add_callback(job.wake)
    try:
        worker.start(job)
        finished = job.wait(token.seconds_left())
    except BaseException:
        if job.leave():
            leave()
        else:
            late(job.value, job.error)
        raise
    finally:
        remove()
    if not finished:
        token.is_cancelled  # noqa: B018  notices the deadline
        leave()
        raise CancelledError(stop=stop_of(token))
    if job.error is not None:
        raise job.error
    return job.value


async def _reached(token: CancellationToken, work: Callable[[], Awaitable[Any]]) -> Any:
    """What `work` comes to; a stop of the call interrupts it."""
    task = current_task()
    assert task is not None
    requested = task.cancelling()
    watching = token.watch(task)
    try:
        token.check()
        return await work()
    except BaseException as error:
        told = taken_back(token, task, error, requested)
        if told is error:
            raise
        raise told from error
    finally:
        if watching and token.unwatch(task) is not None:
            await absorb(task, requested)


def _close_late(response: Any, error: BaseException | None) -> None:
    """The caller has gone: nobody will read what came."""
    if response is not None:
        with suppress(Exception):
            response.close()


def _cut_response(response: Any) -> None:
    """Break the connection that the answer comes over; one that other requests share stays."""
    if response.extensions.get("http_version") != b"HTTP/2":
        _shut_down(response.extensions.get("network_stream"))


def _cut_request(transport: Any, exchange: Exchange) -> None:
    """Break the connection of a request that has no answer yet.

    No library tells which one that is, so this looks where its pool keeps it. Should it be elsewhere one day, then the
    connection lasts until its read times out; the caller is free all the same.
    """
    pool = getattr(transport, "_pool", None)
    for waiting in list(getattr(pool, "_requests", ())):
        if waiting.request.extensions.get(MARK) is exchange:
            connection = getattr(waiting.connection, "_connection", None)
            if type(connection).__name__ != "HTTP2Connection":
                _shut_down(getattr(connection, "_network_stream", None))


def _shut_down(stream: Any) -> None:
    wire = None if stream is None else stream.get_extra_info("socket")
    if wire is not None:
        with suppress(OSError):
            wire.shutdown(socket.SHUT_RDWR)
