"""`penstock doctor`: checks everything that a server or a run may need, and shows how to fix missing parts.

Changes nothing. For a key it shows whether it is set, never its value.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.exits import Exit, Failed, Refused
from penstock.cli.options import URL, AsJson, CostCeiling, Database, EngineUrl, TokensFile, Upstreams, Url, UserDaily
from penstock.cli.render.screen import Line, Screen, print_text, printable
from penstock.cli.service.db import describe_version
from penstock.cli.service.engines import open_engine
from penstock.clock import SYSTEM_CLOCK, Clock
from penstock.errors import PenstockError
from penstock.runtime.billing.prices import default_prices
from penstock.server.auth import NAMES_SHOWN
from penstock.server.checkup import Finding, State, check_installation, check_prices, guarded
from penstock.tracing.redaction import redact

if TYPE_CHECKING:
    from penstock.gateway.upstreams import Upstream
    from penstock.server.auth import Token

MARKS: dict[State, tuple[str, str]] = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "broken": ("✗", "red")}
LOW_DISK_MB = 500
SOON_DAYS = 7
"""Tokens that expire within this many days are listed."""
RUNNING = "running server"
NANOS_PER_DAY = 86_400 * 1_000_000_000


def doctor(
    db: Database = None,
    url: Url = URL,
    tokens: TokensFile = None,
    cost_ceiling: CostCeiling = None,
    user_daily: UserDaily = None,
    engine: EngineUrl = None,
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Check the gateway too: ask each provider for its models, with its key.")
    ] = False,
    upstream: Upstreams = None,
    as_json: AsJson = False,
) -> int:
    """Check everything that a server or a run needs, and show how to fix missing parts.

    Use the same options as for penstock serve. A dot marks optional parts, a cross broken ones. Nothing is changed.

    \b
    Examples:
      penstock doctor
      penstock doctor --db sqlite:///penstock.db --tokens tokens.txt --cost-ceiling 5
      penstock doctor --gateway --upstream ollama=http://127.0.0.1:11434/v1 --db sqlite:///penstock.db
      penstock doctor --json | jq '.[] | select(.state == "broken")'

    \b
    Exit codes:
      0 nothing is broken   2 something is broken
    """
    has_ceiling = cost_ceiling is not None or user_daily is not None
    findings = list(check(db, url, tokens, engine, has_ceiling=has_ceiling))
    if gateway or upstream:
        findings += check_gateway(db, upstream or ())
    if as_json:
        print_text(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        Screen(sys.stdout).show(*(_line(finding) for finding in findings), whole=True)
    return Exit.FAILED if any(finding.state == "broken" for finding in findings) else Exit.OK


def check(
    db: str | None,
    url: str,
    tokens: str | None = None,
    engine: str | None = None,
    *,
    has_ceiling: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[Finding]:
    """Run all checks and yield their findings."""
    yield from check_installation()
    yield guarded("price table", lambda: check_prices(default_prices()))
    yield guarded("database", lambda: _database(db))
    if engine is not None:
        yield guarded("engine", lambda: _engine(engine, db))
    yield guarded("tokens", lambda: _tokens(tokens, clock.time_ns()))
    if not has_ceiling:
        yield from _unlimited(tokens, clock.time_ns())
    yield guarded(RUNNING, lambda: _server(url))


def check_gateway(db: str | None, named: Sequence[str], clock: Clock = SYSTEM_CLOCK) -> Iterator[Finding]:
    """Check the upstreams of the environment and of the command line, and the keys of the database."""
    from penstock.cli.wrap.declared import declared_upstreams

    for upstream in declared_upstreams(named).values():
        yield guarded(f"upstream {upstream.name}", partial(_upstream, upstream))
    if db is not None:
        yield guarded("gateway keys", lambda: asyncio.run(_gateway_keys(db, clock.time_ns() // 1_000_000)))


def _upstream(upstream: Upstream) -> Finding:
    from penstock.gateway.reachability import Unusable, check_upstream

    name = f"upstream {upstream.name}"
    variable = f"{upstream.name.upper().replace('-', '_')}_API_KEY"
    variable = "GOOGLE_API_KEY" if upstream.name == "gemini" else variable
    if not upstream.key and upstream.url == upstream.wire.address:
        return Finding(name, "missing", "no key", f"export {variable}=…, or name a file with it in {variable}_FILE")
    try:
        return Finding(name, "ok", f"{redact(upstream.url)} {asyncio.run(check_upstream(upstream))}")
    except Unusable as unusable:
        return Finding(name, "broken", f"{redact(upstream.url)} {unusable}", f"check the address and {variable}")


async def _gateway_keys(db: str, now_ms: int) -> Finding:
    from penstock.server.tokens import all_tokens
    from penstock.storage import open_stores

    async with await open_stores(db) as stores:
        keys = [key async for key in all_tokens(stores.tokens, "gateway")]
    active = [key for key in keys if key.is_active(now_ms)]
    if not active:
        return Finding("gateway keys", "missing", "none is active", "penstock tokens create NAME --gateway --daily 5")
    unlimited = sorted({key.name for key in active if not key.limits})
    if unlimited:
        found = f"{len(active)} active; without a budget: {', '.join(unlimited[:NAMES_SHOWN])}"
        return Finding("gateway keys", "missing", found, "create them with --daily or --max-cost")
    return Finding("gateway keys", "ok", f"{len(active)} active, each with a budget")


def _engine(url: str, db: str | None) -> Finding:
    engine = open_engine(url, "postgresql://" if db is None else db, 15)()
    health, unregistered = asyncio.run(engine.examine())
    if not health.is_ok:
        return Finding("engine", "broken", health.found)
    if unregistered:
        create = " ".join(f"--name {name} --type Keyword" for name in unregistered)
        advice = f"to find runs in Temporal: temporal operator search-attribute create {create}"
        return Finding("engine", "missing", f"{health.found}, without search attributes", advice)
    return Finding("engine", "ok", health.found)


def _database(url: str | None) -> Finding:
    from penstock.storage.stores import (
        check_ledger,
        check_rows,
        hindrance,
        newest_version,
        schema_version,
        scheme_of,
        sqlite_path,
    )

    if url is None:
        return Finding("database", "missing", "not checked", "name it with --db, such as --db sqlite:///penstock.db")
    if hindered := hindrance(url):
        return Finding("database", "broken", *hindered)
    path = sqlite_path(url) if scheme_of(url) == "sqlite" else None
    if path is not None and not path.exists():
        return Finding("database", "missing", f"{path} does not exist yet", "penstock serve creates it")
    found = asyncio.run(schema_version(url))
    if found not in (0, newest_version()):
        state, _, advice = describe_version(found, newest_version(), url).partition("; ")
        return Finding("database", "broken", state, advice)
    if found == 0:
        return Finding("database", "missing", "no tables yet", "penstock serve creates them")
    asyncio.run(check_ledger(url))
    if rows := asyncio.run(check_rows(url)):
        first = f"{len(rows)} unreadable rows; the first is {rows[0].key!r} of table {rows[0].table!r}: {rows[0].why}"
        return Finding("database", "broken", first, "restore these rows from a backup, or remove them")
    if path is not None:
        return _disk(path, found)
    return Finding("database", "ok", f"version {found}")


def _disk(path: Path, version: int) -> Finding:
    free_mb = shutil.disk_usage(path.parent).free // 1_000_000
    if free_mb < LOW_DISK_MB:
        return Finding(
            "database", "broken", f"only {free_mb} MB free for {path}", "free some space: a full disk stops runs"
        )
    return Finding("database", "ok", f"version {version}, {path.stat().st_size // 1_000} kB, {free_mb:,} MB free")


def _named_tokens(file: str | None) -> tuple[Token, ...]:
    from penstock.server.settings import tokens_in

    return tokens_in(os.environ if file is None else {**os.environ, "PENSTOCK_TOKENS_FILE": file})


def _tokens(file: str | None, now_ns: int) -> Finding:
    from penstock.server.auth import names_of

    tokens = _named_tokens(file)
    if not tokens:
        return Finding("tokens", "missing", "none: only this machine may connect", "check a file with --tokens FILE")
    expired = [token for token in tokens if token.has_expired(now_ns)]
    soon_ns = now_ns + SOON_DAYS * NANOS_PER_DAY
    ending = [token for token in tokens if token.has_expired(soon_ns) and not token.has_expired(now_ns)]
    if not expired and not ending:
        return Finding("tokens", "ok", f"{len(tokens)}, none expires within {SOON_DAYS} days")
    found = [f"expired: {names_of(expired)}"] if expired else []
    found += [f"expire within {SOON_DAYS} days: {names_of(ending)}"] if ending else []
    state: State = "broken" if len(expired) == len(tokens) else "missing"
    return Finding("tokens", state, "; ".join(found), "add new tokens, then remove the old ones")


def _unlimited(file: str | None, now_ns: int) -> Iterator[Finding]:
    """Yield a finding if several users may spend on a server without a ceiling."""
    from penstock.server.auth import spenders

    try:
        people = spenders(_named_tokens(file), now_ns)
    except PenstockError:
        return  # reported by the tokens check
    if len(people) > 1:
        found = f"each of {len(people)} users may start runs without a cost ceiling"
        yield Finding("spending", "missing", found, "set --cost-ceiling or --user-daily for penstock serve, and here")


def _server(url: str) -> Finding:
    from penstock.cli.remote.connection import Connection

    try:
        with Connection(url) as server:
            server.get("/health")
    except Failed as failed:
        return Finding(RUNNING, "missing", str(failed))
    except Refused as refused:
        return Finding(RUNNING, "broken", str(refused))
    return Finding(RUNNING, "ok", f"answers at {url}")


def _line(finding: Finding) -> Line:
    mark, colour = MARKS[finding.state]
    line: Line = [(f"{mark} ", colour), (f"{finding.name:<18} ", ""), (printable(finding.found), "")]
    if finding.advice:
        line.append((f"  → {finding.advice}", colour))
    return line
