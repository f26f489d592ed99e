"""Users, tokens and the table of routes."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.server.auth import (
    ACCESS,
    MAX_SECRET,
    MIN_SECRET,
    ROLES,
    Rules,
    Token,
    TokensInvalid,
    User,
    digest_of,
    format_time,
    names_of,
    parse_tokens,
    reserved,
    secret_in,
    token_of,
)

SECRET = "s" * MIN_SECRET


def test_tokens_are_lines_of_name_role_and_secret() -> None:
    tokens = parse_tokens(["# who", "", f"ann:user:{SECRET}a", f"  root:admin:{SECRET}:with:colons  "])
    assert [token.user for token in tokens] == [User("ann", "user"), User("root", "admin")]
    ann, root = tokens
    assert token_of(tokens, digest_of(f"{SECRET}:with:colons".encode())) is root
    assert token_of(tokens, digest_of(f"{SECRET}a".encode())) is ann
    assert token_of(tokens, digest_of(SECRET.encode())) is None


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        (b"Bearer abc", b"abc"),
        (b"bearer  abc ", b"abc"),
        (b"BEARER a b", b"a b"),
        (b"Bearer \xff\xfe", b"\xff\xfe"),
        (b"Bearer", None),
        (b"Bearer  ", None),
        (b"Basic abc", None),
        (b"abc", None),
        (b"", None),
    ],
)
def test_the_secret_is_the_text_after_bearer(header: bytes, secret: bytes | None) -> None:
    assert secret_in(header) == secret


@pytest.mark.parametrize(
    "line",
    [
        "ann",
        "ann:user",
        "ann:user:",
        f"ann:king:{SECRET}",
        f":user:{SECRET}",
        f"a b:user:{SECRET}",
        f"-a:user:{SECRET}",
        f"{'a' * 65}:user:{SECRET}",
        f"é:user:{SECRET}",
        f"ann:user:{'s' * (MIN_SECRET - 1)}",
        f"ann:user:{'s' * (MAX_SECRET + 1)}",
        f"ann:user:{SECRET} {SECRET}",
        f"ann:user:{SECRET}é",
    ],
)
def test_an_invalid_token_line_is_refused_by_number_and_not_shown(line: str) -> None:
    with pytest.raises(TokensInvalid) as caught:
        parse_tokens(["# first", line])
    assert caught.value.line == 2
    assert SECRET not in str(caught.value)


NANOS_PER_S = 1_000_000_000
NEW_YEAR_NS = 1_798_761_600 * NANOS_PER_S
"""2027-01-01T00:00:00Z."""


@pytest.mark.parametrize(
    ("until", "last_ns", "shown"),
    [
        ("2026-12-31", NEW_YEAR_NS - 1, "2026-12-31T23:59:59Z"),
        ("2026-12-31T18:00:00Z", NEW_YEAR_NS - 6 * 3600 * NANOS_PER_S, "2026-12-31T18:00:00Z"),
        ("2027-01-01T02:00:00+02:00", NEW_YEAR_NS, "2027-01-01T00:00:00Z"),
        ("2026-12-31T18:30:00-05:30", NEW_YEAR_NS, "2027-01-01T00:00:00Z"),
        ("1969-12-31", -1, "1969-12-31T23:59:59Z"),
        ("0001-01-01T00:00:00Z", -62_135_596_800 * NANOS_PER_S, "0001-01-01T00:00:00Z"),
        ("9999-12-31", 253_402_300_800 * NANOS_PER_S - 1, "9999-12-31T23:59:59Z"),
    ],
)
def test_a_token_is_valid_through_its_last_moment(until: str, last_ns: int, shown: str) -> None:
    (token,) = parse_tokens([f"ann:user:{SECRET}   until={until}  "])
    assert token == Token.of("ann", "user", SECRET, until)
    assert token.until_ns == last_ns
    assert [token.has_expired(last_ns + more) for more in (-1, 0, 1)] == [False, False, True]
    assert (format_time(last_ns), repr(token)) == (shown, f"<Token of ann, user, until {shown}>")


def test_a_token_without_until_does_not_expire() -> None:
    (token,) = parse_tokens([f"ann:user:{SECRET}"])
    assert not token.has_expired(10**30)


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("until=2026-02-30", "that exist"),
        ("until=2026-13-01", "that exist"),
        ("until=0000-01-01", "that exist"),
        ("until=2026-12-31T24:00:00Z", "that exist"),
        ("until=2026-12-31T23:59:60Z", "that exist"),
        ("until=2026-12-31T18:00:00+24:00", "that exist"),
        ("until=9999-12-31T23:59:59-00:01", "years 1 to 9999"),
        ("until=0001-01-01T00:00:00+00:01", "years 1 to 9999"),
        ("until=10000-01-01", "a day such as 2026-12-31"),
        ("until=2026-12-31T18:00:00", "Z for UTC"),
        ("until=2026-12-31T18:00Z", "such as 2026-12-31T18:00:00Z"),
        ("until=2026-12-31T18:00:00.5Z", "such as 2026-12-31T18:00:00Z"),
        ("until=2026-12-31t18:00:00z", "such as 2026-12-31T18:00:00Z"),
        ("until=20261231", "a day such as"),
        ("until=2026-W53-4", "a day such as"),
        ("until=1798761600", "a day such as"),
        ("until=٢٠٢٦-12-31", "a day such as"),
        ("until=", "a day such as"),
        ("until= 2026-12-31", "only until= may follow"),
        ("until", "only until= may follow"),
        ("UNTIL=2026-12-31", "only until= may follow"),
        ("since=2026-12-31", "only until= may follow"),
        ("2026-12-31", "only until= may follow"),
        ("# hers", "only until= may follow"),
        ("until=2026-12-31 rest-of-a-secret", "only until= may follow"),
        ("until=2026-12-31 until=2026-12-31", "more than once"),
    ],
)
def test_an_invalid_until_is_refused_with_the_expected_format(behind: str, expected: str) -> None:
    with pytest.raises(TokensInvalid, match=expected) as caught:
        parse_tokens(["", f"ann:user:{SECRET} {behind}"])
    assert caught.value.line == 2
    assert str(caught.value).endswith("write a token as name:role:secret, or name:role:secret until=2026-12-31")
    assert SECRET not in str(caught.value)
    assert "rest-of" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["ann:user:until=2026-12-31", "ann:user: until=2026-12-31", "ann:user until=2026-12-31"]
)
def test_until_is_not_accepted_as_a_secret(line: str) -> None:
    with pytest.raises(TokensInvalid, match=r"the (secret is missing|secret must|role must)"):
        parse_tokens([line])


def test_a_secret_must_not_contain_until() -> None:
    with pytest.raises(TokensInvalid, match="no spaces"):
        Token.of("ann", "user", f"{SECRET} until=2026-12-31")


ODD = "QXJK%$"
"""Characters of which no message has two side by side."""
odd_words = st.text(ODD, min_size=MIN_SECRET, max_size=40)
ends = st.one_of(
    st.just(""),
    st.text(max_size=30),
    st.datetimes().map(lambda at: f" until={at.isoformat()}"),
    st.dates().map(lambda day: f" until={day}"),
    st.from_regex(r" until=[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9:]{8}([Z+-][0-9:]{0,5})?)?"),
    odd_words.map(lambda word: f" {word}"),
    odd_words.map(lambda word: f" until={word}"),
)


@given(st.text())
@example("ann:user:\ud800" + "s" * 20)
@example("ann:user:" + "s" * 20 + " until=\ud800")
def test_every_line_is_a_token_a_comment_or_refused(line: str) -> None:
    with suppress(TokensInvalid):
        assert len(parse_tokens([line])) <= 1


@given(st.sampled_from(["ann:user", "ann:king", "a b:user", "ann", ""]), odd_words, ends)
def test_text_after_a_secret_is_parsed_or_refused_without_being_shown(who: str, secret: str, end: str) -> None:
    try:
        shown_text = repr(parse_tokens([f"{who}:{secret}{end}"]))
    except TokensInvalid as refused:
        shown_text = str(refused)
    assert re.search(f"[{re.escape(ODD)}]{{2}}", shown_text) is None


def test_the_list_of_token_owners_is_bounded_and_without_duplicates() -> None:
    tokens = [Token.of(f"u{number // 2}", "user", f"{SECRET}{number}") for number in range(50)]
    assert names_of(tokens[:4]) == "u0, u1"
    assert names_of(tokens).endswith("u18, u19 and 5 more")


def test_two_tokens_cannot_have_the_same_secret() -> None:
    with pytest.raises(TokensInvalid, match="the same secret"):
        parse_tokens([f"ann:user:{SECRET}", f"bob:admin:{SECRET}"])


def test_the_longest_and_the_shortest_secret_are_fine() -> None:
    assert Token.of("a", "viewer", "s" * MIN_SECRET)
    assert Token.of("a" * 64, "viewer", "s" * MAX_SECRET)


def test_a_role_includes_the_rights_of_lower_roles() -> None:
    assert [[User("x", role).may(access) for access in ("open", *ROLES)] for role in ROLES] == [
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_no_viewer_can_write_and_only_these_are_open() -> None:
    for path, methods in ACCESS.items():
        for method, access in methods.items():
            assert access in {"user", "admin"} or method in {"GET", "HEAD"}, path
    assert {path for path, methods in ACCESS.items() if "open" in methods.values()} == {
        "/",
        "/assets/{name}",
        "/docs",
        "/health",
        "/ready",
    }


def test_only_graph_ids_can_collide_with_a_route() -> None:
    """Of others there are no such words; where there come to be, they have to be refused as these are."""
    taken = {template: reserved(template) for template in ACCESS if template.endswith("}")}
    assert {template for template, words in taken.items() if words} == {"/api/graphs/{graph_id}"}


def test_a_literal_path_is_found_before_a_pattern() -> None:
    assert Rules().find("/api/graphs/validate") == ("/api/graphs/validate", {"POST": "user"})
    found = Rules().find("/api/graphs/other")
    assert found is not None
    assert found[0] == "/api/graphs/{graph_id}"
