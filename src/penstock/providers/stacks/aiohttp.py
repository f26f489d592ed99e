"""aiohttp, and every transport on top of it: those of httpx_aiohttp and LiteLLM, and google-genai.

This module never imports it. `ClientSession._request` is wrapped: all requests pass there, with their redirects, of
which only the last one has an answer that is billed. A client middleware that tries again does so inside of it: its
attempts are one call.

The response has another `content`: a reader of the same class that gets its bytes from the original one, through the
exchange, whenever a caller has to wait for more. So all ways of reading work, and the original reader still decides
when the connection goes back to the pool.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property, lru_cache, partial
from typing import Any

from penstock.errors import PenstockError
from penstock.providers.current import may_apply, terms_for
from penstock.providers.hooks import Method, Patch
from penstock.providers.http.exchange import Exchange, Terms, admit
from penstock.providers.http.forms import Form, form_of
from penstock.providers.http.request import ModelRequest, is_signed, parse_request
from penstock.providers.reading.bodies import ERROR_BYTES, Capped, Sink, decoded
from penstock.providers.reading.families import in_the_families
from penstock.providers.stacks.flight import abandon, fail, reached
from penstock.providers.stacks.gathering import Gathered
from penstock.providers.uncontained import report_if_model
from penstock.runtime.cancellation import call_on
from penstock.runtime.execution import load_prices

_REPLACED = ("content-length", "transfer-encoding")
_UNCONNECTED = frozenset({"ClientConnectorError", "ConnectionTimeoutError", "ClientHttpProxyError"})
"""Class names of errors of connections that never opened."""


class Outgoing(Mapping[str, str]):
    """A request as a session is asked to send it; as a mapping, its headers."""

    def __init__(self, session: Any, method: str, url: Any, options: dict[str, Any]) -> None:
        self.method = method.upper()
        self.host: str = url.host or ""
        self.path: str = url.path
        self.options = options
        """Keyword arguments of `ClientSession._request`."""
        self._session = session

    @cached_property
    def headers(self) -> MutableMapping[str, str]:
        """The headers, with those of the session."""
        headers: MutableMapping[str, str] = self._session._prepare_headers(self.options.get("headers"))
        return headers

    def __getitem__(self, name: str) -> str:
        return self.headers[name]

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.headers)

    def __len__(self) -> int:
        return len(self.headers)

    async def content(self) -> bytes:
        """Return the body; one that can be read only once is replaced by its bytes."""
        json, data = self.options.get("json"), self.options.get("data")
        if json is not None:
            return self._serialized(json)
        if data is None:
            return b""
        if isinstance(data, bytes | bytearray | memoryview):
            return bytes(data)
        if isinstance(data, str):
            return data.encode()
        payload = _payload_of(data)
        written = _Written()
        await payload.write(written)
        for name, value in payload.headers.items():
            self.headers.setdefault(name, value)
        content = bytes(written.gathered.data)
        self.options = {**self.options, "data": content, "headers": self._without_length()}
        return content

    def _serialized(self, json: Any) -> bytes:
        """Return the JSON as the session writes it; newer versions have a function for bytes too."""
        as_bytes = getattr(self._session, "_json_serialize_bytes", None)
        if as_bytes is not None:
            return bytes(as_bytes(json))
        text: str = self._session._json_serialize(json)
        return text.encode()

    def _without_length(self) -> MutableMapping[str, str]:
        for name in _REPLACED:
            self.headers.pop(name, None)
        return self.headers

    def rewritten(self, exchange: Exchange) -> dict[str, Any]:
        """Return the options to send: with the admitted body, and accepting only uncompressed responses.

        Nothing of a signed request is changed, since the signature covers its headers too.
        """
        headers = self.headers if is_signed(self) else self._without_length()
        if not is_signed(self):
            headers["accept-encoding"] = "identity"
        if self.options.get("json") is not None:
            headers.setdefault("content-type", "application/json")
        return {
            **self.options,
            "json": None,
            "data": exchange.body(self.host),
            "headers": headers,
            "auto_decompress": False,  # a body that is compressed all the same is decompressed here, in bounded pieces
            "raise_for_status": False,
        }


class _Written:
    """Where a payload of aiohttp writes itself to."""

    def __init__(self) -> None:
        self.gathered = Gathered()

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.gathered.add(chunk)


def _payload_of(data: Any) -> Any:
    """Return the payload that aiohttp makes of this body."""
    payloads, forms = sys.modules["aiohttp.payload"], sys.modules["aiohttp.formdata"]
    body = data() if isinstance(data, forms.FormData) else data
    try:
        return payloads.PAYLOAD_REGISTRY.get(body, disposition=None)
    except payloads.LookupError:
        return forms.FormData(body)()


async def send(terms: Terms, outgoing: Outgoing, original: Callable[..., Any]) -> Any:
    """Send the request, as a contained call if it is a model request."""
    form = form_of(outgoing.method, outgoing.host, outgoing.path, outgoing)
    request = None if form is None else await _model_request(form, outgoing)
    if request is None:
        response = await original(**outgoing.options)
        if response.history:  # only the first address was looked at, and the last one may be a model's
            report_if_model(outgoing.method, response.url.host or "", response.url.path)
        return response
    if terms.context._run.prices.is_pending:
        await load_prices(terms.context, request.model)
    exchange = admit(terms, request, "async")
    await exchange.ahold()
    try:
        options = outgoing.rewritten(exchange)
        response = await reached(exchange.token, lambda: original(**options))
    except BaseException as error:
        _mark_bill(error)
        fail(exchange, error)
    _observe(exchange, response)
    await _check_status(response, outgoing)
    return response


async def _model_request(form: Form, outgoing: Outgoing) -> ModelRequest | None:
    if outgoing.options.get("json") is not None and outgoing.options.get("data") is not None:
        return None  # refused by aiohttp
    return parse_request(form, outgoing, await outgoing.content())


def _mark_bill(error: BaseException) -> None:
    """Mark whether an error of aiohttp is free: only a connection that never opened is.

    Its other errors may have a status 400 although the server gave none: for a malformed or incomplete answer.
    """
    if isinstance(error, Exception) and not isinstance(error, PenstockError):
        names = {kind.__name__ for kind in type(error).__mro__}
        error.penstock_free = not names.isdisjoint(_UNCONNECTED)  # type: ignore[attr-defined]


async def _check_status(response: Any, outgoing: Outgoing) -> None:
    """Raise for an error status if the caller or the session wants that; after the exchange has seen it."""
    wanted = outgoing.options.get("raise_for_status")
    if wanted is None:
        wanted = outgoing._session._raise_for_status
    if callable(wanted):
        await wanted(response)
    elif wanted:
        response.raise_for_status()


def _observe(exchange: Exchange, response: Any) -> None:
    """Let the exchange read the body; that of a non-success response is limited in size alone."""
    headers = response.headers
    coding = headers.get("content-encoding", "")
    if response.status >= 300:
        response.content = _reader_class()(response, decoded(Capped(ERROR_BYTES), coding), None)
        _drop_headers(response, bool(coding))
        try:
            exchange.refused_by(response.status)
        except BaseException:
            response.close()
            raise
        return
    cut = partial(call_on, asyncio.get_running_loop(), partial(_cut, weakref.ref(response)))
    sink = exchange.opened(headers.get("content-type", ""), coding, cut, headers)
    response.content = _reader_class()(response, sink, exchange)
    _drop_headers(response, bool(coding) or exchange.request.adds_usage)


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
        """Get more of the body: every read comes here when it has to wait."""
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
    """In place of a connection: the original reader tells it when to send more."""

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
        if not may_apply(method.upper()):
            return await original(session, method, str_or_url, **options)
        try:
            url = session._build_url(str_or_url)
        except Exception:  # no address: aiohttp raises its own error
            return await original(session, method, str_or_url, **options)
        if not isinstance(options.get("headers"), Mapping | None):
            options["headers"] = list(options["headers"])  # it may be an iterator, and is read here too
        outgoing = Outgoing(session, method, url, options)
        terms = terms_for(outgoing.method, outgoing.host, outgoing.path, outgoing)
        if terms is None:
            return await original(session, method, str_or_url, **options)
        return await send(terms, outgoing, partial(original, session, method, str_or_url))

    return _request


PATCHES = (Patch("aiohttp.client", "ClientSession", "_request", _request),)
