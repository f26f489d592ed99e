"""The facts of runs that an older version kept only in their events are filled in by the upgrade."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.hosting.ports import RunRecord
from penstock.storage import migrate, migrations, newest_version, open_stores
from penstock.storage.stores import ledger_path, sqlite_path
from tests.storage.postgres import postgres_schemas, postgres_server
from tests.storage.test_migrations import _execute, url

__all__ = ["postgres_schemas", "postgres_server", "url"]

VERSION = 6
"""The version before the facts became columns."""
QUEUED, STARTED = ("run.queued", 5, {}), ("run.started", 1_000, {"epoch": 1})
IDLE, BUSY = ("run.waiting", 1_700, {"idle": True}), ("run.waiting", 1_700, {})
HALTED: tuple[Any, ...] = ("run.halted", 3_000, {"whose": "run", "stop_reason": "timeout", "message": "late"})


def resumed(at_ms: int) -> tuple[str, int, dict[str, Any]]:
    return "run.resumed", at_ms, {"epoch": 2, "lost": 4, "worked_ms": 9}


CASES: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "nothing": ("running", [], {}),
    "first-worker": ("running", [QUEUED, STARTED, ("x", 1_700, {})], {}),
    "second-worker": (
        "running",
        [QUEUED, STARTED, ("x", 1_700, {}), resumed(8_000), ("x", 8_020, {})],
        {"worked_ms": 700, "crash_count": 1, "resumed_ms": 8_000},
    ),
    "no-event-of-the-first": ("running", [QUEUED, resumed(8_000)], {"crash_count": 1, "resumed_ms": 8_000}),
    "third-worker": (
        "waiting",
        [QUEUED, STARTED, BUSY, resumed(8_000), ("x", 8_020, {}), resumed(9_000)],
        {"worked_ms": 720, "crash_count": 2, "resumed_ms": 9_000},
    ),
    "idle": (
        "waiting",
        [QUEUED, STARTED, IDLE, resumed(8_000)],
        {"worked_ms": 700, "crash_count": 0, "resumed_ms": 8_000},
    ),
    "requeued": (
        "running",
        [QUEUED, STARTED, ("x", 1_500, {}), resumed(2_000), ("run.parked", 3_000, {}), QUEUED, resumed(9_000)],
        {"worked_ms": 1_500, "crash_count": 0, "resumed_ms": 9_000},
    ),
    "halted": ("halted", [QUEUED, STARTED, HALTED], {"worked_ms": 2_000, "halt": HALTED[2]}),
    "halted-by-no-limit": ("halted", [STARTED, ("run.halted", 3_000, {"message": "?"})], {"worked_ms": 2_000}),
    "granted": ("queued", [QUEUED, STARTED, HALTED, ("run.granted", 90_000, {})], {"worked_ms": 2_000}),
    "cancelled-in-between": (
        "queued",
        [STARTED, ("run.parked", 3_000, {}), QUEUED, ("run.cancelled", 9_500, {}), QUEUED],
        {"worked_ms": 2_000},
    ),
    "clock-set-back": ("halted", [STARTED, ("run.halted", 400, {"message": "?"})], {}),
}


def test_runs_of_version_6_have_their_crashes_their_time_and_their_halt(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:VERSION])
        assert asyncio.run(migrate(url)) == VERSION
    columns = "id, owner, graph_id, graph_version, input, limits, origin, status, created_ms, lease_until_ms, epoch"
    figures = "output, cost_nanos, tokens_in, tokens_out, unresolved_nanos"
    for id, (status, events, _) in CASES.items():
        values = f"'{id}', 'ann', 'g', 1, 'null', '{{}}', '{{}}', '{status}', 0, 0, 2, 'null', 0, 0, 0, 0"
        _execute(url, f"INSERT INTO runs ({columns}, {figures}) VALUES ({values})")
        for seq, (type, at_ms, data) in enumerate(events, 1):
            text = json.dumps(data, separators=(",", ":"))
            _execute(url, f"INSERT INTO events VALUES ('{id}', {seq}, {at_ms}, '{type}', '{text}')")
    assert asyncio.run(migrate(url)) == newest_version() > VERSION
    if url.startswith("sqlite"):
        ledger_path(sqlite_path(url)).touch()  # these runs have spent nothing

    async def runs() -> dict[str, RunRecord]:
        async with await open_stores(url) as stores:
            return {run.id: run for run in await stores.runs.list()}

    found = asyncio.run(runs())
    for id, (_, _, facts) in CASES.items():
        run = found[id]
        wanted = {"worked_ms": 0, "crash_count": 0, "resumed_ms": None, "halt": None, **facts}
        assert {name: getattr(run, name) for name in wanted} == wanted, id
