"""lm15, of which DSPy contains a copy: an HTTP client on plain sockets.

This module never imports it. The method of its transport that opens a stream is wrapped. A response is an iterator of
chunks, and is replaced by one that passes them through the exchange. A stop before the response releases the caller of
a sync request, and its connection lasts until its read times out; during the response, the connection is cut.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from penstock.providers.current import may_apply, terms_for
from penstock.providers.hooks import Method, Patch
from penstock.providers.http.exchange import Exchange, Terms, admit
from penstock.providers.http.forms import form_of
from penstock.providers.http.request import ModelRequest, is_signed, parse_request
from penstock.providers.reading.bodies import ERROR_BYTES, Capped, Sink, decoded
from penstock.providers.stacks.flight import abandon, fail, reached, shut_down, waited
from penstock.runtime.execution import load_prices

_END = object()


class Outgoing:
    """A request as the transport receives it."""

    def __init__(self, request: Any) -> None:
        url = urlsplit(request.url)
        self._request = request
        self.host = url.hostname or ""
        self.headers = {name.lower(): value for name, value in request.headers}
        self.address = request.method.upper(), self.host, url.path, self.headers

    def model_request(self) -> ModelRequest | None:
        """Parse the model call in the request; None if it is not a model request."""
        form = form_of(*self.address)
        return None if form is None else parse_request(form, self.headers, self._request.body)

    def rewritten(self, exchange: Exchange) -> Any:
        """Return the request to send; a signed one as it is, since the signature covers its headers too."""
        if is_signed(self.headers):
            return self._request
        kept = [(name, value) for name, value in self._request.headers if name.lower() not in _REPLACED]
        headers = [*kept, ("accept-encoding", "identity")]
        return replace(self._request, headers=headers, body=exchange.body(self.host))


_REPLACED = ("content-length", "transfer-encoding", "accept-encoding")


def send(terms: Terms, outgoing: Outgoing, model_request: ModelRequest, original: Method) -> Any:
    """Send the model request as a contained call."""
    exchange = admit(terms, model_request, "sync")
    exchange.hold()
    try:
        response = waited(exchange, partial(original, outgoing.rewritten(exchange)), _close_late, _nothing)
    except BaseException as error:
        fail(exchange, error)
    cut = partial(shut_down, _socket_of(response._chunks))
    sink = _received(exchange, outgoing, response, response.close, cut)
    if sink is not None:
        release = response._release

        def released(body_consumed: bool) -> None:
            abandon(exchange)
            release(body_consumed)

        response._chunks, response._release = _chunks(exchange, response._chunks, sink, cut), released
    return response


async def asend(terms: Terms, outgoing: Outgoing, model_request: ModelRequest, original: Method) -> Any:
    """Send the model request as a contained call."""
    if terms.context._run.prices.is_pending:
        await load_prices(terms.context, model_request.model)
    exchange = admit(terms, model_request, "async")
    await exchange.ahold()
    try:
        response = await reached(exchange.token, partial(original, outgoing.rewritten(exchange)))
    except BaseException as error:
        fail(exchange, error)
    try:
        sink = _received(exchange, outgoing, response, _nothing, _nothing)
    except BaseException:
        await response.aclose()
        raise
    if sink is not None:
        release = response._release

        async def released(body_consumed: bool) -> None:
            abandon(exchange)
            await release(body_consumed)

        response._chunks, response._release = _achunks(exchange, response._chunks, sink), released
    return response


def _nothing() -> None:
    """Do nothing: an async read is interrupted where it waits."""


def _socket_of(chunks: Any) -> Any:
    """Return the socket that the generator of a body reads from, which the library does not expose, or None."""
    frame = getattr(chunks, "gi_frame", None)
    return None if frame is None else getattr(frame.f_locals.get("conn"), "sock", None)


def _received(exchange: Exchange, outgoing: Outgoing, response: Any, close: Method, cut: Method) -> Sink | None:
    """Return the reader of the body; None for a non-success response, whose body is limited in size alone."""
    headers = {name.lower(): value for name, value in response.headers}
    coding = headers.get("content-encoding", "")
    if response.status < 300:
        response.headers = [(name, value) for name, value in response.headers if name.lower() not in _RESIZED]
        return exchange.opened(headers.get("content-type", ""), coding, cut, headers)
    try:
        _, host, path, _ = outgoing.address
        exchange.refused_by(response.status, host, path, headers.get("location"))
    except BaseException:
        close()
        raise
    response._chunks = _limited(response._chunks, decoded(Capped(ERROR_BYTES), coding))
    return None


_RESIZED = ("content-encoding", "content-length")


def _limited(chunks: Any, sink: Sink) -> Any:
    """Return the chunks of an error, up to a limit."""
    if hasattr(chunks, "__aiter__"):

        async def alimited() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                yield sink.take(chunk)
            yield sink.end()

        return alimited()

    def limited() -> Iterator[bytes]:
        for chunk in chunks:
            yield sink.take(chunk)
        yield sink.end()

    return limited()


def _chunks(exchange: Exchange, chunks: Iterator[bytes], sink: Sink, cut: Method) -> Iterator[bytes]:
    try:
        while (chunk := waited(exchange, lambda: next(chunks, _END), _read_late, cut)) is not _END:
            yield sink.take(chunk)
        yield sink.end()
    except GeneratorExit:
        raise
    except BaseException as error:
        fail(exchange, error)
    exchange.ended()


async def _achunks(exchange: Exchange, chunks: AsyncIterator[bytes], sink: Sink) -> AsyncIterator[bytes]:
    try:
        while (chunk := await reached(exchange.token, lambda: anext(chunks, _END))) is not _END:
            yield sink.take(chunk)
        yield sink.end()
    except GeneratorExit:
        raise
    except BaseException as error:
        fail(exchange, error)
    exchange.ended()


def _close_late(response: Any, error: BaseException | None) -> None:
    """Close a response that arrived after its caller was released."""
    if response is not None:
        with suppress(Exception):
            response.close()


def _read_late(chunk: object, error: BaseException | None) -> None:
    """Drop a chunk that arrived after its caller was released."""


def _stream(original: Method) -> Method:
    def stream(transport: Any, request: Any) -> Any:
        found = _contained(request)
        return original(transport, request) if found is None else send(*found, partial(original, transport))

    return stream


def _do_stream(original: Method) -> Method:
    async def do_stream(transport: Any, request: Any) -> Any:
        found = _contained(request)
        if found is None:
            return await original(transport, request)
        return await asend(*found, partial(original, transport))

    return do_stream


def _contained(request: Any) -> tuple[Terms, Outgoing, ModelRequest] | None:
    """Return the terms, the request and the parsed model call of a contained call; None for other requests."""
    if not may_apply(request.method.upper()):
        return None
    outgoing = Outgoing(request)
    terms = terms_for(*outgoing.address, request.body)
    model_request = None if terms is None else outgoing.model_request()
    return None if terms is None or model_request is None else (terms, outgoing, model_request)


PATCHES = tuple(
    patch
    for package in ("lm15", "dspy._vendor.lm15")
    for patch in (
        Patch(f"{package}.transports._sync", "StdlibTransport", "stream", _stream),
        Patch(f"{package}.transports._async", "StdlibAsyncTransport", "_do_stream", _do_stream),
    )
)
