"""Which addresses and hosts may be reached: tables, and what no notation gets around."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.providers.egress import EgressDenied, EgressPolicy
from penstock.providers.egress.addresses import refusal
from penstock.providers.egress.failures import redacted
from penstock.providers.egress.transport import check, parsed

NOT_PUBLIC = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "198.18.0.1",
    "::1",
    "fc00::1",
    "fd12:3456::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::a00:1",
]
NEVER = [
    "0.0.0.0",
    "0.1.2.3",
    "169.254.169.254",
    "169.254.170.2",
    "168.63.129.16",
    "100.100.100.200",
    "192.0.0.192",
    "192.0.2.1",
    "198.51.100.1",
    "203.0.113.1",
    "192.88.99.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "fe80::1",
    "fe80::1%eth0",
    "2606:4700::1%1",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:808:808::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "3fff::1",
    "64:ff9b:1::7f00:1",
    "::127.0.0.1",
    "::ffff:0:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::169.254.169.254",
    "100::1",
    "5f00::1",
    "not an address",
    "",
    "0x7f.1",
    "2130706433",
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]


@pytest.mark.parametrize("address", NOT_PUBLIC + NEVER)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert refusal(address)


@pytest.mark.parametrize("address", NEVER)
def test_some_addresses_are_refused_even_where_private_ones_are_allowed(address: str) -> None:
    assert refusal(address, allow_private=True)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_private_addresses_are_allowed_where_the_policy_says_so(address: str) -> None:
    assert refusal(address, allow_private=True) is None


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert refusal(address) is None


@given(st.ip_addresses())
def test_what_python_calls_private_or_special_is_never_allowed(address: object) -> None:
    parsed_address = ip_address(str(address))
    special = parsed_address.is_private or parsed_address.is_multicast or parsed_address.is_reserved
    if special and not str(parsed_address).startswith("64:ff9b:"):
        mapped = getattr(parsed_address, "ipv4_mapped", None)
        assert refusal(str(address)) or (mapped is not None and mapped.is_global)


@given(st.ip_addresses(v=4))
def test_an_address_inside_an_address_is_judged_as_itself(address: object) -> None:
    inner = IPv4Address(str(address))
    assert refusal(f"::ffff:{inner}") == refusal(str(inner)) == refusal(f"64:ff9b::{inner}")


# Hosts, as they may be written in an address.

ODD_HOSTS = [
    "http://0x7f.1/",
    "http://0x7f000001/",
    "http://0x7f.0x0.0x0.0x1/",
    "http://017700000001/",
    "http://0177.0.0.1/",
    "http://2130706433/",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.0.0.01/",
    "http://1.2.3.4.5/",
    "http://0/",
    "http://0x/",
    "http://example.0x7f/",
    "http://127.1./",
    "http://example..org/",
    "http://example.org../",
    "http://./",
    "http:///path",
    "http://-example.org/",
    "http://exa%6dple.org/",
    "http://127.0.0.1%2f.example.org/",
    "http://[fe80::1%25eth0]/",
    "http://[fe80::1%eth0]/",
    "http://[::1",
    "http://[v1.x]/",
    "http://user@example.org/",
    "http://user:secret@example.org/",
    "http://@example.org/",
    "http://:@example.org/",
    "http://example.org@127.0.0.1/",
    "http://example.org\\@127.0.0.1/",
    "http://example.org\t/",
    "http://exam\nple.org/",
    " http://example.org/",
    "http://example.org/ x",
    "http://example.org:0/",
    "http://example.org:22/",
    "http://example.org:99999/",
    "http://example.org:80x/",
    "http://①②⑦.0.0.1/",
    "http://１２７.0.0.1/",
    "http://127。0。0。1/",
    "http://exa\u200bmple.org/",
    "http://exa\udc80mple.org/",
    "http://example!.org/",
    "ftp://example.org/",
    "file:///etc/passwd",
    "gopher://example.org/",
    "javascript:alert(1)",
    "//example.org/",
    "/path",
    "",
    "http://" + "a" * 9000,
    "http://" + ".".join(["a" * 63] * 5) + "/",
]


@pytest.mark.parametrize("url", ODD_HOSTS, ids=repr)
@pytest.mark.parametrize("policy", [EgressPolicy(), EgressPolicy(allow_private=True)], ids=["public", "private"])
def test_an_address_that_could_be_read_in_two_ways_is_refused(url: str, policy: EgressPolicy) -> None:
    with pytest.raises(EgressDenied) as denied:
        check(policy, parsed(url))
    assert "secret" not in str(denied.value)
    assert "passwd" not in denied.value.why


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://example.org/", "example.org"),
        ("HTTPS://EXAMPLE.ORG:443/a?b#c", "example.org"),
        ("http://example.org./", "example.org"),
        ("http://127.0.0.1/", "127.0.0.1"),
        ("http://127.0.0.1./", "127.0.0.1"),
        ("http://[2606:4700::1111]/", "2606:4700::1111"),
        ("http://bücher.example/", "xn--bcher-kva.example"),
        ("http://a_b.example.org/", "a_b.example.org"),
        ("http://0x7f.org/", "0x7f.org"),
    ],
)
def test_a_plain_address_is_read_in_the_form_that_is_sent(url: str, host: str) -> None:
    read = parsed(url)
    check(EgressPolicy(), read)
    assert read.raw_host.decode() == host
    assert read.fragment == ""


@given(st.text(max_size=40))
def test_any_text_after_the_scheme_is_read_or_refused(text: str) -> None:
    try:
        read = parsed(f"http://{text}")
        check(EgressPolicy(), read)
    except EgressDenied:
        return
    host = read.raw_host.decode("ascii")
    assert host == host.lower()
    assert not set(host) & set("@%/\\?# ")


LISTED = EgressPolicy(
    allow_hosts=["api.example.org", "*.cdn.example.org", "localhost:8080", "[::1]:9000", "10.0.0.5"], allow_private=True
)


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.org/",
        "http://api.example.org/",
        "https://API.example.org./",
        "https://a.b.cdn.example.org/",
        "http://localhost:8080/",
        "http://[::1]:9000/",
        "http://[0:0:0:0:0:0:0:1]:9000/",
        "http://10.0.0.5/",
    ],
)
def test_a_listed_host_is_allowed(url: str) -> None:
    check(LISTED, parsed(url))


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/",
        "https://evil-api.example.org/",
        "https://api.example.org.evil.net/",
        "https://cdn.example.org/",
        "https://evilcdn.example.org/",
        "http://api.example.org:8080/",
        "http://localhost/",
        "http://localhost:8081/",
        "http://[::1]/",
        "http://10.0.0.6/",
    ],
)
def test_any_other_host_or_port_is_refused_where_hosts_are_listed(url: str) -> None:
    with pytest.raises(EgressDenied):
        check(LISTED, parsed(url))


def test_an_empty_list_of_hosts_allows_none() -> None:
    with pytest.raises(EgressDenied):
        check(EgressPolicy(allow_hosts=[]), parsed("https://example.org/"))


@pytest.mark.parametrize(
    "options",
    [
        {"allow_hosts": "example.org"},
        {"allow_hosts": ["https://example.org"]},
        {"allow_hosts": ["*"]},
        {"allow_hosts": ["example.org:0"]},
        {"allow_hosts": ["0x7f.1"]},
        {"allow_hosts": [7]},
        {"schemes": "https"},
        {"schemes": ["ftp"]},
        {"ports": [0]},
        {"ports": ["80"]},
        {"max_bytes": -1},
        {"max_bytes": True},
        {"timeout_s": -1},
        {"max_redirects": 1.5},
    ],
)
def test_a_policy_that_means_nothing_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(InvalidValue):
        EgressPolicy(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:secret@example.org/a?key=secret#secret", "https://example.org/a?…"),
        ("https://a:secret@b:secret@example.org/", "https://example.org/"),
        (
            "https://hooks.example.org/services/T00000000/XXXXXXXXXXXXXXXXXX12secret/x",
            "https://hooks.example.org/services/T00000000/…/x",
        ),
        ("secret", "…"),
        ("http://example.org/\u202esecret", "http://example.org/\\u202esecret"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redacted(url) == shown
