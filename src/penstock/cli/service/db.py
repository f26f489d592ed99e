"""`penstock db …`: the database of a server, and its tables."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import typer

from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.options import Database
from penstock.cli.showing.screen import say

app = typer.Typer(rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def db(context: typer.Context) -> int:
    """Look after the database of a server.

    \b
    Examples:
      penstock db status --db sqlite:///penstock.db
      penstock db upgrade --db postgresql://localhost/penstock
    """
    if context.invoked_subcommand is None:
        say(context.get_help())
    return Exit.OK


@app.command()
def status(db: Database = None) -> int:
    """Say which version the tables have, and which this Penstock uses.

    \b
    Exit codes:
      0 they are the same   2 they are not, or the database cannot be read
    """
    from penstock.storage.stores import newest_version, schema_version

    url = _named(db)
    found = _done(schema_version(url), url)
    say(f"{url}: version {found}; this Penstock uses {newest_version()}")
    return Exit.OK if found == newest_version() else Exit.FAILED


@app.command()
def upgrade(db: Database = None) -> int:
    """Bring the tables to the version that this Penstock uses; an empty database gets them all.

    It is one act: all of it is done, or nothing. Stop the server before, and keep a copy.

    \b
    Examples:
      penstock db upgrade --db sqlite:///penstock.db
    """
    from penstock.storage.stores import migrate

    url = _named(db)
    say(f"{url}: version {_done(migrate(url), url)}")
    return Exit.OK


def _named(url: str | None) -> str:
    if url is None:
        raise Refused("--db says which database, such as --db sqlite:///penstock.db; PENSTOCK_DB does too")
    return url


def _done(work: Coroutine[Any, Any, Any], url: str) -> Any:
    from penstock.errors import PenstockError

    try:
        return asyncio.run(work)
    except PenstockError as error:
        raise Failed(f"{url}: {error}") from None
