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

    \b
    Exit codes:
      0 ok   2 the tables are of another version, or the database cannot be used   64 wrong command line
    """
    if context.invoked_subcommand is None:
        say(context.get_help())
    return Exit.OK


@app.command()
def status(db: Database = None) -> int:
    """Say which version the tables have, and which this Penstock uses.

    \b
    Examples:
      penstock db status --db sqlite:///penstock.db

    \b
    Exit codes:
      0 they are the same   2 they are not, or the database or its ledger cannot be used   64 wrong command line
    """
    url = _named(db)
    said, is_well = _done(_looked_at(url))
    say(f"{without_password(url)}: {said}")
    return Exit.OK if is_well else Exit.FAILED


@app.command()
def upgrade(db: Database = None) -> int:
    """Bring the tables to the version that this Penstock uses; an empty database gets them all.

    It is one act: all of it is done, or nothing. Stop the server before, and keep a copy.

    \b
    Examples:
      penstock db upgrade --db sqlite:///penstock.db

    \b
    Exit codes:
      0 they are of that version now   2 the database or its ledger cannot be used, or is of a newer version
      64 wrong command line
    """
    from penstock.storage.stores import check_ledger, migrate, schema_version

    url = _named(db)
    before = _done(schema_version(url))
    after = _done(migrate(url))
    how = "was so before" if before == after else "made" if before == 0 else f"was version {before}"
    say(f"{without_password(url)}: version {after}; {how}")
    _done(check_ledger(url))
    return Exit.OK


async def _looked_at(url: str) -> tuple[str, bool]:
    """How a database stands, and whether it is as it should be."""
    from penstock.storage.stores import check_ledger, hindrance, newest_version, schema_version

    if hindered := hindrance(url):
        return "; ".join(hindered), False
    found, newest = await schema_version(url), newest_version()
    if found == newest:
        await check_ledger(url)
    return standing(found, newest, url), found == newest


def standing(found: int, newest: int, url: str) -> str:
    """How a database stands to this Penstock, and what to do if it is not as it should be."""
    if found == newest:
        return f"version {found}, as this Penstock uses"
    if found > newest:
        return f"version {found}, and this Penstock knows versions up to {newest}; use a newer Penstock"
    if found == 0:
        return f"no tables yet; penstock serve makes them, in version {newest}"
    upgrade = f"penstock db upgrade --db {without_password(url)}"
    return f"version {found}, and this Penstock uses {newest}; {upgrade} brings it there"


def without_password(url: str) -> str:
    """The URL of a database as it may be shown."""
    scheme, found, rest = url.partition("://")
    if not found or scheme == "sqlite":
        return url
    who, at, where = rest.partition("?")[0].rpartition("@")
    return f"{scheme}://{who.partition(':')[0]}{at}{where}"


def _named(url: str | None) -> str:
    if url is None:
        raise Refused("--db says which database, such as --db sqlite:///penstock.db; PENSTOCK_DB does too")
    return url


def _done(work: Coroutine[Any, Any, Any]) -> Any:
    from penstock.errors import InvalidValue, PenstockError

    try:
        return asyncio.run(work)
    except InvalidValue as invalid:
        raise Refused(f"--db: {invalid}") from None
    except PenstockError as error:
        raise Failed(str(error)) from None
