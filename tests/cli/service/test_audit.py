"""`penstock audit`: what people did, from the database of a server."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.hosting.audit import AuditRecord
from penstock.storage import open_stores
from tests.cli.conftest import Penstock

DB = ("--db", "sqlite:///kept.db")
DAY_MS = 86_400_000


def filled(*entries: AuditRecord) -> None:
    async def fill() -> None:
        async with await open_stores(DB[1]) as stores:
            for entry in entries:
                await stores.audit.append(entry)

    asyncio.run(fill())


def test_what_the_command_line_does_is_recorded_and_listed(penstock: Penstock) -> None:
    assert penstock("tokens", "create", "ann", "--role", "admin", *DB).code == 0
    (token,) = json.loads(penstock("tokens", "list", "--json", *DB).out)
    for _ in range(2):
        penstock("tokens", "revoke", token["id"], "--last", *DB)
    revoked, created = json.loads(penstock("audit", "--json", *DB).out)
    assert [created[name] for name in ("action", "target", "owner", "source")] == [
        "token.create",
        token["id"],
        "ann",
        "cli",
    ]
    assert created["details"] == {"role": "admin", "kind": "user"}
    assert (revoked["action"], "(command line)" in revoked["actor"]) == ("token.revoke", True)
    assert "token.revoke" in penstock("audit", *DB).out


def test_entries_are_filtered_and_shown_on_one_line_each(penstock: Penstock) -> None:
    filled(
        AuditRecord("a1", 1, "ann", "run.cancel", "r1", details={"reason": "too\ndear \x1b[31m"}),
        AuditRecord("a2", DAY_MS, "bob\x1b[2K", "token.create", "t1", owner="ann"),
        AuditRecord("a3", 2 * DAY_MS, "bob", "run.grant", "r1"),
    )

    def shown(*options: str) -> list[str]:
        return [entry["id"] for entry in json.loads(penstock("audit", "--json", *options, *DB).out)]

    assert shown() == ["a3", "a2", "a1"]
    assert shown("--actor", "ann") == ["a2", "a1"]
    assert shown("--action", "run", "--limit", "1") == ["a3"]
    assert shown("--target", "r1", "--since", "1970-01-02") == ["a3"]
    assert shown("--since", "1970-01-02T00:00:00Z") == ["a3", "a2"]
    lines = penstock("audit", *DB).out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() for line in lines)
    assert penstock("audit", "--actor", "carl", *DB).out == "no matching entries\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--since", "yesterday"), "--since must be a day such as 2027-12-31"),
        (("--limit", "0"), "it must be 1 or more"),
        (("--db", "memory:"), "audit entries in memory: are lost"),
    ],
)
def test_bad_input_is_refused(penstock: Penstock, arguments: tuple[str, ...], says: str) -> None:
    ended = penstock("audit", *(() if "--db" in arguments else DB), *arguments)
    assert (ended.code, ended.out, says in ended.err) == (64, "", True), ended.err
