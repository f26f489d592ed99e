"""`penstock db …`: status, upgrade, backup and restore of a server's database."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.options import Database
from penstock.cli.render.screen import print_text

app = typer.Typer(rich_markup_mode=None)

NewBackup = Annotated[Path, typer.Argument(metavar="FILE", help="The backup to write; it must not exist.")]
OldBackup = Annotated[Path, typer.Argument(metavar="FILE", help="A backup that `penstock db backup` has written.")]


@app.callback(invoke_without_command=True)
def db(context: typer.Context) -> int:
    """Check, upgrade, back up and restore the database of a server.

    \b
    Examples:
      penstock db status --db sqlite:///penstock.db
      penstock db upgrade --db postgresql://localhost/penstock
      penstock db backup --db sqlite:///penstock.db monday.backup

    \b
    Exit codes:
      0 ok   2 the tables have another version, or the database cannot be used   64 wrong command line
    """
    if context.invoked_subcommand is None:
        print_text(context.get_help())
    return Exit.OK


@app.command()
def status(db: Database = None) -> int:
    """Show the version of the tables, and the version that this Penstock uses.

    \b
    Examples:
      penstock db status --db sqlite:///penstock.db

    \b
    Exit codes:
      0 the versions are the same   2 they differ, or the database or its ledger cannot be used
      64 wrong command line
    """
    url = named_database(db)
    state, is_usable = run_on_database(_inspect(url))
    print_text(f"{without_password(url)}: {state}")
    return Exit.OK if is_usable else Exit.FAILED


@app.command()
def upgrade(db: Database = None) -> int:
    """Upgrade the tables to the version that this Penstock uses; create them in an empty database.

    The upgrade is one transaction. Stop the server and make a backup first.

    \b
    Examples:
      penstock db upgrade --db sqlite:///penstock.db

    \b
    Exit codes:
      0 upgraded   2 the database or its ledger cannot be used, or has a newer version
      64 wrong command line
    """
    from penstock.storage.stores import check_ledger, migrate, schema_version

    url = named_database(db)
    before = run_on_database(schema_version(url))
    after = run_on_database(migrate(url))
    how = "unchanged" if before == after else "created" if before == 0 else f"upgraded from version {before}"
    print_text(f"{without_password(url)}: version {after}; {how}")
    run_on_database(check_ledger(url))
    return Exit.OK


@app.command()
def backup(file: NewBackup, db: Database = None) -> int:
    """Write the database and its ledger, as of one instant, to a file. Servers may keep running meanwhile.

    The file contains everything that people have sent, and is readable by its owner alone. Money that is spent after
    the backup is not in it.

    \b
    Examples:
      penstock db backup --db sqlite:///penstock.db monday.backup
      penstock db backup --db postgresql://localhost/penstock monday.backup

    \b
    Exit codes:
      0 written   2 the database cannot be read, or the file exists or cannot be written   64 wrong command line
    """
    from penstock.storage.backup import back_up

    url = named_database(db)
    made = run_on_database(asyncio.to_thread(back_up, url, file))
    print_text(f"{file}: {file.stat().st_size:,} bytes; {without_password(url)} of version {made.version}")
    return Exit.OK


@app.command()
def restore(file: OldBackup, db: Database = None) -> int:
    """Restore a backup to a database that does not exist yet, or is empty.

    Runs that were running are resumed by the next server, as after a crash at the time of the backup.

    \b
    Examples:
      penstock db restore --db sqlite:///restored.db monday.backup
      penstock db restore --db postgresql://localhost/empty monday.backup

    \b
    Exit codes:
      0 restored   2 the file is damaged or no backup, or the database is not empty   64 wrong command line
    """
    from penstock.storage.backup import restore
    from penstock.storage.stores import newest_version

    url = named_database(db)
    made = run_on_database(asyncio.to_thread(restore, url, file))
    print_text(f"{without_password(url)}: restored from the backup of {made.made_at}")
    if made.version != newest_version():
        print_text(describe_version(made.version, newest_version(), url))
    return Exit.OK


async def _inspect(url: str) -> tuple[str, bool]:
    """Return the state of a database, and whether it is usable as it is."""
    from penstock.storage.stores import check_ledger, hindrance, newest_version, schema_version

    if hindered := hindrance(url):
        return "; ".join(hindered), False
    found, newest = await schema_version(url), newest_version()
    if found == newest:
        await check_ledger(url)
    return describe_version(found, newest, url), found == newest


def describe_version(found: int, newest: int, url: str) -> str:
    """Describe the schema version relative to this Penstock, and what to do if they differ."""
    if found == newest:
        return f"version {found}, up to date"
    if found > newest:
        return f"version {found}, newer than the version {newest} of this Penstock; use a newer Penstock"
    if found == 0:
        return f"no tables yet; penstock serve creates them, version {newest}"
    command = f"penstock db upgrade --db {without_password(url)}"
    return f"version {found}, older than the version {newest} of this Penstock; upgrade it with: {command}"


def without_password(url: str) -> str:
    """Return the database URL without its password, for display."""
    scheme, found, rest = url.partition("://")
    if not found or scheme == "sqlite":
        return url
    who, at, where = rest.partition("?")[0].rpartition("@")
    return f"{scheme}://{who.partition(':')[0]}{at}{where}"


def named_database(url: str | None) -> str:
    """Return the URL of the database that the command line names; Refused if it names none."""
    if url is None:
        raise Refused("name the database with --db or PENSTOCK_DB, such as --db sqlite:///penstock.db")
    return url


def run_on_database(work: Coroutine[Any, Any, Any]) -> Any:
    """Run the work to its end, with errors as the command line reports them."""
    from penstock.errors import InvalidValue, PenstockError

    try:
        return asyncio.run(work)
    except InvalidValue as invalid:
        raise Refused(f"--db: {invalid}") from None
    except PenstockError as error:
        raise Failed(str(error)) from None
