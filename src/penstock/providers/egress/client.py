"""Requests to untrusted addresses.

Each request, redirects included, is one contained tool call of the run it is made in; outside of a run only the policy
applies. Before anything is resolved or sent, and again for each redirect, the run's egress hooks are consulted, then
the policy. Redirects are followed here, by rules stricter than a browser's: a request redirected to another origin
carries neither credentials nor a body.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json as json_codec
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from penstock.containment.safety import Decision
from penstock.errors import InvalidValue
from penstock.providers.egress.failures import EgressDenied, EgressFailed, redacted
from penstock.providers.egress.policy import EgressPolicy
from penstock.providers.egress.workers import on_worker
from penstock.runtime.context import ExecutionContext, current_call, current_context

if TYPE_CHECKING:
    import httpx2

    from penstock.providers.egress.transport import GuardedTransport, Resolve

Sink = Callable[[bytes], Awaitable[None] | None]
"""Takes the next piece of a download."""

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
KEEPS_METHOD = frozenset({307, 308})
SENT_ANYWHERE = frozenset({"accept", "accept-language", "user-agent"})
"""Headers kept when a redirect leads to another origin; any other may carry a credential."""
OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding", "upgrade", "te"})
"""Headers that only the client itself may set."""
USER_AGENT = "penstock"


@dataclass(frozen=True, slots=True, repr=False)
class EgressResponse:
    """A response: its final URL, status, headers and, unless it was downloaded, its body."""

    url: str
    status: int
    headers: Mapping[str, str]
    """Keyed by lower-case name."""
    body: bytes = b""
    redirects: tuple[str, ...] = ()
    """The addresses requested before `url`, redacted."""

    @property
    def is_success(self) -> bool:
        """Whether the status is 2xx."""
        return 200 <= self.status < 300

    @property
    def content_type(self) -> str:
        """The media type, in lower case and without parameters; empty if there is none."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def text(self) -> str:
        """The body decoded with its declared charset, or UTF-8; undecodable bytes are replaced."""
        found = self.headers.get("content-type", "").lower().partition("charset=")[2]
        charset = found.partition(";")[0].strip().strip("\"'")
        try:
            return self.body.decode(charset or "utf-8", "replace")
        except (LookupError, UnicodeError, ValueError):  # unknown charset, or a codec that is not for text
            return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """Return the body parsed as JSON; raise ValueError if it is not JSON."""
        return json_codec.loads(self.body)

    def __repr__(self) -> str:
        return f"<EgressResponse {self.status} of {redacted(self.url)}, {len(self.body):,} bytes>"


@dataclass(slots=True)
class _Hop:
    """The request of the next hop."""

    method: str
    url: httpx2.URL
    headers: dict[str, str]
    content: bytes


class EgressClient:
    """Sends requests allowed by its policy and the run's hooks; keeps no connections and no cookies between them."""

    def __init__(
        self,
        policy: EgressPolicy | None = None,
        *,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        if policy is not None and not isinstance(policy, EgressPolicy):
            raise InvalidValue("policy", policy, "an EgressPolicy, or None for the strictest useful one")
        self.policy = policy or EgressPolicy()
        self._resolve = resolve
        self._ssl_context = ssl_context
        self._transport: GuardedTransport | None = None

    async def get(self, url: str, **options: Any) -> EgressResponse:
        """Send a GET request; takes the options of `request`."""
        return await self.request("GET", url, **options)

    async def post(self, url: str, **options: Any) -> EgressResponse:
        """Send a POST request; takes the options of `request`."""
        return await self.request("POST", url, **options)

    async def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | str | None = None,
        json: Any = None,
        context: ExecutionContext | None = None,
    ) -> EgressResponse:
        """Return the full response, whatever its status; EgressDenied if refused, EgressFailed if none arrived."""
        pieces: list[bytes] = []
        answer = await self._contained(context, method, url, headers, _body(content, json), json, pieces.append)
        return EgressResponse(answer.url, answer.status, answer.headers, b"".join(pieces), answer.redirects)

    async def download(
        self,
        url: str,
        sink: Sink,
        *,
        headers: Mapping[str, str] | None = None,
        context: ExecutionContext | None = None,
    ) -> EgressResponse:
        """Pass the response body to `sink` piece by piece as it arrives; return the response without its body."""
        if not callable(sink):
            raise InvalidValue("sink", sink, "a function that takes bytes")
        return await self._contained(context, "GET", url, headers, b"", None, sink)

    async def aclose(self) -> None:
        """Close open connections."""
        if self._transport is not None:
            await self._transport.aclose()
            self._transport = None

    async def __aenter__(self) -> EgressClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _contained(
        self,
        context: ExecutionContext | None,
        method: str,
        url: str,
        headers: Mapping[str, str] | None,
        content: bytes,
        json: Any,
        sink: Sink,
    ) -> EgressResponse:
        if method not in METHODS:
            raise InvalidValue("method", method, f"one of {', '.join(sorted(METHODS))}")
        if not isinstance(url, str):
            raise InvalidValue("url", url, "text")
        sent = _headers(headers, json)
        context = context if context is not None else _context_here()

        async def ask(*_mark: str) -> EgressResponse:
            return await self._within_time(context, method, url, sent, content, sink)

        if context is None:
            return await ask()
        # It costs no money, so nothing is held for it. The mark is a hash because loop detection compares calls by it
        # and records the mark of a repeated call.
        mark = hashlib.sha256(f"{url}\n".encode("utf-8", "surrogatepass") + content).hexdigest()[:16]
        name = f"{method} {_shown_host(url)}"
        return cast(EgressResponse, await context.atool(ask, mark, name=name, cost_hint_usd=0))

    async def _within_time(
        self,
        context: ExecutionContext | None,
        method: str,
        url: str,
        headers: dict[str, str],
        content: bytes,
        sink: Sink,
    ) -> EgressResponse:
        try:
            async with asyncio.timeout(self.policy.timeout_s) as limit:
                return await self._follow(context, method, url, headers, content, sink)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise EgressFailed(url, f"it took longer than {self.policy.timeout_s:g} s") from error

    async def _follow(
        self,
        context: ExecutionContext | None,
        method: str,
        url: str,
        headers: dict[str, str],
        content: bytes,
        sink: Sink,
    ) -> EgressResponse:
        transport = await self.guard()
        from penstock.providers.egress.transport import parsed

        hop = _Hop(method, parsed(url), headers, content)
        passed: list[str] = []
        while True:
            _ask_hooks(context, hop)
            async with _answer(transport, hop) as answer:
                location = answer.headers.get("location") if answer.status_code in REDIRECTS else None
                if location is None:
                    await _pour(answer, sink)
                    headers = dict(answer.headers.items())
                    return EgressResponse(str(hop.url), answer.status_code, headers, redirects=tuple(passed))
            passed.append(redacted(str(hop.url)))
            if len(passed) > self.policy.max_redirects:
                raise EgressFailed(url, f"it redirects more than {self.policy.max_redirects} times")
            hop = _redirected(self.policy, hop, answer.status_code, location)

    async def guard(self) -> GuardedTransport:
        """Return the guard as an httpx2 transport, for a library that sends its own requests; outside of any run."""
        # On a worker thread, because it reads the certificates of the system.
        if self._transport is None:
            transport = await on_worker(self._make)
            if self._transport is None:  # no concurrent call has set it meanwhile
                self._transport = transport
        return self._transport

    def _make(self) -> GuardedTransport:
        try:
            from penstock.providers.egress.transport import GuardedTransport, resolve
        except ModuleNotFoundError as error:
            message = f"requests need {error.name}: install penstock[http]"
            raise ModuleNotFoundError(message, name=error.name) from error
        return GuardedTransport(self.policy, resolve=self._resolve or resolve, ssl_context=self._ssl_context)


def _context_here() -> ExecutionContext | None:
    """Return the context of the running call, or else the entered context."""
    call = current_call()
    return cast(ExecutionContext, call.context) if call is not None else current_context()


def _ask_hooks(context: ExecutionContext | None, hop: _Hop) -> None:
    if context is None:
        return
    decision = context.egress(str(hop.url), hop.method)
    if decision not in (Decision.ALLOW, Decision.DEGRADE):
        raise EgressDenied(str(hop.url), f"a hook of the run answered {decision}")


@asynccontextmanager
async def _answer(transport: GuardedTransport, hop: _Hop) -> AsyncIterator[httpx2.Response]:
    """Send one hop; an unread rest of the response is discarded."""
    import httpx2

    request = httpx2.Request(hop.method, hop.url, headers=hop.headers, content=hop.content or None)
    answer = await transport.handle_async_request(request)
    try:
        yield answer
    finally:
        await answer.stream.aclose()  # type: ignore[union-attr]  # the guard's answers have async streams


async def _pour(answer: httpx2.Response, sink: Sink) -> None:
    async for piece in cast(AsyncIterator[bytes], answer.stream):
        done = sink(piece)
        if inspect.isawaitable(done):
            await done


def _redirected(policy: EgressPolicy, hop: _Hop, status: int, location: str) -> _Hop:
    """Return the next hop's request; EgressDenied if the redirect is unsafe. Its host is checked when it is sent."""
    import httpx2

    from penstock.providers.egress.transport import parsed

    try:
        url = parsed(hop.url.join(_clean(location)))
    except (httpx2.InvalidURL, ValueError):
        raise EgressDenied(location, "the redirect's address cannot be read") from None
    if hop.url.scheme == "https" and url.scheme != "https" and not policy.allow_downgrade:
        raise EgressDenied(str(url), "the redirect leads from https to http")
    method, content, headers = hop.method, hop.content, hop.headers
    if status not in KEEPS_METHOD and method not in ("GET", "HEAD") and (status == 303 or method == "POST"):
        method, content = "GET", b""
        headers = {name: value for name, value in headers.items() if name != "content-type"}
    if _origin(url) != _origin(hop.url):
        if content or method not in ("GET", "HEAD"):
            raise EgressDenied(str(url), f"the redirect would send a {method} request on to another origin")
        headers = {name: value for name, value in headers.items() if name in SENT_ANYWHERE}
    return _Hop(method, url, headers, content)


def _clean(location: str) -> str:
    """Return a redirect's address; EgressDenied if it has a space, a control character or a backslash."""
    if any(char <= " " or char in "\\\x7f" for char in location):
        raise EgressDenied("…", "the redirect's address has a space, a control character or a backslash in it")
    return location


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _shown_host(url: str) -> str:
    """Return the host for the name of a call; `url` may be malformed."""
    return redacted(url).partition("://")[2].partition("/")[0].partition("?")[0][:100] or "…"


def _body(content: bytes | str | None, json: Any) -> bytes:
    if json is not None and content is not None:
        raise InvalidValue("json", json, "given, or content, but not both")
    if json is not None:
        return json_codec.dumps(json, allow_nan=False).encode()
    if content is None:
        return b""
    if not isinstance(content, bytes | str):
        raise InvalidValue("content", content, "bytes or text")
    return content.encode() if isinstance(content, str) else content


def _headers(given: Mapping[str, str] | None, json: Any) -> dict[str, str]:
    """Return the headers keyed by lower-case name; InvalidValue for one that the caller may not set."""
    headers = {"user-agent": USER_AGENT, "accept": "*/*"}
    if json is not None:
        headers["content-type"] = "application/json"
    given_headers: Mapping[Any, Any] = given or {}
    for name, value in given_headers.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidValue("headers", name, "names and values of text")
        if name.lower() in OURS or name.lower().startswith("proxy-"):
            raise InvalidValue("headers", name, "ones that the client does not set itself")
        if _is_unclean(name) or _is_unclean(value):
            raise InvalidValue("headers", name, "names and values of one line, without control characters")
        headers[name.lower()] = value
    return headers


def _is_unclean(text: str) -> bool:
    return any(char < " " or char == "\x7f" for char in text) or text != text.strip()
