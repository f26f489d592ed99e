"""Shared code of the commands that work on a server's database: opening it, rendering tables, and the audit log."""

from __future__ import annotations

import getpass
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from penstock.cli.exits import Refused
from penstock.cli.service.db import named_database, run_on_database

if TYPE_CHECKING:
    from penstock.storage import Stores


def on_stores(db: str | None, what: str, act: Callable[[Stores], Coroutine[Any, Any, Any]]) -> Any:
    """Run `act` with the stores of the database that the command line names; errors call its content `what`."""
    from penstock.storage import open_stores

    url = named_database(db)
    if url.startswith("memory:"):
        raise Refused(f"{what} in memory: are lost with the process; name the server's database with --db")

    async def opened() -> Any:
        async with await open_stores(url) as stores:
            return await act(stores)

    return run_on_database(opened())


async def record_audit(stores: Stores, action: str, target: str, owner: str, **details: Any) -> None:
    """Record an action of the person on the command line."""
    from penstock.hosting.audit import AuditRecord
    from penstock.ids import new_run_id

    given = {name: value for name, value in details.items() if value not in (None, "")}
    entry = AuditRecord(new_run_id(), now_ms(), person(), action, target, owner, "cli", given)
    await stores.audit.append(entry)


def person() -> str:
    """Return the name of the person who runs the command, for tokens and the audit log."""
    try:
        return f"{getpass.getuser()} (command line)"
    except (OSError, KeyError):  # a container without an entry for its user
        return "command line"


def now_ms() -> int:
    """Return the current time in milliseconds since 1970."""
    from penstock.clock import SYSTEM_CLOCK

    return SYSTEM_CLOCK.time_ns() // 1_000_000


def moment(at_ms: int | None) -> str:
    """Format a time, to the second and in UTC."""
    from penstock.server.auth import format_time

    return "-" if at_ms is None else format_time(at_ms * 1_000_000)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table whose first row is its head."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
