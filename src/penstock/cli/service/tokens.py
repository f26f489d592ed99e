"""`penstock tokens …`: create, list and revoke the access tokens in a server's database, while it runs or not."""

from __future__ import annotations

import json
import os
import sys
from datetime import date, tzinfo
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.exits import Exit, Refused
from penstock.cli.options import (
    ActionOnBill,
    CallWithBill,
    CostOfBill,
    Database,
    check_bill_arguments,
    dollars,
)
from penstock.cli.render.screen import print_text, printable, write
from penstock.cli.render.text import dollars as shown_dollars
from penstock.cli.service.stored import moment, now_ms, on_stores, person, record_audit, table
from penstock.money import Usd, format_usd, to_nanos

if TYPE_CHECKING:
    from penstock.gateway.key_accounts import KeySpend
    from penstock.hosting.tokens import TokenRecord
    from penstock.storage import Stores

app = typer.Typer(rich_markup_mode=None)

COLUMNS = ("id", "name", "role", "kind", "state", "created", "expires", "last used", "note")
KEY_COLUMNS = ("id", "name", "team", "state", "daily", "whole", "spent today", "held", "unresolved", "left", "models")
RUN_COLUMNS = ("run", "calls", "tokens in", "tokens out", "spent", "held", "unresolved")
BILL_COLUMNS = ("key", "name", "day", "run", "held", "call")

_BILLS_OF_RUNS = "bills of runs with: penstock runs bills"
MAX_RUNS = 10_000
"""Maximum number of runs that are listed."""

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback(invoke_without_command=True)
def tokens(context: typer.Context) -> int:
    """Manage the access tokens in a server's database. Changes are in force within a second, without a restart.

    Once the database has an admin's token, clients of the server need a token, also on its own machine.

    \b
    Examples:
      penstock tokens create ann --role admin --db sqlite:///penstock.db
      penstock tokens list --db sqlite:///penstock.db
      penstock tokens revoke 0123456789ab --db sqlite:///penstock.db

    \b
    Exit codes:
      0 ok   2 refused, or the database cannot be used   64 wrong command line
    """
    if context.invoked_subcommand is None:
        print_text(context.get_help())
    return Exit.OK


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the user; owner of what the token starts.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help="viewer, user or admin.")] = "user",
    expires: Annotated[
        str | None, typer.Option(metavar="TIME", help="Last day (2027-12-31) or time (2027-12-31T18:00:00Z); in UTC.")
    ] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="What the token is for.")] = "",
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="Create a key for `penstock gateway`, which calls models and nothing else."),
    ] = False,
    daily: Annotated[str | None, dollars("Daily budget of a gateway key.")] = None,
    max_cost: Annotated[str | None, dollars("Budget of a gateway key for all of its time.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Models that a gateway key may call, such as gpt-*. Repeatable."),
    ] = None,
    team: Annotated[
        str, typer.Option(metavar="TEAM", help="Team of a gateway key; `penstock gateway --team-daily` limits it.")
    ] = "",
    another: Annotated[bool, typer.Option("--another", help="Allow a further active token of the same name.")] = False,
    db: Database = None,
) -> int:
    """Create a token, and print its secret: it is not stored, and cannot be shown again.

    The secret is the only line on standard output.

    \b
    Examples:
      penstock tokens create ann --role admin --db sqlite:///penstock.db
      penstock tokens create ci --expires 2027-12-31 --note "nightly build" --db sqlite:///penstock.db
      penstock tokens create ann --gateway --daily 5 --model 'gpt-*' --team research --db sqlite:///penstock.db

    \b
    Exit codes:
      0 created   2 ann has a token already, or the database cannot be used   64 wrong command line
    """
    from penstock.errors import InvalidValue
    from penstock.server.tokens import check_team, create_token

    if not gateway and (daily is not None or max_cost is not None or model or team):
        raise Refused("--daily, --max-cost, --model and --team are for gateway keys; add --gateway")
    given = {"daily_usd": daily, "max_cost_usd": max_cost}
    limits = {limit: amount for limit, amount in given.items() if amount is not None} if gateway else None
    try:
        record, secret = create_token(
            *(name, role),
            by=person(),
            now_ms=now_ms(),
            expires=expires,
            note=note,
            kind="gateway" if gateway else "user",
            limits=limits,
            models=model or None,
            team=team,
        )
    except InvalidValue as invalid:
        raise Refused(str(invalid)) from None

    async def add(stores: Stores) -> TokenRecord:
        if gateway:
            await check_team(stores.tokens, record, record.created_ms)
        added = await stores.tokens.add(record, is_only=not (another or gateway))
        about = {"role": role, "kind": record.kind, "expires": expires, "limits": limits, "models": model or None}
        await record_audit(stores, "token.create", added.id, added.name, **about)
        return added

    added = on_stores(db, "tokens", add)
    print_text(secret)
    what = "gateway key" if gateway else "token"
    write(f"created {what} {added.id} of {printable(name)}, {role}; its secret is not shown again", sys.stderr)
    return Exit.OK


@app.command("list")
def list_tokens(
    as_json: AsJson = False,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="List gateway keys, with their budgets and what they spent today.")
    ] = False,
    db: Database = None,
) -> int:
    """List the tokens in the database, newest first; tokens of a server's environment are not in it.

    \b
    Examples:
      penstock tokens list --db sqlite:///penstock.db
      penstock tokens list --gateway --db sqlite:///penstock.db
      penstock tokens list --json --db postgresql://localhost/penstock

    \b
    Exit codes:
      0 listed   2 the database cannot be used   64 wrong command line
    """
    columns, rows_of = (KEY_COLUMNS, _key_rows) if gateway else (COLUMNS, _token_rows)
    rows = on_stores(db, "tokens", rows_of)
    if as_json:
        print_text(json.dumps([dict(zip(columns, row, strict=True)) for row in rows], indent=2))
    elif not rows:
        what, how = ("gateway keys", "--gateway --daily 5") if gateway else ("tokens", "--role admin")
        print_text(f"no {what} in this database; create one with: penstock tokens create NAME {how}")
    else:
        print_text("\n".join(table([columns, *rows])))
    return Exit.OK


@app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token, as `penstock tokens list` shows it.")],
    last: Annotated[bool, typer.Option("--last", help="Revoke it even if no admin's token is left.")] = False,
    db: Database = None,
) -> int:
    """Revoke a token: servers refuse it within a second.

    \b
    Examples:
      penstock tokens revoke 0123456789ab --db sqlite:///penstock.db

    \b
    Exit codes:
      0 revoked   2 no such token, the last admin's, or the database cannot be used   64 wrong command line
    """

    async def act(stores: Stores) -> tuple[bool, TokenRecord]:
        before = await stores.tokens.get(token_id)
        revoked = await stores.tokens.revoke(token_id, by=person(), now_ms=now_ms(), keep_admin=not last)
        was_revoked = before is not None and before.revoked_ms is not None
        if not was_revoked:
            await record_audit(stores, "token.revoke", revoked.id, revoked.name)
        return was_revoked, revoked

    was_revoked, token = on_stores(db, "tokens", act)
    print_text(f"{token.id} of {printable(token.name)}: {'was revoked before' if was_revoked else 'revoked'}")
    return Exit.OK


@app.command()
def runs(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the gateway key.")],
    day: Annotated[str | None, typer.Option(metavar="DAY", help="A day such as 2027-12-31; today without it.")] = None,
    as_json: AsJson = False,
    db: Database = None,
) -> int:
    """List the runs of a gateway key on a day, with their usage.

    Requests name their run in the header X-Penstock-Run; all requests without it belong to the run `day`.

    \b
    Examples:
      penstock tokens runs 0123456789ab --db sqlite:///penstock.db
      penstock tokens runs 0123456789ab --day 2027-12-31 --json --db sqlite:///penstock.db

    \b
    Exit codes:
      0 listed, also without runs   2 refused, or the database cannot be used   64 wrong command line
    """
    try:
        of = None if day is None else date.fromisoformat(day)
    except ValueError:
        raise Refused(f"--day must be a day such as 2027-12-31, not {day!r}") from None
    rows = on_stores(db, "tokens", partial(_run_rows, token_id, of))
    if as_json:
        print_text(json.dumps([dict(zip(RUN_COLUMNS, row, strict=True)) for row in rows], indent=2))
    elif not rows:
        print_text(f"{token_id} has no runs {'today' if of is None else f'on {of}'}")
    else:
        print_text("\n".join(table([RUN_COLUMNS, *rows])))
    return Exit.OK


async def _run_rows(token_id: str, day: date | None, stores: Stores) -> list[tuple[str, ...]]:
    from penstock.gateway.key_runs import key_runs
    from penstock.hosting.durability import day_of
    from penstock.runtime.durable.async_ledger import AsyncLedger

    key = await _gateway_key(stores, token_id, "runs of graphs with: penstock runs list")
    of = day or day_of(now_ms(), _zone())
    found = await key_runs(AsyncLedger(stores.ledger), key.id, of, limit=MAX_RUNS)
    return [
        (
            run.name,
            *(str(count) for count in (run.used.api_calls, run.used.tokens_in, run.used.tokens_out)),
            *(format_usd(nanos) for nanos in (run.used.spent_nanos, run.used.held_nanos, run.used.unresolved_nanos)),
        )
        for run in found
    ]


@app.command()
def bills(
    token_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Id of the gateway key; without it, list the bills of all keys.")
    ] = None,
    action: ActionOnBill = None,
    call: CallWithBill = None,
    cost: CostOfBill = None,
    as_json: AsJson = False,
    db: Database = None,
) -> int:
    """List the unresolved bills of gateway keys, or resolve one.

    A call whose answer broke off, or whose client disconnected, may have been billed, so the amount held for it stays
    taken from the budgets of its key. Look up what it cost (the log of the gateway has its model and time, under the
    same id), and resolve its bill at that amount, or release it if it cost nothing.

    \b
    Examples:
      penstock tokens bills --db sqlite:///penstock.db
      penstock tokens bills 0123456789ab --db sqlite:///penstock.db
      penstock tokens bills 0123456789ab resolve CALL --cost 0.02 --db sqlite:///penstock.db
      penstock tokens bills 0123456789ab release CALL --db sqlite:///penstock.db

    \b
    Exit codes:
      0 ok, also without bills   2 refused, or the database cannot be used   64 wrong command line
    """
    check_bill_arguments("penstock tokens bills ID", action, call, cost)
    if action is not None:
        left = on_stores(db, "tokens", partial(_resolve, str(token_id), str(call), cost))
        done = "released" if cost is None else f"resolved at {shown_dollars(cost)}"
        print_text(f"{token_id}: bill of call {printable(str(call))} {done}; unresolved bills left: {left}")
        return Exit.OK
    rows = on_stores(db, "tokens", partial(_bill_rows, token_id))
    if as_json:
        print_text(json.dumps([dict(zip(BILL_COLUMNS, row, strict=True)) for row in rows], indent=2))
    elif not rows:
        print_text(
            f"{token_id or 'no gateway key'} has {'no ' if token_id else ''}unresolved bills: nothing to resolve"
        )
    else:
        print_text("\n".join(table([BILL_COLUMNS, *rows])))
    return Exit.OK


async def _bill_rows(token_id: str | None, stores: Stores) -> list[tuple[str, ...]]:
    from penstock.gateway.key_bills import key_bills
    from penstock.runtime.durable.async_ledger import AsyncLedger
    from penstock.server.tokens import all_tokens

    named = None if token_id is None else [await _gateway_key(stores, token_id)]
    keys = named or [key async for key in all_tokens(stores.tokens, "gateway")]
    ledger = AsyncLedger(stores.ledger)
    return [
        (key.id, key.name, str(bill.day), bill.run, format_usd(bill.held.cost_nanos), bill.call_id)
        for key in keys
        for bill in await key_bills(ledger, key.id)
    ]


async def _resolve(token_id: str, call: str, cost: str | None, stores: Stores) -> int:
    """Resolve a bill, or release it without a cost; return how many are left."""
    from penstock.containment.ledger import Amounts
    from penstock.gateway.key_bills import resolve_key_bill
    from penstock.runtime.durable.async_ledger import AsyncLedger

    key = await _gateway_key(stores, token_id)
    actual = None if cost is None else Amounts(to_nanos(cost))
    left = await resolve_key_bill(AsyncLedger(stores.ledger), key.id, call, actual)
    action = "bill.release" if cost is None else "bill.resolve"
    await record_audit(stores, action, key.id, key.name, call_id=call, cost_usd=cost)
    return len(left)


async def _gateway_key(stores: Stores, token_id: str, others: str = _BILLS_OF_RUNS) -> TokenRecord:
    from penstock.hosting.tokens import TokenNotFound

    key = await stores.tokens.get(token_id)
    if key is None:
        raise TokenNotFound(token_id)
    if key.kind != "gateway":
        raise Refused(f"{token_id} is not a gateway key; list the {others}")
    return key


async def _token_rows(stores: Stores) -> list[tuple[str, ...]]:
    from penstock.server.tokens import all_tokens

    return [_row(token, now_ms()) async for token in all_tokens(stores.tokens)]


async def _key_rows(stores: Stores) -> list[tuple[str, ...]]:
    from penstock.gateway.key_accounts import spend_on
    from penstock.hosting.durability import day_of
    from penstock.runtime.durable.async_ledger import AsyncLedger
    from penstock.server.tokens import all_tokens

    zone = _zone()
    ledger, day = AsyncLedger(stores.ledger), day_of(now_ms(), zone)
    return [
        _key_row(key, await spend_on(ledger, key, day, zone), now_ms())
        async for key in all_tokens(stores.tokens, "gateway")
    ]


def _zone() -> tzinfo:
    from penstock.hosting.limits import zone_named

    return zone_named(os.environ.get("PENSTOCK_DAY_ZONE", "UTC"), "PENSTOCK_DAY_ZONE")


def _key_row(key: TokenRecord, spend: KeySpend, now_ms: int) -> tuple[str, ...]:
    limits = key.limits or {}
    budgets = (_usd(limits.get(name)) for name in ("daily_usd", "max_cost_usd"))
    used = (format_usd(nanos) for nanos in (spend.spent_nanos, spend.held_nanos, spend.unresolved_nanos))
    left = "-" if spend.left_nanos is None else format_usd(spend.left_nanos)
    return key.id, key.name, key.team or "-", _state(key, now_ms), *budgets, *used, left, ", ".join(key.models or ["*"])


def _usd(amount: Usd | None) -> str:
    return "-" if amount is None else format_usd(to_nanos(amount))


def _state(token: TokenRecord, now_ms: int) -> str:
    return "active" if token.is_active(now_ms) else "expired" if token.revoked_ms is None else "revoked"


def _row(token: TokenRecord, now_ms: int) -> tuple[str, ...]:
    times = (moment(ms) for ms in (token.created_ms, token.expires_ms, token.last_used_ms))
    return token.id, token.name, token.role, token.kind, _state(token, now_ms), *times, printable(token.note)
