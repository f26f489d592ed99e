"""`penstock tokens …`: tokens in a server's database, from its command line."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.server.tokens import StoredTokens
from penstock.storage import open_stores
from tests.cli.conftest import Penstock

DB = ("--db", "sqlite:///kept.db")


def is_valid(secret: str) -> bool:
    async def find() -> bool:
        async with await open_stores(DB[1]) as stores:
            found = await StoredTokens(stores.tokens).find(secret.encode())
            return found is not None and not found.is_revoked

    return asyncio.run(find())


def test_a_token_is_created_listed_and_revoked(penstock: Penstock) -> None:
    made = penstock("tokens", "create", "ann", "--role", "admin", "--note", "laptop", *DB)
    secret = made.out.strip()
    assert (made.code, made.out, "ann, admin" in made.err) == (0, f"{secret}\n", True)
    assert is_valid(secret)
    listed = json.loads(penstock("tokens", "list", "--json", *DB).out)
    assert [(token["name"], token["role"], token["state"], token["note"]) for token in listed] == [
        ("ann", "admin", "active", "laptop")
    ]
    id = listed[0]["id"]
    last = penstock("tokens", "revoke", id, *DB)
    assert (last.code, "last active one of an admin" in last.err) == (2, True)
    assert penstock("tokens", "revoke", id, "--last", *DB).out == f"{id} of ann: revoked\n"
    assert penstock("tokens", "revoke", id, *DB).out == f"{id} of ann: was revoked before\n"
    assert not is_valid(secret)
    shown = penstock("tokens", "list", *DB).out
    assert ("revoked" in shown, secret in shown) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("create", "ann", "--role", "owner"), 64, "role must be one of viewer, user, admin"),
        (("create", "a b"), 64, "name must be 1 to 64"),
        (("create", "bob", "--expires", "2020-01-01"), 64, "a time that is not past"),
        (("create", "bob", "--expires", "soon"), 64, "a day such as 2026-12-31"),
        (("create", "ann"), 2, "ann has the active token"),
        (("revoke", "0123456789ab"), 2, "there is no token '0123456789ab'"),
    ],
)
def test_bad_input_is_refused(penstock: Penstock, arguments: tuple[str, ...], code: int, says: str) -> None:
    assert penstock("tokens", "create", "ann", *DB).code == 0
    ended = penstock("tokens", *arguments, *DB)
    assert (ended.code, ended.out, says in ended.err) == (code, "", True), ended.err


def test_a_database_in_memory_or_none_is_refused(penstock: Penstock) -> None:
    assert "lost with the process" in penstock("tokens", "list", "--db", "memory:").err
    assert "--db" in penstock("tokens", "list").err
    assert "no tokens in this database" in penstock("tokens", "list", *DB).out
