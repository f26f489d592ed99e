"""`penstock db …`: how a database stands, and how it comes to the version of this Penstock."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.cli.service.db import without_password
from penstock.hosting.ports import RunRecord
from penstock.storage import migrations, newest_version, open_stores
from tests.cli.conftest import Ended, Penstock

URL = "sqlite:///kept.db"
NEWEST = newest_version()
OTHER_USER = 65_534


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
    assert (new.code, new.out) == (2, f"{URL}: no tables yet; penstock serve creates them, version {NEWEST}\n")
    assert penstock("db", "upgrade", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}; created\n", "")
    assert penstock("db", "upgrade", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}; unchanged\n", "")
    assert penstock("db", "status", "--db", URL) == Ended(0, f"{URL}: version {NEWEST}, up to date\n", "")


def test_looking_at_a_database_that_is_not_there_makes_none(penstock: Penstock, directory: Path) -> None:
    penstock("db", "status", "--db", URL)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite:///no/such/folder/x.db", "no/such/x.db", "sqlite:////nonexistent/x.db"])
def test_missing_folder_is_reported_like_serve_does(penstock: Penstock, directory: Path, url: str) -> None:
    status = penstock("db", "status", "--db", url)
    assert (status.code, status.err, status.out.count("\n")) == (2, "", 1)
    assert ": there is no folder /" in status.out
    assert status.out.endswith("; make it, or name another file\n")
    assert list(directory.iterdir()) == []


def test_file_instead_of_folder_and_folder_instead_of_file_are_reported(penstock: Penstock, directory: Path) -> None:
    (directory / "text").write_text("x")
    assert "there is no folder" in penstock("db", "status", "--db", "sqlite:///text/x.db").out
    for command in (["db", "status"], ["db", "upgrade"], ["serve", "--port", "0"]):
        ended = penstock(*command, "--db", f"sqlite:///{directory}")
        assert (ended.code, f"{directory} is a folder; name a file in it\n" in ended.out + ended.err) == (2, True)


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that is not root's."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        if os.geteuid() == 0:
            os.chown(made, OTHER_USER, OTHER_USER)
        yield Path(made)


@contextmanager
def as_other_user() -> Iterator[None]:
    """Root may write anything: tests that run as root become another user for a while."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["", "kept.db", "kept.db.ledger", "kept.db-wal", "kept.db-shm", "kept.db.ledger-shm"])
def test_unwritable_database_is_reported_by_every_command_and_leaves_no_files(
    penstock: Penstock, folder: Path, name: str
) -> None:
    url = f"sqlite:///{folder}/kept.db"
    with as_other_user():
        assert penstock("db", "upgrade", "--db", url).code == 0
        (folder / "kept.db.ledger").touch()
        (folder / name).touch()
        (folder / name).chmod(0o555 if name == "" else 0o444)
        before = {one.name: one.stat().st_mode for one in folder.iterdir()}
        expected = f"{folder / name} cannot be written; let this user write there, "
        for command in (["db", "status"], ["db", "upgrade"], ["doctor", "--json", "--url", "http://127.0.0.1:9"]):
            ended = penstock(*command, "--db", url)
            printed = ended.out.replace('",\n    "advice": "', "; ") + ended.err
            assert (ended.code, expected in printed) == (2, True), command
        ended = penstock("serve", "--port", "0", "--db", url)
        assert (ended.code, ended.out, expected in ended.err) == (2, "", True)
        assert {one.name: one.stat().st_mode for one in folder.iterdir()} == before
        (folder / name).chmod(0o755 if name == "" else 0o644)
        assert penstock("db", "status", "--db", url).code == 0


@pytest.mark.parametrize("wrong", ["garbage", "newer", "theirs"])
def test_unusable_ledger_is_reported_by_every_command(penstock: Penstock, directory: Path, wrong: str) -> None:
    work_on_a_run()
    ledger = directory / "kept.db.ledger"
    if wrong == "garbage":
        ledger.write_bytes(b"no ledger" * 1_000)
        expected = "file is not a database (SQLITE_NOTADB); name another file, or restore it from a backup"
    else:
        pragma, expected = {
            "newer": ("user_version = 99", "its tables are of version 99, and this Penstock knows version "),
            "theirs": ("application_id = 99", "it is a database of something else"),
        }[wrong]
        with closing(sqlite3.connect(ledger)) as other:
            other.execute(f"PRAGMA {pragma}")
    before = ledger.read_bytes()
    for command in ("db status", "db upgrade", "doctor --url http://127.0.0.1:9", "serve --port 0"):
        ended = penstock(*command.split(), "--db", URL)
        assert (ended.code, expected in ended.out + ended.err) == (2, True), command
        assert str(ledger) in ended.out + ended.err
    assert ledger.read_bytes() == before


def test_missing_ledger_is_reported_only_for_a_database_with_runs(penstock: Penstock, directory: Path) -> None:
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
    upgrade = penstock("db", "upgrade", "--db", URL)
    assert (upgrade.code, upgrade.err) == (2, status.err)
    assert not (directory / "kept.db.ledger").exists()


def test_older_database_is_reported_and_upgraded(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
    penstock("db", "upgrade", "--db", URL)
    later = ("CREATE TABLE added_later (id TEXT PRIMARY KEY)",)
    monkeypatch.setattr(migrations, "MIGRATIONS", (*migrations.MIGRATIONS, later))
    old = penstock("db", "status", "--db", URL)
    assert old.code == 2
    older = f"version {NEWEST}, older than the version {NEWEST + 1} of this Penstock"
    there = f"{older}; upgrade it with: penstock db upgrade --db {URL}"
    assert there in old.out
    assert (
        penstock("db", "upgrade", "--db", URL).out == f"{URL}: version {NEWEST + 1}; upgraded from version {NEWEST}\n"
    )
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


def test_database_has_to_be_named(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.requirement("X-19")
def test_a_database_with_a_run_in_flight_is_backed_up_and_restored_elsewhere(penstock: Penstock) -> None:
    work_on_a_run()
    written = penstock("db", "backup", "--db", URL, "kept.backup")
    assert (written.code, written.err, f"{URL} of version {NEWEST}" in written.out) == (0, "", True)
    restored = penstock("db", "restore", "--db", "sqlite:///other.db", "kept.backup")
    assert (restored.code, restored.err) == (0, "")
    assert restored.out.startswith("sqlite:///other.db: restored from the backup of ")
    with closing(sqlite3.connect("other.db")) as other:
        assert other.execute("SELECT id, status, worker FROM runs").fetchall() == [("r", "running", "w")]
    assert Path("other.db.ledger").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["backup", "--db", "sqlite:///none.db", "new"], 2, "there is no "),
        (["backup", "--db", "memory:", "new"], 64, "stores in memory end with their process"),
        (["backup", "--db", URL, "text"], 2, "a backup never overwrites one"),
        (["backup", "--db", URL, "/nowhere/new"], 2, "nothing can be written in '/nowhere'"),
        (["backup", "--db", URL], 64, "FILE"),
        (["restore", "--db", URL, "good"], 2, "a restore never overwrites a database"),
        (["restore", "--db", "sqlite:///new.db", "text"], 2, "is no backup, or is damaged"),
        (["restore", "--db", "sqlite:///new.db", "half"], 2, "is no backup, or is damaged"),
        (["restore", "--db", "sqlite:///new.db", "none"], 2, "No such file or directory"),
        (["restore", "--db", "memory:", "good"], 2, "name a sqlite database"),
        (["restore", "--db", "postgresql://h/x", "good"], 2, "name a sqlite database"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_backed_up_or_restored_is_one_sentence_and_leaves_nothing(
    penstock: Penstock, arguments: list[str], code: int, says: str
) -> None:
    work_on_a_run()
    assert penstock("db", "backup", "--db", URL, "good").code == 0
    Path("text").write_text("no archive")
    Path("half").write_bytes(Path("good").read_bytes()[:500])
    before = set(os.listdir())
    ended = penstock("db", *arguments)
    assert (ended.code, ended.out, ended.err.count("\n")) == (code, "", 1)
    assert says in ended.err
    assert set(os.listdir()) == before
