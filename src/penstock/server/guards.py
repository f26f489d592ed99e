"""Middleware that each request passes before it reaches a route, in this order.

ClientGuard           the client's address and scheme behind trusted proxies; the path without the server's prefix
RequestContextGuard   request id, security headers, metrics; an unexpected error becomes a plain 500
ConcurrencyGuard      number of concurrent requests
OriginGuard           Host, Origin, header sizes
AuthGuard             the user, and whether their role is sufficient for the route
AuditGuard            the audit log entry of a successful action (in `penstock.server.audit`)
BodyGuard             size, time and type of the body, and strict parsing of its JSON
Compression           gzip for clients that accept it

Plain ASGI, each around the next. None of them knows what the routes do.

**Bodies.** A body, chunked or not, is received completely before the route is called, within limits of size, time and
total memory. All bodies are JSON except those of RAW. Compressed bodies are rejected: a small one may expand without
bound. Many clients send the whole body before they read the response, and a client that is still sending when the
connection is closed never sees it. So a request that is answered before its body has arrived, such as a refused one, is
answered at once with `Connection: close`. The server then reads and discards the rest for a short time, and closes the
connection.

**JSON** is checked before any other code reads it. What a parser accepts and later code cannot handle is rejected, with
its path: text that is not UTF-8, unpaired surrogates, NUL, NaN and infinities, integers beyond 64 bits, duplicate keys,
nesting that leads to a RecursionError, and an excessive number of values.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock import logs
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.hosting import trace_context
from penstock.hosting.ports import StoreUnavailable
from penstock.ids import new_run_id
from penstock.server.auth import LOCAL, Rules, Token, digest_of, format_time, secret_in, token_of
from penstock.server.clients import TokenThrottle, client_behind, is_in, network_of
from penstock.server.errors import RETRY_AFTER_S, ApiError, api_error, fault_location, not_found, send_error
from penstock.server.metrics import METHODS, Metrics
from penstock.server.settings import ServerSettings, is_loopback
from penstock.server.tokens import MAX_AGE_S, StoredTokens

LOG = logging.getLogger("penstock.server")
REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", b"default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
     b"object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)  # fmt: skip
"""Headers of every response, unless it sets them itself."""
ALWAYS_ANSWERED = "/health"
"""Route exempt from the limit: a server at its limit is still healthy."""
HOST = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
OWN_SITES = frozenset({b"same-origin", b"none"})
"""Values of Sec-Fetch-Site for requests from the server's own pages or the address bar."""
ANONYMOUS = Token(LOCAL, b"")
"""The token of every request on a server without tokens."""
WEIGHT_0 = re.compile(r"q=0(\.0*)?")
RAW: Mapping[str, str] = {"/api/attachments": "max_attachment_bytes"}
"""Routes that accept any bytes, with the setting that limits their size."""
THREAD_MIN_BYTES = 64 * 1024
"""Bodies of at least this size are checked on a thread."""
LINGER_BYTES = 32 * 1024 * 1024
LINGER_S = 2.0
"""How many bytes, and how long, the server drains an unread body of a known user before it closes the connection."""
UNKNOWN_LINGER_BYTES = 1024 * 1024
"""The limit in bytes for a client without a valid token."""
NO_BODY = frozenset({b"0"})
MAX_INTEGER = 2**63 - 1

Place = tuple[Any, Any] | None
"""The path of a value: the path of its container, and its key there; rendered only for an error."""


def headers_named(scope: Scope, name: bytes) -> list[bytes]:
    """Return every value of a header, as sent."""
    return [value for key, value in scope["headers"] if key == name]


def accepts_gzip(scope: Scope) -> bool:
    """Whether the client names gzip in `Accept-Encoding`, with a weight above 0.

    `*` does not count: a client that does not name gzip is sent plain bytes, which every client can read.
    """
    for part in b",".join(headers_named(scope, b"accept-encoding")).decode("latin-1").lower().split(","):
        coding, _, weight = part.replace(" ", "").partition(";")
        if coding == "gzip":
            return not WEIGHT_0.fullmatch(weight)
    return False


class ClientGuard:
    """Restores what a proxy changes: the client's address, the scheme, and the path without the proxy's prefix."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._networks = settings.proxy_networks
        self._prefix = settings.root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._remove_prefix(scope)
            client = scope.get("client")
            if self._networks and client and is_in(client[0], self._networks):
                self._read_forwarded(scope, client[0])
        await self._app(scope, receive, send)

    def _remove_prefix(self, scope: Scope) -> None:
        path = scope["path"]
        if self._prefix and (path == self._prefix or path.startswith(f"{self._prefix}/")):
            scope["path"] = path[len(self._prefix) :] or "/"
            raw_path = scope.get("raw_path") or path.encode("latin-1", "replace")
            scope["raw_path"] = raw_path[len(self._prefix) :] or b"/"

    def _read_forwarded(self, scope: Scope, peer: str) -> None:
        forwarded = b",".join(headers_named(scope, b"x-forwarded-for")).decode("latin-1").split(",")
        scope["client"] = (client_behind(peer, forwarded, self._networks), 0)
        schemes = headers_named(scope, b"x-forwarded-proto")
        if schemes and schemes[-1].strip().lower() in (b"http", b"https"):
            scope["scheme"] = schemes[-1].strip().lower().decode()


class RequestContextGuard:
    """Adds the request id and headers, counts requests, and answers unexpected errors with 500.

    An unexpected error is logged by its type and location, without its message, which may contain anything; the client
    gets the request id.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, *, clock: Clock = SYSTEM_CLOCK, new_id: Callable[[], str] = new_run_id
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._handle_other(scope, receive, send)
            return
        body = _UnreadBody(scope, receive)
        receive = body.receive
        sender = _ResponseSender(self._id_of(scope), send, body)
        scope.setdefault("state", {})["request_id"] = sender.id
        started_ns = self._clock.monotonic_ns()
        fields = _begin_log()
        parents = headers_named(scope, b"traceparent")
        trace_context.current.set(_trace_of(scope, parents) if parents else trace_context.NONE)
        try:
            await self._respond(sender, scope, receive)
        finally:
            route = scope["state"].get("route", "other")
            took_ns = self._clock.monotonic_ns() - started_ns
            self._metrics.count_request(route, scope["method"], sender.status, took_ns)
            if fields is not None:
                _log_request(scope, sender, route, took_ns, fields)

    async def _handle_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})  # websockets are not supported

    async def _respond(self, sender: _ResponseSender, scope: Scope, receive: Receive) -> None:
        try:
            await self._app(scope, receive, sender.send)
        except Exception as error:
            LOG.error("request %s failed: %s", sender.id, fault_location(error))
            self._metrics.faults += 1
            if sender.status:
                # A truncated response must not look complete; raising makes the server close the connection.
                raise ResponseTruncated(sender.id) from None
            await send_error(api_error(error), scope, receive, sender.send)

    def _id_of(self, scope: Scope) -> str:
        sent = headers_named(scope, b"x-request-id")
        if len(sent) == 1 and REQUEST_ID.fullmatch(sent[0]):
            return sent[0].decode()
        return self._new_id()


def _trace_of(scope: Scope, parents: list[bytes]) -> Mapping[str, str]:
    if len(parents) != 1:
        return trace_context.NONE
    states = b",".join(headers_named(scope, b"tracestate"))
    return trace_context.parse(parents[0].decode("latin-1"), states.decode("latin-1"))


def _begin_log() -> dict[str, Any] | None:
    """Return the fields that the request's record will have besides its own; None if requests are not logged."""
    if not logs.REQUESTS.isEnabledFor(logging.INFO):
        return None
    fields: dict[str, Any] = {}
    logs.current_request.set(fields)
    return fields


def _log_request(scope: Scope, sender: _ResponseSender, route: str, took_ns: int, fields: dict[str, Any]) -> None:
    """Log a finished request by its route and the run it found, not by its path, which the client chooses."""
    user = scope["state"].get("user")
    about = {
        "request_id": sender.id,
        "method": scope["method"] if scope["method"] in METHODS else "other",
        "route": route,
        "status": sender.status,
        "duration_ms": round(took_ns / 1_000_000, 3),
        "user": None if user is None else user.name,
        "run_id": fields.get("run_id"),
    }
    logs.record(logs.REQUESTS, "request", about)


class ResponseTruncated(RuntimeError):
    """The server failed while a response was being sent; the rest of it is lost."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the response to request {request_id} was truncated by an error")


class _ResponseSender:
    """Sends one response with the added headers; `status` is 0 until the response begins."""

    def __init__(self, id: str, send: Send, body: _UnreadBody) -> None:
        self.id = id
        self.status = 0
        self._send = send
        self._body = body

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_defaults(list(message.get("headers", ())))}
        elif self._body.is_pending and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._body.drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _with_defaults(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        own = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in SECURITY_HEADERS if name not in own]
        if b"cache-control" not in own:
            headers.append((b"cache-control", b"no-store"))
        headers.append((b"x-request-id", self.id.encode()))
        if self._body.is_pending and b"connection" not in own:
            headers.append((b"connection", b"close"))
        return headers


class _UnreadBody:
    """The part of a request's body that is announced and not yet received."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._scope = scope
        self._receive = receive
        lengths = headers_named(scope, b"content-length")
        self.is_pending = not NO_BODY.issuperset(lengths) or bool(headers_named(scope, b"transfer-encoding"))
        """Whether more of the body may come."""

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self.is_pending = False
        return message

    async def drain(self) -> None:
        """Discard the rest of the body, within limits, so that the client can read the response before the close."""
        is_known = self._scope.get("state", {}).get("user") is not None
        left = LINGER_BYTES if is_known else UNKNOWN_LINGER_BYTES
        if headers_named(self._scope, b"expect") or self._announced() > left:
            return  # the client awaits `100 Continue` before it sends anything, or would send too much
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while self.is_pending and left > 0:
                    message = await self.receive()
                    left -= len(message.get("body", b""))

    def _announced(self) -> float:
        lengths = headers_named(self._scope, b"content-length")
        is_number = all(length.isdigit() and len(length) <= 20 for length in lengths)
        return max(map(int, lengths), default=0) if is_number else math.inf


class ConcurrencyGuard:
    """Limits concurrent requests, and refuses the others with 503, as JSON and with Retry-After.

    Requests of one client address have a limit of their own, so that no client can take all places.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_requests = settings.max_requests
        self._max_per_client = settings.max_connections_per_client
        self._active = 0
        self._by_client: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
        elif self._active >= self._max_requests:
            message = f"the server is at its limit of {self._max_requests} concurrent requests; retry in a moment"
            error = ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
            await send_error(error, scope, receive, send)
        elif self._by_client[client := network_of(_client_address(scope))] >= self._max_per_client:
            message = f"this address has {self._max_per_client} concurrent requests already; retry in a moment"
            error = ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
            await send_error(error, scope, receive, send)
        else:
            await self._count(client, scope, receive, send)

    async def _count(self, client: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._active += 1
        self._by_client[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1
            self._by_client[client] -= 1
            if not self._by_client[client]:
                del self._by_client[client]


def _client_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


class OriginGuard:
    """Refuses requests with a foreign Host or Origin, or with oversized headers or target.

    A page on the internet can make a browser send requests to a server on its user's machine, and a DNS name can be
    made to point there. So the Host must be one of the server's names for every method, and an Origin, if sent, must be
    the server's own or one that the operator allows. There is no CORS: pages of other origins are refused.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = settings.hosts
        self._origins = frozenset(settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            await send_error(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        return self._too_large(scope) or self._wrong_host(scope) or self._wrong_origin(scope)

    def _too_large(self, scope: Scope) -> ApiError | None:
        settings = self._settings
        headers = scope["headers"]
        if len(headers) > settings.max_headers:
            return ApiError(431, f"the request has {len(headers)} headers; at most {settings.max_headers} are allowed")
        if sum(len(name) + len(value) for name, value in headers) > settings.max_header_bytes:
            return ApiError(431, f"the headers are larger than {settings.max_header_bytes} bytes")
        if len(scope.get("raw_path") or b"") + len(scope["query_string"]) > settings.max_target_bytes:
            return ApiError(414, f"path and query are longer than {settings.max_target_bytes} bytes", code="too_large")
        return None

    def _wrong_host(self, scope: Scope) -> ApiError | None:
        name = _host_name(scope)
        if name is None:
            return ApiError(400, "a request must have exactly one Host header", code="bad_host")
        if name not in self._hosts:
            options = "penstock serve --allow-host NAME, PENSTOCK_ALLOWED_HOSTS, or allowed_hosts in the settings"
            message = f"this server does not accept that Host; its operator can allow it with {options}"
            return ApiError(421, message, code="bad_host")
        return None

    def _wrong_origin(self, scope: Scope) -> ApiError | None:
        origins = headers_named(scope, b"origin")
        if not origins:
            return self._foreign_site(scope)
        origin = origins[0].decode("latin-1").lower()
        own = {f"{scheme}://{_host(scope)}" for scheme in ("http", "https")}
        if len(origins) == 1 and (origin in own or origin in self._origins):
            return None
        return _FOREIGN

    def _foreign_site(self, scope: Scope) -> ApiError | None:
        """Refuse a request of another site without an Origin, except a link to the start page."""
        sites = headers_named(scope, b"sec-fetch-site")
        if not sites or set(sites) <= OWN_SITES:
            return None
        is_link = scope["method"] == "GET" and headers_named(scope, b"sec-fetch-mode") == [b"navigate"]
        return None if is_link and scope["path"] == "/" else _FOREIGN


_FOREIGN = ApiError(
    403, "requests from pages of other origins are refused; the operator can allow an origin", code="bad_origin"
)


def _host(scope: Scope) -> str:
    return str(headers_named(scope, b"host")[0].decode("latin-1").lower())


def _host_name(scope: Scope) -> str | None:
    """Return the Host without its port; None if there is not exactly one valid header."""
    hosts = headers_named(scope, b"host")
    match = HOST.fullmatch(_host(scope)) if len(hosts) == 1 else None
    return match["name"] if match else None


class AuthGuard:
    """Authenticates and authorizes requests before routing: denies everything that the access table does not allow.

    Sets `user`, `token`, `until_ns` and `route` in the request's state.

    Tokens are those of the environment, then those of the database, which can be created and revoked at any time. A
    server without either lets in every client on its machine; there a valid token still names its user, and an unknown
    one is ignored, because clients of model APIs always send one.

    A token may expire or be revoked while a response is being sent. An open stream then sees a client disconnect; its
    route decides what that means for the run. A request whose response has not begun by then is still answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        rules: Rules | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        stored: StoredTokens | None = None,
    ) -> None:
        self._app = app
        self._tokens = settings.tokens
        self._stored = stored
        self._check_interval_s = settings.heartbeat_s
        self._rules = rules or Rules()
        self._clock = clock
        self._throttle = TokenThrottle(settings.max_failed_tokens_per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._authorize(scope)
        except PenstockError as error:
            await send_error(api_error(error), scope, receive, send)
            return
        token: Token | None = scope["state"]["token"]
        if token is None or (token.until_ns is None and token.record is None):
            await self._app(scope, receive, send)
        else:
            interval_s = self._check_interval_s if token.record is None else min(self._check_interval_s, MAX_AGE_S)
            lifetime = _TokenLifetime(token, self._clock, interval_s, receive, send, self._stored)
            await self._app(scope, lifetime.receive, lifetime.send)
            await lifetime.end()

    async def _authorize(self, scope: Scope) -> None:
        secret = _presented_secret(scope)
        found = self._rules.find(scope["path"])
        is_open = found is not None and found[1].get(scope["method"]) == "open"
        try:
            token = await self._token(scope, secret)
        except (ApiError, StoreUnavailable):
            if not is_open:
                raise
            token = None  # an open route treats a throttled client as one without a token
        is_valid = token is not None and not token.is_revoked and not token.has_expired(self._clock.time_ns())
        state = scope.setdefault("state", {})
        state["token"] = token if is_valid else None
        state["user"] = token.user if token is not None and is_valid else None
        state["until_ns"] = token.until_ns if token is not None and is_valid else None
        if found is not None:
            state["route"], methods = found
            access = methods.get(scope["method"])
            if access == "open":
                return
        if token is None:
            raise _no_token() if secret is None else _unknown_token()
        if token.is_revoked:
            raise _invalid_token(
                "token_revoked", "this token was revoked; ask the operator of this server for a new one"
            )
        if not is_valid:
            raise _expired_token(token)
        if token.is_gateway_key:
            raise ApiError(403, "this is a gateway key, which calls models at the gateway and nothing else")
        if found is None:
            raise not_found("path")
        if access is None:
            allowed = ", ".join(sorted(methods))
            message = f"{scope['method']} is not allowed on this path; use {allowed}"
            raise ApiError(405, message, headers={"Allow": allowed})
        if not token.user.may(access):
            raise ApiError(403, f"this requires the role {access}; {token.user.name} has the role {token.user.role}")

    async def _token(self, scope: Scope, secret: bytes | None) -> Token | None:
        if await self._needs_token():
            return None if secret is None else await self._compared(_client_address(scope), secret)
        client = scope.get("client")
        if not client or not is_loopback(client[0]):
            return None
        stored = None if secret is None or self._stored is None else await self._stored.find(secret)
        return stored or ANONYMOUS

    async def _needs_token(self) -> bool:
        return bool(self._tokens) or (self._stored is not None and await self._stored.are_required())

    async def _compared(self, address: str, secret: bytes) -> Token | None:
        """Return the token of the secret, None if it is unknown; raises ApiError (429) after too many unknown ones."""
        now_ns, digest = self._clock.monotonic_ns(), digest_of(secret)
        wait_s = self._throttle.wait_s(address, digest, now_ns)
        if wait_s > 0:
            message = "too many unknown tokens came from this address; retry later"
            raise ApiError(429, message, code="too_many_tokens", retry_after_s=wait_s)
        token = token_of(self._tokens, digest)
        if token is None and self._stored is not None:
            token = await self._stored.find(secret)
        if token is None:
            self._throttle.fail(address, now_ns)
        else:
            self._throttle.accept(address, digest)
        return token


def _presented_secret(scope: Scope) -> bytes | None:
    """Return the secret that was sent; None without one, and with several Authorization headers."""
    sent = headers_named(scope, b"authorization")
    return secret_in(sent[0]) if len(sent) == 1 else None


def _expired_token(token: Token) -> ApiError:
    """Create the error for an expired token; only a client with its secret gets this error."""
    assert token.until_ns is not None, "a token without an end does not expire"
    message = f"this token was valid until {format_time(token.until_ns)}; ask the operator of this server for a new one"
    return _invalid_token("token_expired", message)


def _no_token() -> ApiError:
    return ApiError(401, "send a token: Authorization: Bearer <secret>", headers={"WWW-Authenticate": "Bearer"})


def _unknown_token() -> ApiError:
    return _invalid_token("token_unknown", "this server does not know this token; ask its operator for one")


def _invalid_token(code: str, message: str) -> ApiError:
    challenge = f'Bearer error="invalid_token", error_description="{message}"'
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": challenge})


class _TokenLifetime:
    """A request whose token may end: if its response is still being sent then, the app sees a client disconnect."""

    def __init__(
        self,
        token: Token,
        clock: Clock,
        check_interval_s: float,
        receive: Receive,
        send: Send,
        stored: StoredTokens | None = None,
    ) -> None:
        self._token = token
        self._until_ns = token.until_ns
        self._stored = stored if token.record is not None else None
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._receive = receive
        self._send = send
        self._is_responding = False
        self._has_expired = False

    async def receive(self) -> Message:
        """Receive the client's next message; a disconnect once the token has expired or is revoked."""
        interval_s = self._check_interval_s
        while (left_s := await self._left_s()) > 0 or not self._is_responding:
            # Timers are monotonic, but tokens expire by the wall clock, which may be set: check it at intervals.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, interval_s) if left_s > 0 else interval_s):
                    return await self._receive()
        self._has_expired = True
        return {"type": "http.disconnect"}

    async def _left_s(self) -> float:
        if self._stored is not None and await self._stored.is_revoked(self._token):
            return 0.0
        if self._until_ns is None:
            return math.inf
        return (self._until_ns + 1 - self._clock.time_ns()) / 1_000_000_000

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        self._is_responding = message.get("more_body", message["type"] == "http.response.start")
        await self._send(message)

    async def end(self) -> None:
        """Complete a response that the app left unfinished because of the disconnect reported here."""
        if self._has_expired and self._is_responding:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})


class TooLarge(ApiError):
    """A body exceeds its size limit."""

    def __init__(self, limit: int) -> None:
        message = f"the body is larger than {limit} bytes, the limit of this route"
        super().__init__(413, message, headers={"Connection": "close"})


class BodyGuard:
    """Receives and checks bodies before the app is called."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._free_bytes = settings.max_buffered_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            await self._app(scope, receive, send)
            return
        body = _Body(self)
        try:
            await self._receive(body, scope, receive)
        except ClientDisconnect:
            body.release()
            return
        except ApiError as error:
            body.release()
            await send_error(error, scope, receive, send)
            return
        try:
            await self._app(scope, body.replay_before(receive), send)
        finally:
            body.release()

    async def _receive(self, body: _Body, scope: Scope, receive: Receive) -> None:
        setting = RAW.get(scope["path"])
        limit: int = getattr(self._settings, setting or "max_body_bytes")
        _check_headers(scope, limit)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                await body.read(receive, limit)
        except TimeoutError:
            message = f"the body did not arrive within {self._settings.body_timeout_s:g} s"
            raise ApiError(408, message, headers={"Connection": "close"}) from None
        if body.content and setting is None:
            _check_type(scope)
            await self._check_json(bytes(body.content))

    async def _check_json(self, raw: bytes) -> None:
        bounds = {"max_depth": self._settings.max_json_depth, "max_values": self._settings.max_json_values}
        if len(raw) < THREAD_MIN_BYTES:
            read_json(raw, **bounds)
        else:
            await asyncio.to_thread(read_json, raw, **bounds)

    def reserve(self, size: int) -> None:
        """Reserve buffer space; raises ApiError (503) if all bodies together exceed the limit."""
        if size > self._free_bytes:
            raise ApiError(
                503,
                "too many request bodies are being received at once; retry in a moment",
                code="overloaded",
                retry_after_s=1,
            )
        self._free_bytes -= size

    def release(self, size: int) -> None:
        """Release reserved buffer space."""
        self._free_bytes += size


class Compression(GZipMiddleware):
    """Compresses responses for clients that accept it, except event streams, which compress themselves."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not accepts_gzip(scope):
            # The base class finds the word in `gzip;q=0` too, which refuses it.
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        await super().__call__(scope, receive, send)


class _Body:
    """One body while it is being received."""

    def __init__(self, guard: BodyGuard) -> None:
        self.content = bytearray()
        self._guard = guard
        self._reserved = 0
        self._is_replayed = False

    async def read(self, receive: Receive, limit: int) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if len(self.content) + len(piece) > limit:
                raise TooLarge(limit)
            self._guard.reserve(len(piece))
            self._reserved += len(piece)
            self.content += piece

    def release(self) -> None:
        self._guard.release(self._reserved)
        self._reserved = 0

    def replay_before(self, receive: Receive) -> Receive:
        """Return a `receive` that returns the body as one message, and then later messages, such as a disconnect."""

        async def replay() -> Message:
            if self._is_replayed:
                return await receive()
            self._is_replayed = True
            content = bytes(self.content)
            self.content = bytearray()
            self.release()
            return {"type": "http.request", "body": content, "more_body": False}

        return replay


def _check_headers(scope: Scope, limit: int) -> None:
    if any(value.lower() != b"identity" for value in headers_named(scope, b"content-encoding")):
        raise ApiError(415, "send the body uncompressed, without a Content-Encoding")
    for length in headers_named(scope, b"content-length"):
        if not length.isdigit() or len(length) > 20 or int(length) > limit:
            raise TooLarge(limit)


def _check_type(scope: Scope) -> None:
    types = headers_named(scope, b"content-type")
    kind, _, parameters = types[0].partition(b";") if len(types) == 1 else (b"", b"", b"")
    charset = parameters.strip().lower().replace(b'"', b"")
    is_json = kind.strip().lower() == b"application/json" and charset in {b"", b"charset=utf-8"}
    if not is_json:
        raise ApiError(415, "send JSON with Content-Type: application/json")


def read_json(raw: bytes, *, max_depth: int, max_values: int) -> Any:
    """Parse `raw`; raises ApiError with the problem and its path."""
    value = _parse(raw, max_depth)
    _check_value(value, max_depth, max_values, has_escapes=b"\\u" in raw)
    return value


def _parse(raw: bytes, max_depth: int) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(400, "bad_text", f"byte {error.start} is not UTF-8") from None
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep(max_depth, None) from None
    except json.JSONDecodeError as error:
        raise _invalid(400, "bad_json", f"invalid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:  # from int(): more digits than Python converts
        raise _invalid(422, "bad_number", "an integer has too many digits") from None


def _reject_constant(name: str) -> Any:
    raise _invalid(422, "bad_number", f"{name} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((duplicate, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _invalid(422, "duplicate_key", f"the key {ascii(duplicate)[:80]} occurs twice in one object")
    return found


def _check_value(value: Any, max_depth: int, max_values: int, *, has_escapes: bool) -> None:
    """Check every value; strings only if the text has escapes, without which none can be invalid."""
    todo: list[tuple[Any, Place, int]] = [(value, None, 0)]
    left = max_values
    while todo:
        item, place, depth = todo.pop()
        left -= 1
        if left < 0:
            raise _invalid(422, "too_large", f"the body has more than {max_values} values")
        if isinstance(item, str):
            if has_escapes:
                _check_text(item, place)
        elif isinstance(item, (dict, list)):
            if depth >= max_depth:
                raise _too_deep(max_depth, place)
            todo.extend((child, (place, key), depth + 1) for key, child in _children(item, place, has_escapes))
        elif isinstance(item, (int, float)):
            _check_number(item, place)


def _children(container: dict[str, Any] | list[Any], place: Place, has_escapes: bool) -> Iterator[tuple[Any, Any]]:
    if isinstance(container, list):
        return enumerate(container)
    if has_escapes:
        for key in container:
            _check_text(key, place)
    return iter(container.items())


def _check_text(text: str, place: Place) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise _invalid(422, "bad_text", "a string contains an unpaired surrogate", place) from None
    if "\0" in text:
        raise _invalid(422, "bad_text", "a string contains a NUL character", place)


def _check_number(number: float, place: Place) -> None:
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise _invalid(422, "bad_number", f"an integer has more than {MAX_INTEGER.bit_length() + 1} bits", place)
    if not math.isfinite(number):
        raise _invalid(422, "bad_number", "a number is too large", place)


def _too_deep(max_depth: int, place: Place) -> ApiError:
    return _invalid(422, "too_deep", f"values are nested deeper than {max_depth} levels", place)


def _invalid(status: int, code: str, message: str, place: Place = None) -> ApiError:
    path = _path(place)
    return ApiError(status, f"{path}: {message}", code=code, path=path)


def _path(place: Place) -> str:
    steps: list[str] = []
    while place is not None:
        place, key = place
        steps.append(
            f"[{key}]" if isinstance(key, int) else f".{key[:80]}" if key.isidentifier() else f"[{_quoted(key)}]"
        )
    return "$" + "".join(reversed(steps))[:500]


def _quoted(key: str) -> str:
    return json.dumps(key[:80])  # escapes characters that cannot be encoded
