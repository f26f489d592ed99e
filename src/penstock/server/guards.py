"""Middleware that each request passes before it reaches a route, in this order.

RequestContextGuard   request id, security headers, metrics; an unexpected error becomes a plain 500
ConcurrencyGuard      number of concurrent requests
OriginGuard           Host, Origin, header sizes
AuthGuard             the user, and whether their role is sufficient for the route
BodyGuard             size, time, type, JSON: in `bodies`

Plain ASGI, each around the next. None of them knows what the routes do.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.ids import new_run_id
from penstock.server.auth import LOCAL, Rules, Token, format_time, secret_in, token_of
from penstock.server.errors import RETRY_AFTER_S, ApiError, api_error, fault_location, not_found, send_error
from penstock.server.metrics import Metrics
from penstock.server.settings import ServerSettings, is_loopback

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


def headers_named(scope: Scope, name: bytes) -> list[bytes]:
    """Return every value of a header, as sent."""
    return [value for key, value in scope["headers"] if key == name]


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
        sender = _ResponseSender(self._id_of(scope), send)
        scope.setdefault("state", {})["request_id"] = sender.id
        started_ns = self._clock.monotonic_ns()
        try:
            await self._respond(sender, scope, receive)
        finally:
            route = scope["state"].get("route", "other")
            took_ns = self._clock.monotonic_ns() - started_ns
            self._metrics.count_request(route, scope["method"], sender.status, took_ns)

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


class ResponseTruncated(RuntimeError):
    """The server failed while a response was being sent; the rest of it is lost."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the response to request {request_id} was truncated by an error")


class _ResponseSender:
    """Sends one response with the added headers; `status` is 0 until the response begins."""

    def __init__(self, id: str, send: Send) -> None:
        self.id = id
        self.status = 0
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": self._with_defaults(list(message.get("headers", ())))}
        await self._send(message)

    def _with_defaults(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        own = {name.lower() for name, _ in headers}
        headers += [(name, value) for name, value in SECURITY_HEADERS if name not in own]
        if b"cache-control" not in own:
            headers.append((b"cache-control", b"no-store"))
        headers.append((b"x-request-id", self.id.encode()))
        return headers


class ConcurrencyGuard:
    """Passes requests on up to the limit, and refuses the others with 503, as JSON and with Retry-After.

    Uvicorn has a connection limit of its own, above this one, whose refusals have neither.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._max_requests = settings.max_requests
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == ALWAYS_ANSWERED:
            await self._app(scope, receive, send)
        elif self._active >= self._max_requests:
            message = f"the server is at its limit of {self._max_requests} concurrent requests; retry in a moment"
            error = ApiError(503, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
            await send_error(error, scope, receive, send)
        else:
            await self._count(scope, receive, send)

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._active += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active -= 1


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
    """Authenticates and authorizes requests before routing: what the access table does not allow is denied.

    Sets `user`, `until_ns` and `route` in the request's state.

    A token may expire while a response is being sent. An open stream then sees a client disconnect; its route decides
    what that means for the run. A request whose response has not begun by then is still answered.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, rules: Rules | None = None, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._app = app
        self._tokens = settings.tokens
        self._check_interval_s = settings.heartbeat_s
        self._rules = rules or Rules()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._authorize(scope)
        except ApiError as error:
            await send_error(error, scope, receive, send)
            return
        until_ns = scope["state"]["until_ns"]
        if until_ns is None:
            await self._app(scope, receive, send)
        else:
            lifetime = _TokenLifetime(until_ns, self._clock, self._check_interval_s, receive, send)
            await self._app(scope, lifetime.receive, lifetime.send)
            await lifetime.end()

    def _authorize(self, scope: Scope) -> None:
        secret = _presented_secret(scope)
        token = self._token(scope, secret)
        is_valid = token is not None and not token.has_expired(self._clock.time_ns())
        found = self._rules.find(scope["path"])
        state = scope.setdefault("state", {})
        state["user"] = token.user if token is not None and is_valid else None
        state["until_ns"] = token.until_ns if token is not None and is_valid else None
        if found is not None:
            state["route"], methods = found
            access = methods.get(scope["method"])
            if access == "open":
                return
        if token is None:
            raise _no_token() if secret is None else _unknown_token()
        if not is_valid:
            raise _expired_token(token)
        if found is None:
            raise not_found("path")
        if access is None:
            allowed = ", ".join(sorted(methods))
            message = f"{scope['method']} is not allowed on this path; use {allowed}"
            raise ApiError(405, message, headers={"Allow": allowed})
        if not token.user.may(access):
            raise ApiError(403, f"this requires the role {access}; {token.user.name} has the role {token.user.role}")

    def _token(self, scope: Scope, secret: bytes | None) -> Token | None:
        if self._tokens:
            return None if secret is None else token_of(self._tokens, secret)
        client = scope.get("client")
        return ANONYMOUS if client and is_loopback(client[0]) else None


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
    """A request with an expiring token: a response still being sent at expiry sees a disconnect of its client."""

    def __init__(self, until_ns: int, clock: Clock, check_interval_s: float, receive: Receive, send: Send) -> None:
        self._until_ns = until_ns
        self._clock = clock
        self._check_interval_s = check_interval_s
        self._receive = receive
        self._send = send
        self._is_responding = False
        self._has_expired = False

    async def receive(self) -> Message:
        """Receive the client's next message; a disconnect once the token has expired."""
        interval_s = self._check_interval_s
        while (left_s := self._left_s()) > 0 or not self._is_responding:
            # Timers are monotonic, but tokens expire by the wall clock, which may be set: check it at intervals.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, interval_s) if left_s > 0 else interval_s):
                    return await self._receive()
        self._has_expired = True
        return {"type": "http.disconnect"}

    def _left_s(self) -> float:
        return (self._until_ns + 1 - self._clock.time_ns()) / 1_000_000_000

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        self._is_responding = message.get("more_body", message["type"] == "http.response.start")
        await self._send(message)

    async def end(self) -> None:
        """Complete a response that the app left unfinished because of the disconnect reported here."""
        if self._has_expired and self._is_responding:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})
