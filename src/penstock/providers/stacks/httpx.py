"""httpx2 and httpx: send their requests as contained model calls.

This module never imports either. `send` and `asend` wrap the transport that talks to the network, so that every attempt
of a client passes through them: those of an `Auth` that sends twice, and of a transport around this one. Their
transports over aiohttp are contained by the stack of aiohttp.

A transport with a pool of its own, and a program that uses httpcore itself, bypass that transport. Their requests reach
the pools of httpcore and httpcore2 directly: they are not contained, so they are reported, and refused if the run is
strict.

Between two reads of a response nothing waits; a cancel shuts the socket down, and the next read raises.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from penstock.errors import PenstockError
from penstock.providers.current import may_apply, pass_by, terms_for
from penstock.providers.hooks import Patch
from penstock.providers.http.exchange import Exchange, Terms, admit
from penstock.providers.http.forms import Form, form_of
from penstock.providers.http.request import is_signed, parse_request
from penstock.providers.reading.bodies import AsyncLimited, Limited, Sink, limit, stream_class, without_coding
from penstock.providers.stacks.flight import check_loop, fail, reached, shut_down, waited
from penstock.providers.stacks.websockets import check_upgrade
from penstock.runtime.execution import load_prices

MARK = "penstock.exchange"
"""Key of the exchange in a request's extensions, used to find the request's socket."""

_END = object()

_is_seen: ContextVar[bool] = ContextVar("penstock_httpx_seen", default=False)
"""Whether the current request has passed a wrapped transport."""


def send(terms: Terms, original: Callable[[Any, Any], Any], transport: Any, request: Any) -> Any:
    """Send the request, as a contained call if it is a model request."""
    form = _form(request)
    model_request = None if form is None else parse_request(form, request.headers, request.read())
    if model_request is None:
        return original(transport, request)
    exchange = admit(terms, model_request, "sync")
    exchange.hold()
    cut = partial(_cut_request, transport, exchange)
    try:
        request = _rewritten(request, exchange)
        _guard_departure(request, exchange)
        response = waited(exchange, partial(original, transport, request), _close_late, cut)
    except BaseException as error:
        fail(exchange, error)
    return _received(exchange, request, response, _Body, Limited)


async def asend(terms: Terms, original: Callable[[Any, Any], Awaitable[Any]], transport: Any, request: Any) -> Any:
    """Send the request, as a contained call if it is a model request."""
    form = _form(request)
    model_request = None if form is None else parse_request(form, request.headers, await request.aread())
    if model_request is None:
        return await original(transport, request)
    check_loop()
    if terms.context._run.prices.is_pending:
        await load_prices(terms.context, model_request.model)
    exchange = admit(terms, model_request, "async")
    await exchange.ahold()
    try:
        request = _rewritten(request, exchange)
        response = await reached(exchange.token, lambda: original(transport, request))
    except BaseException as error:
        fail(exchange, error)
    return _received(exchange, request, response, _AsyncBody, AsyncLimited)


def _form(request: Any) -> Form | None:
    return form_of(*_address(request))


def _address(request: Any) -> tuple[str, str, str, Any]:
    return request.method, request.url.host, request.url.path, request.headers


def _rewritten(request: Any, exchange: Exchange) -> Any:
    """Return the request to send: with the admitted body, and accepting only uncompressed responses.

    Nothing of a signed request is changed, since the signature covers its headers too.
    """
    headers = request.headers.copy()
    if not is_signed(headers):
        headers.pop("content-length", None)
        headers["accept-encoding"] = "identity"
    return type(request)(
        request.method,
        request.url,
        headers=headers,
        content=exchange.body(request.url.host),
        extensions={**request.extensions, MARK: exchange},
    )


def _guard_departure(request: Any, exchange: Exchange) -> None:
    """Send nothing on a connection that is opened after a stop: the worker that opens it cannot be interrupted.

    The libraries call the extension `trace` at each step of a request, and an error that it raises ends the request.
    """
    outer = request.extensions.get("trace")

    def trace(event: str, info: dict[str, Any]) -> None:
        if outer is not None:
            outer(event, info)
        if event.endswith("send_request_headers.started"):
            exchange.token.check()

    request.extensions["trace"] = trace


def _received(exchange: Exchange, request: Any, response: Any, body: type, error_body: type) -> Any:
    """Return the response with its body observed; that of a non-success response is limited in size alone."""
    if response.status_code >= 300:
        limit(response, error_body)
        url, location = request.url, response.headers.get("location")
        exchange.refused_by(response.status_code, url.host, url.path, location)
        return response
    headers, cut = response.headers, partial(_cut_response, response)
    sink = exchange.opened(headers.get("content-type", ""), headers.get("content-encoding", ""), cut, headers)
    without_coding(headers)
    if exchange.request.adds_usage:
        headers.pop("content-length", None)
    response.stream = stream_class(response, body)(exchange, response.stream, sink, cut)
    return response


class _Body:
    """A response body that is read synchronously."""

    def __init__(self, exchange: Exchange, stream: Any, sink: Sink, cut: Callable[[], None]) -> None:
        self._exchange = exchange
        self._stream = stream
        self._sink = sink
        self._cut = cut
        self._is_left = False
        """Whether a worker is still reading; it closes the stream when it is done."""

    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        chunks = iter(self._stream)
        try:
            while (chunk := self._next(chunks)) is not _END:
                if passed := self._sink.take(chunk):
                    yield passed
            if rest := self._sink.end():
                yield rest
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = exchange.failed(error)
            if isinstance(error, PenstockError):  # the client may never close a response that it could not read
                self.close()
            if failure is error:
                raise
            raise failure from error
        exchange.ended()

    def close(self) -> None:
        self._exchange.closed()
        if not self._is_left:
            self._stream.close()

    def _next(self, chunks: Iterator[bytes]) -> Any:
        return waited(self._exchange, lambda: next(chunks, _END), self._read_late, self._leave)

    def _leave(self) -> None:
        self._is_left = True
        self._cut()

    def _read_late(self, value: object, error: BaseException | None) -> None:
        with suppress(Exception):
            self._stream.close()


class _AsyncBody:
    """A response body that is read on an event loop."""

    def __init__(self, exchange: Exchange, stream: Any, sink: Sink, cut: Callable[[], None]) -> None:
        self._exchange = exchange
        self._stream = stream
        self._sink = sink

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        chunks = self._stream.__aiter__()
        try:
            while (chunk := await reached(exchange.token, lambda: anext(chunks, _END))) is not _END:
                if passed := self._sink.take(chunk):
                    yield passed
            if rest := self._sink.end():
                yield rest
        except GeneratorExit:
            raise
        except BaseException as error:
            failure = exchange.failed(error)
            if isinstance(error, PenstockError):  # the client may never close a response that it could not read
                await self.aclose()
            if failure is error:
                raise
            raise failure from error
        exchange.ended()

    async def aclose(self) -> None:
        self._exchange.closed()
        await self._stream.aclose()


def _close_late(response: Any, error: BaseException | None) -> None:
    """Close a response that arrived after its caller was released."""
    if response is not None:
        with suppress(Exception):
            response.close()


def _cut_response(response: Any) -> None:
    """Break the connection of the response; an HTTP/2 connection, shared with other requests, stays open."""
    if response.extensions.get("http_version") != b"HTTP/2":
        shut_down(_wire(response.extensions.get("network_stream")))


def _cut_request(transport: Any, exchange: Exchange) -> None:
    """Break the connection of a request that has no answer yet.

    The libraries do not expose it, so this reads private attributes of the pool. If those change, the connection lasts
    until its read times out; the caller is released all the same.
    """
    pool = getattr(transport, "_pool", None)
    for waiting in list(getattr(pool, "_requests", ())):
        if waiting.request.extensions.get(MARK) is exchange:
            connection = getattr(waiting.connection, "_connection", None)
            if type(connection).__name__ != "HTTP2Connection":
                shut_down(_wire(getattr(connection, "_network_stream", None)))


def _wire(stream: Any) -> Any:
    return None if stream is None else stream.get_extra_info("socket")


def _sync(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def handle_request(transport: Any, request: Any) -> Any:
        address = _address(request)
        check_upgrade(*address)
        terms = terms_for(*address, getattr(request, "_content", None))
        before = _is_seen.set(True)
        try:
            return original(transport, request) if terms is None else send(terms, original, transport, request)
        finally:
            _is_seen.reset(before)

    return handle_request


def _async(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def handle_async_request(transport: Any, request: Any) -> Any:
        address = _address(request)
        check_upgrade(*address)
        terms = terms_for(*address, getattr(request, "_content", None))
        before = _is_seen.set(True)
        try:
            if terms is None:
                return await original(transport, request)
            return await asend(terms, original, transport, request)
        finally:
            _is_seen.reset(before)

    return handle_async_request


def _pool_sync(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def handle_request(pool: Any, request: Any) -> Any:
        _check_seen(request)
        return original(pool, request)

    return handle_request


def _pool_async(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    async def handle_async_request(pool: Any, request: Any) -> Any:
        _check_seen(request)
        return await original(pool, request)

    return handle_async_request


def _check_seen(request: Any) -> None:
    """Report a model request that bypassed the transport, or refuse it."""
    # A worker sends the request of a sync call, in a context of its own: the request has the mark.
    if _is_seen.get() or MARK in request.extensions or not may_apply(method := request.method.decode("latin-1")):
        return
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
    pass_by(method, request.url.host.decode("latin-1"), request.url.target.decode("latin-1"), headers)


PATCHES = tuple(
    patch
    for library, core in (("httpx2", "httpcore2"), ("httpx", "httpcore"))
    for patch in (
        Patch(library, "HTTPTransport", "handle_request", _sync),
        Patch(library, "AsyncHTTPTransport", "handle_async_request", _async),
        Patch(core, "ConnectionPool", "handle_request", _pool_sync),
        Patch(core, "AsyncConnectionPool", "handle_async_request", _pool_async),
    )
)
