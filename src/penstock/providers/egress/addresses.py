"""Which network addresses may be reached.

Pure: takes an address, returns the reason to refuse it. The table is our own, because Python's definition of a global
address differs between its versions. IPv6 addresses must be in the global range; IPv4 addresses are allowed unless the
table lists them.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Final

PRIVATE_4: Final = (
    (IPv4Network("10.0.0.0/8"), "private"),
    (IPv4Network("100.64.0.0/10"), "carrier-grade NAT"),
    (IPv4Network("127.0.0.0/8"), "loopback"),
    (IPv4Network("172.16.0.0/12"), "private"),
    (IPv4Network("192.168.0.0/16"), "private"),
    (IPv4Network("198.18.0.0/15"), "for benchmarks inside a network"),
)
PRIVATE_6: Final = (
    (IPv6Network("::1/128"), "loopback"),
    (IPv6Network("fc00::/7"), "private"),
)
"""Networks that `allow_private` allows."""

NEVER_4: Final = (
    (IPv4Network("100.100.100.200/32"), "a cloud's metadata service"),
    (IPv4Network("168.63.129.16/32"), "a cloud's metadata service"),
    (IPv4Network("0.0.0.0/8"), "unspecified"),
    (IPv4Network("169.254.0.0/16"), "link-local, where clouds keep their metadata"),
    (IPv4Network("192.0.0.0/24"), "reserved"),
    (IPv4Network("192.0.2.0/24"), "reserved for documentation"),
    (IPv4Network("192.88.99.0/24"), "a relay between versions"),
    (IPv4Network("198.51.100.0/24"), "reserved for documentation"),
    (IPv4Network("203.0.113.0/24"), "reserved for documentation"),
    (IPv4Network("224.0.0.0/4"), "multicast"),
    (IPv4Network("240.0.0.0/4"), "reserved"),
)
NEVER_6: Final = (
    (IPv6Network("fd00:ec2::254/128"), "a cloud's metadata service"),
    (IPv6Network("fd20:ce::254/128"), "a cloud's metadata service"),
    (IPv6Network("fe80::/10"), "link-local"),
    (IPv6Network("fec0::/10"), "site-local"),
    (IPv6Network("ff00::/8"), "multicast"),
    (IPv6Network("2001::/23"), "reserved, or a tunnel between versions"),
    (IPv6Network("2001:db8::/32"), "reserved for documentation"),
    (IPv6Network("2002::/16"), "a tunnel between versions"),
    (IPv6Network("3fff::/20"), "reserved for documentation"),
)
"""Networks that are always refused."""

GLOBAL_6: Final = IPv6Network("2000::/3")
MAPPED: Final = IPv6Network("::ffff:0:0/96")
NAT64: Final = IPv6Network("64:ff9b::/96")


def refusal(address: str, allow_private: bool = False) -> str | None:
    """Return why this address may not be reached; None if it may."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return "not an address"
    if isinstance(parsed, IPv4Address):
        return _refusal_4(parsed, allow_private)
    if parsed.scope_id is not None:
        return "bound to an interface of this machine"
    if parsed in MAPPED or parsed in NAT64:
        return _refusal_4(IPv4Address(int(parsed) & 0xFFFF_FFFF), allow_private)
    return _refusal_6(parsed, allow_private)


def _refusal_4(address: IPv4Address, allow_private: bool) -> str | None:
    for network, why in NEVER_4:
        if address in network:
            return why
    for network, why in PRIVATE_4:
        if address in network:
            return None if allow_private else why
    return None


def _refusal_6(address: IPv6Address, allow_private: bool) -> str | None:
    for network, why in NEVER_6:
        if address in network:
            return why
    for network, why in PRIVATE_6:
        if address in network:
            return None if allow_private else why
    return None if address in GLOBAL_6 else "not a global address"
