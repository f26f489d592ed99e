"""The guard: an httpx2 transport that connects only to addresses that were checked.

The library's pool is given our own network backend (`Network`), whose only way to open a connection takes a host,
resolves it, checks every returned address, and connects to those same addresses. The name is not resolved again, so DNS
rebinding between check and use has no effect. The pool still works with names: the Host header, the TLS server name and
the certificate that must match are the host's.

No proxy, no environment, no cookies, no keep-alive: only the policy determines the permissions of a request.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import httpcore2
import httpx2

from penstock.providers.egress.addresses import refusal
from penstock.providers.egress.body import read
from penstock.providers.egress.failures import EgressDenied, EgressFailed
from penstock.providers.egress.policy import DEFAULT_PORTS, MAX_URL, NUMBER, EgressPolicy
from penstock.providers.egress.workers import on_worker
from penstock.providers.reading.codings import ACCEPTED, Unreadable, coding_of

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, as text."""

MAX_ADDRESSES = 32
MAX_TRIED = 4
MAX_CONNECTIONS = 64
AUTHORITY = re.compile(r"[^/?#]*//[^/?#]*")
"""The part of a URL before the path."""


async def resolve(host: str, port: int) -> Sequence[str]:
    """Return the addresses the system resolves a host to; runs on a worker, which is abandoned on cancellation."""
    found = await on_worker(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return tuple(dict.fromkeys(str(each[4][0]) for each in found))


def parsed(url: str | httpx2.URL) -> httpx2.URL:
    """Return the URL as it will be sent; EgressDenied if two parsers could read it differently."""
    text = str(url)
    if len(text) > MAX_URL:
        raise EgressDenied(text[:MAX_URL], f"the address is longer than {MAX_URL:,} characters")
    if any(char <= " " or char in "\\\x7f" for char in text):
        raise EgressDenied(text, "the address has a space, a control character or a backslash in it")
    try:
        checked = httpx2.URL(url)
        host = checked.raw_host.decode("ascii")
    except (httpx2.InvalidURL, ValueError) as error:
        raise EgressDenied(text, f"the address cannot be read: {_without(text, error)}") from None
    authority = AUTHORITY.match(text)
    if checked.userinfo or (authority is not None and "@" in authority[0]):
        raise EgressDenied(text, "the address carries a user or a password; send them as headers")
    if authority is not None and not authority[0].isascii() and NUMBER.fullmatch(host.rpartition(".")[2]):
        raise EgressDenied(text, "the host is a number in an unusual notation")
    # With a final dot the same host would not match allow lists and certificates.
    return checked.copy_with(host=host[:-1], fragment=None) if host.endswith(".") else checked.copy_with(fragment=None)


def check(policy: EgressPolicy, url: httpx2.URL) -> None:
    """Raise EgressDenied if the policy refuses this scheme, host or port."""
    scheme, host = url.scheme, url.raw_host.decode("ascii")
    port = url.port if url.port is not None else DEFAULT_PORTS.get(scheme, 0)
    why = policy.refusal(scheme, host, port)
    if why is not None:
        raise EgressDenied(str(url), why)


class Network(httpcore2.AsyncNetworkBackend):
    """Network backend that connects only to checked addresses."""

    def __init__(self, policy: EgressPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve
        self._plain = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failed: Exception | None = None
        for address in (await self._checked(host, port))[:MAX_TRIED]:
            try:
                return await self._plain.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
        assert failed is not None
        raise failed

    async def _checked(self, host: str, port: int) -> Sequence[str]:
        """Return the host's addresses; raise _Refused if any is not allowed, for then none can be trusted."""
        shown = f"//{host}:{port}"
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore2.ConnectError(f"its name was not found ({type(error).__name__})") from error
        if not addresses:
            raise httpcore2.ConnectError("its name has no address")
        for address in addresses[:MAX_ADDRESSES]:
            why = refusal(address, self._policy.allow_private)
            if why is not None:
                raise _Refused(shown, address, why)
        return addresses[:MAX_ADDRESSES]

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        raise httpcore2.ConnectError("a socket in the file system is never opened")

    async def sleep(self, seconds: float) -> None:
        await self._plain.sleep(seconds)


class _Refused(Exception):
    def __init__(self, host: str, address: str, why: str) -> None:
        self.address = address
        self.why = why
        super().__init__(f"{host} is {address}: {why}")


class GuardedTransport(httpx2.AsyncBaseTransport):
    """Sends what the policy allows, to checked addresses, and reads no more of a response than the policy allows.

    Follows no redirects. `timeout_s` applies to each single wait here; the caller bounds the request as a whole.
    """

    def __init__(
        self, policy: EgressPolicy, *, resolve: Resolve = resolve, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self.policy = policy
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=httpx2.create_ssl_context(trust_env=False) if ssl_context is None else ssl_context,
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=0,
            network_backend=Network(policy, resolve),
        )

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        url = parsed(request.url)
        check(self.policy, url)
        request.headers["Host"] = url.netloc.decode("ascii")
        request.headers["Accept-Encoding"] = ACCEPTED
        assert isinstance(request.stream, httpx2.AsyncByteStream)
        sent = httpcore2.Request(
            method=request.method,
            url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), self.policy.timeout_s)},
        )
        with _translated(str(url)):
            response = await self._pool.handle_async_request(sent)
        return await self._received(str(url), response)

    async def _received(self, url: str, response: httpcore2.Response) -> httpx2.Response:
        headers = httpx2.Headers(response.headers)
        try:
            coding = coding_of(headers.get("content-encoding"))
        except Unreadable as error:
            await response.aclose()
            raise EgressFailed(url, str(error)) from None
        if coding is not None:
            for header in ("content-encoding", "content-length"):
                headers.pop(header, None)
        stream = _Body(url, response, coding, self.policy.max_bytes)
        return httpx2.Response(response.status, headers=headers, stream=stream)

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx2.AsyncByteStream):
    """A response body, decompressed and limited in size."""

    def __init__(self, url: str, response: httpcore2.Response, coding: str | None, max_bytes: int) -> None:
        self._url = url
        self._response = response
        self._coding = coding
        self._max_bytes = max_bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _translated(self._url):
            async for piece in read(self._response.aiter_stream(), self._coding, self._max_bytes):
                yield piece

    async def aclose(self) -> None:
        await self._response.aclose()


class _translated:
    """Translates errors of the library, the network and the body to egress errors with the URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, _Refused):
            raise EgressDenied(self._url, f"the host is at {error.address}, which is {error.why}") from None
        if isinstance(error, Unreadable):
            raise EgressFailed(self._url, str(error)) from None
        if isinstance(error, httpcore2.TimeoutException | TimeoutError):
            raise EgressFailed(self._url, "it did not answer in time") from error
        if isinstance(
            error, httpcore2.NetworkError | httpcore2.ProtocolError | httpcore2.UnsupportedProtocol | OSError
        ):
            raise EgressFailed(self._url, f"{type(error).__name__}: {error}"[:300]) from error


def _without(url: str, error: Exception) -> str:
    """Return a parser's error message, unless it repeats part of the URL."""
    message = str(error)
    return (
        message
        if len(message) < 80 and not any(part and part in message for part in url.split("/")[2:])
        else "not well formed"
    )
