"""What a caller may say about one call, and how what callers say is checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidValue
from penstock.money import Usd, to_nanos


@dataclass(frozen=True, slots=True)
class WrapOptions:
    """Options of one call; made once, they may serve any number of calls."""

    operation_name: str = ""
    cost_estimate_hint: Usd = 0.0
    """US dollars to hold while the call runs, and its cost if nothing better is known; 0 is no hint."""
    timeout_ms: int | None = None
    """For this call only; never later than the run's own deadline. None and 0 are no timeout of its own."""
    retry_policy_override: int | None = None
    """How often this call is tried again in place when it fails; each retry draws on the run's retry budget."""
    model: str | None = None
    """The model the call is for, if it is known before."""
    degraded: Callable[..., Any] | None = None
    """What runs instead when a hook answers DEGRADE; None runs the call as it is."""
    hint_nanos: int | None = field(init=False, repr=False, compare=False)
    timeout_s: float | None = field(init=False, repr=False, compare=False)
    retries: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.operation_name, str):
            raise InvalidValue("operation_name", self.operation_name, "a string")
        if self.model is not None and not isinstance(self.model, str):
            raise InvalidValue("model", self.model, "a string, or None")
        if self.degraded is not None and not callable(self.degraded):
            raise InvalidValue("degraded", self.degraded, "a function, or None")
        hint = to_nanos(self.cost_estimate_hint, "cost_estimate_hint")
        timeout_ms = whole("timeout_ms", self.timeout_ms)
        object.__setattr__(self, "hint_nanos", hint or None)
        object.__setattr__(self, "timeout_s", timeout_ms / 1_000 if timeout_ms else None)
        object.__setattr__(self, "retries", whole("retry_policy_override", self.retry_policy_override))


def whole(name: str, value: object) -> int:
    """The value, 0 for None; InvalidValue names it if it is no whole number."""
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000_000:
        raise InvalidValue(name, value, "a whole number, zero or more, or None")
    return value


def must_be(field: str, value: object, kind: type) -> None:
    """InvalidValue names the field if it is neither None nor of that kind."""
    if value is not None and not isinstance(value, kind):
        raise InvalidValue(field, value, f"{kind.__name__} or None")


def must_be_text(field: str, value: object) -> None:
    """InvalidValue names the field if it is no string."""
    if not isinstance(value, str):
        raise InvalidValue(field, value, "a string")


def must_be_name(field: str, value: object, expected: str = "a name") -> None:
    """InvalidValue names the field if it is no string, or an empty one."""
    if not isinstance(value, str) or not value:
        raise InvalidValue(field, value, expected)


def must_be_at_least(least: int, field: str, value: object) -> None:
    """InvalidValue names the field if it is no whole number of that size."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValue(field, value, f"a whole number, {least} or more")


DEFAULT_OPTIONS = WrapOptions()
