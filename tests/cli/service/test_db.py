"""`penstock db …`: how a database stands, and how it comes to the version of this Penstock."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.cli.service.db import without_password
from penstock.hosting.records import RunRecord
from penstock.storage import newest_version, open_stores
from penstock.storage.databases import migrations
from tests.cli.conftest import Ended, Penstock

URL = "sqlite:///kept.db"
NEWEST = newest_version()


def work_on_a_run() -> None:
    """One that a server has claimed."""

    async def work() -> None:
        async with await open_stores(URL) as stores:
            await stores.runs.add(RunRecord("r", "ann", "g", 1))
            await stores.runs.claim("w", now_ms=1, lease_ms=1)

    asyncio.run(work())


def set_version(version: int) -> None:
    with closing(sqlite3.connect("kept.db")) as kept:
        kept.execute(f"PRAGMA user_version = {version}")


def test_a_new_database_is_made_and_is_then_as_it_should_be(penstock: Penstock) -> None:
    new = penstock("db", "status", "--db", URL)
    assert (new.code, new.out) == (2, f"{URL}: no tables yet; penstock serve makes them, in version {NEWEST}\n")
    assert penstock("db", "upgrade", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}; made\n", "")
    assert penstock("db", "upgrade", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}; was so before\n", "")
    assert penstock("db", "status", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}, as this Penstock uses\n", "")


def test_looking_at_a_database_that_is_not_there_makes_none(penstock: Penstock, directory: Path) -> None:
    penstock("db", "status", "--db", URL)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite:///no/such/folder/x.db", "no/such/x.db", "sqlite:////nonexistent/x.db"])
def test_a_folder_that_is_not_there_is_said_as_serve_would(penstock: Penstock, directory: Path, url: str) -> None:
    status = penstock("db", "status", "--db", url)
    assert (status.code, status.err, status.out.count("\n")) == (2, "", 1)
    assert ": there is no folder /" in status.out
    assert status.out.endswith("; make it, or name another file\n")
    assert list(directory.iterdir()) == []


def test_a_folder_that_is_a_file_or_cannot_be_written_is_said(
    penstock: Penstock, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "text").write_text("x")
    assert "there is no folder" in penstock("db", "status", "--db", "sqlite:///text/x.db").out
    for name in (directory, directory / "kept.db", directory / "kept.db.ledger"):
        name.is_dir() or name.touch()
        monkeypatch.setattr(os, "access", lambda path, _, locked=name: Path(path) != locked)
        status = penstock("db", "status", "--db", URL)
        assert (status.code, f"{name} cannot be written; let this user" in status.out) == (2, True)


def test_runs_without_their_ledger_are_said_and_a_new_database_without_one_is_not(
    penstock: Penstock, directory: Path
) -> None:
    penstock("db", "upgrade", "--db", URL)
    assert not (directory / "kept.db.ledger").exists()
    assert penstock("db", "status", "--db", URL).code == 0
    work_on_a_run()
    (directory / "kept.db.ledger").unlink()
    status = penstock("db", "status", "--db", URL)
    assert (status.code, status.out, status.err.count("\n")) == (2, "", 1)
    assert "kept.db.ledger' is gone" in status.err
    assert "put it back from a copy" in status.err
    served = penstock("serve", "--port", "0", "--db", URL)
    assert (served.code, served.err) == (2, status.err)
    assert not (directory / "kept.db.ledger").exists()


def test_an_older_one_says_what_to_do_and_is_brought_up(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    penstock("db", "upgrade", "--db", URL)
    later = ("CREATE TABLE added_later (id TEXT PRIMARY KEY)",)
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, later))
    old = penstock("db", "status", "--db", URL)
    assert old.code == 2
    there = f"version {NEWEST}, and this Penstock uses {NEWEST + 1}; penstock db upgrade --db {URL} brings it there"
    assert there in old.out
    assert penstock("db", "upgrade", "--db", URL).out == f"{URL}: version {NEWEST + 1}; was version {NEWEST}\n"
    assert penstock("db", "status", "--db", URL).code == 0


def test_a_newer_one_is_not_touched(penstock: Penstock, directory: Path) -> None:
    penstock("db", "upgrade", "--db", URL)
    set_version(99)
    before = (directory / "kept.db").read_bytes()
    status = penstock("db", "status", "--db", URL)
    assert (status.code, "version 99" in status.out, "use a newer Penstock" in status.out) == (2, True, True)
    upgrade = penstock("db", "upgrade", "--db", URL)
    assert (upgrade.code, upgrade.out, "version 99" in upgrade.err) == (2, "", True)
    assert (directory / "kept.db").read_bytes() == before


@pytest.mark.parametrize("command", ["status", "upgrade"])
def test_what_is_no_database_is_one_sentence(penstock: Penstock, directory: Path, command: str) -> None:
    (directory / "kept.db").write_text("no database, but a text that goes on for a while\n" * 20)
    with closing(sqlite3.connect("other.db")) as other:
        other.execute("CREATE TABLE songs (id TEXT)")
    for url in (URL, "sqlite:///other.db", "postgresql://127.0.0.1:1/none"):
        ended = penstock("db", command, "--db", url)
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    ended = penstock("db", command, "--db", "mysql://here")
    assert (ended.code, ended.err.count("\n")) == (64, 1)


def test_which_database_has_to_be_said(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_DB", raising=False)
    assert penstock("db", "status").code == 64
    monkeypatch.setenv("PENSTOCK_DB", "memory:")
    assert penstock("db", "status").code == 0


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@host:5/d", "postgresql://ann@host:5/d"),
        ("postgresql://ann:se@cr/et@host/d", "postgresql://ann@host/d"),
        ("postgresql://host/d?user=ann&password=secret", "postgresql://host/d"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
        ("plain.db", "plain.db"),
    ],
)
def test_a_password_is_never_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown
