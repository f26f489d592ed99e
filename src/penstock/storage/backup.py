"""Copies of a database and its ledger, made while servers use them.

A backup is one file, a zip archive with a manifest. It has the database and its ledger as they were at one instant, so
a restored database is as it would be after a power failure at that instant: runs are resumed from their journals, and
the holds of their calls are settled or left unresolved. It does not include money that was spent after the backup.

SQLite: both files are locked for as long as it takes to begin a read of each, and then copied from these reads while
writers proceed. PostgreSQL: one read of all tables (`postgres.backup`). A backup is restored to the same kind of
database, and never over another one.

Both functions block until they are done, for as long as the disk takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import InvalidValue
from penstock.hosting.ports import StoreUnavailable
from penstock.storage import versions
from penstock.storage.sqlite.file import SIDE_FILES
from penstock.storage.stores import hindrance, ledger_path, scheme_of, sqlite_path

FORMAT = 1
MANIFEST = "manifest.json"
DATABASE, LEDGER = "database.sqlite", "ledger.sqlite"
LOCKED_S = 10.0
"""How long a backup waits for a writer; writers wait only milliseconds for a backup."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a backup."""

    kind: str
    """sqlite or postgresql."""
    version: int
    """Schema version of the tables; 0 if there are none."""
    ledger_version: int
    made_at: str
    """UTC, ISO 8601."""
    tables: dict[str, list[str]]
    """Columns by table, in the order of restoring; empty for SQLite, whose files are copied whole."""
    format: int = FORMAT


def back_up(url: str, target: Path) -> Manifest:
    """Write the database and its ledger, as of one instant, to a new file.

    Raises StoreUnavailable, with the reason, if that is impossible.
    """
    if scheme_of(url) == "memory":
        raise InvalidValue("url", url, "sqlite:///path or postgresql://…: stores in memory end with their process")
    if target.exists():
        raise StoreUnavailable(f"{str(target)!r} exists; name another file: a backup never overwrites one")
    if scheme_of(url) == "sqlite":
        return _back_up_sqlite(sqlite_path(url), target)
    postgres = _postgres()
    with new_archive(target) as archive:
        version, ledger_version, tables = asyncio.run(postgres.dump(url, archive))
        return write_manifest(archive, "postgresql", version, ledger_version, tables)


def restore(url: str, source: Path) -> Manifest:
    """Restore a backup to a database that does not exist, or is empty.

    Raises StoreUnavailable, with the reason, if that is impossible.
    """
    kind = scheme_of(url)
    with opened_archive(source) as archive:
        manifest = read_manifest(source, archive)
        if manifest.kind != kind:
            raise StoreUnavailable(
                f"{str(source)!r} is a backup of a {manifest.kind} database and cannot be restored to {kind}; "
                f"name a {manifest.kind} database"
            )
        if manifest.version > versions.newest():
            raise StoreUnavailable(
                f"{str(source)!r} is of version {manifest.version}, and this Penstock knows versions up to "
                f"{versions.newest()}; restore it with a newer Penstock"
            )
        if kind == "sqlite":
            _restore_sqlite(sqlite_path(url), source, archive)
        else:
            load = _postgres().load
            asyncio.run(load(url, archive, manifest.version, manifest.ledger_version, manifest.tables))
    return manifest


def _postgres() -> Any:
    try:
        return import_module("penstock.storage.postgres.backup")
    except ImportError as error:
        raise StoreUnavailable(f"PostgreSQL needs asyncpg ({error}); install penstock[postgres]") from error


# The archive.


@contextmanager
def new_archive(target: Path) -> Iterator[zipfile.ZipFile]:
    """Yield a new archive, readable by its owner alone; it gets its name when it is complete, and is removed if not."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                yield archive
            file.flush()
            os.fsync(file.fileno())
        os.link(partial, target)  # unlike a rename, it fails if the name was taken meanwhile
    except OSError as error:
        raise StoreUnavailable(f"the backup cannot be written to {str(target)!r}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def opened_archive(source: Path) -> Iterator[zipfile.ZipFile]:
    """Open a backup for reading; StoreUnavailable if it is missing or damaged."""
    try:
        with zipfile.ZipFile(source) as archive:
            yield archive
    except zipfile.BadZipFile as error:
        raise StoreUnavailable(f"{str(source)!r} is no backup, or is damaged: {error}") from error
    except OSError as error:
        raise StoreUnavailable(f"{str(source)!r} cannot be restored: {error.strerror or error}") from error


def write_manifest(
    archive: zipfile.ZipFile, kind: str, version: int, ledger_version: int, tables: dict[str, list[str]]
) -> Manifest:
    manifest = Manifest(kind, version, ledger_version, datetime.now(UTC).isoformat(timespec="seconds"), tables)
    archive.writestr(MANIFEST, json.dumps(asdict(manifest), indent=2))
    return manifest


def read_manifest(source: Path, archive: zipfile.ZipFile) -> Manifest:
    """Return the contents of the backup; StoreUnavailable if the file is not a backup, or has a later format."""
    try:
        found = json.loads(archive.read(MANIFEST))
        if found["format"] != FORMAT:
            raise StoreUnavailable(f"{str(source)!r} is a backup of a later format; use a newer Penstock")
        return Manifest(**found)
    except (KeyError, TypeError, ValueError) as error:
        raise StoreUnavailable(f"{str(source)!r} is no backup of Penstock") from error


# SQLite.


def _back_up_sqlite(path: Path, target: Path) -> Manifest:
    ledger = ledger_path(path)
    for missing in (one for one in (path, ledger) if not one.exists()):
        raise StoreUnavailable(f"there is no {str(missing)!r}; name the database of a server with --db")
    version = asyncio.run(versions.sqlite_version(path))
    with _folder_in(target.parent, ".penstock-backup-") as folder:
        copies = (folder / DATABASE, folder / LEDGER)
        try:
            ledger_version = _copy_at_one_instant((path, ledger), copies)
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{str(path)!r} cannot be copied: {error}") from error
        with new_archive(target) as archive:
            for copy in copies:
                archive.write(copy, copy.name)
            return write_manifest(archive, "sqlite", version, ledger_version, {})


@contextmanager
def _folder_in(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a folder beside the result, from where a file can be moved to its name without another copy."""
    try:
        folder = tempfile.TemporaryDirectory(dir=parent, prefix=prefix)
    except OSError as error:
        raise StoreUnavailable(f"nothing can be written in {str(parent)!r}: {error.strerror}") from error
    with folder as name:
        yield Path(name)


def _copy_at_one_instant(sources: Sequence[Path], copies: Sequence[Path]) -> int:
    """Copy the files as of one instant at which nothing writes to any of them; returns the version of the last one."""
    with ExitStack() as stack:
        writers = [stack.enter_context(_connected(path)) for path in sources]
        readers = [stack.enter_context(_connected(path)) for path in sources]
        for writer in writers:
            writer.execute("BEGIN IMMEDIATE")
        for reader in readers:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()  # the read begins here
        for writer in writers:
            writer.execute("ROLLBACK")
        for reader, copy in zip(readers, copies, strict=True):
            with closing(sqlite3.connect(copy)) as into:
                reader.backup(into)
        (version,) = readers[-1].execute("PRAGMA user_version").fetchone()
        return int(version)


@contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(uri, uri=True, timeout=LOCKED_S, isolation_level=None)) as connection:
        yield connection


def _restore_sqlite(path: Path, source: Path, archive: zipfile.ZipFile) -> None:
    ledger = ledger_path(path)
    if hindered := hindrance(str(path)):
        raise StoreUnavailable("; ".join(hindered))
    parts = [Path(f"{one}{end}") for one in (path, ledger) for end in ("", *SIDE_FILES)]
    for taken in (one for one in parts if one.exists()):
        raise StoreUnavailable(f"{str(taken)!r} exists; name a new file: a restore never overwrites a database")
    with _folder_in(path.parent, ".penstock-restore-") as folder:
        copies = [_extracted(archive, name, folder, source) for name in (LEDGER, DATABASE)]
        # The ledger first: a database without its ledger would be refused, and one without runs is harmless.
        for copy, to in zip(copies, (ledger, path), strict=True):
            os.link(copy, to)


def _extracted(archive: zipfile.ZipFile, name: str, folder: Path, source: Path) -> Path:
    copy = folder / name
    try:
        with archive.open(name) as packed, open(os.open(copy, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            shutil.copyfileobj(packed, file)
            file.flush()
            os.fsync(file.fileno())
        with closing(sqlite3.connect(copy)) as connection:
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except (KeyError, sqlite3.Error) as error:
        raise StoreUnavailable(f"{str(source)!r} is damaged: {error}") from error
    if found != "ok":
        raise StoreUnavailable(f"{str(source)!r} is damaged: {found}")
    return copy
