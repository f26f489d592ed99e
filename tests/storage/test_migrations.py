"""Versions of a database: a new one is created, an old one is upgraded by `migrate`, and no other is changed."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from penstock.chat.ports import ChatRecord
from penstock.chat.turn import writing
from penstock.errors import InvalidValue
from penstock.hosting.ports import ApprovalRecord, CancelRequest, RunRecord, StoreUnavailable
from penstock.storage import migrate, migrations, newest_version, open_stores, schema_version
from penstock.storage.postgres import database as postgres_database
from penstock.storage.stores import sqlite_path
from tests.storage.postgres import postgres_schemas, postgres_server

__all__ = ["postgres_schemas", "postgres_server"]

NEXT = ("ALTER TABLE runs ADD COLUMN colour TEXT", "CREATE TABLE colours (id TEXT NOT NULL PRIMARY KEY, size BIGINT)")
"""What a version after the newest might bring."""
BROKEN = ("CREATE TABLE half (id BIGINT)", "ALTER TABLE nowhere ADD COLUMN colour TEXT")
RUN = RunRecord("r", "ann", "g", 1)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'penstock.db'}"
    new_schema: Callable[[], str] = request.getfixturevalue("postgres_schemas")
    return new_schema()


def _execute(url: str, statement: str) -> None:
    """Change the database behind its back."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(sqlite_path(url))) as file, file:
            file.execute(statement)
    else:
        asyncio.run(_execute_there(url, statement))


async def _execute_there(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()


def _set_version(url: str, version: int) -> None:
    is_file = url.startswith("sqlite")
    _execute(url, f"PRAGMA user_version = {version}" if is_file else f"UPDATE penstock_schema SET version = {version}")


async def _keep(url: str) -> None:
    async with await open_stores(url) as stores:
        await stores.runs.add(RUN)


async def _find(url: str) -> RunRecord | None:
    async with await open_stores(url) as stores:
        return await stores.runs.get("r")


def test_a_new_database_is_created_on_opening(url: str) -> None:
    assert asyncio.run(schema_version(url)) == 0
    asyncio.run(_keep(url))
    assert asyncio.run(schema_version(url)) == newest_version() == len(migrations.MIGRATIONS)


def test_migrating_creates_a_new_database_and_leaves_an_upgraded_one_unchanged(url: str) -> None:
    for _ in range(2):
        assert asyncio.run(migrate(url)) == newest_version()
        asyncio.run(_keep(url))
    assert asyncio.run(_find(url)) == RUN


def test_an_older_database_is_upgraded_by_migrate_and_never_by_opening_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(_keep(url))
    older = newest_version()
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, NEXT))
    with pytest.raises(StoreUnavailable, match="penstock db upgrade"):
        asyncio.run(_find(url))
    assert asyncio.run(schema_version(url)) == older
    assert asyncio.run(migrate(url)) == older + 1 == asyncio.run(schema_version(url))
    _execute(url, "UPDATE runs SET colour = 'blue'")
    assert asyncio.run(_find(url)) == RUN


def test_runs_of_version_2_have_no_unknown_costs_after_the_upgrade(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:2])
        assert asyncio.run(migrate(url)) == 2
    columns = "id, owner, graph_id, graph_version, input, limits, origin, status, created_ms, lease_until_ms, epoch"
    figures = "output, cost_nanos, tokens_in, tokens_out, unresolved_nanos"
    values = "'r', 'ann', 'g', 1, 'null', '{}', '{}', 'queued', 0, 0, 0, 'null', 7, 1, 2, 3"
    _execute(url, f"INSERT INTO runs ({columns}, {figures}) VALUES ({values})")
    with pytest.raises(StoreUnavailable, match="penstock db upgrade"):
        asyncio.run(_find(url))
    assert asyncio.run(migrate(url)) == newest_version() > 2
    before = RUN._replace(cost_nanos=7, tokens_in=1, tokens_out=2, unresolved_nanos=3)
    assert asyncio.run(_find(url)) == before == before._replace(unknown_costs=0)

    async def count() -> RunRecord:
        async with await open_stores(url) as stores:
            await stores.runs.claim("w", now_ms=1, lease_ms=1)
            return await stores.runs.update("r", 1, unknown_costs=4)

    assert asyncio.run(count()).unknown_costs == 4


def test_chats_of_version_2_are_not_generated_and_keep_their_attachments(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:2])
        asyncio.run(migrate(url))
    content = "X'616263'" if url.startswith("sqlite") else r"'\x616263'"
    data = """'{"attachments":[{"id":"f"}]}'"""
    _execute(url, """INSERT INTO chats VALUES ('c', 'ann', '""', 'g', 0, 0, 'm')""")
    columns = "chat_id, id, parent_id, role, content, at_ms, data, is_in_view"
    _execute(url, f"""INSERT INTO messages ({columns}) VALUES ('c', 'm', '', 'user', '"q"', 0, {data}, 1)""")
    _execute(url, f"""INSERT INTO attachments VALUES ('f', 'ann', '"a"', '"x/y"', 3, 0, {content})""")
    asyncio.run(migrate(url))

    async def look() -> None:
        async with await open_stores(url) as stores:
            assert await stores.chats.get("c") == ChatRecord("c", "ann", "", "g", 0, 0)
            assert list(await stores.chats.remove_unused(9_000)) == []
            await stores.chats.remove("c")
            await stores.chats.detach("f")
            assert await stores.chats.get("c") is None
            assert await stores.chats.attachment("f") is not None, "who else refers to it was never written down"

    asyncio.run(look())


def test_cancel_requests_of_version_3_apply_to_any_owner(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:3])
        assert asyncio.run(migrate(url)) == 3
    _execute(url, """INSERT INTO cancels VALUES ('r', '"enough"', 'bob', 1, 2)""")
    assert asyncio.run(migrate(url)) == newest_version() > 3

    async def look() -> None:
        async with await open_stores(url) as stores:
            before = CancelRequest("r", "enough", "bob", 1, 2)
            assert dict(await stores.cancels.find({"r": "ann"}, now_ms=2)) == {"r": before}
            of_bob = replace(before, owner="bob")
            assert await stores.cancels.put(of_bob) == of_bob
            assert await stores.cancels.prune(now_ms=3) == 2

    asyncio.run(look())


def test_approvals_of_version_4_have_no_expected_answer(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:4])
        assert asyncio.run(migrate(url)) == 4
    values = """'a', 'r', 'ann', 'k', 'n', '"Send it?"', '1', 'waiting', 'null', '""', 5, NULL, NULL"""
    _execute(url, f"INSERT INTO approvals VALUES ({values})")
    assert asyncio.run(migrate(url)) == newest_version() > 4

    async def look() -> None:
        async with await open_stores(url) as stores:
            approval = ApprovalRecord("a", "r", "ann", "k", "n", "Send it?", 1, asked_ms=5)
            assert await stores.approvals.get("a") == approval
            assert (await stores.approvals.answer("a", "edited", answer=2, by="bob", now_ms=6)).answer == 2

    asyncio.run(look())


def test_runs_and_answers_of_version_5_have_their_grants_and_their_ends(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:5])
        assert asyncio.run(migrate(url)) == 5
    numbers = "0, NULL, NULL, NULL, 0, 0, NULL, NULL, 'null', 0, 0, 0, 0, 0"
    for id in ("waited", "granted"):
        _execute(url, f"INSERT INTO runs VALUES ('{id}', 'ann', 'g', 1, '1', '{{}}', '{{}}', 'c', 'queued', {numbers})")
    for seq in (2, 3):
        _execute(url, f"INSERT INTO events VALUES ('granted', {seq}, 5, 'run.granted', '{{}}')")
    _execute(url, "INSERT INTO chats VALUES ('c', 'ann', '\"\"', 'g', 1, 2, '', '')")
    columns = "chat_id, id, parent_id, role, content, at_ms, data, is_in_view"
    for id, run_id in (("a", "waited"), ("b", "never"), ("c", "ask")):
        data = json.dumps(writing(run_id), separators=(",", ":"))
        _execute(url, f"INSERT INTO messages ({columns}) VALUES ('c', '{id}', '', 'assistant', '\"\"', 1, '{data}', 1)")
    assert asyncio.run(migrate(url)) == newest_version() > 5

    async def look() -> None:
        async with await open_stores(url) as stores:
            runs = {run.id: run.grants for run in await stores.runs.list()}
            assert runs == {"waited": 0, "granted": 2}
            messages = {one.id: one.data for one in (await stores.chats.messages("c"))[0]}
            assert {id: data["state"] for id, data in messages.items()} == {
                "a": "writing",
                "b": "failed",
                "c": "failed",
            }
            assert messages["b"]["error"] == "interrupted before its run started: ask again"

    asyncio.run(look())


def test_a_newer_database_is_refused_and_unchanged(url: str) -> None:
    asyncio.run(_keep(url))
    _set_version(url, 99)
    for ask in (_find, migrate):
        with pytest.raises(StoreUnavailable, match=r"version 99.*knows versions up to"):
            asyncio.run(ask(url))
    assert asyncio.run(schema_version(url)) == 99


def test_a_migration_that_fails_changes_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_keep(url))
    older = newest_version()
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, BROKEN))
        with pytest.raises(StoreUnavailable, match="nowhere"):
            asyncio.run(migrate(url))
    assert asyncio.run(schema_version(url)) == older
    assert asyncio.run(_find(url)) == RUN
    _execute(url, "CREATE TABLE half (id BIGINT)")  # it is not there


def test_tables_of_another_application_are_refused_and_unchanged(url: str) -> None:
    _execute(url, "CREATE TABLE runs (distance_km BIGINT)")
    for ask in (_find, migrate, schema_version):
        with pytest.raises(StoreUnavailable, match="of something else"):
            asyncio.run(ask(url))
    _execute(url, "INSERT INTO runs (distance_km) VALUES (42)")


def test_concurrent_opens_create_a_new_database_once(url: str) -> None:
    async def all_at_once() -> list[None]:
        return await asyncio.gather(*(_keep(url) for _ in range(4)))

    asyncio.run(all_at_once())
    assert asyncio.run(_find(url)) == RUN


async def _waiting_for_locks(url: str, count: int) -> None:
    """Return once this many of our connections wait for a lock."""
    waiting = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND application_name = 'penstock' AND datname = current_database()"
    )
    connection = await asyncpg.connect(url)  # in a transaction, every look would find what the first one did
    while await connection.fetchval(waiting) < count:
        continue
    await connection.close()


def test_of_two_concurrent_upgrades_of_a_server_the_second_waits_and_finds_it_done(
    postgres_schemas: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres_schemas()
    asyncio.run(_keep(url))
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, NEXT))
    monkeypatch.setattr(postgres_database, "LOCKED_S", 60)

    async def both_during_a_read() -> list[int]:
        reader = await asyncpg.connect(url)
        try:
            await reader.execute("BEGIN; LOCK TABLE runs IN ACCESS SHARE MODE")
            upgrades = asyncio.gather(migrate(url), migrate(url))
            await _waiting_for_locks(url, 2)
            await reader.execute("COMMIT")
            return await upgrades
        finally:
            await reader.close()

    assert asyncio.run(both_during_a_read()) == [newest_version()] * 2
    _execute(url, "UPDATE runs SET colour = 'blue'")
    assert asyncio.run(_find(url)) == RUN


async def test_memory_is_always_of_the_newest_version() -> None:
    assert await schema_version("memory:") == await migrate("memory:") == newest_version()


@pytest.mark.parametrize(
    "wrong",
    ["", ":memory:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/file", "mysql://x/y", "http://x"],
)
async def test_an_invalid_store_url_is_refused(wrong: str) -> None:
    for ask in (open_stores, migrate, schema_version):
        with pytest.raises(InvalidValue, match="url must be"):
            await ask(wrong)


def test_urls_name_files_relative_to_the_current_folder_or_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    cases = {"sqlite:///a/b.db": "/tmp/a/b.db", "sqlite:////a/b%20c.db": "/a/b c.db", "a.db": "/tmp/a.db", "/a": "/a"}
    assert {url: str(sqlite_path(url)) for url in cases} == cases


OLDEST_NEIGHBOUR = 5
"""The version of the oldest release; from it on, a server that still runs goes on working after an upgrade."""


def _schema(version: int) -> dict[str, dict[str, tuple[object, ...]]]:
    """The tables of a version: each column with its type, whether it must be given, and its place in the key."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statements in migrations.MIGRATIONS[:version]:
            for statement in statements:
                connection.execute(migrations.for_sqlite(statement))
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        found = {}
        for table in tables:
            rows = connection.execute(f"PRAGMA table_info({table})").fetchall()
            found[table] = {
                name: (kind, bool(needed) and default is None, key) for _, name, kind, needed, default, key in rows
            }
        return found


def _unique_indexes(version: int) -> int:
    statements = [one for version in migrations.MIGRATIONS[:version] for one in version]
    return sum("UNIQUE INDEX" in one or "TRIGGER" in one for one in statements)


@pytest.mark.requirement("X-19")
@pytest.mark.parametrize("version", range(OLDEST_NEIGHBOUR, newest_version() + 1))
def test_statements_of_an_older_server_work_on_the_newest_schema(version: int) -> None:
    """Every table and column is still there, and an INSERT that names the old columns need name no more."""
    old, new = _schema(version), _schema(newest_version())
    for table, columns in old.items():
        assert new[table].items() >= columns.items(), table
        for name in new[table].keys() - columns.keys():
            _, must_be_given, key = new[table][name]
            assert not must_be_given, f"{table}.{name} has no default: an older server cannot insert a row any more"
            assert not key
    assert _unique_indexes(version) == _unique_indexes(newest_version())


@pytest.mark.requirement("X-19")
async def test_a_server_that_runs_during_an_upgrade_goes_on_beside_a_new_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = newest_version()
    async with await open_stores(url) as old:
        await old.runs.add(RUN)
        monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, NEXT))
        assert await migrate(url) == newest + 1
        async with await open_stores(url) as new:
            for at, stores in enumerate((old, new, old)):
                run = RUN._replace(id=f"run-{at}")
                await stores.runs.add(run)
                other = new if stores is old else old
                assert (await other.runs.get(run.id)) == run
                claimed = await other.runs.claim("w", now_ms=1_000, lease_ms=10_000, run_id=run.id)
                assert claimed is not None
                await stores.runs.update(run.id, claimed.epoch, status="completed", ended_ms=2_000)
            assert {found.id for found in await old.runs.list()} == {"r", "run-0", "run-1", "run-2"}
