"""`penstock people …`: the data of one person, from the database of a server."""

from __future__ import annotations

import asyncio
import json

from penstock.nodes.memory import space_of_owner
from penstock.storage import open_stores
from tests.cli.conftest import Penstock

DB = ("--db", "sqlite:///kept.db")


def test_command_line_finds_exports_and_erases(penstock: Penstock) -> None:
    async def fill() -> None:
        async with await open_stores(DB[1]) as stores:
            await stores.memories.put(space_of_owner("ann"), "dam", "Hoover\x1b[31m")

    assert penstock("people", "find", "ann", *DB).out == "nothing is stored of ann\n"
    asyncio.run(fill())
    assert penstock("people", "find", "ann", *DB).out.splitlines()[1].split() == ["memories.owner", "1"]
    exported = penstock("people", "export", "ann", *DB)
    assert [json.loads(line) for line in exported.out.splitlines()] == [
        {"memory": {"key": "dam", "value": "Hoover\x1b[31m"}}
    ]
    refused = penstock("people", "erase", "ann", *DB)
    assert (refused.code, "add --yes" in refused.err) == (64, True)
    assert "erased 0 runs and 0 chats" in penstock("people", "erase", "ann", "--yes", *DB).out
    assert json.loads(penstock("people", "find", "ann", "--json", *DB).out) == {}
    actions = [entry["action"] for entry in json.loads(penstock("audit", "--json", *DB).out)]
    assert actions == ["person.erase", "person.export"]
