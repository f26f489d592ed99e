"""Users, tokens and the table of routes."""

from __future__ import annotations

import pytest

from penstock.server.auth import (
    ACCESS,
    MAX_SECRET,
    MIN_SECRET,
    ROLES,
    Rules,
    Token,
    TokensInvalid,
    User,
    parse_tokens,
    user_of,
)

SECRET = "s" * MIN_SECRET


def test_tokens_are_lines_of_name_role_and_secret() -> None:
    tokens = parse_tokens(["# who", "", f"ann:user:{SECRET}a", f"  root:admin:{SECRET}:with:colons  "])
    assert [token.user for token in tokens] == [User("ann", "user"), User("root", "admin")]
    assert user_of(tokens, f"Bearer {SECRET}:with:colons".encode()) == User("root", "admin")
    assert user_of(tokens, f"bearer {SECRET}a".encode()) == User("ann", "user")


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
def test_a_line_that_is_no_token_is_refused_by_its_number_and_not_shown(line: str) -> None:
    with pytest.raises(TokensInvalid) as caught:
        parse_tokens(["# first", line])
    assert caught.value.line == 2
    assert SECRET not in str(caught.value)


def test_a_secret_is_of_one_token_alone() -> None:
    with pytest.raises(TokensInvalid, match="of another token"):
        parse_tokens([f"ann:user:{SECRET}", f"bob:admin:{SECRET}"])


def test_the_longest_and_the_shortest_secret_are_fine() -> None:
    assert Token.of("a", "viewer", "s" * MIN_SECRET)
    assert Token.of("a" * 64, "viewer", "s" * MAX_SECRET)


def test_a_role_may_what_lesser_ones_may() -> None:
    assert [[User("x", role).may(access) for access in ("open", *ROLES)] for role in ROLES] == [
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_no_viewer_can_write_and_only_these_are_open() -> None:
    for path, methods in ACCESS.items():
        for method, access in methods.items():
            assert access in {"user", "admin"} or method == "GET", path
    assert {path for path, methods in ACCESS.items() if "open" in methods.values()} == {"/", "/health", "/ready"}


def test_a_literal_path_is_found_before_a_pattern() -> None:
    assert Rules().find("/api/graphs/validate") == ("/api/graphs/validate", {"POST": "user"})
    found = Rules().find("/api/graphs/other")
    assert found is not None
    assert found[0] == "/api/graphs/{graph_id}"
