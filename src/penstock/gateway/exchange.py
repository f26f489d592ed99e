"""One model request through the gateway: admitted, sent with the provider's key, relayed, settled.

All decisions about money are made by `providers.http.exchange`, as for existing clients inside a process: the hold for
the worst case, the clamped output, the usage, and where a stream is cut at its hold. This module connects the two sides
of one exchange.

A stream is relayed as it comes. An answer of one JSON object is kept back until it is settled, up to `MAX_KEPT_BYTES`,
so that one that breaks limits or ends early can still be replaced by an error.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

import httpcore2

from penstock import logs
from penstock.gateway.client import Client, Truncated
from penstock.gateway.connections import Connections, Headers
from penstock.gateway.denials import denial_of
from penstock.gateway.grants import Grant
from penstock.gateway.upstreams import Upstream, chunks, returned_headers
from penstock.gateway.wires import CREDENTIALS, Denied, without_key
from penstock.money import to_usd
from penstock.providers.http.exchange import Exchange, admit
from penstock.providers.http.forms import form_of
from penstock.providers.http.request import ModelRequest, parse_request
from penstock.providers.http.response import Events
from penstock.providers.reading.bodies import ERROR_BYTES, Capped, decoded
from penstock.providers.stacks.flight import reached, shut_down
from penstock.runtime.execution import load_prices

MAX_KEPT_BYTES = 1024 * 1024
"""Maximum size of an answer, other than a stream, that is kept back until it is settled."""
MAX_MODEL = 200
"""Maximum length of a model's name in the log."""
FREE_BYTES = 64 * 1024 * 1024
"""Maximum size of an answer that costs nothing."""


def read_request(client: Client, upstream: Upstream, path: str, body: bytes) -> ModelRequest:
    """Return the model request; raise Denied if its worst case cannot be read from it."""
    if client.headers.get("content-encoding", "identity").lower() not in ("identity", ""):
        raise Denied(415, "compressed requests are not offered by the gateway", code="unsupported_encoding")
    headers = {name: value for name, value in client.headers.items() if name.encode("latin-1") not in CREDENTIALS}
    form = form_of("POST", upstream.host, path, headers)
    request = None if form is None else parse_request(form, headers, body)
    if request is None or request.form.api == "unknown":
        wanted = "a form" if "multipart" in headers.get("content-type", "") else "a JSON object"
        raise Denied(400, f"the body must be {wanted} with the fields that {path} requires", code="invalid_body")
    return request


async def exchange_model_call(
    client: Client, upstream: Upstream, path: str, body: bytes, connections: Connections, grant: Grant
) -> None:
    """Make one model call for the client; raise Denied if it is not made."""
    request = read_request(client, upstream, path, body)
    logs.note(model=request.model[:MAX_MODEL])
    grant.check(request)
    terms = grant.terms
    if terms.context._run.prices.is_pending:
        await load_prices(terms.context, request.model)
    exchange = admit(terms, request, "async")
    await exchange.ahold()
    try:
        response = await _send(exchange, client, upstream, path, connections)
        try:
            if response.status >= 300:
                await _relay_error(exchange, response, client, upstream)
            else:
                await _Relay(exchange, response, client, upstream).run()
        finally:
            await response.aclose()
    finally:
        _note_cost(exchange, grant.calls)


def _note_cost(exchange: Exchange, calls: str) -> None:
    """Note the call for the log, with its cost as far as that is known."""
    call = exchange.call.record
    logs.note(
        call=f"{calls}/{call.node_id}" if calls else None,
        cost_usd=None if call.cost_unknown else to_usd(call.cost or 0),
        tokens_in=call.tokens_in or 0,
        tokens_out=call.tokens_out or 0,
    )


async def _send(
    exchange: Exchange, client: Client, upstream: Upstream, path: str, connections: Connections
) -> httpcore2.Response:
    try:
        body = exchange.body(upstream.host)
        headers = upstream.headers(client.raw_headers, body)
        url = upstream.target(path, without_key(client.query))
        sending = partial(connections.send, client.method, url, headers, body)
        response: httpcore2.Response = await reached(exchange.token, sending)
    except BaseException as error:
        raise _failure(exchange, error, upstream) from error
    return response


def _failure(exchange: Exchange, error: BaseException, upstream: Upstream) -> BaseException:
    """Settle a failed exchange; return the error to raise."""
    failure = exchange.failed(error)
    return denial_of(failure, upstream.name) or failure


async def _relay_error(exchange: Exchange, response: httpcore2.Response, client: Client, upstream: Upstream) -> None:
    """Settle a non-success response, and pass it on unchanged."""
    exchange.refused_by(response.status)
    if response.status < 400:
        where = "answers with a redirect, which is not followed: set its final address"
        raise Denied(502, f"the upstream {upstream.name} {where}", code="upstream_redirect")
    await relay_free(response, client, upstream, ERROR_BYTES)


async def relay_free(
    response: httpcore2.Response, client: Client, upstream: Upstream, max_bytes: int = FREE_BYTES
) -> None:
    """Pass on a response that costs nothing, without the key of the upstream if the response repeats it."""
    sink = decoded(Capped(max_bytes), header_of(response, b"content-encoding"))
    body = bytearray()
    async for chunk in chunks(response):
        body += sink.take(chunk)
    body += sink.end()
    hidden = [(name, upstream.without_secrets(value)) for name, value in returned_headers(response)]
    shown = upstream.without_secrets(bytes(body))
    await client.answer(response.status, [*hidden, (b"content-length", str(len(shown)).encode())], shown)


def header_of(response: httpcore2.Response, name: bytes) -> str:
    """Return a header of the response; empty if there is none."""
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")


class _Relay:
    """Passes a successful answer on, and settles it."""

    def __init__(self, exchange: Exchange, response: httpcore2.Response, client: Client, upstream: Upstream) -> None:
        self._exchange = exchange
        self._response = response
        self._client = client
        self._upstream = upstream
        self._kept = bytearray()

    async def run(self) -> None:
        """Relay the answer to its end; raise Denied if it fails before the client's response has begun."""
        try:
            await self._relay()
        except BaseException as error:
            failure = _failure(self._exchange, error, self._upstream)
            if not (self._client.has_begun and isinstance(failure, Denied)):
                raise failure from error
            await self._end_broken(failure)

    async def _relay(self) -> None:
        exchange, response = self._exchange, self._response
        wire = response.extensions.get("network_stream")
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
        sink = exchange.opened(
            headers.get("content-type", ""),
            headers.get("content-encoding", ""),
            lambda: shut_down(None if wire is None else wire.get_extra_info("socket")),
            headers,
        )
        parts: AsyncIterator[bytes] = aiter(chunks(response))
        while (chunk := await reached(exchange.token, lambda: anext(parts, None))) is not None:
            await self._pass_on(sink.take(chunk))
        rest = sink.end()
        exchange.ended()
        self._kept += rest
        if not self._client.has_begun:
            await self._client.begin(response.status, self._headers(len(self._kept)))
        await self._client.write(bytes(self._kept), is_last=True)

    async def _pass_on(self, data: bytes) -> None:
        """Send the received part of a stream; keep that of another answer, as long as it is small."""
        client = self._client
        if not client.has_begun:
            self._kept += data
            if not isinstance(self._exchange.answer, Events) and len(self._kept) <= MAX_KEPT_BYTES:
                return
            await client.begin(self._response.status, self._headers(None))
            data, self._kept = bytes(self._kept), bytearray()
        if data:
            await client.write(data)

    def _headers(self, length: int | None) -> Headers:
        sized = [] if length is None else [(b"content-length", str(length).encode())]
        return returned_headers(self._response) + sized

    async def _end_broken(self, denied: Denied) -> None:
        """End a response that has begun: with an error event if it is a stream of events, else without its end."""
        if not header_of(self._response, b"content-type").startswith("text/event-stream"):
            raise Truncated(denied.message)
        await self._client.write(self._upstream.wire.error_event(denied.message), is_last=True)
