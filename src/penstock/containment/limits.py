"""Ceilings and measurements.

Limits (`ExecutionConfig`, `Budget`) and usage (`ResourceUsage`). The ledger compares them. None is no limit; 0 allows
nothing; usage may reach a limit, and nothing starts after that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from penstock import checks
from penstock.clock import SYSTEM_CLOCK, Clock, utc_now
from penstock.errors import Halted, InvalidValue
from penstock.money import Usd, format_usd, to_nanos, to_usd
from penstock.stops import Stop, StopReason

UNLIMITED = 1 << 62
"""Stands for no limit in comparisons: larger than any accepted count or amount."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every dimension of a ceiling, converted to integers once, so that admission only compares."""

    cost_nanos: int = UNLIMITED
    steps: int = UNLIMITED
    tokens: int = UNLIMITED
    api_calls: int = UNLIMITED
    retries: int = UNLIMITED
    time_ns: int = UNLIMITED

    def tighter(self, other: Limits) -> Limits:
        """Return the smaller of both in every dimension."""
        return Limits(
            min(self.cost_nanos, other.cost_nanos),
            min(self.steps, other.steps),
            min(self.tokens, other.tokens),
            min(self.api_calls, other.api_calls),
            min(self.retries, other.retries),
            min(self.time_ns, other.time_ns),
        )

    def __repr__(self) -> str:
        shown = (
            f"{one.name}={'unlimited' if (value := getattr(self, one.name)) == UNLIMITED else value}"
            for one in fields(self)
        )
        return f"Limits({', '.join(shown)})"

    @property
    def time_s(self) -> float | None:
        """The time limit in seconds; None if there is none."""
        return None if self.time_ns == UNLIMITED else self.time_ns / 1_000_000_000

    def in_unit(self, unit: str) -> float | None:
        """Return the ceiling for the unit of a stop; None if there is no such unit."""
        return {
            "usd": to_usd(self.cost_nanos),
            "steps": self.steps,
            "tokens": self.tokens,
            "api calls": self.api_calls,
            "retries": self.retries,
            "seconds": self.time_ns / 1_000_000_000,
        }.get(unit)

    def as_budget(self) -> Budget:
        """Return these ceilings as a Budget, without the limit on retries."""
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
        """Return these ceilings in the form that the ledger compares."""
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
    """Limits of a graph, a step or a context. None is no limit, 0 allows nothing."""

    max_tokens: int | None = None
    max_time_seconds: float | None = None
    max_steps: int | None = None
    max_api_calls: int | None = None
    max_cost_dollars: Usd | None = None
    _limits: Limits = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_limits", self._compared())

    def limits(self) -> Limits:
        """Return this budget in the form that the ledger compares."""
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
"""Limits in any of the accepted forms."""


def as_limits(ceilings: Ceilings) -> Limits:
    """Return the ceilings in the form that the ledger compares."""
    if isinstance(ceilings, Limits):
        return ceilings
    if not isinstance(ceilings, Budget | ExecutionConfig):
        raise InvalidValue("limits", ceilings, "a Budget, an ExecutionConfig or Limits")
    return ceilings.limits()


class UsageCounter(Protocol):
    """Provides the figures of a ResourceUsage that does not store them itself."""

    def read(self, name: str) -> float:
        """Return the current figure of that name."""

    def set(self, name: str, value: float) -> None:
        """Count the difference between `value` and the figure; raises InvalidValue if it is negative."""

    def elapsed_s(self) -> float:
        """Return the seconds since the counting began."""


class _Counted:
    """State of a usage besides its fields."""

    _clock: Clock
    _counter: UsageCounter | None = None
    """Provides the figures; None if the usage stores them itself."""
    _elapsed_s: float | None = None
    """The fixed elapsed time of a measurement; None while time runs."""


@dataclass(slots=True)
class ResourceUsage(_Counted):
    """Resources used; elapsed time comes from a monotonic clock and begins when the usage is created.

    Passed to a context as `usage=`, it is the starting point of the run: it shows what the runtime has counted since,
    and what is added to it counts toward the budgets of the run. `ctx.usage` does the same for its context. There,
    figures can only grow: lowering one raises InvalidValue. A copy has the figures and the time of its moment.
    """

    tokens_used: int = 0
    steps_executed: int = 0
    api_calls: int = 0
    cost_dollars: float = 0.0
    _: KW_ONLY
    retries_used: int = 0
    start_time: datetime = field(default_factory=utc_now, compare=False)
    """Start time, for display; durations never come from it."""
    clock: InitVar[Clock] = SYSTEM_CLOCK
    """The clock for elapsed time."""
    _start_monotonic: float | None = field(default=None, repr=False, compare=False)

    def __post_init__(self, clock: Clock) -> None:
        if not callable(getattr(clock, "monotonic_ns", None)):
            raise InvalidValue("clock", clock, "a Clock: an object with monotonic_ns() and time_ns()")
        checks.instance("start_time", self.start_time, datetime)
        self._clock = clock
        if self._start_monotonic is None:
            self._start_monotonic = clock.monotonic_ns() / 1_000_000_000
        else:
            checks.number("_start_monotonic", self._start_monotonic)

    @property
    def time_elapsed_seconds(self) -> float:
        """Seconds since it was created, or since its context began to count; changes of the system clock do not affect
        it.
        """
        if self._counter is not None:
            return self._counter.elapsed_s()
        if self._elapsed_s is not None:
            return self._elapsed_s
        assert self._start_monotonic is not None
        return self._clock.monotonic_ns() / 1_000_000_000 - self._start_monotonic

    def _attach(self, counter: UsageCounter) -> None:
        """Use `counter` for the figures from now on."""
        if self._counter is None:
            for name in USAGE_FIGURES:
                object.__delattr__(self, name)  # then reading one comes to `__getattr__`
        self._counter = counter

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only what is not stored comes here.
            if name in USAGE_FIGURES:
                return self._counter.read(name)
            raise AttributeError(f"'ResourceUsage' object has no attribute {name!r}")

        def __setattr__(self, name: str, value: Any) -> None:
            if name in USAGE_FIGURES and self._counter is not None:
                self._counter.set(name, value)
                return
            if name == "cost_dollars":
                to_nanos(value, name)
            elif name in USAGE_FIGURES:
                checks.integer(name, value)
            object.__setattr__(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        figures = [getattr(self, name) for name in USAGE_FIGURES]
        return measurement, (*figures, self.start_time, self.time_elapsed_seconds)

    def exceeds(self, budget: Budget) -> tuple[bool, str | None]:
        """Return whether anything more may start under `budget`; if not, which limit was reached."""
        spent = to_nanos(self.cost_dollars, "cost_dollars")
        ceiling = None if budget.max_cost_dollars is None else to_nanos(budget.max_cost_dollars)
        figures: tuple[tuple[str, float, float | None, Callable[[Any], str]], ...] = (
            ("Token", self.tokens_used, budget.max_tokens, str),
            ("Step", self.steps_executed, budget.max_steps, str),
            ("Time", self.time_elapsed_seconds, budget.max_time_seconds, _shown_seconds),
            ("API call", self.api_calls, budget.max_api_calls, str),
            ("Cost", spent, ceiling, format_usd),
        )
        for name, used, limit, shown in figures:
            if limit is not None and used >= limit:
                return True, f"{name} limit exceeded: {shown(used)}/{shown(limit)}"
        return False, None


USAGE_FIGURES = ("tokens_used", "steps_executed", "api_calls", "cost_dollars", "retries_used")


def measurement(
    tokens: int, steps: int, api_calls: int, cost_dollars: float, retries: int, start_time: datetime, elapsed_s: float
) -> ResourceUsage:
    """Return a usage with the figures and time of one moment."""
    made = ResourceUsage(tokens, steps, api_calls, cost_dollars, retries_used=retries, start_time=start_time)
    made._elapsed_s = elapsed_s
    return made


class BudgetExceededError(Halted):
    """A limit was reached; has the usage, the budget, its owner, and the results so far."""

    def __init__(
        self,
        usage: ResourceUsage,
        budget: Budget,
        reason: str,
        *,
        stop: Stop | None = None,
        partial: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(stop or Stop(StopReason.BUDGET_EXCEEDED, reason), partial=partial)
        if stop is None:
            self.args = (reason,)
        self.usage = usage
        self.budget = budget

    @property
    def owner(self) -> str | None:
        """The name of the context whose budget refused."""
        return self.stop.budget


def seconds_to_ns(seconds: float, field: str) -> int:
    """Return a duration in nanoseconds; raises InvalidValue for `field` if it is not a finite, non-negative number."""
    return round(checks.seconds(field, seconds, none="no limit") * 1_000_000_000)


def _shown_seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def _count(field: str, value: int | None) -> int:
    if value is None:
        return UNLIMITED
    if checks.integer(field, value, none="no limit") >= UNLIMITED:
        raise InvalidValue(field, value, "less than 2**62")
    return value


def _cost(field: str, value: Usd | None) -> int:
    return UNLIMITED if value is None else to_nanos(value, field)
