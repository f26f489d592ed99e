"""INV 18 with whole hosts: four processes that work on the runs of one database, and a node that records where it ran.

Each run is worked on once: its node has written one line, regardless of the number of hosts and of the submitter.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.hosting.host import HostSettings, RunHost
from penstock.hosting.ports import RunRecord
from penstock.storage import open_stores
from tests.soak import scaled
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

pytestmark = pytest.mark.reliability

HOSTS = 4
RUNS = scaled(60, soak=1_000)
ROOT = Path(__file__).parents[2]
QUEUE = HostSettings(max_queued=RUNS, max_queued_per_owner=RUNS)
GRAPH = {"nodes": [{"id": "n", "type": "note", "position": {"x": 0, "y": 0}, "data": {}}], "edges": []}

HOST = """
import asyncio, os, sys
from penstock.hosting.host import HostSettings, RunHost
from penstock.kernel.executor import ExecutionResult
from penstock.kernel.executor import DataValue
from penstock.storage import open_stores

url, notes, worker = sys.argv[1:]

class Note:
    async def execute(self, data, inputs, context):
        file = os.open(notes, os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{context.run_id} {worker}\\n".encode())
        os.close(file)
        return ExecutionResult({"output": DataValue("text", worker)})

async def work():
    settings = HostSettings(tick_s=0.05, max_running=8, max_running_per_owner=8)
    async with await open_stores(url) as stores:
        print("ready", flush=True)
        sys.stdin.readline()
        async with RunHost(stores, executors={"note": Note()}, settings=settings, worker=worker):
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(work())
"""


def test_four_hosts_on_a_sqlite_file_do_each_run_once(tmp_path: Path) -> None:
    _each_run_is_done_once(f"sqlite:///{tmp_path / 'runs.db'}", tmp_path / "notes")


def test_four_hosts_on_a_postgresql_database_do_each_run_once(
    tmp_path: Path, postgres_schemas: Callable[[], str]
) -> None:
    _each_run_is_done_once(postgres_schemas(), tmp_path / "notes")


def _each_run_is_done_once(url: str, notes: Path) -> None:
    notes.touch()
    asyncio.run(_submitted(url))
    hosts = [_host(url, notes, f"host {number}") for number in range(HOSTS)]
    try:
        for host in hosts:
            assert host.stdout is not None
            assert host.stdout.readline() == "ready\n"
        for host in hosts:
            _send_line(host)
        left = asyncio.run(_ended(url))
        for host in hosts:
            _send_line(host)
            assert host.wait() == 0
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
    lines = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    assert Counter(run_id for run_id, _ in lines) == Counter(_ids())
    assert {(run.id, run.output) for run in left} == {(run_id, worker) for run_id, worker in lines}
    assert {(run.status, run.epoch) for run in left} == {("completed", 1)}
    assert len({worker for _, worker in lines}) > 1, "one host did it all: nothing was shown"


def _ids() -> list[str]:
    return [f"r{number}" for number in range(RUNS)]


def _host(url: str, notes: Path, worker: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-c", HOST, url, str(notes), worker]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def _send_line(host: subprocess.Popen[str]) -> None:
    assert host.stdin is not None
    host.stdin.write("\n")
    host.stdin.flush()


async def _submitted(url: str) -> None:
    """The runs wait, for the host that takes them on does not work."""
    async with await open_stores(url) as stores:
        await stores.graphs.save("g", "ann", "g", GRAPH, now_ms=0)
        host = RunHost(stores, settings=QUEUE)
        for number, run_id in enumerate(_ids()):
            await host.submit(owner=f"owner {number % 3}", graph_id="g", run_id=run_id)


async def _ended(url: str) -> list[RunRecord]:
    async with await open_stores(url) as stores:
        host = RunHost(stores, settings=QUEUE)
        return [await host.wait(run_id) for run_id in _ids()]
