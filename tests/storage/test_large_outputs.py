"""A long output of a run is stored once, and read back whole everywhere."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.hosting.ports import SHORT_OUTPUT, Conflict, HostedEvent, RunRecord, RunStatus
from penstock.runtime.durable.ports import JournalEntry
from penstock.storage import StoreCorrupt, open_stores
from penstock.storage.sql.events import MAX_EVENTS_PER_LOOKUP
from penstock.testing.contracts.stores import StoreBundle
from tests.hosting.graphs import host_with
from tests.hosting.test_control import TWO_CALLS
from tests.storage.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]

LONG = "The dam holds. " * 100

ODD: list[Any] = [
    LONG,
    "\ud800 half a pair, ü, 🌊, \0 and \x01 12 \x01" * 20,
    "\x012\x01" * 100,
    '", "' * 100,
    "\\" * 300,
    10**300,
    [10**300, [], {}, None, True, 1.5e-7],
    {"output": {"output": LONG, "b": [LONG]}, "a": 1.0, "": LONG},
]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "runs.db")


def written(output: Any) -> list[JournalEntry]:
    """What the nodes of a run gave; one of them its output, and one something that is like it."""
    return [
        JournalEntry("a", "node", {"name": "a", "value": {"output": {"type": "json", "value": output}}}, 7),
        JournalEntry("b", "value", [output, [output, "x"], f"{output}x"]),
        JournalEntry("c", "value", output),
    ]


async def ended(
    stores: StoreBundle, id: str, output: Any, *, in_event: Any = None, status: RunStatus = "completed", before: int = 0
) -> RunRecord:
    """A run that has come to its end, with a journal and `before` events before the last."""
    await stores.runs.add(RunRecord(id, "ann", "g", 1, created_ms=1))
    assert await stores.runs.claim("w", now_ms=1, lease_ms=1, run_id=id) is not None
    await stores.journal.append(id, written(output), epoch=1)
    last = {"output": output if in_event is None else in_event, "cost_usd": 0.5}
    events = [HostedEvent(seq, 1, "text.delta", {"output": "no"}) for seq in range(1, before + 1)]
    await stores.events.append(id, 1, [*events, HostedEvent(before + 1, 1, "run.completed", last)])
    return await stores.runs.update(id, 1, status=status, output=output, ended_ms=2)


@pytest.mark.parametrize("output", ODD, ids=range(len(ODD)))
async def test_a_long_output_is_read_as_it_was_written(url: str, output: Any) -> None:
    async with await open_stores(url) as stores:
        left = await ended(stores, "r", output, before=11)
        assert left.output == output
        assert await stores.runs.get("r") == left
        assert list(await stores.runs.list()) == [left]
        assert list(await stores.journal.load("r")) == written(output)
        assert (await stores.events.read("r", 11))[0].data["output"] == output
        assert await stores.runs.update("r", 1, status="completed", output=output, ended_ms=2) == left
        with pytest.raises(Conflict):
            await stores.runs.update("r", 1, status="completed", output=[output], ended_ms=2)


async def test_many_runs_are_each_read_with_their_own(url: str) -> None:
    async with await open_stores(url) as stores:
        count = MAX_EVENTS_PER_LOOKUP + 3
        for number in range(count):
            await ended(stores, f"r{number:03}", f"{number} {LONG}", before=number % 7)
        found = await stores.runs.list(limit=count)
        assert [one.output for one in found] == [f"{number} {LONG}" for number in reversed(range(count))]


async def test_a_removed_run_leaves_no_rows(url: str) -> None:
    async with await open_stores(url) as stores:
        await ended(stores, "r", LONG)
        assert list(await stores.runs.remove_ended(3)) == ["r"]
        assert (await stores.runs.get("r"), list(await stores.journal.load("r"))) == (None, [])


async def test_a_long_output_is_stored_in_the_event_alone(tmp_path: Path) -> None:
    async with await open_stores(str(tmp_path / "runs.db")) as stores:
        await ended(stores, "r", LONG, before=2)
        assert await kept(tmp_path) == [
            "\x013\x01",
            '{"name":"a","value":{"output":{"type":"json","value":\x013\x01}}}',
            f'[\x013\x01,[\x013\x01,"x"],"{LONG}x"]',
            "\x013\x01",
        ]


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("x" * (SHORT_OUTPUT - 2), {}),
        (LONG, {"in_event": f"{LONG}."}),
        (LONG, {"in_event": [LONG]}),
        (10**300, {"in_event": 10**301}),
        (LONG, {"status": "failed"}),
    ],
)
async def test_outputs_that_are_short_or_differ_from_the_event_or_not_final_are_stored_in_place(
    tmp_path: Path, output: Any, options: dict[str, Any]
) -> None:
    async with await open_stores(str(tmp_path / "runs.db")) as stores:
        await ended(stores, "r", output, **options)
        assert not any("\x01" in text for text in await kept(tmp_path))
        assert list(await stores.journal.load("r")) == written(output)


@pytest.mark.parametrize("change", ["DELETE FROM events", "UPDATE events SET data = '{\"output\":'"])
async def test_an_output_whose_event_is_lost_is_reported_as_corrupt(tmp_path: Path, change: str) -> None:
    async with await open_stores(str(tmp_path / "runs.db")) as stores:
        await ended(stores, "r", LONG)
        await query(tmp_path, change)
        with pytest.raises(StoreCorrupt) as run:
            await stores.runs.get("r")
        with pytest.raises(StoreCorrupt) as entry:
            await stores.journal.load("r")
    assert [(one.value.table, one.value.key) for one in (run, entry)] == [("runs", "r"), ("journal", "r/a")]


async def test_a_hosted_run_with_a_long_output_is_forked_and_replayed(url: str) -> None:
    model = ScriptedModel(lambda request: f"{request.messages[-1].text}! {LONG}")
    async with (
        await open_stores(url) as stores,
        await host_with(stores, services={"models": {"m": model}}) as host,
    ):
        await stores.graphs.save("two", "ann", "two", TWO_CALLS, now_ms=0)
        run = await host.wait((await host.submit(owner="ann", graph_id="two", input="hi")).id)
        assert run.output == f"hi! {LONG}! {LONG}"
        replayed = await host.wait((await host.replay(run.id, owner="ann")).id)
        assert (replayed.status, replayed.output, model.calls) == ("completed", run.output, 2)
        fork = await host.wait((await host.fork(replayed.id, owner="ann", at="out")).id)
        assert (fork.status, fork.output, model.calls) == ("completed", run.output, 2)
        again = await host.wait((await host.fork(fork.id, owner="ann", at="b")).id)
        assert (again.output, model.calls) == (run.output, 3)


async def kept(folder: Path) -> list[str]:
    """What stands in the record and in the journal, as it is in the file."""
    rows = await query(folder, "SELECT output, 0 FROM runs UNION ALL SELECT value, number FROM journal ORDER BY 2")
    return [row[0] for row in rows]


async def query(folder: Path, statement: str) -> list[Any]:
    def ask() -> list[Any]:
        with closing(sqlite3.connect(folder / "runs.db")) as file, file:
            return file.execute(statement).fetchall()

    return await asyncio.to_thread(ask)
