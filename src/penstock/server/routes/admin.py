"""Routes for operators: a checkup of the server, its settings, and its figures."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from penstock.hosting.limits import NO_CEILINGS, HostSettings, RunLimits
from penstock.hosting.ports import CLAIMED, RunRecord
from penstock.server.auth import spenders
from penstock.server.checkup import Finding, State, check_installation, check_prices, guarded
from penstock.server.schemas import Shown
from penstock.server.settings import ServerSettings
from penstock.server.state import KNOWN_QUERY, ServerState, Service
from penstock.storage.stores import newest_version

router = APIRouter(prefix="/api", tags=["server"], dependencies=[KNOWN_QUERY])

Section = Literal["runs", "money", "storage", "access", "requests"]
MAX_RUNS = 1_000
"""Maximum number of claimed runs that are counted by worker."""

HOST_SETTINGS: dict[str, tuple[Section, str, str]] = {
    "max_running": ("runs", "Concurrent runs", "--max-running"),
    "max_running_per_owner": ("runs", "Concurrent runs of each user", "--max-running-per-user"),
    "max_queued": ("runs", "Queued runs, over all servers", ""),
    "max_queued_per_owner": ("runs", "Queued runs of each user", ""),
    "max_abandoned_threads": ("runs", "Functions that may still run after they were cancelled", ""),
    "default_limits": ("money", "Limits of a run that names none", "--max-cost, --max-steps, --timeout"),
    "ceilings": ("money", "Highest limits of a run", "--cost-ceiling, --steps-ceiling, --timeout-ceiling"),
    "owner_daily_usd": ("money", "Daily budget of each user", "--user-daily"),
    "daily_usd": ("money", "Daily budget of all users together", "--daily"),
    "day_zone": ("money", "Time zone of the daily budgets", "--day-zone"),
    "day_blocks": ("money", "Set aside a part of the daily budgets for each server and worker", "--daily-blocks"),
    "max_wait_s": ("money", "How long a call waits for money that other calls hold", ""),
    "lease_s": ("runs", "Runs of a server that is silent for this long are taken over", "--lease"),
    "tick_s": ("runs", "Interval of looking for cancel requests and answers", ""),
    "drain_s": ("runs", "Time for runs to end when the server stops", "--drain"),
    "park_waiting_s": ("runs", "With an engine: time after which a waiting run leaves its worker", ""),
    "early_cancel_s": ("runs", "How long a cancel request waits for its run", ""),
    "keep_days": ("storage", "Days that ended runs are kept", "--keep-days"),
    "record_payloads": ("storage", "Requests and responses of calls that are stored", "--record-payloads"),
    "max_payload_bytes": ("storage", "Size of one stored request or response", ""),
    "max_run_payload_bytes": ("storage", "Size of all stored requests and responses of a run", ""),
    "keep_payload_days": ("storage", "Days that requests and responses are kept", "--keep-payloads"),
    "keep_audit_days": ("storage", "Days that entries of the audit log are kept", "--keep-audit"),
}
"""Section, title and command-line option of each setting of the host."""
SERVER_SETTINGS: dict[str, tuple[Section, str, str]] = {
    "host": ("access", "Address", "--host"),
    "port": ("access", "Port", "--port"),
    "allowed_hosts": ("access", "Further names of this server", "--allow-host"),
    "allowed_origins": ("access", "Further origins of requests", "PENSTOCK_ALLOWED_ORIGINS"),
    "trusted_proxies": ("access", "Proxies in front", "--trusted-proxy"),
    "root_path": ("access", "Path under which a proxy offers the server", "--root-path"),
    "max_failed_tokens_per_minute": ("access", "Wrong tokens per minute of one address", ""),
    "max_requests": ("requests", "Concurrent requests", ""),
    "max_connections_per_client": ("requests", "Connections of one address", ""),
    "max_streams": ("requests", "Open streams", ""),
    "max_streams_per_user": ("requests", "Open streams of each user", ""),
    "max_body_bytes": ("requests", "Size of a request", ""),
    "max_attachment_bytes": ("requests", "Size of an attachment", ""),
    "max_mcp_sessions": ("requests", "MCP sessions", ""),
    "max_mcp_sessions_per_user": ("requests", "MCP sessions of each user", ""),
    "retry_grace_s": ("requests", "How long a run continues after its /v1 client disconnected", ""),
    "client_tools_wait_s": ("requests", "How long a run waits for the tools of its client", ""),
}
"""The same for settings of the server; the others limit a single request and have no command-line option."""


class FindingShown(Shown):
    """The result of one check; `missing` is optional, `broken` cannot work as it is."""

    name: str
    state: State
    found: str
    advice: str


class Checkup(Shown):
    """The findings of the server about itself."""

    findings: list[FindingShown]


class Setting(Shown):
    """A setting in force; `option` changes it at the next start, and is empty if only code can."""

    name: str
    section: Section
    title: str
    value: Any
    unit: Literal["", "seconds", "days", "bytes", "usd"]
    option: str
    is_default: bool


class SettingList(Shown):
    """The settings in force."""

    settings: list[Setting]


class WorkerShown(Shown):
    """A server that works on runs of this database."""

    name: str
    runs: int
    lease_until_ms: int = Field(description="When its runs are taken over unless it renews its lease")
    is_this: bool


class DatabaseShown(Shown):
    """The database of the server."""

    url: str
    version: int
    size_bytes: int | None
    unreadable_rows: int


class HostShown(Shown):
    """Figures of this server and of the database it shares with others."""

    worker: str
    now_ms: int
    running: int
    waiting: int
    queued: int
    streams: int
    cpu_s: float
    max_memory_bytes: int | None = Field(description="The most memory that the process has had; null on Windows")
    totals: dict[str, int]
    workers: list[WorkerShown]
    database: DatabaseShown


@router.get("/doctor")
async def doctor(service: Service) -> Checkup:
    """Check the installation, the prices, the database and the access to this server; changes nothing."""
    size = await service.stores.size_bytes()
    findings = await asyncio.to_thread(lambda: [*_findings(service, size)])
    return Checkup(findings=[FindingShown.model_validate(finding) for finding in findings])


@router.get("/settings")
async def settings(service: Service) -> SettingList:
    """List the settings in force, without tokens or other secrets."""
    defaults: Any
    found = []
    for given, defaults, about in (
        (service.host.settings, HostSettings(), HOST_SETTINGS),
        (service.settings, ServerSettings(), SERVER_SETTINGS),
    ):
        for name, (section, title, option) in about.items():
            value = getattr(given, name)
            found.append(
                Setting(
                    name=name,
                    section=section,
                    title=title,
                    value=_plain(value),
                    unit=_unit(name),
                    option=option,
                    is_default=value == getattr(defaults, name),
                )
            )
    return SettingList(settings=found)


@router.get("/host")
async def host(service: Service) -> HostShown:
    """Return the figures of this server, the servers that work on runs of its database, and the database's size."""
    runs = service.stores.runs
    claimed = await runs.list(statuses=CLAIMED, limit=MAX_RUNS)
    stats = service.host.stats()
    return HostShown(
        worker=stats["worker"],
        now_ms=service.now_ms(),
        running=stats["running"],
        waiting=stats["waiting"],
        queued=await runs.count(statuses=("queued",)),
        streams=service.metrics.open_streams,
        cpu_s=round(time.process_time(), 3),
        max_memory_bytes=_max_memory_bytes(),
        totals={name: count for name, count in stats["totals"].items() if ":" not in name},
        workers=_workers(claimed, stats["worker"]),
        database=DatabaseShown(
            url=service.stores.url,
            version=newest_version(),
            size_bytes=await service.stores.size_bytes(),
            unreadable_rows=len(service.stores.faults.rows),
        ),
    )


def _findings(service: ServerState, size_bytes: int | None) -> Iterator[Finding]:
    yield from check_installation(service.executors())
    yield guarded("price table", lambda: check_prices(service.host.prices))
    yield _database(service, size_bytes)
    yield from _access(service)


def _database(service: ServerState, size_bytes: int | None) -> Finding:
    broken = service.stores.faults.rows
    if broken:
        first = f"{len(broken)} unreadable rows; the first is {broken[0].key!r} of table {broken[0].table!r}"
        return Finding("database", "broken", first, "restore these rows from a backup, or remove them")
    if size_bytes is None:
        found = "in memory: everything is lost when the server stops"
        return Finding("database", "missing", found, "name a database with --db, such as --db sqlite:///penstock.db")
    return Finding("database", "ok", f"version {newest_version()}, {size_bytes // 1_000:,} kB, {service.stores.url}")


def _access(service: ServerState) -> Iterator[Finding]:
    """Yield a finding if users may spend without a ceiling."""
    limits = service.host.settings
    has_ceiling = limits.ceilings.max_cost_usd is not None or limits.owner_daily_usd is not None
    people = spenders(service.settings.tokens, service.clock.time_ns())
    if len(people) > 1 and not has_ceiling:
        found = f"each of {len(people)} users may start runs without a cost ceiling"
        yield Finding("spending", "missing", found, "start penstock serve with --cost-ceiling or --user-daily")
    if not limits.daily_usd:
        yield Finding("daily budget", "missing", "none: a day may cost any amount", "start penstock serve with --daily")


def _max_memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1_024


def _plain(value: Any) -> Any:
    """Return a setting as JSON."""
    if isinstance(value, RunLimits):
        return value.to_dict(NO_CEILINGS)
    if isinstance(value, Decimal):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _unit(name: str) -> Literal["", "seconds", "days", "bytes", "usd"]:
    if name.endswith("_usd"):
        return "usd"
    if name.endswith("_bytes"):
        return "bytes"
    if name.endswith("_days"):
        return "days"
    return "seconds" if name.endswith("_s") else ""


def _workers(claimed: Sequence[RunRecord], own: str) -> list[WorkerShown]:
    runs = Counter(run.worker for run in claimed if run.worker is not None)
    names = sorted({*runs, own})
    leases = {name: max((run.lease_until_ms for run in claimed if run.worker == name), default=0) for name in names}
    return [WorkerShown(name=name, runs=runs[name], lease_until_ms=leases[name], is_this=name == own) for name in names]
