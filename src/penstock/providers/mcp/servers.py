"""Which servers there are: configuration, written by whoever runs the program.

A graph or a model can name a server and nothing else. What is started, with which environment, and which address is
asked stands here. Nothing is started or resolved by describing it.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.agents.tools import TOOL_NAME
from penstock.containment.limits import seconds_to_ns
from penstock.errors import InvalidValue, PenstockError
from penstock.providers.egress.policy import EgressPolicy

if TYPE_CHECKING:
    from penstock.providers.mcp.tools import McpTools

MAX_MESSAGE_BYTES = 10_000_000
MAX_TOLD = 500


class McpError(PenstockError):
    """A server could not be opened, broke off, or answered with what is no answer."""

    def __init__(self, server: str, why: str) -> None:
        self.server = server
        self.why = why[:MAX_TOLD]
        super().__init__(f"MCP server {server!r}: {self.why}")


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is a program of this machine, spoken to over its standard input and output."""

    command: Sequence[str]
    """The program and its arguments; no shell reads them."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the few variables a program needs to start; the rest of our own environment is not passed on."""
    cwd: str | None = None
    start_timeout_s: float = 30.0
    """Until it has told its tools."""
    grace_s: float = 2.0
    """Between being told to end and being killed."""
    max_message_bytes: int = MAX_MESSAGE_BYTES

    def __post_init__(self) -> None:
        given: Any = self.command
        if isinstance(given, str) or not isinstance(given, Sequence) or not given or not given[0]:
            raise InvalidValue("command", given, "a list: the program and its arguments")
        if not all(isinstance(word, str) and "\0" not in word for word in given):
            raise InvalidValue("command", given, "a list of texts")
        _must_be_texts("env", self.env)
        _must_be_bounded(self)
        seconds_to_ns(self.grace_s, "grace_s")
        object.__setattr__(self, "command", tuple(self.command))
        object.__setattr__(self, "env", dict(self.env))


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server somewhere else, spoken to over streamable HTTP through the egress guard."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    policy: EgressPolicy | None = None
    """None allows the host of the address, at a public address, and nothing else."""
    start_timeout_s: float = 30.0
    max_message_bytes: int = MAX_MESSAGE_BYTES
    ssl_context: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        given: Any = self.url
        if not isinstance(given, str) or not given.startswith(("https://", "http://")):
            raise InvalidValue("url", self.url, "an address that begins with https:// or http://")
        if self.policy is not None and not isinstance(self.policy, EgressPolicy):
            raise InvalidValue("policy", self.policy, "an EgressPolicy, or None")
        _must_be_texts("headers", self.headers)
        _must_be_bounded(self)
        object.__setattr__(self, "headers", dict(self.headers))


Server = StdioServer | HttpServer


class McpServers(Mapping[str, Server]):
    """The servers of a program, by the names under which graphs and models may ask for them."""

    __slots__ = ("_by_name",)

    def __init__(self, servers: Mapping[str, Server]) -> None:
        given: Mapping[Any, Any] = servers
        for name, server in given.items():
            if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
                raise InvalidValue("name of a server", name, "1 to 64 letters, digits, _ or -")
            if not isinstance(server, StdioServer | HttpServer):
                raise InvalidValue(f"server {name!r}", server, "a StdioServer or an HttpServer")
        self._by_name = dict(servers)

    def tools(self, name: str, **options: Any) -> McpTools:
        """The tools of the server of this name, to be opened with `async with`; takes what `McpTools` takes."""
        from penstock.providers.mcp.tools import McpTools

        asked: Any = name
        found = self._by_name.get(asked) if isinstance(asked, str) else None
        if found is None:
            raise InvalidValue(
                "server", name, f"one that is configured ({', '.join(self._by_name) or 'there is none'})"
            )
        return McpTools(found, **{"name": name, **options})

    def __getitem__(self, name: str) -> Server:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"McpServers({', '.join(self._by_name)})"


def _must_be_texts(field: str, given: object) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise InvalidValue(field, type(given), "names and values of text")


def _must_be_bounded(server: Server) -> None:
    seconds_to_ns(server.start_timeout_s, "start_timeout_s")
    size: object = server.max_message_bytes
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidValue("max_message_bytes", size, "a whole number above zero")
