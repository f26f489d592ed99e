"""Money is exact inside, and what is not an amount is refused at the edge, by name."""

from __future__ import annotations

import decimal
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidValue
from penstock.money import MAX_NANOS, NANOS_PER_USD, format_cost, format_usd, known_usd, to_nanos, to_usd

nanos = st.integers(0, MAX_NANOS)


def written(nanos: int) -> str:
    return f"{nanos // NANOS_PER_USD}.{nanos % NANOS_PER_USD:09d}"


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0, 0),
        (0.0, 0),
        (-0.0, 0),
        (Decimal("-0"), 0),
        (1, 1_000_000_000),
        (0.1, 100_000_000),
        (0.000000001, 1),
        ("0.50", 500_000_000),
        (" 2.5e-6 ", 2_500),
        *((text, 1_000_000_000) for text in ("1", " 1 ", "1\n", "+1", "1.", "01.0", "10E-1", "0.1e+1")),
        (".5", 500_000_000),
        (Decimal("0.123456789"), 123_456_789),
        (Decimal(7), 7_000_000_000),
        (1e-300, 0),
        ("1e-999999", 0),
        ("1152921504.606846976", MAX_NANOS),
        (1_152_921_504, 1_152_921_504_000_000_000),
    ],
)
def test_an_amount_is_a_whole_number_of_nano_dollars(amount: Any, expected: int) -> None:
    result = to_nanos(amount)
    assert result == expected
    assert type(result) is int


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        ("0.0000000004", 0),
        ("0.0000000006", 1),
        ("0.0000000005", 0),
        ("0.0000000015", 2),
        ("0.0000000025", 2),
        ("0.00000000050000000000000000000000000000000000000001", 1),
        ("0.00000000049999999999999999999999999999999999999999", 0),
        (0.0000000004, 0),
        (0.0000000006, 1),
    ],
)
def test_an_amount_is_rounded_to_the_nearest_and_a_half_to_the_even_one(amount: Any, expected: int) -> None:
    assert to_nanos(amount) == expected


@given(nanos)
def test_text_and_decimals_are_converted_exactly(amount: int) -> None:
    assert to_nanos(written(amount)) == to_nanos(Decimal(written(amount))) == amount


@given(st.integers(0, 10**15))
def test_a_float_below_a_million_dollars_is_the_amount_it_shows(amount: int) -> None:
    assert to_nanos(to_usd(amount)) == amount
    assert to_nanos(float(written(amount))) == amount


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_larger_of_two_amounts_stays_the_larger(one: float, other: float) -> None:
    assert to_nanos(min(one, other)) <= to_nanos(max(one, other))


def test_ten_times_ten_cents_is_a_dollar() -> None:
    assert sum([0.1] * 10) != 1.0
    assert sum([to_nanos(0.1)] * 10) == to_nanos(1)


def test_the_precision_a_program_sets_for_itself_does_not_change_an_amount() -> None:
    with decimal.localcontext() as context:
        context.prec = 2
        context.rounding = decimal.ROUND_UP
        context.traps[decimal.Inexact] = True
        context.traps[decimal.Rounded] = True
        assert to_nanos("1.23456789012345") == 1_234_567_890
        assert to_nanos(Decimal("123456.789")) == 123_456_789_000_000
        assert format_usd(1_234_567_890) == "$1.23456789"


@pytest.mark.parametrize(
    "amount", ["1152921504.606846977", Decimal(MAX_NANOS + 1) / NANOS_PER_USD, 1.2e9, 1_152_921_505]
)
def test_more_than_the_largest_amount_is_refused(amount: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^amount must be .* below one billion, not "):
        to_nanos(amount)


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NOT_AMOUNTS: list[Any] = [
    *(math.nan, math.inf, -math.inf, -0.01, -1, -5e-324, 1e300, 2**62, 10**400, 10**5_000),
    *(Decimal("NaN"), Decimal("sNaN"), Decimal("Infinity"), Decimal("-1"), Decimal("1e999999"), Decimal("-1e-20")),
    *("1_0", "1_000.00", "0.0_1", "١٢", "１", "\u00a01", "Infinity", "-Infinity", "NaN", "sNaN", "NaN1", "1\x00"),
    *(".", "e5", "1e", "1e+", ".e1", "+", "--1", "1 2", "1e1.5", "1.5.0", "9" * 50_000 + "x", " " * 50_000),
    *("abc", "", " ", "nan", "inf", "-0.01", "1e999999", "1e99999999999999999999", "1,5", "$1", "0x10", "9" * 10_000),
    *(True, False, None, b"1", [], [1], {}, (1,), {1}, 1j, object, Unshowable()),
]


@pytest.mark.parametrize("amount", NOT_AMOUNTS, ids=lambda value: type(value).__name__)
@pytest.mark.requirement("C-1")
def test_a_value_that_is_not_an_amount_is_refused_by_name(amount: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^price_usd must be a .* US dollars.*, not ") as caught:
        to_nanos(amount, "price_usd")
    assert caught.value.field == "price_usd"
    assert caught.value.value is amount
    assert len(str(caught.value)) < 250


@given(st.one_of(st.floats(), st.integers(), st.decimals(), st.text(), st.booleans(), st.none(), st.binary()))
def test_anything_at_all_is_an_amount_within_bounds_or_an_invalid_value(amount: Any) -> None:
    try:
        result = to_nanos(amount)
    except InvalidValue:
        return
    assert type(result) is int
    assert 0 <= result <= MAX_NANOS


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        ("abc", "max_cost_usd must be a number of US dollars, such as '0.50', not 'abc'"),
        (True, "max_cost_usd must be a number of US dollars (float, int, Decimal or str), not True"),
        (math.nan, "max_cost_usd must be a finite, non-negative number of US dollars below one billion, not nan"),
        ("-1", "max_cost_usd must be a finite, non-negative number of US dollars below one billion, not '-1'"),
    ],
)
def test_the_error_of_a_refused_amount_names_what_was_expected(amount: Any, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        to_nanos(amount, "max_cost_usd")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "$0.00"),
        (1, "$0.000000001"),
        (500_000_000, "$0.50"),
        (123_000, "$0.000123"),
        (1_000_000_000, "$1.00"),
        (12_345_678_900_000_000, "$12345678.90"),
        (-1, "-$0.000000001"),
        (-1_500_000_000, "-$1.50"),
        (10**40, "$10000000000000000000000000000000.00"),
    ],
)
def test_an_amount_is_shown_in_cents_at_least_and_as_many_digits_as_it_has(amount: int, shown: str) -> None:
    assert format_usd(amount) == shown


@given(nanos)
def test_the_text_of_an_amount_is_the_amount(amount: int) -> None:
    assert to_nanos(format_usd(amount).removeprefix("$")) == amount


@pytest.mark.parametrize(
    ("nanos", "unknown", "known", "text"),
    [
        (0, 0, 0.0, "$0.00 of $1"),
        (120_000_000, 0, 0.12, "$0.12 of $1"),
        (120_000_000, 2, 0.12, "at least $0.12 of $1, 2 calls unknown"),
        (120_000_000, 1, 0.12, "at least $0.12 of $1, 1 call unknown"),
        (0, 1_200, None, "unknown (1,200 calls) of $1"),
    ],
)
def test_a_sum_with_unknown_parts_is_a_lower_bound(nanos: int, unknown: int, known: float | None, text: str) -> None:
    assert known_usd(nanos, unknown) == known
    assert format_cost(nanos, unknown, " of $1") == text
