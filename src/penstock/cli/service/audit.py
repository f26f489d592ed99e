"""`penstock audit`: list the actions of people from the audit log in a server's database."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.exits import Exit, Refused
from penstock.cli.options import AsJson, Database, numeric
from penstock.cli.render.screen import print_text, printable
from penstock.cli.render.text import short
from penstock.cli.service.stored import moment, on_stores, table
from penstock.cli.values import whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.hosting.audit import AuditFilter, AuditRecord
    from penstock.storage import Stores

HEAD = ("time", "actor", "action", "target", "owner", "source", "details")
PAGE = 500


def audit(
    actor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only entries of this person, or about their things.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(metavar="ACTION", help="Only this action, such as run.cancel, or a kind, such as run.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="ID", help="Only what was done to this run, token, …")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="From this day (2027-12-31) or time (2027-12-31T18:00:00Z) on.")
    ] = None,
    limit: Annotated[int, numeric(whole_number, "N", "Maximum number of entries.", minimum=1)] = 100,
    as_json: AsJson = False,
    db: Database = None,
) -> int:
    """List the actions of people, newest first: cancels, grants, approvals, bills, changes of graphs and tokens.

    Times are in UTC. Entries are kept for `penstock serve --keep-audit` days.

    \b
    Examples:
      penstock audit --db sqlite:///penstock.db
      penstock audit --actor ann --action token --db sqlite:///penstock.db
      penstock audit --since 2027-03-01 --limit 10000 --json --db postgresql://localhost/penstock

    \b
    Exit codes:
      0 ok, also without entries   2 the database cannot be used   64 wrong command line
    """
    from penstock.hosting.audit import AuditFilter

    matching = AuditFilter(actor, action, target, None if since is None else _since_ms(since))
    found = on_stores(db, "audit entries", lambda stores: _entries(stores, matching, limit))
    if as_json:
        print_text(json.dumps([asdict(entry) for entry in found], indent=2))
    elif not found:
        print_text("no matching entries")
    else:
        print_text("\n".join(table([HEAD, *map(_row, found)])))
    return Exit.OK


async def _entries(stores: Stores, matching: AuditFilter, limit: int) -> Sequence[AuditRecord]:
    found: list[AuditRecord] = []
    while len(found) < limit:
        before = found[-1].id if found else None
        page = await stores.audit.list(matching, before=before, limit=min(PAGE, limit - len(found)))
        if not page:
            break
        found += page
    return found


def _since_ms(text: str) -> int:
    from penstock.server.auth import DAY, TokensInvalid, parse_until

    try:
        return parse_until(f"{text}T00:00:00Z" if DAY.fullmatch(text) else text) // 1_000_000
    except TokensInvalid:
        expected = "a day such as 2027-12-31, or a time such as 2027-12-31T18:00:00Z"
        raise Refused(f"--since must be {expected}, not {printable(text)[:40]}") from None


def _row(entry: AuditRecord) -> tuple[str, ...]:
    details = short(json.dumps(dict(entry.details), ensure_ascii=False)) if entry.details else ""
    names = (printable(name) for name in (entry.actor, entry.action, entry.target, entry.owner))
    return moment(entry.at_ms), *names, entry.source, details
