"""aiohttp, and every transport on top of it: those of httpx_aiohttp and LiteLLM, and google-genai.

This module never imports it. A client middleware of ours is added below those of the program, next to the connection,
by a wrapper of `ClientSession._request`. So every outgoing request passes through it, as the middlewares of the program
have changed it. A middleware that sends twice, such as one that retries or hedges, makes two calls, and so does a
redirect that is followed with the body. A request that bypasses it, on a connection that a middleware opened by itself,
still reaches `ClientRequest.send`: it is reported, and refused if the run is strict.

A copy of the request is sent, with the admitted body. A middleware that tries again does so with the original: its
output is clamped anew, to what is left then.

The `content` of the response is replaced by a reader of the same class that gets its bytes from the original one,
through the exchange, whenever a caller has to wait for more. So all ways of reading work, and the original reader still
decides when the connection goes back to the pool. `ResponseHandler.set_response_params` is wrapped so that the bytes
arrive as the provider sent them: a compressed body is decompressed here, in bounded pieces.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from copy import copy
from functools import lru_cache, partial
from typing import Any

from penstock.errors import PenstockError
from penstock.providers.current import may_apply, pass_by, terms_for
from penstock.providers.hooks import Method, Patch
from penstock.providers.http.exchange import Exchange, admit
from penstock.providers.http.forms import form_of
from penstock.providers.http.request import is_signed, parse_request
from penstock.providers.reading.bodies import ERROR_BYTES, Capped, Sink, decoded
from penstock.providers.reading.families import in_the_families
from penstock.providers.stacks.flight import abandon, fail, reached
from penstock.providers.stacks.gathering import Gathered
from penstock.providers.stacks.websockets import check_upgrade
from penstock.runtime.cancellation import call_on
from penstock.runtime.execution import load_prices

Handler = Callable[[Any], Awaitable[Any]]
"""Sends a request: the part of the chain below a middleware."""

_UNCONNECTED = frozenset({"ClientConnectorError", "ConnectionTimeoutError", "ClientHttpProxyError"})
"""Class names of errors of connections that never opened."""
_is_raw: ContextVar[bool] = ContextVar("penstock_aiohttp_raw", default=False)
"""Whether aiohttp must not decompress the response to the current request."""
_is_seen: ContextVar[bool] = ContextVar("penstock_aiohttp_seen", default=False)
"""Whether the current request has passed the innermost middleware."""


async def innermost(request: Any, handler: Handler) -> Any:
    """Send the request, as a contained call if it is a model request: the middleware next to the connection."""
    if request.method == "GET":
        check_upgrade("GET", *_address(request), request.headers)
    before = _is_seen.set(True)
    try:
        return await _contained(request, handler)
    finally:
        _is_seen.reset(before)


async def _contained(request: Any, handler: Handler) -> Any:
    exchange = await _admitted(request) if may_apply(request.method) else None
    if exchange is None:
        # A resolver or a trace of the program may make requests while a contained one is being sent.
        return await (_sent(handler, request, is_raw=False) if _is_raw.get() else handler(request))
    try:
        response = await reached(exchange.token, partial(_sent, handler, _rewritten(request, exchange)))
    except BaseException as error:
        _mark_bill(error)
        fail(exchange, error)
    _observe(exchange, request, response)
    return response


async def _admitted(request: Any) -> Exchange | None:
    """Return the admitted call of the request; None if it is no model request."""
    host, path = _address(request)
    terms = terms_for(request.method, host, path, request.headers, _known_content(request))
    form = None if terms is None else form_of(request.method, host, path, request.headers)
    if terms is None or form is None:
        return None
    model_request = parse_request(form, request.headers, await _content(request))
    if model_request is None:
        return None
    if terms.context._run.prices.is_pending:
        await load_prices(terms.context, model_request.model)
    exchange = admit(terms, model_request, "async")
    await exchange.ahold()
    return exchange


def _address(request: Any) -> tuple[str, str]:
    return request.url.host or "", request.url.path


async def _content(request: Any) -> bytes:
    """Return the body; one that can be read only once is replaced by its bytes."""
    payload = request.body
    if isinstance(payload, bytes):  # there is none
        return payload
    written = _Written()
    await payload.write(written)
    content = bytes(written.gathered.data)
    if not isinstance(payload, sys.modules["aiohttp.payload"].BytesPayload):
        await request.update_body(content)
    return content


def _known_content(request: Any) -> bytes | None:
    """Return the body if it is available as bytes."""
    value = getattr(request.body, "_value", None)
    return value if isinstance(value, bytes) else None


class _Written:
    """A writer that gathers the bytes of an aiohttp payload."""

    def __init__(self) -> None:
        self.gathered = Gathered()

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.gathered.add(chunk)


def _rewritten(request: Any, exchange: Exchange) -> Any:
    """Return the request to send: with the admitted body, and accepting only uncompressed responses.

    Nothing of a signed request is changed, since the signature covers its headers too.
    """
    if is_signed(request.headers):
        return request
    sent = copy(request)
    sent.headers = request.headers.copy()
    for name in ("content-length", "transfer-encoding"):
        sent.headers.popall(name, None)
    sent.headers["accept-encoding"] = "identity"
    if not sent.compress:  # aiohttp compresses in chunks, and the length is not known before
        sent.chunked = None
    sent.update_body_from_data(exchange.body(request.url.host or ""))
    sent.update_transfer_encoding()
    return sent


async def _sent(handler: Handler, request: Any, *, is_raw: bool = True) -> Any:
    """Send the request; if `is_raw`, the bytes of the response come as the provider sent them."""
    before = _is_raw.set(is_raw)
    try:
        return await handler(request)
    finally:
        _is_raw.reset(before)


def _mark_bill(error: BaseException) -> None:
    """Mark whether an error of aiohttp is free: only a connection that never opened is.

    Its other errors may have a status 400 although the server gave none: for a malformed or incomplete answer.
    """
    if isinstance(error, Exception) and not isinstance(error, PenstockError):
        names = {kind.__name__ for kind in type(error).__mro__}
        error.penstock_free = not names.isdisjoint(_UNCONNECTED)  # type: ignore[attr-defined]


def _observe(exchange: Exchange, request: Any, response: Any) -> None:
    """Let the exchange read the body; that of a non-success response is limited in size alone."""
    headers = response.headers
    coding = headers.get("content-encoding", "")
    if response.status >= 300:
        _limit(response)
        try:
            location = headers.get("location") or headers.get("uri")  # aiohttp follows both
            exchange.refused_by(response.status, *_address(request), location)
        except BaseException:
            response.close()
            raise
        return
    cut = partial(call_on, asyncio.get_running_loop(), partial(_cut, weakref.ref(response)))
    sink = exchange.opened(headers.get("content-type", ""), coding, cut, headers)
    response.content = _reader_class()(response, sink, exchange)
    _drop_headers(response, bool(coding) or exchange.request.adds_usage)


def _limit(response: Any) -> None:
    """Limit the size of a body that is no answer."""
    coding = response.headers.get("content-encoding", "")
    response.content = _reader_class()(response, decoded(Capped(ERROR_BYTES), coding), None)
    _drop_headers(response, bool(coding))


def _drop_headers(response: Any, is_resized: bool) -> None:
    """Remove the headers that no longer hold for a body whose bytes change here."""
    if is_resized:
        headers = response.headers.copy()
        for name in ("content-encoding", "content-length"):
            headers.popall(name, None)
        response._headers = type(response._headers)(headers)
        response._cache.pop("headers", None)


def _cut(found: weakref.ref[Any]) -> None:
    """Break the connection of a response that still has one, on its loop: it may serve another request by now."""
    response = found()
    connection = None if response is None else response.connection
    if connection is not None and connection.transport is not None:
        connection.transport.abort()


class _Reader:
    """The body of a response, as the caller reads it; mixed into aiohttp's `StreamReader`."""

    def __init__(self, response: Any, sink: Sink, exchange: Exchange | None) -> None:
        source = response.content
        limit = source.get_read_buffer_limits()[0] if hasattr(source, "get_read_buffer_limits") else 2**16
        super().__init__(_Unhurried(), limit, loop=asyncio.get_running_loop())  # type: ignore[call-arg]
        self._source = source
        self._sink = sink
        self._exchange = exchange
        """None if the response is settled: it has no answer."""
        self._response = weakref.ref(response)
        if "chunked" in response.headers.get("transfer-encoding", ""):
            self.begin_http_chunk_receiving()  # type: ignore[attr-defined]

    async def _wait(self, func_name: str) -> None:
        """Get more of the body: called by every read that has to wait."""
        exchange = self._exchange
        try:
            if exchange is None:
                self._feed(await self._source.readany())
            else:
                self._feed(await reached(exchange.token, self._source.readany))
        except BaseException as error:
            self._fail(error)
        if exchange is not None and self._eof:  # type: ignore[attr-defined]
            exchange.ended()

    def _feed(self, data: bytes) -> None:
        reader: Any = self
        passed = self._sink.take(data) if data else self._sink.end()
        if passed:
            reader.feed_data(passed)
            if reader._http_chunk_splits is not None:
                reader.end_http_chunk_receiving()
        if not data:
            reader.feed_eof()

    def _fail(self, error: BaseException) -> None:
        exchange, response = self._exchange, self._response()
        _mark_bill(error)
        failure = exchange.failed(error) if exchange is not None else error
        if isinstance(error, PenstockError):  # the caller may never close a response that it could not read
            failure = in_the_families(error) if failure is error else failure
            if response is not None:
                response.close()
        if failure is error:
            raise error
        raise failure from error

    async def wait_eof(self) -> None:
        """Get all of the body."""
        while not self._eof:  # type: ignore[attr-defined]
            await self._wait("wait_eof")

    def set_exception(self, *error: Any) -> None:
        """End the body: the response is closed or released."""
        super().set_exception(*error)  # type: ignore[misc]
        self._abandon()

    def _abandon(self) -> None:
        if self._exchange is not None:
            abandon(self._exchange)

    __del__ = _abandon


class _Unhurried:
    """Stands in for the connection on which the original reader pauses and resumes reading."""

    connected = True
    _reading_paused = False

    def pause_reading(self, *options: Any, **named: Any) -> None:
        """Do nothing: bytes are only fed when a caller waits for them."""

    resume_reading = pause_reading


@lru_cache(maxsize=1)
def _reader_class() -> Any:
    return type("StreamReader", (_Reader, sys.modules["aiohttp.streams"].StreamReader), {})


def _request(original: Method) -> Method:
    async def _request(session: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        if not may_apply("POST"):  # no scope is open; otherwise a middleware may make a model request of any other
            return await original(session, method, str_or_url, **options)
        given: Sequence[Any] | None = options.pop("middlewares", None)
        middlewares = (*(session._middlewares if given is None else given), innermost)
        return await original(session, method, str_or_url, middlewares=middlewares, **options)

    return _request


def _send(original: Method) -> Method:
    async def send(request: Any, *args: Any, **options: Any) -> Any:
        if not _is_seen.get() and may_apply(request.method):
            pass_by(request.method, *_address(request), request.headers)
        return await original(request, *args, **options)

    return send


def _set_response_params(original: Method) -> Method:
    def set_response_params(protocol: Any, **params: Any) -> None:
        if _is_raw.get():
            params["auto_decompress"] = False
        original(protocol, **params)

    return set_response_params


PATCHES = (
    Patch("aiohttp.client", "ClientSession", "_request", _request, needs="middlewares"),
    Patch("aiohttp.client_reqrep", "ClientRequest", "send", _send),
    Patch("aiohttp.client_proto", "ResponseHandler", "set_response_params", _set_response_params),
)
