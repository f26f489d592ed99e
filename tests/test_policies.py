"""An error policy is refused where it contradicts itself, and its waits stay within their bounds."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.policies import MAX_DELAY_S, ErrorPolicy

NODE = object()
CHANCES = st.floats(0, 1)


def test_the_default_fails_at_once() -> None:
    policy = ErrorPolicy()
    assert (policy.on_error, policy.retry_count, policy.timeout_ms) == ("fail", 0, None)
    assert (policy.retry_delay_ms, policy.retry_backoff) == (1000, 2.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"retry_count": 3},
        {"on_error": "retry", "retry_count": 1},
        {"on_error": "skip"},
        {"on_error": "skip", "fallback_value": 0, "retry_count": 2},
        {"on_error": "fallback", "fallback_value": ""},
        {"on_error": "fallback", "fallback_node": NODE, "timeout_ms": 1},
        {"retry_delay_ms": 0, "retry_backoff": 1, "retry_jitter": 0},
        {"retry_backoff": 1000.0, "retry_jitter": 1.0},
    ],
)
def test_valid_values_are_accepted(fields: dict[str, Any]) -> None:
    policy = ErrorPolicy(**fields)
    assert all(getattr(policy, field) == value for field, value in fields.items())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"on_error": "ignore"}, "on_error"),
        ({"on_error": None}, "on_error"),
        ({"on_error": ["fail"]}, "on_error"),
        ({"retry_count": -1}, "retry_count"),
        ({"retry_count": True}, "retry_count"),
        ({"retry_count": 1.0}, "retry_count"),
        ({"retry_count": "3"}, "retry_count"),
        ({"retry_count": 10**5_000}, "retry_count"),
        ({"retry_delay_ms": -1}, "retry_delay_ms"),
        ({"retry_delay_ms": 0.5}, "retry_delay_ms"),
        ({"retry_delay_ms": None}, "retry_delay_ms"),
        ({"timeout_ms": 0}, "timeout_ms"),
        ({"timeout_ms": -1}, "timeout_ms"),
        ({"timeout_ms": math.inf}, "timeout_ms"),
        ({"retry_backoff": 0.5}, "retry_backoff"),
        ({"retry_backoff": math.nan}, "retry_backoff"),
        ({"retry_backoff": math.inf}, "retry_backoff"),
        ({"retry_backoff": True}, "retry_backoff"),
        ({"retry_jitter": -0.1}, "retry_jitter"),
        ({"retry_jitter": 1.1}, "retry_jitter"),
        ({"retry_jitter": math.nan}, "retry_jitter"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{named} must be") as caught:
        ErrorPolicy(**fields)
    assert caught.value.field == named


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"on_error": "retry"}, "retry_count"),
        ({"on_error": "fail", "fallback_value": 1}, "fallback_value"),
        ({"on_error": "retry", "retry_count": 1, "fallback_value": 1}, "fallback_value"),
        ({"on_error": "fail", "fallback_node": NODE}, "fallback_node"),
        ({"on_error": "skip", "fallback_node": NODE}, "fallback_node"),
        ({"on_error": "retry", "retry_count": 1, "fallback_node": NODE}, "fallback_node"),
        ({"on_error": "fallback"}, "fallback_node"),
        ({"on_error": "fallback", "fallback_node": NODE, "fallback_value": 1}, "fallback_node"),
    ],
)
def test_fields_that_contradict_each_other_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{named} must be") as caught:
        ErrorPolicy(**fields)
    assert caught.value.field == named


def test_a_policy_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ErrorPolicy().retry_count = 5  # type: ignore[misc]


def test_each_wait_is_the_one_before_times_the_backoff() -> None:
    policy = ErrorPolicy(retry_count=4, retry_delay_ms=100, retry_backoff=3.0)
    assert [policy.delay_s(attempt, 0.5) for attempt in (1, 2, 3, 4)] == pytest.approx([0.1, 0.3, 0.9, 2.7])


def test_chance_makes_a_wait_shorter_or_longer_by_the_jitter() -> None:
    policy = ErrorPolicy(retry_count=1, retry_delay_ms=1000, retry_jitter=0.25)
    assert [policy.delay_s(1, chance) for chance in (0.0, 0.5, 1.0)] == pytest.approx([0.75, 1.0, 1.25])


POLICIES = st.builds(
    ErrorPolicy,
    retry_count=st.integers(0, 10**9),
    retry_delay_ms=st.integers(0, 10**9),
    retry_backoff=st.floats(1, 1000),
    retry_jitter=st.floats(0, 1),
)


@given(POLICIES, st.integers(1, 10**9), CHANCES)
def test_a_wait_is_within_its_jitter_and_never_longer_than_the_longest(
    policy: ErrorPolicy, attempt: int, chance: float
) -> None:
    wait = policy.delay_s(attempt, chance)
    middle = min(policy.delay_s(attempt, 0.5), MAX_DELAY_S)
    assert 0 <= wait <= MAX_DELAY_S
    least = middle * (1 - policy.retry_jitter)
    most = min(middle * (1 + policy.retry_jitter), MAX_DELAY_S)
    assert least * (1 - 1e-9) <= wait <= most * (1 + 1e-9)


@given(POLICIES, st.integers(1, 2_000), CHANCES)
def test_a_later_wait_is_never_shorter(policy: ErrorPolicy, attempt: int, chance: float) -> None:
    assert policy.delay_s(attempt, chance) <= policy.delay_s(attempt + 1, chance)


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_no_delay_stays_none_and_a_huge_one_stays_a_number(chance: float) -> None:
    none = ErrorPolicy(retry_count=1, retry_delay_ms=0, retry_backoff=1000.0)
    huge = ErrorPolicy(retry_count=1, retry_delay_ms=10**9, retry_backoff=1000.0, retry_jitter=1.0)
    for attempt in (1, 100, 103, 104, 10**9):
        assert none.delay_s(attempt, chance) == 0.0
        assert huge.delay_s(attempt, chance) == MAX_DELAY_S * min(2 * chance, 1.0)
