"""`penstock tokens …`: tokens in a server's database, from its command line."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS
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


def leave_bill(key_id: str) -> str:
    """Leave the bill of a call of the key unresolved; its id."""

    async def act() -> str:
        async with await open_stores(DB[1]) as stores:
            run = f"gateway:{key_id}:day:2026-11-19"
            stores.ledger.open_account(run, NO_LIMITS)
            stores.ledger.hold(f"{run}/0123456789ab-c0de/n000002", run, Amounts(50_000_000, 10, 90, 1))
            stores.ledger.leave_unresolved(f"{run}/0123456789ab-c0de/n000002")
            return "day:2026-11-19/0123456789ab-c0de/n000002"

    return asyncio.run(act())


def test_bills_of_gateway_keys_are_listed_and_resolved(penstock: Penstock) -> None:
    assert penstock("tokens", "create", "ann", "--gateway", *DB).code == 0
    assert penstock("tokens", "bills", *DB).out == "no gateway key has unresolved bills: nothing to resolve\n"
    id = json.loads(penstock("tokens", "list", "--json", *DB).out)[0]["id"]
    call = leave_bill(id)
    (bill,) = json.loads(penstock("tokens", "bills", "--json", *DB).out)
    assert (bill["key"], bill["name"], bill["run"], bill["held"], bill["call"]) == (id, "ann", "day", "$0.05", call)
    assert call in penstock("tokens", "bills", id, *DB).out
    ended = penstock("tokens", "bills", id, "resolve", call, "--cost", "0.02", *DB)
    assert ended.out == f"{id}: bill of call {call} resolved at $0.02; unresolved bills left: 0\n"
    assert penstock("tokens", "bills", id, *DB).out == f"{id} has no unresolved bills: nothing to resolve\n"
    again = penstock("tokens", "bills", id, "release", call, *DB)
    assert (again.code, "has no unresolved bill of call" in again.err) == (2, True)


def test_runs_of_a_gateway_key_are_listed(penstock: Penstock) -> None:
    assert penstock("tokens", "create", "ann", "--gateway", *DB).code == 0
    id = json.loads(penstock("tokens", "list", "--json", *DB).out)[0]["id"]
    assert penstock("tokens", "runs", id, *DB).out == f"{id} has no runs today\n"
    leave_bill(id)
    (run,) = json.loads(penstock("tokens", "runs", id, "--day", "2026-11-19", "--json", *DB).out)
    assert run == {"run": "day", "calls": "1", "tokens in": "0", "tokens out": "0", "spent": "$0.00", "held": "$0.00",
        "unresolved": "$0.05"}  # fmt: skip
    assert "$0.05" in penstock("tokens", "runs", id, "--day", "2026-11-19", *DB).out
    assert penstock("tokens", "runs", id, "--day", "2026-11-18", *DB).out == f"{id} has no runs on 2026-11-18\n"
    wrong = penstock("tokens", "runs", id, "--day", "soon", *DB)
    assert (wrong.code, "--day must be a day such as 2027-12-31, not 'soon'" in wrong.err) == (64, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("0123456789ab",), 2, "there is no token '0123456789ab'"),
        (("USER",), 64, "is not a gateway key; list the bills of runs with: penstock runs bills"),
        (("USER", "release"), 64, "name the action and the call"),
        (("USER", "resolve", "CALL"), 64, "resolve needs --cost"),
    ],
)
def test_bills_that_are_not_there_are_refused(
    penstock: Penstock, arguments: tuple[str, ...], code: int, says: str
) -> None:
    assert penstock("tokens", "create", "ann", *DB).code == 0
    id = json.loads(penstock("tokens", "list", "--json", *DB).out)[0]["id"]
    ended = penstock("tokens", "bills", *(id if one == "USER" else one for one in arguments), *DB)
    assert (ended.code, ended.out, says in ended.err) == (code, "", True), ended.err
