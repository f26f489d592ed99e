"""What a hosted run may use, as people write it and as it is kept.

None is no limit of its own, 0 is nothing. Kept as JSON without the fields that are None; money is a decimal string, so
that a ceiling reads the same after any number of databases and languages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import lru_cache
from operator import attrgetter
from typing import Any

from penstock.containment.limits import Budget, ExecutionConfig, Limits, seconds_to_ns
from penstock.errors import InvalidValue
from penstock.money import MAX_NANOS, NANOS_PER_USD, Usd, to_nanos

MAX_COUNT = (1 << 53) - 1
"""Counts beyond this are not the same number in every language that reads JSON."""

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
    """For the work on it, over all workers that had it: time that it waits in a queue or is parked does not count."""

    def __post_init__(self) -> None:
        if self.max_cost_usd is not None:
            to_nanos(self.max_cost_usd, "max_cost_usd")
        for name, value in zip(COUNTS, _counts(self), strict=True):
            if value is not None:
                _check_count(name, value)
        if self.timeout_s is not None:
            seconds_to_ns(self.timeout_s, "timeout_s")

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RunLimits:
        """The limits that `to_dict` wrote, or that a client asks for; InvalidValue names what is none."""
        if not isinstance(given, Mapping):
            raise InvalidValue("limits", given, f"an object with any of {', '.join(NAMES)}")
        for name in given:
            if name not in NAMES:
                raise InvalidValue("limits", name, f"an object with any of {', '.join(NAMES)}")
        return cls(**given)

    def to_dict(self, usual: RunLimits | None = None) -> dict[str, Any]:
        """The limits as JSON data, the `usual` ones where these have none; what is not limited is left out."""
        values: Iterable[Any] = _values(self)
        if usual is not None:
            values = [other if one is None else one for one, other in zip(values, _values(usual), strict=True)]
        given = {name: one for name, one in zip(NAMES, values, strict=True) if one is not None}
        if "max_cost_usd" in given:
            given["max_cost_usd"] = _as_text(to_nanos(given["max_cost_usd"]))
        return given

    def within(self, ceilings: RunLimits) -> RunLimits:
        """The same limits; InvalidValue names the first that is above its ceiling."""
        highest = _values(ceilings)
        if highest == NO_VALUES:
            return self
        for name, asked, most in zip(NAMES, _values(self), highest, strict=True):
            if asked is not None and most is not None and _amount(name, asked) > _amount(name, most):
                ceiling = f"at most {_shown(name, most)}, which is the ceiling of a run here"
                raise InvalidValue(name, _shown(name, asked), ceiling)
        return self

    def clipped(self, ceilings: RunLimits) -> RunLimits:
        """The tighter of both in every dimension."""
        return RunLimits(*map(_tighter, NAMES, _values(self), _values(ceilings)))

    def plus(self, more: RunLimits) -> RunLimits:
        """Ceilings that are higher by `more`; what has no limit stays without one."""
        return RunLimits(*map(_risen, NAMES, _values(self), _values(more)))

    def config(self) -> ExecutionConfig:
        """The part of it that an ExecutionConfig says."""
        return ExecutionConfig(self.max_cost_usd, self.max_steps, self.max_retries)

    def budget(self) -> Budget:
        """The part of it that a Budget says."""
        return Budget(max_tokens=self.max_tokens, max_api_calls=self.max_api_calls, max_time_seconds=self.timeout_s)

    def in_ledger(self) -> Limits:
        """What a stored account is opened with: all but the time, which the clock of each worker measures."""
        untimed = Budget(max_tokens=self.max_tokens, max_api_calls=self.max_api_calls)
        return self.config().limits().tighter(untimed.limits())


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of a run as its worker needs them."""

    config: ExecutionConfig
    budget: Budget
    in_ledger: Limits


def ceilings_of(kept: Mapping[str, Any]) -> Ceilings:
    """Those of limits that `to_dict` wrote: most runs have the same, and they are worked out once."""
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


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise InvalidValue(name, value, f"a whole number from 0 to {MAX_COUNT}, or None for no limit")


def _amount(name: str, value: Any) -> float | int:
    return to_nanos(value, name) if name == "max_cost_usd" else value


def _shown(name: str, value: Any) -> Any:
    """The value as people write it, whatever number it came as."""
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
