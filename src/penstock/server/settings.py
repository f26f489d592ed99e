"""The operator's settings of the server, validated on construction.

Pure data: reads no environment of its own; `from_env` receives one, and reads the token file that it names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock import checks
from penstock.errors import InvalidValue
from penstock.server.auth import Token, TokensMissing, parse_tokens
from penstock.server.clients import Network, parse_networks

MiB = 1024 * 1024
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")
ORIGIN = re.compile(r"https?://[^/\s]{1,255}")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){0,8}")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Listening address, access, and limits of requests."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8642
    """Port to listen on; 0 for any free port."""
    tokens: tuple[Token, ...] = ()
    """Accepted tokens. Without any, every client on this machine is the admin `local`, and no others are accepted."""
    tokens_in_database: bool = False
    """Accept a `host` other than loopback without `tokens`, because the database is known to have an admin's token."""
    allowed_hosts: tuple[str, ...] = ()
    """Values of the Host header to accept besides loopback and `host`: other names of this server."""
    allowed_origins: tuple[str, ...] = ()
    """Values of the Origin header to accept besides the server's own, such as the origin of a proxy in front.

    No CORS headers are sent, so a page of such an origin cannot read the responses itself."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of the proxies in front, such as 10.0.0.0/8, whose X-Forwarded-For and X-Forwarded-Proto
    are believed. From anybody else these headers are ignored."""
    root_path: str = ""
    """Path under which a proxy offers the server, such as /penstock, whether or not the proxy removes it."""
    max_body_bytes: int = 2 * MiB
    """Maximum size of a request body."""
    max_attachment_bytes: int = 20 * MiB
    """Maximum size of an uploaded attachment."""
    max_buffered_bytes: int = 256 * MiB
    """Total size of all bodies being received."""
    body_timeout_s: float = 30.0
    """How long a body may take to arrive."""
    max_json_depth: int = 64
    """Maximum nesting depth of a JSON body."""
    max_json_values: int = 250_000
    """Maximum number of values in a JSON body."""
    max_headers: int = 100
    """Maximum number of headers of a request."""
    max_header_bytes: int = 32 * 1024
    """Maximum size of all headers of a request."""
    max_target_bytes: int = 4_096
    """Maximum length of path and query together."""
    max_requests: int = 1_900
    """Maximum concurrent requests, streams included; below the connection limit, so that refusals are JSON."""
    max_connections_per_client: int = 1_000
    """Maximum open connections, and concurrent requests, of one client address; a /64 network of IPv6 counts as one."""
    max_failed_tokens_per_minute: int = 30
    """Wrong tokens that one client address may present in a minute."""
    max_streams: int = 1_000
    """Maximum number of open event streams."""
    max_streams_per_user: int = 100
    """Maximum number of open event streams of one user."""
    max_mcp_sessions: int = 1_000
    """Maximum number of MCP sessions."""
    max_mcp_sessions_per_user: int = 100
    """Maximum number of MCP sessions of one user."""
    mcp_idle_s: float = 1_800.0
    """How long an MCP session without active requests is kept."""
    heartbeat_s: float = 15.0
    """Interval at which an idle stream sends a heartbeat, and at which the expiry of its token is checked."""
    ready_timeout_s: float = 2.0
    """How long `/ready` waits for the database before it says that the server is not ready."""
    retry_grace_s: float = 2.0
    """How long a run continues after its /v1 client disconnected, for the client to repeat the request; then it is
    cancelled."""
    client_tools_wait_s: float = 120.0
    """How long a run waits for the results of its client's tools; results that come later start a new run."""

    def __post_init__(self) -> None:
        checks.integer("port", self.port, maximum=65_535)
        for name in _LIMITS:
            checks.integer(name, getattr(self, name), minimum=1)
        for name in ("body_timeout_s", "mcp_idle_s", "heartbeat_s", "ready_timeout_s", "client_tools_wait_s"):
            checks.number(name, getattr(self, name), minimum=0.001, maximum=86_400)
        checks.number("retry_grace_s", self.retry_grace_s, minimum=0, maximum=86_400)
        _check_each("allowed_hosts", self.allowed_hosts, HOST, "names such as penstock.example, without a port")
        _check_each("allowed_origins", self.allowed_origins, ORIGIN, "origins such as https://penstock.example")
        if not ROOT_PATH.fullmatch(self.root_path):
            raise InvalidValue("root_path", self.root_path, "a path such as /penstock, without a slash at its end")
        for network in self.trusted_proxies:
            try:
                parse_networks([network])
            except ValueError:
                expected = "addresses or networks such as 10.0.0.5 or 10.0.0.0/8"
                raise InvalidValue("trusted_proxies", network, expected) from None
        if not is_loopback(self.host) and not self.tokens and not self.tokens_in_database:
            expected = "a loopback address such as 127.0.0.1, because no tokens are configured"
            raise InvalidValue("host", self.host, expected)

    @property
    def hosts(self) -> frozenset[str]:
        """Accepted values of the Host header, without the port."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        wildcard = {"0.0.0.0", "[::]"}
        return frozenset({*LOOPBACK_HOSTS, own.lower(), *self.allowed_hosts} - wildcard)

    @property
    def proxy_networks(self) -> tuple[Network, ...]:
        """The networks of the trusted proxies."""
        return parse_networks(self.trusted_proxies)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> ServerSettings:
        """Read settings from the environment; `given` takes precedence.

        Variables: PENSTOCK_HOST, PENSTOCK_PORT, PENSTOCK_ROOT_PATH, PENSTOCK_ALLOWED_HOSTS, PENSTOCK_ALLOWED_ORIGINS
        and PENSTOCK_TRUSTED_PROXIES (each comma-separated), PENSTOCK_TOKENS (lines for `parse_tokens`) and
        PENSTOCK_TOKENS_FILE. Raises TokensMissing if a source of tokens is set and contains none.
        """
        found: dict[str, Any] = {}
        if "PENSTOCK_HOST" in environ:
            found["host"] = environ["PENSTOCK_HOST"].strip()
        if "PENSTOCK_PORT" in environ:
            found["port"] = _number("PENSTOCK_PORT", environ["PENSTOCK_PORT"])
        if "PENSTOCK_ROOT_PATH" in environ:
            found["root_path"] = environ["PENSTOCK_ROOT_PATH"].strip().rstrip("/")
        for name in ("allowed_hosts", "allowed_origins", "trusted_proxies"):
            if listed := environ.get(f"PENSTOCK_{name.upper()}"):
                found[name] = tuple(item.strip().lower() for item in listed.split(",") if item.strip())
        if tokens := tokens_in(environ):
            found["tokens"] = tokens
        return cls(**{**found, **given})


_LIMITS = tuple(field.name for field in fields(ServerSettings) if field.name.startswith("max_"))


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_in(environ: Mapping[str, str]) -> tuple[Token, ...]:
    """Read the tokens in PENSTOCK_TOKENS and in the file PENSTOCK_TOKENS_FILE; none if neither is set."""
    lines = environ.get("PENSTOCK_TOKENS", "").splitlines()
    if file := environ.get("PENSTOCK_TOKENS_FILE"):
        try:
            lines += Path(file).read_text("utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            raise InvalidValue("PENSTOCK_TOKENS_FILE", file, f"a text file ({type(error).__name__})") from None
    tokens = parse_tokens(lines)
    named = [name for name in ("PENSTOCK_TOKENS", "PENSTOCK_TOKENS_FILE") if name in environ]
    if named and not tokens:
        raise TokensMissing(*(repr(file) if file and name == "PENSTOCK_TOKENS_FILE" else name for name in named))
    return tokens


def _number(name: str, text: str) -> int:
    if not (text.strip().isascii() and text.strip().isdigit() and len(text) < 20):
        raise InvalidValue(name, text, "a whole number")
    return int(text)


def _check_each(name: str, values: tuple[str, ...], pattern: re.Pattern[str], expected: str) -> None:
    for value in values:
        if not pattern.fullmatch(str(value)):
            raise InvalidValue(name, value, expected)
