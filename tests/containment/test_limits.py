"""What may be allowed, what was used, and how both are refused when they make no sense."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.containment.limits import (
    NO_LIMITS,
    UNLIMITED,
    Budget,
    ExecutionConfig,
    Limits,
    ResourceUsage,
    seconds_to_ns,
)
from penstock.errors import InvalidValue
from penstock.testing import ManualClock

NEVER: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.5, True, False, "abc", "", "nan", [], [1], {}, b"1", object()]
"""What is neither a count, nor an amount, nor a duration."""
NOT_A_COUNT: list[Any] = [*NEVER, 1.0, 0.5, "1", Decimal(1), 2**62, 10**5_000]
NOT_AN_AMOUNT: list[Any] = [*NEVER, "-1", Decimal("NaN"), Decimal("-0.01"), 1e300, 10**10, 10**5_000]
NOT_A_DURATION: list[Any] = [*NEVER, "1", Decimal(1), 1e9 + 1, 1e300, 10**5_000]

CONFIG: dict[str, Any] = {"max_cost_usd": 1.0, "max_steps": 5, "max_retries_total": 2, "timeout_ms": 100}
CONFIG_COUNTS = ["max_steps", "max_retries_total", "timeout_ms"]
BUDGET_COUNTS = ["max_tokens", "max_steps", "max_api_calls"]


def cases(fields: list[str], values: list[Any]) -> list[Any]:
    return [
        pytest.param(field, value, id=f"{field}-{number}-{type(value).__name__}")
        for field in fields
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("field", "value"), [*cases(CONFIG_COUNTS, NOT_A_COUNT), *cases(["max_cost_usd"], NOT_AN_AMOUNT)]
)
@pytest.mark.requirement("C-1")
def test_a_config_with_nonsense_is_refused_and_the_message_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be ") as caught:
        ExecutionConfig(**{**CONFIG, field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *cases(BUDGET_COUNTS, NOT_A_COUNT),
        *cases(["max_cost_dollars"], NOT_AN_AMOUNT),
        *cases(["max_time_seconds"], NOT_A_DURATION),
    ],
)
@pytest.mark.requirement("P-B1")
def test_a_budget_with_nonsense_is_refused_and_the_message_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=f"^{field} must be ") as caught:
        Budget(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(("field", "value"), cases(["pause_s"], [*NOT_A_DURATION, None]))
def test_a_duration_that_is_none_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^pause_s must be "):
        seconds_to_ns(value, field)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_steps", -1, "max_steps must be a whole number, zero or more, or None for no limit, not -1"),
        ("max_steps", 1.0, "max_steps must be a whole number, zero or more, or None for no limit, not 1.0"),
        (
            "max_retries_total",
            True,
            "max_retries_total must be a whole number, zero or more, or None for no limit, not True",
        ),
        ("timeout_ms", "abc", "timeout_ms must be a whole number, zero or more, or None for no limit, not 'abc'"),
        ("max_cost_usd", "abc", "max_cost_usd must be a number of US dollars, such as '0.50', not 'abc'"),
    ],
)
@pytest.mark.requirement("C-1")
def test_a_refused_limit_is_reported_with_what_was_expected(field: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        ExecutionConfig(**{**CONFIG, field: value})
    assert str(caught.value) == message


def test_a_refused_duration_is_reported_with_what_was_expected() -> None:
    with pytest.raises(InvalidValue) as caught:
        Budget(max_time_seconds=-0.5)
    assert str(caught.value) == (
        "max_time_seconds must be a finite number of seconds, zero or more, or None for no limit, not -0.5"
    )


@pytest.mark.requirement("C-1")
def test_none_is_no_limit_and_zero_is_nothing() -> None:
    assert ExecutionConfig(None, None, None).limits() == NO_LIMITS
    assert ExecutionConfig(0, 0, 0).limits() == Limits(cost_nanos=0, steps=0, retries=0)


@pytest.mark.requirement("P-B1")
def test_no_budget_is_no_limit_and_a_budget_of_zeros_is_nothing() -> None:
    assert Budget().limits() == NO_LIMITS
    nothing = Limits(cost_nanos=0, steps=0, tokens=0, api_calls=0, time_ns=0)
    assert Budget(0, 0, 0, 0, 0).limits() == nothing
    assert Budget(0, 0.0, 0, 0, 0.0).limits() == nothing


@pytest.mark.requirement("C-1")
def test_a_timeout_of_zero_is_no_timeout() -> None:
    assert ExecutionConfig(None, None, None, timeout_ms=0).limits().time_ns == UNLIMITED
    assert ExecutionConfig(None, None, None, timeout_ms=1).limits().time_ns == 1_000_000


@pytest.mark.requirement("C-1")
def test_each_field_of_a_config_limits_its_own_dimension() -> None:
    config = ExecutionConfig(max_cost_usd="0.5", max_steps=3, max_retries_total=2, timeout_ms=1_500)
    assert config.limits() == Limits(cost_nanos=500_000_000, steps=3, retries=2, time_ns=1_500_000_000)


@pytest.mark.requirement("P-B1")
def test_each_field_of_a_budget_limits_its_own_dimension() -> None:
    budget = Budget(max_tokens=7, max_time_seconds=1.5, max_steps=3, max_api_calls=4, max_cost_dollars=Decimal("0.25"))
    assert budget.limits() == Limits(250_000_000, steps=3, tokens=7, api_calls=4, time_ns=1_500_000_000)


@pytest.mark.parametrize("value", [0.1, "0.1", "0.10", Decimal("0.1"), Decimal("1e-1")])
@pytest.mark.requirement("C-1")
def test_a_cost_ceiling_is_the_same_however_it_is_written(value: Any) -> None:
    assert ExecutionConfig(value, None, None).limits().cost_nanos == 100_000_000
    assert Budget(max_cost_dollars=value).limits().cost_nanos == 100_000_000


def test_the_largest_limits_are_still_limits() -> None:
    largest = 2**62 - 1
    limits = Budget(largest, 1e9, largest, largest, 1_152_921_504).limits()
    for dimension in ("cost_nanos", "steps", "tokens", "api_calls", "time_ns"):
        assert getattr(limits, dimension) < UNLIMITED, dimension
    assert ExecutionConfig(None, None, largest).limits().retries < UNLIMITED


def test_a_timeout_of_more_than_a_century_is_none_and_fits_64_bits() -> None:
    assert ExecutionConfig(None, None, None, timeout_ms=2**62 - 1).limits().time_ns == UNLIMITED


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (0.0, 0), (1, 10**9), (0.1, 10**8), (1e-9, 1), (4e-10, 0), (6e-10, 1), (1e9, 10**18), (10**9, 10**18)],
)
def test_a_duration_is_a_whole_number_of_nanoseconds(seconds: float, expected: int) -> None:
    assert seconds_to_ns(seconds, "timeout_s") == expected


limits = st.builds(Limits, *[st.integers(0, 9) | st.just(UNLIMITED)] * 6)


@given(limits, limits)
def test_the_tighter_of_two_limits_is_the_smaller_in_every_dimension(one: Limits, other: Limits) -> None:
    both = one.tighter(other)
    for dimension in Limits.__slots__:
        assert getattr(both, dimension) == min(getattr(one, dimension), getattr(other, dimension))
    assert both == other.tighter(one)
    assert one.tighter(NO_LIMITS) == one


DIMENSIONS: list[tuple[str, str, Any, Any]] = [
    ("tokens_used", "max_tokens", 100, 1),
    ("steps_executed", "max_steps", 10, 1),
    ("time_elapsed_seconds", "max_time_seconds", 2.5, 0.001),
    ("api_calls", "max_api_calls", 5, 1),
    ("cost_dollars", "max_cost_dollars", 0.5, 1e-9),
]


def used_so_far(figure: str, amount: Any) -> ResourceUsage:
    """A usage that has this of one figure, and nothing of the others."""
    clock = ManualClock()
    if figure != "time_elapsed_seconds":
        return ResourceUsage(**{figure: amount}, clock=clock)
    usage = ResourceUsage(clock=clock)
    clock.advance(amount)
    return usage


@pytest.mark.parametrize(("used", "limit", "ceiling", "least"), DIMENSIONS)
@pytest.mark.requirement("P-B1", "P-B5")
def test_usage_exceeds_a_budget_at_its_limit_and_above_and_not_below(
    used: str, limit: str, ceiling: Any, least: Any
) -> None:
    budget = Budget(**{limit: ceiling})
    below, at, above = (used_so_far(used, ceiling + step) for step in (-least, 0, least))
    assert below.exceeds(budget) == (False, None)
    assert at.exceeds(budget)[0]
    assert above.exceeds(budget)[0]


@pytest.mark.parametrize(("used", "limit", "ceiling", "least"), DIMENSIONS)
@pytest.mark.requirement("P-B1")
def test_a_limit_of_zero_is_exceeded_by_nothing_at_all_and_no_limit_never(
    used: str, limit: str, ceiling: Any, least: Any
) -> None:
    assert ResourceUsage().exceeds(Budget(**{limit: 0}))[0]
    assert used_so_far(used, 10**6).exceeds(Budget()) == (False, None)


@pytest.mark.parametrize(
    ("usage", "budget", "reason"),
    [
        (ResourceUsage(tokens_used=1_234_567), Budget(max_tokens=1_000_000), "Token limit exceeded: 1234567/1000000"),
        (ResourceUsage(steps_executed=3), Budget(max_steps=3), "Step limit exceeded: 3/3"),
        (used_so_far("time_elapsed_seconds", 61.25), Budget(max_time_seconds=60), "Time limit exceeded: 61.25s/60s"),
        (ResourceUsage(api_calls=5), Budget(max_api_calls=5), "API call limit exceeded: 5/5"),
        (ResourceUsage(cost_dollars=0.5), Budget(max_cost_dollars="0.5"), "Cost limit exceeded: $0.50/$0.50"),
        (
            ResourceUsage(cost_dollars=1_234_567.89),
            Budget(max_cost_dollars=0.00001),
            "Cost limit exceeded: $1234567.89/$0.00001",
        ),
    ],
)
@pytest.mark.requirement("P-B1")
def test_an_exceeded_limit_is_reported_with_both_figures(usage: ResourceUsage, budget: Budget, reason: str) -> None:
    assert usage.exceeds(budget) == (True, reason)


@pytest.mark.requirement("P-B1")
def test_the_first_exceeded_limit_is_reported_in_the_order_tokens_steps_time_calls_cost() -> None:
    usage, order = ResourceUsage(), ["Token", "Step", "Time", "API call", "Cost"]
    fields = ["max_tokens", "max_steps", "max_time_seconds", "max_api_calls", "max_cost_dollars"]
    for index, name in enumerate(order):
        exceeded, reason = usage.exceeds(Budget(**dict.fromkeys(fields[index:], 0)))
        assert exceeded
        assert reason is not None
        assert reason.startswith(f"{name} limit exceeded: ")


@given(st.integers(0, 10**15), st.integers(0, 10**15))
@pytest.mark.requirement("P-B1")
def test_costs_are_compared_exactly(spent: int, ceiling: int) -> None:
    usage = ResourceUsage(cost_dollars=spent / 1e9)
    assert usage.exceeds(Budget(max_cost_dollars=Decimal(ceiling) / 10**9))[0] == (spent >= ceiling)
