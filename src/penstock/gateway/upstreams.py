"""The providers behind the gateway.

An upstream has a name, a wire, an address and a key. Its key is read once, from the environment or a file, and is only
ever put into the request that leaves. Redirects are not followed, since a key must not leave for another host.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

import httpcore2

from penstock.errors import InvalidValue
from penstock.gateway.connections import Headers
from penstock.gateway.wires import ANTHROPIC, CREDENTIALS, GEMINI, OPENAI, WIRES, Wire

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer", b"trailers"),
        *(b"transfer-encoding", b"upgrade", b"host", b"content-length", b"accept-encoding", b"expect"),
    }
)
OURS = (b"x-penstock-", b"sec-websocket-", b"x-forwarded-", b"forwarded", b"x-http-method", b"x-method-override")
"""Prefixes of headers that are meant for the gateway, or would make an upstream do something other than was checked."""
NOT_RETURNED = frozenset(
    {*HOP_BY_HOP, b"content-encoding", b"set-cookie", b"alt-svc", b"date", b"server", b"strict-transport-security"}
)


MIN_SECRET = 8
"""Minimum length of a secret that is removed from the answers of an upstream."""
_VERSION = re.compile(r"/v1(?:beta|alpha)?$")


@dataclass(frozen=True, slots=True)
class Upstream:
    """A provider, or a server that is compatible with one."""

    name: str
    wire: Wire
    url: str
    """Base URL in the form that the clients of the wire take."""
    key: str = field(default="", repr=False)
    is_bearer: bool = False
    """Whether the key is sent as `Authorization: Bearer`, on a wire that has a header of its own."""
    own_headers: tuple[tuple[bytes, bytes], ...] = field(default=(), repr=False)
    """Headers added to every request; they take precedence over the client's and over the key."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise InvalidValue(f"upstream {self.name}", self.url, "an address such as https://api.example.org/v1")

    @property
    def host(self) -> str:
        """The host name of the upstream."""
        return urlsplit(self.url).hostname or ""

    def without_secrets(self, data: bytes) -> bytes:
        """Return the data without the key, because some servers repeat it in their errors."""
        own = (value for name, value in self.own_headers if name in CREDENTIALS)
        for secret in (self.key.encode("latin-1"), *(value.rpartition(b" ")[2] for value in own)):
            if len(secret) >= MIN_SECRET:
                data = data.replace(secret, b"***")
        return data

    def target(self, path: str, query: str) -> httpcore2.URL:
        """Return the address of a path that `Wire.route` returned."""
        parts = urlsplit(self.url)
        base = parts.path.rstrip("/")
        if self.wire.root and base.endswith(self.wire.root):
            base = base.removesuffix(self.wire.root)
        elif self.wire is OPENAI:  # a base URL of this wire is complete, whatever it ends with
            path = path.removeprefix(self.wire.root)
        elif self.wire is GEMINI:  # clients disagree on whether it contains the version
            base = _VERSION.sub("", base)
        target = (base + quote(path, safe="/:@") + (f"?{query}" if query else "")).encode("ascii", "ignore")
        host = (parts.hostname or "").encode("idna" if not (parts.hostname or "").isascii() else "ascii")
        return httpcore2.URL(scheme=parts.scheme.encode(), host=host, port=parts.port, target=target)

    def headers(self, sent: Headers, body: bytes | None) -> Headers:
        """Return the headers to send: those of the client, with its credentials and connection headers replaced."""
        named = {name.strip().lower() for key, value in sent if key == b"connection" for name in value.split(b",")}
        headers = [pair for pair in sent if pair[0] not in named and _passes(pair[0])]
        parts = urlsplit(self.url)
        headers.append((b"host", parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")))
        headers.append((b"accept-encoding", b"identity"))
        if body is not None:
            headers.append((b"content-length", str(len(body)).encode()))
        if self.key:
            bearer = self.is_bearer or self.wire.key_header == "authorization"
            value = f"Bearer {self.key}" if bearer else self.key
            headers.append((("authorization" if bearer else self.wire.key_header).encode(), value.encode("latin-1")))
        if self.own_headers:
            own = {name for name, _ in self.own_headers}
            headers = [*(pair for pair in headers if pair[0] not in own), *self.own_headers]
        return headers


def _passes(name: bytes) -> bool:
    return name not in HOP_BY_HOP and name not in CREDENTIALS and not name.startswith(OURS)


def returned_headers(response: httpcore2.Response) -> Headers:
    """Return the response headers for the client: all but those of the connection and its coding."""
    lower = [(name.lower(), value) for name, value in response.headers]
    return [pair for pair in lower if pair[0] not in NOT_RETURNED]


def chunks(response: httpcore2.Response) -> AsyncIterable[bytes]:
    """Return the body of a response as it comes."""
    stream: AsyncIterable[bytes] = response.stream  # type: ignore[assignment]  # async, since the pool is
    return stream


_VARIABLES: tuple[tuple[Wire, tuple[str, ...], tuple[str, ...]], ...] = (
    (OPENAI, ("OPENAI_BASE_URL", "OPENAI_API_BASE"), ("OPENAI_API_KEY",)),
    (ANTHROPIC, ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_URL", "ANTHROPIC_API_BASE"), ("ANTHROPIC_API_KEY",)),
    (GEMINI, ("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE"), ("GOOGLE_API_KEY", "GEMINI_API_KEY")),
)


def upstreams_in(environ: Mapping[str, str]) -> dict[str, Upstream]:
    """Return the upstream of each wire as the environment configures it, at the provider's own address by default.

    `NAME_FILE` names a file that contains the value of a key `NAME`.
    """
    found: dict[str, Upstream] = {}
    for wire, addresses, keys in _VARIABLES:
        url = next((environ[name] for name in addresses if environ.get(name)), wire.address)
        key = next((key for name in keys if (key := _secret(environ, name))), "")
        bearer = _secret(environ, "ANTHROPIC_AUTH_TOKEN") if wire is ANTHROPIC and not key else ""
        own = _custom_headers(environ.get(f"{wire.name.upper()}_CUSTOM_HEADERS", ""))
        found[wire.name] = Upstream(wire.name, wire, url.strip(), key or bearer, bool(bearer), own)
    return found


def _custom_headers(text: str) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of `NAME: VALUE` lines, as the clients of OpenAI and Anthropic read them; skip other lines."""
    pairs = [line.partition(":") for line in text.splitlines()]
    named = [(name.strip().lower(), value.strip()) for name, _, value in pairs if value]
    kept = [(name.encode(), value.encode()) for name, value in named if name and name.isascii()]
    return tuple(pair for pair in kept if pair[0] not in HOP_BY_HOP)


def _secret(environ: Mapping[str, str], name: str) -> str:
    file = environ.get(f"{name}_FILE")
    if value := environ.get(name, "").strip():
        return _sendable(value, name, "***")
    if not file:
        return ""
    try:
        value = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"{name}_FILE", file, f"a text file with the key ({type(error).__name__})") from None
    return _sendable(value, f"{name}_FILE", file)


def _sendable(key: str, name: str, shown: str) -> str:
    """Return the key if a header can carry it; otherwise every call would fail after its cost is held."""
    if not key.isascii() or not key.isprintable():
        raise InvalidValue(name, shown, "a key of printable ASCII characters, in one line")
    return key


def parse_upstream(text: str, environ: Mapping[str, str]) -> Upstream:
    """Parse `NAME=[WIRE+]URL`; the key is in the variable `NAME_API_KEY`, or in the file `NAME_API_KEY_FILE`."""
    name, equals, url = text.partition("=")
    wire, plus, rest = url.partition("+")
    if not equals or not name.replace("-", "").replace("_", "").isalnum() or name != name.lower():
        raise InvalidValue("upstream", text, "NAME=URL, with a name in small letters")
    if plus and wire not in WIRES:
        raise InvalidValue("upstream", text, f"NAME=URL or NAME=WIRE+URL, with a wire of {', '.join(WIRES)}")
    variable = f"{name.upper().replace('-', '_')}_API_KEY"
    return Upstream(name, WIRES[wire] if plus else OPENAI, rest if plus else url, _secret(environ, variable))
