"""`penstock people …`: find, export and erase the data of one person in a server's database."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.exits import Exit, Refused
from penstock.cli.options import AsJson, Database
from penstock.cli.render.screen import print_text, printable
from penstock.cli.render.text import counted
from penstock.cli.service.stored import now_ms, on_stores, person, record_audit, table

if TYPE_CHECKING:
    from penstock.storage import Stores
    from penstock.storage.people import Erased

app = typer.Typer(rich_markup_mode=None)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the person, as tokens and runs have it.")]
WHAT = "data of people"


@app.callback(invoke_without_command=True)
def people(context: typer.Context) -> int:
    """Find, export and erase the data of one person.

    \b
    Examples:
      penstock people find ann --db sqlite:///penstock.db
      penstock people export ann --db sqlite:///penstock.db > ann.ndjson
      penstock people erase ann --yes --db sqlite:///penstock.db

    \b
    Exit codes:
      0 ok   2 refused, or the database cannot be used   64 wrong command line
    """
    if context.invoked_subcommand is None:
        print_text(context.get_help())
    return Exit.OK


@app.command()
def find(name: Name, as_json: AsJson = False, db: Database = None) -> int:
    """Show where a person's name is stored, as numbers of rows by table and column.

    \b
    Examples:
      penstock people find ann --db sqlite:///penstock.db

    \b
    Exit codes:
      0 ok, also if nothing is found   2 the database cannot be used   64 wrong command line
    """
    places: dict[str, int] = dict(on_stores(db, WHAT, lambda stores: stores.people.places(name)))
    if as_json:
        print_text(json.dumps(places, indent=2))
    elif not places:
        print_text(f"nothing is stored of {printable(name)}")
    else:
        print_text("\n".join(table([("place", "rows"), *((place, str(count)) for place, count in places.items())])))
    return Exit.OK


@app.command()
def export(name: Name, db: Database = None) -> int:
    """Print everything that is stored about a person, one JSON value per line.

    This includes runs with their events, payloads and approvals, chats with their messages, files, memories, tokens
    without their secrets, and entries of the audit log.

    \b
    Examples:
      penstock people export ann --db sqlite:///penstock.db > ann.ndjson

    \b
    Exit codes:
      0 ok, also if nothing is found   2 the database cannot be used   64 wrong command line
    """

    async def write(stores: Stores) -> None:
        from penstock.storage.people import export_person

        async for value in export_person(stores, name):
            print_text(json.dumps(value))
        await record_audit(stores, "person.export", "", name)

    on_stores(db, WHAT, write)
    return Exit.OK


@app.command()
def erase(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Erase; there is no way back but a backup.")] = False,
    db: Database = None,
) -> int:
    """Erase a person: revoke tokens, remove runs, chats, files and memories, and replace the name elsewhere.

    Runs must have ended. Money totals stay, under a pseudonym.

    \b
    Examples:
      penstock people erase ann --yes --db sqlite:///penstock.db

    \b
    Exit codes:
      0 erased   2 runs have not ended, or the database cannot be used   64 wrong command line
    """
    if not yes:
        raise Refused(f"this removes all data of {printable(name)}, without a way back; add --yes to do it")

    async def act(stores: Stores) -> Erased:
        from penstock.storage.people import erase_person

        erased = await erase_person(stores, name, by=person(), now_ms=now_ms())
        await record_audit(stores, "person.erase", erased.pseudonym, "", runs=erased.runs, chats=erased.chats)
        return erased

    erased: Erased = on_stores(db, WHAT, act)
    print_text(
        f"erased {counted(erased.runs, 'run')} and {counted(erased.chats, 'chat')}; what stays names {erased.pseudonym}"
    )
    return Exit.OK
