"""The limits of a hosted run, as written by clients and as stored, and the settings of a host.

A field that is None sets no limit, and 0 allows nothing. Limits are stored as JSON without the fields that are None.
Money is a decimal string, so that databases and other languages do not change a ceiling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, tzinfo
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter
from typing import Any
from zoneinfo import ZoneInfo

from penstock import checks
from penstock.containment.limits import Budget, ExecutionConfig, Limits, seconds_to_ns
from penstock.errors import InvalidValue
from penstock.money import MAX_NANOS, NANOS_PER_USD, Usd, to_nanos
from penstock.runtime.worker import MAX_ABANDONED
from penstock.tracing.payloads import (
    LARGEST_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES,
    RECORD_PAYLOADS,
    SMALLEST_PAYLOAD_BYTES,
    RecordPayloads,
)

MAX_COUNT = (1 << 53) - 1
"""Largest count that every JSON reader represents exactly."""

MAX_TIMEOUT_S = 1e9


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The ceilings of one hosted run."""

    max_cost_usd: Usd | None = None
    max_steps: int | None = None
    max_tokens: int | None = None
    max_api_calls: int | None = None
    max_retries: int | None = None
    timeout_s: float | None = None
    """Execution time over all workers of the run; time in the queue or parked does not count."""

    def __post_init__(self) -> None:
        if self.max_cost_usd is not None:
            to_nanos(self.max_cost_usd, "max_cost_usd")
        for name, value in zip(COUNTS, _counts(self), strict=True):
            if value is not None:
                checks.integer(name, value, maximum=MAX_COUNT, none="no limit")
        if self.timeout_s is not None:
            seconds_to_ns(self.timeout_s, "timeout_s")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RunLimits:
        """Parse limits written by `to_dict` or requested by a client; InvalidValue names an invalid one."""
        if not isinstance(given, Mapping):
            raise InvalidValue("limits", given, f"an object with any of {', '.join(NAMES)}")
        for name in given:
            if name not in NAMES:
                raise InvalidValue("limits", name, f"an object with any of {', '.join(NAMES)}")
        return cls(**given)

    def to_dict(self, usual: RunLimits | None = None) -> dict[str, Any]:
        """Return the limits as JSON data, with `usual` as defaults; fields without a limit are left out."""
        values: Iterable[Any] = _values(self)
        if usual is not None:
            values = [other if one is None else one for one, other in zip(values, _values(usual), strict=True)]
        given = {name: one for name, one in zip(NAMES, values, strict=True) if one is not None}
        if "max_cost_usd" in given:
            given["max_cost_usd"] = _as_text(to_nanos(given["max_cost_usd"]))
        return given

    def within(self, ceilings: RunLimits) -> RunLimits:
        """Return the same limits; InvalidValue names the first that is above its ceiling."""
        highest = _values(ceilings)
        if highest == NO_VALUES:
            return self
        for name, value, most in zip(NAMES, _values(self), highest, strict=True):
            if value is not None and most is not None and _amount(name, value) > _amount(name, most):
                ceiling = f"at most {_shown(name, most)}, which is the ceiling of a run here"
                raise InvalidValue(name, _shown(name, value), ceiling)
        return self

    def clipped(self, ceilings: RunLimits) -> RunLimits:
        """Return the tighter of both for each limit."""
        return RunLimits(*map(_tighter, NAMES, _values(self), _values(ceilings)))

    def plus(self, more: RunLimits) -> RunLimits:
        """Return the limits raised by `more`; a field without a limit stays without one."""
        return RunLimits(*map(_risen, NAMES, _values(self), _values(more)))

    def config(self) -> ExecutionConfig:
        """Return the limits that belong in an ExecutionConfig."""
        return ExecutionConfig(self.max_cost_usd, self.max_steps, self.max_retries)

    def budget(self) -> Budget:
        """Return the limits that belong in a Budget."""
        return Budget(max_tokens=self.max_tokens, max_api_calls=self.max_api_calls, max_time_seconds=self.timeout_s)

    def in_ledger(self) -> Limits:
        """Return the limits for a stored account: all but the time, which each worker measures by its own clock."""
        untimed = Budget(max_tokens=self.max_tokens, max_api_calls=self.max_api_calls)
        return self.config().limits().tighter(untimed.limits())


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of a run in the forms its worker needs."""

    config: ExecutionConfig
    budget: Budget
    in_ledger: Limits

    def after(self, worked_ms: int) -> Ceilings:
        """Return the ceilings with `worked_ms` subtracted from the time limit."""
        most_s = self.budget.max_time_seconds
        if most_s is None or not worked_ms:
            return self
        return replace(self, budget=replace(self.budget, max_time_seconds=max(0.0, most_s - worked_ms / 1_000)))


def ceilings_of(kept: Mapping[str, Any]) -> Ceilings:
    """Return the ceilings for limits written by `to_dict`; cached, because most runs have the same limits."""
    return _ceilings(tuple(kept.items()))


@lru_cache(maxsize=1_000)
def _ceilings(kept: tuple[tuple[str, Any], ...]) -> Ceilings:
    limits = RunLimits.from_dict(dict(kept))
    return Ceilings(limits.config(), limits.budget(), limits.in_ledger())


NAMES = tuple(one.name for one in fields(RunLimits))
NO_VALUES = (None,) * len(NAMES)
_values: Callable[[RunLimits], tuple[Any, ...]] = attrgetter(*NAMES)
COUNTS = ("max_steps", "max_tokens", "max_api_calls", "max_retries")
_counts: Callable[[RunLimits], tuple[Any, ...]] = attrgetter(*COUNTS)


def _amount(name: str, value: Any) -> float | int:
    return to_nanos(value, name) if name == "max_cost_usd" else value


def _shown(name: str, value: Any) -> Any:
    """Return the value for display; money as a decimal string."""
    return _as_text(to_nanos(value)) if name == "max_cost_usd" else value


def _tighter(name: str, one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return one if _amount(name, one) <= _amount(name, other) else other


def _risen(name: str, value: Any, more: Any) -> Any:
    if value is None or more is None:
        return value
    if name == "max_cost_usd":
        return _as_text(min(to_nanos(value) + to_nanos(more), MAX_NANOS))
    return min(value + more, MAX_COUNT if name in COUNTS else MAX_TIMEOUT_S)


def _as_text(nanos: int) -> str:
    return f"{Decimal(nanos) / NANOS_PER_USD:f}"


# Settings of a host.

WHOLE = frozenset(
    {"max_running", "max_running_per_owner", "max_queued", "max_queued_per_owner", "max_abandoned_threads"}
    | {"max_run_payload_bytes"}
)
USUAL_LIMITS = RunLimits(max_cost_usd="1", max_steps=1_000, timeout_s=3_600)
NO_CEILINGS = RunLimits()
POSITIVE = frozenset({"lease_s", "tick_s", "early_cancel_s", "park_waiting_s"})


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Concurrency limits, timings, and run limits of a host."""

    max_running: int = 64
    """Maximum number of concurrent runs on one host; runs waiting for an answer are not counted."""
    max_running_per_owner: int = 8
    """Maximum number of concurrent runs of one owner."""
    max_queued: int = 1_000
    """Maximum number of queued runs, over all hosts."""
    max_queued_per_owner: int = 100
    """Maximum number of queued runs of one owner."""
    max_abandoned_threads: int = MAX_ABANDONED
    """Maximum number of sync functions of the process that still run after they were cancelled or timed out. At the
    limit, no further sync function is started, and its call fails with TooManyAbandoned."""
    lease_s: float = 15
    """Other hosts take over the runs of a host that has not renewed its leases for this long."""
    tick_s: float = 0.5
    """Interval at which a host polls for cancel requests, answers, and runs submitted to other hosts."""
    default_limits: RunLimits = USUAL_LIMITS
    """Limits of a run for the fields that its submission leaves out."""
    ceilings: RunLimits = NO_CEILINGS
    """Highest limits that a submission may request."""
    owner_daily_usd: Usd | None = None
    """Budget of each owner for a day."""
    daily_usd: Usd | None = None
    """Budget of all owners together for a day."""
    day_blocks: bool = False
    """Whether a host reserves blocks of the daily budgets for its runs, so that the calls of all hosts do not contend
    for the same rows; useful with many workers on PostgreSQL."""
    day_zone: str = "UTC"
    """Time zone of the days of daily budgets, such as `Europe/Berlin`; the same for all hosts and gateways."""
    max_wait_s: float = 30
    """How long a call waits for amounts that other calls hold in the budget of its run, its owner or the day; 0 refuses
    it immediately."""
    drain_s: float = 10
    """How long runs may take to end when the host closes, before they are parked."""
    park_waiting_s: float = 60
    """With an engine: a run that only waits for an answer is parked after this time, and leaves its worker."""
    keep_days: float = 30
    """How long runs are kept after their end."""
    record_payloads: RecordPayloads = "off"
    """Whether the requests and responses of model and tool calls are stored: `off`, `redacted` (without apparent
    secrets) or `full`."""
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    """Maximum size of one stored request or response, as JSON; a larger one is truncated."""
    max_run_payload_bytes: int = 16 * 1_024 * 1_024
    """Maximum size of all stored requests and responses of a run under one claim; later ones are left out."""
    keep_payload_days: float = 7
    """How long requests and responses are kept; never longer than their run."""
    keep_audit_days: float = 365
    """How long entries of the audit log are kept."""
    early_cancel_s: float = 3_600
    """How long a cancel request for a run that does not exist yet stays valid."""

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name))

    @property
    def zone(self) -> tzinfo:
        """The time zone `day_zone`."""
        return zone_named(self.day_zone)


def zone_named(name: str, field: str = "day_zone") -> tzinfo:
    """Return a time zone by its name; raise InvalidValue if there is none. UTC needs no time zone database."""
    checks.text(field, name)
    try:
        return UTC if name == "UTC" else _zone(name)
    except (KeyError, ValueError, OSError):  # no such zone, no name of one, or the name of a folder of zones
        raise InvalidValue(field, name, "the name of a time zone, such as Europe/Berlin or UTC") from None


@lru_cache(maxsize=64)
def _zone(name: str) -> tzinfo:
    """Read a time zone from disk once; event loops then get it from the cache."""
    return ZoneInfo(name)


def _check(name: str, value: Any) -> None:
    if name == "day_zone":
        zone_named(value)
    elif name in WHOLE:
        checks.integer(name, value, minimum=1)
    elif name in POSITIVE or name in ("drain_s", "max_wait_s"):
        checks.seconds(name, value, above_zero=name in POSITIVE)
    elif name == "day_blocks":
        checks.instance(name, value, bool)
    elif name == "record_payloads":
        checks.choice(name, value, RECORD_PAYLOADS)
    elif name == "max_payload_bytes":
        checks.integer(name, value, minimum=SMALLEST_PAYLOAD_BYTES, maximum=LARGEST_PAYLOAD_BYTES)
    elif name in ("keep_days", "keep_payload_days", "keep_audit_days"):
        if not checks.number(name, value, minimum=0, maximum=1e9):
            raise InvalidValue(name, value, "more than zero")
    elif name.endswith("daily_usd"):
        if value is not None:
            to_nanos(value, name)
    else:
        checks.instance(name, value, RunLimits)
