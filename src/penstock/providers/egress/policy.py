"""The policy for outgoing requests: schemes, hosts, ports, sizes and timeouts.

Pure: names and numbers are checked here, addresses in `addresses`. Nothing is resolved, nothing is sent.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

from penstock import checks
from penstock.containment.limits import seconds_to_ns
from penstock.errors import InvalidValue

DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_URL = 8_192
MEGABYTE = 1_000_000
MAX_PORT = 65_535

_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
"""A host name in the form that is sent: lower case, no empty label, only letters, digits, - and _."""
NUMBER = re.compile(r"(?:0x[0-9a-f]*|[0-9]+)")
"""A last label like this makes resolvers parse the whole host as a number, in one of a dozen notations."""


@dataclass(frozen=True, slots=True)
class EgressPolicy:
    """The permissions of an `EgressClient`; by default, it may reach any public host on the usual ports."""

    allow_hosts: Collection[str] | None = None
    """Hosts that may be reached: "api.example.org", "*.example.org" for all its subdomains, "[::1]:8080" with a port of
    its own. None allows every public host; an empty list allows none."""
    allow_private: bool = False
    """Whether loopback, private and carrier-grade addresses may be reached; link-local and metadata ones never are."""
    max_bytes: int = 10 * MEGABYTE
    """Maximum size of a response body, after decompression."""
    timeout_s: float = 30.0
    """Timeout of one request as a whole, its redirects included."""
    max_redirects: int = 5
    schemes: Collection[str] = ("https", "http")
    ports: Collection[int] = (443, 80)
    """Allowed ports of hosts that are not listed with a port of their own."""
    allow_downgrade: bool = False
    """Whether a redirect may lead from https to http."""

    def __post_init__(self) -> None:
        seconds_to_ns(self.timeout_s, "timeout_s")
        for field in ("max_bytes", "max_redirects"):
            checks.integer(field, getattr(self, field))
        object.__setattr__(self, "schemes", _schemes(self.schemes))
        object.__setattr__(self, "ports", _ports(self.ports))
        if self.allow_hosts is not None:
            object.__setattr__(self, "allow_hosts", _hosts(self.allow_hosts))

    def refusal(self, scheme: str, host: str, port: int) -> str | None:
        """Return why this host, in its sent form, may not be reached whatever its address is; None if it may."""
        if scheme not in self.schemes:
            return f"the scheme {scheme[:20]!r} is not one of {', '.join(self.schemes)}"
        wrong = wrong_host(host)
        if wrong is not None:
            return wrong
        if self.allow_hosts is None:
            return None if port in self.ports else _other_port(port)
        entries = [entry for entry in self.allow_hosts if _covers(entry.rpartition(":")[0], host)]
        if not entries:
            return "the host is not one of those allowed"
        own = {entry.rpartition(":")[2] for entry in entries}
        return None if str(port) in own or ("" in own and port in self.ports) else _other_port(port)


def wrong_host(host: str) -> str | None:
    """Return the error in the host as written; None for a plain name or an address in its usual notation."""
    if "%" in host:
        return "the host carries an escape or an interface"
    if ":" in host:
        return None if _is_usual(host) else "the host is an address in an unusual notation"
    if NUMBER.fullmatch(host.rpartition(".")[2]):
        return None if _is_usual(host) else "the host is a number in an unusual notation"
    return None if NAME.fullmatch(host) else "the host is not a name that can be sent"


def _is_usual(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return isinstance(address, IPv6Address) or str(address) == host


def _other_port(port: int) -> str:
    return f"the port {port} is not one of those allowed"


def _covers(entry: str, host: str) -> bool:
    if entry.startswith("*."):
        return host.endswith(entry[1:])
    return _same_form(entry) == _same_form(host)


def _same_form(host: str) -> str:
    return str(ip_address(host)) if ":" in host else host


def _schemes(given: object) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Collection) or not set(given) <= DEFAULT_PORTS.keys():
        raise InvalidValue("schemes", given, "a list of https and http")
    return tuple(given)


def _ports(given: object) -> tuple[int, ...]:
    if isinstance(given, str | bytes) or not isinstance(given, Collection):
        raise InvalidValue("ports", given, "a list of port numbers")
    for port in given:
        if type(port) is not int or not 0 < port <= MAX_PORT:
            raise InvalidValue("ports", port, f"numbers from 1 to {MAX_PORT}")
    return tuple(given)


def _hosts(given: object) -> tuple[str, ...]:
    """Return each entry as "host:port", or "host:" if it has no port of its own."""
    if isinstance(given, str) or not isinstance(given, Collection):
        raise InvalidValue("allow_hosts", given, "a list of host names, or None for every public one")
    return tuple(_host(entry) for entry in given)


def _host(entry: object) -> str:
    expected = 'host names such as "api.example.org", "*.example.org" or "[::1]:8080"'
    if not isinstance(entry, str):
        raise InvalidValue("allow_hosts", entry, expected)
    split = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::([0-9]{1,5}))?", entry)
    if split is None:
        raise InvalidValue("allow_hosts", entry, expected)
    host, port = split[1].strip("[]").lower(), split[2] or ""
    if wrong_host(host.removeprefix("*.")) is not None or (port and not 0 < int(port) <= MAX_PORT):
        raise InvalidValue("allow_hosts", entry, expected)
    return f"{host}:{int(port) if port else ''}"
