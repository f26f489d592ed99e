"""Numbers, JSON and text as people write them on a command line."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.exits import Refused
from penstock.cli.values import number, read_input, whole_number

NO_NUMBERS = ["", " ", "x", "1_0", "١", "１", "\u00a01", "nan", "inf", "Infinity", "-inf", "0x10", "1 0", "--1", "1j"]


@pytest.mark.parametrize(("text", "found"), [("0", 0), ("60", 60), (" 60 ", 60), ("+7", 7), ("-1", -1), ("007", 7)])
def test_a_whole_number_is_written_in_plain_digits(text: str, found: int) -> None:
    assert whole_number(text) == found


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1.0", "1e3", "9" * 10_000])
def test_anything_else_is_no_whole_number(text: str) -> None:
    with pytest.raises(ValueError, match=r" is not a whole number$"):
        whole_number(text)


@pytest.mark.parametrize(("text", "found"), [("0", 0), (" 1.5 ", 1.5), (".5", 0.5), ("2.", 2), ("1e-3", 0.001)])
def test_a_number_may_have_a_point_and_an_exponent(text: str, found: float) -> None:
    assert number(text) == found


@pytest.mark.parametrize("text", [*NO_NUMBERS, "1e999", "9" * 10_000, ".", "1e"])
def test_anything_else_is_no_number(text: str) -> None:
    with pytest.raises(ValueError, match=r" is not a number$"):
        number(text)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("hello", "hello"),
        ("12 dams", "12 dams"),
        ("true story", "true story"),
        ("don't {brace}", "don't {brace}"),
        (" ünïcode ", " ünïcode "),
        ("null", None),
        ("12", 12),
        ("true", True),
        ('"12"', "12"),
        (' {"a": [1]}', {"a": [1]}),
    ],
)
def test_an_inline_value_is_json_if_it_can_be_and_text_otherwise(given: str, value: Any) -> None:
    assert read_input(given) == value


@pytest.mark.parametrize("given", ["{'a': 1}", "[1,", '"open', "NaN", "-Infinity", "", "  ", "[" * 100_000])
def test_a_mistake_in_what_begins_like_json_is_reported(given: str) -> None:
    with pytest.raises(Refused, match=r"^--input is (not JSON|nested too deeply)"):
        read_input(given)
