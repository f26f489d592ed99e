"""What an operator decides about the server, checked when it is said.

Pure data: reads no file and no environment by itself; `from_env` is given one.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.errors import InvalidValue
from penstock.server.auth import Token, TokensMissing, parse_tokens

MiB = 1024 * 1024
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?|\[[0-9a-f:.]{2,45}\]")
ORIGIN = re.compile(r"https?://[^/\s]{1,255}")
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where to listen, whom to let in, and how much one request may ask for."""

    host: str = "127.0.0.1"
    port: int = 8642
    tokens: tuple[Token, ...] = ()
    """Who may come in. Without any, everybody on this machine is the admin `local`, and nobody else is let in."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which the server is reached, besides loopback and `host`: what else a Host header may say."""
    allowed_origins: tuple[str, ...] = ()
    """Other origins that an Origin header may name, such as that of a proxy in front; the server's own always may.

    Browsers are not told so: without CORS, a page there cannot read the answers by itself."""
    max_body_bytes: int = 2 * MiB
    max_attachment_bytes: int = 20 * MiB
    max_buffered_bytes: int = 256 * MiB
    """All bodies together that are being received."""
    body_timeout_s: float = 30.0
    """How long a body may take to arrive."""
    max_json_depth: int = 64
    max_json_values: int = 250_000
    max_headers: int = 100
    max_header_bytes: int = 32 * 1024
    max_target_bytes: int = 4_096
    """The path and the query together."""
    max_requests: int = 1_900
    """All that are under way at once, streams among them; fewer than connections, so that it is said properly."""
    max_streams: int = 1_000
    max_streams_per_user: int = 100
    max_mcp_sessions: int = 1_000
    max_mcp_sessions_per_user: int = 100
    mcp_idle_s: float = 1_800.0
    """How long a session of MCP is kept in which nothing is under way."""
    heartbeat_s: float = 15.0
    """How long a stream is silent before it says that it is there, and goes without a look at its token."""
    ready_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= _whole("port", self.port) <= 65_535:
            raise InvalidValue("port", self.port, "a number from 0 to 65535; 0 takes any that is free")
        for name in _LIMITS:
            if _whole(name, getattr(self, name)) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1")
        for name in ("body_timeout_s", "mcp_idle_s", "heartbeat_s", "ready_timeout_s"):
            if not _is_time(getattr(self, name)):
                raise InvalidValue(name, getattr(self, name), "a number of seconds from 0.001 to 86400")
        _check_each("allowed_hosts", self.allowed_hosts, HOST, "names such as penstock.example, without a port")
        _check_each("allowed_origins", self.allowed_origins, ORIGIN, "origins such as https://penstock.example")
        if not is_loopback(self.host) and not self.tokens:
            expected = "a loopback address, such as 127.0.0.1, for as long as there are no tokens"
            raise InvalidValue("host", self.host, expected)

    @property
    def hosts(self) -> frozenset[str]:
        """What a Host header may say, without the port."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        wildcard = {"0.0.0.0", "[::]"}
        return frozenset({*LOOPBACK_HOSTS, own.lower(), *self.allowed_hosts} - wildcard)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: Any) -> ServerSettings:
        """The settings in PENSTOCK_HOST, PENSTOCK_PORT, PENSTOCK_ALLOWED_HOSTS, PENSTOCK_ALLOWED_ORIGINS (lists with
        commas), PENSTOCK_TOKENS (as `parse_tokens` reads lines) and PENSTOCK_TOKENS_FILE; what is `given` counts more.
        TokensMissing if tokens are named, and there are none.
        """
        found: dict[str, Any] = {}
        if "PENSTOCK_HOST" in environ:
            found["host"] = environ["PENSTOCK_HOST"].strip()
        if "PENSTOCK_PORT" in environ:
            found["port"] = _number("PENSTOCK_PORT", environ["PENSTOCK_PORT"])
        for name in ("allowed_hosts", "allowed_origins"):
            if listed := environ.get(f"PENSTOCK_{name.upper()}"):
                found[name] = tuple(one.strip().lower() for one in listed.split(",") if one.strip())
        if tokens := tokens_in(environ):
            found["tokens"] = tokens
        return cls(**{**found, **given})


_LIMITS = tuple(one.name for one in fields(ServerSettings) if one.name.startswith("max_"))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tokens_in(environ: Mapping[str, str]) -> tuple[Token, ...]:
    """The tokens in PENSTOCK_TOKENS, and those in the file that PENSTOCK_TOKENS_FILE names; none if neither is set."""
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


def _whole(name: str, value: object) -> int:
    if type(value) is not int:
        raise InvalidValue(name, value, "a whole number")
    return value


def _is_time(value: object) -> bool:
    return type(value) in {int, float} and 0.001 <= value <= 86_400  # type: ignore[operator]


def _check_each(name: str, values: tuple[str, ...], pattern: re.Pattern[str], expected: str) -> None:
    for one in values:
        if not pattern.fullmatch(str(one)):
            raise InvalidValue(name, one, expected)
