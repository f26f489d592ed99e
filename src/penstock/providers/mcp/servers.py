"""Configuration of MCP servers, written by the operator of the program.

A graph or a model can only name a server. The command, its environment and the address are configured here. Creating a
configuration starts and resolves nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock import checks
from penstock.containment.limits import seconds_to_ns
from penstock.errors import InvalidValue, PenstockError
from penstock.providers.egress.policy import EgressPolicy

MAX_MESSAGE_BYTES = 10_000_000
MAX_REASON = 500


class McpError(PenstockError):
    """A server could not be opened, disconnected, or sent an invalid answer."""

    def __init__(self, server: str, why: str) -> None:
        self.server = server
        self.why = why[:MAX_REASON]
        super().__init__(f"MCP server {server!r}: {self.why}")


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is a local program, connected over its standard input and output."""

    command: Sequence[str]
    """The program and its arguments; run without a shell."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the few variables a program needs to start; the rest of our environment is not passed on."""
    cwd: str | None = None
    start_timeout_s: float = 30.0
    """Timeout until it has listed its tools."""
    grace_s: float = 2.0
    """Time between closing its input and killing it."""
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        given: Any = self.command
        if isinstance(given, str) or not isinstance(given, Sequence) or not given or not given[0]:
            raise InvalidValue("command", given, "a list: the program and its arguments")
        if not all(isinstance(word, str) and "\0" not in word for word in given):
            raise InvalidValue("command", given, "a list of texts")
        _check_texts("env", self.env)
        _check_limits(self)
        seconds_to_ns(self.grace_s, "grace_s")
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "env", dict(self.env))


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A remote server, connected over streamable HTTP through the egress guard."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    policy: EgressPolicy | None = None
    """None allows only the host of `url`, at a public address."""
    start_timeout_s: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given: Any = self.url
        if not isinstance(given, str) or not given.startswith(("https://", "http://")):
            raise InvalidValue("url", self.url, "an address that begins with https:// or http://")
        if self.policy is not None:
            checks.instance("policy", self.policy, EgressPolicy, none="only the host of the url")
        _check_texts("headers", self.headers)
        _check_limits(self)
        object.__setattr__(self, "headers", dict(self.headers))


Server = StdioServer | HttpServer


def _check_texts(field: str, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise InvalidValue(field, type(given), "names and values of text")


def _check_limits(server: Server) -> None:
    seconds_to_ns(server.start_timeout_s, "start_timeout_s")
    checks.integer("max_message_bytes", server.max_message_bytes, minimum=1)
