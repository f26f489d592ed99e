"""Backups of a database and its ledger, made while a host works on them."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.agents.scripted import ScriptedModel
from penstock.containment.ledger import Amounts
from penstock.containment.limits import NO_LIMITS
from penstock.errors import InvalidValue
from penstock.hosting.host import HostSettings
from penstock.hosting.ports import RunRecord, StoreUnavailable
from penstock.runtime.billing.usage import Usage
from penstock.storage import backup, migrations
from penstock.storage.stores import newest_version, open_stores, schema_version
from tests.hosting.graphs import Gate, graph, host_with
from tests.hosting.test_approvals import pending_approval
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

SETTINGS = HostSettings(tick_s=0.05, lease_s=1, drain_s=0, daily_usd="3")
AGENT = {"model": "m", "instructions": "Say it."}
PAID = graph(
    ("in", "input", {}),
    ("a", "agent", AGENT),
    ("ask", "approval", {"question": "Go?"}),
    ("b", "agent", AGENT),
    ("out", "output", {}),
    edges="in>a a>ask ask.approved>b b>out",
)


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Returns the URL of an empty database at each call."""
    if request.param == "postgres":
        schemas: Callable[[], str] = request.getfixturevalue("postgres_schemas")
        return schemas
    numbers = iter(range(100))
    return lambda: str(tmp_path / f"{next(numbers)}.db")


def model() -> ScriptedModel:
    usage = Usage.of(cost_usd="0.4", input_tokens=10, output_tokens=5)
    return ScriptedModel(lambda request: f"{request.messages[-1].text}!", usage=usage)


async def spent(stores: Any, account: str) -> int:
    return int((await asyncio.to_thread(stores.ledger.balance, account)).spent_nanos)


@pytest.fixture
def two_urls(new_url: Callable[[], str]) -> tuple[str, str]:
    return new_url(), new_url()


@pytest.mark.requirement("X-19")
async def test_a_restored_run_that_waited_continues_with_the_right_balance(
    two_urls: tuple[str, str], tmp_path: Path
) -> None:
    first_url, second_url = two_urls
    file, gate = tmp_path / "backup", Gate()
    async with await open_stores(first_url) as stores:
        await stores.graphs.save("paid", "ann", "paid", PAID, now_ms=0)
        services = {"models": {"m": model()}}
        async with await host_with(stores, settings=SETTINGS, services=services, gate=gate) as host:
            run = await host.submit(owner="ann", graph_id="paid", input="hi", limits={"max_cost_usd": "1"})
            running = await host.submit(owner="ann", graph_id="gate", input="in flight")
            approval = await pending_approval(host, run.id)
            await gate.entered.wait()
            await asyncio.to_thread(backup.back_up, first_url, file)
            gate.opened.set()
            await host.wait(running.id)
    restored = await asyncio.to_thread(backup.restore, second_url, file)
    assert restored.version == newest_version() == await schema_version(second_url)
    second = model()
    async with await open_stores(second_url) as stores:
        assert not await stores.check_rows()
        assert await spent(stores, f"run:{run.id}") == 400_000_000
        async with await host_with(stores, settings=SETTINGS, services={"models": {"m": second}}, gate=gate) as host:
            await host.answer(approval.id, "approved", by="bob")
            left = await host.wait(run.id)
            again = await host.wait(running.id)
        assert await spent(stores, f"run:{run.id}") == 800_000_000
        assert [await spent(stores, name) for name in await asyncio.to_thread(days, stores)] == [800_000_000]
    assert (left.status, left.output, left.cost_nanos) == ("completed", "hi!!", 800_000_000)
    assert (again.status, again.output) == ("completed", "in flight")
    assert second.calls == 1  # the first call is in the journal, and not paid for again


def days(stores: Any) -> list[str]:
    return [name for name in stores.ledger.aged(0) if name.startswith("all:")]


async def test_numbers_continue_where_the_backup_ends(two_urls: tuple[str, str], tmp_path: Path) -> None:
    async with await open_stores(two_urls[0]) as stores, await host_with(stores, settings=SETTINGS) as host:
        before = await host.wait((await host.submit(owner="ann", graph_id="echo", input=1)).id)
        await asyncio.to_thread(backup.back_up, two_urls[0], tmp_path / "backup")
    await asyncio.to_thread(backup.restore, two_urls[1], tmp_path / "backup")
    async with await open_stores(two_urls[1]) as stores, await host_with(stores, settings=SETTINGS) as host:
        assert (await host.get(before.id)) == before
        after = await host.wait((await host.submit(owner="ann", graph_id="echo", input=2)).id)
    assert after.output == 2


async def test_a_backup_of_an_older_version_is_restored_as_it_was(
    two_urls: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:-1])
        async with await open_stores(two_urls[0]) as stores:  # its newest tables and columns cannot be used
            await stores.graphs.save("g", "ann", "g", {}, now_ms=0)
    await asyncio.to_thread(backup.back_up, two_urls[0], tmp_path / "backup")
    restored = await asyncio.to_thread(backup.restore, two_urls[1], tmp_path / "backup")
    assert restored.version == newest_version() - 1 == await schema_version(two_urls[1])


async def test_a_restore_overwrites_nothing(two_urls: tuple[str, str], tmp_path: Path) -> None:
    for url in two_urls:
        async with await open_stores(url) as stores:
            await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await asyncio.to_thread(backup.back_up, two_urls[0], tmp_path / "backup")
    with pytest.raises(StoreUnavailable, match="never overwrites a database"):
        await asyncio.to_thread(backup.restore, two_urls[1], tmp_path / "backup")


async def test_a_restore_that_fails_leaves_nothing_behind(two_urls: tuple[str, str], tmp_path: Path) -> None:
    async with await open_stores(two_urls[0]) as stores:
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
    manifest = await asyncio.to_thread(backup.back_up, two_urls[0], tmp_path / "whole")
    last = [*manifest.tables, "database"][-1 if manifest.kind == "sqlite" else -2]
    with zipfile.ZipFile(tmp_path / "whole") as whole, zipfile.ZipFile(tmp_path / "torn", "w") as torn:
        for name in whole.namelist():
            torn.writestr(name, b"torn" if name.startswith(last) else whole.read(name))
    with pytest.raises(StoreUnavailable):
        await asyncio.to_thread(backup.restore, two_urls[1], tmp_path / "torn")
    assert await schema_version(two_urls[1]) == 0
    await asyncio.to_thread(backup.restore, two_urls[1], tmp_path / "whole")


# SQLite, which has two files.


def test_both_files_are_copied_as_of_one_instant(tmp_path: Path) -> None:
    """A writer adds to the ledger, then to the database: the ledger is never behind, and never two ahead."""
    path, ended = tmp_path / "runs.db", threading.Event()

    async def write() -> None:
        async with await open_stores(str(path)) as stores:
            stores.ledger.open_account("a", NO_LIMITS)
            number = 0
            while not ended.is_set():
                stores.ledger.charge(f"k{number}", "a", Amounts(cost_nanos=1))
                await stores.runs.add(RunRecord(f"r{number}", "ann", "g", 1))
                number += 1
                begun.set()

    begun = threading.Event()
    writer = threading.Thread(target=asyncio.run, args=(write(),))
    writer.start()
    try:
        begun.wait()
        counts = []
        for number in range(30):
            backup.back_up(str(path), tmp_path / f"{number}.backup")
            backup.restore(str(tmp_path / f"{number}.db"), tmp_path / f"{number}.backup")
            runs = count(tmp_path / f"{number}.db", "SELECT count(*) FROM runs")
            spent = count(tmp_path / f"{number}.db.ledger", "SELECT count(*) FROM holds")
            assert runs <= spent <= runs + 1
            counts.append(runs)
    finally:
        ended.set()
        writer.join()
    assert counts == sorted(counts)
    assert counts[-1] > counts[0], "nothing was written meanwhile"


def count(path: Path, statement: str) -> int:
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute(statement).fetchone()
        return int(number)


async def test_a_backup_is_private_and_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "runs.db"
    async with await open_stores(str(path)) as stores:
        await stores.runs.add(RunRecord("r", "ann", "g", 1))
    await asyncio.to_thread(backup.back_up, str(path), tmp_path / "backup")
    assert os.stat(tmp_path / "backup").st_mode & 0o777 == 0o600
    with pytest.raises(StoreUnavailable, match="never overwrites"):
        await asyncio.to_thread(backup.back_up, str(path), tmp_path / "backup")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup.os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left on device"):
        await asyncio.to_thread(backup.back_up, str(path), tmp_path / "second")
    assert sorted(os.listdir(tmp_path)) == ["backup", "runs.db", "runs.db.ledger"]


async def test_what_is_no_backup_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "zip", "w") as archive:
        archive.writestr("other.txt", "other")
    with zipfile.ZipFile(tmp_path / "later", "w") as archive:
        archive.writestr("manifest.json", '{"format": 9}')
    for name, message in (
        ("text", "is no backup, or is damaged"),
        ("zip", "is no backup of Penstock"),
        ("later", "use a newer Penstock"),
        ("missing", "No such file or directory"),
    ):
        with pytest.raises(StoreUnavailable, match=message):
            await asyncio.to_thread(backup.restore, str(tmp_path / "new.db"), tmp_path / name)
    assert not (tmp_path / "new.db").exists()


async def test_the_kinds_of_databases_must_match(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with await open_stores(str(path)):
        pass
    await asyncio.to_thread(backup.back_up, str(path), tmp_path / "backup")
    with pytest.raises(StoreUnavailable, match="name a sqlite database"):
        await asyncio.to_thread(backup.restore, "postgresql://127.0.0.1:1/x", tmp_path / "backup")
    with pytest.raises(InvalidValue, match="end with their process"):
        await asyncio.to_thread(backup.back_up, "memory:", tmp_path / "memory")
    with pytest.raises(StoreUnavailable, match="there is no"):
        await asyncio.to_thread(backup.back_up, str(tmp_path / "none.db"), tmp_path / "none")
