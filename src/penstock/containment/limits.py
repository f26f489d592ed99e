"""Ceilings and measurements.

What somebody allows (`ExecutionConfig`, `Budget`), and what was used (`ResourceUsage`). Judging is the ledger's work.
None is no limit; 0 is nothing; reaching a limit is fine, starting anything after it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.errors import InvalidValue
from penstock.money import Usd, format_usd, to_nanos, to_usd

UNLIMITED = 1 << 62
"""Stands for "no limit" where limits are compared: larger than any count or amount that is accepted."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every dimension of a ceiling, folded to integers once, so that admission compares and nothing else."""

    cost_nanos: int = UNLIMITED
    steps: int = UNLIMITED
    tokens: int = UNLIMITED
    api_calls: int = UNLIMITED
    retries: int = UNLIMITED
    time_ns: int = UNLIMITED

    def tighter(self, other: Limits) -> Limits:
        """The smaller of both in every dimension."""
        return Limits(
            min(self.cost_nanos, other.cost_nanos),
            min(self.steps, other.steps),
            min(self.tokens, other.tokens),
            min(self.api_calls, other.api_calls),
            min(self.retries, other.retries),
            min(self.time_ns, other.time_ns),
        )

    @property
    def time_s(self) -> float | None:
        """The time limit in seconds; None if there is none."""
        return None if self.time_ns == UNLIMITED else self.time_ns / 1_000_000_000

    def in_unit(self, unit: str) -> float | None:
        """The ceiling that a stop of that unit speaks of; None if there is no such unit."""
        return {
            "usd": to_usd(self.cost_nanos),
            "steps": self.steps,
            "tokens": self.tokens,
            "api calls": self.api_calls,
            "retries": self.retries,
            "seconds": self.time_ns / 1_000_000_000,
        }.get(unit)

    def as_budget(self) -> Budget:
        """These ceilings as a Budget; one on retries has no place there."""
        return Budget(
            max_tokens=_given(self.tokens),
            max_time_seconds=self.time_s,
            max_steps=_given(self.steps),
            max_api_calls=_given(self.api_calls),
            max_cost_dollars=None if self.cost_nanos == UNLIMITED else to_usd(self.cost_nanos),
        )


def _given(limit: int) -> int | None:
    return None if limit == UNLIMITED else limit


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """The ceilings of one run. None is no limit, 0 halts the first call; `timeout_ms=0` is no timeout."""

    max_cost_usd: Usd | None
    max_steps: int | None
    max_retries_total: int | None
    timeout_ms: int = 0
    _limits: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_limits", self._compared())

    def limits(self) -> Limits:
        """These ceilings in the form the ledger compares."""
        return self._limits

    def _compared(self) -> Limits:
        timeout_ms = _count("timeout_ms", self.timeout_ms)
        return Limits(
            cost_nanos=_cost("max_cost_usd", self.max_cost_usd),
            steps=_count("max_steps", self.max_steps),
            retries=_count("max_retries_total", self.max_retries_total),
            time_ns=min(timeout_ms * 1_000_000, UNLIMITED) if timeout_ms else UNLIMITED,
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """What a graph, a step or a context may use. None is no limit, 0 is nothing."""

    max_tokens: int | None = None
    max_time_seconds: float | None = None
    max_steps: int | None = None
    max_api_calls: int | None = None
    max_cost_dollars: Usd | None = None
    _limits: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_limits", self._compared())

    def limits(self) -> Limits:
        """This budget in the form the ledger compares."""
        return self._limits

    def _compared(self) -> Limits:
        return Limits(
            cost_nanos=_cost("max_cost_dollars", self.max_cost_dollars),
            steps=_count("max_steps", self.max_steps),
            tokens=_count("max_tokens", self.max_tokens),
            api_calls=_count("max_api_calls", self.max_api_calls),
            time_ns=UNLIMITED
            if self.max_time_seconds is None
            else seconds_to_ns(self.max_time_seconds, "max_time_seconds"),
        )


Ceilings = Limits | Budget | ExecutionConfig
"""Limits in any of the forms people write them."""


def as_limits(ceilings: Ceilings) -> Limits:
    """The ceilings in the form the ledger compares."""
    if isinstance(ceilings, Limits):
        return ceilings
    if not isinstance(ceilings, Budget | ExecutionConfig):
        raise InvalidValue("limits", ceilings, "a Budget, an ExecutionConfig or Limits")
    return ceilings.limits()


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What was used, measured by the runtime; elapsed time comes from a monotonic clock."""

    tokens_used: int = 0
    steps_executed: int = 0
    api_calls: int = 0
    cost_dollars: float = 0.0
    time_elapsed_seconds: float = 0.0
    retries_used: int = 0
    start_time: datetime | None = None
    """When it began, for showing; durations never come from it."""

    def exceeds(self, budget: Budget) -> tuple[bool, str | None]:
        """Whether anything more may start under `budget`; if not, which limit was reached and how."""
        spent = to_nanos(self.cost_dollars, "cost_dollars")
        ceiling = None if budget.max_cost_dollars is None else to_nanos(budget.max_cost_dollars)
        checks: tuple[tuple[str, float, float | None, Callable[[Any], str]], ...] = (
            ("Token", self.tokens_used, budget.max_tokens, str),
            ("Step", self.steps_executed, budget.max_steps, str),
            ("Time", self.time_elapsed_seconds, budget.max_time_seconds, _shown_seconds),
            ("API call", self.api_calls, budget.max_api_calls, str),
            ("Cost", spent, ceiling, format_usd),
        )
        for name, used, limit, shown in checks:
            if limit is not None and used >= limit:
                return True, f"{name} limit exceeded: {shown(used)}/{shown(limit)}"
        return False, None


def seconds_to_ns(seconds: float, field: str) -> int:
    """A duration in nanoseconds; InvalidValue names `field` if it is not a finite, non-negative number."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidValue(field, seconds, "a number of seconds, or None for no limit")
    if not 0 <= seconds <= 1e9:
        raise InvalidValue(field, seconds, "a finite, non-negative number of seconds, at most 10**9")
    return round(seconds * 1_000_000_000)


def _shown_seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _count(field: str, value: int | None) -> int:
    if value is None:
        return UNLIMITED
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidValue(field, value, "a whole number, or None for no limit")
    if not 0 <= value < UNLIMITED:
        raise InvalidValue(field, value, "zero or more, and less than 2**62")
    return value


def _cost(field: str, value: Usd | None) -> int:
    return UNLIMITED if value is None else to_nanos(value, field)
