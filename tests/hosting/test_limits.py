"""Limits of hosted runs, as they are requested and stored."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.containment.limits import UNLIMITED
from penstock.errors import InvalidValue
from penstock.hosting.limits import MAX_COUNT, NAMES, HostSettings, RunLimits

counts = st.none() | st.integers(0, MAX_COUNT)
limits = st.builds(
    RunLimits,
    max_cost_usd=st.none() | st.integers(0, 10**18).map(lambda nanos: f"{nanos / 10**9:.9f}"),
    max_steps=counts,
    max_tokens=counts,
    max_api_calls=counts,
    max_retries=counts,
    timeout_s=st.none() | st.floats(0, 1e9),
)


@given(limits)
def test_limits_survive_a_round_trip_through_json(one: RunLimits) -> None:
    kept = json.loads(json.dumps(one.to_dict()))
    again = RunLimits.from_dict(kept)
    assert again.to_dict() == kept
    assert again.in_ledger() == one.in_ledger()
    assert again.budget() == one.budget()


@given(limits, limits)
def test_more_is_never_less_and_clipped_is_never_more(one: RunLimits, other: RunLimits) -> None:
    more, clipped = one.plus(other).in_ledger(), one.clipped(other)
    for name in ("cost_nanos", "steps", "tokens", "api_calls", "retries"):
        assert getattr(more, name) >= getattr(one.in_ledger(), name)
    assert clipped.within(other).within(one) == clipped


@pytest.mark.parametrize(
    "given",
    [
        {"max_steps": True},
        {"max_steps": 1.0},
        {"max_steps": -1},
        {"max_steps": 2**53},
        {"max_tokens": "5"},
        {"max_api_calls": -1},
        {"max_retries": 2**53},
        {"max_cost_usd": math.nan},
        {"max_cost_usd": "-1"},
        {"max_cost_usd": "a lot"},
        {"max_cost_usd": True},
        {"timeout_s": math.inf},
        {"timeout_s": -1},
        {"max_stepps": 1},
        [],
        "max_steps",
        None,
    ],
)
def test_invalid_limits_are_refused(given: Any) -> None:
    with pytest.raises(InvalidValue):
        RunLimits.from_dict(given)


def test_none_is_no_limit_and_zero_is_nothing() -> None:
    assert RunLimits().to_dict() == {}
    assert RunLimits().in_ledger().cost_nanos == UNLIMITED
    assert RunLimits(max_cost_usd=0).in_ledger().cost_nanos == 0
    assert RunLimits(max_cost_usd=0, max_steps=0).to_dict() == {"max_cost_usd": "0", "max_steps": 0}
    assert RunLimits().plus(RunLimits(max_steps=1)).max_steps is None


@given(limits, limits)
def test_default_limits_apply_where_none_are_requested(one: RunLimits, usual: RunLimits) -> None:
    kept = one.to_dict(usual)
    assert kept == {**usual.to_dict(), **one.to_dict()}
    assert [*kept] == [name for name in NAMES if name in kept]


@pytest.mark.parametrize("name", NAMES)
def test_a_limit_above_its_ceiling_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidValue, match=name):
        RunLimits(**{name: 2}).within(RunLimits(**{name: 1}))
    assert RunLimits(**{name: 2}).within(RunLimits()) == RunLimits(**{name: 2})


def test_the_time_of_a_run_is_not_counted_by_the_ledger() -> None:
    assert RunLimits(timeout_s=5).in_ledger().time_ns == UNLIMITED


@pytest.mark.parametrize(
    "given",
    [
        {"max_running": 0},
        {"max_queued": True},
        {"lease_s": 0},
        {"tick_s": math.nan},
        {"drain_s": -1},
        {"drain_s": "10"},
        {"default_limits": {}},
        {"daily_usd": "lots"},
    ],
)
def test_settings_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(given))):
        HostSettings(**given)
