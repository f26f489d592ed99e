"""All stores by one URL: opened together, closed together, and errors on opening."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.chat.conversation import ChatMessage
from penstock.chat.ports import ChatRecord
from penstock.containment.ledger import Amounts
from penstock.containment.limits import Budget
from penstock.hosting.ports import ApprovalRecord, CancelRequest, RunRecord, StoreUnavailable
from penstock.storage import open_stores
from penstock.testing import census


async def test_the_ledger_of_a_sqlite_database_is_in_a_file_beside_it(tmp_path: Path) -> None:
    async with await open_stores(str(tmp_path / "p.db")) as stores:
        await asyncio.to_thread(stores.ledger.open_account, "a", Budget(max_cost_dollars=1).limits())
        assert await asyncio.to_thread(stores.ledger.hold, "k", "a", Amounts(cost_nanos=5)) is None
    async with await open_stores(str(tmp_path / "p.db")) as stores:
        assert (await asyncio.to_thread(stores.ledger.balance, "a")).held_usd > 0
    found = await asyncio.to_thread(lambda: sorted(path.name for path in tmp_path.iterdir()))
    assert found == ["p.db", "p.db.ledger"]


async def test_stores_can_be_closed_twice_and_refuse_operations_afterwards(tmp_path: Path) -> None:
    stores = await open_stores(str(tmp_path / "p.db"))
    await stores.close()
    await stores.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await stores.runs.add(RunRecord("r", "ann", "g", 1))


async def test_a_ledger_that_cannot_be_opened_closes_everything(tmp_path: Path) -> None:
    await asyncio.to_thread((tmp_path / "p.db.ledger").write_bytes, b"no database, but as long as one is" * 100)
    async with census():
        with pytest.raises(StoreUnavailable, match=r"p\.db\.ledger"):
            await open_stores(str(tmp_path / "p.db"))
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_ledger_that_is_gone_is_not_made_again_once_runs_were_worked_on(tmp_path: Path) -> None:
    path, ledger = tmp_path / "p.db", tmp_path / "p.db.ledger"
    async with await open_stores(str(path)) as stores:
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await asyncio.to_thread(ledger.unlink)
    async with await open_stores(str(path)) as stores:  # a run that only waits has spent nothing
        await stores.runs.claim("w", now_ms=1, lease_ms=1)
    await asyncio.to_thread(ledger.unlink)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"p\.db\.ledger' is gone.*put it back from a copy"):
            await open_stores(str(path))
    assert not await asyncio.to_thread(ledger.exists)
    await asyncio.to_thread(ledger.touch)  # an explicit new start without a copy
    async with await open_stores(str(path)) as stores:
        assert (await stores.runs.get("r")) is not None


@pytest.mark.parametrize("turns", range(0, 40, 3))
async def test_a_cancelled_open_leaves_nothing_open(tmp_path: Path, turns: int) -> None:
    async with census():
        opening = asyncio.ensure_future(open_stores(str(tmp_path / "p.db")))
        for _ in range(turns):
            await asyncio.to_thread(int)  # the threads of the stores come a little further meanwhile
        opening.cancel()
        await asyncio.wait((opening,))
        if not opening.cancelled():
            await opening.result().close()
        await asyncio.get_running_loop().shutdown_default_executor()


async def test_lookups_of_more_ids_than_fit_into_one_statement_work(tmp_path: Path) -> None:
    many = [f"r{number}" for number in range(40_000)]
    async with await open_stores(str(tmp_path / "p.db")) as stores:
        await stores.runs.add(RunRecord("r39999", "ann", "g", 1))
        await stores.runs.claim("w", now_ms=1, lease_ms=1)
        await stores.cancels.put(CancelRequest("r39999", "enough", "ann", 1, 9))
        await stores.approvals.ask(ApprovalRecord("r39999", "r39999", "ann", "k", "n", "?"), epoch=1)
        await stores.approvals.withdraw("r39999", 1, now_ms=1)
        assert await stores.runs.renew("w", many, now_ms=1, lease_ms=5) == {"r39999"}
        assert [*await stores.cancels.find(dict.fromkeys(many, "ann"), now_ms=1)] == ["r39999"]
        assert [*await stores.approvals.answered(many)] == ["r39999"]
        await stores.chats.create(ChatRecord("c", "ann", "", "g", 1, 1))
        messages = [
            ChatMessage(id, many[number - 1] if number % 100 else None, "user", "", 1)
            for number, id in enumerate(many[:12_000])
        ]
        for _ in range(2):
            await stores.chats.add_messages("c", messages, now_ms=1)
        messages, in_view = await stores.chats.messages("c")
        assert (len(messages), len(in_view)) == (12_000, 12_000 - 119)


WRITER = """
import asyncio, sys
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import open_stores

async def write():
    stores = await open_stores(sys.argv[1])
    for number in range(100_000):
        await stores.journal.append("r", [JournalEntry(str(number), "node", number)])
        print(number, flush=True)

asyncio.run(write())
"""


def test_acknowledged_writes_survive_a_killed_process(tmp_path: Path) -> None:
    path = str(tmp_path / "p.db")
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=-1, text=True) as process:
        assert process.stdout is not None
        answered = [int(process.stdout.readline()) for _ in range(200)]
        process.kill()
        answered += [int(line) for line in process.stdout.read().splitlines() if line]

    async def kept() -> list[int]:
        async with await open_stores(path) as stores:
            return [entry.value for entry in await stores.journal.load("r")]

    written = asyncio.run(kept())
    assert written[: len(answered)] == answered
    assert len(written) <= len(answered) + 1, "one write was in progress"


async def test_stores_in_memory_share_nothing() -> None:
    async with await open_stores("memory:") as stores:
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
        assert stores.url == "memory:"
    async with await open_stores("memory:") as stores:
        assert await stores.runs.get("r") is None
