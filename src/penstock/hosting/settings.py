"""How a host works, and what it takes on."""

from __future__ import annotations

from dataclasses import dataclass, fields

from penstock.errors import InvalidValue
from penstock.hosting.limits import RunLimits
from penstock.money import Usd, to_nanos

WHOLE = frozenset({"max_running", "max_running_per_owner", "max_queued", "max_queued_per_owner"})
USUAL_LIMITS = RunLimits(max_cost_usd="1", max_steps=1_000, timeout_s=3_600)
NO_CEILINGS = RunLimits()
POSITIVE = frozenset({"lease_s", "tick_s", "early_cancel_s", "keep_days"})


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a host takes on at once, how long it waits, and what runs may use."""

    max_running: int = 64
    """Runs that one host works on at once; those that wait for somebody's answer are not counted."""
    max_running_per_owner: int = 8
    max_queued: int = 1_000
    """Runs that wait for a worker, over all hosts."""
    max_queued_per_owner: int = 100
    lease_s: float = 15
    """A host that says nothing for so long is taken for dead, and another goes on with its runs."""
    tick_s: float = 0.5
    """How often a host looks for cancels, answers and runs that came from elsewhere."""
    default_limits: RunLimits = USUAL_LIMITS
    """What holds where whoever submits a run says nothing."""
    ceilings: RunLimits = NO_CEILINGS
    """What whoever submits a run may ask for at most."""
    owner_daily_usd: Usd | None = None
    daily_usd: Usd | None = None
    drain_s: float = 10
    """How long runs may take to end when the host closes, before they are parked."""
    keep_days: float = 30
    """How long runs are kept after their end."""
    early_cancel_s: float = 3_600
    """How long a cancel is remembered whose run is not there yet."""

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, getattr(self, one.name))


def _check(name: str, value: object) -> None:
    if name in WHOLE:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidValue(name, value, "a whole number, one or more")
    elif name in POSITIVE or name == "drain_s":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e9:
            raise InvalidValue(name, value, "a finite, non-negative number")
        if not value and name in POSITIVE:
            raise InvalidValue(name, value, "more than zero")
    elif name.endswith("daily_usd"):
        if value is not None:
            to_nanos(value, name)  # type: ignore[arg-type]  # it says what it takes
    elif not isinstance(value, RunLimits):
        raise InvalidValue(name, value, "RunLimits")
