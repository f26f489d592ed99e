"""Clients by address: who they are behind proxies, and how often each may present a wrong token.

Works with addresses, times and digests of tokens; knows no HTTP messages and no tokens.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

MAX_ADDRESSES = 10_000
"""Maximum number of addresses, and of their tokens, that are remembered; the oldest are forgotten first."""
MAX_FORWARDED = 20
"""Maximum number of addresses of an X-Forwarded-For header that are read, from its end."""
NANOS_PER_MINUTE = 60 * 1_000_000_000


def parse_networks(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse addresses and networks such as 10.0.0.0/8; raises ValueError."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in texts)


def is_in(address: str, networks: Sequence[Network]) -> bool:
    """Whether the address is in one of the networks; False for anything that is not an address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(mapped in network for network in networks if network.version == mapped.version)


def client_behind(peer: str, forwarded: Sequence[str], networks: Sequence[Network]) -> str:
    """Return the address of the client: the last one in `forwarded` that is not a trusted proxy, if the peer is one.

    Entries that the client wrote itself come before those of the proxies, and are never reached. An entry that is not
    an address ends the search; the result is then the proxy that added it.
    """
    client = peer
    for text in reversed(forwarded[-MAX_FORWARDED:]):
        if not is_in(client, networks):
            break
        address = _address(text)
        if address is None:
            break
        client = address
    return client


def _address(text: str) -> str | None:
    """Return the address in an entry of X-Forwarded-For, which may have a port; None if there is none."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


def network_of(address: str) -> str:
    """Return the network that belongs to one client: the /64 of an IPv6 address, any other address itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4 or parsed.is_loopback:
        return address
    return str(ipaddress.ip_network(f"{parsed}/64", strict=False).network_address)


class TokenThrottle:
    """Limits how often a client may present a wrong token: a bucket per address, refilled over a minute.

    While a bucket is empty, tokens are not even compared, so that the answer does not depend on them: a guess looks
    like the right token. A token that was accepted from this address before is still accepted, so that a neighbour
    at the same address cannot lock its users out.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._failed: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By network: the number of failures, and the time since which it decreases."""
        self._accepted: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def wait_s(self, address: str, digest: bytes, now_ns: int) -> float:
        """Return how long the client has to wait before it may present this token; 0 if it may now."""
        client = network_of(address)
        if client not in self._failed or (client, digest) in self._accepted:
            return 0.0
        excess = self._level(client, now_ns) + 1 - self._per_minute
        return max(0.0, excess * 60 / self._per_minute)

    def fail(self, address: str, now_ns: int) -> None:
        """Count a wrong token."""
        client = network_of(address)
        self._failed[client] = (self._level(client, now_ns) + 1, now_ns)
        self._failed.move_to_end(client)
        if len(self._failed) > MAX_ADDRESSES:
            self._failed.popitem(last=False)

    def accept(self, address: str, digest: bytes) -> None:
        """Remember that this token was accepted from this address."""
        key = network_of(address), digest
        self._accepted[key] = None
        self._accepted.move_to_end(key)
        if len(self._accepted) > MAX_ADDRESSES:
            self._accepted.popitem(last=False)

    def _level(self, client: str, now_ns: int) -> float:
        count, at_ns = self._failed.get(client, (0.0, now_ns))
        return max(0.0, count - max(0, now_ns - at_ns) / NANOS_PER_MINUTE * self._per_minute)
