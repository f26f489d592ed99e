"""One run, one worker: four workers, each a process of its own, and a thousand runs, each of which is claimed once.

Every worker claims runs until there are none left, and completes them. Then each run must have been claimed once, by
the worker that reports it and by no other.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.hosting.ports import RunRecord
from penstock.storage import open_stores
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

pytestmark = [pytest.mark.reliability]

WORKERS = 4
RUNS = 1_000

WORKER = """
import asyncio, json, sys
from penstock.storage import open_stores

async def work(url, worker):
    got = []
    async with await open_stores(url) as stores:
        print("ready", flush=True)
        sys.stdin.readline()
        while (run := await stores.runs.claim(worker, now_ms=1_000, lease_ms=1_000)) is not None:
            got.append(run.id)
            await stores.runs.update(run.id, run.epoch, status="completed", ended_ms=1_001, output=worker)
    print(json.dumps(got), flush=True)

asyncio.run(work(*sys.argv[1:]))
"""


def test_four_processes_claim_each_run_of_a_sqlite_file_once(tmp_path: Path) -> None:
    _each_run_is_claimed_once(f"sqlite:///{tmp_path / 'runs.db'}")


def test_four_processes_claim_each_run_of_a_postgresql_database_once(postgres_schemas: Callable[[], str]) -> None:
    _each_run_is_claimed_once(postgres_schemas())


def _each_run_is_claimed_once(url: str) -> None:
    asyncio.run(_queue(url))
    got = _work(url)
    assert Counter(id for ids in got.values() for id in ids) == Counter(_ids())
    for run in asyncio.run(_ended(url)):
        assert (run.status, run.epoch, run.id in got[run.output]) == ("completed", 1, True)
    assert sum(bool(ids) for ids in got.values()) > 1, "one worker did it all: nothing was shown"


def _ids() -> list[str]:
    return [f"run {number}" for number in range(RUNS)]


async def _queue(url: str) -> None:
    async with await open_stores(url) as stores:
        added = (stores.runs.add(RunRecord(id, "ann", "g", 1, created_ms=n)) for n, id in enumerate(_ids()))
        await asyncio.gather(*added)


async def _ended(url: str) -> list[RunRecord]:
    async with await open_stores(url) as stores:
        return [*await stores.runs.list(limit=2 * RUNS)]


def _work(url: str) -> dict[str, list[str]]:
    """The runs that each worker reports; they start together."""
    workers = {
        f"worker {number}": subprocess.Popen(
            [sys.executable, "-c", WORKER, url, f"worker {number}"], stdin=-1, stdout=-1, text=True
        )
        for number in range(WORKERS)
    }
    try:
        for process in workers.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in workers.values():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return {worker: json.loads(process.communicate(timeout=120)[0]) for worker, process in workers.items()}
    finally:
        for process in workers.values():
            process.kill()
            process.communicate()
